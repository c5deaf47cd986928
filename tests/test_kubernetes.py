"""Sandboxes on a real Kubernetes: `make test-cluster` (tests/cluster, built once per machine). The shared suites, rollouts, every class of failure that one node can have, and the manifests' rights."""
import asyncio, json, os, subprocess, sys, tempfile, time
from pathlib import Path
import pytest, yaml
from clawlab.records import SandboxError
from clawlab.capture.engines.oracle import OracleEngine
from clawlab.capture.proxy import Proxy
from clawlab.capture.store import Store
from clawlab.launch.rollouts import Job, run_rollouts
from clawlab.launch.sandbox import kubernetes, pods
from clawlab.launch.sandbox.base import Limits, probe
from clawlab.launch.tasks import load_suite
from attacks import attacked, holds
from backends import BACKENDS
from conformance import CHECKS, conforms, until

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parent.parent
CLUSTER, MANIFESTS = ROOT/'tests/cluster/cluster', ROOT/'experiments/cluster'
BACKEND = BACKENDS['kubernetes']
box = BACKEND.box
SPACE = 'clawlab-sandboxes'

def sh(*argv, data=None): return subprocess.run(list(map(str, argv)), input=data, capture_output=True, text=True, check=True).stdout

async def rest(method, path, body=None, at=SPACE):
    async with pods.Api(at) as api: return await api.call(method, path, body=body)

def documents():
    return [d for f in yaml.safe_load((MANIFESTS/'kustomization.yaml').read_text())['resources'] for d in yaml.safe_load_all((MANIFESTS/f).read_text())]

PATHS = dict(Namespace='/api/v1/namespaces', ServiceAccount='/api/v1/namespaces/{ns}/serviceaccounts', Role='/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/roles', RoleBinding='/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/rolebindings',
             NetworkPolicy='/apis/networking.k8s.io/v1/namespaces/{ns}/networkpolicies', ResourceQuota='/api/v1/namespaces/{ns}/resourcequotas', LimitRange='/api/v1/namespaces/{ns}/limitranges', Service='/api/v1/namespaces/{ns}/services',
             StatefulSet='/apis/apps/v1/namespaces/{ns}/statefulsets', Job='/apis/batch/v1/namespaces/{ns}/jobs')

async def apply(doc):
    "Create an object of the manifests, or leave what the cluster made itself."
    async with pods.Api(SPACE) as api:
        api.at = ''
        try: await api.call('POST', PATHS[doc['kind']].format(ns=doc['metadata'].get('namespace')), body=doc)
        except pods.ApiError as e: assert e.status == 409, e

@pytest.fixture(scope='module', autouse=True)
def cluster():
    if not all((Path(os.environ.get('CLAWLAB_CLUSTER_HOME', Path.home()/'.cache/clawlab-cluster'))/'bin'/p).exists() for p in ('kube-apiserver', 'kubelet', 'pause.tar')): pytest.fail(f'not built: {CLUSTER} build (ten minutes, once)')
    found = subprocess.run([CLUSTER, 'status'], capture_output=True).returncode == 0
    up = sh(CLUSTER, 'up')
    with tempfile.TemporaryDirectory() as d, pytest.MonkeyPatch.context() as m:
        m.setenv('KUBECONFIG', up.strip().split('=', 1)[1].strip("'"))
        sh(sys.executable, ROOT/'tests/cluster/image.py', f'{d}/image.tar'); sh(CLUSTER, 'load', f'{d}/image.tar')
        for k, v in dict(IMAGE='localhost/clawlab-test:1', PROXY=f'unix:{d}', PATCH=ROOT/'tests/cluster/overlay.yaml', NAMESPACE=SPACE).items(): m.setenv(f'CLAWLAB_KUBERNETES_{k}', str(v))
        async def prepare():
            for doc in documents(): await apply(doc)
        asyncio.run(prepare())
        try: yield
        finally: found or sh(CLUSTER, 'down')  # one that was up stays up


