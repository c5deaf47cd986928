"""Harnesses in real sandboxes against the real proxy with a scripted engine; clawlab's own loop against a nasty endpoint."""
import asyncio, json, os, re, subprocess, sys, threading, tomllib
from dataclasses import replace
from pathlib import Path
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import pytest, yaml
from clawlab.records import InputError, Rollout, repo_root
from clawlab.capture.engines.base import Sampling
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.launch import harness
from clawlab.launch.harness import Spec, known, load, read_spec
from clawlab.launch.sandbox.base import Limits, make_sandbox, probe

WHY = asyncio.run(probe('bwrap'))
HEAVY = [pytest.param(n, marks=pytest.mark.heavy) for n in ('hermes', 'nanobot', 'qwen-code', 'opencode')]  # not installed by `make test`
LIGHT = ['react', 'claude-code', 'mini-swe-agent']
NAMES = [*LIGHT, 'react:stream', 'mini-swe-agent:litellm', *HEAVY]
SHELL = {'anthropic': ('Bash', {}), 'qwen-code': ('run_shell_command', {'is_background': False}), 'opencode': ('bash', {'description': 'x'}), 'hermes': ('terminal', {}), 'nanobot': ('exec', {})}
SHIPPED = known()
SUBMIT = 'echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'


def get(name):
    "The harness, or a skip that says why not."
    if WHY: pytest.skip(WHY)
    h = load(name)
    if not h.installed: pytest.skip(f'{name} is not installed: clawlab harness install {h.spec.name}')
    return h

def tool(h, command):
    name, more = SHELL.get(h.name) or SHELL.get(h.dialect) or ('bash', {})
    return f'<tool_call>{json.dumps(dict(name=name, arguments=dict(command=command, **more)))}</tool_call>'
def last(h): return tool(h, SUBMIT) if 'mini' in h.name else 'done'

async def play(h, script, tmp_path, instruction='How many lines has a.txt? Write the number to n.txt.', seconds=90):
    "One run in a sandbox: `(Exec, files, calls, session)`."
    store = Store.open(tmp_path/'s.db')
    try:
        async with Proxy(ScriptEngine([{'text': 'a title', 'match': instruction}]*(h.name == 'opencode') + script), store, sampling=Sampling(max_tokens=2048)) as p:
            s = await p.open_session(Rollout('r1', 't', h.name), **h.session)
            async with make_sandbox('bwrap', limits=Limits(seconds=seconds), binds=h.binds, listener=lambda sock: p.listen(sock, s.session_id)) as box:
                argv, env, files = h.command(instruction, 'clawlab', box.url + s.base_path, s.api_key, box.limits)
                assert not any(s.api_key in a for a in argv)
                await box.put({'a.txt': 'one\ntwo\nthree\n', **files})
                ex, out = await box.exec(argv, env), await box.get()
            return ex, out, await p.close_session(s.session_id), s
    finally: store.close()


@pytest.mark.harness
@pytest.mark.parametrize('name', NAMES)
async def test_conformance(name, tmp_path):
    h = get(name)
    ex, out, all_calls, s = await play(h, [tool(h, 'wc -l < a.txt > n.txt; cat n.txt'), tool(h, 'cat missing'), tool(h, 'true'), last(h)], tmp_path)
    assert ex.code == 0 and ex.killed == '' and not h.truncated(ex), ex
    assert out['n.txt'].strip() == b'3'                                     # the tool really ran
    assert set(h.submission(out)) == {'a.txt', 'n.txt'}                     # and nothing else is in the workspace but declared litter
    calls, beside = ([c for c in all_calls if (c.role == 'main') == own] for own in (True, False))
    ids = {c.call_id for c in calls}
    assert [c.role for c in beside] == ['side']*(name == 'opencode') and not any(c.quarantine for c in all_calls)          # its title
    assert len(calls) == 4 and dict(roots=sum(c.parent_id not in ids for c in calls), leaves=len(ids - {c.parent_id for c in calls}), drift=sum(c.drift for c in calls)) == h.expect.tree(4)
    assert len({c.parent_id for c in calls}) == len(calls)                  # one chain
    if not h.expect.drift:
        for a, b in zip(calls, calls[1:]): assert list(b.prompt_ids[:len(a.prompt_ids)+len(a.output_ids)]) == [*a.prompt_ids, *a.output_ids]
    assert s.stats.refused.keys() <= {401, 404} and s.stats.disconnects == 0     # a program finds out what it talks to, with its key or without
    seen = '\n'.join(m.content for m in calls[-1].messages if m.role == 'tool')
    assert '3' in seen and 'No such file' in seen

