"""learn.forest: a packed forest gives the numbers of separate rows, in float64, to 1e-9; cuts, kernels and models included."""
import os, platform, subprocess, sys
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from transformers import (Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM, Qwen3ForTokenClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM)
from clawlab.records import Call, InputError
from clawlab.learn.tree import build_tree, concat
from clawlab.learn.objectives import loss_coef, policy_loss
import clawlab.learn.forest as F
from clawlab.learn.forest import pack, logprobs, values, bounds, fastest, _run
torch.set_num_threads(1)

SHAPE = dict(vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)

def exact(model):
    "float64 all the way: transformers' RMSNorm computes in float32."
    model = model.double().eval()
    for m in model.modules():
        if 'RMSNorm' in type(m).__name__:
            m.forward = lambda x, m=m: m.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon)
    for p in model.parameters(): torch.nn.init.normal_(p, std=.3) if p.ndim > 1 else None
    return model

def make(kind):
    torch.manual_seed(0)
    return exact({'qwen3': lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)), 'llama': lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
                  'mha': lambda: LlamaForCausalLM(LlamaConfig(**{**SHAPE, 'num_key_value_heads': 4}))}[kind]())

MODELS = {}
def model_of(kind):
    if kind not in MODELS: MODELS[kind] = make(kind)
    return MODELS[kind]

def grads(model): return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()])

def call(r, i, prompt, out, parent=None, **kw):
    return Call(f'{r}.{i}', f'r{r}', i, prompt, out, [-2.] * len(out), [0] * len(out), parent_id=None if parent is None else f'{r}.{parent}', **kw)

def rollouts(seed, R=4, V=24):
    "Random rollouts that share a prefix, forget, retry and collide."
    r = np.random.default_rng(seed); toks = lambda a, b, v=V: r.integers(0, v, int(r.integers(a, b))).tolist()
    prefix, out = toks(5, 12), []
    for k in range(R):
        hist, calls = prefix + toks(0, 3, 2), []
        for i in range(int(r.integers(1, 5))):
            o = toks(1, 5, 3 if r.random() < .5 else V); calls.append(call(k, i, hist, o, i - 1 if i else None, role='side' if r.random() < .1 else 'main'))
            u = r.random()
            hist = hist + o + toks(1, 4) if u < .7 else hist + toks(1, 3) if u < .9 else hist
        out.append(calls)
    return out

def step(seed):
    "Trees and per-token old log-probs, advantages and coefficients of a step."
    trees = [build_tree(c) for c in rollouts(seed)]; b = concat(trees, [0, 0, 1, 1]); r = np.random.default_rng(seed)
    adv, old = r.normal(size=4)[b.rollout_T], -r.exponential(2., len(b.train_T)) - .5
    coef = loss_coef(b.train_T, b.owner_T, b.rollout_T, b.group_T, b.weight_T, normalizer=['rollout', 'token', 'sequence', 'prompt'][seed % 4])
    return trees, b, adv, old, coef

def packed(model, trees, adv, old, coef, budget, cascade, **kw):
    model.zero_grad(); total = 0.
    for f in pack(trees, budget):
        i = f.index_E; loss, _ = policy_loss(logprobs(model, f, kernel=cascade, **kw), old[i], adv[i], coef[i], np.ones(len(i)), ref_E=old[i], kl=.1)
        loss.backward(); total += loss.item()
    return total, grads(model)

def by_rows(model, trees, b, adv, old, coef, rows):
    "The same loss over flat rows, one forward each: a row is a call or a retained path, a token counts in the first row that has it."
    model.zero_grad(); total, done = 0., set()
    for k, t in enumerate(trees):
        flat = [(c, t.flat.path(e, 0, len(c.prompt_ids) + len(c.output_ids))) for c, e in zip(t.calls, t.end_C)] if rows == 'calls' else [(None, t.path_positions(l)) for l in t.leaves]
        for _, p in flat:
            mine = [j for j in range(1, len(p)) if t.train_T[p[j]] and (k, p[j]) not in done]
            if not mine: continue
            done.update((k, p[j]) for j in mine)
            ids = torch.tensor(t.ids_T[p].astype(np.int64)); logp = model(ids[None]).logits[0].log_softmax(-1)
            i = b.offset_R[k] + p[mine]
            loss, _ = policy_loss(logp[np.array(mine) - 1, ids[mine]], old[i], adv[i], coef[i], np.ones(len(i)), ref_E=old[i], kl=.1); loss.backward(); total += loss.item()
    assert len(done) == sum(t.train_T.sum() for t in trees)
    return total, grads(model)

