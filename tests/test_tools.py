"""A task's own tools: schemas from source, the runner as command and as MCP server, the proof of their state, and harnesses that use them."""
import asyncio, json, subprocess, threading
from dataclasses import replace
import pytest
from clawlab.records import InputError, Task
from clawlab.capture.engines.oracle import RETRY, OracleEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.launch import tools as T
from clawlab.launch.grading import check, grade
from clawlab.launch.harness import load
from clawlab.launch.rollouts import Job, run_rollouts
from clawlab.launch.sandbox.base import probe
from clawlab.launch.tasks import load_suite, save_suite

SOURCE = '''
from typing import Literal

def note_add(state, text: str, tags: list[str] = [], mark: Literal['low', 'high'] = 'low', weight: float | None = None) -> int:
    """Add a note.

    text: what to note
    """
    if not text: raise ValueError('empty')
    state['notes'].append(dict(text=text, tags=tags, mark=mark, weight=weight)); return len(state['notes'])

def note_list(state, most: int = 99) -> list:
    "All notes."
    return [n['text'] for n in state['notes'][:most]]

def note_break(state, how: str):
    "Changes something, then fails."
    state['notes'].clear()
    if how == 'deep': return _deep()
    return dict(x={1, 2}) if how == 'set' else [][1]

def _deep(): return _deep()
'''
VERIFY = 'import json\ndef verify(w, e): return float([n["text"] for n in json.loads((w/".state/tools.json").read_text())["notes"]] == e["notes"])'
def call(name, **arguments): return dict(tool=name, arguments=arguments)
TASK = Task('t', 'notes', 'train', "Note 'it's é' and write the number of notes to n.", {'n': ''}, toolset=SOURCE, tools=('note_*',), state={'notes': [], 'faults': [dict(tool='note_add', call=1)]},
            steps=(call('note_add', text="it's é", tags=['a "b"']), call('note_list'), 'printf 1 > n'), habit=(call('note_add', text='x'), 'printf 1 > n'), verifier=VERIFY, expect={'notes': ["it's é"]})
NATIVE, PLAIN = ['claude-code', 'codex'], ['react', 'mini-swe-agent']
WHY = asyncio.run(probe('bwrap'))

@pytest.fixture
def place(tmp_path):
    "The task's tools on disk; `place(*argv)` runs the runner as sandboxes do."
    ws, at = tmp_path/'ws', tmp_path/'tools'; ws.mkdir(); at.mkdir(); (ws/'.state').mkdir()
    for p, c in T.tool_files(replace(TASK, state={**TASK.state, 'faults': []}), str(ws), str(at)).items(): (tmp_path/p).write_text(c)
    (ws/'.state/tools.json').write_text('{"notes": []}')
    def run(*argv, **kw): return subprocess.run(['/usr/bin/python3', '-I', '-S', str(at/'run.py'), *argv], capture_output=True, text=True, cwd='/', timeout=60, **kw)
    run.state = lambda: json.loads((ws/'.state/tools.json').read_text()); run.log = lambda: [json.loads(l) for l in (ws/'.state/calls.jsonl').read_text().splitlines()]; run.ws = ws
    return run


def test_schemas():
    add, listed, _ = T.specs(SOURCE)
    assert add['inputSchema'] == dict(type='object', required=['text'], additionalProperties=False, properties=dict(text=dict(type='string', description='what to note'), tags=dict(type='array', items=dict(type='string'), default=[]),
        mark=dict(type='string', enum=['low', 'high'], default='low'), weight=dict(type='number')))
    assert listed == dict(name='note_list', description='All notes.', inputSchema=dict(type='object', properties=dict(most=dict(type='integer', default=99)), required=[], additionalProperties=False))

@pytest.mark.parametrize('text, says', [('def f(state, *a): "x"', 'tools.py:1: f'), ('def f(state, a): "x"', 'no type'), ('def f(state, a: set): "x"', 'set'), ('\ndef f(x: int): "x"', 'tools.py:2'), ('def f(state): pass', 'docstring'),
    ('def f(state, a: int = b): "x"', 'default'), ('def f(state): """x\n\n    b: y"""', "'b'"), ('def f(state): "x"\ndef f(state): "x"', 'twice'), ('def f(', 'never closed'), ('import os', 'no tools')])
