"The torch engine: exact log-probs in every situation (faults 15-18), batching, prefix reuse, cancellation, weight updates."
import asyncio
from types import SimpleNamespace
import aiohttp, numpy as np, pytest, torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from clawlab.capture.chat import Template
from clawlab.capture.engines import torch as T
from clawlab.capture.engines.base import Context, Engine, Sampling
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.records import EngineError, InputError, Rollout

EOS = 1
SHAPE = dict(vocab_size=80, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
             max_position_embeddings=256, eos_token_id=EOS)

def make(kind='qwen3', seed=0, **kw):
    torch.manual_seed(seed)
    if kind == 'qwen3': m = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, 'head_dim': 12, 'tie_word_embeddings': True, **kw}))
    else: m = LlamaForCausalLM(LlamaConfig(**{**SHAPE, 'tie_word_embeddings': False, **kw})) # SmolLM2 is a Llama
    for p in m.parameters(): # far from uniform, so that a wrong position or mask shows
        if p.dim() > 1: torch.nn.init.normal_(p, std=.15)
    return m.eval()

def engine(model, **kw): return T.TorchEngine(model, SimpleNamespace(eos_ids=(EOS,)), **kw)

def plain(model, prompt, out, temperature=1.):
    x = torch.tensor([list(prompt)+list(out)])
    with torch.inference_mode(): lp = torch.log_softmax(model(x).logits[0].double()/temperature, -1)
    return np.array([lp[len(prompt)+i-1, t] for i, t in enumerate(out)])

def error(model, prompt, g, temperature=1.): return np.abs(plain(model, prompt, g.ids, temperature) - g.logprobs).max()

async def until(what):
    for _ in range(2000):
        if what(): return
        await asyncio.sleep(.005)
    raise AssertionError('nothing happened')

@pytest.fixture(params=['qwen3', 'llama', 'qwen3-hf', 'llama-hf'])
def model(request, monkeypatch):
    kind, _, hf = request.param.partition('-')
    if hf: monkeypatch.setattr(T.FusedForward, 'fits', staticmethod(lambda m: False))
    return make(kind)

async def test_conversations_equal_a_plain_forward(model):
    "Many requests at once, growing histories, forks, prompts longer than a chunk, all temperatures."
    e, rng = engine(model, max_batch=5, chunk=16), np.random.default_rng(0)
    system = rng.integers(2, 80, 40).tolist()
    async def talk(i):
        p, t = system + rng.integers(2, 80, 5+3*i).tolist(), (1., .6, 1.7)[i % 3]
        for turn in range(3):
            g, twin = await asyncio.gather(*[e.generate(p, Sampling(temperature=t, max_tokens=9, seed=100*i+10*turn+k)) for k in range(2)])
            for x in (g, twin): assert error(model, p, x, t) < 1e-4
            p = p + g.ids.tolist() + rng.integers(2, 80, 6).tolist()
    await asyncio.gather(*[talk(i) for i in range(9)])
    assert e.stats['reused'] > 9*40 and e.stats['steps'] < e.stats['sampled']
    await e.close()

async def test_paths_agree(monkeypatch):
    m = make()
    fused = engine(m); assert isinstance(fused.forward, T.FusedForward)
    monkeypatch.setattr(T.FusedForward, 'fits', staticmethod(lambda m: False))
    hf = engine(m); assert isinstance(hf.forward, T.HFForward)
    a, b = [await e.generate(list(range(2, 60)), Sampling(max_tokens=20, seed=3)) for e in (fused, hf)]
    assert a.ids.tolist() == b.ids.tolist() and np.abs(a.logprobs-b.logprobs).max() < 1e-4
    await fused.close(); await hf.close()

def test_F15_logprobs_of_the_distribution_sampled():
    logits = torch.tensor([[2., 1, 0, -1]])
    (tok,), (lp,), (kept,) = T.sample(logits, [.6], [.5], [1.], [0])
    assert tok == 0 and lp == pytest.approx(-.208, abs=5e-4) and kept == pytest.approx(1)
    for top_p, top_k, n in ((.85, 0, 2), (1., 2, 2), (.5, 0, 1), (.99, 3, 3)): # p = .644 .237 .087 .032
        toks, lps, kept = map(list, zip(*[[x[0] for x in T.sample(logits, [1.], [u], [top_p], [top_k])] for u in np.linspace(0, .9999, 200)]))
        want = torch.softmax(logits[0], -1)
        assert sorted(set(toks)) == list(range(n)) and kept[0] == pytest.approx(want[:n].sum().item(), abs=1e-6)
        assert all(l == pytest.approx(want[t].log().item(), abs=1e-6) for t, l in zip(toks, lps)) # of the full distribution

