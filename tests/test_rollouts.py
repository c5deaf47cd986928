"Outcomes, reruns, resume, interrupts; then real harnesses in real sandboxes, killed from outside and from inside."
import asyncio, os, signal
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace as NS
import aiohttp, pytest
from clawlab.records import Call, InputError, SandboxError
from clawlab.launch import rollouts
from clawlab.launch.grading import Score
from clawlab.launch.rollouts import Job, RERUNS, run_rollouts, tally
from clawlab.launch.sandbox.base import Exec, Limits
from clawlab.launch.tasks import load_suite, select
from clawlab.learn.tree import build_tree

TASKS = load_suite('nano')
LIMITS = Limits(cpus=1, memory_mb=512, pids=64, disk_mb=64, seconds=30)

# ---- a laboratory of fakes: what each attempt does is a function of its record -------------------------------------

def ended(**kw): return Exec(**{**dict(code=0, signal=None, stdout=b'', stderr=b'', seconds=.1), **kw})
def call(rid, seq, finish='stop'): return Call(f'{rid}-{seq}', rid, seq, [1], [2], [-.1], [0], finish=finish)

class FakeStore:
    def __init__(self): self.rows, self.kept = {}, {}
    def put_rollout(self, r): self.rows[r.rollout_id] = replace(r, calls=()); f = Future(); f.set_result(None); return f
    def rollout(self, i): return replace(self.rows[i], calls=tuple(self.kept.get(i, ())))
    def rollouts(self, group): return [r for r in self.rows.values() if r.group == group]

class FakeProxy:
    budget = False
    def __init__(self, store, calls): self.store, self.calls, self.open, self.sampling, self.engine, self.turnstile = store, calls, {}, [], NS(max_context=1 << 17), NS(crowded=False)
    async def open_session(self, r, *, sampling, expect_harness):
        self.open[s := f's-{r.rollout_id}'] = r; self.sampling.append(sampling)
        return NS(session_id=s, rollout_id=r.rollout_id, base_path=f'/s/{s}', stats=NS(truncated=self.budget), api_key='KEY-' + r.rollout_id)
    async def listen(self, sock, session_id): pass
    async def close_session(self, session_id):
        r = self.open.pop(session_id)
        self.store.kept[r.rollout_id] = cs = self.calls(r)
        return cs
    async def list_sessions(self, rollout_id): return [dict(session=s) for s, r in self.open.items() if r.rollout_id == rollout_id]

class FakeBox:
    live, most, url, left_out, home, workspace = 0, 0, "http://box", (), "/home/agent", "/workspace"
    def __init__(self, lab, limits, name): self.lab, self.limits, self.name, self.here = lab, limits, name, {}
    async def start(self): FakeBox.live += 1; FakeBox.most = max(FakeBox.most, FakeBox.live); self.up = True
    async def put(self, files): self.here.update(files)
    async def exec(self, argv, env, timeout):
        r = self.lab.store.rows[self.name]
        assert env == {'KEY': 'KEY-' + r.rollout_id} and not any('KEY-' in a for a in argv)
        self.lab.started.append((r.sample, r.attempt)); await asyncio.sleep(0)
        x = self.lab.does(r)
        if asyncio.iscoroutine(x): x = await x
        if isinstance(x, BaseException): raise x
        return x
    async def get(self): return {k: v for k, v in self.here.items() if not k.startswith('~')}
    async def stop(self):
        await asyncio.sleep(0)
        if getattr(self, 'up', False): FakeBox.live -= 1; self.up = False

@pytest.fixture
def lab(monkeypatch):
    lab = NS(store=FakeStore(), does=lambda r: ended(), calls=lambda r: [call(r.rollout_id, 0)], score=lambda t, f: Score(.5), started=[], graded=[])
    lab.proxy = FakeProxy(lab.store, lambda r: lab.calls(r))
    FakeBox.live = FakeBox.most = 0
    harness = lambda name: NS(name=name, version='1.0', absent="", binds=(), fits=lambda window: None, session=dict(expect_harness={}), submission=lambda files, given=(): files, truncated=lambda ex: b'turn limit' in ex.stdout,
        command=lambda say, model, url, key, limits, window, home: (['run', say, url], {'KEY': key}, {'~/.conf': 'x'}))
    async def grade(task, files, *, backend): lab.graded.append(task.task_id); return lab.score(task, files)
    async def fine(backend): return ''
    for k, v in dict(load=harness, probe=fine, grade=grade, make_sandbox=lambda backend, limits, binds, listener, name: FakeBox(lab, limits, name)).items(): monkeypatch.setattr(rollouts, k, v)
    lab.run = lambda jobs, **kw: run_rollouts(jobs, proxy=lab.proxy, store=lab.store, backend='fake', limits=LIMITS, **{'progress': False, **kw})
    return lab

