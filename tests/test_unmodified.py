"""Unmodified programs against the real proxy: what each does to the tree when it works, forks, compacts, fails and is cut (harnesses.md)."""
import asyncio, json, os, re, signal
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
import pytest
from clawlab.capture.engines.base import Sampling
from clawlab.capture.engines.oracle import SUBMIT, shell_call, shell_tool
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.turn import DIALECTS
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
    "One run of a program: how it ended, what it left, its calls and their tree, and the bytes of each good answer."
    def __init__(self, ex, files, calls, session, wire): self.ex, self.files, self.calls, self.s, self.refused, self.wire = ex, files, calls, session, session.stats.refused, wire
    @property
    def tree(self): return build_tree([c for c in self.calls if c.response])
    def roles(self): return [c.role for c in self.calls]
    def __repr__(self): return f'{self.ex}\n' + '\n'.join(f'{c.seq} {c.call_id[:6]} <- {str(c.parent_id)[:6]} {c.role} ({c.role_reason}) {c.finish} {c.delivered} {c.messages[-1].content[-80:]!r} => {c.response and c.response.content[:60]!r} {[t.name for t in c.response.tool_calls] if c.response else ""}' for c in self.calls) + f'\n{self.s.stats}'

class Relay:
    "Stands between a program and the proxy, and breaks the connection where `cut(n, data)` says: bytes of the n-th good answer to let through, or None."
    def __init__(self, port, cut): self.port, self.cut, self.wire = port, cut, []

    async def __call__(self, reader, writer):
        up_reader, up_writer = await asyncio.open_connection('127.0.0.1', self.port)
        jobs = [asyncio.create_task(self.up(reader, up_writer)), asyncio.create_task(self.down(up_reader, writer))]
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        for j in jobs: j.cancel()
        for w in (writer, up_writer): w.transport.abort()

    async def up(self, reader, writer):
        while data := await reader.read(1 << 16): writer.write(data); await writer.drain()

    async def down(self, reader, writer):
        n, seen, sent = -1, bytearray(), 0
        while data := await reader.read(1 << 16):
            if data.startswith(b'HTTP/1.1 200'): n, seen, sent = len(self.wire), bytearray(), 0; self.wire.append(seen)
            seen += data
            end = self.cut(n, seen) if n >= 0 else None
            writer.write(bytes(seen[sent:end])); sent = len(seen)
            await writer.drain()
            if end is not None: return await asyncio.sleep(1)   # a reset takes with it what the client hasn't read yet

async def at(p, h, *, rollout='r1', cut=lambda n, data: None, edit=lambda files: files, env=(), then=None, seconds=120, **session):
    "One run in a sandbox at a proxy, its connections through a `Relay` (`cut=None`: straight). `then(box)` runs beside it."
    s, relay, servers = await p.open_session(Rollout(rollout, 't', h.name), **h.session | session), cut and Relay(p.port, cut), []
    async def listen(sock): servers.append(await asyncio.start_server(relay, sock=sock)) if relay else await p.listen(sock, s.session_id)
    try:
        async with make_sandbox('bwrap', limits=Limits(seconds=seconds), binds=h.binds, listener=listen) as box:
            argv, e, files = h.command('Do the task.', 'clawlab', box.url + s.base_path, s.api_key, box.limits)
            await box.put({'a.txt': 'one\ntwo\nthree\n', **edit(files)})
            (ex, *_), out = await asyncio.gather(box.exec(argv, e | dict(env)), *[then(box)] if then else []), await box.get()
    finally:
        for x in servers: x.close()
    return Run(ex, out, await p.close_session(s.session_id), s, relay and relay.wire)

@asynccontextmanager
async def serving(tmp_path, act, max_context=1 << 20, **kw):
    with Store.open(tmp_path/'s.db') as store:
        async with Proxy(Acting(act, max_context=max_context), store, sampling=Sampling(max_tokens=32768), **kw) as p: yield p

async def play(h, act, tmp_path, *, max_context=1 << 20, **kw):
    "One run, at a proxy of its own."
    async with serving(tmp_path, act, max_context) as p: return await at(p, h, **kw)


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
    t = shell_call(*shell_tool(c.tools), command)
    return call(t.name, **t.arguments)

