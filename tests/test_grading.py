"What a cheating agent leaves behind, and what a broken verifier says. On `process`, and on `bwrap` where it runs."
import asyncio, os
from dataclasses import replace
import pytest
from clawlab.records import Task
from clawlab.launch import grading
from clawlab.launch.grading import Score, check, check_suite, grade, settle, tampered
from clawlab.launch.sandbox.base import Exec, Limits, make_sandbox, probe
from clawlab.launch.tasks import load_suite, select
from attacks import ANSWER, CHEATS, HONEST

NO_BWRAP = asyncio.run(probe('bwrap'))
backends = pytest.mark.parametrize('backend', ['process', pytest.param('bwrap', marks=pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP))])
bwrap = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)

def task(verifier, **kw): return Task('t', 'f', 'train', 'Do it.', {'a': 'x\n'}, verifier=verifier, **kw)
def says(body): return 'import os, sys, subprocess\ndef verify(w, expect):\n' + '\n'.join('    ' + l for l in body.splitlines())

@backends
async def test_a_score_and_its_detail(backend):
    t = task(says("return {'score': .5, 'text': (w/'d/a').read_text(), 'expect': expect['k']}"), expect={'k': [1]})
    assert await grade(t, {'d/a': 'é\n'}, backend=backend) == Score(.5, {'text': 'é\n', 'expect': [1]})
    assert (await grade(task(says('return True')), {}, backend=backend)).score == 1

@backends
@pytest.mark.parametrize('body, error', [
    ('return 1/0', 'ZeroDivisionError'), ('return 1.5', 'a score of 1.5'), ('return float("nan")', 'a score of nan'), ('return None', 'TypeError'), ('return "much"', 'ValueError'),
    ('sys.exit(0)', 'SystemExit'), ('os._exit(0)', 'the verifier died: code 0'), ('os.kill(os.getpid(), 11)', 'the verifier died'), ('return {"points": 1}', 'KeyError')])
async def test_a_broken_verifier_gives_no_score(backend, body, error):
    s = await grade(task(says(body)), {}, backend=backend)
    assert s.score is None and error in s.error and '\n' not in s.error

async def test_a_verifier_that_does_not_compile_or_hangs():
    assert 'SyntaxError' in (await grade(task('def verify(:'), {}, backend='process')).error
    with pytest.raises(grading.GraderError, match='busy for more than 0.45 s of its 0.5|took more than 0.5 s'): await grading._grade([(task(says('while True: pass')), {})], 'process', seconds=.5)

@backends
@pytest.mark.parametrize('cheat', CHEATS)
async def test_S47_cheating_files_change_nothing(backend, cheat):
    assert (await grade(task(says(HONEST)), {'a': 'x\n', **CHEATS[cheat]}, backend=backend)).score == .25

@backends
async def test_S47_a_program_of_the_agent_run_by_the_verifier_cannot_answer_for_it(backend):
    t = task(says("r = subprocess.run([sys.executable, str(w/'run.py')])\nreturn {'score': 0.125, 'reached': r.returncode}"))
    s = await grade(t, {'run.py': ANSWER}, backend=backend)
    assert s.score == .125
    if backend == 'bwrap': assert s.detail['reached'] == 0

@bwrap
async def test_S47_the_submission_is_read_only_and_there_is_no_network():
    body = '''
import errno, socket
wrong = []
for act in (lambda: (w/'a').write_text('z'), lambda: (w/'new').write_text(''), lambda: (w/'a').unlink(), lambda: (w/'d').mkdir()):
    try: act(); wrong.append('wrote')
    except PermissionError: pass
for addr in (('127.0.0.1', 8000), ('1.1.1.1', 53)):
    try: socket.create_connection(addr, 1); wrong.append('network')
    except OSError: pass
links = os.listdir('/sys/class/net') if os.path.isdir('/sys/class/net') else ['lo']
env = {k for k in os.environ if k not in ('PATH', 'LC_ALL', 'LC_CTYPE', 'PWD', 'SHLVL', '_')}
near = os.path.realpath('.').startswith(os.path.realpath(w)) or os.path.realpath(w).startswith(os.path.realpath('.'))
return {'score': 1.0, 'wrong': wrong, 'env': sorted(env), 'near': near, 'isolated': sys.flags.isolated, 'site': 'site' in sys.modules}'''
    s = await grade(task(says(body)), {'a': 'x\n'}, backend='bwrap')
    assert s.detail == {'wrong': [], 'env': [], 'near': False, 'isolated': 1, 'site': False}, s

