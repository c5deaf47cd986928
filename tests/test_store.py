"""The store keeps its promises: durable before resolved, readable while written, exact in every byte."""
import json, logging, os, random, shutil, signal, sqlite3, subprocess, sys, tempfile, textwrap, threading
from dataclasses import replace
from pathlib import Path
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from clawlab.capture import codec, runs as runs_
from clawlab.capture.codec import NO_FRAME, pack_text, unpack_text
from clawlab.capture.runs import RUN
from clawlab.capture.store import Store
from clawlab.records import Call, DataError, InputError, Message, Rollout, ToolCall

ROOT = Path(__file__).parent.parent
ARRAYS = ('prompt_ids', 'output_ids', 'logprobs', 'versions')

def call(cid, seq=0, prompt=(1, 2), out=(3, 4), rollout='r', **kw):
    return Call(cid, rollout, seq, prompt, out, np.full(len(out), -.5), np.full(len(out), 7), **kw)

def same(a, b):
    for k in ARRAYS: np.testing.assert_array_equal(getattr(a, k), getattr(b, k))
    for k in ('kept_mass', 'routed_experts'):
        if getattr(a, k) is None: assert getattr(b, k) is None
        else: np.testing.assert_array_equal(getattr(a, k), getattr(b, k))
    for k in ('call_id', 'rollout_id', 'seq', 'finish', 'parent_id', 'anchor_id', 'role', 'role_reason', 'model', 'delivered', 'requested', 'used', 'headers',
              'messages', 'tools', 'response', 'media', 'drift', 'quarantine', 'dialect', 't_start', 't_end'): assert getattr(a, k) == getattr(b, k), k

@pytest.fixture
def url(tmp_path): return str(tmp_path/'calls.db')

@pytest.fixture
def store(url):
    with Store.open(f'sqlite:///{url}') as s: yield s

def chain(n, rollout='r', start=0, words=60, tools=(dict(name='sh', description='d'*400, parameters={}),)):
    "A linear rollout with bodies as an agent's: (call, body), ids `rollout.0`, `rollout.1`, ..."
    rng, ms, prompt, prev = random.Random(f'{rollout}{start}'), [Message('system', 'You are an agent. '*50), Message('user', f'Task {rollout}.')], list(range(300)), None
    for i in range(n):
        out, cid = [rng.randrange(5000) for _ in range(20)], f'{rollout}.{i}'
        body = json.dumps(dict(model='m', messages=[dict(role=m.role, content=m.content) for m in ms], tools=tools)).encode()
        yield call(cid, i, prompt, out, rollout, parent_id=prev, anchor_id=prev, messages=tuple(ms), tools=tools, headers={'user-agent': 'x', 'content-length': str(len(body))},
                   used=dict(seed=rng.randrange(1 << 31), temperature=1.0), response=Message('assistant', f'step {i}')), body
        prompt, prev = prompt + out + [rng.randrange(5000) for _ in range(30)], cid
        ms = [*ms, Message('assistant', f'step {i}'), Message('user', ' '.join(str(rng.randrange(10**6)) for _ in range(words)))]

def fill(store, *args, **kw):
    cs = list(chain(*args, **kw))
    for f in [store.put_call(c, b) for c, b in cs]: f.result()
    return cs

def alter(store, sql, *args): store.writer.submit(lambda db: db.execute(sql, args) and None).result()

def flipped(b, i=-10): b = bytearray(b); b[i] ^= 1; return bytes(b)

def damage(store, call_id, column='text', i=-10):
    old, = store.read(f'select {column} x from calls where call_id=?', call_id)
    alter(store, f'update calls set {column}=? where call_id=?', flipped(old['x'], i), call_id)

