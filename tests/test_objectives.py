"""learn.objectives: worked examples, named faults, and properties against slow, obvious versions."""
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from clawlab.records import Call, DataError, InputError
from clawlab.learn.tree import build_tree
from clawlab.learn.objectives import (correction_metrics, explained_variance, grpo_advantages, is_weights, loss_coef, policy_loss, tree_gae, value_loss, whiten)
from clawlab.learn.advantages import (ESTIMATORS, NEEDS_VALUES, advantages, call_rewards, outcome_rewards, reinforce_pp_advantages, rloo_advantages, trained_calls, without_signal)

def call(i, prompt, out, parent=None, r='r', **kw):
    return Call(f'{r}{i}', r, i, prompt, out, [-1.] * len(out), [0] * len(out), parent_id=None if parent is None else f'{r}{parent}', **kw)

def chain(r, *turns):
    "One call per turn, each going on from the last; all begin with [1, 2]."
    calls, hist = [], [1, 2]
    for i, out in enumerate(turns): calls.append(call(i, hist, out, i - 1 if i else None, r)); hist = hist + out + [9]
    return build_tree(calls)

# -- how it ended -------------------------------------------------------------------------------------------------------------
def test_outcome_to_reward():
    out, score = ['ok', 'truncated', 'agent_fail', 'timeout', 'infra_fail', 'grader_fail', None, 'ok'], [1, .5, .25, .75, None, None, None, None]
    r, m = outcome_rewards(out, score, ['a'] * 8)
    assert np.array_equal(r, [1, .5, .25, .75] + [np.nan] * 4, equal_nan=True) and m['why'] == [''] * 4 + ['infra_fail', 'grader_fail', 'no outcome', 'ok without a score']
    assert m['dropped_share'] == .5 and m['dropped'] == {w: 1 for w in m['why'][4:]} and len(m['warnings']) == 1
    for rule, want in (('score', .75), ('zero', 0.), ('drop', np.nan)):
        r, m = outcome_rewards(['timeout', 'ok'], [.75, 1], ['a'] * 2, timeout=rule); assert np.array_equal(r, [want, 1], equal_nan=True) and m['why'][0] == ('timeout' if rule == 'drop' else '')
    assert outcome_rewards(['timeout'], [None], ['a'], timeout='zero')[0] == 0 and outcome_rewards(['timeout'], [None], ['a'])[1]['why'] == ['timeout']
    r, m = outcome_rewards(['ok', 'ok'], [1, 1], ['a'] * 2, why_R=['over-branching', None]); assert np.isnan(r[0]) and r[1] == 1 and m['why'] == ['over-branching', '']
    assert np.isnan(outcome_rewards(['infra_fail'], [1.], ['a'])[0][0])                                  # whatever somebody wrote beside it
    for bad in (dict(outcomes_R=['won']), dict(timeout='retry'), dict(scores_R=[1, 1]), dict(scores_R=[float('inf')])):
        with pytest.raises(InputError): outcome_rewards(**{**dict(outcomes_R=['ok'], scores_R=[1.], harness_R=['a']), **bad})
    assert len(outcome_rewards([], [], [])[0]) == 0

def test_the_dropped_share_is_told_per_arm_and_harness():
    n = 20; out = ['ok'] * 38 + ['infra_fail'] * 2; arm, h = ['mix'] * n + ['solo'] * n, (['x'] * 19 + ['y']) + ['x'] * n
    m = outcome_rewards(out, [1.] * 40, h, arm)[1]
    assert m['dropped_by'] == {('mix', 'x'): 0, ('mix', 'y'): 0, ('solo', 'x'): .1} and m['warnings'] == ['10% of the rollouts of x in arm solo have no reward'] and m['dropped_share'] == .05
    assert outcome_rewards(['ok'] * 19 + ['infra_fail'], [1.] * 20, ['x'] * 20)[1]['warnings'] == []           # 5% is not above 5%

# -- other estimators ---------------------------------------------------------------------------------------------------------------
def test_rloo_is_the_reward_against_the_mean_of_the_others():
    r, g = [1, 0, 0, .5, 1, 1, None, .3], ['a'] * 4 + ['b'] * 2 + ['b', 'c']
    adv, m = rloo_advantages(r, g)
    assert np.allclose(adv[:4], [x - (1.5 - x) / 3 for x in r[:4]]) and (adv[4:] == 0).all() and m['zero_variance'] == 2 and m['missing'] == 1
    assert np.allclose(adv[:4], 4 / 3 * (np.array(r[:4], float) - .375))

def test_reinforce_pp_divides_by_the_batch_per_harness():
    r, g, h = [1, 0, .4, .6, 1, 1, 0, 1], ['a'] * 2 + ['b'] * 2 + ['c'] * 2 + ['d'] * 2, ['x'] * 6 + ['y'] * 2
    adv, _ = reinforce_pp_advantages(r, g, h); dev = np.array([.5, -.5, -.1, .1, 0, 0])
    assert np.allclose(adv[:6], dev / (np.sqrt((dev ** 2).mean()) + 1e-6)) and np.allclose(adv[6:], [-1, 1], atol=1e-5)
    assert np.array_equal(adv[:6], reinforce_pp_advantages(r[:6], g[:6], h[:6])[0])                             # another harness says nothing
    assert np.array_equal(reinforce_pp_advantages(r + [None], g + ['d'], h + ['y'])[0][:8], adv) and (reinforce_pp_advantages([1, 1], [0, 0], ['x'] * 2)[0] == 0).all()
    with pytest.raises(InputError): reinforce_pp_advantages([1, 0], ['a', 'a'], ['x'])
    with pytest.raises(InputError): reinforce_pp_advantages([1, 0], ['a', 'a'], ['x', None])

