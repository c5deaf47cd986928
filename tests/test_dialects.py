"Rooms capture.dialects: the official SDKs as oracles against served bytes, strict readers of each grammar, bad input (faults.md 1, 19-21, 28-30, 34, 36-38)."
import asyncio, copy, hashlib, json, os
from contextlib import asynccontextmanager
import anthropic, openai, pytest
from aiohttp import ClientSession, web
from hypothesis import given, settings, strategies as st
from anthropic._streaming import SSEDecoder as AnthropicDecoder
from openai._streaming import SSEDecoder as OpenAIDecoder
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from clawlab.capture.chat import CALL, CALL_END, END, THINK, THINK_END, Template
from clawlab.capture.dialects import anthropic as A, base, chat as C, responses as R
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.lineage import message_key
from clawlab.capture.proxy import DIALECTS, Proxy
from clawlab.capture.store import Store
from clawlab.records import InputError, Message, Rollout, ToolCall, message_from, to_json

T = Template.bytes()
ALL = (A, C, R)
EACH = pytest.mark.parametrize('d', ALL, ids=[d.NAME for d in ALL])
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
USER = [{'role': 'user', 'content': 'hi'}]
def said(d, ms=USER, **kw):
    "A request body of a dialect."
    return {'model': 'm', **({'input': ms} if d is R else {'messages': ms}), **({'max_tokens': 64} if d is A else {}), **kw}
def parsed(d, ms=USER, **kw): return d.parse_request(said(d, ms, **kw))

@asynccontextmanager
async def serve(log=None):
    "All dialects on one port; the model's name picks the reply, `fail:KIND` an error, `late:KIND` one after the headers, `once:KIND` one at first."
    failed = set()
    async def handle(http):
        d = next(d for d in ALL if http.path in d.PATHS)
        try: req = d.parse_request(await http.json(), http.headers)
        except InputError as e:
            status, doc = d.error(None, 'invalid', str(e)); return web.json_response(doc, status=status)
        if log is not None: log.append(req)
        how, _, kind = req.model.partition(':')
        if how == 'fail' or how == 'once' and (d, kind) not in failed:
            failed.add((d, kind))
            status, doc = d.error(None, kind, d.overflow_message(1200, 1000) if kind == 'overflow' else 'no')
            return web.json_response(doc, status=status, headers={'Retry-After': '0.05'})
        reply, finish = REPLIES.get(req.model) or REPLIES['text']
        if not req.stream: return web.json_response(d.body(req, reply, 'c1', finish, USAGE))
        out = web.StreamResponse(headers={'Content-Type': 'text/event-stream'})
        await out.prepare(http)
        for _ in range(2): await out.write(d.keepalive())
        if how == 'late':
            await out.write(d.error_event(kind, 'gone'))
            if d is not R: http.transport.abort()   # `response.failed` is an end, the others' error events are none
            return out
        for _, data in d.events(req, reply, 'c1', finish, USAGE): await out.write(data)
        await out.write_eof()
        return out
    app = web.Application(client_max_size=64 << 20)
    for d in ALL: app.router.add_post(d.PATHS[0], handle)
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

def same_chat(x, name):
    m, c = REPLIES[name][0].message, x.choices[0]
    assert (c.message.content or None) == shown(m) and c.finish_reason == expected_stop(name)
    assert [(t.function.name, json.loads(t.function.arguments)) for t in c.message.tool_calls or ()] == [(t.name, t.arguments) for t in m.tool_calls]
    assert (x.usage.prompt_tokens, x.usage.completion_tokens) == USAGE
    return [t.id for t in c.message.tool_calls or ()]

async def test_openai_chat_sdk():
    async with serve() as (_, o, _a):
        for name in REPLIES:
            kw, m = dict(model=name, messages=USER), REPLIES[name][0].message
            r = await o.chat.completions.create(**kw)
            async with o.chat.completions.stream(**kw, stream_options={'include_usage': True}) as s:
                try:
                    async for _ in s: pass
                    f = await s.get_final_completion()
                except openai.LengthFinishReasonError as e: f = e.completion  # the helper's word for finish_reason length
            ids = [same_chat(x, name) for x in (r, f)]
            assert ids[0] == ids[1] and len(set(ids[0])) == len(ids[0])
            if m.reasoning: assert r.choices[0].message.reasoning_content == m.reasoning

def same_anthropic(x, name):
    got = [('thinking', b.thinking) if b.type == 'thinking' else ('text', b.text) if b.type == 'text' else ('tool', (b.name, b.input)) for b in x.content]
    assert got == [(k, (v.name, v.arguments) if k == 'tool' else v) for k, v in base.blocks_of(REPLIES[name][0])]
    assert x.stop_reason == dict(stop='end_turn', length='max_tokens', tool_calls='tool_use')[expected_stop(name)]
    assert (x.usage.input_tokens, x.usage.output_tokens) == USAGE
    return [b.model_dump(exclude={'citations', 'parsed_output'}, exclude_none=True) for b in x.content]

async def test_anthropic_sdk():
    async with serve() as (_, _o, a):
        for name in REPLIES:
            kw = dict(model=name, max_tokens=64, messages=USER)
            r = await a.messages.create(**kw)
            async with a.messages.stream(**kw) as s:
                async for _ in s: pass
                f = await s.get_final_message()
            assert same_anthropic(r, name) == same_anthropic(f, name)

def same_responses(x, name):
    reply = REPLIES[name][0]
    got = [('thinking', it.summary[0].text) if it.type == 'reasoning' else ('text', it.content[0].text) if it.type == 'message' else ('tool', (it.name, json.loads(it.arguments))) for it in x.output]
    assert got == [(k, (v.name, v.arguments) if k == 'tool' else v) for k, v in base.blocks_of(reply)]
    cut = expected_stop(name) == 'length'
    assert (x.status, x.incomplete_details and x.incomplete_details.reason) == (('incomplete', 'max_output_tokens') if cut else ('completed', None))
    assert (x.usage.input_tokens, x.usage.output_tokens, x.usage.total_tokens) == (*USAGE, sum(USAGE))
    assert x.output_text == ''.join(v for k, v in base.blocks_of(reply) if k == 'text') and x.error is None
    return [it.model_dump(exclude_none=True, exclude={'parsed_arguments': True, 'content': {'__all__': {'parsed'}}}) for it in x.output]

async def test_openai_responses_sdk():
    async with serve() as (_, o, _a):
        for name in REPLIES:
            r, last = await o.responses.create(model=name, input='hi'), None
            async with o.responses.stream(model=name, input='hi') as s:
                async for e in s: last = e
            assert last.type == 'response.' + r.status
            assert same_responses(r, name) == same_responses(last.response, name) and last.response.id == r.id
            async for e in await o.responses.create(model=name, input='hi', stream=True): last = e
            assert same_responses(last.response, name) == same_responses(r, name)

