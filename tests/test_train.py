"Data and trainer: what is kept, what is refused, what a step computes, and that a stopped run goes on as if nothing had happened."
import asyncio, copy, hashlib, json, threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
import aiohttp, numpy as np, pytest, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from clawlab.capture.chat import Template
from clawlab.capture.engines.base import Generation
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.records import Call, DataError, InputError, Rollout, Task
from clawlab.learn.tree import build_tree
from clawlab.learn import checkpoints as C, train as T
from clawlab.learn.data import TaskSampler, batch_at, no_signal, prefix_share, sft_data
from clawlab.learn.steps import deal, make_mini, prepare, rl_mini
from clawlab.learn.checkpoints import Log, Run
from clawlab.learn.train import NotFinite, Trainer
from clawlab.learn.loops import expect_signal, rl, sft, shuffle_rewards

VOCAB = 40

def model_(seed=0, hidden=32, layers=2, heads=4):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, hidden_size=hidden, intermediate_size=3*hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=2, head_dim=hidden//heads, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None))

USED = dict(temperature=1.0, top_p=1.0, top_k=0)

def call(rid, seq, prompt, out, logp=None, version=0, parent=None, **kw):
    n = len(out)
    return Call(f'{rid}.{seq}', rid, seq, prompt, out, [-1.0]*n if logp is None else logp, [version]*n if np.isscalar(version) else version,
                parent_id=f'{rid}.{parent}' if parent is not None else None, **{**dict(delivered=('yes',), used=USED), **kw})

def rollout(rid, reward, calls=None, group='g', **kw):
    calls = calls if calls is not None else (call(rid, 0, [1, 2, 3], [4, 5]),)
    return Rollout(rid, kw.pop('task_id', 't-' + group), kw.pop('harness', 'h'), group=group, outcome=kw.pop('outcome', 'ok' if reward is not None else 'infra_fail'), reward=reward, calls=tuple(calls), **kw)

def random_rollouts(model, seed, groups=3, n=4, turns=2, length=5):
    "Rollouts of random tokens with the model's own log-probs: the right shape, no play."
    rng, out = np.random.default_rng(seed), []
    for g in range(groups):
        task = rng.integers(8, VOCAB, 4)
        for i in range(n):
            ids, calls, rid = np.concatenate([[1, 2, 3], task]), [], f's{seed}g{g}.{i}'
            for k in range(turns):
                o = rng.integers(8, VOCAB, length)
                with torch.no_grad(): lp = torch.log_softmax(model(torch.tensor(np.concatenate([ids, o]))[None]).logits[0].float(), -1)
                calls.append(call(rid, k, ids, o, lp[len(ids) - 1:-1].gather(1, torch.tensor(o)[:, None])[:, 0].numpy(), parent=k - 1 if k else None))
                ids = np.concatenate([ids, o, rng.integers(8, VOCAB, 3)])
            out.append(rollout(rid, float(rng.integers(0, 3))/2 if i else float(g > 0), calls, f's{seed}g{g}'))
    return out

def adv_R(s):
    "One advantage per rollout, where all its tokens have the same."
    each = [{float(a) for k, (t, a_T) in enumerate(zip(s.trees, s.adv_S)) if s.of_S[k] == i for a in a_T[t.train_T]} for i in range(len(s.rollouts))]
    assert all(len(x) <= 1 for x in each); return np.array([next(iter(x), 0.) for x in each])

def same(a, b): return all(torch.equal(v, b[k]) for k, v in a.items())

# ---- data

def teacher(rid, task='t1', split='train', reward=1.0, calls=None, harness='h'):
    return Rollout(rid, task, harness, split=split, outcome='ok' if reward is not None else 'grader_fail', reward=reward, calls=tuple(calls or (call(rid, 0, [1, 2, 3, 9], [4, 5], [np.nan]*2, -1),)))

def test_data_stages_count():
    side = call('d', 1, [7, 7], [8], [np.nan], -1, role='side')
    rs = [teacher('a'), teacher('b'), teacher('c', reward=.5), teacher('d', 't2', calls=(call('d', 0, [1, 2, 3, 8], [4], [np.nan], -1), side)), teacher('e', reward=None), teacher('f', calls=(replace(side, rollout_id='f'),))]
    d = sft_data(rs)
    assert [(s['stage'], s['kept'], s['dropped']) for s in d.card['stages']] == [('read', 6, 0), ('graded', 5, 1), ('score', 4, 1), ('tree', 3, 1), ('duplicates', 2, 1)]
    assert d.card['splits']['train']['trained_tokens'] == 3 == sum(len(o) for _, o in d.pairs()) and d.card['shared_prefix'] == {'h': 3}
    assert sft_data(rs, min_score=None, dedup=False).card['stages'][-1]['kept'] == 4
    assert json.loads(json.dumps(d.card)) == d.card

def test_data_refuses_test_tasks_and_overlapping_splits():
    with pytest.raises(InputError, match='test task'): sft_data([teacher('a', split='test')])
    with pytest.raises(InputError, match='disjoint'): sft_data([teacher('a'), teacher('b', split='validation')])

def test_heldout_is_by_task():
    rs = [teacher(f'{t}-{i}', f't{t}', calls=(call(f'{t}-{i}', 0, [1, 2, t + 3], [i, t], [np.nan]*2, -1),)) for t in range(30) for i in range(2)]
    held = lambda x: {e.rollout.task_id for e in sft_data(x, heldout=.3).splits['heldout']}
    assert len(held(rs)) == 9 and held(rs) == held(rs[::-1]) and len(held(rs[:4])) == 1
    d = sft_data(rs, heldout=.3)
    assert not held(rs) & {e.rollout.task_id for e in d.splits['train']}