@backends
async def test_S47_links_and_special_files_never_reach_the_verifier(backend):
    "An agent links its answer to where it hopes the expected values are."
    async with make_sandbox(backend, limits=Limits(memory_mb=256, pids=32), name='links') as box:
        await box.put({'a': 'x\n'})
        await box.exec(['/bin/bash', '-c', 'ln -s /etc/passwd b; ln -s / root; mkfifo pipe; ln a c; ln -s ../submission0/a d; mkdir e; ln -s .. e/up'])
        left = await box.get()
    assert set(left) <= {'a', 'c'}
    s = await grade(task(says("return {'score': 1.0, 'names': sorted(os.listdir(w))}")), left, backend=backend)
    assert set(s.detail['names']) <= {'a', 'c'}

@bwrap
async def test_S47_a_daemon_of_the_agent_is_gone_before_the_verifier_arrives():
    "Verifier and expected values are nowhere while the agent runs, and nothing of the agent is left when they come."
    async with make_sandbox('bwrap', limits=Limits(memory_mb=256, pids=32), name='daemon') as box:
        await box.exec(['/bin/bash', '-c', 'setsid nohup bash -c "while true; do echo 1 > marker; done" >/dev/null 2>&1 & disown; grep -rl SECRET_EXPECT / --include=* 2>/dev/null --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr > found; true'], timeout=20)
        left = await box.get()
    assert not left['found']
    body = "n = [p for p in os.listdir('/proc') if p.isdigit() and b'marker' in open(f'/proc/{p}/cmdline', 'rb').read()]\nreturn {'score': 1.0, 'alive': n}"
    s = await grade(task(says(body), expect={'x': 'SECRET_EXPECT'}), left, backend='bwrap')
    assert s.score == 1 and s.detail['alive'] == []

@pytest.mark.parametrize('left', [b'red\n'*(50 << 20), 'é '.encode()*(20 << 20), b'\xff'*(200 << 20)], ids=['words', 'wide', 'noise'])
async def test_a_workspace_cannot_break_its_own_grading_by_size(left):
    "No reward would be a failure that leaves no trace."
    t = next(t for t in load_suite('nano').values() if t.family == 'append')
    name = next(p for p in t.files if t.expect['goal'][p] != t.files[p])
    s = await grade(t, {**t.files, name: left}, backend='bwrap')
    assert s.score == 0 and s.detail['left_out'] == 1, s

async def test_a_large_file_is_there_and_wrong():
    t = next(t for t in load_suite('nano').values() if t.family == 'delete')
    gone = next(p for p in t.files if p not in t.expect['goal'])
    big, done = b'x'*(20 << 20), {p: c for p, c in t.files.items() if p != gone}
    assert [(await grade(t, f, backend='bwrap')).score for f in (done, {**done, gone: big}, {**done, 'x'*200 + '/y'*500: b''})] == [1, 0, 1]

@pytest.mark.parametrize('cpu, tries', [(.5, 2), (19., 1)])
async def test_a_verifier_that_got_no_processor_is_given_more_time_and_one_that_hangs_is_not(monkeypatch, cpu, tries):
    seen = []
    class Box:
        async def __aenter__(self): return self
        async def __aexit__(self, *_): pass
        async def exec(self, argv, timeout, stdin): seen.append(timeout); return Exec(None, 9, b'', b'', timed_out=True, cpu=cpu)
    monkeypatch.setattr(grading, 'make_sandbox', lambda *a, **kw: Box())
    s = await grade(task(says('return 1')), {}, backend='bwrap')
    assert s.score is None and seen == [20, 120][:tries] + [20] and f'more than {seen[tries-1]} s' in s.error   # and once more, on the untouched workspace