@pytest.mark.harness
@pytest.mark.parametrize('name', [n for n in NAMES if n != 'mini-swe-agent:litellm'])
async def test_turn_limit(name, tmp_path):
    h = get(name)
    h = replace(h, spec=h.spec.model_copy(update=dict(turns=3)))
    ex, _, calls, s = await play(h, [tool(h, f'echo {i}') for i in range(9)], tmp_path)
    assert len(calls) == 3 and (h.truncated(ex) or s.stats.truncated) and not ex.timed_out and ex.signal is None, ex

@pytest.mark.harness
@pytest.mark.parametrize('name', [*LIGHT, *HEAVY[:2]])   # the other two ask again for minutes
async def test_a_dead_engine_ends_the_run_soon(name, tmp_path):
    h = get(name)
    ex, _, calls, s = await play(h, [tool(h, 'echo 1'), *[{'error': 'gone'}] * 9], tmp_path)
    assert (ex.code != 0) == (name != 'nanobot') and not ex.timed_out and ex.seconds < 60 and not h.truncated(ex), ex
    assert s.stats.engine_errors >= 1

@pytest.mark.harness
@pytest.mark.parametrize('name', [*LIGHT, *HEAVY])
async def test_awkward_instructions_and_replies(name, tmp_path):
    h = get(name)
    words = '--help {api_key} "quoted" $HOME `id`\nsecond line é'
    ex, out, calls, s = await play(h, [f'<tool_call>{json.dumps(dict(name="no_such_tool", arguments={}))}</tool_call>', tool(h, 'printf é > out; pwd; echo $HOME'), last(h)], tmp_path, words)
    calls = [c for c in calls if c.role == 'main']
    assert words in '\n'.join(m.content for m in calls[0].messages if m.role == 'user') and s.api_key not in str(calls[0].messages)
    assert ex.code == 0 and out['out'] == 'é'.encode() and len(calls) == 3, ex
    assert '/workspace' in calls[-1].messages[-1].content and '/home/agent' in calls[-1].messages[-1].content

@pytest.mark.harness
@pytest.mark.parametrize('name', [*LIGHT, *HEAVY])
async def test_every_run_sends_the_same_prompt(name, tmp_path):
    h = get(name)
    a, b = [await play(h, [last(h)], tmp_path/str(i)) for i in (0, 1) if not (tmp_path/str(i)).mkdir()]
    assert [list(c.prompt_ids) for c in a[2]] == [list(c.prompt_ids) for c in b[2]]

@pytest.mark.harness
async def test_both_ways_of_mini_swe_agent_send_the_same_prompts(tmp_path):
    a, b = (get(n) for n in ('mini-swe-agent', 'mini-swe-agent:litellm'))
    (x, y) = [(await play(h, [tool(h, 'seq 3'), tool(h, 'cat missing'), last(h)], tmp_path/str(i)))[2] for i, h in enumerate((a, b)) if not (tmp_path/str(i)).mkdir()]
    assert [c.prompt_ids.tolist() for c in x] == [c.prompt_ids.tolist() for c in y]


def tutorial() -> str:
    "The commands and files of harnesses/README.md, in order, as one script."
    blocks = re.findall(r'^```(sh|toml)([^\n]*)\n(.*?)^```$', (repo_root()/'harnesses'/'README.md').read_text(), re.M | re.S)
    return 'set -e\n' + ''.join(body if kind == 'sh' else f"cat > {path} <<'END'\n{body}END\n" for kind, path, body in blocks)

def test_the_tutorial_is_complete():
    script = tutorial()
    assert script.count('<<') == 2 and 'harness install gptme' in script and script.index('requirements.txt') < script.index('<<')
    for text in re.findall(r"<<'END'\n(.*?)END\n", script, re.S): Spec(**tomllib.loads(text))

