"""What every isolated sandbox must do, whatever it is made of. Each check takes a `Backend`; test_sandbox.py (bwrap), test_podman.py and test_kubernetes.py run all of them."""
import asyncio, hashlib, json, resource, signal, tempfile, time
from dataclasses import dataclass, field
from typing import Callable
from urllib.parse import urlsplit
import pytest
from clawlab.records import InputError, Rollout, SandboxError
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.launch.sandbox.base import CAP, HOME, Limits, WORKSPACE, make_sandbox, sweep


@dataclass(frozen=True)
class Backend:
    "A backend under test, and what of the attack suite it leaves to its surroundings."
    name: str
    not_enforced: dict = field(default_factory=dict)  # attack -> why it isn't enforced here
    binds: bool = True                                # can it show a folder of this machine?
    live: Callable | None = None                      # sandbox -> its live processes, seen from this machine

    def box(self, listener=None, binds=(), **kw):
        kw = dict(cpus=2, memory_mb=256, pids=64, disk_mb=32, seconds=20) | kw
        return make_sandbox(self.name, limits=Limits(**kw), binds=binds, listener=listener, name='test')

def py(code): return ['python3', '-c', code]

async def until(f, seconds=20):
    "Wait for a condition that another process brings about; `f` may be a coroutine function."
    end = time.monotonic() + seconds
    while True:
        x = f()
        if asyncio.iscoroutine(x): x = await x
        if x: return x
        assert time.monotonic() < end, 'it did not happen'
        await asyncio.sleep(.02)

class Served:
    "A listener for sandboxes that answers every connection with `handle`; `async with` closes it."
    def __init__(self, handle): self.handle, self.servers = handle, []
    async def __call__(self, sock): self.servers.append(await asyncio.start_server(self.handle, sock=sock))
    async def __aenter__(self): return self
    async def __aexit__(self, *_): [x.close() for x in self.servers]

def says(text):
    "A handler that reads a line and answers."
    async def handle(r, w): await r.readline(); w.write(text); await w.drain(); w.close()
    return handle

def dial(s):
    "Python that connects to the listener as `c`."
    u = urlsplit(s.url)
    return f'import socket; c = socket.create_connection(({u.hostname!r}, {u.port}), 10)\n'

BEAT = '''
import os, signal, time
for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: open('/workspace/beat', 'a').write('.'); time.sleep(.01)
    os._exit(0)
while not os.path.exists('/workspace/beat'): time.sleep(.01)
'''  # a daemon that ignores everything and shows that it lives

async def ended_beating(s): assert await stopped_beating(s)

async def stopped_beating(s):
    "The daemon of `BEAT` has lived, and lives no more."
    n = len((await s.get())['beat'])
    await asyncio.sleep(.3)
    return n > 0 and n == len((await s.get())['beat'])


# files, environment, ends

async def files_and_environment(b):
    async with b.box() as s:
        await s.put({'a/b.txt': 'x', 'run.sh': '#!/bin/sh\necho "$X"; cat ~/.conf/key; pwd; exit 4', '~/.conf/key': b'k\xff\n', 'big': b'z' * (20 << 20)})
        r = await s.exec(['./run.sh'], env={'X': 'ä y'})
        assert (r.code, r.signal, r.stdout, r.ok) == (4, None, 'ä y\n'.encode() + b'k\xff\n' + WORKSPACE.encode() + b'\n', False), r
        r = await s.exec(['sh', '-c', 'pwd; cat b.txt; echo e >&2; echo new > c; stat -c %a ../run.sh b.txt'], cwd='a')
        assert (r.code, r.stdout, r.stderr) == (0, f'{WORKSPACE}/a\nx755\n644\n'.encode(), b'e\n') and r.ok and r.seconds > 0, r
        files = await s.get()
        assert files.pop('big') == b'z' * (20 << 20) and files.pop('run.sh') and files == {'a/b.txt': b'x', 'a/c': b'new\n'} and list(s.left_out) == []
        assert (s.home, s.workspace) == (HOME, WORKSPACE)

async def the_same_view_in_every_rollout(b):
    async def look():
        async with b.box() as s: return (await s.exec(['sh', '-c', 'id; pwd; env | sort; echo ~; hostname; ls /; cat /etc/passwd; stat -c %U /workspace ~ /tmp'])).stdout
    x, y = await asyncio.gather(look(), look())
    assert x == y and b'uid=1000(agent) gid=1000(agent) groups=1000(agent)\n/workspace\n' in x and b'HOME=/home/agent\n' in x and b'\nsandbox\n' in x, (x, y)

