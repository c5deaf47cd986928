"""learn.tree: named faults, the filters, and a random-workload simulator of its invariants."""
from dataclasses import replace
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from clawlab.records import Call, DataError, InputError, Message, ToolCall
from clawlab.learn.objectives import loss_coef
from clawlab.learn.tree import Tree, build_tree, concat

def call(i, prompt, out, parent=None, role='main', lp=None, v=0, **kw):
    lp = [-.1 * (i + 1)] * len(out) if lp is None else lp
    return Call(f'c{i}', 'r', i, prompt, out, lp, [v] * len(out), parent_id=None if parent is None else f'c{parent}', role=role, **kw)

def trained(tree): return tree.ids_T[tree.train_T].tolist()

def test_T3_retokenised_history():
    "sampled [a, b] (ids 1, 2; id 3 is 'ab'), replayed as 'ab', grafted by the proxy: one chain"
    t = build_tree([call(0, [9], [1, 2, 0]), call(1, [9, 1, 2, 0, 8], [1, 0], 0, drift=1)])
    assert t.stats['token_leaves'] == 1 and t.stats['nodes'] == 1 and t.stats['drift'] == 1
    assert t.ids_T.tolist() == [9, 1, 2, 0, 8, 1, 0] and trained(t) == [1, 2, 0, 1, 0]

def test_T4_template_drops_earlier_thinking():
    S, U1, U2, th, ct, x, eos, A1, A2 = range(1, 10)
    t = build_tree([call(0, [S, U1], [th, x, ct, A1, eos]), call(1, [S, U1, A1, eos, U2], [A2, eos], 0)])
    assert len(t.leaves) == 2 and t.stats['lineage_leaves'] == 1 and t.stats['segments'] == 2
    assert t.ids_T[t.start_N[0]:t.end_N[0]].tolist() == [S, U1]                    # the shared prefix, exactly
    assert trained(t).count(A1) == 1 and t.stats['trained'] == 7                    # the replayed A1 is context

def test_T4_sixty_turns_that_forget():
    calls, hist = [], [1, 2]
    for i in range(60):
        calls.append(call(i, list(hist), [50, 1000 + i, 51, 2000 + i], i - 1 if i else None)); hist += [2000 + i, 3000 + i]
    t = build_tree(calls)
    assert t.stats['token_leaves'] == 60 and t.stats['lineage_leaves'] == 1 and t.discarded is None and t.stats['trained'] == 240
    moving, hist = [], [1]                                                          # an ephemeral reminder always at the end
    for i in range(60): moving.append(call(i, hist + [7, 7], [100 + i], i - 1 if i else None)); hist = hist + [100 + i, 200 + i]
    t = build_tree(moving)
    assert t.stats['token_leaves'] == 60 and t.stats['lineage_leaves'] == 1 and t.discarded is None

def test_T5_shared_node_trained_once():
    A, B, C = call(0, [1], [2, 3, 4]), call(1, [1, 2, 3, 4, 5], [6, 7], 0), call(2, [1, 2, 3, 4, 8], [9, 10], 0)
    t = build_tree([A, B, C])
    assert t.stats['trained'] == 7 and t.leaves_T[t.train_T].tolist() == [2, 2, 2, 1, 1, 1, 1]
    assert t.owner_T[t.train_T].tolist() == [0, 0, 0, 0, 0, 1, 1]
    t = build_tree([A, call(1, B.prompt_ids, B.output_ids, 0, role='subagent'), C])
    assert t.stats['trained'] == 5 and set(t.owner_T[t.train_T]) == {0} and len(t.leaves) == 1
    assert set(t.leaves_T[t.train_T]) == {1}

def test_T5_equal_samples_of_two_calls_share_once():
    t = build_tree([call(0, [1], [2, 3], lp=[-1, -2], v=3), call(1, [1], [2, 4], lp=[-5, -6], v=4), call(2, [1, 2, 3, 9], [8], 0), call(3, [1, 2, 4, 9], [8], 1)])
    assert (t.stats['sampled'], t.stats['shared'], t.stats['trained']) == (6, 1, 5)
    i = t.ids_T.tolist().index(2)
    assert t.logprobs_T[i] == -1 and t.versions_T[i] == 3 and t.call_T[i] == 0      # of the earliest

