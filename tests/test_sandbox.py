"""Attacks on the sandbox, and what happens when parts of it die. Needs root, bubblewrap and cgroup v1; `process` tests run anywhere."""
import asyncio, os, resource, signal, socket, subprocess, sys, time
from pathlib import Path
import pytest
os.environ['CLAWLAB_SANDBOX_UIDS'] = f'{(a := 62000 + os.getpid() % 20 * 100)}-{a + 100}'  # apart from whatever else runs on this machine
from clawlab.records import InputError, SandboxError
from clawlab.launch.sandbox import bwrap, keeper
from clawlab.launch.sandbox.base import CAP, Limits, make_sandbox, probe, sweep

WHY = asyncio.run(probe('bwrap'))
needs_bwrap = pytest.mark.skipif(bool(WHY), reason=WHY or 'bwrap')


def box(listener=None, binds=(), **kw):
    kw = dict(cpus=2, memory_mb=256, pids=64, disk_mb=32, seconds=20) | kw
    return make_sandbox('bwrap', limits=Limits(**kw), binds=binds, listener=listener, name='test')

def py(code): return ['python3', '-c', code]

def of_uid(uid):
    "Live host processes of a sandbox's uid."
    out = []
    for p in Path('/proc').glob('[0-9]*'):
        try:
            if p.stat().st_uid == uid and (p/'stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z': out.append(int(p.name))
        except (FileNotFoundError, ProcessLookupError): pass
    return out

def cgroups(uid): return [d for c in ('memory', 'pids', 'cpu') if os.path.isdir(d := f'{keeper.cgroup_base(c)}/clawlab-{uid}')]

def left_of(uids):
    "Everything that sandboxes with these uids could leave on the machine."
    mounts = open('/proc/self/mounts').read()
    return {k: v for k, v in dict(claims=[u for u in uids if os.path.exists(f'{keeper.RUN}/{u}')], cgroups=sum(map(cgroups, uids), []),
            processes=sum(map(of_uid, uids), []), mounts=[u for u in uids if f'{keeper.STAGE}/{u}' in mounts]).items() if v}

async def until(f, seconds=10):
    "Wait for a condition that another process brings about."
    end = time.monotonic() + seconds
    while not (x := f()):
        assert time.monotonic() < end, 'it did not happen'
        await asyncio.sleep(.02)
    return x


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists('/usr/bin/bwrap') or not keeper.cgroup_base('memory'), reason='not root, no bubblewrap, or no cgroup v1')
def test_S46_the_probe_succeeds_where_it_should(): assert WHY == ''


# what is reachable from inside

@needs_bwrap
async def test_S_root_file_under_a_bound_path_is_unreadable(tmp_path):
    (tmp_path/'secret').write_text('TOP'); (tmp_path/'secret').chmod(0o600)
    (tmp_path/'public').write_text('hello'); (tmp_path/'public').chmod(0o644)
    tmp_path.chmod(0o755)
    async with box(binds=((str(tmp_path), '/opt/x'),)) as s:
        r = await s.exec(['sh', '-c', 'cat /opt/x/public; cat /opt/x/secret; echo no > /opt/x/new'])
        assert r.stdout == b'hello' and r.stderr.count(b'Permission denied') == 1 and b'Read-only' in r.stderr
        r = await s.exec(['sh', '-c', 'ls /root /etc/shadow /var/log /work /home; cat /proc/1/environ; ls /proc/1/fd; ls /proc/1/root'])
        assert r.stdout.strip() == b'/home:\nagent' and b'TOP' not in r.stderr
    assert not (tmp_path/'new').exists()