def jobs(n=3, **kw): return [Job(TASKS['test-copy-1-0'], 'h', k, **{'group': 'g', 'checkpoint': 'c', 'seed': 1, **kw}) for k in range(n)]

@pytest.mark.parametrize('how, outcome, rewarded', [
    (ended(), 'ok', True), (ended(code=1), 'agent_fail', True), (ended(code=1, stdout=b'turn limit'), 'truncated', True), (ended(stdout=b'turn limit'), 'truncated', True),
    (ended(code=None, timed_out=True, signal=9), 'timeout', True), (ended(code=None, signal=9, oom=True), 'agent_fail', True), (ended(code=0, oom=True), 'agent_fail', True),
    (ended(code=None, signal=9, killed='inside'), 'agent_fail', True), (ended(code=None, signal=9, killed='outside'), 'infra_fail', False),
    (ended(code=0, killed='outside'), 'infra_fail', False), (SandboxError('node lost'), 'infra_fail', False)])
async def test_outcome_and_reward(lab, how, outcome, rewarded):
    lab.does = lambda r: how
    r, = await lab.run(jobs(1))
    assert (r.outcome, r.reward) == (outcome, .5 if rewarded else None) and len(lab.graded) == rewarded and FakeBox.live == 0
    assert lab.store.rows[r.rollout_id].outcome == outcome and bool(r.dropped_reason) != rewarded
    assert lab.started == [(0, a) for a in range(1 if rewarded else RERUNS+1)] and len(r.calls) == 1

async def test_engine_failures_and_runs_without_a_call_have_no_reward(lab):
    for calls in (lambda r: [], lambda r: [call(r.rollout_id, 0, 'aborted')], lambda r: [call(r.rollout_id, 0), call(r.rollout_id, 1, 'error')]):
        lab.calls = calls
        r, = await lab.run(jobs(1, group=f'g{id(calls)}'))
        assert r.outcome == 'infra_fail' and r.reward is None
    for i, calls in enumerate(['error stop', 'stop aborted', 'stop error aborted']):
        lab.calls = lambda r: [call(r.rollout_id, k, f) for k, f in enumerate(calls.split())][::-1]
        assert (await lab.run(jobs(1, group=f'h{i}')))[0].outcome == ('infra_fail' if i == 2 else 'ok')

async def test_the_call_budget_truncates(lab):
    lab.proxy.budget, lab.does = True, lambda r: ended(code=1)
    assert (await lab.run(jobs(1)))[0].outcome == 'truncated'

async def test_a_broken_verifier_is_no_zero(lab):
    lab.score = lambda t, f: Score(None, error='boom')
    r, = await lab.run(jobs(1))
    assert (r.outcome, r.reward, r.dropped_reason, r.meta['ended']) == ('grader_fail', None, 'boom', 'ok') and len(lab.started) == 1

async def test_only_the_infrastructure_is_rerun_and_each_attempt_is_on_record(lab):
    lab.does = lambda r: ended(code=None, signal=9, killed='outside') if r.sample == 1 and r.attempt < 2 else ended(code=1)
    rs = await lab.run(jobs(3))
    assert [(r.sample, r.attempt, r.outcome) for r in rs] == [(0, 0, 'agent_fail'), (1, 2, 'agent_fail'), (2, 0, 'agent_fail')]
    of = sorted((r for r in lab.store.rows.values() if r.sample == 1), key=lambda r: r.attempt)
    assert [r.outcome for r in of] == ['infra_fail']*2 + ['agent_fail'] and len({r.rollout_id for r in of}) == 3 and len({r.seed for r in of}) == 1
    assert all(len(lab.store.kept[r.rollout_id]) == 1 for r in of)
    assert tally(rs) == dict(n=3, reward=.5, dropped=0, outcomes={'agent_fail': 3})

