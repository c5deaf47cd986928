"Rooms capture.dialects: the official SDKs as oracles against a tiny server, byte-level grammar, bad input (faults.md 1, 19-21, 30, 34, 36-38)."
import copy, json
from contextlib import asynccontextmanager
import anthropic, openai, pytest
from aiohttp import ClientSession, web
from hypothesis import given, settings, strategies as st
from clawlab.capture.chat import CALL, CALL_END, END, THINK, THINK_END, Template
from clawlab.capture.dialects import anthropic as A, base, chat as C
from clawlab.records import InputError, Message, to_json

T = Template.bytes()
def call(name, **a): return f'{{"name": "{name}", "arguments": {json.dumps(a)}}}'
LONG = 'Zeile – ' * 200
REPLIES = {  # model name -> (reply, finish of the engine)
    'text': (T.parse(T.encode(LONG)), 'stop'),
    'think': (T.parse(T.encode('<think>why</think>\nbecause', special=True)), 'stop'),
    'two': (T.parse(T.ids([CALL, call('f', a=1), CALL_END, CALL, call('g', b=2, text=LONG), CALL_END, END])), 'stop'),
    'mixed': (T.parse(T.ids([THINK, 'r1', THINK_END, '\nt1', THINK, 'r2', THINK_END, CALL, call('f', a=1), CALL_END, 't2', CALL, call('g'), CALL_END])), 'tool_calls'),
    'half': (T.parse(T.ids(['so ', CALL, '{"name": "f", "argu'])), 'length'),
    'whole+half': (T.parse(T.ids([CALL, call('f', a=1), CALL_END, CALL, '{"na'])), 'length'),
    'empty': (T.parse(T.ids([END])), 'stop'),
    'blank': (T.parse(T.ids([' \n', END])), 'stop'),
    'thought-only': (T.parse(T.ids([THINK, 'hm', END])), 'stop'),
}
USAGE = (123, 45)

@asynccontextmanager
async def serve(log=None):
    "Both dialects on one port; the model's name picks the reply, `fail:KIND` an error, `late:KIND` one after the headers."
    async def handle(http):
        d = next(d for d in (A, C) if http.path in d.PATHS)
        try: req = d.parse_request(await http.json(), http.headers)
        except InputError as e:
            status, doc = d.error(None, 'invalid', str(e)); return web.json_response(doc, status=status)
        if log is not None: log.append(req)
        how, _, kind = req.model.partition(':')
        if how == 'fail':
            status, doc = d.error(None, kind, d.overflow_message(1200, 1000) if kind == 'overflow' else 'no'); return web.json_response(doc, status=status)
        reply, finish = REPLIES.get(req.model) or REPLIES['text']
        if not req.stream: return web.json_response(d.body(req, reply, 'c1', finish, USAGE))
        out = web.StreamResponse(headers={'Content-Type': 'text/event-stream'})
        await out.prepare(http)
        for _ in range(2): await out.write(d.keepalive())
        if how == 'late': await out.write(d.error_event(kind, 'gone')); http.transport.abort(); return out
        for _, data in d.events(req, reply, 'c1', finish, USAGE): await out.write(data)
        await out.write_eof()
        return out
    app = web.Application(client_max_size=64 << 20)
    for p in (*A.PATHS, *C.PATHS): app.router.add_post(p, handle)
    runner = web.AppRunner(app); await runner.setup()
    site = web.TCPSite(runner, '127.0.0.1', 0); await site.start()
    url = f'http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}'
    try:
        async with openai.AsyncOpenAI(base_url=url + '/v1', api_key='k', max_retries=0) as o, anthropic.AsyncAnthropic(base_url=url, api_key='k', max_retries=0) as a: yield url, o, a
    finally: await runner.cleanup()

# ---- what each SDK understands, streaming and not

def expected_stop(name):
    reply, finish = REPLIES[name]
    return 'length' if finish == 'length' else 'tool_calls' if reply.finish_tools else 'stop'

def shown(m: Message): return m.content if m.content.strip() else None if m.tool_calls else '(empty)'