def test_T5_sampled_wins_over_context_whatever_the_order():
    a, b = call(0, [1, 2, 3], [4]), call(1, [1], [2, 3])                            # b samples what a saw as context
    for order in ([a, b], [b, a]):
        t = build_tree(order)
        assert t.stats['trained'] == 3 and t.train_T.tolist() == [False, True, True, True]

def test_T7_side_calls_are_kept_and_not_trained():
    calls, hist = [], [1, 2]
    for i in range(3): calls.append(call(i, list(hist), [10 + i], i - 1 if i else None)); hist += [10 + i, 20 + i]
    calls += [call(3, [5, 6], [7, 7], role='side', role_reason='title'), call(4, [5], [8], role='side', role_reason='quota')]
    t = build_tree(calls)
    assert t.stats['trained'] == 3 and t.stats['roles'] == {'main': 3, 'side': 2} and t.stats['reasons'] == {'title': 1, 'quota': 1}
    assert build_tree(calls, train_roles=('main', 'side')).stats['trained'] == 6

def test_T8_interleaved_subagents():
    P1, P2, P3 = call(0, [1], [2]), call(2, [1, 2, 3], [4], 0), call(4, [1, 2, 3, 4, 5], [6], 2)
    C1, C2 = call(1, [50], [51], role='subagent'), call(3, [50, 51, 52], [53], 1, role='subagent')
    t = build_tree([P1, C1, P2, C2, P3])
    assert t.stats['roots'] == 2 and t.stats['lineage_leaves'] == 2 and t.stats['main_lineage_leaves'] == 1
    assert np.bincount(t.segment_C).tolist() == [3, 2] and trained(t) == [2, 4, 6]

def test_T9_retries_and_resends():
    p, q = [1, 2], [3]
    t = build_tree([call(0, p, [5, 6], delivered=('no',)), call(1, p, [5, 7], delivered=('yes',)), call(2, p + [5, 7] + q, [8], 1)])
    assert t.fate_C == ['abandoned', 'accepted', 'accepted'] and trained(t) == [5, 7, 8]
    i = t.ids_T.tolist().index(5)
    assert t.call_T[i] == 1                                                         # the abandoned call lends nothing
    last = build_tree([call(0, p, [5], delivered=('unknown',)), call(1, p, [6], delivered=('yes',)), call(2, p, [7], delivered=('no',))])
    assert last.fate_C == ['abandoned', 'accepted', 'aborted']                      # nobody extended: the later *delivered* one wins; the last never arrived
    twins = build_tree([call(0, p, [5]), call(1, p, [6]), call(2, p + [5, 9], [3], 0), call(3, p + [6, 9], [3], 1)])
    assert set(twins.fate_C) == {'accepted'}                                        # best-of-n: both were extended
    unknown = build_tree([call(0, p, [5]), call(1, p, [6])])
    assert set(unknown.fate_C) == {'accepted'}                                      # no evidence, no filter

def test_T9_extended_by_tokens_without_lineage():
    t = build_tree([call(0, [1], [5]), call(1, [1], [6]), call(2, [1, 6, 2], [7])])
    assert t.fate_C == ['abandoned', 'accepted', 'accepted']

def test_T49_quarantine_one_call_never_a_subtree():
    calls, hist = [], [1]
    for i in range(61):
        calls.append(call(i, list(hist), [100 + i, 2], i - 1 if i else None, quarantine='user agent' if i == 30 else '')); hist += [100 + i, 2, 300]
    t = build_tree(calls)
    assert t.stats['trained'] == 120 and t.fate_C.count('quarantined') == 1 and t.stats['reasons'] == {'user agent': 1}
    # a quarantined call vouches for nobody: it doesn't make its target "extended"
    t = build_tree([call(0, [1], [5], delivered=('no',)), call(1, [1], [6], delivered=('yes',)), call(2, [1, 5, 3], [7], 0, quarantine='key')])
    assert t.fate_C == ['abandoned', 'accepted', 'quarantined']