@needs_bwrap
async def test_S_nothing_on_the_network_but_the_listener():
    host, everywhere = socket.create_server(('127.0.0.1', 0)), socket.create_server(('0.0.0.0', 0))
    hidden = socket.socket(socket.AF_UNIX); hidden.bind(f'\0clawlab-test-{os.getpid()}'); hidden.listen()
    seen = []
    async def hello(r, w): seen.append(await r.readline()); w.write(b'hi'); await w.drain(); w.close()
    servers = []
    async def listener(sock): servers.append(await asyncio.start_server(hello, sock=sock))
    addresses = {'127.0.0.1', *(a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET))}
    code = f'''
import socket
c = socket.create_connection(('127.0.0.1', 8000)); c.sendall(b'me\\n'); assert c.recv(9) == b'hi'
for a in {addresses!r}:
    for p in ({host.getsockname()[1]}, {everywhere.getsockname()[1]}):
        try: socket.create_connection((a, p), 2); print('REACHED', a, p)
        except OSError: pass
try: socket.socket(socket.AF_UNIX).connect('\\0clawlab-test-{os.getpid()}'); print('REACHED abstract')
except OSError: pass
for family in (40, 38, 17):  # vsock, alg, packet
    try: socket.socket(family, socket.SOCK_STREAM); print('REACHED', family)
    except OSError: pass
print(sorted(n for _, n in socket.if_nameindex()))'''
    try:
        async with box(listener) as s: r = await s.exec(py(code))
    finally:
        for x in (host, everywhere, hidden, *servers): x.close()
    assert (r.stdout, seen) == (b"['lo']\n", [b'me\n']), r

@needs_bwrap
async def test_S_no_listener_no_network():
    async with box() as s: r = await s.exec(py('import socket; socket.create_connection(("127.0.0.1", 8000), 2)'))
    assert b'refused' in r.stderr

@needs_bwrap
async def test_S_another_sandbox_is_out_of_reach():
    async with box() as a, box() as b:
        assert a.uid != b.uid
        await a.put({'mine.txt': 'SECRET-A', '~/.key': 'SECRET-A'})
        asleep = asyncio.create_task(a.exec(['sleep', '60']))
        await until(lambda: len(of_uid(a.uid)) >= 3)
        r = await b.exec(['sh', '-c', 'ls -A /workspace ~ /tmp; grep -rIl SECRET-A / --exclude-dir=usr --exclude-dir=sys 2>/dev/null; ls -d /proc/[0-9]* | wc -l; '
                          'ls /run/clawlab 2>&1; for p in ' + ' '.join(map(str, of_uid(a.uid))) + '; do kill -9 $p 2>&1; done'])
        assert b'mine.txt' not in r.stdout and b'SECRET-A' not in r.stdout and r.stdout.count(b'No such process') >= 3, r
        assert not asleep.done()
        asleep.cancel()
    async with box() as c: assert await c.get() == {} and c.uid in (a.uid, b.uid)  # the uid is used again, its files are not

@needs_bwrap
async def test_S_same_view_in_every_rollout():
    async def look():
        async with box() as s: return (await s.exec(['sh', '-c', 'id; pwd; env | sort; echo ~; hostname; ls /; cat /etc/passwd; stat -c %U /workspace'])).stdout
    a, b = await asyncio.gather(look(), look())
    assert a == b and b'uid=1000(agent) gid=1000(agent) groups=1000(agent)\n/workspace\n' in a


# kernel interfaces

@needs_bwrap
async def test_S_no_new_privileges_no_namespaces_no_tracing():
    code = '''
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def sys(nr, *a): return os.strerror(ctypes.get_errno()) if libc.syscall(nr, *map(ctypes.c_long, a)) < 0 else 'REACHED'
pid = os.getppid()
print({k: v for k, v in dict(unshare=sys(272, 0x10000000), unshare_mnt=sys(272, 0x20000), clone=sys(56, 0x10000000 | 17, 0, 0, 0, 0), clone3=sys(435, 0, 0), mount=sys(165, 0, 0, 0, 0, 0),
  ptrace=sys(101, 16, pid, 0, 0), readv=sys(310, pid, 0, 0, 0, 0, 0), keyctl=sys(250, 0, -3, 0), bpf=sys(321, 0, 0, 0), perf=sys(298, 0, 0, -1, -1, 0), io_uring=sys(425, 1, 0), userfaultfd=sys(323, 0),
  prlimit=sys(302, pid, 0, 0, 0), setsig=sys(72, 0, 10, 9), open_tree=sys(428, -100, 0, 1), setuid=sys(105, 0), x32=sys(0x40000000 + 39)).items()})
print([l for l in open('/proc/self/status') if l[:6] in ('CapEff', 'CapBnd', 'NoNewP')])
try: open('/proc/1/mem', 'r+b'); print('REACHED mem')
except OSError: pass'''
    async with box() as s: r = await s.exec(py(code))
    out = r.stdout.decode()
    assert 'REACHED' not in out and r.code == 0, r
    assert out.count('Operation not permitted') >= 12 and out.count('Function not implemented') == 3 and '0000000000000000' in out and 'NoNewPrivs:\\t1' in out, out

