"""Unmodified programs against the real proxy: what each does to the tree when it works, forks, compacts, fails and is cut (harnesses.md)."""
import asyncio, json, re
import pytest
from clawlab.capture.engines.base import Sampling
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.launch.harness import load
from clawlab.launch.sandbox.base import Limits, make_sandbox, probe
from clawlab.learn.tree import build_tree
from clawlab.records import Rollout

WHY = asyncio.run(probe('bwrap'))
pytestmark = pytest.mark.harness

def get(name):
    if WHY: pytest.skip(WHY)
    h = load(name)
    if not h.installed: pytest.skip(f'{name} is not installed: clawlab harness install {h.spec.name}')
    return h

def call(name, **arguments): return f'<tool_call>{json.dumps(dict(name=name, arguments=arguments))}</tool_call>'

class Acting(ScriptEngine):
    "Answers by what it is asked: `act(context)` gives a text, or a script line."
    def __init__(self, act, **kw): super().__init__([], **kw); self.act = act
    def pick(self, context):
        line = self.act(context)
        return line if isinstance(line, dict) else dict(text=line)

def users(context): return [m.content for m in context.messages if m.role == 'user']
def answers(context): return [m.content for m in context.messages if m.role == 'tool']
def turn(context): return sum(m.role == 'assistant' for m in context.messages)

class Run:
    "One run of a program: how it ended, what it left, its calls and their tree."
    def __init__(self, ex, files, calls, session, refused): self.ex, self.files, self.calls, self.s, self.refused = ex, files, calls, session, refused
    @property
    def tree(self): return build_tree([c for c in self.calls if c.response])
    def roles(self): return [c.role for c in self.calls]
    def __repr__(self): return f'{self.ex}\n' + '\n'.join(f'{c.seq} {c.call_id[:6]} <- {str(c.parent_id)[:6]} {c.role} ({c.role_reason}) {c.finish} {c.delivered} {c.messages[-1].content[-80:]!r} => {c.response and c.response.content[:60]!r} {[t.name for t in c.response.tool_calls] if c.response else ""}' for c in self.calls) + f'\n{self.s.stats}'

class Relay:
    "Stands between a program and the proxy, and breaks the connection where `cut(n, data)` says: bytes of the n-th good answer to let through, or None."
    def __init__(self, port, cut): self.port, self.cut, self.n = port, cut, -1

    async def __call__(self, reader, writer):
        up_reader, up_writer = await asyncio.open_connection('127.0.0.1', self.port)
        jobs = [asyncio.create_task(self.up(reader, up_writer)), asyncio.create_task(self.down(up_reader, writer))]
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        for j in jobs: j.cancel()
        for w in (writer, up_writer): w.transport.abort()

    async def up(self, reader, writer):
        while data := await reader.read(1 << 16): writer.write(data); await writer.drain()

    async def down(self, reader, writer):
        seen, sent = b'', 0
        while data := await reader.read(1 << 16):
            if data.startswith(b'HTTP/1.1 200'): self.n += 1; seen, sent = b'', 0
            seen += data
            end = self.cut(self.n, seen) if self.n >= 0 else None
            writer.write(seen[sent:end]); sent = len(seen)
            await writer.drain()
            if end is not None: return await asyncio.sleep(1)   # a reset takes with it what the client hasn't read yet

async def play(h, act, tmp_path, *, instruction='Do the task.', env=None, max_context=1 << 20, cut=lambda n, data: None, edit=lambda files: files, seconds=120):
    "One run in a sandbox, its connections through a `Relay`."
    with Store.open(tmp_path/'s.db') as store:
        async with Proxy(Acting(act, max_context=max_context), store, sampling=Sampling(max_tokens=32768)) as p:
            s, servers = await p.open_session(Rollout('r1', 't', h.name), expect_harness=h.wire), []
            async def listen(sock): servers.append(await asyncio.start_server(Relay(p.port, cut), sock=sock))
            try:
                async with make_sandbox('bwrap', limits=Limits(seconds=seconds), binds=h.binds, listener=listen) as box:
                    argv, e, files = h.command(instruction, 'clawlab', box.url + s.base_path, s.api_key, box.limits)
                    await box.put({'a.txt': 'one\ntwo\nthree\n', **edit(files)})
                    ex, out = await box.exec(argv, {**e, **(env or {})}), await box.get()
            finally:
                for x in servers: x.close()
            return Run(ex, out, await p.close_session(s.session_id), s, s.stats.refused)


