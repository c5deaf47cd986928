"`clawlab train`, `eval`, `try` and `export` on a real harness: end to end, resumed, refused."
import json, os, subprocess, sys
import pytest, torch
from transformers import AutoModelForCausalLM
from clawlab.capture.engines.torch import TorchEngine
from clawlab.capture.store import Store
from clawlab.cli import main
from clawlab.learn import nano
from clawlab.study.commands import numbers
from clawlab.study.drive import call_rows, interval, mix_of, name_of, readable
from test_cli import ROOT, here, refused   # noqa: F401 (a fixture)

BOX = ('--sandbox', 'process', '--seconds', '60')

def run(capfd, *args, code=0):
    got = main([str(a) for a in args]); out, err = capfd.readouterr()
    assert got == code, err
    return json.loads(out.splitlines()[-1]), err

@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    "A policy of a few thousand weights with its own tokenizer, from two runs of the oracle in the ReACT loop."
    d = tmp_path_factory.mktemp('policy')
    with pytest.MonkeyPatch.context() as mp:
        mp.chdir(ROOT); assert main(['rollout', '--tasks', 'nano', '--harness', 'react', '--engine', 'oracle', '--store', str(d/'calls.db'), '--n', '2', '--split', 'train', *BOX[:2]]) == 0
    with Store.open(str(d/'calls.db')) as st: rs = [st.rollout(r.rollout_id) for r in st.rollouts()]
    return nano.prepare(d/'model', rs, seed=1, size=600, d=32, layers=2), d/'calls.db'

def test_from_sft_to_a_model_that_is_tried_by_hand(capfd, tmp_path, policy):
    model, store = policy
    sft = ('train', 'sft', '--model', model, '--to', tmp_path/'sft', '--tasks', 'nano', '--harness', 'react', '--n', 3, '--batch', 2, '--lr', '1e-3', *BOX)
    a, _ = run(capfd, *sft, '--steps', 2); b, _ = run(capfd, *sft, '--steps', 3)
    assert a['steps'] == 2 and b['steps'] == 3 and b['curve'][:2] == a['curve'] and b['nll'] < a['curve'][0]['nll'] and b['card']['splits']['heldout']['tasks'] >= 1
    assert 'was started with lr=0.001, not 0.01' in refused(capfd, *sft[:-6], '--lr', '1e-2', *BOX, '--steps', 3)
    # the same demonstrations from the store, in other tokens than the policy's
    c, _ = run(capfd, 'train', 'sft', '--model', model, '--to', tmp_path/'other', '--store', store, '--steps', 1, '--heldout', 0); assert c['card']['splits']['train']['rollouts'] == 2
    ppo = ('train', 'ppo', '--model', b['checkpoint'], '--to', tmp_path/'ppo', '--tasks', 'nano', '--harness', 'react', '--groups', 2, '--samples', 2, '--lora', 2, '--dtype', 'bfloat16', '--max-tokens', 12,
           '--validate-every', 1, '--validation', 1, '--switch', 'lam=0.9', '--penalty', 'kilotokens=-1', *BOX)
    x, err = run(capfd, *ppo, '--steps', 1); y, _ = run(capfd, *ppo, '--steps', 2)
    assert x['steps'] == 1 and y['steps'] == 2 and y['curve'][0] == x['curve'][0] and y['best']['step'] in (1, 2) and 'rl 1/1: reward' in err
    rows = [json.loads(l) for l in (tmp_path/'ppo/log.jsonl').read_text().splitlines()]
    assert rows[0]['reward_parts']['kilotokens'] > 0 and rows[0]['critic']['pretraining'] and rows[1]['engine_version'] == 3 and rows[1]['staleness']['max'] == 0
    out, _ = run(capfd, 'export', '--checkpoint', y['checkpoint'], '--to', tmp_path/'out', '--format', 'safetensors')
    m = AutoModelForCausalLM.from_pretrained(tmp_path/'out', dtype=torch.float32); assert not any('lora' in k for k in m.state_dict()) and not list((tmp_path/'out').glob('*.pt'))
    assert TorchEngine.from_dir(tmp_path/'out').template.eos_ids
    ev = ('eval', '--tasks', 'nano', '--harness', 'react', '--store', tmp_path/'ev.db', '--n', 2, '--max-tokens', 8, *BOX)
    e, _ = run(capfd, *ev, '--checkpoint', y['checkpoint']); again, _ = run(capfd, *ev, '--checkpoint', tmp_path/'ppo/step_0002')
    assert e['cells']['react']['n'] == 2 and again == e
    other, _ = run(capfd, *ev, '--checkpoint', x['checkpoint'])
    with Store.open(str(tmp_path/'ev.db')) as st: assert len(st.rollouts()) == 4 and other['policy'] != e['policy']
    t, err = run(capfd, 'try', '--checkpoint', tmp_path/'out', '--harness', 'react', 'Say hello.', '--max-tokens', 8, '--file', ROOT/'Makefile', *BOX)
    assert t['calls'] >= 1 and 'Makefile' in t['files'] and t['store'] is None and 'main: ' in err
    d, _ = run(capfd, 'export', '--store', tmp_path/'ev.db', '--to', tmp_path/'ds'); lines = [json.loads(l) for l in (tmp_path/'ds/data/test.jsonl').read_text().splitlines()]
    assert d['calls'] == dict(test=len(lines)) and all(len(l['output_ids']) == len(l['logprobs']) == len(l['versions']) for l in lines) and 'data/test.jsonl' in (tmp_path/'ds/README.md').read_text()

