"""The proxy as a harness sees it: real sockets, served bytes, and the record (faults P, items by number)."""
import asyncio, gzip, itertools, json, os, signal, socket, subprocess, sys, textwrap, time, zlib
from pathlib import Path
import aiohttp, brotli, numpy as np, pytest, zstandard
from hypothesis import HealthCheck, given, settings, strategies as st
from clawlab.capture.chat import Template
from clawlab.capture.engines.base import Generation, Sampling
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.records import InputError, Rollout

ROOT = Path(__file__).parent.parent
T = Template.bytes()
CALL = '<tool_call>{"name": "sh", "arguments": {"cmd": "ls"}}</tool_call>'
CHAT, ANTH, RESP, COUNT = '/v1/chat/completions', '/v1/messages', '/v1/responses', '/v1/messages/count_tokens'
TOOLS = {CHAT: [dict(type='function', function=dict(name='sh', description='Run', parameters={'type': 'object'}))],
         ANTH: [dict(name='sh', description='Run', input_schema={'type': 'object'})]}
BOTH, ALL = pytest.mark.parametrize('path', [CHAT, ANTH]), pytest.mark.parametrize('path', [CHAT, ANTH, RESP])

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
    def calls(self): self.proxy._tell(); return self.store.calls('r1')

def user(text='Go.'): return [dict(role='user', content=text)]
def error_of(path, body): return body['error']['message'] and (path in (CHAT, RESP) or body['type'] == 'error')
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

async def test_commit_that_fails_is_never_served(tmp_path, caplog):
    async with Lab(tmp_path, ScriptEngine(['a'])) as lab:
        from concurrent.futures import Future
        def broken(call, body): f = Future(); f.set_exception(OSError('disk full')); return f
        lab.store.put_call = broken
        status, body = await lab.ask(CHAT, user())
        assert status == 500 and 'disk full' not in json.dumps(body) and 'disk full' in caplog.text and not lab.s.lineage.nodes

async def test_a_full_disk_leaves_no_hole(tmp_path):
    "While the store can't be written nothing is served or counted; afterwards the record goes on where it ended, and nothing is said to be missing."
    async with Lab(tmp_path, ScriptEngine([str(i) for i in range(9)])) as lab:
        writing, full = lab.store.put_call, [True]
        def put(call, body):
            if not full: return writing(call, body)
            from concurrent.futures import Future
            f = Future(); f.set_exception(OSError('disk full')); return f
        lab.store.put_call = put
        for path, stream in itertools.product((CHAT, ANTH, RESP), (False, True)):
            async with lab.post(path, **wire(path, stream=stream)) as r: assert r.status == 500 and 'could not be recorded' in await r.text()
        assert lab.s.stats.calls == 0 and lab.s.promised == 0
        full.clear()
        for i in range(2): assert (await lab.ask(CHAT, user()))[0] == 200
        lab.store.put_call = lambda call, body: put(call, body) if call.finish == 'error' or full else (full.append(1), put(call, body), full.clear())[1]
        assert (await lab.ask(CHAT, user()))[0] == 500    # the reply could not be written, its failure could
        assert [(c.seq, c.finish) for c in lab.calls] == [(0, 'stop'), (1, 'stop'), (2, 'error')] and not lab.store.verify()['rollouts']['incomplete'] and lab.s.stats.calls == 2

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

async def test_a_subagent_that_only_the_billing_line_tells_of(tmp_path):
    "The line never reaches the model, what it says reaches the roles, and a user who quotes it is no subagent."
    line = 'x-anthropic-billing-header: cc_version=2.1.332.%s; cc_entrypoint=sdk-cli;'
    system = lambda x, says='': [dict(type='text', text=line % x + says), dict(type='text', text='You act. '*20)]
    async with Lab(tmp_path, ScriptEngine(['a']*4)) as lab:
        await lab.ask(ANTH, user('x ' + line % 'abc' + ' cc_is_subagent=true;'), system=system('abc'))
        await lab.ask(ANTH, user('Find.'), system=system('def', ' cc_is_subagent=true;'))
        await lab.ask(ANTH, user('Look.'), system=line % 'ghi' + ' cc_is_subagent=true;\n' + 'You act. '*20)
        await lab.ask(ANTH, user('Go on.'), system=line % 'jkl' + '\n' + 'You act. '*20 + 'cc_is_subagent=true;')
        assert [c.role for c in lab.calls] == [c.role for c in await lab.proxy.close_session(lab.s.session_id)] == ['main', 'subagent', 'subagent', 'main']
        assert all('cc_version' not in T.decode(c.prompt_ids) for c in lab.calls[1:])

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
    async with Lab(tmp_path, ScriptEngine(['a']*8), max_body=1 << 20) as lab:
        data = json.dumps(dict(model='m', messages=user())).encode()
        raw = zlib.compressobj(wbits=-15); z = zstandard.compress(data)
        cases = [('gzip', gzip.compress(data), 200), ('deflate', zlib.compress(data), 200), ('deflate', raw.compress(data) + raw.flush(), 200), ('zstd', z, 200),
                 ('zstd, gzip', gzip.compress(z), 200), ('zstd', z[:-2], 400), ('gzip', gzip.compress(data)[:-9], 400), ('gzip', b'nonsense', 400), ('deflate', b'', 400),
                 ('br', brotli.compress(data), 200), ('br', brotli.compress(data)[:-2], 400), ('br', data, 400), ('br', brotli.compress(bytes(5 << 20)), 413),
                 ('gzip, br', brotli.compress(gzip.compress(data)), 200), ('xz', data, 415), (', '.join(['gzip']*4), data, 415), ('zstd', zstandard.compress(bytes(50 << 20)), 413), ('gzip', gzip.compress(bytes(5 << 20)), 413), ('identity', data, 200)]
        for coding, body, want in cases:
            async with lab.post(data=body, headers={'Content-Encoding': coding, 'Content-Type': 'application/json'}) as r:
                assert r.status == want, (coding, want, await r.text())
                assert want == 200 or (await r.json())['error']['message']
        assert all(lab.store.body(c.call_id) == data for c in lab.calls) and len(lab.calls) == 8

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
        async with Lab(d, eng, hold_s=keepalive, keepalive_s=keepalive) as lab:
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
    "600 at once, held for 2 s, none refused; one more gets 429 with Retry-After in the dialect's shape."
    eng = Held()
    async with Lab(tmp_path, eng, max_inflight=600) as lab:
        ask = [asyncio.create_task(lab.ask(CHAT if i % 2 else ANTH, user(str(i)), stream=bool(i % 3))) for i in range(600)]
        await until(lambda: eng.running == 600, 60)
        async with lab.post(ANTH, model='m', messages=user(), max_tokens=5) as r:
            assert r.status == 429 and int(r.headers['Retry-After']) >= 1 and (await r.json())['error']['type'] == 'rate_limit_error'
        await asyncio.sleep(2)
        assert eng.running == 600 and lab.proxy.inflight == 600 and not any(t.done() for t in ask)
        eng.go.set()
        assert {status for status, _ in await asyncio.gather(*ask)} == {200}
        assert eng.most == 600 and len(lab.calls) == 600 and sorted(c.seq for c in lab.calls) == list(range(600))
        await until(lambda: lab.proxy.inflight == 0)