async def test_synchronous_sdks():
    def talk(url):
        with openai.OpenAI(base_url=url + '/v1', api_key='k') as o, anthropic.Anthropic(base_url=url, api_key='k') as a:
            same_chat(o.chat.completions.create(model='mixed', messages=USER), 'mixed')
            with o.chat.completions.stream(model='mixed', messages=USER, stream_options={'include_usage': True}) as s: same_chat(s.get_final_completion(), 'mixed')
            same_responses(o.responses.create(model='mixed', input='hi'), 'mixed')
            with o.responses.stream(model='mixed', input='hi') as s: same_responses(s.get_final_response(), 'mixed')
            same_anthropic(a.messages.create(model='mixed', max_tokens=9, messages=USER), 'mixed')
            with a.messages.stream(model='mixed', max_tokens=9, messages=USER) as s: same_anthropic(s.get_final_message(), 'mixed')
    async with serve() as (url, _o, _a): await asyncio.to_thread(talk, url)

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
            assert state == 'start' and d['message']['content'] == [] and d['message']['stop_reason'] is None; state, id = 'body', d['message']['id']
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
            del cur['json']; blocks.append(cur); cur = None
        elif event == 'message_delta':
            assert state == 'body' and cur is None
            state, stop, usage = 'delta', d['delta']['stop_reason'], d['usage']
        elif event == 'message_stop': assert state == 'delta'; state = 'end'
        else: raise AssertionError(event)
    assert state == 'end'
    return dict(id=id, content=blocks, stop_reason=stop, usage=usage)

TERMINAL = ('response.completed', 'response.incomplete', 'response.failed')
PARTS = {'message': ('response.content_part', 'response.output_text', 'content_index', 'content'), 'reasoning': ('response.reasoning_summary_part', 'response.reasoning_summary_text', 'summary_index', 'summary')}
FLAT = {'function_call': ('response.function_call_arguments', 'arguments'), 'custom_tool_call': ('response.custom_tool_call_input', 'input')}

def responses_object(data: bytes):
    "A strict reader of the Responses grammar: the response that its events add up to, or an AssertionError."
    out, cur, part, text, id, end = [], None, None, '', None, None
    for n, (event, raw) in enumerate(frames(data)):
        d = json.loads(raw)
        assert end is None and d['type'] == event and d['sequence_number'] == n
        if n < 2:
            assert event == ('response.created', 'response.in_progress')[n] or n == 1 and event in TERMINAL
            r = d['response']; id = id or r['id']
            assert r['id'] == id and r['object'] == 'response'
            if event in TERMINAL: end = r; assert r['status'] == event.removeprefix('response.')
            else: assert r['status'] == 'in_progress' and r['output'] == [] and r['usage'] is None
            continue
        if event in TERMINAL:
            end = d['response']
            assert cur is None and end['id'] == id and end['status'] == event.removeprefix('response.') and end['output'] == out
            continue
        assert d['output_index'] == len(out)
        if event == 'response.output_item.added':
            assert cur is None; cur, done = d['item'], False
            assert not (cur.get('content') or cur.get('summary') or cur.get('arguments') or cur.get('input')) and cur.get('status') in ('in_progress', None)
            continue
        if event == 'response.output_item.done':
            it = d['item']; kind = it['type']
            assert done and part is None and (it['id'], kind) == (cur['id'], cur['type']) and {k: it[k] for k in ('call_id', 'name', 'namespace') if k in it} == {k: cur[k] for k in ('call_id', 'name', 'namespace') if k in cur}
            assert (it[PARTS[kind][3]][0]['text'] if kind in PARTS else it[FLAT[kind][1]]) == text and it.get('status') != 'in_progress'
            out.append(it); cur = None
            continue
        assert d['item_id'] == cur['id'] and not done
        if cur['type'] in PARTS:
            outer, inner, index, _ = PARTS[cur['type']]
            assert d[index] == 0
            if event == outer + '.added': assert part is None and d['part']['text'] == ''; part, text = d['part'], ''
            elif event == inner + '.delta': assert part and d['delta']; text += d['delta']
            elif event == inner + '.done': assert part and d['text'] == text
            else: assert event == outer + '.done' and d['part'] == {**part, 'text': text}; part, done = None, True
        else:
            name, key = FLAT[cur['type']]
            if part is None: part, text = 'arguments', ''
            if event == name + '.delta': text += d['delta']
            else: assert event == name + '.done' and d[key] == text; part, done = None, True
    assert end is not None
    return end

def chat_object(data: bytes):
    "What the vendor's own accumulator makes of the chunks."
    state, fs = ChatCompletionStreamState(), list(frames(data))
    assert fs[-1] == (None, '[DONE]') and all(e is None for e, _ in fs)
    think = ''
    for _, x in fs[:-1]:
        c = ChatCompletionChunk.model_validate_json(x)
        think += ''.join(getattr(ch.delta, 'reasoning_content', None) or '' for ch in c.choices)
        state.handle_chunk(c)
    return state.current_completion_snapshot.model_dump(exclude_none=True), think or None

def stream(d, reply, finish='stop', **kw): return list(d.events(parsed(d, stream=True, **kw), reply, 'c1', finish, USAGE))
def joined(es): return b''.join(b for _, b in es)

@pytest.mark.parametrize('name', REPLIES)
def test_P19_block_state_machine(name):
    reply, finish = REPLIES[name]
    for r in (reply, reply.message):
        for d in ALL:
            es, its = stream(d, r, finish), d.items(r, 'c1')
            assert [i for i, _ in es if i is not None] == list(range(len(its)))
            if d is A:
                assert anthropic_blocks(joined(es))['content'] == its and all(b'content_block_stop' in data for i, data in es if i is not None)
            if d is R:
                out = responses_object(joined(es))['output']
                assert [{**x, 'status': 0} for x in out] == [{**x, 'status': 0} for x in its] and all(b'output_item.done' in data for i, data in es if i is not None)

def test_P19_six_blocks():
    assert [b['type'] for b in anthropic_blocks(joined(stream(A, REPLIES['mixed'][0])))['content']] == ['thinking', 'text', 'thinking', 'tool_use', 'text', 'tool_use']
    assert [b['type'] for b in responses_object(joined(stream(R, REPLIES['mixed'][0])))['output']] == ['reasoning', 'message', 'reasoning', 'function_call', 'message', 'function_call']

@pytest.mark.parametrize('name', REPLIES)
@pytest.mark.parametrize('asked', [True, False])
def test_P36_chat_grammar_and_usage(name, asked):
    reply, finish = REPLIES[name]
    es = stream(C, reply, finish, **({'stream_options': {'include_usage': True}} if asked else {}))
    fs = list(frames(joined(es)))
    ds = [json.loads(x) for _, x in fs[:-1]]
    assert len({d['id'] for d in ds}) == 1 and ds[0]['choices'][0]['delta']['role'] == 'assistant'
    chunks = ds[:-1] if asked else ds
    assert all(len(d['choices']) == 1 for d in chunks)
    stops = [d['choices'][0]['finish_reason'] for d in chunks]
    assert stops[-1] == expected_stop(name) and not any(stops[:-1])
    usages = [d['usage'] for d in ds if d.get('usage')]
    assert usages == [dict(prompt_tokens=123, completion_tokens=45, total_tokens=168)] == [ds[-1]['usage']]
    assert (ds[-1]['choices'] == []) == asked

@EACH
def test_P36_usage_is_always_sent(d):
    for name, (reply, finish) in REPLIES.items():
        last = {A: lambda b: anthropic_blocks(b)['usage'], C: lambda b: chat_object(b)[0]['usage'], R: lambda b: responses_object(b)['usage']}[d](joined(stream(d, reply, finish)))
        assert {k: last[k] for k in d.usage_json(USAGE)} == d.usage_json(USAGE) == d.body(parsed(d), reply, 'c1', finish, USAGE)['usage']