@needs_bwrap
async def test_S_no_descriptor_and_no_secret_leaks_in():
    async with box() as s:
        t = asyncio.create_task(s.exec(['sh', '-c', 'ls -l /proc/self/fd /proc/$$/fd; sleep 0.5'], env={'API_KEY': 'hunter2'}))
        pids = await until(lambda: len(p := of_uid(s.uid)) >= 4 and p)
        lines = [Path(f'/proc/{p}/cmdline').read_bytes() for p in pids if os.path.exists(f'/proc/{p}')]
        assert any(b'bwrap' in l for l in lines) and not any(b'hunter2' in l for l in lines)
        out = (await t).stdout.decode()
    assert {l.split(' -> ')[0].split()[-1] for l in out.splitlines() if '->' in l} <= {'0', '1', '2', '3'}, out  # 3: ls reading the folder


# resources

@needs_bwrap
async def test_S_fork_bomb():
    async with box(pids=32, seconds=2) as s:
        t = asyncio.create_task(s.exec(['bash', '-c', 'f() { f | f & }; f; sleep 60']))
        most = 0
        while not t.done(): most = max(most, len(of_uid(s.uid))); await asyncio.sleep(.05)
        r = await t
        assert r.timed_out and 10 < most <= 36 and of_uid(s.uid) == []
        assert (await s.exec(['echo', 'alive'])).stdout == b'alive\n'

@needs_bwrap
@pytest.mark.parametrize('code', ['x = bytearray(b"x") * 10**9', 'open("/dev/shm/a", "wb").write(b"x"*60_000_000); x = bytearray(b"x") * 70_000_000'])
async def test_S_memory_bomb(code):
    async with box(memory_mb=96) as s:
        r = await s.exec(py(code))
        assert r.oom and r.killed == '' and not r.ok, r
        r = await s.exec(['true'])
        assert r.ok and not r.oom

@needs_bwrap
async def test_S_memory_bomb_in_a_child_is_told():
    async with box(memory_mb=64) as s: r = await s.exec(['sh', '-c', "python3 -c 'x = bytearray(b\"x\") * 10**9'; echo survived"])
    assert r.code == 0 and r.oom and b'survived' in r.stdout and not r.ok

@needs_bwrap
async def test_S_cpu_cap():
    spin = "import os, time\nfor _ in range(3): os.fork()\nt = time.monotonic()\nwhile time.monotonic() - t < 2: pass"
    for cap in (0.5, 0.1):
        async with box(cpus=cap) as s:
            r = await s.exec(py(spin))
            throttled = int(dict(l.split() for l in open(f'{keeper.cgroup_base("cpu")}/clawlab-{s.uid}/cpu.stat'))['nr_throttled'])
        assert r.cpu / r.seconds < cap + 0.1, r
    assert throttled >= 5  # a busy machine may give less than a half anyway; a tenth is the cap's doing

@needs_bwrap
async def test_S_disk_fill():
    async with box(disk_mb=8) as s:
        r = await s.exec(['sh', '-c', 'for f in /workspace/a ~/b /tmp/c /var/tmp/d /dev/shm/e /dev/x /x /etc/x; do head -c 100M /dev/zero > $f; done; df -k --output=used /workspace | tail -1; du -ck /dev/shm | tail -1'])
        used, shm = (int(l.split()[0]) for l in r.stdout.decode().splitlines())
        assert used <= 8 << 10 and shm <= 64 << 10 and r.stderr.count(b'No space left') >= 3, r
        assert sum(map(len, (await s.get()).values())) <= 8 << 20
    async with box(disk_mb=8, seconds=10) as s:
        r = await s.exec(py('i = 0\nwhile True: open(str(i), "w").close(); i += 1'))
        assert b'No space left' in r.stderr
        assert len(await s.get()) < 4096

@needs_bwrap
async def test_S_a_gigabyte_on_stdout():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with box(seconds=60) as s: r = await s.exec(['sh', '-c', 'head -c 1G /dev/zero; echo end >&2; exit 3'])
    assert r.code == 3 and len(r.stdout) == CAP and r.stderr == b'end\n'
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


