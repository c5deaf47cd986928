"SFT data: near-duplicates are exact, bins add up, what is exported is what is trained, and a killed build ends in the same bytes."
import json, os, signal, subprocess, sys, threading, time
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from clawlab.capture.chat import Template
from clawlab.capture.store import Store
from clawlab.cli import main
from clawlab.launch.sandbox.base import probe
from clawlab.launch.tasks import load_suite, overlap, save_suite
from clawlab.learn import sftdata as S
from clawlab.learn.data import sft_data
from clawlab.launch import endpoint
from clawlab.launch.endpoint import Endpoint
from clawlab.learn.embed import Served, Words, embed, embedder, nearest, thin, unit
from clawlab.learn.forest import logprobs, pack
from clawlab.learn.tree import build_tree
from clawlab.records import ClawlabError, InputError, Message, Rollout, Task, ToolCall
from clawlab.study import pages
from test_cli import ROOT, here, refused   # noqa: F401 (a fixture)
from test_drive import policy as policy_, run
from test_gold import play, qwen
from transformers import Qwen3ForCausalLM

policy = policy_   # a fixture

# -- all pairs ----------------------------------------------------------------------------------------------------------------------
def brute(V, order, least):
    "The definition, pair by pair, in float64."
    V, kept, like = V.astype(np.float64), [], {}
    for i in order:
        s = [(float(V[i] @ V[k]), -at) for at, k in enumerate(kept)]
        if s and max(s)[0] >= least: like[i] = kept[-max(s)[1]]
        else: kept.append(i)
    return like

