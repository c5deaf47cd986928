"""Pods as data, the classes of failure, and the one watch, against an API server made of a script. No cluster is needed."""
import asyncio, json, subprocess, sys
from dataclasses import replace
from pathlib import Path
import pytest
from aiohttp import web
from clawlab.records import InputError, SandboxError
from clawlab.launch.images import ref
from clawlab.launch.sandbox import pods
from clawlab.launch.sandbox.base import Limits
from clawlab.launch.sandbox.pods import Api, Fate, Place, Watch, fate, manifest, patched, read_patch

PLACE = Place(image='x', proxy='tcp:proxy:8000')
def pod(limits=Limits(), place=PLACE, **kw): return manifest(place, 'p', 'me', limits, **kw)


# the pod as data

def test_S_a_pod_keeps_everything_out():
    spec = pod(target='proxy:8000')['spec']
    box, = spec['containers']
    assert (spec['automountServiceAccountToken'], spec['enableServiceLinks'], spec['restartPolicy'], spec['terminationGracePeriodSeconds']) == (False, False, 'Never', 1)
    assert spec['activeDeadlineSeconds'] == 120 + pods.QUIET and 'env' not in box and not any(k.startswith('host') and k != 'hostname' for k in spec)
    sc = box['securityContext']
    assert sc == dict(runAsNonRoot=True, runAsUser=1000, runAsGroup=1000, allowPrivilegeEscalation=False, readOnlyRootFilesystem=True, privileged=False, capabilities={'drop': ['ALL']}, seccompProfile={'type': 'RuntimeDefault'})
    assert box['resources']['limits'] == {'cpu': '4000m', 'memory': f'{4096 + pods.OWN_MB}Mi', 'ephemeral-storage': '64Mi'}
    assert [v for v in spec['volumes']] == [dict(name='files', emptyDir=dict(medium='Memory', sizeLimit='256Mi'))] and len(box['volumeMounts']) == 3
    assert max(map(len, box['command'])) < 100_000  # an argument's limit is 128 KiB

def test_S_no_limits_are_no_limits():
    r = pod(Limits(None, None, None, None, None))
    assert r['spec']['containers'][0]['resources']['limits'] == {'ephemeral-storage': '64Mi'} and r['spec']['volumes'][0]['emptyDir'] == {'medium': 'Memory'}

def test_S_host_folders_only_where_asked_for():
    r = pod(binds=(('/opt/h', '/opt/x'),), target='/run/clawlab/s', mount='/run/c/p')
    assert [v.get('hostPath', {}).get('path') for v in r['spec']['volumes']] == [None, '/run/c/p', '/opt/h']
    assert [(m['mountPath'], m['readOnly']) for m in r['spec']['containers'][0]['volumeMounts'][3:]] == [('/run/clawlab', True), ('/opt/x', True)]

def test_S_one_patch_for_what_clusters_differ_in(tmp_path):
    patch = dict(metadata={'annotations': {'a': 'b'}, 'labels': {'kueue.x-k8s.io/queue-name': 'q'}}, spec=dict(priorityClassName='low', nodeSelector={'pool': 'x'}, tolerations=[{'key': 't'}], imagePullSecrets=[{'name': 's'}],
                 hostUsers=False, runtimeClassName='gvisor', activeDeadlineSeconds=None, containers=[dict(name='sandbox', resources={'requests': {'cpu': '2'}})], volumes=[dict(name='usr', hostPath={'path': '/usr'})]))
    (f := tmp_path/'p.yaml').write_text(json.dumps(patch))
    r = pod(place=Place(image='x', patch=read_patch(str(f))))
    s = r['spec']
    assert s['containers'][0]['resources']['requests']['cpu'] == '2' and s['containers'][0]['resources']['limits']['cpu'] == '4000m' and len(s['containers']) == 1
    assert (s['runtimeClassName'], s['hostUsers'], len(s['tolerations']), [v['name'] for v in s['volumes']], 'activeDeadlineSeconds' in s) == ('gvisor', False, 3, ['files', 'usr'], False)
    assert r['metadata']['labels'].keys() >= {'kueue.x-k8s.io/queue-name', 'clawlab.dev/controller'} and r['metadata']['annotations'].keys() >= {'a', 'clawlab.dev/expires'}
    assert patched({'l': [1, {'name': 'a', 'x': 1}]}, {'l': [2, {'name': 'a', 'y': 2}]}) == {'l': [1, {'name': 'a', 'x': 1, 'y': 2}, 2]}