def test_a_cut_example_trains_the_same_tokens():
    rs = [teacher(f'r{t}', f't{t}', calls=(call(f'r{t}', 0, [1, 2, 3, 4, t], [t, 9], [np.nan]*2, -1), call(f'r{t}', 1, [1, 2, 3, 4, t, t, 9, 7], [6], [np.nan], -1, parent=0))) for t in (10, 11)]
    for e in sft_data(rs).splits['train']:
        assert e.prefix == 4
        for k in range(5): t = e.tree(k); assert len(t.ids_T) == 9 - k and t.ids_T[t.train_T].tolist() == [e.rollout.calls[0].output_ids[0], 9, 6]
        with pytest.raises(InputError): e.tree(5)

def test_batches_cover_and_depend_on_the_step_alone():
    xs = list(range(7))
    seen = Counter(x for s in range(7) for x in batch_at(xs, 3, s, seed=2)); assert set(seen.values()) == {3}
    assert batch_at(xs, 3, 5, seed=2) == batch_at(xs, 3, 5, seed=2) != batch_at(xs, 3, 5, seed=3)
    cuts = [prefix_share(s, (2, 3), 1) for s in range(7)]
    assert cuts[:2] == [1, 1] and cuts[5:] == [0, 0] and len(set(cuts[2:5])) == 3 and all(0 < c < 1 for c in cuts[2:5])

@pytest.mark.parametrize('mix', [{'a': 1}, {'a': 1, 'b': 1}, {'a': 1, 'b': 2, 'c': .5}])
def test_sampler_mix_families_and_determinism(mix):
    tasks = [Task(f'{f}{i}', f, 'train', '') for f in 'xyz' for i in range(3)]
    draws = [TaskSampler(tasks, mix, 5, seed=1).draw(s) for s in range(40)]
    assert draws == [TaskSampler(list(reversed(tasks)), mix, 5, seed=1).draw(s) for s in range(40)]
    assert draws != [TaskSampler(tasks, mix, 5, seed=2).draw(s) for s in range(40)]
    flat = [d for ds in draws for d in ds]; n = Counter(d.harness for d in flat)
    assert len({d.group for d in flat}) == 200
    for h, w in mix.items():
        assert abs(n[h] - 200*w/sum(mix.values())) <= 1
        fam = Counter(d.task.family for d in flat if d.harness == h); assert max(fam.values()) - min(fam.values()) <= 1
        task = Counter(d.task.task_id for d in flat if d.harness == h); assert max(task.values()) - min(task.values()) <= 1

def test_R54_group_too_small(capsys):
    assert no_signal([.18], 2) == pytest.approx(.70, abs=.01) and no_signal([.18], 8) == pytest.approx(.20, abs=.01)
    assert no_signal([0., 1.], 8) == 1 and '20%' in expect_signal([.18], 8)
    with pytest.raises(InputError): no_signal([1.2], 8)

# ---- what counts

def test_R6_baseline_counts_rollouts_not_rows():
    rows = lambda rid, k: [call(rid, i, [1, 2, 10 + i], [4]) for i in range(k)]
    s = prepare([rollout('a', 1., rows('a', 2)), rollout('b', 0., rows('b', 8))])
    assert np.allclose(adv_R(s), [1, -1], atol=1e-4) and s.metrics['reward'] == .5
    with pytest.raises(DataError, match='missing or repeated'): prepare([rollout('a', 1.), rollout('a', 0.)])
    with pytest.raises(DataError, match='missing or repeated'): prepare([rollout('', 1., ())])
    with pytest.raises(DataError, match='no group'): prepare([replace(rollout('a', 1.), group='')])

def test_R12_no_reward_is_not_zero():
    s = prepare([rollout('a', 1.), rollout('b', 0.), rollout('c', None), rollout('d', 0.)])
    assert [r.rollout_id for r in s.rollouts] == ['a', 'b', 'd'] and s.metrics['reward'] == pytest.approx(1/3)
    assert np.allclose(adv_R(s), [2**.5, -.5**.5, -.5**.5], atol=1e-4)
    assert s.metrics['dropped'] == {'infra_fail': 1} and s.metrics['dropped_share'] == .25 and s.metrics['warnings']

def test_R13_masked_row_leaves_the_baseline():
    rs = [rollout('a', 1.), rollout('b', .5), rollout('c', 0.), replace(rollout('d', 0.), dropped_reason='edited the tests')]
    s = prepare(rs); assert s.metrics['reward'] == .5 and adv_R(s)[1] == 0 and len(s.rollouts) == 3
    wide = [call('w', i, [1, 2, 10 + i], [4]) for i in range(4)]
    s = prepare([rollout('w', 1., wide), *rs[:3]], max_leaves=3)
    assert s.metrics['dropped'] == {'over-branching': 1} and s.metrics['reward'] == .5
    tr = Trainer(model_()); w0 = copy.deepcopy(tr.weights())
    m = tr.rl_step([replace(r, reward=None, outcome='infra_fail') for r in rs])
    assert m['updates'] == 0 and m['reward'] is None and same(w0, tr.weights())

