"Loops and run folders: what is drawn, refused, validated, kept and logged, and that a resumed run goes on with all of it."
import asyncio, json, sys, threading, types
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
import numpy as np, pytest, torch
from transformers import AutoModelForCausalLM
from clawlab.records import DataError, InputError, Task
from clawlab.learn.checkpoints import Run, export_checkpoint
from clawlab.learn.data import TaskSampler
from clawlab.learn.loops import OutOfSync, Wandb, add_rewards, apart, gather, penalties, rl, scalars, sync_test
from clawlab.learn.train import Trainer
from clawlab.learn.weights import lora
from test_train import Engine, call, model_, random_rollouts, rollout, toys

# ---- what is drawn

def tasks(n=6): return [Task(f't{k}', 'xy'[k % 2], 'train', '') for k in range(n)]

def played(draws, reward): return [rollout(f'{d.group}.{i}', reward(d, i), group=d.group, harness=d.harness, task_id=d.task.task_id) for d in draws for i in range(3)]

def test_without_a_filter_what_was_seen_changes_nothing():
    a, b = (TaskSampler(tasks(), {'h': 1, 'k': 2}, 4, seed=1) for _ in range(2))
    for s in range(6): a.note(s, played(a.draw(s), lambda d, i: 1.))
    assert [a.draw(s) for s in range(12)] == [b.draw(s) for s in range(12)]

def test_pass_rate_filter_rests_pairs_and_takes_them_back():
    s = TaskSampler(tasks(), {'h': 1}, 6, seed=1, between=(0., 1.), rest=3); easy = {'t0', 't3'}
    s.note(0, played(s.draw(0), lambda d, i: 1. if d.task.task_id in easy else float(i == 0)))
    seen = [{d.task.task_id for d in s.draw(k)} for k in range(1, 6)]
    assert not easy & set().union(*seen[:3]) and easy <= set().union(*seen[3:])
    assert not s.resting(1, 'other', 't0'), 'a pair is (harness, task)'
    all_rest = TaskSampler(tasks(2), {'h': 1}, 2, between=(0, 1)); all_rest.note(0, played(all_rest.draw(0), lambda d, i: 0.)); assert len(all_rest.draw(1)) == 2
    with pytest.raises(InputError, match='nothing'): TaskSampler(tasks(), {'h': 1}, 1, between=(1, 0))

def test_sampler_state_is_json_and_restores():
    a, b = (TaskSampler(tasks(), {'h': 1}, 4, seed=1, between=(0, 1)) for _ in range(2)); a.note(0, played(a.draw(0), lambda d, i: float(d.task.task_id < 't3')))
    assert [a.draw(k) for k in range(1, 9)] != [b.draw(k) for k in range(1, 9)]; b.restore(json.loads(json.dumps(a.state()))); assert [a.draw(k) for k in range(1, 9)] == [b.draw(k) for k in range(1, 9)]

async def test_groups_without_variance_are_replaced():
    s, log = TaskSampler(tasks(), {'h': 1, 'k': 1}, 4, seed=2), []
    async def collect(step, draws):
        log.append(draws); return played(draws, lambda d, i: 1. if len(log) == 1 and d.group.endswith(('0', '1')) else float(i > 0))
    rs, m = await gather(3, s, collect, resample=2)
    assert len(log) == 2 and len(log[1]) == 2 and Counter(d.harness for d in log[1]) == Counter(d.harness for d in log[0] if d.group.endswith(('0', '1')))
    assert len({r.group for r in rs}) == 4 and len({(r.rollout_id) for r in rs}) == 12 and m == dict(resampled=2, played=18) and all(np.ptp([r.reward for r in rs if r.group == g]) for g in {r.group for r in rs})
    log.clear(); rs, m = await gather(3, s, lambda step, draws: collect(step, draws)); assert len(log) == 1 and len(rs) == 12 and m == {}

async def test_what_never_has_variance_is_kept_after_the_last_round():
    s = TaskSampler(tasks(), {'h': 1}, 3, seed=2); n = []
    async def collect(step, draws): n.append(len(draws)); return played(draws, lambda d, i: 0.)
    rs, m = await gather(0, s, collect, resample=2); assert n == [3, 3, 3] and len(rs) == 9 and m['resampled'] == 6

# ---- rewards

def test_components_are_weighed_summed_and_logged():
    rs = [rollout('a', 1., [call('a', 0, [1, 2, 3], [4]*500), call('a', 1, [1, 9], [5]*500, used=dict(malformed=2))]), rollout('b', 0.), rollout('c', None)]
    out, m = add_rewards(rs, lambda r: {**penalties(r), 'bonus': .5}, dict(score=2, segments=-.1, kilotokens=-.2, malformed=-.05, calls=0, bonus=1))
    assert out[0].reward == pytest.approx(2 - .1 - .2 - .1 + .5) and out[1].reward == pytest.approx(.5 - .2*.002) and out[2].reward is None
    assert m['bonus'] == .5 and m['malformed'] == 1 and m['score'] == .5 and out[0].scores['reward/segments'] == 1
    with pytest.raises(InputError, match="component 'bonsu'"): add_rewards(rs, penalties, dict(bonsu=1))
    with pytest.raises(DataError, match='rollout a: the reward component x is nan'): add_rewards(rs, lambda r: dict(x=float('nan')))

