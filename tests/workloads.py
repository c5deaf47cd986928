"""Workloads of the tree: simulated harnesses, the shape of real runs, and what must hold of every tree. (The long rollout of `clawlab bench tree` is `clawlab.study.benchtree.long_rollout`.)"""
import json
from dataclasses import dataclass, field
from pathlib import Path
import numpy as np
from clawlab.records import CALL_ROLES, Call
from clawlab.learn.tree import FATES

# --- what must hold

POW = np.cumprod(np.array([1] + [0x9E3779B97F4A7C15]*(1 << 18), np.uint64))

def prefixes(c):
    "A key of each prefix of prompt + output: equal for equal ids."
    ids = np.concatenate([c.prompt_ids, c.output_ids]).astype(np.uint64) + np.uint64(7)
    return np.cumsum(ids*POW[:len(ids)]) ^ (np.arange(len(ids), dtype=np.uint64) << np.uint64(45))

def invariants(t):
    "Algorithms, sections 2 and 3, of a tree of any size, without looking at how it was built."
    n, owner, sampled = len(t.ids_T), {}, []
    for c, (p, o) in zip(t.calls, t.expand(), strict=True):
        assert len(c.output_ids) == len(c.logprobs) == len(c.versions)
        assert p.tobytes() == c.prompt_ids.tobytes() and o.tobytes() == c.output_ids.tobytes()
    keys = [prefixes(c) for c in t.calls]
    assert len(np.unique(np.concatenate(keys))) == n if t.calls else n == 0                # one position a prefix, and one prefix a position
    at = np.zeros(n, np.uint64)
    for c, k, e in zip(t.calls, keys, t.end_C): at[t.flat.path(e, 0, len(k))] = k
    for i in sorted(range(len(t.calls)), key=lambda i: t.calls[i].seq):
        c, P, kept = t.calls[i], len(t.calls[i].prompt_ids), int(t.kept_C[i])
        assert kept == (len(c.output_ids) if t.fate_C[i] == 'accepted' else kept if t.fate_C[i] == 'aborted' else 0) <= len(c.output_ids)
        if c.role in t.train_roles and not t.discarded:
            sampled.append(keys[i][P:P+kept])
            for j, k in enumerate(keys[i][P:P+kept].tolist()): owner.setdefault(k, (i, j))
    assert np.array_equal(np.sort(at[t.train_T]), np.unique(np.concatenate([np.zeros(0, np.uint64), *sampled])))   # trained once, and nothing else
    for p in np.flatnonzero(t.train_T):                                                      # log-prob and version of the earliest
        i, j = owner[int(at[p])]
        c = t.calls[i]
        assert t.call_T[p] == i and t.versions_T[p] == c.versions[j] and np.array_equal(t.logprobs_T[p], c.logprobs[j], equal_nan=True)
    s = t.stats
    assert s['trained'] == s['sampled'] - s['shared'] == int(t.train_T.sum()) and s['sampled'] == sum(map(len, sampled))
    assert s['tokens'] == n == len(t.trie) and s['flat_tokens'] == sum(map(len, keys))
    assert set(t.role_C) <= set(CALL_ROLES) and set(t.fate_C) <= set(FATES)
    assert sum(s['roles'].values()) == sum(s['fates'].values()) == s['calls'] == len(t.calls)
    assert sum(s['role_tokens'].values()) == sum(s['fate_tokens'].values()) == sum(len(c.output_ids) for c in t.calls)
    assert all(r for r, f, c in zip(t.reason_C, t.fate_C, t.calls) if f in ('quarantined', 'abandoned') or c.role not in t.train_roles)
    assert sum(s['reasons'].values()) == sum(map(bool, t.reason_C))
    T = np.arange(n)
    assert (t.parent_T < T).all() and (t.depth_T == np.where(t.parent_T >= 0, t.depth_T[t.parent_T] + 1, 0)).all() if n else True
    assert not len(t.leaves) or t.train_T[t.leaves].all()
    assert ((t.leaves_T > 0) == (t.owner_T >= 0)).all() and (t.leaves_T[t.train_T] > 0).all() and (t.parent_T[t.train_T] >= 0).all()
    return t

# --- simulated harnesses

OPS = ('step', 'step', 'step', 'retry', 'regenerate', 'twins', 'fork', 'compact', 'spawn', 'title', 'cut', 'foreign')

@dataclass
class Context:
    "A conversation: tokens before the first turn, and (thinking, text, result, call_id) of each turn."
    head: list
    role: str = 'main'
    turns: list = field(default_factory=list)
    last: str | None = None

