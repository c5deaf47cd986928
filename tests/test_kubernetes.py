"""Sandboxes on a real Kubernetes: `make test-cluster` (tests/cluster, built once per machine). The shared suites, rollouts, every class of failure that one node can have, and the manifests' rights."""
import asyncio, hashlib, json, os, subprocess, sys, tempfile, threading, time
from concurrent.futures import Future
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
import test_egress
from attacks import ATTACKS, attacked, holds
from backends import BACKENDS
from conformance import CHECKS, conforms, until
from realcluster import CLUSTER, ROOT, SPACE, documents, prepare, rest, restart_api, sh, up
from test_manifests import violations

pytestmark = pytest.mark.cluster
BACKEND = BACKENDS['kubernetes']
box = BACKEND.box

@pytest.fixture(scope='module', autouse=True)
def cluster():
    with tempfile.TemporaryDirectory() as d, pytest.MonkeyPatch.context() as m, up(m):
        sh(sys.executable, ROOT/'tests/cluster/image.py', f'{d}/image.tar'); sh(CLUSTER, 'load', f'{d}/image.tar')
        for k, v in dict(IMAGE='localhost/clawlab-test:1', PROXY=f'unix:{d}', PATCH=ROOT/'tests/cluster/overlay.yaml', NAMESPACE=SPACE).items(): m.setenv(f'CLAWLAB_KUBERNETES_{k}', str(v))
        asyncio.run(prepare())
        yield

async def test_S_a_pod_runs_true():
    assert await probe('kubernetes') == ''


# the shared suites: what mostly waits for the node, several at a time in a loop of their own; each test waits for its own

ALONE = {'a_gigabyte_on_stdout'}  # it measures this process

@pytest.fixture(scope='module')
def together(cluster, request):
    mine = [i for i in request.session.items if i.module is sys.modules[__name__] and getattr(i, 'callspec', None)]
    todo = {n: f for i in mine for n, f in [(i.callspec.params.get('check'), lambda n: CHECKS[n](BACKEND)), (i.callspec.params.get('attack'), lambda n: holds(BACKEND, n))] if n and n not in ALONE}
    results, gate = {n: Future() for n in todo}, asyncio.Semaphore(4)
    async def one(n, f):
        async with gate:
            try: results[n].set_result(await f(n))
            except BaseException as e: results[n].set_exception(e)
    async def work(): await asyncio.gather(*(one(n, f) for n, f in todo.items()))
    t = threading.Thread(target=lambda: asyncio.run(work())); t.start()
    yield results
    t.join()

@conforms
def test_S_kubernetes_conforms(together, check): together[check].result() if check in together else asyncio.run(CHECKS[check](BACKEND))

@attacked
def test_S_kubernetes_contains(together, attack): together[attack].result()

def test_S_the_table_says_what_is_not_enforced_here():
    assert set(BACKEND.not_enforced) == {'reach_another_sandbox', 'fork_bomb', 'memory_in_sockets'} <= set(ATTACKS) and all(BACKEND.not_enforced.values())


# rollouts

async def play(tmp_path, n, concurrency, meanwhile=None, harness='react'):
    "The rollouts, as they are on record."
    tasks = load_suite('nano'); task = min(tasks.values(), key=lambda t: t.task_id); store = Store.open(str(tmp_path/'r.db'))
    engine = OracleEngine(tasks)
    async with Proxy(engine, store) as proxy:
        t = asyncio.create_task(run_rollouts([Job(task, harness, k, group='g') for k in range(n)], proxy=proxy, store=store, backend='kubernetes', concurrency=concurrency, limits=Limits(cpus=2, memory_mb=1024, seconds=90), progress=False))
        if meanwhile: await meanwhile(t)
        await t
    await engine.close(); rs = store.rollouts(group='g', with_calls=True); store.close()
    return rs

@pytest.mark.parametrize('harness', ['react', 'claude-code'])
async def test_S_a_rollout_end_to_end(tmp_path, harness):
    rs = await play(tmp_path, 1, 1, harness=harness)
    assert (rs[-1].outcome, rs[-1].reward, rs[-1].harness) == ('ok', 1.0, harness) and rs[-1].calls, rs

async def alone(): return [p['metadata']['name'] for p in (await rest('GET', '/pods'))['items']]
async def none_left(): return not await alone()