def test_R14_near_zero_std():
    s = prepare([rollout(f'a{i}', r) for i, r in enumerate([0.] + [.35]*7)])
    assert adv_R(s)[0] == pytest.approx(-2.6457, abs=1e-4) and adv_R(s)[1] == pytest.approx(.37796, abs=1e-4)
    s = prepare([rollout(f'a{i}', float(np.float32(.1))) for i in range(7)]); assert (adv_R(s) == 0).all() and not s.signal_R.any()
    s = prepare([rollout('a', .3)]); assert adv_R(s).tolist() == [0] and s.metrics['groups_signal'] == 0

def test_R5_R7_shared_once_and_side_never():
    side = [call('a', 2 + i, [30 + i], [31], [np.nan], -1, role='side', used={}) for i in range(2)]  # NaN at a masked position stays out
    tree = build_tree([call('a', 0, [1], [20, 21, 22, 23, 24]), call('a', 1, [1, 20, 21, 22], [25, 26]), *side])
    s = prepare([rollout('a', 1., tree.calls), rollout('b', 0.)])
    m = make_mini(s.trees[:1], 4096)
    assert len(m.coef_E) == 7 and s.metrics['roles'] == {'main': 3, 'side': 2}
    loss = Trainer(model_()).rl_step([rollout('a', 1., tree.calls), rollout('b', 0.)]); assert np.isfinite(loss['loss']) and loss['entries'] == 9

def test_R3_what_was_sampled_is_trained_not_what_the_text_would_be():
    "Vocabulary a=10, b=11, ab=12: sampled [a, b]. Replayed as [a, b] it is one chain; a prompt with ab is a fork, and what was sampled is still what is trained."
    one, two = ([call('a', 0, [1], [10, 11]), call('a', 1, p, [13], parent=0, drift=1)] for p in ([1, 10, 11, 2], [1, 12, 2]))
    for calls, leaves in ((one, 1), (two, 2)):
        s = prepare([rollout('a', 1., calls), rollout('b', 0.)]); m = rl_mini(s, np.arange(2), 4096, 'rollout'); t = m.trees[0]
        assert sorted(t.ids_T[t.train_T].tolist()) == [10, 11, 13] and len(t.leaves) == leaves and t.stats['drift'] == 1

def test_R7_a_title_and_a_quota_call_are_counted_not_trained():
    side = [call('a', 3 + i, [30 + i], [31], [np.nan], -1, role='side', used=dict(max_tokens=1)) for i in range(2)]
    line = [call('a', k, [1, 2, *[x for j in range(k) for x in (20 + j, 5)]], [20 + k], parent=k - 1 if k else None) for k in range(3)]
    s = prepare([rollout('a', 1., [*line, *side]), rollout('b', 0.)])
    assert s.metrics['roles'] == {'main': 4, 'side': 2} and s.trees[0].ids_T[s.trees[0].train_T].tolist() == [20, 21, 22]

def test_groups_never_mix_pairs():
    with pytest.raises(DataError, match='mixes'): prepare([rollout('a', 1.), rollout('b', 0., harness='other')])

@pytest.mark.parametrize('bad, why', [(dict(logp=[np.nan, -1.]), 'unknown'), (dict(version=-1), 'unknown'), (dict(used={}), 'not recorded'), (dict(used=dict(temperature=0)), 'temperature 0'),
                                      (dict(used=dict(temperature=.7)), '0.7'), (dict(used=dict(temperature=1, top_p=.9)), 'top-p'), (dict(used=dict(temperature=1, top_k=5)), 'top-p'), (dict(media=((0, 1, 'ab'*32),)), 'media')])
def test_R15_refuses_replies_of_another_distribution(bad, why):
    with pytest.raises(DataError, match=why) as e: Trainer(model_()).rl_step([rollout('a', 1., (call('a', 0, [1, 2, 3], [4, 5], **bad),)), rollout('b', 0.)])
    assert 'a.0' in str(e.value)
    with pytest.raises(InputError): Trainer(model_(), temperature=0)

async def test_an_image_is_captured_and_training_refuses_it_in_one_line(tmp_path):
    "What the model read was a placeholder: it must not learn what to say to a picture that it never saw."
    line = dict(ids=[4, 5], logprobs=[-1., -1.])
    image = dict(type='image_url', image_url=dict(url='data:image/png;base64,aGk='))
    with Store.open(tmp_path/'c.db') as st:
        async with Proxy(ScriptEngine([line]), st) as p, aiohttp.ClientSession() as http:
            s = await p.open_session(rollout('a', None, ()))
            ask = dict(model='m', messages=[dict(role='user', content=[dict(type='text', text='What is it?'), image])])
            async with http.post(f'http://127.0.0.1:{p.port}{s.base_path}/v1/chat/completions', json=ask, headers={'x-api-key': s.api_key}) as r: assert r.status == 200
            await p.close_session(s.session_id)
        seen, body = st.rollout('a'), st.body(st.calls('a')[0].call_id)
    c, = seen.calls
    assert c.media == ((-1, 0, hashlib.sha256(b'hi').hexdigest()),) and b'aGk=' in body and 'aGk=' not in Template.bytes().decode(c.prompt_ids)
    seen = replace(seen, outcome='ok', reward=1.)
    for train in (lambda t: t.rl_step([seen, rollout('b', 0.)]), lambda t: t.sft_step([build_tree(seen.calls)]), lambda t: t.sft_step([e.tree() for e in sft_data([seen]).splits['train']])):
        with pytest.raises((DataError, InputError), match='media') as e: train(Trainer(model_()))
        assert '\n' not in str(e.value) and any(x in str(e.value) for x in ('rollout a ', c.call_id))