def test_groups_to_resample():
    assert without_signal([1, 0, 1, 1, None, .3, None, .1, .1 + 1e-9], list('aabbcdaee')) == {'b': 'zero variance', 'c': 'no reward', 'd': 'zero variance', 'e': 'zero variance'}
    assert without_signal([], []) == {}

def test_call_discount():
    trees = [chain('a', [3, 4], [5], [6]), chain('b', [7])]
    c, x = call_rewards(trees[0], 2., .5); assert c.tolist() == [0, 1, 2] and x.tolist() == [.5, 1, 2]
    train = np.concatenate([t.train_T for t in trees]); at = lambda **k: advantages('grpo', trees, [1, 0], ['t'] * 2, **k)[0][train]
    mean = (1.75 / 3 + 0) / 2; var = ((.25 - mean) ** 2 + (.5 - mean) ** 2 + (1 - mean) ** 2) / 6 + mean ** 2 / 2
    assert np.allclose(at(call_discount=.5, std_norm=False), np.array([.25, .25, .5, 1, 0]) - mean) and np.allclose(at(call_discount=.5), (np.array([.25, .25, .5, 1, 0]) - mean) / (np.sqrt(var) + 1e-6))
    assert np.allclose(at(call_discount=1 - 1e-12), at(), atol=1e-9)
    assert (advantages('grpo', trees, [1, 1], ['t'] * 2, call_discount=.5)[0] == 0).all()                     # length is no signal
    empty = build_tree([call(0, [1], [2], r='s', role='side')]); adv, m = advantages('grpo', trees + [empty], [1, 0, 1], ['t'] * 3, call_discount=.5, std_norm=False)
    mean = (1.75 / 3 + 0 + 1) / 3; assert np.allclose(adv[:len(train)][train], np.array([.25, .25, .5, 1, 0]) - mean) and m['valid'].all()   # it trains nothing and is in the baseline
    for bad in (0, 1.5, -1):
        with pytest.raises(InputError): at(call_discount=bad)

def test_only_trained_calls_are_steps():
    t = build_tree([call(0, [1, 2], [3]), call(1, [1, 2], [4]), call(2, [1, 2, 4, 9], [5], 1), call(3, [7], [8], role='side')])
    assert t.fate_C[0] == 'abandoned' and trained_calls(t).tolist() == [1, 2]
    backwards = build_tree([call(1, [1, 2, 4, 9], [5], 0), call(0, [1, 2], [4])]); assert trained_calls(backwards).tolist() == [1, 0] and call_rewards(backwards, 1., .5)[1].tolist() == [.5, 1]

def test_gigpo_by_hand():
    trees, R = [chain('a', [3, 4], [5]), chain('b', [6]), chain('c', [3, 4], [8])], [1, 1, 0]
    f = lambda **k: advantages('gigpo', trees, R, ['t'] * 3, std_norm=False, **k); adv, m = f(step_discount=.5)
    train = np.concatenate([t.train_T for t in trees])
    first = np.array([.5, 1, 0]) - .5; second = np.array([1, 0]) - .5; roll = np.array(R) - 2 / 3                # prompts [1, 2] three times, [1, 2, 3, 4, 9] twice
    want = [roll[0] + first[0]] * 2 + [roll[0] + second[0], roll[1] + first[1]] + [roll[2] + first[2]] * 2 + [roll[2] + second[1]]
    assert np.allclose(adv[train], want) and m['step_groups'] == 2 and m['step_calls'] == 5 and (adv[~train] == 0).all()
    assert np.allclose(f(step_discount=.5, omega=0.)[0][train], np.repeat(roll, [3, 1, 3]))
    std = lambda x: x / (x.std() + 1e-6); adv = advantages('gigpo', trees, R, ['t'] * 3, step_discount=.5)[0][train]
    assert np.allclose(adv[[0, 3, 4]], std(roll) + std(first)) and np.allclose(adv[[2, 6]], std(roll)[[0, 2]] + std(second))
    alone, m = advantages('gigpo', trees, R, ['t', 'u', 'v']); assert (alone == 0).all() and m['step_groups'] == 0 and m['skipped'].all()   # singletons, and nobody to compare with

def test_gigpo_skips_a_group_only_without_any_signal():
    trees = [chain('a', [3], [5]), chain('b', [6])]
    adv, m = advantages('gigpo', trees, [1, 1], ['t'] * 2, step_discount=.5); assert adv.any() and not m['skipped'].any()
    adv, m = advantages('gigpo', trees, [1, 1], ['t'] * 2, step_discount=1.); assert not adv.any() and m['skipped'].all()
    adv, m = advantages('gigpo', trees, [1, 1], ['t'] * 2, step_discount=.5, omega=0.); assert m['skipped'].all()
    adv, m = advantages('gigpo', trees, [1, None], ['t'] * 2); assert not adv.any() and m['valid'].tolist() == [True, False]

def test_ppo_is_reward_minus_value():
    trees = [chain('a', [3, 4], [5]), chain('b', [6]), chain('c', [7])]; train = np.concatenate([t.train_T for t in trees])
    V = np.full(len(train), np.nan); V[train] = [.1, .2, .3, .4, .5]
    adv, m = advantages('ppo', trees, [1, 1, None], ['t'] * 3, values_T=V)
    assert np.allclose(adv[train], [.9, .8, .7, .6, 0]) and m['returns'][train].tolist() == [1, 1, 1, 1, 0] and not m['skipped'].any() and m['zero_variance'] == 1 and np.isnan(m['explained_variance'])
    adv, m = advantages('ppo', trees, [1, 0, 1], ['t'] * 3, values_T=V, whiten_adv=True); assert abs(adv[train].mean()) < 1e-12 and np.isclose(adv[train].std(), 1, atol=1e-4)
    assert np.isclose(m['explained_variance'], 1 - np.var([.9, .8, .7, -.4, .5]) / np.var([1, 1, 1, 0, 1]))
    with pytest.raises(InputError): advantages('ppo', trees, [1, 0, 1], ['t'] * 3, values_T=V[:-1])
    with pytest.raises(DataError): advantages('ppo', trees, [1, 0, 1], ['t'] * 3, values_T=np.full(len(train), np.nan))

