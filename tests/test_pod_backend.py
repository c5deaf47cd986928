"""The Kubernetes backend on a cluster made of bubblewrap (fakecluster.py): the shared conformance suite, and what happens when the API server, a connection or a pod goes away. Memory and processor caps need a real node."""
import asyncio, os, tempfile
from pathlib import Path
import pytest
from clawlab.records import InputError, SandboxError
from clawlab.launch.sandbox import kubernetes, pods
from clawlab.launch.sandbox.base import Limits, probe, sweep
from attacks import ATTACKS, holds
from conformance import CHECKS, Backend, dial, py, says, Served, until
from fakecluster import Cluster

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists('/usr/bin/bwrap'), reason='not root, or no bubblewrap')
BACKEND = Backend('kubernetes')
NODE = ('out_of_memory_is_told', 'out_of_memory_in_a_child_is_told', 'the_cpu_cap_holds',
        'fork_bomb', 'memory_bomb', 'memory_in_sockets', 'disk_fill', 'read_host_files', 'read_a_root_owned_file', 'reach_another_sandbox', 'find_a_secret')  # what a kubelet and its runtime do, not the pods of fakecluster.py, which are root's

@pytest.fixture
async def cluster(monkeypatch):
    with tempfile.TemporaryDirectory(prefix='k') as d:  # a socket's path must be short
        async for c in serve(Path(d), monkeypatch): yield c