# files

@needs_bwrap
async def test_S_only_regular_files_come_back():
    evil = '''
import os, socket
open('good', 'w').write('x'); os.makedirs('d/e'); open('d/e/f', 'w').write('y')
os.symlink('/etc/passwd', 'link'); os.symlink('/', 'up'); os.symlink('good', 'inner'); os.mkfifo('pipe'); socket.socket(1).bind('sock')
os.truncate(os.open('sparse', 66), 1 << 42)
open(b'bad\\xff', 'w').write('z'); os.chmod('good', 0o4755)
for _ in range(200): os.mkdir('deep'); os.chdir('deep')
open('bottom', 'w').write('q')'''
    async with box() as s:
        r = await s.exec(py(evil))
        out = await s.get()
        assert r.ok and out == {'good': b'x', 'd/e/f': b'y'}, (r, out)
        assert {x.split(' (')[0].split('/')[0] for x in s.left_out} == {'link', 'up', 'inner', 'pipe', 'sock', 'sparse', "'bad\\udcff'", 'deep'}, s.left_out

@needs_bwrap
async def test_S_put_does_not_follow_links(tmp_path):
    target = tmp_path/'target'; target.write_text('precious')
    async with box() as s:
        await s.exec(['sh', '-c', f'ln -s {target} file; ln -s {tmp_path} dir; mkdir real'])
        await s.put({'file': 'mine', 'real/x': 'ok'})
        with pytest.raises(OSError): await s.put({'dir/target': 'mine'})
        assert (await s.get()) == {'file': b'mine', 'real/x': b'ok'}
        for bad in ('../x', '/etc/x', 'a/../../x', '~', '', '~/../x'):
            with pytest.raises(InputError): await s.put({bad: 'x'})
        with pytest.raises(SandboxError, match='No space'): await s.put({'big': b'x' * (40 << 20)})
    assert target.read_text() == 'precious'


# ends

DAEMON = '''
import os, signal, time
for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: open('/workspace/beat', 'a').write('.'); time.sleep(.01)
    os._exit(0)
'''

@needs_bwrap
@pytest.mark.parametrize('tail, late', [('while True: pass', True), ('time.sleep(.3)', False)])
async def test_S_daemons_end_with_the_program(tail, late):
    async with box(seconds=1) as s:
        r = await s.exec(py(DAEMON + tail))
        assert r.timed_out == late and of_uid(s.uid) == []
        beats = len((await s.get())['beat'])
        assert beats and beats == len((await s.get())['beat'])

@needs_bwrap
@pytest.mark.parametrize('who', ['program', 'init', 'bwrap'])
@pytest.mark.parametrize('sig', [signal.SIGKILL, signal.SIGTERM])
async def test_S_killed_from_outside(who, sig):
    if (who, sig) == ('init', signal.SIGTERM): pytest.skip('process 1 of a namespace ignores it')
    def victim():
        for p in of_uid(s.uid):
            try: words, ns = Path(f'/proc/{p}/cmdline').read_bytes().split(b'\0'), Path(f'/proc/{p}/status').read_text().split('NSpid:')[1].split('\n')[0].split()
            except (OSError, IndexError): continue
            if words[0] == b'sleep' and who == 'program' or ns[-1] == '1' and len(ns) > 1 and b'/run/init' in words and who == 'init' or words[0] == b'bwrap' and len(ns) == 1 and who == 'bwrap': return p
    async with box() as s:
        t = asyncio.create_task(s.exec(['sleep', '60']))
        await until(lambda: any(b'sleep\0' == Path(f'/proc/{p}/cmdline').read_bytes()[:6] for p in of_uid(s.uid) if os.path.exists(f'/proc/{p}/cmdline')))
        os.kill(await until(victim), sig)
        r = await t
        assert (r.code, r.killed, r.timed_out, r.oom) == (None, 'outside', False, False), r
        assert of_uid(s.uid) == [] and (await s.exec(['true'])).ok

@needs_bwrap
@pytest.mark.parametrize('attack', ['os.kill(os.getppid(), 9)', 'os.kill(os.getppid(), 15)', 'os.kill(-1, 9)', 'os.kill(0, 9)', 'signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)',
    'ctypes.CDLL(None).syscall(234, os.getppid(), os.getppid(), 9)', 'ctypes.CDLL(None).syscall(200, os.getppid(), 9)', 'os.kill(os.getppid(), 11)', 'os.kill(os.getppid(), 10)'])
