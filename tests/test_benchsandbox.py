"""study.benchsandbox: what is counted is what happened."""
import asyncio, glob, os, time
import pytest
from clawlab.launch.sandbox.base import Exec, Limits, probe
from clawlab.records import ClawlabError
from clawlab.study import benchsandbox as B
from clawlab.study.bench import value

WHY = asyncio.run(probe('bwrap'))
bwrap = pytest.mark.skipif(bool(WHY), reason=WHY)
LIMITS = Limits(cpus=2, memory_mb=512, pids=64, disk_mb=32, seconds=60)

async def test_lives_are_all_lived_and_never_more_at_a_time_than_asked():
    now = most = 0
    async def once():
        nonlocal now, most
        now += 1; most = max(most, now); await asyncio.sleep(0); now -= 1
        return .5
    out, wall, mine, whole = await B.lives(once, 7, 3, time.process_time)
    assert out == [.5]*7 and most == 3 and 0 < mine and 0 < whole and wall > 0

@pytest.mark.skipif(os.geteuid() != 0 or not B.keeper.cgroup_base('cpuacct'), reason='not root, or no cgroup v1')
async def test_all_that_was_started_counts_whoever_waits_for_it_and_the_cgroup_goes():
    before = open('/proc/self/cgroup').read()
    with B.counted() as used:
        assert open('/proc/self/cgroup').read() != before
        start = used()
        await B.command('setsid', '-f', 'python3', '-c', 'import time; t = time.process_time\nwhile t() < .3: pass\nopen("/dev/null", "w")')
        end = time.monotonic() + 60
        while used() - start < .3 and time.monotonic() < end: await asyncio.sleep(.02)
        assert used() - start >= .3
    assert open('/proc/self/cgroup').read() == before and not glob.glob(f'/sys/fs/cgroup/*/**/clawlab-bench-{os.getpid()}', recursive=True)

async def test_a_program_that_fails_is_no_start(monkeypatch):
    class Box:
        async def __aenter__(self): return self
        async def __aexit__(self, *_): pass
        async def exec(self, argv): return Exec(1, None, b'', b'no such thing')
    monkeypatch.setattr(B, 'make_sandbox', lambda *a, **kw: Box())
    with pytest.raises(ClawlabError, match='exit code 1'): await B.life('bwrap', LIMITS)
    with pytest.raises(ClawlabError, match='exit code 1'): await B.lives(lambda: B.life('bwrap', LIMITS), 3, 2, time.process_time)
    with pytest.raises(ClawlabError, match='sh: oh no'): await B.command('sh', '-c', 'echo first >&2; echo oh no >&2; exit 3')

@bwrap
async def test_rows_and_goals_and_a_lost_rollout_is_told(monkeypatch):
    said = []; rows, goals = await B.bench_sandbox(['bwrap'], n=4, at_once=2, rollouts_n=6, in_flight=3, say=said.append)
    assert {r['system'] for r in rows} == {'bwrap', 'bwrap alone', *['podman alone']*bool(B.shutil.which('podman'))} and len(goals) == 5 and goals['bwrap: 6 rollouts, 3 at a time, lost']['ok']
    assert value(rows, 'one at a time', 'bwrap', 'start_ms') <= value(rows, 'one at a time', 'bwrap', 'p95_ms')
    real = B.run_rollouts
    async def loses(jobs, **kw): return await real(jobs[1:], **kw)
    monkeypatch.setattr(B, 'run_rollouts', loses)
    rows = await B.rollouts('bwrap', 3, 2, LIMITS, time.process_time, said.append)
    assert value(rows, '3 rollouts, 2 at a time', 'bwrap', 'lost') == 1

async def test_a_backend_that_cannot_be_used_says_why(monkeypatch):
    async def no(b): return 'not today'
    monkeypatch.setattr(B, 'probe', no)
    rows, goals = await B.bench_sandbox(['process'], n=2, rollouts_n=0)
    assert rows[0]['metric'] == 'missing: not today' and not goals
