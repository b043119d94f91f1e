"""Hold on to processes by file descriptor, and learn how they ended without being their parent.

A pidfd turns readable when its process exits (pidfd_open(2), Linux 5.3). How it ended is read from the zombie's stat
line while its parent has not reaped it, and from the pidfd itself afterwards where the kernel is 6.15 or later
(``PIDFD_GET_INFO`` with ``PIDFD_INFO_EXIT``, ``linux/pidfd.h``).

A Python that was built on an older system, as those of uv were until July 2026, lacks the functions for pidfds; the
system calls are there all the same.
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
#: The same on every machine; ``asm-generic/unistd.h``.
_NR_PIDFD_SEND_SIGNAL, _NR_PIDFD_OPEN = 424, 434
_INFO = struct.Struct("=QQ3I8Ii")  # mask, cgroup id, pid, tgid, ppid, eight ids, exit status


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended."""

    code: int | None = None  # its exit status, None when a signal ended it or nothing is known
    signal: str | None = None  # the name of the signal that ended it, such as ``SIGKILL``
    core_dumped: bool = False  # the kernel wrote a core file for it

    @property
    def known(self) -> bool:
        """Whether the kernel told how the process ended."""
        return self.code is not None or self.signal is not None

    @classmethod
    def from_wait_status(cls, status: int) -> ExitStatus:
        """Decode a status in the form of waitpid(2)."""
        number = status & 0x7F
        if number == 0:
            return cls(code=status >> 8 & 0xFF)
        return cls(signal=signal_name(number), core_dumped=bool(status & 0x80))

    @classmethod
    def from_exit_code(cls, code: int) -> ExitStatus:
        """Decode an exit code as `multiprocessing` writes it, negative for a signal."""
        return cls(code=code) if code >= 0 else cls(signal=signal_name(-code))


def open_pidfd(pid: int) -> int:
    """Return a pidfd of a process, which no program that this one runs inherits.

    Raises OSError where there is no such process, or the kernel gives none.
    """
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else _system_call(_NR_PIDFD_OPEN, pid, 0)


def signal_pidfd(pidfd: int, signum: int) -> None:
    """Send a signal to the process of a pidfd; raises OSError where it was reaped, or is of another user."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, signum)
    else:
        _system_call(_NR_PIDFD_SEND_SIGNAL, pidfd, signum, 0, 0)


def _system_call(number: int, *arguments: int) -> int:
    # Here alone: it takes a megabyte.
    import ctypes

    result = ctypes.CDLL(None, use_errno=True).syscall(*map(ctypes.c_long, (number, *arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def signal_name(number: int) -> str:
    """Return the name of a signal, also of a real-time one that Python does not name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def wait_status_of(child: int, process: Any = None) -> int:
    """Return how a child of this process ended, as waitpid(2) does, without reaping it.

    Args:
        child: its pid.
        process: its `multiprocessing.Process`, which knows the exit code of a child that `multiprocessing` reaped.

    Raises:
        ChildProcessError: it is not a child of this process, or was reaped and its exit code is not known.
        ValueError: it lives.
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
    """A process identified by pidfd, pid and start time, so that a recycled pid is never mistaken for it.

    Raises:
        ProcessLookupError: there is no process `pid`.
        OSError: the kernel gave no pidfd (no descriptors left, a kernel before 5.3).
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
        """Return what stands for a process that was reaped before anybody held on to it; its pid may be another's."""
        handle = cls.__new__(cls)
        handle.pid, handle.fd, handle.start_ticks, handle._exit = pid, -1, 0, status
        return handle

    def fileno(self) -> int:
        """Return the pidfd, readable once the process has exited."""
        return self.fd

    def has_exited(self, timeout_secs: float = 0.0) -> bool:
        """Say whether the process has exited, reaped or not; wait for it for at most `timeout_secs` seconds.

        Once the descriptor is closed, this is whether it was known to have exited by then.
        """
        if self.fd < 0:
            return self._exit is not None
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(timeout_secs * 1000))

    def exit_status(self) -> ExitStatus:
        """Return how it ended; `ExitStatus.known` is false while it lives or when it cannot be known any more."""
        if self._exit is None or not self._exit.known:
            if not self.has_exited():
                # Its main thread may be a zombie while others run.
                return ExitStatus()
            self._exit = self._from_zombie() or self._from_kernel() or ExitStatus()
        return self._exit

    def take_exit_status(self, status: ExitStatus) -> None:
        """Take in how it ended from somebody who knows, where the kernel does not tell this process."""
        if not self.exit_status().known:
            self._exit = status

    def send_signal(self, signum: int) -> None:
        """Send a signal to this very process; raises what `signal_pidfd` does."""
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
            # Without the right to trace it, the status reads 0 (proc_pid_stat(5), exit_code). It is checked again after
            # `may_inspect`, which is also true of a process that was reaped in between.
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