def whole(r):
    "What holds for every run without faults: nothing lost, nothing foreign, each sampled token of a main call trained once."
    t = r.tree
    for c, (p, o) in zip(t.calls, t.expand()): assert p.tobytes() == c.prompt_ids.tobytes() and o.tobytes() == c.output_ids.tobytes()
    assert t.discarded is None and not any(c.quarantine for c in r.calls) and set(t.fate_C) == {'accepted'}, r
    assert t.stats['sampled'] == sum(len(c.output_ids) for c in r.calls if c.role == 'main') and t.stats['trained'] == t.stats['sampled'] - t.stats['shared'], r
    return t

def chain(r):
    "One chain, no drift, trained = sampled."
    t = whole(r)
    assert (t.stats['roots'], t.stats['lineage_leaves'], t.stats['token_leaves'], t.stats['drift'], t.stats['shared']) == (1, 1, 1, 0, 0), r
    assert all(b.anchor_id == b.parent_id == a.call_id for a, b in zip(r.calls, r.calls[1:])) and set(r.roles()) == {'main'}, r

# ---------------------------------------------------------------- Claude Code, the whole program

CLAUDE = 'claude-code:full'
def bash(command): return call('Bash', command=command, description='x')
def agent(name): return call('Agent', description=name, prompt=f'SUBTASK-{name} please', subagent_type='general-purpose', run_in_background=False)

async def test_claude_turns_and_parallel_tools(tmp_path):
    texts = [bash('wc -l < a.txt'), 'Two at once.' + bash('echo first') + bash('echo second; false'), 'done']
    r = await play(get(CLAUDE), lambda c: texts[turn(c)], tmp_path)
    chain(r)
    got = {(m.content.split()[-1], m.is_error) for m in r.calls[-1].messages if m.role == 'tool'}
    assert r.ex.code == 0 and len(r.calls) == 3 and got == {('3', False), ('first', False), ('second', True)}, r

async def test_claude_subagents(tmp_path):
    "Two at a time, interleaved on the wire: trees of their own, not trained; the main chain is whole."
    def act(c):
        for n in ('ALPHA', 'BETA'):
            if f'SUBTASK-{n}' in ' '.join(users(c)): return bash(f'echo {n}') if not turn(c) else f'{n} result'
        return 'all done' if turn(c) else agent('ALPHA') + agent('BETA')
    r = await play(get(CLAUDE), act, tmp_path)
    t = whole(r)
    assert r.ex.code == 0 and sorted(r.roles()) == ['main']*2 + ['subagent']*4 and (t.stats['lineage_leaves'], t.stats['main_lineage_leaves'], t.stats['drift']) == (3, 1, 0), r
    assert [('ALPHA result' in m.content, 'BETA result' in m.content) for m in r.calls[-1].messages if m.role == 'tool'] == [(True, False), (False, True)], r

async def test_claude_compacts_when_the_window_is_full(tmp_path):
    "The vendor's overflow error makes it summarise; then the conversation has a new root."
    texts = ['word ' * 4000 + bash(f'echo {i}') for i in range(3)] + ['too late']
    def act(c):
        if 'create a detailed summary' in c.messages[-1].content: return '<summary>Counted the lines: 3.</summary>'
        return 'finished after it' if any('being continued' in u for u in users(c)) else texts[turn(c)]
    first = await play(get(CLAUDE), lambda c: 'done', tmp_path)                       # how long is the first prompt here?
    (tmp_path/'2').mkdir()
    r = await play(get(CLAUDE), act, tmp_path/'2', max_context=len(first.calls[0].prompt_ids) + 50000)
    assert r.ex.code == 0 and b'finished after it' in r.ex.stdout and r.s.stats.overflows >= 1, r
    t = whole(r)
    assert r.roles().count('compaction') == 1 and r.roles()[-1] == 'main' and r.calls[-1].parent_id is None, r
    c = r.calls[r.roles().index('compaction')]
    assert c.parent_id and c.anchor_id and t.stats['main_lineage_leaves'] == 2, r

