"The backends that the conformance and attack suites run on, and what each leaves to its surroundings."
from pathlib import Path
from conformance import Backend

def of_uid(uid):
    "Live processes of a sandbox's uid on this machine."
    out = []
    for p in Path('/proc').glob('[0-9]*'):
        try:
            if p.stat().st_uid == uid and (p/'stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z': out.append(int(p.name))
        except (FileNotFoundError, ProcessLookupError): pass
    return out

BACKENDS = {b.name: b for b in [Backend('bwrap', live=lambda s: of_uid(s.uid)), Backend('podman', live=lambda s: of_uid(s.uid)),
    Backend('kubernetes', not_enforced={'reach_another_sandbox': 'the test cluster stores NetworkPolicy and does not enforce it', 'memory_in_sockets': 'the kubelet has no setting for what waits in sockets under control groups of version 1', 'fork_bomb': 'processes are capped by the kubelet (podPidsLimit, 256 here), not per pod'})]}