async def test_samples_differ_in_seed_and_records_carry_the_plan(lab):
    rs = await lab.run(jobs(4, tag='t'))
    assert len({r.seed for r in rs}) == 4 and all(0 <= r.seed < 2**31 for r in rs)
    assert {(r.group, r.checkpoint, r.split, r.harness, r.harness_version, r.meta['tag']) for r in rs} == {('g', 'c', 'test', 'h', '1.0', 't')}
    assert [r.seed for r in rs] == [r.seed for r in await lab.run(jobs(4, tag='t'))]

async def test_concurrency_is_used_and_kept(lab):
    gate = asyncio.Event()
    async def wait():
        if FakeBox.live == 3: gate.set()
        await asyncio.wait_for(gate.wait(), 5)
        return ended()
    lab.does = lambda r: wait()
    await lab.run(jobs(9), concurrency=3)
    assert FakeBox.most == 3 and len(lab.started) == 9

async def test_a_crowded_engine_gets_no_new_sandboxes(lab):
    "Back-pressure: what runs goes on, nothing starts until the line at the engine is shorter again."
    async def first(r): lab.proxy.turnstile.crowded = True; await asyncio.sleep(.05); return ended()
    lab.does = first
    run = asyncio.create_task(lab.run(jobs(6), concurrency=2))
    while len(lab.graded) < 2: await asyncio.sleep(.01)
    await asyncio.sleep(.3); assert len(lab.started) == 2 and FakeBox.live == 0
    lab.does = lambda r: ended(); lab.proxy.turnstile.crowded = False
    assert [r.outcome for r in await run] == ['ok']*6

async def test_resume_plays_only_what_is_missing(lab):
    first = await lab.run(jobs(2))
    lab.started.clear()
    both = await lab.run(jobs(4))
    assert [s for s, _ in lab.started] == [2, 3] and [r.rollout_id for r in both[:2]] == [r.rollout_id for r in first] and all(r.calls for r in both)
    await lab.run(jobs(4, group='other'))
    assert len(lab.started) == 6

async def test_calls_stay_in_the_store_where_nobody_needs_them(lab):
    rs = await lab.run(jobs(3), calls=False)
    assert [r.calls for r in rs] == [()]*3 and all(lab.store.rollout(r.rollout_id).calls for r in rs) and [r.reward for r in rs] == [.5]*3
    assert [len(r.calls) for r in await lab.run(jobs(3))] == [1]*3   # on record, read back

async def test_reruns_are_counted_and_interruptions_are_not(lab):
    for k in range(5): lab.store.put_rollout(rollouts.rollout_of(jobs(1)[0], k))   # launchers that were killed
    lab.does = lambda r: ended(code=None, signal=9, killed='outside')
    r, = await lab.run(jobs(1))
    assert (r.outcome, r.reward, r.attempt) == ('infra_fail', None, 8) and [a for _, a in lab.started] == [5, 6, 7, 8]   # once, and again RERUNS times
    assert (await lab.run(jobs(1)))[0].attempt == 8 and len(lab.started) == 4   # counted missing from then on

async def test_an_interrupt_keeps_what_is_done_and_stops_the_rest(lab):
    started, never = asyncio.Event(), asyncio.Event()
    async def hang(): started.set(); await never.wait()
    lab.does = lambda r: hang() if r.sample == 2 else ended()
    run = asyncio.create_task(lab.run(jobs(4), concurrency=1))
    await asyncio.wait_for(started.wait(), 5)
    run.cancel()
    with pytest.raises(asyncio.CancelledError): await run
    assert FakeBox.live == 0 and not lab.proxy.open
    assert {r.sample: r.outcome for r in lab.store.rows.values()} == {0: 'ok', 1: 'ok', 2: None}
    lab.does = lambda r: ended(); lab.started.clear()
    rs = await lab.run(jobs(4))
    assert [r.outcome for r in rs] == ['ok']*4 and sorted(lab.started) == [(2, 1), (3, 0)]  # a new id: calls of two attempts never mix
    assert [r.dropped_reason for r in lab.store.rows.values() if r.outcome == 'infra_fail'] == ['interrupted']

async def test_a_fault_of_ours_stops_everything_and_is_not_swallowed(lab):
    lab.does = lambda r: RuntimeError('bug') if r.sample == 1 else ended()
    with pytest.raises(RuntimeError, match='bug'): await lab.run(jobs(6), concurrency=2)
    assert FakeBox.live == 0 and not lab.proxy.open