async def ends_and_standard_input(b):
    async with b.box() as s:
        r = await s.exec(['/opt/nothing'])
        assert r.code == 127 and b'No such file' in r.stderr
        r = await s.exec(['sh', '-c', 'cat | wc -c; kill -PIPE $$'], stdin=b'x' * 200_000)
        assert (r.code, r.stdout, r.signal) == (None, b'200000\n', signal.SIGPIPE)
        assert (await s.exec(['cat'])).stdout == b''
        r = await s.exec(['sh', '-c', 'exit 137'])
        assert (r.code, r.signal, r.killed) == (137, None, '')
        r = await s.exec(['grep', '-E', 'Sig(Blk|Ign)', '/proc/self/status'])
        blocked, ignored = (int(x, 16) for x in r.stdout.split()[1::2])
        assert not blocked and not ignored & ~(3 << 31), r   # what starts us hands on none of its habits, but for the C library's own two signals
        with pytest.raises(InputError): await s.exec(['echo', 'a\0b'])

async def a_program_that_ends_its_own_child_was_not_killed(b):
    code = '''
import os, signal, subprocess
p = subprocess.Popen(['sleep', '60'], start_new_session=True); os.killpg(p.pid, signal.SIGKILL); p.wait()
q = subprocess.Popen(['sleep', '60']); q.terminate(); print(q.wait()); raise SystemExit(7)'''
    async with b.box() as s: r = await s.exec(py(code))
    assert (r.code, r.killed, r.stdout) == (7, '', b'-15\n')

async def only_regular_files_come_back(b):
    code = '''
import os, socket
open('good', 'w').write('x'); os.makedirs('d/e'); open('d/e/f', 'w').write('y')
os.symlink('/etc/passwd', 'link'); os.symlink('/', 'up'); os.symlink('good', 'inner'); os.mkfifo('pipe'); socket.socket(1).bind('sock')
os.truncate(os.open('sparse', 66), 1 << 42)
open(b'bad\\xff', 'w').write('z'); os.chmod('good', 0o4755)
for _ in range(200): os.mkdir('deep'); os.chdir('deep')
open('bottom', 'w').write('q')'''
    async with b.box() as s:
        r = await s.exec(py(code))
        out = await s.get()
    assert r.ok and out == {'good': b'x', 'd/e/f': b'y'}, (r, out)
    assert {x.split(' (')[0].split('/')[0] for x in s.left_out} == {'link', 'up', 'inner', 'pipe', 'sock', 'sparse', "'bad\\udcff'", 'deep'}, s.left_out

async def what_is_put_stays_inside(b):
    async with b.box() as s:
        await s.exec(['sh', '-c', 'ln -s /tmp/target file; ln -s /tmp dir; mkdir real; echo precious > /tmp/target'])
        await s.put({'file': 'mine', 'real/x': 'ok'})
        with pytest.raises((OSError, SandboxError)): await s.put({'dir/target': 'mine'})
        assert (await s.get()) == {'file': b'mine', 'real/x': b'ok'}
        for bad in ('../x', '/etc/x', 'a/../../x', '~', '', '~/../x'):
            with pytest.raises(InputError): await s.put({bad: 'x'})
        with pytest.raises(SandboxError, match='No space'): await s.put({'big': b'x' * (40 << 20)})
        assert (await s.exec(['cat', '/tmp/target'])).stdout == b'precious\n'

async def a_missing_bind_is_bad_input(b):
    with pytest.raises(InputError, match='does not exist'):
        async with b.box(binds=(('/no/such', '/opt/x'),)): pass

async def stopping_twice_is_fine(b):
    s = b.box()
    await s.stop()
    await s.start(); await s.put({'x': 'y'}); await s.stop(); await s.stop()


# network

async def the_listener_is_at_the_url(b):
    seen = []
    async def hello(r, w): seen.append(await r.readline()); w.write(b'hi'); await w.drain(); w.close()
    async with Served(hello) as listener, b.box(listener) as s:
        for k in (1, 2):
            r = await s.exec(py(dial(s) + f'c.sendall(b"me{k}\\n"); print(c.recv(9))'))
            assert r.stdout == b"b'hi'\n", r
    assert seen == [b'me1\n', b'me2\n']

async def without_a_listener_no_network(b):
    async with b.box() as s: r = await s.exec(py(dial(s)))
    assert r.code == 1 and b'Error' in r.stderr, r

