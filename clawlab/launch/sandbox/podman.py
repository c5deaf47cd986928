"A container for every program."
from __future__ import annotations
import asyncio, errno, functools, hashlib, io, json, os, secrets, shutil, signal, socket, subprocess, tarfile, time, weakref
from dataclasses import dataclass
from pathlib import Path
from ...records import InputError, SandboxError, setting
from . import inside, keeper
from .base import Drain, Exec, HOME, Limits, Sandbox, WORKSPACE, read_tree, write_tree
from .bwrap import ENV, Held, last_line, memfd, verdict


PARALLEL, CALL_S, START_S = 4, 60, 60  # podman calls at a time, seconds for one of them, seconds for a container to report

def own_cgroup() -> str | None:
    "The launcher's own version 1 cgroup, under which its containers go; None where only version 2 is mounted."
    if os.path.exists('/sys/fs/cgroup/cgroup.controllers'): return None
    return next((p for _, names, p in (l.rstrip('\n').split(':', 2) for l in open('/proc/self/cgroup')) if 'cpu' in names.split(',')), '/').rstrip('/') + '/clawlab'

def command() -> list[str]: return ['podman', *(['--runtime', 'runc', '--cgroup-manager', 'cgroupfs'] if own_cgroup() else [])]

_gates = weakref.WeakKeyDictionary()

async def podman(*args, seconds=CALL_S, cwd='/') -> str:
    "The output of a podman command. Errors: `SandboxError` with podman's last line, or that it took too long."
    async with _gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(PARALLEL)):
        p = await asyncio.create_subprocess_exec(*command(), *args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, cwd=cwd)
        try: out, err = await asyncio.wait_for(p.communicate(), seconds)
        except asyncio.TimeoutError: raise SandboxError(f'podman {args[0]} took more than {seconds:g} s') from None
        finally:
            if p.returncode is None: p.kill(); await p.wait()
    if p.returncode: raise SandboxError(f'podman {args[0]}: {last_line(err)}')
    return out.decode()


def host_image() -> bytes:
    "A tar of the folders, links and few files of /etc that programs expect around a `/usr`."
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode='w') as tar:
        def add(name, kind, mode=0o755, link='', data=b''):
            t = tarfile.TarInfo(name); t.type, t.mode, t.linkname, t.size = kind, mode, link, len(data); tar.addfile(t, io.BytesIO(data))
        for d in ('etc', 'etc/alternatives', 'usr', 'opt', 'run', 'run/clawlab', 'home', 'home/agent', 'workspace', 'var', 'proc', 'sys', 'dev', 'tmp'): add(d, tarfile.DIRTYPE)
        for d in ('bin', 'sbin', 'lib', 'lib32', 'lib64'):
            if os.path.islink(f'/{d}'): add(d, tarfile.SYMTYPE, link=f'usr/{d}')
        add('var/tmp', tarfile.SYMTYPE, link='/tmp')
        for name, text in {**keeper.ETC, 'ld.so.cache': ''}.items(): add(f'etc/{name}', tarfile.REGTYPE, 0o644, data=text.encode())
    return out.getvalue()

async def image() -> tuple[str, list[tuple[str, str]]]:
    "The image to start, and what of this machine it needs to be shown."
    if name := setting('sandbox', 'image'): return name, []
    name = f'localhost/clawlab-host:{hashlib.sha256(data := host_image()).hexdigest()[:12]}'
    if name not in _made:
        try: await podman('image', 'exists', name)
        except SandboxError:
            fd = memfd(data)
            try: await podman('import', '--quiet', f'/proc/{os.getpid()}/fd/{fd}', name)
            finally: os.close(fd)
        _made.add(name)
    return name, [(p, p) for p in ('/usr', '/etc/alternatives', '/etc/ld.so.cache') if os.path.exists(p)]
_made = set()


def limit_args(limits: Limits) -> list[str]:
    "Caps, as options. Process 1 counts as a process."
    out = ['--pids-limit', str(limits.pids + 1 if limits.pids else -1)]
    if limits.memory_mb: out += ['--memory', f'{limits.memory_mb}m', '--memory-swap', f'{limits.memory_mb}m']
    return out + (['--cpus', f'{max(limits.cpus, .01):g}'] if limits.cpus else [])

def volume(host: str, inside: str, mode='ro') -> list[str]:
    if ':' in host + inside: raise InputError(f'cannot bind {host} into a container: a colon in its path')
    return ['-v', f'{host}:{inside}:{mode},nosuid,nodev']