async def test_the_key_is_in_no_record(lab):
    lab.does = lambda r: ended(stdout=f'key KEY-{r.rollout_id}'.encode(), stderr=b'x'*5000 + f'KEY-{r.rollout_id}'.encode())
    r, = await lab.run(jobs(1))
    assert 'KEY-' not in str(lab.store.rows) and r.meta['exit']['stdout'] == 'key ***' and len(r.meta['exit']['stderr']) == 2000

async def test_task_limits_only_tighten(lab):
    t = replace(TASKS['test-copy-1-0'], limits={'seconds': 5, 'memory_mb': 10**6})
    assert rollouts._limits(LIMITS, t) == replace(LIMITS, seconds=5)
    assert rollouts._limits(replace(LIMITS, memory_mb=None), t).memory_mb == 10**6

async def test_bad_input_is_one_line_before_anything_starts(lab, monkeypatch):
    def load(name):
        if name == 'none': raise InputError('no harness none')
        return NS(name=name, absent='harness h is not installed: clawlab harness install h')
    async def broken(backend): return 'no bubblewrap'
    with pytest.raises(InputError, match='there twice'): await lab.run(jobs(1) + jobs(1))
    monkeypatch.setattr(rollouts, 'probe', broken)
    with pytest.raises(InputError, match='sandbox fake: no bubblewrap'): await lab.run(jobs(1))
    monkeypatch.setattr(rollouts, 'load', load)
    with pytest.raises(InputError, match='harness h is not installed: clawlab harness install h'): await lab.run(jobs(1))
    with pytest.raises(InputError, match='no harness none'): await lab.run([replace(j, harness='none') for j in jobs(1)])
    assert not lab.started and not lab.store.rows
    assert await lab.run([]) == []

# ---- the real thing: proxy, store, sandboxes; a harness of twenty lines ---------------------------------------------

from pathlib import Path
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.launch.sandbox.base import probe

LOOP = r'''
import json, os, subprocess, sys, urllib.request
ms = [{'role': 'user', 'content': sys.argv[2]}]
tools = [{'type': 'function', 'function': {'name': 'bash', 'description': 'Run a command.', 'parameters': {'type': 'object', 'properties': {'command': {'type': 'string'}}}}}]
while True:
    body = json.dumps({'model': 'm', 'messages': ms, 'tools': tools}).encode()
    ask = urllib.request.Request(sys.argv[1] + '/v1/chat/completions', body, {'content-type': 'application/json', 'authorization': 'Bearer ' + os.environ['KEY']})
    m = json.load(urllib.request.urlopen(ask))['choices'][0]['message']
    ms.append(m)
    if not m.get('tool_calls'): break
    for c in m['tool_calls']:
        p = subprocess.run(['/bin/sh', '-c', json.loads(c['function']['arguments'])['command']], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        ms.append({'role': 'tool', 'tool_call_id': c['id'], 'content': p.stdout + p.stderr})
'''
def loop(name): return NS(name=name, version='0', absent="", binds=(), fits=lambda window: None, session=dict(expect_harness={}), submission=lambda files, given=(): files, truncated=lambda ex: False,
    command=lambda say, model, url, key, limits, window, home: (['/usr/bin/python3', '-S', '-c', LOOP, url, say], {'KEY': key}, {}))

def sh(command): import json; return '<tool_call>' + json.dumps({'name': 'bash', 'arguments': {'command': command}}) + '</tool_call>'

NO_BWRAP = asyncio.run(probe('bwrap'))
bwrap = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
backends = pytest.mark.parametrize('backend', ['process', pytest.param('bwrap', marks=bwrap)])

class Held(ScriptEngine):
    "Waits before its reply number `at` until it is let go."
    def __init__(self, replies, at): super().__init__(replies); self.at, self.n, self.here, self.go = at, 0, asyncio.Event(), asyncio.Event()
    async def generate(self, *a):
        self.n += 1
        if self.n == self.at: self.here.set(); await self.go.wait()
        return await super().generate(*a)

@pytest.fixture
def bench(monkeypatch, tmp_path):
    monkeypatch.setattr(rollouts, 'load', loop)
    async def play(jobs, engine, backend, limits=LIMITS, store=None, then=None, **kw):
        store = store or Store.open(str(tmp_path/'calls.db'))
        async with Proxy(engine, store) as proxy:
            run = asyncio.create_task(run_rollouts(jobs, proxy=proxy, store=store, backend=backend, limits=limits, progress=False, **kw))
            try:
                if then: await then(run)
                return await run, store
            finally: run.cancel()
    return play