@pytest.mark.parametrize('name', REPLIES)
async def test_openai_sdk(name):
    m = REPLIES[name][0].message
    async with serve() as (_, o, _a):
        kw = dict(model=name, messages=[{'role': 'user', 'content': 'hi'}])
        r = await o.chat.completions.create(**kw)
        async with o.chat.completions.stream(**kw, stream_options={'include_usage': True}) as s:
            try:
                async for _ in s: pass
                f = await s.get_final_completion()
            except openai.LengthFinishReasonError as e: f = e.completion  # the helper's word for finish_reason length
    for x in (r, f):
        c = x.choices[0]
        assert (c.message.content or None) == shown(m) and c.finish_reason == expected_stop(name)
        got = [(t.function.name, json.loads(t.function.arguments)) for t in c.message.tool_calls or ()]
        assert got == [(t.name, t.arguments) for t in m.tool_calls]
        assert (x.usage.prompt_tokens, x.usage.completion_tokens) == USAGE
    ids = [[t.id for t in x.choices[0].message.tool_calls or ()] for x in (r, f)]
    assert ids[0] == ids[1] and len(set(ids[0])) == len(ids[0])
    if m.reasoning: assert r.choices[0].message.reasoning_content == m.reasoning

@pytest.mark.parametrize('name', REPLIES)
async def test_anthropic_sdk(name):
    reply = REPLIES[name][0]
    async with serve() as (_, _o, a):
        kw = dict(model=name, max_tokens=64, messages=[{'role': 'user', 'content': 'hi'}])
        r = await a.messages.create(**kw)
        async with a.messages.stream(**kw) as s:
            async for _ in s: pass
            f = await s.get_final_message()
    want = [(k, (v.name, v.arguments) if k == 'tool' else v) for k, v in base.blocks_of(reply)]
    for x in (r, f):
        got = [('thinking', b.thinking) if b.type == 'thinking' else ('text', b.text) if b.type == 'text' else ('tool', (b.name, b.input)) for b in x.content]
        assert got == want
        assert x.stop_reason == dict(stop='end_turn', length='max_tokens', tool_calls='tool_use')[expected_stop(name)]
        assert (x.usage.input_tokens, x.usage.output_tokens) == USAGE
    drop = {'citations': None}
    assert [b.model_dump(exclude=drop.keys(), exclude_none=True) for b in r.content] == [b.model_dump(exclude=drop.keys() | {'parsed_output'}, exclude_none=True) for b in f.content]

# ---- the served bytes

def frames(data: bytes):
    assert data.endswith(b'\n\n')
    for f in data.decode().split('\n\n')[:-1]:
        lines = dict(l.split(': ', 1) for l in f.split('\n'))
        assert set(lines) <= {'event', 'data'}
        yield lines.get('event'), lines['data']

def anthropic_blocks(data: bytes):
    "A strict reader of the vendor's grammar: every event in its place, or an AssertionError."
    state, blocks, cur = 'start', [], None
    for event, text in frames(data):
        d = json.loads(text)
        assert d['type'] == event and state != 'end'
        if event == 'ping': continue
        if event == 'message_start':
            assert state == 'start' and d['message']['content'] == [] and d['message']['stop_reason'] is None; state = 'body'
        elif event == 'content_block_start':
            assert state == 'body' and cur is None and d['index'] == len(blocks)
            cur = dict(d['content_block'], json='')
            assert not (cur.get('text') or cur.get('thinking') or cur.get('input') or cur.get('signature'))
        elif event == 'content_block_delta':
            assert d['index'] == len(blocks); x = d['delta']
            key = dict(text_delta='text', thinking_delta='thinking', signature_delta='signature', input_json_delta='json')[x['type']]
            assert (key, cur['type']) in {('text', 'text'), ('thinking', 'thinking'), ('signature', 'thinking'), ('json', 'tool_use')}
            cur[key] += x['partial_json' if key == 'json' else key]
        elif event == 'content_block_stop':
            assert d['index'] == len(blocks)
            if cur['type'] == 'tool_use': cur['input'] = json.loads(cur['json'])
            blocks.append(cur); cur = None
        elif event == 'message_delta':
            assert state == 'body' and cur is None and d['usage']['output_tokens'] == USAGE[1] and d['usage']['input_tokens'] == USAGE[0]
            state, stop = 'delta', d['delta']['stop_reason']
        elif event == 'message_stop': assert state == 'delta'; state = 'end'
        else: raise AssertionError(event)
    assert state == 'end'
    return blocks, stop

