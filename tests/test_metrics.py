"Metrics against values worked out by hand and against counting every draw; what is left out is counted."
import itertools, json, math, random
import numpy as np, pytest
from clawlab.records import InputError, Rollout
from clawlab.study import behavior as B, metrics as M, report as P

def trials(of: dict, outcome='ok'):
    "`{task: [reward or None]}` as rollouts."
    return [Rollout(f'{t}.{i}', t, 'h', outcome=outcome if x is not None else 'infra_fail', sample=i, reward=x) for t, v in of.items() for i, x in enumerate(v)]

@pytest.mark.parametrize('n', range(1, 8))
def test_pass_at_k_and_pass_hat_k_are_the_share_of_all_draws(n):
    for c in range(n + 1):
        outcomes = [1]*c + [0]*(n - c)
        for k in range(1, n + 1):
            draws = list(itertools.combinations(outcomes, k))
            assert M.pass_at(n, c, k) == pytest.approx(sum(any(d) for d in draws)/len(draws)) and M.pass_hat(n, c, k) == pytest.approx(sum(all(d) for d in draws)/len(draws)), (c, k)

def test_by_hand():
    assert M.pass_at(10, 3, 5) == pytest.approx(1 - 21/252) and M.pass_hat(10, 3, 2) == pytest.approx(3/45)     # C(7,5) = 21, C(10,5) = 252; C(3,2) = 3, C(10,2) = 45
    assert M.pass_at(5, 2, 1) == M.pass_hat(5, 2, 1) == pytest.approx(.4) and M.pass_at(4, 1, 4) == 1 and M.pass_hat(4, 3, 4) == 0
    assert M.pass_at(2000, 1, 1000) == .5   # no overflow, exact

def test_they_are_unbiased_and_the_plug_in_is_not():
    p, n, k = .3, 5, 3
    pmf = [math.comb(n, c)*p**c*(1 - p)**(n - c) for c in range(n + 1)]
    assert sum(w*M.pass_at(n, c, k) for c, w in enumerate(pmf)) == pytest.approx(1 - (1 - p)**k)
    assert sum(w*M.pass_hat(n, c, k) for c, w in enumerate(pmf)) == pytest.approx(p**k)
    assert abs(sum(w*(1 - (1 - c/n)**k) for c, w in enumerate(pmf)) - (1 - (1 - p)**k)) > .05

@pytest.mark.parametrize('n, c, k', [(3, 1, 4), (0, 0, 1), (3, 4, 2), (3, -1, 2), (3, 1, 0)])
def test_more_draws_than_trials_raise(n, c, k):
    for f in (M.pass_at, M.pass_hat):
        with pytest.raises(InputError, match=f'{k} of {n} trials'): f(n, c, k)

def test_tasks_with_too_few_trials_are_left_out_and_counted():
    rs = trials({'a': [1., 0., .8, .5], 'b': [1., 1., .75], 'c': [0., None, None, 1.], 'd': [None, None]})
    got = M.tries(rs, 3, n_boot=500)
    a, b = got['pass@3'], got['pass^3']   # a: n 4, c 2 (.8 passes, .5 doesn't); b: n 3, c 3; c has two valid trials, d none
    assert a['value'] == pytest.approx((1 + 1)/2) and b['value'] == pytest.approx((0 + 1)/2)
    for e in (a, b): assert (e['left_out'], e['tasks'], e['n'], e['resamples'], e['level']) == (2, 2, 7, 'tasks', .95) and e['low'] <= e['value'] <= e['high']
    assert M.tries(rs, 2, n_boot=10)['pass@2']['left_out'] == 1 and M.tries(rs, 4, n_boot=10)['pass^4']['value'] == 0
    with pytest.raises(InputError, match='no task has 5 valid trials; the most are 4'): M.tries(rs, 5)
    with pytest.raises(InputError, match='the most are 0'): M.tries([], 1)

def test_the_threshold_moves_passes_and_not_the_mean():
    rs = trials({'a': [.6, 0.]})
    assert M.tries(rs, 2, passing=.5, n_boot=10)['pass@2']['value'] == 1 and M.tries(rs, 2, n_boot=10)['pass@2']['value'] == 0
    strict, loose = M.cell(rs, n_boot=10), M.cell(rs, passing=.5, n_boot=10)
    assert strict['mean_score'] == loose['mean_score'] == strict['clawgym_pass_at_1'] == .3 and (strict['pass_rate'], loose['pass_rate']) == (0, .5)