def test_R15_log_probs_are_of_the_tempered_distribution():
    model = model_(); tr = Trainer(model, temperature=.6)
    with torch.no_grad(): z = model(torch.tensor([[1, 2, 3]])).logits[0, -1].double()
    right, wrong = float(torch.log_softmax(z/.6, -1)[7]), float(torch.log_softmax(z, -1)[7]/.6)
    c = lambda lp: [call('a', 0, [1, 2, 3], [7], [lp], used=dict(temperature=.6))]
    assert tr.consistency(c(right))['max'] < 1e-5 < 1e-2 < tr.consistency(c(wrong))['max']

def test_R18_versions_of_a_call_that_spans_an_update():
    a = call('a', 0, [1, 2], [9]*128, version=[7]*57 + [8]*71)
    m = prepare([rollout('a', 1., (a,)), rollout('b', 0., (call('b', 0, [1, 2], [3], version=8),))]).metrics
    assert (m['version_min'], m['version_max']) == (7, 8)

# ---- what a step computes

def gradients(trainer, f):
    got = []
    trainer.opt.adam.step = lambda: got.append([p.grad.clone() for p in trainer.params])
    trainer.max_norm = 1e9; f(trainer)
    return got[0]

def close(a, b, tol=1e-5): return all(torch.allclose(x, y, rtol=1e-3, atol=tol*float(max(1, y.abs().max()))) for x, y in zip(a, b))

def test_R44_split_into_forests_changes_nothing():
    rs = random_rollouts(model_(), 1); grad = lambda budget: gradients(Trainer(model_(), token_budget=budget, minibatches=1, epochs=1), lambda t: t.rl_step(rs))
    one, many = grad(100_000), grad(24)
    assert close(one, many) and max(float(g.abs().max()) for g in one) > 1e-4
    trees = [build_tree(r.calls) for r in rs]
    assert close(*(gradients(Trainer(model_(), token_budget=b), lambda t: t.sft_step(trees)) for b in (100_000, 24)))

def test_sft_is_the_per_token_mean():
    model = model_(); rs = random_rollouts(model, 2); tr = Trainer(model)
    want = -np.concatenate([c.logprobs for r in rs for c in r.calls]).mean()
    assert tr.nll([build_tree(r.calls) for r in rs]) == pytest.approx(want, abs=1e-4)
    assert tr.sft_step([build_tree(r.calls) for r in rs])['nll'] == pytest.approx(want, abs=1e-4)

def test_sft_computes_no_entropies(monkeypatch):
    "whatever RL is to add to its loss"
    tr, asked, real = Trainer(model_(), entropy=.01), [], T.logprobs; rs = random_rollouts(tr.model, 2)
    monkeypatch.setattr(T, 'logprobs', lambda *a, entropy=False, **k: asked.append(entropy) or real(*a, entropy=entropy, **k))
    tr.sft_step([build_tree(r.calls) for r in rs]); assert asked and not any(asked)

def test_grpo_gradient_is_the_textbook_one():
    "First update: ratio 1, so the gradient is that of -1/N sum_i A_i mean_t logp (no KL yet), on rows."
    model = model_(); rs = random_rollouts(model, 3); s = prepare(rs)
    got = gradients(Trainer(model, minibatches=1, epochs=1), lambda t: t.rl_step(rs))
    model = model_(); loss = 0
    for r, a in zip(s.rollouts, adv_R(s)):
        lp = [torch.log_softmax(model(torch.tensor(np.concatenate([c.prompt_ids, c.output_ids]))[None]).logits[0], -1)[len(c.prompt_ids) - 1:-1].gather(1, torch.tensor(c.output_ids).long()[:, None]) for c in r.calls]
        loss = loss - a*torch.cat(lp).mean()/len(rs)
    loss.backward()
    assert close(got, [p.grad for p in model.parameters()])

@pytest.mark.parametrize('ratio,weight', [(1.5, 1.5), (.5, .5), (4., 2.)])
def test_correction_between_engine_and_trainer_reaches_the_gradient(ratio, weight):
    "An engine that was off by a constant factor: token-TIS multiplies the gradient by it, at most by 2."
    rs = random_rollouts(model_(), 3); off = [replace(r, calls=tuple(replace(c, logprobs=c.logprobs - np.float32(np.log(ratio))) for c in r.calls)) for r in rs]
    g = lambda x, **kw: gradients(Trainer(model_(), minibatches=1, epochs=1, **kw), lambda t: t.rl_step(x))
    plain = g(rs); assert max(float(p.abs().max()) for p in plain) > 0
    assert close(g(off), [weight*p for p in plain]) and close(g(off, correction='none'), plain)

def test_zero_variance_counts_in_N_and_is_skipped():
    rs = random_rollouts(model_(), 4); flat = [replace(r, reward=1.) for r in random_rollouts(model_(), 5)]
    for r in flat[:2]: flat[flat.index(r)] = replace(r, calls=())  # never sampled a token: counts all the same
    s, both = prepare(rs), prepare(rs + flat)
    assert both.metrics['groups_signal'] == s.metrics['groups_signal'] and both.metrics['groups_zero_variance'] == s.metrics['groups_zero_variance'] + 3
    for norm, k in (('rollout', 2), ('prompt', 2), ('token', 1)):
        a, b = (rl_mini(x, np.arange(len(x.rollouts)), 4096, norm) for x in (s, both))
        if norm != 'token': assert np.allclose(a.coef_E.sum(), b.coef_E.sum()*k)
        assert len(a.coef_E) == len(b.coef_E)

