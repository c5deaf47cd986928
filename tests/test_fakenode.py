"""Pods by the thousand, and nodes that fail, on a real API server whose one node is played (`make test-cluster`): study.benchpods says what a kubelet would say."""
import asyncio, os
from pathlib import Path
import pytest
from clawlab.records import SandboxError
from clawlab.launch.sandbox import pods
from clawlab.launch.sandbox.base import Limits, make_sandbox
from clawlab.study import benchpods
from clawlab.study.bench import value
from conformance import until
from realcluster import SPACE, prepare, rest, restart_api, up

pytestmark = pytest.mark.cluster

@pytest.fixture(scope='module', autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as m, up(m, fake=True):
        for k, v in dict(IMAGE='x', PROXY='tcp:127.0.0.1:1', NAMESPACE=SPACE, STARTING='100', RATE='1000').items(): m.setenv(f'CLAWLAB_KUBERNETES_{k}', v)
        asyncio.run(prepare())
        yield

def keys(): return Path(os.environ['KUBECONFIG']).parent/'pki'
def box(): return make_sandbox('kubernetes', limits=Limits(cpus=1, memory_mb=64, seconds=60), name='test')

LOST = {
    'evicted': (dict(phase='Failed', reason='Evicted', message='The node was low on resource: memory.'), r'\(evicted\): The node was low on resource'),
    'node lost': (dict(phase='Unknown', reason='NodeLost', message='Node fake which was running pod is unresponsive'), r'\(node\): NodeLost: Node fake'),
    'node down': (dict(phase='Failed', reason='NodeShutdown', message='Node is shutting, evicting pods'), r'\(node\): NodeShutdown'),
    'deadline': (dict(phase='Failed', reason='DeadlineExceeded', message='Pod was active on the node longer than the specified deadline'), r'\(deadline\): Pod was active'),
    'out of memory': (dict(phase='Failed', containerStatuses=[benchpods.RUNNING['containerStatuses'][0] | dict(ready=False, state={'terminated': dict(reason='OOMKilled', exitCode=137)})]), ''),
}

@pytest.mark.parametrize('how', LOST)
async def test_S46_a_pod_that_its_node_loses_is_classified(how, monkeypatch):
    status, says = LOST[how]
    started = asyncio.Event()
    async def answer(head, body, real=benchpods.answer):
        if head['op'] == 'run': started.set(); await asyncio.Event().wait()
        return await real(head, body)
    monkeypatch.setattr(benchpods, 'answer', answer)
    async with benchpods.Node(SPACE, keys()) as node, box() as s:
        t = asyncio.create_task(s.exec(['sleep', '60']))
        await started.wait()
        await rest('POST', '/events', dict(metadata=dict(name=f'{s.pod}.1', namespace=SPACE), involvedObject=dict(kind='Pod', name=s.pod, namespace=SPACE), reason='Lost', message='said by the cluster', type='Warning', lastTimestamp='2030-01-01T00:00:00Z'))
        await benchpods.report(node.api, s.pod, status)
        if says:
            with pytest.raises(SandboxError, match=says + r'.*events: .*Lost: said by the cluster'): await t
        else: assert (await t).oom  # the agent's doing, not the infrastructure's
        pod = s.pod
        await s.stop()
        async def gone(): return pod not in [p['metadata']['name'] for p in (await rest('GET', '/pods'))['items']]
        await until(gone)

async def test_S46_a_watch_that_is_gone_twice_is_listed_again(monkeypatch):
    "The API server's own 410: the first lists claim to be older than what it still knows."
    await restart_api(); await rest('GET', '/pods')
    real, refused = pods.Api.listing, []
    async def listing(self, selector):
        items, version = await real(self, selector)
        return items, version if len(refused) >= 2 or 'controller=' not in selector else '1'
    async def follow(self, selector, version, seconds, real=pods.Api.follow):
        try:
            async for x in real(self, selector, version, seconds): yield x
        except pods.ApiError as e: refused.extend([e.status] * ('controller=' in selector)); raise
    async with benchpods.Node(SPACE, keys()):
        monkeypatch.setattr(pods.Api, 'listing', listing); monkeypatch.setattr(pods.Api, 'follow', follow)
        async with box() as s:
            assert (await s.exec(['true'])).ok
            await until(lambda: s.c.watch.lists >= 3)
            assert refused == [410, 410]

@pytest.mark.timeout(600)
async def test_S46_1000_pods_at_100_in_flight():
    said = []
    rows, goals = await benchpods.bench_pods(1000, 100, say=said.append)
    print(*said, *(f"{r['metric']} {r['value']:.1f}" for r in rows), sep='\n')
    assert len(goals) == 4 and all(g['ok'] for k, g in goals.items() if 'processor' not in k), (goals, said)  # what it costs is for the benchmark
    assert value(rows, rows[0]['case'], 'kubernetes', 'lost') == 0 and not [p for p in (await rest('GET', '/pods'))['items'] if not p['metadata'].get('deletionTimestamp')]