def python(code, *args, **kw):
    return subprocess.Popen([sys.executable, '-c', textwrap.dedent(code), *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE, text=True, **kw)

def test_every_field_comes_back(store):
    c = call('c1', 3, parent_id=None, role='side', role_reason='why', model='m', delivered=('yes', 'no', 'unknown'), requested=dict(temperature=.1, max_tokens=None),
             used=dict(seed=3), headers={'user-agent': 'x'}, messages=(Message('user', 'é\ud800 \0'), Message('tool', 'x', tool_call_id='t', is_error=True)),
             tools=(dict(name='sh', description='', parameters={'type': 'object'}),),
             response=Message('assistant', '', 'think', (ToolCall('i', 'sh', {'a': [1.0, None]}, '{"a": [1.0, null]}'),)),
             kept_mass=np.array([.5, 1], np.float32), routed_experts=np.arange(8, dtype=np.int16).reshape(2, 2, 2), media=((0, 4, 'ab'),), drift=2,
             quarantine='curl', dialect='chat', t_start=1.5, t_end=2.5, finish='length')
    store.put_call(c, b'\xff raw').result()
    same(store.calls('r')[0], c)
    assert store.body('c1') == b'\xff raw'

def test_nan_logprobs_and_empty_replies(store):
    store.put_call(replace(call('c1'), logprobs=np.array([np.nan, -1], np.float32))).result()
    store.put_call(call('c2', 1, out=(), finish='aborted')).result()
    a, b = store.calls('r')
    assert np.isnan(a.logprobs[0]) and a.logprobs[1] == -1 and len(b.output_ids) == 0 and b.response is None

def test_P48_linear_storage(store):
    "Sixty turns cost what is new, not the square: tokens, messages and raw bodies."
    rng, ids, ms, prev, new = np.random.default_rng(0), np.arange(4000), [Message('user', 'x'*9000)], None, 0
    for i in range(60):
        c = call(f'c{i}', i, ids, rng.integers(0, 9, 30), parent_id=prev, anchor_id=prev, messages=tuple(ms), response=Message('assistant', str(i)))
        store.put_call(c, json.dumps([m.content for m in ms]).encode()).result()
        ids, prev = np.concatenate([ids, c.output_ids, rng.integers(0, 9, 20)]), c.call_id
        ms += [c.response, Message('user', rng.bytes(100).hex())]
    d = store.summary()
    runs = -(-60//RUN)   # each begins with a call that stands on its own
    assert d['prompt_tokens_kept'] == sum(4000 + 50*RUN*i for i in range(runs)) + (60 - runs)*20
    assert d['prompt_tokens_sent'] == sum(4000 + 50*i for i in range(60))
    size = store.read('select sum(length(text)) t, sum(length(tokens)) k from calls')[0]
    assert size['t'] < 90_000 and size['k'] < 60_000
    assert [json.loads(store.body(f'c{i}'))[-1] for i in (0, 31, 32, 59)] == [ms[2*i].content for i in (0, 31, 32, 59)]

def test_forks_and_wrong_bases_are_exact(store):
    "The base is a guess about what is shared; only what is really shared is left out."
    a = call('a', 0, (1, 2, 3), (4, 5))
    cs = [a, call('b', 1, (1, 2, 3, 4, 5, 6), (7,), anchor_id='a'), call('c', 2, (1, 9), (8,), anchor_id='b'), call('d', 3, (), (), parent_id='c'),
          call('e', 4, (1, 2, 3, 4, 5, 6, 7, 7), (1,), anchor_id='b'), call('f', 5, (5,), (1,), anchor_id='nowhere')]
    for c in cs: store.put_call(c)
    for c, d in zip(cs, store.calls('r'), strict=True): same(c, d)

@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=4)), max_size=12))
@settings(max_examples=40, deadline=None)
def test_any_history_round_trips(steps):
    import tempfile
    with tempfile.TemporaryDirectory() as d, Store.open(f'{d}/s.db') as store:
        cs = []
        for i, (base, prompt, out) in enumerate(steps):
            b = cs[base % len(cs)] if cs and base < 8 else None
            head = np.concatenate([b.prompt_ids, b.output_ids])[:base*2] if b else []
            cs.append(call(f'c{i}', i, np.concatenate([head, prompt]), out, anchor_id=b and b.call_id))
            store.put_call(cs[-1], bytes(prompt))
        for c, d in zip(cs, store.calls('r'), strict=True): same(c, d)
        assert [store.body(c.call_id) for c in cs] == [bytes(p) for _, p, _ in steps]

texts = st.text(st.sampled_from('ab\u00e9\ud800\0"\\'), max_size=6)
values = st.recursive(st.none() | st.booleans() | st.integers(0, 3) | st.floats(0, 2) | texts, lambda x: st.lists(x, max_size=2) | st.dictionaries(texts, x, max_size=2), max_leaves=4)
messages = st.lists(st.builds(Message, st.sampled_from(['user', 'assistant', 'tool']), texts, st.none() | texts, st.lists(st.builds(ToolCall, texts, texts, values, texts), max_size=2).map(tuple), st.none() | texts, st.booleans()), max_size=3).map(tuple)

@given(st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=60), messages, st.dictionaries(texts, values, max_size=3), st.none() | messages.map(lambda ms: ms[0] if ms else None),
                          st.lists(st.sampled_from(['yes', 'no', 'unknown']), max_size=3)), max_size=8))
