"The one client of other people's models, against a server that is busy, slow, gone, endless, indiscreet, or no such server at all."
import asyncio, json
from contextlib import asynccontextmanager
import pytest
from aiohttp import web
from clawlab.launch import endpoint as E
from clawlab.launch.endpoint import Endpoint, Fault, endpoint
from clawlab.records import InputError

class Server:
    "Answers in turn, `(status, body, headers)` or a text in a chat completion or a coroutine function; the last one again and again."
    def __init__(self, *script): self.script, self.asked, self.heads, self.open, self.most = list(script), [], [], 0, 0
    async def __call__(self, request):
        self.asked.append(await request.json()); self.heads.append(request.headers)
        self.open += 1; self.most = max(self.most, self.open)
        try:
            r = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            if callable(r): r = await r(self.asked[-1])
            status, body, headers = r if isinstance(r, tuple) else (200, says(r), {})
            if body is None: request.transport.close(); return web.Response()
            return web.Response(status=status, body=body, headers=headers)
        finally: self.open -= 1

def says(text, end='stop', **m): return json.dumps(dict(choices=[dict(message=dict(content=text, **m), finish_reason=end)], usage=dict(completion_tokens=3))).encode()
def vectors(body): return json.dumps(dict(data=[dict(index=i, embedding=[len(t), 1.]) for i, t in reversed([*enumerate(body['input'])])])).encode()

@asynccontextmanager
async def serving(*script, key='', **kw):
    "An endpoint and the server behind it."
    app = web.Application(); app.router.add_post('/{path:.*}', server := Server(*script))
    runner = web.AppRunner(app); await runner.setup(); await web.TCPSite(runner, '127.0.0.1', 0).start()
    try:
        async with Endpoint(f'http://127.0.0.1:{runner.addresses[0][1]}/v1/', 'm', key, **{'seconds': 20., **kw}) as e: yield e, server
    finally: await runner.cleanup()

@pytest.fixture(autouse=True)
def no_pause(monkeypatch): monkeypatch.setattr(E, 'PAUSE', .001)

async def test_a_chat():
    async with serving('Hello.', key='KEY-1') as (e, server):
        assert await e.chat([dict(role='user', content='Hi \udce9')], temperature=0) == 'Hello.' and 'KEY-1' not in repr(e)
        assert server.asked == [dict(model='m', messages=[dict(role='user', content='Hi \udce9')], temperature=0)] and server.heads[0]['authorization'] == 'Bearer KEY-1' and e.asked == dict(calls=1, retries=0, tokens=3)

PASSES = {'500': (500, b'x', {}), '503': (503, b'x', {}), '429': (429, b'slow', {'retry-after': '0'}), '429 with a date': (429, b'slow', {'retry-after': 'Wed, 21 Oct 2015 07:28:00 GMT'}), '429 with nonsense': (429, b'slow', {'retry-after': 'soon'}), 'lost': (200, None, {})}

@pytest.mark.parametrize('fault', PASSES)
async def test_what_passes_is_tried_again_and_what_stays_is_a_fault(fault):
    async with serving(PASSES[fault], PASSES[fault], 'Hello.') as (e, server):
        assert await e.chat([]) == 'Hello.' and len(server.asked) == e.asked['calls'] == 3 and e.asked['retries'] == 2
    async with serving(PASSES[fault], tries=3) as (e, server):
        with pytest.raises(Fault, match=e.url) as f: await e.chat([])
        assert (f.value.again, f.value.answered, len(server.asked)) == (True, False, 3) and '\n' not in str(f.value)
        with pytest.raises(Fault): await e.chat([], tries=1)
        assert len(server.asked) == 4

@pytest.mark.parametrize('status', [400, 401, 403, 404, 422, 307])
async def test_what_will_not_pass_is_asked_once_and_the_key_goes_nowhere_else(status):
    async with serving((status, b'no such key: KEY-1\nhelp', {'location': '/elsewhere'}), key='KEY-1') as (e, server):
        with pytest.raises(Fault, match=f'HTTP {status}: no such key: ...') as f: await e.chat([])
        assert len(server.asked) == 1 and not f.value.again and 'KEY-1' not in str(f.value) and '\n' not in str(f.value)

@pytest.mark.parametrize('body,why', [(b'<html>', 'not an answer'), (b'', 'not an answer'), (b'['*100_000, 'not an answer'), (b'{"choices": []}', 'not a chat completion'), (b'[]', 'not a chat completion'), (says(None), 'no text'), (says('', refusal='I\nwill not'), 'declined: I will not'), (says('', 'content_filter'), 'declined'), (says('Hel', 'length'), 'cut off'), (b'{"x": "' + b'x'*200_000, 'more than 200000')])
async def test_an_answer_of_no_use_is_left_to_the_caller(body, why, monkeypatch):
    monkeypatch.setattr(E, 'MOST', 200_000)
    async with serving((200, body, {})) as (e, server):
        with pytest.raises(Fault, match=why) as f: await e.chat([])
        assert f.value.answered and f.value.again and len(server.asked) == 1 and '\n' not in str(f.value)