def test_bad_tools_are_one_clear_line(text, says):
    with pytest.raises(InputError) as e: T.specs(text)
    assert says in str(e.value) and '\n' not in str(e.value)

def test_the_launcher_never_runs_the_tools(tmp_path):
    assert T.specs(f'open({str(tmp_path/"x")!r}, "w")\ndef f(state): "x"') and not (tmp_path/'x').exists()

@pytest.mark.parametrize('change, says', [(dict(tools=('mail_*',)), "'mail_*'"), (dict(tools=('note_list',)), "'note_add'"), (dict(state=dict(faults=[dict(tool='nothing')])), "'nothing'"), (dict(state=dict(calls={})), '`calls`')])
def test_names_that_mean_nothing(change, says):
    with pytest.raises(InputError, match=says.replace('*', r'\*')): T.offered(replace(TASK, **change))

def test_the_command(place):
    assert place('note_add', '{"text": "it\'s é", "tags": ["\\ud800"]}').stdout == '1\n'
    assert place('note_add', '-', input='{"text": "two", "mark": "high", "weight": 2}').stdout == '2\n'
    assert json.loads(place('note_list').stdout) == ["it's é", 'two'] and [n['weight'] for n in place.state()['notes']] == [None, 2]
    assert json.loads(place('note_list', '{"most": 1.0}').stdout) == ["it's é"]
    assert place().returncode == 0 and 'note_add {"text": "string"' in place().stdout
    for argv, code, says in ((('note_add', '{}'), 1, "'text' is missing"), (('note_add', '{"text": 5}'), 1, "'text' is 5"), (('note_add', '{"text": "x", "tags": [1]}'), 1, "'tags'"), (('note_add', '{"text": "x", "mark": "no"}'), 1, 'enum'),
                             (('note_add', '{"text": true}'), 1, "'text'"), (('note_add', '{"txt": "x"}'), 1, "no argument 'txt'"), (('note_add', '{"text": ""}'), 1, 'error: empty'), (('note_add', '[1]'), 2, 'no object'),
                             (('note_add', '{'), 2, 'not a JSON object'), (('nothing',), 2, 'no tool'), (('note_list', '{"most": 1.5}'), 1, "'most' is 1.5"), (('note_break', '{"how": "set"}'), 1, 'TypeError'), (('note_break', '{"how": "list"}'), 1, 'IndexError'), (('note_break', '{"how": "deep"}'), 1, 'RecursionError')):
        p = place(*argv)
        assert p.returncode == code and says in p.stderr and not p.stdout, (argv, p)
    assert len(place.state()['notes']) == 2 and place.state()['calls'] == {'note_add': 3, 'note_list': 2, 'note_break': 3}  # what fails changes nothing
    assert T_replayed(place) == ''

def T_replayed(place, task=None):
    exec(T.RUNNER, space := {'__name__': 'runner'})
    return space['replayed'](str(place.ws), SOURCE, T.specs(SOURCE), {'notes': []})[0]

@pytest.mark.parametrize('where', ['before the record', 'within it', 'after it', 'before the end'])
def test_a_call_that_was_killed_is_forgotten_or_completed(place, where):
    "Whatever is left of it, the calls after it are nobody's forgery."
    at, add = place.ws/'.state', lambda t: place('note_add', json.dumps(dict(text=t)))
    add('a'); before = {p.name: p.read_bytes() for p in at.iterdir()}
    add('b'); after = {p.name: p.read_bytes() for p in at.iterdir()}
    size, log = len(after['calls.jsonl']), after['calls.jsonl']
    left = {'before the record': before, 'within it': {**before, 'calls.jsonl': log[:-5]}, 'after it': {**before, 'calls.jsonl': log}, 'before the end': after}[where]
    for p in at.iterdir(): p.unlink()
    for n, b in {**left, '.next.json': json.dumps(dict(size=size, state=json.loads(after['tools.json']))).encode()}.items(): (at/n).write_bytes(b)
    assert add('c').returncode == 0 and T_replayed(place) == ''
    assert [n['text'] for n in place.state()['notes']] == (['a', 'c'] if where in ('before the record', 'within it') else ['a', 'b', 'c']) and not (at/'.next.json').exists()

