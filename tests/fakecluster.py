"""A cluster that fits into a test: an API server for pods, and a node whose pods are bubblewrap namespaces. It knows lists, watches, exec over websockets, quotas on request, and how to go away; it
caps neither memory nor processor. What only a real cluster does is in test_kubernetes.py."""
import asyncio, json, os
from pathlib import Path
from aiohttp import WSMsgType, web

LINKS = [x for d in ('bin', 'sbin', 'lib', 'lib64') for x in ('--symlink', f'usr/{d}', f'/{d}')]

def megabytes(text): return int(text.removesuffix('Mi')) << 20

class Cluster:
    "`async with` serves it; `refuse` is what the next requests to make pods get, as (status, message)."
    def __init__(self, folder): self.dir, self.pods, self.procs, self.log, self.version, self.queues, self.streams, self.refuse, self.asked, self.execs, self.tasks, self.closed = Path(folder), {}, {}, [], 0, [], set(), [], [], 0, set(), False

    # serving, and going away
    async def __aenter__(self):
        for f, text in (('passwd', 'root:x:0:0:::\nagent:x:1000:1000::/home/agent:/bin/bash\n'), ('group', 'root:x:0:\nagent:x:1000:\n'), ('hosts', '127.0.0.1 localhost\n')):
            (self.dir/'etc').mkdir(exist_ok=True); (self.dir/'etc'/f).write_text(text)
        app = web.Application(client_max_size=1 << 30)
        at = '/api/v1/namespaces/{ns}'
        app.add_routes([web.post(at + '/pods', self.create), web.get(at + '/pods', self.list), web.delete(at + '/pods/{name}', self.delete), web.get(at + '/pods/{name}/exec', self.exec), web.get(at + '/events', self.events)])
        self.runner = web.AppRunner(app, shutdown_timeout=0); await self.runner.setup()
        self.site = web.TCPSite(self.runner, '127.0.0.1', 0); await self.site.start()
        self.port = self.site._server.sockets[0].getsockname()[1]
        (self.dir/'config').write_text(json.dumps(dict(apiVersion='v1', kind='Config', clusters=[dict(name='c', cluster=dict(server=f'http://127.0.0.1:{self.port}'))], users=[dict(name='u', user=dict(token='t'))],
                                                       contexts=[dict(name='x', context=dict(cluster='c', user='u'))], **{'current-context': 'x'})))
        return self
    async def __aexit__(self, *_):
        self.closed = True
        for name in list(self.pods): await self.end(name)
        while self.tasks: await asyncio.wait(self.tasks)
        await self.cut(); await self.site.stop(); await self.runner.cleanup()
    async def cut(self):
        "Break every connection."
        for s in list(self.streams): s.cancel()
        for q in self.queues: q.put_nowait(None)
        await asyncio.sleep(0)
    async def away(self, seconds):
        "The API server is gone for a while; the node and its pods go on."
        await self.site.stop(); await self.cut()
        for t in list(self.runner.server.connections): t.force_close(); t.transport and t.transport.abort()
        await asyncio.sleep(seconds)
        self.site = web.TCPSite(self.runner, '127.0.0.1', self.port, reuse_address=True); await self.site.start()

    # objects
    def note(self, kind, pod):
        self.version += 1; pod['metadata']['resourceVersion'] = str(self.version)
        change = json.dumps(dict(type=kind, object=pod)).encode() + b'\n'
        self.log.append((self.version, change))
        for q in self.queues: q.put_nowait(change)
    def matches(self, q, pod):
        return all(pod['metadata'].get('labels', {}).get(k) == v if eq else k in pod['metadata'].get('labels', {}) for k, eq, v in (t.partition('=') for t in q.query.get('labelSelector', '').split(',') if t))
    async def create(self, q):
        pod = await q.json()
        self.asked.append(pod)
        if self.closed: raise web.HTTPServiceUnavailable()
        if self.refuse: status, message = self.refuse.pop(0); return web.json_response(dict(message=message, reason='Forbidden'), status=status)
        name = pod['metadata']['name']
        if name in self.pods: return web.json_response(dict(message=f'pods "{name}" already exists', reason='AlreadyExists'), status=409)
        pod['status'] = dict(phase='Pending'); self.pods[name] = pod; self.note('ADDED', pod)
        self.tasks.add(t := asyncio.ensure_future(self.run(name))); t.add_done_callback(self.tasks.discard)
        return web.json_response(pod, status=201)
    async def list(self, q):
        if q.query.get('watch'): return await self.watch(q)
        return web.json_response(dict(items=[p for p in self.pods.values() if self.matches(q, p)], metadata=dict(resourceVersion=str(self.version))))
    async def watch(self, q):
        r = web.StreamResponse(); await r.prepare(q)
        queue = asyncio.Queue(); self.queues.append(queue)
        for v, change in self.log:
            if v > int(q.query['resourceVersion']): queue.put_nowait(change)
        try:
            while (change := await queue.get()): await r.write(change)
        finally: self.queues.remove(queue)
        return r
    async def delete(self, q):
        name = q.match_info['name']
        if name not in self.pods: return web.json_response(dict(message='not found', reason='NotFound'), status=404)
        await self.end(name)
        return web.json_response({})
    async def events(self, q): return web.json_response(dict(items=[dict(reason='Killing', message='as asked')]))

    # the node
    async def run(self, name):
        pod = self.pods[name]; box = pod['spec']['containers'][0]
        volumes = {v['name']: v for v in pod['spec']['volumes']}
        args = []
        for m in box['volumeMounts']:
            v = volumes[m['name']]
            args += ['--ro-bind', v['hostPath']['path'], m['mountPath']] if 'hostPath' in v else ['--size', str(megabytes(v['emptyDir'].get('sizeLimit', '1024Mi'))), '--tmpfs', m['mountPath']]
        r, w = os.pipe()
        p = await asyncio.create_subprocess_exec('bwrap', '--unshare-all', '--unshare-user', '--uid', '1000', '--gid', '1000', '--hostname', pod['spec']['hostname'], '--cap-drop', 'ALL', '--new-session', '--die-with-parent', '--as-pid-1', '--clearenv',
            '--info-fd', str(w), '--ro-bind', '/usr', '/usr', *LINKS, '--ro-bind', str(self.dir/'etc'), '/etc', '--proc', '/proc', '--dev', '/dev', '--perms', '1777', '--size', str(64 << 20), '--tmpfs', '/dev/shm', '--symlink', '/tmp', '/var/tmp',
            *args, '--remount-ro', '/dev', '--remount-ro', '/', *box['command'], pass_fds=[w], stdin=asyncio.subprocess.DEVNULL)
        os.close(w)
        with os.fdopen(r) as f: info = await asyncio.to_thread(f.read)
        pid = json.loads(info or '{}').get('child-pid')
        try:
            while p.returncode is None and not Path(f'/proc/{pid}/cmdline').read_bytes().startswith(b'/usr/bin/python3'): await asyncio.sleep(.01)  # bubblewrap is still at work
        except OSError: pass  # it has ended already
        self.procs[name] = p, pid
        if name not in self.pods: self.procs.pop(name)[0].kill(); await p.wait(); return  # deleted on its way
        pod['status'] = dict(phase='Running', containerStatuses=[dict(name='sandbox', state={'running': {}})]); self.note('MODIFIED', pod)
        code = await p.wait()
        if name in self.pods: pod['status'] = pod['status'] | dict(phase='Failed', containerStatuses=[dict(name='sandbox', state={'terminated': dict(reason='Error', exitCode=code)})]); self.note('MODIFIED', pod)
    async def end(self, name, **status):
        "Kill a pod and forget it."
        pod = self.pods.pop(name)
        if name in self.procs:
            p, _ = self.procs.pop(name)
            if p.returncode is None: p.kill(); await p.wait()
        pod['status'] |= status
        pod['metadata']['deletionTimestamp'] = 'now'; self.note('DELETED', pod)
    async def exec(self, q):
        name = q.match_info['name']
        if name not in self.procs: return web.json_response(dict(message='not running'), status=404)
        ws = web.WebSocketResponse(protocols=('v4.channel.k8s.io',)); await ws.prepare(q)
        self.execs += 1
        p = await asyncio.create_subprocess_exec('nsenter', '-t', str(self.procs[name][1]), '-a', '-S', '1000', '-G', '1000', *q.query.getall('command'), stdin=-1, stdout=-1, stderr=-1)
        async def out(pipe, n):
            while b := await pipe.read(1 << 16): await ws.send_bytes(bytes([n]) + b)
        async def inward():
            async for m in ws:
                if m.type == WSMsgType.BINARY and m.data[:1] == b'\0': p.stdin.write(m.data[1:]); await p.stdin.drain()
        tasks = [asyncio.ensure_future(x) for x in (out(p.stdout, 1), out(p.stderr, 2), inward())]
        self.streams |= set(tasks)
        try: await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for t in tasks: t.cancel()
            self.streams -= set(tasks)
            if p.returncode is None: p.stdin.close(); p.kill() if p.returncode is None else None; await p.wait()
            await ws.close()
        return ws
