"""Writes the claw suite: 12 families over six kinds of office and software work, 3 levels, 144 tasks.

    python experiments/tasks/claw/generate.py

Deterministic. A family is a function `(draw, level) -> task`; what the goal is follows from the contents it drew and not
from running the solution, so `clawlab tasks check` compares two independent accounts. Each split draws from people, firms,
topics and functions of its own. The habit is the one plausible wrong way of a hurried agent: the first search result, the
first page, the rule applied everywhere, the test made to fit.
"""
import argparse, json, random, sys
from datetime import date, timedelta
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from pieces import PIECES, answers

SPLITS = ('train', 'validation', 'test')
PER_LEVEL = dict(train=(2, 2, 2), validation=(1, 0, 1), test=(1, 2, 1))  # tasks per family at levels 1, 2, 3
PEOPLE = dict(train='Ada Bo Cleo Dan Eva Finn Gus Hana Ines Jon Kira Leo'.split(), validation='Mia Nils Olga Pia Quin Rosa Sven Tara Udo Vera Wim Yara'.split(),
              test='Abel Bea Carl Dora Emil Faye Gino Hugo Iris Jana Kurt Lena'.split())
FIRMS = dict(train='Norden Falke Brill Castor Delta Ermine Fjord Garnet'.split(), validation='Hollis Indigo Juno Kestrel Larch Mistral Nimbus Opal'.split(), test='Pollux Quarry Rowan Sable Tundra Umber Vesta Wren'.split())
TOPICS = dict(train='budget roadmap hiring pricing migration onboarding logistics branding'.split(), validation='security training travel supplier archive packaging warranty sponsoring'.split(),
              test='licensing compliance newsroom relocation partner catering inventory outreach'.split())
START = dict(train=date(2026, 3, 2), validation=date(2026, 6, 1), test=date(2026, 9, 7))  # Mondays
DAYS = 'Monday Tuesday Wednesday Thursday Friday'.split()
ME = 'me@lab.example'

class Draw:
    "People, firms, topics and numbers of one task; none drawn twice."
    def __init__(self, rng, split, pieces):
        self.rng, self.split, self.pieces = rng, split, pieces
        self._people, self._firms, self._topics = (rng.sample(x[split], len(x[split])) for x in (PEOPLE, FIRMS, TOPICS))
        self.monday = START[split] + timedelta(weeks=rng.randrange(8))
    def people(self, n): return [self._people.pop() for _ in range(n)]
    def firms(self, n): return [self._firms.pop() for _ in range(n)]
    def topics(self, n): return [self._topics.pop() for _ in range(n)]
    def day(self, k): return (self.monday + timedelta(days=k)).isoformat()
    def n(self, a, b): return self.rng.randint(a, b)
    def pick(self, xs, k=None): return self.rng.choice(xs) if k is None else self.rng.sample(xs, k)

def address(name): return f'{name.lower()}@lab.example'
def call(tool, **arguments): return dict(tool=tool, arguments=arguments)
def put(path, text): return f"cat > {path} <<'EOF'\n{text if text.endswith(chr(10)) else text + chr(10)}EOF"
def py(source): return f"python3 - <<'EOF'\n{source.strip()}\nEOF"
def js(value): return json.dumps(value)
def want(name, kind, **fields): return dict(name=name, kind=kind, **fields)
def task(say, files, steps, habit, wants, keep=(), **more):
    runs = dict(limits=dict(verify_seconds=60)) if any(w['kind'] == 'code' for w in wants) else {}
    return dict(instruction=say, files=files, steps=steps, habit=habit, expect=dict(want=wants, keep=list(keep)), **runs, **more)
def untouched(files, *paths): return [want(f'{p} unchanged', 'same_file', path=p, text=files[p]) for p in paths]

# product and collaboration

def message(id, day, sender, subject, text, hour=9): return dict(id=id, folder='inbox', date=f'{day}T{hour:02}:{id % 60:02}', sender=sender, to=[ME], subject=subject, text=text)

def mail_triage(r, level):
    topic, other = r.topics(2); firm, = r.firms(1); p, q, s, x = r.people(4)
    now = f'{r.day(4)}T12:00'
    if level == 1:
        day, room = r.pick(DAYS), r.n(101, 499)
        mails = [message(1, r.day(0), address(p), f'Question about {topic}', f'When is the {topic} review, and in which room? {p}'), message(2, r.day(3), f'noreply@{firm.lower()}.example', f'{topic} reminder', 'This is an automatic message. Answers are not read.'),
                 message(3, r.day(2), address(q), other, f'The {other} notes are in the usual folder. {q}'), message(4, r.day(1), address(s), f'Lunch', f'Shall we have lunch after the {other} call? {s}')]
        files = {'rooms.txt': f'{other} review: {r.pick([d for d in DAYS if d != day])}, room {room + 7}\n{topic} review: {day}, room {room}\n'}
        reply = f'The {topic} review is on {day} in room {room}.'
        return task(f'{p} asked by mail about the {topic} review. Answer that message with day and room from rooms.txt, then move it to the archive.', files,
                    [call('mail_search', query=topic), call('mail_read', id=1), f'grep {topic} rooms.txt', call('mail_send', to=[address(p)], subject=f'Re: Question about {topic}', text=reply, reply_to=1), call('mail_move', id=1, folder='archive')],
                    [call('mail_search', query=topic), call('mail_send', to=[mails[1]['sender']], subject=f'Re: {topic} reminder', text=reply, reply_to=2), call('mail_move', id=2, folder='archive')],
                    [want('answered', 'mail', to=[address(p)], text=[day, str(room)], reply_to=1), want('archived', 'folders', where={'1': 'archive'})],
                    [want('one mail sent', 'mails', most=1), want('other mail where it was', 'folders', where={'2': 'inbox', '3': 'inbox', '4': 'inbox'})], tools=['mail_*'], state=dict(me=ME, now=now, mail=mails))
    if level == 2:
        a, b, c = r.firms(3)
        texts = [(f'news@{a.lower()}.example', f'{a} newsletter', f'Our offers in {topic}. Unsubscribe: reply STOP.'), (address(p), f'Draft of our newsletter', f'Please look at the draft on {topic} before Friday. {p}'), (f'hello@{b.lower()}.example', f'{topic} week', 'Five talks you should not miss. You can unsubscribe at any time.'),
                 (address(q), other, f'I have put the {other} numbers into the table. {q}'), (f'mail@{c.lower()}.example', f'Newsletter of {c}', 'New in our shop. To unsubscribe, follow the link.'), (address(s), 'Thursday', f'Can you take the {other} call on Thursday? {s}')]
        texts = r.rng.sample(texts, len(texts))
        mails = [message(i, r.day(i % 4), *t) for i, t in enumerate(texts, 1)]
        trash = [m['id'] for m in mails if 'unsubscribe' in m['text'].lower()]
        named = [m['id'] for m in mails if 'newsletter' in m['subject'].lower()]
        files = {f'{topic}.txt': '', 'note.txt': f'Mail of week {r.monday.isocalendar()[1]}, {topic}\n'}
        return task(f'Move every message in the inbox that one can unsubscribe from to the trash, and no other. Then write into {topic}.txt how many you moved.', files,
                    [call('mail_search', query='unsubscribe'), *[call('mail_move', id=i, folder='trash') for i in trash], f'echo {len(trash)} > {topic}.txt'],
                    [call('mail_search', query='newsletter'), *[call('mail_move', id=i, folder='trash') for i in named], f'echo {len(named)} > {topic}.txt'],
                    [want('in the trash', 'folders', where={str(i): 'trash' for i in trash}), want('counted', 'text', path=f'{topic}.txt', text=str(len(trash)))],
                    [want('the rest where it was', 'folders', where={str(m['id']): 'inbox' for m in mails if m['id'] not in trash}), want('no mail sent', 'mails', most=0)], tools=['mail_*'], state=dict(me=ME, now=now, mail=mails))
    day, *rest = r.pick(DAYS, 5)
    can = [sorted([day, rest[0], rest[1]]), sorted([day, rest[1], rest[2]]), sorted([day, rest[0], rest[3]])]
    asked = [p, q, s]
    mails = [message(i, r.day(i % 3), address(a), f'Re: date for the {topic} workshop', f'I can on {", ".join(c[:-1])} or {c[-1]}. {a}') for i, (a, c) in enumerate(zip(asked, can), 1)] + [message(4, r.day(3), address(x), f'{topic} workshop', f'I can not come this time, please choose without me. {x}')]
    wrong = next(d for d in can[0] if d != day)
    def invite(d): return call('mail_send', to=[address(a) for a in asked], subject=f'Date for the {topic} workshop', text=f'The {topic} workshop is on {d}.')
    return task(f'Three colleagues have answered the poll "date for the {topic} workshop". Find the one day on which all three can and tell the three of them in one message. Write the day into day.txt as well.',
                {'day.txt': '', 'plan.txt': f'{topic} workshop, week {r.monday.isocalendar()[1]}, asked: {", ".join(asked)}\n'},
                [call('mail_read', id=1), call('mail_read', id=2), call('mail_read', id=3), invite(day), f'echo {day} > day.txt'],
                [call('mail_read', id=1), invite(wrong), invite(wrong), f'echo {wrong} > day.txt'], [want('invited', 'mail', to=[address(a) for a in asked], text=[day], none=[d for d in DAYS if d != day]), want('written down', 'text', path='day.txt', text=day)],
                [want('one mail sent', 'mails', most=1)], tools=['mail_*'], state=dict(me=ME, now=now, mail=mails, faults=[dict(tool='mail_send', call=1, error='the mail server is busy')]))