def req(d, **kw): return d.parse_request({'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}], 'stream': True, **kw})
def stream(d, reply, finish='stop', **kw): return list(d.events(req(d, **kw), reply, 'c1', finish, USAGE))

@pytest.mark.parametrize('name', REPLIES)
def test_P19_block_state_machine(name):
    reply, finish = REPLIES[name]
    for r in (reply, reply.message):
        es = stream(A, r, finish)
        blocks, stop = anthropic_blocks(b''.join(b for _, b in es))
        its = A.items(r, 'c1')
        assert [i for i, _ in es if i is not None] == list(range(len(its))) and len(blocks) == len(its)
        assert [{k: b[k] for k in it} for b, it in zip(blocks, its)] == its
        assert all(b'content_block_stop' in data for i, data in es if i is not None)

def test_P19_six_blocks():
    assert [b['type'] for b in anthropic_blocks(b''.join(b for _, b in stream(A, REPLIES['mixed'][0])))[0]] == ['thinking', 'text', 'thinking', 'tool_use', 'text', 'tool_use']

@pytest.mark.parametrize('name', REPLIES)
@pytest.mark.parametrize('asked', [True, False])
def test_P36_chat_grammar_and_usage(name, asked):
    reply, finish = REPLIES[name]
    es = stream(C, reply, finish, **({'stream_options': {'include_usage': True}} if asked else {}))
    its = C.items(reply, 'c1')
    assert [i for i, _ in es if i is not None] == list(range(len(its)))
    fs = list(frames(b''.join(b for _, b in es)))
    assert fs[-1] == (None, '[DONE]') and all(e is None for e, _ in fs)
    ds = [json.loads(x) for _, x in fs[:-1]]
    assert len({d['id'] for d in ds}) == 1 and ds[0]['choices'][0]['delta']['role'] == 'assistant'
    chunks = ds[:-1] if asked else ds
    assert all(len(d['choices']) == 1 for d in chunks)
    stops = [d['choices'][0]['finish_reason'] for d in chunks]
    assert stops[-1] == expected_stop(name) and not any(stops[:-1])
    usages = [d['usage'] for d in ds if d.get('usage')]
    assert usages == [dict(prompt_tokens=123, completion_tokens=45, total_tokens=168)] == [ds[-1]['usage']]
    assert (ds[-1]['choices'] == []) == asked

def test_P20_parallel_calls_arrive_whole():
    two = T.parse(T.ids([CALL, call('f', a=1), CALL_END, CALL, call('f', b=2), CALL_END])).message
    assert [b['input'] for b in anthropic_blocks(b''.join(b for _, b in stream(A, two)))[0]] == [{'a': 1}, {'b': 2}]
    got = {}
    for _, x in frames(b''.join(b for _, b in stream(C, two))):
        for t in [] if x == '[DONE]' else json.loads(x)['choices'][0]['delta'].get('tool_calls', []):
            got[t['index']] = got.get(t['index'], '') + t['function']['arguments']
    assert {k: json.loads(v) for k, v in got.items()} == {0: {'a': 1}, 1: {'b': 2}}

@pytest.mark.parametrize('d', [A, C])
def test_P21_stop_reasons(d):
    stop = lambda name, finish: d.body(req(d), REPLIES[name][0], 'c', finish, USAGE)
    reason = lambda b: b['stop_reason'] if d is A else b['choices'][0]['finish_reason']
    tool, most, end = ('tool_use', 'max_tokens', 'end_turn') if d is A else ('tool_calls', 'length', 'stop')
    assert [reason(stop(*x)) for x in [('two', 'stop'), ('two', 'tool_calls'), ('half', 'length'), ('whole+half', 'length'), ('text', 'stop'), ('text', 'tool_calls')]] == [tool, tool, most, most, end, end]
    assert not any(i['type'] in ('tool_use', 'tool_call') for i in d.items(REPLIES['half'][0], 'c'))

@pytest.mark.parametrize('d', [A, C])
def test_tool_ids_are_unique_and_survive_stripping(d):
    ids = [''.join(filter(str.isalnum, i['id'])) for c in ('c1', 'c11', 'c1_1') for i in d.items(REPLIES['mixed'][0].message, c) if 'id' in i]
    assert len(ids) == 6 == len(set(ids))

def test_malformed_calls_are_served_as_text():
    r = T.parse(T.ids([CALL, '{"name": "f"', CALL_END, END]))
    assert r.malformed == 1
    for d in (A, C): assert [(i['type'], i['text']) for i in d.items(r, 'c')] == [('text', '<tool_call>{"name": "f"</tool_call>')]

async def test_P34_stream_absent_means_json():
    async with serve() as (url, _o, _a), ClientSession() as s:
        for d in (A, C):
            for extra, kind in (({}, 'application/json'), ({'stream': None}, 'application/json'), ({'stream': False}, 'application/json'), ({'stream': True}, 'text/event-stream')):
                async with s.post(url + d.PATHS[0], json={'model': 'text', 'max_tokens': 9, 'messages': [{'role': 'user', 'content': 'x'}], **extra}) as r:
                    assert (r.status, r.content_type) == (200, kind)

# ---- requests

NONCE = 'x-anthropic-billing-header: cc_version=2.1.332.%s; cc_entrypoint=sdk-cli;'
def ask(ms, **kw): return A.parse_request({'model': 'm', 'max_tokens': 5, 'messages': ms, **kw})

def test_P1_billing_nonce():
    user = {'role': 'user', 'content': NONCE % 'abc'}
    def sys(n): return [{'type': 'text', 'text': NONCE % n}, {'type': 'text', 'text': 'You are.', 'cache_control': {'type': 'ephemeral'}}]
    a, b = (ask([user], system=sys(n)) for n in ('a1f', 'b2e'))
    assert a == b and a.messages == (Message('system', 'You are.'), Message('user', NONCE % 'abc'))
    assert ask([user], system=(NONCE % 'q') + '\nYou are.').messages == a.messages
    assert ask([user], system=[{'type': 'text', 'text': NONCE % 'q'}]).messages == a.messages[1:]

def test_P30_system_messages_stay_in_place():
    roles = ask([{'role': 'user', 'content': 'a'}, {'role': 'system', 'content': [{'type': 'text', 'text': 'S'}]}, {'role': 'user', 'content': 'b'}], system='top').messages
    assert [(m.role, m.content) for m in roles] == [('system', 'top'), ('user', 'a'), ('system', 'S'), ('user', 'b')]
    r = C.parse_request({'model': 'm', 'messages': [{'role': 'user', 'content': 'a'}, {'role': 'developer', 'content': 'S'}, {'role': 'user', 'content': 'b'}]})
    assert [m.role for m in r.messages] == ['user', 'system', 'user']

def test_P37_tool_result_shapes():
    png = {'type': 'image', 'source': {'type': 'base64', 'media_type': 'image/png', 'data': 'iVBORw0KGgo' * 9}}
    r = ask([{'role': 'user', 'content': 'go'}, {'role': 'assistant', 'content': [{'type': 'tool_use', 'id': i, 'name': 'f', 'input': {}} for i in ('t1', 't2')]},
             {'role': 'user', 'content': [{'type': 'tool_result', 'tool_use_id': 't1', 'content': [{'type': 'text', 'text': 'boom'}, png], 'is_error': True},
                                          {'type': 'tool_result', 'tool_use_id': 't2'}, {'type': 'text', 'text': 'and?'}]}])
    assert r.messages[2:] == (Message('tool', 'boom\n[image]', tool_call_id='t1', is_error=True), Message('tool', '', tool_call_id='t2'), Message('user', 'and?'))
    s = T.decode(T.render(r.messages, r.tools))
    assert '[error] boom' in s and 'iVBOR' not in s
    r = C.parse_request({'model': 'm', 'messages': [{'role': 'tool', 'tool_call_id': 'x', 'name': 'f', 'content': [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]},
        {'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,iVBOR'}}]}]})
    assert [m.content for m in r.messages] == ['a\nb', '[image]']

