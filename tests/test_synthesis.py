"Task synthesis: every refusal is reached, a proposer may fail in every way an endpoint can, and a killed run ends with the suite of one that was left alone."
import asyncio, json, os, random, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
import pytest
from aiohttp import web
from clawlab.cli import main
from clawlab.records import EngineError, InputError, Rollout
from clawlab.capture.engines.oracle import OracleEngine
from clawlab.launch import endpoint, synthesis
from clawlab.launch.endpoint import Endpoint
from clawlab.launch.grading import check_suite
from clawlab.launch.propose import CATEGORIES, Draft, Idea, ModelProposer, Refused, seed_of
from clawlab.launch.sandbox.base import probe
from clawlab.launch.synthesis import Lab, Ledger, Plan, Synthesis, built, leaks, mentioned, synthesize, tricks, unfit
from clawlab.launch.tasks import load_suite, overlap
from clawlab.launch.templates import FAULTS, IDEA_FAULTS, TASK_FAULTS, TEMPLATES, TemplateProposer

ROOT, NO_BWRAP = Path(__file__).parent.parent, asyncio.run(probe('bwrap'))
bwrap = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
IDEA = dict(idea='A clerk wants the totals of three tills in one file, by place.', family='totals', category='analysis-reason', level=2)
quick = dict(backend='process', concurrency=2, progress=False)

def drafted(seed=0, family='due', **kw) -> Draft:
    d = {k: v for k, v in TEMPLATES[family][1](random.Random(seed)).items() if k != 'level'}
    return Draft(**{**d, **kw})
def task(seed=0, family='due', **kw): return built(drafted(seed, family, **kw), Idea(**IDEA), 't')
def reason_of(f, *args) -> str:
    with pytest.raises(Refused) as e: f(*args)
    return e.value.reason

# The templates

async def test_every_template_writes_sound_tasks_that_are_always_the_same():
    assert {c for c, _ in TEMPLATES.values()} == set(CATEGORIES) and len(TEMPLATES) >= 12
    tasks = [replace(task(s, f), task_id=f'{f}-{s}') for f in TEMPLATES for s in (0, 1, 2)]
    assert await check_suite(tasks, 'process', progress=False) == {}
    assert all(drafted(5, f) == drafted(5, f) != drafted(6, f) for f in TEMPLATES)

def test_the_seeds_of_a_run_are_its_own_and_no_category_is_missing():
    assert seed_of(0, 3) == seed_of(0, 3) != seed_of(1, 3) and seed_of(0, 3, 1) != seed_of(0, 3)
    assert {seed_of(7, i).category for i in range(6)} == {seed_of(7, i).category for i in range(6, 12)} == set(CATEGORIES)

# Every refusal

async def test_a_longer_run_keeps_what_a_shorter_one_had(tmp_path):
    plan = Plan(k=1, wrong=0, wave=3, quota=1)
    async def run(n): await synthesize(tmp_path, n, TemplateProposer(0), plan, **quick); return load_suite(tmp_path)
    two = await run(2); calls = (tmp_path/'ledger.jsonl').read_bytes()
    five = await run(5); assert (tmp_path/'ledger.jsonl').read_bytes().startswith(calls) and len(five) == 5
    assert {k: five[k] for k in two} == two and {t.split for t in five.values()} == {'train', 'validation', 'test'}
    assert await run(2) == two and not (tmp_path/'validation.jsonl').exists()

ORDER = (*TASK_FAULTS, 'a repetition', *(f for f in IDEA_FAULTS if f != 'a repetition'))  # what is repeated must be a good idea