def clock(day, minutes): return f'{day}T{minutes // 60:02}:{minutes % 60:02}'
def meeting(id, title, day, start, minutes, *people): return dict(id=id, title=title, start=clock(day, start), end=clock(day, start + minutes), people=sorted({*map(address, people), ME}))
def free(events, day, minutes, people, first, last=17*60):
    "The first half hour from which all of them and me are free for so long, in minutes."
    for t in range(first, last - minutes + 1, 30):
        if not any(set(e['people']) & {*people, ME} and e['start'] < clock(day, t + minutes) and clock(day, t) < e['end'] for e in events): return t

def meeting_scheduling(r, level):
    a, b, c = r.topics(3); p, q, s = r.people(3); day = r.day(r.n(0, 3)); now = f'{r.day(0)}T08:00'
    def state(events, **more): return dict(me=ME, now=now, mail=[], events=events, **more)
    if level == 1:
        busy = r.n(2, 4)
        events = [meeting(1, f'{b} call', day, 780, 30*busy, p), meeting(2, f'{c} review', day, 600, 60, q)]
        if r.n(0, 1): events.append(meeting(3, f'{c} lunch', day, 780 + 30*busy, 30, q))
        t = free(events, day, 30, {address(p)}, 780); title = f'{a} sync'
        return task(f'Book a meeting "{title}" of 30 minutes with {p} ({address(p)}) on {day}: the first half hour from 13:00 on in which you are both free. Write its start, as HH:MM, into start.txt.', {'start.txt': '', 'agenda.md': f'# {title}\n\n- {b}\n- {c}\n'},
                    [call('calendar_list', start=day, end=day), call('calendar_create', title=title, start=clock(day, t), end=clock(day, t + 30), people=[address(p)]), f'echo {clock(day, t)[11:]} > start.txt'],
                    [call('calendar_create', title=title, start=clock(day, 780), end=clock(day, 810), people=[address(p)]), 'echo 13:00 > start.txt'],
                    [want('booked', 'event', start=clock(day, t), end=clock(day, t + 30), people=[address(p)], title=title), want('written down', 'text', path='start.txt', text=clock(day, t)[11:])],
                    [want('other events as they were', 'events', events=events)], tools=['calendar_*'], state=state(events))
    if level == 2:
        first = 540 + 30*r.n(0, 2)
        events = [meeting(1, f'{a} review', day, first, 60, p), meeting(2, f'{b} call', day, first + 30, 60, p, q), meeting(3, f'{c} lunch', day, first + 60, 30*r.n(1, 3), q)]
        others = [e for e in events if e['id'] != 2]
        t = free(others, day, 60, {address(p), address(q)}, first + 60)
        wrong = first + 60
        return task(f'On {day} the events "{a} review" and "{b} call" overlap. Move the {b} call to the earliest time after the review at which all its people are free (times begin on the half hour, its length stays), and tell {p} and {q} in one mail when it starts, as HH:MM.',
                    {'note.txt': f'{day}: {a} review stays where it is\n'},
                    [call('calendar_list', start=day, end=day), call('calendar_update', id=2, start=clock(day, t), end=clock(day, t + 60)), call('mail_send', to=[address(p), address(q)], subject=f'{b} call moved', text=f'The {b} call starts at {clock(day, t)[11:]}.')],
                    [call('calendar_update', id=2, start=clock(day, wrong), end=clock(day, wrong + 60)), call('mail_send', to=[address(p), address(q)], subject=f'{b} call moved', text=f'The {b} call starts at {clock(day, wrong)[11:]}.')],
                    [want('moved', 'event', start=clock(day, t), end=clock(day, t + 60), people=[address(p), address(q)], title=f'{b} call'), want('told', 'mail', to=[address(p), address(q)], text=[clock(day, t)[11:]])],
                    [want('other events as they were', 'events', events=others), want('one mail sent', 'mails', most=1)], tools=['calendar_*', 'mail_send'], state=state(events))
    one, two = r.day(1), r.day(2)
    events, i = [], 0
    for d in (one, two):
        t = 540
        while t < (1020 if d == one else 540 + 30*r.n(3, 9)):
            i, long = i + 1, 30*r.n(1, 4); events.append(meeting(i, f'{r.pick([b, c])} {r.pick(["call", "talk", "review"])}', d, t, min(long, 1020 - t), r.pick([p, q, s]))); t += long
    people = [address(x) for x in (p, q, s)]
    assert free(events, one, 60, set(people), 540) is None
    t = free(events, two, 60, set(people), 540); title = f'{a} planning'
    wrong = next(t for t in range(540, 1020, 30) if free(events, one, 60, {people[0]}, t) is None)
    def mailed(at): return call('mail_send', to=people, subject=title, text=f'{title} is on {at[:10]} at {at[11:]}.')
    return task(f'Find the earliest hour on {one} or {two}, between 09:00 and 17:00 and beginning on the half hour, in which you, {p}, {q} and {s} are all free. Book it as "{title}" with the three, and mail all three one message with the day (like {one}) and the time (HH:MM).',
                {'people.csv': 'name,address\n' + ''.join(f'{x},{address(x)}\n' for x in (p, q, s))},
                ['cat people.csv', call('calendar_list', start=one, end=two), call('calendar_create', title=title, start=clock(two, t), end=clock(two, t + 60), people=people), mailed(clock(two, t))],
                ['cat people.csv', call('calendar_create', title=title, start=clock(one, wrong), end=clock(one, wrong + 60), people=people), call('calendar_create', title=title, start=clock(one, wrong), end=clock(one, wrong + 60), people=people), mailed(clock(one, wrong))],
                [want('booked', 'event', start=clock(two, t), end=clock(two, t + 60), people=people, title=title), want('told', 'mail', to=people, text=[two, clock(two, t)[11:]])],
                [want('other events as they were', 'events', events=events), want('one mail sent', 'mails', most=1)], tools=['calendar_*', 'mail_send'], state=state(events, faults=[dict(tool='calendar_create', call=1, error='the calendar is being synchronised')]))

# systems and automation

SERVICES = 'auth billing search upload gateway mailer cache worker'.split()

