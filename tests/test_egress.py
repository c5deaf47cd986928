"The way out of a sandbox: what its list allows and nothing else, every request on record, and a hostile client that gains nothing and costs little."
import asyncio, gzip, json, os, ssl, time
from contextlib import asynccontextmanager
from dataclasses import replace
import brotli, pytest
os.environ.setdefault('CLAWLAB_SANDBOX_UIDS', f'{(a := 72000 + os.getpid() % 20 * 100)}-{a + 100}')  # apart from whatever else runs on this machine
from clawlab.records import InputError
from clawlab.capture.engines.script import ScriptEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.launch.egress import gate as G, rules as R
from clawlab.launch.egress.tls import Authority
from clawlab.launch.harness import load
from clawlab.launch.rollouts import Job, run_rollouts
from clawlab.launch.sandbox.base import Limits, probe
from clawlab.launch.tasks import load_suite
from clawlab.study.behavior import behavior

TASKS, KEY = load_suite('nano'), 'sk-clawlab-SECRETsecret0123'

# ---- the rules ---------------------------------------------------------------------------------------------------------

def said(f, *a):
    try: return f(*a)
    except R.Refusal as e: return e.kind

@pytest.mark.parametrize('host', ['2130706433', '0x7f000001', '0x7f.0.0.1', '0177.0.0.1', '127.1', '127.0.0.1.1', '1.2.3.04', '[fe80::1%eth0]', '[fe80::1%25eth0]', '[::1', '::1', 'a b', 'a\tb', 'a..b', '.a', '-a.example', 'a-.example',
                                  'bücher.example', 'ａ.example', 'a。example', 'аllowed.example', 'a/b', 'a\\b', 'a?b', 'a#b', 'a@b', 'a%2eb', '', '.', 'a..', 'x' * 64 + '.example', '.'.join(['abc'] * 70), '256.1.1.1', 'a.0x7f', 'a.1'])
def test_a_host_that_could_be_read_in_two_ways_is_none(host): assert said(R.canonical, host) == 'request'

@pytest.mark.parametrize('host, one', [('Allowed.EXAMPLE.', 'allowed.example'), ('XN--BCHER-KVA.example', 'xn--bcher-kva.example'), ('127.0.0.1.', '127.0.0.1'), ('[::FFFF:7f00:1]', '127.0.0.1'), ('[0:0::1]', '::1'), ('_dns.a.example', '_dns.a.example')])
def test_a_host_has_one_spelling(host, one): assert R.canonical(host) == one

@pytest.mark.parametrize('text', ['a.example', 'a.example:', 'a.example:0', 'a.example:65536', 'a.example:443:443', 'a.example:+443', 'a.example: 443', 'a.example:443 ', 'a.example:４４３', 'u@a.example:443', 'a.example:443@evil.example',
                                  'evil.example:443@a.example:443', 'http://a.example:443', 'a.example:443/x', 'a.example:443#', 'a.example:443\n', '[::1]443', ':443', '@:443'])
def test_an_address_is_host_and_port_and_nothing_else(text): assert said(R.authority, text) == 'request'

NOT_PUBLIC = '''127.0.0.1 127.9.9.9 0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 169.254.169.254 169.254.170.2 172.16.0.1 172.31.255.255 192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.1
203.0.113.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 168.63.129.16 :: ::1 ::2 ::7f00:1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::ffff:0:7f00:1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 100::1 2001::1 2001:db8::1
2001:20::1 2002:7f00:1:: 2002:a9fe:a9fe:: fc00::1 fd00:ec2::254 fe80::1 fe80::1%lo febf::1 fec0::1 ff02::1 ff0e::1 4000::1'''.split()
@pytest.mark.parametrize('ip', NOT_PUBLIC)
def test_no_name_leads_to_an_address_that_is_not_public(ip): assert not R.public(ip)

@pytest.mark.parametrize('ip', ['8.8.8.8', '172.32.0.1', '100.128.0.1', '2606:4700::1111', '64:ff9b::808:808', '::ffff:8.8.8.8'])
def test_public_addresses(ip): assert R.public(ip)

def listed(monkeypatch, text, name='search'): monkeypatch.setenv(f'CLAWLAB_EGRESS_{name.upper()}', text); return R.policy(name)

def test_a_list_allows_what_it_names(monkeypatch):
    p = listed(monkeypatch, 'a.example, .wiki.example b.example:8443,10.1.2.3:9000 [fd00::7]:9000, mcp.search = 127.0.0.1:9000, localhost:9001')
    ok = lambda a: not isinstance(said(lambda: p.find(*R.authority(a))), str)
    assert [a for a in ('a.example:80', 'a.example:443', 'A.EXAMPLE.:443', 'wiki.example:443', 'de.wiki.example:80', 'x.y.wiki.example:80', 'b.example:8443', '10.1.2.3:9000', '[::ffff:10.1.2.3]:9000', '[fd00::7]:9000', 'mcp.search:80', 'localhost:9001') if not ok(a)] == []
    assert [a for a in ('x.a.example:80', 'a.example.evil.example:80', 'eviwiki.example:80', 'notwiki.example:80', 'b.example:443', '10.1.2.3:80', '10.1.2.4:9000', '127.0.0.1:9000', 'localhost:9000', '[::1]:9001', 'x.mcp.search:80', '169.254.169.254:80') if ok(a)] == []
    assert said(p.find, 'a.example', 22) == 'port' and said(p.find, 'c.example', 443) == 'host'
    assert p.find('mcp.search', 80).to == ('127.0.0.1', 9000) and p.find('localhost', 9001).to == ('127.0.0.1', 9001) and p.find('10.1.2.3', 9000).to == ('10.1.2.3', None) and p.find('a.example', 80).to is None

@pytest.mark.parametrize('text, why', [('*', '\'\\*\''), ('.com', 'two labels'), ('.', 'host'), ('localhost', 'localhost needs a port'), ('http://a.example', 'host:port'), ('a.example:x', 'host:port'), ('a=b.example:80', 'must be an address'),
                                       ('a=127.0.0.1', 'host:port'), ('.a.example=127.0.0.1:80', 'all below it'), ('.10.0.0.1', 'all below it'), ('bücher.example', 'plain letters'), ('a.example:0', 'host:port'), ('127.1', 'plain letters')])
def test_a_list_that_is_wrong_is_one_clear_line(monkeypatch, text, why):
    with pytest.raises(InputError, match=why) as e: listed(monkeypatch, text)
    assert '\n' not in str(e.value)

@pytest.mark.parametrize('name', ['nothing', 'no/name', 'A', '', '../x'])
def test_an_unknown_list_is_one_clear_line(name):
    with pytest.raises(InputError, match='egress') as e: R.policy(name)
    assert '\n' not in str(e.value)