def test_minibatches_are_whole_groups_with_equal_signal():
    rs = [rollout(f'{g}.{i}', float(i % 2 if g % 3 == 0 else 1), group=f'g{g:02d}') for g in range(12) for i in range(4)]
    s = prepare(rs)
    for seed in range(5):
        parts = deal(s, 2, np.random.default_rng(seed))
        assert sorted(np.concatenate(parts).tolist()) == list(range(48)) and [len(p) for p in parts] == [24, 24]
        groups = [{s.rollouts[i].group for i in p} for p in parts]; assert not groups[0] & groups[1]
        assert [sum(s.signal_R[i] for i in p) for p in parts] == [8, 8]

def test_R50_metrics_show_quantiles_and_consistency():
    model = model_(); m = Trainer(model, lr=1e-3).rl_step(random_rollouts(model, 6))
    assert m['ratio']['min'] <= m['ratio']['p01'] <= m['ratio']['p50'] <= m['ratio']['p99'] <= m['ratio']['max'] and m['ratio']['min'] < 1 < m['ratio']['max']
    assert m['engine_trainer']['max'] < 1e-4 and m['engine_trainer']['p95'] <= m['engine_trainer']['max'] and m['kl'] == pytest.approx(0, abs=1e-6)
    assert m['trained'] == m['sampled'] - m['shared'] == 3*4*2*5 and m['lineage_leaves'] == 1 and m['forest_tokens'] < m['flat_tokens']
    assert set(m['seconds']) == {'tree', 'pack', 'old', 'ref', 'update'} and m['reward_by_harness'].keys() == {'h'}
    assert json.loads(json.dumps(m)) == m

def test_first_update_has_ratio_one():
    model = model_(); rs = random_rollouts(model, 7); m = Trainer(model, epochs=1, minibatches=1).rl_step(rs)
    assert m['ratio']['min'] == m['ratio']['max'] == 1 and m['clip_fraction'] == 0

def test_kl_is_measured_against_the_first_policy():
    model = model_(); tr = Trainer(model, lr=1e-3)
    kl = [tr.rl_step(random_rollouts(model, 8 + k))['kl'] for k in range(3)]
    assert abs(kl[0]) < 1e-6 < kl[1] < kl[2]
    a = gradients(Trainer(model_(), kl=0.), lambda t: t.rl_step(random_rollouts(t.model, 8))); assert len(a)

def test_a_row_stays_json_however_far_the_policy_went():
    tr = Trainer(model_(), correction='none'); tr.set_reference()
    with torch.no_grad(): tr.params[0].mul_(1e4)   # log-probs of thousands
    m = tr.rl_step(random_rollouts(model_(), 1)); json.dumps(m, allow_nan=False); assert m['kl'] > 1e6

# ---- failure and resume

def test_nan_stops_before_the_weights(tmp_path, monkeypatch):
    model = model_(); tr = Trainer(model); tr.dump = tmp_path; rs = random_rollouts(model, 1); w0 = copy.deepcopy(tr.weights())
    real, n = T.logprobs, [0]
    def poisoned(*a, **k):
        n[0] += 1; out = real(*a, **k)
        return out*float('nan') if n[0] == 5 else out
    monkeypatch.setattr(T, 'logprobs', poisoned)
    with pytest.raises(NotFinite, match='not finite') as e: tr.rl_step(rs)
    assert n[0] == 5 and tr.updates == 0 and tr.step == 0 and same(w0, tr.weights()) and str(tmp_path) not in str(e.value)
    z = np.load(next(tmp_path.glob('not-finite-step0001.npz')))
    assert set(z['rollout_ids']) <= {r.rollout_id for r in rs} and len(z['adv_E']) == len(z['old_E']) == z['train_T'].sum()

@pytest.mark.parametrize('good', [0, 1, 3])
def test_who_stops_says_how_much_of_the_step_is_in_the_weights(tmp_path, good):
    "Four updates a step; the one after `good` is poisoned."
    tr = Trainer(model_(), lr=1e-2); tr.rl_step(random_rollouts(tr.model, 3)); tr.dump = tmp_path; rs, w0, real, n = random_rollouts(tr.model, 1), copy.deepcopy(tr.weights()), tr.opt.clip, [0]
    def clip(most): n[0] += 1; return real(most) if n[0] <= good else float('nan')
    tr.opt.clip = clip
    with pytest.raises(NotFinite) as e: tr.rl_step(rs)
    assert same(w0, tr.weights()) == (not good) and tr.updates == 4 + good and tr.step == 1
    assert ('the weights are as they were' in str(e.value)) == (not good) and (not good or f'this update was not made, {good} before it in the step were' in str(e.value))

def test_a_batch_that_cannot_be_saved_does_not_hide_why(tmp_path, monkeypatch):
    tr = Trainer(model_()); tr.dump = tmp_path; tr.params[0].register_hook(lambda g: g*float('nan'))
    def full(path, **kw): path.write_bytes(b'half'); raise OSError(28, 'No space left on device')
    monkeypatch.setattr(np, 'savez_compressed', full)
    with pytest.raises(NotFinite, match='gradient is not finite; the batch could not be saved .No space left on device.'): tr.rl_step(random_rollouts(tr.model, 1))
    assert not list(tmp_path.iterdir())