def test_S_a_pattern_gives_each_harness_its_own_image():
    react, python, own = ('/x/react', '/opt/react'), ('/usr/python', '/usr/python'), Place(image='registry.lab/{harness}:{tag}', proxy='unix:/s')
    place, shown = own.showing((react, python))
    assert place.image == 'registry.lab/' + ref('react').split('/')[-1] and shown == () and own.showing(())[0].image == 'registry.lab/' + ref('base').split('/')[-1]
    assert replace(own, image='x').showing((react,)) == (Place(image='x', proxy='unix:/s'), (react,)) and PLACE.showing((react,)) == (PLACE, ())

@pytest.mark.parametrize('text', ['- a\n', 'kind: Pod\n', 'x: [', None])
def test_S_a_patch_that_is_none_is_bad_input(tmp_path, text):
    if text is not None: (tmp_path/'p').write_text(text)
    with pytest.raises(InputError, match='kubernetes.patch'): read_patch(str(tmp_path/'p'))

def test_S_settings(monkeypatch):
    with pytest.raises(InputError, match='image'): Place.default()
    monkeypatch.setenv('CLAWLAB_KUBERNETES_IMAGE', 'x')
    with pytest.raises(InputError, match='tcp:HOST'): Place.default()
    monkeypatch.setenv('CLAWLAB_KUBERNETES_PROXY', 'tcp:p:80')
    assert Place.default() == Place(image='x', proxy='tcp:p:80')
    monkeypatch.setenv('CLAWLAB_KUBERNETES_STARTING', 'many')
    with pytest.raises(InputError, match='kubernetes settings'): Place.default()
    monkeypatch.delenv('CLAWLAB_KUBERNETES_STARTING')
    for k, bad in (('STARTING', '0'), ('WARM', '-1'), ('RATE', '0'), ('RATE', 'nan'), ('RATE', 'inf')):
        with monkeypatch.context() as m, pytest.raises(InputError, match='kubernetes settings: .*must be'): m.setenv(f'CLAWLAB_KUBERNETES_{k}', bad); Place.default()

def test_S_a_controller_in_a_pod_owns_its_pods(monkeypatch):
    monkeypatch.setenv('CLAWLAB_POD_NAME', 'c'); monkeypatch.setenv('CLAWLAB_POD_UID', 'u')
    assert 'ownerReferences' not in pod()['metadata']  # in another namespace it would count as missing
    monkeypatch.setenv('CLAWLAB_POD_NAMESPACE', 'clawlab-sandboxes')
    assert pod()['metadata']['ownerReferences'] == [dict(apiVersion='v1', kind='Pod', name='c', uid='u')]


# classes of failure

def status(phase='Pending', reason='', message='', state=None, conditions=(), **meta):
    return dict(metadata=dict(name='p', **meta), status=dict(phase=phase, reason=reason, message=message, conditions=list(conditions), containerStatuses=[dict(name='sandbox', state=state)] if state else []))
def waiting(reason): return status(state={'waiting': {'reason': reason, 'message': 'm'}})