def test_estimators_by_name():
    trees = [chain('a', [3]), chain('b', [4])]; V = np.zeros(6); have = dict(harness_R=['x', 'x'], values_T=V)
    for kind in ESTIMATORS: assert len(advantages(kind, trees, [1, 0], ['t', 't'], **have)[0]) == 6 and len(advantages(kind, [], [], [], harness_R=[], values_T=[])[0]) == 0
    assert NEEDS_VALUES == {'ppo'}
    for bad in (('a2c', have, {}), ('rloo', have, dict(std_norm=True)), ('ppo', have, dict(call_discount=.5)), ('ppo', {}, {}), ('reinforce++', {}, {}), ('grpo', have, dict(samples_R=[1, 1]))):
        with pytest.raises(InputError): advantages(bad[0], trees, [1, 0], ['t', 't'], **bad[1], **bad[2])
    with pytest.raises(InputError): advantages('grpo', trees, [1, 0, 1], ['t', 't'])

def test_unit_sample_counts_owner_paths():
    "rollout A: reward 1, three samples; B: reward 0, one: the baseline is 3/4 instead of 1/2"
    fork = build_tree([call(0, [1, 2], [3])] + [call(i, [1, 2, 3, 9, i], [5], 0) for i in (1, 2, 3)]); assert len(fork.leaves) == 3
    trees = [fork, chain('b', [4])]; f = lambda unit: sorted(set(advantages('grpo', trees, [1, 0], ['t'] * 2, std_norm=False, unit=unit)[0]) - {0.})
    assert f('rollout') == [-.5, .5] and f('sample') == [-.75, .25]

# -- named faults, on trees -----------------------------------------------------------------------------------------------------------
def coef_of(t, **kw):
    z = np.zeros(len(t.ids_T), int); return loss_coef(t.train_T, t.owner_T, z, z, t.weight_T, **kw)[t.train_T]

def test_R3_what_was_sampled_is_what_is_trained():
    "vocabulary a=1, b=2, ab=3: sampled [a, b] and replayed as the text 'ab', which is one token when it is encoded again: the loss is about a and b, once each"
    t = build_tree([call(0, [7], [1, 2]), call(1, [7, 1, 2, 8], [1, 2], 0, drift=1)]); assert t.ids_T[t.train_T].tolist() == [1, 2, 1, 2] and t.stats['drift'] == 1 and np.allclose(coef_of(t), [1 / 4] * 4)
    fork = build_tree([call(0, [7], [1, 2]), call(1, [7, 3, 8], [1, 2], 0)]); assert fork.ids_T[fork.train_T].tolist() == [1, 2, 1, 2] and (fork.ids_T[~fork.train_T] == 3).sum() == 1   # even then the re-encoded one is context

def test_R4_a_reply_that_the_template_rewrote_is_trained_once():
    "[S, U1] -> [t, x, /t, A1], then [S, U1, A1, U2]: A1 after the thinking is trained, A1 without it is context"
    S, U1, U2, A1 = 1, 2, 3, 4; t = build_tree([call(0, [S, U1], [10, 11, 12, A1]), call(1, [S, U1, A1, U2], [5], 0)])
    a1 = np.flatnonzero(t.ids_T == A1); assert len(t.leaves) == 2 and len(a1) == 2 and t.train_T[a1].sum() == 1 and t.train_T.sum() == 5
    adv, _ = advantages('grpo', [t, chain('b', [4])], [1, 0], ['t'] * 2, std_norm=False); assert adv[:len(t.ids_T)].tolist() == (.5 * t.train_T).tolist() and np.allclose(coef_of(t), [1 / 5] * 5)
    assert np.allclose(sorted(coef_of(t, normalizer='sequence')), [1 / 8] * 4 + [1 / 2])

def test_R5_a_shared_node_is_trained_once():
    "A(3) -> {B(2), C(2)}: 7 tokens share the loss, not 10; with B untrainable 5, A included"
    A, B, C = call(0, [1], [2, 3, 4]), call(1, [1, 2, 3, 4, 5], [6, 7], 0), call(2, [1, 2, 3, 4, 8], [9, 10], 0)
    assert np.allclose(coef_of(build_tree([A, B, C]), normalizer='token'), [1 / 7] * 7)
    for bad in (dict(quarantine='forged'), dict(role='side')):
        t = build_tree([A, call(1, [1, 2, 3, 4, 5], [6, 7], 0, **bad), C]); assert np.allclose(coef_of(t, normalizer='token'), [1 / 5] * 5) and np.allclose(coef_of(t, normalizer='sequence'), [1 / 5] * 5)
    adv, _ = advantages('grpo', [build_tree([A, B, C]), chain('b', [4])], [1, 0], ['t'] * 2, std_norm=False); assert (adv == .5).sum() == 7

def test_R6_two_rows_and_eight_rows_are_two_rollouts():
    "one success in 2 rows and one failure in 8 rows: baseline 0.5, not 0.2"
    rows = lambda r, n: build_tree([call(i, [1, 2 + i], [3], r=r) for i in range(n)]); trees = [rows('a', 2), rows('b', 8)]; assert [len(t.leaves) for t in trees] == [2, 8]
    f = lambda unit: advantages('grpo', trees, [1, 0], ['t'] * 2, std_norm=False, unit=unit)[0]; on = np.concatenate([t.train_T for t in trees])
    assert f('rollout')[on].tolist() == [.5] * 2 + [-.5] * 8 and np.allclose(f('sample')[on], [.8] * 2 + [-.2] * 8)