async def test_every_fault_is_refused_with_its_reason_and_repaired_where_it_can_be(tmp_path):
    s = await synthesize(tmp_path, len(ORDER), TemplateProposer(1, ORDER), Plan(k=1, wrong=0, refine=1, wave=len(ORDER), quota=1), most=1, **quick)
    first = {f: s.ledger.refusal(i, 0) for i, f in enumerate(ORDER)}
    assert {f: e and e['reason'] for f, e in first.items()} == {f: FAULTS[f][0] for f in ORDER}, first
    assert {f for i, f in enumerate(ORDER) if s.ledger.passed(i)} == {f for f in ORDER if FAULTS[f][1]}
    d = s.summary()
    assert sum(d['repaired'].values()) == d['tasks'] == sum(FAULTS[f][1] for f in ORDER) and d['refused'] == {'unsafe': 1, 'unsolvable': 1}
    assert all(a - sum(lost.values()) == b for f in ('funnel', 'versions') for (_, a, _), (_, b, lost) in zip(d[f], d[f][1:])) and d['funnel'][-1][1] == d['versions'][-1][1] == d['tasks']
    assert d['funnel'][0][1] == len(ORDER) == d['versions'][0][1] - len(ORDER)
    tasks = load_suite(tmp_path)
    assert len(tasks) == d['tasks'] and all(overlap([t], [u for u in tasks.values() if u is not t]) == 0 for t in tasks.values())
    assert all(t.source['format'] == 'synthesized' for t in tasks.values())
    told = {synthesis.REASONS[r] for r in d['refusals']}
    from clawlab.study.synthcommands import report
    page = report(s)
    assert all(t in page for t in told) and '<pre>' in page

@pytest.mark.parametrize('least,fate', [(1, 'hard'), (0, 'kept')])
async def test_what_only_the_reference_solves_is_hard(tmp_path, least, fate):
    s = await synthesize(tmp_path, 1, TemplateProposer(0), Plan(k=2, wrong=1, least=least, refine=0, wave=1), most=1, **quick)
    if fate == 'hard': assert s.ledger.refusal(0, 0)['reason'] == 'hard' and '0 of 2' in s.ledger.refusal(0, 0)['detail'] and not (tmp_path/'train.jsonl').exists()
    else: (t,) = load_suite(tmp_path).values(); assert t.source['label'] == 'hard' and t.source['pass_rate'] == 0

def test_a_family_or_category_has_its_share(tmp_path):
    s = Synthesis(tmp_path, 2, TemplateProposer(0), Plan(quota=.01), None)
    async def ideas():
        for i in range(12): await s._propose(i, 0); s._prune(i, 0)
    asyncio.run(ideas())
    passed = [s.idea(i, 0) for i in range(12) if not s.ledger.refusal(i, 0)]
    assert len(passed) == 6 and {i.category for i in passed} == set(CATEGORIES) and {s.ledger.refusal(i, 0)['reason'] for i in range(6, 12)} == {'quota'}

async def test_what_is_in_another_suite_is_refused(tmp_path):
    p, s = TemplateProposer(0), seed_of(0, 0)
    there = replace(built(await p.build(s, idea := await p.propose(s)), idea, 'there'), instruction='Something else is asked here, in other words, of the same files.')
    got = await synthesize(tmp_path, 1, p, Plan(k=1, refine=0, wave=1), most=1, against=[there], **quick)
    assert got.ledger.refusal(0, 0)['reason'] == 'duplicate' and 'workspace' in got.ledger.refusal(0, 0)['detail']

@pytest.mark.parametrize('text,reason', [('Sort it.', 'unclear'), ('Put the names from [your file] into a list for the others in the team.', 'unclear'), ('Send the summary of all the notes with curl to my server in the office.', 'unsafe'),
                                         ('Copy what you find in /etc/passwd into users.txt, one name a line, sorted.', 'unsafe'), ('Read the page at https://news.example and write what is new into news.txt.', 'unsafe')])
def test_unfit_ideas(text, reason): assert reason_of(unfit, text) == reason

@pytest.mark.parametrize('text', ['In upload.ini, change the port of the section cache to 4711. Nothing else may change.', 'Rename the function download_all to fetch_all in the files under src/usr/etc.'])
def test_ordinary_ideas_are_not_unsafe(text): unfit(text)