@settings(max_examples=25, deadline=None)
def test_any_call_tree_round_trips_exactly(steps):
    "Bodies, messages, parameters and replies of any shape, in a tree of any shape; and again after a restart between the writes."
    with tempfile.TemporaryDirectory() as d:
        cs, bodies, store = [], [], Store.open(f'{d}/s.db')
        for i, (at, body, ms, used, response, delivered) in enumerate(steps):
            if i == 4: store.close(); store = Store.open(f'{d}/s.db')
            b = cs[at % len(cs)] if cs and at < 8 else None
            cs.append(call(f'c{i}', i, [*(b.prompt_ids if b else ()), i], [i], parent_id=b and b.call_id, messages=(b.messages if b else ()) + ms, used={**(b.used if b else {}), **used},
                           requested=used, response=response, delivered=tuple(delivered), t_start=i/3))
            bodies.append(bodies[cs.index(b)] + body if b else body)
            store.put_call(cs[-1], bodies[-1])
        with store:
            for c, x, raw in zip(cs, store.calls('r'), bodies, strict=True):
                same(c, x); same(c, store.call(c.call_id)); assert store.body(c.call_id) == raw
                assert [repr(sorted(d.items())) for d in (x.used, x.requested)] == [repr(sorted(d.items())) for d in (c.used, c.requested)]   # 1 is not True
            assert store.verify()['ok']

@given(st.binary(max_size=300), st.binary(max_size=300))
@settings(deadline=None)
def test_bodies_round_trip(a, b):
    base = (call('c'), b)
    assert unpack_text(pack_text(call('d'), a, base)[0], base)[0] == a

@settings(max_examples=200)
@given(st.binary(max_size=60), st.binary(min_size=40, max_size=80), st.binary(max_size=60), st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 20))
def test_what_stood_behind_a_list_is_found_behind_what_was_added(head, tail, new, a, b, n):
    "Codex: the list grows in the middle, the tools stand behind it, and what ends the body is another each time."
    old, now = head + tail*n + a, head + new + tail*n + b
    base = call('c'), old
    assert unpack_text(pack_text(call('d'), now, base)[0], base)[0] == now

def test_tools_behind_a_list_are_stored_once():
    tools = json.dumps([dict(name=f'tool{i}', description=str(random.Random(i).random())*9) for i in range(50)])
    old, now = (f'{{"input":["{"x"*900}"{new}],"tools":{tools},"stamp":"{stamp}"}}'.encode() for new, stamp in (('', 'a1'), (',"answer"', 'b2')))
    base = call('c'), old
    data = pack_text(call('d'), now, base)[0]
    assert len(tools) > 9000 and len(data) < 700 and unpack_text(data, base)[0] == now

def test_large_bodies_against_each_other(store):
    a = os.urandom(9_000_000); b = a[:-5] + b'other' + b'tail'
    store.put_call(call('a'), a); store.put_call(call('b', 1, parent_id='a'), b).result()
    assert store.read("select length(text) n from calls where call_id='b'")[0]['n'] < 1000 and store.body('b') == b and store.body('a') == a

# ---------------------------------------------------------------- reading is bounded, and so is damage

def counted(monkeypatch):
    "How often something is decoded: calls, and frames."
    n = []
    monkeypatch.setattr(runs_, 'decode', lambda *a, **kw: n.append(1) or codec.decode(*a, **kw))
    plain = NO_FRAME.unzip   # of the two halves of a frame one is counted
    monkeypatch.setattr(NO_FRAME, 'unzip', lambda data, kind: (n.append(1) if kind == 'ids' and sys._getframe(1).f_code.co_name == 'copies' else 0) or plain(data, kind))
    return n

def test_any_call_is_read_in_16_decodes(tmp_path, monkeypatch):
    with Store.open(tmp_path/'s.db') as s:
        cs = [*fill(s, 20, 'q'), *fill(s, 100)]
        assert s.read('select max(frame) n from calls')[0]['n']
    for c, raw in cs[20::7] + cs[-1:]:
        with Store.open(tmp_path/'s.db') as s, monkeypatch.context() as m:
            n = counted(m)
            same(s.call(c.call_id), c); assert 1 <= len(n) <= 16, (c.call_id, len(n))
            assert s.body(c.call_id) == raw

def test_a_damaged_call_takes_14_others_with_it_at_most(store, caplog):
    "In a long chain, and in a star of forks; what is left is exact, and says what is lost."
    cs = dict((c.call_id, c) for c, _ in fill(store, 40))
    for i in range(30): store.put_call(call(f'f{i}', 40 + i, (1, 2, 3, 4, i), (i,), parent_id='r.3', messages=cs['r.3'].messages), b'fork')
    sizes = store.read('select coalesce(run, id) head, count(*) n from calls group by 1')
    assert max(r['n'] for r in sizes) <= RUN == 15
    for cid in ('r.0', 'r.15', 'r.7', 'f29'):
        old = store.read('select text from calls where call_id=?', cid)[0]['text']
        damage(store, cid)
        caplog.clear()
        r = store.calls('r'); gone = {*cs, *(f'f{i}' for i in range(30))} - {c.call_id for c in r}
        assert cid in gone and len(gone) <= 15 and str(len(gone)) + ' of 70 calls are damaged' in caplog.text and cid in caplog.text
        for c in r:
            if c.call_id in cs: same(c, cs[c.call_id])
        with pytest.raises(DataError, match=cid): store.body(cid)
        alter(store, 'update calls set text=? where call_id=?', old, cid)
    assert len(store.calls('r')) == 70