async def test_S_the_agent_kills_its_harness(attack):
    child = f'import ctypes, os, signal; {attack}'
    async with box() as s: r = await s.exec(py(f'import os, subprocess, sys, time; subprocess.run([sys.executable, "-c", {child!r}]); time.sleep(20)'))
    assert r.code is None and r.killed == 'inside' and r.seconds < 15, r

@needs_bwrap
@pytest.mark.parametrize('attack', ['os.kill(tid, 9)', 'os.kill(tid, 15)', 'ctypes.CDLL(None).syscall(129, tid, 9, struct.pack("iii116x", 0, 9, -1))'])
async def test_S_the_agent_kills_a_thread_of_its_harness(attack):
    "kill(2) takes the id of any thread; its whole process dies."
    child = f'import ctypes, os, struct; tid = max(map(int, os.listdir(f"/proc/{{os.getppid()}}/task"))); assert tid != os.getppid(); {attack}'
    async with box() as s: r = await s.exec(py(f'import subprocess, sys, threading, time; threading.Thread(target=time.sleep, args=(20,)).start(); subprocess.run([sys.executable, "-c", {child!r}])'))
    assert r.code is None and r.killed == 'inside' and r.seconds < 15, r

@needs_bwrap
async def test_S_a_thread_of_another_process_is_not_the_harness():
    code = '''
import os, subprocess, sys, time
p = subprocess.Popen([sys.executable, '-c', 'import threading, time; threading.Thread(target=time.sleep, args=(20,)).start(); print(flush=True)'], stdout=-1)
p.stdout.readline(); os.kill(max(map(int, os.listdir(f'/proc/{p.pid}/task'))), 9); p.wait(); open('ready', 'w'); time.sleep(60)'''
    def harness(p): return Path(f'/proc/{p}/status').read_text().split('NSpid:')[1].splitlines()[0].split()[-1] == '2'
    async with box() as s:
        t = asyncio.create_task(s.exec(py(code), timeout=30))
        await until(lambda: 'ready' in os.listdir(f'/proc/self/fd/{s.root}/workspace'))
        os.kill(next(filter(harness, of_uid(s.uid))), 9)
        assert (await t).killed == 'outside'

@needs_bwrap
async def test_S_a_harness_that_kills_its_own_child_is_not_killed():
    code = '''
import os, signal, subprocess
p = subprocess.Popen(['sleep', '60'], start_new_session=True); os.killpg(p.pid, signal.SIGKILL); p.wait()
q = subprocess.Popen(['sleep', '60']); q.terminate(); print(q.wait()); raise SystemExit(7)'''
    async with box() as s:
        r = await s.exec(py(code))
        assert (r.code, r.killed, r.stdout) == (7, '', b'-15\n')
        r = await s.exec(['sh', '-c', 'exit 137'])
        assert (r.code, r.signal, r.killed) == (137, None, '')

@needs_bwrap
async def test_S_program_that_does_not_exist_and_stdin():
    async with box() as s:
        r = await s.exec(['/opt/nothing'])
        assert r.code == 127 and b'No such file' in r.stderr
        r = await s.exec(['sh', '-c', 'cat | wc -c; kill -PIPE $$'], stdin=b'x' * 200_000)
        assert r.stdout == b'200000\n' and r.signal == signal.SIGPIPE
        assert (await s.exec(['cat'])).stdout == b''
        with pytest.raises(InputError): await s.exec(['echo', 'a\0b'])

@needs_bwrap
async def test_S_cancelled_and_stopped():
    async with box() as s:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(.5): await s.exec(['sleep', '60'])
        await until(lambda: of_uid(s.uid) == [])
        assert (await s.exec(['true'])).ok
        t = asyncio.create_task(s.exec(['sleep', '60']))
        await until(lambda: len(of_uid(s.uid)) >= 3)
        await s.stop()
        with pytest.raises(SandboxError, match='stopped'): await t
    assert left_of([s.uid]) == {}

@needs_bwrap
async def test_S_listener_that_fails_starts_nothing():
    async def broken(sock): sock.close(); raise RuntimeError('no proxy')
    async with box(broken) as s:
        with pytest.raises(RuntimeError): await s.exec(['sh', '-c', 'echo ran > f'])
        await until(lambda: of_uid(s.uid) == [])
        assert await s.get() == {}