def test_P20_parallel_calls_arrive_whole():
    two = T.parse(T.ids([CALL, call('f', a=1), CALL_END, CALL, call('f', b=2), CALL_END])).message
    assert [b['input'] for b in anthropic_blocks(joined(stream(A, two)))['content']] == [{'a': 1}, {'b': 2}]
    assert [json.loads(b['arguments']) for b in responses_object(joined(stream(R, two)))['output']] == [{'a': 1}, {'b': 2}]
    got = {}
    for _, x in frames(joined(stream(C, two))):
        for t in [] if x == '[DONE]' else json.loads(x)['choices'][0]['delta'].get('tool_calls', []):
            got[t['index']] = got.get(t['index'], '') + t['function']['arguments']
    assert {k: json.loads(v) for k, v in got.items()} == {0: {'a': 1}, 1: {'b': 2}}

@EACH
def test_P21_stop_reasons(d):
    tool, most, end = {A: ('tool_use', 'max_tokens', 'end_turn'), C: ('tool_calls', 'length', 'stop'), R: ('completed', 'incomplete', 'completed')}[d]
    for name, finish, want in [('two', 'stop', tool), ('two', 'tool_calls', tool), ('half', 'length', most), ('whole+half', 'length', most), ('text', 'stop', end), ('text', 'tool_calls', end)]:
        b = d.body(parsed(d), REPLIES[name][0], 'c1', finish, USAGE)
        assert (b['stop_reason'] if d is A else b['choices'][0]['finish_reason'] if d is C else b['status']) == want
    assert not any('name' in i for i in d.items(REPLIES['half'][0], 'c'))

def test_P28_exactly_one_terminal_event():
    "The strict reader takes every reply; a failure is `response.failed`, and the last word."
    for reply, finish in REPLIES.values(): assert responses_object(joined(stream(R, reply, finish)))['status'] == ('incomplete' if finish == 'length' else 'completed')
    for kind, code in dict(engine='server_error', overflow='context_length_exceeded', overloaded='server_is_overloaded', rate='rate_limit_exceeded').items():
        r = responses_object(R.error_event(kind, 'gone'))
        assert r['status'] == 'failed' and r['error'] == dict(code=code, message='gone')
    whole = joined(stream(R, REPLIES['mixed'][0]))
    for broken in (whole.replace(b'"sequence_number": 3', b'"sequence_number": 4', 1), whole.rpartition(b'event: response.completed')[0], whole + whole, whole.replace(b'rs_c1_0', b'rs_c1_9', 1)):
        with pytest.raises(AssertionError): responses_object(broken)

@EACH
def test_tool_ids_are_unique_and_survive_stripping(d):
    ids = [''.join(filter(str.isalnum, i.get('call_id') or i['id'])) for c in ('c1', 'c11', 'c1_1') for i in d.items(REPLIES['mixed'][0].message, c) if 'name' in i]
    assert len(ids) == 6 == len(set(ids))

def test_malformed_calls_are_served_as_text():
    r = T.parse(T.ids([CALL, '{"name": "f"', CALL_END, END]))
    assert r.malformed == 1
    for d in (A, C): assert [(i['type'], i['text']) for i in d.items(r, 'c')] == [('text', '<tool_call>{"name": "f"</tool_call>')]
    assert [i['content'][0]['text'] for i in R.items(r, 'c')] == ['<tool_call>{"name": "f"</tool_call>']

async def test_P34_stream_absent_means_json():
    async with serve() as (url, _o, _a), ClientSession() as s:
        for d in ALL:
            for extra, kind in (({}, 'application/json'), ({'stream': None}, 'application/json'), ({'stream': False}, 'application/json'), ({'stream': True}, 'text/event-stream')):
                async with s.post(url + d.PATHS[0], json=said(d, **extra)) as r: assert (r.status, r.content_type) == (200, kind)

# ---- any reply, any cut

words = st.text(st.characters(exclude_categories=['Cs']) | st.sampled_from('\n\r\u2028\u0085"\\{}<>'), max_size=30)
values = st.recursive(st.none() | st.booleans() | st.integers(-2**53, 2**53) | words, lambda v: st.lists(v, max_size=2) | st.dictionaries(words, v, max_size=2), max_leaves=4)
calls = st.builds(lambda n, a: [CALL, json.dumps({'name': n, 'arguments': a}, ensure_ascii=False), CALL_END], st.sampled_from(['f', 'apply_patch', 'mcp__calc__sum']),
                  st.dictionaries(words, values, max_size=2) | words.map(lambda w: {'input': w}))
replies = st.lists(words.map(lambda w: [w]) | words.map(lambda w: [THINK, w, THINK_END]) | calls | st.just([CALL, '{"na', CALL_END]), max_size=5).map(lambda ps: T.parse(T.ids(sum(ps, []))))
TOOLS = dict(tools=[{'type': 'custom', 'name': 'apply_patch'}, {'type': 'namespace', 'name': 'mcp__calc', 'tools': [{'type': 'function', 'name': 'sum'}]}])

@settings(max_examples=60, deadline=None)
@given(reply=replies, finish=st.sampled_from(['stop', 'length', 'tool_calls']))
def test_stream_and_json_say_the_same(reply, finish):
    "Content, ids, stop reason and usage of every dialect; and what the harness sends back is the message that was recorded."
    for d, kw in ((A, {}), (C, {'stream_options': {'include_usage': True}}), (R, TOOLS)):
        req = parsed(d, stream=True, **kw)
        b, raw = d.body(req, reply, 'c1', finish, USAGE), joined(d.events(req, reply, 'c1', finish, USAGE))
        if d is A: assert anthropic_blocks(raw) == {k: b[k] for k in ('id', 'content', 'stop_reason', 'usage')}
        if d is R: assert {**responses_object(raw), 'created_at': 0} == {**b, 'created_at': 0}
        if d is C:
            got, think = chat_object(raw)
            (x,), (y,) = got['choices'], b['choices']
            assert (got['id'], x['finish_reason'], think, {k: got['usage'][k] for k in b['usage']}) == (b['id'], y['finish_reason'], y['message'].get('reasoning_content'), b['usage'])
            assert (x['message'].get('content') or None) == y['message']['content']
            assert [(t['id'], t['function']['name'], t['function']['arguments']) for t in x['message'].get('tool_calls', ())] == [(t['id'], t['function']['name'], t['function']['arguments']) for t in y['message'].get('tool_calls', ())]
        turn = [{'role': 'assistant', 'content': b['content']}] if d is A else [b['choices'][0]['message']] if d is C else b['output']
        back, m = d.parse_request(json.loads(json.dumps(said(d, [*USER, *turn, *USER])))).messages[1], reply.message
        assert message_key(back) == message_key(m) or not m.content.strip('\ufeff \n\t\r')
        assert [(c.name, c.arguments) for c in back.tool_calls] == [(c.name, c.arguments) for c in m.tool_calls]

@settings(max_examples=40, deadline=None)
@given(reply=replies, data=st.data())
def test_any_cut_of_the_bytes_gives_the_same_events(reply, data):
    for d, decoder in ((A, AnthropicDecoder), (C, OpenAIDecoder), (R, OpenAIDecoder)):
        raw = d.keepalive() + joined(stream(d, reply))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
        read = lambda chunks: [(e.event, e.data) for e in decoder().iter_bytes(iter(chunks))]
        assert read([raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)])]) == read([raw]) == [(e, x) for e, x in frames(raw.removeprefix(C.keepalive()))]

