"""bwrap under the suites that all isolated sandboxes share, and what happens when parts of it die. Needs root, bubblewrap and cgroup v1; `process` tests run anywhere."""
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path
import pytest
os.environ['CLAWLAB_SANDBOX_UIDS'] = f'{(a := 62000 + os.getpid() % 20 * 100)}-{a + 100}'  # apart from whatever else runs on this machine
from clawlab.records import InputError, SandboxError
from clawlab.launch.sandbox import bwrap, keeper
from clawlab.launch.sandbox.base import Limits, make_sandbox, probe, sweep
from clawlab.launch.tasks import load_suite
from attacks import attacked, holds
from backends import BACKENDS, of_uid
from conformance import CHECKS, conforms, py, until

WHY = asyncio.run(probe('bwrap'))
needs_bwrap = pytest.mark.skipif(bool(WHY), reason=WHY or 'bwrap')
box = BACKENDS['bwrap'].box

def cgroups(uid): return [d for c in ('memory', 'pids', 'cpu') if os.path.isdir(d := f'{keeper.cgroup_base(c)}/clawlab-{uid}')]

def left_of(uids):
    "Everything that sandboxes with these uids could leave on the machine."
    mounts = open('/proc/self/mounts').read()
    return {k: v for k, v in dict(claims=[u for u in uids if os.path.exists(f'{keeper.RUN}/{u}')], cgroups=sum(map(cgroups, uids), []),
            processes=sum(map(of_uid, uids), []), mounts=[u for u in uids if f'{keeper.STAGE}/{u}' in mounts]).items() if v}

@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists('/usr/bin/bwrap') or not keeper.cgroup_base('memory'), reason='not root, no bubblewrap, or no cgroup v1')
def test_S46_the_probe_succeeds_where_it_should(): assert WHY == ''


@needs_bwrap
@conforms
async def test_S_bwrap_conforms(check): await CHECKS[check](BACKENDS['bwrap'])

@needs_bwrap
@attacked
async def test_S_bwrap_contains(attack): await holds(BACKENDS['bwrap'], attack)

@needs_bwrap
async def test_S_uids_differ_while_they_live_and_nothing_is_left():
    async with box() as a, box() as b:
        asleep = asyncio.create_task(a.exec(['sleep', '60']))
        await until(lambda: len(of_uid(a.uid)) >= 3)
        assert a.uid != b.uid and of_uid(b.uid) == [] and left_of([a.uid])
        await a.stop()
        with pytest.raises(SandboxError, match='stopped'): await asleep
        assert left_of([a.uid]) == {}
        async with box() as c: assert c.uid == a.uid and await c.get() == {}  # the uid is used again, its files are not
    assert left_of([a.uid, b.uid]) == {}

@needs_bwrap
async def test_S_the_cpu_cap_throttles():
    "A busy machine may give less than a half anyway; a tenth is the cap's doing."
    async with box(cpus=.1) as s:
        r = await s.exec(py("import os, time\nfor _ in range(3): os.fork()\nt = time.monotonic()\nwhile time.monotonic() - t < 1.5: pass"))
        throttled = int(dict(l.split() for l in open(f'{keeper.cgroup_base("cpu")}/clawlab-{s.uid}/cpu.stat'))['nr_throttled'])
    assert throttled >= 5 and r.cpu / r.seconds < .2, r

@needs_bwrap
async def test_S_its_command_line_holds_no_environment():
    async with box() as s:
        t = asyncio.create_task(s.exec(['sleep', '60'], env={'API_KEY': 'hunter2'}))
        pids = await until(lambda: len(p := of_uid(s.uid)) >= 3 and p)
        lines = [Path(f'/proc/{p}/cmdline').read_bytes() for p in pids if os.path.exists(f'/proc/{p}')]
        t.cancel()
    assert any(b'bwrap' in l for l in lines) and not any(b'hunter2' in l for l in lines)


