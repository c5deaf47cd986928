"""A stored rollout played again, through the real proxy, without its model."""
import aiohttp, numpy as np, pytest
from clawlab.capture.chat import Template
from clawlab.capture.engines.base import Context, Generation, Sampling
from clawlab.capture.engines.replay import ReplayEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.records import Call, EngineError, InputError, Message, Rollout

T = Template.bytes()
SH = [dict(type='function', function=dict(name='sh', description='Run', parameters={'type': 'object'}))]
def tool(cmd): return f'<think>next</think>\nRunning.<tool_call>{{"name": "sh",  "arguments": {{"cmd": "{cmd}"}}}}</tool_call>'

class Policy:
    "A scripted policy with log-probs and versions, so that a replay has something to lose."
    name, template, max_context, version = 'policy', T, 1 << 20, 5
    def __init__(self, *replies): self.replies = list(replies)
    async def generate(self, ids, sampling, context):
        r = self.replies.pop(0)
        if isinstance(r, Exception): raise r
        out = np.append(T.encode(r, special=True), T.eos_ids[0])
        return Generation(out, -np.arange(1, len(out) + 1) / 100, np.full(len(out), 5))
    async def update(self, weights=None): return self.version
    async def close(self): pass

async def agent(url, key, task='List.', day='Sunday', turns=9):
    "A small agent: runs what it is told to, retries what failed, stops at an answer without a call."
    ms = [dict(role='system', content=f'You act. It is {day}.'), dict(role='user', content=task)]
    async with aiohttp.ClientSession(headers={'x-api-key': key}) as http:
        for i in range(turns):
            async with http.post(f'{url}/v1/chat/completions', json=dict(model='m', messages=ms, tools=SH, stream=bool(i % 2))) as r:
                if r.status != 200: status = r.status; continue
                if i % 2: m = _joined(await r.text())
                else: m = (await r.json())['choices'][0]['message']
            ms.append({k: v for k, v in m.items() if v is not None and k != 'reasoning_content'})
            if not m.get('tool_calls'): return ms
            ms += [dict(role='tool', tool_call_id=c['id'], content='out of ' + c['function']['arguments']) for c in m['tool_calls']]
    raise AssertionError(f'no end, last status {status}')

def _joined(text):
    import json
    m, calls = dict(role='assistant', content=''), {}
    for line in text.splitlines():
        if not line.startswith('data: {') or not (cs := json.loads(line[6:])['choices']): continue
        d = cs[0]['delta']; m['content'] += d.get('content') or ''
        for c in d.get('tool_calls') or ():
            if 'id' in c: calls[c['index']] = dict(id=c['id'], type='function', function=dict(name=c['function']['name'], arguments=''))
            calls[c['index']]['function']['arguments'] += c['function'].get('arguments') or ''
    return {**m, **({'tool_calls': [calls[i] for i in sorted(calls)]} if calls else {})}

async def run(engine, path, rid='r', **kw):
    with Store.open(path) as store:
        async with Proxy(engine, store) as proxy:
            s = await proxy.open_session(Rollout(rid, 'task', 'agent'))
            await agent(f'http://127.0.0.1:{proxy.port}{s.base_path}', s.api_key, **kw)
            return await proxy.close_session(s.session_id)

def facts(c): return (c.prompt_ids.tolist(), c.output_ids.tolist(), c.logprobs.tolist(), c.versions.tolist(), c.finish, c.role, c.drift, c.delivered, c.response and c.response.content)

async def test_a_recorded_rollout_is_replayed_call_by_call(tmp_path):
    one = await run(Policy(tool('ls'), EngineError('down'), tool('pwd'), 'Done.'), tmp_path/'a.db')
    assert [c.finish for c in one] == ['tool_calls', 'error', 'tool_calls', 'stop']
    with Store.open(tmp_path/'a.db', create=False) as old:
        for engine in (ReplayEngine(old, 'r'), ReplayEngine(old)):
            two = await run(engine, tmp_path/f'b{engine.rollout_id}.db')
            assert list(map(facts, two)) == list(map(facts, one))
            seq = {c.call_id: c.seq for c in (*one, *two)}
            assert [(seq.get(c.parent_id), seq.get(c.anchor_id)) for c in two] == [(seq.get(c.parent_id), seq.get(c.anchor_id)) for c in one] == [(None, None), (0, 0), (0, 0), (2, 2)]

async def test_another_date_is_found_by_its_position(tmp_path):
    one = await run(Policy(tool('ls'), tool('pwd'), 'Done.'), tmp_path/'a.db')
    with Store.open(tmp_path/'a.db', create=False) as old: two = await run(ReplayEngine(old, 'r'), tmp_path/'b.db', day='Monday')
    assert [c.output_ids.tolist() for c in two] == [c.output_ids.tolist() for c in one] and 'Monday' in T.decode(two[0].prompt_ids)

async def test_into_the_same_store(tmp_path):
    one = await run(Policy('Done.'), tmp_path/'a.db')
    with Store.open(tmp_path/'a.db') as old: two = await run(ReplayEngine(old), tmp_path/'a.db', 'again')
    assert facts(two[0]) == facts(one[0]) and two[0].rollout_id == 'again'

def call(i, prompt, text, messages, **kw):
    out = np.append(T.encode(text), T.eos_ids[0]); n = len(out)
    return Call(f'c{i}', 'r', i, prompt, out, np.zeros(n), np.zeros(n), messages=messages, response=Message('assistant', text), **kw)

async def test_subagents_and_retries_get_their_own_answers(tmp_path):
    "Equal prompts in their order, then the last one again; equal positions by who asks."
    main, sub = (Message('system', 'You act.'), Message('user', 'Go.')), (Message('system', 'You search.'), Message('user', 'Find.'))
    with Store.open(tmp_path/'s.db') as store:
        store.put_rollout(Rollout('r', 't', 'h'))
        for c in (call(0, [1], 'main', main), call(1, [2], 'sub', sub), call(2, [1], 'again', main)): store.put_call(c).result()
        e = ReplayEngine(store)
        async def ask(ids, messages=(), session='s'): return T.decode((await e.generate(np.array(ids), Sampling(), Context(session, messages=messages))).ids[:-1])
        assert [await ask([1]) for _ in range(3)] == ['main', 'again', 'again'] and await ask([2]) == 'sub'
        assert [await ask([7], m, 'other') for m in (sub, main, main)] == ['sub', 'main', 'again']
        with pytest.raises(EngineError, match='nothing is recorded'): await ask([7], main, 'other')
        with pytest.raises(EngineError, match='nothing is recorded'): await ask([9], (*main, Message('assistant', 'never said'), Message('user', 'x')), 'third')

async def test_bad_input_is_one_line(tmp_path):
    with Store.open(tmp_path/'s.db') as store:
        with pytest.raises(InputError, match='no rollout'): ReplayEngine(store, 'nope')
        with pytest.raises(EngineError, match='no calls'): await ReplayEngine(store).generate([1], Sampling(), Context('s'))
        for r in ('r', 'q'): store.put_rollout(Rollout(r, 't' + r, 'h'))
        store.put_call(Call('x', 'r', 0, [1], [1, 2], [0, 0], [0, 0], response=Message('assistant', 'of another tokenizer'))).result()
        with pytest.raises(InputError, match='tokenizer'): ReplayEngine(store, 'r')
    from clawlab.cli import make_engine
    with pytest.raises(InputError): make_engine(f'replay:{tmp_path}/none.db#r')