async def test_S_a_pod_runs_true():
    assert await probe('kubernetes') == ''

@conforms
async def test_S_kubernetes_conforms(check): await CHECKS[check](BACKEND)

@attacked
async def test_S_kubernetes_contains(attack): await holds(BACKEND, attack)


# rollouts

async def play(tmp_path, n, concurrency, meanwhile=None, harness='react'):
    tasks = load_suite('nano'); task = min(tasks.values(), key=lambda t: t.task_id); store = Store.open(str(tmp_path/'r.db'))
    engine = OracleEngine(tasks)
    async with Proxy(engine, store) as proxy:
        t = asyncio.create_task(run_rollouts([Job(task, harness, k, group='g') for k in range(n)], proxy=proxy, store=store, backend='kubernetes', concurrency=concurrency, limits=Limits(cpus=1, memory_mb=256, seconds=60), progress=False))
        if meanwhile: await meanwhile(t)
        rs = await t
    await engine.close(); store.close()
    return rs

async def test_S_a_rollout_end_to_end(tmp_path):
    r, = await play(tmp_path, 1, 1)
    assert (r.outcome, r.reward) == ('ok', 1.0) and r.calls, r

async def alone(): return [p['metadata']['name'] for p in (await rest('GET', '/pods'))['items'] if not p['metadata'].get('deletionTimestamp')]

@pytest.mark.timeout(900)
async def test_S46_the_api_server_restarts_in_the_middle_of_50_rollouts(tmp_path):
    home = Path(os.environ['KUBECONFIG']).parent
    async def restart(t):
        await asyncio.sleep(10)
        pid = int((home/'kube-apiserver.pid').read_text().split()[0])
        argv = [a.decode() for a in Path(f'/proc/{pid}/cmdline').read_bytes().split(b'\0')[:-1]]
        os.kill(pid, 9); await asyncio.sleep(5)
        p = subprocess.Popen(argv, start_new_session=True, stdin=subprocess.DEVNULL, stdout=(home/'log/kube-apiserver.log').open('a'), stderr=subprocess.STDOUT)
        (home/'kube-apiserver.pid').write_text(f'{p.pid} {pods.birth(p.pid)}\n')
    rs = await play(tmp_path, 50, 8, restart)
    assert [r.outcome for r in rs] == ['ok'] * 50 and sorted(r.sample for r in rs) == list(range(50))
    print('extra starts:', sum(r.attempt for r in rs))
    await until(lambda: none_left(), 60)

async def none_left(): return not await alone()

LAUNCHER = '''
import asyncio
from clawlab.launch.sandbox.base import Limits, make_sandbox
async def main():
    boxes = [make_sandbox('kubernetes', limits=Limits(memory_mb=64, cpus=.5)) for _ in range(8)]
    await asyncio.gather(*(b.start() for b in boxes))
    runs = [asyncio.create_task(b.exec(['sleep', '1000'])) for b in boxes]
    print(*(b.pod for b in boxes), flush=True)
    await asyncio.gather(*runs)
asyncio.run(main())
'''

