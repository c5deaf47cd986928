"""Criterion of the forest: in float64 a packed forest, rows per path and rows per call give one loss and one gradient, whatever the objective.

The reference below is the slow, obvious thing: one forward pass per call, tokens known by the ids that lead to them, everything else by hand. It shares no line with the library."""
import itertools, math
from dataclasses import replace
from functools import lru_cache
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForTokenClassification
from clawlab.records import Call
from clawlab.learn.tree import build_tree, concat
from clawlab.learn.objectives import is_weights, loss_coef, policy_loss, tree_gae, value_loss
from clawlab.learn.advantages import advantages
from clawlab.learn.forest import logprobs, pack, values
torch.set_num_threads(1)
VOCAB, TOL = 50, 1e-9

# -- models -------------------------------------------------------------------------------------------------------------------
def exact(model, seed):
    "float64 all the way (transformers' RMSNorm computes in float32), with weights that make every token matter."
    model, g = model.double().eval(), torch.Generator().manual_seed(seed)
    for m in model.modules():
        if 'RMSNorm' in type(m).__name__: m.forward = lambda x, m=m: m.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon)
    for p in model.parameters():
        if p.ndim > 1: p.data = torch.randn(p.shape, generator=g, dtype=torch.float64) * .3
    return model

def qwen(cls, seed, layers, **kw):
    return exact(cls(Qwen3Config(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=4, **kw)), seed)

def near(model, seed):
    "A policy a few updates away."
    other, g = qwen(type(model), 0, model.config.num_hidden_layers, tie_word_embeddings=True), torch.Generator().manual_seed(seed)
    for p, q in zip(other.parameters(), model.parameters()): p.data = q.data + torch.randn(q.shape, generator=g, dtype=torch.float64) * .04
    return other.requires_grad_(False)

def grad(loss, model):
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True))])

def same(x, y):
    assert abs(x[0] - y[0]) <= TOL * max(1, abs(x[0])), (x[0], y[0])
    assert (x[1] - y[1]).abs().max() <= TOL * max(1, x[1].abs().max()), (x[1] - y[1]).abs().max()

# -- rollouts whose fates are known, because they are made so -----------------------------------------------------------------------
def play(seed, k, prefix):
    "One rollout: chains, rewritten history, retries, twins that sample the same first tokens, side calls. Returns calls and which of them are trained."
    r = np.random.default_rng([seed, k]); toks = lambda a, b: r.integers(1, VOCAB, int(r.integers(a, b))).tolist()
    calls, trained = [], []
    def call(prompt, out, parent, train=True, role='main'):
        calls.append(Call(f'{k}.{len(calls)}', f'r{k}', len(calls), prompt, out, (-r.exponential(1.5, len(out))).astype(np.float32), [0] * len(out),
                          parent_id=None if parent is None else f'{k}.{parent}', role=role)); trained.append(train)
        return len(calls) - 1
    hist, up = prefix, None
    for _ in range(int(r.integers(1, 4))):
        u, out = r.random(), toks(1, 4)
        if u < .2: call(hist, [out[0] % (VOCAB - 1) + 1] + toks(0, 3), up, train=False)                 # a retry: only the second was used
        if u > .85: call(toks(2, 4), toks(1, 3), None, train=False, role='side')
        a = call(hist, out, up); ask = hist
        if .2 < u < .45:                                                                                  # a twin with the same beginning, extended too
            b = call(hist, out + toks(1, 2), up); call(hist + calls[b].output_ids.tolist() + [0, 0], toks(1, 3), b)
        up = a; hist = hist + out + [0] + toks(0, 2)
        if r.random() < .35: hist = ask + [0] + toks(1, 3)                                                # the template dropped the thinking: a fork
    call(hist, toks(1, 3), up)
    return calls, trained