@pytest.mark.parametrize('kw,reason', [(dict(files={'a/../../b': 'x'}), 'invalid'), (dict(files={'.git/HEAD': 'x'}), 'invalid'), (dict(steps=['echo \0']), 'invalid'), (dict(steps=['x'*16_000]*2), 'invalid'),
    (dict(verify='def verify(w, expect) return 1'), 'verifier'), (dict(verify='def check(w, expect): return 1'), 'verifier'), (dict(verify='def verify(w): return 1'), 'verifier'), (dict(verify='x = ' + '('*5000), 'verifier'),
    (dict(files={'a': 'x'*(9 << 20)}), 'environment'), (dict(files={'notes.md': 'hint: sort jobs.txt | head -3 > due.txt'}, steps=['sort  jobs.txt | head -3 > due.txt']), 'leak'), (dict(files={'t.py': 'def verify(w, expect):\n    return 1.0\n'}), 'leak')])
def test_drafts_that_are_no_tasks(kw, reason): assert reason_of(lambda: task(**kw)) == reason

def test_drafts_that_are_no_text():
    for bad in (dict(files={'a': '\ud800'}), dict(expect={'x': '\ud800'}), dict(expect={'x': float('nan')}), dict(steps=[])):
        with pytest.raises(ValueError): drafted(**bad)

async def test_a_source_is_never_run_outside_a_sandbox(tmp_path):
    flag = tmp_path/'run'; src = f'open({str(flag)!r}, "w")\ndef verify(w, expect): return 1.0'
    assert leaks(drafted(verify=src)) == '' and task(verify=src).expect['verify'] == src and not flag.exists()

def test_the_trivial_agent_uses_names_only():
    t = replace(task(), instruction='Sort jobs.txt (see notes/old.md) into out/due.txt; e.g. like last year. Then read /etc/x and ../y.')
    assert mentioned(t) == ['jobs.txt', 'notes/old.md', 'out/due.txt'] and set(tricks(t)) == {'touch', 'echo', 'pour'}
    assert tricks(replace(t, instruction='Do what is to be done here.')) == {'nothing': 'true'}
    assert 'jobs.txt' not in tricks(t)['pour'].split(';')[0]

HOSTILE = {'leaves': (dict(verify='import os\ndef verify(w, e): os._exit(0)'), 'verifier'), 'forges': (dict(verify='import os\ndef verify(w, e):\n for f in range(3, 20):\n  try: os.write(f, b"1.0")\n  except OSError: pass\n return 1.0'), 'verifier'),
           'recursion': (dict(verify='def verify(w, e): return verify(w, e)'), 'verifier'), 'more than all': (dict(verify='def verify(w, e): return 2'), 'verifier'), 'kills': (dict(steps=['kill -9 -1', 'true']), 'unsolvable'), 'habit is right': (dict(habit=drafted(1).steps), 'lenient'),
           'names': (dict(files={**drafted(1).files, '-rf': 'x', 'a\nb': 'y', "it's $(id)": 'q', 'solution/é': 's'}), None)}
@bwrap
@pytest.mark.parametrize('what', HOSTILE)
async def test_what_a_model_writes_ends_in_a_reason(what):
    kw, reason = HOSTILE[what]
    try: assert await synthesis.sound(task(1, **kw), 'bwrap') == reason
    except Refused as e: assert e.reason == reason, e

@pytest.mark.parametrize('kw,engine,reason', [(dict(solver='idle'), lambda ts: OracleEngine({k: replace(t, steps=('true',), habit=()) for k, t in ts.items()}), 'hard'), (dict(weak='wise'), OracleEngine, 'trivial'), (dict(solver='wise', weak='none'), OracleEngine, None)])
async def test_any_engine_may_be_the_solver_or_the_one_that_must_not_solve_it(tmp_path, kw, engine, reason):
    plan = Plan(k=2, wrong=0, refine=0, wave=1, **kw)
    s = await synthesize(tmp_path, 1, TemplateProposer(0), plan, most=1, engine=lambda name, ts: engine(dict(ts)), **quick)
    assert (s.ledger.refusal(0, 0) or {}).get('reason') == reason and (not reason or plan.solver in s.ledger.refusal(0, 0)['detail'] or plan.weak in s.ledger.refusal(0, 0)['detail'])
    assert reason or s.ledger.passed(0)['rate'] == 1 and 'weak' not in s.ledger.passed(0)

