"""podman under the suites that all isolated sandboxes share, what it leaves when launchers die, and rollouts in it. `make test-podman`; needs root, podman and (with version 1 cgroups) runc."""
import asyncio, json, os, signal, subprocess, sys, time
from pathlib import Path
import pytest
os.environ['CLAWLAB_SANDBOX_UIDS'] = f'{(a := 66000 + os.getpid() % 20 * 100)}-{a + 100}'  # apart from whatever else runs on this machine
from clawlab.records import InputError, SandboxError
from clawlab.capture.engines.oracle import OracleEngine
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.launch.harness import load
from clawlab.launch.rollouts import Job, run_rollouts
from clawlab.launch.sandbox import keeper, podman
from clawlab.launch.sandbox.base import Limits, probe, sweep
from clawlab.launch.tasks import load_suite
from attacks import attacked, holds
from backends import BACKENDS, of_uid
from conformance import CHECKS, conforms, until

pytestmark = pytest.mark.podman
BACKEND = BACKENDS['podman']
box, TASKS = BACKEND.box, load_suite('nano')

@pytest.fixture(autouse=True, scope='module')
def podman_works():
    if why := asyncio.run(probe('podman')): pytest.fail(f'podman cannot be used here: {why}')

def containers(): return subprocess.run([*podman.command(), 'ps', '--all', '--format', '{{.Names}}'], capture_output=True, text=True, check=True).stdout.split()

def left_of(uids):
    "Everything that sandboxes with these uids could leave on the machine."
    mounts, names = open('/proc/self/mounts').read(), containers()
    return {k: v for k, v in dict(claims=[u for u in uids if os.path.exists(f'{keeper.RUN}/{u}')], processes=sum(map(of_uid, uids), []),
            containers=[n for n in names for u in uids if n.startswith(f'clawlab-{u}-')], folders=[str(d) for u in uids for d in Path(podman.HERE).glob(f'*/{u}')], mounts=[u for u in uids if f'/{u}/ws ' in mounts]).items() if v}


@conforms
async def test_S_podman_conforms(check): await CHECKS[check](BACKEND)

@attacked
async def test_S_podman_contains(attack): await holds(BACKEND, attack)


# what is particular to it

async def test_S_nothing_is_left_of_a_sandbox():
    async with box() as s:
        assert (await s.exec(['true'])).ok and (await s.exec(['true'])).ok and {'claims', 'folders', 'mounts'} <= set(left_of([s.uid]))
    assert left_of([s.uid]) == {}

async def test_S_podman_never_sees_command_environment_or_key():
    async with box() as s:
        t = asyncio.create_task(s.exec(['sh', '-c', 'echo > up; sleep 60'], env={'API_KEY': 'hunter2'}))
        async def up(): return 'up' in await s.get()
        await until(up)
        name, = s.calls
        seen = subprocess.run([*podman.command(), 'inspect', name], capture_output=True, text=True, check=True).stdout
        seen += ''.join(p.read_text() for p in Path('/var/lib/containers/storage/overlay-containers').glob(f'{json.loads(seen)[0]["Id"]}/userdata/config.json'))
        t.cancel(); await asyncio.gather(t, return_exceptions=True)
    assert name in seen and 'hunter2' not in seen and 'echo > up' not in seen

async def test_S_readonly_binds_of_one_program(tmp_path):
    (tmp_path/'f').write_text('x'); tmp_path.chmod(0o755)
    async with box() as s:
        await s.put({'a': 'kept'})
        assert (await s.exec(['cat', 'a', '/opt/y/f'], readonly_binds=((str(tmp_path), '/opt/y'),))).stdout == b'keptx'
        assert (await s.exec(['ls', '/opt/y'])).code
        with pytest.raises(InputError, match='colon'): await s.exec(['true'], readonly_binds=((str(tmp_path), '/opt/a:b'),))

@pytest.mark.parametrize('who', [b'sleep', b'1'])
async def test_S_killed_from_outside(who):
    async with box(seconds=60) as s:
        t = asyncio.create_task(s.exec(['sleep', '61']))
        def processes(): return {b'sleep' if w[0] == b'sleep' else b'1': p for p in of_uid(s.uid) if os.path.exists(f'/proc/{p}/cmdline') and (w := Path(f'/proc/{p}/cmdline').read_bytes().split(b'\0'))}
        await until(lambda: len(processes()) == 2)
        os.kill(processes()[who], signal.SIGKILL)
        r = await t
        assert (r.code, r.signal, r.killed, r.timed_out, r.oom) == (None, 9, 'outside', False, False), r
        assert of_uid(s.uid) == [] and (await s.exec(['true'])).ok

async def test_S46_an_image_that_is_not_there_is_told_at_once(monkeypatch):
    monkeypatch.setenv('CLAWLAB_SANDBOX_IMAGE', 'localhost/no-such-image:1')
    t = time.monotonic()
    with pytest.raises(SandboxError, match='no-such-image'): await box().start()
    why = await probe('podman')
    assert 'no-such-image' in why and '\n' not in why and time.monotonic() - t < podman.START_S

async def test_S46_an_image_of_ones_own(monkeypatch):
    name, _ = await podman.image()
    monkeypatch.setenv('CLAWLAB_SANDBOX_IMAGE', name)  # without this machine's /usr there is no Python in it
    with pytest.raises(SandboxError, match='python3'): await box().start()

