"Studies: intervals on planted data, behaviour across harness styles, the page, and the runner's rails."
import json, os, re, subprocess, sys, time
from pathlib import Path
import nbformat as nbf, numpy as np, pytest
from clawlab.records import DataError, InputError, Message, Rollout, ToolCall
from clawlab.study import metrics as M, behavior as B, report as P, run as R, seeds as S, stages as T


def scores(p, n=108, k=4, seed=0):
    r = np.random.default_rng(seed)
    return {f't{i}': r.binomial(1, p, k).tolist() for i in range(n)}

def test_interval_covers_about_as_often_as_it_says():
    hit = []
    for s in range(200):
        r = np.random.default_rng(s); e = M.bootstrap({str(i): r.binomial(1, p, 2) for i, p in enumerate(r.beta(2, 3, 80))}, n_boot=300, seed=s)
        hit.append(e.low <= .4 <= e.high)
    assert .9 <= np.mean(hit) <= .99

def test_resampling_rollouts_instead_of_tasks_would_be_too_narrow():
    same = {f't{i}': [float(i % 2)]*20 for i in range(40)}  # samples of a task agree completely
    assert M.bootstrap(same).high - M.bootstrap(same).low > .25

def test_paired_gain_finds_a_planted_gain_and_no_gain():
    e = M.paired_gain(scores(.5, seed=1), scores(.3, seed=2))
    assert e.above0 and e.resamples == 'tasks' and e.tasks == 108 and e.n == 432
    null = [M.paired_gain(scores(.3, seed=2*s), scores(.3, seed=2*s + 1), n_boot=300) for s in range(200)]
    assert .01 < np.mean([e.above0 or e.below0 for e in null]) < .1  # false alarms: about 5%

def test_paired_gain_uses_only_common_tasks():
    e = M.paired_gain({'a': [1.], 'b': [1.], 'c': []}, {'a': [0.], 'c': [0.], 'd': [0.]})
    assert (e.value, e.tasks, e.n) == (1., 1, 1)

def test_missing_rewards_are_left_out_and_counted_never_zero():
    rs = [Rollout(f'r{i}', f't{i//2}', 'h', outcome=o, reward=x) for i, (o, x) in enumerate([('ok', 1.), ('infra_fail', None), ('timeout', .5), ('grader_fail', None)])]
    c = M.cell(rs, n_boot=100)
    assert (c['mean_score'], c['n'], c['missing'], c['pass_rate']) == (.75, 2, 2, .5) and '2 of 4' in c['warning']

def test_hierarchical_is_wider_than_pooled_when_seeds_disagree():
    by = {s: scores(p, seed=s) for s, p in enumerate([.2, .4, .6])}
    h, one = M.hierarchical(by), M.bootstrap(by[1])
    assert h.resamples == 'seeds and tasks' and h.high - h.low > 2*(one.high - one.low) and h.low < .4 < h.high

def test_hierarchical_covers_when_tasks_are_hard_for_every_seed():
    hit = []
    for k in range(100):
        r = np.random.default_rng(k); hard = r.normal(0, .35, 60)  # shared by the seeds: resampled apart it would cover 80%
        e = M.hierarchical({s: {f't{i}': [.2 + x + r.normal(0, .2)] for i, x in enumerate(hard)} for s in range(3)}, n_boot=300, seed=k)
        hit.append(e.low <= .2 <= e.high)
    assert np.mean(hit) >= .92

def test_one_seed_resamples_tasks_only_and_missing_tasks_stay_out():
    one = M.hierarchical({0: scores(.4)})
    assert one.resamples == 'tasks' and one.value == pytest.approx(M.bootstrap(scores(.4)).value)
    e = M.hierarchical({0: {'a': [1.], 'b': [0.], 'c': []}, 1: {'b': [1.], 'd': [1.]}}, n_boot=200)
    assert e.value == pytest.approx(.75) and e.tasks == 3 and 0 <= e.low <= e.high <= 1
    for bad in ({}, {0: {}}, {0: {'a': [1.]}, 1: {'a': []}}):
        with pytest.raises(DataError): M.hierarchical(bad)

