"Critic, LoRA, number formats and layouts: what is trained, with what, and that each of them resumes bit for bit."
import copy, json
from dataclasses import replace
import numpy as np, pytest, torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from clawlab.records import InputError
from clawlab.learn import train as T
from clawlab.learn.tree import build_tree
from clawlab.learn.forest import values
from clawlab.learn.steps import LAYOUTS, OPENFORGE, lay_out, make_mini, prepare, rl_mini
from clawlab.learn.weights import Adam, critic_of, lora
from clawlab.learn.train import NotFinite, Trainer
from test_train import adv_R, call, close, gradients, model_, play, random_rollouts, rollout, same

def ppo(seed=0, **kw): return Trainer(model_(seed), **{**dict(kind='ppo', lr=2e-3, pretrain=0), **kw})

def strip(ms): return json.loads(json.dumps([{k: v for k, v in m.items() if k != 'seconds'} for m in ms]))

# ---- the critic

@pytest.mark.parametrize('make', [model_, lambda s=0: LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False))])
def test_critic_starts_as_the_policy_and_says_zero(make):
    model = make(); rng = torch.get_rng_state(); critic = critic_of(model)
    assert torch.equal(rng, torch.get_rng_state()), 'making a critic must not shift the random numbers of a run'
    mine = dict(critic.named_parameters())
    assert all(torch.equal(p, mine[n]) for n, p in model.named_parameters() if n.startswith('model.')) and not critic.training
    m = make_mini([build_tree(r.calls) for r in random_rollouts(model_(), 1)], 4096)
    assert all((values(critic, f) == 0).all() for f in m.forests)

def test_value_is_of_the_state_before_the_token():
    "Per path, by hand: the critic's output at the parent position."
    tr = ppo(); rs = random_rollouts(tr.model, 1)
    with torch.no_grad(): tr.critic.score.weight.normal_(); tr.critic.score.bias.fill_(.3)
    m = make_mini([build_tree(r.calls) for r in rs], 4096); got = m.split(tr.value(m))
    for r, v in zip(rs, got):
        want = []
        for c in r.calls:
            with torch.no_grad(): x = tr.critic(torch.tensor(np.concatenate([c.prompt_ids, c.output_ids]))[None]).logits[0, :, 0]
            want.append(x[len(c.prompt_ids) - 1:-1].numpy())
        assert np.allclose(v, np.concatenate(want), atol=1e-5)

def test_advantage_is_reward_less_value_and_every_rollout_counts():
    "gamma = lambda = 1 (ClawGym II); groups without variance have signal too."
    tr = ppo(epochs=1, minibatches=1); rs = [replace(r, reward=1.) for r in random_rollouts(tr.model, 2)]
    with torch.no_grad(): tr.critic.score.weight.normal_()
    s = prepare(rs, kind='ppo'); assert s.signal_R.all() and len(s.rollouts) == 12
    m = rl_mini(s, np.arange(12), 4096, 'rollout'); tr._judge([m])
    assert np.allclose(m.adv_E, 1 - m.value_E, atol=1e-6) and np.allclose(m.return_E, 1) and m.coef_E.sum() == pytest.approx(1)

def test_whitened_advantages():
    tr = ppo(switches=dict(whiten_adv=True)); ms = [rl_mini(prepare(random_rollouts(tr.model, k), kind='ppo'), np.arange(12), 4096, 'rollout') for k in range(2)]; tr._judge(ms)
    a = np.concatenate([m.adv_E for m in ms]); assert abs(a.mean()) < 1e-9 and a.std() == pytest.approx(1, abs=1e-4)

def test_value_gradient_is_the_textbook_one():
    tr = ppo(epochs=1, minibatches=1); rs = random_rollouts(tr.model, 3); got = []; tr.max_norm = 1e9
    with torch.no_grad(): tr.critic.score.weight.normal_()
    other = copy.deepcopy(tr.critic)
    tr.critic_opt.adam.step = lambda: got.append([p.grad.clone() for p in tr.critic.parameters()]); tr.rl_step(rs)
    loss = 0
    for r in rs:
        v = [other(torch.tensor(np.concatenate([c.prompt_ids, c.output_ids]))[None]).logits[0, len(c.prompt_ids) - 1:-1, 0] for c in r.calls]
        loss = loss + ((torch.cat(v) - r.reward)**2).mean()/2/len(rs)
    loss.backward(); assert close(got[0], [p.grad for p in other.parameters()], 1e-4)