async def test_a_failure_of_the_laboratory_is_no_fault_of_the_task():
    lab = Lab(None, 'process')
    def ran(outcome, why='', reward=None): return [Rollout('r', 't', 'react', outcome='ok', reward=1.), Rollout('r', 't', 'react', outcome=outcome, dropped_reason=why, reward=reward)]
    assert await lab.scores(ran('timeout', reward=0.)) == [1, 0]
    with pytest.raises(EngineError, match='the engine failed'): await lab.scores(ran('infra_fail', 'the engine failed'))
    for outcome, reason in (('grader_fail', 'verifier'), ('infra_fail', 'environment')):
        with pytest.raises(Refused) as e: await lab.scores(ran(outcome, 'sandbox: no room'))
        assert e.value.reason == reason
    with pytest.raises(InputError, match='unknown sandbox'): await Lab(None, 'chroot').scores(ran('infra_fail', 'x'))

# The ledger

def test_a_ledger_drops_what_was_cut_off_and_refuses_what_does_not_belong(tmp_path):
    f = tmp_path/'ledger.jsonl'; l = Ledger(f, Plan()); l.add(3, 0, 'propose', idea=IDEA)
    with pytest.raises(InputError, match='another synthesis is working'): Ledger(f, Plan())
    l.close(); whole = f.read_bytes()
    for cut in range(len(whole) - 1, whole.index(b'\n'), -7):
        f.write_bytes(whole[:cut]); (l := Ledger(f, Plan())).close()
        assert l.indices() == [] and f.read_bytes() == whole[:whole.index(b'\n') + 1]
    for changed, what in ((Plan(run=1), 'run 0, not 1'), (Plan(refine=0), 'refine 2, not 0')):
        with pytest.raises(InputError, match=what): Ledger(f, changed)
    for line in (b'{"i": 1}\n', b'[]\n', b'\xff\n'):
        f.write_bytes(whole + line)
        with pytest.raises(InputError, match='ledger.jsonl:3: not a line of a ledger'): Ledger(f, Plan())
    f.write_bytes(whole); Ledger(f, Plan()).close()   # a refusal leaves no lock behind

# The endpoint

class Server:
    "A chat endpoint that answers from a list; the last answer stays."
    def __init__(self, *script): self.script, self.seen, self.keys = list(script), [], []
    async def __aenter__(self):
        app = web.Application(); app.router.add_post('/v1/chat/completions', self.chat); app.router.add_post('/elsewhere', self.chat)
        self.runner = web.AppRunner(app); await self.runner.setup(); await web.TCPSite(self.runner, '127.0.0.1', 0).start()
        self.url = f'http://127.0.0.1:{self.runner.addresses[0][1]}/v1'; return self
    async def __aexit__(self, *_): await self.runner.cleanup()
    async def chat(self, request):
        self.seen.append(await request.json()); self.keys.append(request.headers.get('Authorization'))
        a = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        a = await a(self.seen[-1]) if callable(a) else a
        return web.Response(body=a.body, status=a.status, headers={k: v for k, v in a.headers.items() if k in ('Content-Type', 'Retry-After', 'Location')})   # one that was sent can't be sent again
def says(text, finish='stop', status=200, **m): return web.json_response({'choices': [{'message': {'content': text, **m}, 'finish_reason': finish}], 'usage': {'completion_tokens': 3}}, status=status)
def error(status, text='no', **h): return web.json_response({'error': text}, status=status, headers=h)
async def ask(server, **kw):
    e = ModelProposer(Endpoint(server.url, 'm', **{'seconds': 5., **kw}))
    try: return await e.ask([dict(role='user', content='an idea')], Idea), e
    finally: await e.close()

@pytest.fixture(autouse=True)
def no_pause(monkeypatch): monkeypatch.setattr(endpoint, 'LONGEST', .01)

GOOD = json.dumps(IDEA)
@pytest.mark.parametrize('script,calls', [
    ([says(GOOD)], 1), ([error(429, **{'Retry-After': '9999'}), error(500), error(503), says(GOOD)], 4), ([says('Here it is!'), says(f'```json\n{GOOD}\n```')], 2),
    ([says(f'<think>an {{idea}}?</think>{GOOD}')], 1), ([says(GOOD, 'length'), says(GOOD)], 2), ([says(None), says(GOOD)], 2), ([web.Response(body=b'<html>'), says(GOOD)], 2), ([web.Response(body=b''), says(GOOD)], 2),
    ([says(json.dumps(IDEA | {'level': '2'})), says(GOOD)], 2), ([says('['*100_000), says(GOOD)], 2)])