def test_P38_unknown_fields_are_tolerated_and_listed():
    mark = {'cache_control': {'type': 'ephemeral'}}
    r = ask([{'role': 'user', 'content': [{'type': 'text', 'text': 'a', **mark}, {'type': 'tool_result', 'tool_use_id': 't', 'content': 'x', **mark}]}], thinking={'type': 'adaptive'},
            context_management={}, output_config={'effort': 'high'}, betas=['x'], zz=1, metadata={'user_id': '{}'}, tools=[{'name': 'f', 'input_schema': {}, 'defer_loading': True, **mark},
            {'type': 'web_search_20250305', 'name': 'web_search'}])
    assert set(r.unknown) == {'thinking', 'context_management', 'output_config', 'betas', 'zz', 'metadata', 'cache_control', 'tools[].defer_loading', 'tools[].cache_control', 'tools[].type=web_search_20250305'}
    assert r.messages == (Message('user', 'a'), Message('tool', 'x', tool_call_id='t')) and len(r.tools) == 1
    r = C.parse_request({'model': 'm', 'messages': [{'role': 'user', 'content': 'a'}], 'zz': 1, 'store': False, 'tools': [{'type': 'custom', 'custom': {'name': 'x'}},
        {'type': 'function', 'function': {'name': 'f', 'strict': True}}], 'temperature': 0.1, 'stop': ['x'], 'max_completion_tokens': 7})
    assert set(r.unknown) == {'zz', 'store', 'tools[].type=custom', 'tools[].function.strict'} and r.max_tokens == 7
    assert r.tools == ({'name': 'f', 'description': '', 'parameters': {'type': 'object', 'properties': {}}},) and r.sampling == {'temperature': 0.1, 'stop': ['x']}

