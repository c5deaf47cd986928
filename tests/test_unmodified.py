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

async def play(h, act, tmp_path, *, max_context=1 << 20, cut=lambda n, data: None, edit=lambda files: files):
    "One run in a sandbox, its connections through a `Relay`."
    with Store.open(tmp_path/'s.db') as store:
        async with Proxy(Acting(act, max_context=max_context), store, sampling=Sampling(max_tokens=32768)) as p:
            s, servers = await p.open_session(Rollout('r1', 't', h.name), expect_harness=h.wire), []
            async def listen(sock): servers.append(await asyncio.start_server(Relay(p.port, cut), sock=sock))
            try:
                async with make_sandbox('bwrap', limits=Limits(seconds=120), binds=h.binds, listener=listen) as box:
                    argv, e, files = h.command('Do the task.', 'clawlab', box.url + s.base_path, s.api_key, box.limits)
                    await box.put({'a.txt': 'one\ntwo\nthree\n', **edit(files)})
                    ex, out = await box.exec(argv, e), await box.get()
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

def shell(c, command):
    "A call of the shell tool that is offered."
    t = next(t for t in c.tools if t['name'] in ('Bash', 'exec_command'))
    p = t['parameters']['properties']
    return call(t['name'], **{'cmd' if 'cmd' in p else 'command': command}, **({'description': 'x'} if 'description' in p else {}))

def results(r):
    "Tool results that the last main call has seen, in the order in which they were asked for. (Programs return parallel ones as they finish.)"
    got = {m.tool_call_id: m for m in r.calls[-1].messages if m.role == 'tool'}
    return [got[t.id] for c in r.calls if c.role == 'main' for t in c.response.tool_calls]

def before(mark: bytes, count=1):
    "Cut the first answer in front of the count-th `mark`."
    def cut(n, data):
        at = -1
        for _ in range(count):
            if (at := data.find(mark, at + 1)) < 0: return None
        return at if n == 0 else None
    return cut

CLAUDE, CODEX = 'claude-code:full', 'codex'
CUTS = {CLAUDE: dict(first=before(b'event: content_block_start'), text=before(b'event: content_block_start', 2), call=before(b'"input_json_delta"'), end=before(b'event: message_delta')),
        CODEX: dict(first=before(b'event: response.output_item.done'), text=before(b'event: response.output_item.added', 2),
                    call=before(b'event: response.function_call_arguments.done'), end=before(b'event: response.completed'))}
both = pytest.mark.parametrize('name', CUTS)

# ---------------------------------------------------------------- Claude Code, the whole program, and Codex

@both
async def test_turns_and_parallel_tools(tmp_path, name):
    r = await play(get(name), lambda c: [shell(c, 'wc -l < a.txt'), 'Two at once.' + shell(c, 'echo first') + shell(c, 'echo second; false'), 'done'][turn(c)], tmp_path)
    chain(r)
    assert r.ex.code == 0 and len(r.calls) == 3 and [m.content.split()[-1] for m in results(r)] == ['3', 'first', 'second'], r
    if name == CLAUDE: assert [m.is_error for m in results(r)] == [False, False, True], r

@both
async def test_after_a_500(tmp_path, name):
    failed = []
    def act(c):
        if not failed: failed.append(1); return dict(error='overloaded')
        return 'done' if answers(c) else shell(c, 'wc -l a.txt')
    r = await play(get(name), act, tmp_path)
    assert r.ex.code == 0 and [c.finish for c in r.calls] == ['error', 'tool_calls', 'stop'] and r.refused[500] == 1, r
    r.calls = r.calls[1:]
    chain(r)

def looking():
    "Other words on every attempt, so that no two replies are the same."
    n = []
    def act(c): n.append(1); return 'done' if answers(c) else f'Look {len(n)}. ' + shell(c, f'wc -l a.txt # {len(n)}')
    return act

@both
@pytest.mark.parametrize('where', ['text', 'call'])
async def test_what_arrived_whole_of_a_cut_stream_is_kept(tmp_path, name, where):
    "Claude Code asks to resume behind the text; the retry of Codex ends with it."
    r = await play(get(name), looking(), tmp_path, cut=CUTS[name][where])
    a, b, c = r.calls
    t = r.tree
    assert r.ex.code == 0 and b.parent_id == a.call_id and 'Look 1.' in [m.content.strip() for m in b.messages if m.role == 'assistant'], r
    assert b.messages[-1].role == ('user' if name == CLAUDE else 'assistant'), r
    assert t.fate_C == ['aborted', 'accepted', 'accepted'] and t.stats['main_lineage_leaves'] == 1 and t.stats['drift'] == 0, r
    assert r.s.lineage.template.decode(a.output_ids[:t.kept_C[0]]) == 'Look 1. ' and t.stats['trained'] == t.kept_C[0] + len(b.output_ids) + len(c.output_ids), r

@both
async def test_a_tool_call_that_arrived_is_run_though_the_stream_was_cut(tmp_path, name):
    r = await play(get(name), looking(), tmp_path, cut=CUTS[name]['end'])
    assert r.ex.code == 0 and len(r.calls) == 2, r
    chain(r)

