"The command line: bad input is one clear line and exit code 2; results are one JSON object on the last line of stdout."
import json, os, signal, socket, subprocess, sys, urllib.error, urllib.request
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints
import pytest
from clawlab.capture.engines.base import Sampling
from clawlab.cli import app, main, pairs
from clawlab.records import InputError

ROOT = Path(__file__).parent.parent

@pytest.fixture(autouse=True)
def here(monkeypatch): monkeypatch.chdir(ROOT)

def cli(*args):
    "The real program: (exit code, stdout, stderr)."
    p = subprocess.run([sys.executable, '-m', 'clawlab.cli', *map(str, args)], capture_output=True, text=True, cwd=ROOT, timeout=120, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    return p.returncode, p.stdout, p.stderr

def refused(capfd, *args) -> str:
    "The one line a bad command ends with; nothing on stdout, no traceback."
    code = main(list(map(str, args))); out, err = capfd.readouterr(); lines = err.strip().splitlines()
    assert code == 2 and out == '' and len(lines) == 1 and lines[0].startswith('clawlab: '), (code, out, err)
    return lines[0]

ORACLE = ('rollout', '--tasks', 'nano', '--harness', 'react', '--engine', 'oracle')

@pytest.mark.parametrize('args,line', [
    (('study', 'nope'), "unknown study 'nope'; there are: single_vs_mix"),
    (('study', 'single_vs_mix', '-p', 'sead', '1'), "unknown parameter 'sead'; the study has: seed, "),
    (('study', 'single_vs_mix', '-p', 'seed', 'x'), "parameter seed: expected int"),
    (('study', 'single_vs_mix', '-p', 'seed'), '-p needs KEY VALUE'),
    (('study', 'single_vs_mix', '--preset', 'huge'), "unknown preset 'huge'"),
    (('study',), "Missing argument"), (('studdy',), "No such command 'studdy'"), (('study', 'single_vs_mix', '--frob'), "No such option"),
    (('table', 'nope'), 'no finished run in'),
    ((*ORACLE[:4], 'emacs', *ORACLE[5:], '--store', 'x.db'), "unknown harness 'emacs'"),
    ((*ORACLE[:-1], 'vllm:x', '--store', 'x.db'), "the URL begins with http://"), ((*ORACLE[:-1], 'vlm:x', '--store', 'x.db'), "unknown engine 'vlm:x'"),
    ((*ORACLE[:-1], 'torch:/nowhere', '--store', 'x.db'), "no model folder '/nowhere'"),
    ((*ORACLE[:-1], 'script:/nowhere', '--store', 'x.db'), '/nowhere'),
    ((*ORACLE, '--store', 'x.db', '--sandbox', 'chroot'), "unknown sandbox backend 'chroot'"),
    ((*ORACLE, '--store', 'x.db', '--n', '100000'), '100000 tasks wanted'),
    (('rollout', '--tasks', 'nope', *ORACLE[3:], '--store', 'x.db'), 'no task suite nope'),
    (('tree', '--store', '/nowhere.db'), 'no store at /nowhere.db'), (('tree', '--store', 'x.db', '--tokenizer', '/nowhere'), 'no tokenizer.json in /nowhere'),
    (('proxy', '--engine', 'oracle', '--store', 'x.db'), 'name one with --tasks'),
    (('harness', 'install', 'emacs'), "unknown harness 'emacs'"), (('harness', 'check', 'emacs'), "unknown harness 'emacs'"),
    (('tasks', 'check', 'nope'), 'no task suite nope'),
    *[((*ORACLE, '--store', 'x.db', o, v), f"Invalid value for '{o}'") for o, v in (('--samples', '0'), ('--n', '-1'), ('--concurrency', '-1'))],
    *[(('proxy', '--engine', 'oracle', '--tasks', 'nano', '--store', 'x.db', o, v), f"Invalid value for '{o}'") for o, v in (('--port', '99999'), ('--port', '-1'), ('--admin-port', '70000'))],
    (('proxy', '--engine', 'oracle', '--tasks', 'nano', '--store', 'x.db', '--task', 'nope'), "no task 'nope' in the suite nano"),
])
def test_bad_input_is_one_clear_line(capfd, tmp_path, args, line):
    assert line in refused(capfd, *[tmp_path/a if a == 'x.db' else a for a in args])

def number_options(app, path=()):
    "Every option of every command that takes a number: (command, option, does it take fractions, what typer knows of it)."
    for c in app.registered_commands:
        for name, hint in get_type_hints(c.callback, include_extras=True).items():
            kind, info = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
            if {int, float} & {kind, *get_args(kind)}: yield (*path, c.name or c.callback.__name__), info.default if str(info.default)[:1] == '-' else '--' + name.replace('_', '-'), float in (kind, *get_args(kind)), info
    for g in app.registered_groups: yield from number_options(g.typer_instance, (*path, g.name))

def test_every_number_is_bounded_and_nan_is_none(capfd):
    options = list(number_options(app))
    assert len(options) > 60 and {('rollout',), ('proxy',), ('eval',), ('try',), ('train', 'grpo'), ('study',)} <= {p for p, *_ in options}
    for path, o, fractions, t in options:
        assert t.min is not None and t.max is not None, (path, o)
        for bad in [str(t.min - 1), '9'*30] + ['nan', 'inf', '-inf']*fractions:
            assert f"Invalid value for '{o}'" in refused(capfd, *path, f'{o}={bad}' if o[:2] == '--' else f'{o}{bad}'), (path, o, bad)

@pytest.mark.parametrize('temperature', ['-0.1', 'nan', '1e9', '101'])
def test_a_temperature_is_between_0_and_100(capfd, temperature):
    assert "Invalid value for '--temperature'" in refused(capfd, *ORACLE, '--store', '/nowhere/x.db', '--temperature', temperature)
    with pytest.raises(InputError, match='temperature must be in'): Sampling(temperature=float(temperature))

@pytest.mark.parametrize('to', ['nowhere/x.html', '.'])
def test_a_page_that_cannot_be_written(capfd, tmp_path, to):
    from dataclasses import replace
    from clawlab.capture.store import Store
    from clawlab.study.behavior import chat_rollout
    with Store.open(str(tmp_path/'x.db')) as st:
        r = chat_rollout([('ls', 'a', False), ('end', None, False)]); st.put_rollout(replace(r, calls=()))
        for c in r.calls: st.put_call(c, b'{}').result()
    assert 'cannot write to' in refused(capfd, 'tree', '--store', tmp_path/'x.db', '--html', tmp_path/to)

def test_missing_harness(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path/'empty'))
    assert 'harness claude-code is not installed: clawlab harness install claude-code' in refused(capfd, *ORACLE[:4], 'claude-code', *ORACLE[5:], '--store', tmp_path/'x.db')