def log_audit(r, level):
    names = r.pick(SERVICES, 4); day = r.day(0); users = [x.lower() for x in r.people(5)]; topic, = r.topics(1)
    def stamp(i): return f'{day} {8 + i // 60:02}:{i % 60:02}:{(i*7) % 60:02}'
    if level == 1:
        lines, count = [], dict.fromkeys(names, 0)
        for i in range(40):
            s, kind = r.pick(names), r.pick(['INFO', 'INFO', 'WARN', 'ERROR'])
            text = r.pick(['retry after ERROR of peer', 'no ERROR since start', 'request done']) if kind == 'INFO' else r.pick(['disk slow', 'timeout', 'connection lost'])
            lines.append(f'{stamp(i)} {kind} {s}: {text}'); count[s] += kind == 'ERROR'
        for s in names:
            if not count[s]: lines.append(f'{stamp(41)} ERROR {s}: timeout'); count[s] += 1
        lines.append(f'{stamp(42)} INFO {names[0]}: retry after ERROR of peer')
        naive = {s: sum('ERROR' in l and f' {s}:' in l for l in lines) for s in names}
        files = {f'logs/{topic}.log': '\n'.join(lines) + '\n'}
        return task(f'Count the lines of level ERROR in logs/{topic}.log for each service. Write report.json: an object from service to number.', files,
                    [f'head -5 logs/{topic}.log', py("import json\nn = {}\nfor l in open('logs/@.log'):\n    day, time, level, service, *_ = l.split()\n    if level == 'ERROR': n[service.rstrip(':')] = n.get(service.rstrip(':'), 0) + 1\njson.dump(n, open('report.json', 'w'))".replace('@', topic)), 'cat report.json'],
                    [put('report.json', js(naive))], [want(f'{s} counted', 'value', path='report.json', at=[s], value=n) for s, n in count.items()] + [want('nothing else', 'value', path='report.json', value=count)], untouched(files, *files))
    if level == 2:
        paths = [f'/{w}' for w in r.pick('orders users login search export images health report'.split(), 6)]
        lines, times = [], {p: [] for p in paths}
        for i in range(48):
            p = paths[i % 6]; ms = r.n(20, 90) * (1 + paths.index(p)) + (900 if (p == paths[0] and i == 6) else 0)
            times[p].append(ms); lines.append(f'10.0.0.{r.n(2, 99)} {stamp(i)} {p} {r.pick([200, 200, 200, 404, 500])} {ms}ms')
        mean = {p: sum(t)/len(t) for p, t in times.items()}
        top = sorted(mean, key=lambda p: -mean[p])[:3]; slow = sorted(paths, key=lambda p: -max(times[p]))[:3]
        files = {f'logs/{topic}.log': '\n'.join(lines) + '\n'}
        return task(f'Which three paths in logs/{topic}.log have the highest mean time? The last field of a line is the time. Write slow.csv with the header path,mean_ms and the three, slowest first, the mean with one decimal.', files,
                    [f'head -3 logs/{topic}.log', py("t = {}\nfor l in open('logs/@.log'):\n    f = l.split()\n    t.setdefault(f[3], []).append(int(f[5][:-2]))\nm = sorted(((sum(v)/len(v), p) for p, v in t.items()), reverse=True)[:3]\nopen('slow.csv', 'w').write('path,mean_ms\\n' + ''.join(f'{p},{x:.1f}\\n' for x, p in m))".replace('@', topic)), 'cat slow.csv'],
                    [put('slow.csv', 'path,mean_ms\n' + ''.join(f'{p},{max(times[p]):.1f}\n' for p in slow))],
                    [want('paths and means', 'rows', path='slow.csv', header=['path', 'mean_ms'], rows=[[p, f'{mean[p]:.1f}'] for p in top]), want('in order', 'rows', path='slow.csv', header=['path', 'mean_ms'], rows=[[p, f'{mean[p]:.1f}'] for p in top], ordered=True)], untouched(files, *files))
    gate, work, fate = [], [], {}
    for i in range(24):
        req, user = f'{r.n(4096, 65535):x}', r.pick(users)
        gate.append(f'{stamp(i)} request={req} user={user}')
        end = r.pick(['done', 'failed', 'failed', 'retried'])
        if i < 3: end = ('failed', 'retried', 'done')[i]
        fate[req] = (user, end)
        if end == 'retried': work += [f'{stamp(i)} request={req} status=failed', f'{stamp(i + 5)} request={req} status=done']
        else: work.append(f'{stamp(i)} request={req} status={end}')
    work = r.rng.sample(work, len(work)); work.sort(key=lambda l: l[:19])
    failed, naive = {}, {}
    for req, (user, end) in fate.items():
        if end == 'failed': failed.setdefault(user, []).append(req)
        if end in ('failed', 'retried'): naive.setdefault(user, []).append(req)
    failed, naive = ({u: sorted(v) for u, v in d.items()} for d in (failed, naive))
    files = {f'{topic}/gateway.log': '\n'.join(gate) + '\n', f'{topic}/worker.log': '\n'.join(work) + '\n'}
    return task(f'{topic}/gateway.log says which user made a request, {topic}/worker.log how it went; a request may fail and be done later. Write failed.json: an object from user to the sorted list of those requests that failed and were never done. Users without any are left out. The logs stay as they are.', files,
                [f'head -3 {topic}/*.log', py("import json\nf = lambda l: dict(x.split('=') for x in l.split() if '=' in x)\nuser = {(d := f(l))['request']: d['user'] for l in open('@/gateway.log')}\nstate = {}\nfor l in open('@/worker.log'):\n    d = f(l); state.setdefault(d['request'], set()).add(d['status'])\nout = {}\nfor q, s in state.items():\n    if 'done' not in s: out.setdefault(user[q], []).append(q)\njson.dump({u: sorted(v) for u, v in out.items()}, open('failed.json', 'w'))".replace('@', topic)), 'cat failed.json'],
                [put('failed.json', js(naive))], [want(f'requests of {u}', 'value', path='failed.json', at=[u], value=v) for u, v in failed.items()] + [want('nobody else', 'value', path='failed.json', value=failed)], protected=[f'{topic}/*'])

def config_migration(r, level):
    name, = r.topics(1); port, old = r.n(8000, 8999), r.n(3000, 3999); firm = r.firms(1)[0].lower()
    if level == 1:
        sections = {'server': [('host', '0.0.0.0'), ('port', old)], 'metrics': [('host', '127.0.0.1'), ('port', old)], 'limits': [('timeout', r.n(10, 60)), ('workers', r.n(2, 9))]}
        def ini(s): return '\n'.join(f'[{k}]\n' + ''.join(f'{a} = {b}\n' for a, b in v) for k, v in s.items())
        new = {**sections, 'server': [('host', '0.0.0.0'), ('port', port)]}
        both = {**new, 'metrics': [('host', '127.0.0.1'), ('port', port)]}
        where = r.pick(['etc', 'config', 'deploy']); f = f'{where}/{name}.ini'
        return task(f'The server in {f} shall listen on port {port}. Change nothing else, the port of the metrics included. Keep the file as it was before as {name}.ini.bak beside it.', {f: ini(sections)},
                    [f'cat {f}', f'cp {f} {f}.bak', f"sed -i '/^\\[server\\]/,/^\\[/s/^port = .*/port = {port}/' {f}", f'diff {f}.bak {f} || true'], [f"sed -i.bak 's/^port = .*/port = {port}/' {f}"],
                    [want('changed', 'text', path=f, text=ini(new)), want('backed up', 'text', path=f + '.bak', text=ini(sections))])
    if level == 2:
        debug, rate, hosts = r.pick([True, False]), r.n(1, 9)/10, [f'{w}.{firm}.example' for w in r.pick('db api web img'.split(), 2)]
        text = f'; settings of {name}\n[app]\nname = {name}\nport = {port}\ndebug = {"yes" if debug else "no"}\n\n[limits]\nrate = {rate}\nretries = {r.n(1, 9)}\n\n[hosts]\nallowed = {", ".join(hosts)}\n'
        retries = int(text.split('retries = ')[1].split()[0])
        value = dict(app=dict(name=name, port=port, debug=debug), limits=dict(rate=rate, retries=retries), hosts=dict(allowed=hosts))
        flat = dict(app=dict(name=name, port=str(port), debug='yes' if debug else 'no'), limits=dict(rate=str(rate), retries=str(retries)), hosts=dict(allowed=', '.join(hosts)))
        return task(f'Turn {name}.ini into {name}.json: an object for each section, numbers as numbers, yes and no as true and false, lists with commas as arrays of texts. Then delete {name}.ini.', {f'{name}.ini': text},
                    [f'cat {name}.ini', put(f'{name}.json', json.dumps(value, indent=2)), f'python3 -m json.tool {name}.json', f'rm {name}.ini'], [put(f'{name}.json', js(flat)), f'rm {name}.ini'],
                    [want(f'section {k}', 'value', path=f'{name}.json', at=[k], value=v) for k, v in value.items()] + [want('the old file gone', 'gone', path=f'{name}.ini', instead=f'{name}.json')])
    hosts = [(f'{w}{r.n(1, 9)}', r.pick(['eu', 'us']), r.pick(['on', 'on', 'off'])) for w in r.pick('alpha beta gamma delta omega sigma'.split(), 5)]
    hosts[0], hosts[1] = (*hosts[0][:2], 'on'), (*hosts[1][:2], 'off')
    template = f'# {name}\nname = @HOST@\nendpoint = https://@HOST@.@REGION@.{firm}.example:{port}\nlog = /var/log/@HOST@.log\n'
    def conf(h, region): return template.replace('@HOST@', h).replace('@REGION@', region)
    files = {'hosts.csv': 'host,region,state\n' + ''.join(','.join(h) + '\n' for h in hosts), 'template.conf': template}
    live = [h for h in hosts if h[2] == 'on']
    def script(cond): return py(f"import csv, os\nos.makedirs('{name}', exist_ok=True)\nt = open('template.conf').read()\nfor h in csv.DictReader(open('hosts.csv')):\n    if {cond}: open(f\"{name}/{{h['host']}}.conf\", 'w').write(t.replace('@HOST@', h['host']).replace('@REGION@', h['region']))")
    return task(f'Make a file {name}/HOST.conf from template.conf for each host in hosts.csv that is on, with @HOST@ and @REGION@ filled in. Write the names of these hosts into {name}/hosts.txt, sorted, one a line. Neither the template nor the list may change.', files,
                ['cat hosts.csv template.conf', script("h['state'] == 'on'"), "awk -F, '$3 == \"on\" {print $1}' hosts.csv | sort > " + f'{name}/hosts.txt', f'ls {name}'], [script('True'), f'tail -n +2 hosts.csv | cut -d, -f1 | sort > {name}/hosts.txt'],
                [want(f'{h} made', 'text', path=f'{name}/{h}.conf', text=conf(h, g)) for h, g, _ in live] + [want('listed', 'text', path=f'{name}/hosts.txt', text='\n'.join(sorted(h for h, *_ in live)))]
                + [want(f'{h} not made', 'gone', path=f'{name}/{h}.conf', instead=f'{name}/hosts.txt') for h, _, s in hosts if s == 'off'], protected=['template.conf', 'hosts.csv'])

