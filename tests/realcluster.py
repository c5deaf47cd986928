"""The clusters of `tests/cluster`: a real node, and one that a test plays."""
import asyncio, contextlib, os, subprocess
from pathlib import Path
import pytest, yaml
from clawlab.launch.sandbox import pods

ROOT = Path(__file__).parent.parent
CLUSTER, MANIFESTS, SPACE = ROOT/'tests/cluster/cluster', ROOT/'experiments/cluster', 'clawlab-sandboxes'
HOME = Path(os.environ.get('CLAWLAB_CLUSTER_HOME', Path(os.environ.get('XDG_CACHE_HOME', Path.home()/'.cache'))/'clawlab-cluster'))

def sh(*argv):
    "What a command says; a failing one is told with its last words."
    p = subprocess.run(list(map(str, argv)), capture_output=True, text=True)
    if p.returncode: pytest.fail(f'{argv[0]} {argv[1:]}: {p.stderr.strip()[-300:]}')
    return p.stdout

@contextlib.contextmanager
def up(m: pytest.MonkeyPatch, fake=False):
    "The cluster runs, and KUBECONFIG names it; one that was found running is left so."
    if not all((HOME/'bin'/p).exists() for p in ('kube-apiserver', 'kubelet', 'pause.tar')): pytest.fail(f'not built: {CLUSTER} build (ten minutes, once)')
    if fake:  # beside the real one: a home and ports of its own, the same programs
        (home := HOME.with_name(HOME.name + '-fake')).mkdir(exist_ok=True)
        if not (home/'bin').exists(): (home/'bin').symlink_to(HOME/'bin')
        m.setenv('CLAWLAB_CLUSTER_HOME', str(home))
        for k, p in dict(API=36443, ETCD=36379, PEER=36380, KCM=36257, SCHEDULER=36259, KUBELET=36250).items(): m.setenv(f'CLAWLAB_CLUSTER_{k}_PORT', str(p))
    found = subprocess.run([CLUSTER, 'status'], capture_output=True).returncode == 0
    try:
        m.setenv('KUBECONFIG', sh(CLUSTER, 'up', *['--fake-node'] * fake).strip().split('=', 1)[1].strip("'"))
        yield
    finally: found or sh(CLUSTER, 'down')

async def rest(method, path, body=None, at=SPACE, query=()):
    "One request; `at` is a namespace, or '' for a path of its own."
    async with pods.Api(at) as api:
        if not at: api.at = ''
        return await api.call(method, path, query, body=body)

def documents():
    return [d for f in yaml.safe_load((MANIFESTS/'kustomization.yaml').read_text())['resources'] for d in yaml.safe_load_all((MANIFESTS/f).read_text())]

PATHS = dict(Namespace='/api/v1/namespaces', ServiceAccount='/api/v1/namespaces/{ns}/serviceaccounts', Role='/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/roles', RoleBinding='/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/rolebindings',
             NetworkPolicy='/apis/networking.k8s.io/v1/namespaces/{ns}/networkpolicies', ResourceQuota='/api/v1/namespaces/{ns}/resourcequotas', LimitRange='/api/v1/namespaces/{ns}/limitranges', Service='/api/v1/namespaces/{ns}/services',
             StatefulSet='/apis/apps/v1/namespaces/{ns}/statefulsets', Job='/apis/batch/v1/namespaces/{ns}/jobs')

async def prepare():
    "Make the objects of experiments/cluster; what would start images that this cluster doesn't have is only checked by it. What it made itself is left."
    for doc in documents():
        try: await rest('POST', PATHS[doc['kind']].format(ns=doc['metadata'].get('namespace')), doc, '', [('dryRun', 'All')] * (doc['kind'] in ('Job', 'StatefulSet')))
        except pods.ApiError as e: assert e.status == 409, e

async def restart_api(away=0.):
    "`kill -9` of the API server; the same again after `away` seconds."
    home = Path(os.environ['KUBECONFIG']).parent
    pid = int((home/'kube-apiserver.pid').read_text().split()[0])
    argv = [a.decode() for a in Path(f'/proc/{pid}/cmdline').read_bytes().split(b'\0')[:-1]]
    os.kill(pid, 9); await asyncio.sleep(away)
    p = subprocess.Popen(argv, start_new_session=True, stdin=subprocess.DEVNULL, stdout=(home/'log/kube-apiserver.log').open('a'), stderr=subprocess.STDOUT)
    (home/'kube-apiserver.pid').write_text(f'{p.pid} {pods.birth(p.pid)}\n')