def test_cache_markers_and_list_or_string_content_are_the_same_message():
    a = ask([{'role': 'user', 'content': [{'type': 'text', 'text': 'a', 'cache_control': {'type': 'ephemeral'}}]}])
    assert a.messages == ask([{'role': 'user', 'content': 'a'}]).messages

@pytest.mark.parametrize('name', REPLIES)
@pytest.mark.parametrize('d', [A, C])
def test_replayed_reply_is_the_recorded_one(d, name):
    "What a harness sends back of a served reply is the canonical message again (whitespace and thinking aside)."
    m = REPLIES[name][0].message
    b = d.body(req(d), REPLIES[name][0], 'c1', 'stop', USAGE)
    turn = {'role': 'assistant', 'content': b['content']} if d is A else b['choices'][0]['message']
    got = d.parse_request({'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}, turn, {'role': 'user', 'content': 'y'}]}).messages[1]
    assert got.content.strip() == m.content.strip() and (got.reasoning or '') == (m.reasoning or '')
    assert [(c.name, c.arguments) for c in got.tool_calls] == [(c.name, c.arguments) for c in m.tool_calls]

BAD = [(d, body) for d in (A, C) for body in ([], 'x', {}, {'model': 'm'}, {'model': 'm', 'messages': []}, {'model': 'm', 'messages': {}}, {'messages': [{'role': 'user', 'content': 'x'}]},
    {'model': 'm', 'messages': [None]}, {'model': 'm', 'messages': [{'content': 'x'}]}, {'model': 'm', 'messages': [{'role': 'king', 'content': 'x'}]}, {'model': 'm', 'messages': [{'role': 'user', 'content': 3}]},
    {'model': 'm', 'messages': [{'role': 'user', 'content': [3]}]}, {'model': 'm', 'messages': [{'role': 'user', 'content': [{'type': 'text'}]}]}, {'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}], 'max_tokens': 0},
    {'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}], 'max_tokens': '5'}, {'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}], 'stream': 'yes'}, {'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}], 'tools': [1]})]
BAD += [(A, {'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'y'}]}), (C, {'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}], 'n': 2})]

@pytest.mark.parametrize('d,body', BAD, ids=range(len(BAD)))
def test_bad_input_is_one_clear_line(d, body):
    with pytest.raises(InputError) as e: d.parse_request(body)
    assert str(e.value) and '\n' not in str(e.value)

GOOD = {A: {'model': 'm', 'max_tokens': 5, 'stream': True, 'system': [{'type': 'text', 'text': 's'}], 'tools': [{'name': 'f', 'description': 'd', 'input_schema': {'type': 'object'}}],
            'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'a'}]}, {'role': 'assistant', 'content': [{'type': 'thinking', 'thinking': 't', 'signature': 's'}, {'type': 'tool_use', 'id': 'i', 'name': 'f', 'input': {}}]},
                         {'role': 'user', 'content': [{'type': 'tool_result', 'tool_use_id': 'i', 'content': [{'type': 'document', 'source': {'type': 'text', 'data': 'd'}}, {'type': 'tool_reference', 'tool_name': 'q'}], 'is_error': False}]}]},
        C: {'model': 'm', 'max_tokens': 5, 'stream': True, 'stream_options': {'include_usage': True}, 'tools': [{'type': 'function', 'function': {'name': 'f', 'description': 'd', 'parameters': {}}}],
            'messages': [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': [{'type': 'text', 'text': 'a'}]}, {'role': 'assistant', 'content': None, 'reasoning_content': 'r', 'tool_calls': [{'id': 'i', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}]},
                         {'role': 'tool', 'tool_call_id': 'i', 'content': 'x'}]}}

def places(x, at=()):
    yield at
    for k, v in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else (): yield from places(v, (*at, k))

junk = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(['\ud800', 'text', 'tool_use', 'user', '[' * 5000]),
                    lambda v: st.lists(v, max_size=2) | st.dictionaries(st.sampled_from(['type', 'text', 'content', 'role', 'name', 'id', '\udfff']), v, max_size=3), max_leaves=5)