async def test_S46_kill_9_of_the_launcher_with_8_live_sandboxes():
    p = subprocess.Popen([sys.executable, '-c', LAUNCHER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    names = (await asyncio.to_thread(p.stdout.readline)).split()
    assert len(names) == 8 and set(names) <= set(await alone())
    p.kill(); p.wait()
    async with box() as s: assert (await s.exec(['true'])).ok  # a new launcher begins with sweeping
    await until(lambda: none_left(), 60)


# classes of failure

async def failure(monkeypatch, **patch):
    with tempfile.NamedTemporaryFile('w', suffix='.yaml') as f:
        base = yaml.safe_load((ROOT/'tests/cluster/overlay.yaml').read_text())
        json.dump(pods.patched(base, dict(spec=patch)), f); f.flush()
        monkeypatch.setenv('CLAWLAB_KUBERNETES_PATCH', f.name)
        async with box(seconds=60) as s: return await s.exec(['sleep', '40'])

async def test_S46_an_image_that_cannot_be_pulled(monkeypatch):
    t = time.monotonic()
    with pytest.raises(SandboxError, match=r'\(image\).*(ErrImageNeverPull|ErrImagePull|ImagePullBackOff)'): await failure(monkeypatch, containers=[dict(name='sandbox', image='localhost/no-such:1')])
    assert time.monotonic() - t < kubernetes.START_S

async def test_S46_a_pod_that_fits_nowhere(monkeypatch):
    monkeypatch.setattr(kubernetes, 'START_S', 8)
    with pytest.raises(SandboxError, match=r'\(unschedulable\).*nodes'): await failure(monkeypatch, nodeSelector={'no': 'such'})

async def test_S46_a_pod_past_its_deadline(monkeypatch):
    with pytest.raises(SandboxError, match=r'\(deadline\)'): await failure(monkeypatch, activeDeadlineSeconds=15)

async def test_S46_a_pod_deleted_by_somebody_else():
    async with box(seconds=60) as s:
        t = asyncio.create_task(s.exec(['sleep', '40']))
        await asyncio.sleep(1); await rest('DELETE', f'/pods/{s.pod}')
        with pytest.raises(SandboxError, match=r'\((deleted|ended)\)'): await t


# rights and policies

VERBS = ['get', 'list', 'watch', 'create', 'update', 'patch', 'delete', 'deletecollection']
GRANTED = {('pods', v) for v in ('create', 'get', 'list', 'watch', 'delete')} | {('pods/log', 'get'), ('pods/exec', 'get'), ('pods/exec', 'create'), ('events', 'list')}
RESOURCES = ['pods', 'pods/log', 'pods/exec', 'pods/attach', 'pods/portforward', 'pods/status', 'pods/ephemeralcontainers', 'pods/eviction', 'events', 'secrets', 'configmaps', 'services', 'serviceaccounts', 'serviceaccounts/token', 'persistentvolumeclaims',
             'resourcequotas', 'limitranges', 'endpoints', 'deployments.apps', 'jobs.batch', 'roles.rbac.authorization.k8s.io', 'rolebindings.rbac.authorization.k8s.io', 'networkpolicies.networking.k8s.io']
WIDE = ['nodes', 'namespaces', 'persistentvolumes', 'clusterroles.rbac.authorization.k8s.io', 'clusterrolebindings.rbac.authorization.k8s.io']

async def may(user, resource, verb, namespace):
    name, _, group = resource.partition('.'); name, _, sub = name.partition('/')
    body = dict(apiVersion='authorization.k8s.io/v1', kind='SubjectAccessReview', spec=dict(user=user, groups=['system:serviceaccounts', 'system:authenticated'], resourceAttributes=dict(namespace=namespace, verb=verb, resource=name, subresource=sub, group=group)))
    async with pods.Api(SPACE) as api:
        api.at = ''
        return (await api.call('POST', '/apis/authorization.k8s.io/v1/subjectaccessreviews', body=body))['status']['allowed']

async def test_S_the_launcher_may_do_what_it_needs_and_nothing_else():
    "`auth can-i` of every verb, in every namespace of ours and cluster-wide."
    user = 'system:serviceaccount:clawlab:launcher'
    for ns in (SPACE, 'clawlab', 'clawlab-store', 'default', 'kube-system', ''):
        for r in RESOURCES + WIDE:
            got = {v for v in VERBS if await may(user, r, v, ns)}
            assert got == ({v for x, v in GRANTED if x == r} if ns == SPACE else set()), (ns, r, got)
    assert not any([await may(f'system:serviceaccount:{SPACE}:default', r, v, SPACE) for r in RESOURCES for v in VERBS])
