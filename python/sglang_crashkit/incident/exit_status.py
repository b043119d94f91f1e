"""The exit status of the server and the termination message of its container, which an orchestrator reads.

Upstream's server ends by SIGKILL, status 137, which reads as out of memory. As process 1 of a container it ends with 0.
With the kit, 137 means an out-of-memory kill only. 128 + N means that signal N killed a process (134 SIGABRT, 135
SIGBUS, 136 SIGFPE, 139 SIGSEGV). A `ServerExit` means that no signal was the cause. 1 means that a main process which
makes no progress ended itself, as process 1 of a container must: Python's own timer exits with no other status. A
server that is asked to end by SIGTERM ends as upstream's does.
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

#: The variable that names another file than Kubernetes' default, or switches the termination message off.
TERMINATION_LOG = "SGLANG_CRASHKIT_TERMINATION_LOG"
DEFAULT_LOG = "/dev/termination-log"
MAX_MESSAGE_BYTES = 4096
_OFF = {"", "0", "false", "no", "n"}
#: 128 + SIGKILL, the status of a container whose first process the kernel's out-of-memory killer ended.
OUT_OF_MEMORY = 128 + signal.SIGKILL
#: Signals that an orderly shutdown does not send.
FATAL_SIGNALS = frozenset({"SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP"})

#: Signals that ask a process to end.
_ORDERLY_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})


class ServerExit(IntEnum):
    """The exit statuses for failures that no signal caused; above those of ``sysexits.h``, below those of a shell."""

    CRASHED = 81  # the cause is not known, for example because there was no crash handler
    KILLED = 82  # SIGKILL killed a process, and its memory cgroup counted no out-of-memory kill
    RAISED = 83  # a process raised a Python exception
    EXITED = 84  # a process exited by itself, with status 0 or another, or by a signal that asks for an orderly end
    HUNG = 85  # no progress: a watchdog timed out, or SIGTERM came while the health check failed
    FAILED_START = 86  # the ranks did not become ready: a rank raised an exception or exited, or they took too long
    LOST_PEER = 87  # a rank lost its connection to a rank of another node; look for the cause on that node


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
#: Statuses that are replaced by FAILED_START if the server had not started: they say no more than that it did not.
_ANY_START = {ServerExit.CRASHED, ServerExit.RAISED, ServerExit.EXITED, ServerExit.HUNG}


def reports_crash(code: int | None) -> bool:
    """Return whether a main process ends with this status to report the crash of another process."""
    if code is None:
        return False
    by_signal = {128 + signal.Signals[name] for name in FATAL_SIGNALS}
    return code in by_signal or code in tuple(ServerExit)


def exit_status_of(incident: Incident) -> int | None:
    """Return the exit status for an incident's verdict; None if the verdict names no cause."""
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
    """Return whether a process ended as on request: with status 0, or by a signal that asks for an orderly end."""
    return end.code == 0 or end.signal in _ORDERLY_SIGNALS


def status_of_exit(end: ExitStatus) -> int:
    """Return the server's exit status for the end of one process, for use where nothing else is known."""
    if not end.known:
        return int(ServerExit.CRASHED)
    if end.signal not in FATAL_SIGNALS:
        return int(ServerExit.EXITED)
    number = signal.Signals[end.signal]
    return int(ServerExit.KILLED if number == signal.SIGKILL else 128 + number)


def while_starting(status: int | None) -> int:
    """Return the exit status of a server that had not started; `status` is that of the cause, None if not known."""
    return int(ServerExit.FAILED_START) if status is None or status in _ANY_START else status


def termination_log(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of the container's termination message; empty if it is switched off."""
    path = environ.get(TERMINATION_LOG, DEFAULT_LOG).strip()
    return "" if path.lower() in _OFF else path


def write_termination_message(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Replace the container's termination message with `text`; return whether it was written.

    The kubelet creates the file (``terminationMessagePath``) and shows 4,096 bytes of it in the status of a pod that
    has ended. This function never creates it: outside a container there is no such file.
    """
    data, mark = text.encode(errors="backslashreplace"), b" ..."
    if len(data) > MAX_MESSAGE_BYTES:
        data = data[: MAX_MESSAGE_BYTES - len(mark)].decode(errors="ignore").encode() + mark
    # No O_CREAT: open an existing file only.
    path, flags = termination_log(environ), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError), open(path, "wb", opener=lambda path, _flags: os.open(path, flags)) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.truncate(0)
            return file.write(data) == len(data)
    return False