def test_R7_side_calls_get_nothing():
    t = build_tree([call(0, [1, 2], [3]), call(1, [1, 2, 3, 9], [4], 0), call(2, [1, 2, 3, 9, 4, 9], [5], 1), call(3, [7], [8, 8], role='side'), call(4, [6], [2], role='side')])
    assert t.train_T.sum() == 3 and len(trained_calls(t)) == 3 and np.allclose(coef_of(t), [1 / 3] * 3)
    adv, _ = advantages('gigpo', [t, chain('b', [4])], [1, 0], ['t'] * 2); assert (adv != 0).sum() == 4 and call_rewards(t, 1., .5)[1].tolist() == [.25, .5, 1]

def test_R15_a_ratio_between_different_distributions_is_visible():
    "top-p that keeps 2 of 4: the log-prob of the cut distribution is off by the kept mass, in every token alike"
    p = np.exp([2., 1, 0, -1]); p /= p.sum(); kept = p[:2].sum(); old, behav = np.log(p[[0, 1, 0]]), np.log(p[[0, 1, 0]] / kept)
    m = correction_metrics(old, behav, is_weights(old, behav, [0, 0, 0])); assert np.allclose([m['is_ratio_p01'], m['is_ratio_p50'], m['is_ratio_max']], kept)
    t = np.log(np.exp(np.array([2., 1, 0, -1]) / .6) / np.exp(np.array([2., 1, 0, -1]) / .6).sum()); assert np.isclose(t[0], -.20806, atol=1e-4) and np.isclose(np.log(p[0]) / .6, -.734, atol=1e-3)

def test_R18_a_call_that_spans_an_update_is_corrected_token_by_token():
    "57 tokens of v7, then 71 of v8: the weight of a token is its own, and a product is over the whole call"
    old = np.full(128, -1.); behav = np.r_[np.full(57, -1.2), np.full(71, -1.)]
    assert np.allclose(is_weights(old, behav, np.zeros(128)), np.r_[np.full(57, np.exp(.2)), np.ones(71)], rtol=1e-5) and np.allclose(is_weights(old, behav, np.zeros(128), mode='seq_tis', cap=1e6), np.exp(57 * .2), rtol=1e-4)

# -- advantages ---------------------------------------------------------------------------------------------------------------
def test_R6_baseline_counts_rollouts_not_rows():
    adv, m = grpo_advantages([1, 0], ['t', 't'], std_norm=False)
    assert adv.tolist() == [.5, -.5] and m['reward_mean'] == .5
    for missing in (None, '', -1, float('nan')):
        with pytest.raises(InputError): grpo_advantages([1, 0], ['t', missing])
        with pytest.raises(InputError): loss_coef([True] * 2, [0, 0], [0, missing] if isinstance(missing, (str, type(None))) else np.array([0, missing]), [0, 0], [1, 1])

def test_sample_statistics_are_a_switch():
    args = dict(std_norm=False)
    assert grpo_advantages([1, 0], [0, 0], **args)[0].tolist() == [.5, -.5]
    assert grpo_advantages([1, 0], [0, 0], unit='sample', samples_R=[3, 1], **args)[0].tolist() == [.25, -.75]
    with pytest.raises(InputError): grpo_advantages([1, 0], [0, 0], unit='sample')
    with pytest.raises(InputError): grpo_advantages([1, 0], [0, 0], unit='row')

def test_R12_infrastructure_failures_are_not_zeros():
    adv, m = grpo_advantages([1, 0, None, 0], [0] * 4)
    std = np.std([1, 0, 0])
    assert np.allclose(adv, [2/3 / (std + 1e-6), -1/3 / (std + 1e-6), 0, -1/3 / (std + 1e-6)], rtol=1e-12) and m['valid'].tolist() == [True, True, False, True]
    assert m['missing'] == 1 and np.array_equal(adv, grpo_advantages(np.array([1, 0, np.nan, 0], np.float32), [0] * 4)[0])

def test_R13_masked_rows_stay_out_of_the_baseline():
    assert grpo_advantages([1, 3, 2, None], [0] * 4, std_norm=False)[0].tolist() == [-1, 1, 0, 0]
    adv, m = grpo_advantages([None, None], [0, 0])
    assert adv.tolist() == [0, 0] and m['skipped_groups'] == 1 and m['empty'] == 1 and m['reward_mean'] == 0
    logp = torch.zeros(2, requires_grad=True); loss, _ = policy_loss(logp, [0, 0], adv, [0, 0], [1, 1]); loss.backward()
    assert loss == 0 and torch.isfinite(logp.grad).all()

def test_R14_near_zero_std():
    adv, m = grpo_advantages(np.full(7, .1, np.float32), [0] * 7)
    assert (adv == 0).all() and m['zero_variance'] == 1 and m['skipped'].all()
    adv, m = grpo_advantages(np.array([0] + [.35] * 7, np.float32), [0] * 8)
    assert np.allclose(adv, [-2.6457] + [.37796] * 7, atol=1e-4) and not m['skipped'].any() and adv.dtype == np.float64
    assert grpo_advantages([.3], [0])[0].tolist() == [0]
    assert (grpo_advantages([1e9, 1e9 + 1], [0, 0])[0] == 0).all()                   # relative to the scale of the rewards
    with pytest.raises(InputError): grpo_advantages([float('inf'), 0], [0, 0])
    with pytest.raises(InputError): grpo_advantages([1, 0, 1], [0, 0])