def copy_job(k=0, **kw): return Job(TASKS['test-copy-1-0'], 'loop', k, **{'group': 'g', 'seed': 1, **kw})
STEP, = TASKS['test-copy-1-0'].steps

@backends
async def test_a_solved_task(bench, backend):
    (r,), store = await bench([copy_job()], ScriptEngine([sh(STEP), 'done']), backend)
    assert (r.outcome, r.reward, r.exit_code, len(r.calls)) == ('ok', 1.0, 0, 2), r.meta
    assert store.rollout(r.rollout_id).reward == 1 and r.calls[1].parent_id == r.calls[0].call_id
    assert 'KEY' not in str(r.meta)

@backends
async def test_an_agent_that_kills_its_parent_is_graded(bench, backend):
    "First the work, then the parent: the work counts. Without the work: 0, and on record."
    (r,), _ = await bench([copy_job()], ScriptEngine([sh(f'{STEP}; kill -9 $PPID')]), backend)
    assert (r.outcome, r.reward, r.exit_code) == ('agent_fail', 1.0, None) and 'signal 9' in r.meta['reason'], r.meta
    (r,), _ = await bench([copy_job(1)], ScriptEngine([sh('kill -9 $PPID')]), backend)
    assert (r.outcome, r.reward, r.attempt) == ('agent_fail', 0.0, 0)

@bwrap
@pytest.mark.parametrize('how', ['kill -9 -1', 'kill -TERM -1', 'kill -9 2', 'kill -9 1; kill -9 $PPID', 'python3 -c "import os,signal; os.kill(os.getppid(), signal.SIGINT); os.kill(os.getppid(), 9)"',
                                 'python3 -c "import os; [os.fork() for _ in range(20)]"; kill -9 $PPID', 'head -c 1G /dev/zero > f; kill -9 $PPID'])
async def test_no_way_of_ending_itself_loses_the_reward(bench, how):
    (r,), _ = await bench([copy_job()], ScriptEngine([sh(how), 'done']), 'bwrap')
    assert r.outcome in ('agent_fail', 'ok', 'timeout') and r.reward is not None, (r.outcome, r.meta)

OUTSIDE, LEFT = f'killed-from-outside-{os.getpid()}', f'left-behind-{os.getpid()}'

def inside(marker: str) -> list[int]:
    "Host pids of harness processes with this instruction."
    def line(p):
        try: return (p/'cmdline').read_bytes().split(b'\0')
        except OSError: return []
    return [int(p.name) for p in Path('/proc').iterdir() if p.name.isdigit() and (l := line(p))[:3] == [b'/usr/bin/python3', b'-S', b'-c'] and marker.encode() in l]

@bwrap
@pytest.mark.parametrize('sig', [9, 15])
async def test_a_harness_killed_from_outside_has_no_reward_and_is_rerun(bench, sig):
    engine = Held([sh(STEP), 'done'], at=2)
    async def kill(run):
        await asyncio.wait_for(engine.here.wait(), 20)
        pid, = inside(OUTSIDE)
        os.kill(pid, sig); engine.go.set()
    job = Job(replace(TASKS['test-copy-1-0'], instruction=OUTSIDE), 'loop', group='g')
    (r,), store = await bench([job], engine, 'bwrap', then=kill)
    first, second = sorted(store.rollouts(group='g'), key=lambda r: r.attempt)
    assert (first.outcome, first.reward, first.meta['exit']['killed']) == ('infra_fail', None, 'outside')
    assert (second.outcome, second.reward, second.rollout_id) == ('ok', 1.0, r.rollout_id)

@backends
async def test_a_deadline_is_scored(bench, backend):
    (r,), _ = await bench([copy_job()], ScriptEngine([sh(f'{STEP}; sleep 60')]), backend, limits=replace(LIMITS, seconds=2.5))
    assert (r.outcome, r.reward) == ('timeout', 1.0)

@backends
async def test_an_engine_that_fails_is_nobodys_zero(bench, backend):
    (r,), store = await bench([copy_job()], ScriptEngine([sh(STEP), {'error': 'out of order'}]), backend)
    assert (r.outcome, r.reward, r.attempt, r.dropped_reason) == ('infra_fail', None, RERUNS, 'the engine failed')
    assert len(store.rollouts(group='g', outcome='infra_fail')) == RERUNS + 1