@pytest.mark.timeout(900)
async def test_S46_api_server_restarted_in_the_middle_of_50_rollouts(tmp_path):
    async def restart(t):
        await until(lambda: sum(r.outcome is not None for r in read(tmp_path)) >= 10, 240)
        await restart_api(5)
        assert not t.done()
    rs = await play(tmp_path, 50, 8, restart)
    settled = sorted((r.task_id, r.harness, r.sample) for r in rs if r.outcome == 'ok')
    assert len(settled) == len(set(settled)) == 50, rs  # none lost, each recorded once
    again = [r for r in rs if r.outcome != 'ok']
    assert len(rs) == 50 + len(again) == 50 + sum(max(r.attempt for r in rs if r.sample == k) for k in range(50)) and all(r.outcome == 'infra_fail' for r in again)  # extra starts are on record too
    print(f'{len(again)} extra starts: {[r.dropped_reason for r in again]}')
    await until(none_left, 120)

def read(tmp_path):
    with Store.open(str(tmp_path/'r.db'), create=False) as s: return list(s.rollouts(group='g'))

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

async def test_S46_kill_9_of_the_controller_with_8_live_pods():
    p = subprocess.Popen([sys.executable, '-c', LAUNCHER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    names = (await asyncio.to_thread(p.stdout.readline)).split()
    assert len(names) == 8 and set(names) <= set(await alone())
    p.kill(); p.wait()
    async with box() as s: assert (await s.exec(['true'])).ok  # a new controller begins with sweeping
    await until(none_left, 120)

async def test_S_a_pod_that_ran_ahead_is_taken(monkeypatch):
    monkeypatch.setenv('CLAWLAB_KUBERNETES_WARM', '1')
    async with box(): pass
    async def ready(): return [p['metadata']['name'] for p in (await rest('GET', '/pods', query=[('labelSelector', 'clawlab.dev/ahead')]))['items'] if pods.fate(p).kind == 'running']
    waiting, = await until(ready, 60)
    async with box() as s: assert s.pod == waiting and (await s.exec(['true'])).ok


# classes of failure

async def failure(monkeypatch, argv=('sleep', '40'), seconds=60, **patch):
    with tempfile.NamedTemporaryFile('w', suffix='.yaml') as f:
        base = yaml.safe_load((ROOT/'tests/cluster/overlay.yaml').read_text())
        json.dump(pods.patched(base, dict(spec=patch)), f); f.flush()
        monkeypatch.setenv('CLAWLAB_KUBERNETES_PATCH', f.name)
        async with box(seconds=seconds) as s: return await s.exec(argv)

async def test_S46_an_image_that_cannot_be_pulled(monkeypatch):
    t = time.monotonic()
    with pytest.raises(SandboxError, match=r'\(image\): ErrImageNeverPull.*events: .*no-such:1'): await failure(monkeypatch, containers=[dict(name='sandbox', image='localhost/no-such:1')])
    assert time.monotonic() - t < kubernetes.PATIENCE_S  # there is nothing to wait for
    monkeypatch.setattr(kubernetes, 'PATIENCE_S', 4)
    with pytest.raises(SandboxError, match=r'\(image\): (ErrImagePull|ImagePullBackOff).*events: .*no-such:1'): await failure(monkeypatch, containers=[dict(name='sandbox', image='127.0.0.1:1/no-such:1', imagePullPolicy='IfNotPresent')])
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


async def test_S46_a_pod_evicted_by_its_node(monkeypatch):
    "More than a volume may hold: the kubelet's own eviction. It looks at volumes once a minute."
    scratch = dict(volumes=[dict(name='scratch', emptyDir={'sizeLimit': '1Mi'})], containers=[dict(name='sandbox', volumeMounts=[dict(name='scratch', mountPath='/opt/scratch')])])
    with pytest.raises(SandboxError, match=r'\(evicted\).*exceeds the limit "1Mi".*events: .*Evicted'): await failure(monkeypatch, ['sh', '-c', 'head -c 9M /dev/zero > /opt/scratch/x; sleep 170'], 180, **scratch)

async def test_S46_memory_that_takes_process_1_along_is_read_before_the_pod_is_deleted():
    async with box(memory_mb=64, disk_mb=512, seconds=60) as s:
        pod = s.pod
        r = await s.exec(['sh', '-c', 'cat /dev/zero > big'])  # files can't be killed: memory stays full
        assert r.oom and not r.ok and (r.code, r.signal) == (None, 9), r
        assert pods.fate(await rest('GET', f'/pods/{pod}')).kind == 'oom' and await s.get() == {} and s.left_out == ['everything (the pod ended: out of memory)']
    await until(none_left, 120)

async def test_S46_output_that_is_cut_is_asked_for_again_and_has_the_hash_it_should_have(monkeypatch):
    real, cuts = kubernetes.Channel.receive, []
    async def receive(self):
        if len(cuts) == 2: return await real(self)
        n = 0
        async for m in self.ws:
            if m.data[:1] == b'\1': n += len(m.data); self.r.feed_data(m.data[1:])
            if n > 200_000: break
        cuts.append(n); self.r.feed_eof()  # as a connection that ends well does
    monkeypatch.setattr(kubernetes.Channel, 'receive', receive)
    async with box() as s: r = await s.exec(['sh', '-c', 'echo x >> runs; seq 400000; echo $(wc -l < runs) run >&2'])
    want = ''.join(f'{k}\n' for k in range(1, 400_001)).encode()
    assert len(cuts) == 2 and hashlib.sha256(r.stdout).digest() == hashlib.sha256(want).digest() and r.stderr == b'1 run\n'


# rights and policies

VERBS = ['get', 'list', 'watch', 'create', 'update', 'patch', 'delete', 'deletecollection']
RESOURCES = ['pods', 'pods/log', 'pods/exec', 'pods/attach', 'pods/portforward', 'pods/status', 'pods/ephemeralcontainers', 'pods/eviction', 'events', 'secrets', 'configmaps', 'services', 'serviceaccounts', 'serviceaccounts/token', 'persistentvolumeclaims',
             'resourcequotas', 'limitranges', 'endpoints', 'deployments.apps', 'jobs.batch', 'roles.rbac.authorization.k8s.io', 'rolebindings.rbac.authorization.k8s.io', 'networkpolicies.networking.k8s.io']
WIDE = ['nodes', 'namespaces', 'persistentvolumes', 'clusterroles.rbac.authorization.k8s.io', 'clusterrolebindings.rbac.authorization.k8s.io']
USER = 'system:serviceaccount:clawlab:launcher'

def granted():
    "What rbac.yaml grants, and where."
    role, = [d for d in documents() if d['kind'] == 'Role']
    return role['metadata']['namespace'], {(r, v) for x in role['rules'] for r in x['resources'] for v in x['verbs']}

async def may(api, user, resource, verb, namespace):
    name, _, group = resource.partition('.'); name, _, sub = name.partition('/')
    body = dict(apiVersion='authorization.k8s.io/v1', kind='SubjectAccessReview', spec=dict(user=user, groups=['system:serviceaccounts', 'system:authenticated'], resourceAttributes=dict(namespace=namespace, verb=verb, resource=name, subresource=sub, group=group)))
    return (await api.call('POST', '/apis/authorization.k8s.io/v1/subjectaccessreviews', body=body))['status']['allowed']

async def test_S_the_launcher_may_do_what_it_needs_and_nothing_else():
    "`auth can-i` of every verb, in every namespace of ours and cluster-wide."
    space, rights = granted()
    assert {r for r, _ in rights} <= set(RESOURCES) and {v for _, v in rights} <= set(VERBS)
    async with pods.Api(SPACE) as api:
        api.at = ''
        for ns in (SPACE, 'clawlab', 'clawlab-store', 'default', 'kube-system', ''):
            for r in RESOURCES + WIDE:
                got = dict(zip(VERBS, await asyncio.gather(*(may(api, USER, r, v, ns) for v in VERBS))))
                assert got == {v: ns == space and (r, v) in rights for v in VERBS}, (ns, r, got)
        assert not any(await asyncio.gather(*(may(api, f'system:serviceaccount:{SPACE}:default', r, v, SPACE) for r in RESOURCES for v in VERBS)))

@pytest.fixture
async def as_launcher(monkeypatch, tmp_path):
    "KUBECONFIG of the launcher's own account, with a token that the cluster made."
    body = dict(apiVersion='authentication.k8s.io/v1', kind='TokenRequest', spec=dict(expirationSeconds=600))
    token = (await rest('POST', '/api/v1/namespaces/clawlab/serviceaccounts/launcher/token', body, ''))['status']['token']
    c = yaml.safe_load(Path(os.environ['KUBECONFIG']).read_text())
    c['users'][0]['user'] = dict(token=token)
    (tmp_path/'config').write_text(json.dumps(c)); monkeypatch.setenv('KUBECONFIG', str(tmp_path/'config'))

async def test_S_with_its_rights_alone_the_launcher_does_its_work(as_launcher):
    async with box(seconds=60) as s:
        await s.put({'a': 'b'})
        assert (await s.exec(['cat', 'a'])).stdout == b'b' and (await s.get()) == {'a': b'b'}
        assert {e.split(':')[0] for e in await s.c.api.events(s.pod)} >= {'Scheduled', 'Started'}
        assert (await rest('GET', f'/pods/{s.pod}'))['metadata']['name'] == s.pod and await rest('GET', f'/pods/{s.pod}/log') == b''
        assert s.pod in [p['metadata']['name'] for p in (await s.c.api.listing('app.kubernetes.io/managed-by=clawlab'))[0]]
        for method, path, body in (('DELETE', '/pods', None), ('PUT', f'/pods/{s.pod}', {}), ('POST', f'/pods/{s.pod}/eviction', {}), ('GET', f'/pods/{s.pod}/attach', None), ('GET', '/secrets', None), ('GET', '/configmaps', None), ('GET', '/resourcequotas', None)):
            with pytest.raises(pods.ApiError, match='forbidden') as e: await rest(method, path, body)
            assert e.value.status == 403
        for path in ('/api/v1/nodes', '/api/v1/namespaces', '/api/v1/namespaces/clawlab/pods', '/api/v1/namespaces/clawlab-store/secrets', '/api/v1/namespaces/kube-system/secrets'):
            with pytest.raises(pods.ApiError, match='forbidden'): await rest('GET', path, at='')
    await until(lambda: gone(s.pod), 120)

async def gone(name): return name not in await alone()

async def test_S_what_the_cluster_makes_of_our_pods_passes_restricted():
    "With its defaults filled in. (This cluster is older than the admission that enforces it.)"
    bare = pods.Place(namespace=SPACE, image='x', proxy='tcp:h:1')
    made = await rest('POST', '/pods', pods.manifest(bare, 'clawlab-bare', 'c', Limits(), target='h:1'), query=[('dryRun', 'All')])
    specs = [made['spec']]
    for d in documents():
        if d['kind'] in ('Job', 'StatefulSet'): specs.append((await rest('POST', {'Job': '/apis/batch/v1', 'StatefulSet': '/apis/apps/v1'}[d['kind']] + f'/namespaces/{d["metadata"]["namespace"]}/{d["kind"].lower()}s', d, '', [('dryRun', 'All')]))['spec']['template']['spec'])
    assert len(specs) == 3 and [violations(x) for x in specs] == [[], [], []]
    assert violations(pods.patched(made['spec'], dict(hostNetwork=True, volumes=[dict(name='x', hostPath={'path': '/'})]))) == ['hostNetwork', 'volume hostPath']


async def test_S_egress_an_agent_in_a_pod_reaches_what_its_list_names_and_nothing_else(tmp_path, monkeypatch):
    await test_egress.test_an_agent_reaches_what_its_list_names_and_nothing_else(tmp_path, monkeypatch, 'kubernetes')

async def test_S_harness_and_verifier_in_pods_of_their_own_images(tmp_path, monkeypatch):
    got = subprocess.run([sys.executable, '-m', 'clawlab.cli', 'harness', 'image', 'base', 'react', '--cached', '--archive'], capture_output=True, text=True, cwd=ROOT)
    if got.returncode: pytest.skip('the images are not on this machine: make test-images builds them')
    for i in json.loads(got.stdout.splitlines()[-1])['images']: await asyncio.to_thread(sh, CLUSTER, 'load', i['archive'])
    (tmp_path/'patch').write_text('{spec: {containers: [{name: sandbox, imagePullPolicy: Never}]}}')
    monkeypatch.setenv('CLAWLAB_KUBERNETES_IMAGE', 'localhost/clawlab/{harness}:{tag}'); monkeypatch.setenv('CLAWLAB_KUBERNETES_PATCH', str(tmp_path/'patch'))
    r, = await play(tmp_path, 1, 1)
    assert (r.outcome, r.reward) == ('ok', 1.), r
