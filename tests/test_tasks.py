"The suite that ships, and what a broken suite says."
import importlib.util, json, re
from collections import Counter
from dataclasses import replace
from pathlib import Path
import pytest
from clawlab.records import InputError
from clawlab.launch.tasks import load_suite, overlap, save_suite, select

NANO = Path(__file__).parent.parent/'experiments/tasks/nano'
GOOD = dict(task_id='a', family='copy', instruction='Copy notes to draft.', files={'notes': 'red\n'}, steps=['cp notes draft'])

@pytest.fixture(scope='module')
def tasks(): return load_suite(NANO)

def module(name):
    spec = importlib.util.spec_from_file_location(f'nano_{name}', NANO/f'{name}.py')
    spec.loader.exec_module(m := importlib.util.module_from_spec(spec))
    return m

def test_the_committed_suite_is_what_the_generator_writes():
    for split, ts in module('generate').suite().items():
        assert (NANO/f'{split}.jsonl').read_text() == ''.join(json.dumps(t) + '\n' for t in ts), split

def test_sizes(tasks):
    n = Counter(t.split for t in tasks.values())
    assert n['test'] == 108 and n['validation'] >= 40 and n['train'] >= 200
    for split in n:
        cells = Counter((t.family, t.level) for t in tasks.values() if t.split == split)
        assert len({f for f, _ in cells}) >= 9 and {l for _, l in cells} == {1, 2, 3} and len(cells) == 36, split

def test_splits_have_nothing_in_common(tasks):
    split = {s: select(tasks, split=s) for s in ('train', 'validation', 'test')}
    assert all(overlap(split[a], split[b]) == 0 for a in split for b in split if a != b)
    assert overlap(split['test'][:5], split['test']) == 5
    for key in (lambda t: t.instruction, lambda t: json.dumps(t.files, sort_keys=True)): assert len({key(t) for t in tasks.values()}) == len(tasks)

def test_a_small_policy_can_do_them(tasks):
    "Few words, short commands, no shell quoting that JSON would have to escape; every argument is one word of the little world."
    world = json.loads((NANO/'words.json').read_text())
    args = {w for ws in world.values() for w in ws}
    assert len(world['words']) == 14 and len(args) == 30 and all(re.fullmatch('[a-z]+', w) for w in args)
    for t in tasks.values():
        assert len(t.instruction.split()) <= 20 and 1 <= len(t.steps) <= 3 and t.habit and t.habit != t.steps
        assert all(len(s) <= 60 and not set(s) & set('"\\\n\'') for s in (*t.steps, *t.habit)), t.task_id
        assert set(re.findall('[a-z]+', ' '.join([*t.files, *t.files.values(), *t.expect['goal']]))) <= args
        verbs = {'echo', 'touch', 'cp', 'mv', 'rm', 'r', 'mkdir', 'cat', 'sed', 'i', 's', 'g', 'grep', 'l'}
        assert set(re.findall('[a-z]+', ' '.join([*t.steps, *t.habit]))) <= args | verbs, t.task_id

def test_some_need_reading_and_some_several_calls(tasks):
    "The word to write or the file to act on isn't in the instruction; two or more calls; three."
    def hidden(t): return set(re.findall('[a-z]+', ' '.join(t.steps))) & set(re.findall('[a-z]+', ' '.join([*t.files, *t.files.values()]))) - set(re.findall('[a-z]+', t.instruction))
    n = len(tasks)
    assert sum(bool(hidden(t)) for t in tasks.values()) >= n/5
    assert sum(len(t.steps) >= 2 for t in tasks.values()) >= n/3 and any(len(t.steps) == 3 for t in tasks.values())

def test_verifier_partial_credit_and_damage(tmp_path):
    verify = module('verify').verify
    start, goal = {'a': 'x y\n', 'k': 'z\n'}, {'b': 'x y\n', 'k': 'z\n'}  # rename a to b, keep k
    def score(**have):
        for p in tmp_path.iterdir(): p.unlink()
        for p, c in have.items(): (tmp_path/p).write_text(c)
        return verify(tmp_path, {'start': start, 'goal': goal})
    assert score(b='x y\n', k='z\n') == 1
    assert score(a='x y\n', k='z\n') == 0 == score()
    assert 0 < score(a='x y\n', b='x y\n', k='z\n') < .5        # copied, not renamed
    assert 0 < score(b='x\n', k='z\n') < score(a='x y\n', b='x y\n', k='z\n')
    assert score(k='z\n') == 0                                   # removed: no progress
    assert score(b='x y\n') == 0 == score(b='x y\n', k='q\n')    # a bystander lost or changed
    assert score(b='x y\n', k='z\n', junk='') == .5              # litter
    assert score(b='x y\n', k='z\n', **{'AGENTS.md': '', '.state': ''}) == 1  # a harness's own files