@pytest.mark.heavy
@pytest.mark.harness
@pytest.mark.timeout(1800)
def test_the_tutorial_as_it_stands(tmp_path):
    "A program that nobody here has heard of becomes a harness by the words of harnesses/README.md; two minutes, of which pip takes one."
    if WHY: pytest.skip(WHY)
    env = {k: v for k, v in os.environ.items() if not k.startswith('CLAWLAB_')} | {'CLAWLAB_LAB_HOME': str(tmp_path/'home'), 'PYTHONPATH': str(repo_root()), 'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}'}
    p = subprocess.run(['bash'], input=tutorial(), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1100)
    assert p.returncode == 0 and 'not yet' in p.stdout, p
    said = [json.loads(l) for l in p.stdout.splitlines() if l.startswith('{')]
    first, then = (x['checks'][0] for x in said if 'checks' in x)
    assert any('reach something else' in x for x in first['problems']) and first['side'] == 1
    assert then['ok'] and (then['side'], then['elsewhere'], then['oracle']) == (0, 0, 10)
    assert [(r['outcome'], r['reward']) for r in said[-1]['rollouts']] == [('ok', 1.0)] * 3


# harness.toml and lock files

def toml(tmp_path, text, **changes):
    (d := tmp_path/'h').mkdir(exist_ok=True)
    base = 'name = "h"\nversion = "1"\ndialect = "chat"\nturns = 8\n[install]\nkind = "builtin"\n[run]\nargv = ["x", "{instruction}"]\n'
    (d/'harness.toml').write_text((base if not changes.get('bare') else '') + text)
    return d

@pytest.mark.parametrize('text, says', [('envv = {}', 'envv'), ('env = {A = "{apikey}"}', 'apikey'), ('[expect]\nroots = "many"', 'expect.roots'), ('[expect]\ndrift = "some"', 'expect.drift'), ('[', 'harness.toml'),
    ('[truncated]\nstdout = "("', 'regular expression'), ('[wire]\ntool = []', "'tool'"), ('[wire]\ntools = 5', "'tools'"), ('[wire]\ntools = "bash"', "'tools'")])
def test_bad_harness_files_are_one_clear_line(tmp_path, text, says):
    with pytest.raises(InputError) as e: read_spec(toml(tmp_path, text))
    assert says in str(e.value) and '\n' not in str(e.value)

def test_the_key_stays_off_the_command_line(tmp_path):
    d = toml(tmp_path, '')
    (d/'harness.toml').write_text((d/'harness.toml').read_text().replace('"x"', '"--key={api_key}"'))
    with pytest.raises(InputError, match='command line'): read_spec(d)

def test_variants(tmp_path):
    d = toml(tmp_path, 'env = {A = "1", B = "2"}\n[variant.two.run.env]\nB = "3"\n')
    assert read_spec(d).run.env == {'A': '1', 'B': '2'} and read_spec(d, 'two').run.env == {'A': '1', 'B': '3'}
    with pytest.raises(InputError, match='no variant'): read_spec(d, 'three')
    with pytest.raises(InputError, match='unknown harness'): load('nobody')

def test_harnesses_of_ones_own_lie_in_folders_that_a_setting_names(tmp_path, monkeypatch):
    toml(tmp_path, '')
    monkeypatch.setenv('CLAWLAB_LAB_HARNESSES', f'{tmp_path}:')
    assert known() == sorted(['h', *SHIPPED]) and load('h').dir == tmp_path/'h' and load('react').source.parent != tmp_path
    (tmp_path/'react').mkdir(); (tmp_path/'react'/'harness.toml').write_text('nonsense')
    assert load('react').version == '1'   # one of the same name does not take the place of one that ships
    monkeypatch.setenv('CLAWLAB_LAB_HARNESSES', f'{tmp_path}:{tmp_path/"gone"}')
    with pytest.raises(InputError, match='lab.harnesses: no folder .*gone'): load('react')

def test_a_window_that_is_too_small_is_said_beforehand():
    for window in (None, 64000, 1 << 17): load('hermes').fits(window)
    load('react').fits(512)
    with pytest.raises(InputError, match='hermes refuses a context window below 64,000 tokens; the engine has 8,192'): load('hermes').fits(8192)

