"""The proxy as a harness sees it: real sockets, served bytes, and the record (faults P, items by number)."""
import asyncio, gzip, json, signal, socket, subprocess, sys, textwrap, time, zlib
from pathlib import Path
import aiohttp, numpy as np, pytest, zstandard
from clawlab.capture.chat import Template
from clawlab.capture.engines.base import Generation, Sampling
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.records import InputError, Rollout

ROOT = Path(__file__).parent.parent
T = Template.bytes()
CALL = '<tool_call>{"name": "sh", "arguments": {"cmd": "ls"}}</tool_call>'
CHAT, ANTH, COUNT = '/v1/chat/completions', '/v1/messages', '/v1/messages/count_tokens'
TOOLS = {CHAT: [dict(type='function', function=dict(name='sh', description='Run', parameters={'type': 'object'}))],
         ANTH: [dict(name='sh', description='Run', input_schema={'type': 'object'})]}
BOTH = pytest.mark.parametrize('path', [CHAT, ANTH])

class Held:
    "An engine that answers when told to; knows how many calls it is working on."
    name, template, max_context, version = 'held', T, 1 << 20, 0
    def __init__(self): self.go, self.running, self.most, self.stopped, self.seen = asyncio.Event(), 0, 0, asyncio.Event(), []
    async def generate(self, ids, sampling, context):
        self.running += 1; self.most = max(self.most, self.running); self.seen.append((ids, sampling, context))
        try: await self.go.wait()
        except asyncio.CancelledError: self.stopped.set(); raise
        finally: self.running -= 1
        return Generation([*T.encode(f'reply {self.version}'), T.eos_ids[0]], [-.5]*7 + [-.1], [self.version]*8)
    async def update(self, weights=None): assert not self.running; self.version += 1; return self.version
    async def close(self): pass

class Lab:
    "A proxy with one session and a client for it."
    def __init__(self, tmp, engine, open_kw=None, **kw): self.tmp, self.engine, self.kw, self.open_kw = tmp, engine, kw, open_kw or {}
    async def __aenter__(self):
        self.store = Store.open(self.tmp/'calls.db')
        self.proxy = await Proxy(self.engine, self.store, **self.kw).start()
        self.s = await self.proxy.open_session(Rollout('r1', 't1', 'react', seed=3), **self.open_kw)
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        return self
    async def __aexit__(self, *exc): await self.http.close(); await self.proxy.stop(); self.store.close()
    def url(self, path=CHAT, s=None): return f'http://127.0.0.1:{self.proxy.port}{(s or self.s).base_path}{path}'
    def auth(self, s=None): return {'x-api-key': (s or self.s).api_key}
    def post(self, path=CHAT, s=None, headers=None, data=None, **body):
        kw = dict(data=data) if data is not None else dict(json=body)
        return self.http.post(self.url(path, s), headers={**self.auth(s), **(headers or {})}, **kw)
    async def ask(self, path, messages, with_tools=True, **kw):
        "(status, answer) of one request in either dialect."
        body = dict(model='m', messages=messages, **({'max_tokens': 1000} if path != CHAT else {}), **({'tools': TOOLS[path]} if with_tools else {}))
        async with self.post(path, **{**body, **kw}) as r: return r.status, (await r.json() if r.content_type == 'application/json' else await r.text())
    @property
    def calls(self): return self.store.calls('r1')

def user(text='Go.'): return [dict(role='user', content=text)]
def error_of(path, body): return body['error']['message'] and (path == CHAT or body['type'] == 'error')
async def until(f, seconds=5):
    t = time.monotonic()
    while not f():
        assert time.monotonic() - t < seconds, 'waited in vain'
        await asyncio.sleep(.005)

# ---------------------------------------------------------------- capture

@BOTH
@pytest.mark.parametrize('stream', [False, True])
async def test_durable_before_the_first_byte(tmp_path, path, stream):
    "A client that looks into the file when the first bytes arrive finds the call there; delivery is written after."
    async with Lab(tmp_path, ScriptEngine([CALL])) as lab:
        body = dict(model='m', messages=user(), tools=TOOLS[path], stream=stream, max_tokens=50)
        async with lab.post(path, **body) as r:
            await r.content.readany()
            import sqlite3
            db = sqlite3.connect(f'file:{lab.store.path}?mode=ro', uri=True)
            assert db.execute('select count(*) from calls').fetchone()[0] == 1
            db.close(); await r.read()
        await until(lambda: lab.calls[0].delivered == ('yes',))
        c = lab.calls[0]
        assert (c.finish, c.role, c.dialect) == ('tool_calls', 'main', {CHAT: 'chat', ANTH: 'anthropic'}[path])
        assert T.decode(c.output_ids) == CALL + '<|im_end|>' and np.isnan(c.logprobs).all() and set(c.versions) == {-1}

