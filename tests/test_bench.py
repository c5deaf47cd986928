"Benchmarks: the arithmetic of rows and goals, the scripted upstream, and our own proxy through all of it in small."
import json, subprocess, sys
import aiohttp, numpy as np
import pytest
from clawlab.cli import main
from clawlab.records import ClawlabError, InputError, Message
from clawlab.study import bench, gateways, peers, upstream

@pytest.fixture(scope='module')
def up(tmp_path_factory): return upstream.Upstream(upstream.make_tokenizer(tmp_path_factory.mktemp('tok')/'tok'))

# --- rows and goals

def test_medians_and_the_worst_capture():
    r = lambda m, v: [bench.row('c', 's', m, v, 4)]
    rows = bench.medians([r('cpu_ms', v) + r('captured', c) for v, c in ((1., 1.), (9., .75), (2., 1.))])
    assert bench.value(rows, 'c', 's', 'cpu_ms') == 2. and bench.value(rows, 'c', 's', 'captured') == .75 and rows[0]['n'] == 4

def cells(ours_first, ours_late, peer_first, peer_late, captured=1., ours=1.):
    out = []
    for case, a, b in (('2k', ours_first, peer_first), ('150 kB', ours_late, peer_late)):
        out += [bench.row(f'{case}, chat, json', 'clawlab', 'cpu_ms', a, 4), bench.row(f'{case}, chat, json', 'peer', 'cpu_ms', b, 4)]
    for load in ('2k', 'grow'): out += [bench.row(f'{load}, chat, json', 'clawlab', 'captured', ours, 4), bench.row(f'{load}, chat, json', 'peer', 'captured', captured, 4)]
    return bench.proxy_goals(out, ['chat, json'], '2k', '150 kB', 'grow')

def test_goals_reached_and_missed():
    g = cells(1., 1.4, 2.5, 8.)
    assert all(x['ok'] for x in g.values()) and g['first turn of the best peer: chat, json'] == dict(value=.4, goal=.5, ok=True)
    assert g['150 kB of the best peer: chat, json']['value'] == .175 and g['150 kB of the first turn: chat, json']['value'] == 1.4
    g = cells(2., 4., 2.5, 8.)
    assert [k.partition(':')[0] for k, x in g.items() if not x['ok']] == ['first turn of the best peer', '150 kB of the best peer', '150 kB of the first turn']

def test_a_peer_that_lost_a_token_is_no_rival_and_a_loss_of_ours_is_a_missed_goal():
    g = cells(1., 1.2, .1, .1, captured=.99)
    assert not any('peer' in k for k in g)
    assert not cells(1., 1.2, 5., 9., ours=.99)['captured: grow, chat, json']['ok']

def test_a_missing_system_is_a_marked_row():
    rows = [bench.row('a', 'clawlab', 'cpu_ms', 1., 2), bench.missing('a', 'peer', 'not installed')]
    assert rows[1] == dict(case='a', system='peer', metric='missing: not installed', value=None, n=0)
    assert bench.why_missing(rows) == ['peer: not installed (a)'] and '–' in bench.table(rows, 'cpu_ms')

def test_store_goals():
    rows = [bench.row('h', s, 'bytes per rollout', v, 1) for s, v in (('clawlab, without tokens', 30), ('without tokens, zstd -3 of the log', 40), ('clawlab, everything', 60), ('everything, zstd -3 of the log', 50))]
    g = bench.store_goals([*rows, bench.row('h', 'clawlab, everything', 'percent of the bodies', 4.2, 1)])
    assert [x['ok'] for x in g.values()] == [True, True, False]

def test_the_clock_counts_children():
    code = 'import subprocess, sys; subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < .2: pass"]); print("done", flush=True); sys.stdin.read()'
    p = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try: assert p.stdout.readline() == b'done\n' and bench.cpu_s(p.pid) > .2
    finally: p.communicate()

# --- the upstream

def test_replies_read_back_as_themselves(up):
    assert len(up.replies) == upstream.KINDS and len({r.text for r in up.replies}) == upstream.KINDS
    for r in up.replies:
        assert len(r.ids) == len(r.logprobs) == upstream.OUTPUT and r.ids[-1] == up.template.eos_ids[0] and (r.logprobs < 0).all()
        assert np.array_equal(up.template.encode(r.text), r.ids[:-1]) and [float(x) for x in json.loads(json.dumps(r.logprobs.tolist()))] == r.logprobs.tolist()

def test_the_rendering_is_the_template_s(up):
    talk = [('system', 'Be brief.'), ('user', 'hi <|im_end|>'), ('assistant', up.replies[0].text), ('user', 'and?')]
    ids = up.render([dict(role=r, content=t) for r, t in talk])
    assert np.array_equal(ids, up.template.render([Message(r, t) for r, t in talk])) and up.turns(ids) == 1 and up.turns(up.render([dict(role='user', content='x')])) == 0

async def ask(up, path, body):
    runner, url = await upstream.serve(upstream.app(up))
    try:
        async with aiohttp.ClientSession() as http, http.post(url + path, json=body) as r: return await r.read()
    finally: await runner.cleanup()