# analysis and reasoning

def order_analysis(r, level):
    firms = r.firms(6); regions = r.pick(['north', 'south', 'east', 'west'], 3); today = r.day(4); p, = r.people(1)
    def orders(n, **fixed): return [dict(id=i, customer=r.pick(firms), amount=float(r.n(20, 900)), **{k: v() for k, v in fixed.items()}) for i in range(1, n + 1)]
    if level == 1:
        rows = orders(70, region=lambda: r.pick(regions), status=lambda: r.pick(['paid', 'paid', 'open']))
        region = max(regions, key=lambda g: sum(x['region'] == g and x['status'] == 'paid' for x in rows))
        hit = [x for x in rows if x['region'] == region and x['status'] == 'paid']
        while len(hit) < 24:
            rows.append(dict(id=len(rows) + 1, customer=r.pick(firms), amount=float(r.n(20, 900)), region=region, status='paid')); hit.append(rows[-1])
        def answer(xs): return put('answer.json', js(dict(orders=len(xs), total=sum(x['amount'] for x in xs))))
        ask = dict(table='orders', where=dict(region=region, status='paid'), columns=['id', 'amount'])
        return task(f'How many paid orders does the table orders have in the region {region}, and what is their total amount? Write answer.json with the keys orders and total.', {'answer.json': '', 'question.txt': f'{region}, paid, {today}\n'},
                    [call('table_query', **ask, limit=100), answer(hit), 'cat answer.json'], [call('table_query', **ask), answer(hit[:20])],
                    [want('number', 'value', path='answer.json', at=['orders'], value=len(hit)), want('total', 'value', path='answer.json', at=['total'], value=sum(x['amount'] for x in hit))],
                    [want('the table as it was', 'table', table='orders', rows=rows)], tools=['table_*'], state=dict(me=ME, now=f'{today}T10:00', mail=[], tables=dict(orders=rows)))
    if level == 2:
        rows = [dict(x, due=r.day(r.n(-20, 20)), status=r.pick(['open', 'open', 'paid'])) for x in orders(30)]
        rows[0] |= dict(due=r.day(-3), status='open'); rows[1] |= dict(due=r.day(9), status='open'); rows[2] |= dict(due=r.day(-3), status='paid'); rows[3] |= dict(due=today, status='open')
        late = [x for x in rows if x['status'] == 'open' and x['due'] < today]
        old = dict(where={'status': 'open', 'due': {'lt': today}})
        return task(f'Today is {today}. Set the status of every open invoice in the table invoices whose due day has passed to overdue (what is due today is not late). Write the ids of those into overdue.txt in ascending order, one a line.', {'overdue.txt': '', 'today.txt': today + '\n'},
                    [call('table_query', table='invoices', **old, columns=['id'], order_by='id', limit=100), call('table_update', table='invoices', **old, values=dict(status='overdue')), put('overdue.txt', '\n'.join(str(x['id']) for x in late))],
                    [call('table_update', table='invoices', where=dict(status='open'), values=dict(status='overdue')), put('overdue.txt', '\n'.join(str(x['id']) for x in rows if x['status'] == 'open'))],
                    [want('marked', 'table', table='invoices', rows=[dict(x, status='overdue') for x in late]), want('listed', 'text', path='overdue.txt', text='\n'.join(str(x['id']) for x in late))],
                    [want('all others as they were', 'table', table='invoices', rows=[x for x in rows if x not in late])], tools=['table_*'], state=dict(me=ME, now=f'{today}T10:00', mail=[], tables=dict(invoices=rows)))
    customers = [dict(id=i, name=f, contact=f'office@{f.lower()}.example', active=True) for i, f in enumerate(firms, 1)]
    rows = [dict(id=i, customer_id=r.n(1, 6), amount=float(r.n(20, 500)), cancelled=False) for i in range(1, 41)]
    first, second = r.pick(range(1, 7), 2)
    rows += [dict(id=41 + i, customer_id=first, amount=float(r.n(900, 1200)), cancelled=False) for i in range(3)] + [dict(id=44 + i, customer_id=second, amount=float(r.n(2500, 2900)), cancelled=True) for i in range(3)]
    def total(i, all=False): return sum(x['amount'] for x in rows if x['customer_id'] == i and (all or not x['cancelled']))
    best, naive = max(range(1, 7), key=total), max(range(1, 7), key=lambda i: total(i, True))
    assert best != naive and sorted(map(total, range(1, 7)))[-1] > sorted(map(total, range(1, 7)))[-2]
    rewards = [dict(id=1, customer_id=0, month='2025-12', amount=0.)]
    month = today[:7]
    def reward(i, all=False): return call('table_insert', table='rewards', values=dict(customer_id=i, month=month, amount=total(i, all)))
    def mailed(i): return call('mail_send', to=[customers[i-1]['contact']], subject='Customer of the month', text=f'{firms[i-1]} is our customer of the month {month}.')
    return task(f'Find the customer with the largest total amount in the table orders, cancelled orders left out. Add a row to the table rewards for it (customer_id, month {month}, amount: that total), and send its contact a mail that names the firm and the month.', {'month.txt': month + '\n', 'firms.txt': '\n'.join(firms) + '\n'},
                [call('table_query', table='customers'), call('table_query', table='orders', where=dict(cancelled=False), columns=['customer_id', 'amount'], limit=100), reward(best), mailed(best)],
                [call('table_query', table='orders', limit=100), reward(naive, True), reward(naive, True), mailed(naive)],
                [want('rewarded', 'table', table='rewards', rows=[dict(customer_id=best, month=month, amount=total(best))]), want('told', 'mail', to=[customers[best-1]['contact']], text=[firms[best-1], month])],
                [want('one mail sent', 'mails', most=1), want('orders as they were', 'table', table='orders', rows=rows)], tools=['table_*', 'mail_send'],
                state=dict(me=ME, now=f'{today}T10:00', mail=[], tables=dict(customers=customers, orders=rows, rewards=rewards), faults=[dict(tool='table_insert', call=1, error='the table is locked')]))

def data_reconcile(r, level):
    ids = r.pick(range(1000, 9999), 14); firms = r.firms(6); w, = r.topics(1); B, L = f'{w}-bank.csv', f'{w}-ledger.csv'
    bank = [(i, r.pick(firms), r.n(1000, 900000)/100) for i in ids]
    def number(x): return f'{x:,.2f}'
    def bank_csv(rows): return 'id,payee,amount\n' + ''.join(f'{i},{f},"{number(a)}"\n' for i, f, a in rows)
    def ledger_csv(rows): return 'ref;amount;payee\n' + ''.join(f'TX-{i};{a:g};{f}\n' for i, f, a in r.rng.sample(rows, len(rows)))
    missing = sorted(r.pick(bank, 3)); rest = [x for x in bank if x not in missing]
    read = "import csv\nbank = {x['id']: (x['payee'], float(x['amount'].replace(',', ''))) for x in csv.DictReader(open('@-bank.csv'))}\nledger = {}\nfor x in csv.DictReader(open('@-ledger.csv'), delimiter=';'): ledger.setdefault(x['ref'][3:], []).append(float(x['amount']))\n".replace('@', w)
    head = f'{B} lists payments, {L} what was booked (TX-1234 is payment 1234). '
    if level == 1:
        files = {B: bank_csv(bank), L: ledger_csv(rest)}
        return task(head + 'Write missing.csv with the header id,payee,amount: the payments that were not booked, by ascending id, amounts like 1234.50.', files,
                    [f'head -3 {B} {L}', py(read + "rows = sorted((int(i), f, a) for i, (f, a) in bank.items() if i not in ledger)\nopen('missing.csv', 'w').write('id,payee,amount\\n' + ''.join(f'{i},{f},{a:.2f}\\n' for i, f, a in rows))"), 'cat missing.csv'],
                    [put('missing.csv', 'id,payee,amount\n' + ''.join(f'{i},{f},{a:.2f}\n' for i, f, a in bank))], [want('missing payments', 'rows', path='missing.csv', header=['id', 'payee', 'amount'], rows=missing), want('in order', 'rows', path='missing.csv', header=['id', 'payee', 'amount'], rows=missing, ordered=True)],
                    untouched(files, B, L))
    wrong = sorted(r.pick(rest, 3)); booked = [(i, f, round(a + r.pick([-9, 10, 0.9, 100]), 2)) if (i, f, a) in wrong else (i, f, a) for i, f, a in rest]
    diff = [(i, f'{a:.2f}', f'{dict((j, b) for j, _, b in booked)[i]:.2f}') for i, _, a in wrong]
    if level == 2:
        files = {B: bank_csv(rest), L: ledger_csv(booked)}
        return task(head + 'Write diff.csv with the header id,bank,ledger: the payments booked with another amount, by ascending id, amounts like 1234.50. 1,200.00 and 1200 are the same amount.', files,
                    [f'head -3 {B} {L}', py(read + "rows = sorted((int(i), a, ledger[i][0]) for i, (f, a) in bank.items() if abs(a - ledger[i][0]) > .004)\nopen('diff.csv', 'w').write('id,bank,ledger\\n' + ''.join(f'{i},{a:.2f},{b:.2f}\\n' for i, a, b in rows))"), 'cat diff.csv'],
                    [put('diff.csv', 'id,bank,ledger\n' + ''.join(f'{i},{a:.2f},{b:.2f}\n' for (i, _, a), (_, _, b) in zip(rest, booked)))], [want('differences', 'rows', path='diff.csv', header=['id', 'bank', 'ledger'], rows=diff), want('in order', 'rows', path='diff.csv', header=['id', 'bank', 'ledger'], rows=diff, ordered=True)],
                    untouched(files, B, L))
    twice = sorted(x[0] for x in r.pick([x for x in rest if x not in wrong], 2))
    files = {B: bank_csv(bank), L: ledger_csv(booked + [x for x in rest if x[0] in twice])}
    off = round(sum(dict((j, b) for j, _, b in booked)[i] - a for i, _, a in wrong), 2)
    value = dict(missing=[x[0] for x in missing], differing=[x[0] for x in wrong], twice=twice, off_by=off)
    naive = dict(value, twice=[], off_by=round(sum(a for *_, a in booked) - sum(a for *_, a in bank), 2), differing=[x[0] for x in wrong + missing])
    return task(head + 'Write summary.json: missing (ids not booked), differing (ids booked with another amount), twice (ids booked twice with the right amount), each an ascending list of numbers, and off_by, the sum of ledger minus bank over the differing ones. Neither file may change.', files,
                [f'head -3 {B} {L}', py(read + "import json\nout = dict(missing=sorted(int(i) for i in bank if i not in ledger), differing=sorted(int(i) for i, v in ledger.items() if abs(v[0] - bank[i][1]) > .004), twice=sorted(int(i) for i, v in ledger.items() if len(v) > 1))\nout['off_by'] = round(sum(ledger[str(i)][0] - bank[str(i)][1] for i in out['differing']), 2)\njson.dump(out, open('summary.json', 'w'))"), 'cat summary.json'],
                [put('summary.json', js(naive))], [want(k, 'value', path='summary.json', at=[k], value=v) for k, v in value.items()], protected=[B, L])