# pooling runs
def finished(root, name, seed, gain, code='c', versions='1', **config):
    d = root/name; d.mkdir(parents=True); (d/'finished').write_text(''); (d/'code').write_text(code)
    (d/'results.json').write_text(json.dumps(dict(config=dict(seed=seed, **config), checks=dict(suite='x'), versions=dict(react=versions))))
    level = lambda up: {f't{i}': [float(i % 10 < 3 + 10*up)] for i in range(50)}
    (d/'scores.json').write_text(json.dumps({'sft': {'react|T=1': level(0)}, 'rl:react': {'react|T=1': level(gain)}, 'rl:mix': {'react|T=1': level(gain - .1)}, 'rl:react+ppo': {'react|T=1': level(gain + .2)}}))

def test_the_table_answers_the_question_of_its_study(tmp_path):
    for s, g in enumerate((.1, .2, .3)): finished(tmp_path, f'r{s}', s, g)
    res = S.pool_runs(tmp_path); mix = next(r for r in res['rows'] if (r['arm'], r['versus']) == ('rl:mix', 'rl:react'))
    assert mix['pooled']['value'] == pytest.approx(-.1) and list(mix['per_seed']) == [0, 1, 2] and res['notes'] == []
    assert 'rl:react | -0.100, -0.100, -0.100 | -0.100' in S.markdown(res)
    ppo = next(r for r in res['rows'] if (r['arm'], r['versus']) == ('rl:react+ppo', 'rl:react'))
    assert ppo['pooled']['value'] == pytest.approx(.2)

def test_the_table_says_what_it_does_not_know(tmp_path):
    finished(tmp_path, 'a', 0, .1); one = S.markdown(S.pool_runs(tmp_path))
    assert 'not about the methods' in one and 'seeds and tasks' not in one
    finished(tmp_path, 'b', 1, .1, code='other'); finished(tmp_path, 'c', 2, .1, lr=1)
    res = S.pool_runs(tmp_path)
    assert res['runs'] == ['a', 'b'] and any('library code' in n for n in res['notes']) and any('1 finished runs' in n for n in res['notes'])
    finished(tmp_path, 'd', 3, .1, lr=1)
    with pytest.raises(InputError, match='name the runs'): S.pool_runs(tmp_path)  # two sets of two: nobody guesses
    finished(tmp_path, 'e', 4, .1, versions='2')
    with pytest.raises(InputError, match='name the runs'): S.pool_runs(tmp_path, ['a', 'e'])  # other programs

def test_dropped_training_rollouts_are_a_warning():
    curve = lambda *xs: [dict(dropped_by_harness=dict(react=x)) for x in xs]
    assert T.dropped({'rl:react': curve(.2, 0.), 'rl:mix': curve(.04, .02)}) == ['rl:react: 10% of the training rollouts in react were left out']

def test_nothing_measured_is_nan_not_zero(): assert np.isnan(M.bootstrap({}).value) and M.bootstrap({}).n == 0

# behaviour
def test_results_are_matched_by_id_when_the_order_differs():
    a, b = ToolCall('a', 'bash', {'command': 'x'}), ToolCall('b', 'bash', {'command': 'y'})
    run = B.chat_rollout([('x', '', False), ('end', None, False)])
    first, second = run.calls
    first = R_(first, response=Message('assistant', '', tool_calls=(a, b)))
    ms = (Message('user', 'go'), Message('assistant', '', tool_calls=(a, b)), Message('tool', 'Y', tool_call_id='b'), Message('tool', 'X', tool_call_id='a'))
    assert [s.result.content for s in B.steps(R_(run, calls=(first, R_(second, messages=ms))))] == ['X', 'Y']

