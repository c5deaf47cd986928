"""What experiments/cluster says: closed by default, open where needed, nothing privileged. Its rights are tried on a real cluster in test_kubernetes.py."""
from pathlib import Path
import yaml
from clawlab.launch.sandbox.pods import Place, manifest, security
from clawlab.launch.sandbox.base import Limits

HERE = Path(__file__).parent.parent/'experiments/cluster'
DOCS = [d for f in yaml.safe_load((HERE/'kustomization.yaml').read_text())['resources'] for d in yaml.safe_load_all((HERE/f).read_text())]
def of(kind, namespace=None): return [d for d in DOCS if d['kind'] == kind and namespace in (None, d['metadata'].get('namespace'))]

def test_S_every_file_is_listed(): assert {f.name for f in HERE.glob('*.yaml')} == {*yaml.safe_load((HERE/'kustomization.yaml').read_text())['resources'], 'kustomization.yaml'}

def test_S_proxy_store_and_sandboxes_live_apart():
    spaces = {d['metadata']['name']: d['metadata']['labels'] for d in of('Namespace')}
    assert spaces.keys() == {'clawlab', 'clawlab-store', 'clawlab-sandboxes'} and all(l['pod-security.kubernetes.io/enforce'] == 'restricted' for l in spaces.values())

def test_S_sandboxes_reach_the_proxy_and_nothing_else():
    deny, allow = of('NetworkPolicy', 'clawlab-sandboxes')
    assert deny['spec'] == {'podSelector': {}, 'policyTypes': ['Ingress', 'Egress']}
    assert allow['spec']['policyTypes'] == ['Egress'] and 'ingress' not in allow['spec']
    rule, = allow['spec']['egress']
    peer, = rule['to']
    assert rule['ports'] == [{'protocol': 'TCP', 'port': 8000}] and peer['namespaceSelector']['matchLabels'] == {'clawlab.dev/part': 'proxy'}
    pod, = of('Job')
    assert peer['podSelector']['matchLabels'].items() <= pod['spec']['template']['metadata']['labels'].items()
    made = manifest(Place(image='x'), 'n', 'c', Limits())['metadata']['labels']
    assert allow['spec']['podSelector']['matchLabels'].items() <= made.items()
    assert not any('ipBlock' in p or p == {} for d in of('NetworkPolicy') for r in d['spec'].get('egress', []) + d['spec'].get('ingress', []) for p in r.get('to', []) + r.get('from', []))

def test_S_the_store_answers_the_proxy_only():
    p, = of('NetworkPolicy', 'clawlab-store')
    assert p['spec']['policyTypes'] == ['Ingress', 'Egress'] and 'egress' not in p['spec'] and p['spec']['ingress'] == [{'from': [{'namespaceSelector': {'matchLabels': {'clawlab.dev/part': 'proxy'}}}], 'ports': [{'protocol': 'TCP', 'port': 5432}]}]

def test_S_rights_are_few_and_in_one_namespace():
    role, = of('Role')
    assert role['metadata']['namespace'] == 'clawlab-sandboxes' and not of('ClusterRole') and not of('ClusterRoleBinding')
    rules = {(r, v) for x in role['rules'] for r in x['resources'] for v in x['verbs']}
    assert rules == {('pods', v) for v in ('create', 'get', 'list', 'watch', 'delete')} | {('pods/log', 'get'), ('pods/exec', 'get'), ('pods/exec', 'create'), ('events', 'list')} and '*' not in str(role)
    binding, = of('RoleBinding')
    assert binding['subjects'] == [{'kind': 'ServiceAccount', 'name': 'launcher', 'namespace': 'clawlab'}]
    assert all(d['automountServiceAccountToken'] is False for d in of('ServiceAccount'))

VOLUMES = {'configMap', 'csi', 'downwardAPI', 'emptyDir', 'ephemeral', 'persistentVolumeClaim', 'projected', 'secret'}

def violations(spec: dict) -> list[str]:
    "What Pod Security's `restricted` has against a pod (kubernetes.io/docs/concepts/security/pod-security-standards)."
    pod = spec.get('securityContext', {}); out = [k for k in ('hostNetwork', 'hostPID', 'hostIPC') if spec.get(k)]
    out += [f'volume {k}' for v in spec.get('volumes', []) for k in v if k != 'name' and k not in VOLUMES]
    out += ['sysctls'] * bool(pod.get('sysctls'))
    for c in spec['containers'] + spec.get('initContainers', []) + spec.get('ephemeralContainers', []):
        sc = pod | c.get('securityContext', {}); caps = sc.get('capabilities', {})
        out += [k for k, bad in {'privileged': sc.get('privileged'), 'escalation': sc.get('allowPrivilegeEscalation') is not False, 'root': not sc.get('runAsNonRoot') or sc.get('runAsUser') == 0,
                'seccomp': sc.get('seccompProfile', {}).get('type') not in ('RuntimeDefault', 'Localhost'), 'capabilities': caps.get('drop') != ['ALL'] or set(caps.get('add', [])) - {'NET_BIND_SERVICE'},
                'procMount': sc.get('procMount', 'Default') != 'Default', 'hostPort': any(p.get('hostPort') for p in c.get('ports', [])), 'seLinux': sc.get('seLinuxOptions')}.items() if bad]
    return out

def test_S_what_runs_passes_restricted():
    specs = [d['spec']['template']['spec'] for d in DOCS if 'template' in d.get('spec', {})] + [manifest(Place(image='x'), 'n', 'c', Limits(), target='h:1')['spec']]
    for s in specs:
        assert violations(s) == [] and s['enableServiceLinks'] is False
        for c in s['containers']: assert c['securityContext']['readOnlyRootFilesystem'] and 'limits' in c['resources']
    assert security()['runAsUser'] == 1000 and set(violations(dict(containers=[{}]))) == {'escalation', 'root', 'seccomp', 'capabilities'}

def test_S_secrets_come_from_the_cluster():
    assert not of('Secret') and all('value' not in e or 'PASSWORD' not in e['name'] for d in DOCS if 'template' in d.get('spec', {}) for c in d['spec']['template']['spec']['containers'] for e in c.get('env', []))