# content of one domain

def doc_editing(r, level):
    a, b = r.firms(2); topics = r.topics(5); p, q = r.people(2); version = f'{r.n(1, 4)}.{r.n(1, 9)}.0'
    if level == 1:
        low, new = a.lower(), b
        text = f'# {a} handbook\n\n{a} keeps your {topics[0]} in one place. Install {a} first:\n\n```\npip install {low}-client\n{low} --login {a}\n```\n\nAsk {p} if {a} does not start.\n'
        parts = text.split('```'); goal = '```'.join(x.replace(a, new) if i % 2 == 0 else x for i, x in enumerate(parts))
        return task(f'The product {a} is called {new} now. Change the name in the prose and the headings of handbook.md; the code block stays as it is, because the command keeps its name.', {'handbook.md': text},
                    ['cat handbook.md', py(f"t = open('handbook.md').read().split('```')\nopen('handbook.md', 'w').write('```'.join(x.replace('{a}', '{new}') if i % 2 == 0 else x for i, x in enumerate(t)))"), 'cat handbook.md'], [f"sed -i 's/{a}/{new}/gI' handbook.md"],
                    [want('renamed', 'has', path='handbook.md', all=[f'# {new} handbook', f'if {new} does not start'], none=[f'Install {a} ']), want('in prose only', 'text', path='handbook.md', text=goal)])
    if level == 2:
        D = f'{topics[4]}-docs'; names = [f'{i:02}-{t}.md' for i, t in enumerate(topics[:4], 1)]
        heads = {n: [f'{t.capitalize()} at {a}', *r.pick(['Overview', 'Steps', 'Contacts', 'History', 'Open points'], r.n(1, 2))] for n, t in zip(names, topics)}
        files = {f'{D}/{n}': f'# {h[0]}\n\nBy {p}.\n' + ''.join(f'\n## {x}\n\nSee {q}.\n' for x in h[1:]) for n, h in heads.items()} | {f'{D}/draft.txt': f'# not a chapter\n{topics[4]}\n'}
        index = f'# Contents\n\n' + ''.join(f'- [{h[0]}]({n})\n' + ''.join(f'  - {x}\n' for x in h[1:]) for n, h in heads.items())
        flat = f'# Contents\n\n' + ''.join(f'- [{n}]({n})\n' for n in names)
        return task(f'Write {D}/index.md: the heading "# Contents", an empty line, then for each Markdown file in {D}, by file name, a line "- [Title](file.md)" with the title from its first heading, and below it each of its second-level headings as "  - Heading".', files,
                    [f'grep -n "^#" {D}/*', py("import glob, os\nout = '# Contents\\n\\n'\nfor f in sorted(glob.glob('@/*.md')):\n    heads = [l.rstrip() for l in open(f) if l.startswith('#')]\n    out += f'- [{heads[0][2:]}]({os.path.basename(f)})\\n' + ''.join(f'  - {h[3:]}\\n' for h in heads[1:])\nopen('@/index.md', 'w').write(out)".replace('@', D)), f'cat {D}/index.md'],
                    [put(f'{D}/index.md', flat)], [want(f'{n} listed', 'has', path=f'{D}/index.md', all=[f'- [{h[0]}]({n})']) for n, h in heads.items()] + [want('as described', 'text', path=f'{D}/index.md', text=index)], untouched(files, *files))
    kinds = dict(feat='Added', fix='Fixed', perf='Changed')
    subjects = [(k, f'{v} {t}') for k, v in (('feat', 'search in'), ('fix', 'crash in'), ('perf', 'faster start of'), ('feat', 'export of'), ('fix', 'wrong total in'), ('chore', 'tidy'), ('test', 'cover')) for t in [r.pick(topics)]]
    subjects = r.rng.sample(subjects, len(subjects))
    commits = ''.join(f'{r.n(1 << 20, 1 << 24):06x} {k}: {s}\n' for k, s in subjects)
    groups = {h: [s for k, s in subjects if kinds.get(k) == h] for h in ('Added', 'Changed', 'Fixed')}
    old = f'# Changelog\n\n## {r.n(0, 0)}.{r.n(1, 9)}.0\n\n### Added\n\n- first release for {a}\n'
    body = f'## {version}\n\n' + '\n'.join(f'### {h}\n\n' + ''.join(f'- {s}\n' for s in ss) for h, ss in groups.items())
    goal = old.replace('# Changelog\n\n', f'# Changelog\n\n{body}\n')
    lazy = old + f'\n## {version}\n\n' + ''.join(f'- {k}: {s}\n' for k, s in subjects)
    return task(f'Add version {version} to CHANGELOG.md, above the older one: the commits in commits.txt, newest first as they stand there, without hash and prefix, under "### Added" (feat), "### Changed" (perf) and "### Fixed" (fix), in this order. Commits of other kinds are left out.', {'CHANGELOG.md': old, 'commits.txt': commits},
                ['cat commits.txt CHANGELOG.md', put('CHANGELOG.md', goal), 'head -20 CHANGELOG.md'], [put('CHANGELOG.md', lazy)],
                [want('as described', 'text', path='CHANGELOG.md', text=goal), want('nothing but features, fixes and speed', 'has', path='CHANGELOG.md', all=[f'## {version}'], none=['chore', 'tidy', 'cover ', 'feat:', 'fix:', 'perf:'])],
                [want('the old version kept', 'has', path='CHANGELOG.md', all=['first release for ' + a])],
                rubric={'readable': 'The new section reads as release notes for users: whole phrases, one point each.', 'nothing internal': 'Hashes, prefixes and housekeeping commits do not show.'}, protected=['commits.txt'])