def test_pretraining_leaves_the_policy_alone_until_the_critic_explains_something():
    tr = ppo(pretrain=20); w0, seen = copy.deepcopy(tr.weights()), []
    for k in range(8):
        m = tr.rl_step(random_rollouts(tr.model, 0)); seen.append(m['critic'])   # one batch again and again: explained soon
        if not m['critic']['pretraining']: break
        assert m['updates'] == 0 and 'ratio' not in m and same(w0, tr.weights())
    assert seen[0]['explained_variance'] == 0 and 1 <= len(seen) - 1 == tr.pretrained <= 6 and seen[-1]['explained_variance'] > 0 and m['updates'] == 4 and not same(w0, tr.weights())

def test_pretraining_ends_after_so_many_batches():
    tr = ppo(pretrain=3, critic_lr=0.)
    assert [tr.rl_step(random_rollouts(tr.model, k))['updates'] for k in range(5)] == [0, 0, 0, 4, 4]

def test_pretraining_is_over_once_a_batch_was_explained(monkeypatch):
    "returns that do not vary explain nothing; a later batch that is explained badly freezes nobody again"
    said = iter([float('nan'), -1., 0., .1, -1.]); monkeypatch.setattr(T, 'explained_variance', lambda *a: next(said)); tr = ppo(pretrain=20)
    assert [tr.rl_step(random_rollouts(tr.model, k))['updates'] for k in range(5)] == [0, 0, 0, 4, 4] and tr.pretrained == 3

def test_R44_ppo_split_into_forests_changes_nothing():
    rs = random_rollouts(model_(), 1)
    grad = lambda b: gradients(ppo(token_budget=b, minibatches=1, epochs=1), lambda t: t.rl_step(rs))
    assert close(grad(100_000), grad(24))

def test_clipped_value_loss_is_reached():
    a, b = (ppo(value_clip=c, critic_lr=1e-2, epochs=4) for c in (None, 1e-3)); rs = random_rollouts(a.model, 4)
    for t in (a, b): t.rl_step(rs)
    assert not same(a.critic.state_dict(), b.critic.state_dict())

@pytest.mark.parametrize('poison', ['values', 'policy'])
def test_nan_stops_ppo_with_the_batch(tmp_path, monkeypatch, poison):
    tr = ppo(); tr.dump = tmp_path; rs = random_rollouts(tr.model, 1); w0, c0 = copy.deepcopy(tr.weights()), copy.deepcopy(tr.critic.state_dict())
    if poison == 'values': monkeypatch.setattr(T, 'values', lambda *a, **k: values(*a, **k)*float('nan'))
    else: tr.params[0].register_hook(lambda g: g*float('nan'))
    with pytest.raises(NotFinite, match='not finite'): tr.rl_step(rs)
    assert same(w0, tr.weights()) and same(c0, tr.critic.state_dict()) and tr.step == 0
    z = np.load(next(tmp_path.glob('not-finite-step0001.npz'))); assert {'value_E', 'reward_S', 'old_E'} <= set(z)

def test_toy_ppo_learns():
    tr, curve = Trainer(model_(0, hidden=64), kind='ppo', lr=1e-3), []
    for s in range(46): curve.append(tr.rl_step(play(tr.model, s))['reward'])
    assert np.mean(curve[:3]) < .15 and np.mean(curve[-5:]) > .5, curve
    assert 0 < tr.pretrained < 20

# ---- LoRA and number formats