@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from([1, 7, 1024]), st.floats(.5, .999))
def test_thin_is_its_definition_whatever_the_block(seed, n, block, least):
    rng = np.random.default_rng(seed); C = rng.normal(size=(max(n//3, 1), 6)); V = unit(C[rng.integers(len(C), size=n)] + rng.choice([0, .02, .3])*rng.normal(size=(n, 6)))
    order = rng.permutation(n); like, sim = thin(V, order, least, block)
    assert {i: k for i, k in enumerate(like.tolist()) if k >= 0} == brute(V, order.tolist(), least)
    kept = np.flatnonzero(like < 0); G = V[kept].astype(np.float64) @ V[kept].astype(np.float64).T
    assert (np.triu(G, 1) < least).all() and (sim[like >= 0] >= least).all() and (like[like[like >= 0]] == -1).all()

@given(st.integers(0, 2**32 - 1), st.integers(0, 30), st.integers(0, 30))
def test_nearest_is_the_maximum(seed, a, b):
    rng = np.random.default_rng(seed); A, B = unit(rng.normal(size=(a, 5))), unit(rng.normal(size=(b, 5)))
    at, sim = nearest(A, B, block=4)
    if not b: assert (at == -1).all(); return
    D = A.astype(np.float64) @ B.astype(np.float64).T
    assert (at == D.argmax(1)).all() and np.allclose(sim, D.max(1)) if a else at.shape == (0,)

def test_a_pair_at_the_threshold_is_decided_in_double():
    V = unit(np.array([[1., 0], [.95, np.sqrt(1 - .95**2)]])); exact = float(V[0].astype(np.float64) @ V[1].astype(np.float64))
    for block in (1, 2): assert thin(V, [0, 1], exact, block)[0].tolist() == [-1, 0] and thin(V, [0, 1], np.nextafter(exact, 2), block)[0].tolist() == [-1, -1]

# -- vectors ------------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def server():
    "An embedding endpoint that answers what the test puts into `say`; `asked` are the bodies."
    class H(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers['content-length']))); S_.asked.append((self.path, self.headers.get('authorization'), body))
            code, out = S_.say(body['input']); out = out if isinstance(out, bytes) else json.dumps(out).encode()
            self.send_response(code); self.send_header('content-length', str(len(out))); self.end_headers(); self.wfile.write(out)
        def log_message(self, *a): pass
    S_ = ThreadingHTTPServer(('127.0.0.1', 0), H); S_.asked = []; S_.url = f'http://127.0.0.1:{S_.server_port}/v1'
    t = threading.Thread(target=S_.serve_forever, args=(.01,)); t.start()
    yield S_
    S_.shutdown(); t.join(); S_.server_close()

def good(texts): return 200, dict(data=[dict(index=i, embedding=[len(t), 1.]) for i, t in reversed(list(enumerate(texts)))])

def test_an_endpoint_is_asked_in_batches_and_once(server, tmp_path, monkeypatch):
    server.say = good
    for k, v in dict(URL=server.url + '/', MODEL='m', KEY_ENV='THE_KEY').items(): monkeypatch.setenv(f'CLAWLAB_EMBED_{k}', v)
    with pytest.raises(InputError, match='no such environment variable'): embedder()
    monkeypatch.setenv('THE_KEY', 'secret')
    e = embedder(); texts = ['x'*i for i in range(1, 131)] + ['x']
    V = embed(texts, e, cache=tmp_path/'v.db')
    assert np.allclose(V[2], unit(np.array([3., 1.]))) and (V[130] == V[0]).all() and [len(b['input']) for _, _, b in server.asked] == [64, 64, 2]
    assert server.asked[0][:2] == ('/v1/embeddings', 'Bearer secret') and server.asked[0][2]['model'] == 'm'
    assert (embed(texts[::-1], e, cache=tmp_path/'v.db') == V[::-1]).all() and len(server.asked) == 3
    embed(['x'], Served(Endpoint(server.url, 'other')), cache=tmp_path/'v.db'); assert len(server.asked) == 4   # another model's vectors are others

@pytest.mark.parametrize('say,line', [(lambda t: (200, dict(data=[])), '0 vectors for 2 texts'), (lambda t: (401, b'no key'), '401: no key'), (lambda t: (503, b'busy'), '503: busy')])
def test_an_endpoint_that_fails_is_one_line(server, say, line, monkeypatch):
    monkeypatch.setattr(endpoint, 'PAUSE', 0.); server.say = say
    with pytest.raises(ClawlabError, match=line) as e: embedder(f'{server.url}#m')(['a', 'b'])
    assert '\n' not in str(e.value) and server.url in str(e.value) and len(server.asked) == (3 if '503' in line else 1)

def test_an_endpoint_is_asked_again_and_what_came_is_kept(server, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, 'PAUSE', 0.)
    n = iter(range(99)); server.say = lambda t: good(t) if next(n) % 2 else (429, b'slow down')
    assert Served(Endpoint(server.url, 'm'))(['a', 'bb']).shape == (2, 2) and len(server.asked) == 2
    n2 = iter(range(99)); server.say = lambda t: good(t) if next(n2) < 1 else (400, b'too long'); server.asked.clear(); e = Served(Endpoint(server.url, 'm'))
    with pytest.raises(ClawlabError, match='too long'): embed([str(i) for i in range(100)], e, cache=tmp_path/'v.db')
    server.say = good; embed([str(i) for i in range(100)], e, cache=tmp_path/'v.db'); assert [len(b['input']) for _, _, b in server.asked] == [64, 36, 36]

def test_models_are_named_or_refused():
    assert isinstance(embedder('words'), Words) and embedder('http://h:1/v1#m').name == 'http://h:1/v1#m'
    for bad in ('gpt', 'http://h:1/v1', '#m'):
        with pytest.raises(InputError): embedder(bad)
    assert (Words()(['', 'a']) [0] == 0).all()   # nothing is like nothing

@pytest.mark.smol
def test_minilm_ranks_by_meaning_and_reads_to_the_end(tmp_path):
    m = embedder('minilm'); long = 'copy the file and check the sum. '*60
    V = embed(['Copy diary to invoice.', 'Make a copy of diary that is called invoice.', 'Copy poem to novel.', long + 'Then delete everything.', long + 'Then send a mail to Anna with the weather in Oslo. '*12, long + 'Then delete everything.'], m, cache=tmp_path/'v.db')
    G = V @ V.T
    assert G[0, 1] > .8 > G[0, 2] and G[3, 4] < .95 and G[3, 5] > .9999 and np.allclose(np.linalg.norm(V, axis=1), 1, atol=1e-6) and V.dtype == np.float32
    assert (m([long])[0] == m(['x', long])[1]).all()   # a vector is of its text, not of its company

# -- plan ---------------------------------------------------------------------------------------------------------------------------
def task(tid, say, split='train', family='f', **files): return Task(tid, family, split, say, files)

def test_training_tasks_that_resemble_held_out_ones_are_left_out():
    ts = {t.task_id: t for t in [task('same', 'Copy  A to b', x='1'), task('files', 'Something else entirely here', y='2'), task('near', 'Append jade to the file diary and then save it', z='dune sand'), task('world', 'Fix the failing test', code='def f(): return 1 # first version of it'),
        task('free', 'Count words in atlas', atlas='one'), task('bare', 'Say hello to the world and stop'), task('none', 'Multiply seven by nine'),
        task('t1', 'copy a TO b', 'test', x='9'), task('t2', 'Other', 'test', y='2'), task('t3', 'Append jade to the file diary and then save it!', 'validation', z='dune  sand'), task('t4', 'Fix the failing test!', 'test', code='import os, sys, json; print(os.getcwd(), 42)'),
        task('t5', 'Say hello to the world and stop.', 'test', q='x'), task('t6', 'What is this?', 'validation')]}
    p = S.plan(ts, 'words', similar=.9, validation=0)
    assert {k: v[:2] for k, v in p.left.items()} == dict(same=('equal', 't1'), files=('equal', 't2'), near=('near', 't3'), bare=('near', 't5')) and p.side == dict.fromkeys(('world', 'free', 'none'), 'train')
    assert p == S.plan(dict(reversed(ts.items())), 'words', similar=.9, validation=0) and set(S.plan(ts, 'words', validation=0, only={'free'}).side) == {'free'}
    with pytest.raises(InputError, match='no training tasks'): S.plan({'t1': ts['t1']}, 'words')
    assert overlap([task('a', 'x')], [task('b', 'y', 'test')]) == 0   # to have no files is nothing in common

def test_sides_are_by_task_and_do_not_leak():
    ts = {f't{i}': task(f't{i}', f'{"alpha beta gamma delta".split()[i % 4]} number {i//8}', **{f'f{i}': f'{i} {i*7}'}) for i in range(40)}
    p = S.plan(ts, 'words', similar=.999, validation=.25, seed=3)
    assert Counter(p.side.values())['validation'] == 10 and set(p.side) | set(p.left) == set(ts) and not set(p.side) & set(p.left)
    held, train = ([ts[t] for t, s in p.side.items() if s == x] for x in ('validation', 'train'))
    assert p.left and all(w == 'equal' for w, *_ in p.left.values()) and not overlap(train, held)

# -- bins ---------------------------------------------------------------------------------------------------------------------------
def wanted(rng, tasks, harnesses, n):
    "What a store may hold of them: everything that can go wrong does."
    out = []
    for t in tasks:
        for h in harnesses:
            for k in range(n):
                kind = rng.choice(['none', 'running', 'infra', 'grader', 'low', 'side', 'good', 'good', 'good', 'late'])
                if kind == 'none': continue
                rid = f'{t}{h}{k}'; calls, _ = play(int(rng.integers(4)), 0, [1, 2, len(h)])
                calls = [replace(c, rollout_id=rid, role='side' if kind == 'side' else c.role, response=Message('assistant', '', None, (ToolCall(f'call_{rng.integers(10**9)}', 'sh', dict(command=' '.join(map(str, c.output_ids)))),))) for c in calls]
                o = dict(infra='infra_fail', grader='grader_fail', late='timeout', running=None).get(kind, 'ok')
                out.append(Rollout(rid, t, h, sample=k, outcome=o, reward=None if o in (None, 'infra_fail', 'grader_fail') else .2 if kind == 'low' else float(rng.choice([.75, 1.])), calls=tuple(calls)))
    return out

@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.floats(.3, 1))
def test_every_wanted_rollout_ends_in_one_bin_and_the_bins_add_up(seed, n, similar):
    rng = np.random.default_rng(seed); ts = {f't{i}': task(f't{i}', f'do {i}', family=f'f{i % 2}') for i in range(4)}
    p = S.Plan({t: 'validation' if t == 't3' else 'train' for t in ts}, {}); rs = wanted(rng, ts, ('h1', 'h22'), n); rng.shuffle(rs)
    lines = S.ledger(p, ts, ['h22', 'h1'], n, rs); S.trainable(lines); S.distinct(lines, ts, 'words', similar)
    assert len(lines) == 4*2*n == len({l.id for l in lines}) and all(l.bin in S.BINS for l in lines)
    data = {s: [x for l in lines if l.bin == s for x in S.rows(l)] for s in ('train', 'validation')}; c = S.make_card(p, lines, data)
    assert sum(c['bins'].values()) == len(lines) and c['rollouts'][-1][1] == c['bins']['train'] and pages.funnel([tuple(x) for x in c['rollouts']])
    for by in ('harnesses', 'families'): assert sum(r['wanted'] for r in c[by]) == len(lines) and sum(r['train'] for r in c[by]) == c['bins']['train'] and sum(r['trained tokens'] for r in c[by]) == sum(s['trained_tokens'] for s in c['splits'].values())
    ids = {l.id: l for l in lines}
    for l in lines:   # what is dropped resembles something that is kept, of its harness, and no worse
        if l.like: k = ids[l.like]; assert k.harness == l.harness and (k.score, -k.tokens) >= (l.score, -l.tokens) and (k.bin in ('train', 'validation') or l.bin == 'same_tokens')
    again = S.ledger(p, ts, ['h1', 'h22'], n, rs[::-1]); S.trainable(again); S.distinct(again, ts, 'words', similar)
    assert [(l.id, l.bin, l.like) for l in again] == [(l.id, l.bin, l.like) for l in lines]