GROUPS = ['a', 'a', 'a', 'b', 'b']
class Step:
    "Five rollouts of two groups, their policies and critic."
    def __init__(self, seed):
        r = np.random.default_rng([seed, 99]); prefix = r.integers(1, VOCAB, 4).tolist()
        self.seed, self.T = seed, [1., .7, 1.3][seed % 3]
        self.rollouts = [play(seed, k, prefix) for k in range(5)]
        self.R = [[1., 0, .25, .5, 1], [0, 1., 1, .5, .5], [.75, .25, 0, 0, 1.]][seed % 3]               # the second has a group without variance
        self.harness = [['x'] * 5, ['x'] * 3 + ['y'] * 2][seed % 2]
        self.model = qwen(Qwen3ForCausalLM, seed, 1 + seed % 2, tie_word_embeddings=True); self.old, self.ref = near(self.model, seed + 50), near(self.model, seed + 60)
        self.critic = qwen(Qwen3ForTokenClassification, seed + 70, 1, num_labels=1)
        self.rollouts = [([self.recorded(c, r) for c in calls], trained) for calls, trained in self.rollouts]

    def recorded(self, c, r):
        "What the engine would have recorded: near the old policy, some tokens far off."
        ids = torch.tensor(c.prompt_ids.tolist() + c.output_ids.tolist()); lp = (self.old(ids[None]).logits[0] / self.T).log_softmax(-1)
        old = lp[torch.arange(len(c.prompt_ids) - 1, len(ids) - 1), ids[len(c.prompt_ids):]].numpy(); n = len(old)
        return replace(c, logprobs=(old + r.normal(size=n) * .5 + 12. * (r.random(n) < .05)).astype(np.float32))

@lru_cache(4)
def step(seed): return Step(seed)