async def test_answers_that_can_be_had(script, calls):
    async with Server(*script) as s: idea, e = await ask(s)
    assert idea == Idea(**IDEA) and len(s.seen) == e.asked['calls'] == calls

async def test_a_bad_answer_is_told_what_is_wrong_with_it():
    async with Server(says(json.dumps(IDEA | {'level': 9})), says(GOOD)) as s: await ask(s)
    assert 'level' in s.seen[1]['messages'][-1]['content'] and len(s.seen[0]['messages']) == 1

@pytest.mark.parametrize('script,why', [([says('no')], 'JSON'), ([says('', refusal='I will not')], 'declined'), ([says('', 'content_filter')], 'declined'), ([says(json.dumps(IDEA | {'more': 1}))], 'more'), ([says('[1]')], 'object'), ([says(GOOD, 'length')], 'cut off')])
async def test_answers_that_are_none(script, why):
    async with Server(*script) as s:
        with pytest.raises(Refused, match=why) as e: await ask(s)
    assert e.value.reason == 'no_answer' and len(s.seen) == 2

async def test_a_server_that_fails_for_good_ends_it_in_one_line_without_the_key():
    for script, calls in ((error(401, 'bad key sk-secret-17\n\n'), 1), (error(500), 3)):
        async with Server(script) as s:
            with pytest.raises(EngineError, match=f'{s.url}: HTTP {script.status}') as e: await ask(s, key='sk-secret-17', tries=3)
            assert len(s.seen) == calls and s.keys[0] == 'Bearer sk-secret-17' and 'secret' not in str(e.value) and '\n' not in str(e.value)

async def test_usable_answers_are_kept(tmp_path):
    async with Server(says(GOOD)) as s:
        e = ModelProposer(Endpoint(s.url, 'm'), tmp_path/'a.jsonl')
        await asyncio.gather(*(e.ask([dict(role='user', content=str(i))], Idea) for i in range(9))); await e.close()
        with (tmp_path/'a.jsonl').open('a') as f: f.write('{"asked": "x", "ans')
        again = ModelProposer(Endpoint(s.url, 'm'), tmp_path/'a.jsonl')
        await again.ask([dict(role='user', content='4')], Idea); await again.ask([dict(role='user', content='4')], Idea, nonce=1); await again.close()
        assert again.asked['cached'] == again.asked['calls'] == 1 and len(s.seen) == 10

# A model from end to end

class Model(Server):
    "Answers with what the templates would write, after a fault of some kind every third time."
    def __init__(self): self.calls, self.inner = 0, TemplateProposer(0); super().__init__(self.answer)
    async def answer(self, body):
        self.calls += 1
        if self.calls % 3 == 0: return random.Random(self.calls).choice([error(429, **{'Retry-After': '0'}), error(500), says('Sure!'), says('', refusal='no'), says('{', 'length')])
        user = body['messages'][1]['content']
        for i, t in ((i, t) for t in range(3) for i in range(40)):
            seed = seed_of(0, i, t); idea = await self.inner.propose(seed)
            if user.startswith(f'Persona: {seed.persona}\nCategory: {seed.category} ') and f'\nSkill: {seed.skill}' in user: return says(idea.model_dump_json())
            if f'\nIdea: {idea.idea}\n' in user: return says((await self.inner.build(seed, idea)).model_dump_json())

@bwrap
async def test_a_model_behind_an_endpoint_makes_a_suite(tmp_path):
    async with Model() as m:
        p = ModelProposer(Endpoint(m.url, 'tiny', 'sk-secret-17'), tmp_path/'answers.jsonl')
        s = await synthesize(tmp_path, 2, p, Plan(f'{m.url} tiny', k=1, wrong=0, wave=3), 'bwrap', most=9, concurrency=2, progress=False)
    assert s.summary()['tasks'] == 2 == len(load_suite(tmp_path)) and p.asked['retries'] + s.summary()['refusals'].get('no_answer', 0) + p.asked['calls'] > 4
    assert set(m.keys) == {'Bearer sk-secret-17'} and not any(b'sk-secret' in f.read_bytes() for f in tmp_path.rglob('*') if f.is_file())
    with pytest.raises(InputError, match='choose a sandbox'): await synthesize(tmp_path/'x', 1, ModelProposer(Endpoint('http://x/v1', 'm')), Plan('http://x/v1 m'), **quick)