def constant(logits):
    "A model whose next token has these logits for the bytes a, b, c, ..., whatever came before."
    m = LlamaForCausalLM(LlamaConfig(**{**SHAPE, 'vocab_size': 258, 'tie_word_embeddings': False, 'max_position_embeddings': 2048}))
    with torch.no_grad():
        m.model.embed_tokens.weight.fill_(1.)   # and attention and MLP add nothing, so the head sees ones
        for l in m.model.layers: l.self_attn.o_proj.weight.zero_(); l.mlp.down_proj.weight.zero_()
        m.lm_head.weight.fill_(-99/48)
        for i, x in enumerate(logits): m.lm_head.weight[97+i] = x/48
    return m.eval()

@pytest.mark.parametrize('hf', [False, True])
@pytest.mark.parametrize('top_p', [1., .9])
async def test_P15_recorded_logprobs_are_of_the_tempered_logits_and_kept_mass_is_recorded(tmp_path, monkeypatch, top_p, hf):
    "Logits 2, 1, 0, -1 at T=0.6: the store has -0.208 for the first, not logprob/T = -0.734; with top-p 0.9 also the mass of the two that were left."
    if hf: monkeypatch.setattr(T.FusedForward, 'fits', staticmethod(lambda m: False))
    want = torch.log_softmax(torch.tensor([2., 1, 0, -1]).double()/.6, -1)
    e, ask = T.TorchEngine(constant([2., 1, 0, -1]), Template.bytes()), dict(model='m', temperature=1.9, top_p=.1, messages=[dict(role='user', content='Go.')])
    with Store.open(str(tmp_path/'c.db')) as st:
        async with Proxy(e, st, sampling=Sampling(temperature=.6, top_p=top_p, max_tokens=150)) as p, aiohttp.ClientSession() as http:
            s = await p.open_session(Rollout('r', '', 'h'))
            async with http.post(f'http://127.0.0.1:{p.port}{s.base_path}/v1/chat/completions', json=ask, headers={'x-api-key': s.api_key}) as r: assert r.status == 200
        c, = st.calls('r')
    await e.close()
    k, n = c.output_ids - 97, 2 if top_p < 1 else 4
    assert set(k) == set(range(n)) and np.abs(c.logprobs - want.numpy()[k]).max() < 1e-4 and c.logprobs[k == 0][0] == pytest.approx(-.208, abs=5e-4)
    assert (c.used['temperature'], c.used['top_p']) == (.6, top_p) and c.requested['top_p'] == .1
    if top_p == 1: assert c.kept_mass is None
    else:
        assert len(c.kept_mass) == len(k) and np.allclose(c.kept_mass, want.exp()[:2].sum(), atol=1e-5)
        share, sampled = np.bincount(k, minlength=2)/len(k), np.exp(c.logprobs - np.log(c.kept_mass))   # what was sampled from: a distribution over those two
        assert sampled[k == 0][0] + sampled[k == 1][0] == pytest.approx(1, abs=1e-4) and abs(share[0] - sampled[k == 0][0]) < .1

def test_samples_follow_the_distribution():
    logits, n = torch.tensor([[.3, -1., 2., 0., float('-inf')]]), 20000
    toks, _, _ = T.sample(logits.repeat(n, 1), [1.]*n, np.random.default_rng(0).random(n), [1.]*n, [0]*n)
    share = np.bincount(toks, minlength=5)/n
    assert np.abs(share - torch.softmax(logits[0], -1).numpy()).max() < .01 and share[4] == 0

async def test_seed_decides_whoever_else_is_there():
    m = make(); e = engine(m)
    alone = await e.generate(range(2, 40), Sampling(max_tokens=15, seed=7))
    crowd = await asyncio.gather(*[e.generate(range(2, 40), Sampling(max_tokens=15, seed=s)) for s in range(12)])
    assert crowd[7].ids.tolist() == alone.ids.tolist() and len({tuple(g.ids) for g in crowd}) > 6
    by_context = [await e.generate(range(2, 40), Sampling(max_tokens=15), Context(seed=4, seq=1)) for _ in range(2)]
    assert by_context[0].ids.tolist() == by_context[1].ids.tolist()
    greedy = [await e.generate(range(2, 40), Sampling(max_tokens=15, temperature=0., seed=s)) for s in range(2)]
    assert greedy[0].ids.tolist() == greedy[1].ids.tolist() and error(m, range(2, 40), greedy[0]) < 1e-4
    await e.close()

async def test_F17_warm_cache_after_update_equals_a_cold_engine():
    old, new = make(seed=0), make(seed=1)
    warm, cold = engine(old), engine(new)
    p = list(range(2, 70))
    await warm.generate(p, Sampling(max_tokens=10, seed=0))
    assert await warm.update(new) == 1
    a, b = [await e.generate(p, Sampling(max_tokens=10, seed=0)) for e in (warm, cold)]
    assert a.ids.tolist() == b.ids.tolist() and np.abs(a.logprobs-b.logprobs).max() < 1e-4
    assert set(a.versions) == {1} and set(b.versions) == {0}
    await warm.close(); await cold.close()