# -- the reference: one forward pass per call --------------------------------------------------------------------------------------
class Reference:
    def __init__(self, s):
        self.s, self.entry, self.calls = s, {}, {}                                                         # entry: (rollout, ids up to and with the token) -> its facts
        for k, (calls, trained) in enumerate(s.rollouts):
            mine = [c for c, t in zip(calls, trained) if t]; self.calls[k] = mine
            for c in mine:
                p, o = c.prompt_ids.tolist(), c.output_ids.tolist(); ids = torch.tensor(p + o)
                lp = [(m(ids[None]).logits[0] / s.T).log_softmax(-1) for m in (s.model, s.old, s.ref)]
                v = s.critic(ids[None]).logits[0, :, 0]
                for j, t in enumerate(o):
                    at = len(p) + j - 1
                    self.entry.setdefault((k, *p, *o[:j + 1]), dict(rollout=k, call=c, logp=lp[0][at, t], old=float(lp[1][at, t]), ref=float(lp[2][at, t]), H=-(lp[0][at].exp() * lp[0][at]).sum(),
                                                                    behav=float(c.logprobs[j]), value=v[at], V=v[at].item()))
        first = {}
        for k, (calls, _) in enumerate(s.rollouts):
            for i, c in enumerate(calls):
                ids = c.prompt_ids.tolist() + c.output_ids.tolist()
                for d in range(1, len(ids) + 1): first.setdefault((k, *ids[:d]), i)
        self.paths = {}
        for k, mine in self.calls.items():
            full = {tuple(c.prompt_ids.tolist() + c.output_ids.tolist()) for c in mine}
            ends = [x for x in full if not any(len(y) > len(x) and y[:len(x)] == x for y in full)]
            self.paths[k] = sorted(ends, key=lambda x: [first[(k, *x[:d])] for d in range(1, len(x) + 1)])
        for (k, *ids), e in self.entry.items():
            through = [i for i, x in enumerate(self.paths[k]) if x[:len(ids)] == tuple(ids)]
            e['g'], e['owner'] = len(through), through[0]

    def flat(self, k):
        r = [x for x, g in zip(self.s.R, GROUPS) if g == GROUPS[k]]; return max(r) - min(r) < 1e-6

    def group_adv(self, kind, std_norm=True, unit='rollout', call_discount=1.):
        "(rollout, call id) -> advantage; each rollout (or sample) weighs the same, spread over its calls."
        rows = []
        for k, mine in self.calls.items():
            w = len(self.paths[k]) if unit == 'sample' else 1
            rows += [(k, c.call_id, call_discount ** (len(mine) - 1 - i) * self.s.R[k], w / len(mine)) for i, c in enumerate(mine)]
        def centred(k):
            same = [x for x in rows if GROUPS[x[0]] == GROUPS[k]]; n = sum(x[3] for x in same)
            return sum(x[2] * x[3] for x in same) / n, n, same
        out, dev = {}, {}
        for k, c, x, w in rows: dev[k, c] = 0. if self.flat(k) else x - centred(k)[0]
        for k, c, x, w in rows:
            mean, n, same = centred(k)
            if kind == 'rloo': out[k, c] = dev[k, c] * n / (n - 1)
            elif kind == 'reinforce++':
                batch = [(dev[y[0], y[1]], y[3]) for y in rows if self.s.harness[y[0]] == self.s.harness[k]]
                out[k, c] = dev[k, c] / (math.sqrt(sum(d * d * v for d, v in batch) / sum(v for _, v in batch)) + 1e-6)
            else:
                std = math.sqrt(sum((y[2] - mean) ** 2 * y[3] for y in same) / n)
                out[k, c] = dev[k, c] / (std + 1e-6) if std_norm else dev[k, c]
        return out

    def gigpo(self, omega=1., step_discount=.95, std_norm=True):
        out = self.group_adv('grpo', std_norm=std_norm)
        rows = [(k, c, step_discount ** (len(mine) - 1 - i) * self.s.R[k]) for k, mine in self.calls.items() for i, c in enumerate(mine)]
        add = {}
        for k, c, x in rows:
            here = [y for j, d, y in rows if GROUPS[j] == GROUPS[k] and d.prompt_ids.tolist() == c.prompt_ids.tolist()]
            mean = sum(here) / len(here); std = math.sqrt(sum((y - mean) ** 2 for y in here) / len(here))
            add[k, c.call_id] = 0. if max(here) - min(here) <= 1e-6 else omega * ((x - mean) / (std + 1e-6) if std_norm else x - mean)
        return {kc: a + add[kc] for kc, a in out.items()}

    def ppo(self, gamma=1., lam=1., whiten_adv=False):
        "Entry -> (advantage, return): the mean over the retained paths through it of textbook GAE."
        per = {e: [] for e in self.entry}
        for k, paths in self.paths.items():
            for x in paths:
                on = [(k, *x[:d]) for d in range(1, len(x) + 1) if (k, *x[:d]) in self.entry]; a = 0.
                for i in reversed(range(len(on))):
                    v = self.entry[on[i]]['V']; last = i == len(on) - 1
                    a = self.s.R[k] - v if last else gamma * self.entry[on[i + 1]]['V'] - v + gamma * lam * a
                    per[on[i]].append(a)
        adv = {e: sum(a) / len(a) for e, a in per.items()}; ret = {e: a + self.entry[e]['V'] for e, a in adv.items()}
        if whiten_adv:
            m = sum(adv.values()) / len(adv); sd = math.sqrt(sum((a - m) ** 2 for a in adv.values()) / len(adv)); adv = {e: (a - m) / (sd + 1e-6) for e, a in adv.items()}
        return adv, ret

    def advantages(self, kind, **sw):
        "Entry -> advantage, entries whose group is skipped, entry -> return."
        if kind == 'ppo': adv, ret = self.ppo(**sw); return adv, set(), ret
        by = self.gigpo(**sw) if kind == 'gigpo' else self.group_adv(kind, **sw)
        adv = {e: by[f['rollout'], f['call'].call_id] for e, f in self.entry.items()}
        dead = {g for g in GROUPS if all(a == 0 for (k, _), a in by.items() if GROUPS[k] == g)}
        return adv, {e for e, f in self.entry.items() if GROUPS[f['rollout']] in dead}, None

    def coef(self, normalizer, weight):
        w = {e: {'once': 1, 'paths': f['g'], 'sqrt': f['g'] ** -.5}[weight] for e, f in self.entry.items()}
        key = {'token': lambda f: 0, 'rollout': lambda f: f['rollout'], 'prompt': lambda f: GROUPS[f['rollout']], 'sequence': lambda f: (f['rollout'], f['owner'])}[normalizer]
        tot = {}
        for e, f in self.entry.items(): tot[key(f)] = tot.get(key(f), 0) + w[e]
        return {e: w[e] / (len(tot) * tot[key(f)]) for e, f in self.entry.items()}

    def w(self, mode, cap=2.):
        ratio = {e: math.exp(f['old'] - f['behav']) for e, f in self.entry.items()}; out = {}
        for e, f in self.entry.items():
            mine = [ratio[x] for x, y in self.entry.items() if y['call'] is f['call']]
            out[e] = {'none': 1., 'token_tis': min(ratio[e], cap), 'mis': ratio[e] if 1 / cap <= ratio[e] <= cap else 0., 'seq_tis': min(math.prod(mine), cap),
                      'veto': 0. if min(mine) < 1e-4 else min(ratio[e], cap)}[mode]
        return out

    def loss(self, adv, skipped, coef, w, kind='ppo', dual_clip=3., kl=.001, entropy=0.):
        total = 0. * next(iter(self.entry.values()))['logp']
        for e, f in self.entry.items():
            if e in skipped: continue
            rho, A = torch.exp(f['logp'] - f['old']), adv[e]
            if kind == 'cispo': J = min(rho.item(), 5.) * A * f['logp']
            else:
                J = torch.minimum(rho * A, rho.clamp(.8, 1.28) * A)
                if A < 0 and dual_clip: J = J.clamp(min=dual_clip * A)
            d = f['ref'] - f['logp']
            total = total - coef[e] * w[e] * (J - kl * (torch.exp(d) - d - 1)) - entropy * coef[e] * f['H']
        return total

    def value_loss(self, ret, coef, clip):
        total = 0.
        for e, f in self.entry.items():
            v, old = f['value'], f['V'] + .3 * math.sin(len(e)); err = (v - ret[e]) ** 2
            if clip: err = torch.maximum(err, (old + (v - old).clamp(-clip, clip) - ret[e]) ** 2)
            total = total + coef[e] * err / 2
        return total