def same(x, y, tol=1e-9):
    assert abs(x[0] - y[0]) <= tol * max(1, abs(x[0])), (x[0], y[0])
    assert (x[1] - y[1]).abs().max() <= tol * max(1, x[1].abs().max()), (x[1] - y[1]).abs().max()

@pytest.mark.parametrize('kind', ['qwen3', 'llama', 'mha'])
@pytest.mark.parametrize('seed', range(4))
def test_packed_equals_paths_equals_calls(kind, seed):
    model = model_of(kind); trees, b, adv, old, coef = step(seed)
    paths, calls = by_rows(model, trees, b, adv, old, coef, 'paths'), by_rows(model, trees, b, adv, old, coef, 'calls')
    same(paths, calls); assert paths[1].abs().max() > 1e-3
    longest = max(int(t.depth_T.max()) + 1 for t in trees)
    for cascade in ('cascade', 'per_node'):
        for budget in (None, longest + 8, longest): same(packed(model, trees, adv, old, coef, budget, cascade), calls)

@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 30))
def test_any_cut_gives_the_same_step(seed, slack):
    model = model_of('qwen3'); trees, b, adv, old, coef = step(seed)
    longest = max(int(t.depth_T.max()) + 1 for t in trees); fs = pack(trees, longest + slack)
    same(packed(model, trees, adv, old, coef, longest + slack, 'cascade'), packed(model, trees, adv, old, coef, None, 'per_node'))
    assert all(len(f) <= longest + slack for f in fs)
    assert sorted(np.concatenate([f.index_E for f in fs])) == np.flatnonzero(b.train_T).tolist()          # each entry exactly once
    whole, = pack(trees); assert sum(map(len, fs)) - sum(f.extra for f in fs) == len(whole)
    for f in fs:
        assert (f.parent_T < np.arange(len(f))).all() and (f.depth_T == np.where(f.parent_T < 0, 0, f.depth_T[f.parent_T] + 1)).all() and (f.parent_T[f.pos_E] >= 0).all()
        for e in range(len(f.pos_E)):                                                                     # each entry reads its own path
            path, p = [], f.pos_E[e]
            while p >= 0: path.append(f.ids_T[p]); p = f.parent_T[p]
            assert path[::-1] == trees[f.tree_E[e]].path_ids(f.token_E[e]).tolist() and f.index_E[e] == b.offset_R[f.tree_E[e]] + f.token_E[e]

def test_micro_batches_of_rollouts_add_up():
    "coefficients of the whole step, packed rollout by rollout"
    model = model_of('qwen3'); trees, b, adv, old, coef = step(2); whole = packed(model, trees, adv, old, coef, None, 'cascade')
    model.zero_grad(); total = 0.
    for k, t in enumerate(trees):
        for f in pack([t]):
            i = b.offset_R[k] + f.index_E; loss, _ = policy_loss(logprobs(model, f), old[i], adv[i], coef[i], np.ones(len(i)), ref_E=old[i], kl=.1); loss.backward(); total += loss.item()
    same((total, grads(model)), whole)

def test_path_weights_equal_independent_rows():
    model = model_of('qwen3'); trees = [build_tree(c, weight='paths') for c in rollouts(7)]
    model.zero_grad(); w = np.concatenate([t.weight_T for t in trees])
    for f in pack(trees, 60): (torch.tensor(w[f.index_E]) * logprobs(model, f)).sum().backward()
    got = grads(model); model.zero_grad()
    for t in trees:
        for l in t.leaves:
            p = t.path_positions(l); ids = torch.tensor(t.ids_T[p].astype(np.int64)); j = np.flatnonzero(t.train_T[p])
            model(ids[None]).logits[0].log_softmax(-1)[j - 1, ids[j]].sum().backward()
    assert (got - grads(model)).abs().max() <= 1e-9 * max(1, got.abs().max())