async def test_claude_after_a_500(tmp_path):
    failed = []
    def act(c):
        if not failed: failed.append(1); return dict(error='overloaded')
        return 'done' if turn(c) else bash('wc -l a.txt')
    r = await play(get(CLAUDE), act, tmp_path)
    assert r.ex.code == 0 and [c.finish for c in r.calls] == ['error', 'tool_calls', 'stop'] and r.refused[500] == 1, r
    r.calls = r.calls[1:]
    chain(r)

def cutting():
    "Other words on every attempt, so that no two replies are the same."
    n = []
    def act(c): n.append(1); return 'done' if answers(c) else f'Look {len(n)}. ' + bash(f'wc -l a.txt # {len(n)}')
    return act

def before(mark: bytes, count=1, n=0):
    "Cut the n-th answer in front of the count-th `mark`."
    def cut(i, data):
        at = -1
        for _ in range(count):
            if (at := data.find(mark, at + 1)) < 0: return None
        return at if i == n else None
    return cut

@pytest.mark.parametrize('cut', [before(b'event: content_block_start', 2), before(b'"input_json_delta"')], ids=['behind the text', 'in the tool call'])
async def test_claude_keeps_a_text_block_of_a_stream_that_was_cut(tmp_path, cut):
    r = await play(get(CLAUDE), cutting(), tmp_path, cut=cut)
    a, b, c = r.calls
    t = r.tree
    assert r.ex.code == 0 and b.parent_id == a.call_id and 'Look 1.' in [m.content.strip() for m in b.messages if m.role == 'assistant'], r
    assert t.fate_C == ['aborted', 'accepted', 'accepted'] and t.stats['main_lineage_leaves'] == 1 and t.stats['drift'] == 0, r
    kept = r.s.lineage.template.decode(a.output_ids[:t.kept_C[0]])
    assert kept == 'Look 1. ' and t.stats['trained'] == t.kept_C.sum() == len(b.output_ids) + len(c.output_ids) + t.kept_C[0], (kept, r)

async def test_claude_runs_a_tool_call_that_arrived_though_the_stream_was_cut(tmp_path):
    r = await play(get(CLAUDE), cutting(), tmp_path, cut=before(b'event: message_delta'))
    assert r.ex.code == 0 and len(r.calls) == 2, r
    chain(r)

async def test_claude_retries_a_stream_that_was_cut_before_its_first_block(tmp_path):
    r = await play(get(CLAUDE), cutting(), tmp_path, cut=before(b'event: content_block_start'))
    t = r.tree
    assert r.ex.code == 0 and len(r.calls) == 3 and t.fate_C == ['abandoned', 'accepted', 'accepted'] and t.stats['lineage_leaves'] == 1, r
    assert (r.calls[0].prompt_ids == r.calls[1].prompt_ids).all() and t.stats['trained'] == sum(len(c.output_ids) for c in r.calls[1:]), r

# ---------------------------------------------------------------- Codex

def shell(c, command):
    "A call of the shell tool that is offered."
    t = next(t for t in c.tools if t['name'] in ('exec_command', 'shell', 'shell_command'))
    key = 'cmd' if 'cmd' in t['parameters']['properties'] else 'command'
    listed = t['parameters']['properties'][key].get('type') == 'array'
    return call(t['name'], **{key: ['bash', '-c', command] if listed else command})

async def test_codex_turns_and_parallel_tools(tmp_path):
    r = await play(get('codex'), lambda c: [shell(c, 'wc -l < a.txt'), 'Two at once.' + shell(c, 'echo first') + shell(c, 'echo second; false'), 'done'][turn(c)], tmp_path)
    chain(r)
    assert r.ex.code == 0 and len(r.calls) == 3 and [m.content.split()[-1] for m in r.calls[-1].messages if m.role == 'tool'] == ['3', 'first', 'second'], r