def R_(x, **kw):
    from dataclasses import replace
    return replace(x, **kw)

def test_side_quarantined_and_undelivered_calls_are_not_the_policys_turns():
    run = B.chat_rollout([('ls', '', False), ('pwd', '', False), ('cat a', '', False), ('end', None, False)])
    c = list(run.calls); c[0], c[1], c[2] = R_(c[0], role='side'), R_(c[1], quarantine='wrong user agent'), R_(c[2], delivered=('no',))
    assert B.behavior(R_(run, calls=tuple(c)))['calls'] == 1

@pytest.mark.parametrize('text,bad', [('{\n  "returncode": 127,\n  "output": "x"\n}', True), ('{"returncode": 0, "output": "exit code"}', False), ('Exit code 1\nls: no', True), ('', False),
                                      ('(exit code 2)', True), ('the function returns 3 items', False), ('exit status: -9', True)])
def test_failure_is_read_from_each_harness_own_wording(text, bad): assert B.failed(Message('tool', text)) is bad

@pytest.mark.parametrize('text,bad', [('Wall time: 0.0036 seconds\nOutput:\nerror: temporarily unavailable', True), ('Wall time: 0.0029 seconds\nOutput:\nsent', False), ('error: no such mail', True), ('{"result": "sent"}', False), ('No error: all sent', False),
    ('<untrusted_tool_result source="mcp__tools__mail_send">\n' + 'x'*300 + '\n\n{"error": "temporarily unavailable"}\n</untrusted_tool_result>', True), ('MCP tool \'mail_send\' reported tool error [{"error":{"content":[{"type":"text","text":"x"}],"isError":true}}]', True)])
def test_failure_of_a_tool_that_is_no_shell_is_read_from_words(text, bad):
    "As codex, opencode, hermes and qwen-code hand on an error of a task's own tool, seen in their runs; a shell may print such words."
    assert B.failed(Message('tool', text)) is B.failed(Message('tool', text), ToolCall('', 'mcp__tools__mail_send', {})) is bad and not B.failed(Message('tool', text), ToolCall('', 'bash', {'command': 'cat log'}))

@pytest.mark.parametrize('cmd,kinds', [('cp a b; ls', ['write', 'read']), ('cat a | sort > b', ['write']), ("grep '&& x' f && rm f", ['read', 'write']), ('python3 x.py', ['other']),
                                       ('cat "unclosed', ['read']), ('cat a 2>/dev/null', ['read']), ('sed -n 1p f', ['other']), ('', [])])
def test_kinds_of_shell_commands(cmd, kinds): assert B.kinds(ToolCall('', 'bash', {'command': cmd})) == kinds

def test_recovery_is_apart_from_success():
    rows = [B.behavior(B.chat_rollout([('x', 'Exit code 1', True), ('y', '', False), ('end', None, False)], reward=r, task_id=str(r))) for r in (0., 1.)]
    assert [r['reacted'] for r in rows] == [True, True] and [r['recovered'] for r in rows] == [False, True]
    assert B.behavior(B.chat_rollout([('x', '', False)]))['reacted'] is None

# report
def result(**kw):
    cell = dict(mean_score=.3, interval=[.2, .4], pass_rate=.25, pass_interval=[.1, .4], n=9, tasks=9, missing=0, resamples='tasks', warning='')
    g = dict(arm='rl:react', harness='react', versus='sft', decoding='T=1', value=.2, low=.1, high=.3, n=90, tasks=90, resamples='tasks')
    return {**dict(study='s', run='r', arms={'sft': dict(curve=[], harnesses={'react': cell}), 'rl:react': dict(curve=[], harnesses={'react': cell})}, gains=[g], stages=[], seeds=[0]), **kw}