@lru_cache(4)
def reference(seed): return Reference(step(seed))

# -- the library -------------------------------------------------------------------------------------------------------------------
class Packed:
    "Some rollouts of a step in one layout: graphs of log-prob, entropy and value, kept for all objectives."
    def __init__(self, s, trees, b, which, layout):
        self.index, self.logp, self.H, self.value = [], [], [], []
        longest = max(int(t.depth_T.max()) + 1 for t in trees)
        if layout == 'paths': return self._paths(s, trees, b)
        for f in pack([trees[i] for i in which], {'whole': None, 'cut': longest + 6, 'tight': longest}[layout]):
            back = np.cumsum([0] + [len(trees[i].ids_T) for i in which]); self.index.append(f.index_E + (b.offset_R[which] - back[:-1])[f.tree_E])
            lp, H = logprobs(s.model, f, temperature=s.T, entropy=True); self.logp.append(lp); self.H.append(H); self.value.append(values(s.critic, f))

    def _paths(self, s, trees, b):
        done = set()
        for k, t in enumerate(trees):
            for leaf in t.leaves:
                p = t.path_positions(leaf); j = np.array([i for i in range(1, len(p)) if t.train_T[p[i]] and (k, p[i]) not in done]); done.update((k, p[i]) for i in j)
                if not len(j): continue
                ids = torch.tensor(t.ids_T[p].astype(np.int64)); lp = (s.model(ids[None]).logits[0] / s.T).log_softmax(-1)
                self.index.append(b.offset_R[k] + p[j]); self.logp.append(lp[j - 1, ids[j]]); self.H.append(-(lp.exp() * lp).sum(-1)[j - 1]); self.value.append(s.critic(ids[None]).logits[0, j - 1, 0])

    def at_T(self, parts, n):
        out = np.full(n, np.nan)
        for i, x in zip(self.index, parts): out[i] = x.detach().numpy()
        return out

