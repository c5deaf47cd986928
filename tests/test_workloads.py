"""learn.tree on simulated harnesses and on the shapes of real runs; what its costs depend on; calls that come from a store."""
import tempfile
from dataclasses import replace
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from clawlab.capture.store import Store
from clawlab.learn import radix
from clawlab.learn.tree import Tree, build_tree
from clawlab.records import Call, Message, Rollout
from clawlab.study import benchtree
from clawlab.study.benchtree import Line, long_rollout
from test_lineage import S, Talk, U, result, tool
from workloads import OPS, invariants, real_runs, simulated

plays = dict(rng=st.randoms(use_true_random=False), ops=st.lists(st.sampled_from(OPS), min_size=1, max_size=20), forgets=st.booleans(), reminds=st.booleans())

@settings(max_examples=150, deadline=None)
@given(**plays)
def test_simulated_harnesses_have_the_fates_they_played(rng, ops, forgets, reminds):
    h = simulated(rng, ops, forgets=forgets, reminds=reminds)
    t = invariants(build_tree(h.calls))
    assert dict(zip(t.index, t.fate_C)) == h.fates
    assert {c: int(t.kept_C[t.index[c]]) for c in h.kept} == h.kept
    main = sum(len(c.output_ids) if h.fates[c.call_id] == 'accepted' else h.kept.get(c.call_id, 0) for c in h.calls if c.role == 'main')
    assert t.discarded is None and (t.stats['trained'], t.stats['shared']) == (main, 0)     # every token is new, so nothing is shared
    if not forgets and not reminds: assert t.stats['roots'] == len({int(c.prompt_ids[0]) for c in h.calls})

@settings(max_examples=100, deadline=None)
@given(**plays, words=st.integers(1, 4), cap=st.sampled_from([2, 32]))
def test_simulated_harnesses_whose_histories_collide(rng, ops, forgets, reminds, words, cap):
    h = simulated(rng, ops, forgets=forgets, reminds=reminds, words=words)
    t = invariants(build_tree(h.calls, max_leaves=cap))
    grown, other = Tree(max_leaves=cap), list(h.calls)
    for c in h.calls: grown.add(c); grown.stats
    rng.shuffle(other); mixed = invariants(build_tree(other, max_leaves=cap))
    bare = build_tree([Call(c.call_id, 'r', c.seq, c.prompt_ids, c.output_ids, c.logprobs, c.versions) for c in h.calls])   # no lineage to go by
    assert grown.stats == t.stats and len(bare.trie) == t.stats['tokens'] and bare.stats['nodes'] == t.stats['nodes']
    same = ('tokens', 'flat_tokens', 'nodes', 'token_leaves', 'roots', 'fates', 'reasons', 'trained', 'shared', 'segments', 'lineage_leaves')
    assert {k: mixed.stats[k] for k in same} == {k: t.stats[k] for k in same} and mixed.discarded == t.discarded

@pytest.mark.parametrize('harness,i', [(h, i) for h, rs in real_runs().items() for i in range(len(rs))])
def test_real_runs(harness, i):
    calls, want = real_runs()[harness][i]
    t = invariants(build_tree(calls))
    assert {k: t.stats[k] for k in want} == want

def test_real_runs_are_of_three_harnesses():
    runs = real_runs()
    assert {'claude-code', 'codex', 'openclaw'} <= set(runs)
    assert all(w['roots'] == w['token_leaves'] == w['lineage_leaves'] == 1 and not w['drift'] for h in ('claude-code', 'claude-code:full', 'codex') for _, w in runs[h])
    assert any(w['token_leaves'] > 1 and w['lineage_leaves'] == 1 and w['drift'] for _, w in runs['openclaw'])   # it rewrites its own words

# --- faults that begin on the wire and end in the tree: messages, lineage and tree together

def tree_of(k, **kw): return invariants(build_tree(list(k.calls.values()), **kw))

def test_T1_a_volatile_nonce_makes_no_root():
    "Bodies that differ in the billing line only are one chain: a nonce per request, and none at all on the compaction route."
    from clawlab.capture.dialects import anthropic
    k, ms = Talk(), [dict(role='user', content='go')]
    for i, nonce in enumerate(['x-anthropic-billing-header: cc_version=2.1.332.a1f; cch=00000;', 'x-anthropic-billing-header: cc_version=2.1.332.0c4;', '']):
        system = [dict(type='text', text=x) for x in (nonce, 'You act.') if x]
        c = k.say(anthropic.parse_request(dict(model='m', max_tokens=9, system=system, messages=ms)).messages, f'ok {i}')
        ms += [dict(role='assistant', content=[dict(type='text', text=c.response.content)]), dict(role='user', content='and?')]
    t = tree_of(k)
    assert t.stats['roots'] == t.stats['token_leaves'] == t.stats['lineage_leaves'] == t.stats['segments'] == 1 and t.stats['trained'] == sum(len(c.output_ids) for c in k.calls.values())