def test_lora_trains_its_additions_only_and_hands_over_plain_weights():
    model = lora(model_(), rank=4); before = {k: v.clone() for k, v in model.state_dict().items()}
    tr = Trainer(model, lr=1e-2); tr.rl_step(random_rollouts(model, 1))
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed and all(k.endswith(('lora_A', 'lora_B')) for k in changed) and len(tr.params) == 2*14
    plain = model_(); plain.load_state_dict(tr.weights()); x = torch.randint(0, 40, (1, 9))
    with torch.no_grad(): assert torch.allclose(plain(x).logits, model(x).logits, atol=1e-5) and not torch.equal(plain(x).logits, model_()(x).logits)
    m = tr.rl_step(random_rollouts(model, 2)); assert m['kl'] > 0, 'the reference is the policy without additions'
    with pytest.raises(InputError, match='rank'): lora(model_(), rank=0)

def test_the_reference_takes_no_more_room_than_what_is_trained():
    tr = Trainer(lora(model_(), rank=2)); tr.set_reference()
    assert sum(r.numel() for r in tr.reference) == sum(p.numel() for p in tr.params) < sum(p.numel() for p in tr.model.parameters())/3

def test_masters_keep_updates_that_bfloat16_cannot():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)); opt = Adam([p], 0.)
    for k in range(50): opt.zero(); p.sum().backward(); opt.collect(); opt.step(1e-4)
    assert (p < 1).all() and abs(float(opt.master[0][0]) - .995) < 1e-4 and p.dtype == torch.bfloat16

def test_bfloat16_gradients_of_forests_add_up_in_float32():
    rs = random_rollouts(model_(), 1); got = []
    for dtype in ('float32', 'bfloat16'):
        tr = Trainer(model_(), dtype=dtype, token_budget=24, minibatches=1, epochs=1, max_norm=1e9); g = []
        tr.opt.adam.step = lambda: g.append(torch.cat([p.grad.flatten() for p in tr.opt.master])); tr.rl_step(rs)
        assert g[0].dtype == torch.float32; got.append(g[0])
    a, b = got; assert float((a*b).sum()/a.norm()/b.norm()) > .97

def test_bfloat16_learns_what_float32_learns():
    trees = [build_tree(r.calls) for r in random_rollouts(model_(), 1)]; end = []
    for dtype in ('float32', 'bfloat16'):
        tr = Trainer(model_(), dtype=dtype, lr=3e-3); end.append([tr.sft_step(trees)['nll'] for _ in range(15)])
    assert end[0][-1] < end[0][0] - .5 and abs(end[0][-1] - end[1][-1]) < .15

CASES = dict(ppo=dict(kind='ppo', pretrain=1), lora=dict(), ppo_lora=dict(kind='ppo', pretrain=1), bfloat16=dict(dtype='bfloat16'), ppo_bfloat16=dict(kind='ppo', pretrain=0, dtype='bfloat16'), lora_bfloat16=dict(dtype='bfloat16'), ppo_lora_bfloat16=dict(kind='ppo', pretrain=1, dtype='bfloat16'), per_call=dict(OPENFORGE), longest=dict(layout='longest_path'), entropy=dict(entropy=.01), cispo=dict(loss='cispo'))

@pytest.mark.parametrize('case', CASES)
def test_resume_is_bit_exact_for_every_kind(tmp_path, case):
    make = lambda: (lora(model_(3), rank=4) if 'lora' in case else model_(3))
    a = Trainer(make(), lr=2e-3, **CASES[case]); player = model_(3); batches = [random_rollouts(player, k, groups=2, n=3) for k in range(4)]
    for b in batches[:2]: a.rl_step(b)
    a.save(tmp_path/'c'); torch.manual_seed(99)
    c = Trainer(make() if 'lora' in case else model_(77), lr=2e-3, **CASES[case]); c.load(tmp_path/'c')
    ma, mc = ([t.rl_step(b) for b in batches[2:]] for t in (a, c))
    assert strip(ma) == strip(mc) and same(a.weights(), c.weights()) and ma[-1]['updates']
    if a.critic: assert same(a.critic.state_dict(), c.critic.state_dict()) and (a.pretrained, a.ready) == (c.pretrained, c.ready)
    for x, y in zip(a.opt.master, c.opt.master): assert torch.equal(x, y)