async def test_commit_that_fails_is_never_served(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a'])) as lab:
        from concurrent.futures import Future
        def broken(call, body): f = Future(); f.set_exception(OSError('disk full')); return f
        lab.store.put_call = broken
        status, body = await lab.ask(CHAT, user())
        assert status == 500 and 'disk full' in body['error']['message'] and not lab.s.lineage.nodes

@BOTH
async def test_a_conversation_is_one_chain(tmp_path, path):
    "Token in, token out, over the wire, in both dialects."
    async with Lab(tmp_path, ScriptEngine(['<think>why</think>\nHm.' + CALL.replace(': {"', ':   {"'), 'Done.'])) as lab:
        ms = user()
        _, a = await lab.ask(path, ms)
        if path == CHAT:
            m = a['choices'][0]['message']
            ms += [dict(role='assistant', content=m['content'], tool_calls=m['tool_calls']), dict(role='tool', tool_call_id=m['tool_calls'][0]['id'], content='f')]
        else:
            use = next(b for b in a['content'] if b['type'] == 'tool_use')
            ms += [dict(role='assistant', content=a['content']), dict(role='user', content=[dict(type='tool_result', tool_use_id=use['id'], content='f')])]
        status, b = await lab.ask(path, ms, stream=True)
        one, two = await lab.proxy.close_session(lab.s.session_id)
        both = np.concatenate([one.prompt_ids, one.output_ids])
        np.testing.assert_array_equal(two.prompt_ids[:len(both)], both)
        assert (two.parent_id, two.anchor_id) == (one.call_id, one.call_id) and [one.seq, two.seq] == [0, 1]
        sent = one.response.tool_calls[0].id
        assert sent == (m['tool_calls'][0]['id'] if path == CHAT else use['id'])
        usage = a['usage']
        assert (len(one.prompt_ids), len(one.output_ids)) == ((usage['prompt_tokens'], usage['completion_tokens']) if path == CHAT else (usage['input_tokens'], usage['output_tokens']))

async def test_P1_volatile_nonce_in_the_system_prompt(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a', 'b'])) as lab:
        nonce = lambda x: [dict(type='text', text=f'x-anthropic-billing-header: cc_version=2.1.{x};'), dict(type='text', text='You act.')]
        quote = user('x-anthropic-billing-header: quoted')
        await lab.ask(ANTH, quote, system=nonce('abc'))
        _, n = await lab.ask(COUNT, quote, False, system=nonce('999'))
        await lab.ask(ANTH, [*quote, dict(role='assistant', content='a'), *user('next')], system=nonce('def'))
        one, two = lab.calls
        assert two.anchor_id == one.call_id and 'billing-header: quoted' in T.decode(one.prompt_ids) and b'cc_version=2.1.abc' in lab.store.body(one.call_id)

async def test_P2_ids_come_from_the_engine(tmp_path):
    ids = [*T.encode('<tool_call>{"na', special=True), 255, 254, T.eos_ids[0]]
    async with Lab(tmp_path, ScriptEngine([dict(ids=[int(i) for i in ids], logprobs=[-.25]*len(ids))])) as lab:
        await lab.ask(CHAT, user())
        c = lab.calls[0]
        assert c.output_ids.tolist() == [int(i) for i in ids] and set(c.logprobs) == {np.float32(-.25)} and set(c.versions) == {0} and c.used['malformed'] == 1

async def test_P9_retries_are_new_attempts(tmp_path):
    "No reply cache, no joining: identical requests are independent samples, at once or one after the other."
    async with Lab(tmp_path, ScriptEngine([dict(text='one', delay_s=.05), dict(text='two', delay_s=.05), 'three'])) as lab:
        a, b = await asyncio.gather(lab.ask(CHAT, user()), lab.ask(CHAT, user()))
        _, c = await lab.ask(CHAT, user())
        assert {x[1]['choices'][0]['message']['content'] for x in (a, b)} == {'one', 'two'} and c['choices'][0]['message']['content'] == 'three'
        assert len(lab.calls) == 3 and {x.parent_id for x in lab.calls} == {None} and len({x.used['seed'] for x in lab.calls}) == 3

async def test_P9_retry_after_a_cut_connection(tmp_path):
    async with Lab(tmp_path, ScriptEngine([dict(text='lost', delay_s=30), 'kept', 'end'])) as lab:
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(.2): await lab.ask(CHAT, user())
        await until(lambda: lab.engine.running == 0, 1)
        _, a = await lab.ask(CHAT, user())
        await lab.ask(CHAT, [*user(), a['choices'][0]['message'], *user('more')])
        x, y, z = await lab.proxy.close_session(lab.s.session_id)
        assert (x.finish, len(x.output_ids), x.delivered) == ('aborted', 0, ()) and (z.parent_id, y.finish) == (y.call_id, 'stop')

async def test_P16_sampling_is_the_laboratory_s(tmp_path):
    eng = Held(); eng.go.set()
    async with Lab(tmp_path, eng, sampling=Sampling(temperature=.7, top_p=.9, top_k=5, max_tokens=64)) as lab:
        for path, extra in ((CHAT, dict(temperature=.1, top_p=.5, seed=1, max_completion_tokens=32000)), (ANTH, dict(temperature=0, top_k=1, max_tokens=32000))):
            await lab.ask(path, user(), **extra)
        for c, (_, sp, _) in zip(lab.calls, eng.seen, strict=True):
            assert (sp.temperature, sp.top_p, sp.top_k, sp.max_tokens) == (.7, .9, 5, 64) and sp.seed is not None
            assert c.used['temperature'] == .7 and c.used['seed'] == sp.seed and c.requested['temperature'] in (.1, 0) and c.requested['max_tokens'] == 32000
        assert eng.seen[0][1].seed != eng.seen[1][1].seed
        await lab.ask(ANTH, user('quota'), False, max_tokens=1)
        assert eng.seen[2][1].max_tokens == 1 and lab.calls[2].role == 'side'

async def test_P17_weights_change_between_calls(tmp_path):
    "Calls in flight end with the old weights, waiting ones start with the new; nobody sees an error."
    eng = Held()
    async with Lab(tmp_path, eng) as lab:
        first = asyncio.create_task(lab.ask(CHAT, user('a')))
        await until(lambda: eng.running == 1)
        up = asyncio.create_task(lab.proxy.update())
        await until(lambda: lab.proxy.metrics()['paused'])
        second = asyncio.create_task(lab.ask(CHAT, user('b')))
        await until(lambda: lab.proxy.inflight == 2)
        assert eng.running == 1 and not up.done()
        eng.go.set()
        assert await up == 1
        texts = [(await x)[1]['choices'][0]['message']['content'] for x in (first, second)]
        assert texts == ['reply 0', 'reply 1'] and [set(c.versions) for c in lab.calls] == [{0}, {1}]

async def test_same_study_same_seeds(tmp_path):
    seeds = []
    for i in range(2):
        eng = Held(); eng.go.set(); (d := tmp_path/str(i)).mkdir()
        async with Lab(d, eng) as lab:
            for k in range(3): await lab.ask(CHAT, user(str(k)))
        seeds.append([sp.seed for _, sp, _ in eng.seen])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3

# ---------------------------------------------------------------- wire

async def test_P31_compressed_bodies(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a']*6), max_body=1 << 20) as lab:
        data = json.dumps(dict(model='m', messages=user())).encode()
        raw = zlib.compressobj(wbits=-15); z = zstandard.compress(data)
        cases = [('gzip', gzip.compress(data), 200), ('deflate', zlib.compress(data), 200), ('deflate', raw.compress(data) + raw.flush(), 200), ('zstd', z, 200),
                 ('zstd, gzip', gzip.compress(z), 200), ('zstd', z[:-2], 400), ('gzip', gzip.compress(data)[:-9], 400), ('gzip', b'nonsense', 400), ('deflate', b'', 400),
                 ('br', data, 415), ('zstd', zstandard.compress(bytes(50 << 20)), 413), ('gzip', gzip.compress(bytes(5 << 20)), 413), ('identity', data, 200)]
        for coding, body, want in cases:
            async with lab.post(data=body, headers={'Content-Encoding': coding, 'Content-Type': 'application/json'}) as r:
                assert r.status == want, (coding, want, await r.text())
                assert want == 200 or (await r.json())['error']['message']
        assert all(lab.store.body(c.call_id) == data for c in lab.calls) and len(lab.calls) == 6

async def test_P33_large_bodies(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a', 'b'], max_context=1 << 25), max_body=10 << 20) as lab:
        big = user('x'*(8 << 20))
        status, a = await lab.ask(CHAT, big)
        assert status == 200 and len(lab.calls[0].prompt_ids) > 8 << 20
        status, _ = await lab.ask(CHAT, [*big, a['choices'][0]['message'], *user('more')], stream=True)
        assert status == 200 and lab.calls[1].anchor_id == lab.calls[0].call_id
        async with lab.post(data=b' '*(11 << 20)) as r: assert r.status == 413
        async def chunks():
            for _ in range(11): yield b' '*(1 << 20)
        try:
            async with lab.post(data=chunks()) as r: assert r.status == 413
        except aiohttp.ClientConnectionError: pass   # the refusal may overtake the upload
        assert (await lab.ask(CHAT, user()))[0] == 500   # the script has run out; the proxy lives

async def test_P33_long_replies_stream(tmp_path):
    text = 'é"\\\n' * 200_000
    async with Lab(tmp_path, ScriptEngine([text]), sampling=Sampling(max_tokens=2_000_000)) as lab:
        _, out = await lab.ask(CHAT, user(), stream=True, max_tokens=None)
        got = ''.join(d['choices'][0]['delta'].get('content') or '' for l in out.split('\n\n') if l.startswith('data: {') and (d := json.loads(l[6:]))['choices'])
        assert got == text and lab.calls[0].delivered == ('yes',)

@BOTH
async def test_P34_no_stream_means_json(tmp_path, path):
    async with Lab(tmp_path, ScriptEngine(['a']*4)) as lab:
        for extra, kind in (({}, 'application/json'), (dict(stream=False), 'application/json'), (dict(stream=None), 'application/json'), (dict(stream=True), 'text/event-stream')):
            async with lab.post(path, model='m', messages=user(), max_tokens=9, **extra) as r: assert r.content_type == kind and await r.read()

async def test_P35_count_tokens(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['<think>why</think>\nHi.', 'b'])) as lab:
        kw = dict(system='You act.')
        _, n = await lab.ask(COUNT, user(), False, **kw)
        _, a = await lab.ask(ANTH, user(), False, **kw)
        assert n == {'input_tokens': a['usage']['input_tokens']}
        ms = [*user(), dict(role='assistant', content=a['content']), *user('more')]
        async with lab.post(COUNT, model='m', messages=ms, system='You act.') as r: n = await r.json()
        many = await asyncio.gather(*[lab.ask(COUNT, ms, False, **kw) for _ in range(50)])
        _, b = await lab.ask(ANTH, ms, False, **kw)
        assert n['input_tokens'] == b['usage']['input_tokens'] and {x[1]['input_tokens'] for x in many} == {n['input_tokens']}
        assert len(lab.calls) == 2

@BOTH
async def test_P36_clamp_and_overflow(tmp_path, path):
    eng = Held(); eng.go.set(); eng.max_context = 1000
    async with Lab(tmp_path, eng, sampling=Sampling(max_tokens=32000), min_completion=256) as lab:
        frame = len(T.render([__import__('clawlab.records', fromlist=['Message']).Message('user', '')], ()))
        status, _ = await lab.ask(path, user('x'*(700 - frame)), False, max_tokens=32000)
        assert status == 200 and eng.seen[0][1].max_tokens == 300 and lab.s.stats.clamped == 1 and lab.calls[0].used['max_tokens'] == 300
        status, body = await lab.ask(path, user('x'*(990 - frame)), False, max_tokens=64)
        assert status == 400 and len(eng.seen) == 1 and lab.s.stats.overflows == 1 and len(lab.calls) == 1
        if path == CHAT: assert body['error']['code'] == 'context_length_exceeded'
        else: assert body['error']['message'].startswith('prompt is too long')
        assert (await lab.ask(path, user('x'*(900 - frame)), False, max_tokens=64))[0] == 200
        assert (await lab.ask(path, user('x'*5000), False, max_tokens=1))[0] == 400

@BOTH
async def test_P38_unknown_fields_are_tolerated_and_counted(tmp_path, path):
    async with Lab(tmp_path, ScriptEngine(['a'])) as lab:
        status, _ = await lab.ask(path, user(), zz=1, context_management={'edits': []}, metadata={'user_id': 'x'})
        assert status == 200 and lab.s.stats.unknown['zz'] == 1

@BOTH
async def test_P40_disconnect_stops_the_engine(tmp_path, path):
    "(a) While the engine samples: idle within a second, nothing delivered; before and after a keep-alive."
    for keepalive in (30, .02):
        eng = Held(); (d := tmp_path/str(keepalive)).mkdir()
        async with Lab(d, eng, keepalive_s=keepalive) as lab:
            r, w = await asyncio.open_connection('127.0.0.1', lab.proxy.port)
            body = json.dumps(dict(model='m', messages=user(), stream=True, max_tokens=9)).encode()
            w.write(f'POST {lab.s.base_path}{path} HTTP/1.1\r\nHost: x\r\nx-api-key: {lab.s.api_key}\r\nContent-Length: {len(body)}\r\n\r\n'.encode() + body)
            await until(lambda: eng.running == 1)
            if keepalive < 1: await r.readuntil(b'\r\n\r\n'); await r.readuntil(b'\n\n')
            t = time.monotonic(); w.close()
            await until(lambda: eng.running == 0, 1)
            assert time.monotonic() - t < 1
            await until(lambda: lab.calls and lab.proxy.inflight == 0)
            c = lab.calls[0]
            assert (c.finish, c.delivered, len(c.output_ids), lab.s.stats.disconnects) == ('aborted', (), 0, 1)

async def test_P40_disconnect_while_blocks_are_written(tmp_path):
    "(b) What is recorded as delivered is an upper bound of what arrived, per item."
    text = 'x'*2_000_000
    async with Lab(tmp_path, ScriptEngine([text + CALL*2], max_context=1 << 25), sampling=Sampling(max_tokens=3_000_000)) as lab:
        sock = socket.socket(); sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15); sock.bind(('127.0.0.1', 0)); sock.listen()
        await lab.proxy.listen(sock, lab.s.session_id)
        client = socket.socket(); client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15); client.connect(sock.getsockname())
        r, w = await asyncio.open_connection(sock=client, limit=1 << 12)
        body = json.dumps(dict(model='m', messages=user(), stream=True, max_tokens=3_000_000)).encode()
        w.write(f'POST {lab.s.base_path}{ANTH} HTTP/1.1\r\nHost: x\r\nx-api-key: {lab.s.api_key}\r\nContent-Length: {len(body)}\r\n\r\n'.encode() + body)
        await r.read(1000); w.transport.abort()
        await until(lambda: lab.calls and lab.calls[0].delivered)
        assert lab.calls[0].delivered == ('unknown', 'no', 'no') and lab.calls[0].finish == 'tool_calls' and len(lab.calls[0].output_ids) > 2_000_000

async def test_P41_many_in_flight(tmp_path):
    "600 at once, none refused; one more gets 429 with Retry-After in the dialect's shape."
    eng = Held()
    async with Lab(tmp_path, eng, max_inflight=600) as lab:
        ask = [asyncio.create_task(lab.ask(CHAT if i % 2 else ANTH, user(str(i)), stream=bool(i % 3))) for i in range(600)]
        await until(lambda: eng.running == 600, 60)
        async with lab.post(ANTH, model='m', messages=user(), max_tokens=5) as r:
            assert r.status == 429 and int(r.headers['Retry-After']) >= 1 and (await r.json())['error']['type'] == 'rate_limit_error'
        eng.go.set()
        assert {status for status, _ in await asyncio.gather(*ask)} == {200}
        assert eng.most == 600 and len(lab.calls) == 600 and sorted(c.seq for c in lab.calls) == list(range(600))
        await until(lambda: lab.proxy.inflight == 0)

BAD = [b'', b'{', b'null', b'[]', b'3', b'"x"', b'{}', b'\xff\xfe', b'{"model":"m"}', b'{"model":"m","messages":null}', b'{"model":"m","messages":[]}',
       b'{"model":"m","messages":[null]}', b'{"model":"m","messages":[{"role":"user"}],"max_tokens":"x"}', b'{"model":7,"messages":[{"role":"user","content":"x"}],"max_tokens":5}',
       b'{"model":"m","messages":[{"role":"wizard","content":"x"}],"max_tokens":5}', b'{"model":"m","messages":[{"role":"user","content":{"a":1}}],"max_tokens":5}',
       b'{"model":"m","messages":[{"role":"assistant","tool_calls":[{}]}],"max_tokens":5}', b'{"model":"m","messages":[{"role":"user","content":[{"type":3}]}],"max_tokens":5}',
       b'{"model":"m","tools":[{}],"messages":[{"role":"user","content":"x"}],"max_tokens":5}', b'{"model":"m","max_tokens":-1,"messages":[{"role":"user","content":"x"}]}',
       b'['*200_000, b'{"a":'*5000 + b'1' + b'}'*5000, b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":1e999}']

@BOTH
async def test_bad_json_is_400_never_500(tmp_path, path):
    async with Lab(tmp_path, ScriptEngine(['a']*50)) as lab:
        for bad in BAD:
            async with lab.post(path, data=bad, headers={'Content-Type': 'application/json'}) as r:
                assert r.status == 400, (bad[:80], r.status, await r.text())
                assert error_of(path, await r.json())
        assert lab.calls == [] and lab.s.stats.refused[400] == len(BAD)
        ugly = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"\\ud800 \\u0000 <|im_start|>"}]}'
        async with lab.post(path, data=ugly) as r: assert r.status == 200
        assert T.decode(lab.calls[0].prompt_ids).count('<|im_start|>') == 3 and (lab.calls[0].prompt_ids == T.special['<|im_start|>']).sum() == 2