# ---------------------------------------------------------------- fairness, budgets, failures

def wire(path, text='Go.', **kw):
    "A small body of any dialect."
    return dict(model='m', **{'input' if path == RESP else 'messages': user(text)}, **({'max_tokens': 50} if path == ANTH else {}), **kw)
def terminal(path, text):
    "Does a stream end with its terminal event?"
    end = text.rstrip().rsplit('data: ', 1)[-1]
    return end == '[DONE]' if path == CHAT else json.loads(end)['type'] in ('message_stop', 'response.completed', 'response.incomplete')

async def test_P41_bodies_on_their_way_take_nobody_s_place(tmp_path):
    "A slow upload holds no place, however many there are; it is told 408 when its time is over."
    async with Lab(tmp_path, ScriptEngine(['a']*3), max_inflight=1, body_s=(1.5, 3)) as lab:
        head = f'POST {lab.s.base_path}{CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {lab.s.api_key}\r\nContent-Length: 999\r\n\r\n{{'.encode()
        slow = [await asyncio.open_connection('127.0.0.1', lab.proxy.port) for _ in range(20)]
        for _, w in slow: w.write(head); await w.drain()
        assert (await lab.ask(CHAT, user()))[0] == 200 and lab.proxy.inflight == 0
        for i, (r, w) in enumerate(slow):
            answer = await asyncio.wait_for(r.read(), 30)
            assert b' 408 ' in answer.split(b'\r\n')[0] and b'in time' in answer and b'onnection: close' in answer
            w.close()
        assert lab.s.stats.refused[408] == 20 and len(lab.calls) == 1

async def test_a_previous_response_is_looked_up_not_searched(tmp_path):
    "One call is read, whoever is asked for; another session's is unknown."
    async with Lab(tmp_path, ScriptEngine(['a']*20)) as lab:
        other = await lab.proxy.open_session(Rollout('r2', 't', 'h'))
        async def ask(**kw):
            async with lab.post(RESP, model='m', input='x', **kw) as r: return r.status, await r.json()
        first = (await ask())[1]['id']
        for _ in range(9): assert (await ask())[0] == 200
        async with lab.post(RESP, s=other, model='m', input='x') as r: foreign = (await r.json())['id']
        def everything(*a): raise AssertionError('all calls were read')
        calls, lab.store.calls = lab.store.calls, everything
        for id, want in ((first, 200), (foreign, 400), ('resp_nobody', 400), ('resp_\0', 400), ('resp_', 200)):
            status, body = await ask(previous_response_id=id)
            assert status == want and (want == 200 or 'not found' in body['error']['message']), (id, body)
        lab.store.calls = calls
        assert [len(c.messages) for c in lab.calls] == [1]*10 + [3, 1]