def results(r):
    "Tool results that the last main call has seen, in the order in which they were asked for. (Programs return parallel ones as they finish.)"
    bare = lambda id: id.replace('_', '')   # OpenClaw
    got = {bare(m.tool_call_id): m for m in r.calls[-1].messages if m.role == 'tool'}
    return [got[bare(t.id)] for c in r.calls if c.role == 'main' for t in c.response.tool_calls]

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

async def test_claude_fork(tmp_path):
    "A fork has the whole history, the turn that made it without its text: it goes on from that turn, and its tokens branch off where that turn began."
    def act(c):
        if 'that fork is you' in ' '.join(answers(c)): return 'FORK RESULT' if len(answers(c)) > 2 else shell(c, 'echo in the fork')
        return [shell(c, 'wc -l < a.txt'), 'I split.' + call('Agent', description='x', prompt='SUBTASK', subagent_type='fork'), 'I go on.', 'all done'][turn(c)]
    r = await play(get(CLAUDE), act, tmp_path, env=dict(CLAUDE_CODE_FORK_SUBAGENT='1'))
    t = whole(r)
    main, (a, b) = [[c for c in r.calls if c.role == role] for role in ('main', 'subagent')]
    assert r.ex.code == 0 and 3 <= len(main) <= 4 and any('FORK RESULT' in m.content for m in main[-1].messages), r   # it hears of the fork's end when it comes
    assert all(y.parent_id == y.anchor_id == x.call_id for x, y in [*zip(main, main[1:]), (a, b)]), r
    assert (a.parent_id, a.anchor_id, a.drift) == (main[1].call_id, main[0].call_id, 1), r
    assert (main[1].response.content, [m for m in a.messages if m.role == 'assistant'][-1].content) == ('I split.', ''), r
    assert (t.stats['roots'], t.stats['lineage_leaves'], t.stats['token_leaves'], t.stats['main_lineage_leaves'], t.stats['drift']) == (1, 2, 2, 1, 1), r

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

# ---------------------------------------------------------------- OpenClaw, which takes twenty processor seconds for a run

@pytest.mark.slow
async def test_openclaw_turns_and_parallel_tools(tmp_path):
    "One lineage. A last message with its own state comes with each request and is gone from the next, so that every call has a token branch of its own; arguments are written anew."
    h = get('openclaw')
    r = await play(h, lambda c: [shell(c, 'wc -l < a.txt'), 'Two at once.' + shell(c, 'echo first') + shell(c, 'echo second'), 'done'][turn(c)], tmp_path, seconds=280)
    t = whole(r)
    assert r.ex.code == 0 and len(r.calls) == 3 and [m.content.split()[-1] for m in results(r)] == ['3', 'first', 'second'], r
    assert {k: t.stats[n] for k, n in dict(roots='roots', leaves='lineage_leaves', drift='drift').items()} == h.expect.tree(3) == dict(roots=1, leaves=1, drift=2), r
    assert (t.stats['token_leaves'], t.stats['shared'], set(r.roles())) == (3, 0, {'main'}) and all(b.parent_id == a.call_id for a, b in zip(r.calls, r.calls[1:])), r
    state = [c.messages[-1] for c in r.calls]
    assert all(m.role == 'user' and 'OPENCLAW_INTERNAL_CONTEXT' in m.content for m in state) and all(sum('OPENCLAW_INTERNAL_CONTEXT' in u for u in users(c)) == 1 for c in r.calls), r
    assert set(r.files) >= {'a.txt', 'AGENTS.md', 'SOUL.md'} and b'"text": "done"' in r.ex.stdout, r   # it makes itself at home in the workspace

@pytest.mark.slow
async def test_openclaw_stops_at_the_budget_of_calls(tmp_path):
    h = get('openclaw')
    r = await play(h, lambda c: shell(c, f'echo {turn(c)}'), tmp_path, max_calls=2, seconds=280)
    assert len(r.calls) == 2 and r.s.stats.truncated and h.truncated(r.ex) and not r.ex.timed_out, r

# ---------------------------------------------------------------- every program: a policy that thinks for long, an engine that dies, a program that is killed

async def together(p, *runs):
    "Runs at one proxy at the same time: (harness, options of `at`)."
    return await asyncio.gather(*[at(p, h, rollout=f'r{i}', **kw) for i, (h, kw) in enumerate(runs)])