@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.sampled_from([0., .25, .5, 1.]))), min_size=1, max_size=20), st.booleans())
def test_groups_are_independent(rows, std_norm):
    g, r = [a for a, _ in rows], [b for _, b in rows]
    adv, m = grpo_advantages(r, g, std_norm=std_norm)
    for k in set(g):
        i = [j for j in range(len(g)) if g[j] == k]
        assert np.array_equal(adv[i], grpo_advantages([r[j] for j in i], ['x'] * len(i), std_norm=std_norm)[0])
        assert abs(adv[i].sum()) < 1e-9
    assert all(adv[j] == 0 for j in range(len(r)) if r[j] is None) and m['valid'].tolist() == [x is not None for x in r]

# -- coefficients -------------------------------------------------------------------------------------------------------------
SIZE, ROLL, GROUP = [50, 100, 30, 30, 30, 40], [0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1]
WANT = dict(token=[1/280] * 6, rollout=[1/450] * 2 + [1/270] * 3 + [1/120], sequence=[1/300, 1/600] + [1/180] * 3 + [1/240], prompt=[1/480] * 5 + [1/80])
@pytest.mark.parametrize('normalizer', WANT)
def test_worked_example_of_the_normalisers(normalizer):
    rep = lambda x: np.repeat(x, SIZE)
    for owner in (np.arange(6), np.array([0, 1, 0, 1, 2, 0])):                        # unique in the step, or within the rollout
        coef = loss_coef(np.ones(280, bool), rep(owner), rep(ROLL), rep(GROUP), np.ones(280), normalizer=normalizer)
        assert np.allclose(coef, rep(WANT[normalizer]), rtol=1e-12) and np.isclose(coef.sum(), 1)
    names = [f'r{r}' for r in rep(ROLL)]
    assert np.array_equal(coef, loss_coef(np.ones(280, bool), rep(owner), names, rep(GROUP), np.ones(280), normalizer=normalizer))

def test_context_and_untrained_rollouts():
    train, owner, roll = [True, False, False], [0, -1, -1], [0, 0, 1]                 # rollout 1 has a reward and trains nothing
    assert loss_coef(train, owner, roll, roll, [1, np.nan, np.nan]).tolist() == [.5, 0, 0]
    assert loss_coef(train, owner, roll, roll, [1, 1, 1], normalizer='sequence').tolist() == [1, 0, 0]
    for n in WANT: assert loss_coef([False] * 3, owner, roll, roll, [1, 1, 1], normalizer=n).tolist() == [0, 0, 0]
    for n in WANT: assert len(loss_coef([], [], [], [], [], normalizer=n)) == 0
    with pytest.raises(InputError): loss_coef(train, owner, roll, roll, [1] * 3, normalizer='mean')

@pytest.mark.parametrize('weight', ['once', 'paths', 'sqrt'])
def test_weights_of_a_shared_turn(weight):
    call = lambda i, p, o, par=None: Call(f'c{i}', 'r', i, p, o, [-1] * len(o), [0] * len(o), parent_id=par)
    t = build_tree([call(0, [1], [2, 3, 4]), call(1, [1, 2, 3, 4, 5], [6, 7], 'c0'), call(2, [1, 2, 3, 4, 8], [9, 10], 'c0')], weight=weight)
    w = {'once': 1, 'paths': 2, 'sqrt': .5 ** .5}[weight]
    z = np.zeros(len(t.ids_T), int)
    coef = loss_coef(t.train_T, t.owner_T, z, z, t.weight_T, normalizer='token')[t.train_T]
    assert np.allclose(coef, np.array([w] * 3 + [1] * 4) / (3 * w + 4))
    if weight == 'paths': assert np.isclose(coef[:3].sum(), 2 * 3 / 10)               # as two independent rows of five tokens

# -- corrections --------------------------------------------------------------------------------------------------------------
def test_is_weights_by_hand():
    ratio = np.array([1, 3, .4, .9, 1.2, 1e-5]); call = [0, 0, 1, 1, 2, 2]; behav = np.full(6, -2.); old = behav + np.log(ratio)
    f = lambda mode, **k: is_weights(old, behav, call, mode=mode, **k)
    assert np.allclose(f('token_tis'), [1, 2, .4, .9, 1.2, 1e-5], rtol=1e-5) and f('token_tis').dtype == np.float32
    assert np.allclose(f('mis'), [1, 0, 0, .9, 1.2, 0], rtol=1e-5)
    assert np.allclose(f('seq_tis'), [2, 2, .36, .36, 1.2e-5, 1.2e-5], rtol=1e-4)
    assert np.allclose(f('veto'), [1, 2, .4, .9, 0, 0], rtol=1e-5) and f('none').tolist() == [1] * 6
    assert np.isclose(f('token_tis', cap=5)[1], 3)
    assert np.isfinite(is_weights([0, -500], [-500, 0], [0, 1], mode='seq_tis')).all()
    with pytest.raises(InputError): f('tis')

def test_masked_share_and_quantiles_of_the_weights():
    ratio = np.array([1, 3, .4, .9, 1.2, 1e-5]); behav = np.full(6, -2.); old = behav + np.log(ratio); w = is_weights(old, behav, [0, 0, 1, 1, 2, 2], mode='mis'); m = correction_metrics(old, behav, w)
    assert m['masked_share'] == .5 and np.isclose(m['w_mean'], 3.1 / 6) and np.isclose(m['w_max'], 1.2) and np.isclose(m['is_ratio_max'], 3) and np.isclose(m['is_ratio_p50'], .95)
    assert correction_metrics([], [], [])['masked_share'] == 0

def test_log_ratios_are_clamped():
    assert np.isclose(is_weights([0.], [-30.], [0], cap=1e12)[0], np.exp(np.float32(20))) and is_weights([-30.], [0.], [0])[0] == np.exp(np.float32(-20)) > 0
    assert np.isclose(is_weights([0.] * 3, [-15.] * 3, [0] * 3, mode='seq_tis', cap=1e12)[0], np.exp(20.))

