"""Verifier of the claw suite: named checks, partial credit.

    expect = {"want": [check, ...], "keep": [check, ...]}       check = {"name", "kind", ...}

The score is the mean share of what was wanted, halved for each thing that should have been kept and wasn't. Things to keep
earn nothing by themselves, so an untouched workspace scores 0. What an agent leaves behind is data: a file that can't be
read, parsed or compared fails its check and never the verifier. Code of the agent runs in a process of its own, with a
deadline and a memory limit, is asked for values and never sees what they should be.
"""
import csv, io, json, os, resource, signal, subprocess, tempfile, time
from pathlib import Path

DEADLINE = time.monotonic() + 30  # for all programs of an agent together; these tasks give a verifier 60 s

class Space:
    "What the agent left."
    def __init__(self, root): self.root = Path(root)
    def text(self, path):
        p = self.root/path
        return p.read_bytes().decode('utf8', 'replace') if p.is_file() and not p.is_symlink() else None
    def json(self, path): return json.loads(self.text(path))
    def state(self): return json.loads(self.text('.state/tools.json'))
    def sent(self): return [m for m in self.state()['mail'] if m['folder'] == 'sent' and 'reply_to' in m]

def same(a, b):
    "Equal, numbers to the cent, texts up to outer blanks."
    if isinstance(b, bool) or isinstance(a, bool): return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)): return abs(a - b) < .006
    if isinstance(a, str) and isinstance(b, str): return a.strip() == b.strip()
    if isinstance(a, list) and isinstance(b, list): return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in b)
    return a == b

def lines(text): return [l.rstrip() for l in text.strip().splitlines()]

def cell(x):
    try: return f'{float(x):.2f}'
    except ValueError: return x.strip()

# Every kind: (space, its fields) -> share in [0, 1]

def text(w, path, text): return lines(w.text(path)) == lines(text)

def same_file(w, path, text): return w.text(path) == text

def has(w, path, all=(), none=()):
    "Share of the texts that occur, nothing if a forbidden one does; a list of texts means one of them."
    t = w.text(path).lower()
    if any(x.lower() in t for x in none): return 0.
    return sum(any(y.lower() in t for y in ([x] if isinstance(x, str) else x)) for x in all)/max(len(all), 1)

def gone(w, path, instead): return w.text(path) is None and not (w.root/path).exists() and w.text(instead) is not None

def value(w, path, value, at=(), otherwise=()):
    "What a JSON file says at a place; `otherwise` are other ways to say it."
    v = w.json(path)
    for k in at: v = v[k]
    return any(same(v, x) for x in (value, *otherwise))

def rows(w, path, header, rows, ordered=False):
    "Share of the rows that are right, of those that are there or should be."
    have = [r for r in csv.reader(io.StringIO(w.text(path).strip())) if r]
    if [h.strip().lower() for h in have[0]] != header: return 0.
    have, want = [tuple(map(cell, r)) for r in have[1:]], [tuple(cell(str(x)) for x in r) for r in rows]
    if ordered: return have == want
    both = sum(min(have.count(r), want.count(r)) for r in set(want))
    return both/max(len(have) + len(want) - both, 1)

def order(w, path, after):
    "A list of all names, a line each, none before what it needs."
    names = [l.strip() for l in lines(w.text(path)) if l.strip()]
    if sorted(names) != sorted(after): return 0.
    return all(names.index(b) < names.index(a) for a, bs in after.items() for b in bs)

def mail(w, to, text=(), none=(), reply_to=None):
    "The best message sent: right people, nothing forbidden, share of the texts."
    def one(m):
        if set(m['to']) - set(to) or reply_to is not None and m['reply_to'] != reply_to: return 0.
        t = f"{m['subject']} {m['text']}".lower()
        if any(x.lower() in t for x in none): return 0.
        return len(set(m['to']) & set(to))/len(to) * (sum(any(y.lower() in t for y in ([x] if isinstance(x, str) else x)) for x in text)/len(text) if text else 1.)
    return max(map(one, w.sent()), default=0.)