async def test_S46_a_machine_that_cannot_says_so_in_one_line(monkeypatch):
    monkeypatch.setenv('PATH', '/nowhere')
    assert 'apt-get install podman' in (why := await probe('podman')) and '\n' not in why
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    assert 'root' in (why := await probe('podman')) and '\n' not in why

async def test_S46_a_podman_that_hangs_has_a_deadline(monkeypatch, tmp_path):
    (tmp_path/'podman').write_text('#!/bin/sh\nexec sleep 60\n'); (tmp_path/'podman').chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    with pytest.raises(SandboxError, match='took more than 0.5 s'): await podman.podman('ps', seconds=.5)

async def test_S46_calls_of_podman_are_few_at_a_time(monkeypatch, tmp_path):
    (tmp_path/'podman').write_text(f'#!/bin/sh\ntouch {tmp_path}/live.$$; ls {tmp_path} | grep -c live >> {tmp_path}/most; sleep .2; rm {tmp_path}/live.$$\n'); (tmp_path/'podman').chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    await asyncio.gather(*(podman.podman('ps') for _ in range(12)))
    assert len(n := list(map(int, (tmp_path/'most').read_text().split()))) == 12 and max(n) <= podman.PARALLEL

async def test_S46_containers_carry_the_name_of_their_launcher():
    async with box() as s:
        t = asyncio.create_task(s.exec(['sleep', '30']))
        await until(lambda: s.calls and s.running)
        shown = subprocess.run([*podman.command(), 'ps', '--filter', f'label=clawlab={podman.owner()}', '--format', '{{.Names}}'], capture_output=True, text=True, check=True).stdout.split()
        assert set(s.calls) <= set(shown)
        t.cancel(); await asyncio.gather(t, return_exceptions=True)

def test_S_out_of_memory_under_version_2(tmp_path):
    (tmp_path/'memory.events').write_text('low 0\nhigh 0\nmax 4\noom 1\noom_kill 1\n'); (tmp_path/'cpu.stat').write_text('usage_usec 1500000\nuser_usec 1\n')
    assert podman.Container('n', None, None, -1, {'': str(tmp_path)}).usage() == (True, 1.5)


# launchers that die

LAUNCHER = '''
import asyncio
from clawlab.launch.sandbox.base import Limits, make_sandbox
async def main():
    boxes = [make_sandbox('podman', limits=Limits(memory_mb=64)) for _ in range(8)]
    await asyncio.gather(*(b.start() for b in boxes))
    runs = [asyncio.create_task(b.exec(['sh', '-c', '(setsid sleep 1000 &) ; echo go > f; sleep 1000'])) for b in boxes]
    while not all([await b.get() for b in boxes]): await asyncio.sleep(.02)
    print(*(b.uid for b in boxes), flush=True)
    await asyncio.gather(*runs)
asyncio.run(main())
'''

async def test_S46_kill_9_of_the_launcher_with_eight_live_sandboxes():
    p = subprocess.Popen([sys.executable, '-c', LAUNCHER], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    uids = list(map(int, p.stdout.readline().split()))
    assert len(uids) == 8 and all(len(of_uid(u)) >= 3 for u in uids)
    assert not any(f'/{u}' in l or f'-{u}-' in l for u in uids for l in sweep())  # they live
    p.kill(); p.wait()
    await until(lambda: sum(map(of_uid, uids), []) == [])  # at once, before anybody sweeps
    swept = [l for l in sweep() if any(l.endswith(f'/{u}') for u in uids)]
    assert len(swept) == 8 and left_of(uids) == {}
    assert not any(l.endswith(f'/{u}') for l in sweep() for u in uids)


# rollouts

REAL = Limits(cpus=2, memory_mb=2048, pids=128, disk_mb=256, seconds=120)

async def play(tmp_path, jobs, engine):
    store = Store.open(str(tmp_path/'calls.db'))
    async with Proxy(engine, store) as proxy: rs = await run_rollouts(jobs, proxy=proxy, store=store, backend='podman', limits=REAL, progress=False, concurrency=2)
    store.close()
    return rs

@pytest.mark.parametrize('name', ['react', 'claude-code'])
async def test_the_oracle_solves_a_task(tmp_path, name):
    if not load(name).installed: pytest.fail(f'{name} is not installed: clawlab harness install {name}')
    r, = await play(tmp_path, [Job(TASKS['test-copy-1-0'], name, group='g')], OracleEngine(TASKS))
    assert (r.outcome, r.reward, r.meta['backend']) == ('ok', 1.0, 'podman') and r.harness_version == load(name).version and not any(c.quarantine for c in r.calls), r.meta

async def test_a_script_that_ends_its_harness_is_graded(tmp_path):
    STEP, = TASKS['test-copy-1-0'].steps
    call = '<tool_call>' + json.dumps({'name': 'bash', 'arguments': {'command': f'{STEP}; kill -9 $PPID'}}) + '</tool_call>'
    r, = await play(tmp_path, [Job(TASKS['test-copy-1-0'], 'react', group='g')], ScriptEngine([call]))
    assert (r.outcome, r.reward) == ('agent_fail', 1.0) and 'signal 9' in r.meta['reason'], r.meta