async def test_a_lost_sandbox_is_tried_once_more(monkeypatch):
    from clawlab.records import SandboxError
    tries = []
    async def lost(*a, **k): tries.append(1); raise SandboxError('no room')
    monkeypatch.setattr(grading, '_grade', lost)
    s = await grade(task(''), {}, backend='process')
    assert len(tries) == 2 and s == Score(None, {}, 'no sandbox for the verifier: no room')

GATED = says("return {'score': .75, 'gates': expect}")

@backends
@pytest.mark.parametrize('gates, score, label', [({'kept': True}, .75, ''), ({}, .75, ''), ({'kept': True, 'sent': False}, 0, 'gate: sent'), ({'b': False, 'a': False}, 0, 'gate: a, b')])
async def test_any_gate_that_is_not_true_is_a_labelled_zero(backend, gates, score, label):
    s = await grade(task(GATED, expect=gates), {}, backend=backend)
    assert (s.score, s.label, s.detail.get('ungated')) == (score, label, .75 if label else None) and s.detail['gates'] == gates

@pytest.mark.parametrize('gates', [{'kept': 1}, {'kept': None}, {'kept': 'false'}, ['kept'], 'kept', None])
async def test_a_gate_that_is_neither_true_nor_false_is_a_broken_verifier(gates):
    s = await grade(task(says(f"return {{'score': 1, 'gates': {gates!r}}}")), {}, backend='process')
    assert s.score is None and 'true or false' in s.error and '\n' not in s.error

PROTECTED = task(says('return 1.0'), protected=('tests', 'data/*.csv', 'a'))
PROTECTED.files.update({'tests/test_a.py': 'assert False\n', 'tests/deep/x': b'\0\xff', 'data/in.csv': '1\n', 'data/notes': 'n'})

@pytest.mark.parametrize('change, label', [
    ({}, ''), ({'data/notes': b'other', 'new': b'', 'tests.md': b'', 'b': b''}, ''),
    ({'tests/test_a.py': b'assert True\n'}, 'protected: tests/test_a.py changed'), ({'tests/deep/x': None}, 'protected: tests/deep/x removed'), ({'tests/conftest.py': b''}, 'protected: tests/conftest.py added'),
    ({'data/sub/new.csv': b''}, 'protected: data/sub/new.csv added'), ({'a': b'x'}, 'protected: a changed'), ({'a': None, 'a/b': b''}, 'protected: a removed, a/b added'),
    ({f'tests/{i}': b'' for i in range(9)}, 'protected: tests/0 added, tests/1 added, tests/2 added and 6 more'),
    ({'tests/__pycache__/test_a.cpython-311.pyc': b'\0', 'tests/.git/config': b''}, '')])   # running the tests is no tampering; and a verifier sees neither
async def test_S47_protected_paths_are_as_they_were_or_the_score_is_a_labelled_zero(change, label):
    left = {p: c for p, c in ({p: c.encode() if isinstance(c, str) else c for p, c in PROTECTED.files.items()} | change).items() if c is not None}
    s = await grade(PROTECTED, left, backend='process')
    assert (s.score, s.label) == (0. if label else 1., label) and bool(label) == ('protected' in s.detail)

async def test_S47_tampering_that_breaks_the_verifier_is_still_a_zero():
    "Else it would delete the failure."
    broken = replace(PROTECTED, verifier=says("return float((w/'a').read_text() == 'x\\n') / 0"))
    assert (await grade(broken, dict(PROTECTED.files), backend='process')).score is None
    assert (await grade(broken, {**PROTECTED.files, 'a': b''}, backend='process')).score == 0
    assert len(tampered(PROTECTED, {})) == 4 and settle(PROTECTED, PROTECTED.files) is None

@backends
async def test_S47_histories_and_compiled_code_never_reach_the_verifier(backend):
    left = {'a': 'x\n', '.git/hooks/post-checkout': '#!/bin/sh\nkill -9 $PPID', 'm.py': 'X = 1', '__pycache__/m.cpython-311.pyc': b'\xa7\r\r\n', 'sub/.git': 'gitdir: x', 'sub/.gitignore': '*', 'x.git/HEAD': ''}
    s = await grade(task(says("return {'score': 1.0, 'names': sorted(str(p.relative_to(w)) for p in w.rglob('*') if p.is_file())}")), left, backend=backend)
    assert s.detail['names'] == ['a', 'm.py', 'sub/.gitignore', 'x.git/HEAD'] and 'left_out' not in s.detail