def mails(w, most): return len(w.sent()) <= most

def folders(w, where):
    "Share of the messages that are in the folder where they belong."
    now = {str(m['id']): m['folder'] for m in w.state()['mail']}
    return sum(now.get(k) == v for k, v in where.items())/len(where)

def event(w, start, end, people, title=''):
    return any(e['start'] == start and e['end'] == end and set(people) <= set(e['people']) and title.lower() in e['title'].lower() for e in w.state()['events'])

def events(w, events):
    "These are all there as they are here."
    now = w.state()['events']
    return all(any(x == e for x in now) for e in events)

def table(w, table, rows):
    "Share of these rows that the table has, by all the columns named here."
    now = w.state()['tables'][table]
    return sum(any(all(same(x.get(k), v) for k, v in r.items()) for x in now) for r in rows)/len(rows)

CHILD = r'''
import contextlib, io, json, sys
sys.path.insert(0, '.'); sys.dont_write_bytecode = True
ask, answer = json.loads(sys.stdin.readline()), []
def out(module, *argv):
    said, sys.argv = io.StringIO(), [module, *argv]
    with contextlib.redirect_stdout(said):
        try: __import__(module).main()
        except SystemExit: pass
    return said.getvalue()
for e in ask:
    try:
        space = {'out': out}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(e[0], space); v = eval(e[1], space)
        answer.append(['is', json.loads(json.dumps(v))])
    except BaseException as x: answer.append(['raises', type(x).__name__])
sys.__stdout__.write('\n' + json.dumps(answer) + '\n')
'''

def _limits():
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20,)*2); resource.setrlimit(resource.RLIMIT_CPU, (5, 5)); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,)*2)

def code(w, files, tests):
    "Share of the expressions that have the value they should, asked of the agent's modules: [setup, expression, [`is`, value]]."
    if any(w.text(f) is None for f in files): return 0.
    with tempfile.TemporaryDirectory(dir='.') as d:
        for f in files: (Path(d)/f).parent.mkdir(parents=True, exist_ok=True); (Path(d)/f).write_text(w.text(f), encoding='utf8', errors='replace')
        with tempfile.TemporaryFile(dir='.') as said, tempfile.TemporaryFile(dir='.') as asked:  # not a pipe: what it says is bounded
            asked.write((json.dumps([t[:2] for t in tests]) + '\n').encode()); asked.seek(0)
            p = subprocess.Popen(['/usr/bin/python3', '-I', '-S', '-c', CHILD], cwd=d, stdin=asked, stdout=said, stderr=subprocess.DEVNULL, preexec_fn=_limits, start_new_session=True, env={'PATH': '/usr/bin:/bin'})
            try: p.wait(max(.1, DEADLINE - time.monotonic()))
            except subprocess.TimeoutExpired: return 0.
            finally:
                try: os.killpg(p.pid, signal.SIGKILL)
                except OSError: pass
                p.wait()
            said.seek(0); got = json.loads(said.read().decode('utf8', 'replace').strip().splitlines()[-1])
    return sum(g[0] == t[2][0] and same(g[1], t[2][1]) for g, t in zip(got, tests))/len(tests)

KINDS = {f.__name__: f for f in (text, same_file, has, gone, value, rows, order, mail, mails, folders, event, events, table, code)}

def share(w, check):
    f = {k: v for k, v in check.items() if k not in ('name', 'kind')}
    try: return round(float(KINDS[check['kind']](w, **f)), 4)
    except Exception: return 0.

def verify(workspace, expect):
    w = Space(workspace)
    want, keep = ({c['name']: share(w, c) for c in expect.get(k, ())} for k in ('want', 'keep'))
    score = sum(want.values())/len(want) * .5**sum(v < 1 for v in keep.values())
    return {'score': 1. if score > .9999 else round(score, 4), 'checks': {**want, **keep}}