def test_cut_call_keeps_what_a_later_prompt_kept():
    t = build_tree([call(0, [1], [5, 6, 7], finish='aborted'), call(1, [1, 5, 6, 3], [8], 0, anchor_id='c0'), call(2, [2], [9, 9], finish='aborted')])
    assert t.fate_C == ['aborted', 'accepted', 'aborted'] and t.kept_C.tolist() == [2, 1, 0] and trained(t) == [5, 6, 8]
    assert t.stats['trained'] == t.stats['sampled'] - t.stats['shared'] == 3

def test_a_reply_of_which_a_part_was_kept_trains_that_part():
    "Claude Code keeps the text block of a stream that was cut behind it; the tool call was sampled and never seen."
    whole, part = (Message('assistant', 'Look.', tool_calls=x) for x in ((ToolCall('', 'sh', {}),), ()))
    first = lambda got: call(0, [1], [5, 6, 7], delivered=got, response=whole, messages=(Message('user', 'x'),))
    nxt = lambda m: call(1, [1, 5, 6, 3], [8], 0, messages=(Message('user', 'x'), m, Message('user', 'resume')))
    for got in (('yes', 'unknown'), ('yes', 'yes')):   # what was delivered is an upper bound: the history wins
        t = build_tree([first(got), nxt(part)])
        assert t.fate_C == ['aborted', 'accepted'] and t.kept_C.tolist() == [2, 1] and trained(t) == [5, 6, 8] and t.stats['lineage_leaves'] == 1
    t = build_tree([first(('yes', 'unknown')), nxt(whole)])                 # the harness has it all: a template that rewrites history
    assert t.fate_C == ['accepted', 'accepted'] and trained(t) == [5, 6, 7, 8]
    fork = call(2, [1, 6, 4], [9], 0, messages=(Message('user', 'x'), part, Message('user', 'fork')))
    assert build_tree([first(('yes', 'yes')), nxt(whole), fork]).fate_C == ['accepted']*3   # one went on with all of it
    assert trained(build_tree([first(('yes', 'unknown'))])) == [5, 6, 7]    # nobody went on: an upper bound is all there is

def test_over_branching_discards_the_rollout():
    fan = lambda n: [call(0, [1], [2])] + [call(i, [1, 2, 10 + i], [3], 0) for i in range(1, n + 1)]
    assert build_tree(fan(32)).discarded is None
    t = build_tree(fan(33))
    assert t.discarded and not t.train_T.any() and len(t.leaves) == 0 and t.stats['trained'] == 0
    assert build_tree(fan(33), max_leaves=33).discarded is None
    retries = [call(0, [1], [2], delivered=('yes',))] + [call(i, [1, 2, 3], [i], 0, delivered=('yes',)) for i in range(1, 50)]
    assert build_tree(retries).discarded is None                                    # dead leaves go first
    subs = [call(0, [1], [2])] + [call(i, [7, i], [3], role='subagent') for i in range(1, 50)]
    assert build_tree(subs).discarded is None                                       # main leaves only

def test_media_of_different_content_do_not_merge():
    img = lambda sha: ((1, 3, sha),)
    a, b = call(0, [1, 7, 7, 7, 2], [3], media=img('aa')), call(1, [1, 7, 7, 7, 2], [3], media=img('bb'))
    t = build_tree([a, b, call(2, [1, 7, 7, 7, 2, 3, 4], [5], 0, media=img('aa'))])
    assert len(t.leaves) == 2 and t.stats['trained'] == 3 and t.node_T[1] != t.node_T[0]
    for c, (p, o) in zip(t.calls, t.expand()): assert p.tolist() == c.prompt_ids.tolist() and o.tolist() == c.output_ids.tolist()

def test_refusals():
    with pytest.raises(DataError): build_tree([call(0, [1], [2]), Call('x', 'other', 1, [1], [2], [0], [0])])
    with pytest.raises(DataError): build_tree([call(0, [1], [2]), call(0, [1], [3])])
    with pytest.raises(InputError): build_tree([], train_roles=('mian',))
    with pytest.raises(InputError): build_tree([], weight='twice')
    with pytest.raises(InputError): concat([build_tree([])], groups_R=[1, 2])

def test_degenerate_trees():
    t = build_tree([])
    assert t.stats['calls'] == 0 and len(t.ids_T) == 0 and t.expand() == [] and t._repr_html_()
    t = build_tree([call(0, [], [1, 2]), call(1, [1], []), call(2, [], [])])       # a root is never trained
    assert t.fate_C == ['quarantined', 'accepted', 'quarantined'] and t.stats['trained'] == 0
    assert [(p.tolist(), o.tolist()) for p, o in t.expand()] == [([], [1, 2]), ([1], []), ([], [])]