@BOTH
@pytest.mark.parametrize('depth', [90, 150, 300, 450, 600, 900, 990, 5000])
async def test_nested_values_are_400_never_500(tmp_path, path, depth):
    deep = '{"a":' + '['*depth + ']'*depth + '}'
    call = {CHAT: '{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"sh","arguments":%s}}]},{"role":"tool","tool_call_id":"c","content":"x"}' % json.dumps(deep),
            ANTH: '{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"sh","input":%s}]},{"role":"user","content":"x"}' % deep}[path]
    bodies = ['{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"Go."},%s]}' % call] + [
        '{"model":"m","max_tokens":9,%s:%s,"zz":"\\ud800","messages":[{"role":"user","content":"Go."}]}' % (k, deep) for k in ('"temperature"', '"zy"')]
    async with Lab(tmp_path, ScriptEngine(['x']*3)) as lab:
        for i, b in enumerate(bodies):
            async with lab.post(path, data=b.encode()) as r: status, body = r.status, await r.json()
            assert status == (200 if depth <= 150 or path == CHAT and not i else 400) and (status == 200 or error_of(path, body)), (status, body)

async def test_a_nested_reply_is_a_malformed_call(tmp_path):
    text = '<tool_call>{"name": "sh", "arguments": {"a": %s}}</tool_call>' % ('['*600 + ']'*600)
    async with Lab(tmp_path, ScriptEngine([text, 'x'])) as lab:
        status, body = await lab.ask(CHAT, user())
        assert status == 200 and lab.calls[0].used['malformed'] == 1
        assert (await lab.ask(CHAT, [*user(), body['choices'][0]['message'], *user('On.')]))[0] == 200
        assert lab.calls[1].anchor_id == lab.calls[0].call_id