def suite(tmp_path, *lines, verifier='def verify(workspace, expect): return 0.0\n'):
    (tmp_path/'train.jsonl').write_text('\n'.join(l if isinstance(l, str) else json.dumps(l) for l in lines))
    if verifier is not None: (tmp_path/'verify.py').write_text(verifier)
    return tmp_path

@pytest.mark.parametrize('line, said', [
    ('{"task_id": ', 'train.jsonl:2: the line: '),
    ('[1]', 'train.jsonl:2: the line: '),
    (GOOD | {'task_id': 'b', 'famly': 'x'}, 'train.jsonl:2: famly: '),
    ({k: v for k, v in GOOD.items() if k != 'steps'}, 'train.jsonl:2: steps: '),
    (GOOD | {'task_id': 'b', 'steps': 'ls'}, 'train.jsonl:2: steps: '),
    (GOOD | {'task_id': 'b', 'steps': []}, 'train.jsonl:2: steps: '),
    (GOOD | {'task_id': 'b', 'instruction': ''}, 'train.jsonl:2: instruction: '),
    (GOOD | {'task_id': 'b', 'level': 0}, 'train.jsonl:2: level: '),
    (GOOD | {'task_id': 'b', 'limits': {'seconds': 0}}, 'train.jsonl:2: limits: '),
    (GOOD | {'task_id': 'b', 'limits': {'disk_mb': 1.5}}, 'train.jsonl:2: limits: '),
    (GOOD | {'task_id': 'b', 'limits': {'second': 5}}, 'train.jsonl:2: limits: '),
    (GOOD | {'task_id': 'b', 'files': {'x': 3}}, 'train.jsonl:2: files.x: '),
    (GOOD | {'task_id': 'b', 'files': {'../x': ''}}, 'train.jsonl:2: files: '),
    (GOOD | {'task_id': 'b', 'files': {'~/x': ''}}, 'train.jsonl:2: files: '),
    (GOOD | {'task_id': 'b', 'files': {'/x': ''}}, 'train.jsonl:2: files: '),
    (GOOD | {'task_id': 'b', 'files': {'x': '', 'x/y': ''}}, 'train.jsonl:2: files: '),
    (GOOD | {'task_id': 'a b'}, 'train.jsonl:2: task_id: '),
    (GOOD, 'train.jsonl:2: task_id: a occurs twice'),
])
def test_a_broken_line_is_said_in_one_line(tmp_path, line, said):
    with pytest.raises(InputError) as e: load_suite(suite(tmp_path, GOOD, line))
    assert said in str(e.value) and '\n' not in str(e.value)

@pytest.mark.parametrize('verifier, said', [(None, 'verify.py: no verifier'), ('def verify(:', 'verify.py:1: invalid syntax'), ('x = 1', 'verify.py: defines no function verify')])
def test_a_broken_verifier_is_said_in_one_line(tmp_path, verifier, said):
    with pytest.raises(InputError) as e: load_suite(suite(tmp_path, GOOD, verifier=verifier))
    assert said in str(e.value) and '\n' not in str(e.value)

def test_S47_a_task_brings_no_history(tmp_path):
    "Future commits would be the answer."
    for path in ('.git/HEAD', 'sub/.git/objects/x', '.git'):
        with pytest.raises(InputError, match='history'): load_suite(suite(tmp_path, GOOD | {'files': {path: ''}}))
    assert not any('.git' in p for t in load_suite('nano').values() for p in t.files)

def test_whole_limits_stay_whole(tmp_path):
    t, = load_suite(suite(tmp_path, GOOD | {'limits': {'seconds': 2.5, 'disk_mb': 64}})).values()
    assert repr(t.limits) == "{'seconds': 2.5, 'disk_mb': 64}"

def test_no_suite(tmp_path):
    for s, said in ((tmp_path, 'no train.jsonl'), (tmp_path/'none', 'no task suite'), ('none', 'no task suite none')):
        with pytest.raises(InputError, match=said): load_suite(s)
    assert len(load_suite('nano')) == len(load_suite(NANO))