@pytest.mark.parametrize('d', [A, C])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_fuzzed_bodies_parse_or_say_why(d, data):
    body = copy.deepcopy(GOOD[d])
    *way, last = data.draw(st.sampled_from([p for p in places(body) if p]))
    spot = body
    for k in way: spot = spot[k]
    spot[last] = data.draw(junk)
    try: r = d.parse_request(body)
    except InputError: return
    to_json([r.messages, r.tools, r.sampling, r.unknown, r.model]).encode()  # storable
    T.render(r.messages, r.tools)

# ---- errors

async def test_errors_are_the_vendors_own():
    ms = [{'role': 'user', 'content': 'x'}]
    async with serve() as (_, o, a):
        kinds = dict(invalid=(openai.BadRequestError, anthropic.BadRequestError), auth=(openai.AuthenticationError, anthropic.AuthenticationError), rate=(openai.RateLimitError, anthropic.RateLimitError),
                     overloaded=(openai.InternalServerError, anthropic.APIStatusError), engine=(openai.InternalServerError, anthropic.InternalServerError), not_found=(openai.NotFoundError, anthropic.NotFoundError))
        for kind, (eo, ea) in kinds.items():
            with pytest.raises(eo): await o.chat.completions.create(model=f'fail:{kind}', messages=ms)
            with pytest.raises(ea): await a.messages.create(model=f'fail:{kind}', messages=ms, max_tokens=5)
        with pytest.raises(openai.BadRequestError) as e: await o.chat.completions.create(model='fail:overflow', messages=ms)
        assert e.value.code == 'context_length_exceeded' and 'maximum context length is 1000 tokens' in str(e.value)
        with pytest.raises(anthropic.BadRequestError, match='prompt is too long: 1200 tokens > 1000 maximum'): await a.messages.create(model='fail:overflow', messages=ms, max_tokens=5)
        for bad in ({'role': 'king', 'content': 'x'},):
            with pytest.raises(openai.BadRequestError, match='king'): await o.chat.completions.create(model='m', messages=[bad])
            with pytest.raises(anthropic.BadRequestError, match='king'): await a.messages.create(model='m', messages=[bad], max_tokens=5)

async def test_P21_failure_after_the_headers_is_an_error_event():
    ms = [{'role': 'user', 'content': 'x'}]
    async with serve() as (_, o, a):
        with pytest.raises(openai.APIError, match='gone'):
            async for _ in await o.chat.completions.create(model='late:engine', messages=ms, stream=True): pass
        with pytest.raises(anthropic.APIStatusError, match='gone'):
            async for _ in await a.messages.create(model='late:overloaded', messages=ms, max_tokens=5, stream=True): pass

@pytest.mark.parametrize('d', [A, C])
def test_error_surface(d):
    for kind in ('invalid', 'auth', 'overflow', 'rate', 'overloaded', 'engine', 'not_found'):
        status, doc = d.error(None, kind, 'why')
        assert 400 <= status < 600 and doc['error']['message'] == 'why' and d.error(403, kind, '')[0] == 403
    assert A.overflow_message(990, 1000) == 'prompt is too long: 1001 tokens > 1000 maximum'  # the harness computes the difference