def test_the_page_is_self_contained_and_escapes(tmp_path):
    page = P.write_report(result(question='<script>alert(1)</script> & more', config={'x': '</td><img src=http://a>'}), tmp_path).read_text()
    assert '<script' not in page and '<img' not in page and not re.search(r'(?:src|href)="(?!#)|url\((?!#)|@import', page)
    assert 'prefers-color-scheme:dark' in page and 'name="viewport"' in page

@pytest.mark.parametrize('low,high,want', [(.01, .3, 'better'), (-.1, .2, 'open'), (-.3, -.01, 'worse'), (0., .2, 'open')])
def test_verdict_follows_the_interval_only(low, high, want):
    g = dict(result()['gains'][0], low=low, high=high)
    assert P.verdicts(result(gains=[g]))[0]['judge'] == want
    assert ('raised the score in 1 of 1' in P.headline(result(gains=[g]))) is (want == 'better')

def test_a_floor_is_no_verdict():
    low = dict(mean_score=.0004, interval=[0, .001], pass_rate=0., n=36, tasks=36)
    g = dict(arm='rl:mix', harness='mini', versus='sft', decoding='T=1', value=-.0004, low=-.001, high=0., n=36, tasks=36)
    res = dict(arms={a: dict(harnesses={'mini': low}) for a in ('sft', 'rl:mix')}, gains=[g])
    assert P.verdicts(res)[0]['judge'] == 'floor' and 'neither side solves' in P.verdicts(res)[0]['text']
    assert '0 of 1 (arm, training harness) pairs' in P.headline(dict(res, train_harnesses=['mini'])) and 'neither side' in P.headline(dict(res, train_harnesses=['mini']))
    res['arms']['rl:mix']['harnesses']['mini'] = dict(low, mean_score=.1)
    assert P.verdicts(res)[0]['judge'] == 'open'

def test_three_tasks_that_agree_are_no_verdict():
    g = dict(result()['gains'][0], low=1., value=1., high=1., n=12, tasks=3)
    assert P.verdicts(result(gains=[g]))[0]['judge'] == 'few' and 'nothing to conclude' in P.headline(result(gains=[g]))

def test_greedy_gains_never_decide_the_verdict():
    assert P.verdicts(result(gains=[dict(result()['gains'][0], decoding='greedy')])) == []

def test_results_json_has_no_nan(tmp_path):
    P.write_report(result(gains=[dict(result()['gains'][0], value=float('nan'), low=np.float64('nan'), high=float('inf'))], x=np.arange(3)), tmp_path)
    d = json.loads((tmp_path/'results.json').read_text(), parse_constant=lambda c: pytest.fail(c))
    assert d['gains'][0]['value'] is None and d['x'] == [0, 1, 2] and d['verdicts'][0]['judge'] == 'missing'

def test_failed_exactness_is_shown_as_failed():
    x = dict(rollouts=3, calls=9, expand_failed=1, trained_mismatch=0, sampled=10, shared=1, trained=9, logprob_max_diff=.01, logprob_checked=10)
    assert P.exact_html({'exactness': x}).count("class='bad'") == 2 and 'Not checked' in P.exact_html({})

def test_a_page_whose_capture_was_not_exact_warns_first(tmp_path):
    x = dict(rollouts=3, calls=9, expand_failed=0, trained_mismatch=0, sampled=10, shared=1, trained=9, policy=9, logprob_max_diff=1e-5, logprob_checked=9)
    for bad, n in (({}, 0), (dict(trained_mismatch=1), 1), (dict(logprob_max_diff=None), 1)):
        P.write_report(result(exactness=dict(x, **bad)), tmp_path); assert len(json.loads((tmp_path/'results.json').read_text()).get('warnings', [])) == n

# stages: the checks of a study can fail
def played():
    run = B.chat_rollout([('ls', 'a', False), ('end', None, False)]); a, b = run.calls
    return R_(run, calls=(R_(a, prompt_ids=np.array([1, 2]), output_ids=np.array([3, 4]), logprobs=np.array([-.5, -.6]), versions=np.array([1, 1])),
                          R_(b, prompt_ids=np.array([1, 2, 3, 4, 5]), output_ids=np.array([6]), logprobs=np.array([-.7]), versions=np.array([1]))))