async def test_rewards_reach_the_step_and_its_row():
    async def collect(step, draws): return played(draws, lambda d, i: 1.)   # nobody differs but by the component
    rows = await rl(Trainer(model_(), correction='none'), Engine(), toys(), collect, 1, reward=lambda rs: add_rewards(rs, lambda r: dict(place=float(r.rollout_id[-1]))))
    assert rows[0]['groups_signal'] == 3 and rows[0]['reward_parts'] == dict(score=1., place=1.) and rows[0]['reward'] == 2

# ---- engine and trainer

async def test_R15_self_test_refuses_another_distribution():
    tr = Trainer(model_(1)); good, off = Engine(), Engine(off=.02); await good.update(tr.weights()); await off.update(tr.weights())
    d = await sync_test(tr, good); assert d['max'] < 1e-4 and d['n'] >= 40
    with pytest.raises(OutOfSync, match='disagree'): await sync_test(tr, off)
    assert (await sync_test(tr, off, max_gap=.5))['max'] == pytest.approx(.02, abs=1e-4)
    hot = Trainer(model_(1), temperature=.7); assert (await sync_test(hot, good))['max'] < 1e-4

async def test_R17_a_run_stops_when_the_engine_keeps_old_weights(tmp_path):
    engine = Engine(stale=4)  # the update after the third step is lost
    async def collect(step, draws): return random_rollouts(engine.model, step)
    with pytest.raises(OutOfSync): await rl(Trainer(model_(1), lr=1e-2), engine, toys(), collect, 8, tmp_path, check_every=2)
    assert [r['step'] for r in Run(tmp_path).log.rows()] == [1, 2, 3] and 'sync_test' in Run(tmp_path).log.rows()[1]
    with pytest.raises(OutOfSync): await rl(Trainer(model_(1), lr=1e-2), Engine(stale=0), toys(), collect, 8)

async def test_R17_a_warm_cache_of_older_weights_is_noticed():
    "A real engine whose cache survives an update."
    from clawlab.capture.engines.torch import TorchEngine
    tr = Trainer(model_(6), lr=1e-2); engine = TorchEngine(model_(6), SimpleNamespace(eos_ids=()))
    try:
        assert (await sync_test(tr, engine))['max'] < 1e-4
        tr.rl_step(random_rollouts(tr.model, 1)); await engine.update(tr.weights()); assert (await sync_test(tr, engine))['max'] < 1e-4
        tr.rl_step(random_rollouts(tr.model, 2)); engine.cache.reset = lambda: None; await engine.update(tr.weights())
        with pytest.raises(OutOfSync): await sync_test(tr, engine)
    finally: await engine.close()

# ---- validation, the best checkpoint, and resuming with all of it

async def whole_run(folder, steps, crash=None, scores=(.1, .9, .3, .4, .2), **kw):
    engine, sampler, drawn = Engine(), TaskSampler(tasks(), {'h': 1}, 3, seed=3, between=(.2, 1.)), []
    async def collect(step, draws):
        if crash == step: raise RuntimeError('power cut')
        drawn.append((step, [d.task.task_id for d in draws]))
        return [replace(r, group=d.group, task_id=d.task.task_id) for d, rs in zip(draws, np.array(random_rollouts(engine.model, 50 + step), object).reshape(3, 4)) for r in rs]
    async def validate(step): return dict(a=scores[step - 1], b=scores[step - 1] - .05)
    rows = await rl(Trainer(model_(1), lr=1e-3, kind='ppo', pretrain=1), engine, sampler, collect, steps, folder, validate=validate, validate_every=1, **kw)
    return rows, drawn

async def test_a_resumed_run_draws_validates_and_keeps_as_the_whole_one(tmp_path):
    _, a = await whole_run(tmp_path/'a', 5)
    with pytest.raises(RuntimeError): await whole_run(tmp_path/'b', 5, crash=3)
    _, b = await whole_run(tmp_path/'b', 5)
    assert b == a[3:], 'the sampler goes on with what it had seen'
    rows = [[{k: v for k, v in r.items() if k not in ('seconds', 'engine_version', 'staleness')} for r in Run(tmp_path/x).log.rows()] for x in 'ab']; assert rows[0] == rows[1]
    run = Run(tmp_path/'b'); assert run.best() == (2, pytest.approx(.875))
    kept = {p.name for p in run.checkpoints() if (p/'optimizer.pt').exists()}; assert kept == {'step_0002', 'step_0004', 'step_0005'}
    assert all((p/'critic.safetensors').exists() == (p.name in kept) and (p/'model.safetensors').exists() for p in run.checkpoints())
    best = Trainer(model_(), kind='ppo'); best.load(tmp_path/'b/step_0002'); assert best.step == 2