@pytest.mark.parametrize('name', REPLIES)
@EACH
def test_replayed_reply_is_the_recorded_one(d, name):
    "What a harness sends back of a served reply is the canonical message again (whitespace and blank thinking aside)."
    m = REPLIES[name][0].message
    b = d.body(parsed(d), REPLIES[name][0], 'c1', 'stop', USAGE)
    turn = [{'role': 'assistant', 'content': b['content']}] if d is A else [b['choices'][0]['message']] if d is C else b['output']
    got = parsed(d, [*USER, *turn, *USER]).messages[1]
    assert got.content.strip() == m.content.strip() and (got.reasoning or '') == (m.reasoning or '')
    assert [(c.name, c.arguments) for c in got.tool_calls] == [(c.name, c.arguments) for c in m.tool_calls]

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
    for d in (C, R):
        ms = parsed(d, [{'role': 'user', 'content': 'a'}, {'role': 'developer', 'content': 'S'}, {'role': 'user', 'content': 'b'}]).messages
        assert [(m.role, m.content) for m in ms] == [('user', 'a'), ('system', 'S'), ('user', 'b')]
    assert [m.content for m in parsed(R, [{'role': 'developer', 'content': 'dev'}], instructions='top').messages] == ['top', 'dev']

PNG = 'iVBORw0KGgo' * 9 + 'A'
def image(d, data=PNG): return {A: {'type': 'image', 'source': {'type': 'base64', 'media_type': 'image/png', 'data': data}}, C: {'type': 'image_url', 'image_url': {'url': f'data:image/png;base64,{data}'}},
                                R: {'type': 'input_image', 'image_url': f'data:image/png;base64,{data}', 'detail': 'auto'}}[d]
def text(d, t): return {'type': 'input_text' if d is R else 'text', 'text': t}
def results(d, *outs):
    "A conversation in which a tool was called once per output."
    if d is A: return [*USER, {'role': 'assistant', 'content': [{'type': 'tool_use', 'id': f't{i}', 'name': 'f', 'input': {}} for i, _ in enumerate(outs)]},
                       {'role': 'user', 'content': [{'type': 'tool_result', 'tool_use_id': f't{i}', 'content': o} for i, o in enumerate(outs)]}]
    if d is C: return [*USER, {'role': 'assistant', 'content': None, 'tool_calls': [{'id': f't{i}', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}} for i, _ in enumerate(outs)]},
                       *({'role': 'tool', 'tool_call_id': f't{i}', 'content': o} for i, o in enumerate(outs))]
    return [*USER, *({'type': 'function_call', 'call_id': f't{i}', 'name': 'f', 'arguments': '{}'} for i, _ in enumerate(outs)), *({'type': 'function_call_output', 'call_id': f't{i}', 'output': o} for i, o in enumerate(outs))]

def test_P37_tool_result_shapes():
    r = ask([{'role': 'user', 'content': 'go'}, {'role': 'assistant', 'content': [{'type': 'tool_use', 'id': i, 'name': 'f', 'input': {}} for i in ('t1', 't2')]},
             {'role': 'user', 'content': [{'type': 'tool_result', 'tool_use_id': 't1', 'content': [{'type': 'text', 'text': 'boom'}, image(A)], 'is_error': True},
                                          {'type': 'tool_result', 'tool_use_id': 't2'}, {'type': 'text', 'text': 'and?'}]}])
    assert r.messages[2:] == (Message('tool', 'boom\n[image]', tool_call_id='t1', is_error=True, media=(base.media_id(image(A)),)), Message('tool', '', tool_call_id='t2'), Message('user', 'and?'))
    s = T.decode(T.render(r.messages, r.tools))
    assert '[error] boom' in s and 'iVBOR' not in s

@EACH
def test_P37_tool_results_in_parts(d):
    r = parsed(d, results(d, [text(d, 'a'), image(d), text(d, 'b')], 'plain', []))
    assert [(m.role, m.content, m.tool_call_id) for m in r.messages[2:]] == [('tool', 'a\n[image]\nb', 't0'), ('tool', 'plain', 't1'), ('tool', '', 't2')]
    assert len(r.messages[1].tool_calls) == 3 and 'iVBOR' not in T.decode(T.render(r.messages, r.tools)) and not r.unknown
    assert parsed(R, results(R, {'content': 'no', 'success': False})).messages[-1].is_error

@EACH
def test_P37_different_images_are_different_messages(d):
    "In messages and in tool results; the same image is the same message, however it is wrapped."
    other = 'aW1hZ2Uy'
    for make in (lambda x: parsed(d, [{'role': 'user', 'content': [text(d, 'look'), image(d, x)]}]).messages[0], lambda x: parsed(d, results(d, [image(d, x)])).messages[-1]):
        a, b, again = make(PNG), make(other), make(PNG)
        assert a == again and message_key(a) == message_key(again) and message_key(a) != message_key(b) and a.content == b.content
        assert b.media == (hashlib.sha256(b'image2').hexdigest(),) and message_from(json.loads(to_json(a))) == a
    two = parsed(d, [{'role': 'user', 'content': [image(d), text(d, 'or'), image(d, other)]}]).messages[0]
    assert two.content == '[image]\nor\n[image]' and two.media == (a.media[0], b.media[0])

@EACH
def test_media_stay_with_their_message(d):
    turn = {'role': 'assistant', 'content': [{'type': 'output_text' if d is R else 'text', 'text': 'a'}, image(d)]}
    assert [len(m.media) for m in parsed(d, [{'role': 'user', 'content': [image(d)]}, turn, *USER]).messages][::2] == [1, 0]

def test_files_sounds_and_addresses():
    c = parsed(C, [{'role': 'user', 'content': [{'type': 'input_audio', 'input_audio': {'data': 'aGk=', 'format': 'wav'}}, {'type': 'file', 'file': {'file_id': 'f-1'}}, {'type': 'image_url', 'image_url': {'url': 'https://x.org/a.png'}}]}]).messages[0]
    r = parsed(R, [{'role': 'user', 'content': [{'type': 'input_audio', 'input_audio': {'data': 'aGk=', 'format': 'wav'}}, {'type': 'input_file', 'file_id': 'f-1'}, {'type': 'input_image', 'image_url': 'https://x.org/a.png'}]}]).messages[0]
    assert c.content == r.content == '[audio]\n[file]\n[image]' and c.media == r.media and len(set(c.media)) == 3
    docs = ask([{'role': 'user', 'content': [{'type': 'document', 'source': {'type': 'text', 'media_type': 'text/plain', 'data': 'plain'}, 'title': 't'}, {'type': 'document', 'source': {'type': 'content', 'content': [{'type': 'text', 'text': 'inside'}]}},
        {'type': 'document', 'source': {'type': 'url', 'url': 'https://x.org/a.pdf'}}, {'type': 'search_result', 'source': 's', 'title': 'T', 'content': [{'type': 'text', 'text': 'found'}]}]}])
    assert docs.messages[0].content == 'plain\ninside\n[document]\nT\nfound' and len(docs.messages[0].media) == 1 and not docs.unknown

