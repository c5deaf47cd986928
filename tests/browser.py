"""A real Chromium, driven over its debugging protocol with aiohttp: no driver, no further dependency."""
import asyncio, contextlib, json, os, shutil, tempfile
from itertools import count
import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
_KEYS = {'Enter': 13, 'Escape': 27, 'ArrowDown': 40, 'ArrowUp': 38}

class Tab:
    "One tab: what it logged (`errors`) and what it asked the network for (`requests`)."
    def __init__(self, ws): self.ws, self.n, self.wait, self.errors, self.sent = ws, count(1), {}, [], {}
    @property
    def requests(self): return list(self.sent.values())

    async def listen(self):
        async for msg in self.ws:
            d = json.loads(msg.data); p = d.get('params', {})
            if d.get('id') in self.wait: self.wait.pop(d['id']).set_result(d)
            elif d.get('method') == 'Runtime.exceptionThrown': self.errors.append(p['exceptionDetails'].get('exception', {}).get('description') or p['exceptionDetails']['text'])
            elif d.get('method') == 'Runtime.consoleAPICalled': self.errors.append(f"console.{p['type']}: " + ' '.join(str(a.get('value', a.get('description'))) for a in p['args']))
            elif d.get('method') == 'Log.entryAdded': self.errors.append(p['entry']['text'])
            elif d.get('method') == 'Page.javascriptDialogOpening': self.errors.append('dialog: ' + p['message']); asyncio.ensure_future(self('Page.handleJavaScriptDialog', accept=False))
            elif d.get('method') == 'Network.requestWillBeSent': self.sent[p['requestId']] = p['request']['url']
            elif d.get('method') == 'Network.loadingFailed' and p.get('blockedReason') == 'csp': self.sent.pop(p['requestId'], None)   # announced, and never made
        for f in self.wait.values(): f.cancel()

    async def __call__(self, method, **params):
        n = next(self.n); f = self.wait[n] = asyncio.get_running_loop().create_future()
        await self.ws.send_json(dict(id=n, method=method, params=params))
        d = await asyncio.wait_for(f, 60)
        if 'error' in d: raise RuntimeError(f"{method}: {d['error']}")
        return d['result']

    async def js(self, code: str):
        "Value of an expression (a promise is awaited)."
        r = await self('Runtime.evaluate', expression=code, awaitPromise=True, returnByValue=True)
        if 'exceptionDetails' in r: raise RuntimeError(r['exceptionDetails'].get('exception', {}).get('description') or r['exceptionDetails']['text'])
        return r['result'].get('value')

    async def until(self, code: str):
        "Wait, in the page, until an expression is true there; frame by frame."
        return await self.js(f"new Promise((ok, no) => {{ let n = 0; const f = () => {{ const v = ({code}); v ? ok(v) : ++n > 1500 ? no(Error({json.dumps(code)})) : setTimeout(f, 10) }}; f() }})")

    async def open(self, path, at=''):
        await self('Page.navigate', url='about:blank')
        await self('Page.navigate', url=f'file://{path}{at}'); await self.until("location.protocol === 'file:' && document.body && document.body.dataset.ready")

    async def click(self, selector: str):
        "A real click into the middle of an element."
        x, y = await self.js(f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect(); return [r.x + Math.min(r.width / 2, 60), r.y + r.height / 2] }})(document.querySelector({json.dumps(selector)}))")
        for kind in ('mousePressed', 'mouseReleased'): await self('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left', clickCount=1)

    async def key(self, *keys: str):
        for k in keys:
            one = dict(key=k, text=k) if len(k) == 1 else dict(key=k, windowsVirtualKeyCode=_KEYS[k])
            await self('Input.dispatchKeyEvent', type='keyDown', **one); await self('Input.dispatchKeyEvent', type='keyUp', key=k)

    async def look(self, width=1280, height=800, dark=False, mobile=False):
        await self('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        await self('Emulation.setEmulatedMedia', features=[dict(name='prefers-color-scheme', value='dark' if dark else 'light')])

@contextlib.asynccontextmanager
async def browser():
    "A headless Chromium with an empty profile; yields its tab."
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        p = await asyncio.create_subprocess_exec(CHROMIUM, '--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--remote-debugging-port=0', f'--user-data-dir={home}', '--no-first-run',
            '--disable-background-networking', '--disable-component-update', '--disable-sync', 'about:blank', stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env={**os.environ, 'HOME': home})
        try:
            async def address():
                async for line in p.stderr:
                    if b'DevTools listening on ' in line: return line.split(b'listening on ')[1].decode().strip()
                raise RuntimeError('Chromium ended before it listened')
            url = await asyncio.wait_for(address(), 60); drain = asyncio.ensure_future(p.stderr.read())
            async with aiohttp.ClientSession() as s:
                port = url.split('/')[2]
                async with s.get(f'http://{port}/json') as r: target = next(t for t in await r.json(content_type=None) if t['type'] == 'page')
                async with s.ws_connect(target['webSocketDebuggerUrl'], max_msg_size=0) as ws:
                    tab = Tab(ws); ear = asyncio.ensure_future(tab.listen())
                    for d in ('Page', 'Runtime', 'Log', 'Network'): await tab(f'{d}.enable')
                    yield tab
                    ear.cancel()
            drain.cancel()
        finally:
            if p.returncode is None: p.kill()
            await p.wait()