@pytest.mark.parametrize('cascade', ['cascade', 'per_node'])
def test_perturbing_siblings_and_ancestors(cascade):
    model, P = model_of('qwen3'), [1, 2, 3, 4]
    def lp(sib, anc):
        f, = pack([build_tree([call(0, 0, [1, anc, 3, 4], [5, 6, 7])]), build_tree([call(1, 0, [1, anc, 3, 4], sib + [9, 8])])])
        with torch.no_grad(): x = logprobs(model, f, kernel=cascade)
        return x[f.tree_E == 0]
    base = lp([10, 11], 2)
    assert torch.equal(base, lp([12, 11], 2)) or (base - lp([12, 11], 2)).abs().max() < 1e-14            # a sibling changes nothing
    assert (lp([10, 11, 12, 13, 14], 2) - base).abs().max() < 1e-14
    assert ((lp([10, 11], 15) - base).abs() > 1e-6).all()                                                 # an ancestor changes every descendant

def test_sibling_order_does_not_matter():
    model, calls = model_of('llama'), rollouts(5)
    def by_token(order):
        ts = [build_tree(calls[k]) for k in order]; f, = pack(ts); x = logprobs(model, f).detach()
        return {(order[r], tuple(ts[r].path_ids(t))): float(v) for r, t, v in zip(f.tree_E, f.token_E, x)}
    a, b = by_token([0, 1, 2, 3]), by_token([3, 1, 0, 2])
    assert a.keys() == b.keys() and max(abs(a[k] - b[k]) for k in a) < 1e-12

def test_one_position_many_entries():
    "equal sampled tokens of different rollouts share a position, never an entry"
    ts = [build_tree([call(k, 0, [1, 2, 3], [4, 5])]) for k in range(3)]; f, = pack(ts)
    assert len(f) == 5 and f.pos_E.tolist() == [3, 3, 3, 4, 4, 4] and f.tree_E.tolist() == [0, 1, 2] * 2 and len(f.read[0]) == 2
    model = model_of('qwen3'); x = logprobs(model, f); adv = np.array([1., -1., 0.])[f.tree_E]
    loss, _ = policy_loss(x, x.detach(), adv, np.ones(6), np.ones(6)); loss.backward()
    assert abs(loss.item()) < 1e-15

def test_untrained_branches_cost_nothing():
    t = build_tree([call(0, 0, [1, 2], [3]), call(0, 1, [9] * 50, [4], role='side')]); f, = pack([t])
    assert len(f) == 3 and pack([build_tree([call(0, 0, [1], [2], role='side')])]) == [] and pack([]) == []

def test_R15_temperature_before_the_softmax():
    "logits [2,1,0,-1] at T=0.6: -0.208, not logprob / T = -0.734"
    class Fixed(torch.nn.Module):
        def __init__(self): super().__init__(); self.config = LlamaConfig(**{**SHAPE, 'num_hidden_layers': 0}); self.w = torch.nn.Parameter(torch.tensor([2., 1, 0, -1]))
        def forward(self, input_ids, position_ids, use_cache, logits_to_keep): return type('O', (), {'logits': self.w.expand(1, len(logits_to_keep), 4)})
    f, = pack([build_tree([call(0, 0, [1], [0])])])
    lp, H = logprobs(Fixed(), f, temperature=.6, entropy=True)
    p = torch.tensor([2., 1, 0, -1]).div(.6).softmax(-1)
    assert abs(lp.item() + .20806) < 1e-4 and abs(logprobs(Fixed(), f).item() + .4402) < 1e-4 and abs(H.item() + (p * p.log()).sum().item()) < 1e-6
    for T in (0, -1, float('nan')):
        with pytest.raises(InputError): logprobs(Fixed(), f, temperature=T)