def test_a_critic_that_is_not_finite_stops_the_step_before_the_policy(tmp_path):
    tr = ppo(); tr.dump = tmp_path; w0 = {k: v.clone() for k, v in tr.weights().items()}
    with torch.no_grad(): next(tr.critic.parameters()).fill_(float('nan'))
    with pytest.raises(NotFinite, match='the weights are as they were'): tr.rl_step(random_rollouts(model_(3), 1, groups=2, n=3))
    assert same(w0, tr.weights()) and tr.updates == 0 and list(tmp_path.glob('not-finite-step*.npz'))

def test_sft_with_lora_resumes_and_its_checkpoint_is_a_plain_model(tmp_path):
    trees = [build_tree(r.calls) for r in random_rollouts(model_(), 1)]
    a = Trainer(lora(model_(), rank=4), lr=1e-2); a.sft_step(trees); a.save(tmp_path/'c')
    b = Trainer(lora(model_(), rank=4, seed=5), lr=1e-2); b.load(tmp_path/'c'); assert a.sft_step(trees)['nll'] == b.sft_step(trees)['nll'] and same(a.weights(), b.weights())
    m = AutoModelForCausalLM.from_pretrained(tmp_path/'c'); assert not any('lora' in k for k in m.state_dict())
    again = Trainer(lora(model_(), rank=4)); again.load(tmp_path/'c'); assert same(again.weights(), m.state_dict())
    with pytest.raises(InputError, match='with LoRA'): Trainer(model_()).load(tmp_path/'c')
    with pytest.raises(InputError, match='other weights'): Trainer(lora(model_(1), rank=4)).load(tmp_path/'c')
    Trainer(model_()).save(tmp_path/'d')
    with pytest.raises(InputError, match='without LoRA'): a.load(tmp_path/'d')
    with pytest.raises(InputError, match='no critic'): ppo().load(tmp_path/'d')

def test_another_number_format_cannot_be_resumed(tmp_path):
    t = Trainer(model_(), dtype='bfloat16'); t.save(tmp_path/'c')
    with pytest.raises(InputError, match='number format'): Trainer(model_()).load(tmp_path/'c')
    with pytest.raises(InputError, match='number format'): Trainer(model_(), dtype='float8')

# ---- layouts

def forked(rid, reward, seed=0):
    "A line of two turns, a fork after the first (compaction), and a retry of which the first attempt came to nothing."
    g = np.random.default_rng(seed).integers(8, 40, 30).tolist()
    a = call(rid, 0, [1, 2, 3], g[:4]); b = call(rid, 1, [1, 2, 3, *g[:4], 5], g[4:7], parent=0)
    c = call(rid, 2, [1, 2, 6, 6], g[7:9], parent=1); d = call(rid, 3, [1, 2, 6, 6, *g[7:9], 5, 5, 5, 5, 5], g[9:12], parent=2)
    lost = call(rid, 4, [1, 2, 6, 6], g[12:15], delivered=('no',))
    return rollout(rid, reward, (a, b, c, d, lost))

def test_layouts_of_one_rollout():
    t = build_tree(forked('a', 1.).calls); size = {k: [int(x.train_T.sum()) for x in lay_out(t, k)] for k in LAYOUTS}
    assert size == dict(tree=[12], per_call=[4, 3, 2, 3], longest_path=[5])
    for k in LAYOUTS: assert {tuple(x.ids_T[x.train_T][:2]) for x in lay_out(t, k)}, k
    assert lay_out(build_tree([]), 'per_call') == lay_out(build_tree([]), 'longest_path') == []
    with pytest.raises(InputError, match='layout'): lay_out(t, 'flat')

def test_per_call_trains_a_shared_position_once_for_each_call():
    calls = [call('a', 0, [1], [20, 21, 22, 23]), call('a', 1, [1, 20, 21], [22, 26])]
    n = {k: sum(int(x.train_T.sum()) for x in lay_out(build_tree(calls), k)) for k in LAYOUTS}
    assert n == dict(tree=5, per_call=6, longest_path=4)