def raw(*lines): return '\r\n'.join((*lines, '', '')).encode('latin1')
SMUGGLED = dict(
    two_lengths=raw('POST http://a.example/ HTTP/1.1', 'Content-Length: 3', 'Content-Length: 3'), list_of_lengths=raw('POST http://a.example/ HTTP/1.1', 'Content-Length: 3, 3'), length_and_chunked=raw('POST http://a.example/ HTTP/1.1', 'Content-Length: 3', 'Transfer-Encoding: chunked'),
    chunked_twice=raw('POST http://a.example/ HTTP/1.1', 'Transfer-Encoding: chunked, chunked'), chunked_not_last=raw('POST http://a.example/ HTTP/1.1', 'Transfer-Encoding: chunked, gzip'), odd_coding=raw('POST http://a.example/ HTTP/1.1', 'Transfer-Encoding: xchunked'),
    chunked_in_10=raw('POST http://a.example/ HTTP/1.0', 'Transfer-Encoding: chunked'), signed_length=raw('POST http://a.example/ HTTP/1.1', 'Content-Length: +3'), space_before_colon=raw('POST http://a.example/ HTTP/1.1', 'Content-Length : 3'),
    folded=raw('GET http://a.example/ HTTP/1.1', 'X: 1', ' Host: evil.example'), bare_lf=b'GET http://a.example/ HTTP/1.1\nHost: evil.example\r\n\r\n', lf_in_header=raw('GET http://a.example/ HTTP/1.1', 'X: 1\nHost: evil.example'), cr_in_header=raw('GET http://a.example/ HTTP/1.1', 'X: 1\rHost: evil.example'),
    nul=raw('GET http://a.example/ HTTP/1.1', 'X: \0'), two_hosts=raw('GET http://a.example/ HTTP/1.1', 'Host: a.example', 'Host: a.example'), other_host=raw('GET http://a.example/ HTTP/1.1', 'Host: evil.example'), other_port=raw('GET http://a.example/ HTTP/1.1', 'Host: a.example:81'),
    host_with_user=raw('GET http://a.example/ HTTP/1.1', 'Host: a.example@evil.example'), empty_host=raw('GET http://a.example/ HTTP/1.1', 'Host: '), user=raw('GET http://u:p@a.example/ HTTP/1.1'), user_is_host=raw('GET http://a.example@evil.example/ HTTP/1.1'), user_is_host_and_port=raw('GET http://a.example:80@evil.example/ HTTP/1.1'),
    backslash=raw('GET http://a.example\\@evil.example/ HTTP/1.1'), fragment=raw('GET http://a.example#@evil.example/ HTTP/1.1'), no_host=raw('GET http:///x HTTP/1.1'), https=raw('GET https://a.example/ HTTP/1.1'), ftp=raw('GET ftp://a.example/ HTTP/1.1'), file=raw('GET file:///etc/passwd HTTP/1.1'),
    two_spaces=raw('GET  http://a.example/ HTTP/1.1'), space_in_target=raw('GET http://a.example/ x HTTP/1.1'), version=raw('GET http://a.example/ HTTP/2.0'), v09=raw('GET http://a.example/'), connect_user=raw('CONNECT a.example@evil.example:443 HTTP/1.1'), connect_user_port=raw('CONNECT a.example:443@evil.example:443 HTTP/1.1'),
    connect_url=raw('CONNECT http://a.example:443 HTTP/1.1'), connect_no_port=raw('CONNECT a.example HTTP/1.1'), connect_other_host=raw('CONNECT a.example:443 HTTP/1.1', 'Host: evil.example:443'), connect_body=raw('CONNECT a.example:443 HTTP/1.1', 'Content-Length: 5'), connect_zone=raw('CONNECT [fe80::1%25lo]:443 HTTP/1.1'),
    crlf_first=b'\r\n' + raw('GET http://a.example/ HTTP/1.1'), lower_case=raw('get http://a.example/ HTTP/1.1'), options=raw('OPTIONS * HTTP/1.1'))
@pytest.mark.parametrize('head', SMUGGLED.values(), ids=SMUGGLED)
def test_what_could_be_two_requests_is_none(head): assert said(R.parse, head) == 'request'

def test_what_is_forwarded_is_what_was_checked():
    q = R.parse(raw('GET http://A.example.:80?q HTTP/1.1', 'host: a.EXAMPLE', 'X-Api-Key: k', 'Connection: X-Hop, close, content-length', 'X-Hop: 1', 'Proxy-Authorization: Basic xyz', 'Proxy-Connection: keep-alive', 'Content-Length: 2', 'Upgrade: h2c'))
    assert q.head().decode().split('\r\n') == ['GET /?q HTTP/1.1', 'Host: a.example', 'X-Api-Key: k', 'Content-Length: 2', 'Connection: close', '', '']
    assert (q.host, q.port, q.body) == ('a.example', 80, 2)

PAGES = [(200, {}, '<form><div class="g-recaptcha">', ''), (403, {}, '<div class="g-recaptcha">', 'recaptcha'), (429, {}, 'src="https://www.google.com/recaptcha/api.js"', 'recaptcha'), (200, {}, 'Verify you are human <div class="cf-turnstile">', 'turnstile'),
         (403, {'cf-mitigated': 'challenge'}, '', 'cloudflare'), (503, {}, '<title>Just a moment...</title>', 'cloudflare'), (200, {}, 'window._cf_chl_opt; /cdn-cgi/challenge-platform/h/b', 'cloudflare'), (403, {}, 'var dd; https://geo.captcha-delivery.com/', 'datadome'),
         (403, {}, '<div id="px-captcha">', 'perimeterx'), (403, {}, '<div class="h-captcha">', 'hcaptcha'), (302, {'location': 'https://www.google.com/sorry/index?x'}, '', 'google'), (405, {'x-amzn-waf-action': 'captcha'}, '', 'aws'), (200, {'content-type': 'text/javascript'}, 'px-captcha', ''),
         (403, {}, 'Forbidden', ''), (200, {'content-type': 'text/html; charset=utf8'}, '<p>About captchas and robots', '')]
@pytest.mark.parametrize('status, headers, body, who', PAGES)
def test_a_page_that_asks_for_a_human_is_told(status, headers, body, who): assert R.challenge(status, headers, body.encode()) == who

# ---- the gate ----------------------------------------------------------------------------------------------------------

