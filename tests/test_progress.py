"""One line for all runs of a process, and few of them where lines stay."""
import asyncio, io, sys
import pytest
from clawlab.launch import progress
from clawlab.launch.progress import Lines, Progress
from test_rollouts import ended, jobs, lab   # noqa: F401

class Terminal(io.StringIO):
    def isatty(self): return True

@pytest.fixture
def drawn(monkeypatch):
    "`drawn(True)`: what a terminal gets; `drawn(False)`: what a file gets. Nothing waits for its turn on a terminal."
    def on(terminal):
        monkeypatch.setattr(Lines, 'last', -progress.EVERY_S); monkeypatch.setattr(sys, 'stderr', out := (Terminal if terminal else io.StringIO)())
        if terminal:
            real = progress.tqdm
            monkeypatch.setattr(progress, 'tqdm', lambda **kw: real(**{**kw, 'mininterval': 0, 'delay': 1e-9, 'ncols': 300}))
        return out
    yield on
    assert Progress.bar is None and not Progress.parts   # whatever happened

async def test_runs_at_the_same_time_share_the_line_of_a_terminal(lab, drawn):  # noqa: F811
    out, both = drawn(True), asyncio.Event()
    async def wait(r):
        if len(lab.started) >= 4: both.set()
        await both.wait()
        return ended(code=None, signal=9, killed='outside') if r.sample == 0 and r.attempt == 0 else ended()
    lab.does = wait
    await asyncio.gather(*(lab.run(jobs(2, group=g, tag=g), concurrency=2, progress=True) for g in ('train', 'check')))
    frames = [f.strip() for f in out.getvalue().split('\r') if f.strip()]
    assert '\n' not in out.getvalue() and any('4 in flight' in f and 'train + check' in f and '0/4' in f for f in frames), frames
    assert '4/4' in frames[-1] and '2 rerun' in frames[-1] and 'reward 0.500' in frames[-1] and 'in flight' not in frames[-1]

async def test_a_file_gets_a_line_now_and_then(lab, drawn):  # noqa: F811
    out = drawn(False)
    for k in range(30): await lab.run(jobs(20, group=f'g{k}'), concurrency=4, progress=True)
    line, = out.getvalue().splitlines()
    assert '20/20' in line and '\r' not in line

async def test_back_pressure_and_failures_are_on_the_line(lab, drawn):  # noqa: F811
    out = drawn(True); lab.proxy.turnstile.crowded = True; lab.calls = lambda r: []
    run = asyncio.create_task(lab.run(jobs(1), progress=True))
    while 'engine crowded' not in out.getvalue(): await asyncio.sleep(.01)
    lab.proxy.turnstile.crowded = False; await run
    last = out.getvalue().split('\r')[-2:]
    assert any('1 failed, 3 rerun' in f and 'crowded' not in f for f in out.getvalue().split('\r')), last

async def test_an_interrupted_run_leaves_no_line(lab, drawn):  # noqa: F811
    drawn(True); lab.does = lambda r: asyncio.Event().wait()
    run = asyncio.create_task(lab.run(jobs(3), progress=True))
    while not lab.started: await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError): await run

async def test_a_run_without_progress_draws_nothing(lab, drawn):  # noqa: F811
    out = drawn(True); await lab.run(jobs(3)); assert out.getvalue() == ''
