"""The same store in PostgreSQL: the tests of SQLite's, on a real server, and what only a server can do wrong."""
import glob, json, os, pwd, shutil, socket, subprocess, sys, tempfile, urllib.request
import pytest
from clawlab.capture.store import Store
from clawlab.records import InputError, Rollout

from test_store import (ROOT, call, chain, fill, python, same,   # noqa: F401
    test_every_field_comes_back, test_nan_logprobs_and_empty_replies, test_P48_linear_storage, test_forks_and_wrong_bases_are_exact, test_large_bodies_against_each_other,
    test_a_damaged_call_takes_14_others_with_it_at_most, test_forks_from_a_full_run_share_the_next, test_a_rollout_of_a_known_kind_costs_little_from_its_first_call,
    test_verify_finds_a_flipped_bit, test_verify_says_what_is_wrong_with_a_row, test_verify_says_what_is_complete, test_a_damaged_record_of_a_rollout,
    test_a_rollout_with_lost_calls_is_not_trained_on, test_gc_frees_what_nothing_refers_to, test_gc_leaves_a_damaged_store_alone, test_rollouts_filters_and_order, test_sessions_are_kept,
    test_another_process_reads_while_it_is_written, test_kill_9_loses_nothing_acknowledged)

BIN = next((d for d in [os.path.dirname(os.path.realpath(shutil.which('postgres') or '')), *sorted(glob.glob('/usr/lib/postgresql/*/bin'), reverse=True)] if os.path.exists(f'{d}/initdb')), None)
if BIN is None: pytest.skip('no PostgreSQL server: `make test-postgres` installs one', allow_module_level=True)

class Server:
    "A server of our own in a temporary folder, on a unix socket only. It refuses to run as root, so root lends it a user."
    def __init__(self):
        self.dir, self.as_ = tempfile.mkdtemp(prefix='clawlab-pg-'), []
        if os.geteuid() == 0:
            user = pwd.getpwnam('postgres'); os.chown(self.dir, user.pw_uid, user.pw_gid)
            self.as_ = ['setpriv', f'--reuid={user.pw_uid}', f'--regid={user.pw_gid}', '--clear-groups']
        self.run('initdb', '-D', f'{self.dir}/data', '-U', 'lab', '-A', 'trust', '--no-sync', '-E', 'UTF8'); self.start()
    def run(self, name, *args): subprocess.run([*self.as_, f'{BIN}/{name}', *args], cwd=self.dir, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=120)
    def start(self): self.run('pg_ctl', '-D', f'{self.dir}/data', '-w', '-l', f'{self.dir}/log', '-o', f"-k {self.dir} -c listen_addresses='' -c fsync=off -c full_page_writes=off", 'start')
    def stop(self, how='immediate'): self.run('pg_ctl', '-D', f'{self.dir}/data', '-w', '-m', how, 'stop')
    def url(self, name): return f'postgresql://lab:secret@/{name}?host={self.dir}'

@pytest.fixture(scope='module')
def server():
    s = Server()
    try: yield s
    finally: s.stop(); shutil.rmtree(s.dir)

@pytest.fixture
def url(server, request):
    import psycopg
    name = f'x{abs(hash(request.node.name)) % 10**12}'
    with psycopg.connect(server.url('postgres'), autocommit=True) as db: db.execute(f'create database {name}')
    yield server.url(name)
    with psycopg.connect(server.url('postgres'), autocommit=True) as db: db.execute(f'drop database {name} with (force)')

@pytest.fixture
def store(url):
    with Store.open(url) as s: yield s

def test_a_password_is_never_shown(store, server):
    assert 'secret' not in store.path and 'lab' in store.path
    with pytest.raises(InputError) as e: Store.open(server.url('nowhere'))
    assert 'nowhere' in str(e.value) and 'secret' not in str(e.value) and '\n' not in str(e.value)
    with pytest.raises(InputError, match='no store'): Store.open(server.url('postgres'), create=False)