def test_select(tasks):
    half = select(tasks, split='test', n=54)
    assert len({t.task_id for t in half}) == 54 and max(Counter((t.family, t.level) for t in half).values()) == 2
    assert min(Counter((t.family, t.level) for t in select(tasks, split='test', n=36)).values()) == 1
    assert select(tasks, split='test', n=36) == half[:36] and select(tasks, split='test', n=54, seed=1) != half
    assert {t.family for t in select(tasks, split='train', n=12, seed=3)} == {t.family for t in tasks.values()}
    assert all(t.family == 'copy' and t.level == 2 for t in select(tasks, family='copy', level=2))
    for kw, said in ((dict(split='dev'), "no split 'dev'"), (dict(family='x'), "no family 'x'"), (dict(split='test', n=109), '109 tasks wanted, there are 108'), (dict(n=0), '0 tasks wanted')):
        with pytest.raises(InputError, match=said): select(tasks, **kw)

def test_files_that_are_no_text_tool_steps_and_tools_py(tmp_path):
    line = dict(task_id='a', family='f', instruction='i', files={'p.bin': {'base64': 'AP8='}, 't': 'x'}, steps=['ls', dict(tool='mail_send', arguments={'to': 'a'})], tools=['mail_*'], state={'mail': []}, protected=['t'], rubric={'clear': 'it is'}, limits={'verify_seconds': 60})
    (tmp_path/'verify.py').write_text('def verify(w, e): return 0.'); (tmp_path/'train.jsonl').write_text(json.dumps(line))
    with pytest.raises(InputError, match='train.jsonl:1: tools: this suite has no tools.py'): load_suite(tmp_path)
    (tmp_path/'tools.py').write_text('def mail_send(state, to: str): "Send."')
    t = load_suite(tmp_path)['a']
    assert t.files == {'p.bin': b'\0\xff', 't': 'x'} and t.steps[1] == {'tool': 'mail_send', 'arguments': {'to': 'a'}} and t.toolset.startswith('def mail_send') and t.protected == ('t',) and t.rubric == {'clear': 'it is'}
    assert overlap([t], [t]) == 1
    for wrong, says in ((dict(files={'a': {'base64': '***'}}), 'files.a.base64'), (dict(files={'a': 5}), 'files.a: '), (dict(steps=[{'tool': 'a b'}]), 'steps.0.tool'), (dict(limits={'verify_seconds': 0}), 'limits'), (dict(limits={'verify_second': 1}), 'limits')):
        (tmp_path/'train.jsonl').write_text(json.dumps(line | wrong))
        with pytest.raises(InputError) as e: load_suite(tmp_path)
        assert says in str(e.value) and '\n' not in str(e.value), e.value
    (tmp_path/'train.jsonl').write_text(json.dumps(line | dict(steps=[], source={'format': 'clawgym'})))
    assert load_suite(tmp_path)['a'].steps == ()

def test_a_suite_that_is_written_is_read_back(tmp_path):
    t = replace(load_suite('nano')['test-copy-1-0'], files={'a': 'é\r\n', 'b/c.bin': b'\0\xff'}, steps=('ls', {'tool': 'mail_send', 'arguments': {}}), tools=('mail_*',), toolset='def mail_send(state): "Send."', state={'x': [1]}, protected=('a',), limits={'verify_seconds': 9})
    other = replace(t, task_id='b', split='train', tools=(), toolset='')
    assert load_suite(save_suite([t, other], tmp_path/'s')) == {'b': other, t.task_id: t}
    (tmp_path/'half').mkdir(); (tmp_path/'half/x').write_text('')
    for tasks, to, says in (([t], 's', 'not empty'), ([t], 'half', 'not empty'), ([], 'n', 'no tasks'), ([t, replace(t, verifier='def verify(w, e): return 1')], 'n', '2 verifiers'), ([replace(t, split='dev')], 'n', "'dev'"), ([t, t], 'n', 'twice')):
        with pytest.raises(InputError, match=says): save_suite(tasks, tmp_path/to)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['half', 's']


# claw: office and software work with services

CLAW = NANO.parent/'claw'

def claw_module(name):
    spec = importlib.util.spec_from_file_location(f'claw_{name}', CLAW/f'{name}.py')
    spec.loader.exec_module(m := importlib.util.module_from_spec(spec))
    return m

@pytest.fixture(scope='module')
def claw(): return load_suite('claw')

def test_claw_is_what_its_generator_writes():
    for split, ts in claw_module('generate').suite().items():
        assert (CLAW/f'{split}.jsonl').read_text(encoding='utf8') == ''.join(json.dumps(t, ensure_ascii=False) + '\n' for t in ts), split