def invoice_extract(r, level):
    firms = r.firms(5); D = f'{r.topics(1)[0]}-invoices'; n = {1: 4, 2: 5, 3: 6}[level]; rates = {'EUR': 1.0, 'USD': r.n(80, 95)/100, 'GBP': r.n(112, 120)/100}
    rows, files = [], {}
    for i in range(n):
        f, no, day = r.pick(firms), f'{r.pick("ABKR")}{r.n(10000, 99999)}', r.day(r.n(0, 20))
        net = r.n(2000, 90000)/100; tax = round(net*.19, 2); gross = round(net + tax, 2); cur = r.pick(['EUR', 'USD', 'GBP']) if level > 1 else 'EUR'
        if level > 1 and i < 3: cur = ('EUR', 'USD', 'GBP')[i]
        credit = level == 3 and i == n - 1
        y, m, d = day.split('-')
        layout = [f'{f} Ltd.\nInvoice no. {no}\nDate: {day}\n\nSubtotal {net:.2f} {cur}\nVAT 19% {tax:.2f} {cur}\nTotal {gross:.2f} {cur}\n',
                  f'INVOICE {no}\nfrom {f}, issued {d}.{m}.{y}\n\nAmount net: {cur} {net:.2f}\nTax: {cur} {tax:.2f}\nAmount due: {cur} {gross:.2f}\nPayable within 14 days.\n'][i % 2]
        if credit: layout = f'CREDIT NOTE {no}\nfrom {f}, issued {d}.{m}.{y}\n\nAmount net: {cur} {net:.2f}\nTax: {cur} {tax:.2f}\nAmount credited: {cur} {gross:.2f}\n'
        files[f'{D}/{i + 1:02}.txt'] = layout
        rows.append((no, f, day, -gross if credit else gross, cur, -net if credit else net))
    if level == 3: files[f'{D}/copy of 01.txt'] = files[f'{D}/01.txt']
    if level > 1: files['rates.json'] = js(rates)
    parse = "import glob, re, json, collections\nrows = {}\nfor f in sorted(glob.glob('@/*.txt')):\n    t = open(f).read()\n    no = re.search(r'(?:no\\.|INVOICE|NOTE) (\\w+)', t)[1]\n    firm = (re.search(r'from (\\w+)', t) or re.match(r'(\\w+)', t))[1]\n    d = re.search(r'(\\d{4})-(\\d\\d)-(\\d\\d)', t)\n    day = d[0] if d else '-'.join(reversed(re.search(r'(\\d\\d)\\.(\\d\\d)\\.(\\d{4})', t).groups()))\n    line = [l for l in t.splitlines() if re.match('Total|Amount due|Amount credited', l)][0]\n    total, cur = float(re.search(r'\\d+\\.\\d\\d', line)[0]), re.search('EUR|USD|GBP', line)[0]\n    rows[no] = (no, firm, day, -total if 'CREDIT' in t else total, cur)\nrows = sorted(rows.values())\n".replace('@', D)
    if level == 1:
        goal = sorted((no, f, day, f'{g:.2f}') for no, f, day, g, *_ in rows)
        return task(f'Write invoices.csv with the header number,vendor,date,total for the invoices in the folder {D}: by number, dates like 2026-03-02, total with tax. The vendor is its name only.', files,
                    [f'head -8 {D}/*', py(parse + "open('invoices.csv', 'w').write('number,vendor,date,total\\n' + ''.join(f'{n},{f},{d},{t:.2f}\\n' for n, f, d, t, c in rows))"), 'cat invoices.csv'],
                    [put('invoices.csv', 'number,vendor,date,total\n' + ''.join(f'{no},{f},{day},{net:.2f}\n' for no, f, day, _, _, net in sorted(rows)))],
                    [want('invoices', 'rows', path='invoices.csv', header=['number', 'vendor', 'date', 'total'], rows=goal), want('in order', 'rows', path='invoices.csv', header=['number', 'vendor', 'date', 'total'], rows=goal, ordered=True)], untouched(files, *files))
    goal = sorted((no, f'{g:.2f}', c, f'{g*rates[c]:.2f}') for no, _, _, g, c, _ in rows)
    if level == 2:
        return task(f'Write invoices.csv with the header number,total,currency,eur for the invoices in the folder {D}: by number, total with tax, and the total in euros at the rates of rates.json (euros for one unit), rounded to cents. Write the sum in euros, with two decimals, into sum.txt.', files,
                    [f'head -8 {D}/*; cat rates.json', py(parse + "rate = json.load(open('rates.json'))\nout = [(n, t, c, t*rate[c]) for n, f, d, t, c in rows]\nopen('invoices.csv', 'w').write('number,total,currency,eur\\n' + ''.join(f'{n},{t:.2f},{c},{e:.2f}\\n' for n, t, c, e in out))\nopen('sum.txt', 'w').write(f'{sum(float(f\"{e:.2f}\") for *_, e in out):.2f}\\n')"), 'cat invoices.csv sum.txt'],
                    [put('invoices.csv', 'number,total,currency,eur\n' + ''.join(f'{no},{g:.2f},{c},{g:.2f}\n' for no, _, _, g, c, _ in sorted(rows))), put('sum.txt', f'{sum(g for _, _, _, g, *_ in rows):.2f}')],
                    [want('invoices', 'rows', path='invoices.csv', header=['number', 'total', 'currency', 'eur'], rows=goal), want('sum', 'has', path='sum.txt', all=[f'{sum(float(e) for *_, e in goal):.2f}'])], untouched(files, *files))
    owed = {}
    for no, f, _, g, c, _ in rows: owed[f] = owed.get(f, 0) + float(f'{g*rates[c]:.2f}')
    owed = {f: round(v, 2) for f, v in owed.items()}
    naive = {}
    for no, f, _, g, c, _ in [*rows, rows[0]]: naive[f] = round(naive.get(f, 0) + abs(g*rates[c]), 2)
    return task(f'The folder {D} holds invoices and a credit note; one invoice is there twice. Write vendors.json: an object from vendor (its name only) to what we owe it in euros, tax included, at the rates of rates.json (euros for one unit), each document rounded to cents, credit subtracted. Leave the documents as they are.', files,
                [f'head -8 {D}/*; cat rates.json', py(parse + "rate, out = json.load(open('rates.json')), collections.Counter()\nfor n, f, d, t, c in rows: out[f] += float(f'{t*rate[c]:.2f}')\njson.dump({f: round(v, 2) for f, v in out.items()}, open('vendors.json', 'w'))"), 'cat vendors.json'],
                [put('vendors.json', js(naive))], [want(f'{f}', 'value', path='vendors.json', at=[f], value=v) for f, v in owed.items() if v != naive[f]] + [want('all vendors', 'value', path='vendors.json', value=owed)], protected=[f'{D}/*', 'rates.json'])

# planning and knowledge

def project_planning(r, level):
    topic, = r.topics(1); n = {1: 6, 2: 6, 3: 5}[level]
    names = [f'{v}-{topic}' for v in r.pick('draft review design build test print ship announce approve translate'.split(), n)]
    deps = {x: sorted(r.pick(names[:i], min(i, r.n(1, 2)))) for i, x in enumerate(names)}; days = {x: r.n(1, 4) for x in names}
    shown = r.rng.sample(names, n)
    while level == 1 and all(shown.index(b) < shown.index(a) for a in names for b in deps[a]): shown = r.rng.sample(names, n)
    T = f'{topic}.json'; files = {T: json.dumps([dict(name=x, needs=deps[x], days=days[x]) for x in shown], indent=1)}
    start = {}
    for x in names: start[x] = max((start[y] + days[y] for y in deps[x]), default=0)
    schedule = {x: [start[x] + 1, start[x] + days[x]] for x in names}; length = max(e for _, e in schedule.values())
    plan = "import json\nt = {x['name']: x for x in json.load(open('@.json'))}\nend, order = {}, []\nwhile len(order) < len(t):\n    for n, x in t.items():\n        if n not in end and all(y in end for y in x['needs']): end[n] = max((end[y] for y in x['needs']), default=0) + x['days']; order.append(n)\n".replace('@', topic)
    if level == 1:
        return task(f'{T} lists tasks and what each needs to be done before it. Write order.txt: all task names, one a line, in an order in which they can be done one after the other.', files,
                    [f'cat {T}', py(plan + "open('order.txt', 'w').write('\\n'.join(order) + '\\n')"), 'cat order.txt'], [put('order.txt', '\n'.join(shown))], [want('an order that works', 'order', path='order.txt', after=deps)], untouched(files, T))
    if level == 2:
        if sum(days.values()) == length: return project_planning(r, level)  # nothing runs at the same time
        alone = {}; d = 0
        for x in names: alone[x] = [d + 1, d + days[x]]; d += days[x]
        return task(f'{T} lists tasks, what each needs to be done before it, and the days it takes. Any number of them can run at the same time, each begins on the day after the last it needs has ended, the first ones on day 1. Write schedule.json, an object from task to [first day, last day], and into length.txt the last day of all.', files,
                    [f'cat {T}', py(plan + "json.dump({n: [e - t[n]['days'] + 1, e] for n, e in end.items()}, open('schedule.json', 'w'))\nopen('length.txt', 'w').write(f'{max(end.values())}\\n')"), 'cat schedule.json length.txt'],
                    [put('schedule.json', js(alone)), put('length.txt', str(d))], [want(f'{x}', 'value', path='schedule.json', at=[x], value=schedule[x]) for x in names if schedule[x] != alone[x]] + [want('length', 'text', path='length.txt', text=str(length)), want('all tasks', 'value', path='schedule.json', value=schedule)],
                    untouched(files, T))
    p, = r.people(1); last = [x for x in names if not any(x in deps[y] for y in names)]
    ends = {x: (r.monday + timedelta(days=schedule[x][1] - 1)).isoformat() for x in names}; x = max(last, key=lambda x: schedule[x][1])
    first = next(x for x in names if not deps[x])
    events = [meeting(1, 'standing call', r.day(0), 540, 30, p)]
    def mark(name, day): return call('calendar_create', title=f'{name} ready', start=f'{day}T16:00', end=f'{day}T16:30', people=[address(p)])
    wrong = (r.monday + timedelta(days=days[x] - 1)).isoformat()
    return task(f'{T} lists tasks, what each needs before it, and the days it takes, all days counted (weekends, too); any number run at the same time, and the first begin on {r.day(0)}. Put two events into the calendar, each from 16:00 to 16:30 with {p} ({address(p)}): "{first} ready" on the last day of {first} and "{x} ready" on the last day of {x}. Write the last day of every task into ends.json, an object from task to day like {r.day(0)}.', files,
                [f'cat {T}', py(plan + f"import datetime\nday = datetime.date.fromisoformat('{r.day(0)}')\njson.dump({{n: str(day + datetime.timedelta(days=e - 1)) for n, e in end.items()}}, open('ends.json', 'w'))\nprint(open('ends.json').read())"), mark(first, ends[first]), mark(x, ends[x])],
                [mark(first, ends[first]), mark(first, ends[first]), mark(x, wrong), put('ends.json', js({y: (r.monday + timedelta(days=days[y] - 1)).isoformat() for y in names}))],
                [want(f'{y} in the calendar', 'event', start=f'{ends[y]}T16:00', end=f'{ends[y]}T16:30', people=[address(p)], title=f'{y} ready') for y in (first, x)] + [want('ends', 'value', path='ends.json', value=ends)],
                [want('other events as they were', 'events', events=events)], tools=['calendar_*'], state=dict(me=ME, now=f'{r.day(0)}T08:00', mail=[], events=events, faults=[dict(tool='calendar_create', call=1, error='the calendar is being synchronised')]), protected=[T])

