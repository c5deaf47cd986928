"""The check of harnesses: that it passes what is right is seen on the installed programs, that it sees what is wrong on programs that were spoiled."""
import asyncio, json
from dataclasses import replace
import pytest
from clawlab.capture.engines.oracle import OracleEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.cli import main
from clawlab.launch import check
from clawlab.launch.harness import Expect, Mcp, load
from clawlab.launch.sandbox.base import Limits, probe
from clawlab.launch.tasks import load_suite
from clawlab.records import SandboxError

WHY = asyncio.run(probe('bwrap'))
needs_bwrap = pytest.mark.skipif(bool(WHY), reason=WHY or '')
HEAVY = ['openclaw', 'qwen-code', 'opencode', 'hermes', 'nanobot', 'mini-swe-agent:litellm']

def spoiled(before='', **changes):
    "clawlab's own loop, with something done first, and claims that aren't true."
    h = load('react'); argv = ['/bin/sh', '-c', f'{before}\nexec "$@"', 'sh', *h.spec.run.argv]
    return replace(h, spec=h.spec.model_copy(update=dict(run=h.spec.run.model_copy(update=dict(argv=argv)), **changes)))

async def row(h, tmp_path, n=0, tasks=None):
    with Store.open(tmp_path/'c.db') as store:
        p = Proxy(OracleEngine({'check': check.marked('w0rd'), **{t.task_id: t for t in tasks or []}}), store)
        await p.start()
        try: return await check._row(h, 'w0rd', tasks or [], proxy=p, store=store, backend='bwrap', concurrency=2, limits=Limits(seconds=60), progress=False)
        finally: await p.stop()

PY = '/usr/bin/python3 -c "import socket, urllib.request\ntry: {}\nexcept OSError as e: print(e)"'

@needs_bwrap
async def test_a_program_as_described_passes(tmp_path):
    r = await row(spoiled('true'), tmp_path)
    assert r['ok'] and r['elsewhere'] == 0 and (r['calls'], r['roots'], r['leaves'], r['drift'], r['skill'], r['mcp']) == (4, 1, 1, 0, None, None) and r['start_s'] >= 0, r

@needs_bwrap
@pytest.mark.parametrize('doing, n', [("socket.create_connection(('192.0.2.1', 80), 1)", 1), ("socket.create_connection(('2001:db8::1', 80), 1)", 1), ("socket.getaddrinfo('telemetry.example.com', 443)", 2),
    ("socket.create_connection(('127.0.0.1', 999), 1)", 1), ("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))", 1)])
async def test_whatever_it_tries_to_reach_is_counted(tmp_path, doing, n):
    r = await row(spoiled(PY.format(doing)), tmp_path)
    assert not r['ok'] and r['elsewhere'] >= n and any('reach something else' in p for p in r['problems']), r

@needs_bwrap
@pytest.mark.parametrize('before, changes, says', [
    ('', dict(skills=['~/.x/skills']), 'its skill is not in the prompt'), ('', dict(expect=Expect(roots=2)), 'roots: 1 instead of 2'), ('', dict(expect=Expect(drift='calls')), 'drift: 0 instead of 3'),
    ('', dict(wire={'tools': ['sh']}), 'quarantined'), ('', dict(mcp=Mcp(run={'env': {'X': '1'}})), 'not offered natively'), ('cd /tmp', {}, 'had no effect'), ('rm -r ~/.tools', {}, 'the tool of the task was not called'),
    ('exit 7', {}, 'no model call'), (PY.format("urllib.request.urlopen('http://127.0.0.1:8000/s/other/v1/models')"), {}, 'another session')])
async def test_what_is_not_as_described_is_named(tmp_path, before, changes, says):
    r = await row(spoiled(before, **changes), tmp_path)
    assert r['ok'] is False and r['status'] == 'differs' and any(says in p for p in r['problems']), r

@needs_bwrap
async def test_a_task_that_is_not_solved_is_named(tmp_path):
    a, b = list(load_suite('nano').values())[:2]
    r = await row(load('react'), tmp_path, tasks=[a, replace(b, steps=('true',))])
    assert r['ok'] is False and (r['oracle'], r['tasks']) == (1, 2) and b.task_id in r['problems'][0] and a.task_id not in r['problems'][0], r

def test_what_is_not_there_is_listed_and_nothing_more(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path/'home'))
    (page := tmp_path/'page.md').write_text(f'# Harnesses\n\nAbout them.\n\n<!-- below: written by `clawlab harness check --all --into experiments/HARNESSES.md` -->\n\nold\n')
    assert main(['harness', 'check', 'codex', '--sandbox', 'process']) == 1
    out, err = capfd.readouterr()
    assert json.loads(out.splitlines()[-1]) == dict(ok=False, checks=[dict(harness='codex', version=load('codex').version, status='not installed', ok=None, prompt_tokens=load('codex').spec.prompt_tokens, problems=[])]) and 'nothing was checked: codex' in err
    assert main(['harness', 'check', 'react', 'codex', '--sandbox', 'process', '--oracle', '2', '--into', str(page)]) == 0
    text = page.read_text()
    assert 'old' not in text and text.startswith('# Harnesses\n\nAbout them.\n\n<!--') and '| 2/2 ' in text and 'not installed' in text and '**codex**' in text
    assert main(['harness', 'check', '--sandbox', 'process']) == 2 and main(['harness', 'check', 'react', '--oracle', '100000', '--sandbox', 'process']) == 2

def test_all_means_variants_too():
    names = check.every()
    assert {'claude-code', 'claude-code:full', 'react:forks', 'openclaw'} < set(names) and 'claude-code:screen' not in names

@pytest.mark.harness
@needs_bwrap
@pytest.mark.parametrize('name', [pytest.param(n, marks=pytest.mark.heavy) if n in HEAVY else n for n in check.every() if load(n).spec.tried])
async def test_installed_harnesses_do_as_described(name):
    if (h := load(name)).absent: pytest.skip(h.absent)
    r, = await check.check([name], load_suite('nano'), 1, progress=False)
    assert r['ok'] and r['elsewhere'] == 0 and r['skill'] in (None, True) and r['mcp'] in (None, True), r

def test_a_page_that_cannot_be_written_is_known_before_anything_is_played(tmp_path, capfd):
    assert main(['harness', 'check', 'react', '--sandbox', 'process', '--into', str(tmp_path/'no'/'page.md')]) == 2 and 'cannot write to' in capfd.readouterr().err
    assert main(['harness', 'check', 'react', '--sandbox', 'process', '--oracle', '0', '--into', str(tmp_path/'new.md')]) == 0 and (tmp_path/'new.md').read_text().startswith('# Harnesses, checked\n\n<!--')

async def test_without_a_sandbox_the_row_says_so(tmp_path, monkeypatch):
    async def none(*args, **kw): raise SandboxError('none today')
    monkeypatch.setattr(check, 'run_harness', none)
    r = await row(load('react'), tmp_path)
    assert r['ok'] is False and r['problems'] == ['sandbox: none today'] and '| differs |' in check.table([r])