async def a_listener_that_fails_starts_nothing(b):
    async def broken(sock): sock.close(); raise RuntimeError('no proxy')
    async with Served(says(b'')) as fine:
        s = b.box(broken)
        with pytest.raises(RuntimeError):
            async with s: await s.exec(['sh', '-c', 'echo ran > f'])
        async with b.box(fine) as s: assert (await s.exec(['true'])).ok and await s.get() == {}

async def a_killed_program_is_a_disconnect(b):
    came, gone = asyncio.Event(), asyncio.Event()
    async def hold(r, w): await r.readline(); came.set(); w.write(b'wait'); await r.read(); gone.set(); w.close()
    for seconds in (2, 8, 32):  # the last ones for machines on which a program takes seconds to start
        async with Served(hold) as listener, b.box(listener, seconds=seconds) as s:
            r = await s.exec(py(dial(s) + 'c.settimeout(None); c.sendall(b"x\\n"); c.recv(4); c.recv(1)'))
            assert r.timed_out
            if came.is_set(): return await asyncio.wait_for(gone.wait(), 10)
    raise AssertionError('the program never called')


class Sampling(ScriptEngine):
    "Samples until the call is given up."
    running = 0
    async def generate(self, *a):
        self.running += 1
        try: await asyncio.Event().wait()
        finally: self.running -= 1

async def a_killed_program_frees_the_engine(b):
    "While it samples: before and after a keep-alive, on a deadline and on a stop; idle within a second, and nothing counts as delivered."
    with tempfile.TemporaryDirectory() as d:
        store, engine = Store.open(f'{d}/calls.db'), Sampling([])
        for keepalive in (30, .02):
            async with Proxy(engine, store, hold_s=keepalive, keepalive_s=keepalive) as proxy:
                h = await proxy.open_session(Rollout(f'r{keepalive}', 't', 'h'))
                async with b.box(lambda sock: proxy.listen(sock, h.session_id), seconds=60) as s:
                    ask = json.dumps(dict(model='m', stream=True, max_tokens=9, messages=[dict(role='user', content='hi')]))
                    head = f'POST {h.base_path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {h.api_key}\r\ncontent-length: {len(ask)}\r\n\r\n{ask}'
                    t = asyncio.create_task(s.exec(py(dial(s) + f'c.settimeout(60); c.sendall({head!r}.encode()); c.recv(5); c.recv(1)\nimport time; time.sleep(60)'), timeout=60))
                    await until(lambda: engine.running == 1)
                    if keepalive < 1: await asyncio.sleep(.1)
                    t.cancel(); await asyncio.gather(t, return_exceptions=True)
                    await until(lambda: engine.running == 0, 1)
                    await until(lambda: proxy.inflight == 0)
                c, = await proxy.close_session(h.session_id)
                assert (c.finish, c.delivered, len(c.output_ids), h.stats.disconnects) == ('aborted', (), 0, 1)
        store.close()


# ends that nobody wished for

async def a_deadline_ends_the_whole_tree(b):
    for seconds in (2, 8, 32):  # the last ones for machines on which a program takes seconds to start
        async with b.box() as s:
            r = await s.exec(py(BEAT + 'while True: pass'), timeout=seconds)
            assert r.timed_out and r.killed == '' and not r.ok and r.seconds < seconds + 20, r
            if 'beat' in await s.get(): return await ended_beating(s)
    raise AssertionError('the program never started')

async def daemons_end_with_their_program(b):
    async with b.box() as s:
        r = await s.exec(py(BEAT + 'print("done")'))
        assert r.ok and r.stdout == b'done\n' and r.seconds < 15 and await stopped_beating(s), r

async def out_of_memory_is_told(b):
    async with b.box(memory_mb=96) as s:
        r = await s.exec(py('x = bytearray(b"x") * 10**9'))
        assert r.oom and r.killed == '' and not r.ok, r
        r = await s.exec(['true'])
        assert r.ok and not r.oom, r

async def out_of_memory_in_a_child_is_told(b):
    async with b.box(memory_mb=96) as s: r = await s.exec(['sh', '-c', "python3 -c 'x = bytearray(b\"x\") * 10**9'; echo survived"])
    assert r.code == 0 and r.oom and b'survived' in r.stdout and not r.ok, r

async def cancelled_and_stopped(b):
    async with b.box(seconds=60) as s:
        t = asyncio.create_task(s.exec(py(BEAT + 'time.sleep(60)')))
        async def beats(): return (await s.get()).get('beat')
        await until(beats); t.cancel()
        with pytest.raises(asyncio.CancelledError): await t
        await until(lambda: stopped_beating(s))
        assert (await s.exec(['true'])).ok
        t = asyncio.create_task(s.exec(['sh', '-c', 'echo > up; sleep 60']))
        async def up(): return 'up' in await s.get()
        await until(up)
        await s.stop()
        with pytest.raises(SandboxError, match='stopped'): await t