def test_without_near_duplicates_it_keeps_what_sft_data_keeps():
    ts = {f't{i}': task(f't{i}', f'do {i}') for i in range(4)}; rs = wanted(np.random.default_rng(5), ts, ('h1', 'h22'), 6); rs = [r for r in rs if r.outcome]
    lines = S.ledger(S.Plan(dict.fromkeys(ts, 'train'), {}), ts, ('h1', 'h22'), 6, rs); S.trainable(lines); S.distinct(lines, ts, 'words', 1.1)
    ours, theirs = ({tuple(map(bytes, (x.tobytes() for p in e.pairs for x in p))) for e in es} for es in ([l.example for l in lines if l.bin == 'train'], sft_data(rs).splits['train']))
    assert ours == theirs and len(ours) > 3

def test_deeds_leave_out_what_is_new_in_every_run():
    say = lambda cid, cmd, think=None: Message('assistant', 'I will', think, (ToolCall(cid, 'bash', dict(command=cmd, timeout=5)),))
    r = lambda cid, cmd, think: Rollout('r', 't', 'h', calls=tuple(replace(c, response=say(cid, cmd, think)) for c in play(0, 0, [1])[0][:1]))
    a, b = (S.deeds(r(*x), 'Do it.') for x in (('call_8f3a9b2c11', 'cp /tmp/8f14e45f-ceea-467f-9a36-dedd4bea2543/a b', None), ('toolu_01XYZ', 'cp /tmp/1b6453892473-a467-d07372d45eb05abc2031/a b'.replace('1b6453892473-a467-d07372d45eb05abc2031', '6f4922f4-5568-461a-8cdf-4ad2299f6d23'), 'hm')))
    assert a == b == 'Do it.\nbash cp /tmp/#/a b 5'
    assert 'deadbeef2026' not in S.deeds(r('x', 'git show deadbeef2026cafe', None), '') and 'invoice_2026-11-30.csv' in S.deeds(r('x', 'rm invoice_2026-11-30.csv', None), '')
    quiet = Rollout('r', 't', 'h', calls=tuple(replace(c, response=Message('assistant', 'It is 42.')) for c in play(0, 0, [1])[0][:1]))
    assert S.deeds(quiet, 'What?') == 'What?\nIt is 42.'