async def serve(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    (d := tmp_path/'s').mkdir()
    for k, v in dict(CLAWLAB_KUBERNETES_IMAGE='x', CLAWLAB_KUBERNETES_PROXY=f'unix:{d}', KUBECONFIG=str(tmp_path/'config')).items(): monkeypatch.setenv(k, v)
    async with Cluster(tmp_path) as c: yield c

@pytest.mark.parametrize('check', [c for c in CHECKS if c not in NODE])
async def test_S_kubernetes_conforms(cluster, check): await CHECKS[check](BACKEND)

@pytest.mark.parametrize('attack', [a for a in ATTACKS if a not in NODE])
async def test_S_kubernetes_contains(cluster, attack): await holds(BACKEND, attack)

async def test_S_nothing_is_left(cluster):
    async with Served(says(b'')) as listener, BACKEND.box(listener) as s:
        n = cluster.execs
        await s.put({'a': 'b'}); assert len(cluster.pods) == 1 and (await s.exec(['true'])).ok and await s.get() == {'a': b'b'}
    assert not cluster.pods and cluster.execs == n  # one connection for everything
    assert not list((cluster.dir/'s').glob('*/*'))  # no socket either

async def test_S_an_api_server_that_restarts_loses_nothing(cluster):
    "In the middle of programs, and of starts."
    async def one(i):
        async with BACKEND.box(seconds=60) as s:
            await s.put({'n': str(i)})
            r = await s.exec(['sh', '-c', f'echo x >> /workspace/runs; echo > /workspace/up; sleep 3; cat n'])
            return r.stdout, (await s.get())['runs']
    runs = [asyncio.create_task(one(i)) for i in range(6)]
    await until(lambda: len(cluster.procs) >= 3)
    await cluster.away(2)
    assert await asyncio.gather(*runs) == [(str(i).encode(), b'x\n') for i in range(6)]
    assert not cluster.pods and len(cluster.asked) == 6

async def test_S_the_key_is_in_no_pod(cluster):
    async with BACKEND.box() as s: assert (await s.exec(['sh', '-c', 'echo $K'], env={'K': 'hunter2'})).stdout == b'hunter2\n'
    assert 'hunter2' not in str(cluster.asked) + str(cluster.log)

LINKS = """
import os, socket, subprocess, sys
def link(kind=0):
    try: s = socket.socket(16, 3, kind); s.bind((0, 0)); return True
    except OSError as e: return os.strerror(e.errno)
print(link(), link(2), [n for _, n in socket.if_nameindex()] if link() is True else 'none', link(), socket.getaddrinfo('localhost', 80)[0][4][1])"""

@pytest.mark.parametrize('heard', [True, False])
async def test_S_netlink_sockets_are_counted_or_refused_where_nobody_can_count(cluster, monkeypatch, heard):
    "Names resolve either way. The count begins anew with each program."
    if not heard: first, deaf = kubernetes.filters_inside(); monkeypatch.setattr(kubernetes, 'filters_inside', lambda: ['AAAA', deaf])  # a filter that no kernel takes
    monkeypatch.setattr(kubernetes.keeper, 'LINKS', 3)
    no = 'Address family not supported by protocol'
    async with BACKEND.box() as s:
        for _ in range(2):
            r = await s.exec(py(LINKS))
            assert r.stdout.decode() == (f"True {no} ['lo'] {no} 80\n" if heard else f"{no} {no} none {no} 80\n"), r

async def test_S46_a_pod_that_is_lost_is_told_with_its_reason(cluster):
    async with BACKEND.box(seconds=60) as s:
        t = asyncio.create_task(s.exec(['sh', '-c', 'echo > up; sleep 60']))
        async def up(): return 'up' in await s.get()
        await until(up)
        await cluster.end(s.pod, phase='Failed', reason='Evicted', message='The node was low on memory.')
        with pytest.raises(SandboxError, match=r'evicted.*low on memory.*Killing'): await t

async def test_S_a_full_quota_is_waited_for(cluster):
    cluster.refuse = [(403, 'pods "x" is forbidden: exceeded quota: sandboxes'), (409, 'Operation cannot be fulfilled on resourcequotas "sandboxes": the object has been modified')] * 2
    async with BACKEND.box() as s: assert (await s.exec(['true'])).ok

async def test_S_a_refusal_is_bad_input(cluster):
    cluster.refuse = [(403, 'pods is forbidden: User "x" cannot create')]
    with pytest.raises(InputError, match='forbidden'): await BACKEND.box().start()

async def test_S_a_harness_that_the_image_lacks(cluster, monkeypatch):
    monkeypatch.setenv('CLAWLAB_KUBERNETES_PROXY', 'tcp:127.0.0.1:1')
    with pytest.raises(InputError, match='no /opt/react'): await BACKEND.box(binds=(('/nowhere', '/opt/react'),)).start()
    monkeypatch.setenv('CLAWLAB_KUBERNETES_IMAGE', 'lab/{harness}:{tag}')
    with pytest.raises(InputError, match='image lab/react:1-.* has no /opt/react'): await BACKEND.box(binds=(('/nowhere', '/opt/react'), ('/here', '/here'))).start()
    assert not cluster.pods

async def test_S46_sweep_removes_what_the_dead_left(cluster):
    async with BACKEND.box() as s:
        await kubernetes_pod(s, 'dead', '0-1-1'); await kubernetes_pod(s, 'elsewhere', 'other-1-1', '99999999999'); await kubernetes_pod(s, 'late', 'other-1-1', '1')
        lines = await asyncio.to_thread(sweep)
        assert {l.split()[-1] for l in lines if l.startswith('kubernetes')} == {'dead', 'late'} and (await s.exec(['true'])).ok

async def kubernetes_pod(s, name, controller, expires='99999999999'):
    body = pods.manifest(s.c.place, name, controller.replace('0-', f'{pods.this_machine()}-', 1) if controller[0] == '0' else controller, Limits())
    body['metadata']['annotations']['clawlab.dev/expires'] = expires
    await s.c.api.call('POST', '/pods', body=body)

async def test_S_probe_and_dry_run(cluster, monkeypatch):
    assert await probe('kubernetes') == ''
    assert 'activeDeadlineSeconds' in kubernetes.dry_run() and 'hostPath' in kubernetes.dry_run(binds=(('/opt', '/opt/x'),))
    monkeypatch.setenv('KUBECONFIG', '/nowhere')
    assert 'no Kubernetes cluster' in await asyncio.to_thread(lambda: asyncio.run(probe('kubernetes')))

async def test_S_a_pod_that_runs_before_its_creation_is_answered_is_seen_at_once(cluster, monkeypatch):
    "What the answer says is older than what the watch has said meanwhile."
    real = pods.Api.call
    async def call(self, method, path, query=(), body=None):
        got = await real(self, method, path, query, body)
        if method == 'POST': await until(lambda: body['metadata']['name'] in cluster.procs); await asyncio.sleep(.2)  # the news arrives first
        return got | ({'status': {'phase': 'Pending'}} if method == 'POST' else {})
    monkeypatch.setattr(pods.Api, 'call', call)
    async with asyncio.timeout(20), BACKEND.box() as s: assert (await s.exec(['true'])).ok

async def test_S_a_pod_whose_start_was_cancelled_before_it_was_answered_is_removed(cluster, monkeypatch):
    async with BACKEND.box() as s:
        await kubernetes_pod(s, 'stray', s.c.id)
        await cluster.cut()  # the watch begins anew, with a list
        await until(lambda: 'stray' not in cluster.pods)
        assert (await s.exec(['true'])).ok


# pods that run ahead

def ahead(cluster): return {n for n, p in cluster.pods.items() if 'clawlab.dev/ahead' in p['metadata']['labels'] and n in cluster.procs}

async def test_S_pods_run_ahead_and_each_is_used_once(cluster, monkeypatch):
    monkeypatch.setenv('CLAWLAB_KUBERNETES_WARM', '2')
    async def use(listener):
        async with BACKEND.box(listener) as s:
            r = await s.exec(py(dial(s) + 'c.sendall(b"\\n"); open("me", "ab").write(c.recv(9))'))
            return s.pod, r.ok and await s.get()
    async with Served(says(b'x')) as listener:
        first = await use(listener)
        await until(lambda: len(ahead(cluster)) == 2)
        was, used = ahead(cluster), await asyncio.gather(*(use(listener) for _ in range(6)))
        assert all(got == {'me': b'x'} for _, got in (first, *used)) and len({n for n, _ in (first, *used)}) == 7  # nothing of the one before
        assert was <= {n for n, _ in used}  # what ran ahead was taken first
        await until(lambda: len(ahead(cluster)) == 2)
        async with BACKEND.box() as s: assert s.pod not in ahead(cluster) and 'clawlab.dev/ahead' not in cluster.pods[s.pod]['metadata']['labels']  # of another kind: no network

async def test_S_a_pod_that_ended_while_it_waited_is_not_used(cluster, monkeypatch):
    monkeypatch.setenv('CLAWLAB_KUBERNETES_WARM', '1')
    async with BACKEND.box(): pass
    await until(lambda: len(ahead(cluster)) == 1)
    lost, = ahead(cluster)
    c = await kubernetes.the_controller()
    await cluster.end(lost, phase='Failed', reason='Evicted'); await until(lambda: pods.fate(c.watch.pods[lost]).over)
    async with BACKEND.box() as s: assert s.pod != lost and (await s.exec(['true'])).ok
    await until(lambda: len(ahead(cluster)) == 1)
    c.spare[next(k for k, v in c.spare.items() if v)][0].born -= pods.QUIET  # it has waited for too long
    old, = ahead(cluster)
    async with BACKEND.box() as s: assert s.pod != old
    await until(lambda: old not in cluster.pods)

@pytest.mark.parametrize('ready', [0, 2])
def test_S_a_controller_that_ends_deletes_what_ran_ahead(monkeypatch, ready):
    "And what was on its way to do so."
    monkeypatch.setenv('CLAWLAB_KUBERNETES_WARM', '2')
    async def work():
        with tempfile.TemporaryDirectory(prefix='k') as d:
            async for c in serve(Path(d), monkeypatch):
                def session():
                    async def one():
                        async with BACKEND.box(): pass
                        await until(lambda: len(ahead(c)) >= ready)
                    asyncio.run(one())
                await asyncio.to_thread(session)
                assert not c.pods
    asyncio.run(work())