def test_arguments_without_a_bottom_end_nothing(place):
    deep = '{"text": ' + '['*100_000 + ']'*100_000 + '}'
    assert (r := place('note_add', '-', input=deep)).returncode == 2 and 'Traceback' not in r.stderr and r.stderr
    bad, good = rpc(place, '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "note_add", "arguments": ' + deep + '}}', dict(id=2, method='ping'))
    assert 'error' in bad and good == dict(jsonrpc='2.0', id=2, result={})
    (place.ws/'.state/tools.json').write_text('[]')
    assert (r := place('note_add', '{"text": "a"}')).returncode == 1 and 'broken' in r.stderr and 'Traceback' not in r.stderr

def test_calls_at_the_same_time_are_one_after_the_other(place):
    runs = [threading.Thread(target=place, args=('note_add', json.dumps({'text': str(i)}))) for i in range(8)]
    for r in runs: r.start()
    for r in runs: r.join()
    assert sorted(n['text'] for n in place.state()['notes']) == list('01234567') and len(place.log()) == 8 and T_replayed(place) == ''

def test_a_broken_state_is_an_error_and_no_traceback(place):
    (place.ws/'.state/tools.json').write_text('nonsense')
    p = place('note_list')
    assert p.returncode == 1 and 'broken' in p.stderr and 'Traceback' not in p.stderr

def test_filling_the_log_ends_the_calls_and_not_the_grader(place):
    line = json.dumps(dict(tool='note_list', arguments={}, result=[])) + '\n'
    (place.ws/'.state/calls.jsonl').write_text(line*1000)
    assert 'no calls left' in place('note_list').stderr and len(place.log()) == 1000
    (place.ws/'.state/calls.jsonl').write_text(line*1001); assert 'too long' in T_replayed(place)
    (place.ws/'.state/calls.jsonl').write_text(' '*(5 << 20)); assert 'too large' in T_replayed(place)

def rpc(place, *messages):
    out = place('mcp', input=''.join((m if isinstance(m, str) else json.dumps(m)) + '\n' for m in messages))
    assert not out.stderr, out.stderr
    return [json.loads(l) for l in out.stdout.splitlines()]

def test_mcp(place):
    def ask(id, method, **params): return dict(jsonrpc='2.0', id=id, method=method, params=params)
    say = rpc(place, ask(0, 'initialize', protocolVersion='2025-03-26', capabilities={}, clientInfo={}), dict(jsonrpc='2.0', method='notifications/initialized'), dict(jsonrpc='2.0', id='p', method='ping'), ask(1, 'tools/list'),
              ask(2, 'tools/call', name='note_add', arguments=dict(text='é')), ask(3, 'tools/call', name='note_add', arguments={}), ask(4, 'tools/call', name='none'), ask(5, 'tools/call', name='note_list', arguments=[1]),
              ask(6, 'resources/list'), ask(7, 'tools/call', name='note_list', arguments=None), '', '{', '[]', '{"id": 8}', '{"id": 9, "method": "ping", "params": 5}', ask(10, 'initialize', protocolVersion='1999'))
    assert [a.get('id') for a in say] == [0, 'p', 1, 2, 3, 4, 5, 6, 7, None, None, 8, 9, 10] and all(a['jsonrpc'] == '2.0' and ('result' in a) != ('error' in a) for a in say)
    say = {a['id']: a for a in say if a['id'] is not None}
    assert say[0]['result']['protocolVersion'] == '2025-03-26' and say[10]['result']['protocolVersion'] == '2025-06-18' and say[0]['result']['capabilities'] == {'tools': {}}
    assert say['p']['result'] == {} and say[1]['result']['tools'] == T.specs(SOURCE)
    assert say[2]['result'] == dict(content=[dict(type='text', text='1')], isError=False) and say[3]['result']['isError'] and 'missing' in say[3]['result']['content'][0]['text']
    assert [say[i]['error']['code'] for i in (4, 5, 6, 8, 9)] == [-32602, -32602, -32601, -32600, -32600] and say[7]['result']['content'][0]['text'] == '["é"]'

def test_only_what_a_task_offers_is_there():
    t = replace(TASK, tools=('note_list',), steps=(), habit=(), state={'notes': []})
    assert [x['name'] for x in json.loads(T.tool_files(t, '/w')['~/.tools/tools.json'])['tools']] == ['note_list'] == [x['name'] for x in T.offered(t)]
    plain = replace(TASK, tools=())
    assert T.tool_files(plain, '/w') == {} and T.start_files(plain) == TASK.files and T.guarded(plain) == VERIFY and T.equip(load('react'), plain, '/w') == (TASK.instruction, {})

