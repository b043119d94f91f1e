"""What a process is called in the names of files that lie in a folder which several servers share.

A pid alone is not enough, nor is a pid with the name of the host: in each container the main process may be process 1,
and hosts may share a name. With the start time and the PID namespace two processes have the same key only where one
namespace was made, after another had gone, with the same inode number, and both processes have the same pid and began
in the same hundredth of a second since boot.
"""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
#: The PID namespace of the host has this inode in every kernel; include/linux/proc_ns.h.
_HOST_NAMESPACE = 0xEFFFFFFC


def server_key(pid: int, start_ticks: int) -> str:
    """Return the key ``<pid>-<start ticks>-<PID namespace>`` of a process of this process's own namespace."""
    return f"{pid}-{start_ticks}-{own_namespace()}"


def key_of(pid: int, start_ticks: int) -> str:
    """Return the key that a process gives itself, which may be in another PID namespace, such as a container's.

    Of a process that is gone, or that may not be looked at, it is taken to be in this one. The pid is that which this
    process sees.
    """
    try:
        namespace = (_PROC / str(pid) / "ns" / "pid").stat().st_ino
        status = (_PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return server_key(pid, start_ticks)
    # One number for each namespace that it is in, the innermost last; proc_pid_status(5).
    numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    return f"{numbers[-1] if numbers else pid}-{start_ticks}-{namespace}"


def is_host_namespace() -> bool:
    """Say whether this process sees the host's processes by the host's own pids."""
    return own_namespace() == _HOST_NAMESPACE


def own_namespace() -> int:
    """Return the inode number of this process's PID namespace; 0 where there is no ``/proc``."""
    try:
        return (_PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return 0