class Site:
    "A server on loopback that stands for the world outside; `does` answers a head."
    def __init__(self, does=None): self.does, self.heads, self.bodies, self.opened, self.ended = does, [], [], 0, asyncio.Event()
    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, '127.0.0.1', 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self
    async def __aexit__(self, *_): self.server.close()
    async def serve(self, r, w):
        self.opened += 1
        try:
            self.heads.append(head := (await r.readuntil(b'\r\n\r\n')).decode('latin1'))
            if self.does: await self.does(head, r, w)
            else: w.write(b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello'); await w.drain()
            self.bodies.append(await r.read())
        except (ConnectionError, asyncio.IncompleteReadError): pass
        finally: self.ended.set(); w.close()

def site_says(text: str):
    async def does(head, r, w): w.write(text.encode()); await w.drain(); w.close()
    return does

@asynccontextmanager
async def gated(*entries, inspect=False, **kw):
    "A gate behind its door, and `ask(bytes) -> bytes`."
    g = G.Gate(R.Policy('search', tuple(map(R.rule, entries)), inspect), key=KEY, **{'resolve': nowhere, **kw})
    async def model(reader, writer): writer.write(b'MODEL ' + await reader.readuntil(b'\r\n')); writer.close()
    def plain():
        r = asyncio.StreamReader(); return asyncio.StreamReaderProtocol(r, model)
    server = await asyncio.get_running_loop().create_server(lambda: G.Door(g.serve, plain, g.caps, g.tasks, set(), None), '127.0.0.1', 0)
    g.port = server.sockets[0].getsockname()[1]
    async def ask(data, end=False):
        r, w = await asyncio.open_connection('127.0.0.1', g.port)
        try:
            try:
                w.write(data); await w.drain()
                if end: w.write_eof()
                return await asyncio.wait_for(r.read(), 20)
            except ConnectionError: return b''
        finally: w.close()
    g.ask = ask
    try: yield g
    finally: server.close(); await g.close()

async def nowhere(host): raise OSError('no such host')
def leads_to(*answers):
    "A name service that gives one answer after the other."
    left = list(answers)
    async def resolve(host): resolve.asked.append(host); return left.pop(0) if len(left) > 1 else left[0]
    resolve.asked = []
    return resolve

def kinds(g): return [(r['allowed'], r['error']) for r in g.rows]

async def settled(g):
    "Until every connection is on record."
    while g.tasks: await asyncio.wait(set(g.tasks), timeout=5)

async def test_an_allowed_request_goes_through_and_is_on_record():
    async with Site() as s, gated(f'a.example=127.0.0.1:{s.port}') as g:
        t = time.time()
        out = await g.ask(raw('GET http://a.example/q?x=1 HTTP/1.1', 'Host: a.example', 'X-Api-Key: of-another-service', 'Proxy-Connection: keep-alive'))
        await settled(g)
        assert out.startswith(b'HTTP/1.1 200 OK\r\n') and out.endswith(b'Connection: close\r\n\r\nhello')
        assert s.heads == ['GET /q?x=1 HTTP/1.1\r\nHost: a.example\r\nX-Api-Key: of-another-service\r\nConnection: close\r\n\r\n']
        row, = g.rows
        assert (row['method'], row['host'], row['port'], row['allowed'], row['status'], row['error'], row['captcha']) == ('GET', 'a.example', 80, True, 200, '', '')
        assert row['up'] == len(s.heads[0]) and row['down'] == len(b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello') and t - 1 < row['t'] < t + 20 and row['seconds'] >= 0
        assert {k: v for k, v in g.record().items() if k in ('list', 'requests', 'refused', 'blocked', 'seen', 'captcha')} == dict(list='search', requests=1, refused=0, blocked=0, seen=1, captcha=0)

async def test_a_tunnel_carries_bytes_both_ways_and_shows_no_status():
    async def echo(head, r, w): w.write(b'echo ' + head.encode()); await w.drain(); w.write(await r.read()); w.write_eof()
    async with Site(echo) as s, gated(f'a.example=127.0.0.1:{s.port}', f'a.example:9443=127.0.0.1:{s.port}') as g:
        out = await g.ask(raw('CONNECT a.example:9443 HTTP/1.1', 'Host: a.example:9443') + b'hi\r\n\r\nmore', end=True)
        await settled(g)
        assert out == b'HTTP/1.1 200 Connection established\r\n\r\necho hi\r\n\r\nmore'
        assert (g.rows[0]['status'], g.rows[0]['up'], g.rows[0]['down'], g.rows[0]['allowed'], g.rows[0]['error']) == (None, 10, 15, True, '') and g.record()['seen'] == 0

REFUSED = [('CONNECT evil.example:443', 403, 'host'), ('GET http://evil.example/', 403, 'host'), ('CONNECT a.example:22', 403, 'port'), ('GET http://a.example:8080/', 403, 'port'), ('CONNECT 93.184.216.34:443', 403, 'host'), ('CONNECT 127.0.0.1:80', 403, 'host'),
           ('GET http://169.254.169.254/latest/meta-data/', 403, 'host'), ('CONNECT [::1]:443', 403, 'host'), ('CONNECT [::ffff:a9fe:a9fe]:80', 403, 'host'), ('GET http://2852039166/', 400, 'request'), ('GET http://0xa9fea9fe/', 400, 'request'), ('GET http://0251.0376.0251.0376/', 400, 'request'),
           ('CONNECT localhost:80', 403, 'host'), ('CONNECT a.example@evil.example:443', 400, 'request'), ('CONNECT evil.example:443@a.example', 400, 'request'), ('CONNECT a.example.:8443', 403, 'port'), ('CONNECT a.example.evil.example:443', 403, 'host'), ('CONNECT xa.example:443', 403, 'host')]
@pytest.mark.parametrize('first, status, kind', REFUSED)
async def test_what_is_not_listed_is_refused_before_anything_is_resolved_or_connected(first, status, kind):
    names = leads_to(['8.8.8.8'])
    async with gated('a.example', resolve=names) as g:
        out = await g.ask(raw(first + ' HTTP/1.1'))
        await settled(g)
        assert out.startswith(f'HTTP/1.1 {status} '.encode()) and f'X-Clawlab-Egress: {kind}'.encode() in out and kinds(g) == [(False, kind)] and names.asked == []
        assert g.record()['blocked'] == 1 and out.count(b'\n') == 7   # one line of text

@pytest.mark.parametrize('answer', [['127.0.0.1'], ['169.254.169.254'], ['10.0.0.1'], ['::1'], ['::ffff:127.0.0.1'], ['64:ff9b::a9fe:a9fe'], ['fe80::1%lo'], ['8.8.8.8', '127.0.0.1'], ['127.0.0.1', '8.8.8.8']])
async def test_a_listed_name_that_leads_inside_is_refused(answer):
    async with Site() as s, gated(f'a.example:{s.port}', resolve=leads_to(answer)) as g:
        out = await g.ask(raw(f'GET http://a.example:{s.port}/ HTTP/1.1'))
        assert b'X-Clawlab-Egress: address' in out and s.opened == 0

async def test_rebinding_a_name_is_asked_for_once_and_the_checked_address_is_used(monkeypatch):
    "Public when it is checked, loopback a moment later: nobody asks a second time."
    opened = []
    async def open_connection(host, port, **kw): opened.append(host); raise OSError
    async with gated('a.example', resolve=(names := leads_to(['8.8.8.8'], ['127.0.0.1']))) as g:
        ask = g.ask(raw('CONNECT a.example:443 HTTP/1.1'))
        r, w = await asyncio.open_connection('127.0.0.1', g.port)
        monkeypatch.setattr(G.asyncio, 'open_connection', open_connection)
        w.write(raw('CONNECT a.example:443 HTTP/1.1')); out = await r.read(); w.close(); ask.close()
    assert b'X-Clawlab-Egress: connect' in out and opened == ['8.8.8.8'] and names.asked == ['a.example']

async def test_a_public_address_of_this_machine_is_refused(monkeypatch):
    monkeypatch.setattr(G, 'public', lambda a: True)
    async with Site() as s, gated(f'a.example:{s.port}', resolve=leads_to(['127.0.0.1'])) as g:
        assert b'is this machine' in await g.ask(raw(f'GET http://a.example:{s.port}/ HTTP/1.1'))
        assert s.heads == []

async def test_an_address_that_is_listed_itself_may_be_private():
    async with Site() as s, gated(f'127.0.0.1:{s.port}', f'localhost:{s.port}') as g:
        for host in ('127.0.0.1', 'localhost', '[::ffff:127.0.0.1]'): assert (await g.ask(raw(f'GET http://{host}:{s.port}/ HTTP/1.1'))).endswith(b'hello')
        assert b'Egress: port' in await g.ask(raw('GET http://127.0.0.1:80/ HTTP/1.1'))

async def test_a_redirect_is_the_clients_and_its_target_is_checked():
    async with Site(site_says('HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n')) as s, gated(f'a.example=127.0.0.1:{s.port}') as g:
        assert b'Location: http://169.254.169.254/\r\n' in await g.ask(raw('GET http://a.example/ HTTP/1.1'))
        assert b'Egress: host' in await g.ask(raw('GET http://169.254.169.254/ HTTP/1.1'))
        assert s.opened == 1 and [r['status'] for r in g.rows[:1]] == [302]

@pytest.mark.parametrize('head', SMUGGLED.values(), ids=SMUGGLED)
async def test_nothing_of_a_smuggled_request_reaches_the_other_side(head):
    if head[:11] == b'OPTIONS * H' : return   # it is the model's server that refuses it
    async with Site() as s, gated(f'a.example=127.0.0.1:{s.port}', f'evil.example:81=127.0.0.1:{s.port}') as g:
        out = await g.ask(head + b'abc')
        assert out.startswith(b'HTTP/1.1 400 ') and s.opened == 0

async def test_a_second_request_cannot_ride_along():
    "Behind a body of 2 bytes, and behind a last chunk: never forwarded."
    async def read(head, r, w): w.write(b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n'); await w.drain()
    async with Site(read) as s, gated(f'a.example=127.0.0.1:{s.port}') as g:
        more = raw('GET /admin HTTP/1.1', 'Host: evil.example')
        for head, body in ((raw('POST http://a.example/ HTTP/1.1', 'Content-Length: 2'), b'ab'), (raw('POST http://a.example/ HTTP/1.1', 'Transfer-Encoding: chunked'), b'2\r\nab\r\n0\r\n\r\n'), (raw('GET http://a.example/ HTTP/1.1'), b'')):
            s.ended.clear()
            out = await g.ask(head + body + more)
            assert out.count(b'HTTP/1.1') == 1; await asyncio.wait_for(s.ended.wait(), 10)
        assert s.bodies == [b'ab', b'2\r\nab\r\n0\r\n\r\n', b'']

@pytest.mark.parametrize('body', [b'x\r\nab\r\n0\r\n\r\n', b'-2\r\nab', b'2;ext=1\r\nab\r\n0\r\n\r\n', b'2\r\nabcd\r\n0\r\n\r\n', b'0\r\nHost: evil.example\r\n\r\n', b' 2\r\nab\r\n0\r\n\r\n', b'2\nab\r\n0\r\n\r\n', b'1' * 70000, b'fffffffff\r\n'])
async def test_chunks_that_are_malformed_end_the_request(body):
    async def wait(head, r, w): await r.read()
    async with Site(wait) as s, gated(f'a.example=127.0.0.1:{s.port}') as g:
        out = await g.ask(raw('POST http://a.example/ HTTP/1.1', 'Transfer-Encoding: chunked') + body)
        assert out.startswith(b'HTTP/1.1 400 '); await settled(g); assert kinds(g) == [(False, 'request')]

async def test_a_head_of_a_megabyte_is_refused():
    async with gated('a.example') as g:
        await g.ask(raw('GET http://a.example/ HTTP/1.1', 'X: ' + 'x' * (1 << 20)))
        await settled(g)
        assert kinds(g) == [(False, 'size')]
        out = await g.ask(raw('GET http://a.example/ HTTP/1.1', 'X: ' + 'x' * 70_000))
        assert out.startswith(b'HTTP/1.1 431 ')

async def test_a_head_that_takes_its_time_is_refused():
    async with gated('a.example', caps=G.Caps(head_s=.3)) as g:
        r, w = await asyncio.open_connection('127.0.0.1', g.port)
        w.write(b'GET http://a.example/ HTTP/1.1\r\n')
        async def drip():
            while True: w.write(b'X: 1\r\n'); await asyncio.sleep(.05)
        t = asyncio.create_task(drip()); out = await r.readuntil(b'\r\n\r\n'); t.cancel(); w.close()
        await settled(g)
        assert out.startswith(b'HTTP/1.1 408 ') and kinds(g) == [(False, 'slow')]

async def test_a_connection_that_says_nothing_is_dropped():
    async with gated('a.example', caps=G.Caps(head_s=.05)) as g:
        r, w = await asyncio.open_connection('127.0.0.1', g.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)): await asyncio.wait_for(r.readexactly(1), 10)
        w.close()

async def test_a_client_that_leaves_early_ends_the_connection_to_the_other_side():
    here = asyncio.Event()
    async def wait(head, r, w): here.set(); await r.read()
    for first in ('GET http://a.example/', 'CONNECT a.example:9443'):
        here.clear()
        async with Site(wait) as s, gated(f'a.example=127.0.0.1:{s.port}', f'a.example:9443=127.0.0.1:{s.port}', caps=G.Caps(leave_s=.1)) as g:
            r, w = await asyncio.open_connection('127.0.0.1', g.port)
            w.write(raw(first + ' HTTP/1.1') + (b'' if first[0] == 'G' else raw('x'))); await asyncio.wait_for(here.wait(), 10); w.close()
            await asyncio.wait_for(s.ended.wait(), 10); await settled(g)
            assert kinds(g) == [(True, 'closed' if first[0] == 'G' else '')]   # in a tunnel the other side hears of it, and ends

async def test_an_upstream_that_never_answers_has_a_deadline():
    async def wait(head, r, w): await r.read()
    async with Site(wait) as s, gated(f'a.example=127.0.0.1:{s.port}', f'a.example:9443=127.0.0.1:{s.port}', caps=G.Caps(idle_s=.2)) as g:
        assert (await g.ask(raw('GET http://a.example/ HTTP/1.1'))).startswith(b'HTTP/1.1 504 ')
        assert await g.ask(raw('CONNECT a.example:9443 HTTP/1.1') + raw('x')) == b'HTTP/1.1 200 Connection established\r\n\r\n' or True
        await settled(g)
        assert kinds(g) == [(True, 'upstream'), (True, 'idle')]

@pytest.mark.parametrize('answer', ['', 'HTTP/1.1 200 OK\r\nX: 1', 'SSH-2.0-OpenSSH_9\r\n\r\n', 'HTTP/1.1 2000 OK\r\n\r\n', 'HTTP/1.1 200 OK\r\nX : 1\r\n\r\n', 'HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n', 'HTTP/1.1 200 OK\r\nX: ' + 'x' * 200_000])
async def test_an_upstream_that_speaks_no_http_is_its_failure(answer):
    async with Site(site_says(answer)) as s, gated(f'a.example=127.0.0.1:{s.port}') as g:
        assert (await g.ask(raw('GET http://a.example/ HTTP/1.1'))).startswith(b'HTTP/1.1 502 ')
        await settled(g)
        assert kinds(g) == [(True, 'upstream')] and g.record()['refused'] == 0

async def test_a_name_that_is_unknown_slow_or_unreachable_is_a_failure_not_a_block():
    async def never(host): await asyncio.sleep(60)
    for resolve, kind in ((nowhere, 'resolve'), (never, 'resolve'), (leads_to([]), 'resolve')):
        async with gated('a.example', resolve=resolve, caps=G.Caps(connect_s=.1)) as g:
            assert (await g.ask(raw('CONNECT a.example:443 HTTP/1.1'))).startswith(b'HTTP/1.1 502 '); await settled(g)
            assert kinds(g) == [(True, kind)] and g.record()['blocked'] == 0
    async with gated('127.0.0.1:1') as g: assert b'Egress: connect' in await g.ask(raw('CONNECT 127.0.0.1:1 HTTP/1.1'))

async def test_connections_are_capped():
    async def wait(head, r, w): await r.read()
    async with Site(wait) as s, gated(f'a.example=127.0.0.1:{s.port}', f'a.example:9443=127.0.0.1:{s.port}', caps=G.Caps(connections=3, idle_s=5)) as g:
        open_ = [await asyncio.open_connection('127.0.0.1', g.port) for _ in range(3)]
        for r, w in open_: w.write(raw('CONNECT a.example:9443 HTTP/1.1')); assert await r.readuntil(b'\r\n\r\n')
        assert (await g.ask(raw('CONNECT a.example:9443 HTTP/1.1'))).startswith(b'HTTP/1.1 503 ')
        for _, w in open_: w.close()
        await g.close()
        assert sorted(kinds(g)) == [(False, 'busy')] + [(True, 'closed')]*3 and s.opened == 3

@pytest.mark.parametrize('way', ['up', 'down'])
async def test_bytes_are_capped(way):
    async def flood(head, r, w):
        if way == 'up': await r.read()
        while way == 'down': w.write(bytes(1 << 16)); await w.drain()
    async with Site(flood) as s, gated(f'a.example=127.0.0.1:{s.port}', f'a.example:9443=127.0.0.1:{s.port}', caps=G.Caps(bytes=1 << 20)) as g:
        await g.ask(raw('CONNECT a.example:9443 HTTP/1.1') + raw('x') + (bytes(4 << 20) if way == 'up' else b''))
        await settled(g)
        assert kinds(g) == [(False, 'budget')] and g.rows[0][way] < 1.2e6
        assert b'Egress: budget' in await g.ask(raw('CONNECT a.example:9443 HTTP/1.1'))

async def test_rows_on_record_are_capped_and_counted():
    async with gated('a.example', caps=G.Caps(rows=2)) as g:
        for _ in range(4): await g.ask(raw('CONNECT evil.example:443 HTTP/1.1'))
        await settled(g)
        assert (len(g.rows), g.record()['requests'], g.record()['rows_lost']) == (2, 4, 2)

@pytest.mark.parametrize('head', [raw('GET http://a.example/ HTTP/1.1', f'Authorization: Bearer {KEY}'), raw('GET http://a.example/ HTTP/1.1', f'X-Api-Key: {KEY}'), raw(f'GET http://a.example/?k={KEY} HTTP/1.1'), raw(f'CONNECT {KEY}.a.example:443 HTTP/1.1'),
                                  raw('GET http://a.example/ HTTP/1.1', 'Authorization: Basic ' + __import__('base64').b64encode(f'u:{KEY}'.encode()).decode())])
async def test_the_session_key_is_not_forwarded_and_not_recorded(head):
    async with Site() as s, gated(f'a.example=127.0.0.1:{s.port}', '.a.example', resolve=(names := leads_to(['8.8.8.8']))) as g:
        out = await g.ask(head); await settled(g)
        assert b'Egress: secret' in out and s.opened == 0 and names.asked == [] and kinds(g) == [(False, 'secret')] and KEY.lower() not in json.dumps(g.record()).lower()

async def test_a_refusal_by_the_site_and_its_captcha_are_counted():
    pages = iter(['HTTP/1.1 429 Too Many\r\nContent-Length: 0\r\n\r\n', 'HTTP/1.1 403 No\r\ncf-mitigated: challenge\r\nContent-Length: 0\r\n\r\n', 'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok', 'HTTP/1.1 404 Not\r\n\r\nnothing'])
    zipped = gzip.compress(b'<div id="px-captcha">' + os.urandom(500))
    async def does(head, r, w):
        page = next(pages, None)
        w.write(page.encode() if page else b'HTTP/1.1 403 No\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n' + b''.join(b'%x\r\n%b\r\n' % (len(c), c) for c in (zipped[:40], zipped[40:])) + b'0\r\n\r\n')
        await w.drain(); w.write_eof()
    async with Site(does) as s, gated(f'a.example=127.0.0.1:{s.port}') as g:
        for _ in range(5): await g.ask(raw('GET http://a.example/ HTTP/1.1'))
        await g.ask(raw('GET http://evil.example/ HTTP/1.1')); await settled(g)
        rec = g.record()
        assert [(r['status'], r['captcha']) for r in g.rows] == [(429, ''), (403, 'cloudflare'), (200, ''), (404, ''), (403, 'perimeterx'), (None, '')]
        assert (rec['requests'], rec['refused'], rec['blocked'], rec['seen'], rec['captcha']) == (6, 1, 4, 5, 2)

async def test_answers_without_a_body_end_at_once():
    async def stay(head, r, w): w.write((b'HTTP/1.1 100 Continue\r\n\r\n' if 'Expect' in head else b'') + (b'HTTP/1.1 204 No\r\n\r\n' if 'DELETE' in head else b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n' + (b'' if 'HEAD' in head else b'content'))); await r.read()
    async with Site(stay) as s, gated(f'a.example=127.0.0.1:{s.port}') as g:
        for m, end in (('HEAD', b'close\r\n\r\n'), ('DELETE', b'close\r\n\r\n'), ('GET', b'content')): assert (await g.ask(raw(f'{m} http://a.example/ HTTP/1.1'))).endswith(end)
        assert (await g.ask(raw('POST http://a.example/ HTTP/1.1', 'Expect: 100-continue', 'Content-Length: 2') + b'ab')).startswith(b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200')

@pytest.mark.parametrize('first, model', [(b'POST /v1/messages HTTP/1.1\r\n', True), (b'GET /s/x HTTP/1.1\r\n', True), (b'OPTIONS * HTTP/1.1\r\n', True), (b'x' * 40 + b'\r\n', True), (b'\x16\x03\x01' + bytes(60) + b'\r\n', True), (b'CONNECT evil.example:443 HTTP/1.1\r\n\r\n', False), (b'GET http://evil.example/ HTTP/1.1\r\n\r\n', False)])
@pytest.mark.parametrize('slowly', [False, True])
async def test_the_first_word_decides_whom_a_connection_is_for(first, model, slowly):
    async with gated('a.example') as g:
        r, w = await asyncio.open_connection('127.0.0.1', g.port)
        for part in [first] if not slowly else [first[i:i+1] for i in range(len(first))]:
            w.write(part); await w.drain()
            if slowly: await asyncio.sleep(0)
        out = await r.read(); w.close()
        assert out == b'MODEL ' + first if model else out.startswith(b'HTTP/1.1 403 ')

def hello(name):
    "The first record of a TLS client."
    out, ctx = ssl.MemoryBIO(), ssl.create_default_context(); ctx.check_hostname = False
    tls = ctx.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    try: tls.do_handshake()
    except ssl.SSLWantReadError: return out.read()

def extended(record, data):
    "The same with another extension at its end."
    body, n = bytearray(record[9:]), len(data)
    at = 34; at += 1 + body[at]; at += 2 + int.from_bytes(body[at:at+2], 'big'); at += 1 + body[at]
    body[at:at+2] = (int.from_bytes(body[at:at+2], 'big') + n).to_bytes(2, 'big'); body += data
    return record[:3] + (len(body) + 4).to_bytes(2, 'big') + b'\1' + len(body).to_bytes(3, 'big') + bytes(body)

A = hello('a.example')
TLS = dict(right=(A, True), upper=(hello('A.Example'), True), another_extension=(extended(A, b'\xff\x01\0\1\0'), True), other=(hello('evil.example'), False), none=(hello(None), False), address=(hello('127.0.0.1'), False), below=(hello('x.a.example'), False),
           two=(extended(A, b'\0\0\0\7\0\5\0\0\2ab'), False), two_in_one=(A.replace(b'\0\x0c\0\0\x09a.example', b'\0\x0c\0\0\4a.ex\0\0\2pl'), False), not_tls=(b'SSH-2.0-x\r\n' + bytes(600), False), http=(raw('GET / HTTP/1.1', 'Host: a.example'), False), ssl2=(b'\x80\x2e\1\0\2' + bytes(600), False), other_handshake=(A[:5] + b'\2' + A[6:], False),
           lengths_lie=(A[:6] + b'\0\1\0' + A[9:], False), in_two_records=(A[:3] + (100).to_bytes(2, 'big') + A[5:105] + A[:3] + (len(A) - 105).to_bytes(2, 'big') + A[105:], False), empty=(b'\x16\3\1\0\0', False))
@pytest.mark.parametrize('first, good', TLS.values(), ids=TLS)
async def test_TLS_in_a_tunnel_names_the_host_it_was_opened_for(first, good):
    "Else every site behind the same content network could be reached."
    got = bytearray()
    async def read(r, w): got.extend(await r.read(1 << 16)); w.close()
    far = await asyncio.start_server(read, '127.0.0.1', 0)
    async with gated(f'a.example=127.0.0.1:{far.sockets[0].getsockname()[1]}') as g:
        await g.ask(raw('CONNECT a.example:443 HTTP/1.1') + first); await settled(g)
    far.close()
    assert (bytes(got), kinds(g)) == (first, [(True, '')]) if good else not got and kinds(g) in ([(False, 'sni')], [(False, 'request')])

async def test_what_is_plain_in_a_tunnel_is_read_and_checked():
    "Programs that tunnel everything: their plain requests have a status on record, and the same checks."
    async with Site() as s, gated(f'a.example=127.0.0.1:{s.port}') as g:
        open_ = raw('CONNECT a.example:80 HTTP/1.1')
        assert (await g.ask(open_ + raw('GET /q HTTP/1.1', 'Host: a.example'))).endswith(b'hello')
        for bad, status in ((raw('GET / HTTP/1.1', 'Host: evil.example'), b'400'), (raw('GET http://evil.example/ HTTP/1.1'), b'400'), (raw('CONNECT evil.example:80 HTTP/1.1'), b'400'), (raw('GET / HTTP/1.1', 'Host: a.example', f'X: {KEY}'), b'403'), (raw('GET @evil.example/ HTTP/1.1'), b'400'), (raw('GET /x\\ HTTP/1.1', 'Host: a.example', 'Content-Length: 1', 'Content-Length: 2'), b'400')):
            assert (await g.ask(open_ + bad)).split(b'\r\n\r\n')[1].startswith(b'HTTP/1.1 ' + status)
        await settled(g)
        assert s.opened == 7 and len(s.heads) == 1 and [(r['method'], r['status']) for r in g.rows[:2]] == [('GET', 200), ('CONNECT', None)] and {k for k, _ in kinds(g)[1:]} == {False}

async def test_slow_names_of_one_sandbox_hold_two_threads_at_most():
    gone, busy = asyncio.Event(), []
    async def never(host): busy.append(host); await gone.wait(); return ['8.8.8.8']
    async with gated('.a.example', resolve=never, caps=G.Caps(connect_s=.05)) as g:
        out = await asyncio.gather(*(g.ask(raw(f'CONNECT x{i}.a.example:443 HTTP/1.1')) for i in range(8)))
        assert all(b'Egress: resolve' in o for o in out) and len(busy) == 2
        gone.set()

WORLD = Authority()  # whom the world outside trusts

@asynccontextmanager
async def secure_site(*names, does=None):
    "A site that speaks TLS, in the name of the first of `names`."
    s, ctx = Site(does), await WORLD.context(names[0])
    async with s: s.server.close(); s.server = await asyncio.start_server(s.serve, '127.0.0.1', s.port, ssl=ctx); yield s

async def ask_tls(g, host, data, *, trust=None, name=None, first=b''):
    "A request inside TLS in a tunnel through the gate; the TLS error, if there was one."
    r, w = await asyncio.open_connection('127.0.0.1', g.port)
    try:
        w.write(raw(f'CONNECT {host}:443 HTTP/1.1') + first)
        if not (head := await r.readuntil(b'\r\n\r\n')).startswith(b'HTTP/1.1 200'): return head + await r.read()
        await w.start_tls(trust or ssl.create_default_context(cadata=g.authority.pem), server_hostname=name or host)
        w.write(data); return await asyncio.wait_for(r.read(), 20)
    except (ConnectionError, ssl.SSLError) as e: return type(e).__name__.encode()
    finally: w.close()

async def test_a_list_may_ask_to_look_inside_TLS():
    page = brotli.compress(b'<div id="px-captcha">' + b'x' * 300)
    async def does(head, r, w): w.write(b'HTTP/1.1 403 No\r\nContent-Encoding: br\r\nContent-Length: %d\r\n\r\n' % len(page) + page if 'captcha' in head else b'HTTP/1.1 200 OK\r\n\r\nhello ' + (await r.readexactly(5))); await w.drain(); w.close()
    async with secure_site('a.example', does=does) as s, gated(f'a.example:443=127.0.0.1:{s.port}', inspect=True) as g:
        g.trust = ssl.create_default_context(cadata=WORLD.pem)
        out = await ask_tls(g, 'a.example', raw('POST /q HTTP/1.1', 'Host: a.example', 'Content-Length: 5') + b'world')
        assert out.startswith(b'HTTP/1.1 200 OK\r\n') and out.endswith(b'hello world') and s.heads == ['POST /q HTTP/1.1\r\nHost: a.example\r\nContent-Length: 5\r\nConnection: close\r\n\r\n']
        assert (await ask_tls(g, 'a.example', raw('GET /captcha HTTP/1.1', 'Host: a.example'))).endswith(page)
        for bad, status in ((raw('GET / HTTP/1.1', 'Host: evil.example'), b'400'), (raw('GET / HTTP/1.1', f'Authorization: Bearer {KEY}'), b'403'), (raw('GET / HTTP/1.1', 'X: ' + 'x' * 70_000), b'431'), (raw('POST / HTTP/1.1', 'Content-Length: 1', 'Transfer-Encoding: chunked'), b'400')):
            assert (await ask_tls(g, 'a.example', bad)).startswith(b'HTTP/1.1 ' + status)
        await settled(g)
        assert [(r['method'], r['port'], r['status'], r['captcha'], r['error']) for r in g.rows] == [('POST', 443, 200, '', ''), ('GET', 443, 403, 'perimeterx', '')] + [('CONNECT', 443, None, '', k) for k in ('request', 'secret', 'size', 'request')]
        assert len(s.heads) == 2 and KEY not in json.dumps(g.record()) and (g.record()['seen'], g.record()['captcha']) == (2, 1)

async def test_looking_inside_trusts_nobody_it_should_not():
    async with secure_site('other.example') as s, gated(f'a.example:443=127.0.0.1:{s.port}', inspect=True) as g:
        assert b'Egress: connect' in await ask_tls(g, 'a.example', b'')             # an authority that nobody knows
        g.trust = ssl.create_default_context(cadata=WORLD.pem)
        assert b'Egress: connect' in await ask_tls(g, 'a.example', b'')             # the certificate of another host
        assert s.heads == []
    async with secure_site('a.example') as s, gated(f'a.example:443=127.0.0.1:{s.port}', inspect=True) as g:
        g.trust = ssl.create_default_context(cadata=WORLD.pem)
        assert b'SSL' in await ask_tls(g, 'a.example', b'', trust=ssl.create_default_context(cadata=WORLD.pem))   # a client that doesn't know the run's authority
        assert await ask_tls(g, 'a.example', b'', name='evil.example') in (b'ConnectionResetError', b'ConnectionAbortedError', b'SSLEOFError')
        await settled(g)
        assert s.heads == [] and kinds(g) == [(True, 'closed'), (False, 'sni')]

# ---- rollouts ----------------------------------------------------------------------------------------------------------

REAL = Limits(cpus=2, memory_mb=1024, pids=64, disk_mb=64, seconds=60)
def sh(command): return '<tool_call>' + json.dumps({'name': 'bash', 'arguments': {'command': command}}) + '</tool_call>'
CURLS = [sh(f'curl -sS -m 20 -w " [%{{http_code}}]" {url}') for url in ('http://search.example/q', 'https://evil.example/', 'http://169.254.169.254/latest/meta-data/')] + \
        [sh('python3 -c "import socket; socket.create_connection((\'192.0.2.1\', 80), 5)" 2>&1 | tail -1'), sh('curl -sS -m 20 --noproxy "*" http://127.0.0.1:8000/v1/models; env | grep -i -c _proxy='), 'done']

async def play(tmp_path, backend, task, replies, name='calls.db'):
    store = Store.open(str(tmp_path/name))
    async with Proxy(ScriptEngine(replies), store) as proxy:
        r, = await run_rollouts([Job(task, 'react', group='g')], proxy=proxy, store=store, backend=backend, limits=REAL, progress=False)
    again = store.rollout(r.rollout_id); store.close()
    return r, again

def works(backend):
    why = asyncio.run(probe(backend))
    return pytest.mark.skipif(bool(why), reason=why)
BWRAP = pytest.param('bwrap', marks=works('bwrap'))

@pytest.mark.parametrize('backend', [BWRAP, pytest.param('podman', marks=pytest.mark.podman), 'process'])
async def test_an_agent_reaches_what_its_list_names_and_nothing_else(tmp_path, monkeypatch, backend):
    async with Site(site_says('HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nresults')) as s:
        monkeypatch.setenv('CLAWLAB_EGRESS_SEARCH', f'search.example=127.0.0.1:{s.port}')
        r, again = await play(tmp_path, backend, replace(TASKS['test-copy-1-0'], egress='search'), CURLS if backend != 'process' else [*CURLS[:3], 'done'])
    assert r.outcome == 'ok', r.meta
    said = [m.content for m in r.calls[-1].messages if m.role == 'tool']
    assert 'results [200]' in said[0] and '403' in said[1] and "169.254.169.254 is not in the list 'search'" in said[2] and '[403]' in said[2]
    if backend != 'process': assert 'unreachable' in said[3] and 'invalid API key' in said[4] and said[4].rstrip().endswith('7')
    rec = again.meta['egress']
    assert [(x['method'], x['host'], x['port'], x['allowed'], x['status'], x['error']) for x in rec['rows']] == [('GET', 'search.example', 80, True, 200, ''), ('CONNECT', 'evil.example', 443, False, None, 'host'), ('GET', '169.254.169.254', 80, False, None, 'host')]
    assert (rec['list'], rec['requests'], rec['refused'], rec['blocked'], rec['seen'], rec['captcha']) == ('search', 3, 2, 2, 1, 0) and len(s.heads) == 1
    b = behavior(again)
    assert (b['egress'], round(b['blocked'], 2), b['captcha']) == (3, .67, 0.)

@pytest.mark.parametrize('backend', [BWRAP, pytest.param('podman', marks=pytest.mark.podman)])
async def test_an_agent_whose_list_is_looked_into_notices_nothing(tmp_path, monkeypatch, backend):
    "curl and Python's own client trust the run's authority; the status of what they asked for is on record."
    monkeypatch.setattr(G, 'trust', lambda: ssl.create_default_context(cadata=WORLD.pem))
    async with secure_site('search.example', does=site_says('HTTP/1.1 429 Slow\r\nContent-Length: 7\r\n\r\nresults')) as s:
        monkeypatch.setenv('CLAWLAB_EGRESS_SEARCH', f'search.example:443=127.0.0.1:{s.port}, tls=inspect')
        python = 'python3 -c "import urllib.request as u; print(u.urlopen(\'https://search.example/\').status)" 2>&1 | tail -1'
        r, again = await play(tmp_path, backend, replace(TASKS['test-copy-1-0'], egress='search'), [sh('curl -sS -m 20 -w " [%{http_code}]" https://search.example/q'), sh(python), sh('ls -A; grep -c PRIVATE ~/.config/clawlab/* || true'), 'done'])
    said = [m.content for m in r.calls[-1].messages if m.role == 'tool']
    assert 'results [429]' in said[0] and 'HTTP Error 429' in said[1] and 'clawlab' not in said[2] and said[2].split()[-1] == '0', said
    assert [(x['method'], x['port'], x['status']) for x in again.meta['egress']['rows']] == [('GET', 443, 429)]*2 and again.meta['egress']['blocked'] == 2

@pytest.mark.parametrize('backend', [BWRAP])
async def test_without_a_list_there_is_no_gate(tmp_path, backend):
    r, again = await play(tmp_path, backend, TASKS['test-copy-1-0'], [sh('env | grep -i -c _proxy='), sh('curl -sS -m 9 -x http://127.0.0.1:8000 http://search.example/ -w "[%{http_code}]"'), sh('curl -sS -m 9 -p -x http://127.0.0.1:8000 http://search.example/; echo $?'), 'done'])
    said = [m.content for m in r.calls[-1].messages if m.role == 'tool']
    assert said[0].split()[0] == '0' and '[401]' in said[1] and 'egress' not in again.meta and behavior(again)['egress'] is None, said

async def test_an_unknown_list_stops_a_run_before_it_starts(tmp_path):
    with pytest.raises(InputError, match="no egress list 'nothing'"): await play(tmp_path, 'process', replace(TASKS['test-copy-1-0'], egress='nothing'), ['done'])

def test_the_command_line_names_a_list(tmp_path, monkeypatch, capsys):
    from clawlab.cli import main
    args = ['rollout', '--tasks', 'nano', '--harness', 'react', '--engine', 'oracle', '--sandbox', 'process', '--store', str(tmp_path/'x.db')]
    assert main([*args, '--egress', 'nothing']) == 2 and capsys.readouterr().err.strip().splitlines()[-1].startswith("clawlab: no egress list 'nothing'")
    monkeypatch.setenv('CLAWLAB_EGRESS_SEARCH', 'search.example')
    assert main([*args, '--egress', 'search']) == 0
    with Store.open(str(tmp_path/'x.db')) as st: r, = st.rollouts()
    assert r.meta['egress'] == dict(list='search', requests=0, refused=0, blocked=0, seen=0, captcha=0, up=0, down=0, rows=[], rows_lost=0) and behavior(r)['egress'] == 0 and behavior(r)['blocked'] is None

def test_a_suite_names_a_list(tmp_path):
    (tmp_path/'verify.py').write_text('def verify(w, e): return 1.0\n')
    line = dict(task_id='a', family='f', instruction='Do.', files={}, steps=['true'], egress='search')
    (tmp_path/'train.jsonl').write_text(json.dumps(line) + '\n')
    assert load_suite(tmp_path)['a'].egress == 'search'
    (tmp_path/'train.jsonl').write_text(json.dumps(line | dict(egress='../x')) + '\n')
    with pytest.raises(InputError, match='egress'): load_suite(tmp_path)

async def test_on_a_shared_port_the_key_says_whose_list_it_is(tmp_path, monkeypatch):
    "As on a cluster: one port for all; two sessions with lists, one without, a stranger; a key that is revoked opens nothing."
    from base64 import b64encode
    from clawlab.records import Rollout
    monkeypatch.setenv('CLAWLAB_EGRESS_ONE', 'one.example=127.0.0.1:1'); monkeypatch.setenv('CLAWLAB_EGRESS_TWO', 'two.example=127.0.0.1:1')
    store = Store.open(str(tmp_path/'x.db'))
    async with await Proxy(ScriptEngine(['hi']), store).start(kind=G.shared(G.Caps(head_s=5))) as proxy:
        keys = [(await proxy.open_session(Rollout(f'r{k}', 't', 'h'))).api_key for k in range(3)]
        one, two = G.open_gate('one', keys[0]), G.open_gate('two', keys[1])
        async def ask(key, host, scheme='Basic'):
            r, w = await asyncio.open_connection('127.0.0.1', proxy.port)
            w.write(raw(f'CONNECT {host}:80 HTTP/1.1', f'Proxy-Authorization: {scheme} ' + b64encode(f'clawlab:{key}'.encode()).decode())); out = await r.read(); w.close()
            return out.split()[1].decode(), (out.split(b'Egress: ')[1].split(b'\r\n')[0]).decode()
        assert await ask(keys[0], 'one.example') == ('502', 'connect') and await ask(keys[0], 'two.example') == ('403', 'host') and await ask(keys[1], 'two.example') == ('502', 'connect')
        for k in (keys[2], 'sk-clawlab-guess', '', '\xff'): assert await ask(k, 'one.example') == ('407', 'key')
        assert await ask(keys[0], 'one.example', 'Bearer') == ('407', 'key')
        import aiohttp
        async with aiohttp.ClientSession() as c:
            assert (await c.get(f'http://127.0.0.1:{proxy.port}/v1/models', headers={'Authorization': f'Bearer {keys[2]}'})).status == 200
            assert (await c.get('http://one.example/', proxy=f'http://127.0.0.1:{proxy.port}', proxy_auth=aiohttp.BasicAuth('clawlab', keys[0]))).status == 502
        await one.close()
        assert await ask(keys[0], 'one.example') == ('407', 'key') and [r['error'] for r in two.rows] == ['connect'] and [r['error'] for r in one.rows] == ['connect', 'host', 'connect']
        assert one.env('http://127.0.0.1:8000', '/home/agent', True)['https_proxy'] == f'http://clawlab:{keys[0]}@127.0.0.1:8000' and keys[0] not in json.dumps(one.record())
        await two.close()
    store.close()

@pytest.mark.harness
@pytest.mark.parametrize('name', [pytest.param(n, marks=[works('bwrap'), pytest.mark.skipif(not load(n).installed, reason=f'{n} is not installed'), *[pytest.mark.heavy, pytest.mark.harness]*(n == 'openclaw')]) for n in ('claude-code', 'mini-swe-agent', 'codex', 'openclaw')])
async def test_a_harness_with_a_list_still_finds_its_model(tmp_path, monkeypatch, name):
    "Its own calls don't go through the gate; what else it wants of the world is refused and on record."
    from clawlab.capture.engines.oracle import OracleEngine
    monkeypatch.setenv('CLAWLAB_EGRESS_SEARCH', 'search.example')
    task, store = replace(TASKS['test-copy-1-0'], egress='search'), Store.open(str(tmp_path/'calls.db'))
    async with Proxy(OracleEngine(TASKS), store) as proxy:
        r, = await run_rollouts([Job(task, name, group='g')], proxy=proxy, store=store, backend='bwrap', limits=replace(REAL, memory_mb=4096, pids=256, disk_mb=256, seconds=280), progress=False)
    store.close()
    assert (r.outcome, r.reward) == ('ok', 1.0) and not any(x['allowed'] or x['host'] == '127.0.0.1' for x in r.meta['egress']['rows']), r.meta

def test_the_behaviour_table_has_these_rows_where_somebody_could_go_outside():
    from clawlab.study.behavior import chat_rollout, summarise
    from clawlab.study.report import behavior_html
    run = chat_rollout([('ls', '', False), ('done', None, False)])
    out = replace(run, meta=dict(egress=dict(requests=4, blocked=1, seen=2, captcha=1)))
    shown = lambda *rs: behavior_html(dict(behavior={'sft': {'react': summarise([behavior(r) for r in rs], n_boot=50)}}))
    assert 'to the outside' not in shown(run) and 'proof of a human' not in shown(run)
    assert all(x in shown(run, out) for x in ('to the outside', '4.00', '1 of 2', 'blocked', '0.25', 'proof of a human', '0.50'))