def test_masked_tokens_keep_their_place_in_the_denominators():
    "two tokens of which MIS masks one: the other counts 1/2, not 1; the reference log-prob of the masked one is not looked at"
    train = np.ones(2, bool); z = np.zeros(2, int); coef = loss_coef(train, z, z, z, [1, 1]); old = np.array([-1., -1.]); w = is_weights(old, [-1., -9.], z, mode='mis')
    x = torch.tensor(old, requires_grad=True); loss, m = policy_loss(x, old, [1., 1.], coef, w, ref_E=[-2., float('nan')], kl=.1); loss.backward()
    assert w.tolist() == [1, 0] and np.isclose(loss.item(), -.5 * (1 - .1 * np.exp(-1))) and x.grad[1] == 0 and np.isclose(x.grad[0], -.5 * (1 - .1 * (1 - np.exp(-1)))) and m['masked'] == 1

def test_the_entropy_bonus_is_not_corrected():
    "- entropy * sum coef H: neither multiplied nor masked by w; NaN where nothing counts stays out"
    x, H = torch.tensor([-1., -1., -1.], dtype=torch.float64, requires_grad=True), torch.tensor([2., 3., float('nan')], dtype=torch.float64, requires_grad=True)
    loss, m = policy_loss(x, [-1.] * 3, [0.] * 3, [.5, .5, 0.], [1.5, 0., 1.], entropy_E=H, entropy=.1, kl=0); loss.backward()
    assert np.isclose(loss.item(), -.25) and H.grad.tolist() == [-.05, -.05, 0] and m['entropy'] == 2.5
    y = torch.tensor([-1.], requires_grad=True); loss, m = policy_loss(y, [-1.], [1.], [1.], [0.], entropy_E=[2.], entropy=.1); assert np.isclose(loss.item(), -.2) and m['n'] == 0
    with pytest.raises(DataError): policy_loss(y, [-1.], [1.], [1.], [0.], entropy_E=[float('nan')], entropy=.1)

def test_rl_refuses_replies_without_logprobs():
    for mode in ('token_tis', 'seq_tis', 'mis', 'veto'):
        with pytest.raises(DataError): is_weights([-1, -1], [-1, np.nan], [0, 0], mode=mode)
    assert is_weights([-1], [np.nan], [0], mode='none').tolist() == [1]

# -- the policy loss ----------------------------------------------------------------------------------------------------------
def slow_loss(logp, old, adv, coef, w, ref=None, H=None, clip=(.2, .28), dual=3., kl=.001, ent=0., kind='ppo'):
    out = torch.zeros((), dtype=logp.dtype)
    for i in range(len(logp)):
        if coef[i] == 0: continue
        if H is not None: out = out - ent * coef[i] * H[i]                              # the correction is no part of it
        if w[i] == 0: continue
        rho = torch.exp(logp[i] - old[i])
        if kind == 'cispo': J = min(rho.detach(), torch.tensor(5., dtype=rho.dtype)) * adv[i] * logp[i]
        else:
            J = torch.minimum(rho * adv[i], torch.clamp(rho, 1 - clip[0], 1 + clip[1]) * adv[i])
            if adv[i] < 0: J = torch.maximum(J, torch.tensor(dual * adv[i], dtype=J.dtype))
        d = ref[i] - logp[i] if ref is not None else None
        out = out - coef[i] * w[i] * (J - (kl * (torch.exp(d) - d - 1) if d is not None else 0))
    return out

@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(['ppo', 'cispo']))
def test_policy_loss_equals_the_obvious_one_for_any_micro_batches(seed, kind):
    r = np.random.default_rng(seed); n = 12
    old, adv, ref = -r.exponential(1, n), r.normal(size=n), -r.exponential(1, n)
    coef, w = r.random(n) * (r.random(n) > .2), r.random(n) * 2 * (r.random(n) > .2)
    x, H = torch.tensor(old + r.normal(size=n) * .6, requires_grad=True), torch.tensor(r.random(n))
    kw = dict(kl=.1, entropy=.01, kind=kind)
    want = slow_loss(x, old, adv, coef, w, ref, H, kl=.1, ent=.01, kind=kind)
    g = torch.autograd.grad(want, x, retain_graph=True)[0] if ((coef != 0) & (w != 0)).any() else torch.zeros(n)
    cuts = np.sort(r.choice(np.arange(1, n), 3, replace=False)); parts = np.split(r.permutation(n), cuts)
    got = sum(policy_loss(x[p], old[p], adv[p], coef[p], w[p], ref_E=ref[p], entropy_E=H[p], **kw)[0] for p in parts)
    assert abs(got - want) < 1e-12 and (torch.autograd.grad(got, x)[0] - g).abs().max() < 1e-12

def test_R44_aggregation_and_nan():
    "micro-batches of 1 and 9 tokens equal one of 10; a masked NaN stays out of value and gradient"
    x = torch.linspace(-2, -.1, 10, dtype=torch.float64, requires_grad=True); old = np.linspace(-2, -.2, 10); adv = np.arange(10) - 4.; coef = np.full(10, .1)
    f = lambda s: policy_loss(x[s], old[s], adv[s], coef[s], np.ones(10)[s])[0]
    assert abs(f(slice(0, 1)) + f(slice(1, 10)) - f(slice(0, 10))) < 1e-15
    for bad in ('logp', 'old', 'adv', 'w', 'ref'):
        v = dict(logp=torch.tensor([-1., -1.]), old=[-1., -1.], adv=[1., 1.], w=[1., 1.], ref=[-1., -1.]); v[bad] = torch.tensor([-1., float('nan')]) if bad == 'logp' else [1., float('nan')]
        y = v['logp'].requires_grad_(); loss, m = policy_loss(y, v['old'], v['adv'], [1., 0.], v['w'], ref_E=v['ref']); loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(y.grad).all() and m['n'] == 1 and m['masked'] == 1
    y = torch.tensor([float('nan'), -1.], requires_grad=True); loss, m = policy_loss(y, [0., 0.], [1., 1.], [0., 0.], [1., 1.]); loss.backward()
    assert loss == 0 and y.grad.tolist() == [0, 0] and m['n'] == 0
    with pytest.raises(DataError): policy_loss(torch.tensor([float('nan')]), [0.], [1.], [1.], [1.])