async def a_cancelled_start_leaves_nothing_to_stop(b):
    s = b.box()
    t = asyncio.create_task(s.start())
    await asyncio.sleep(.01); t.cancel()
    await asyncio.gather(t, return_exceptions=True)
    await s.stop()
    async with b.box() as s: assert (await s.exec(['true'])).ok


# limits

async def output_is_whole(b):
    "Up to the last byte, on both streams, with the exit code of the program."
    code = "import hashlib, os, sys; d = os.urandom(4000000); print(hashlib.sha256(d).hexdigest(), file=sys.stderr, flush=True); sys.stdout.buffer.write(d); sys.stdout.flush(); os._exit(9)"
    async with b.box() as s:
        for _ in range(3):
            r = await s.exec(py(code))
            assert (r.code, len(r.stdout), hashlib.sha256(r.stdout).hexdigest()) == (9, 4_000_000, r.stderr.decode().strip()), (r.code, len(r.stdout), r.stderr)

async def a_gigabyte_on_stdout(b):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with b.box(seconds=120) as s: r = await s.exec(['sh', '-c', 'head -c 1G /dev/zero; echo end >&2; exit 3'])
    assert r.code == 3 and len(r.stdout) == CAP and r.stderr == b'end\n', (r.code, len(r.stdout), r.stderr)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB

async def a_late_program_is_told_with_its_processor_time(b):
    "What is killed at the deadline has used what it says it has."
    spin = "import subprocess, sys, time\nif len(sys.argv) < 2: subprocess.run([sys.executable, '-c', open('spin.py').read(), 'x'])\nwhile True:\n    t = time.monotonic()\n    while time.monotonic() < t + .1: pass\n    print(time.process_time(), flush=True)\n"
    for argv in (['python3', 'spin.py', 'alone'], ['python3', 'spin.py']):  # in a child too
        async with b.box(seconds=60) as s:
            await s.put({'spin.py': spin})
            r = await s.exec(argv, timeout=3)
        assert r.timed_out and r.cpu >= float(r.stdout.split()[-1]) - .05 > 0, (r.cpu, r.stdout[-40:])

async def the_cpu_cap_holds(b):
    "Half a processor, since four can't be seen on two."
    spin = "import os, time\nt = time.monotonic()\nfor _ in range(3): os.fork()\nwhile time.monotonic() - t < 2: pass\nprint(time.process_time(), flush=True)\ntry:\n    while True: os.wait()\nexcept ChildProcessError: pass"
    for cap in (.5, .1):
        async with b.box(cpus=cap, seconds=60) as s: r = await s.exec(py(spin))
        used = sum(map(float, r.stdout.split()))
        assert r.ok and len(r.stdout.split()) == 8 and used < (cap + .15) * r.seconds and r.cpu < (cap + .15) * r.seconds + .5, (cap, used, r)

async def many_at_once(b):
    async def one(i):
        async with Served(says(str(i).encode())) as listener, b.box(listener, memory_mb=64) as s:
            r = await s.exec(py(dial(s) + 'c.sendall(b"\\n"); open("me", "wb").write(c.recv(9))'))
            return r.ok and await s.get() == {'me': str(i).encode()}
    assert all(await asyncio.gather(*map(one, range(12))))

async def a_live_sandbox_is_not_swept(b):
    async with b.box() as s:
        await s.put({'x': 'y'})
        await asyncio.to_thread(sweep)
        assert (await s.exec(['cat', 'x'])).stdout == b'y'

CHECKS = {n: f for n, f in list(globals().items()) if asyncio.iscoroutinefunction(f) and f.__module__ == __name__ and n not in ('until', 'stopped_beating', 'ended_beating')}
ITEMS = dict(out_of_memory_is_told='S46', out_of_memory_in_a_child_is_told='S46', output_is_whole='S46', a_gigabyte_on_stdout='S46', a_live_sandbox_is_not_swept='S46', the_same_view_in_every_rollout='S46', a_killed_program_frees_the_engine='P40', a_killed_program_is_a_disconnect='P40')
conforms = pytest.mark.parametrize('check', CHECKS, ids=lambda n: f'{ITEMS[n]}_{n}' if n in ITEMS else n)  # names of tests carry the number of the kind of fault
