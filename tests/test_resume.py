"`kill -9` in the middle of a study: nothing stays behind, nothing captured is lost, and a second call goes on from the last finished step."
import json, os, signal, subprocess, sys, time
from pathlib import Path
import pytest
from clawlab.capture.store import Store
from clawlab.launch.sandbox.base import probe, sweep

ROOT = Path(__file__).parent.parent
TINY = dict(harnesses='react', unseen='', arms='rl:react', teacher=6, sft_steps=3, clean=1, partial=1, steps=3, groups=2, group_size=2, eval_tasks=4, eval_off=0, eval_mix=0, eval_unseen=0, eval_greedy=2, max_tokens=24)

def study(reports):
    return subprocess.Popen([sys.executable, '-m', 'clawlab.cli', 'study', 'single_vs_mix', '--reports', reports, *(x for k, v in TINY.items() for x in ('-p', k, str(v)))], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=open(Path(reports)/'stderr', 'a'), text=True, env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'})

def of_run(run: Path) -> list[int]:
    "Live processes that mention the run directory or have it as their working directory."
    out = []
    for p in Path('/proc').iterdir():
        if not p.name.isdigit() or int(p.name) == os.getpid(): continue
        try:
            if str(run).encode() in (p/'cmdline').read_bytes() or str(run) in os.readlink(p/'cwd'): out.append(int(p.name))
        except OSError: pass
    return out

@pytest.mark.timeout(280)
async def test_kill_9_then_go_on(tmp_path):
    if why := await probe('bwrap'): pytest.skip(why)
    first = study(tmp_path); end = time.monotonic() + 150
    try:  # until one step is finished and rollouts of the next are on record
        while not (logs := list(tmp_path.glob('single_vs_mix/*/rl_react/log.jsonl'))) or not logs[0].read_text().strip():
            assert time.monotonic() < end and first.poll() is None, (tmp_path/'stderr').read_text()[-2000:]
            time.sleep(.05)
        run = logs[0].parent.parent
        first.send_signal(signal.SIGKILL)
    finally: first.kill(); first.wait()
    end = time.monotonic() + 20
    while (left := of_run(run)) and time.monotonic() < end: time.sleep(.1)
    assert not left, 'processes of the killed study are still alive'
    done = len(logs[0].read_text().splitlines())
    with Store.open(str(run/'calls.db')) as st: before = {r.rollout_id: [c.call_id for c in r.calls] for r in st.rollouts(with_calls=True) if r.outcome}
    second = study(tmp_path); out, _ = second.communicate(timeout=200)
    err = (tmp_path/'stderr').read_text()
    assert second.returncode == 0, err[-3000:]
    res = json.loads(Path(json.loads(out.splitlines()[-1])['results']).read_text())
    assert 'going on' in err and Path(json.loads(out.splitlines()[-1])['dir']) == run.resolve()
    assert [r['step'] for r in map(json.loads, logs[0].read_text().splitlines())] == [1, 2, 3] and done >= 1
    with Store.open(str(run/'calls.db')) as st: after = {r.rollout_id: [c.call_id for c in r.calls] for r in st.rollouts(with_calls=True)}
    assert all(after[k] == v for k, v in before.items())  # no captured call lost or changed
    x = res['exactness']
    assert x['expand_failed'] == 0 and x['trained_mismatch'] == 0 and x['logprob_max_diff'] < 1e-3 and len(res['arms']['rl:react']['curve']) == 3
    assert sweep() == [] and json.loads(subprocess.run([sys.executable, '-m', 'clawlab.cli', 'study', 'single_vs_mix', '--reports', tmp_path, *(x for k, v in TINY.items() for x in ('-p', k, str(v)))],
                       cwd=ROOT, capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': str(ROOT)}).stdout.splitlines()[-1])['status'] == 'recalled'