def test_exactness_notices_a_wrong_tree(monkeypatch):
    good = T.exact(played()); assert good['expand_ok'] and good['trained_ok'] and (good['sampled'], good['trained'], good['policy']) == (3, 3, 3)
    def broken(calls):
        t = tree(calls); t.train_T = t.train_T & (np.arange(len(t.train_T)) != np.flatnonzero(t.train_T)[0]); return t
    tree = T.build_tree; monkeypatch.setattr(T, 'build_tree', broken)
    assert T.exact(played())['trained_ok'] is False and T.exact_all([played()])['trained_mismatch'] == 1
    def lossy(calls):
        t = tree(calls); t.expand = lambda: [(p, o[:-1]) for p, o in type(t).expand(t)]; return t
    monkeypatch.setattr(T, 'build_tree', lossy)
    x = T.exact_all([played()]); assert x['expand_failed'] == 1 and x['failed'] == ['r']

@pytest.mark.parametrize('off,most', [(0., 1e-6), (.01, .011), (float('nan'), None)])
def test_logprob_gap_is_of_every_token_and_no_number_is_no_agreement(off, most):
    class Trainer: # differs at the last token
        token_budget = 100
        def score(self, mini): s = mini.behav_E.copy(); s[-1] += off; return s
    gap = T.logprob_gap(Trainer(), [played()]); assert gap['n'] == 3
    assert gap['max'] > 1 if most is None else off*.99 <= gap['max'] <= most

def test_unknown_arms_and_overlapping_splits_are_refused():
    import asyncio
    from types import SimpleNamespace as N
    from clawlab.launch.tasks import load_suite
    for arm in ('rl:emacs', 'sft:react', 'rl', 'control:'):
        with pytest.raises(InputError, match='unknown arm'): T.plan([arm], ['react'], [])
    tasks = load_suite('nano'); test = next(t for t in tasks.values() if t.split == 'test')
    lab = N(backend='process', tasks={**tasks, 'twin': R_(test, task_id='twin', split='train')}, run=N(log=print))
    with pytest.raises(InputError, match='in train and in test'): asyncio.run(T.preflight(lab, []))

def test_gains_pair_the_mix_with_its_parts_by_task():
    e = lambda x: {'react|T=1': dict(scores={f't{i}': [x] for i in range(12)})}
    g = {(x['arm'], x['versus']): x['value'] for x in T.gains({'sft': e(.2), 'rl:react': e(.5), 'rl:mix': e(.4)}, ['react', 'claude-code'])}
    assert g == pytest.approx({('rl:react', 'sft'): .3, ('rl:mix', 'sft'): .2, ('rl:mix', 'rl:react'): -.1})

# runner
KERNEL = {'kernelspec': {'name': 'python3', 'display_name': 'python3', 'language': 'python'}, 'language_info': {'name': 'python'}}

@pytest.fixture
def project(tmp_path, monkeypatch):
    "A project folder with one toy study that counts how often it ran."
    (tmp_path/'harnesses').mkdir(); (tmp_path/'experiments').mkdir(); monkeypatch.chdir(tmp_path)
    def study(*cells, name='toy', tag=True):
        nb = nbf.v4.new_notebook(cells=[nbf.v4.new_code_cell(c) for c in cells], metadata=KERNEL)
        if tag: nb.cells[0].metadata['tags'] = ['parameters']
        nbf.write(nb, tmp_path/'experiments'/f'{name}.ipynb')
    study("seed = 0\nlr = 1e-3\nrun_dir = ''", "import json, pathlib\nd = pathlib.Path(run_dir); n = len(list(d.glob('ran*')))\n(d/f'ran{n}').write_text('')",
          "(d/'results.json').write_text(json.dumps(dict(headline='h', seed=seed, lr=lr)))")
    return study