async def test_a_verifier_may_leave_a_task_to_its_rubric():
    t = task(says("return {'score': None, 'seen': 1}"), rubric={'clear': 'It is clear.'})
    assert await grade(t, {}, backend='process') == Score(None, {'seen': 1}, '')
    assert 'TypeError' in (await grade(replace(t, rubric={}), {}, backend='process')).error and 'TypeError' in (await grade(replace(t, verifier=says('return None')), {}, backend='process')).error
    assert await check(replace(t, steps=('true',)), 'process') == []   # there is no number to prove

async def test_check_finds_a_solution_that_touches_what_is_protected():
    t = task("def verify(w, e): return float((w/'b').is_file())", steps=('mv a b',), protected=('a',))
    assert await check(t, 'process') == ['solution: scores 0, must be 1 (protected: a removed)']
    assert await check(replace(t, steps=('cp a b',)), 'process') == []

async def test_a_task_may_give_its_verifier_more_time_or_less(monkeypatch):
    seen = []
    class Box:
        async def __aenter__(self): return self
        async def __aexit__(self, *_): pass
        async def exec(self, argv, timeout, stdin): seen.append(timeout); return Exec(None, 9, b'', b'', timed_out=True, cpu=.1)
    monkeypatch.setattr(grading, 'make_sandbox', lambda *a, **kw: Box())
    await grade(task(says('return 1'), limits={'verify_seconds': 300}), {}, backend='bwrap')
    assert seen == [300, 1800, 300]

RUNS = says("subprocess.run([sys.executable, '-I', str(w/'run.py')], timeout=15)\nreturn 1.0 if (w/'a').exists() else 0.")

@bwrap
@pytest.mark.parametrize('attack', ['os.kill(os.getppid(), 9)', 'os.kill(os.getppid(), 11)', 'os.kill(os.getppid(), 10)', 'os.kill(os.getppid(), 27)', 'os.kill(os.getppid(), 19)', '[os.kill(p, 19) for p in range(1, os.getppid() + 1)]',
                                    'x = [bytearray(8 << 20) for _ in range(999)]; time.sleep(9)', '[os.fork() for _ in range(9)]; os.kill(os.getppid(), 6)'])
async def test_S47_no_way_of_ending_the_verifier_loses_the_score(attack):
    "By any signal, stopped instead of ended, out of memory: a labelled 0, or the score if it got over it."
    t = task(RUNS, limits={'verify_seconds': 2})
    s = await grade(t, {'a': 'x\n', 'run.py': f'import os, time\n{attack}\ntime.sleep(9)'}, backend='bwrap')
    assert s.score is not None and (s.score == 1 or s.label.startswith('ended: the verifier')), s

@backends
@pytest.mark.parametrize('left, score, label', [({'out.json': '{"n": 3}'}, 1., ''), ({'out.json': '{"n": 4}'}, 0., ''), ({}, 0., ''), ({'out.json': '{'}, 0., 'broke: JSONDecodeError'), ({'out.json': '{}'}, 0., "broke: KeyError: 'n', on what the agent left"), ({'out.json': b'\xff'}, 0., 'broke: UnicodeDecodeError')])
async def test_S47_a_malformed_answer_is_a_labelled_zero_not_a_free_ticket(backend, left, score, label):
    body = "import json\nif not (w/'out.json').exists(): return 0.\nreturn float(json.loads((w/'out.json').read_text())['n'] == 3)"
    s = await grade(task(says(body)), {'a': 'x\n', **left}, backend=backend)
    assert s.score == score and (s.label.startswith(label) if label else not s.label) and s.error == ''
    assert (await grade(replace(task(says(body)), files=left), left, backend=backend)).score == (None if label else score)   # where it breaks untouched, too, it is broken

async def test_a_number_that_is_no_score_is_the_verifiers_own_fault():
    "An honest agent may have done too well for a careless sum: that is no zero."
    s = await grade(task(says("return len(list(w.iterdir()))/2")), {str(i): '' for i in range(9)}, backend='process')
    assert s.score is None and s.error == 'ValueError: a score of 4.5'