@pytest.mark.parametrize('args,line', [
    (('train', 'grpo', '--model', '/nowhere', '--to', 'X', '--tasks', 'nano', '--harness', 'react'), 'no model in /nowhere'),
    (('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nano', '--harness', 'emacs'), "unknown harness 'emacs'"),
    (('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nano', '--harness', 'react=x'), 'a ratio is a number'),
    (('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nope', '--harness', 'react'), 'no task suite nope'),
    (('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nano', '--harness', 'react', '--layout', 'flat'), "unknown layout 'flat'"),
    (('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nano', '--harness', 'react', '--dtype', 'int8'), "unknown number format 'int8'"),
    (('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nano', '--harness', 'react', '--switch', 'lam=.9'), "grpo has no switch 'lam'"),
    (('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nano', '--harness', 'react', '--switch', 'lam'), 'NAME=VALUE'),
    (('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nano', '--harness', 'react', '--temperature', '0'), 'greedy policy'),
    (('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nano', '--harness', 'react', '--between', '1'), 'two numbers'),
    (('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nano', '--harness', 'react', '--sandbox', 'chroot'), "unknown sandbox backend 'chroot'"),
    (('train', 'sft', '--model', 'M', '--to', 'X'), 'demonstrations come from --store'), (('train', 'sft', '--model', 'M', '--to', 'X', '--store', '/nowhere.db'), 'no store at /nowhere.db'),
    *[(('train', 'grpo', '--model', 'M', '--to', 'X', '--tasks', 'nano', *more), line) for more, line in (
        (('--harness', 'react=-1'), 'a ratio above 0'), (('--harness', 'react=nan'), 'a ratio above 0'), (('--harness', 'react=inf'), 'a ratio above 0'), (('--harness', 'react,react'), 'each harness once'),
        (('--harness', 'react', '--lr', 'inf'), "'--lr'"), (('--harness', 'react', '--temperature', 'inf'), "'--temperature'"), (('--harness', 'react', '--temperature', 'nan'), "'--temperature'"), (('--harness', 'react', '--seconds', 'inf'), "'--seconds'"),
        (('--harness', 'react', '--switch', 'call_discount=7'), 'call_discount is 7.0'), (('--harness', 'react', '--kl', 'inf'), "'--kl'"), (('--harness', 'react', '--penalty', 'nope=1'), "unknown reward component 'nope'"),
        (('--harness', 'react', '--penalty', 'calls=nan'), 'NAME=VALUE'), (('--harness', 'react', '--switch', 'std_norm=nan'), 'NAME=VALUE'), (('--harness', 'react', '--between', '1,0'), 'the smaller one'), (('--harness', 'react', '--seed', '-1'), "'--seed'"))],
    (('train', 'sft', '--model', 'M', '--to', 'X', '--store', 'S', '--min-score', 'nan'), "'--min-score'"), (('train', 'ppo', '--model', 'M', '--to', 'X', '--tasks', 'nano', '--harness', 'react', '--switch', 'lam=2'), 'lam is 2.0, but must be a number in [0, 1]'),
    (('train', 'dpo'), "No such command 'dpo'"), (('export', '--to', 'X'), 'one of the two'), (('export', '--checkpoint', '/nowhere', '--to', 'X'), 'no checkpoint in /nowhere'),
    (('export', '--checkpoint', 'M', '--to', 'X', '--format', 'gguf'), "unknown format 'gguf'"), (('export', '--store', '/nowhere.db', '--to', 'X'), 'no store at /nowhere.db'),
    (('eval', '--tasks', 'nano', '--harness', 'react', '--store', 'X'), 'name a policy'), (('eval', '--tasks', 'nano', '--harness', 'react', '--store', 'X', '--checkpoint', '/nowhere'), 'no model in /nowhere'),
    (('try', '--checkpoint', 'M', '--harness', 'react', ' '), 'an empty instruction'), (('try', '--checkpoint', 'M', '--harness', 'react', 'x', '--file', '/nowhere'), 'no file /nowhere'),
])
def test_bad_input_is_one_clear_line(capfd, tmp_path, policy, args, line):
    capfd.readouterr()
    assert line in refused(capfd, *[{'X': tmp_path/'x', 'M': policy[0]}.get(a, a) for a in args])