def test_P38_unknown_fields_are_tolerated_and_listed():
    mark = {'cache_control': {'type': 'ephemeral'}}
    r = ask([{'role': 'user', 'content': [{'type': 'text', 'text': 'a', **mark}, {'type': 'tool_result', 'tool_use_id': 't', 'content': 'x', **mark}]}], thinking={'type': 'adaptive'},
            context_management={}, output_config={'effort': 'high'}, betas=['x'], zz=1, metadata={'user_id': '{}'}, tools=[{'name': 'f', 'input_schema': {}, 'defer_loading': True, **mark},
            {'type': 'web_search_20250305', 'name': 'web_search'}], tool_choice={'type': 'any', 'disable_parallel_tool_use': True}, stop_sequences=['x'])
    assert set(r.unknown) == {'thinking', 'context_management', 'output_config', 'betas', 'zz', 'metadata', 'cache_control', 'tools[].defer_loading', 'tools[].cache_control', 'tools[].type=web_search_20250305'}
    assert r.messages == (Message('user', 'a'), Message('tool', 'x', tool_call_id='t')) and len(r.tools) == 1
    assert r.sampling == {'tool_choice': {'type': 'any', 'disable_parallel_tool_use': True}, 'stop': ['x']}
    r = C.parse_request({'model': 'm', 'messages': [{'role': 'user', 'content': 'a', 'zz': 1}], 'zz': 1, 'store': False, 'tools': [{'type': 'custom', 'custom': {'name': 'x'}},
        {'type': 'function', 'function': {'name': 'f', 'strict': True}}], 'temperature': 0.1, 'stop': ['x'], 'max_completion_tokens': 7, 'tool_choice': 'auto', 'parallel_tool_calls': False})
    assert set(r.unknown) == {'zz', 'messages[].zz', 'store', 'tools[].type=custom', 'tools[].function.strict'} and r.max_tokens == 7
    assert r.tools == ({'name': 'f', 'description': '', 'parameters': {'type': 'object', 'properties': {}}},)
    assert r.sampling == {'temperature': 0.1, 'stop': ['x'], 'tool_choice': 'auto', 'parallel_tool_calls': False}
    r = R.parse_request({'model': 'm', 'input': [{'type': 'message', 'role': 'user', 'content': 'a', 'zz': 1}], 'zz': 1, 'store': False, 'include': ['reasoning.encrypted_content'], 'prompt_cache_key': 'k', 'client_metadata': {'a': 'b'},
        'tools': [{'type': 'web_search'}, {'type': 'function', 'name': 'f', 'strict': False}], 'tool_choice': 'auto', 'parallel_tool_calls': True, 'reasoning': {'summary': 'auto'}, 'max_output_tokens': 9})
    assert set(r.unknown) == {'zz', 'input[].zz', 'store', 'include', 'prompt_cache_key', 'client_metadata', 'tools[].type=web_search', 'tools[].strict'} and r.max_tokens == 9
    assert r.sampling == {'tool_choice': 'auto', 'parallel_tool_calls': True, 'reasoning': {'summary': 'auto'}} and [t['name'] for t in r.tools] == ['f']

def test_cache_markers_and_list_or_string_content_are_the_same_message():
    a = ask([{'role': 'user', 'content': [{'type': 'text', 'text': 'a', 'cache_control': {'type': 'ephemeral'}}]}])
    assert a.messages == ask([{'role': 'user', 'content': 'a'}]).messages
    for content in ([text(R, 'a')], 'a'): assert parsed(R, [{'type': 'message', 'role': 'user', 'content': content}]).messages == a.messages == parsed(R, 'a').messages

def test_old_and_rare_spellings_of_chat():
    ms = parsed(C, [*USER, {'role': 'assistant', 'content': None, 'function_call': {'name': 'f', 'arguments': '{"a": 1}'}}, {'role': 'function', 'name': 'f', 'content': 'x'},
                    {'role': 'assistant', 'content': None, 'refusal': 'I will not.'}, {'role': 'assistant', 'content': [{'type': 'refusal', 'refusal': 'No.'}], 'reasoning': 'hm'}]).messages
    assert [(m.role, m.content) for m in ms] == [('user', 'hi'), ('assistant', ''), ('tool', 'x'), ('assistant', 'I will not.'), ('assistant', 'No.')]
    assert ms[1].tool_calls == (ToolCall('', 'f', {'a': 1}, '{"a": 1}'),) and ms[4].reasoning == 'hm'

def test_thinking_of_another_model_is_unreadable():
    r = ask([*USER, {'role': 'assistant', 'content': [{'type': 'redacted_thinking', 'data': 'x'}, {'type': 'thinking', 'thinking': 'mine', 'signature': 'c.0'}, {'type': 'text', 'text': 'a'}]}, *USER])
    assert r.messages[1] == Message('assistant', 'a', 'mine') and r.unknown == ('content[].type=redacted_thinking',)
    r = parsed(R, [*USER, {'type': 'reasoning', 'summary': [{'type': 'summary_text', 'text': 'short'}], 'encrypted_content': 'gAAAA'}, {'role': 'assistant', 'content': 'a'}])
    assert r.messages[1] == Message('assistant', 'a', 'short') and r.unknown == ('input[].encrypted_content of another writer',)
    assert parsed(R, [*USER, {'type': 'reasoning', 'summary': [], 'content': [{'type': 'reasoning_text', 'text': 'long'}]}]).messages[1].reasoning == 'long'

# ---- Responses: items and tools

def test_P29_codex_tools():
    "A grammar, a namespace, a function; what can't be run here is counted; calls go back as each kind wants them, byte for byte."
    grammar = {'type': 'grammar', 'syntax': 'lark', 'definition': 'start: begin_patch'}
    r = parsed(R, tools=[{'type': 'function', 'name': 'shell', 'description': 'Run', 'parameters': {'type': 'object'}, 'strict': False}, {'type': 'custom', 'name': 'apply_patch', 'description': 'Edit', 'format': grammar},
        {'type': 'namespace', 'name': 'multi_agent_v1', 'description': 'Helpers', 'tools': [{'type': 'function', 'name': 'spawn_agent', 'parameters': {}}, {'type': 'custom', 'name': 'note'}]},
        {'type': 'namespace', 'name': 'mcp__calc__', 'tools': [{'type': 'function', 'name': 'sum'}]}, {'type': 'web_search'}, {'type': 'tool_search'}, {'type': 'local_shell'}, {'type': 'zz', 'x': 1}])
    assert [t['name'] for t in r.tools] == ['shell', 'apply_patch', 'multi_agent_v1__spawn_agent', 'multi_agent_v1__note', 'mcp__calc__sum']
    assert {u for u in r.unknown if 'type=' in u} == {f'tools[].type={t}' for t in ('web_search', 'tool_search', 'local_shell', 'zz')}
    assert r.tools[1]['parameters']['required'] == ['input'] and 'begin_patch' in r.tools[1]['description'] and r.tools[2]['description'].startswith('Helpers')
    patch = '*** Begin Patch\n*** Update File: "a\\b".py\n-\tx = \'é\'\r\n+\u2028y\n*** End Patch\n'
    said_ = [('shell', {'command': ['ls']}), ('apply_patch', {'input': patch}), ('multi_agent_v1__spawn_agent', {'message': 'go'}), ('multi_agent_v1__note', {'input': 'n'}), ('mcp__calc__sum', {'a': 1}), ('nobody', {})]
    m = Message('assistant', 'On it.', 'plan', tuple(ToolCall('', n, a, json.dumps(a, ensure_ascii=False)) for n, a in said_))
    out = responses_object(joined(R.events(r, m, 'c1', 'stop', USAGE)))['output']
    assert [(i['type'], i.get('name'), i.get('namespace')) for i in out[2:]] == [('function_call', 'shell', None), ('custom_tool_call', 'apply_patch', None), ('function_call', 'spawn_agent', 'multi_agent_v1'),
        ('custom_tool_call', 'note', 'multi_agent_v1'), ('function_call', 'sum', 'mcp__calc__'), ('function_call', 'nobody', None)]
    assert out[3]['input'] == patch and out[2]['arguments'] == '{"command": ["ls"]}'
    back = parsed(R, [*USER, *out, {'type': 'custom_tool_call_output', 'call_id': out[3]['call_id'], 'output': 'Done'}]).messages
    assert [m.role for m in back] == ['user', 'assistant', 'tool'] and back[2].tool_call_id == out[3]['call_id']
    assert back[1].content == 'On it.' and back[1].reasoning == 'plan' and [(c.name, c.arguments) for c in back[1].tool_calls] == said_