def test_litter_is_no_part_of_a_submission_unless_the_task_brought_it(tmp_path):
    h = harness.Harness('h', read_spec(toml(tmp_path, '').with_name('h')), tmp_path/'h')
    left = {'a.txt': b'1', '.git/refs/heads/master': b'2', 'AGENTS.md': b'3'}
    assert h.submission(left) == left
    h = replace(h, spec=h.spec.model_copy(update=dict(litter=['.git/*', 'AGENTS.md'])))
    assert set(h.submission(left)) == {'a.txt'} and set(h.submission(left, {'AGENTS.md': ''})) == {'a.txt', 'AGENTS.md'}

def test_hermes_and_nanobot_are_told_window_address_and_key():
    for name, file in (('hermes', '~/.hermes/config.yaml'), ('nanobot', '~/.nanobot/config.json')):
        for h in (load(name), load(name).with_tools(['mail_send'])):
            argv, env, files = h.command('-x {api_key}', 'policy', 'http://127.0.0.1:1/s/x/', 'sk-7', window=70000)
            text = files[file]
            if name == 'nanobot':
                d = json.loads(text); told = d['agents']['defaults']['contextWindowTokens'], d['agents']['defaults']['model'], *[d['providers']['custom'][k] for k in ('apiBase', 'apiKey')]
                server = d.get('tools', {}).get('mcpServers', {}).get('tools')
            else:
                d = yaml.safe_load(text); told = *[d['model'][k] for k in ('context_length', 'default', 'base_url', 'api_key')],
                server = d.get('mcp_servers', {}).get('tools')
            assert told == (70000, 'policy', 'http://127.0.0.1:1/s/x/v1', '${CLAWLAB_KEY}') and env['CLAWLAB_KEY'] == 'sk-7'
            assert 'sk-7' not in ''.join([*argv, *files.values()]) and any(a.endswith('=-x {api_key}') for a in argv) and h.session['max_calls'] == 100
            assert server == (None if h == load(name) else {'command': '/usr/bin/python3', 'args': ['-I', '-S', '/home/agent/.tools/run.py', 'mcp']})

@pytest.mark.parametrize('name', ['zeroclaw', 'openai-compatible'])
def test_harnesses_that_are_only_described_say_so_in_one_line(name):
    h = load(name)
    argv, env, files = h.command('do {model}', 'policy', 'http://127.0.0.1:1/s/x/', 'sk-7')
    assert argv[-1] == 'do {model}' and 'sk-7' in env.values() and 'sk-7' not in ''.join([*argv, *files.values()])
    for t in files.values(): assert tomllib.loads(t)['default_provider'] == 'custom:http://127.0.0.1:1/s/x/v1'
    assert not h.installed and '\n' not in h.absent
    for use in (lambda: h.binds, lambda: harness.install(name)):
        with pytest.raises(InputError, match='never run here'): use()

def test_S46_claude_code_is_no_root_and_is_told_of_its_sandbox():
    "It refuses to skip permissions as root; inside, everybody is uid 1000 (see `the_same_view_in_every_rollout`)."
    for name in ('claude-code', 'claude-code:full'):
        argv, env, _ = load(name).command('x', 'm', 'http://127.0.0.1:8000', 'k')
        assert '--dangerously-skip-permissions' in argv and env['IS_SANDBOX'] == '1'

def test_codex_is_told_window_address_and_key():
    h = load('codex')
    argv, env, files = h.command('do it', 'policy', 'http://127.0.0.1:1/s/x/', 'sk-7', window=8192)
    d = tomllib.loads(files['~/.codex/config.toml'])
    p = d['model_providers']['clawlab']
    assert (d['model'], d['model_context_window'], p['base_url'], p['wire_api'], h.dialect) == ('policy', 8192, 'http://127.0.0.1:1/s/x/v1', 'responses', 'responses')
    assert env[p['env_key']] == 'sk-7' and 'sk-7' not in ''.join([*argv, *files.values()]) and argv[-2:] == ['--', 'do it']
    assert h.session == dict(expect_harness=h.wire, on_engine_failure='cut', report_length_as_stop=True, max_calls=100) and load('react').session['max_calls'] is None