async def test_numbers_that_json_can_t_say_are_not_echoed(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a']*9)) as lab:
        for path, stream in itertools.product((CHAT, ANTH, RESP), (False, True)):
            body = json.dumps(wire(path, stream=stream, temperature=5e300)).replace('5e+300', '1e400').encode()
            async with lab.post(path, data=body) as r: assert r.status == 200 and not {b'Infinity', b'NaN'} & set((await r.read()).replace(b',', b' ').split())
        assert {c.requested['temperature'] for c in lab.calls} == {float('inf')}

async def test_a_body_that_waits_to_be_asked_for(tmp_path):
    "`Expect: 100-continue` (curl, Java, .NET): the body is asked for once the key is known and the size is right."
    body = json.dumps(wire(CHAT)).encode()
    async with Lab(tmp_path, ScriptEngine(['a']*3), max_body=999) as lab:
        for key, size, want in ((lab.s.api_key, len(body), b'HTTP/1.1 100 Continue\r\n\r\n'), ('nope', len(body), b'HTTP/1.1 401 '), (lab.s.api_key, 1000, b'HTTP/1.1 413 ')):
            r, w = await asyncio.open_connection('127.0.0.1', lab.proxy.port)
            w.write(f'POST {lab.s.base_path}{CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nExpect: 100-continue\r\nContent-Length: {size}\r\n\r\n'.encode())
            assert await asyncio.wait_for(r.readexactly(len(want)), 5) == want
            if b' 100 ' in want:
                w.write(body)
                assert (await asyncio.wait_for(r.readuntil(b'\r\n\r\n'), 5)).startswith(b'HTTP/1.1 200 ')
            w.close()

async def test_P41_one_session_can_t_take_every_place(tmp_path):
    eng = Held()
    async with Lab(tmp_path, eng, max_inflight=4) as lab:
        other = await lab.proxy.open_session(Rollout('r2', 't', 'h'))
        ask = [asyncio.create_task(lab.ask(CHAT, user(str(i)))) for i in range(4)]
        await until(lambda: eng.running == 4)
        for path in (CHAT, ANTH, RESP):
            async with lab.post(path, **wire(path)) as r: assert r.status == 429 and r.headers['Retry-After'] == '1' and (await r.json())['error']['message']
        async def others():
            async with lab.post(s=other, **wire(CHAT)) as r: return r.status
        more = [asyncio.create_task(others()) for _ in range(2)]
        await until(lambda: eng.running == 6)
        assert await others() == 429     # its fair half is held
        eng.go.set()
        assert {(await t)[0] for t in ask} == {200} == {await t for t in more} and lab.proxy.inflight == 0

async def test_sessions_take_turns_at_the_engine(tmp_path):
    "A session that asks twenty times at once doesn't make another wait for all twenty."
    class Slow(Held):
        async def generate(self, ids, sampling, context):
            self.seen.append(context.session_id); await asyncio.sleep(0)
            return Generation([*T.encode('a'), T.eos_ids[0]], [-.1]*2, [0]*2)
    eng = Slow()
    async with Lab(tmp_path, eng, slots=1) as lab:
        other = await lab.proxy.open_session(Rollout('r2', 't', 'h'))
        await lab.proxy.pause()
        many = [asyncio.create_task(lab.ask(CHAT, user(str(i)))) for i in range(20)]
        await until(lambda: lab.proxy.metrics()['waiting'] == 20)
        async def one():
            async with lab.post(s=other, **wire(CHAT)) as r: return r.status
        two = [asyncio.create_task(one()) for _ in range(2)]
        await until(lambda: lab.proxy.metrics()['waiting'] == 22)
        await lab.proxy.resume()
        await asyncio.gather(*many, *two)
        assert [i for i, s in enumerate(eng.seen) if s == other.session_id] in ([1, 3], [0, 2])

async def test_who_gives_up_in_the_line_leaves_it(tmp_path):
    eng = Held()
    async with Lab(tmp_path, eng, slots=1) as lab:
        first = asyncio.create_task(lab.ask(CHAT, user()))
        await until(lambda: eng.running == 1)
        second = asyncio.create_task(lab.ask(CHAT, user('b')))
        await until(lambda: lab.proxy.metrics()['waiting'] == 1)
        second.cancel()
        await until(lambda: lab.proxy.metrics()['waiting'] == 0 and lab.proxy.inflight == 1)
        eng.go.set()
        assert (await first)[0] == 200 and (await lab.ask(CHAT, user('c')))[0] == 200
        assert sorted(c.finish for c in lab.calls) == ['aborted', 'stop', 'stop']

@ALL
async def test_budgets(tmp_path, path):
    "Calls, sampled tokens, seconds: a spent one is 400 in the dialect's shape, and the session is truncated."
    for opts, served, why in ((dict(max_calls=2), 2, '2 calls'), (dict(max_output_tokens=7), 2, '7 sampled tokens'), (dict(max_seconds=0), 0, '0 seconds')):
        (d := tmp_path/why.replace(' ', '')).mkdir()
        async with Lab(d, ScriptEngine(['word']*4), opts) as lab:
            for i in range(served + 1):
                async with lab.post(path, **wire(path)) as r: status, body = r.status, await r.json()
                assert status == (200 if i < served else 400), body
            assert why in body['error']['message'] and body['error']['type'] == 'invalid_request_error' and lab.s.stats.truncated
            assert [len(c.output_ids) for c in lab.calls] == [5, 5 if 'calls' in why else 2][:served]
        store = Store.open(d/'calls.db')    # budgets survive a restart
        async with Proxy(ScriptEngine(['word']*4), store) as proxy, aiohttp.ClientSession() as http:
            async with http.post(f'http://127.0.0.1:{proxy.port}{path}', json=wire(path), headers={'x-api-key': lab.s.api_key}) as r: assert r.status == 400
        store.close()

class Counting(Held):
    "Each call has its own `go`, and then as many tokens as it may, or `most`."
    def __init__(self, most=10**9): super().__init__(); self.most_ids, self.at_work = most, []
    async def generate(self, ids, sampling, context):
        self.running += 1; self.seen.append((ids, sampling, context)); self.at_work.append(go := asyncio.Event())
        try: await go.wait()
        finally: self.running -= 1
        n = min(sampling.max_tokens, self.most_ids)
        return Generation([97]*n, [-.5]*n, [0]*n, 'length')

@ALL
async def test_budgets_of_calls_at_the_same_time(tmp_path, path):
    "The first of two may use all that is left; the second gets what the first gives back, and no more."
    eng, limit = Counting(6), lambda: [x[1].max_tokens for x in eng.seen]
    async with Lab(tmp_path, eng, dict(max_output_tokens=10), sampling=Sampling(max_tokens=8)) as lab:
        async def one(i):
            async with lab.post(path, **wire(path, str(i))) as r: return r.status
        ask = [asyncio.create_task(one(i)) for i in range(4)]
        await until(lambda: len(eng.at_work) == 2 and lab.proxy.inflight == 4)
        assert limit() == [8, 2]             # the other two wait: all that is left is promised
        eng.at_work[0].set(); await until(lambda: len(eng.at_work) == 3)
        assert limit() == [8, 2, 2]          # of 8 it used 6
        eng.at_work[1].set(); eng.at_work[2].set()
        assert sorted([await t for t in ask]) == [200, 200, 200, 400] and sum(len(c.output_ids) for c in lab.calls) == 10
        assert lab.s.promised == 0 and lab.s.stats.truncated and lab.s.stats.clamped == 2

async def test_who_waits_for_a_budget_holds_no_slot(tmp_path):
    "Calls that wait for their own session's tokens are in nobody's way, and a drain doesn't wait for them."
    eng = Counting()
    async with Lab(tmp_path, eng, dict(max_output_tokens=10), sampling=Sampling(max_tokens=10), slots=2) as lab:
        other = await lab.proxy.open_session(Rollout('r2', 't', 'h'))
        mine = [asyncio.create_task(lab.ask(CHAT, user(x))) for x in 'abc']
        await until(lambda: lab.proxy.inflight == 3)
        async def theirs():
            async with lab.post(s=other, **wire(CHAT)) as r: return r.status
        theirs = asyncio.create_task(theirs())
        await until(lambda: len(eng.at_work) == 2)
        assert lab.proxy.metrics()['generating'] == 2
        await lab.proxy.pause()
        for go in eng.at_work: go.set()
        await asyncio.wait_for(lab.proxy.drain(), 5)
        assert await theirs == 200 and len(eng.at_work) == 2
        await lab.proxy.resume()
        assert sorted([(await t)[0] for t in mine]) == [200, 400, 400] and lab.s.promised == 0 and len(eng.at_work) == 2

@pytest.mark.parametrize('ids, finish', [([97]*6, 'stop'), ([5, 10**6, 5, 5, 5, 5], 'error')])
async def test_a_budget_is_of_tokens_sampled(tmp_path, ids, finish):
    "Whatever became of them: also those of replies that couldn't be read, before a restart as after it."
    eng = Held()
    async def generate(ids_, sampling, context): n = min(6, sampling.max_tokens); return Generation(ids[:n], [-.5]*n, [0]*n)
    eng.generate = generate
    async with Lab(tmp_path, eng, dict(max_output_tokens=10)) as lab:
        for want in (6, 10, 10):
            await lab.ask(CHAT, user()); assert lab.s.stats.output_tokens == want
        assert [len(c.output_ids) for c in lab.calls] == [6, 4] and {c.finish for c in lab.calls} == {finish} and lab.s.stats.truncated
    store = Store.open(tmp_path/'calls.db')
    async with Proxy(eng, store) as proxy: assert (await proxy.session(lab.s.session_id)).stats.output_tokens == 10
    store.close()

async def test_a_failed_call_gives_its_part_of_the_budget_back(tmp_path):
    eng = Counting()
    async with Lab(tmp_path, eng, dict(max_output_tokens=10), sampling=Sampling(max_tokens=10)) as lab:
        gone, waits = (asyncio.create_task(lab.ask(CHAT, user(x))) for x in 'ab')
        await until(lambda: len(eng.at_work) == 1 and lab.proxy.inflight == 2)
        gone.cancel()
        await until(lambda: len(eng.at_work) == 2)
        eng.at_work[1].set()
        assert (await waits)[0] == 200 and lab.s.promised == 0 and [len(c.output_ids) for c in lab.calls] == [0, 10]

@ALL
@pytest.mark.parametrize('hold', [10, 0])
async def test_seconds_that_are_over_when_the_turn_comes(tmp_path, path, hold):
    "A call that waited too long is refused, and the engine never hears of it; with the headers out the connection breaks, and the retry is refused."
    eng = Held(); eng.go.set()
    async with Lab(tmp_path, eng, dict(max_seconds=1000), hold_s=hold) as lab:
        await lab.proxy.pause()
        begun = asyncio.Event()
        async def ask():
            async with lab.post(path, **wire(path), stream=not hold) as r:
                begun.set(); return r.status, await r.text()
        task = asyncio.create_task(ask())
        await until(lambda: lab.proxy.metrics()['waiting'] == 1)
        if not hold: await begun.wait()
        lab.s.opened -= 2000
        await lab.proxy.resume()
        if hold: status, body = await task; assert status == 400 and '1000 seconds' in body and error_of(path, json.loads(body))
        else:
            with pytest.raises(aiohttp.ClientError): await task
        async with lab.post(path, **wire(path)) as r: assert r.status == 400
        assert not eng.seen and not lab.calls and lab.s.stats.truncated and lab.proxy.metrics()['generating'] == 0

@ALL
async def test_engine_failure_after_the_headers(tmp_path, path):
    "`cut` breaks the connection; `event` says so first. Neither ends cleanly, and nothing follows."
    for how in ('cut', 'event'):
        eng = Held(); (d := tmp_path/how).mkdir()
        async def fail(ids, sampling, context): await eng.go.wait(); raise RuntimeError('it died')
        eng.generate = fail
        async with Lab(d, eng, dict(on_engine_failure=how), hold_s=.02, keepalive_s=.02) as lab:
            text = b''
            with pytest.raises(aiohttp.ClientPayloadError):
                async with lab.post(path, **wire(path, stream=True)) as r:
                    text += await r.content.readany(); eng.go.set()
                    while data := await r.content.readany(): text += data
            assert (b'it died' in text) == (how == 'event') and b'[DONE]' not in text and b'message_stop' not in text
            if how == 'event': assert {CHAT: b'"error"', ANTH: b'event: error', RESP: b'response.failed'}[path] in text
            assert [c.finish for c in lab.calls] == ['error'] and lab.s.stats.engine_errors == 1
    with pytest.raises(InputError, match='cut or event'): await Proxy(Held(), None).open_session(Rollout('r', 't', 'h'), on_engine_failure='retry')

@ALL
async def test_P18_a_call_that_spans_an_update(tmp_path, path):
    "Versions are kept per token; an engine's `abort` is its failure, never an answer."
    class Spans(Held):
        async def generate(self, ids, sampling, context):
            if self.go.is_set(): return Generation([1, 2], [-1., -1.], [7, 7], 'abort')
            return Generation([65]*127 + [T.eos_ids[0]], [-.5]*128, [7]*57 + [8]*71)
    eng = Spans()
    async with Lab(tmp_path, eng, sampling=Sampling(max_tokens=999)) as lab:
        async with lab.post(path, **wire(path)) as r: assert r.status == 200
        eng.go.set()
        for stream in (False, True):
            async with lab.post(path, **wire(path, stream=stream)) as r: assert r.status == 500 and 'abort' in (await r.json())['error']['message']
        a, b, c = lab.calls
        assert a.versions.tolist() == [7]*57 + [8]*71 and (b.finish, c.finish) == ('error', 'error') and b.response is None

async def test_a_reply_that_can_t_be_read_is_an_engine_failure_and_kept(tmp_path):
    class Odd(Held):
        async def generate(self, ids, sampling, context): return Generation([5, 10**6], [-1., -1.], [0, 0])
    async with Lab(tmp_path, Odd()) as lab:
        for stream in (False, True):
            async with lab.post(**wire(CHAT, stream=stream)) as r: assert r.status == 500
        assert [(c.finish, c.output_ids.tolist(), c.response) for c in lab.calls] == [('error', [5, 10**6], None)]*2

async def test_a_fault_of_ours_is_seen_and_told(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a'])) as lab:
        def broken(*a): raise ZeroDivisionError('oops')
        lab.s.lineage.match = broken
        status, body = await lab.ask(ANTH, user())
        assert status == 500 and body['error']['type'] == 'api_error' and 'ZeroDivisionError' in body['error']['message'] and lab.proxy.inflight == 0

async def test_P40_on_a_connection_that_was_kept_alive(tmp_path):
    "The second request on one connection, while waiting in line and while sampling."
    eng = Held(); eng.go.set()
    async with Lab(tmp_path, eng, slots=1) as lab:
        body = json.dumps(wire(CHAT)).encode()
        ask = f'POST {lab.s.base_path}{CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {lab.s.api_key}\r\nContent-Length: {len(body)}\r\n\r\n'.encode() + body
        both = [await asyncio.open_connection('127.0.0.1', lab.proxy.port) for _ in range(2)]
        for r, w in both:
            w.write(ask); head = await r.readuntil(b'\r\n\r\n')
            await r.readexactly(int(head.lower().split(b'content-length: ')[1].split(b'\r')[0]))
        eng.go.clear()
        both[0][1].write(ask); await until(lambda: eng.running == 1)
        both[1][1].write(ask); await until(lambda: lab.proxy.metrics()['waiting'] == 1)
        for _, w in both[::-1]: w.close()
        await until(lambda: eng.running == 0 and lab.proxy.inflight == 0, 1)
        await until(lambda: [c.finish for c in lab.calls] == ['stop', 'stop', 'aborted', 'aborted'])

@ALL
@pytest.mark.parametrize('stream', [False, True])
async def test_all_routes_record_what_was_asked_and_used(tmp_path, path, stream):
    "P16, P34, P38 in every dialect."
    async with Lab(tmp_path, ScriptEngine([CALL]), sampling=Sampling(temperature=.7)) as lab:
        async with lab.post(path, **wire(path, stream=stream, temperature=.1, zz=1)) as r:
            assert r.content_type == ('text/event-stream' if stream else 'application/json') and r.headers['request-id'] == r.headers['x-request-id'] == lab.calls[0].call_id
            text = await r.text()
            assert terminal(path, text) if stream else json.loads(text)
        c, = lab.calls
        assert (c.requested['temperature'], c.used['temperature'], c.dialect) == (.1, .7, {CHAT: 'chat', ANTH: 'anthropic', RESP: 'responses'}[path])
        assert lab.s.stats.unknown == {'zz': 1} and lab.proxy.metrics()['unknown_fields'] == 1

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
    async with Lab(tmp_path, ScriptEngine([dict(error='died', delay_s=.3)]), hold_s=.02, keepalive_s=.02) as lab:
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
    eng, mark = Held(), {CHAT: b': keep-alive', ANTH: b'event: ping'}[path]
    async with Lab(tmp_path, eng, hold_s=.02, keepalive_s=.02) as lab:
        async with lab.post(path, model='m', messages=user(), stream=True, max_tokens=9) as r:
            text = b''
            while text.count(mark) < 3: text += await r.content.readany()
            assert b'reply' not in text and not eng.stopped.is_set()
            eng.go.set()
            text += await r.read()
        assert r.status == 200 and text.rindex(mark) < text.index(b'reply') and text.rstrip().endswith(b'[DONE]' if path == CHAT else b'"message_stop"}')

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
        await lab.proxy.close_session(lab.s.session_id)
        async with post(lab.s, lab.auth()) as r: assert r.status == 401

async def test_keys_are_long_hashed_and_nowhere_on_disk(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a'])) as lab:
        await lab.ask(CHAT, user(), headers={'authorization': f'Bearer {lab.s.api_key}', 'x-copy': lab.s.api_key, 'user-agent': 'me/1'})
        key = lab.s.api_key
        assert len(key.removeprefix('sk-clawlab-')) * 6 >= 128 and lab.calls[0].headers['user-agent'] == 'me/1'
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

@ALL
async def test_sessions_by_key_alone(tmp_path, path):
    "A harness that can't take a path: its key says who it is."
    async with Lab(tmp_path, ScriptEngine(['a']*3)) as lab:
        other = await lab.proxy.open_session(Rollout('r2', 't', 'h'))
        url = f'http://127.0.0.1:{lab.proxy.port}{path}'
        for headers, want in (({'Authorization': f'Bearer {lab.s.api_key}'}, 200), ({'x-api-key': other.api_key}, 200), ({'x-api-key': 'none'}, 401), ({}, 401)):
            async with lab.http.post(url, headers=headers, json=wire(path)) as r: assert r.status == want
        assert len(lab.calls) == 1 == len(lab.store.calls('r2'))
        async with lab.http.get(f'http://127.0.0.1:{lab.proxy.port}/v1/models', headers=lab.auth()) as r: assert r.status == 200
        sock = socket.create_server(('127.0.0.1', 0)); await lab.proxy.listen(sock, lab.s.session_id)
        for s, want in ((lab.s, 200), (other, 403)):
            async with lab.http.post(f'http://127.0.0.1:{sock.getsockname()[1]}{path}', headers=lab.auth(s), json=wire(path)) as r: assert r.status == want
        await lab.proxy.close_session(other.session_id)
        async with lab.http.post(url, headers=lab.auth(other), json=wire(path)) as r: assert r.status == 401

async def test_sessions_of_a_dead_proxy_can_be_closed(tmp_path):
    async with Lab(tmp_path, ScriptEngine(['a'])) as lab: await lab.ask(CHAT, user())
    with Store.open(tmp_path/'calls.db') as store:
        async with Proxy(ScriptEngine([]), store) as proxy:
            assert await proxy.list_sessions() == [dict(session=lab.s.session_id, rollout_id='r1', here=False, stats=None)] == await proxy.list_sessions('r1')
            assert await proxy.list_sessions('r9') == []
            assert len(await proxy.close_session(lab.s.session_id)) == 1 and await proxy.list_sessions() == []
            with pytest.raises(InputError, match='no open session'): await proxy.close_session(lab.s.session_id)
            with pytest.raises(InputError, match='already'): await proxy.open_session(Rollout('r2', 't', 'h'), session_id=lab.s.session_id)

async def test_metrics_and_one_line_per_request(tmp_path):
    async with Lab(tmp_path, ScriptEngine([CALL, dict(error='x')]), log_file=str(tmp_path/'log')) as lab:
        await lab.ask(CHAT, user(), stream=True); await lab.ask(ANTH, user()); await lab.ask(ANTH, [])
        async with lab.http.post(lab.url(), headers={'x-api-key': 'wrong'}) as r: assert r.status == 401
        text = lab.proxy.meter.text().decode()
        for want in ('clawlab_requests_total{dialect="chat",http_response_status_code="200"} 1.0', 'clawlab_requests_total{dialect="anthropic",http_response_status_code="500"} 1.0',
                     'clawlab_requests_total{dialect="chat",http_response_status_code="401"} 1.0', 'clawlab_calls_total 1.0', 'clawlab_engine_errors_total 1.0', 'clawlab_sessions 1.0',
                     'gen_ai_server_request_duration_seconds_count{dialect="chat"} 1.0', 'gen_ai_client_token_usage_count{gen_ai_token_type="output"} 2.0'): assert want in text, want
        await lab.proxy.close_session(lab.s.session_id)
        after = lab.proxy.meter.text().decode()
        assert 'clawlab_calls_total 1.0' in after and 'clawlab_sessions 0.0' in after   # counters never go down
        call = lab.calls[0]
    one, two, three = map(json.loads, (tmp_path/'log').read_text().splitlines())
    assert (one['gen_ai.response.id'], one['clawlab.rollout.id'], one['gen_ai.usage.input_tokens'], one['gen_ai.usage.output_tokens']) == (call.call_id, 'r1', len(call.prompt_ids), len(call.output_ids))
    assert one['gen_ai.response.finish_reasons'] == ['tool_calls'] and one['http.response.status_code'] == 200 and 'error.type' not in one
    assert (two['error.type'], two['http.response.status_code'], three['http.response.status_code']) == ('engine', 500, 400)

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

async def test_admin_types_and_listing(tmp_path):
    from clawlab.capture.admin import start_admin
    async with Lab(tmp_path, ScriptEngine(['a'])) as lab:
        runner = await start_admin(lab.proxy, f'{tmp_path}/sock')
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(f'{tmp_path}/sock')) as door:
            for bad in (b'[]', b'3', b'{"seed": "x"}', b'{"sample": 1.5}', b'{"task_id": 7}', b'{"meta": []}', b'{"sampling": 3}', b'{"sampling": {"temperature": "hot"}}', b'{"sampling": {"heat": 1}}',
                        b'{"sampling": {"temperature": -1}}', b'{"max_calls": -1}', b'{"max_calls": true}', b'{"max_seconds": "1"}', b'{"keyless": 1}', b'{"on_engine_failure": "no"}', b'{"outcome": "ok"}',
                        b'{"expect_harness": 5}', b'{"expect_harness": {"agent": "x"}}', b'{"rollout_id": ""}', b'{"task_id": "\\ud800"}', b'{"task_id": "a\\u0000"}', b'{"rollout_id": "x\\u0000"}', b'{"sample": 9223372036854775808}', b'{"max_seconds": 1e400}',
                        b'{"sampling": {"temperature": 1e400}}', b'{"sampling": {"seed": -9223372036854775809}}', b'\xff', b'{"calls": []}'):
                async with door.post('http://a/sessions', data=bad) as r:
                    text = (await r.json())['error']
                    assert r.status == 400 and text and '\n' not in text, (bad, text)
            async with door.post('http://a/sessions', json=dict(task_id='t', seed=4, sampling=dict(temperature=1), max_seconds=60, max_output_tokens=9, expect_harness=dict(tools=['sh']), on_engine_failure='event')) as r: s = await r.json()
            async with door.get('http://a/sessions') as r: assert {x['session'] for x in await r.json()} == {s['session'], lab.s.session_id}
            async with door.get('http://a/sessions', params=dict(rollout=s['rollout_id'])) as r: assert [x['session'] for x in await r.json()] == [s['session']]
            async with door.get('http://a/metrics') as r: assert 'clawlab_sessions 2.0' in await r.text()
            lab.store.put_rollout = lambda r: 1/0   # a store that fails is told, too
            async with door.post('http://a/sessions', json={}) as r: assert r.status == 500 and 'ZeroDivisionError' in (await r.json())['error']
            async with door.get('http://a/nope') as r: assert r.status == 404
            for what, paused in (('pause', 1), ('drain', 1), ('resume', 0)):
                async with door.post(f'http://a/{what}') as r: assert r.status == 200 and lab.proxy.metrics()['paused'] == paused
            assert lab.proxy.sessions[s['session']].max_seconds == 60 and lab.store.rollout(s['rollout_id']).seed == 4
        await runner.cleanup()

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

async def test_kill_9_under_64_sessions(tmp_path):
    "Of every call of which a byte of content arrived the store has all; the sessions go on."
    (tmp_path/'script.jsonl').write_text('\n'.join([json.dumps(dict(text='reply ' + 'x'*50 + CALL))]*200))
    p = subprocess.Popen([sys.executable, '-m', 'clawlab.cli', 'proxy', '--engine', f'script:{tmp_path}/script.jsonl', '--store', f'{tmp_path}/s.db', '--admin', f'{tmp_path}/sock'],
                         cwd=ROOT, stdout=subprocess.PIPE, text=True)
    url, seen = json.loads(p.stdout.readline())['url'], set()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(f'{tmp_path}/sock')) as door, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async def opened():
            async with door.post('http://a/sessions', json={}) as r: return await r.json()
        ss = await asyncio.gather(*[opened() for _ in range(64)])
        async def agent(i, s):
            path = (CHAT, ANTH, RESP)[i % 3]
            for k in range(200):
                try:
                    async with http.post(s['base_url'] + path, json=wire(path, f'{i} {k}', stream=k % 2 == 0), headers={'x-api-key': s['api_key']}) as r:
                        async for data, _ in r.content.iter_chunks():
                            if data: seen.add((s['rollout_id'], r.headers['request-id']))
                            if len(seen) > 300 and p.returncode is None and p.poll() is None: p.send_signal(signal.SIGKILL)
                except aiohttp.ClientError: return
        await asyncio.gather(*[agent(i, s) for i, s in enumerate(ss)])
    p.wait(); p.stdout.close()
    with Store.open(tmp_path/'s.db', create=False) as store:
        calls = {(s['rollout_id'], c.call_id): c for s in ss for c in store.calls(s['rollout_id'])}
        assert len(seen) > 300 and seen <= calls.keys() and all(c.response and len(c.output_ids) for c in calls.values())
        assert all(json.loads(store.body(cid))['model'] == 'm' for _, cid in seen)
        async with Proxy(ScriptEngine(['on']), store) as proxy, aiohttp.ClientSession() as http:
            async with http.post(f'http://127.0.0.1:{proxy.port}{CHAT}', json=wire(CHAT), headers={'x-api-key': ss[0]['api_key']}) as r: assert r.status == 200
            assert len(await proxy.list_sessions()) == 64

# ---------------------------------------------------------------- any body at all

TEXT = st.text(st.characters(codec=None), max_size=12)
J = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | TEXT, lambda c: st.lists(c, max_size=3) | st.dictionaries(TEXT, c, max_size=3), max_leaves=6)
odd = lambda good: st.one_of(good, good, good, good, J)   # mostly right
objects = lambda **kw: st.fixed_dictionaries({}, optional={k: odd(v) for k, v in kw.items()})
PART = st.fixed_dictionaries(dict(type=odd(st.sampled_from(['text', 'image', 'image_url', 'tool_use', 'tool_result', 'thinking', 'input_text', 'output_text']))),
                             optional=dict(text=odd(TEXT), thinking=TEXT, input=odd(st.dictionaries(TEXT, J, max_size=2)), id=TEXT, name=TEXT, tool_use_id=TEXT, content=odd(TEXT), source=J, image_url=J))