@pytest.mark.parametrize('arguments', [{}, {'patch': 'x'}, {'input': 5}, {'input': 'x', 'y': 1}, {'input': {'input': 'x'}}])
def test_P29_a_custom_tool_called_with_other_arguments(arguments):
    "The harness gets the argument text; what it sends back is what was sampled."
    req, raw = parsed(R, **TOOLS), json.dumps(arguments, indent=1)
    it, = R.items(Message('assistant', tool_calls=(ToolCall('', 'apply_patch', arguments, raw),)), 'c1', req)
    assert it['type'] == 'custom_tool_call' and it['input'] == raw and it['call_id'][-24:] == base.tool_id('', 'c1', 0)
    assert [(c.name, c.arguments) for c in parsed(R, [*USER, it]).messages[1].tool_calls] == [('apply_patch', arguments)]

def test_items_of_one_reply_are_one_message_and_of_two_are_two():
    a, b = Message('assistant', 'A', 'ra', (ToolCall('', 'f', {}, '{}'),)), Message('assistant', 'B', 'rb', (ToolCall('', 'g', {}, '{}'), ToolCall('', 'h', {}, '{}')))
    roles = lambda its: [(m.content, m.reasoning, len(m.tool_calls)) for m in parsed(R, [*USER, *its]).messages[1:]]
    ia, ib = R.items(a, 'c1'), R.items(b, 'c2')
    assert roles(ia + ib) == [('A', 'ra', 1), ('B', 'rb', 2)]
    assert roles(ia[:2] + ib) == [('A', 'ra', 0), ('B', 'rb', 2)]                   # a reply that was cut, and the next
    bare = [{k: v for k, v in i.items() if k not in ('id', 'status')} for i in ib]
    assert roles(bare) == [('B', 'rb', 2)] and roles(ia[1:2] + bare) == [('A', None, 0), ('B', 'rb', 2)]   # without ids the sealed letter tells
    assert roles([{**i, 'id': f'msg_{n}'} for n, i in enumerate(bare)]) == [('B', 'rb', 2)]                  # fresh ids of the harness
    assert roles([*ia, {'type': 'function_call_output', 'call_id': 'x', 'output': 'o'}, *ib]) == [('A', 'ra', 1), ('o', None, 0), ('B', 'rb', 2)]
    odd = [{'type': 'local_shell_call', 'call_id': 'x', 'action': {}}, {'type': 'ghost_snapshot'}, {'type': 'compaction', 'encrypted_content': 'x'}]
    r = parsed(R, [*USER, *ib[:2], *odd, *ib[2:]])
    assert len(r.messages) == 2 and set(r.unknown) == {'input[].type=local_shell_call', 'input[].type=ghost_snapshot', 'input[].type=compaction'}

@given(words | st.text(max_size=200))
def test_the_sealed_letter_comes_back_byte_by_byte(s):
    if s.encode('utf-8', 'replace').decode() != s: return
    assert R.unseal(R.seal(s, 'c1')) == (s, 'c1') and R.unseal(R.seal(s, 'c1')[:-3]) == (None, None) and R.unseal(s) == (None, None)

def test_a_sealed_bomb_is_not_opened():
    assert R.unseal(R.seal('x' * (1 << 20), 'c1'), most=1 << 16) == (None, None)

@pytest.mark.parametrize('body,says', [({'input': [{'type': 'item_reference', 'id': 'msg_1'}]}, 'item_reference'), ({'input': [{'id': 'msg_1'}]}, 'item_reference'), ({'input': 'x', 'background': True}, 'background'),
    ({'input': 'x', 'conversation': 'conv_1'}, 'conversation'), ({'input': [{'type': 'message', 'role': 'tool', 'content': ''}]}, 'unknown role'), ({}, 'input: field required'), ({'input': {}}, 'a string or a list'),
    ({'input': []}, 'empty'), ({'input': [{'type': 'web_search_call'}]}, 'empty'), ({'input': [{'type': 'function_call', 'name': 'f'}]}, 'input.0.call_id'), ({'input': 'x', 'tools': [{'type': 'function', 'function': {'name': 'f'}}]}, 'tools.0.name')])
def test_responses_says_what_it_does_not_take(body, says):
    with pytest.raises(InputError, match=says): R.parse_request({'model': 'm', **body})

def test_tools_that_arrive_in_the_input():
    r = parsed(R, [{'type': 'additional_tools', 'role': 'developer', 'tools': [{'type': 'function', 'name': 'g'}]}, *USER], tools=[{'type': 'function', 'name': 'f'}, {'type': 'custom', 'name': 'f'}])
    assert [t['name'] for t in r.tools] == ['f', 'g'] and r.wire == {} and r.unknown == ('tools[].name twice',) and len(r.messages) == 1

BAD = [(d, body) for d in (A, C) for body in ([], 'x', {}, {'model': 'm'}, {'model': 'm', 'messages': []}, {'model': 'm', 'messages': {}}, {'messages': USER}, {'model': 'm', 'messages': [None]}, {'model': 'm', 'messages': [{'content': 'x'}]})]
BAD += [(d, said(d, ms, **kw)) for d in ALL for ms, kw in [([{'role': 'king', 'content': 'x'}], {}), ([{'role': 'user', 'content': 3}], {}), ([{'role': 'user', 'content': [3]}], {}), ([{'role': 'user', 'content': [{'type': 'text'}]}], {}),
    (USER, {'stream': 'yes'}), (USER, {'tools': [1]}), (USER, {'tools': {}}), (USER, {'model': 3}), (USER, {'max_output_tokens' if d is R else 'max_tokens': 0}), (USER, {'max_output_tokens' if d is R else 'max_tokens': '5'})]]
BAD += [(A, said(A, [*USER, {'role': 'assistant', 'content': 'y'}])), (C, said(C, n=2))]

@pytest.mark.parametrize('d,body', BAD, ids=range(len(BAD)))
def test_bad_input_is_one_clear_line(d, body):
    with pytest.raises(InputError) as e: d.parse_request(body)
    assert str(e.value) and '\n' not in str(e.value)