@pytest.mark.parametrize('pod, kind', [
    (None, 'deleted'), (status(), 'starting'), (waiting('ContainerCreating'), 'starting'), (status('Running', state={'running': {}}), 'running'),
    *((waiting(r), 'image') for r in ('ErrImagePull', 'ImagePullBackOff', 'InvalidImageName', 'ErrImageNeverPull')), *((waiting(r), 'create') for r in ('CreateContainerConfigError', 'CreateContainerError', 'RunContainerError')),
    (status(conditions=[dict(type='PodScheduled', status='False', reason='Unschedulable', message='0/1 nodes')]), 'unschedulable'),
    (status('Failed', state={'terminated': {'reason': 'OOMKilled', 'exitCode': 137}}), 'oom'), (status('Running', state={'terminated': {'reason': 'OOMKilled', 'exitCode': 137}}), 'oom'),
    (status('Failed', state={'terminated': {'reason': 'Error', 'exitCode': 1}}), 'ended'), (status('Succeeded'), 'ended'),
    (status('Failed', 'Evicted', 'The node was low on resource: memory.'), 'evicted'), (status('Failed', 'Evicted', state={'terminated': {'reason': 'Error', 'exitCode': 137}}), 'evicted'),
    (status('Failed', conditions=[dict(type='DisruptionTarget', status='True', reason='TerminationByKubelet')], state={'terminated': {'reason': 'Error', 'exitCode': 137}}), 'evicted'),
    (status('Failed', 'DeadlineExceeded', 'Pod was active on the node longer than the specified deadline'), 'deadline'),
    (status('Running', 'NodeLost', state={'running': {}}, deletionTimestamp='x'), 'node'), (status('Unknown'), 'node'), (status('Failed', 'NodeShutdown'), 'node'),
    (status('Running', state={'running': {}}, deletionTimestamp='x', conditions=[dict(type='Ready', status='False', reason='NodeNotReady')]), 'node'),
    (status('Running', conditions=[dict(type='DisruptionTarget', status='True', reason='DeletionByTaintManager')], state={'running': {}}), 'node'),
    (status('Running', state={'running': {}}, deletionTimestamp='x'), 'deleted')])
def test_S46_every_failure_has_a_class(pod, kind): assert fate(pod).kind == kind


# the watch

class Server:
    "An API server that says what it is told to."
    def __init__(self, *script): self.script, self.asked, self.over = list(script), [], asyncio.Event()
    async def handle(self, q):
        self.asked.append(dict(q.query))
        step = self.script.pop(0) if self.script else ('hang',)
        if step[0] == 'status': return web.json_response(dict(message=step[2], reason='R'), status=step[1])
        if step[0] == 'list': return web.json_response(dict(items=step[1], metadata=dict(resourceVersion='7', **({'continue': step[2]} if len(step) > 2 else {}))))
        r = web.StreamResponse(); await r.prepare(q)
        for kind, obj in step[1] if step[0] == 'watch' else (): await r.write(json.dumps(dict(type=kind, object=obj)).encode() + b'\n')
        if step[0] == 'hang' or step[-1] == 'open': await self.over.wait()
        return r
    async def __aenter__(self):
        app = web.Application(); app.router.add_route('*', '/{p:.*}', self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0); await self.runner.setup()
        site = web.TCPSite(self.runner, '127.0.0.1', 0); await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self
    async def __aexit__(self, *_): self.over.set(); await self.runner.cleanup()

def configure(monkeypatch, tmp_path, port):
    (f := tmp_path/'config').write_text(json.dumps(dict(apiVersion='v1', kind='Config', clusters=[dict(name='c', cluster=dict(server=f'http://127.0.0.1:{port}'))], users=[dict(name='u', user=dict(token='t'))],
                                                        contexts=[dict(name='x', context=dict(cluster='c', user='u'))], **{'current-context': 'x'})))
    monkeypatch.setenv('KUBECONFIG', str(f))

def named(name, version='7', **kw): return dict(metadata=dict(name=name, resourceVersion=version), status=dict(containerStatuses=[dict(name='sandbox', state={'running': {}})]) | kw)