def test_forks_from_a_full_run_share_the_next(store):
    cs = fill(store, 30)
    for i in range(10): store.put_call(replace(cs[5][0], call_id=f'f{i}', seq=30 + i, parent_id='r.4'), cs[5][1] + b' '*i)
    assert store.read("select count(*) n from calls where call_id like 'f%' and base is null")[0]['n'] <= 1
    assert store.body('f7') == cs[5][1] + b' '*7

def test_a_rollout_of_a_known_kind_costs_little_from_its_first_call(store):
    fill(store, 12, 'a', words=200)
    one = store.read('select sum(length(text)) n from calls')[0]['n']
    fill(store, 1, 'b', words=200); first, = store.read("select length(text) n, frame from calls where rollout_id='b'")
    assert first['frame'] and first['n'] < 300 < one/10

def test_frames_are_kept_twice(tmp_path):
    "Either copy of a frame may be damaged; with both, what was written with it is lost, and nothing else."
    with Store.open(tmp_path/'s.db') as s:
        fill(s, 12, 'a'); cs = fill(s, 12, 'b')
        f, = s.read('select * from frames')
        alter(s, 'update frames set text=?', flipped(f['text']))
    with Store.open(tmp_path/'s.db') as s:
        for c, x in zip(cs, s.calls('b'), strict=True): same(c[0], x)
        v = s.verify()
        assert not v['ok'] and v['calls']['damaged'] == {} and 'one of its two copies' in v['damaged'][f"frame {f['id']}"]
        s.gc(); assert s.verify()['ok']
        damage(s, 'a.0')
    with Store.open(tmp_path/'s.db') as s:
        assert len(s.calls('b')) == 12 and len(s.calls('a')) == 0
        alter(s, 'update frames set text=?', flipped(f['text']))
    with Store.open(tmp_path/'s.db') as s:
        assert s.calls('b') == [] and 'frame' in s.verify()['calls']['damaged']['b.0']

BLOBS = dict(text='text', tokens='tokens', hash='hash')

@pytest.mark.parametrize('column', ['text', 'tokens', 'hash'])
@pytest.mark.parametrize('where', [0, .3, .7, 1])
def test_verify_finds_a_flipped_bit(store, column, where):
    cs = fill(store, 6)
    assert store.verify()['ok'] and store.verify()['calls']['complete'] == 6
    n = len(store.read(f"select {column} x from calls where call_id='r.2'")[0]['x'])
    damage(store, 'r.2', column, min(int(where*n), n - 1))
    v = store.verify()
    assert not v['ok'] and set(v['calls']['damaged']) == {f'r.{i}' for i in range(2, 6)} and v['calls']['complete'] == 2
    assert 'based on' in v['calls']['damaged']['r.3'] and 'based on' not in v['calls']['damaged']['r.2'] and 'r' in v['rollouts']['incomplete']
    assert [c.call_id for c in store.calls('r')] == ['r.0', 'r.1']

@pytest.mark.parametrize('sql,says', [("update calls set base=99 where call_id='r.2'", 'based on'), ("delete from calls where call_id='r.2'", 'based on'),
    ("update calls set rollout_id='s' where call_id='r.5'", 'based on'), ("update calls set seq=9 where call_id='r.5'", 'hash'), ("update calls set prompt=3 where call_id='r.5'", 'lengths'),
    ("update calls set output=3 where call_id='r.5'", 'lengths'), ("update calls set role='boss' where call_id='r.5'", 'role'), ("update calls set delivered='yx' where call_id='r.5'", "'x'"),
    ("update calls set frame=7 where call_id='r.5'", 'frame'), ("update calls set reason='12345678\"x\"' where call_id='r.5'", 'reason'),
    ("update calls set base=(select id from calls where call_id='r.1') where call_id='r.5'", '')])
def test_verify_says_what_is_wrong_with_a_row(store, sql, says):
    fill(store, 6); alter(store, sql)
    v = store.verify()
    assert not v['ok'] and says in ' '.join(v['calls']['damaged'].values())