async def test_F18_update_drains_and_no_call_spans_it():
    m = make(); m.config.eos_token_id = None
    e = T.TorchEngine(m, SimpleNamespace(eos_ids=(-1,)), max_batch=3)
    p = list(range(2, 50))
    gens = [asyncio.create_task(e.generate(p, Sampling(max_tokens=60, seed=s))) for s in range(8)]
    await until(lambda: e.stats['sampled'] > 5)
    new = make(seed=1)
    assert await e.update(new.state_dict()) == 1
    seen = set()
    for g in await asyncio.gather(*gens):
        assert len(set(g.versions)) == 1 and len(g.ids) == 60
        v = int(g.versions[0]); seen.add(v)
        assert error((m, new)[v], p, g) < 1e-4
    assert seen == {0, 1}
    await e.close()

async def test_the_engine_owns_its_weights_until_update():
    m = make(); e = engine(m); p = list(range(2, 30))
    before = await e.generate(p, Sampling(max_tokens=8, seed=0))
    with torch.no_grad():
        for q in m.parameters(): q.mul_(1.5)
    same = await e.generate(p, Sampling(max_tokens=8, seed=0))
    assert same.ids.tolist() == before.ids.tolist() and np.allclose(same.logprobs, before.logprobs, atol=1e-5)
    assert await e.update() == 1 # None: anew from the source model
    assert error(m, p, await e.generate(p, Sampling(max_tokens=8, seed=0))) < 1e-4
    with pytest.raises(EngineError): await e.update({'nonsense': torch.zeros(1)})
    assert e.version == 1
    await e.close()

async def test_cancellation_frees_the_slot():
    e = T.TorchEngine(make(), SimpleNamespace(eos_ids=(-1,)), max_batch=2)
    p = list(range(2, 40))
    gens = [asyncio.create_task(e.generate(p, Sampling(max_tokens=200, seed=s))) for s in range(4)] # two run, two wait
    await until(lambda: e.stats['sampled'] > 3)
    for g in gens: g.cancel()
    await asyncio.gather(*gens, return_exceptions=True)
    await until(lambda: e.stats['cancelled'] == 4)
    assert not e._active and not e._waiting and not any(s.busy for s in e.cache.slots)
    sampled = e.stats['sampled']
    g = await e.generate(p, Sampling(max_tokens=5, seed=0))
    assert e.stats['sampled'] == sampled+5 and len(g.ids) == 5
    await e.close()

async def test_limits_and_errors():
    m = make(); e = engine(m)
    assert isinstance(e, Engine) and e.max_context == 256
    g = await e.generate(np.arange(250) % 70 + 2, Sampling(max_tokens=100, seed=1))
    assert len(g.ids) <= 6 and (g.finish == 'length' or g.ids[-1] == EOS)
    for bad in ([], range(256)):
        with pytest.raises(EngineError): await e.generate(list(bad), Sampling())
    with pytest.raises(EngineError): await e.generate([10**6], Sampling()) # no such token: only this request fails
    assert len((await e.generate([2, 3], Sampling(max_tokens=2, seed=0))).ids) >= 1
    late = asyncio.create_task(e.generate(range(2, 9), Sampling(max_tokens=200, seed=0)))
    await e.close()
    await asyncio.gather(late, return_exceptions=True)
    with pytest.raises(EngineError): await e.generate([2], Sampling())

async def test_end_of_turn_is_recorded_and_stops():
    m = make()
    e = T.TorchEngine(m, SimpleNamespace(eos_ids=tuple(range(0, 80, 2)))) # every second token ends
    gens = await asyncio.gather(*[e.generate(range(2, 20), Sampling(max_tokens=50, seed=s)) for s in range(20)])
    for g in gens: assert g.finish == 'stop' and g.ids[-1] % 2 == 0 and all(t % 2 for t in g.ids[:-1]) and len(g.ids) == len(g.logprobs)
    await e.close()

async def test_cache_stays_in_its_budget():
    m = make(); e = engine(m, cache_mb=1)
    rng = np.random.default_rng(0)
    for i in range(40): await e.generate(rng.integers(2, 80, 200), Sampling(max_tokens=3, seed=i))
    assert sum(s.nbytes for s in e.cache.slots) <= 1.5*2**20
    p = rng.integers(2, 80, 200); g = await e.generate(p, Sampling(max_tokens=3, seed=0))
    assert error(m, p, g) < 1e-4
    await e.close()

def test_unsuitable_models_are_refused():
    with pytest.raises(InputError): T.HFForward(make(sliding_window=16, use_sliding_window=True, max_window_layers=0))
