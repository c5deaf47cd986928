"""The store keeps its promises: durable before resolved, readable while written, exact in every byte."""
import json, os, signal, sqlite3, subprocess, sys, textwrap, threading
from dataclasses import replace
from pathlib import Path
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from clawlab.capture.store import Store, squeeze, unsqueeze
from clawlab.records import Call, InputError, Message, Rollout, ToolCall

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
def store(tmp_path):
    with Store.open(f'sqlite:///{tmp_path}/calls.db') as s: yield s

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
    assert d['prompt_tokens_kept'] == 4000 + 59*20
    assert d['prompt_tokens_sent'] == sum(4000 + 50*i for i in range(60))
    size = store.read('select sum(length(new_messages)) m, sum(length(body)) b from calls')[0]
    assert size['m'] < 30_000 and size['b'] < 60_000
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

@given(st.binary(max_size=300), st.binary(max_size=300))
@settings(deadline=None)
def test_bodies_round_trip(a, b): assert unsqueeze(squeeze(a, b), b) == a

def test_large_bodies_against_each_other():
    a = os.urandom(9_000_000); b = a[:-5] + b'other' + b'tail'
    z = squeeze(b, a)
    assert len(z) < 50_000 and unsqueeze(z, a) == b

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

def test_kill_9_loses_nothing_acknowledged(tmp_path):
    db = tmp_path/'calls.db'
    p = python('''
        import sys, numpy as np
        from clawlab.capture.store import Store
        from clawlab.records import Call, Rollout
        s = Store.open(sys.argv[1]); s.put_rollout(Rollout('r', 't', 'h'))
        for i in range(100000):
            s.put_call(Call(f'c{i}', 'r', i, np.arange(i+1), [i], [-1.], [0], anchor_id=f'c{i-1}' if i else None), b'x').result()
            print(i, flush=True)
    ''', db)
    for line in p.stdout:
        if int(line) >= 40: break
    p.send_signal(signal.SIGKILL)
    last = int((p.stdout.read().split() or [line])[-1]); p.wait()
    with Store.open(db, create=False) as s:
        got = s.calls('r')
        assert len(got) >= last + 1
        for i, c in enumerate(got): np.testing.assert_array_equal(c.prompt_ids, np.arange(i + 1))
        s.put_call(call('more', 10**6, (0, 1, 5), anchor_id=got[-1].call_id)).result()  # and it goes on, bases read back from disk
        assert s.calls('r')[-1].prompt_ids.tolist() == [0, 1, 5]

def test_another_process_reads_while_it_is_written(store):
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
        ''', store.path)
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
    for url in ('mysql://x', f'{tmp_path}/no/folder/s.db', tmp_path/'text', newer):
        with pytest.raises(InputError) as e: Store.open(url)
        assert '\n' not in str(e.value)
    with pytest.raises(InputError, match='no store'): Store.open(tmp_path/'missing.db', create=False)
    with Store.open(tmp_path/'s.db') as s, pytest.raises(InputError, match='no rollout'): s.rollout('x')

def test_sessions_are_kept(store):
    store.put_session('s1', 'hash', 'r', sampling=dict(temperature=.5))
    assert store.session('s1')['data'] == {'sampling': {'temperature': .5}} and store.session(key_hash='hash')['session_id'] == 's1'
    store.put_session('s1', None, 'r', True)
    assert store.session('s1')['revoked'] and store.session(key_hash='hash') is None and store.session('zz') is None