def test_verify_says_what_is_complete(store):
    fill(store, 3, 'a'); fill(store, 2, 'b'); fill(store, 1, 'c')
    store.put_rollout(Rollout('a', 't', 'h', outcome='ok', reward=1.)); store.put_rollout(Rollout('b', 't', 'h'))
    store.put_call(replace(call('a.3', 3, rollout='a', finish='aborted', out=()), delivered=()))
    store.put_call(call('c.2', 2, rollout='c', parent_id='c.1'))
    store.set_delivered('a.0', ('yes',)); store.set_delivered('a.1', ('yes', 'unknown'))
    v = store.verify()
    assert v['ok'] and v['rollouts']['complete'] == 1 and v['rollouts']['open'] == ['b', 'c'] and list(v['rollouts']['incomplete']) == ['c']
    assert 'call 1 is absent' in v['rollouts']['incomplete']['c']
    assert (v['calls']['total'], v['calls']['unfinished'], v['calls']['delivery_unknown']) == (8, 1, 6)

def test_a_damaged_record_of_a_rollout(store, caplog):
    for i in 'ab': store.put_rollout(Rollout(i, 't', 'h', outcome='ok', reward=1.))
    alter(store, "update rollouts set reward=0 where rollout_id='a'")
    assert [r.rollout_id for r in store.rollouts()] == ['b'] and 'reward' in caplog.text and 'rollout a' in store.verify()['damaged']
    with pytest.raises(DataError, match='reward'): store.rollout('a')

def test_a_rollout_with_lost_calls_is_not_trained_on(store):
    fill(store, 5); store.put_rollout(Rollout('r', 't', 'h', outcome='ok', reward=1.))
    damage(store, 'r.3')
    r = store.rollout('r')
    assert r.dropped_reason == '2 of 5 calls are damaged' and set(r.meta['damaged']) == {'r.3', 'r.4'} and len(r.calls) == 3

@pytest.mark.parametrize('seed', range(40))
def test_flipped_bytes_in_the_file(tmp_path_factory, caplog, seed):
    "Whatever byte of the file is damaged: it is found, or nothing that is read has changed. Reading never fails in the middle, and what comes back is exact."
    d = tmp_path_factory.getbasetemp()/'flip.db'
    if not d.exists():
        with Store.open(d) as s:
            for r in 'abc': fill(s, 17, r); s.put_rollout(Rollout(r, 't', 'h', outcome='ok', reward=.5))
            s.set_role('a.3', 'side', 'corrected'); s.set_delivered('a.4', ('yes',))
        with sqlite3.connect(d) as db: db.execute('pragma wal_checkpoint(truncate)')
    with Store.open(d) as s: before = {c.call_id: c for r in s.rollouts(with_calls=True) for c in r.calls}
    f = tmp_path_factory.mktemp('flip')/'s.db'; shutil.copy(d, f)
    data, rng = bytearray(f.read_bytes()), random.Random(seed)
    for _ in range(1 + seed % 3): data[rng.randrange(100, len(data))] ^= rng.randrange(1, 256)
    f.write_bytes(data)
    caplog.set_level(logging.CRITICAL, 'clawlab.store')
    try: s = Store.open(f)
    except InputError: return   # said in one line: the file can't be opened
    with s:
        v, got = s.verify(), {}
        for r in 'abc':
            try: got |= {c.call_id: c for c in s.calls(r)}
            except DataError: assert not v['ok']
        for k, c in got.items(): same(c, before[k])
        assert not v['ok'] or len(got) == len(before), v

@pytest.mark.parametrize('how', ['zeros', 'noise'])
def test_a_lost_page_takes_no_other_rollout_with_it(tmp_path, caplog, how):
    "Page after page: the rollouts come back, one by one if need be, with exact calls, or it is said in one line; `rollout` and its filters agree."
    caplog.set_level(logging.CRITICAL, 'clawlab.store'); rng, whole = random.Random(how), 0
    with Store.open(tmp_path/'s.db') as s:
        for r in 'abcd': fill(s, 3, r); s.put_rollout(Rollout(r, 't', 'h', group='g' if r < 'c' else 'k', outcome='ok', reward=.5, meta={'x': rng.randbytes(700).hex()}))
        s.writer.submit(lambda db: None).result(); before = {r.rollout_id: r for r in s.rollouts(with_calls=True)}
    raw = (tmp_path/'s.db').read_bytes(); size, f = int.from_bytes(raw[16:18]), tmp_path/'p.db'
    for at in range(size, len(raw), 2*size):
        f.write_bytes(raw[:at] + (bytes(size) if how == 'zeros' else rng.randbytes(size)) + raw[at + size:])
        try:
            with Store.open(f, create=False) as s:
                rs = s.rollouts(with_calls=True); whole += len(rs) == 4
                assert {r.rollout_id for r in s.rollouts(group='g')} == {r.rollout_id for r in rs if r.group == 'g'}
                for r in rs:
                    assert r.meta.get('x') == before[r.rollout_id].meta['x'] and len(s.rollout(r.rollout_id).calls) == len(r.calls)
                    for c in r.calls: same(c, next(b for b in before[r.rollout_id].calls if b.call_id == c.call_id))
        except (DataError, InputError): pass
    assert whole > len(raw)/size/4, 'most pages are nobody\'s record'