class Library:
    def __init__(self, seed, weight='once', order=slice(None), backwards=False):
        s = self.s = step(seed); self.pick = list(range(5))[order]
        self.trees = [build_tree(reversed(s.rollouts[k][0]) if backwards else s.rollouts[k][0], weight=weight) for k in self.pick]
        self.groups, self.R, self.harness = ([x[k] for k in self.pick] for x in (GROUPS, s.R, s.harness))
        self.b = concat(self.trees, self.groups); self.n, self.cache = len(self.b.train_T), {}
        f, = pack(self.trees); self.old_T, self.ref_T = np.full(self.n, np.nan), np.full(self.n, np.nan)
        for to, m in ((self.old_T, s.old), (self.ref_T, s.ref)): to[f.index_E] = logprobs(m, f, temperature=s.T).numpy()
        self.V_T = self.packed('whole').at_T(self.packed('whole').value, self.n)

    def packed(self, layout, which=None):
        which = tuple(range(5)) if which is None else which
        if (layout, which) not in self.cache: self.cache[layout, which] = Packed(self.s, self.trees, self.b, list(which), layout)
        return self.cache[layout, which]

    def weighted(self, weight):
        "The same step with other token weights: nothing is computed again."
        trees = [build_tree(t.calls, weight=weight) for t in self.trees]; assert all(np.array_equal(x.ids_T, y.ids_T) for x, y in zip(trees, self.trees))
        return np.concatenate([t.weight_T for t in trees])

    def arrays(self, kind, switches, correction, normalizer, weight):
        b, on = self.b, self.b.train_T
        adv, m = advantages(kind, self.trees, self.R, self.groups, harness_R=self.harness, values_T=self.V_T, **switches)
        coef = loss_coef(b.train_T, b.owner_T, b.rollout_T, b.group_T, self.weighted(weight), normalizer=normalizer)
        w = np.zeros(self.n); w[on] = is_weights(self.old_T[on], b.logprobs_T[on], b.call_T[on], mode=correction)
        return adv, np.where(m['skipped'][b.rollout_T], 0, coef), w, m.get('returns'), coef

    def loss(self, p, adv, coef, w, **kw):
        return sum(policy_loss(x, self.old_T[i], adv[i], coef[i], w[i], ref_E=self.ref_T[i], entropy_E=H, **kw)[0] for i, x, H in zip(p.index, p.logp, p.H))

    def value_loss(self, p, ret, coef, clip):
        old = self.V_T + .3 * np.sin(self.depth() + 2)
        return sum(value_loss(v, ret[i], coef[i], old_E=old[i], clip=clip)[0] for i, v in zip(p.index, p.value))

    def depth(self): return np.concatenate([t.depth_T for t in self.trees])
    def keys(self): return [(self.pick[k], *self.trees[k].path_ids(int(t)).tolist()) for k in range(5) for t in np.flatnonzero(self.trees[k].train_T)]

@lru_cache(4)
def library(seed): return Library(seed)

# -- objectives: each switch alone, and random combinations of all ---------------------------------------------------------------
KINDS = [('grpo', {}), ('grpo', dict(std_norm=False)), ('grpo', dict(unit='sample')), ('grpo', dict(call_discount=.8)), ('grpo', dict(unit='sample', call_discount=.8)), ('rloo', {}), ('rloo', dict(call_discount=.7)),
         ('reinforce++', {}), ('reinforce++', dict(unit='sample')), ('reinforce++', dict(call_discount=.8)), ('gigpo', {}), ('gigpo', dict(omega=.5, step_discount=.8, std_norm=False)), ('ppo', {}), ('ppo', dict(gamma=.95, lam=.9)), ('ppo', dict(lam=.5, whiten_adv=True))]
AXES = dict(estimator=KINDS, correction=['token_tis', 'seq_tis', 'mis', 'veto', 'none'], normalizer=['rollout', 'token', 'sequence', 'prompt'], weight=['once', 'paths', 'sqrt'],
            loss=[{}, dict(dual_clip=None), dict(kind='cispo')], kl=[.001, 0., .3], entropy=[0., .05])
BASE = {k: v[0] for k, v in AXES.items()}

def pairs(c): return set(itertools.combinations([(k, AXES[k].index(v)) for k, v in c.items()], 2))