def test_second_call_returns_at_once_and_another_configuration_runs(project, tmp_path):
    a = R.run_study('toy', {'seed': '3'}, quiet=True); b = R.run_study('toy', {'seed': 3}, quiet=True); c = R.run_study('toy', quiet=True)
    assert (a['status'], b['status'], a['run']) == ('finished', 'recalled', b['run']) and c['run'] != a['run'] and b['seconds'] < 1
    assert json.loads(Path(a['results']).read_text())['seed'] == 3 and len(list(Path(a['dir']).glob('ran*'))) == 1
    assert (Path(a['dir'])/'notebook.ipynb').exists()

def test_another_sandbox_is_another_run(project, monkeypatch):
    "Two backends once shared a run: the second one recalled what the first had measured."
    project("sandbox = ''\nrun_dir = ''", "import json, pathlib\n(pathlib.Path(run_dir)/'results.json').write_text(json.dumps(dict(headline=sandbox)))", name='boxed')
    monkeypatch.setenv('CLAWLAB_SANDBOX_BACKEND', 'podman'); a = R.run_study('boxed', quiet=True)
    monkeypatch.setenv('CLAWLAB_SANDBOX_BACKEND', 'bwrap'); b, c = R.run_study('boxed', quiet=True), R.run_study('boxed', {'sandbox': 'podman'}, quiet=True)
    assert (a['headline'], b['headline'], b['status'], c['status']) == ('podman', 'bwrap', 'finished', 'recalled') and a['run'] == c['run'] != b['run']

def test_a_harness_that_a_study_does_not_use_does_not_change_its_run(project, tmp_path):
    def pin(name, version): d = tmp_path/'harnesses'/name; d.mkdir(exist_ok=True); (d/'harness.toml').write_text(version)
    def ids():
        fp = lambda name, **p: R.fingerprint(R.study_path(name), 'nano', p)
        return dict(one=fp('by_parameter', harnesses='react,codex'), less=fp('by_parameter', harnesses='react'), arm=fp('by_parameter', harnesses='', arms='rl:mini-react'), code=fp('by_code'), any=fp('toy'))
    project("harnesses = 'react,codex'", '1', name='by_parameter'); project('seed = 0', "play(\n'codex')", name='by_code')
    for h in ('react', 'mini-react', 'codex', 'other'): pin(h, '1')
    def changed(name): before = ids(); pin(name, '2'); return {k for k, v in ids().items() if v != before[k]}
    assert [changed(h) for h in ('other', 'react', 'codex', 'mini-react')] == [{'any'}, {'one', 'less', 'any'}, {'one', 'code', 'any'}, {'arm', 'any'}]

def test_an_interrupted_run_goes_on_in_the_same_directory(project):
    project("run_dir = ''", "import json, pathlib\nd = pathlib.Path(run_dir)\nif not (d/'half').exists(): (d/'half').write_text(''); raise RuntimeError('power cut')\n(d/'results.json').write_text('{}')", name='half')
    with pytest.raises(R.StudyError, match='power cut'): R.run_study('half', quiet=True)
    assert R.run_study('half', quiet=True)['status'] == 'finished'

@pytest.mark.parametrize('params,line', [({'sead': 1}, "unknown parameter 'sead'"), ({'seed': 'x'}, 'expected int'), ({'seed': True}, 'expected int'), ({'lr': 'fast'}, 'expected float'), ({'run_dir': '/'}, 'unknown parameter')])
def test_bad_parameters_are_one_clear_line(project, params, line):
    with pytest.raises(InputError, match=line) as e: R.run_study('toy', params, quiet=True)
    assert '\n' not in str(e.value)