def test_gc_frees_what_nothing_refers_to(store):
    fill(store, 20)
    for i in 'ab': store.put_call(call(f'big{i}', 0, rollout=i, tools=(dict(name='gone'),)), os.urandom(400_000)).result()
    assert len(store.read('select 1 from frames')) == 2
    alter(store, "delete from calls where call_id like 'big%'")
    d = store.gc()
    assert d['frames'] == 1 and d['bytes'] > 350_000 and len(store.calls('r')) == 20 and store.verify()['ok']
    fill(store, 3, 'after'); assert len(store.calls('after')) == 3 and store.gc()['frames'] == 0

def test_no_blob_is_the_only_copy_of_what_many_need(store):
    "Whichever single blob is damaged, 15 calls are lost at most: tools, system text and frames included."
    for i in range(6): fill(store, 20, f'r{i}')
    total = len(store.read('select 1 from calls'))
    for table, column in (('calls', 'text'), ('calls', 'tokens'), ('frames', 'text'), ('frames', 'ids')):
        for r in store.read(f'select id, {column} x from {table} order by id limit 20'):
            alter(store, f'update {table} set {column}=? where id=?', flipped(r['x']), r['id'])
            with Store.open(store.path) as s: assert sum(len(s.calls(f'r{i}')) for i in range(6)) >= total - 15, (table, r['id'])
            alter(store, f'update {table} set {column}=? where id=?', r['x'], r['id'])

def test_gc_leaves_a_damaged_store_alone(store):
    fill(store, 3); damage(store, 'r.1')
    with pytest.raises(DataError, match='verify'): store.gc()

def test_a_restart_goes_on_where_it_was(tmp_path):
    "Runs, kinds and frames are known again from the disk: the same rows as without a restart."
    def rows(path): 
        with Store.open(path) as s: return [tuple(r) for r in s.read('select call_id, base, run, frame, kind, kept from calls order by id')]
    cs = [*chain(20, 'a'), *chain(40, 'b')]
    with Store.open(tmp_path/'one.db') as s:
        for c, b in cs: s.put_call(c, b).result()
    for c, b in cs:
        with Store.open(tmp_path/'two.db') as s: s.put_call(c, b).result()
    assert rows(tmp_path/'one.db') == rows(tmp_path/'two.db')

def test_a_damaged_base_lends_nothing(tmp_path):
    with Store.open(tmp_path/'s.db') as s: cs = list(chain(4)); [s.put_call(c, b).result() for c, b in cs[:3]]; damage(s, 'r.2')
    with Store.open(tmp_path/'s.db') as s:
        s.put_call(*cs[3]).result()
        same(s.call('r.3'), cs[3][0]); assert s.body('r.3') == cs[3][1]

def test_durability_is_a_setting(tmp_path, monkeypatch):
    flush = lambda s: s.writer.submit(lambda db: db.execute('pragma synchronous').fetchone()[0]).result()
    with Store.open(tmp_path/'a.db') as s: assert flush(s) == 1     # NORMAL: survives kill -9
    with Store.open(tmp_path/'b.db', durable='power') as s: assert flush(s) == 2
    monkeypatch.setenv('CLAWLAB_STORE_DURABLE', 'power')
    with Store.open(tmp_path/'a.db') as s: assert flush(s) == 2
    with pytest.raises(InputError, match='process, power'): Store.open(tmp_path/'a.db', durable='maybe')

def test_a_store_of_an_older_clawlab_is_one_clear_line(tmp_path):
    db = sqlite3.connect(tmp_path/'old.db'); db.execute('create table calls(call_id text)'); db.execute('pragma user_version=1'); db.close()
    with pytest.raises(InputError, match='format 1; this clawlab reads format 3'): Store.open(tmp_path/'old.db')
    db = sqlite3.connect(tmp_path/'other.db'); db.execute('create table things(x)'); db.close()
    with pytest.raises(InputError, match='no store of clawlab'): Store.open(tmp_path/'other.db')

def test_a_bad_write_fails_alone(store):
    good, twice, after = store.put_call(call('c1')), store.put_call(call('c1')), store.put_call(call('c2', 1, (1, 2, 3, 4, 9), anchor_id='c1'))
    good.result(); after.result()
    with pytest.raises(sqlite3.IntegrityError): twice.result()
    assert [c.call_id for c in store.calls('r')] == ['c1', 'c2']