def run_args(name: str, owner: str, uid: int, box: str, talk: str, limits: Limits, binds) -> list[str]:
    "`podman run` with everything closed. `box`: the sandbox's folder; `talk`: the folder of the socket and of process 1's program."
    args = ['run', '--detach', '--rm', '--pull', 'never', '--name', name, '--label', f'clawlab={owner}', '--hostname', 'sandbox', '--log-driver', 'none', '--network', 'none', '--no-hosts', '--passwd=false',
            '--user', f'{uid}:{uid}', '--cap-drop', 'all', '--security-opt', 'no-new-privileges', '--security-opt', 'label=disable', '--read-only', '--read-only-tmpfs=false', '--image-volume', 'ignore', '--shm-size', '64m',
            '--http-proxy=false', '--systemd=false', '--ulimit', 'nofile=1024:4096', '--ulimit', 'nproc=4096:4096', '--ulimit', 'core=0:0', '--workdir', '/', *limit_args(limits)]
    if parent := own_cgroup(): args += ['--cgroup-parent', parent]
    for a, b in (('workspace', WORKSPACE), ('home', HOME), ('tmp', '/tmp')): args += volume(f'{box}/ws/{a}', b, 'rw')
    return args + [x for b in (*binds, (talk, '/run/clawlab')) for x in volume(*b)]

PROCESS_1 = ['-I', '-S', '-c', "import sys; sys.path.insert(0, '/run/clawlab'); from box import inside; inside.main('/run/clawlab/sock')"]


HERE = f'{keeper.RUN}/podman'  # folders of live sandboxes: HERE/OWNER/UID

def born(pid) -> str | None:
    "When a process started, in ticks since the machine did; None if it lives no more."
    try: words = open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()
    except (FileNotFoundError, ProcessLookupError): return None
    return None if words[0] in 'ZX' else words[19]

def owner() -> str: return f'{os.getpid()}-{born(os.getpid())}'

def lives(owner: str) -> bool: return (x := owner.partition('-'))[2] == born(x[0])

def clear(d: str):
    "Remove the folder of a sandbox."
    try: keeper.call('umount2', os.fsencode(f'{d}/ws'), 2)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOENT): raise
    shutil.rmtree(d, ignore_errors=True)
    try: os.rmdir(os.path.dirname(d))
    except OSError: pass


@dataclass(eq=False)
class Container:
    "Process 1 of a live container, seen from here."
    name: str
    sock: socket.socket   # to process 1
    ear: Held             # listens in the container's network
    pidfd: int
    cgroups: dict         # controller -> folder

    def kill(self):
        "End everything in the container; the kernel does, when process 1 goes."
        try: signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError: pass

    async def end(self):
        "Let process 1 go, and return when nothing of the container runs any more."
        self.sock.close(); self.ear.close(); self.kill()
        try: await asyncio.wait_for(readable(self.pidfd), CALL_S)
        except asyncio.TimeoutError: raise SandboxError(f'container {self.name} does not end') from None
        finally: os.close(self.pidfd)

    def usage(self) -> tuple[bool, float]:
        "`(out of memory, CPU seconds)`, while process 1 keeps the cgroup alive."
        def read(controller, file, field=None):
            try: text = open(f'{self.cgroups[controller]}/{file}').read()
            except (KeyError, OSError): return 0
            return int(text) if field is None else int(dict(l.split() for l in text.splitlines()).get(field, 0))
        if '' in self.cgroups and 'memory' not in self.cgroups: return read('', 'memory.events', 'oom_kill') > 0, read('', 'cpu.stat', 'usage_usec') / 1e6
        full = read('memory', 'memory.max_usage_in_bytes') >= .9 * read('memory', 'memory.limit_in_bytes')  # if not, the *machine* ran out of memory
        return full and read('memory', 'memory.oom_control', 'oom_kill') > 0, read('cpuacct', 'cpuacct.usage') / 1e9

async def readable(fd: int):
    "Wait until there is something to read, or the end."
    f = (loop := asyncio.get_running_loop()).create_future()
    loop.add_reader(fd, lambda: f.done() or f.set_result(None))
    try: await f
    finally: loop.remove_reader(fd)

def cgroups_of(pid: int) -> dict[str, str]:
    return {c: f'/sys/fs/cgroup/{names}{path}' for names, path in (l.rstrip('\n').split(':', 2)[1:] for l in open(f'/proc/{pid}/cgroup')) for c in names.split(',')}