def test_claw_has_families_levels_services_failures_and_splits_apart(claw):
    gen, ts = claw_module('generate'), list(claw.values())
    families = {f.__name__.replace('_', '-'): c for c, fs in gen.FAMILIES.items() for f in fs}
    assert len(families) == 12 and Counter(families.values()) == Counter({c: 2 for c in ('product-collab', 'systems-auto', 'analysis-reason', 'content-domain', 'planning-knowl', 'software-dev')})
    assert all(f'| {c} | {f} |' in (CLAW/'README.md').read_text() for f, c in families.items())
    assert Counter(t.split for t in ts) == {'train': 72, 'validation': 24, 'test': 48} and {t.family for t in ts} == set(families)
    for split in ('train', 'test'): assert len({(t.family, t.level) for t in ts if t.split == split}) == 36
    split = {s: select(claw, split=s) for s in ('train', 'validation', 'test')}
    assert all(overlap(split[a], split[b]) == 0 for a in split for b in split if a != b) and all(len({json.dumps([t.files, t.state]) for t in x}) == len(x) == len({t.instruction for t in x}) for x in split.values())
    assert not any(w in t.instruction for t in split['test'] for pool in (gen.PEOPLE, gen.FIRMS, gen.TOPICS) for w in pool['train'] if re.search(rf'\\b{w}\\b', t.instruction))
    assert sum(bool(t.tools) for t in ts) >= 40 and sum(bool(t.state.get('faults')) for t in ts) >= 12 and sum(bool(t.protected) for t in ts) >= 40 and sum(bool(t.rubric) for t in ts) >= 4
    for t in ts: assert t.habit and len(t.steps) + len(t.state.get('faults', ())) <= 6 and len(t.expect['want']) == len({w['name'] for w in t.expect['want']}), t.task_id

@pytest.mark.slow
async def test_claw_is_sound(claw):
    from clawlab.launch.grading import check_suite
    assert await check_suite(claw.values(), 'process', progress=False) == {}

async def test_a_part_of_claw_is_sound(claw):
    from clawlab.launch.grading import check_suite
    some = select(claw, split='test', n=12, seed=3)
    assert len({t.family for t in some}) == 12 and await check_suite(some, 'process', progress=False) == {}

def test_claw_tools():
    t = claw_module('tools')
    state = dict(me='me@x', now='2026-03-02T09:00', mail=[dict(id=3, folder='inbox', date='2026-03-01T09:00', sender='a@x', to=['me@x'], subject='Hi', text='lunch')], events=[dict(id=1, title='a', start='2026-03-02T09:00', end='2026-03-02T10:00', people=['a@x', 'me@x'])],
                 tables=dict(t=[dict(id=i, n=i % 3, s=f's{i}') for i in range(30)]))
    assert [m['id'] for m in t.mail_search(state, 'LUNCH')] == [3] and t.mail_search(state, 'lunch dinner') == [] and 'text' not in t.mail_search(state)[0] and t.mail_read(state, 3)['text'] == 'lunch'
    assert t.mail_send(state, ['a@x'], 's', 'b', 3)['id'] == 4 and state['mail'][-1]['reply_to'] == 3 and t.mail_move(state, 3, 'archive') and t.mail_search(state) == []
    for bad in (lambda: t.mail_read(state, 9), lambda: t.mail_send(state, ['nobody'], 's', 'b'), lambda: t.mail_send(state, [], 's', 'b'), lambda: t.mail_send(state, ['a@x'], 's', ' '), lambda: t.mail_move(state, 4, 'trash'), lambda: t.calendar_list(state, 'today', '2026-03-02'),
                lambda: t.calendar_create(state, 'b', '2026-03-02T09:30', '2026-03-02T10:30'), lambda: t.calendar_create(state, 'b', '2026-03-02T11:00', '2026-03-02T10:30'), lambda: t.calendar_create(state, 'b', '2026-03-02T25:00', '2026-03-02T26:00'), lambda: t.table_query(state, 'u'),
                lambda: t.table_query(state, 't', dict(m=1)), lambda: t.table_query(state, 't', dict(n=dict(like=1))), lambda: t.table_query(state, 't', dict(n=dict(lt='x'))), lambda: t.table_update(state, 't', {}, dict(n=1)), lambda: t.table_update(state, 't', dict(n=1), dict(m=1)), lambda: t.table_insert(state, 't', dict(n=1))):
        before = json.dumps(state)
        with pytest.raises(ValueError): bad()
        assert json.dumps(state) == before
    e = t.calendar_create(state, 'b', '2026-03-02T10:00', '2026-03-02T10:30', ['a@x'])
    with pytest.raises(ValueError, match='conflict: a@x, me@x busy'): t.calendar_update(state, e['id'], '2026-03-02T09:30', '2026-03-02T10:00')
    assert t.calendar_update(state, e['id'], '2026-03-02T10:15', '2026-03-02T10:45')['start'][11:] == '10:15' and [x['id'] for x in t.calendar_list(state, '2026-03-02', '2026-03-02', 'a@x')] == [1, 2] and t.calendar_cancel(state, 2) and len(state['events']) == 1
    q = t.table_query(state, 't', dict(n=1, id=dict(ge=4, ne=7)), ['id'], '-id', limit=3)
    assert q == dict(total=8, rows=[dict(id=28), dict(id=25), dict(id=22)]) and len(t.table_query(state, 't')['rows']) == 20 and [r['id'] for r in t.table_query(state, 't', offset=28)['rows']] == [28, 29] and t.table_query(state, 't', dict(s=dict(contains='S29')))['total'] == 1
    assert t.table_update(state, 't', dict(n=2), dict(s='x')) == dict(changed=10) and t.table_insert(state, 't', dict(n=5, s='y'))['id'] == 30 and t.table_list(state)['t']['rows'] == 31