class Harness:
    "Plays operations and notes the fate that each call must have, as the harness knows it. `forgets`: its template drops earlier thinking; `reminds`: a reminder always stands at the end; `words`: 0 = every token is new, else a vocabulary so small that histories collide."
    def __init__(self, rng, *, words=0, forgets=False, reminds=False):
        self.rng, self.words, self.forgets, self.reminds, self.next = rng, words, forgets, reminds, 1000
        self.calls, self.fates, self.kept = [], {}, {}
        self.contexts = [Context(self.some(3, 6))]

    def some(self, a, b):
        n = self.rng.randint(a, b)
        if self.words: return [self.rng.randint(1, self.words) for _ in range(n)]
        self.next += n
        return list(range(self.next - n, self.next))

    def prompt(self, x):
        out = list(x.head)
        for think, text, result, _ in x.turns: out += [*(() if self.forgets else think), *text, *result]
        return out + [501, 502]*self.reminds

    def ask(self, x, out, fate='accepted', prompt=None, role=None, parent=..., **kw):
        i = len(self.calls); cid = f'c{i}'; parent = x.last if parent is ... else parent
        kw.setdefault('delivered', ('yes',))
        self.calls.append(Call(cid, 'r', i, self.prompt(x) if prompt is None else prompt, out, [-self.rng.randint(1, 999)/256 for _ in out], [i//3]*len(out),
                               parent_id=parent, anchor_id=parent, role=role or x.role, role_reason='' if (role or x.role) == 'main' else 'simulated', **kw))
        self.fates[cid] = fate
        return cid

    def turn(self, x, keep=None):
        "A turn that the harness goes on from."
        think, text, result = self.some(0, 3), self.some(1, 4), self.some(1, 5)
        cid = self.ask(x, think + text)
        x.turns.append((think, text, result, cid)); x.last = cid

    def play(self, op):
        r = self.rng; x = r.choice(self.contexts)
        if op == 'retry': self.ask(x, self.some(1, 4), 'abandoned', delivered=('no',)); self.turn(x)
        elif op == 'regenerate': self.ask(x, self.some(1, 4), 'abandoned'); self.turn(x)     # read by a person, and asked for again
        elif op == 'twins':                                                                  # best of two, and both go on
            y = Context(x.head, x.role, list(x.turns), x.last); self.turn(x); self.turn(y); self.turn(x); self.turn(y)
            self.contexts.append(y)
        elif op == 'fork' and x.turns:                                                       # a person goes back, and on from there with other words
            k = r.randrange(len(x.turns)); think, text, _, cid = x.turns[k]
            y = Context(x.head, x.role, [*x.turns[:k], (think, text, self.some(1, 5), cid)], cid); self.turn(x); self.turn(y); self.contexts.append(y)
        elif op == 'compact' and x.turns:
            summary = self.some(2, 6); self.ask(x, summary, prompt=self.prompt(x) + [503], role='compaction')
            x.head, x.turns, x.last = self.some(2, 4) + summary, [], None; self.turn(x)
        elif op == 'spawn': self.contexts.append(y := Context(self.some(3, 6), 'subagent')); self.turn(y)
        elif op == 'title': self.ask(x, self.some(1, 3), prompt=self.some(2, 5), role='side', parent=None)
        elif op == 'foreign': self.ask(x, self.some(1, 4), 'quarantined', quarantine='user agent', parent=x.last)
        elif op == 'cut':                                                                    # a stream was cut; the harness keeps what it has seen
            out = self.some(2, 5); k = r.randint(1, len(out) - 1); cid = self.ask(x, out, 'aborted', finish='aborted', delivered=('unknown',))
            x.turns.append(([], out[:k], self.some(1, 4), cid)); x.last = cid; self.kept[cid] = 0 if self.reminds else k; self.turn(x)
        else: self.turn(x)

def simulated(rng, ops, **kw) -> Harness:
    h = Harness(rng, **kw)
    for op in ops: h.play(op)
    return h

# --- real runs

def shape(calls) -> list:
    "What a run looks like without its words: each call as [parent, anchor, call it shares most with, tokens shared, prompt, output, role, finish, delivered, drift]."
    rows, index, full = [], {c.call_id: i for i, c in enumerate(calls)}, [np.concatenate([c.prompt_ids, c.output_ids]) for c in calls]
    for i, c in enumerate(calls):
        best = (0, -1)
        for j in range(i):
            n = min(len(full[i]), len(full[j])); d = np.flatnonzero(full[i][:n] != full[j][:n]); best = max(best, (int(d[0]) if len(d) else n, j))
        rows.append([index.get(c.parent_id, -1), index.get(c.anchor_id, -1), best[1], best[0], len(c.prompt_ids), len(c.output_ids), c.role, c.finish, ''.join(x[0] for x in c.delivered), c.drift])
    return rows

def shaped(rows) -> list[Call]:
    "Calls of that shape: new ids wherever a call leaves those before it."
    out, full, new, spelled = [], [], 0, dict(y='yes', n='no', u='unknown')
    for i, (parent, anchor, like, shared, p, o, role, finish, delivered, drift) in enumerate(rows):
        ids = np.arange(new, new + p + o - shared, dtype=np.int32); new += len(ids)
        full.append(ids := np.concatenate([full[like][:shared], ids]) if shared else ids)
        out.append(Call(f'c{i}', 'r', i, ids[:p], ids[p:], np.full(o, -.5), np.full(o, i), finish, f'c{parent}' if parent >= 0 else None, f'c{anchor}' if anchor >= 0 else None,
                        role=role, role_reason='' if role == 'main' else 'recorded', delivered=tuple(spelled[x] for x in delivered), drift=drift))
    return out

def real_runs() -> dict:
    "`{harness: [(calls, what the tree of the real run counted), ...]}`."
    d = json.loads((Path(__file__).parent/'real_runs.json').read_text())
    return {h: [(shaped(r['calls']), r['stats']) for r in rs] for h, rs in d.items()}