def test_repr_escapes_and_counts():
    t = build_tree([call(0, [1, 2], [3], quarantine='<script>')])
    assert '<script>' not in t._repr_html_() and '1 calls' in t._repr_html_()

# -- a simulator of harnesses -------------------------------------------------------------------------------------------------
@st.composite
def workload(draw):
    "Random turns over a tiny vocabulary: growth, forgetting, retries, subagents, cuts, quarantine; so that collisions are the rule."
    tok = st.integers(1, 3); some = lambda a, b: draw(st.lists(tok, min_size=a, max_size=b))
    calls, n = [], draw(st.integers(1, 12))
    for i in range(n):
        par = draw(st.integers(0, i - 1)) if i and draw(st.booleans()) else None
        if par is None: prompt = some(1, 4)
        else:
            c = calls[par]; kind = draw(st.sampled_from(['grow', 'retry', 'forget', 'cut']))
            full = c.prompt_ids.tolist() + c.output_ids.tolist()
            prompt = {'grow': lambda: full + some(0, 3), 'retry': lambda: c.prompt_ids.tolist(), 'forget': lambda: c.prompt_ids.tolist() + some(1, 3),
                      'cut': lambda: full[:max(1, len(full) - 1)] + some(0, 2)}[kind]()
            if kind == 'retry': par = None
        out = some(0, 4)
        calls.append(call(i, prompt, out, par, role=draw(st.sampled_from(['main', 'main', 'main', 'side', 'subagent'])),
            delivered=draw(st.sampled_from([(), ('yes',), ('no',), ('unknown',)])), quarantine=draw(st.sampled_from([''] * 7 + ['x'])),
            finish=draw(st.sampled_from(['stop', 'stop', 'stop', 'length', 'aborted'])), lp=draw(st.lists(st.floats(-9, -.125, width=32), min_size=len(out), max_size=len(out)))))
    return calls

def check(t):
    n = len(t.ids_T)
    for c, (p, o) in zip(t.calls, t.expand()): assert p.tobytes() == c.prompt_ids.tobytes() and o.tobytes() == c.output_ids.tobytes()
    assert t.stats['trained'] == t.stats['sampled'] - t.stats['shared'] == t.train_T.sum()
    # by brute force over prefixes: what must be trained, and by whom
    want = {}
    for i in sorted(range(len(t.calls)), key=lambda i: t.calls[i].seq):
        c, full = t.calls[i], t.calls[i].prompt_ids.tolist() + t.calls[i].output_ids.tolist()
        ok = t.fate_C[i] == 'accepted' and c.role in t.train_roles and not t.discarded
        kept = len(c.output_ids) if ok else t.kept_C[i] if t.fate_C[i] == 'aborted' and c.role in t.train_roles and not t.discarded else 0
        for k in range(kept): want.setdefault(tuple(full[:len(c.prompt_ids) + k + 1]), (i, c.logprobs[k]))
    paths = {tuple(t.path_ids(p).tolist()): p for p in range(n)}
    assert len(paths) == n == len({tuple((c.prompt_ids.tolist() + c.output_ids.tolist())[:k + 1]) for c in t.calls for k in range(len(c.prompt_ids) + len(c.output_ids))})
    assert {k for k, p in paths.items() if t.train_T[p]} == set(want)
    for k, (i, lp) in want.items(): assert t.call_T[paths[k]] == i and t.logprobs_T[paths[k]] == lp
    # structure
    assert (np.bincount(t.parent_N[t.parent_N >= 0]) != 1).all()                      # edges are compressed: nobody has an only child
    assert (t.parent_T < np.arange(n)).all() and all(t.depth_T[p] == (t.depth_T[q] + 1 if (q := t.parent_T[p]) >= 0 else 0) for p in range(n))
    above = {p: set(t.path_positions(p)) for p in range(n)}
    for a in range(n):
        for d in range(n):
            na, nd = t.node_T[a], t.node_T[d]
            assert (a in above[d]) == (t.enter_N[na] <= t.enter_N[nd] < t.exit_N[na] and (na != nd or a <= d))
    # ownership: first retained leaf at or below; weights count the paths
    for p in range(n):
        below = [j for j, l in enumerate(t.leaves) if p in above[l]]
        assert t.leaves_T[p] == len(below) and t.owner_T[p] == (below[0] if below else -1)
        if t.train_T[p]: assert below and t.parent_T[p] >= 0
    assert all(t.train_T[l] for l in t.leaves)