@pytest.mark.parametrize('said,raw,same', [({'a': 'é/', 'b': 1}, '{"a":"\\u00e9\\/","b":1.0}', True), ({'b': 2, 'a': 'é/'}, '{"b": 2, "a": "é/"}', False)])
def test_T27_json_arguments_are_compared_as_values(said, raw, same):
    k = Talk()
    a = k.say((S, U), '<tool_call>{"name": "sh", "arguments": {"b": 1, "a": "é/"}}</tool_call>')
    back = replace(a.response, tool_calls=(replace(a.response.tool_calls[0], id='theirs', arguments=said, raw=raw),))
    b = k.say((S, U, back, Message('tool', 'done', tool_call_id='theirs')), 'ok')
    t = tree_of(k)
    assert b.parent_id == 'c0' if same else b.anchor_id is None
    if same: assert t.stats['nodes'] == 1 and t.stats['segments'] == 1 and t.stats['trained'] == len(a.output_ids) + len(b.output_ids)
    else: assert t.stats['token_leaves'] == 2 and t.stats['roots'] == 1 and t.segment_C.tolist() == [0, 1]

def test_T30_a_system_message_in_mid_conversation_keeps_the_chain():
    k = Talk()
    a = k.say((S, U), tool('ls')); b = k.say((S, U, a.response, result(a, 'x'), Message('system', 'Now be brief.')), tool('pwd'))
    k.say((*b.messages, b.response, result(b, 'y')), 'done')
    t = tree_of(k)
    assert t.stats['roots'] == t.stats['token_leaves'] == t.stats['segments'] == 1 and t.stats['trained'] == sum(len(c.output_ids) for c in k.calls.values())

def test_T36_overflow_and_what_follows():
    "A reply clamped by the window is trained; the request that overflowed has none; the compaction is kept and not trained; the next segment is."
    k = Talk()
    a = k.say((S, U), tool('ls')); b = k.say((S, U, a.response, result(a, 'x'*60)), 'I was say', eos=False)               # finish: length
    over = Call('over', 'r', 90, np.concatenate([b.prompt_ids, b.output_ids, [1, 2]]), [], [], [], 'error', parent_id=b.call_id)
    summary = Call('sum', 'r', 91, over.prompt_ids, [5, 6], [-1, -1], [0, 0], role='compaction', role_reason='summary asked for', parent_id=b.call_id, delivered=('yes',))
    after = Call('after', 'r', 92, [1, 5, 6], [7, 8, 9], [-1]*3, [0]*3, delivered=('yes',))
    t = invariants(build_tree([a, b, over, summary, after]))
    assert t.fate_C == ['accepted', 'accepted', 'aborted', 'accepted', 'accepted'] and t.stats['roles'] == dict(main=4, compaction=1)
    assert t.stats['trained'] == len(a.output_ids) + len(b.output_ids) + 3 and t.stats['segments'] == 2 and t.stats['reason_tokens']['summary asked for'] == 2

# --- the store

@settings(max_examples=12, deadline=None)
@given(**plays)
def test_a_tree_from_the_store_is_the_tree_of_the_calls(rng, ops, forgets, reminds):
    h = simulated(rng, ops*3, forgets=forgets, reminds=reminds)
    with tempfile.TemporaryDirectory() as tmp, Store.open(f'{tmp}/calls.db') as s:
        s.put_rollout(Rollout('r', 't', 'h'))
        for c in h.calls: s.put_call(c, c.call_id.encode())
        read = s.calls('r')
    assert invariants(build_tree(read, max_leaves=99)).stats == build_tree(h.calls, max_leaves=99).stats

def test_a_line_read_from_the_store_is_kept_once(tmp_path):
    calls = long_rollout(lines=(Line('main', 500, 40, 0), Line('main', 300, 20, .5)))   # longer than a run of the store
    with Store.open(f'{tmp_path}/calls.db') as s:
        benchtree.keep(s, benchtree.told(calls)); read = s.calls('long')
    for a, b in zip(calls, read, strict=True):
        for k in ('prompt_ids', 'output_ids', 'logprobs', 'versions'): assert getattr(a, k).tobytes() == getattr(b, k).tobytes() and getattr(a, k).dtype == getattr(b, k).dtype
    line = [c for c in read if c.call_id.startswith('0.0.')]
    assert len({id(c.prompt_ids.base) for c in line}) == 1
    n = len(build_tree(read).trie)
    assert benchtree.held(read) < 2.5*4*n < benchtree.held(calls)