def test_three_ways_to_tell_a_harness():
    h = load('react')
    def like(**kw): return replace(h, spec=h.spec.model_copy(update=kw))
    said, files = T.equip(h, TASK, '/w')
    assert said.startswith(TASK.instruction) and 'note_add(text, tags?, mark?, weight?)' in said and set(files) == {f'~/.tools/{f}' for f in ('run.py', 'tools.py', 'tools.json')}
    said, more = T.equip(like(skills=['~/.h/skills', 'skills']), TASK, '/w')
    assert said == TASK.instruction and set(more) - set(files) == {'~/.h/skills/tools/SKILL.md'}
    text = more['~/.h/skills/tools/SKILL.md']
    assert text.startswith('---\nname: tools\ndescription: ') and 'note_add(text: string, tags?: array of string, mark?: "low" | "high", weight?: number)' in text and 'note_list(most?: integer)' in text
    from clawlab.launch.harness import Mcp
    assert T.equip(like(skills=['x'], mcp=Mcp(args=['--mcp'])), TASK, '/w') == (TASK.instruction, files)


# the proof

STARTED = T.start_files(TASK)
FAULT = dict(tool='note_add', arguments=dict(text="it's é"), error=f'temporarily unavailable {RETRY}', fault=True)
ADDED = dict(tool='note_add', arguments=dict(text="it's é"), result=1)
def workspace(notes, log, calls=2, **more):
    return {'n': '1', '.state/tools.json': json.dumps(dict(TASK.state, notes=[dict(text=t, tags=[], mark='low', weight=None) for t in notes], calls={'note_add': calls})), '.state/calls.jsonl': ''.join(json.dumps(l) + '\n' for l in log), **more}

@pytest.mark.parametrize('files, score, tampered', [
    (workspace(["it's é"], [FAULT, ADDED]), 1, ''), (STARTED, 0, ''),
    (workspace([], [FAULT, ADDED], 1), 0, ''),                                             # killed between log and state: one behind
    (workspace(["it's é"], [FAULT, ADDED], **{'.state/calls.jsonl': json.dumps(FAULT) + '\n' + json.dumps(ADDED) + '\n{"tool": "no'}), 1, ''),  # killed in a line
    (workspace(["it's é"], []), 0, 'not what their calls made'), (workspace(["it's é"], [ADDED], 1), 0, 'not what they answered'),
    (workspace(["it's é"], [FAULT, {**ADDED, 'result': 2}]), 0, 'not what they answered'), (workspace(["it's é", 'x'], [FAULT, ADDED]), 0, 'not what their calls made'),
    (workspace(["it's é"], [FAULT, ADDED], **{'.state/tools.json': '['}), 0, 'broken'), ({}, 0, 'broken'),
    (workspace(["it's é"], [FAULT, {'tool': 'os', 'arguments': {}}]), 0, 'broken'), (workspace([], [{**FAULT, 'arguments': dict(text=float('nan'))}]), 0, 'not what they answered')])
async def test_the_proof(files, score, tampered):
    s = await grade(TASK, files, backend='process')
    assert s.score == score and tampered in s.detail.get('tampered', '') and ('tampered' in s.detail) == bool(tampered), s

async def test_arguments_that_are_no_number_are_no_forgery(place):
    place('note_add', '{"text": "x", "weight": NaN}')
    assert T_replayed(place) == ''

async def test_check_plays_the_tools():
    assert await check(TASK, 'process') == []
    lazy = replace(TASK, steps=('printf 1 > n',))
    assert await check(lazy, 'process') == ['solution: scores 0, must be 1']
    wrong = await check(replace(TASK, steps=(call('note_add', text=''), *TASK.steps)), 'process')
    assert wrong[0].startswith('solution: step 1 fails'), wrong

async def test_failures_met_and_overcome():
    s = await grade(TASK, workspace(["it's é"], [FAULT, ADDED]), backend='process')
    assert (s.detail['faults'], s.detail['recovered']) == (1, 1)
    s = await grade(TASK, workspace([], [FAULT], 1), backend='process')
    assert (s.score, s.detail['faults'], s.detail['recovered']) == (0, 1, 0)