async def meet(listening: socket.socket, name: str) -> Container:
    "Process 1 calls: who it is, and its listening socket."
    sock, _ = await asyncio.get_running_loop().sock_accept(listening)
    sock.setblocking(False)
    pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], 'little')
    try:
        pidfd, groups = os.pidfd_open(pid), cgroups_of(pid)
        await readable(sock.fileno())
        data, fds = keeper.receive_fds(sock)
    except OSError as e: sock.close(); raise SandboxError(f'container {name} did not start: {e}') from None
    c = Container(name, sock, Held(fds[0] if fds else None), pidfd, groups)
    if data: return c
    await c.end()
    raise SandboxError(f'container {name} did not start: process 1 ended at once')


class Podman(Sandbox):
    "A podman sandbox; see `make_sandbox`."
    home, workspace, url = HOME, WORKSPACE, f'http://127.0.0.1:{keeper.PORT}'

    def __init__(self, limits: Limits, binds=(), listener=None, name=''):
        self.limits, self.binds, self.listener, self.name = limits, tuple(binds), listener, name
        self.uid = self.root = self.claim = self.ready = None
        self.left_out, self.calls, self.running, self.stopping = [], {}, set(), False

    async def start(self):
        if os.geteuid(): raise InputError("podman sandboxes need root, to give each one its own uid; as an ordinary user only the 'process' backend works, without isolation")
        if not shutil.which('podman'): raise InputError('podman sandboxes need podman: apt-get install podman' + (' runc' if own_cgroup() else ''))
        check_binds(self.binds)
        os.makedirs(keeper.RUN, exist_ok=True)
        self.uid, *self.claim = keeper.claim()
        self.dir = f'{HERE}/{owner()}/{self.uid}'
        try:
            os.makedirs(f'{self.dir}/ws', exist_ok=True); os.chmod(HERE, 0o700)
            keeper.lay_out(f'{self.dir}/ws', self.uid, self.limits.disk_mb)
            self.root = os.open(f'{self.dir}/ws', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.ready = await self.launch(self.binds)
        except BaseException: await self.stop(); raise
        return self

    async def launch(self, binds) -> Container:
        "A container whose process 1 waits for its command."
        what, shown = await image()
        name = f'clawlab-{self.uid}-{secrets.token_hex(4)}'
        talk = f'{self.dir}/{name}'
        os.makedirs(f'{talk}/box'); os.chmod(talk, 0o755)
        for m in (keeper, inside): shutil.copyfile(m.__file__, f'{talk}/box/{Path(m.__file__).name}')
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as l:
            l.bind(f'{talk}/sock'); os.chmod(f'{talk}/sock', 0o666); l.listen(1); l.setblocking(False)
            call = self.calls[name] = asyncio.ensure_future(podman(*run_args(name, owner(), self.uid, self.dir, talk, self.limits, (*shown, *binds)), '--entrypoint', '/usr/bin/python3', what, *PROCESS_1, cwd=talk))
            met = asyncio.ensure_future(meet(l, name))
            try:
                await asyncio.wait({call, met}, return_when=asyncio.FIRST_COMPLETED)  # the call has a deadline
                for _ in range(START_S // 3):
                    if met.done(): return met.result()
                    call.result(); await asyncio.wait({met}, timeout=3)
                    if not met.done() and name not in await podman('ps', '--filter', f'name={name}', '--format', '{{.Names}}'): raise SandboxError(f'container {name}: process 1 ended before it reported')
                raise SandboxError(f'container {name} did not report within {START_S} s')
            finally:
                if not met.done(): met.cancel()
                os.unlink(f'{talk}/sock')

def check_binds(binds):
    for host, _ in binds:
        if not os.path.exists(host): raise InputError(f'cannot bind {host} into a sandbox: it does not exist')


async def exec(self: Podman, argv, env=None, cwd=None, timeout=None, stdin=b'', readonly_binds=()) -> Exec:
    "Run a program in the sandbox to its end, or to `timeout` seconds (default: the limit); its children end with it."
    order = dict(argv=list(map(str, argv)), env={**ENV, **{k: str(v) for k, v in (env or {}).items()}}, cwd=os.path.normpath(os.path.join(WORKSPACE, cwd or '.')))
    if any('\0' in x for x in (*order['argv'], *order['env'], *order['env'].values(), order['cwd'])): raise InputError('a NUL character in the command or environment of a sandbox')
    check_binds(readonly_binds)
    if self.ready and not readonly_binds: c, self.ready = self.ready, None
    else: c = await self.launch((*self.binds, *readonly_binds))
    (out, out_w), (err, err_w) = os.pipe(), os.pipe()
    fds, drains = [memfd(json.dumps(order).encode()), memfd(stdin), out_w, err_w], [Drain(out), Drain(err)]
    self.running.add(c)
    try:
        if self.listener is not None: await self.listener(socket.socket(fileno=c.ear.take()))
        c.ear.close()
        report, late, seconds = await self.attend(c, fds, timeout or self.limits.seconds)
        oom, cpu = c.usage()
    except BaseException: [d.close() for d in drains]; raise
    finally:
        for fd in fds: os.close(fd)
        await c.end(); self.running.discard(c)
    if self.stopping: [d.close() for d in drains]; raise SandboxError(f'sandbox {self.name} was stopped while a program ran in it')
    status, sent = json.loads(report) if report else (None, False)
    oom = oom or not report and not late and os.path.exists(f'{self.dir}/{c.name}/oom')  # podman's monitor writes it where it was started
    return Exec(**verdict(dict(status=status, sent=sent, bwrap=signal.SIGKILL, timed_out=late, oom=oom)), stdout=await drains[0].done, stderr=await drains[1].done, seconds=seconds, cpu=cpu)
Podman.exec = exec

async def attend(self: Podman, c: Container, fds, seconds) -> tuple[bytes, bool, float]:
    "Give the command; what process 1 reports (nothing if it was killed), whether the deadline ended it, and the seconds it took."
    t = time.monotonic()
    try: socket.send_fds(c.sock, [b'go'], fds)
    except OSError: return b'', False, 0.
    while fds: os.close(fds.pop())
    try: await asyncio.wait_for(readable(c.sock.fileno()), seconds)
    except asyncio.TimeoutError: return b'', True, time.monotonic()-t
    try: return c.sock.recv(99), False, time.monotonic()-t
    except OSError: return b'', False, time.monotonic()-t
Podman.attend = attend


async def put(self: Podman, files): write_tree(self.root, files, self.uid)

async def get(self: Podman) -> dict[str, bytes]:
    "The regular files of the workspace, at most the disk limit; what stayed behind is in `left_out`."
    d = os.open('workspace', os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self.root)
    try: files, self.left_out = await asyncio.to_thread(read_tree, d, self.limits.disk_mb or 1 << 20)
    finally: os.close(d)
    return files

async def stop(self: Podman):
    "End every program and remove containers and files; twice is fine."
    if self.claim is None: return
    (path, lock), self.claim, self.stopping = self.claim, None, True
    for c in self.running: c.kill()
    if self.ready: c, self.ready = self.ready, None; await c.end()
    if self.root is not None: os.close(self.root); self.root = None
    calls, self.calls = self.calls, {}
    await asyncio.gather(*calls.values(), return_exceptions=True)
    try:
        if calls: await remove(calls)
    finally: clear(self.dir); keeper.bury(path, lock)
Podman.put, Podman.get, Podman.stop = put, get, stop

async def remove(names):
    "Remove containers that may be on their way out already."
    try: await podman('rm', '--force', '--time', '0', '--ignore', *names)
    except SandboxError:
        left = [n for n in names if n in (await podman('ps', '--all', '--format', '{{.Names}}')).split()]
        if left: await podman('rm', '--force', '--time', '0', '--ignore', *left)


def make(limits, binds, listener, name): return Podman(limits, binds, listener, name)

async def probe() -> str:
    "Make one sandbox with a network and run `true` in it."
    async def close(sock): sock.close()
    try:
        async with Podman(Limits.default(), listener=close, name='probe') as s: r = await s.exec(['true'])
    except (InputError, SandboxError) as e: return str(e)
    except OSError as e: return f'podman: {e}'
    return '' if r.ok else f'podman: {r._repr_markdown_()}'

def sweep() -> list[str]:
    "Remove containers and folders of launchers that live no more."
    out, run = [], functools.partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_S)
    if os.geteuid() == 0 and shutil.which('podman'):
        try: listed = run([*command(), 'ps', '--all', '--filter', 'label=clawlab', '--format', '{{.Names}} {{.Labels.clawlab}}']).stdout.split()
        except subprocess.TimeoutExpired: return ['podman: does not answer, nothing swept']
        if dead := [n for n, who in zip(listed[::2], listed[1::2]) if not lives(who)]:
            run([*command(), 'rm', '--force', '--time', '0', '--ignore', *dead]); out += [f'podman: removed container {n}' for n in dead]
    for d in [d for o in Path(HERE).glob('*') if not lives(o.name) for d in o.iterdir()]: clear(str(d)); out.append(f'podman: removed {d}')
    return out

