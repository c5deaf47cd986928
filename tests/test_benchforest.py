"""study.benchforest: both sides compute one loss and one gradient, and the bounds are those of the forest."""
import pytest, torch
from clawlab.records import InputError
from clawlab.learn.forest import bounds
from clawlab.study import benchforest as B

@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(B, 'CASES', {'turns': B.Case(3, 3, 20, 4, 6, 5), 'critic': B.Case(3, 2, 20, 4, 6, 5, True), 'chain': B.Case(1, 4, 0, 8, 6, 5)})
    monkeypatch.setattr(B, 'SHAPE', dict(B.SHAPE, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8))

@pytest.mark.parametrize('case', ['turns', 'critic', 'chain'])
def test_every_side_computes_the_same_step(small, case):
    run, trees, forests, models = B.systems(case); got = {}
    for name, f in run.items(): s = f(); got[name] = s['loss'], torch.cat([p.grad.flatten() for m in models for p in m.parameters()])
    loss, g = got.pop('forest'); assert got and g.abs().max() > 1e-3
    for l, x in got.values(): assert abs(l - loss) < 1e-4*abs(loss) and (x - g).abs().max() < 1e-4*g.abs().max()
    b = B.case_bounds(trees, forests, 'paths', models)
    if case != 'critic': ours = bounds(models[0], trees, forests); assert b == pytest.approx({k: ours[k] for k in b})

def test_each_trained_token_is_in_one_row(small):
    trees = B.trees_of(B.CASES['turns']); want = sum(int(t.train_T.sum()) for t in trees)
    for layout, n in (('calls', 9), ('paths', 3)):
        rows = B.rows_of(trees, layout); assert len(rows) == n and sum(len(m) for _, m in rows) == want
        batches = B.micro_batches(rows, 120); assert sum(map(len, batches)) == n and all(len(b)*len(b[0][0]) <= 120 or len(b) == 1 for b in batches)

def test_rows_and_goals(small):
    said = []; rows, goals = B.bench_forest(['turns'], repeats=2, memory=False, say=said.append)
    assert len(goals) == 2 and all('FLOP bound' in g for g in goals) and len(said) >= 6
    v = {(r['system'], r['metric']): r['value'] for r in rows}
    assert v['calls', 'tokens'] > v['paths', 'tokens'] > v['forest', 'tokens'] and abs(v['paths', 'of_bound'] - v['paths', 'speedup']/v['paths', 'flop_bound']) < 1e-9
    with pytest.raises(InputError, match='unknown case'): B.bench_forest(['nothing'])