def choices():
    "Each switch alone, then one row for each estimator and correction, filled so that any two values of any two switches meet."
    rows = [BASE] + [{**BASE, k: v} for k, vs in AXES.items() for v in vs[1:]]; met, r = set().union(*map(pairs, rows)), np.random.default_rng(0)
    for e, c in itertools.product(AXES['estimator'], AXES['correction']):
        fill = [{k: vs[r.integers(len(vs))] for k, vs in AXES.items()} | dict(estimator=e, correction=c) for _ in range(30)]
        rows.append(max(fill, key=lambda x: len(pairs(x) - met))); met |= pairs(rows[-1])
    return rows

def label(c): return '-'.join(str(x).translate(str.maketrans('', '', "{}' ()")) for x in (*c['estimator'], c['correction'], c['normalizer'], c['weight'], c['loss'], c['kl'], c['entropy']))
CASES = [(i % 3, c) for i, c in enumerate(choices())]

def test_any_two_switches_meet():
    want = set().union(*({((a, i), (b, j)) for i in range(len(AXES[a])) for j in range(len(AXES[b]))} for a, b in itertools.combinations(AXES, 2)))
    assert want == set().union(*(pairs(c) for _, c in CASES))

def both(seed, c):
    "(reference loss, gradient), the library's arrays, loss options; arrays that come before the model are compared here."
    ref, lib = reference(seed), library(seed); (kind, sw), kw = c['estimator'], dict(c['loss'], kl=c['kl'], entropy=c['entropy'])
    a = lib.arrays(kind, sw, c['correction'], c['normalizer'], c['weight']); keys = lib.keys(); on = np.flatnonzero(lib.b.train_T)
    adv, skipped, ret = ref.advantages(kind, **sw); coef, w = ref.coef(c['normalizer'], c['weight']), ref.w(c['correction'])
    assert set(keys) == set(ref.entry)
    assert np.allclose(a[0][on], [adv[k] for k in keys], rtol=0, atol=1e-10) and np.allclose(a[4][on], [coef[k] for k in keys], rtol=1e-12)
    assert np.allclose(a[2][on], [w[k] for k in keys], rtol=1e-5) and {k for k, x in zip(keys, a[1][on]) if x == 0} == skipped
    w = dict(zip(keys, a[2][on]))                                                                            # float32 by definition: from here on the same numbers
    want = ref.loss(adv, skipped, coef, w, **kw); out = [(want.item(), grad(want, ref.s.model))]
    if ret is not None:
        clip = .2 if sw else None; want = ref.value_loss(ret, coef, clip); out.append((want.item(), grad(want, ref.s.critic)))
    return out, a, kw

def measured(lib, p, a, kw, critic):
    x = lib.loss(p, *a[:3], **kw); out = [(x.item(), grad(x, lib.s.model))]
    if critic is not None: x = lib.value_loss(p, a[3], a[4], critic[0]); out.append((x.item(), grad(x, lib.s.critic)))
    return out

@pytest.mark.parametrize('seed,c', CASES, ids=[f'{s}-{label(c)}' for s, c in CASES])
def test_one_loss_in_every_layout(seed, c):
    lib = library(seed); want, a, kw = both(seed, c); critic = (.2 if c['estimator'][1] else None,) if len(want) > 1 else None
    for layout in ('whole', 'paths', 'cut', 'tight'):
        for x, y in zip(want, measured(lib, lib.packed(layout), a, kw, critic), strict=True): same(x, y)
    assert want[0][1].abs().max() > 1e-6

def partitions(xs):
    if not xs: yield []; return
    head, *rest = xs
    for p in partitions(rest):
        yield [(head,), *p]
        for i in range(len(p)): yield [*p[:i], (head, *p[i]), *p[i + 1:]]

@pytest.mark.parametrize('k', range(len(KINDS)), ids=['-'.join(map(str, k)).replace("'", '') for k in KINDS])
def test_every_micro_batch_split_gives_the_same_step(k):
    "all 52 ways to deal five rollouts into micro-batches, each packed by itself, those of an odd number cut into forests of one path"
    c = {n: vs[k % len(vs)] for n, vs in AXES.items()} | dict(estimator=KINDS[k], entropy=.05); lib = library(k % 3); want, a, kw = both(k % 3, c)
    critic = (.2 if KINDS[k][1] else None,) if len(want) > 1 else None
    part = {s: measured(lib, lib.packed('tight' if len(s) % 2 else 'whole', s), a, kw, critic) for n in range(1, 6) for s in itertools.combinations(range(5), n)}
    ways = list(partitions(list(range(5)))); assert len(ways) == 52
    for way in ways:
        for i, x in enumerate(want): same(x, (sum(part[s][i][0] for s in way), sum(part[s][i][1] for s in way)))

