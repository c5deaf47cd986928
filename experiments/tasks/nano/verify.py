"""Verifier of the nano suite: compares the workspace with the goal tree.

    1                   the goal, and nothing else touched
    1/2 * progress**2   part of the way (progress = mean over the changes the task asks for)
    0                   untouched, emptied, or a file that should have stayed was changed or removed

Each file that nobody asked for halves the score. Content counts as progress by the words that are right from the start
of the file, beyond those that were right already. Removing a file counts only once everything to be written is right:
throwing information away is never progress. Names that aren't plain lower-case words (a harness's own litter) are ignored.
"""
import re
from pathlib import Path

PLAIN = re.compile(r'[a-z]+(/[a-z]+)*')

def tree(root):
    "Path -> text of every regular file with a plain name."
    found = {}
    for p in sorted(Path(root).rglob('*')):
        name = p.relative_to(root).as_posix()
        if p.is_file() and not p.is_symlink() and PLAIN.fullmatch(name): found[name] = p.read_bytes().decode('utf8', 'replace')
    return found

def likeness(text, goal):
    "Share of the words that agree, counted from the start."
    a, b = (text or '').split(), goal.split()
    n = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return n/max(len(a), len(b), 1)

def progress(have, start, goal):
    "How much of one file's change is done, 0 to 1."
    if have == goal: return 1.
    if have is None: return 0.
    before = likeness(start, goal)
    return max(0., likeness(have, goal) - before)/(1 - before) if before < 1 else 0.

def verify(workspace, expect):
    start, goal, have = expect['start'], expect['goal'], tree(workspace)
    if any(have.get(p) != goal[p] for p in goal if start.get(p) == goal[p]): return 0.
    written = [progress(have.get(p), start.get(p), g) for p, g in goal.items() if start.get(p) != g]
    removed = [float(p not in have) for p in start if p not in goal]
    whole = all(w == 1 for w in written)
    done = written + (removed if whole else [0.]*len(removed))
    part = sum(done)/len(done)
    litter = sum(p not in goal and p not in start for p in have)
    return (1. if part == 1 else .5*part**2) * .5**litter