@pytest.mark.parametrize('args', [('train',), ('train', 'sft'), ('train', 'grpo'), ('train', 'ppo'), ('eval',), ('try',), ('export',)])
def test_help(capfd, args): assert main([*args, '--help']) == 0 and 'Usage: clawlab' in capfd.readouterr().out

def test_words(): assert numbers(['a=1', 'b=on']) == dict(a=1., b=True) and interval('0,1') == (0., 1.) and interval('') is None and mix_of('react') == {'react': 1.}

def test_options_that_were_refused_do_not_bind_the_run(capfd, tmp_path, policy):
    model, store = policy; sft = ('train', 'sft', '--model', model, '--to', tmp_path/'s', '--store', store, '--steps', 1, '--heldout', 0)
    for bad in (('--dtype', 'int8'), ('--min-score', 2)): refused(capfd, *sft, *bad)
    run(capfd, *sft); assert run(capfd, *sft[:-3], 2, *sft[-2:], '--token-budget', 4096)[0]['steps'] == 2   # and memory is no setting of the result

def test_a_run_goes_on_with_the_data_it_was_started_with(capfd, tmp_path, policy):
    "The same options and another store, or one that has grown, are other data."
    import shutil
    from clawlab.records import Rollout
    model, store = policy; shutil.copy(store, mine := tmp_path/'mine.db'); sft = ('train', 'sft', '--model', model, '--to', tmp_path/'s', '--heldout', 0)
    a, _ = run(capfd, *sft, '--store', mine, '--steps', 1); shutil.copy(store, other := tmp_path/'other.db'); assert run(capfd, *sft, '--store', other, '--steps', 2)[0]['curve'][:1] == a['curve']
    with Store.open(str(mine)) as st: r = st.rollouts(with_calls=True)[0]; st.put_rollout(Rollout(**{**{k: getattr(r, k) for k in r.__dataclass_fields__}, 'reward': 0., 'calls': ()}))
    assert 'was started with data=' in refused(capfd, *sft, '--store', mine, '--steps', 3) and json.loads((tmp_path/'s/config.json').read_text())['data'] == a['card']['digest']

def test_scores_of_other_validation_tasks_are_not_compared(capfd, tmp_path, policy):
    from clawlab.learn.checkpoints import Run
    rl = ('train', 'grpo', '--model', policy[0], '--to', tmp_path/'r', '--tasks', 'nano', '--harness', 'react', '--groups', 1, '--samples', 2, '--max-tokens', 4, '--validate-every', 0, *BOX)
    run(capfd, *rl, '--steps', 1, '--validation', 3); assert 'was started with validation=3, not 4' in refused(capfd, *rl, '--steps', 2, '--validation', 4) and len(Run(tmp_path/'r').log.rows()) == 1