def test_no_bubblewrap(tmp_path):
    "In a process of its own: a keeper that runs already needs no second look."
    hide = "import os; real = os.path.exists; os.path.exists = lambda p: p != '/usr/bin/bwrap' and real(p); from clawlab.cli import main; main()"
    p = subprocess.run([sys.executable, '-c', hide, *ORACLE, '--store', str(tmp_path/'x.db'), '--sandbox', 'bwrap'], capture_output=True, text=True, cwd=ROOT, timeout=120, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert p.returncode == 2 and p.stdout == '' and len(p.stderr.strip().splitlines()) == 1 and 'apt-get install bubblewrap' in p.stderr, (p.returncode, p.stdout, p.stderr)

def test_port_in_use(capfd, tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as s:
        assert f'port {s.getsockname()[1]}' in refused(capfd, 'proxy', '--engine', 'oracle', '--tasks', 'nano', '--store', tmp_path/'x.db', '--port', s.getsockname()[1])

@pytest.mark.parametrize('args', [('study', 'single_vs_mix', '--reports', '/proc/clawlab'), (*ORACLE, '--store', '/proc/clawlab/x.db'), (*ORACLE, '--store', 'sqlite:////proc/x.db')])
def test_directory_that_cannot_be_written(capfd, args): assert '/proc' in refused(capfd, *args)

def test_read_only_file_system(tmp_path):
    "A truly read-only mount, where the system lets us make one."
    (tmp_path/'ro').mkdir()
    mounted = ['unshare', '-m', 'sh', '-c', f'mount -t tmpfs -o ro none {tmp_path}/ro && exec "$@"', 'sh']
    if subprocess.run([*mounted, 'true'], capture_output=True).returncode: pytest.skip('cannot mount a file system here')
    p = subprocess.run([*mounted, sys.executable, '-m', 'clawlab.cli', 'study', 'single_vs_mix', '--reports', tmp_path/'ro'/'reports'], capture_output=True, text=True, cwd=ROOT, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert p.returncode == 2 and p.stdout == '' and p.stderr.strip().splitlines()[-1].endswith('Read-only file system') and 'Traceback' not in p.stderr

def suite(tmp_path, **change):
    "The shipped suite's first test task with something changed."
    d = tmp_path/'suite'; d.mkdir(); line = json.loads((ROOT/'experiments/tasks/nano/test.jsonl').read_text().splitlines()[0])
    (d/'verify.py').write_text(change.pop('verify', (ROOT/'experiments/tasks/nano/verify.py').read_text())); (d/'test.jsonl').write_text(json.dumps({**line, **change}) + '\n')
    return d

def test_broken_task_files(capfd, tmp_path):
    d = suite(tmp_path)
    for text, line in (('{"task_id": 1', 'test.jsonl:1'), ('{"task_id": "x"}', 'test.jsonl:1')):
        (d/'test.jsonl').write_text(text); assert line in refused(capfd, 'tasks', 'check', d)
    d = [*d.parent.iterdir()][0]; (d/'verify.py').write_text('def verify(:'); assert 'verify.py' in refused(capfd, 'tasks', 'check', d)

def test_task_whose_verifier_is_always_pleased(capfd, tmp_path):
    code = main(['tasks', 'check', str(suite(tmp_path, verify='def verify(w, e): return 1.0\n')), '--sandbox', 'process']); out, err = capfd.readouterr()
    assert code == 2 and err.strip().splitlines()[-1].startswith('clawlab: 1 of 1 tasks are broken') and json.loads(out.splitlines()[-1])['ok'] is False

def test_good_task(capfd, tmp_path):
    assert main(['tasks', 'check', str(suite(tmp_path)), '--sandbox', 'process']) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == dict(suite=str(tmp_path/'suite'), tasks=1, broken={}, overlap={}, unsolved=0, judged=0, ok=True)

def test_pairs():
    assert pairs(['study', 'x', '-p', 'a', '1', '-p', 'b=2', '--preset', 'nano']) == ['study', 'x', '-p', 'a=1', '-p', 'b=2', '--preset', 'nano']
    with pytest.raises(InputError): pairs(['-p', 'a'])

@pytest.mark.parametrize('args', [(), ('study',), ('table',), ('proxy',), ('rollout',), ('tree',), ('doctor',), ('tasks', 'check'), ('harness', 'list'), ('harness', 'install'), ('harness', 'check'), ('sandbox', 'sweep')])
def test_help(capfd, args):
    assert main([*args, '--help']) == 0 and 'Usage: clawlab' in capfd.readouterr().out

def test_no_arguments_shows_the_help(capfd): assert main([]) == 2 and 'Commands:' in capfd.readouterr().err

def test_rollout_then_tree(tmp_path):
    "The oracle through the ReACT loop, without isolation: captured, graded, and exact."
    db = tmp_path/'calls.db'
    code, out, err = cli(*ORACLE, '--store', db, '--sandbox', 'process', '--n', 2, '--samples', 2)
    res = json.loads(out.splitlines()[-1])
    assert code == 0 and [r['reward'] for r in res['rollouts']] == [1.0]*4 and res['cells']['react']['n'] == 4, err
    code, out, err = cli('tree', '--store', f'sqlite:///{db}', '--html', tmp_path/'tree.html')
    t = json.loads(out.splitlines()[-1])
    assert code == 0 and t['expand_exact'] and t['rollouts'] == 4 and t['trained'] == t['sampled'] - t['shared'] and 'react' in (tmp_path/'tree.html').read_text()

def test_proxy_serves_an_open_session_until_interrupted(tmp_path):
    "A call at work is cut and recorded; nobody waits for it."
    (tmp_path/'s.jsonl').write_text('{"text": "Hello."}\n{"text": "zz", "delay_s": 120, "match": "slow"}\n')
    p = subprocess.Popen([sys.executable, '-m', 'clawlab.cli', 'proxy', '--engine', f'script:{tmp_path}/s.jsonl', '--store', tmp_path/'x.db', '--open'], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    try:
        d = json.loads(p.stdout.readline())
        body = lambda text: json.dumps(dict(model='m', messages=[dict(role='user', content=text)])).encode()
        slow = socket.create_connection(('127.0.0.1', int(d['url'].rsplit(':', 1)[1])))
        slow.sendall(f"POST /s/{d['session']}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body('slow'))}\r\n\r\n".encode() + body('slow'))
        req = urllib.request.Request(d['base_url'] + '/v1/chat/completions', body('hi'), {'Content-Type': 'application/json'})
        assert json.load(urllib.request.urlopen(req))['choices'][0]['message']['content'] == 'Hello.'
        p.send_signal(signal.SIGINT); out, err = p.communicate(timeout=20)
    finally: p.kill(); p.wait()
    assert p.returncode == 0 and '2 calls captured' in err and slow.recv(1) == b''
    assert main(['tree', '--store', str(tmp_path/'x.db'), '--rollout', d['rollout']]) == 0

def test_proxy_opens_sessions_for_its_owner_only(tmp_path):
    (tmp_path/'s.jsonl').write_text('{"text": "Hello."}\n')
    p = subprocess.Popen([sys.executable, '-m', 'clawlab.cli', 'proxy', '--engine', f'script:{tmp_path}/s.jsonl', '--store', tmp_path/'x.db'], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    try:
        d = json.loads(p.stdout.readline()); assert Path(d['admin']).stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(d['admin']); s.sendall(b'POST /sessions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n')
            one = json.loads(b''.join(iter(lambda: s.recv(65536), b'')).split(b'\r\n\r\n', 1)[1])
        def call(**headers):
            req = urllib.request.Request(one['base_url'] + '/v1/chat/completions', json.dumps(dict(model='m', messages=[dict(role='user', content='hi')])).encode(), {'Content-Type': 'application/json', **headers})
            try: return urllib.request.urlopen(req).status
            except urllib.error.HTTPError as e: return e.code
        assert call() == 401 and call(Authorization='Bearer ' + one['api_key']) == 200
        p.terminate(); p.wait(30)
    finally: p.kill(); p.wait()
    assert p.returncode == 0

@pytest.mark.parametrize('args,line', [(('--admin-port', '0'), 'needs a token file'), (('--admin-port', '0', '--token-file', '/nowhere'), 'no token file /nowhere'), (('--admin', '/proc/x.sock'), 'admin: cannot listen on /proc/x.sock')])
def test_bad_admin_interface(capfd, tmp_path, args, line):
    (tmp_path/'s.jsonl').write_text('{"text": "Hello."}\n')
    assert line in refused(capfd, 'proxy', '--engine', f'script:{tmp_path}/s.jsonl', '--store', tmp_path/'x.db', *args)

def test_sweep_and_doctor_speak_json(capfd):
    assert main(['sandbox', 'sweep']) == 0 and 'removed' in json.loads(capfd.readouterr().out.splitlines()[-1])
    main(['doctor']); d = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert {'python', 'torch', 'processors'} <= {r['what'] for r in d['checks']} and isinstance(d['ok'], bool)