@pytest.mark.parametrize('dialect', gateways.PATHS)
@pytest.mark.parametrize('stream', [False, True])
async def test_every_endpoint_says_the_scripted_reply(up, dialect, stream):
    data = await ask(up, gateways.PATHS[dialect], json.loads(gateways.body(dialect, 'Be brief.', [('user', 'a'), ('assistant', up.replies[0].text), ('user', 'b')], stream)))
    text = gateways.text_of_stream(dialect, data) if stream else gateways.text_of(dialect, json.loads(data))
    assert text == up.replies[1].text

@pytest.mark.parametrize('stream', [False, True])
async def test_chat_gives_ids_and_log_probs_when_asked(up, stream):
    asked = dict(messages=[dict(role='user', content='a')], stream=stream, logprobs=True, return_token_ids=True)
    data = await ask(up, '/v1/chat/completions', asked)
    ds = [json.loads(l[6:]) for l in data.splitlines() if l.startswith(b'data: {')] if stream else [json.loads(data)]
    ids, lps = [], []
    for c in (c for d in ds for c in d['choices']): ids += c.get('token_ids') or []; lps += [x['logprob'] for x in (c['logprobs'] or {}).get('content', ())]
    assert ids == up.replies[0].ids.tolist() and lps == up.replies[0].logprobs.tolist() and ds[0]['prompt_token_ids'] == up.render(asked['messages']).tolist()

# --- the peers' descriptions

def test_all_peers_are_alike(tmp_path):
    at = peers.Place('http://127.0.0.1:1', str(tmp_path), 2, str(tmp_path))
    for n, make in peers.PEERS.items():
        p = make(); argv = p.command(at)
        assert p.name and set(p.captures) <= set(p.dialects) <= set(peers.DIALECTS) and all(isinstance(a, str) for a in argv) and 'http://127.0.0.1:1' in ' '.join(argv + [f.read_text() for f in tmp_path.glob('*.json')])
        assert all('==' in r for r in p.requires) and bool(p.requires) == bool(p.env)

def test_a_changed_pin_means_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path)); p = peers.Rllm()
    assert 'not installed' in p.missing
    (tmp_path/'bench/rllm').mkdir(parents=True); (tmp_path/'bench/rllm/installed').write_text('\n'.join(p.requires))
    assert not p.missing and peers.install(p) is False
    (tmp_path/'bench/rllm/installed').write_text('rllm-model-gateway==0.0.9')
    assert p.missing

async def test_a_gateway_that_ends_at_once_is_told_with_its_last_words(tmp_path):
    with pytest.raises(ClawlabError, match='no such luck'):
        async with peers.Running([sys.executable, '-c', 'raise SystemExit("no such luck")'], str(tmp_path)): pass

# --- ours, small, through all of it

@pytest.fixture
def alone(monkeypatch, tmp_path): monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path))

async def test_our_proxy_alone_is_measured_and_its_record_is_true(alone):
    dialects = [c for c in gateways.CELLS if gateways.PATHS[c[0]] in upstream.ROUTES and c in (('chat', False), ('anthropic', True), ('responses', True))]
    rows, goals = await gateways.bench_proxy(['rllm'], repeats=1, kb=12, cells=dialects, names=['2k', 'grow'], say=lambda *a: None)
    for c in dialects:
        cell = gateways.cell_name(*c)
        for load in ('2k', 'grow'):
            assert bench.value(rows, f'{load}, {cell}', 'clawlab', 'captured') == 1., [r for r in rows if 'missing' in r['metric']]
            assert any(r['metric'].startswith('missing: not installed') and r['case'] == f'{load}, {cell}' and r['system'] == 'rllm' for r in rows)
        assert all(bench.value(rows, f'{p}, {cell}', 'clawlab', m) > 0 for p in ('2k', '3 kB', '12 kB') for m in ('cpu_ms', 'requests_s'))
        assert f'12 kB of the first turn: {cell}' in goals and goals[f'captured: grow, {cell}']['ok']

@pytest.mark.parametrize('args,line', [(('bench', 'proxy', '--system', 'nope'), "unknown system 'nope'"), (('bench', 'install', 'nope'), "unknown system 'nope'"),
    (('bench', 'proxy', '--load', '64k'), "unknown load '64k'"), (('bench', 'proxy', '--dialect', 'google'), "unknown dialect 'google'"), (('bench', 'proxy', '--repeats', '0'), 'Invalid value'),
    (('bench', 'store', '/nowhere.db'), 'no store at /nowhere.db')])
def test_bad_input_is_one_clear_line(capfd, args, line):
    assert main(list(args)) == 2
    out, err = capfd.readouterr()
    assert out == '' and line in err and len(err.strip().splitlines()) == 1

def test_a_result_that_cannot_be_written(tmp_path):
    (tmp_path/'f').write_text('')
    with pytest.raises(InputError, match='cannot write'): bench.result('proxy', [], {}, tmp_path/'f'/'x')
    assert json.loads((bench.result('proxy', [bench.row('a', 's', 'm', 1.)], {}, tmp_path/'out') and tmp_path/'out/proxy.json').read_text())['rows'][0]['value'] == 1.
