"""Cheats and broken verifiers, played through a harness in a sandbox: what the score is, and what is on record about it."""
import asyncio
from dataclasses import replace
import pytest
from cheats import BELOW, CHEATS, WANT, holds, play
from pathlib import Path
from clawlab.launch.sandbox.base import probe

NO_BWRAP = asyncio.run(probe('bwrap'))
pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
PAGE = Path(__file__).parent.parent/'experiments/CHEATS.md'

@pytest.fixture(scope='module')
def played(): return asyncio.run(play())

@pytest.mark.parametrize('name', CHEATS)
def test_S47_cheat(played, name): assert holds(name, played[name]) == ''

def test_S47_the_page_of_cheats_is_up_to_date(played):
    "`python tests/cheats.py --into experiments/CHEATS.md` brings it there."
    rows = [[x.strip() for x in l.split('|')[1:4]] for l in PAGE.read_text().partition(BELOW)[2].splitlines() if l.startswith('| ')]
    assert [r for r in rows if r[0] not in ('the agent', 'the verifier', '---')] == [[WANT[n][0][:120].replace('|', '\\|').strip(), 'none' if r.reward is None else f'{r.reward:g}', r.outcome] for n, r in played.items()]

async def test_S47_the_search_would_find_what_it_looks_for(monkeypatch):
    "Else a zero says nothing: the same searches, with something to find."
    for name, files in (('search', {'x/notes': 'SECRET_OF_THE_VERIFIER'}), ('history', {'x/a.bundle': 'x'})):
        monkeypatch.setitem(CHEATS, name, replace(CHEATS[name], files={**CHEATS[name].files, **files}))
    got = await play(('search', 'history'))
    assert 'x/notes' in got['search'].scores['found'] and 'a.bundle' in got['history'].scores['found'] and holds('search', got['search']).startswith('on record')