@pytest.mark.parametrize('seed', range(3))
def test_any_split_of_the_entries_gives_the_same_loss(seed):
    "one token per micro-batch, and random cuts"
    lib = library(seed); _, a, kw = both(seed, {**BASE, 'kl': .3, 'entropy': .05}); p = lib.packed('whole'); whole = lib.loss(p, *a[:3], **kw); r = np.random.default_rng(seed)
    i, x, H = p.index[0], p.logp[0], p.H[0]; n = len(i)
    for parts in ([[e] for e in range(n)], *(np.array_split(r.permutation(n), m) for m in (2, 3, 7))):
        got = sum(policy_loss(x[e], lib.old_T[i[e]], a[0][i[e]], a[1][i[e]], a[2][i[e]], ref_E=lib.ref_T[i[e]], entropy_E=H[e], **kw)[0] for e in parts)
        same((whole.item(), torch.cat(torch.autograd.grad(whole, [x, H], retain_graph=True))), (got.item(), torch.cat(torch.autograd.grad(got, [x, H], retain_graph=True))))

@pytest.mark.parametrize('k', range(0, len(KINDS), 2))
def test_packing_order_does_not_matter(k):
    c = {n: vs[k % len(vs)] for n, vs in AXES.items()} | dict(estimator=KINDS[k]); want, *_, kw = both(1, c)
    for order in (slice(None, None, -1),):
        lib = Library(1, order=order); a = lib.arrays(*c['estimator'], c['correction'], c['normalizer'], c['weight']); same(want[0], measured(lib, lib.packed('whole'), a, kw, None)[0])

@pytest.mark.parametrize('normalizer', ['rollout', 'token', 'prompt'])
def test_sibling_order_does_not_matter(normalizer):
    "calls that arrive backwards; `sequence` is left out: its samples are owner paths, which are *defined* by the order of siblings"
    c = {**BASE, 'normalizer': normalizer, 'weight': 'sqrt', 'kl': .3}
    for seed, kind in ((0, KINDS[0]), (1, ('gigpo', {})), (2, ('ppo', dict(gamma=.95, lam=.9)))):
        want, *_, kw = both(seed, {**c, 'estimator': kind}); lib = Library(seed, backwards=True); a = lib.arrays(*kind, c['correction'], normalizer, c['weight'])
        same(want[0], measured(lib, lib.packed('cut'), a, kw, None)[0])

def test_the_random_rollouts_have_what_they_should():
    "forks, shared samples, retries, side calls, cuts: or the tests above prove little"
    kinds = [f for seed in range(3) for t in library(seed).trees for f in t.fate_C]; assert 'abandoned' in kinds
    trees = [t for seed in range(3) for t in library(seed).trees]
    assert sum(t.stats['shared'] for t in trees) > 2 and sum(len(t.leaves) for t in trees) > 20 and any('side' in t.role_C for t in trees) and max(t.leaves_T.max() for t in trees) > 2
    for seed in range(3):
        f = pack(library(seed).trees, max(int(t.depth_T.max()) + 1 for t in library(seed).trees)); assert len(f) > 2 and sum(x.extra for x in f) > 0
        w = [reference(seed).w(mode).values() for mode in ('mis', 'veto', 'seq_tis')]; assert 0 < sum(x == 0 for x in w[0]) < len(w[0]) / 2 and 0 < sum(x == 0 for x in w[1]) < len(w[1]) and 2. in w[2]
        rho = np.exp(library(seed).packed('whole').at_T(library(seed).packed('whole').logp, library(seed).n) - library(seed).old_T); assert (rho > 1.28).any() and (rho < .8).any()