async def test_codex_subagents(tmp_path):
    def act(c):
        for n in ('ALPHA', 'BETA'):
            if f'SUBTASK-{n}' in ' '.join(users(c)): return f'{n} result' if answers(c) else shell(c, f'echo {n}')
        if not turn(c): return ''.join(call('multi_agent_v1__spawn_agent', message=f'SUBTASK-{n} please') for n in ('ALPHA', 'BETA'))
        return 'all done' if turn(c) > 1 else call('multi_agent_v1__wait_agent', targets=[json.loads(a)['agent_id'] for a in answers(c)], timeout_ms=60000)
    r = await play(get('codex'), act, tmp_path)
    t = whole(r)
    assert r.ex.code == 0 and r.roles().count('subagent') == 4 and set(r.roles()) == {'main', 'subagent'}, r
    assert (t.stats['lineage_leaves'], t.stats['main_lineage_leaves'], t.stats['drift']) == (3, 1, 0), r
    assert all(any(f'{n} result' in u for u in (m.content for m in r.calls[-1].messages)) for n in ('ALPHA', 'BETA')), r

async def test_codex_compacts_when_usage_says_so(tmp_path):
    def act(c):
        if not c.tools: return 'SUMMARY: the file has 3 lines.'
        return 'finished after it' if any('SUMMARY' in u for u in users(c)) else 'word ' * 4000 + shell(c, 'wc -l < a.txt')
    tight = lambda files: {k: re.sub(r'model_context_window = \d+', 'model_context_window = 90000\nmodel_auto_compact_token_limit = 50000', v) for k, v in files.items()}
    r = await play(get('codex'), act, tmp_path, edit=tight)
    t = whole(r)
    assert r.ex.code == 0 and r.roles() == ['main', 'compaction', 'main'] and b'finished after it' in r.ex.stdout, r
    assert r.calls[1].parent_id == r.calls[0].call_id and r.calls[2].parent_id is None and (t.stats['lineage_leaves'], t.stats['main_lineage_leaves']) == (2, 1), r

async def test_codex_after_a_500(tmp_path):
    failed = []
    def act(c):
        if not failed: failed.append(1); return dict(error='overloaded')
        return 'done' if answers(c) else shell(c, 'wc -l a.txt')
    r = await play(get('codex'), act, tmp_path)
    assert r.ex.code == 0 and [c.finish for c in r.calls] == ['error', 'tool_calls', 'stop'] and r.refused[500] == 1, r
    r.calls = r.calls[1:]
    chain(r)

def looking():
    "Other words on every attempt."
    n = []
    def act(c): n.append(1); return 'done' if answers(c) else f'Look {len(n)}. ' + shell(c, f'wc -l a.txt # {len(n)}')
    return act

@pytest.mark.parametrize('cut', [before(b'event: response.output_item.added', 2), before(b'event: response.function_call_arguments.done')], ids=['behind the text', 'in the tool call'])
async def test_codex_keeps_an_item_of_a_stream_that_was_cut(tmp_path, cut):
    "The retry ends with the item that arrived, and its reply stands behind it."
    r = await play(get('codex'), looking(), tmp_path, cut=cut)
    a, b, c = r.calls
    t = r.tree
    assert r.ex.code == 0 and b.parent_id == a.call_id and b.messages[-1].role == 'assistant' and b.messages[-1].content.strip() == 'Look 1.', r
    assert t.fate_C == ['aborted', 'accepted', 'accepted'] and t.stats['main_lineage_leaves'] == 1 and t.stats['drift'] == 0, r
    assert r.s.lineage.template.decode(a.output_ids[:t.kept_C[0]]) == 'Look 1. ' and t.stats['trained'] == t.kept_C[0] + len(b.output_ids) + len(c.output_ids), r

async def test_codex_runs_a_tool_call_that_arrived_though_the_stream_was_cut(tmp_path):
    r = await play(get('codex'), looking(), tmp_path, cut=before(b'event: response.completed'))
    assert r.ex.code == 0 and len(r.calls) == 2, r
    chain(r)

async def test_codex_retries_a_stream_that_was_cut_before_its_first_item(tmp_path):
    r = await play(get('codex'), looking(), tmp_path, cut=before(b'event: response.output_item.done'))
    t = r.tree
    assert r.ex.code == 0 and len(r.calls) == 3 and t.fate_C == ['abandoned', 'accepted', 'accepted'] and t.stats['lineage_leaves'] == 1, r
    assert t.stats['trained'] == sum(len(c.output_ids) for c in r.calls[1:]), r