FN = st.fixed_dictionaries(dict(name=odd(TEXT)), optional=dict(arguments=odd(TEXT), description=TEXT, parameters=odd(st.dictionaries(TEXT, J, max_size=2))))
TURN = st.fixed_dictionaries(dict(role=odd(st.sampled_from(['user', 'assistant', 'system', 'tool', 'developer']))),
                             optional=dict(content=odd(TEXT | st.lists(PART, max_size=3)), tool_calls=odd(st.lists(objects(id=TEXT, type=st.just('function'), function=FN), max_size=2)), tool_call_id=TEXT, reasoning_content=odd(TEXT)))
ITEM = TURN | st.fixed_dictionaries(dict(type=odd(st.sampled_from(['message', 'function_call', 'function_call_output', 'reasoning', 'custom_tool_call', 'custom_tool_call_output', 'item_reference']))),
                                    optional=dict(role=odd(st.just('assistant')), content=J, call_id=TEXT, name=TEXT, arguments=odd(TEXT), input=odd(TEXT), output=odd(TEXT), summary=J, id=TEXT, namespace=odd(TEXT)))
TOOL = st.fixed_dictionaries(dict(type=odd(st.just('function'))), optional=dict(name=TEXT, function=odd(FN), input_schema=odd(st.dictionaries(TEXT, J, max_size=2)), parameters=J, format=J, tools=J))
@st.composite
def requests(draw):
    "(path, headers, bytes) of something like a request."
    path = draw(st.sampled_from([CHAT, ANTH, RESP, COUNT]))
    key, one = ('input', ITEM) if path == RESP else ('messages', TURN)
    turns = st.lists(odd(one), max_size=4).map(lambda ms: [*ms, dict(role='user', content='x')])
    body = draw(st.fixed_dictionaries({'model': odd(st.just('m')), key: odd(turns)}, optional=dict(stream=odd(st.booleans()), max_tokens=odd(st.integers(1, 99)), tools=odd(st.lists(TOOL, max_size=2)),
                system=odd(TEXT | st.lists(PART, max_size=2)), temperature=J, stream_options=odd(objects(include_usage=st.booleans())), instructions=odd(TEXT), previous_response_id=odd(TEXT), zz=J, n=J)))
    data = json.dumps(body, ensure_ascii=draw(st.booleans())).encode('utf-8', 'surrogatepass')
    if draw(st.integers(0, 9)) == 0: i = draw(st.integers(0, len(data))); data = data[:i] + draw(st.binary(max_size=3)) + data[i + draw(st.integers(0, 2)):]
    coding = draw(st.sampled_from(['']*8 + ['gzip', 'br', 'zstd', 'deflate', 'nope']))
    pack = dict(gzip=gzip.compress, br=lambda b: brotli.compress(b, quality=1), zstd=zstandard.compress, deflate=zlib.compress).get(coding if draw(st.integers(0, 5)) else '', lambda b: b)
    return path, {'Content-Type': 'application/json', **({'Content-Encoding': coding} if coding else {})}, pack(data)

