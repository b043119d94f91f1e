"""What an orchestrator learns of a crash: the exit status of the server, and the termination message of its container.

Upstream's servers end by SIGKILL, 137, which reads as out of memory, or, as process 1 of a container, with 0. Here 137
is an out-of-memory kill alone, 128 + N a process that signal N killed (134 SIGABRT, 135 SIGBUS, 136 SIGFPE, 139
SIGSEGV), and what no signal caused a `ServerExit`. It is 1 where a main process that stands still has to end itself, as
process 1 of a container must: Python's own timer knows no other. Who is asked to end by SIGTERM ends as upstream's
does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Mapping
from enum import IntEnum

from sglang_crashkit.kernel.pidfd import ExitStatus
from sglang_crashkit.model.incident import Incident

#: Names another file than Kubernetes' default, or switches the termination message off.
TERMINATION_LOG = "SGLANG_CRASHKIT_TERMINATION_LOG"
DEFAULT_LOG = "/dev/termination-log"
MAX_MESSAGE_BYTES = 4096
_OFF = {"", "0", "false", "no", "n"}
#: 128 and SIGKILL, as the kernel's own out-of-memory kill of a container's first process reads.
OUT_OF_MEMORY = 128 + signal.SIGKILL
#: Signals that a process does not get by an orderly shutdown.
FATAL_SIGNALS = frozenset({"SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP"})

#: Signals by which somebody asks for an end.
_ORDERLY_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})


class ServerExit(IntEnum):
    """The statuses that no signal stands for, above those of ``sysexits.h`` and below those of a shell."""

    CRASHED = 81  # the cause is not known, for example because there was no crash handler
    KILLED = 82  # a process was killed by SIGKILL, and its memory cgroup counts no out-of-memory kill
    RAISED = 83  # a process raised a Python exception
    EXITED = 84  # a process ended by itself: with a status, 0 included, or by a signal that asks for an orderly end
    HUNG = 85  # no progress: a watchdog timed out, or SIGTERM came while the health check failed
    FAILED_START = 86  # the ranks did not get ready: one raised an exception or ended by itself, or they took too long
    LOST_PEER = 87  # a rank lost its connection to a rank of another node, where the cause is to be looked for


_BY_KIND = {
    "oom_kill": OUT_OF_MEMORY,
    "exception": ServerExit.RAISED,
    "lost_peer": ServerExit.LOST_PEER,
    "exit_status": ServerExit.EXITED,
    "consensus_check": ServerExit.EXITED,
    "thread_died": ServerExit.RAISED,
    "parent_ended": ServerExit.EXITED,
    "hang": ServerExit.HUNG,
}
#: What says no more than that the server did not start, where it had not.
_ANY_START = {ServerExit.CRASHED, ServerExit.RAISED, ServerExit.EXITED, ServerExit.HUNG}


def reports_crash(code: int | None) -> bool:
    """Say whether a main process ends with this status because of what happened to another process."""
    if code is None:
        return False
    by_signal = {128 + signal.Signals[name] for name in FATAL_SIGNALS}
    return code in by_signal or code in tuple(ServerExit)


def exit_status_of(incident: Incident) -> int | None:
    """Return the status that an incident's verdict stands for, None where the verdict names no cause."""
    verdict = incident.verdict
    if verdict is None or verdict.first_failure is None:
        return None
    if verdict.kind != "signal":
        status = _BY_KIND.get(verdict.kind)
        return None if status is None else int(status)
    process = incident.first_failure
    name = process.exit.signal if process is not None and process.exit is not None else None
    return status_of_exit(ExitStatus(signal=name))


def is_orderly(end: ExitStatus) -> bool:
    """Say whether a process ended as one does that is asked to: with status 0, or by a signal that asks for it."""
    return end.code == 0 or end.signal in _ORDERLY_SIGNALS


def status_of_exit(end: ExitStatus) -> int:
    """Return the status that the end of one process stands for, where nothing else is known."""
    if not end.known:
        return int(ServerExit.CRASHED)
    if end.signal not in FATAL_SIGNALS:
        return int(ServerExit.EXITED)
    number = signal.Signals[end.signal]
    return int(ServerExit.KILLED if number == signal.SIGKILL else 128 + number)


def while_starting(status: int | None) -> int:
    """Return the status of a server that had not started yet; `status` is that of its cause, None where not known."""
    return int(ServerExit.FAILED_START) if status is None or status in _ANY_START else status


def termination_log(environ: Mapping[str, str] = os.environ) -> str:
    """Return the file of the container's termination message; empty where it is switched off."""
    path = environ.get(TERMINATION_LOG, DEFAULT_LOG).strip()
    return "" if path.lower() in _OFF else path


def write_termination_message(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Write `text` in place of the container's termination message, and return whether it was written.

    The kubelet makes the file (``terminationMessagePath``) and shows 4,096 bytes of it in the status of a pod that has
    ended. It is never made here: outside a container there is none.
    """
    data, mark = text.encode(errors="backslashreplace"), b" ..."
    if len(data) > MAX_MESSAGE_BYTES:
        data = data[: MAX_MESSAGE_BYTES - len(mark)].decode(errors="ignore").encode() + mark
    # What is there is opened, and nothing is made.
    path, flags = termination_log(environ), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError), open(path, "wb", opener=lambda path, _flags: os.open(path, flags)) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.truncate(0)
            return file.write(data) == len(data)
    return False