@bwrap
async def test_a_verifier_that_is_ended_by_the_untouched_workspace_too_is_broken():
    files = {'a': 'x\n', 'run.py': 'import os\nos.kill(os.getppid(), 11)'}
    s = await grade(replace(task(RUNS), files=files), files, backend='bwrap')
    assert s.score is None and 'signal 11' in s.error

@bwrap
async def test_a_verifier_ended_from_outside_is_nobodys_zero(monkeypatch):
    class Box:
        async def __aenter__(self): return self
        async def __aexit__(self, *_): pass
        async def exec(self, argv, timeout, stdin): return Exec(None, 9, b'', b'', killed='outside')
    monkeypatch.setattr(grading, 'make_sandbox', lambda *a, **kw: Box())
    s = await grade(task(says('return 1')), {}, backend='bwrap')
    assert s.score is None and 'from outside by signal 9' in s.error

@bwrap
async def test_a_verifier_out_of_memory_by_its_own_doing_is_no_score():
    s = await grade(task(says('x = [bytearray(64 << 20) for _ in range(99)]\nreturn 1.0')), {}, backend='bwrap')
    assert s.score is None and ('MemoryError' in s.error or 'out of memory' in s.error), s

@backends
async def test_check_finds_each_fault(backend):
    v = "def verify(w, e):\n    f = w/'b'\n    return float(f.is_file() and f.read_bytes() == b'x\\n')"
    good = task(v, steps=('cp a b',), habit=('mv a c',))
    assert await check(good, backend) == []
    faults = {'untouched: scores 1': replace(good, files={'a': 'x\n', 'b': 'x\n'}), 'empty: scores 1': replace(good, verifier="def verify(w, e): return float(not (w/'c').exists() and not (w/'z').exists())"),
              'solution: scores 0': replace(good, steps=('cp a d',)), 'solution: step 2 fails with code 1': replace(good, steps=('cp a b', 'cp no b')),
              'habit: scores 1': replace(good, habit=('mv a b',)), 'junk: the verifier breaks: UnicodeDecodeError': replace(good, verifier=v.replace("read_bytes() == b'", "read_text() == '")),
              'folders: the verifier breaks: IsADirectoryError': replace(good, verifier=v.replace('f.is_file()', 'f.exists()'))}
    found = await check_suite([replace(t, task_id=p) for p, t in faults.items()], backend, progress=False)
    for problem in faults: assert any(p.startswith(problem) for p in found[problem]), (problem, found)

async def test_a_verifier_that_takes_the_others_down_is_the_only_one_blamed():
    good = task("def verify(w, e): return float((w/'b').is_file())", steps=('touch b',))
    bad = replace(good, task_id='bad', verifier=says('os._exit(1)'))
    assert {k: v[0][:26] for k, v in (await check_suite([good, bad], 'process', progress=False)).items()} == {'bad': 'the verifier breaks: the v'}

@backends
async def test_the_suite_is_sound(backend):
    "0 untouched and empty, 1 for the solution, below the pass mark for the habit, unbroken by junk; every task on `bwrap`, one of each kind on `process`."
    assert await check_suite(select(load_suite('nano'), n=36 if backend == 'process' else None), backend, progress=False) == {}

@bwrap
async def test_grading_is_cheap():
    "Well below 60 ms of CPU on a quiet machine, the sandbox's start and end included; a busy one counts more for the same work."
    from clawlab.launch.sandbox.bwrap import the_keeper
    t = load_suite('nano')['test-copy-1-0']
    await grade(t, t.files, backend='bwrap')
    stat = f'/proc/{the_keeper().proc.pid}/stat'
    def cpu(): return sum(os.times()[:2]) + sum(map(int, open(stat).read().rsplit(')')[-1].split()[11:15]))/os.sysconf('SC_CLK_TCK')
    costs = []
    for _ in range(4):
        c = cpu()
        for _ in range(5): await grade(t, t.files, backend='bwrap')
        costs.append((cpu() - c)/5)
    assert min(costs) < .1, costs