# -- who sees whom ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('kernel', ['cascade', 'per_node'])
def test_a_sibling_changes_nothing_and_an_ancestor_changes_all_descendants(seed, kernel):
    s, lib = step(seed), library(seed); f, = pack(lib.trees); r = np.random.default_rng(seed)
    look = lambda f: torch.stack([logprobs(s.model, f, kernel=kernel), values(s.critic, f, kernel=kernel)]).detach()
    base = look(f)
    for t in [0, *r.choice(len(f), 12, replace=False)]:
        ids = f.ids_T.copy(); ids[t] = (ids[t] + 1 + r.integers(VOCAB - 2)) % VOCAB; d = (look(replace(f, ids_T=ids)) - base).abs()
        below = np.array([f.enter_N[f.node_T[t]] <= f.enter_N[f.node_T[p]] < f.exit_N[f.node_T[t]] and p >= t for p in f.pos_E])
        assert (d[:, ~below] < 1e-13).all() and (d[0, below] > 1e-9).all() and (d[1, below & (f.pos_E != t)] > 1e-9).all()
        assert (d[1, f.pos_E == t] < 1e-13).all()                                                           # a value is of the state before its token

# -- tree-GAE ------------------------------------------------------------------------------------------------------------------------
def trees_and_values():
    return st.integers(1, 40).flatmap(lambda n: st.tuples(st.lists(st.integers(1, 4), min_size=n, max_size=n), st.lists(st.booleans(), min_size=n, max_size=n), st.integers(0, 2 ** 31)))

def unpack(x):
    back, train, seed = x; n = len(back); r = np.random.default_rng(seed)
    parent = np.array([max(-1, i - b) if r.random() < .3 else i - 1 for i, b in enumerate(back)])
    return parent, np.array(train), np.where(train, r.normal(size=n), np.nan), float(r.random())

def textbook(v, R, gamma, lam):
    "GAE by its definition: the sum of (gamma lam)^l delta, with R at the last token."
    delta = [(R if i == len(v) - 1 else gamma * v[i + 1]) - v[i] for i in range(len(v))]
    return [sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(v))) for i in range(len(v))]

GAMMAS = st.sampled_from([(1., 1.), (.9, .5), (1., .95), (.99, 1.), (.7, 0.), (0., .5)])

@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(-2, 2)), min_size=1, max_size=30), GAMMAS, st.floats(-1, 1))
def test_tree_gae_without_forks_is_textbook_gae(tokens, gl, R):
    train = np.array([t for t, _ in tokens]); V = np.array([v for _, v in tokens])
    adv, ret = tree_gae(V, np.arange(-1, len(V) - 1), train, R, gamma=gl[0], lam=gl[1])
    assert np.allclose(adv[train], textbook(V[train].tolist(), R, *gl), atol=1e-12) and np.allclose(ret[train], adv[train] + V[train]) and (adv[~train] == 0).all() and (ret[~train] == 0).all()

@settings(max_examples=150, deadline=None)
@given(trees_and_values())
def test_tree_gae_at_one_is_reward_minus_value(x):
    parent, train, V, R = unpack(x); adv, ret = tree_gae(V, parent, train, R)
    assert np.allclose(adv[train], R - V[train], atol=1e-14) and np.allclose(ret[train], R, atol=1e-14)

@settings(max_examples=250, deadline=None)
@given(trees_and_values(), GAMMAS)
def test_tree_gae_is_the_mean_over_the_paths_through_a_token(x, gl):
    parent, train, V, R = unpack(x); adv, ret = tree_gae(V, parent, train, R, gamma=gl[0], lam=gl[1])
    line = lambda t: [] if t < 0 else line(int(parent[t])) + [t]
    paths = {t: [p for p in line(t) if train[p]] for t in np.flatnonzero(train).tolist()}
    ends = [t for t in paths if not any(t in q[:-1] for q in paths.values())]; per = {t: [] for t in paths}
    for e in ends:
        for p, a in zip(paths[e], textbook(V[paths[e]].tolist(), R, *gl)): per[p].append(a)
    for t, a in per.items(): assert np.isclose(adv[t], np.mean(a), atol=1e-12) and np.isclose(ret[t], adv[t] + V[t], atol=1e-12)
    assert (adv[~train] == 0).all()