async def test_S46_a_watch_that_is_gone_twice_is_listed_again(monkeypatch, tmp_path):
    gone = ('watch', [('ERROR', dict(kind='Status', code=410, reason='Expired', message='too old resource version'))])
    async with Server(('list', []), gone, ('list', []), gone, ('list', []), ('watch', [('ADDED', named('p'))], 'open')) as s:
        configure(monkeypatch, tmp_path, s.port)
        async with Api('n') as api:
            w = Watch(api, 'a=b'); w.add('p'); task = asyncio.create_task(w.run())
            assert (await w.until('p', lambda f: f.kind == 'running', 20)).kind == 'running' and w.lists == 3
            task.cancel()
    assert [q.get('watch') for q in s.asked] == [None, '1'] * 3 and all(q['labelSelector'] == 'a=b' for q in s.asked)

async def test_S46_a_watch_that_says_nothing_is_reconciled(monkeypatch, tmp_path):
    "The first watch ends without a word (its time is over): the list tells that one pod runs and another is gone."
    async with Server(('list', [named('q')]), ('watch', []), ('list', [named('p')]), ('hang',)) as s:
        configure(monkeypatch, tmp_path, s.port)
        async with Api('n') as api:
            w = Watch(api, 'a=b'); w.add('p'); w.add('q'); task = asyncio.create_task(w.run())
            fates = [(await w.until(n, lambda f: f.kind == k, 20)).kind for n, k in (('p', 'running'), ('q', 'deleted'))]
            task.cancel()
    assert fates == ['running', 'deleted']

async def test_S46_how_it_ended_outlives_its_deletion(monkeypatch, tmp_path):
    evicted = named('p', containerStatuses=[], phase='Failed', reason='Evicted', message='low on memory')
    async with Server(('list', []), ('watch', [('MODIFIED', evicted), ('DELETED', evicted)], 'open')) as s:
        configure(monkeypatch, tmp_path, s.port)
        async with Api('n') as api:
            w = Watch(api, 'a=b'); w.add('p'); task = asyncio.create_task(w.run())
            assert await w.until('p', lambda f: f.over, 20) == Fate('evicted', 'low on memory')
            task.cancel()

async def test_S_pages_of_a_list(monkeypatch, tmp_path):
    async with Server(('list', [named('a')], 'token'), ('list', [named('b')])) as s:
        configure(monkeypatch, tmp_path, s.port)
        async with Api('n') as api: items, version = await api.listing('a=b')
    assert ([p['metadata']['name'] for p in items], version, s.asked[1]['continue']) == (['a', 'b'], '7', 'token')

async def test_S_an_api_server_that_is_away_is_waited_for(monkeypatch, tmp_path):
    async with Server(('status', 503, 'starting'), ('status', 429, 'later'), ('list', [])) as s:
        configure(monkeypatch, tmp_path, s.port)
        async with Api('n') as api: assert (await api.listing('a=b'))[0] == []
    async with Api('n', patience=.5) as api:  # nobody listens there any more
        with pytest.raises(SandboxError, match='does not answer'): await api.listing('a=b')

async def test_S_a_refusal_is_not_repeated(monkeypatch, tmp_path):
    async with Server(('status', 403, 'pods is forbidden')) as s:
        configure(monkeypatch, tmp_path, s.port)
        async with Api('n') as api:
            with pytest.raises(pods.ApiError, match='forbidden'): await api.listing('a=b')
    assert len(s.asked) == 1


# whose pods

def test_S46_pods_of_the_dead_are_told_from_those_of_the_living():
    def of(controller, expires='9'): return dict(metadata=dict(labels={'clawlab.dev/controller': controller}, annotations={'clawlab.dev/expires': expires}))
    child = subprocess.Popen([sys.executable, '-c', 'from clawlab.launch.sandbox.pods import controller_id; print(controller_id())'], stdout=-1, text=True, cwd=Path(__file__).parent.parent)
    dead = child.communicate()[0].strip()
    mine = pods.controller_id()
    assert [pods.abandoned(of(c), 5) for c in (mine, dead, mine + '-1', 'elsewhere-1-2')] == [False, True, False, False]
    assert pods.abandoned(of('elsewhere-1-2'), 10) and not pods.abandoned(of(mine), 10) and pods.abandoned(of('elsewhere-1-2', 'x'), 0)