def test_lock_files_pin_everything_and_name_no_host():
    for n in known():
        h = load(n)
        for f in harness.LOCKS:
            if (p := h.source/f).exists():
                assert '://' not in p.read_text()
        if h.spec.install.kind == 'npm':
            assert all('integrity' in v or v.get('inBundle') for k, v in json.loads((h.source/'package-lock.json').read_text())['packages'].items() if k)
        if h.spec.install.kind == 'pip':
            assert all('==' in l for l in (h.source/'requirements.txt').read_text().splitlines() if l and l[0] != '#')
        assert h.versions[n] == h.version

def test_changed_lock_means_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path))
    h = load('claude-code')
    assert not h.installed
    with pytest.raises(InputError, match='not installed'): h.binds
    h.dir.mkdir(parents=True); (h.dir/'installed.json').write_text(json.dumps({'digest': h.digest}))
    assert h.installed
    (h.dir/'installed.json').write_text(json.dumps({'digest': 'other'}))
    assert not h.installed

def test_a_failed_install_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path))
    (bad := tmp_path/'npm').write_text('#!/bin/sh\necho broken >&2; exit 1\n'); bad.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    with pytest.raises(InputError, match='npm failed: broken'): harness.install('claude-code')
    assert not list((tmp_path/'harnesses').iterdir())


# the loop of react.py, without a sandbox

CALL = {'role': 'assistant', 'content': None, 'reasoning_content': 'hm', 'tool_calls': [{'id': 'c1', 'type': 'function', 'function': {'name': 'bash', 'arguments': '{"command": "echo hi"}'}}]}
TEXT = {'role': 'assistant', 'content': 'done'}
def answer(m, finish=None): return 200, json.dumps({'choices': [{'message': m, 'finish_reason': finish or ('tool_calls' if m.get('tool_calls') else 'stop')}]}).encode()
def bash(command, name='bash', raw=None): return CALL | {'tool_calls': [{'id': 'x', 'type': 'function', 'function': {'name': name, 'arguments': raw if raw is not None else json.dumps({'command': command})}}]}

class Endpoint:
    "Answers in order; `cut` closes the connection after so many bytes."
    def __init__(self, *answers):
        self.answers, self.bodies, self.headers = list(answers), [], []
        outer = self
        class H(BaseHTTPRequestHandler):
            def log_message(self, *a): pass
            def do_POST(self):
                outer.headers.append(dict(self.headers)); outer.bodies.append(json.loads(self.rfile.read(int(self.headers['Content-Length']))))
                status, body, *cut = outer.answers.pop(0)
                self.send_response(status); self.send_header('Content-Length', str(len(body))); self.end_headers()
                self.wfile.write(body[:cut[0]] if cut else body)
                if cut: self.connection.close()
        self.server = ThreadingHTTPServer(('127.0.0.1', 0), H)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
    def __enter__(self): return self
    def __exit__(self, *a): self.server.shutdown(); self.server.server_close()

async def react(endpoint, *options, task='do it'):
    async with make_sandbox('process', limits=Limits(seconds=30)) as box:
        return await box.exec([sys.executable, '-I', '-S', str(load('react').source/'react.py'), '--base-url', f'http://127.0.0.1:{endpoint.server.server_port}/s/1/v1', '--model', 'm', *options, '--', task],
                              env={'CLAWLAB_API_KEY': 'KEY'})

async def test_react_plain():
    with Endpoint(answer(CALL), answer(TEXT)) as e: r = await react(e, task='-x')
    assert (r.code, r.stdout) == (0, b'done\n')
    assert e.headers[0]['Authorization'] == 'Bearer KEY' and 'clawlab-react' in e.headers[0]['User-Agent']
    m = e.bodies[1]['messages']
    assert [x['role'] for x in m] == ['system', 'user', 'assistant', 'tool'] and m[1]['content'] == '-x' and m[2] == CALL and m[3]['content'] == 'hi'
    assert e.bodies[1]['messages'][:2] == e.bodies[0]['messages'] and e.bodies[0]['tools'] == e.bodies[1]['tools']