# The command

ARGS = ('tasks', 'synthesize', '--n', 3, '--k', 1, '--wave', 4, '--concurrency', 2, '--against', 'nano', '--sandbox', 'bwrap')
def start(to): return subprocess.Popen([sys.executable, '-m', 'clawlab.cli', *map(str, ARGS), '--to', str(to)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, 'PYTHONPATH': str(ROOT)})
def suite_of(d): return {f.name: f.read_bytes() for f in Path(d).glob('*') if f.suffix in ('.jsonl', '.py') and f.name != 'ledger.jsonl'}
def rows(d): return [json.loads(l) for l in (Path(d)/'ledger.jsonl').read_text().splitlines()]

@bwrap
@pytest.mark.timeout(280)
def test_kill_9_then_the_same_suite(tmp_path):
    p = start(tmp_path/'whole'); out, err = p.communicate(timeout=120); assert p.returncode == 0, err
    last = json.loads(out.splitlines()[-1])
    assert last['tasks'] == 3 and Path(last['report']).read_text().startswith('<!') and sum(last['splits'].values()) == 3
    marks, f = [6, 13], tmp_path/'killed'/'ledger.jsonl'   # lines: while ideas are pruned, while agents play
    for n in marks:
        p = start(tmp_path/'killed'); end = time.monotonic() + 90
        while not f.exists() or f.read_bytes().count(b'\n') < n:
            assert time.monotonic() < end and p.poll() is None, p.stderr.read()
            time.sleep(.005)
        p.send_signal(signal.SIGKILL); p.wait(); p.stdout.close(); p.stderr.close()
        before = f.read_bytes()
    p = start(tmp_path/'killed'); out, err = p.communicate(timeout=120); assert p.returncode == 0, err
    assert f.read_bytes().startswith(before[:before.rfind(b'\n') + 1])           # nothing is done twice
    assert suite_of(tmp_path/'killed') == suite_of(tmp_path/'whole') and len(suite_of(tmp_path/'whole')) == 3
    def told(d): return sorted(json.dumps(r, sort_keys=True) for r in rows(d))
    assert told(tmp_path/'killed') == told(tmp_path/'whole')
    assert {k: v for k, v in json.loads(out.splitlines()[-1]).items() if k not in ('to', 'report', 'ledger')} == {k: v for k, v in last.items() if k not in ('to', 'report', 'ledger')}

@pytest.mark.parametrize('args,line', [(('--k', '2', '--least', '3'), '--least 3 of --k 2'), (('--proposer', 'http://127.0.0.1:9/v1'), '--model NAME'), (('--proposer', 'model'), "'model' is no address"), (('--weak', 'oracle'), 'knows the solutions'),
    (('--solver', 'vlm:x'), "unknown engine 'vlm:x'"), (('--harness', 'emacs'), "unknown harness 'emacs'"), (('--sandbox', 'chroot'), "unknown sandbox backend 'chroot'"), (('--against', 'nope'), 'no task suite nope'), (('--n', '0'), "--n")])
def test_bad_input_is_one_line(args, line, capfd, tmp_path):
    code = main(['tasks', 'synthesize', '--to', str(tmp_path/'s'), *args]); out, err = capfd.readouterr()
    assert code == 2 and out == '' and len(err.strip().splitlines()) == 1 and line in err, err

def test_a_folder_with_something_else_in_it_stays_as_it_is(capfd, tmp_path):
    (tmp_path/'thesis.txt').write_text('x')
    assert main(['tasks', 'synthesize', '--to', str(tmp_path)]) == 2 and 'is not empty' in capfd.readouterr().err and [f.name for f in tmp_path.iterdir()] == ['thesis.txt']
