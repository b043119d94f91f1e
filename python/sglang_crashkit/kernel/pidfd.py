"""Hold on to processes by file descriptor, and learn how they ended without being their parent.

A pidfd becomes readable when its process exits (pidfd_open(2), Linux 5.3). Until the parent reaps the process, its exit
status is read from the zombie's stat line. After that, Linux 6.15 or later returns it for the pidfd (``PIDFD_GET_INFO``
with ``PIDFD_INFO_EXIT``, ``linux/pidfd.h``).

A Python that was built on an older system, as uv's builds were until July 2026, lacks the functions for pidfds. Then
this module makes the system calls itself.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from dataclasses import dataclass
from typing import Any

from sglang_crashkit.kernel import procfs

_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info of 64 bytes)
_PIDFD_INFO_EXIT = 1 << 3
#: Numbers of system calls, the same on every architecture; ``asm-generic/unistd.h``.
_NR_PIDFD_SEND_SIGNAL, _NR_PIDFD_OPEN = 424, 434
_INFO = struct.Struct("=QQ3I8Ii")  # mask, cgroup id, pid, tgid, ppid, eight ids, exit status


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended."""

    code: int | None = None  # its exit status, None when a signal ended it or the kernel did not report it
    signal: str | None = None  # the name of the signal that ended it, such as ``SIGKILL``
    core_dumped: bool = False  # the kernel wrote a core file for it

    @property
    def known(self) -> bool:
        """Whether the exit status or the signal is known."""
        return self.code is not None or self.signal is not None

    @classmethod
    def from_wait_status(cls, status: int) -> ExitStatus:
        """Decode a wait status, as waitpid(2) returns it."""
        number = status & 0x7F
        if number == 0:
            return cls(code=status >> 8 & 0xFF)
        return cls(signal=signal_name(number), core_dumped=bool(status & 0x80))

    @classmethod
    def from_exit_code(cls, code: int) -> ExitStatus:
        """Decode an exit code as `multiprocessing` has it: negative for a signal."""
        return cls(code=code) if code >= 0 else cls(signal=signal_name(-code))


def open_pidfd(pid: int) -> int:
    """Return a pidfd of a process, with close-on-exec set.

    Raises OSError if there is no such process, or the kernel has no pidfds or no descriptor left.
    """
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else _system_call(_NR_PIDFD_OPEN, pid, 0)


def signal_pidfd(pidfd: int, signum: int) -> None:
    """Send a signal to the process of a pidfd; raises OSError if it was reaped or belongs to another user."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, signum)
    else:
        _system_call(_NR_PIDFD_SEND_SIGNAL, pidfd, signum, 0, 0)


def _system_call(number: int, *arguments: int) -> int:
    # Imported here only: ctypes takes a megabyte.
    import ctypes

    result = ctypes.CDLL(None, use_errno=True).syscall(*map(ctypes.c_long, (number, *arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``; ``SIG45`` for a real-time signal without a name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def wait_status_of(child: int, process: Any = None) -> int:
    """Return the wait status of a child of this process, as waitpid(2) does, without reaping the child.

    Args:
        child: the child's pid.
        process: its `multiprocessing.Process`, which has the exit code of a child that `multiprocessing` reaped.

    Raises:
        ChildProcessError: `child` is not a child of this process, or was reaped and its exit code is not known.
        ValueError: the child is alive.
    """
    try:
        result = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        code = process.exitcode if process is not None else None
        if code is None:
            raise
        return int(code) << 8 if code >= 0 else -int(code)
    if result is None:
        raise ValueError(child)
    if result.si_code == os.CLD_EXITED:
        return result.si_status << 8
    return result.si_status | (0x80 if result.si_code == os.CLD_DUMPED else 0)


class ProcessHandle:
    """A process identified by pidfd, pid and start time, so that a process with a recycled pid is not mistaken for it.

    Raises:
        ProcessLookupError: there is no process `pid`.
        OSError: the kernel returned no pidfd (no descriptors left, a kernel before 5.3).
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self.fd = open_pidfd(pid)
        except OSError as error:
            if procfs.read_stat(pid) is None:
                raise ProcessLookupError(f"no process {pid}") from error
            raise
        stat = procfs.read_stat(pid)
        if stat is None:
            os.close(self.fd)
            raise ProcessLookupError(f"no process {pid}")
        self.start_ticks = stat.start_ticks
        self._exit: ExitStatus | None = None

    @classmethod
    def of_reaped(cls, pid: int, status: ExitStatus) -> ProcessHandle:
        """Return a handle without a pidfd, for a process that was reaped before one was opened; `pid` may be reused."""
        handle = cls.__new__(cls)
        handle.pid, handle.fd, handle.start_ticks, handle._exit = pid, -1, 0, status
        return handle

    def fileno(self) -> int:
        """Return the pidfd, which is readable once the process has exited."""
        return self.fd

    def has_exited(self, timeout_secs: float = 0.0) -> bool:
        """Say whether the process has exited, reaped or not; wait at most `timeout_secs` seconds for its exit.

        After `close`, say whether `exit_status` had seen the exit before.
        """
        if self.fd < 0:
            return self._exit is not None
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(timeout_secs * 1000))

    def exit_status(self) -> ExitStatus:
        """Return how the process ended; `ExitStatus.known` is false while it lives, or if its status is lost."""
        if self._exit is None or not self._exit.known:
            if not self.has_exited():
                # Don't look at the zombie yet: the main thread may be one while other threads run.
                return ExitStatus()
            self._exit = self._from_zombie() or self._from_kernel() or ExitStatus()
        return self._exit

    def take_exit_status(self, status: ExitStatus) -> None:
        """Take the exit status that another process reported, unless the kernel gave it to this process."""
        if not self.exit_status().known:
            self._exit = status

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process of this handle; raises OSError as `signal_pidfd` does."""
        signal_pidfd(self.fd, signum)

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _from_zombie(self) -> ExitStatus | None:
        stat = procfs.read_stat(self.pid)
        if stat is None or stat.start_ticks != self.start_ticks or stat.state not in "ZX":
            return None
        if stat.wait_status == 0:
            # The status reads 0, too, without the right to trace the process (proc_pid_stat(5), exit_code). Read the
            # stat line again after `may_inspect`, which is also true of a process that was reaped in between.
            may_inspect, later = procfs.may_inspect(self.pid), procfs.read_stat(self.pid)
            if not may_inspect or later is None or later.start_ticks != self.start_ticks:
                return None
        return ExitStatus.from_wait_status(stat.wait_status)

    def _from_kernel(self) -> ExitStatus | None:
        if self.fd < 0:
            return None
        request = bytearray(_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self.fd, _PIDFD_GET_INFO, request)
        except OSError:
            return None
        answer = _INFO.unpack(request)
        if not answer[0] & _PIDFD_INFO_EXIT:
            return None
        return ExitStatus.from_wait_status(answer[-1])