GOOD = {A: {'model': 'm', 'max_tokens': 5, 'stream': True, 'system': [{'type': 'text', 'text': 's'}], 'tools': [{'name': 'f', 'description': 'd', 'input_schema': {'type': 'object'}}], 'tool_choice': {'type': 'auto'},
            'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'a'}, image(A, 'aGk=')]}, {'role': 'assistant', 'content': [{'type': 'thinking', 'thinking': 't', 'signature': 's'}, {'type': 'tool_use', 'id': 'i', 'name': 'f', 'input': {}}]},
                         {'role': 'user', 'content': [{'type': 'tool_result', 'tool_use_id': 'i', 'content': [{'type': 'document', 'source': {'type': 'text', 'data': 'd'}}, {'type': 'document', 'source': {'type': 'content', 'content': [{'type': 'text', 'text': 'c'}]}},
                             {'type': 'search_result', 'title': 't', 'content': []}, {'type': 'tool_reference', 'tool_name': 'q'}], 'is_error': False}]}]},
        C: {'model': 'm', 'max_tokens': 5, 'stream': True, 'stream_options': {'include_usage': True}, 'tools': [{'type': 'function', 'function': {'name': 'f', 'description': 'd', 'parameters': {}}}],
            'messages': [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': [{'type': 'text', 'text': 'a'}, image(C, 'aGk=')]}, {'role': 'assistant', 'content': None, 'reasoning_content': 'r', 'refusal': None, 'function_call': {'name': 'f', 'arguments': ''},
                          'tool_calls': [{'id': 'i', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}]}, {'role': 'tool', 'tool_call_id': 'i', 'content': 'x'}]},
        R: {'model': 'm', 'max_output_tokens': 5, 'stream': True, 'instructions': 's', 'previous_response_id': None, 'reasoning': {'summary': 'auto'}, 'tools': [{'type': 'function', 'name': 'f', 'parameters': {}}, {'type': 'custom', 'name': 'p',
                'format': {'type': 'grammar', 'syntax': 'lark', 'definition': 'x'}}, {'type': 'namespace', 'name': 'n', 'description': 'd', 'tools': [{'type': 'function', 'name': 'g'}]}],
            'input': [{'type': 'message', 'role': 'developer', 'content': [{'type': 'input_text', 'text': 's'}]}, {'role': 'user', 'content': [{'type': 'input_text', 'text': 'a'}, image(R, 'aGk=')]},
                      {'type': 'reasoning', 'id': 'rs_c_0', 'summary': [{'type': 'summary_text', 'text': 't'}], 'encrypted_content': R.seal('t', 'c')}, {'type': 'message', 'id': 'msg_c_1', 'role': 'assistant', 'content': [{'type': 'output_text', 'text': 'x'}]},
                      {'type': 'function_call', 'id': 'fc_c_2', 'call_id': 'i', 'name': 'g', 'namespace': 'n', 'arguments': '{}'}, {'type': 'custom_tool_call', 'call_id': 'callraw_j', 'name': 'p', 'input': '[1]'},
                      {'type': 'function_call_output', 'call_id': 'i', 'output': [{'type': 'input_text', 'text': 'o'}]}, {'type': 'custom_tool_call_output', 'call_id': 'j', 'output': 'o'}, {'type': 'additional_tools', 'tools': []}]}}

def places(x, at=()):
    yield at
    for k, v in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else (): yield from places(v, (*at, k))

KEYS = ['type', 'text', 'content', 'role', 'name', 'id', 'input', 'output', 'source', 'image_url', 'tools', 'arguments', 'call_id', '\udfff']
junk = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(['\ud800', 'text', 'tool_use', 'user', '[' * 5000, 'message', 'custom', 'namespace', 'reasoning', 'assistant', 'function_call']),
                    lambda v: st.lists(v, max_size=2) | st.dictionaries(st.sampled_from(KEYS), v, max_size=3), max_leaves=5)
DRAWN = {d: st.sampled_from([p for p in places(GOOD[d]) if p]) for d in ALL}

@EACH
@settings(max_examples=int(os.environ.get('CLAWLAB_FUZZ', 150)), deadline=None)
@given(data=st.data())
def test_fuzzed_bodies_parse_or_say_why(d, data):
    "Up to three places of a good body are anything else; CLAWLAB_FUZZ=10000 asks more."
    body = copy.deepcopy(GOOD[d])
    for *way, last in data.draw(st.lists(DRAWN[d], min_size=1, max_size=3)):
        spot = body
        try:
            for k in way: spot = spot[k]
            spot[last] = data.draw(junk)
        except (KeyError, IndexError, TypeError): continue   # an earlier change took this place away
    try: r = d.parse_request(body)
    except InputError as e: assert '\n' not in str(e)[:200]; return
    to_json([r.messages, r.tools, r.sampling, r.unknown, r.model]).encode()  # storable
    T.render(r.messages, r.tools); [message_key(m) for m in r.messages]
    m = Message('assistant', 'a', 'b', tuple(ToolCall('', t['name'], {'input': 'x'}, '{"input": "x"}') for t in r.tools))
    json.dumps(d.body(r, m, 'c1', 'stop', USAGE)); joined(d.events(r, m, 'c1', 'stop', USAGE))

# ---- errors

async def one(d, o, a, model, **kw):
    body = said(d, model=model, **kw)
    return await (a.messages.create if d is A else o.chat.completions.create if d is C else o.responses.create)(**body)

@EACH
async def test_errors_are_the_vendors_own(d):
    lib = anthropic if d is A else openai
    kinds = dict(invalid='BadRequestError', auth='AuthenticationError', rate='RateLimitError', overloaded='APIStatusError', engine='InternalServerError', not_found='NotFoundError')
    async with serve() as (_, o, a):
        for kind, name in kinds.items():
            with pytest.raises(getattr(lib, name)): await one(d, o, a, f'fail:{kind}')
        with pytest.raises(lib.BadRequestError) as e: await one(d, o, a, 'fail:overflow')
        assert {A: 'prompt is too long: 1200 tokens > 1000 maximum', C: 'maximum context length is 1000 tokens', R: 'exceeds the context window'}[d] in str(e.value)
        if d is not A: assert e.value.code == 'context_length_exceeded'
        with pytest.raises(lib.BadRequestError, match='king'): await one(d, o, a, 'm', **{'input' if d is R else 'messages': [{'role': 'king', 'content': 'x'}]})

@EACH
async def test_one_429_or_500_is_retried(d):
    "By the vendor's own client, after the time that Retry-After names."
    async with serve(log := []) as (_, o, a):
        for kind in ('rate', 'engine', 'overloaded'):
            log.clear()
            await one(d, o.with_options(max_retries=1), a.with_options(max_retries=1), f'once:{kind}')
            assert len(log) == 2 and log[0] == log[1]
            with pytest.raises((anthropic if d is A else openai).APIStatusError): await one(d, o.with_options(max_retries=1), a.with_options(max_retries=1), f'fail:{kind}')

async def test_P21_failure_after_the_headers_is_an_error_event():
    async with serve() as (_, o, a):
        with pytest.raises(openai.APIError, match='gone'):
            async for _ in await o.chat.completions.create(model='late:engine', messages=USER, stream=True): pass
        with pytest.raises(anthropic.APIStatusError, match='gone'):
            async for _ in await a.messages.create(model='late:overloaded', messages=USER, max_tokens=5, stream=True): pass
        last = [e async for e in await o.responses.create(model='late:engine', input='x', stream=True)][-1]
        assert last.type == 'response.failed' and last.response.error.message == 'gone'