@both
async def test_a_stream_cut_before_its_first_item_is_retried(tmp_path, name):
    r = await play(get(name), looking(), tmp_path, cut=CUTS[name]['first'])
    t = r.tree
    assert r.ex.code == 0 and len(r.calls) == 3 and t.fate_C == ['abandoned', 'accepted', 'accepted'] and t.stats['lineage_leaves'] == 1, r
    assert (r.calls[0].prompt_ids == r.calls[1].prompt_ids).all() and t.stats['trained'] == sum(len(c.output_ids) for c in r.calls[1:]), r

def delegate(tool, **kw): return ''.join(call(tool, **{k: v.format(n) if isinstance(v, str) else v for k, v in kw.items()}) for n in ('ALPHA', 'BETA'))

def subtask(c):
    "What a subagent says; None where the main agent is asked."
    n = next((n for n in ('ALPHA', 'BETA') if f'SUBTASK-{n}' in ' '.join(users(c))), None)
    return n and (f'{n} result' if answers(c) else shell(c, f'echo {n}'))

async def test_claude_subagents(tmp_path):
    "Two at a time, interleaved on the wire: trees of their own, not trained; the main chain is whole."
    def act(c): return subtask(c) or ('all done' if turn(c) else delegate('Agent', description='{}', prompt='SUBTASK-{} please', subagent_type='general-purpose', run_in_background=False))
    r = await play(get(CLAUDE), act, tmp_path)
    t = whole(r)
    assert r.ex.code == 0 and sorted(r.roles()) == ['main']*2 + ['subagent']*4 and (t.stats['lineage_leaves'], t.stats['main_lineage_leaves'], t.stats['drift']) == (3, 1, 0), r
    assert [n in m.content for n, m in zip(('ALPHA result', 'BETA result'), results(r), strict=True)] == [True, True], r

async def test_codex_subagents(tmp_path):
    def act(c):
        if says := subtask(c): return says
        if not turn(c): return delegate('multi_agent_v1__spawn_agent', message='SUBTASK-{} please')
        said, ids = ' '.join(m.content for m in c.messages), [json.loads(m.content)['agent_id'] for m in c.messages if m.role == 'tool' and '"agent_id"' in m.content]
        if all(f'{n} result' in said for n in ('ALPHA', 'BETA')) or turn(c) > 9: return 'all done'
        return call('multi_agent_v1__wait_agent', targets=ids, timeout_ms=60000)   # it comes back with the first that is done
    r = await play(get(CODEX), act, tmp_path)
    t = whole(r)
    assert r.ex.code == 0 and r.roles().count('subagent') == 4 and set(r.roles()) == {'main', 'subagent'}, r
    assert (t.stats['lineage_leaves'], t.stats['main_lineage_leaves'], t.stats['drift']) == (3, 1, 0), r
    assert all(any(f'{n} result' in m.content for m in r.calls[-1].messages) for n in ('ALPHA', 'BETA')), r

async def test_claude_compacts_when_the_window_is_full(tmp_path):
    "The vendor's overflow error makes it summarise; then the conversation has a new root."
    def act(c):
        if 'create a detailed summary' in c.messages[-1].content: return '<summary>Counted the lines: 3.</summary>'
        return 'finished after it' if any('being continued' in u for u in users(c)) else 'word ' * 4000 + shell(c, f'echo {turn(c)}')
    first = await play(get(CLAUDE), lambda c: 'done', tmp_path)                       # how long is the first prompt here?
    (tmp_path/'2').mkdir()
    r = await play(get(CLAUDE), act, tmp_path/'2', max_context=len(first.calls[0].prompt_ids) + 50000)
    assert r.ex.code == 0 and b'finished after it' in r.ex.stdout and r.s.stats.overflows >= 1, r
    t = whole(r)
    assert r.roles().count('compaction') == 1 and r.roles()[-1] == 'main' and r.calls[-1].parent_id is None, r
    c = r.calls[r.roles().index('compaction')]
    assert c.parent_id and c.anchor_id and t.stats['main_lineage_leaves'] == 2, r

async def test_codex_compacts_when_usage_says_so(tmp_path):
    def act(c):
        if not c.tools: return 'SUMMARY: the file has 3 lines.'
        return 'finished after it' if any('SUMMARY' in u for u in users(c)) else 'word ' * 4000 + shell(c, 'wc -l < a.txt')
    tight = lambda files: {k: re.sub(r'model_context_window = \d+', 'model_context_window = 90000\nmodel_auto_compact_token_limit = 50000', v) for k, v in files.items()}
    r = await play(get(CODEX), act, tmp_path, edit=tight)
    t = whole(r)
    assert r.ex.code == 0 and r.roles() == ['main', 'compaction', 'main'] and b'finished after it' in r.ex.stdout, r
    assert r.calls[1].parent_id == r.calls[0].call_id and r.calls[2].parent_id is None and (t.stats['lineage_leaves'], t.stats['main_lineage_leaves']) == (2, 1), r
