"""A mixed run: every harness on the same tasks of a suite, played by the oracle, and every figure that must hold.

    python experiments/mixed_run.py [--harness react,claude-code,...] [--tasks 20] [--suite claw] [--split test] [--store URL]

A row for each harness: rollouts that ended `ok`, those that scored 1, trees shaped as its `[expect]` says (roots, lineage
leaves, drift), and trained against sampled tokens: counted over the calls and over the tree, each sampled token is trained
exactly once. Tasks with a failure to recover from count in the last columns. Fails where one figure isn't what it should be.
"""
import argparse, asyncio, json, os, sys, tempfile, time
from clawlab.capture.engines.base import Sampling
from clawlab.capture.engines.oracle import OracleEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.launch.check import differs
from clawlab.launch.harness import load
from clawlab.launch.rollouts import Job, run_rollouts
from clawlab.launch.tasks import load_suite, select
from clawlab.learn.tree import build_tree

HARNESSES = 'react,claude-code,mini-swe-agent,codex,qwen-code,nanobot'

def problems(r, h) -> list[str]:
    "What isn't as it should be in one rollout."
    out = [] if (r.outcome, r.reward) == ('ok', 1) else [f'{r.outcome} {r.meta.get("reason", "")} reward {r.reward} {json.dumps(r.scores.get("checks", r.scores))}']
    if not r.calls: return out
    t = build_tree(r.calls)
    out += differs(h, r.calls)
    sampled = sum(len(c.output_ids) for c in r.calls if c.role == 'main')
    if not sampled == t.stats['sampled'] == t.stats['trained'] == int(t.train_T.sum()): out.append(f"{sampled} sampled, {t.stats['sampled']} in the tree, {t.stats['trained']} trained")
    if (n := r.scores.get('faults')) and n != r.scores.get('recovered'): out.append('a failure was met and not overcome')
    return out

async def main(a) -> int:
    hs = {n: load(n) for n in a.harness.split(',')}
    if missing := [h.absent for h in hs.values() if h.absent]: sys.exit('\n'.join(missing))
    tasks = load_suite(a.suite)
    chosen, rows, bad = select(tasks, split=a.split or None, n=a.tasks, seed=a.seed), [], []
    with tempfile.TemporaryDirectory() as d:
        store = Store.open(a.store or f'{d}/calls.db')
        async with Proxy(OracleEngine(tasks), store, sampling=Sampling(max_tokens=1 << 14)) as proxy:  # its tokens are bytes
            for n, h in hs.items():
                t = time.monotonic()
                rs = await run_rollouts([Job(x, n, group=f'mixed:{n}') for x in chosen], proxy=proxy, store=store, backend=a.sandbox, concurrency=a.concurrency)
                found = [(r, p) for r in rs for p in problems(r, h)]; bad += [f'{n} {r.task_id}: {p}' for r, p in found]
                trees = [build_tree(r.calls) for r in rs if r.calls]; calls = [c for r in rs for c in r.calls]
                native = sum('run.py' not in str(c.arguments) and c.name != 'bash' and any(c.name.endswith(x['tool']) for x in tasks[r.task_id].steps if isinstance(x, dict)) for r in rs for call in r.calls for c in call.response.tool_calls)
                rows.append(dict(harness=n, version=h.version, rollouts=len(rs), ok=sum(r.outcome == 'ok' for r in rs), score_1=sum(r.reward == 1 for r in rs), as_expected=len(rs) - len({r.rollout_id for r, _ in found}), calls=len(calls),
                                 prompt=min(len(next(c for c in r.calls if c.role == 'main').prompt_ids) for r in rs if r.calls), sampled=sum(len(c.output_ids) for c in calls if c.role == 'main'), trained=sum(int(x.train_T.sum()) for x in trees), native_calls=native,
                                 faults=sum(r.scores.get('faults', 0) for r in rs), recovered=sum(r.scores.get('recovered', 0) for r in rs), seconds=round(time.monotonic() - t)))
                print(rows[-1], file=sys.stderr, flush=True)
        store.close()
    print('| ' + ' | '.join(rows[0]) + ' |\n|' + '---|'*len(rows[0]))
    for r in rows: print('| ' + ' | '.join(map(str, r.values())) + ' |')
    for b in bad: print(b)
    print(json.dumps(dict(ok=not bad, suite=a.suite, tasks=len(chosen), rows=rows, problems=bad)))
    return bool(bad)

if __name__ == '__main__':
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--harness', default=HARNESSES); ap.add_argument('--tasks', type=int, default=20); ap.add_argument('--suite', default='claw'); ap.add_argument('--split', default='test'); ap.add_argument('--seed', type=int, default=0)
    ap.add_argument('--sandbox', default='bwrap'); ap.add_argument('--concurrency', type=int, default=2); ap.add_argument('--store', default='')
    os.environ.setdefault('CLAWLAB_JUDGE_URL', 'none')  # the oracle is scored by code
    sys.exit(asyncio.run(main(ap.parse_args())))
