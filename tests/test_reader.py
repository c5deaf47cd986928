"""Bodies that begin like earlier ones: whatever is remembered, the value is what `json.loads` makes of the bytes."""
import json, time
import pytest
from hypothesis import given, settings, strategies as st
from clawlab.capture.dialects.base import checked
from clawlab.capture.chat import Template
from clawlab.capture.dialects import chat, responses
from clawlab.capture.lineage import Lineage
from clawlab.capture.reader import Reader, shared
from clawlab.capture.wire import Refused, parse_json
from clawlab.records import InputError

J = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=3), c, max_size=3), max_leaves=8)
TURNS = st.lists(st.dictionaries(st.sampled_from(['role', 'content', 'x']), J, max_size=3) | J, max_size=4)

def outcome(f, *args):
    try: return json.dumps(f(*args), sort_keys=True)
    except (Refused, InputError) as e: return f'{type(e).__name__}: {e}'

@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TURNS, st.dictionaries(st.sampled_from(['model', 'tools', 'é']), J), st.booleans(), st.integers(0, 2)), max_size=4), st.data())
def test_reads_what_json_reads(bodies, data):
    "Growing, branching, re-spelled and broken bodies, in any order of members."
    r, history = Reader('messages'), []
    for turns, rest, first, spelling in bodies:
        history = history[:data.draw(st.integers(0, len(history)))] + turns
        body = {'messages': history, **rest} if first else {**rest, 'messages': history, 'z': 1}
        raw = json.dumps(body, ensure_ascii=bool(spelling), indent=1 if spelling == 1 else None).encode('utf-8', 'surrogatepass')
        if data.draw(st.integers(0, 9)) == 0: raw = raw[:data.draw(st.integers(0, len(raw)))]
        assert outcome(r.read, raw) == outcome(lambda: checked(parse_json(raw)))

def body(n, tail='"stream":true', turn=lambda i: {'role': 'user', 'content': f'turn {i} é'}): return ('{"model":"m","messages":%s,%s}' % (json.dumps([turn(i) for i in range(n)], ensure_ascii=False), tail)).encode()

def test_what_was_read_is_kept():
    r = Reader('messages')
    a, b, c = r.read(body(3)), r.read(body(5)), r.read(body(5, '"stream":false'))
    assert all(x is y for x, y in zip(a['messages'], b['messages'])) and all(x is y for x, y in zip(b['messages'], c['messages'])) and len(r.known) == 1
    assert a.memo is b.memo and b.memo is not c.memo   # other members: nothing made of them is valid any more
    r.read(body(4, turn=lambda i: {'role': 'user', 'content': f'turn {i if i < 2 else 9}'}))
    assert len(r.known) == 2                            # a branch keeps both
    for i in range(9): r.read(body(2, turn=lambda k: {'role': 'user', 'content': f'{i}'}))
    assert len(r.known) == r.most

def test_unusual_bodies_are_read_the_ordinary_way():
    r = Reader('messages'); r.read(body(2))
    for raw in (b'{"messages":[{"a":1}],"messages":[{"a":2}]}', b'{"model":"m","messages":"x"}', b'{"messages":[1,2]}', b'{"messages":[{"a":1},2]}', b'{}', '{"messages":[{"a":1}]}'.encode('utf-16'),
                b'{"messages":[{"a":1}]} x', b'{"messages":[{"a":1},]}', b'{"a":1,"a":2,"messages":[]}', b'{"messages":[]}', b' \n{ "messages" : [ { } , { } ] , "a" : NaN } '):
        assert outcome(r.read, raw) == outcome(lambda: checked(parse_json(raw))), raw
    assert r.read(b'{"messages":[{"a":"\\ud800"}]}')['messages'][0]['a'] == '?'

def test_shared():
    assert [shared(b'', b'a'), shared(b'ab', b'ab'), shared(b'abc', b'abd'), shared(b'ab', b'abc'), shared(b'x', b'y')] == [0, 2, 2, 2, 0]

@pytest.mark.parametrize('d, key, part', [
    (chat, 'messages', lambda i: dict(role='user', content=f'a{i}')), (chat, 'messages', lambda i: dict(role='assistant', content=f'a{i}')),
    (chat, 'messages', lambda i: {'role': 'user', 'content': 'a', f'z{i}': 1}), (responses, 'input', lambda i: dict(role='user', content=f'a{i}')),
    (responses, 'input', lambda i: dict(role='assistant', content='a')), (responses, 'input', lambda i: dict(type='function_call_output', call_id='c', output='a'))])
def test_many_messages_cost_as_many_times_one(d, key, part):
    "A hostile body of few bytes and very many messages holds nobody else up: eight times as many cost about eight times as much."
    def cost(n):
        raw = json.dumps(dict(model='m', **{key: [*map(part, range(n)), dict(role='user', content='end')]})).encode()
        best = float('inf')
        for _ in range(2):
            lineage, t = Lineage(Template.bytes()), time.process_time()
            q = d.parse_request(Reader(key).read(raw))
            lineage.prompt(q.messages, q.tools, lineage.match(q.messages, q.tools))
            best = min(best, time.process_time() - t)
        return best
    assert cost(24000) < 24*cost(3000)