def test_a_call_that_was_not_committed_lends_nothing(store):
    "Its successor is stored whole, so that it can be read."
    class Full:
        def __init__(self, db): self.db = db
        def __getattr__(self, k): return getattr(self.db, k)
        def execute(self, sql, *a):
            if sql == 'commit': raise sqlite3.OperationalError('disk full')
            return self.db.execute(sql, *a)
    a = call('a', 0, [1, 2, 3], [4])
    store.writer.db, db = Full(store.writer.db), store.writer.db
    with pytest.raises(sqlite3.OperationalError): store.put_call(a, b'one').result()
    store.writer.db = db
    store.put_call(call('b', 1, [1, 2, 3, 4, 5], [6], anchor_id='a'), b'one, two').result()
    assert [c.prompt_ids.tolist() for c in store.calls('r')] == [[1, 2, 3, 4, 5]] and store.body('b') == b'one, two'

def test_kill_9_loses_nothing_acknowledged(url):
    p = python('''
        import sys, numpy as np
        from clawlab.capture.store import Store
        from clawlab.records import Call, Rollout
        s = Store.open(sys.argv[1]); s.put_rollout(Rollout('r', 't', 'h'))
        for i in range(100000):
            s.put_call(Call(f'c{i}', 'r', i, np.arange(i+1), [i], [-1.], [0], anchor_id=f'c{i-1}' if i else None), b'x').result()
            print(i, flush=True)
    ''', url)
    for line in p.stdout:
        if int(line) >= 40: break
    p.send_signal(signal.SIGKILL)
    last = int((p.stdout.read().split() or [line])[-1]); p.wait()
    with Store.open(url, create=False) as s:
        got = s.calls('r')
        assert len(got) >= last + 1 and s.verify()['ok']
        for i, c in enumerate(got): np.testing.assert_array_equal(c.prompt_ids, np.arange(i + 1))
        s.put_call(call('more', 10**6, (0, 1, 5), anchor_id=got[-1].call_id)).result()  # and it goes on, bases read back from disk
        assert s.calls('r')[-1].prompt_ids.tolist() == [0, 1, 5]

def test_another_process_reads_while_it_is_written(store, url):
    stop = threading.Event()
    def write():
        i = 0
        while not stop.is_set(): store.put_call(call(f'c{i}', i)).result(); i += 1
    t = threading.Thread(target=write); t.start()
    try:
        p = python('''
            import sys
            from clawlab.capture.store import Store
            with Store.open(sys.argv[1], create=False) as s:
                seen = [len(s.calls('r'))]
                while len(seen) < 2000 and seen[-1] < seen[0] + 20: seen.append(len(s.calls('r')))
            assert seen == sorted(seen); print(seen[-1] - seen[0])
        ''', url)
        assert int(p.communicate(timeout=60)[0]) >= 20 and p.returncode == 0
    finally: stop.set(); t.join()

def test_two_writing_processes(store):
    p = python('''
        import sys
        from clawlab.capture.store import Store
        from clawlab.records import Call
        with Store.open(sys.argv[1]) as s:
            for i in range(50): s.put_call(Call(f'x{i}', 'x', i, [1], [2], [-1.], [0])).result()
    ''', store.path)
    for i in range(50): store.put_call(call(f'c{i}', i)).result()
    assert p.wait(timeout=60) == 0
    assert len(store.calls('x')) == len(store.calls('r')) == 50

def test_commits_are_grouped(tmp_path):
    "Many at once cost few commits: a thread per caller, far fewer transactions than calls."
    with Store.open(tmp_path/'s.db') as s:
        commits = []
        s.writer.submit(lambda db: db.set_trace_callback(lambda q: commits.append(q) if q == 'COMMIT' or q == 'commit' else None)).result()
        gate = threading.Event()
        s.writer.submit(lambda db: gate.wait(10))
        fs = [s.put_call(call(f'c{i}', i)) for i in range(200)]
        assert not any(f.done() for f in fs)
        gate.set()
        for f in fs: f.result()
        assert len(commits) <= 4 and len(s.calls('r')) == 200

def test_rollouts_filters_and_order(store):
    for i in range(6): store.put_rollout(Rollout(f'r{i}', f't{i%2}', 'react' if i < 3 else 'cc', group=f'g{i%2}', checkpoint='c', split='test', sample=i, t_start=10. - i))
    assert [r.rollout_id for r in store.rollouts(harness='react')] == ['r2', 'r1', 'r0']
    assert len(store.rollouts(harness=['react', 'cc'], group='g1')) == 3 and store.rollouts(checkpoint='z') == []
    store.put_call(call('c', rollout='r1'))
    store.put_rollout(Rollout('r1', 't1', 'react', outcome='ok', reward=.5, scores={'code': .5}, meta={'a': [1]}))
    r = store.rollout('r1')
    assert (r.reward, r.scores, r.meta, len(r.calls)) == (.5, {'code': .5}, {'a': [1]}, 1)
    assert [r.rollout_id for r in store.rollouts(outcome='ok')] == ['r1'] and len(store.rollouts(with_calls=True, outcome='ok')[0].calls) == 1