def test_clipping_by_hand():
    def grad(logp, adv, **kw):
        x = torch.tensor([logp], dtype=torch.float64, requires_grad=True); loss, m = policy_loss(x, [0.], [adv], [1.], [1.], kl=0, **kw); loss.backward(); return loss.item(), x.grad.item(), m
    L = np.log
    assert np.allclose(grad(L(1.2), 1)[:2], (-1.2, -1.2)) and np.allclose(grad(L(1.5), 1)[:2], (-1.28, 0))     # upper clip 0.28
    assert np.allclose(grad(L(.5), 1)[:2], (-.5, -.5)) and np.allclose(grad(L(.5), -1)[:2], (.8, 0))           # lower clip 0.2
    assert np.allclose(grad(L(2), -1)[:2], (2, 2)) and np.allclose(grad(L(4), -1)[:2], (3, 0))                 # dual clip
    assert np.allclose(grad(L(4), -1, dual_clip=None)[:2], (4, 4))
    assert np.allclose(grad(L(4), 1, kind='cispo')[1], -4) and np.allclose(grad(L(9), 1, kind='cispo')[1], -5) # keeps the gradient
    assert np.isfinite(grad(800., -1)[0]) and grad(L(1.5), 1)[2]['clip_frac'] == 1
    with pytest.raises(InputError): grad(0., 1, kind='grpo')

def test_kl_is_weighted_and_pulls_towards_the_reference():
    x = torch.tensor([-1.], dtype=torch.float64, requires_grad=True)
    loss, m = policy_loss(x, [-1.], [0.], [1.], [.5], ref_E=[-2.], kl=.1); loss.backward()
    k3 = np.exp(-1) - (-1) - 1
    assert np.isclose(loss.item(), .5 * .1 * k3) and np.isclose(m['kl_ref'], k3) and x.grad > 0

def test_R50_quantiles_are_reported():
    x = torch.zeros(1000); x[0] = 3.
    m = policy_loss(x, np.zeros(1000), np.ones(1000), np.ones(1000), np.ones(1000))[1]
    assert m['ratio_p50'] == 1 and m['ratio_max'] > 20 and m['ratio_p99'] == 1

# -- tree-GAE -----------------------------------------------------------------------------------------------------------------
def path_gae(v, R, gamma, lam):
    a, out = 0., []
    for i in range(len(v) - 1, -1, -1):
        a = R - v[i] if i == len(v) - 1 else gamma * v[i + 1] - v[i] + gamma * lam * a
        out.append(a)
    return out[::-1]

@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(1., 1.), (.9, .5), (1., .95), (.7, 0.)]))
def test_tree_gae_is_the_mean_over_paths(seed, gl):
    r = np.random.default_rng(seed); T = int(r.integers(2, 25)); gamma, lam = gl
    parent = np.array([-1] + [int(r.integers(max(0, i - 3), i)) for i in range(1, T)]); train = r.random(T) < .6; train[0] = False
    V = np.where(train, r.random(T), np.nan); R = float(r.random())
    adv, ret = tree_gae(V, parent, train, R, gamma=gamma, lam=lam)
    per = {t: [] for t in range(T)}
    line = lambda t: ([] if parent[t] < 0 else line(parent[t])) + [t]
    paths = {t: [p for p in line(t) if train[p]] for t in range(T) if train[t]}
    ends = [t for t in paths if not any(t in q[:-1] for q in paths.values())]
    for e in ends:
        for p, a in zip(paths[e], path_gae(V[paths[e]], R, gamma, lam)): per[p].append(a)
    for t in range(T):
        assert np.isclose(adv[t], np.mean(per[t]) if train[t] else 0, atol=1e-12) and np.isclose(ret[t], adv[t] + V[t] if train[t] else 0)
        if gl == (1., 1.) and train[t]: assert np.isclose(adv[t], R - V[t])

def test_tree_gae_refuses_what_it_cannot_use():
    with pytest.raises(DataError): tree_gae([0., np.nan], [-1, 0], [True, True], 1.)
    with pytest.raises(InputError): tree_gae([0., 0.], [1, -1], [True, True], 1.)
    assert [x.tolist() for x in tree_gae([], [], [], 1.)] == [[], []] and tree_gae([.5], [-1], [False], 1.)[0].tolist() == [0] and tree_gae([.5], [-1], [True], 1.)[0].tolist() == [.5]

def test_tree_gae_is_no_loop_over_tokens():
    "a chain of 200,000 tokens, and a star of 2,000 branches: fractions of a second"
    import time
    n = 200_000; r = np.random.default_rng(0); parent = np.arange(-1, n - 1); parent[100:n:100] = 49; train = r.random(n) < .5; V = r.random(n)
    t = time.process_time(); adv, ret = tree_gae(V, parent, train, 1., gamma=.99, lam=.95); took = time.process_time() - t
    assert took < 1.5 and np.isfinite(adv).all()
    line = [i for i in range(50) if train[i]] + [i for i in range(n - 100, n) if train[i]]; g = path_gae(V[line], 1., .99, .95); k = sum(train[:50])
    assert np.allclose(adv[line[k:]], g[k:])