# --- costs

def looked_at(monkeypatch, build):
    "Ids that were compared."
    n, real = [0], radix.shared_prefix
    def counting(a, b):
        m = real(a, b)
        if not np.may_share_memory(a, b): n[0] += m
        return m
    monkeypatch.setattr(radix, 'shared_prefix', counting); build(); monkeypatch.undo()
    return n[0]

LINES = (Line('main', 400, 12, 0), Line('main', 300, 8, 13), Line('subagent', 200, 6, 2.1), Line('subagent', 200, 6, 2.2))

def test_T48_nothing_old_is_looked_at_or_copied(monkeypatch):
    "Of separate arrays each id is looked at once; of views of one history, as the store gives them, none is."
    arrays, views = long_rollout(lines=LINES), long_rollout(lines=LINES, apart=False)
    t = build_tree(arrays)
    assert looked_at(monkeypatch, lambda: build_tree(arrays)) <= t.stats['flat_tokens'] - t.stats['tokens']
    assert looked_at(monkeypatch, lambda: build_tree(views)) == 0 and len(t.trie.up) - 1 == 2*len(arrays)      # a prompt's news, and a reply
    blind = [Call(c.call_id, c.rollout_id, c.seq, c.prompt_ids, c.output_ids, c.logprobs, c.versions) for c in arrays]
    assert looked_at(monkeypatch, lambda: build_tree(blind)) <= t.stats['flat_tokens'] - t.stats['tokens']     # without lineage as well
    small, full = benchtree.weight(lambda: views)
    assert small < 3*4*t.stats['tokens'] < full

def test_T48_a_wrong_hint_costs_time_only():
    rows = [np.array(x, np.int32) for x in ([1, 2, 3, 4], [1, 2, 5], [9], [1, 2, 3, 4, 6], [1, 2, 3])]
    for hint in range(-1, 4):
        t = radix.Trie()
        for i, x in enumerate(rows): t.insert(x, like=min(hint, i - 1))
        f = radix.flatten(t)
        assert len(t) == 7 and [f.key_T[f.path(e[-1], 0, len(x))].tolist() for x, e in zip(rows, t.ends)] == [x.tolist() for x in rows]

def test_T48_more_calls_cost_as_much_more():
    "Cost per token of four times the calls; the bound is loose, a quadratic cost would be four times."
    cost = lambda k: min(benchtree.cpu_ms(lambda: build_tree(calls, max_leaves=9999).stats) for _ in range(3))/k if (calls := long_rollout(k, LINES, apart=False)) else 0
    assert cost(16) < 2.5*cost(4)

def test_the_long_rollout_is_the_one_that_is_spoken_of():
    calls = long_rollout(apart=False); s = build_tree(calls).stats
    assert (len(calls), s['flat_tokens'], s['tokens'], s['roots'], s['roles'], s['main_lineage_leaves']) == (200, 6_160_000, 277_400, 7, dict(main=100, subagent=100), 2)
    subs = [c.call_id.split('.')[1] for c in calls if c.role == 'subagent']
    assert sum(a != b for a, b in zip(subs, subs[1:])) > 90                              # interleaved

def test_bench_tree_goals_and_rows_in_small(tmp_path, monkeypatch):
    monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path))                                # no peers there
    monkeypatch.setattr(benchtree, 'LINES', LINES); monkeypatch.setattr(benchtree.long_rollout, '__defaults__', (1, LINES, True, 0))
    rows, goals = benchtree.bench_tree(repeats=1, scales=(2, 1), say=lambda *a: None)
    assert {r['system'] for r in rows if r['value'] is None} == set(benchtree.RIVALS) and all('not installed' in r['metric'] for r in rows if r['value'] is None)
    assert goals['arrays: ms']['ok'] and goals['store: ms']['ok'] and not any('peer' in k for k in goals)
    rows += [dict(case='arrays', system='agentcore', metric='cpu_ms', value=4*benchtree.value(rows, 'arrays', 'clawlab', 'cpu_ms'), n=1)]
    assert benchtree.tree_goals(rows, (1, 2))['times faster than the best peer'] == dict(value=4., goal=5., ok=False)
