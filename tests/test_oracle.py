"The oracle: the right commands through any shell tool, in any harness's history; deterministic imperfection."
import numpy as np, pytest
from clawlab.capture.engines.base import Context, Engine, Sampling
from clawlab.capture.engines.oracle import SUBMIT, OracleEngine
from clawlab.records import EngineError, Message, Task

def tool(name, required=(), **props): return dict(name=name, description='', parameters=dict(type='object', properties={k: {'type': t} for k, t in props.items()}, required=list(required)))
TASKS = {t.task_id: t for t in (
    Task('a', 'f', 'train', 'do', steps=('echo "é" > x', 'cat x'), habit=('touch x',)),
    Task('b', 'f', 'train', 'do', steps=('ls',)))}

@pytest.mark.parametrize('tools, name, args', [
    ([tool('Edit', file_path='string'), tool('Bash', ['command'], command='string', timeout='number')], 'Bash', {'command': 'ls'}),
    ([tool('exec_command', ['cmd'], cmd='string', workdir='string')], 'exec_command', {'cmd': 'ls'}),
    ([tool('shell', ['command'], command='array')], 'shell', {'command': ['bash', '-lc', 'ls']}),
    ([tool('run_shell_command', ['command', 'is_background'], command='string', is_background='boolean')], 'run_shell_command', {'command': 'ls', 'is_background': False}),
    ([tool('schedule', command='string'), tool('terminal', ['command', 'description'], command='string', description='string')], 'terminal', {'command': 'ls', 'description': 'ls'}),
])
async def test_every_kind_of_shell(tools, name, args):
    e = OracleEngine(TASKS)
    g = await e.generate([], Sampling(), Context(task_id='b', messages=(Message('user', 'do'),), tools=tuple(tools)))
    (c,) = e.template.parse(g.ids).message.tool_calls
    assert (c.name, c.arguments) == (name, args)

async def play(e, task, seed=0, user='do', tools=(tool('Bash', command='string'),)):
    t, h, out = e.template, [Message('user', user)], []
    for _ in range(9):
        g = await e.generate(t.render(h, tools), Sampling(), Context(task_id=task, seed=seed, messages=tuple(h), tools=tools, template=t))
        assert np.isnan(g.logprobs).all() and (g.versions == -1).all() and g.ids[-1] in t.eos_ids
        m = t.parse(g.ids).message
        if not m.tool_calls: return out, m
        out.append(m.tool_calls[0].arguments['command'])
        if SUBMIT in out[-1]: return out, m
        h += [m, Message('tool', 'Exit code 1', is_error=True)] # whatever comes back

async def test_steps_then_a_closing_word():
    e = OracleEngine(TASKS)
    assert isinstance(e, Engine)
    assert await play(e, 'a') == (['echo "é" > x', 'cat x'], Message('assistant', 'done'))
    assert (await play(e, 'a', user=f'... run `echo {SUBMIT}` ...'))[0] == ['echo "é" > x', 'cat x', f'echo {SUBMIT}']
    assert (await play(OracleEngine(TASKS, think='ok'), 'b'))[0] == ['ls']

async def test_side_calls_and_unknown_tasks():
    e = OracleEngine(TASKS)
    g = await e.generate([], Sampling(), Context(task_id='a', messages=(Message('user', 'title?'),)))
    assert not e.template.parse(g.ids).finish_tools
    with pytest.raises(EngineError, match='zzz'): await e.generate([], Sampling(), Context(task_id='zzz'))

async def test_wrong_is_decided_by_the_seed():
    e = OracleEngine(TASKS, wrong=.6)
    first = [(await play(e, 'a', s))[0] for s in range(200)]
    assert first == [(await play(e, 'a', s))[0] for s in range(200)]
    assert .5 < sum(x == ['touch x'] for x in first)/200 < .7
    assert all([(await play(e, 'b', s))[0] == ['ls'] for s in range(20)]) # no habit, nothing to get wrong