@pytest.mark.parametrize('source, score', [
    ('def f(x): return x + 1', 1), ('def f(x): return x', 0), ('while True: pass', 0), ('import time; time.sleep(99)', 0), ('import os\nwhile True: os.write(1, b"x"*65536)', 0), ('x = "x"\nwhile True: x += x', 0),
    ('def f(x): return x + 1\nimport atexit; atexit.register(print, "[1]")', 0), ('import os; os._exit(0)', 0), ('class F(int):\n    def __eq__(self, o): return True\ndef f(x): return F(0)', 0), ('import sys; sys.exit(0)', 0), ('def f(x): return [[]]*x', 0), ('\0', 0), ('(' * 5000, 0)])
def test_code_of_an_agent_is_asked_and_not_believed(source, score, tmp_path, monkeypatch):
    "It gets no credit by hanging, flooding, ending, printing or by objects that equal everything, and it breaks nothing."
    import time
    v = claw_module('verify'); (w := tmp_path/'w').mkdir(); (s := tmp_path/'s').mkdir(); monkeypatch.chdir(s)
    monkeypatch.setattr(v, 'DEADLINE', time.monotonic() + 3)
    (w/'m.py').write_text(source)
    expect = dict(want=[dict(name='works', kind='code', files=['m.py'], tests=[['from m import f', 'f(1)', ['is', 2]], ['from m import f', 'f(9)', ['is', 10]]])])
    assert v.verify(w, expect) == dict(score=score, checks=dict(works=score)) and not [*s.iterdir()]

def test_what_a_claw_agent_leaves_is_data(tmp_path):
    v = claw_module('verify')
    def score(text, **check):
        (tmp_path/'f').write_bytes(text if isinstance(text, bytes) else text.encode()); return v.verify(tmp_path, dict(want=[dict(name='x', path='f', **check)]))['score']
    rows = dict(kind='rows', header=['a', 'b'], rows=[['1', 2.5], ['x', 3]])
    assert score('a,b\n1,2.50\nx,3\n', **rows) == 1 == score('A, b\r\nx,3.0\r\n1,"2.5"\r\n', **rows) and score('a,b\nx,3\n1,2.5\n', **rows, ordered=True) == 0 and score('a,b\nx,3\n', **rows) == .5 and score('a,b\nx,3\nx,3\n1,2.5\n', **rows) == .6667
    assert score('b,a\n', **rows) == 0 == score(b'\xff\0', **rows) == score('', **rows)
    assert score('[' * 10**5, kind='value', value=1) == 0 == score('{"a": 1}', kind='value', at=['a', 'b'], value=1) == score('{"a": true}', kind='value', at=['a'], value=1) and score('{"a": 1.001}', kind='value', at=['a'], value=1) == 1
    assert score('b\na\n', kind='order', after=dict(a=['b'], b=[])) == 1 and score('a\nb\n', kind='order', after=dict(a=['b'], b=[])) == 0 == score('b\nb\na', kind='order', after=dict(a=['b'], b=[]))
    assert v.verify(tmp_path, dict(want=[dict(name='x', kind='has', path='f', all=['b'])], keep=[dict(name='k', kind='same_file', path='f', text='')]))['score'] == .5
