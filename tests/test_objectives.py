"""learn.objectives: worked examples, named faults, and properties against slow, obvious versions."""
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from clawlab.records import Call, DataError, InputError
from clawlab.learn.tree import build_tree
from clawlab.learn.objectives import grpo_advantages, loss_coef, is_weights, policy_loss, tree_gae, value_loss

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
