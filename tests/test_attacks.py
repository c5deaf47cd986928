"""The table of attacks in the docs is that of the suite; what the suite says of a hole, and of a launcher that failed."""
from pathlib import Path
import pytest
import attacks
from attacks import ATTACKS, BELOW, column, holds, parse, row, write
from backends import BACKENDS
from conformance import Backend

ROOT = Path(__file__).parent.parent
PAGE = ROOT/'experiments/ATTACKS.md'

def test_S_the_table_of_attacks_is_up_to_date():
    "`python tests/attacks.py --into experiments/ATTACKS.md BACKEND` brings it there."
    columns, made = parse(PAGE.read_text())
    assert {'bwrap', 'podman'} <= set(columns) <= set(BACKENDS) and set(made) == set(columns)
    for name, cells in columns.items():
        assert list(cells) == list(map(row, ATTACKS)), name
        for a in ATTACKS: assert cells[row(a)].startswith('not enforced here' if a in BACKENDS[name].not_enforced else 'contained'), (name, a, cells[row(a)])
    assert 'ATTACKS.md' in (ROOT/'README.md').read_text()

def test_S_rows_have_names_of_their_own():
    assert len(set(map(row, ATTACKS))) == len(ATTACKS) and not any('|' in row(a) for a in ATTACKS)

def test_S_one_column_is_written_and_the_others_stay():
    columns = {n: {row(a): f'{n} | of {k}' for k, a in enumerate(ATTACKS)} for n in ('bwrap', 'podman')}
    page = BELOW + write(columns, dict(bwrap='x: y', podman='z'))
    columns, made = parse(page)
    assert made == dict(bwrap='x: y', podman='z') and BELOW + write(columns, made) == page
    columns['podman'] = {}
    again, _ = parse(BELOW + write(columns, made))
    assert again['bwrap'] == columns['bwrap'] and set(again['podman'].values()) == {'not run'}

class Box:
    "Not a sandbox: it says what it was told to say."
    def __init__(self, says): self.says = says
    async def __aenter__(self): return self
    async def __aexit__(self, *_): pass
    async def exec(self, argv, **kw): return self.says

class Ok: ok = True

def backend(**kw):
    class Fake(Backend):
        def box(self, *a, **k): return Box(Ok)
    return Fake('bwrap', **kw)

async def test_S_an_attack_that_gets_through_is_told(monkeypatch):
    async def fails(b): "fails"; assert False, 'a hole'
    async def raises(b):
        "does not raise"
        with pytest.raises(OSError): pass
    async def breaks(b): "breaks the launcher"; raise KeyError('x')
    async def fine(b): "fine"
    monkeypatch.setattr(attacks, 'ATTACKS', dict(fails=fails, raises=raises, breaks=breaks, fine=fine))
    monkeypatch.setitem(BACKENDS, 'bwrap', backend())
    async def versions(name): return 'v'
    monkeypatch.setattr(attacks, 'made_with', versions)
    got, _ = await column('bwrap')
    assert got['fails'].startswith('**reached**: a hole') and got['does not raise'].startswith('**reached**') and got['breaks the launcher'].startswith('**the launcher failed**: KeyError') and got['fine'] == 'contained'
    with pytest.raises(AssertionError, match='reached'): await holds(backend(), 'fails')
    await holds(backend(not_enforced=dict(fails='no such thing')), 'fails')
    with pytest.raises(AssertionError): await holds(backend(not_enforced=dict(fine='no such thing')), 'fine')  # an expectation that is out of date