def test_best_is_the_earlier_of_equals_and_ignores_missing_scores(tmp_path):
    run = Run(tmp_path); assert run.best() is None
    for k, v in enumerate([None, .5, .5, float('nan')]): run.log.write(dict(step=k + 1, **({'validation': dict(h=v)} if k else {})))
    assert run.best() == (2, .5)

def test_a_run_goes_on_as_it_was_configured(tmp_path):
    Run(tmp_path).configure(dict(lr=1e-4, mix=('a', 'b'))); Run(tmp_path).configure(dict(lr=1e-4, mix=['a', 'b']))
    with pytest.raises(InputError, match='started with lr=0.0001, not 0.001'): Run(tmp_path).configure(dict(lr=1e-3, mix=['a', 'b']))

def test_export_is_a_plain_model_and_refuses_what_it_cannot(tmp_path):
    (tmp_path/'tok').mkdir(); (tmp_path/'tok/tokenizer.json').write_text('{}')
    tr = Trainer(lora(model_(4), rank=2), kind='ppo', pretrain=0, assets=tmp_path/'tok'); tr.rl_step(random_rollouts(tr.model, 1)); tr.save(tmp_path/'c')
    export_checkpoint(tmp_path/'c', tmp_path/'out')
    assert sorted(p.name for p in (tmp_path/'out').iterdir() if 'generation' not in p.name) == ['config.json', 'model.safetensors', 'tokenizer.json']
    m = AutoModelForCausalLM.from_pretrained(tmp_path/'out'); assert all(torch.equal(v, m.state_dict()[k]) for k, v in tr.weights().items())
    with pytest.raises(InputError, match='not empty'): export_checkpoint(tmp_path/'c', tmp_path/'out')
    with pytest.raises(InputError, match='no checkpoint'): export_checkpoint(tmp_path, tmp_path/'z')

# ---- tracking

def test_scalars_are_numbers_only(): assert scalars(dict(a=1, b=dict(c=2., d='x'), e=[1], f=True, g=None)) == {'a': 1, 'b/c': 2.}

def fake(monkeypatch):
    got = SimpleNamespace(init=[], defined=[], rows=[], done=0)
    class R:
        def define_metric(self, *a, **k): got.defined.append((a, k))
        def log(self, row, **k): assert not k; got.rows.append(row)
        def finish(self): got.done += 1
    w = types.ModuleType('wandb'); w.init = lambda **k: got.init.append(k) or R(); w.Settings = lambda **k: k
    monkeypatch.setitem(sys.modules, 'wandb', w); return got

async def test_R51_wandb_repeats_the_log_in_order_and_once(tmp_path, monkeypatch):
    "A step that is played again after a crash is not sent again; the x-axis is the row's own step, the id the configuration's."
    got = fake(monkeypatch); monkeypatch.delenv('WANDB_MODE', raising=False); t = Wandb(tmp_path, dict(lr=1)); one = Wandb(tmp_path, dict(lr=1)); two = Wandb(tmp_path, dict(lr=2))
    assert t.id == one.id != two.id and got.init[0]['mode'] == 'offline' and got.init[0]['id'] == t.id and (('*',), dict(step_metric='step')) in got.defined
    with pytest.raises(RuntimeError): await whole_run(tmp_path/'r', 5, crash=2, track=t)
    await whole_run(tmp_path/'r', 5, track=t); assert [r['step'] for r in got.rows] == [1, 2, 3, 4, 5] and 'validation/a' in got.rows[0]
    await whole_run(tmp_path/'r', 5, track=t); assert len(got.rows) == 5

def test_R51_without_the_package_it_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    with pytest.raises(InputError, match='pip install'): Wandb(tmp_path, {})

def test_R51_wandb_offline_for_real(tmp_path, monkeypatch):
    monkeypatch.delenv('WANDB_MODE', raising=False); monkeypatch.setenv('WANDB_SILENT', 'true')
    for steps in ((1, 2), (3,)):   # the second as a resumed run
        t = Wandb(tmp_path, dict(lr=1))
        for s in steps: t.log(dict(step=s, ratio=dict(p50=1.)))
        t.close()
    assert len({p.name.rsplit('-', 1)[1] for p in (tmp_path/'wandb').glob('offline-run-*')}) == 1 and list((tmp_path/'wandb').glob('offline-run-*/*.wandb'))

async def test_steps_are_computed_in_one_thread(tmp_path):
    "Whoever asks, and however many at a time: memory that a step leaves behind is there once."
    tr = Trainer(model_()); who = await asyncio.gather(*(apart(tr, threading.get_ident) for _ in range(8)))
    assert len(set(who)) == 1 and who[0] != threading.get_ident() and not tr.stopped
