"""The services of the claw suite: a mail box, a calendar and tables.

State: `me` (address), `mail` [id, folder, date, sender, to, subject, text], `events` [id, title, start, end, people],
`tables` {name: rows}. Times are `2026-03-02T09:00`. Nothing reads a clock or draws a number, so a log of calls can be replayed.
"""
import re
from typing import Literal

# mail

def mail_search(state, query: str = '', folder: Literal['inbox', 'archive', 'sent', 'trash', 'any'] = 'inbox') -> list:
    """Find messages, newest first: id, folder, date, sender and subject, without the text.

    query: words that all occur in sender, subject or text (empty: every message)
    """
    words = query.lower().split()
    found = [m for m in state['mail'] if folder in ('any', m['folder']) and all(w in f"{m['sender']} {m['subject']} {m['text']}".lower() for w in words)]
    return [{k: m[k] for k in ('id', 'folder', 'date', 'sender', 'subject')} for m in sorted(found, key=lambda m: (m['date'], m['id']), reverse=True)]

def mail_read(state, id: int) -> dict:
    "The whole of a message."
    return _one(state['mail'], id, 'message')

def mail_send(state, to: list[str], subject: str, text: str, reply_to: int | None = None) -> dict:
    """Send a message.

    to: addresses
    reply_to: id of the message that this one answers
    """
    if not to: raise ValueError('a message needs somebody to go to')
    if bad := [a for a in to if not re.fullmatch(r'[\w.+-]+@[\w.-]+', a)]: raise ValueError(f'{bad[0]!r} is no address')
    if not text.strip(): raise ValueError('the message is empty')
    if reply_to is not None: _one(state['mail'], reply_to, 'message')
    m = dict(id=_next(state['mail']), folder='sent', date=state['now'], sender=state['me'], to=to, subject=subject, text=text, reply_to=reply_to)
    state['mail'].append(m)
    return dict(id=m['id'], sent_to=to)

def mail_move(state, id: int, folder: Literal['inbox', 'archive', 'trash']) -> str:
    "Move a message into another folder."
    m = _one(state['mail'], id, 'message')
    if m['folder'] == 'sent': raise ValueError('a sent message stays where it is')
    m['folder'] = folder
    return f'message {id} is in {folder}'

# calendar

def calendar_list(state, start: str, end: str, person: str | None = None) -> list:
    """The events of some days, in order.

    start: first day, 2026-03-02
    end: last day, included
    person: address of one of its people
    """
    for d in (start, end):
        if not re.fullmatch(r'\d{4}-\d\d-\d\d', d): raise ValueError(f'{d!r} is no day like 2026-03-02')
    return sorted((e for e in state['events'] if start <= e['start'][:10] <= end and (person is None or person in e['people'])), key=lambda e: (e['start'], e['id']))

def calendar_create(state, title: str, start: str, end: str, people: list[str] = []) -> dict:
    """Make an event; refused where one of its people is busy.

    start: 2026-03-02T09:00
    end: on the same day
    people: addresses; you are one of them in any case
    """
    e = dict(id=_next(state['events']), title=title, start=start, end=end, people=sorted({*people, state['me']}))
    _fits(state, e)
    state['events'].append(e)
    return e

def calendar_update(state, id: int, start: str, end: str) -> dict:
    "Move an event to another time; refused where one of its people is busy then."
    e = _one(state['events'], id, 'event')
    _fits(state, {**e, 'start': start, 'end': end})
    e.update(start=start, end=end)
    return e

def calendar_cancel(state, id: int) -> str:
    "Take an event out of the calendar."
    state['events'].remove(_one(state['events'], id, 'event'))
    return f'event {id} is cancelled'

# tables

def table_list(state) -> dict:
    "The tables, their columns and number of rows."
    return {n: dict(columns=list(rows[0]) if rows else [], rows=len(rows)) for n, rows in state['tables'].items()}

def table_query(state, table: str, where: dict = {}, columns: list[str] = [], order_by: str | None = None, limit: int = 20, offset: int = 0) -> dict:
    """Rows of a table, 20 at a time unless told otherwise, and how many there are in all.

    where: {"column": value}, or {"column": {"lt": 5}} with lt, le, gt, ge, ne, in or contains; all must hold
    columns: empty for all
    order_by: a column, with a minus in front for the largest first
    """
    rows = [r for r in _table(state, table) if _holds(r, where)]
    if order_by:
        column = order_by.lstrip('-'); _column(state, table, column)
        rows = sorted(rows, key=lambda r: r[column], reverse=order_by.startswith('-'))
    for c in columns: _column(state, table, c)
    page = rows[max(0, offset):max(0, offset) + max(0, limit)]
    return dict(total=len(rows), rows=[{c: r[c] for c in columns or r} for r in page])

def table_update(state, table: str, where: dict, values: dict) -> dict:
    """Set columns of all rows that match; an empty `where` is refused.

    where: as in table_query
    """
    if not where: raise ValueError('a condition is needed: this would change every row')
    for c in values: _column(state, table, c)
    rows = [r for r in _table(state, table) if _holds(r, where)]
    for r in rows: r.update(values)
    return dict(changed=len(rows))

def table_insert(state, table: str, values: dict) -> dict:
    "Add a row; every column needs a value, `id` is given."
    rows = _table(state, table)
    row = dict(id=_next(rows), **{k: v for k, v in values.items() if k != 'id'})
    if rows and set(row) != set(rows[0]): raise ValueError(f'the columns are {", ".join(c for c in rows[0] if c != "id")}')
    rows.append(row)
    return row

# helpers

def _one(things, id, what):
    found = [x for x in things if x['id'] == id]
    if not found: raise ValueError(f'there is no {what} {id}')
    return found[0]

def _next(things): return max((x['id'] for x in things), default=0) + 1

def _fits(state, e):
    for t in (e['start'], e['end']):
        if not re.fullmatch(r'\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d', t): raise ValueError(f'{t!r} is no time like 2026-03-02T09:00')
    if e['start'][:10] != e['end'][:10] or e['start'] >= e['end']: raise ValueError('an event ends later on the day it begins')
    for x in state['events']:
        busy = sorted(set(x['people']) & set(e['people']))
        if x['id'] != e['id'] and busy and x['start'] < e['end'] and e['start'] < x['end']: raise ValueError(f"conflict: {', '.join(busy)} busy with {x['title']!r} from {x['start'][11:]} to {x['end'][11:]}")

def _table(state, name):
    if name not in state['tables']: raise ValueError(f'no table {name!r}; there are {", ".join(state["tables"])}')
    return state['tables'][name]

def _column(state, table, column):
    rows = _table(state, table)
    if rows and column not in rows[0]: raise ValueError(f'{table} has no column {column!r}; there are {", ".join(rows[0])}')

def _holds(row, where):
    for c, want in where.items():
        if c not in row: raise ValueError(f'no column {c!r}; there are {", ".join(row)}')
        for op, v in (want.items() if isinstance(want, dict) else [('eq', want)]):
            x = row[c]
            try:
                ok = {'eq': lambda: x == v, 'ne': lambda: x != v, 'lt': lambda: x < v, 'le': lambda: x <= v, 'gt': lambda: x > v, 'ge': lambda: x >= v,
                      'in': lambda: x in v, 'contains': lambda: str(v).lower() in str(x).lower()}[op]()
            except KeyError: raise ValueError(f'no comparison {op!r}: lt, le, gt, ge, ne, in or contains') from None
            except TypeError: raise ValueError(f'{c} can not be compared with {v!r}') from None
            if not ok: return False
    return True