def test_values_are_read_at_the_parent():
    torch.manual_seed(1); critic = exact(Qwen3ForTokenClassification(Qwen3Config(**SHAPE, num_labels=1))); trees = [build_tree(c) for c in rollouts(3)]
    for f in pack(trees, 60):
        got = values(critic, f)
        for e in range(0, len(f.pos_E), 3):
            ids = torch.tensor(trees[f.tree_E[e]].path_ids(f.token_E[e]).astype(np.int64))
            assert abs(critic(ids[None, :-1]).logits[0, -1, 0] - got[e]) < 1e-9
    with pytest.raises(InputError): values(exact(Qwen3ForTokenClassification(Qwen3Config(**SHAPE, num_labels=2))), f)

def test_the_models_own_attention_is_restored():
    model, ids = model_of('qwen3'), torch.tensor([[1, 2, 3]]); f, = pack([build_tree([call(0, 0, [1, 2], [3])])]); before, impl = model(ids).logits, model.config._attn_implementation
    logprobs(model, f); assert torch.equal(model(ids).logits, before) and model.config._attn_implementation == impl
    with pytest.raises(InputError): logprobs(model, f, temperature=0)
    with pytest.raises(Exception): _run(model, f, nonsense=lambda: 1 / 0, inputs_embeds=torch.zeros(1))
    assert torch.equal(model(ids).logits, before) and model.config._attn_implementation == impl

def test_refusals():
    long = build_tree([call(0, 0, list(range(20)), [3, 4])])
    with pytest.raises(InputError, match='22 tokens'): pack([long], 21)
    for media in ((1, 2, 'ab'), (-1, 0, 'ab')):   # located in the prompt, and only known to be in it
        with pytest.raises(InputError, match='media'): pack([build_tree([call(0, 0, [1, 2, 2], [3], media=(media,))])])
    f, = pack([long])
    with pytest.raises(InputError, match='window'): logprobs(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)), f)
    assert torch.isfinite(logprobs(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=22)), f)).all()
    drop = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=.1)).train()
    with pytest.raises(InputError, match='dropout'): logprobs(drop, f)
    m = LlamaForCausalLM(LlamaConfig(**SHAPE)); m.model.layers[1] = torch.nn.Identity(); m.model.layers[1].forward = lambda x, **k: x
    with pytest.raises(InputError, match='1 of 2 layers'): logprobs(m, f)

def test_float32_and_bfloat16():
    torch.manual_seed(0); m = Qwen3ForCausalLM(Qwen3Config(**SHAPE)); f, = pack([build_tree(c) for c in rollouts(1)])
    x = logprobs(m, f).detach(); assert x.dtype == torch.float32 and (x - logprobs(m, f, kernel='per_node')).abs().max() < 1e-5
    y = logprobs(m.bfloat16(), f); assert y.dtype == torch.float32 and (x - y).abs().max() < .1
    y.sum().backward()

def test_bounds_of_a_star():
    ts = [build_tree([call(k, 0, list(range(20)), [k])]) for k in range(10)]; b = bounds(model_of('qwen3'), ts, pack(ts))
    assert b['flat_tokens'] == 210 and b['forest_tokens'] == 30 and b['token_bound'] == 7 and 1 < b['flop_bound'] < 7 * 1.5 and b['extra_tokens'] == 0

def plain(model, f, temperature=1., entropy=True):
    "Log-probs and entropies from all logits at once."
    at, inv = map(torch.as_tensor, f.read); z = _run(model, f).logits[0, at]/temperature
    lp = z.log_softmax(-1); return lp[inv, torch.as_tensor(f.ids_T[f.pos_E].astype(np.int64))], -(lp.exp()*lp).sum(-1)[inv]