# -- rows ---------------------------------------------------------------------------------------------------------------------------
def line(r): return S.Line(r.task_id, 'f', r.harness, 0, 'train', 'train', score=1., tokens=0, example=None)

def kept(seed, n=6):
    "Kept lines of rollouts with forks, twins, retries and side calls."
    out = []
    for k in range(n):
        calls, _ = play(seed, k, [7, 7, 7]); r = Rollout(f'r{k}', f't{k}', 'h', '1', checkpoint='me', outcome='ok', reward=1., calls=tuple(calls)); l = line(r)
        l.bin, l.example = '', S.Example(r); S.trainable([l])
        if not l.bin: l.put('train'); out.append(l)
    return out

@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_rows_train_each_token_once_and_come_back_as_the_same_trees(seed):
    ls = kept(seed); data = dict(train=[x for l in ls for x in S.rows(l)], validation=[])
    back = S.examples(json.loads(json.dumps(data))).splits['train']
    assert len(back) == len(ls) and len({x['id'] for x in data['train']}) == len(data['train'])
    for l, e in zip(ls, back):
        a, b = l.example.tree(), e.tree(); key = lambda t: sorted((t.path_ids(i).tobytes()) for i in np.flatnonzero(t.train_T))
        assert key(a) == key(b) and len(key(a)) == l.tokens == build_tree(l.example.rollout.calls).stats['trained'] and e.rollout.reward == 1.