@pytest.mark.parametrize('call, says', [(bash('', 'sh'), 'unknown tool sh'), (bash('', raw='{"command": '), 'bash takes'), (bash('', raw='{"cmd": "ls"}'), 'bash takes'), (bash('', raw='["ls"]'), 'bash takes'),
    (bash('', raw='{"command": 3}'), 'bash takes'), (bash('false'), 'exit code 1'), (bash('kill -9 $$'), 'exit code -9'), (bash('true'), '(no output)'), (bash('sleep 60 & sleep 60'), 'timed out after 1 s'),
    (bash('seq 100000'), 'characters left out'), (bash("printf '\\377'"), '\ufffd'), (bash('echo $CLAWLAB_API_KEY.'), '.'), (bash('cat'), '(no output)')])
async def test_react_tool_results(call, says):
    with Endpoint(answer(call), answer(TEXT)) as e: r = await react(e, '--seconds', '1')
    got = e.bodies[1]['messages'][-1]['content']
    assert r.code == 0 and says in got and len(got) < 4200 and 'KEY' not in got

@pytest.mark.parametrize('answers, code, calls', [([(500, b'x'), answer(TEXT)], 0, 2), ([(429, b'x'), answer(TEXT)], 0, 2), ([(500, b'x')] * 3, 4, 3), ([(400, b'too long')], 4, 1), ([(401, b'no')], 4, 1),
    ([(*answer(TEXT), 20), answer(TEXT)], 0, 2), ([answer(CALL)] * 3, 3, 3), ([answer(TEXT, 'length')], 5, 1), ([answer({'role': 'assistant', 'content': None})], 0, 1)])
async def test_react_exit_codes(answers, code, calls):
    with Endpoint(*answers) as e: r = await react(e, '--turns', '3')
    assert (r.code, len(e.bodies)) == (code, calls), r
    assert load('react').truncated(r) == (code == 3)

async def test_react_forks():
    with Endpoint(answer(CALL), answer(CALL), answer(TEXT)) as e: r = await react(e, '--forks', '--turns', '5')
    assert r.code == 0
    a, b, c = (x['messages'] for x in e.bodies)
    assert [x[-1]['content'] for x in (a, b, c)] == ['(5 more calls)', '(4 more calls)', '(3 more calls)'] and b[:-1] == c[:len(b) - 2] + [c[len(b) - 2] | {'content': 'hi'}]
    assert [m['content'] for m in c if m['role'] == 'tool'] == ['[left out]', 'hi'] and not any('reasoning_content' in m for m in c)

def sse(*chunks, end=True): return 200, b''.join(b'data: ' + json.dumps(c).encode() + b'\n\n' for c in chunks) + (b'data: [DONE]\n\n' if end else b'')
def delta(finish=None, **d): return {'choices': [{'index': 0, 'delta': d, 'finish_reason': finish}]}

async def test_react_stream():
    call = [delta(role='assistant', content=''), delta(reasoning_content='h'), delta(reasoning_content='m'), delta(tool_calls=[{'index': 0, 'id': 'a', 'type': 'function', 'function': {'name': 'bash', 'arguments': ''}}]),
            delta(tool_calls=[{'index': 1, 'id': 'b', 'function': {'name': 'bash', 'arguments': '{"command": "ec'}}]), delta(tool_calls=[{'index': 0, 'function': {'arguments': '{"command": "echo 1"}'}}]),
            delta(tool_calls=[{'index': 1, 'function': {'arguments': 'ho 2"}'}}]), delta('tool_calls'), {'choices': [], 'usage': {}}]
    half = [delta(content='par')]
    with Endpoint(sse(*call), sse(*half, end=False), sse(delta(content='do'), delta(content='ne'), delta('stop'))) as e: r = await react(e, '--stream')
    assert (r.code, r.stdout, len(e.bodies)) == (0, b'done\n', 3)
    m = e.bodies[2]['messages']
    assert [x['content'] for x in m[-2:]] == ['1', '2'] and [c['id'] for c in m[2]['tool_calls']] == ['a', 'b'] and m[2]['reasoning_content'] == 'hm'
    assert e.bodies[1]['messages'] == m   # after half a stream: the same request again