@BOTH
async def test_engine_failure_before_headers_is_a_5xx(tmp_path, path):
    async with Lab(tmp_path, ScriptEngine([dict(error='the GPU is gone')]*2 + ['ok'])) as lab:
        for stream in (False, True):
            status, body = await lab.ask(path, user(), stream=stream)
            assert status >= 500 and 'GPU' in (body['error']['message'] if isinstance(body, dict) else body)
        assert (await lab.ask(path, user()))[0] == 200
        assert [c.finish for c in lab.calls] == ['error', 'error', 'stop'] and lab.s.stats.engine_errors == 2
        assert lab.calls[2].parent_id is None and lab.calls[0].response is None

@BOTH
async def test_engine_failure_after_headers_breaks_the_connection(tmp_path, path):
    "Never a clean end without the last event."
    async with Lab(tmp_path, ScriptEngine([dict(error='died', delay_s=.3)]), keepalive_s=.02) as lab:
        with pytest.raises(aiohttp.ClientError): await lab.ask(path, user(), stream=True)
        r, w = await asyncio.open_connection('127.0.0.1', lab.proxy.port)

async def test_unexpected_engine_exception_is_an_engine_failure(tmp_path):
    class Broken(Held):
        async def generate(self, *a): raise RuntimeError('shape mismatch')
    async with Lab(tmp_path, Broken()) as lab:
        status, body = await lab.ask(ANTH, user())
        assert status == 500 and body['error']['type'] == 'api_error' and 'shape mismatch' in body['error']['message']