def test_the_same_rows_as_in_sqlite(store, tmp_path):
    "One encoding: blob for blob."
    cs = [*chain(20, 'a'), *chain(20, 'b')]
    sql = 'select call_id, base, run, frame, kind, kept, hash, text, tokens from calls order by id'
    with Store.open(tmp_path/'s.db') as s:
        for x in (s, store):
            for c, b in cs: x.put_call(c, b).result()
        assert [tuple(r) for r in s.read(sql)] == [tuple(r.values()) for r in store.read(sql)]

def test_a_restart_of_the_server(server, url):
    "What was acknowledged is there; what comes while it is down fails loudly; what comes afterwards is written, without a restart here."
    with Store.open(url) as s:
        a, b, c = list(chain(3)); s.put_call(*a).result(); assert len(s.calls('r')) == 1
        server.stop()
        try: failed = s.put_call(*b).exception(timeout=60)
        finally: server.start()
        assert failed is not None
        s.put_call(*b).result(); s.put_call(*c).result()
        same(s.calls('r')[2], c[0]); assert s.body('r.1') == b[1] and s.verify()['ok']

def test_four_processes_open_and_write_one_store(url):
    code = '''
        import sys
        from clawlab.capture.store import Store
        from clawlab.records import Call
        with Store.open(sys.argv[1]) as s:
            for i in range(20): s.put_call(Call(f'{sys.argv[2]}.{i}', sys.argv[2], i, range(i + 1), [2], [-1.], [0], parent_id=f'{sys.argv[2]}.{i-1}' if i else None), b'x'*i).result()
    '''
    ps = [python(code, url, f'p{k}') for k in range(4)]
    assert [p.wait(timeout=120) for p in ps] == [0]*4
    with Store.open(url) as s: assert all(len(s.calls(f'p{k}')) == 20 for k in range(4)) and s.verify()['ok']

def test_a_rollout_is_replaced_in_place(store):
    for r in (.25, .75): store.put_rollout(Rollout('r', 't', 'h', outcome='ok', reward=r, meta={'stderr': 'a\ud800\0b'}))
    assert store.rollout('r').reward == .75 and store.rollout('r').meta['stderr'] == 'a\ud800\0b' and len(store.rollouts()) == 1

def test_the_command_line_takes_a_url_wherever_it_takes_a_file(url, tmp_path, monkeypatch, capfd):
    "Proxy with its admin interface, tree, verify; and the password is in nothing that is printed."
    from clawlab.cli import main
    monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path)); monkeypatch.setenv('PYTHONPATH', str(ROOT))
    (tmp_path/'s.jsonl').write_text('{"text": "Hello."}\n')
    p = subprocess.Popen([sys.executable, '-m', 'clawlab.cli', 'proxy', '--engine', f'script:{tmp_path}/s.jsonl', '--store', url], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        d = json.loads(line := p.stdout.readline())
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(d['admin']); s.sendall(b'POST /sessions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n')
            one = json.loads(b''.join(iter(lambda: s.recv(65536), b'')).split(b'\r\n\r\n', 1)[1])
        ask = urllib.request.Request(one['base_url'] + '/v1/chat/completions', b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}', {'Authorization': 'Bearer ' + one['api_key']})
        with urllib.request.urlopen(ask) as r: assert r.status == 200
        p.terminate(); err = p.communicate(timeout=30)[1]
    finally: p.kill(); p.wait()
    assert p.returncode == 0 and os.path.dirname(d['admin']) == str(tmp_path) and 'secret' not in line + err
    for args in (('tree', '--store', url), ('tree', '--store', url, '--rollout', one['rollout_id']), ('store', 'verify', url)): assert main(list(args)) == 0, args
    out, err = capfd.readouterr(); trees = [json.loads(x) for x in out.splitlines()]
    assert trees[0]['rollouts'] == trees[1]['rollouts'] == 1 and trees[0]['calls'] == 1 and 'secret' not in out + err
    assert main(['tree', '--store', url, '--rollout', 'none']) == 2 and main(['tree', '--store', url.replace('/x', '/y')]) == 2 and 'secret' not in ''.join(capfd.readouterr())