def test_damaged_calls_leave_the_other_demonstrations(capfd, tmp_path, policy):
    import shutil, sqlite3
    shutil.copy(policy[1], db := tmp_path/'d.db')
    with sqlite3.connect(db) as c: n = c.execute('select count(*) from rollouts').fetchone()[0]; bad, = c.execute('select rollout_id from calls order by id desc').fetchone(); c.execute('update calls set tokens=zeroblob(9) where id=(select max(id) from calls)')
    t, err = run(capfd, 'tree', '--store', db, '--html', tmp_path/'p.html'); assert t['rollouts'] == n and t['expand_exact'] and (tmp_path/'p.html').exists()
    s, _ = run(capfd, 'train', 'sft', '--model', policy[0], '--to', tmp_path/'s', '--store', db, '--steps', 1, '--heldout', 0); assert {x['stage']: x['dropped'] for x in s['card']['stages']}['graded'] == 1 and s['card']['splits']['train']['rollouts'] == n - 1

def test_an_export_that_fails_leaves_nothing_and_may_be_repeated(capfd, tmp_path, policy, monkeypatch):
    from pathlib import Path
    import shutil
    def full(*a, **k): raise OSError(28, 'No space left on device')
    for args, where, name in ((('--store', policy[1]), Path, 'write_text'), (('--checkpoint', policy[0]), shutil, 'copy')):
        with monkeypatch.context() as mp: mp.setattr(where, name, full); assert 'No space left' in refused(capfd, 'export', *args, '--to', tmp_path/'o')
        assert not list(tmp_path.iterdir()); run(capfd, 'export', *args, '--to', tmp_path/'o'); shutil.rmtree(tmp_path/'o')

def test_a_store_on_a_full_disk_is_one_line(capfd, policy, monkeypatch):
    import sqlite3
    from clawlab.capture.store import Store
    monkeypatch.setattr(Store, 'rollouts', lambda *a, **k: (_ for _ in ()).throw(sqlite3.OperationalError('database or disk is full')))
    assert main(['tree', '--store', str(policy[1])]) == 1 and capfd.readouterr().err == 'clawlab: the store: database or disk is full\n'

def test_two_folders_never_share_the_groups_of_a_store(tmp_path):
    a, b = tmp_path/'a/rl', tmp_path/'b/rl'
    assert name_of(a) == name_of(b) == name_of(a.with_name('other')) and name_of(a, 's.db') != name_of(b, 's.db')

def test_half_a_character_is_exported(capfd, tmp_path):
    from dataclasses import replace
    from clawlab.records import Message, Rollout
    from test_tree import call
    c = replace(call(0, [1], [2]), messages=(Message('user', 'x'),), response=Message('assistant', 'half \ud83d'))
    row = next(call_rows([Rollout('r', 't', 'h', calls=(c,))])); assert readable(row)['response'].encode('utf8') and json.loads(readable(row)['response'])['content'] == 'half \ud83d'

@pytest.mark.parametrize('size,says', [('ro', 'Read-only file system'), ('size=200k', 'No space left on device')])
def test_a_read_only_and_a_full_folder_are_one_line_and_what_was_there_stays(tmp_path, policy, size, says):
    "Mounted for real; the run's folder lies there."
    model, store = policy; (d := tmp_path/'mnt').mkdir()
    mounted = ['unshare', '-m', 'sh', '-c', f'mount -t tmpfs -o {size} none {d} && "$@"; code=$?; ls -A {d}; exit $code', 'sh']
    if subprocess.run([*mounted, 'true'], capture_output=True).returncode: pytest.skip('cannot mount a file system here')
    p = subprocess.run([*mounted, sys.executable, '-m', 'clawlab.cli', 'train', 'sft', '--model', str(model), '--to', f'{d}/sft', '--store', str(store), '--steps', '1', '--heldout', '0'], capture_output=True, text=True, cwd=ROOT, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert p.returncode and 'Traceback' not in p.stderr and says in p.stderr.strip().splitlines()[-1] and p.stderr.strip().splitlines()[-1].startswith('clawlab: '), p.stderr