def test_nan_gradient_and_nan_policy_stop(tmp_path):
    tr = Trainer(model_()); tr.dump = tmp_path; trees = [build_tree(r.calls) for r in random_rollouts(model_(), 1)]
    h = tr.params[0].register_hook(lambda g: g*float('nan'))
    with pytest.raises(NotFinite, match='gradient'): tr.sft_step(trees)
    h.remove(); assert np.isfinite(tr.sft_step(trees)['nll'])
    rs = random_rollouts(tr.model, 2)
    with torch.no_grad(): tr.params[0].fill_(float('nan'))
    with pytest.raises(NotFinite): tr.rl_step(rs)

def test_resume_is_bit_exact(tmp_path):
    model = model_(3); a = Trainer(model, lr=2e-3); batches = [random_rollouts(model, k) for k in range(4)]
    for b in batches[:2]: a.rl_step(b)
    a.save(tmp_path/'c', note='x'); torch.manual_seed(99)
    c = Trainer(model_(77), lr=2e-3); assert c.load(tmp_path/'c')['note'] == 'x'
    ma, mc = [], []
    for b in batches[2:]: ma.append(a.rl_step(b)); mc.append(c.rl_step(b))
    strip = lambda ms: [{k: v for k, v in m.items() if k != 'seconds'} for m in ms]
    assert strip(ma) == strip(mc) and ma[-1]['kl'] > 0 and same(a.weights(), c.weights()) and (c.step, c.updates) == (a.step, a.updates)
    for x, y in zip(a.opt.adam.state.values(), c.opt.adam.state.values()): assert all(torch.equal(x[k], y[k]) for k in x)

def test_random_state_is_restored(tmp_path):
    tr = Trainer(model_()); torch.manual_seed(5); tr.save(tmp_path/'c'); x = torch.rand(3); torch.rand(7)
    tr.load(tmp_path/'c'); assert torch.equal(torch.rand(3), x)

def test_a_checkpoint_opens_as_a_model_and_refuses_another(tmp_path):
    from transformers import AutoModelForCausalLM
    (tmp_path/'tok').mkdir(); (tmp_path/'tok/tokenizer.json').write_text('{}'); (tmp_path/'tok/model.safetensors').write_text('no')
    tr = Trainer(model_(4), assets=tmp_path/'tok'); tr.save(tmp_path/'c')
    m = AutoModelForCausalLM.from_pretrained(str(tmp_path/'c')); assert same(tr.weights(), m.state_dict()) and (tmp_path/'c/tokenizer.json').exists()
    with pytest.raises(DataError, match='does not fit'): Trainer(model_(layers=3)).load(tmp_path/'c')
    with pytest.raises(InputError, match='no checkpoint'): tr.load(tmp_path)

def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    tr = Trainer(model_()); tr.save(tmp_path/'c', k=1)
    monkeypatch.setattr(C.torch, 'save', lambda *a, **k: (_ for _ in ()).throw(OSError('disk full')))
    with pytest.raises(OSError): tr.save(tmp_path/'c', k=2)
    monkeypatch.undo(); assert tr.load(tmp_path/'c')['k'] == 1

@pytest.mark.parametrize('error', [RuntimeError('PytorchStreamWriter failed writing file'), C.SafetensorError('No space left on device')])
def test_a_full_disk_in_the_words_of_others_is_one_line(tmp_path, monkeypatch, error):
    tr = Trainer(model_()); tr.save(tmp_path/'c', k=1)
    monkeypatch.setattr(C, 'save_file', lambda *a, **k: (_ for _ in ()).throw(error))
    with pytest.raises(C.ClawlabError, match='cannot write checkpoint c'): tr.save(tmp_path/'c', k=2)
    monkeypatch.undo(); assert [p.name for p in tmp_path.iterdir()] == ['c'] and tr.load(tmp_path/'c')['k'] == 1

@pytest.mark.parametrize('name', ['optimizer.pt', 'model.safetensors', 'state.json'])
@pytest.mark.parametrize('share', [0, .5])
def test_a_checkpoint_cut_in_half_is_one_line(tmp_path, name, share):
    tr = Trainer(model_()); tr.save(tmp_path/'c'); f = tmp_path/'c'/name; raw = f.read_bytes(); f.write_bytes(raw[:int(len(raw)*share)])
    with pytest.raises(DataError, match='checkpoint c is damaged'): tr.load(tmp_path/'c')
    if name == 'model.safetensors':
        with pytest.raises(DataError, match='is damaged'): C.export_checkpoint(tmp_path/'c', tmp_path/'out')

def test_checkpoints_count_past_9999_and_know_their_own(tmp_path):
    run = C.Run(tmp_path)
    for n in ('step_10000', 'step_9999', 'step_9999.bak', 'step_x'): (tmp_path/n).mkdir(); (tmp_path/n/'state.json').write_text('{}')
    assert [p.name for p in run.checkpoints()] == ['step_9999', 'step_10000']

def test_one_run_at_a_time_in_a_folder(tmp_path):
    with C.alone(tmp_path/'r'):
        with pytest.raises(InputError, match='another run is at work'):
            with C.alone(tmp_path/'r'): pass
    with C.alone(tmp_path/'r'): pass

