"""The doctor's rules: pure functions from facts, and from the kit's environment variables, to findings."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from sglang_crashkit.kernel.server_arguments import value_of
from sglang_crashkit.kernel.shared_memory import FOLDER
from sglang_crashkit.policy import Capture, Event, Mode, decide
from sglang_crashkit.settings import VARIABLES, Settings, unknown_variables

if TYPE_CHECKING:
    from sglang_crashkit.doctor.facts import Facts, ServerFacts

#: ``note``: to know, and nothing is wrong; ``warning``: some evidence will be missing; ``problem``: there will be no
#: incident, or not a whole one.
Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was found of one thing."""

    level: Level  # how bad it is
    topic: str  # what was looked at, in a word or two
    what: str  # what is the case, one sentence
    why: str = ""  # why it matters; empty where nothing is wrong
    next: tuple[str, ...] = ()  # the commands or lines that mend it, one each


def has_problem(findings: Iterable[Finding]) -> bool:
    """Say whether one of them is a problem."""
    return any(finding.level == "problem" for finding in findings)


_MB = 1 << 20
_FOLDER_OPTION = "--crash-dump-folder FOLDER"
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
    rules = (_installation, _servers, _tracing, _gpu, _folder, _shared_memory, _end)
    findings = [finding for rule in rules for finding in rule(facts)]
    return [*findings, *check_variables(facts.environ, list(facts.arguments))]


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
            what = "runs in another container than this command, which saw its own surroundings"
            why = "who may look at whom, disks and shared memory may differ there"
            mend = "run this command in that container: docker exec, kubectl exec"
            yield Finding("note", name, what, why, (mend,))
        if is_watched:
            yield Finding("note", name, _policy_in_words(server.mode))


def _to_be_watched(facts: Facts) -> tuple[str, ...]:
    found = facts.installation
    is_to_be_patched = found.supported and found.state not in ("", "patched")
    return (*([found.next or "sglang-crashkit apply"] if is_to_be_patched else []), "restart the server")


def policy_table(mode: Mode) -> dict[str, dict[str, object]]:
    """Return what is done about each event, as `policy` has it, for a program."""
    actions = {event.value: decide(mode, event) for event in Event}
    return {event: asdict(action) | {"captures": action.captures.value} for event, action in actions.items()}