@needs_bwrap
async def test_P40_a_killed_program_is_a_disconnect():
    gone = asyncio.Event()
    async def hold(r, w): await r.readline(); w.write(b'wait'); await r.read(); gone.set(); w.close()
    servers = []
    async def listener(sock): servers.append(await asyncio.start_server(hold, sock=sock))
    async with box(listener, seconds=1) as s:
        r = await s.exec(py('import socket; c = socket.create_connection(("127.0.0.1", 8000)); c.sendall(b"x\\n"); c.recv(4); c.recv(1)'))
        assert r.timed_out
        await asyncio.wait_for(gone.wait(), 1)
    [x.close() for x in servers]

@needs_bwrap
async def test_S_many_at_once():
    async def one(i):
        async def answer(r, w): await r.readline(); w.write(str(i).encode()); await w.drain(); w.close()
        async def listener(sock): servers.append(await asyncio.start_server(answer, sock=sock))
        async with box(listener, memory_mb=64) as s:
            r = await s.exec(py('import socket; c = socket.create_connection(("127.0.0.1", 8000)); c.sendall(b"\\n"); open("me", "wb").write(c.recv(9))'))
            uids.append(s.uid)
            return r.ok and await s.get() == {'me': str(i).encode()}
    servers, uids = [], []
    assert all(await asyncio.gather(*map(one, range(12)))) and len(set(uids)) > 1
    [x.close() for x in servers]
    assert left_of(set(uids)) == {}


# launchers that die

LAUNCHER = '''
import asyncio, sys
from clawlab.launch.sandbox import bwrap
from clawlab.launch.sandbox.base import Limits, make_sandbox
async def main():
    boxes = [make_sandbox('bwrap', limits=Limits(memory_mb=64)) for _ in range(8)]
    for b in boxes: await b.start()
    runs = [asyncio.create_task(b.exec(['sh', '-c', '(setsid sleep 1000 &) ; echo go > f; sleep 1000'])) for b in boxes]
    while not all([await b.get() for b in boxes]): await asyncio.sleep(.02)
    print(bwrap.the_keeper().proc.pid, *(b.uid for b in boxes), flush=True)
    await asyncio.gather(*runs)
asyncio.run(main())
'''

def swept(uids): return [l for l in sweep() if any(l.endswith(f'/clawlab-{u}') for u in uids)]