@pytest.mark.slow
@pytest.mark.parametrize('names', [('claude-code', CODEX, 'mini-swe-agent', 'react', 'react:stream'), ('openclaw',)], ids=['cheap', 'openclaw'])
async def test_a_reply_that_takes_half_a_minute_is_waited_for(tmp_path, names):
    "At a proxy with its own settings each asks once, whether it hears keep-alives (it streams) or nothing."
    hs, act = [get(n) for n in names], lambda c: 'done' if answers(c) else dict(text=shell(c, f'echo {SUBMIT}'), delay_s=30)
    async with serving(tmp_path, act) as p: rs = await together(p, *[(h, dict(seconds=280)) for h in hs])
    for h, r in zip(hs, rs):
        a, *more = r.calls
        assert r.ex.code == 0 and a.finish == 'tool_calls' and a.t_end - a.t_start >= 30 and [c.finish for c in more] == ['stop']*('mini' not in h.name), r
        assert all(set(c.delivered) == {'yes'} for c in r.calls) and not r.refused and not r.s.stats.disconnects, r
        streams, beats = b'event-stream' in r.wire[0][:500], r.wire[0].count(DIALECTS[h.dialect].keepalive())
        assert streams == (h.name not in ('mini-swe-agent', 'react')) and (4 <= beats <= 5 if streams else not beats), (beats, r)   # at 10, 15, 20, 25 s

async def test_an_engine_that_dies_behind_the_headers(tmp_path):
    "Cut or told: each asks again and gets through, at the setting of its harness.toml too."
    hs, failed = [get(n) for n in (CLAUDE, CODEX, 'react:stream')], set()
    def act(c):
        if c.session_id not in failed: failed.add(c.session_id); return dict(error='out of order', delay_s=.3)
        return 'done' if answers(c) else shell(c, 'wc -l a.txt')
    cases = [(h, how) for h in hs for how in ('cut', 'event')]
    async with serving(tmp_path, act, hold_s=.02, keepalive_s=.05) as p: rs = await together(p, *[(h, dict(on_engine_failure=how)) for h, how in cases])
    for (h, how), r in zip(cases, rs):
        assert r.ex.code == 0 and [c.finish for c in r.calls] == ['error', 'tool_calls', 'stop'] and not r.refused, r
        assert DIALECTS[h.dialect].keepalive() in r.wire[0] and (b'out of order' in r.wire[0]) == (how == 'event'), r.wire[0]
        r.calls = r.calls[1:]
        chain(r)

async def until(true, seconds):
    async with asyncio.timeout(seconds):
        while not true(): await asyncio.sleep(.01)

def pids(box):
    "The program in a sandbox: who has its instruction on the command line, first process aside."
    def of(p):
        try: return p.stat().st_uid == box.uid and b'Do the task.' in (line := (p/'cmdline').read_bytes()) and b'/run/init' not in line
        except OSError: return False
    return [int(p.name) for p in Path('/proc').iterdir() if p.name.isdigit() and of(p)]

@pytest.mark.parametrize('sig, hold', [(signal.SIGKILL, 60), (signal.SIGINT, .05)])
async def test_P40_a_program_killed_while_the_engine_samples(tmp_path, monkeypatch, sig, hold):
    "In silence, and on keep-alives: within a second the engine works for nobody, and nothing was delivered."
    hs, boxes, beats = [get(n) for n in ('claude-code', CODEX, 'mini-swe-agent', 'react:stream')], [], Counter()
    for n, d in DIALECTS.items(): monkeypatch.setattr(d, 'keepalive', lambda n=n, beat=d.keepalive: beats.update([n]) or beat())
    async def run(box): boxes.append(box)
    async def kill(engine):
        await until(lambda: engine.running == len(hs), 60)
        if hold < 1: await until(lambda: all(beats[d] > 1 for d in DIALECTS), 10)
        assert [len(pids(b)) for b in boxes] == [1]*len(hs)
        for b in boxes: os.kill(*pids(b), sig)
        await until(lambda: not engine.running, 1)
    async with serving(tmp_path, lambda c: dict(text='too late', delay_s=600), hold_s=hold, keepalive_s=.05) as p:
        rs, _ = await asyncio.gather(together(p, *[(h, dict(cut=None, then=run)) for h in hs]), kill(p.engine))
    for r in rs:
        assert [(c.finish, c.delivered, len(c.output_ids)) for c in r.calls] == [('aborted', (), 0)] and r.s.stats.disconnects == 1 and not r.refused, r
        assert not r.ex.timed_out and r.ex.killed == ('outside' if sig == signal.SIGKILL else r.ex.killed), r