def test_the_interval_of_pass_at_k_covers_as_often_as_it_says():
    "Sixty tasks with hidden pass rates, four trials each: the interval must contain the mean of 1 - (1 - p)^2 over the world the tasks come from, 1 - E (1-p)^2 = 2/3 for uniform p."
    hit = []
    for s in range(150):
        r = np.random.default_rng(s)
        e = M.tries(trials({f't{i}': r.binomial(1, p, 4).astype(float).tolist() for i, p in enumerate(r.uniform(size=60))}), 2, n_boot=300, seed=s)['pass@2']
        hit.append(e['low'] <= 2/3 <= e['high'])
    assert .88 <= np.mean(hit) <= .995, np.mean(hit)

def test_a_cell_says_pass_at_k_where_there_are_k_samples():
    c = M.cell(trials({f't{i}': [1., 0., 1., float(i % 2)] for i in range(12)}), n_boot=100)
    assert list(c['tries']) == ['pass@2', 'pass^2', 'pass@3', 'pass^3', 'pass@4', 'pass^4'] and c['tries']['pass^4']['value'] == 0 and c['tries']['pass@2']['value'] == pytest.approx((5/6 + 1)/2)
    assert M.cell(trials({'a': [1.], 'b': [0.]}), n_boot=10)['tries'] == {} == M.cell([], n_boot=10)['tries']
    json.dumps(c)
    page = P.cells_html(dict(arms={'sft': dict(harnesses={'react': json.loads(json.dumps(c))})}))
    assert 'pass@4 1.00 [1.00, 1.00]' in page and 'pass^4 0.00' in page and 'pass@2' not in page and 'left out' not in page
    c['tries']['pass^4']['left_out'] = 3
    assert '3 tasks with fewer trials left out' in P.cells_html(dict(arms={'sft': dict(harnesses={'react': c})}))

def test_labelled_zeros_are_counted_by_kind():
    rs = [Rollout(f'r{i}', f't{i}', 'h', outcome='ok', reward=0., scores={'code': 0., 'label': l} if l else {}) for i, l in enumerate(('gate: a', 'gate: b', 'protected: x changed', ''))]
    c = M.cell(rs, n_boot=10)
    assert c['labels'] == {'gate': 2, 'protected': 1} and '0 by gate 2, protected 1' in P.cells_html(dict(arms={'sft': dict(harnesses={'react': c})}))

def test_the_order_of_trials_does_not_matter():
    rs = trials({f't{i}': [float(i % 3 == 0), 1., 0.] for i in range(9)})
    assert M.cell(rs, n_boot=50) == M.cell(random.Random(1).sample(rs, len(rs)), n_boot=50)

BAD, GOOD = 'Exit code 1', 'fine'
def run(*turns, reward=1., task_id='t'): return B.chat_rollout([(c, o, o == BAD) for c, o in turns] + [('end', None, False)], reward=reward, task_id=task_id)

@pytest.mark.parametrize('turns, reward, reacted, mended, recovered', [
    ([('a', BAD), ('b', GOOD)], 1., True, True, True),
    ([('a', BAD), ('b', GOOD)], 0., True, True, False),    # recovered from the error, failed the task
    ([('a', BAD), ('a', BAD)], 1., False, False, False),   # solved all the same: no recovery
    ([('a', BAD), ('b', BAD)], 1., True, False, True),
    ([('a', BAD)], 1., False, False, False),
    ([('a', GOOD)], 1., None, None, None)])
def test_recovery_is_read_apart_from_success(turns, reward, reacted, mended, recovered):
    b = B.behavior(run(*turns, reward=reward))
    assert (b['reacted'], b['mended'], b['recovered']) == (reacted, mended, recovered)

def test_recovery_has_a_denominator_of_its_own():
    rs = [run(('a', BAD), ('b', GOOD), reward=x, task_id=f't{i}') for i, x in enumerate((1., 0., 0.))] + [run(('a', GOOD), task_id='x'), run(('a', GOOD), task_id='y', reward=0.)]
    got = B.recovery(rs, n_boot=100)
    assert got.pop('overcome') is None   # no tool of a task was made to fail
    assert {k: (v['value'], v['n'], v['of']) for k, v in got.items()} == dict(failed=(.6, 5, 5), reacted=(1, 3, 5), mended=(1, 3, 5), recovered=(pytest.approx(1/3), 3, 5))
    assert all(v['resamples'] == 'tasks' for v in got.values()) and B.recovery(rs[3:])['recovered'] is None

@pytest.mark.parametrize('scores, overcome', [({'faults': 2, 'recovered': 1}, .5), ({'faults': 0, 'recovered': 0}, None), ({}, None), ({'faults': 2}, None), ({'faults': 'many', 'recovered': 1}, None), ({'faults': True, 'recovered': True}, None)])
def test_injected_failures_are_counted_by_the_tools_themselves(scores, overcome):
    from dataclasses import replace
    assert B.behavior(replace(run(('a', GOOD)), scores=scores))['overcome'] == overcome