def launch():
    p = subprocess.Popen([sys.executable, '-c', LAUNCHER], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    pid, *uids = map(int, p.stdout.readline().split())
    assert len(uids) == 8 and all(len(of_uid(u)) >= 4 for u in uids)
    return p, pid, uids

@needs_bwrap
async def test_S46_kill_9_of_the_launcher_leaves_nothing():
    p, _, uids = launch()
    p.kill(); p.wait()
    await until(lambda: left_of(uids) == {})
    assert swept(uids) == []

@needs_bwrap
async def test_S46_kill_9_of_launcher_and_keeper_then_sweep():
    p, pid, uids = launch()
    fake = subprocess.Popen(['sleep', '1000'])          # something that outlived them in a cgroup
    Path(cgroups(uids[0])[1], 'cgroup.procs').write_text(str(fake.pid))
    os.kill(pid, signal.SIGSTOP)                        # the keeper can do nothing any more
    p.kill(); p.wait(); os.kill(pid, signal.SIGKILL)
    await until(lambda: not os.path.exists(f'/proc/{pid}'))
    await until(lambda: sum(map(of_uid, uids), []) == [])  # the kernel ended the sandboxes
    assert set(left_of(uids)) == {'claims', 'cgroups'}
    assert len(swept(uids)) == 24 and left_of(uids) == {} and fake.wait() == -signal.SIGKILL
    assert swept(uids) == []

@needs_bwrap
async def test_S_the_keeper_dies():
    async with box() as s:
        t = asyncio.create_task(s.exec(['sleep', '60']))
        await until(lambda: len(of_uid(s.uid)) >= 3)
        os.kill(bwrap.the_keeper().proc.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match='keeper'): await t
        with pytest.raises(SandboxError, match='keeper'): await s.exec(['true'])
    async with box() as s: assert (await s.exec(['true'])).ok   # a new keeper
    sweep()

@needs_bwrap
async def test_S_a_live_sandbox_is_not_swept():
    async with box() as s:
        assert swept([s.uid]) == [] and (await s.exec(['true'])).ok
    assert left_of([s.uid]) == {}


# machines that can't

PROBE = 'import asyncio; from clawlab.launch.sandbox.base import Limits, make_sandbox, probe\n'

def in_namespace(setup, code):
    "Run Python on a machine that is spoilt by `setup`."
    r = subprocess.run(['unshare', '-m', 'sh', '-c', f'{setup} && exec "$0" -c "$1"', sys.executable, PROBE + code], capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=60)
    assert r.returncode == 0, r.stderr
    return r.stdout.strip()

@needs_bwrap
@pytest.mark.parametrize('setup, says', [('mount -t tmpfs none /sys/fs/cgroup && mount -o remount,ro /sys/fs/cgroup', 'cgroup (version 1) is not writable'),
    ('mount --bind /dev/null /usr/bin/bwrap', 'Permission denied'), ('mount --bind /dev/null /usr/bin/python3', 'Permission denied')])
def test_S46_a_machine_that_cannot_says_so_in_one_line(setup, says):
    out = in_namespace(setup, 'print(asyncio.run(probe("bwrap")))')
    assert says in out and '\n' not in out, out

@needs_bwrap
def test_S_without_cgroups_only_when_no_cap_is_wanted():
    code = '''async def main():
    async with make_sandbox('bwrap', limits=Limits(None, None, None, 8, 5)) as s: print((await s.exec(['echo', 'ran'])).stdout.decode())
asyncio.run(main())'''
    assert in_namespace('mount -t tmpfs none /sys/fs/cgroup && mount -o remount,ro /sys/fs/cgroup', code) == 'ran'

async def test_S_an_ordinary_user_is_refused(monkeypatch):
    monkeypatch.setattr(os, 'geteuid', lambda: 1000); monkeypatch.setattr(bwrap, '_keeper', None)
    why = await probe('bwrap')
    assert 'root' in why and 'process' in why and '\n' not in why
    with pytest.raises(InputError): await make_sandbox('bwrap').start()

@pytest.mark.parametrize('kw', [dict(seconds=0), dict(seconds=-1), dict(memory_mb=-1), dict(disk_mb=0), dict(disk_mb=64.), dict(pids=0), dict(cpus=float('inf')), dict(cpus=float('nan'))])
def test_S_a_limit_is_none_or_positive(kw):
    with pytest.raises(InputError, match=next(iter(kw))): Limits(**kw)

async def test_S_bad_input():
    with pytest.raises(InputError, match='unknown sandbox backend'): make_sandbox('docker')
    for backend in ('process',) + (() if WHY else ('bwrap',)):
        with pytest.raises(InputError, match='does not exist'):
            async with make_sandbox(backend, binds=(('/no/such', '/opt/x'),)): pass


# without isolation

async def test_process_backend():
    async def answer(r, w): await r.readline(); w.write(b'hi'); await w.drain(); w.close()
    servers = []
    async def listener(sock): servers.append(await asyncio.start_server(answer, sock=sock))
    async with make_sandbox('process', limits=Limits(seconds=5), listener=listener) as s:
        port = int(s.url.rsplit(':', 1)[1])
        await s.put({'a/b.txt': 'x', 'run.sh': '#!/bin/sh\necho "$X"; exit 4'})
        r = await s.exec(['./run.sh'], env={'X': 'y'})
        assert (r.code, r.stdout) == (4, b'y\n')
        r = await s.exec([sys.executable, '-c', f'import socket; c = socket.create_connection(("127.0.0.1", {port})); c.sendall(b"\\n"); print(c.recv(9))'])
        assert r.stdout == b"b'hi'\n"
        assert (await s.exec(['no-such-program'])).code == 127
        t = time.monotonic()
        r = await s.exec(['sh', '-c', 'trap "" TERM; sleep 60 & sleep 60'], timeout=.5)
        assert r.timed_out and time.monotonic() - t < 5
        assert set(await s.get()) == {'a/b.txt', 'run.sh'}
    assert not os.path.exists(s.dir)
    [x.close() for x in servers]
