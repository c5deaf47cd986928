"""Writes the nano suite: 12 families x 3 levels of small workspace tasks for a policy of two million parameters.

    python experiments/tasks/nano/generate.py [--train-per-cell 8]

Deterministic. Every word of the little world below is one token for the policy, so that copying an argument is copying
one token. A family has one way to say each level, one solution (at most three shell commands) and one *habit*: the one
plausible wrong way that an imperfect teacher shows, so that there is something left to discover. No instruction and no
initial workspace occurs twice in the whole suite, so the splits have nothing in common.
"""
import argparse, json, random, sys
from pathlib import Path

WORDS = 'amber birch cedar dune ember frost grape hazel ivory jade kelp lotus maple onyx'.split()
NAMES = 'ledger memo diary agenda recipe poem roster sketch invoice atlas novel ballad'.split()
DIRS  = 'attic cellar garage pantry'.split()
PER_CELL = dict(train=(8, 8, 8), validation=(1, 2, 1), test=(3, 3, 3))  # tasks per family at levels 1, 2, 3

class Draw:
    "Names and words of one task, none drawn twice."
    def __init__(self, rng):
        self.words, self.names, self.dirs = (rng.sample(x, len(x)) for x in (WORDS, NAMES, DIRS))
        self.rng = rng
    def w(self, n=1): return tuple(self.words.pop() for _ in range(n)) if n > 1 else self.words.pop()
    def f(self, n=1): return tuple(self.names.pop() for _ in range(n)) if n > 1 else self.names.pop()
    def d(self): return self.dirs.pop()
    def text(self, n=None): return line(*(self.w() for _ in range(n or self.rng.choice((1, 2)))))

def line(*words): return ' '.join(words) + '\n'

def task(say, files, steps, habit, add=None, drop=()):
    "`goal` is written down from the family's meaning, not by running the steps: the check compares the two."
    goal = {p: t for p, t in {**files, **(add or {})}.items() if p not in drop}
    return dict(instruction=say, files=files, steps=steps, habit=habit, expect=dict(start=files, goal=goal))

# Every family: (draw, level) -> task. `x` is a bystander that must stay as it is.
def write(r, level):
    (a, b, x), (u, v) = r.f(3), r.w(2)
    files = {x: r.text()}
    if level == 1: return task(f'Create the file {a} containing {u}.', files, [f'echo {u} > {a}'], [f'touch {a}'], {a: line(u)})
    if level == 2: return task(f'Create the file {a} containing {u} {v}.', files, [f'echo {u} {v} > {a}'], [f'touch {a}'], {a: line(u, v)})
    return task(f'Create the file {a} containing {u} and the file {b} containing {v}.', files,
                [f'echo {u} > {a}', f'echo {v} > {b}'], [f'touch {a}', f'touch {b}'], {a: line(u), b: line(v)})

def append(r, level):
    (a, b, x), (u, v) = r.f(3), r.w(2)
    files = {a: r.text(), b: r.text(), x: r.text()}
    if level == 1: return task(f'Append {u} to {a}.', files, [f'echo {u} >> {a}'], [f'echo {u} > {a}'], {a: files[a] + line(u)})
    if level == 2: return task(f'Append {u} {v} to {a}.', files, [f'echo {u} {v} >> {a}'], [f'echo {u} {v} > {a}'], {a: files[a] + line(u, v)})
    return task(f'Append {u} to {a} and {v} to {b}.', files, [f'echo {u} >> {a}', f'echo {v} >> {b}'],
                [f'echo {u} > {a}', f'echo {v} > {b}'], {a: files[a] + line(u), b: files[b] + line(v)})

def copy(r, level):
    (a, b, c, x), d = r.f(4), r.d()
    files = {a: r.text(), x: r.text()}
    if level == 1: return task(f'Copy {a} to {b}.', files, [f'cp {a} {b}'], [f'mv {a} {b}'], {b: files[a]})
    if level == 3: return task(f'Copy {a} to {b} and to {c}.', files, [f'cp {a} {b}', f'cp {a} {c}'], [f'mv {a} {b}', f'mv {b} {c}'], {b: files[a], c: files[a]})
    files = {a: files[a], f'{d}/{x}': files[x]}
    return task(f'Copy {a} into the directory {d}.', files, [f'cp {a} {d}'], [f'mv {a} {d}'], {f'{d}/{a}': files[a]})