@bwrap
async def test_an_interrupt_leaves_no_sandbox(bench, tmp_path):
    engine = Held([sh(STEP), 'done'], at=4)
    async def stop(run):
        await asyncio.wait_for(engine.here.wait(), 20)
        assert inside(LEFT)
        run.cancel()
    jobs = [Job(replace(TASKS['test-copy-1-0'], instruction=LEFT), 'loop', k, group='g') for k in range(3)]
    store = Store.open(str(tmp_path/'x.db'))
    with pytest.raises(asyncio.CancelledError): await bench(jobs, engine, 'bwrap', store=store, then=stop, concurrency=1)
    assert not inside(LEFT) and sorted(str(r.outcome) for r in store.rollouts(group='g')) == ['None', 'ok']
    rs, _ = await bench(jobs, ScriptEngine([sh(STEP), 'done']), 'bwrap', store=store)
    assert [(r.outcome, r.attempt) for r in rs] == [('ok', 0), ('ok', 1), ('ok', 0)]
    store.close()

async def test_the_key_of_an_interrupted_attempt_opens_nothing_after_a_resume(bench, tmp_path):
    "A harness that outlived its launcher (`kill -9` leaves the session in the store) must not write into a record that is closed."
    store, job = Store.open(str(tmp_path/'calls.db')), copy_job()
    async with Proxy(ScriptEngine([]), store) as dead: s = await dead.open_session(rollouts.rollout_of(job, 0))
    engine = Held([sh(STEP), 'done'], at=1)
    async with Proxy(engine, store) as proxy, aiohttp.ClientSession() as http:
        async def status():
            async with http.post(f'http://127.0.0.1:{proxy.port}{s.base_path}/v1/chat/completions', json={}, headers={'x-api-key': s.api_key}) as r: return r.status
        assert await status() == 400   # before: the key is good, the request isn't
        run = asyncio.create_task(run_rollouts([job], proxy=proxy, store=store, backend='process', limits=LIMITS, progress=False))
        await asyncio.wait_for(engine.here.wait(), 20)
        assert await status() == 401
        engine.go.set(); r, = await run
    assert (r.attempt, r.outcome, store.rollout(s.rollout_id).dropped_reason, store.rollout(s.rollout_id).calls) == (1, 'ok', 'interrupted', ())
    store.close()

# ---- real harnesses --------------------------------------------------------------------------------------------------

from clawlab.capture.engines.oracle import OracleEngine
from clawlab.launch.harness import load

def real(name):
    h = load(name)
    return pytest.param(name, marks=[bwrap, pytest.mark.harness, pytest.mark.skipif(not h.installed, reason=f'{name} is not installed: clawlab harness install {name}')])
HARNESSES = pytest.mark.parametrize('name', [real(n) for n in ('react', 'claude-code', 'mini-swe-agent')])
REAL = Limits(cpus=2, memory_mb=2048, pids=128, disk_mb=256, seconds=60)

async def play(tmp_path, jobs, engine, then=None, limits=REAL, **kw):
    store = Store.open(str(tmp_path/'calls.db'))
    async with Proxy(engine, store) as proxy:
        run = asyncio.create_task(run_rollouts(jobs, proxy=proxy, store=store, backend='bwrap', limits=limits, progress=False, concurrency=2, **kw))
        try:
            if then: await then()
            return await run, store
        finally: run.cancel()

def host_pids(exe: str, instruction: str) -> list[int]:
    "Processes that run this program with this instruction."
    def of(p):
        try: return Path(os.readlink(p/'exe')).name == exe and instruction.encode() in (p/'cmdline').read_bytes().split(b'\0')
        except OSError: return False
    return [int(p.name) for p in Path('/proc').iterdir() if p.name.isdigit() and of(p)]

@bwrap
async def test_react_forks_begins_a_path_with_every_call(tmp_path):
    t = max(TASKS.values(), key=lambda t: (len(t.steps), t.task_id))
    (r,), _ = await play(tmp_path, [Job(t, 'react:forks', group='g')], OracleEngine(TASKS, think='Hm.'))
    tree = build_tree(r.calls)
    assert r.reward == 1 and len(r.calls) == len(t.steps) + 1 >= 3
    assert len(tree.leaves) == len(r.calls) and tree.stats['lineage_leaves'] == 1 and tree.stats['roots'] == 1 and tree.stats['drift'] == 0
    assert tree.stats['trained'] == sum(len(c.output_ids) for c in r.calls)