@pytest.mark.parametrize('keep', [2**25, 0])
@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('kind', ['qwen3', 'llama'])
def test_chunked_head_equals_all_logits(kind, bias, keep, monkeypatch):
    monkeypatch.setattr(F, 'KEEP', keep); monkeypatch.setattr(F, 'CHUNK', 24*5); model = make(kind)
    if bias: model.lm_head.bias = torch.nn.Parameter(torch.randn(24, dtype=torch.float64))
    f, = pack([build_tree(c) for c in rollouts(1)]); a, b = torch.randn(2, len(f.pos_E), dtype=torch.float64)
    assert len(f.read[0]) > 11
    for T in (1., .6):
        got = []
        for fn in (lambda: logprobs(model, f, temperature=T, entropy=True), lambda: plain(model, f, T)):
            model.zero_grad(); lp, H = fn(); ((lp*a).sum() + (H*b).sum()).backward(); got.append((lp.detach(), H.detach(), grads(model)))
        for x, y in zip(*got): assert (x - y).abs().max() <= 1e-9*max(1, y.abs().max())
        with torch.no_grad(): assert (logprobs(model, f, temperature=T) - got[1][0]).abs().max() < 1e-9

def test_a_head_of_another_kind_is_chunked_too(monkeypatch):
    monkeypatch.setattr(F, 'CHUNK', 24*5); model = make('llama'); f, = pack([build_tree(c) for c in rollouts(1)])
    class Head(torch.nn.Linear): pass
    model.lm_head.__class__ = Head; got = []
    for fn in (lambda: logprobs(model, f, temperature=.7, entropy=True), lambda: plain(model, f, .7)):
        model.zero_grad(); lp, H = fn(); (lp.sum() + 2*H.sum()).backward(); got.append((lp.detach(), H.detach(), grads(model)))
    for x, y in zip(*got): assert (x - y).abs().max() <= 1e-9*max(1, y.abs().max())

def test_what_changes_logits_is_refused():
    f, = pack([build_tree([call(0, 0, [1, 2], [3])])])
    with pytest.raises(InputError, match='final_logit_softcapping'): logprobs(Gemma2ForCausalLM(Gemma2Config(**SHAPE, attn_logit_softcapping=None)), f)
    with pytest.raises(InputError, match='soft cap'): logprobs(Gemma2ForCausalLM(Gemma2Config(**SHAPE)), f)
    with pytest.raises(InputError, match='logits_scaling'): logprobs(GraniteForCausalLM(GraniteConfig(**{k: v for k, v in SHAPE.items() if k != 'head_dim'}, logits_scaling=2.)), f)
    m = LlamaForCausalLM(LlamaConfig(**SHAPE)); own = m.forward
    def shifted(**k): o = own(**k); o.logits = o.logits + 1; return o
    m.forward = shifted
    with pytest.raises(InputError, match='unknown how'): logprobs(m, f)

@pytest.mark.parametrize('reentrant', [False, True])
def test_activation_checkpointing(reentrant):
    model = make('qwen3').train(); f, = pack([build_tree(c) for c in rollouts(2)]); got = []
    for ckpt in (False, True):
        if ckpt: model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model.zero_grad(); lp = logprobs(model, f); lp.sum().backward(); got.append((lp.detach(), grads(model)))
    assert torch.equal(got[0][0], got[1][0]) and (got[0][1] - got[1][1]).abs().max() < 1e-12
    assert all('<lambda>' not in getattr(l._gradient_checkpointing_func, '__qualname__', '') for l in model.model.layers)
    ids = torch.tensor([[1, 2, 3]]); x = model(ids).logits; model.gradient_checkpointing_disable(); assert torch.equal(x, model(ids).logits)

@pytest.mark.parametrize('targets', [['q_proj', 'down_proj'], ['v_proj', 'lm_head']])
def test_lora(targets):
    import peft; torch.manual_seed(3)
    model = peft.get_peft_model(make('llama'), peft.LoraConfig(r=2, target_modules=targets)).double().train(); f, = pack([build_tree(c) for c in rollouts(2)])
    for n, p in model.named_parameters(): torch.nn.init.normal_(p, std=.2) if 'lora' in n else None
    got = []
    for ckpt in (None, False, True):
        if ckpt: model.gradient_checkpointing_enable(); model.enable_input_require_grads()
        model.zero_grad(); lp = plain(model, f)[0] if ckpt is None else logprobs(model, f); lp.sum().backward(); got.append((lp.detach(), grads(model)))
    for x, g in got[1:]: assert (x - got[0][0]).abs().max() < 1e-9 and (g - got[0][1]).abs().max() < 1e-9*max(1, g.abs().max())
    assert got[0][1].abs().max() > 1e-3