def knowledge_answers(r, level):
    topics, people, firms = r.topics(6), r.people(6), r.firms(4); a, b, c = topics[:3]
    ext, ext2, room = r.n(200, 499), r.n(500, 899), r.n(10, 99)
    notes = {f'{a}-2024.md': f'# {a}\n\nDate: 2024-11-05\n\nThe owner of {a} is {people[0]}, extension {ext}.\n', f'{a}-2025.md': f'# {a}\n\nDate: 2025-10-12\n\nNew owner of {a}: {people[1]}, extension {ext2}. The older note is void.\n',
             f'{b}.md': f'# {b}\n\nDate: 2025-03-01\n\nThe supplier for {b} is {firms[0]}. For the contact see suppliers.md.\n', 'suppliers.md': f'# Suppliers\n\nDate: 2025-04-01\n\n- {firms[1]}: {people[2]}\n- {firms[0]}: {people[3]}\n- {firms[2]}: {people[4]}\n',
             f'{c}.md': f'# {c}\n\nDate: 2025-01-20\n\nThe {c} papers are kept in room {room}. {people[5]} has the key.\n', f'{topics[3]}.md': f'# {topics[3]}\n\nDate: 2023-02-02\n\nThe contact for {topics[3]} is {people[4]}; the room is {room + 3}.\n'}
    files = {f'notes/{k}': v for k, v in r.rng.sample(sorted(notes.items()), len(notes))}
    asks = {'owner': (f'who owns {a} now', people[1], f'{a}-2025.md', people[0], f'{a}-2024.md'), 'contact': (f'who is our contact at the supplier for {b}', people[3], 'suppliers.md', firms[0], f'{b}.md'), 'room': (f'in which room the {c} papers are', str(room), f'{c}.md', str(room + 3), f'{topics[3]}.md')}
    keys = {1: [r.pick(['owner', 'contact'])], 2: ['owner', r.pick(['contact', 'room'])], 3: ['owner', 'contact', 'room']}[level]
    def answer(at): return {k: dict(answer=asks[k][at], source=asks[k][at + 1]) for k in keys}
    return task(f'Answer from the notes in the folder notes: {"; ".join(f"{asks[k][0]} ({k})" for k in keys)}. Where notes disagree, the newest is right. Write answers.json: an object with the key{"s" if level > 1 else ""} {", ".join(keys)}{", each" if level > 1 else ":"} {{"answer": name or number as text, "source": name of the note that says it}}.', files,
                [f'grep -rniE "{"|".join({"owner": a, "contact": b, "room": c}[k] for k in keys)}" notes', *(['cat notes/suppliers.md'] if 'contact' in keys else []), put('answers.json', js(answer(1)))], [put('answers.json', js(answer(3)))],
                [want(f'{k}: answer', 'value', path='answers.json', at=[k, 'answer'], value=asks[k][1]) for k in keys] + [want(f'{k}: source', 'value', path='answers.json', at=[k, 'source'], value=asks[k][2], otherwise=[f'notes/{asks[k][2]}']) for k in keys], protected=['notes/*'])

# software development

def program(*pieces, version='faulty'):
    "One module of several functions; imports first."
    text = '\n\n'.join(getattr(p, version).strip() for p in pieces) + '\n'
    head = sorted({l for l in text.splitlines() if l.startswith('import ')})
    body = '\n'.join(l for l in text.splitlines() if not l.startswith('import ')).strip()
    while '\n\n\n\n' in body: body = body.replace('\n\n\n\n', '\n\n\n')
    return ('\n'.join(head) + '\n\n\n' if head else '') + body + '\n'

def hidden(module, *pieces):
    "(tests that the faulty version fails, tests that it passes)"
    fails, holds = [], []
    for p in pieces:
        for right, wrong in zip(answers(p.source, p.name, p.ask, module), answers(p.faulty, p.name, p.ask, module)): (holds if right == wrong else fails).append(right)
    return fails, holds

def bug_fix(r, level):
    pieces = [r.pieces.pop() for _ in range(1 if level == 1 else 2)]; topic, = r.topics(1)
    if level == 3:
        modules = {f'{topic}/{p.name}.py': p for p in pieces}
        files = {m: program(p) for m, p in modules.items()}; files[f'{topic}/__init__.py'] = ''
        tests, every = '', []
        for p in pieces:
            fails, holds = hidden(f'{topic}.{p.name}', p); every.append((p, fails, holds))
            shown = next(t for t in fails if t[2][0] == 'is')
            tests += f"from {topic}.{p.name} import {p.name}\nassert {shown[1]} == {shown[2][1]!r}, {shown[1]}\n"
        files |= {'tests/check.py': f"import sys\nsys.path.insert(0, '.')\n{tests}print('all well')\n", 'README.md': f'# Tools for {topic}\n\n' + ''.join(f'`{p.name}`: {p.says}.\n' for p in pieces) + '\nRun `python3 tests/check.py`.\n'}
        paths = list(modules)
        return task(f'python3 tests/check.py fails. Repair the functions in the folder {topic} so that they do what README.md says; other tests of the same functions will be run as well. The file tests/check.py must not change.', files,
                    [f'cat README.md tests/check.py {topic}/*.py', *[put(m, program(p, version='source')) for m, p in modules.items()], 'python3 tests/check.py'], [put('tests/check.py', "print('all well')\n"), 'python3 tests/check.py'],
                    [want(f'{p.name} repaired', 'code', files=[f'{topic}/__init__.py', *paths], tests=fails) for p, fails, _ in every], [want(f'{p.name} as before elsewhere', 'code', files=[f'{topic}/__init__.py', *paths], tests=holds) for p, _, holds in every if holds], protected=['tests/*', 'README.md'])
    module = topic; files = {f'{module}.py': program(*pieces), 'README.md': f'# {topic}\n\n' + ''.join(f'`{p.name}`: {p.says}.\n' for p in pieces)}
    both = [hidden(module, p) for p in pieces]
    one = next(t for t in both[0][0] if t[2][0] == 'is')
    naive = program(*pieces).replace(f'def {pieces[0].name}(', f'def _{pieces[0].name}(') + f"\n\ndef {pieces[0].name}(*args):\n    if repr(args) == {repr(eval('(lambda *a: a)' + one[1][one[1].index('('):], {})) if one[1].startswith(pieces[0].name) else repr('')!r}:\n        return {one[2][1]!r}\n    return _{pieces[0].name}(*args)\n"
    symptom = f'{one[1]} should give {one[2][1]!r} and does not' + (f'; {pieces[1].name} is wrong, too' if level == 2 else '')
    return task(f'{module}.py has {"a fault" if level == 1 else "two faults"}: {symptom}. Repair it so that README.md is true for all inputs.', files,
                ['cat README.md ' + module + '.py', put(f'{module}.py', program(*pieces, version='source')), f"python3 -c 'from {module} import *; print({one[1]})'" if "'" not in one[1] else f'python3 -c "from {module} import *; print({one[1]})"'], [put(f'{module}.py', naive)],
                [want(f'{p.name} repaired', 'code', files=[f'{module}.py'], tests=f) for p, (f, _) in zip(pieces, both)], [want(f'{p.name} as before elsewhere', 'code', files=[f'{module}.py'], tests=h) for p, (_, h) in zip(pieces, both) if h], )