@pytest.mark.parametrize('bad', [dict(lr=float('nan')), dict(lr=float('inf')), dict(lr=-1e-3), dict(lr=lambda step: float('nan')), dict(kl=float('nan')), dict(temperature=float('inf')), dict(temperature=float('nan')), dict(switches=dict(call_discount=float('nan'))), dict(seed=-1),
    dict(max_norm=float('nan')), dict(clip=(float('nan'), .2)), dict(value_clip=-1.), dict(epochs=0), dict(minibatches=0), dict(token_budget=0), dict(weight_decay=-1.), dict(threads=-1), dict(kind='ppo', pretrain=-1), dict(kind='ppo', critic_lr=float('nan')),
    dict(kind='ppo', switches=dict(lam=2.)), dict(switches=dict(call_discount=7.)), dict(kind='gigpo', switches=dict(step_discount=-1.)), dict(loss='reinforce'), dict(correction='tis'), dict(normalizer='batch'), dict(timeout='forgive'), dict(unit='row'), dict(weight='cube')])
def test_what_no_step_can_use_is_refused_at_the_start(bad):
    with pytest.raises(InputError): Trainer(model_(), **bad)

def test_a_rate_that_is_none_later_leaves_the_weights(tmp_path):
    tr = Trainer(model_(), lr=lambda step: 1e-3 if not step else float('nan')); trees = [build_tree(r.calls) for r in random_rollouts(tr.model, 1)]
    tr.sft_step(trees); w0 = copy.deepcopy(tr.weights())
    with pytest.raises(InputError, match='a learning rate is nan'): tr.sft_step(trees)
    assert same(w0, tr.weights()) and tr.step == 1

async def test_whoever_interrupts_need_not_wait_for_the_last_step(monkeypatch):
    from clawlab.learn.loops import apart
    from clawlab.learn.train import Stopped
    tr, begun, ended = Trainer(model_()), threading.Event(), []
    trees = [build_tree(r.calls) for r in random_rollouts(model_(), 1)]
    def forever():
        try:
            while True: tr.sft_step(trees); begun.set()
        except Stopped: ended.append(tr.step)
    task = asyncio.create_task(apart(tr, forever)); await asyncio.to_thread(begun.wait, 60); task.cancel()
    with pytest.raises(asyncio.CancelledError): await task
    while not ended: await asyncio.sleep(0)
    assert ended[0] >= 1

def test_log_is_append_only_and_mends_a_torn_line(tmp_path):
    log = Log(tmp_path/'log.jsonl'); assert log.write(dict(step=1, x=1)) and log.write(dict(step=2)) and not log.write(dict(step=1, x=5))
    with open(log.path, 'a') as f: f.write('{"step": 3, "re')
    log = Log(log.path); assert [r['step'] for r in log.rows()] == [1, 2] and log.write(dict(step=3)) and log.rows()[0]['x'] == 1

class Engine:
    "Continues with a model of its own; `stale`: from this version on it forgets to take new weights."
    def __init__(self, stale=10**9, off=0.): self.model, self.version, self.stale, self.off = model_(123), 0, stale, off
    async def update(self, weights):
        self.version += 1
        if self.version < self.stale: self.model.load_state_dict(weights)
        return self.version
    async def generate(self, prompt_ids, sampling, context=None):
        ids, g, out, lps = list(prompt_ids), torch.Generator().manual_seed(sampling.seed), [], []
        for _ in range(sampling.max_tokens):
            with torch.no_grad(): logp = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1].float()/sampling.temperature, -1)
            a = int(torch.multinomial(logp.exp(), 1, generator=g)); ids.append(a); out.append(a); lps.append(float(logp[a]) + self.off)
        return Generation(out, lps, [self.version]*len(out))

def toys(groups=3): return TaskSampler([Task(f't{k}', 'f', 'train', '') for k in range(4)], {'h': 1}, groups)

def strip(rows): return [{k: v for k, v in r.items() if k not in ('seconds', 'engine_version', 'staleness')} for r in rows]

async def rl_run(folder, steps, crash=None):
    engine = Engine()
    async def collect(step, draws):
        if crash == step: raise RuntimeError('power cut')
        return random_rollouts(engine.model, 50 + step)
    return await rl(Trainer(model_(1), lr=1e-3), engine, toys(), collect, steps, folder), engine

async def test_loops_resume_from_the_last_finished_step(tmp_path, monkeypatch):
    whole, _ = await rl_run(tmp_path/'whole', 5)
    with pytest.raises(RuntimeError): await rl_run(tmp_path/'cut', 5, crash=2)
    real = Log.write
    monkeypatch.setattr(Log, 'write', lambda self, row: real(self, row) if row['step'] < 4 else (_ for _ in ()).throw(OSError('crash after the checkpoint')))
    with pytest.raises(OSError): await rl_run(tmp_path/'cut', 5)
    monkeypatch.undo()
    assert [r['step'] for r in Log(tmp_path/'cut/log.jsonl').rows()] == [1, 2, 3]
    rest, engine = await rl_run(tmp_path/'cut', 5); assert [r['step'] for r in rest] == [5]
    a, b = (Log(tmp_path/f'{n}/log.jsonl').rows() for n in ('whole', 'cut'))
    assert [r['step'] for r in b] == [1, 2, 3, 4, 5] and strip(a) == strip(b)
    names = [p.name for p in Run(tmp_path/'cut').checkpoints()]; assert names == [f'step_{k:04d}' for k in range(1, 6)]
    assert [(tmp_path/'cut'/n/'optimizer.pt').exists() for n in names] == [False]*3 + [True]*2
    with pytest.raises(InputError, match='pruned'): Trainer(model_()).load(tmp_path/'cut/step_0001')
    assert (await rl_run(tmp_path/'cut', 5))[0] == []