# -- the critic -----------------------------------------------------------------------------------------------------------------
def test_explained_variance():
    assert explained_variance([0, 1], [0, 1]) == 1 and explained_variance([.5, .5], [0, 1]) == 0 and np.isclose(explained_variance([1, 0], [0, 1]), -3) and np.isnan(explained_variance([0, 1], [1, 1])) and np.isnan(explained_variance([], []))
    assert explained_variance([5, 6], [0, 1]) == 1                                                             # a constant error is not seen
    assert np.isclose(explained_variance([.1, .4, .4, .9], [0, 1, 1, 0]), explained_variance([.1, .4, .9], [0, 1, 0], [1, 2, 1]))
    assert explained_variance([.2, 9., .8], [0, 7., 1], [1, 0, 1]) == explained_variance([.2, .8], [0, 1])

def test_whitening_is_masked_and_of_the_whole_step():
    adv, on = np.array([1., 2, 3, 100, np.nan]), np.array([True] * 3 + [False] * 2); w = whiten(adv, on)
    assert np.allclose(w[:3], np.array([-1, 0, 1]) * 1.5 ** .5, atol=1e-5) and (w[3:] == 0).all()
    assert whiten([.1] * 3, [True] * 3).tolist() == [0] * 3 and whiten([1.], [False]).tolist() == [0] and len(whiten([], [])) == 0

# -- values -------------------------------------------------------------------------------------------------------------------
def test_value_loss_by_hand():
    v = torch.tensor([.5, 2., float('nan')], dtype=torch.float64, requires_grad=True)
    loss, m = value_loss(v, [1., 1., 0.], [1., .5, 0.]); loss.backward()
    assert np.isclose(loss.item(), .5 * .25 + .25) and v.grad.tolist() == [-.5, .5, 0] and m['n'] == 2
    loss, m = value_loss(v[:2], [1., 1.], [1., .5], old_E=[.5, .5], clip=.2)
    assert np.isclose(loss.item(), .5 * .25 + .25) and m['clip_frac'] == 0
    loss, m = value_loss(torch.tensor([1.]), [1.], [1.], old_E=[0.], clip=.2)
    assert np.isclose(loss.item(), .5 * .64) and m['clip_frac'] == 1
    assert value_loss(torch.tensor([0., 1.]), [0., 1.], [1., 1.])[1]['explained_variance'] == 1
    y = torch.tensor([1.], requires_grad=True); loss, m = value_loss(y, [0.], [0.]); loss.backward(); assert loss == 0 and y.grad == 0
    with pytest.raises(InputError): value_loss(v[:1], [1.], [1.], clip=.2)

# ---- numbers without a meaning

E0 = np.zeros(1)
def loss1(**kw): return policy_loss(torch.zeros(1, requires_grad=True), E0, E0 + 1, E0 + 1, E0 + 1, ref_E=E0, entropy_E=torch.ones(1), **kw)
NAN, INF = float('nan'), float('inf')

@pytest.mark.parametrize('f,kw', [
    *[(lambda mode, cap: is_weights([0.], [0.], [0], mode=mode, cap=cap), dict(mode=m, cap=c)) for m in ('token_tis', 'seq_tis', 'mis', 'veto') for c in (NAN, 0., -1., .5)],
    *[(loss1, dict([kw])) for kw in (('clip', (NAN, .2)), ('clip', (.2, -.1)), ('clip', (.2,)), ('dual_clip', NAN), ('dual_clip', .5), ('kl', NAN), ('kl', -1.), ('kl', INF), ('entropy', NAN), ('entropy', -INF))],
    *[(lambda clip: value_loss(torch.zeros(1), E0, E0 + 1, old_E=E0, clip=clip), dict(clip=c)) for c in (NAN, -.1)],
    *[(lambda **kw: tree_gae(E0, [-1], [True], **{'reward': 1., **kw}), dict([kw])) for kw in (('gamma', NAN), ('gamma', 1.5), ('lam', -.1), ('lam', INF), ('reward', NAN), ('reward', 1e200))],
    *[(lambda kind, **kw: advantages(kind, [], [], [], harness_R=[], values_T=np.zeros(0), **kw), kw) for kw in (dict(kind='ppo', gamma=2.), dict(kind='ppo', lam=NAN), dict(kind='gigpo', omega=INF), dict(kind='gigpo', step_discount=1.1), dict(kind='grpo', call_discount=NAN), dict(kind='rloo', call_discount=0.))],
    *[(lambda n: grpo_advantages([1, 0], [0, 0], unit='sample', samples_R=[n, 1]), dict(n=n)) for n in (NAN, INF, -1.)],
    *[(lambda w: loss_coef([True], [0], [0], [0], [w]), dict(w=w)) for w in (NAN, INF, -1.)]])
def test_an_option_without_a_meaning_is_refused(f, kw):
    with pytest.raises(InputError): f(**kw)

def test_limits_that_have_a_meaning_stay():
    assert is_weights([3.], [0.], [0], cap=INF)[0] == pytest.approx(np.exp(3)) and is_weights([3.], [0.], [0], mode='mis', cap=INF)[0] > 20
    assert loss1(clip=(INF, INF), dual_clip=None, kl=0)[0].isfinite() and tree_gae(E0, [-1], [True], 1., gamma=0, lam=0)[0] == 1 and loss_coef([False], [0], [0], [0], [NAN]) == 0

@pytest.mark.parametrize('x', [1e16, -1e151, 1e300])
def test_rewards_whose_squares_overflow_are_refused(x):
    for f in (lambda r: grpo_advantages(r, [0, 0]), lambda r: rloo_advantages(r, [0, 0]), lambda r: reinforce_pp_advantages(r, [0, 0], ['h', 'h']), lambda r: without_signal(r, [0, 0])):
        with pytest.raises(InputError, match='a reward is'): f([x, 0.])
    a, _ = grpo_advantages([1e15, -1e15, None], [0]*3); assert a[:2] == pytest.approx([1, -1]) and np.isfinite(np.float32(1e15)**2)