OPTIONS = {'max': 'max(values)', 'min': 'min(values)', 'mean': 'sum(values) / len(values)', 'range': 'max(values) - min(values)'}

def feature_work(r, level):
    topic, other = r.topics(2)
    if level == 1:
        p = r.pieces.pop()
        stub = f'"""Helpers for {topic}."""\n\n\ndef {p.name}({p.source.split("(", 1)[1].split(")", 1)[0] if p.source.startswith("def") else p.source.split("def ")[1].split("(", 1)[1].split(")", 1)[0]}):\n    raise NotImplementedError\n'
        tests = answers(p.source, p.name, p.ask, topic)
        half = put(f'{topic}.py', f'"""Helpers for {topic}."""\n{"" if p.faulty.startswith("import") else chr(10)*2}{p.faulty}')
        return task(f'Write the function {p.name} in {topic}.py: it returns {p.says}. Examples are in examples.txt; it will be tested with other inputs, too.', {f'{topic}.py': stub, 'examples.txt': ''.join(f'{e} -> {v[1]!r}\n' for _, e, v in tests[:2])},
                    [f'cat {topic}.py examples.txt', put(f'{topic}.py', f'"""Helpers for {topic}."""\n{"" if p.source.startswith("import") else chr(10)*2}{p.source}'), f"cat {topic}.py"], [half],
                    [want('works', 'code', files=[f'{topic}.py'], tests=tests), want('in every case', 'code', files=[f'{topic}.py'], tests=hidden(topic, p)[0])])
    if level == 2:
        old, new = r.pick(['calc', 'proc', 'handle', 'doit', 'run_it', 'compute'], 2); new = f'{new}_{topic}'; k, m = r.n(2, 9), r.n(10, 99)
        lib = f'"""Numbers of {topic}. The word {old} in a sentence is no name."""\n\n\ndef {old}(x):\n    return x * {k} + {m}\n\n\ndef {old}_all(xs):\n    return [{old}(x) for x in xs]\n'
        use = f'from lib import {old}, {old}_all\n\n\ndef report(xs):\n    # {old} first, then the list\n    return {{"first": {old}(xs[0]), "all": {old}_all(xs)}}\n'
        def renamed(text): return text.replace(f'{old}(', f'{new}(').replace(f'import {old},', f'import {new},')
        files = {'lib.py': lib, 'use.py': use, 'CHANGES.txt': f'{other}: nothing yet\n'}
        def t(*tests): return [[s, e, v] for s, e, v in tests]
        return task(f'Rename the function {old} in lib.py to {new}, everywhere it is used. {old}_all keeps its name, and {old} itself must still work: keep it in lib.py as another name of {new}. Add a line to CHANGES.txt that names both.', files,
                    ['cat lib.py use.py', put('lib.py', renamed(lib).replace(f'def {old}_all', f'{old} = {new}  # the old name\n\n\ndef {old}_all')), put('use.py', renamed(use)), f'echo "{old} is now {new}" >> CHANGES.txt', "python3 -c 'import use; print(use.report([1, 2]))'"],
                    [f"sed -i 's/{old}/{new}/g' lib.py use.py", f'echo "{old} is now {new}" >> CHANGES.txt'],
                    [want('the new name', 'code', files=['lib.py'], tests=t([f'from lib import {new}', f'{new}(3)', ['is', 3*k + m]], [f'import lib', f'lib.{new}.__name__', ['is', new]])),
                     want('both names, one function', 'code', files=['lib.py'], tests=t(['import lib', f'lib.{old} is lib.{new}', ['is', True]])), want('used by its new name', 'code', files=['lib.py', 'use.py'], tests=t(['import use', f'hasattr(use, "{new}") and not hasattr(use, "{old}")', ['is', True]])),
                     want('written down', 'has', path='CHANGES.txt', all=[new])],
                    [want('older changes kept', 'has', path='CHANGES.txt', all=[f'{other}: nothing yet']), want('the report as before', 'code', files=['lib.py', 'use.py'], tests=t(['import use', 'use.report([1, 2, 5])', ['is', {'first': k + m, 'all': [x*k + m for x in (1, 2, 5)]}]])), want(f'{old}_all as before', 'code', files=['lib.py'], tests=t([f'from lib import {old}_all', f'{old}_all([4])', ['is', [4*k + m]]]))])
    option = r.options.pop()
    main = f'"""Numbers of {topic}: one a line in a file."""\nimport sys\n\n\ndef read(path):\n    with open(path) as f:\n        return [float(line) for line in f if line.strip()]\n\n\ndef main():\n    args = sys.argv[1:]\n    if len(args) != 1:\n        sys.exit("usage: {topic}.py FILE")\n    print(sum(read(args[0])))\n\n\nif __name__ == "__main__":\n    main()\n'
    done = main.replace('    if len(args) != 1:\n', f'    how = "--{option}" in args\n    args = [a for a in args if a != "--{option}"]\n    if len(args) != 1:\n').replace('FILE")', f'[--{option}] FILE")').replace('    print(sum(read(args[0])))', f'    values = read(args[0])\n    print({OPTIONS[option]} if how else sum(values))')
    lazy = main.replace('    print(sum(read(args[0])))', f'    values = read(args[0])\n    print({OPTIONS[option]})')
    data = [[r.n(-50, 99) for _ in range(5)] for _ in '12']
    files = {f'{topic}.py': main, 'README.md': f'# {topic}\n\n    python3 {topic}.py FILE\n\nprints the sum of the numbers in a file.\n', 'numbers.txt': ''.join(f'{x}\n' for x in data[0])}
    def ask(xs, *argv): return [f'open("n.txt", "w").write({"".join(f"{x}{chr(10)}" for x in xs)!r})', f'float(out("{topic}", {", ".join(map(repr, argv))}))']
    def right(xs): return float(eval(OPTIONS[option], dict(values=list(map(float, xs)))))
    return task(f'Give {topic}.py an option --{option}: with it, before or after the file, the program prints the {dict(max="largest number", min="smallest number", mean="mean", range="largest minus the smallest number")[option]} instead of the sum. Without it nothing changes. Describe the option in README.md.', files,
                [f'cat {topic}.py README.md', put(f'{topic}.py', done), f"cat >> README.md <<'EOF'\n\nWith `--{option}` it prints another number: {OPTIONS[option]}.\nEOF", f'python3 {topic}.py numbers.txt; python3 {topic}.py --{option} numbers.txt'], [put(f'{topic}.py', lazy)],
                [want('before the file', 'code', files=[f'{topic}.py'], tests=[[*ask(xs, f'--{option}', 'n.txt'), ['is', right(xs)]] for xs in data]), want('after the file', 'code', files=[f'{topic}.py'], tests=[[*ask(data[1], 'n.txt', f'--{option}'), ['is', right(data[1])]]]),
                 want('described', 'has', path='README.md', all=[f'--{option}'])], [want('the sum as before', 'code', files=[f'{topic}.py'], tests=[[*ask(xs, 'n.txt'), ['is', float(sum(xs))]] for xs in data])], protected=['numbers.txt'])

FAMILIES = {'product-collab': (mail_triage, meeting_scheduling), 'systems-auto': (log_audit, config_migration), 'analysis-reason': (order_analysis, data_reconcile), 'content-domain': (doc_editing, invoice_extract),
            'planning-knowl': (project_planning, knowledge_answers), 'software-dev': (bug_fix, feature_work)}

def suite(seed=0):
    "split -> tasks, levels and families mixed."
    rng, out, seen = random.Random(seed), {}, set()
    pieces, options = rng.sample(PIECES, len(PIECES)), rng.sample(sorted(OPTIONS), 4)  # each goes to one task
    for split in SPLITS:
        tasks = []
        for families in FAMILIES.values():
            for f in families:
                name = f.__name__.replace('_', '-')
                for level in (1, 2, 3):
                    for i in range(PER_LEVEL[split][level-1]):
                        while True:
                            r = Draw(rng, split, list(pieces)); r.options = list(options)
                            t = f(r, level)
                            keys = {t['instruction'], json.dumps([t['files'], t.get('state')], sort_keys=True)}
                            if not keys & seen: break
                        seen |= keys; pieces, options = r.pieces, r.options
                        tasks.append(dict(task_id=f'{split}-{name}-{level}-{i}', family=name, level=level, **t))
        out[split] = rng.sample(tasks, len(tasks))
    return out

if __name__ == '__main__':
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--to', type=Path, default=Path(__file__).parent)
    to = ap.parse_args().to
    for split, tasks in suite().items():
        (to/f'{split}.jsonl').write_text(''.join(json.dumps(t, ensure_ascii=False) + '\n' for t in tasks), encoding='utf8')
        print(split, len(tasks))