def test_mixture_of_experts():
    "routing is per token: packing changes nothing"
    torch.manual_seed(0); model = exact(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, experts_implementation='eager')))
    trees, b, adv, old, coef = step(1); calls = by_rows(model, trees, b, adv, old, coef, 'calls')
    for kernel in ('cascade', 'per_node'): same(packed(model, trees, adv, old, coef, None, kernel), calls, 1e-5)  # the router's softmax is float32

def test_flex_forward_without_gradient():
    "on a CPU flex_attention has no backward pass; its block mask is checked all the same"
    model = make('qwen3'); f, = pack([build_tree(c) for c in rollouts(1)])
    with torch.no_grad(): assert (logprobs(model.float(), f, kernel='flex') - logprobs(model, f, kernel='per_node')).abs().max() < 1e-4
    assert fastest('cuda', torch.bfloat16) == 'flex' and fastest('cpu', torch.bfloat16) == 'cascade' and fastest('cpu', torch.float16) == fastest('mps', torch.float32) == 'per_node'
    with pytest.raises(InputError, match='per_node, cascade, flex'): logprobs(model, f, kernel='dense')

def test_bfloat16_gradients_are_as_good_as_per_node():
    "relative error of the whole gradient against float32, beside the portable kernel's"
    torch.manual_seed(0); m = Qwen3ForCausalLM(Qwen3Config(**SHAPE)); f, = pack([build_tree(c) for c in rollouts(1, R=8)]); w = torch.randn(len(f.pos_E))
    def g(m, kernel): m.zero_grad(); (logprobs(m, f, kernel=kernel)*w).sum().backward(); return grads(m).float()
    exact_g, m = g(m, 'per_node'), m.bfloat16(); err = {k: ((g(m, k) - exact_g).norm()/exact_g.norm()).item() for k in ('cascade', 'per_node')}
    assert err['cascade'] < max(.03, 1.5*err['per_node']), err


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='glibc')
def test_freed_memory_is_held_for_the_next_step(monkeypatch):
    "A large buffer that was freed is taken again without page faults; the environment's own wish is left alone."
    code = '''import resource, numpy as np
from clawlab.learn.forest import hold_memory
held = hold_memory()
def faults():
    a = resource.getrusage(resource.RUSAGE_SELF).ru_minflt; np.ones(2**24, np.float32)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - a
faults(); print(int(held), faults())'''
    env = {k: v for k, v in os.environ.items() if not k.startswith('MALLOC_')}
    held, n = map(int, subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=True).stdout.split())
    assert held and n < 100
    monkeypatch.setenv('MALLOC_TRIM_THRESHOLD_', '131072')
    assert not F.hold_memory()

@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='glibc')
def test_threads_do_not_hold_memory_each():
    "Six threads, all alive, take and free 400 MB one after the other."
    code = '''import threading, torch
from clawlab.learn.forest import hold_memory
hold_memory(); at = [threading.Barrier(2) for _ in range(6)]
def work(b): b.wait(); xs = [torch.ones(5 << 20) for _ in range(20)]; del xs; b.wait(); b.wait()
rss = lambda: int(open('/proc/self/statm').read().split()[1])*4096 >> 20
ts = [threading.Thread(target=work, args=(b,)) for b in at]; [t.start() for t in ts]; seen = []
for b in at: b.wait(); b.wait(); seen.append(rss())
[b.wait() for b in at]; print(seen[-1] - seen[0])'''
    env = {k: v for k, v in os.environ.items() if not k.startswith('MALLOC_')}
    assert int(subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=True).stdout) < 1400   # 2000 with a heap each