@settings(max_examples=150, deadline=None)
@given(workload())
def test_simulated_workloads_keep_the_invariants(calls): check(build_tree(calls, train_roles=('main', 'subagent')))

@settings(max_examples=40, deadline=None)
@given(workload(), st.randoms(use_true_random=False), st.integers(1, 3))
def test_incremental_equals_whole_and_order_does_not_matter(calls, rnd, cap):
    t = Tree(max_leaves=cap)
    for c in calls: t.add(c); t.stats                                              # derived after each call, then invalidated
    whole, other = build_tree(calls, max_leaves=cap), list(calls)
    check(t); check(whole)
    for k in ('ids_T', 'train_T', 'call_T', 'owner_T', 'segment_C', 'kept_C'): assert np.array_equal(getattr(t, k), getattr(whole, k))
    rnd.shuffle(other); shuffled = build_tree(other, max_leaves=cap); check(shuffled)
    by = lambda t: {c.call_id: (f, r) for c, f, r in zip(t.calls, t.fate_C, t.reason_C)}
    coef = lambda t: (lambda b: {tuple(t.path_ids(p).tolist()): x for p, x in enumerate(loss_coef(b.train_T, b.owner_T, b.rollout_T, b.group_T, b.weight_T, normalizer='sequence'))})(concat([t]))
    assert coef(shuffled) == coef(whole) and np.array_equal(shuffled.ids_T, whole.ids_T)   # siblings stand in the order of time, so owners do not depend on arrival
    assert by(shuffled) == by(whole) and shuffled.stats['trained'] == whole.stats['trained'] and shuffled.discarded == whole.discarded

@pytest.mark.parametrize('parents', [(0,), (1, 0), (2, 0, 1), ('9',)])
def test_lineage_never_runs_in_a_circle(parents):
    "a parent is an earlier call of the rollout: one that is later, the call itself or of nobody is none"
    calls, hist = [], [1]
    for i, p in enumerate(parents): calls.append(call(i, hist, [5 + i], p)); hist = hist + [5 + i]
    t = build_tree(calls); assert t.above_C[0] == -1 and all(p < i for i, p in enumerate(t.above_C))
    assert t.stats['main_lineage_leaves'] >= 1 and t.stats['trained'] == len(t)
    if len(t) > 1: assert build_tree(calls, max_leaves=0).discarded

def test_siblings_of_equal_seq_do_not_depend_on_arrival():
    calls = [call(0, [1, 2], [3]), call(0, [1, 2], [4]), call(0, [1, 2, 4], [5])]; calls = [replace(c, call_id=f'x{i}', parent_id='x1' if i == 2 else None) for i, c in enumerate(calls)]
    a, b = build_tree(calls), build_tree(calls[::-1])
    assert np.array_equal(a.ids_T, b.ids_T) and a.owner_T.tolist() == b.owner_T.tolist() and a.segment_C.tolist() == b.segment_C[::-1].tolist()

def test_media_outside_the_prompt_are_refused():
    for span in ((0, 9, 'a'), (-1, 1, 'a'), (2, 1, 'a')):
        with pytest.raises(DataError, match='media at'): build_tree([call(0, [1, 2], [3], media=(span,))])

def test_long_rollout_is_quick():
    "400 turns, 60 thousand tokens: linear enough to be derived in well under a second's work"
    calls, hist = [], np.arange(1000)
    for i in range(400): calls.append(call(i, hist, np.arange(75) + i, i - 1 if i else None)); hist = np.concatenate([hist, np.arange(75) + i, np.full(75, i)])
    import time; s = time.process_time(); t = build_tree(calls); t.stats; took = time.process_time() - s
    assert t.stats['token_leaves'] == 1 and t.stats['trained'] == 400 * 75 and took < 3, took