def test_a_suite_with_tools(tmp_path):
    d = save_suite([TASK], tmp_path/'s')
    assert load_suite(d) == {'t': TASK}
    (d/'tools.py').write_text('def note_add(state, text): "Add."')
    with pytest.raises(InputError, match='tools.py:1: note_add'): load_suite(d)
    (d/'tools.py').write_text('def mail(state): "Mail."')
    with pytest.raises(InputError, match=r'train.jsonl:1: t: tools: .note_\*. is none of mail'): load_suite(d)


# in harnesses, by the oracle

async def run(name, task, tmp_path, backend='bwrap'):
    if WHY: pytest.skip(WHY)
    if (h := load(name)).absent: pytest.skip(h.absent)
    store = Store.open(tmp_path/'s.db')
    try:
        async with Proxy(OracleEngine({task.task_id: task}), store) as proxy: return (await run_rollouts([Job(task, name)], proxy=proxy, store=store, backend=backend, progress=False))[0]
    finally: store.close()

@pytest.mark.harness
@pytest.mark.parametrize('name', [*NATIVE, 'claude-code:full', *PLAIN])
async def test_every_harness_gets_the_tools(name, tmp_path):
    "One definition: native where the program takes MCP, else by the command; the failure is met and overcome, and the wire rules let the tools through."
    r = await run(name, TASK, tmp_path)
    assert (r.outcome, r.reward, r.scores.get('faults'), r.scores.get('recovered')) == ('ok', 1, 1, 1), (r.outcome, r.scores, r.meta)
    assert not any(c.quarantine for c in r.calls)
    names = [c.name for call in r.calls for c in call.response.tool_calls]
    offered = [t['name'] for t in r.calls[0].tools]
    prefix = load(name).spec.mcp.prefix if load(name).spec.mcp else None
    assert sum(n == f'{prefix}note_add' for n in names) == (2 if prefix else 0) and (f'{prefix}note_list' in offered) == bool(prefix), (names, offered)
    assert RETRY in next(m.content for m in r.calls[1].messages if m.role == 'tool')

@pytest.mark.harness
@pytest.mark.parametrize('name', ['codex', 'claude-code:full'])
async def test_a_program_without_mcp_reads_of_them_in_a_skill(name, tmp_path, monkeypatch):
    "What is then in its prompt is the skill's name and description, from its own folder."
    from clawlab.launch import rollouts
    monkeypatch.setattr(rollouts, 'load', lambda n: replace(h := load(n), spec=h.spec.model_copy(update=dict(mcp=None))))
    r = await run(name, TASK, tmp_path)
    assert (r.outcome, r.reward, r.scores['recovered']) == ('ok', 1, 1), r.meta
    said = '\n'.join(m.content for m in r.calls[0].messages)
    assert T.skill(T.offered(TASK)).split('description: ')[1].split('\n')[0][:60] in said and not any('note_add' in t['name'] for t in r.calls[0].tools)

@pytest.mark.harness
async def test_the_mixed_run_names_what_is_not_as_it_should_be(tmp_path):
    import importlib.util
    from pathlib import Path
    spec = importlib.util.spec_from_file_location('mixed_run', Path(__file__).parent.parent/'experiments/mixed_run.py')
    spec.loader.exec_module(m := importlib.util.module_from_spec(spec))
    r, h = await run('react', TASK, tmp_path), load('react')
    assert m.problems(r, h) == []
    a, b, *rest = r.calls
    spoilt = dict(reward=replace(r, reward=.5), outcome=replace(r, outcome='timeout'), recovered=replace(r, scores={**r.scores, 'recovered': 0}), roots=replace(r, calls=r.calls[1:] + (replace(a, prompt_ids=a.prompt_ids[1:], call_id='x'),)), quarantined=replace(r, calls=(replace(a, quarantine='odd'), b, *rest)))
    assert all(m.problems(x, h) for x in spoilt.values()), {k: m.problems(x, h) for k, x in spoilt.items()}
    assert m.problems(r, replace(h, spec=h.spec.model_copy(update=dict(expect=h.expect.model_copy(update=dict(leaves=2)))))) == ['leaves: 1 instead of 2']