@BOTH
async def test_keep_alives_then_the_answer(tmp_path, path):
    async with Lab(tmp_path, ScriptEngine([dict(text='late', delay_s=.3)]), keepalive_s=.02) as lab:
        status, text = await lab.ask(path, user(), stream=True)
        mark = ': keep-alive' if path == CHAT else 'event: ping'
        assert text.count(mark) > 2 and text.index(mark) < text.index('late') and text.rstrip().endswith('[DONE]' if path == CHAT else '"message_stop"}')

async def test_length_stop_can_be_reported_as_stop(tmp_path):
    for flag, want in ((False, 'length'), (True, 'stop')):
        (d := tmp_path/str(flag)).mkdir()
        async with Lab(d, ScriptEngine([dict(text='half', finish='length')]), dict(report_length_as_stop=flag)) as lab:
            _, a = await lab.ask(CHAT, user())
            c, = lab.calls
            assert a['choices'][0]['finish_reason'] == want and c.finish == 'length' and c.used.get('served_as') == ('stop' if flag else None)

async def test_empty_reply_gets_a_placeholder_and_true_tokens(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['', 'b'])) as lab:
        _, a = await lab.ask(CHAT, user())
        assert a['choices'][0]['message']['content'] == '(empty)' and lab.calls[0].output_ids.tolist() == [T.eos_ids[0]]
        await lab.ask(CHAT, [*user(), a['choices'][0]['message'], *user('well?')])
        assert lab.calls[1].anchor_id == lab.calls[0].call_id and 'empty' not in T.decode(lab.calls[1].prompt_ids)