def test_the_exported_rows_give_the_loss_of_the_store():
    model = qwen(Qwen3ForCausalLM, 0, 2, tie_word_embeddings=True).requires_grad_(False); ls = kept(11); xs = [x for l in ls for x in S.rows(l)]
    assert len(xs) > len(ls)   # some rollouts have several rows
    forest = sum(float(logprobs(model, f).sum()) for f in pack([l.example.tree() for l in ls], 10**6))
    def plain(x): # what any trainer does with ids and a mask
        ids, m = torch.tensor(x['input_ids']), torch.tensor(x['loss_mask'][1:], dtype=bool)
        return float(torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[m].sum())
    n = sum(map(sum, (x['loss_mask'] for x in xs)))
    assert n == sum(l.tokens for l in ls) and abs(forest - sum(map(plain, xs))) < 1e-9*abs(forest)

def test_messages_have_one_shape_and_numbered_calls():
    ms = (Message('system', 's'), Message('assistant', 'x\ud800', None, (ToolCall('zz', 'sh', {'c': 'é'}), ToolCall('yy', 'sh', 'half {', 'half {'))), Message('tool', 'ok', tool_call_id='yy'), Message('tool', 'no', tool_call_id='gone'))
    out = S.openai_messages(ms); json.dumps(out, ensure_ascii=False).encode()
    assert {tuple(m) for m in out} == {('role', 'content', 'reasoning_content', 'tool_calls', 'tool_call_id')} and out[1]['content'] == 'x?'
    assert [c['id'] for c in out[1]['tool_calls']] == ['call_0', 'call_1'] and out[1]['tool_calls'][1]['function']['arguments'] == 'half {' and [m['tool_call_id'] for m in out[2:]] == ['call_1', 'gone']
    assert S.openai_messages([replace(m, tool_calls=tuple(replace(c, id=c.id*2) for c in m.tool_calls), tool_call_id=m.tool_call_id == 'yy' and 'yyyy' or m.tool_call_id) for m in ms]) == out   # ids are the laboratory's, and random

def test_tokens_are_known_by_what_they_do(policy):
    model, _ = policy; t = Template.from_dir(model)
    assert S.tokens_of(t) == S.tokens_of(Template.from_dir(model)) != S.tokens_of(Template.bytes()) != S.tokens_of(Template.bytes('qwen3'))

# -- the command --------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def suite(tmp_path_factory):
    "Tasks of nano, one of them twice in other words, and a test task that is a training task again."
    ts = load_suite(ROOT/'experiments/tasks/nano'); d = tmp_path_factory.mktemp('suite')/'small'
    some = sorted((t for t in ts.values() if t.split == 'train' and t.habit), key=lambda t: (t.level, t.task_id))[:5]
    twin, leak = replace(some[0], task_id='twin', instruction=some[0].instruction + ' Do.', files={**some[0].files, 'zebra': 'z\n'}, expect=dict(start={**some[0].files, 'zebra': 'z\n'}, goal={**some[0].expect['goal'], 'zebra': 'z\n'})), replace(some[1], task_id='leak', split='test', instruction='Never seen.')
    return save_suite([*some, twin, leak], d)