@HARNESSES
async def test_the_oracle_solves_a_task_of_each_level(tmp_path, name):
    jobs = [Job(t, name, group='g') for t in select(TASKS, split='test', n=3, seed=4)]
    rs, store = await play(tmp_path, jobs, OracleEngine(TASKS))
    assert {j.task.level for j in jobs} == {1, 2, 3} and len({j.task.family for j in jobs}) == 3
    for r in rs: assert (r.outcome, r.reward, len({c.role for c in r.calls})) == ('ok', 1.0, 1) and r.harness_version == load(name).version, r.meta
    assert not any(c.quarantine for r in rs for c in r.calls)

@bwrap
@pytest.mark.heavy
@pytest.mark.harness
@pytest.mark.skipif(not load('openclaw').installed, reason='openclaw is not installed: clawlab harness install openclaw')
async def test_the_oracle_solves_a_task_in_openclaw(tmp_path):
    "Twenty processor seconds, most of them until the first call; and it counts on two gigabytes."
    (r,), _ = await play(tmp_path, [Job(max(TASKS.values(), key=lambda t: (len(t.steps), t.task_id)), 'openclaw', group='g')], OracleEngine(TASKS), limits=replace(REAL, seconds=280))
    assert (r.outcome, r.reward, len(r.calls)) == ('ok', 1.0, 4) and not any(c.quarantine for c in r.calls), r.meta

@HARNESSES
async def test_the_habit_scores_low(tmp_path, name):
    jobs = [Job(t, name, group='g') for t in select(TASKS, split='test', n=2, seed=4)]
    rs, _ = await play(tmp_path, jobs, OracleEngine(TASKS, wrong=1.))
    assert all(r.outcome == 'ok' and r.reward < .75 for r in rs), [(r.outcome, r.reward) for r in rs]

KILL_PARENT = f'{STEP}; kill -9 $PPID; sleep 1'

@HARNESSES
async def test_an_agent_that_ends_its_harness_is_graded(tmp_path, name):
    "The task's step is done, then the shell ends the program that started it."
    engine = OracleEngine({t: replace(x, steps=(KILL_PARENT,)) for t, x in TASKS.items()})
    (r,), _ = await play(tmp_path, [Job(TASKS['test-copy-1-0'], name, group='g')], engine)
    assert (r.outcome, r.reward, r.exit_code) == ('agent_fail', 1.0, None), (r.outcome, r.meta)

@HARNESSES
async def test_the_turn_limit_truncates_and_is_graded(tmp_path, name):
    t = TASKS['test-copy-1-0']
    engine = OracleEngine({t.task_id: replace(t, steps=t.steps + ('true',)*30)})
    (r,), _ = await play(tmp_path, [Job(t, name, group='g')], engine)
    assert (r.outcome, r.reward, len(r.calls)) == ('truncated', 1.0, load(name).spec.turns), (r.outcome, r.meta)

@bwrap
@pytest.mark.harness
@pytest.mark.skipif(not load('claude-code').installed, reason='claude-code is not installed: clawlab harness install claude-code')
async def test_claude_killed_from_outside_in_the_middle(tmp_path):
    "No reward, on record, and run once more."
    name, exe = 'claude-code', 'claude'
    engine, here, go, n, mark = OracleEngine(TASKS), asyncio.Event(), asyncio.Event(), [], f'Shelve it, says {os.getpid()}.'
    generate = engine.generate
    async def held(*a):
        n.append(1)
        if len(n) == 2: here.set(); await go.wait()
        return await generate(*a)
    engine.generate = held
    async def kill():
        await asyncio.wait_for(here.wait(), 40)
        pid, = host_pids(exe, mark)
        os.kill(pid, signal.SIGKILL); go.set()
    (r,), store = await play(tmp_path, [Job(replace(TASKS['test-shelve-3-0'], instruction=mark), name, group='g')], engine, then=kill)
    first, second = sorted(store.rollouts(group='g'), key=lambda r: r.attempt)
    assert (first.outcome, first.reward, first.exit_code, first.meta['exit']['killed']) == ('infra_fail', None, None, 'outside')
    assert (second.outcome, second.reward, second.attempt) == ('ok', 1.0, 1) and r.rollout_id == second.rollout_id
    assert store.calls(first.rollout_id) and not host_pids(exe, mark)