def rename(r, level):
    (a, b, c, e, x), d = r.f(5), r.d()
    files = {a: r.text(), x: r.text()}
    if level == 1: return task(f'Rename {a} to {b}.', files, [f'mv {a} {b}'], [f'cp {a} {b}'], {b: files[a]}, [a])
    if level == 2:
        files = {a: files[a], f'{d}/{x}': files[x]}
        return task(f'Move {a} into the directory {d}.', files, [f'mv {a} {d}'], [f'cp {a} {d}'], {f'{d}/{a}': files[a]}, [a])
    files[c] = r.text()
    return task(f'Rename {a} to {b} and {c} to {e}.', files, [f'mv {a} {b}', f'mv {c} {e}'], [f'cp {a} {b}', f'cp {c} {e}'], {b: files[a], e: files[c]}, [a, c])

def delete(r, level):
    (a, b, x), d = r.f(3), r.d()
    if level == 1:
        files = {a: r.text(), b: r.text()}
        return task(f'Delete {a} but keep {b}.', files, [f'rm {a}'], [f'rm {a} {b}'], drop=[a])
    files = {a: r.text(), f'{d}/{a}': r.text(), f'{d}/{b}': r.text()}
    if level == 2: return task(f'Delete {a} in the directory {d} but keep {b}.', files, [f'rm {d}/{a}'], [f'rm {a}'], drop=[f'{d}/{a}'])
    files[x] = r.text()
    return task(f'Delete the directory {d} and the file {a}.', files, [f'rm -r {d}', f'rm {a}'], ['rm -r *'], drop=[a, f'{d}/{a}', f'{d}/{b}'])

def shelve(r, level):
    (a, b, x), d = r.f(3), r.d()
    files = {a: r.text(), b: r.text(), x: r.text()}
    if level == 1: return task(f'Make the directory {d} and move {a} into it.', files, [f'mkdir {d}', f'mv {a} {d}'], [f'mv {a} {d}'], {f'{d}/{a}': files[a]}, [a])
    if level == 2: return task(f'Make the directory {d} and move {a} and {b} into it.', files, [f'mkdir {d}', f'mv {a} {b} {d}'], [f'mv {a} {b} {d}'],
                               {f'{d}/{a}': files[a], f'{d}/{b}': files[b]}, [a, b])
    return task(f'Make the directory {d}, move {a} into it and delete {b}.', files, [f'mkdir {d}', f'mv {a} {d}', f'rm {b}'], [f'mv {a} {d}', f'rm {b}'],
                {f'{d}/{a}': files[a]}, [a, b])

def join(r, level):
    a, b, c, e, x = r.f(5)
    files = {a: r.text(), b: r.text(), x: r.text()}
    if level == 1: return task(f'Join {a} and {b} into {c}.', files, [f'cat {a} {b} > {c}'], [f'cat {a} > {c}'], {c: files[a] + files[b]})
    if level == 3: return task(f'Join {a} and {b} into {c}, then delete {a} and {b}.', files, [f'cat {a} {b} > {c}', f'rm {a} {b}'], [f'cat {a} > {c}', f'rm {a} {b}'],
                               {c: files[a] + files[b]}, [a, b])
    files[e] = r.text()
    return task(f'Join {a}, {b} and {e} into {c}.', files, [f'cat {a} {b} {e} > {c}'], [f'cat {a} > {c}'], {c: files[a] + files[b] + files[e]})

def replace(r, level):
    (a, b, x), (u, v, p, q) = r.f(3), r.w(4)
    old, new = ((line(p, k, q), line(p, k, k))[level == 2] for k in (u, v))
    files = {a: old, x: r.text()}
    if level == 1: return task(f'Replace {u} with {v} in {a}.', files, [f'sed -i s/{u}/{v}/ {a}'], [f'echo {v} > {a}'], {a: new})
    if level == 2: return task(f'Replace every {u} with {v} in {a}.', files, [f'sed -i s/{u}/{v}/g {a}'], [f'sed -i s/{u}/{v}/ {a}'], {a: new})
    return task(f'Replace {u} with {v} in {a}, then rename it to {b}.', files, [f'sed -i s/{u}/{v}/ {a}', f'mv {a} {b}'], [f'echo {v} > {a}', f'mv {a} {b}'], {b: new}, [a])

def pick(r, level):
    (a, b, c, x), (u, v, p, q) = r.f(4), r.w(4)
    files = {a: line(u, p), x: r.text()}
    if level == 1: return task(f'Write the first word of {a} into {b}.', files, [f'cat {a}', f'echo {u} > {b}'], [f'cp {a} {b}'], {b: line(u)})
    if level == 2: return task(f'Write the last word of {a} into {b}.', files, [f'cat {a}', f'echo {p} > {b}'], [f'cat {a}', f'echo {u} > {b}'], {b: line(p)})
    files[c] = line(v, q)
    return task(f'Write the first words of {a} and {c} into {b}.', files, [f'cat {a} {c}', f'echo {u} {v} > {b}'], [f'cat {a} {c} > {b}'], {b: line(u, v)})