def test_every_layout_weighs_each_rollout_alike_and_openforge_each_call():
    rs = [forked('a', 1., 1), forked('b', 0., 2), rollout('c', .5)]
    for k in LAYOUTS:
        s = prepare(rs, layout=k); m = rl_mini(s, np.arange(3), 4096, 'rollout'); w = {}
        for t, c in zip(m.trees, m.split(m.coef_E)): w[t.rollout_id] = w.get(t.rollout_id, 0) + c.sum()
        assert w == pytest.approx(dict.fromkeys('abc', 1/3)), k
    s = prepare(rs, layout='per_call', unit='sample'); m = rl_mini(s, np.arange(3), 4096, 'sequence')
    assert [c.sum() for c in m.split(m.coef_E)] == pytest.approx([1/9]*9)
    mean = (4*1 + 4*0 + .5)/9; assert (adv_R(s)[0] > 0 > adv_R(s)[1]) and np.isclose(adv_R(s)[2]/adv_R(s)[0], (.5 - mean)/(1 - mean))

def test_without_forks_all_layouts_are_one():
    rs = random_rollouts(model_(), 1)
    g = {k: gradients(Trainer(model_(), layout=k, minibatches=1, epochs=1), lambda t: t.rl_step(rs)) for k in LAYOUTS}
    assert close(g['tree'], g['per_call']) and close(g['tree'], g['longest_path'])

def test_leaves_and_dead_share_are_reported():
    m = prepare([forked('a', 1.), rollout('b', 0.)]).metrics
    assert m['paths'] == 1.5 and m['dead'] == pytest.approx(1/6) and m['fates'] == dict(accepted=5, abandoned=1)

def test_staleness_is_the_age_of_what_is_trained():
    model = model_(); rs = [replace(r, calls=tuple(replace(c, versions=np.full(len(c.versions), 3 + k)) for k, c in enumerate(r.calls))) for r in random_rollouts(model, 1)]
    assert Trainer(model).rl_step(rs, version=5)['staleness'] == dict(mean=1.5, max=2)

# ---- estimators by name

@pytest.mark.parametrize('kind,switches', [('rloo', {}), ('reinforce++', {}), ('gigpo', dict(omega=.5)), ('grpo', dict(call_discount=.5)), ('grpo', dict(std_norm=False)), ('ppo', dict(gamma=.9, lam=.8))])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_every_estimator_trains_in_every_layout(kind, switches, layout):
    tr = Trainer(model_(), kind=kind, switches=switches, layout=layout, pretrain=0, correction='none', lr=1e-3); w0 = copy.deepcopy(tr.weights())
    m = tr.rl_step([forked(f'{g}{i}', float(i), 10*g + i) for g in range(2) for i in range(3)])
    assert m['updates'] == 2 and np.isfinite(m['loss']) and not same(w0, tr.weights())

def test_per_call_keeps_the_advantage_of_its_call():
    "The earlier call is further from the reward; alone or in the tree it has the same number."
    rs = [forked('a', 1., 1), forked('b', 0., 2)]
    flat = {}
    for k in ('tree', 'per_call'):
        s = prepare(rs, layout=k, call_discount=.5); flat[k] = [sorted({round(float(x), 9) for t, a, i in zip(s.trees, s.adv_S, s.of_S) if i == r for x in a[t.train_T]}) for r in (0, 1)]
    assert flat['tree'] == flat['per_call'] and len(flat['tree'][0]) == 4

def test_unknown_switches_are_one_clear_line():
    for kw in (dict(kind='grpo', switches=dict(lam=.9)), dict(kind='ppo', switches=dict(values_T=1)), dict(kind='reinforce')):
        with pytest.raises(InputError): Trainer(model_(), **kw)

def test_timeouts_by_rule():
    rs = [rollout('a', 1.), rollout('b', .5, outcome='timeout'), rollout('c', 0.)]
    assert [prepare(rs, timeout=k).metrics['reward'] for k in ('score', 'drop', 'zero')] == pytest.approx([.5, .5, 1/3]) and len(prepare(rs, timeout='drop').rollouts) == 2