# killed from outside

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
    ('mount --bind /dev/null /usr/bin/bwrap', 'Permission denied'), ('mount --bind /dev/null /usr/bin/perl && mount --bind /dev/null /usr/bin/python3', 'Permission denied')])
def test_S46_a_machine_that_cannot_says_so_in_one_line(setup, says):
    out = in_namespace(setup, 'print(asyncio.run(probe("bwrap")))')
    assert says in out and '\n' not in out, out

@needs_bwrap
def test_S_without_perl_process_1_is_python():
    code = f'''import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from backends import BACKENDS
from conformance import CHECKS
async def main():
    for c in ('ends_and_standard_input', 'the_same_view_in_every_rollout', 'daemons_end_with_their_program'): await CHECKS[c](BACKENDS['bwrap'])
    async with BACKENDS['bwrap'].box() as s: print((await s.exec(['sh', '-c', 'tr "\\\\0" " " </proc/1/cmdline; ls -l /proc/1/fd'])).stdout.decode())
asyncio.run(main())'''
    assert in_namespace('mount --bind /dev/null /usr/bin/perl', code).startswith('/usr/bin/python3 -I -S /run/init sh -c')

@needs_bwrap
async def test_S46_the_probe_starts_what_rollouts_start(monkeypatch):
    "The same options, but for folder and environment: what the probe finds is true of rollouts."
    seen, make = [], bwrap.bwrap_args
    monkeypatch.setattr(bwrap, 'bwrap_args', lambda d, env, *a: seen.append([x.replace(d, 'BOX') for x in make(d, {}, *a)]) or make(d, env, *a))
    assert await probe('bwrap') == ''
    async def close(sock): sock.close()
    async with box(close) as s: await s.exec(['true'], env={'KEY': 'x'})
    assert len(seen) == 2 and seen[0] == seen[1] and {'--unshare-all', '--disable-userns', '--die-with-parent', '--clearenv', '--seccomp'} <= set(seen[0])

async def test_S46_isolation_is_never_dropped_silently(monkeypatch):
    "A backend that can't run is an error, whatever else could."
    from clawlab.launch import rollouts
    async def broken(backend): return 'no bubblewrap'
    def made(*a, **k): raise AssertionError('another sandbox was made')
    monkeypatch.setattr(rollouts, 'probe', broken); monkeypatch.setattr(rollouts, 'make_sandbox', made); monkeypatch.setattr(rollouts, 'load', lambda n: type('H', (), dict(name=n, absent="")))
    job = rollouts.Job(next(iter(load_suite('nano').values())), 'h', group='g')
    for backend in ('bwrap', 'podman', 'kubernetes'):
        with pytest.raises(InputError, match=f'sandbox {backend}: no bubblewrap'): await rollouts.run_rollouts([job], proxy=None, store=None, backend=backend, progress=False)

@needs_bwrap
def test_S_ignored_signals_of_who_started_us_are_not_handed_on():
    "A shell starts what runs in the background with SIGINT and SIGQUIT ignored, nohup adds SIGHUP; what an agent starts would inherit that."
    code = f'''import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import asyncio
from backends import BACKENDS
from conformance import CHECKS
asyncio.run(CHECKS['ends_and_standard_input'](BACKENDS['bwrap']))'''
    subprocess.run(['bash', '-c', 'trap "" HUP INT QUIT USR1; exec "$0" -c "$1"', sys.executable, code], check=True)

@needs_bwrap
def test_S_without_cgroups_only_when_no_cap_is_wanted():
    code = '''async def main():
    async with make_sandbox('bwrap', limits=Limits(None, None, None, 8, 5)) as s: print((await s.exec(['echo', 'ran'])).stdout.decode())
asyncio.run(main())'''
    assert in_namespace('mount -t tmpfs none /sys/fs/cgroup && mount -o remount,ro /sys/fs/cgroup', code) == 'ran'

async def test_S46_an_ordinary_user_is_refused(monkeypatch):
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
