"""python3 image.py FILE: a docker archive of a few kilobytes that holds links, empty folders and two users; a node that is this machine shows it its own /usr (see overlay.yaml)."""
import hashlib, io, json, platform, sys, tarfile

NAME = 'localhost/clawlab-test:1'
FILES = {'etc/passwd': 'root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n', 'etc/group': 'root:x:0:\nagent:x:1000:\n', 'etc/nsswitch.conf': 'passwd: files\ngroup: files\nhosts: files dns\n'}
FOLDERS = {'workspace': 0o755, 'home': 0o755, 'home/agent': 0o755, 'tmp': 0o1777, 'opt': 0o755, 'usr': 0o755, 'run': 0o755, 'run/clawlab': 0o755, 'var': 0o755, 'etc': 0o755, 'proc': 0o755, 'sys': 0o755, 'dev': 0o755}
LINKS = {**{d: f'usr/{d}' for d in ('bin', 'sbin', 'lib', 'lib32', 'lib64')}, 'var/tmp': '/tmp'}

def add(tar, name, data=b'', **kw):
    t = tarfile.TarInfo(name); t.size = len(data)
    for k, v in kw.items(): setattr(t, k, v)
    tar.addfile(t, io.BytesIO(data))

def main(path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode='w') as tar:
        for n, mode in FOLDERS.items(): add(tar, n, type=tarfile.DIRTYPE, mode=mode)
        for n, text in FILES.items(): add(tar, n, text.encode())
        for n, to in LINKS.items(): add(tar, n, type=tarfile.SYMTYPE, linkname=to)
    layer = out.getvalue()
    arch = {'x86_64': 'amd64', 'aarch64': 'arm64'}.get(platform.machine(), platform.machine())
    config = json.dumps(dict(architecture=arch, os='linux', config=dict(User='1000'), rootfs=dict(type='layers', diff_ids=['sha256:' + hashlib.sha256(layer).hexdigest()]))).encode()
    with tarfile.open(path, 'w') as tar:
        add(tar, 'manifest.json', json.dumps([dict(Config='config.json', RepoTags=[NAME], Layers=['layer.tar'])]).encode()); add(tar, 'config.json', config); add(tar, 'layer.tar', layer)

if __name__ == '__main__': main(sys.argv[1])
