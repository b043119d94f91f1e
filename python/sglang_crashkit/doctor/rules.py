"""The doctor's rules: pure functions from facts to findings."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from sglang_crashkit.doctor.facts import Facts, ServerFacts
from sglang_crashkit.doctor.findings import Finding
from sglang_crashkit.doctor.variables import check_variables
from sglang_crashkit.kernel.shared_memory import FOLDER
from sglang_crashkit.policy import Action, Capture, Event, Mode, decide
from sglang_crashkit.settings import OTLP_ENDPOINT

_MB = 1 << 20
#: On these each read waits for another machine.
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "9p", "fuse.glusterfs"})
_MEMORY = frozenset({"tmpfs", "ramfs"})
_LAYER = frozenset({"overlay", "aufs"})
#: Docker gives a container so much of ``/dev/shm``.
_DOCKER_SHM = 64 * _MB
#: Kubernetes' and Docker's defaults, in seconds.
_KUBERNETES_GRACE, _DOCKER_GRACE = 30.0, 10.0
#: What a server's end takes beside the evidence, in seconds.
_MARGIN_SECS = 15.0
_CAPABILITY = (
    "Docker: docker run --cap-add=SYS_PTRACE ...",
    'Kubernetes: securityContext: {capabilities: {add: ["SYS_PTRACE"]}}, of the container',
    "Slurm/pyxis: srun --container-remap-root ... (root of the container's user namespace has it)",
)
_SECCOMP = (
    "Docker: docker run --security-opt seccomp=unconfined ... (Docker before 19.03 forbids it by default)",
    "Kubernetes: securityContext: {seccompProfile: {type: Unconfined}}, of the container",
)
#: Events of the rule table that a person asks about, with their words.
_EVENTS = {Event.DIED: "dies", Event.RAISED: "raises", Event.HUNG: "hangs"}


def judge(facts: Facts) -> list[Finding]:
    """Return all findings, in the order in which a person reads them."""
    findings = [*_installation(facts), *_servers(facts), *_tracing(facts), *_gpu(facts), *_folder(facts)]
    findings += [
        *_shared_memory(facts),
        *_end(facts),
        *_opentelemetry(facts),
        *check_variables(facts.environ, list(facts.arguments)),
    ]
    return findings


def _installation(facts: Facts) -> Iterator[Finding]:
    found = facts.installation
    mend = (found.next,) if found.next else ()
    if not found.state:
        why = "nothing can be said of a server that this python does not run"
        yield Finding("problem", "kit", found.words, why, mend or ("name the server's python with --python PATH",))
    elif found.state == "patched":
        # As where the kit of this command is not the one that SGLang's python has.
        why = "a server that starts now may not have what this command knows" if mend else ""
        yield Finding("ok" if not mend else "warning", "kit", f"applied and intact: {found.words}", why, mend)
    elif found.supported:
        why = "no crash of it leaves an incident" if found.state == "pristine" else "what a crash leaves is uncertain"
        yield Finding("problem", "kit", f"{found.state}: {found.words}", why, mend)
    if found.state and not found.supported:
        other = mend or (f"pip install sglang==RELEASE, with one of {found.range}",)
        yield Finding("problem", "release", f"{found.words} is none of {found.range}", "it cannot be patched", other)
    elif found.state:
        yield Finding("ok", "release", f"supported: {found.range}")


def _servers(facts: Facts) -> Iterator[Finding]:
    if not facts.servers:
        yield Finding("note", "server", "none of this user runs here: the settings are those of this shell")
    for server in facts.servers:
        name = f"server {server.pid}"
        is_watched = server.handler is not None and not server.problem
        if is_watched:
            yield Finding("ok", name, f"watched by crash handler {server.handler}")
        elif server.is_starting:
            words = "is still starting: whether a crash handler watches it shows when its ranks run"
            yield Finding("note", name, words, next=(f"sglang-crashkit doctor --pid {server.pid}   # once it serves",))
        else:
            why = "a crash of it leaves no incident"
            yield Finding("problem", name, f"has no crash handler: {server.problem}", why, _to_be_watched(facts))
        if server.is_others:
            why = "who may look at whom, and write where, differs between users"
            yield Finding("note", name, "runs as another user", why, ("run this command as that user",))
        if server.is_elsewhere:
            yield Finding(
                "note",
                name,
                "runs in another container than this command, which saw its own surroundings",
                "who may look at whom, disks and shared memory may differ there",
                ("run this command in that container: docker exec, kubectl exec",),
            )
        if is_watched:
            yield Finding("note", name, _policy_in_words(server.mode))


def _opentelemetry(facts: Facts) -> Iterator[Finding]:
    is_traced = "--enable-trace" in facts.arguments
    where = facts.environ.get(OTLP_ENDPOINT)
    if not (where or (is_traced and where is None)):
        return
    if facts.has_opentelemetry:
        yield Finding("ok", "opentelemetry", "each incident is a log record where SGLang's traces go")
    else:
        why = "an incident is no log record there"
        mend = ("pip install 'sglang[tracing]'",)
        yield Finding("warning", "opentelemetry", "its exporter is not installed", why, mend)


def _to_be_watched(facts: Facts) -> tuple[str, ...]:
    found = facts.installation
    is_to_be_patched = found.supported and found.state not in ("", "patched")
    return (*([found.next or "sglang-crashkit apply"] if is_to_be_patched else []), "restart the server")


def policy_table(mode: Mode) -> dict[str, dict[str, object]]:
    """Return what is done about each event, as `policy` has it, for a program."""
    return {event.value: _as_json(decide(mode, event)) for event in Event}


def _as_json(action: Action) -> dict[str, object]:
    return {
        "records": action.records,
        "tells": action.tells,
        "ends": action.ends,
        "captures": action.captures.value,
    }


def _policy_in_words(mode: Mode) -> str:
    told: dict[str, list[str]] = {}
    for event, words in _EVENTS.items():
        action = decide(mode, event)
        how = "" if action.captures is Capture.FULL else ", taken without stopping a process"
        told.setdefault(
            f"an incident{how}; {'the server ends' if action.ends else 'SGLang decides what follows'}", []
        ).append(words)
    parts = [f"when a rank {' or '.join(events)}: {done}" for done, events in told.items()]
    return f"{'; '.join(parts)} (mode {mode.value}, see docs/policy.md)"


def _tracing(facts: Facts) -> Iterator[Finding]:
    found, topic = facts.tracing, "py-spy"
    if not facts.settings.stacks:
        yield Finding("note", topic, "not used: SGLANG_PYSPY_DUMP_BEFORE_CRASH is off, so no stacks are taken")
        return
    lost = "of a rank that is stuck outside of Python there may be no stack"
    if found.executable is None:
        yield Finding("problem", topic, "is not installed", lost, ("pip install py-spy",))
        return
    if not found.problem:
        yield Finding("ok", topic, f"{found.version} looks at processes of this user")
        return
    mend: tuple[str, ...]
    if found.ptrace_scope == 3:
        reason = "Yama forbids it to everybody (kernel.yama.ptrace_scope=3)"
        mend = ("start the host with another kernel.yama.ptrace_scope, which cannot be changed before",)
    elif found.ptrace_scope == 2 and not found.has_capability:
        reason = "Yama allows it with CAP_SYS_PTRACE alone (kernel.yama.ptrace_scope=2)"
        mend = ("on the host: sysctl kernel.yama.ptrace_scope=1", *_CAPABILITY)
    elif found.has_seccomp:
        reason = "a seccomp filter holds here"
        mend = (*_CAPABILITY, *_SECCOMP)
    else:
        reason = "CAP_SYS_PTRACE is " + ("there" if found.has_capability else "not there")
        mend = _CAPABILITY
    yield Finding("warning", topic, f"cannot look at other processes: {found.problem}; {reason}", lost, mend)


def _gpu(facts: Facts) -> Iterator[Finding]:
    if not facts.has_gpu:
        yield Finding("note", "GPU", "there is none here: neither the devices of NVIDIA's driver nor of AMD's")
        return
    gpu = facts.gpu
    if gpu is not None and gpu.driver:
        what = f"driver {gpu.driver.get('version')} tells of {gpu.driver.get('gpus')} GPUs"
        yield Finding("ok" if not gpu.reason else "warning", "GPU", what + (f"; {gpu.reason}" if gpu.reason else ""))
    else:
        reason = gpu.reason if gpu is not None else "it was not asked"
        why = "Xid events, memory and processes of the GPUs are missing in an incident"
        yield Finding("warning", "GPU", f"the driver tells nothing: {reason}", why, ("nvidia-smi",))
    if facts.debugger == "cuda-gdb":
        yield Finding("ok", "debugger", "cuda-gdb is there")
    else:
        what, _, mend = facts.debugger_missing.partition("; next: ")
        yield Finding("note", "debugger", what, "native stacks and kernels that hang need it", (mend,) if mend else ())
    yield from _core_variables(facts)


def _core_variables(facts: Facts) -> Iterator[Finding]:
    environ, topic = facts.environ, "GPU cores"
    if not facts.settings.cores:
        yield Finding("note", topic, "SGLANG_CUDA_COREDUMP_BEFORE_CRASH is off: none is written")
        return
    if not facts.has_own_folder:
        yield Finding(
            "warning",
            topic,
            "CUDA's core variables are set with --crash-dump-folder alone",
            "a GPU exception leaves no core, so no kernel is named",
            ("--crash-dump-folder FOLDER",),
        )
        return
    wanted = {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1"}
    wanted["CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION"] = "0"
    why = {"0": "the driver aborts a rank before Python can say what failed", "1": "no such core is written"}
    wrong = {name: value for name, value in wanted.items() if environ.get(name, value) != value}
    for name, value in wrong.items():
        yield Finding("warning", topic, f"{name}={environ[name]} was set", why[value], (f"unset {name}",))
    if "%t" in environ.get("CUDA_COREDUMP_PIPE", ""):
        yield Finding(
            "warning", topic, "CUDA_COREDUMP_PIPE holds %t", "no pipe is found by it", ("unset CUDA_COREDUMP_PIPE",)
        )
    for server in facts.servers:
        for title, reason in server.without_pipe.items():
            why_not = "no core can be asked for while it hangs"
            what = f"{title} of server {server.pid}: {reason}"
            yield Finding("warning", topic, what, why_not, ("restart the server",))
    if not wrong and not any(server.without_pipe for server in facts.servers):
        yield Finding("ok", topic, "the driver is told to write them, and takes requests")


def _folder(facts: Facts) -> Iterator[Finding]:
    folder, topic = facts.folder, "crash folder"
    quoted = shlex.quote(folder.path)
    if not facts.has_own_folder:
        yield Finding(
            "warning",
            topic,
            f"none is set: incidents go to {folder.path}",
            "requests are not saved, GPU cores not written, and a container takes the incidents with it",
            ("--crash-dump-folder FOLDER",),
        )
    if folder.problem:
        yield Finding(
            "problem",
            topic,
            f"{folder.path}: {folder.problem}",
            "incidents go to the temporary folder",
            (f"df -h {quoted}; ls -ld {quoted}", "--crash-dump-folder FOLDER, that this user may write to"),
        )
        return
    used = f"{folder.incidents} incidents take {_size(folder.use)} of {_size(folder.max_use)}"
    what = f"{folder.path} ({folder.file_system or 'unknown'}), {_size(folder.free)} of {_size(folder.total)} free"
    # What one incident takes: without it the oldest go, and then evidence is left away.
    needed = min(facts.settings.disk.max_incident, folder.max_use)
    if folder.has_no_room(facts.settings.disk):
        yield Finding("problem", topic, what, "an incident has no room", (f"du -xsh {quoted}",))
    elif folder.free < folder.keep_free + needed:
        why = f"SGLANG_CRASHKIT_KEEP_FREE_MB ({_size(folder.keep_free)}) leaves less than one incident may take"
        yield Finding("warning", topic, what, why, (f"du -xsh {quoted}",))
    else:
        yield Finding("ok", topic, f"{what}; {used}")
    kind = folder.file_system
    if kind in _MEMORY:
        why = "incidents take memory, and are gone with the machine or the container"
        yield Finding("warning", topic, f"it is in memory ({kind})", why, ("--crash-dump-folder FOLDER, on a disk",))
    elif kind in _LAYER and facts.has_own_folder:
        why = "incidents are gone with the container"
        mend = (f"Docker: -v /var/crash/sglang:{quoted}", "Kubernetes: a volumeMount of a hostPath or a claim")
        yield Finding("warning", topic, f"it is in the container's own layer ({kind})", why, mend)
    elif kind in _NETWORK:
        yield Finding("note", topic, f"it is on a network ({kind}): a disk that does not answer is left after 2 s")
    if not folder.has_locks:
        why = "repeats of a fault are not counted, and each is kept in full"
        elsewhere = ("--crash-dump-folder FOLDER, on a file system with locks",)
        yield Finding("warning", topic, f"flock(2) does not work on {kind or 'it'}", why, elsewhere)


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    found, topic = facts.shared_memory, "shared memory"
    if not found.total:
        why = "NCCL and the tokenizers need it"
        yield Finding("warning", topic, f"{FOLDER} is not there", why, ("docker run --shm-size=16g ...",))
        return
    what = f"{FOLDER}: {_size(found.free)} of {_size(found.total)} free ({found.file_system or 'unknown'})"
    why = "a rank that finds no room there dies of SIGBUS"
    mend = (
        "Docker: docker run --shm-size=16g ... or --ipc=host",
        "Kubernetes: an emptyDir volume with medium: Memory at /dev/shm",
    )
    if found.total <= _DOCKER_SHM or found.free < found.total // 10:
        yield Finding("warning", topic, what, why, mend)
    else:
        yield Finding("ok", topic, what)
    if found.left:
        names = ", ".join(found.left[:3]) + (f" and {len(found.left) - 3} more" if len(found.left) > 3 else "")
        paths = " ".join(shlex.quote(str(FOLDER / name)) for name in found.left[:3])
        what = f"{_size(found.left_bytes)} of processes that are gone: {names}"
        yield Finding("warning", topic, what, "it takes memory until it is removed", (f"rm {paths}",))


def _end(facts: Facts) -> Iterator[Finding]:
    end, exit_secs = facts.end, facts.settings.exit_secs
    if facts.place.get("kubernetes"):
        what = f"{end.termination_log or 'none'}"
        if end.has_termination_log:
            yield Finding("ok", "termination log", what)
        else:
            why = "kubectl describe pod does not say what happened"
            mend = ("terminationMessagePath: /dev/termination-log, and run as a user who may write to it",)
            yield Finding("warning", "termination log", f"{what} cannot be written to", why, mend)
    topic, needed = "grace period", exit_secs + _MARGIN_SECS
    grace = end.grace_secs
    longer = {
        "Kubernetes": f"terminationGracePeriodSeconds: {needed:g}",
        "Slurm": f"slurm.conf: KillWait={needed:g}",
        "systemd": f"systemctl edit {shlex.quote(end.unit)}: [Service] TimeoutStopSec={needed:g}",
    }.get(end.who, f"docker stop -t {needed:g}; terminationGracePeriodSeconds: {needed:g}")
    lower = f"SGLANG_CRASHKIT_EXIT_SECS={max(1, (grace or _KUBERNETES_GRACE) - _MARGIN_SECS):g}"
    why = "a server that hangs at SIGTERM is killed before its incident is whole"
    if grace is None:
        what = f"not known; SGLANG_CRASHKIT_EXIT_SECS is {exit_secs:g} s"
        if end.who == "Kubernetes":
            what = f"{what}, and Kubernetes' default {_KUBERNETES_GRACE:g} s"
        yield Finding("note", topic, what, why if exit_secs > _DOCKER_GRACE else "", (longer,))
    elif grace < exit_secs:
        what = f"{end.who} kills after {grace:g} s, and SGLANG_CRASHKIT_EXIT_SECS is {exit_secs:g} s"
        yield Finding("warning", topic, what, why, (longer, lower))
    else:
        yield Finding("ok", topic, f"{grace:g} s of {end.who}, for SGLANG_CRASHKIT_EXIT_SECS of {exit_secs:g} s")


def _size(number: int) -> str:
    return f"{number / (_MB << 10):.1f} GB" if number >= _MB << 10 else f"{number / _MB:.0f} MB"


def servers_to_json(servers: tuple[ServerFacts, ...]) -> list[dict[str, object]]:
    """Return the servers, each with its rule table, for a program."""
    return [
        {"pid": one.pid, "mode": one.mode.value, "handler": one.handler, "policy": policy_table(one.mode)}
        for one in servers
    ]