def test_unknown_study_and_preset_and_untagged_notebook(project):
    project('seed = 0', name='plain', tag=False)
    for args, line in ((('nope',), "unknown study 'nope'"), (('toy', {}, 'huge'), "unknown preset 'huge'"), (('plain',), 'no cell tagged')):
        with pytest.raises(InputError, match=line): R.run_study(*args, quiet=True)

def test_input_error_inside_the_notebook_stays_one(project):
    project("run_dir = ''", "from clawlab.records import InputError\nraise InputError('harness claude-code is not installed')", name='missing')
    with pytest.raises(InputError, match='^harness claude-code is not installed$'): R.run_study('missing', quiet=True)

def test_N52_killed_kernel_does_not_hang(project):
    project("run_dir = ''", "import os, pathlib; (pathlib.Path(run_dir)/'memory').write_text('18406'); os.kill(os.getpid(), 9)", name='dies')
    t = time.monotonic()
    with pytest.raises(R.StudyError, match='the kernel died .*18406 MB of memory'): R.run_study('dies', quiet=True)
    assert time.monotonic() - t < 60

def test_N52_deadline_stands_outside_the_kernel(project):
    project("run_dir = ''", "import pathlib, os, time; (pathlib.Path(run_dir)/'pid').write_text(str(os.getpid())); time.sleep(600)", name='sleeps')
    for deadline in (6, 12, 24, 48):   # on a busy machine a kernel takes its time to start
        with pytest.raises(R.StudyError, match=f'not finished after {deadline} s'): R.run_study('sleeps', deadline_s=deadline, quiet=True)
        if pid := next(Path('reports').glob('sleeps/*/pid'), None): break
    assert gone(int(pid.read_text()))

def gone(pid, within=10):
    "Whether a process ends (or is a zombie) within some seconds."
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] == 'Z': return True
        except OSError: return True
        time.sleep(.1)
    return False

def test_killing_the_command_kills_papermill_and_kernel(project, tmp_path):
    project("run_dir = ''", "import pathlib, os, time; (pathlib.Path(run_dir)/'pid').write_text(str(os.getpid())); time.sleep(600)", name='sleeps')
    p = subprocess.Popen([sys.executable, '-c', "from clawlab.study.run import run_study; run_study('sleeps', quiet=True)"], cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(Path(R.__file__).resolve().parents[2])})
    try:
        end = time.monotonic() + 60
        while not (f := list((tmp_path/'reports').glob('sleeps/*/pid'))) or not f[0].read_text():
            assert time.monotonic() < end and p.poll() is None
            time.sleep(.1)
    finally: p.kill(); p.wait()
    assert gone(int(f[0].read_text()))

async def test_two_processes_cannot_share_a_run_directory(tmp_path):
    with R.Run(tmp_path):
        with pytest.raises(InputError, match='being run by another process'): R.Run(tmp_path, patience_s=.3)
    R.Run(tmp_path, patience_s=.3).__exit__()

async def test_stages_are_done_once_and_failures_are_not_remembered(tmp_path):
    ran, said = [], []
    async def ok(): ran.append(1); return {'v': np.float32(.5)}
    with R.Run(tmp_path, log=said.append) as r:
        with pytest.raises(ZeroDivisionError): await r.stage('rl:mix', lambda: 1/0, 10)
        assert await r.stage('rl:mix', ok, 10) == {'v': .5} and await r.stage('rl:mix', ok, 10) == {'v': .5}
    with R.Run(tmp_path, log=said.append) as r:
        assert await r.stage('rl:mix', ok, 10) == {'v': .5} and [s['name'] for s in r.stages] == ['rl:mix'] and r.stages[0]['tries'] == 2
    assert ran == [1] and 'budget 10 s' in said[0] and 'done before' in said[-1]

def test_reports_directory_that_cannot_be_written(project):
    with pytest.raises(InputError, match='cannot write to /proc'): R.run_study('toy', reports='/proc/nowhere', quiet=True)