# ---------------------------------------------------------------- sessions

async def test_keys_and_paths_must_agree(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a']*9)) as lab:
        other = await lab.proxy.open_session(Rollout('r2', 't', 'h'))
        post = lambda s, headers, path=CHAT: lab.http.post(lab.url(path, s), json=dict(model='m', messages=user(), max_tokens=3), headers=headers)
        for path in (CHAT, ANTH, COUNT):
            for headers, want in (({}, 401), ({'x-api-key': 'wrong'}, 401), ({'Authorization': 'Bearer '}, 401), ({'Authorization': f'Basic {lab.s.api_key}'}, 401),
                                  ({'x-api-key': other.api_key}, 403), ({'Authorization': f'Bearer {other.api_key}'}, 403)):
                async with post(lab.s, headers, path) as r: assert r.status == want and error_of(path, await r.json())
        async with post(lab.s, {'Authorization': f'bearer {lab.s.api_key}'}) as r: assert r.status == 200
        for path, want in (('/v1/nothing', 404), ('/v1/models', 404), (ANTH + '/x', 404)):
            async with lab.post(path) as r: assert r.status == want
        async with lab.http.get(lab.url(CHAT), headers=lab.auth()) as r: assert r.status == 405
        async with lab.http.get(lab.url('/v1/models'), headers=lab.auth()) as r: assert (await r.json())['data']
        async with lab.http.post(f'http://127.0.0.1:{lab.proxy.port}/s/none{CHAT}', headers=lab.auth()) as r: assert r.status == 403
        async with lab.http.post(f'http://127.0.0.1:{lab.proxy.port}{CHAT}', headers=lab.auth()) as r: assert r.status == 403
        await lab.proxy.close_session(lab.s.session_id)
        async with post(lab.s, lab.auth()) as r: assert r.status == 401

async def test_keys_are_long_hashed_and_nowhere_on_disk(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a'])) as lab:
        await lab.ask(CHAT, user(), headers={'authorization': f'Bearer {lab.s.api_key}', 'x-copy': lab.s.api_key, 'user-agent': 'me/1'})
        key = lab.s.api_key
        assert len(key.split('-')[-1]) * 6 >= 128 and lab.calls[0].headers['user-agent'] == 'me/1'
        assert key not in json.dumps(lab.calls[0].headers)
        await lab.proxy.close_session(lab.s.session_id)
    assert not any(key.encode() in f.read_bytes() for f in tmp_path.glob('calls.db*'))

async def test_a_session_s_own_listener_serves_no_other(tmp_path):
    "The sandbox's socket: right session 200, another session's key and path 403, gone after close."
    async with Lab(tmp_path, ScriptEngine(['a']*3)) as lab:
        other = await lab.proxy.open_session(Rollout('r2', 't', 'h'))
        sock = socket.create_server(('127.0.0.1', 0)); port = sock.getsockname()[1]
        await lab.proxy.listen(sock, lab.s.session_id)
        async def at(s, path=CHAT):
            async with lab.http.post(f'http://127.0.0.1:{port}{s.base_path}{path}', headers=lab.auth(s), json=dict(model='m', messages=user(), max_tokens=2)) as r: return r.status
        assert [await at(lab.s), await at(other), await at(lab.s, ANTH)] == [200, 403, 200]
        assert (await lab.proxy.close_session(lab.s.session_id))[0].delivered == ('yes',)
        with pytest.raises(aiohttp.ClientConnectionError): await at(lab.s)
        async with lab.post(s=other, model='m', messages=user()) as r: assert r.status == 200

async def test_keyless_session(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a']), dict(keyless=True)) as lab:
        async with lab.http.post(lab.url(), json=dict(model='m', messages=user())) as r: assert r.status == 200

async def test_sessions_survive_a_restart(tmp_path):
    "A new proxy on the same store: same key, same lineage, numbers go on."
    async with Lab(tmp_path, ScriptEngine(['a', 'b']), dict(sampling=Sampling(temperature=.3), expect_harness='Python', max_calls=2)) as lab:
        _, a = await lab.ask(CHAT, user()); s = lab.s
    store = Store.open(tmp_path/'calls.db')
    async with Proxy(ScriptEngine(['b']), store) as proxy, aiohttp.ClientSession(headers={'x-api-key': s.api_key}) as http:
        body = dict(model='m', messages=[*user(), a['choices'][0]['message'], *user('more')], tools=TOOLS[CHAT])
        async with http.post(f'http://127.0.0.1:{proxy.port}{s.base_path}{CHAT}', json=body) as r: assert r.status == 200
        one, two = store.calls('r1')
        assert (two.anchor_id, two.seq, two.used['temperature']) == (one.call_id, 1, .3)
        assert one.used['seed'] != two.used['seed']
        async with http.post(f'http://127.0.0.1:{proxy.port}{s.base_path}{CHAT}', json=body) as r: assert r.status == 400   # the budget too
        assert len(await proxy.close_session(s.session_id)) == 2
        async with http.post(f'http://127.0.0.1:{proxy.port}{s.base_path}{CHAT}', json=body) as r: assert r.status == 401
    store.close()

async def test_close_settles_what_is_pending(tmp_path):
    async with Lab(tmp_path, ScriptEngine([dict(text='late', delay_s=.2)])) as lab:
        ask = asyncio.create_task(lab.ask(CHAT, user()))
        await until(lambda: lab.engine.running == 1)
        calls = await lab.proxy.close_session(lab.s.session_id)
        assert [c.delivered for c in calls] == [('yes',)] and (await ask)[0] == 200

async def test_close_cancels_what_never_ends(tmp_path):
    eng = Held()
    async with Lab(tmp_path, eng) as lab:
        ask = asyncio.create_task(lab.ask(CHAT, user()))
        await until(lambda: eng.running == 1)
        calls = await lab.proxy.close_session(lab.s.session_id, timeout=.05)
        assert [c.finish for c in calls] == ['aborted'] and eng.running == 0
        with pytest.raises(aiohttp.ClientError): await ask

async def test_call_budget(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a']*5), dict(max_calls=2)) as lab:
        assert [(await lab.ask(CHAT, user()))[0] for _ in range(3)] == [200, 200, 400] and lab.s.stats.truncated and len(lab.calls) == 2

async def test_P7_roles_are_settled_when_the_session_closes(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['T', CALL, 'x'])) as lab:
        await lab.ask(CHAT, [dict(role='system', content='Name this thread.'), *user()], False)
        assert lab.calls[0].role == 'main'
        await lab.ask(CHAT, [dict(role='system', content='You act.'), *user()])
        assert [c.role for c in await lab.proxy.close_session(lab.s.session_id)] == ['side', 'main']

async def test_calls_that_are_not_the_harness_s_are_quarantined(tmp_path):
    expect = dict(user_agent='claude-cli', dialect='anthropic', tools=['sh'])
    async with Lab(tmp_path, ScriptEngine(['a']*5), dict(expect_harness=expect)) as lab:
        own = dict(headers={'user-agent': 'claude-cli/2.1'})
        await lab.ask(ANTH, user(), **own); await lab.ask(ANTH, user(), headers={'user-agent': 'curl/8'}); await lab.ask(CHAT, user(), **own)
        await lab.ask(ANTH, user(), False, tools=[dict(name='other', input_schema={})], **own)
        await lab.ask(ANTH, [*user(), dict(role='assistant', content='a'), *user()], **own)
        cs = lab.calls
        assert [bool(c.quarantine) for c in cs] == [False, True, True, True, False] and cs[4].parent_id == cs[0].call_id and lab.s.stats.quarantined == 3
    with pytest.raises(InputError, match='wire shape'): await Proxy(Held(), None).open_session(Rollout('r', 't', 'h'), expect_harness=dict(agent='x'))

async def test_port_in_use_is_one_line(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as sock, Store.open(tmp_path/'s.db') as store:
        with pytest.raises(InputError, match=r'^port \d+ is in use$'): await Proxy(Held(), store).start(port=sock.getsockname()[1])

# ---------------------------------------------------------------- whole processes

SERVER = '''
    import asyncio, sys
    from clawlab.capture.engines.script import ScriptEngine
    from clawlab.capture.proxy import Proxy
    from clawlab.capture.store import Store
    from clawlab.records import Rollout
    async def main():
        proxy = await Proxy(ScriptEngine(['reply']*100000), Store.open(sys.argv[1])).start()
        s = await proxy.open_session(Rollout('r1', 't', 'h'))
        print(proxy.port, s.base_path, s.api_key, flush=True)
        await asyncio.Event().wait()
    asyncio.run(main())
'''

async def test_kill_9_of_the_proxy_loses_no_served_call(tmp_path):
    p = subprocess.Popen([sys.executable, '-c', textwrap.dedent(SERVER), str(tmp_path/'s.db')], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    port, base, key = p.stdout.readline().split()
    served = []
    async with aiohttp.ClientSession(headers={'x-api-key': key}) as http:
        async def client(i):
            for k in range(1000):
                try:
                    async with http.post(f'http://127.0.0.1:{port}{base}{CHAT}', json=dict(model='m', messages=user(f'{i} {k}'))) as r: served.append((await r.json())['id'])
                except aiohttp.ClientError: return
                if len(served) == 60: p.send_signal(signal.SIGKILL)
        await asyncio.gather(*[client(i) for i in range(8)])
    p.wait(); p.stdout.close()
    with Store.open(tmp_path/'s.db', create=False) as store:
        got = {c.call_id for c in store.calls('r1')}
        assert len(served) >= 60 and all(any(i.endswith(g) for g in got) for i in served)

async def test_official_sdks(tmp_path):
    "The vendors' own clients, as they come."
    import anthropic, openai
    async with Lab(tmp_path, ScriptEngine(['<think>w</think>\nHi.' + CALL]*4 + [dict(error='x')]*2)) as lab:
        base = f'http://127.0.0.1:{lab.proxy.port}{lab.s.base_path}'
        async with openai.AsyncOpenAI(base_url=base + '/v1', api_key=lab.s.api_key, max_retries=0) as o, anthropic.AsyncAnthropic(base_url=base, api_key=lab.s.api_key, max_retries=0) as a:
            r = await o.chat.completions.create(model='m', messages=user(), tools=TOOLS[CHAT])
            assert json.loads(r.choices[0].message.tool_calls[0].function.arguments) == {'cmd': 'ls'} and r.choices[0].finish_reason == 'tool_calls'
            async with o.chat.completions.stream(model='m', messages=user(), stream_options={'include_usage': True}) as st: f = await st.get_final_completion()
            assert f.choices[0].message.content == 'Hi.' and f.usage.completion_tokens == r.usage.completion_tokens
            r = await a.messages.create(model='m', max_tokens=1000, messages=user(), tools=TOOLS[ANTH])
            assert [b.type for b in r.content] == ['thinking', 'text', 'tool_use'] and r.stop_reason == 'tool_use'
            async with a.messages.stream(model='m', max_tokens=1000, messages=user(), tools=TOOLS[ANTH]) as st: m = await st.get_final_message()
            assert m.content[2].input == {'cmd': 'ls'} and m.usage.input_tokens == r.usage.input_tokens
            with pytest.raises(openai.InternalServerError): await o.chat.completions.create(model='m', messages=user())
            with pytest.raises(anthropic.InternalServerError): await a.messages.create(model='m', max_tokens=5, messages=user())
            n = await a.messages.count_tokens(model='m', messages=user(), tools=TOOLS[ANTH])
            assert n.input_tokens == r.usage.input_tokens
        assert len({t.id for c in lab.calls if c.response for t in c.response.tool_calls}) == 4

async def test_admin_port_needs_its_token(tmp_path):
    from clawlab.capture.admin import start_admin
    (tmp_path/'token').write_text('t'*20)
    with socket.create_server(('127.0.0.1', 0)) as free: port = free.getsockname()[1]
    async with Lab(tmp_path, ScriptEngine(['a'])) as lab:
        with pytest.raises(InputError, match='token file'): await start_admin(lab.proxy, str(port))
        with pytest.raises(InputError, match='cannot listen'): await start_admin(lab.proxy, f'{tmp_path}/no/such/socket')
        dead = socket.socket(socket.AF_UNIX); dead.bind(f'{tmp_path}/sock'); dead.close()   # left by a killed process
        unix = await start_admin(lab.proxy, f'{tmp_path}/sock')
        with pytest.raises(InputError, match='in use'): await start_admin(lab.proxy, f'{tmp_path}/sock')
        await unix.cleanup()
        runner = await start_admin(lab.proxy, str(port), str(tmp_path/'token'))
        for headers, want in (({}, 401), ({'Authorization': 'Bearer nope'}, 401), ({'Authorization': 'Bearer ' + 't'*20}, 200)):
            async with lab.http.post(f'http://127.0.0.1:{port}/sessions', json={}, headers=headers) as r: assert r.status == want
        async with lab.http.post(f'http://127.0.0.1:{port}/sessions', data=b'{', headers=headers) as r: assert r.status == 400
        async with lab.http.delete(f'http://127.0.0.1:{port}/sessions/none', headers=headers) as r: assert r.status == 400
        await runner.cleanup()
        with pytest.raises(InputError, match='cannot listen'):
            with socket.create_server(('127.0.0.1', port)): await start_admin(lab.proxy, str(port), str(tmp_path/'token'))