class Cycle(Held):
    "All kinds of replies, over and over."
    def __init__(self, seed=0):
        super().__init__()
        texts = ['Hi.', '', '<think>why</think>\nSo.' + CALL*2, '<tool_call>{"name": "sh"', 'x<tool_call>[]</tool_call>y', '\x00é\n"\\', '<think>'+CALL]
        self.replies = itertools.cycle([[int(i) for i in T.encode(t, special=True)] + [int(T.eos_ids[0])] for t in texts] + [[], [255, 254], [int(i) for i in T.encode('cut')]])
    async def generate(self, ids, sampling, context):
        out = next(self.replies)[:sampling.max_tokens]
        return Generation(out, [-.5]*len(out), [0]*len(out), 'stop' if out and out[-1] == T.eos_ids[0] else 'length')

def test_any_body_is_answered_and_every_answer_recorded(tmp_path):
    "No 500, no hang, no lost record. CLAWLAB_FUZZ sets the number of cases."
    loop, ok = asyncio.new_event_loop(), [0]
    lab = loop.run_until_complete(Lab(tmp_path, Cycle()).__aenter__())
    async def one(path, headers, data):
        async with asyncio.timeout(60), lab.post(path, data=data, headers=headers) as r:
            text = await r.text()
            assert r.status in (200, 400, 413, 415), (r.status, text)
            if r.status != 200: assert error_of(path, json.loads(text))
            elif path != COUNT:
                ok[0] += 1
                assert terminal(path, text) if r.content_type == 'text/event-stream' else json.loads(text)
    @settings(max_examples=int(os.environ.get('CLAWLAB_FUZZ', 60)), deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(requests())
    def run(case): loop.run_until_complete(one(*case))
    try:
        run()
        calls = lab.calls
        assert ok[0] == len(calls) == lab.s.stats.calls and ok[0] > 0 and lab.proxy.inflight == 0 and sorted(c.seq for c in calls) == list(range(ok[0]))
        assert all(set(c.delivered) == {'yes'} and json.loads(lab.store.body(c.call_id)) for c in calls)
    finally: loop.run_until_complete(lab.__aexit__()); loop.close()

@ALL
async def test_a_long_history_costs_no_more_than_a_short_one(tmp_path, path):
    "Criterion 7: of what is done for a request, in Python calls, very little is done for each message of its history."
    import cProfile, pstats
    async with Lab(tmp_path, ScriptEngine(['reply']*60)) as lab:
        ms, work = user('begin'), {}
        for i in range(60):
            pr = cProfile.Profile() if i in (5, 59) else None
            if pr: pr.enable()
            async with lab.post(path, **{**wire(path), 'input' if path == RESP else 'messages': ms}) as r: assert r.status == 200, await r.text()
            if pr: pr.disable(); work[len(ms)] = sum(n for (f, _, _), (_, n, *_) in pstats.Stats(pr).stats.items() if 'clawlab' in f)
            ms = [*ms, dict(role='assistant', content='reply'), *user(f'turn {i}')]
        (few, little), (many, much) = work.items()
        assert len({c.parent_id for c in lab.calls}) == 60 and (much - little)/(many - few) < 4, work

# ---------------------------------------------------------------- load: make test-load

@pytest.mark.load
async def test_1000_sessions_on_two_cores(tmp_path):
    "No failed request, and memory that stays flat: 1,000 sessions at any time, a new one for each that ends, with a scripted engine."
    (tmp_path/'script.jsonl').write_text('\n'.join([json.dumps(dict(text='word '*50 + CALL, delay_s=.2))]*40))
    p = subprocess.Popen([sys.executable, '-m', 'clawlab.cli', 'proxy', '--engine', f'script:{tmp_path}/script.jsonl', '--store', f'{tmp_path}/s.db', '--admin', f'{tmp_path}/sock'],
                         cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, 'CLAWLAB_PROXY_MAX_INFLIGHT': '1000'})
    rss = lambda: next(int(l.split()[1]) >> 10 for l in Path(f'/proc/{p.pid}/status').read_text().splitlines() if l.startswith('VmRSS'))
    seen, failed, done = [], [], [0]
    try:
        json.loads(p.stdout.readline())
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(f'{tmp_path}/sock', limit=20)) as door, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)) as http:
            async def run(i, turns):
                async with door.post('http://a/sessions', json={}) as r: s = await r.json()
                ms, path = user('x '*200), (CHAT, ANTH)[i % 2]
                for k in range(turns):
                    async with http.post(s['base_url'] + path, json=dict(model='m', max_tokens=500, messages=ms, stream=bool(k % 2)), headers={'x-api-key': s['api_key']}) as r:
                        await r.read()
                        if r.status != 200: failed.append(r.status)
                    ms = [*ms, dict(role='assistant', content='word '*50), *user('y '*300)]; done[0] += 1
                    if done[0] % 500 == 0: seen.append(rss())
                async with door.delete(f"http://a/sessions/{s['session']}") as r: failed.extend([r.status] if r.status != 200 else [])
            async def agent(i):
                for turns in (1 + i % 10, 10, 10, 10, 10): await run(i, turns)   # out of step, so that as many are at each turn all the time
            await asyncio.gather(*[agent(i) for i in range(1000)])
    finally: p.send_signal(signal.SIGINT); p.wait(60); p.stdout.close()
    print('RSS MB', seen)
    assert not failed and max(seen) <= 600 and max(seen[len(seen)//2:]) <= 1.15*seen[len(seen)//2], seen

async def test_what_is_not_http_is_counted_and_leaves_no_traceback(tmp_path, caplog):
    async with Lab(tmp_path, ScriptEngine([{'text': 'hi'}], template=T)) as lab:
        for sent in (b'\x16\x03\x01no HTTP\r\n\r\n', b'GET / HTTP/9.9\r\n\r\n', b'POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n'):
            r, w = await asyncio.open_connection('127.0.0.1', lab.proxy.port)
            w.write(sent); assert b' 400 ' in await r.readline(); w.close()
        assert lab.proxy.meter.registry.get_sample_value('clawlab_requests_total', dict(dialect='none', http_response_status_code='400')) == 3
        assert not caplog.records