def _policy_in_words(mode: Mode) -> str:
    told: dict[str, list[str]] = {}
    for event, words in _EVENTS.items():
        action = decide(mode, event)
        how = "" if action.captures is Capture.FULL else ", taken without stopping a process"
        follows = "the server ends" if action.ends else "SGLang decides what follows"
        told.setdefault(f"an incident{how}; {follows}", []).append(words)
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
        what = "CUDA's core variables are set with --crash-dump-folder alone"
        lost = "a GPU exception leaves no core, so no kernel is named"
        yield Finding("warning", topic, what, lost, (_FOLDER_OPTION,))
        return
    wanted = {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1"}
    wanted["CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION"] = "0"
    why = {"0": "the driver aborts a rank before Python can say what failed", "1": "no such core is written"}
    wrong = {name: value for name, value in wanted.items() if environ.get(name, value) != value}
    for name, value in wrong.items():
        yield Finding("warning", topic, f"{name}={environ[name]} was set", why[value], (f"unset {name}",))
    if "%t" in environ.get("CUDA_COREDUMP_PIPE", ""):
        mend = "unset CUDA_COREDUMP_PIPE"
        yield Finding("warning", topic, "CUDA_COREDUMP_PIPE holds %t", "no pipe is found by it", (mend,))
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
        why = "requests are not saved, GPU cores not written, and a container takes the incidents with it"
        yield Finding("warning", topic, f"none is set: incidents go to {folder.path}", why, (_FOLDER_OPTION,))
    if folder.problem:
        mend = (f"df -h {quoted}; ls -ld {quoted}", f"{_FOLDER_OPTION}, that this user may write to")
        what = f"{folder.path}: {folder.problem}"
        yield Finding("problem", topic, what, "incidents go to the temporary folder", mend)
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
        yield Finding("warning", topic, f"it is in memory ({kind})", why, (f"{_FOLDER_OPTION}, on a disk",))
    elif kind in _LAYER and facts.has_own_folder:
        why = "incidents are gone with the container"
        mend = (f"Docker: -v /var/crash/sglang:{quoted}", "Kubernetes: a volumeMount of a hostPath or a claim")
        yield Finding("warning", topic, f"it is in the container's own layer ({kind})", why, mend)
    elif kind in _NETWORK:
        yield Finding("note", topic, f"it is on a network ({kind}): a disk that does not answer is left after 2 s")
    if not folder.has_locks:
        why = "repeats of a fault are not counted, and each is kept in full"
        elsewhere = (f"{_FOLDER_OPTION}, on a file system with locks",)
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
        what = end.termination_log or "none"
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


_MAY_BE_SECRET = re.compile(r"WEBHOOK|OTLP|SECR|TOKEN|KEY|PASS")
#: SGLang's own default of ``--watchdog-timeout``, in seconds.
_WATCHDOG_SECS = 300.0
#: The least that SGLANG_CRASHKIT_HANG_SECS may be, in seconds.
_SHORTEST_HANG_SECS = 2.0
_TOPIC = "settings"


def check_variables(environ: Mapping[str, str], arguments: list[str]) -> Iterator[Finding]:
    """Yield what is wrong with a server's settings, beside its command line, or one finding that nothing is."""
    found = [*_misspelt(environ), *_in_conflict(environ, arguments)]
    yield from found or [Finding("ok", _TOPIC, "every variable of the kit is known and can be read")]


def _misspelt(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in unknown_variables(environ):
        close = difflib.get_close_matches(name, VARIABLES, 1)
        next_step = (_shown(name, environ[name]).replace(name, close[0], 1),) if close else (f"unset {name}",)
        yield Finding("warning", _TOPIC, f"{name} is no variable of the kit", "it has no effect", next_step)
    for name, pattern in VARIABLES.items():
        value = environ.get(name, "").strip()
        if value and not re.fullmatch(pattern, value, re.DOTALL):
            what = f"{_shown(name, value)} cannot be read"
            yield Finding("warning", _TOPIC, what, "it counts as not set", (f"unset {name}",))


def _shown(name: str, value: str) -> str:
    """Return a setting as it is written, without what may be a key."""
    return f"{name}=..." if _MAY_BE_SECRET.search(name) else f"{name}={value}"


def _in_conflict(environ: Mapping[str, str], arguments: list[str]) -> Iterator[Finding]:
    settings = Settings.from_environ(environ)
    folder = value_of(arguments, "--crash-dump-folder")
    if not settings.enabled:
        what, mend = "SGLANG_CRASHKIT_ENABLED switches the kit off", "unset SGLANG_CRASHKIT_ENABLED"
        yield Finding("problem", _TOPIC, what, "a crash leaves no incident", (mend,))
    elif not settings.diagnostics and not folder:
        what = "both of upstream's diagnostics are off, and there is no --crash-dump-folder"
        mends = ("unset SGLANG_PYSPY_DUMP_BEFORE_CRASH", _FOLDER_OPTION)
        yield Finding("problem", _TOPIC, what, "no crash handler is started", mends)
    # Whoever lowers SGLANG_CRASHKIT_EXIT_SECS alone wants what is left at its default to have less time.
    needed, exit_secs = settings.budget_secs + settings.end_secs, settings.exit_secs
    if needed > exit_secs and not environ.keys().isdisjoint(
        ("SGLANG_CRASHKIT_BUDGET_SECS", "SGLANG_CRASHKIT_END_SECS")
    ):
        what = f"an incident and the end after it may take {needed:g} s, and SGLANG_CRASHKIT_EXIT_SECS allows"
        mend = f"SGLANG_CRASHKIT_EXIT_SECS={needed:g}"
        yield Finding("warning", _TOPIC, f"{what} {exit_secs:g} s", "a slow incident is cut short", (mend,))
    watchdog = _seconds(value_of(arguments, "--watchdog-timeout"), _WATCHDOG_SECS)
    if settings.hang_secs == 0:
        yield Finding("note", _TOPIC, "SGLANG_CRASHKIT_HANG_SECS=0: hangs are not looked for")
    elif settings.hang_secs >= watchdog > 0:
        # What was not set is no mistake of the user's.
        level: Level = "warning" if "SGLANG_CRASHKIT_HANG_SECS" in environ else "note"
        than = f"SGLang's --watchdog-timeout ({watchdog:g} s)"
        what = f"SGLANG_CRASHKIT_HANG_SECS ({settings.hang_secs:g} s) is no shorter than {than}"
        mend = f"SGLANG_CRASHKIT_HANG_SECS={max(_SHORTEST_HANG_SECS, watchdog / 2):g}"
        yield Finding(level, _TOPIC, what, "SGLang ends a server that hangs before the kit has looked at it", (mend,))
    use, incident = settings.disk.max_use, settings.disk.max_incident
    if use is not None and use < incident:
        what = "SGLANG_CRASHKIT_MAX_USE_MB is less than what one incident may take"
        why = "an incident is cut short, and no earlier one is kept"
        yield Finding("warning", _TOPIC, what, why, (f"SGLANG_CRASHKIT_MAX_USE_MB={4 * incident >> 20}",))
    if environ.get("SGLANG_CRASHKIT_QUARANTINE", "off").strip().lower() in ("observe", "refuse") and not folder:
        what = "SGLANG_CRASHKIT_QUARANTINE is set, and there is no --crash-dump-folder"
        yield Finding("warning", _TOPIC, what, "the list of requests is in that folder", (_FOLDER_OPTION,))


def _seconds(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default