def build(to, suite, store, *more): return ('data', 'build', '--tasks', suite, '--harness', 'react', '--engine', 'oracle', '--store', store, '--to', to, '--embed', 'words', '--similar', '.8', '--wrong', '.5', '--think', 'well', '--validation', '.2', '--seed', '4', *more)
def tree_bytes(d): return {str(f.relative_to(d)): f.read_bytes() for f in sorted(Path(d).rglob('*')) if f.is_file() and f.name != '.lock'}

@pytest.mark.timeout(280)
async def test_killed_and_resumed_is_the_same_to_the_byte(tmp_path, suite):
    if why := await probe('bwrap'): pytest.skip(why)
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    def go(name, store): return subprocess.Popen([sys.executable, '-m', 'clawlab.cli', *map(str, build(tmp_path/name, suite, tmp_path/store, '--n', '2', '--concurrency', '2'))], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=open(tmp_path/'err', 'a'), text=True)
    def settled(store):
        if not (tmp_path/store).is_file(): return 0
        with Store.open(str(tmp_path/store), create=False) as s: return sum(r.outcome is not None for r in s.rollouts())
    whole = go('a', 'a.db'); out, _ = whole.communicate(timeout=120); res = json.loads(out.splitlines()[-1])
    n = sum(res['bins'].values()); assert whole.returncode == 0 and n == 2*res['tasks']['played'] and res['tasks']['equal'] == 1 and res['bins']['low_score'] and res['bins']['train'] and res['bins']['near_duplicate'] + res['bins']['same_tokens']
    p, end = go('b', 'b.db'), time.monotonic() + 100
    try:
        while settled('b.db') < 3:
            assert p.poll() is None and time.monotonic() < end, (tmp_path/'err').read_text()[-2000:]
            time.sleep(.2)
        p.send_signal(signal.SIGKILL)
    finally: p.kill(); p.wait(); p.stdout.close()
    assert settled('b.db') < n and not (tmp_path/'b'/'card.json').exists()
    p = go('b', 'b.db'); p.communicate(timeout=120); assert p.returncode == 0
    assert tree_bytes(tmp_path/'a') == tree_bytes(tmp_path/'b') and {'README.md', 'card.json', 'index.html', 'ledger.jsonl', 'data/train.jsonl'} <= set(tree_bytes(tmp_path/'a'))
    with Store.open(str(tmp_path/'b.db'), create=False) as s: ids = {r.rollout_id for r in s.rollouts()}
    p = go('b', 'b.db'); p.communicate(timeout=60); assert tree_bytes(tmp_path/'a') == tree_bytes(tmp_path/'b')
    with Store.open(str(tmp_path/'b.db'), create=False) as s: assert {r.rollout_id for r in s.rollouts()} == ids   # nothing was played again
    page = (tmp_path/'a'/'index.html').read_text(); assert 'class="stage"' in page and 'dropped: ' in page and '<script' not in page
    assert [p for p in tmp_path.iterdir() if p.name.startswith('.')] == []

BOX = ('--sandbox', 'process', '--seconds', '60')

def test_what_is_built_trains(capfd, tmp_path, suite, policy):
    model, _ = policy; store = tmp_path/'s.db'
    d, err = run(capfd, *build(tmp_path/'d', suite, store, '--tokenizer', model, '--n', 2, *BOX)); assert 'left out because' in err and d['splits']['train']['trained_tokens'] > 0
    data, card = S.read_data(tmp_path/'d'); t = Template.from_dir(model)
    assert card['versions']['tokenizer'] == S.tokens_of(t) and all('well' in t.decode([i for i, m in zip(x['input_ids'], x['loss_mask']) if m]) for x in data['train'])
    sft = ('--model', model, '--steps', 2, '--batch', 4, '--lr', '1e-3', *BOX)
    a, _ = run(capfd, 'train', 'sft', '--to', tmp_path/'a', '--data', tmp_path/'d', *sft); assert a['steps'] == 2 and a['nll_heldout'] and a['card']['splits']['train']['trained_tokens'] == d['splits']['train']['trained_tokens']
    # the store's own rollouts of the same lines: the same loss
    keep = {(l['task_id'], l['sample']) for l in map(json.loads, (tmp_path/'d'/'ledger.jsonl').read_text().splitlines()) if l['bin'] == 'train'}
    with Store.open(str(store), create=False) as s: rs = [s.rollout(r.rollout_id) for r in s.rollouts() if (r.task_id, r.sample) in keep]
    ours, theirs = sorted(e.pairs[-1][0].tobytes() for e in S.examples(data).splits['train']), sorted(e.pairs[-1][0].tobytes() for e in sft_data(rs, dedup=False).splits['train'])
    assert ours == theirs and len(ours) == len(keep)
    # more rollouts and another threshold use what is there; parquet says the same
    e, _ = run(capfd, *build(tmp_path/'d', suite, store, '--tokenizer', model, '--n', 2, '--keep', '0', *BOX)); assert e['group'] == d['group'] and e['bins']['low_score'] < d['bins']['low_score']
    with Store.open(str(store), create=False) as s: assert len(s.rollouts()) == 2*d['tasks']['played']
    assert 'build it with --tokenizer' in refused_after(capfd, 'train', 'sft', '--to', tmp_path/'x', '--data', plain(capfd, tmp_path, suite), *sft)
    pytest.importorskip('pyarrow'); run(capfd, *build(tmp_path/'q', suite, store, '--tokenizer', model, '--n', 2, '--format', 'parquet', *BOX)); assert S.read_data(tmp_path/'q')[0] == data