def test_fields_that_say_more_about_a_program(tmp_path):
    d = toml(tmp_path, '')
    base = (d/'harness.toml').read_text()
    def spec(top='', below=''): (d/'harness.toml').write_text(f'{top}\n{base}{below}'); return read_spec(d)
    s = spec('skills = ["~/.h/skills", ".h/skills"]\nquirks = ["slow"]\nprompt_tokens = 960\ntried = false')
    assert s.skills[0] == '~/.h/skills' and s.quirks == ['slow'] and s.prompt_tokens == 960 and not s.tried
    for top, below, says in (('skill = []', '', 'skill'), ('skills = ["/etc"]', '', '/etc'), ('', '[mcp]\nargs = ["{port}"]\n', 'port'), ('', '[mcp]\nrun.argw = []\n', 'argw'),
                             ('', '[mcp]\nargs = ["{api_key}"]\n', 'command line'), ('', '[mcp]\nprefix = "x"\n', 'never hears'), ('', '[mcp.wire]\ntool = []\n', "'tool'"),
                             ('', '[run.files]\na = "{server_args}"\n', 'outside')):
        with pytest.raises(InputError) as e: spec(top, below)
        assert says in str(e.value) and '\n' not in str(e.value), says

def test_a_harness_that_was_never_run_is_listed_and_refused(tmp_path, monkeypatch):
    (tmp_path/'harnesses').mkdir(); toml(tmp_path/'harnesses', '')
    f = tmp_path/'harnesses/h/harness.toml'; f.write_text('tried = false\n' + f.read_text())
    monkeypatch.setattr(harness, 'repo_root', lambda: tmp_path); monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path/'home'))
    assert known() == ['h'] and not (h := load('h')).installed
    for refused in (lambda: harness.install('h'), lambda: h.binds):
        with pytest.raises(InputError, match='never run here'): refused()
    f.write_text(f.read_text().replace('tried = false', '').replace('builtin', 'manual'))
    with pytest.raises(InputError, match='put it at'): harness.install('h')
    load('h').dir.mkdir(parents=True)
    assert harness.install('h').installed and load('h').binds == ((str(load('h').dir), '/opt/h'),)

def test_native_tools_change_what_mcp_says_and_nothing_else(tmp_path):
    d = toml(tmp_path, '[run.files]\n"~/c" = "plain"\n[wire]\ntools = ["sh"]\n[mcp]\nargs = ["--config", "{home}/c"]\nrun.files = {"~/c" = "{server_command} {server_args}"}\n[variant.free.wire]\ntools = []\n')
    def told(variant='', names=('a', 'b')): return harness.Harness('h', read_spec(d, variant), d).with_tools(names)
    argv, _, files = (h := told()).command('-- do', 'm', 'http://x', 'k', home='/h')
    assert argv == ['x', '-- do', '--config', '/h/c'] and json.loads(files['~/c'].split(' ', 1)[1])[-2:] == ['/h/.tools/run.py', 'mcp']
    assert h.session['expect_harness'] == {'tools': ['sh', 'mcp__tools__a', 'mcp__tools__b']} and told('free').wire == {'tools': []}
    plain = told(names=())
    assert plain.command('i', 'm', 'http://x', 'k')[0] == ['x', 'i'] and plain.command('i', 'm', 'http://x', 'k')[2] == {'~/c': 'plain'} and plain.wire == {'tools': ['sh']}

def test_qwen_code_and_opencode_are_told_window_and_address():
    for name, at in (('qwen-code', lambda d: d['model']['generationConfig']['contextWindowSize']), ('opencode', lambda d: d['provider']['clawlab']['models']['policy']['limit']['context'])):
        argv, env, files = (h := load(name).with_tools(['mail_send'])).command('do it', 'policy', 'http://127.0.0.1:1/s/x/', 'sk-7', window=8192)
        configs = [json.loads(t) for p, t in files.items() if t]
        assert at(configs[0]) == 8192 and 'sk-7' in env.values() and 'sk-7' not in ''.join([*argv, *files.values()])
        assert 'http://127.0.0.1:1/s/x/v1' in [*env.values(), configs[0].get('provider', {}).get('clawlab', {}).get('options', {}).get('baseURL')]
        assert any('.tools/run.py' in x for x in [*argv, *files.values()]) and not any('{server' in x for x in [*argv, *files.values()]), h