@EACH
def test_error_surface(d):
    for kind in ('invalid', 'auth', 'overflow', 'rate', 'overloaded', 'engine', 'not_found'):
        status, doc = d.error(None, kind, 'why')
        assert 400 <= status < 600 and doc['error']['message'] == 'why' and d.error(403, kind, '')[0] == 403
    assert A.overflow_message(990, 1000) == 'prompt is too long: 1001 tokens > 1000 maximum'  # the harness computes the difference

# ---- the same clients against the real proxy

BOTH = '<think>plan</think>\nTwo looks.' + ''.join(f'<tool_call>{call("sh", cmd=c)}</tool_call>' for c in ('ls', 'pwd'))

@asynccontextmanager
async def lab(tmp, script):
    with Store.open(tmp/'s.db') as store:
        async with Proxy(ScriptEngine(script), store) as proxy:
            s = await proxy.open_session(Rollout('r1', 't1', 'react'))
            url = f'http://127.0.0.1:{proxy.port}{s.base_path}'
            async with openai.AsyncOpenAI(base_url=url + '/v1', api_key=s.api_key, max_retries=0) as o, anthropic.AsyncAnthropic(base_url=url, api_key=s.api_key, max_retries=0) as a: yield store, url, s, o, a

def chain(store):
    x, y = store.calls('r1')
    assert y.parent_id == y.anchor_id == x.call_id and y.drift == 0 and y.prompt_ids[:len(x.prompt_ids) + len(x.output_ids)].tolist() == [*x.prompt_ids, *x.output_ids]
    return x, y

async def test_anthropic_agent_through_the_proxy(tmp_path):
    tools = [{'name': 'sh', 'description': 'Run', 'input_schema': {'type': 'object', 'properties': {'cmd': {'type': 'string'}}}}]
    async with lab(tmp_path, [BOTH, 'Done.']) as (store, _, s, _o, a):
        kw = dict(model='m', max_tokens=1000, tools=tools)
        n = (await a.messages.count_tokens(model='m', messages=USER, tools=tools)).input_tokens
        async with a.messages.stream(**kw, messages=USER) as st: r = await st.get_final_message()
        assert r.usage.input_tokens == n and [b.type for b in r.content] == ['thinking', 'text', 'tool_use', 'tool_use']
        out = [{'type': 'tool_result', 'tool_use_id': b.id, 'content': [{'type': 'text', 'text': 'x'}, image(A)]} for b in r.content if b.type == 'tool_use']
        f = await a.messages.create(**kw, messages=[*USER, {'role': 'assistant', 'content': r.content}, {'role': 'user', 'content': out}])
        assert f.content[0].text == 'Done.' and f.stop_reason == 'end_turn'
        _, y = chain(store)
        assert y.media == ((-1, 0, base.media_id(image(A))),)*2 and [c.id for c in y.messages[1].tool_calls] == [b.id for b in r.content[2:]]

async def test_chat_agent_through_the_proxy(tmp_path):
    tools = [{'type': 'function', 'function': {'name': 'sh', 'description': 'Run', 'parameters': {'type': 'object', 'properties': {'cmd': {'type': 'string'}}}}}]
    async with lab(tmp_path, [BOTH, 'Done.']) as (store, _, s, o, _a):
        async with o.chat.completions.stream(model='m', tools=tools, messages=USER, tool_choice='auto') as st: m = (await st.get_final_completion()).choices[0].message
        turn = {'role': 'assistant', 'content': m.content, 'tool_calls': [{'id': t.id, 'type': 'function', 'function': {'name': t.function.name, 'arguments': t.function.arguments}} for t in m.tool_calls]}
        f = await o.chat.completions.create(model='m', tools=tools, messages=[*USER, turn, *({'role': 'tool', 'tool_call_id': t.id, 'content': 'x'} for t in m.tool_calls)])
        assert f.choices[0].message.content == 'Done.'
        x, _ = chain(store)
        assert x.requested == {'tool_choice': 'auto', 'max_tokens': None}
        assert [m.id for m in (await o.models.list()).data] == ['clawlab'] and (await o.models.retrieve('gpt-5.5')).id == 'gpt-5.5'

async def test_responses_agent_through_the_proxy(tmp_path):
    "A custom tool and a namespace; the items go back as they came."
    patch = '*** Begin Patch\n+é\n*** End Patch'
    first = '<think>plan</think>\nTwo.' + f'<tool_call>{call("apply_patch", input=patch)}</tool_call><tool_call>{call("mcp__calc__sum", a=1)}</tool_call>'
    async with lab(tmp_path, [first, 'Done.']) as (store, _, s, o, _a):
        async with o.responses.stream(model='m', input=USER, instructions='Be brief.', **TOOLS) as st: r = await st.get_final_response()
        assert [i.type for i in r.output] == ['reasoning', 'message', 'custom_tool_call', 'function_call'] and r.output[2].input == patch and r.output[3].namespace == 'mcp__calc'
        back = [i.model_dump(exclude_none=True, exclude={'parsed_arguments': True, 'content': {'__all__': {'parsed'}}}) for i in r.output]
        f = await o.responses.create(model='m', instructions='Be brief.', **TOOLS, input=[*USER, *back, {'type': 'custom_tool_call_output', 'call_id': r.output[2].call_id, 'output': 'Done'}, {'type': 'function_call_output', 'call_id': r.output[3].call_id, 'output': '3'}])
        assert f.output_text == 'Done.' and f.usage.input_tokens > r.usage.input_tokens
        _, y = chain(store)
        assert y.dialect == 'responses' and y.messages[2].reasoning == 'plan' and [m.tool_call_id for m in y.messages[3:]] == [i.call_id for i in r.output[2:]]

async def test_previous_response_id(tmp_path):
    "The proxy's record puts the earlier messages in front; instructions aren't inherited; a stranger's id is a 400."
    async with lab(tmp_path, ['One.', 'Two.', 'Three.']) as (store, _, s, o, _a):
        r = await o.responses.create(model='m', input='a', instructions='I')
        r = await o.responses.create(model='m', input='b', instructions='I', previous_response_id=r.id)
        r = await o.responses.create(model='m', input='c', previous_response_id=r.id)
        x, y, z = store.calls('r1')
        assert [m.content for m in y.messages] == ['I', 'a', 'One.', 'b'] and [m.content for m in z.messages] == ['a', 'One.', 'b', 'Two.', 'c']
        assert y.anchor_id == x.call_id and z.parent_id is None   # another system prompt
        with pytest.raises(openai.BadRequestError, match="'resp_nobody' not found"): await o.responses.create(model='m', input='c', previous_response_id='resp_nobody')

async def test_a_websocket_is_answered_426(tmp_path):
    async with lab(tmp_path, []) as (_, url, s, _o, _a), ClientSession() as http:
        for path in ('/v1/responses', '/v1/chat/completions', '/anything'):
            async with http.get(url + path, headers={'Upgrade': 'websocket', 'Connection': 'Upgrade', 'Sec-WebSocket-Version': '13', 'Sec-WebSocket-Key': 'dGhlIHNhbXBsZSBub25jZQ=='}) as r:
                assert r.status == 426 and 'websocket' in (await r.json())['error']['message']

async def test_every_dialect_is_in_the_proxy():
    assert set(DIALECTS) == {d.NAME for d in ALL}
    for d in ALL: assert DIALECTS[d.NAME] is d