def plain(capfd, tmp_path, suite): run(capfd, *build(tmp_path/'bytes', suite, tmp_path/'t.db', '--n', 3, '--first', 4, *BOX)); return tmp_path/'bytes'
def refused_after(capfd, *args):
    assert main([str(a) for a in args]) == 2; out, err = capfd.readouterr(); assert out == '' and 'Traceback' not in err; return err.strip().splitlines()[-1]

@pytest.mark.parametrize('more,line', [
    (('--format', 'csv'), "unknown format 'csv'"), (('--harness', 'emacs'), "unknown harness 'emacs'"), (('--embed', 'bert'), "unknown embedding model 'bert'"), (('--engine', 'script:x.jsonl'), "are the oracle's"), (('--tasks', 'nope'), 'no task suite nope'),
    (('--tokenizer', '/nowhere'), 'no model in /nowhere'), (('--keep', '2'), 'less than or equal to 1'), (('--similar', 'nan'), "Invalid value for '--similar'"), (('--first', '999'), '999 tasks wanted'), (('--n', '0'), 'greater than or equal to 1'), (('--embed', 'ftp://x#y'), 'unknown embedding model')])
def test_bad_input_is_one_line(capfd, tmp_path, suite, more, line):
    assert line in refused(capfd, *build(tmp_path/'d', suite, tmp_path/'s.db', *more)) and not (tmp_path/'s.db').exists()

def test_what_is_not_ours_stays(capfd, tmp_path, suite):
    (tmp_path/'d').mkdir(); (tmp_path/'d'/'thesis.tex').write_text('x')
    assert 'is no data set of ours' in refused(capfd, *build(tmp_path/'d', suite, tmp_path/'s.db')) and (tmp_path/'d'/'thesis.tex').read_text() == 'x'
    with pytest.raises(InputError, match='no data set of ours'): S.read_data(tmp_path/'d')

# -- pages --------------------------------------------------------------------------------------------------------------------------
def test_a_page_escapes_and_a_funnel_adds_up(tmp_path):
    evil = '<img src=x onerror=alert(1)>\ud800'
    P = pages.page(evil, [('h' + evil, pages.para(evil), evil, pages.table([evil], [[evil, 1234567, None, .5]]), pages.details(evil, pages.code(evil)), pages.side_by_side((evil, pages.code(evil))), pages.facts({evil: [evil]}), pages.funnel([(evil, 3), ('b', 1, {evil: 2, 'none': 0})], evil))])
    f = pages.write(P, tmp_path/'a'/'p.html'); text = f.read_bytes().decode('utf8')
    assert '<img' not in text and '1,234,567' in text and '–' in text and list(f.parent.iterdir()) == [f] and 'none' not in text.split('<figure')[1]
    for bad in ([('a', 3), ('b', 1, {'x': 1})], [('a', 1), ('b', 2)]):
        with pytest.raises(ValueError): pages.funnel(bad)
    assert pages.funnel([]) and pages.funnel([('a', 0), ('b', 0)])