def follow(r, level):
    (a, b, c, e, x), u = r.f(5), r.w()
    files = {a: line(c), c: r.text(), x: r.text()}
    if level == 1: return task(f'Append {u} to the file named in {a}.', files, [f'cat {a}', f'echo {u} >> {c}'], [f'echo {u} >> {a}'], {c: files[c] + line(u)})
    if level == 2: return task(f'Rename the file named in {a} to {b}.', files, [f'cat {a}', f'mv {c} {b}'], [f'mv {a} {b}'], {b: files[c]}, [c])
    files |= {b: line(e), e: r.text()}
    return task(f'Delete the files named in {a} and {b}.', files, [f'cat {a} {b}', f'rm {c} {e}'], [f'rm {a} {b}'], drop=[c, e])

def search(r, level):
    (a, b, c, x), (u, v, p, q) = r.f(4), r.w(4)
    files = {a: line(p, u), x: r.text()}
    if level == 1: return task(f'Rename the file that contains {u} to {b}.', files, [f'grep -l {u} *', f'mv {a} {b}'], [f'mv {u} {b}'], {b: files[a]}, [a])
    if level == 2: return task(f'Append {v} to the file that contains {u}.', files, [f'grep -l {u} *', f'echo {v} >> {a}'], [f'echo {v} >> {u}'], {a: files[a] + line(v)})
    files[c] = line(v, q)
    return task(f'Delete the file that contains {u} and the file that contains {v}.', files, [f'grep -l {u} *', f'grep -l {v} *', f'rm {a} {c}'], [f'rm {u} {v}'], drop=[a, c])

def chain(r, level):
    (a, b, c, x), u = r.f(4), r.w()
    files = {a: r.text(), x: r.text()}
    if level == 1: return task(f'Rename {a} to {b}, then copy it to {c}.', files, [f'mv {a} {b}', f'cp {b} {c}'], [f'mv {a} {b}', f'cp {a} {c}'], {b: files[a], c: files[a]}, [a])
    if level == 2: return task(f'Append {u} to {a}, then rename it to {b}.', files, [f'echo {u} >> {a}', f'mv {a} {b}'], [f'echo {u} > {a}', f'mv {a} {b}'], {b: files[a] + line(u)}, [a])
    new = files[a] + line(u)
    return task(f'Rename {a} to {b}, append {u} to it, then copy it to {c}.', files, [f'mv {a} {b}', f'echo {u} >> {b}', f'cp {b} {c}'],
                [f'mv {a} {b}', f'echo {u} > {b}', f'cp {b} {c}'], {b: new, c: new}, [a])

FAMILIES = (write, append, copy, rename, delete, shelve, join, replace, pick, follow, search, chain)

def fresh(family, level, rng, seen):
    "A task whose instruction and files occur nowhere else."
    for _ in range(10_000):
        t = family(Draw(rng), level)
        t['files'] = dict(rng.sample(sorted(t['files'].items()), len(t['files'])))
        keys = {('say', t['instruction']), ('files', json.dumps(t['files'], sort_keys=True))}
        if not keys & seen: seen |= keys; return t
    sys.exit(f'{family.__name__} level {level}: no more different tasks')

def suite(per_cell=PER_CELL, seed=0):
    "split -> tasks, levels and families mixed."
    rng, seen, out = random.Random(seed), set(), {}
    for split in ('test', 'validation', 'train'):  # held-out tasks first: they stay the same when train grows
        tasks = [dict(task_id=f'{split}-{f.__name__}-{level}-{i}', family=f.__name__, level=level, **fresh(f, level, rng, seen))
                 for level in (1, 2, 3) for f in FAMILIES for i in range(per_cell[split][level-1])]
        out[split] = rng.sample(tasks, len(tasks))
    return out

if __name__ == '__main__':
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--train-per-cell', type=int, default=PER_CELL['train'][0], help='training tasks per family and level')
    ap.add_argument('--to', type=Path, default=Path(__file__).parent)
    args = ap.parse_args()
    for split, tasks in suite({**PER_CELL, 'train': (args.train_per_cell,)*3}).items():
        (args.to/f'{split}.jsonl').write_text(''.join(json.dumps(t) + '\n' for t in tasks))
        print(split, len(tasks))
    (args.to/'words.json').write_text(json.dumps(dict(words=WORDS, names=NAMES, dirs=DIRS), indent=1) + '\n')