def test_bad_stores_are_one_clear_line(tmp_path):
    (tmp_path/'text').write_text('this is no database, but it is long enough to be looked at as one' * 20)
    newer = tmp_path/'newer.db'; db = sqlite3.connect(newer); db.execute('pragma user_version=99'); db.close()
    for url in ('mysql://x', f'{tmp_path}/no/folder/s.db', tmp_path/'text', newer, 'postgresql://u:secret@localhost:1/x'):
        with pytest.raises(InputError) as e: Store.open(url)
        assert '\n' not in str(e.value) and 'secret' not in str(e.value)
    with pytest.raises(InputError, match='no store'): Store.open(tmp_path/'missing.db', create=False)
    with Store.open(tmp_path/'s.db') as s, pytest.raises(InputError, match='no rollout'): s.rollout('x')

def test_sessions_are_kept(store):
    store.put_session('s1', 'hash', 'r', sampling=dict(temperature=.5))
    assert store.session('s1')['data'] == {'sampling': {'temperature': .5}} and store.session(key_hash='hash')['session_id'] == 's1'
    store.put_session('s1', None, 'r', True)
    assert store.session('s1')['revoked'] and store.session(key_hash='hash') is None and store.session('zz') is store.session('s1\0') is None

def test_a_settled_session_leaves_no_calls_in_memory(store):
    for r in 'ab':
        for c, body in chain(4, r): store.put_call(c, body).result()
    held = store.runs._held
    store.put_session('s', None, 'a', True)
    assert {k.call.rollout_id for k in store.runs.recent.values()} == {'b'} and 0 < store.runs._held < held
    *_, (c, body) = chain(5, 'a'); store.put_call(c, body).result()   # a straggler: its base is read again
    same(store.call(c.call_id), c); assert store.verify()['ok']

def test_what_the_proxy_asks_for_is_looked_up_never_searched(store, monkeypatch):
    "A key, a session, the calls of a rollout, a call: each costs the same in a small store and in a large one."
    fill(store, 3); store.put_rollout(Rollout('r', 't', 'h', group='g')); store.put_session('s1', 'hash', 'r')
    asked, read = [], store.read
    monkeypatch.setattr(store, 'read', lambda sql, *args: asked.append((sql, args)) or read(sql, *args))
    assert store.session(key_hash='hash') and store.session('s1') and len(store.calls('r')) == 3 and store.rollout('r') and store.body('r.1') and store.rollouts(group='g')
    plans = [(sql, row['detail']) for sql, args in asked for row in read(f'explain query plan {sql}', *args)]
    assert len(asked) >= 6 and any('sessions_key' in p for _, p in plans) and [x for x in plans if x[1].startswith('SCAN')] == []

def test_clawlab_store_verify_and_gc(tmp_path, capfd):
    from clawlab.cli import main
    def run(*args):
        code = main(['store', *map(str, args)]); out, err = capfd.readouterr()
        return code, json.loads(out.splitlines()[-1]) if out else None, err
    with Store.open(tmp_path/'s.db') as s: fill(s, 20); s.put_rollout(Rollout('r', 't', 'h', outcome='ok', reward=1.))
    code, v, err = run('verify', tmp_path/'s.db')
    assert code == 0 and v['ok'] and v['rollouts'] == dict(total=1, complete=1, open=[], incomplete={}) and v['calls']['complete'] == 20 and '1 of 1 rollouts' in err
    code, d, err = run('gc', tmp_path/'s.db')
    assert code == 0 and d['frames'] == 0 and 'bytes freed' in err
    with Store.open(tmp_path/'s.db') as s: damage(s, 'r.17')
    code, v, err = run('verify', tmp_path/'s.db')
    assert code == 1 and set(v['calls']['damaged']) == {'r.17', 'r.18', 'r.19'} and 'clawlab: call r.17: ' in err and 'clawlab: rollout r: 3 of 20 calls are damaged' in err
    code, d, err = run('gc', tmp_path/'s.db')
    assert code == 1 and d is None and 'left as it is' in err
    assert run('verify', tmp_path/'none.db') == (2, None, f'clawlab: no store at {tmp_path}/none.db\n')

def test_processes_that_make_a_store_at_the_same_time(tmp_path):
    code = "import sys; from clawlab.capture.store import Store; from clawlab.records import Call\nwith Store.open(sys.argv[1]) as s: s.put_call(Call(sys.argv[2], 'r', int(sys.argv[2]), [1], [2], [-1.], [0])).result()"
    ps = [python(code, tmp_path/'s.db', i) for i in range(4)]
    assert [p.wait(timeout=120) for p in ps] == [0]*4
    with Store.open(tmp_path/'s.db') as s: assert [c.seq for c in s.calls('r')] == [0, 1, 2, 3]