def test_sft_loop_resumes_and_logs_once(tmp_path):
    rs = [replace(r, reward=1.) for r in random_rollouts(model_(), 9, groups=5, n=2)]; d = sft_data(rs, heldout=.5); assert all(d.splits.values()) and d.card['shared_prefix']['h'] >= 3
    go = lambda folder, steps: sft(Trainer(model_(2), lr=1e-3, seed=4), d.splits['train'], steps, tmp_path/folder, batch=3, curriculum=(3, 3), heldout=d.splits['heldout'], save_every=4)
    go('a', 10)
    with pytest.MonkeyPatch.context() as mp:
        real, n = Trainer.sft_step, [0]
        def dies(self, trees):
            n[0] += 1
            if n[0] == 7: raise RuntimeError('power cut')
            return real(self, trees)
        mp.setattr(Trainer, 'sft_step', dies)
        with pytest.raises(RuntimeError): go('b', 10)
    again = go('b', 10); assert [r['step'] for r in again] == list(range(5, 11))  # 5 and 6 again: the checkpoint was at 4
    a, b = (Log(tmp_path/x/'log.jsonl').rows() for x in 'ab')
    assert [r['step'] for r in b] == list(range(1, 11)) and strip(a) == strip(b) and [r['prefix_cut'] for r in a][:3] == [1]*3 and 'nll_heldout' in a[-1]

async def test_R17_engine_follows_the_trainer(tmp_path):
    "A real engine with a warm cache: after every sync its log-probs are the trainer's."
    from clawlab.capture.engines.base import Sampling
    from clawlab.capture.engines.torch import TorchEngine
    model = model_(6); engine = TorchEngine(copy.deepcopy(model), SimpleNamespace(eos_ids=()))
    async def collect(step, draws):
        async def one(g, i):
            ids, calls, rid = [1, 2, 3, 4, 5, 6, 7, 20 + g], [], f'{step}-{g}.{i}'
            for k in range(2):
                x = await engine.generate(np.array(ids, np.int32), Sampling(max_tokens=4, seed=(step*10 + g)*100 + i*10 + k))
                calls.append(call(rid, k, ids, x.ids, x.logprobs, x.versions, parent=k - 1 if k else None)); ids = [*ids, *x.ids.tolist(), 8]
            return rollout(rid, float(np.mean(np.concatenate([c.output_ids for c in calls]) == 20 + g)) + .01*i, calls, f'{step}-{g}')
        return await asyncio.gather(*(one(g, i) for g in range(3) for i in range(4)))
    try: rows = await rl(Trainer(model, lr=5e-3), engine, toys(), collect, 4)
    finally: await engine.close()
    assert max(r['engine_trainer']['max'] for r in rows) < 1e-4 and rows[-1]['kl'] > 1e-4
    assert [r['engine_version'] for r in rows] == [2, 3, 4, 5] and all(r['version_min'] == r['version_max'] == r['step'] for r in rows)

def test_shuffled_rewards_keep_the_groups():
    rs = random_rollouts(model_(), 1, groups=4, n=6); a, b = shuffle_rewards(rs, 0, 3), shuffle_rewards(rs, 0, 3)
    key = lambda x: sorted((r.group, r.reward) for r in x)
    assert [r.reward for r in a] == [r.reward for r in b] != [r.reward for r in rs] and key(a) == key(rs) and [r.rollout_id for r in a] == [r.rollout_id for r in rs]
    assert [r.reward for r in shuffle_rewards(rs, 0, 4)] != [r.reward for r in a]

# ---- learning

@torch.no_grad()
def play(model, step, groups=8, n=8, turns=2):
    "Two calls a rollout, all played together: answer with the letter named in the prompt, three ids before the end."
    g = torch.Generator().manual_seed(step)
    letter = torch.arange(groups).repeat_interleave(n)%16 + 16
    ids = torch.stack([*[torch.full_like(letter, k) for k in (1, 2, 3)], letter, torch.full_like(letter, 4)], 1); done = []
    for k in range(turns):
        logp = torch.log_softmax(model(ids).logits[:, -1].float(), -1)
        a = torch.multinomial(logp.exp(), 1, generator=g); done.append((ids, a, logp.gather(1, a)))
        ids = torch.cat([ids, a, torch.full_like(a, 5)], 1)
    reward = torch.stack([(a[:, 0] == letter).float() for _, a, _ in done]).mean(0)
    rs = []
    for i in range(len(letter)):
        rid = f's{step}.{i}'
        calls = [call(rid, k, p[i].numpy(), a[i].numpy(), lp[i].numpy(), step, parent=k - 1 if k else None) for k, (p, a, lp) in enumerate(done)]
        rs.append(rollout(rid, float(reward[i]), calls, f's{step}.{i//n}', task_id=f'letter{int(letter[i])}'))
    return rs

def learn(shuffle, steps):
    tr, curve = Trainer(model_(0, hidden=128, layers=4), lr=6e-4), []
    for s in range(steps):
        rs = play(tr.model, s); curve.append(np.mean([r.reward for r in rs]))
        tr.rl_step(shuffle_rewards(rs, 0, s) if shuffle else rs)
    return np.array(curve), sum(p.numel() for p in tr.params)

def test_toy_grpo_learns_and_shuffled_rewards_do_not():
    curve, n = learn(False, 40); assert n > 790_000
    control, _ = learn(True, 15)
    assert curve[:3].mean() < .15 and curve[-5:].mean() > .5, curve
    assert control[-5:].mean() < .15, control