async def test_a_slow_answer_nobody_there_and_no_such_host():
    never = asyncio.Event()
    async def slow(_): await never.wait()
    async with serving(slow, 'Hello.', seconds=.3) as (e, _): assert await e.chat([]) == 'Hello.' and e.asked['retries'] == 1; never.set()
    async with Endpoint('http://127.0.0.1:1/v1', 'm', tries=2) as e:
        with pytest.raises(Fault, match='127.0.0.1:1/v1: ClientConnectorError') as f: await e.chat([])
        assert f.value.again and e.asked['calls'] == 2

async def test_pauses_grow_and_a_server_may_ask_for_longer_within_reason(monkeypatch):
    waits, sleep = [], asyncio.sleep
    async def note(s): waits.append(s); await sleep(0)
    monkeypatch.setattr(E.asyncio, 'sleep', note); monkeypatch.setattr(E, 'PAUSE', 1.)
    async with serving((500, b'', {}), (500, b'', {}), (429, b'', {'retry-after': '7'}), (429, b'', {'retry-after': '86400'}), (429, b'', {'retry-after': 'nan'}), 'Hello.', tries=6) as (e, _): await e.chat([])
    got = [w for w in waits if w > .5]
    assert len(got) == 5 and .7 <= got[0] <= 1 and 1.4 <= got[1] <= 2 and got[2] == 7 and got[3] == 60 and 11.2 <= got[4] <= 16, got

async def test_requests_are_bounded_and_side_by_side():
    here, go = [], asyncio.Event()
    async def wait(_):
        here.append(1)
        if len(here) == 3: go.set()
        await asyncio.wait_for(go.wait(), 10); return 'Hello.'
    async with serving(wait, at_once=3) as (e, server):
        await asyncio.gather(*(e.chat([dict(role='user', content=str(i))]) for i in range(9)))
        assert server.most == 3 and len(server.asked) == 9

async def test_embeddings_come_in_order_in_batches_and_all_of_them():
    async def good(body): return 200, vectors(body), {}
    async with serving((503, b'', {}), good) as (e, server):
        assert await e.embeddings(['x'*i for i in range(130)]) == [[i, 1.] for i in range(130)]
        assert [len(b['input']) for b in server.asked] == [64, 64, 64, 2]
    for rows in ([], [(0, [1.])], [(0, [1.]), (0, [1.])], [(0, [1.]), (1, [float('nan')])], [(0, [1.]), (1, [1., 2.])], [(0, []), (1, [])], [(0, None), (1, None)], [(0, [1.]), (1, [1.]), (2, [1.])], [(0, ['x']), (1, ['x'])]):
        async with serving((200, json.dumps(dict(data=[dict(index=i, embedding=v) for i, v in rows])).encode(), {})) as (e, server):
            with pytest.raises(Fault, match='not an answer') as f: await e.embeddings(['a', 'b'])
            assert len(server.asked) == 1 and f.value.answered and not f.value.again

def test_an_endpoint_is_opened_again_in_another_loop():
    async def go():
        async with serving('Hello.', at_once=1) as (e, _):
            await asyncio.gather(*(e.chat([]) for _ in range(3))); return e
    async def again(e):
        async with e:
            with pytest.raises(Fault, match='ClientConnectorError'): await asyncio.gather(*(e.chat([], tries=1) for _ in range(3)))
    asyncio.run(again(asyncio.run(go())))

@pytest.mark.parametrize('url,model,says', [('ftp://x', 'm', 'no address'), ('', 'm', 'no address'), ('http://x/v1', '', 'which model'), ('http://me:sk-1@x/v1', 'm', 'key_env'), ('ftp://me:sk-1@x/v1', 'm', 'key_env'), ('http://x/v1?key=sk-1', 'm', 'key_env')])
def test_an_address_is_one_and_holds_no_secret(url, model, says, monkeypatch):
    for section in ('judge', 'embed', 'proposer'):
        for k in ('URL', 'MODEL', 'KEY_ENV'): monkeypatch.setenv(f'CLAWLAB_{section}_{k}'.upper(), '')
        with pytest.raises(InputError, match=rf'\[{section}\] .*{says}') as e: endpoint(section, url, model)
        assert 'sk-1' not in str(e.value) and '\n' not in str(e.value)

@pytest.mark.parametrize('section', ['judge', 'embed', 'proposer'])
def test_every_section_is_read_alike(section, monkeypatch):
    for k, v in dict(URL='https://x/v1/', MODEL='m', KEY_ENV='MY_KEY').items(): monkeypatch.setenv(f'CLAWLAB_{section}_{k}'.upper(), v)
    for missing in (None, '', ' \n'):
        if missing is None: monkeypatch.delenv('MY_KEY', raising=False)
        else: monkeypatch.setenv('MY_KEY', missing)
        with pytest.raises(InputError, match=rf'\[{section}\] key_env = MY_KEY: there is no such'): endpoint(section)
    monkeypatch.setenv('MY_KEY', 'sk-1\r\nX-Evil: 1')
    with pytest.raises(InputError, match='no header can') as e: endpoint(section)
    assert 'sk-1' not in str(e.value)
    monkeypatch.setenv('MY_KEY', 'K1\n'); e, other = endpoint(section), endpoint(section, 'http://y/v1', 'n', tries=2)
    assert (e.url, e.model, e.key) == ('https://x/v1', 'm', 'K1') and (other.url, other.model, other.key, other.tries) == ('http://y/v1', 'n', 'K1', 2)
