"""Tell an out-of-memory kill from any other SIGKILL by the counters of the process's memory cgroup.

``oom_kill`` is cumulative and, in cgroup v2, hierarchical; so only its growth between two readings says anything.
Sources: cgroup-v2 (``memory.events``) and cgroup-v1 (``memory.oom_control``) in the kernel's admin guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True)
class OomCounter:
    """The file in which a memory cgroup counts its OOM kills.

    Attributes:
        path: ``memory.events`` (v2) or ``memory.oom_control`` (v1).
        kills: the count when it was looked up.
    """

    path: Path
    kills: int

    def grown_by(self) -> int | None:
        """Return how many processes of the cgroup the OOM killer has ended since, None where it cannot be told."""
        now = _read_kills(self.path)
        return None if now is None else now - self.kills


def find_counter(pid: int) -> OomCounter | None:
    """Return the OOM counter of the memory cgroup of `pid`, None where there is none to be read."""
    try:
        memberships = Path(f"/proc/{pid}/cgroup").read_text(errors="replace")
    except OSError:
        return None
    for line in memberships.splitlines():
        _hierarchy, controllers, group = line.split(":", 2)
        candidates: list[Path] = []
        if "memory" in controllers.split(","):
            candidates = _counter_files("cgroup", "memory", group, "memory.oom_control")
        elif not controllers:
            candidates = _counter_files("cgroup2", None, group, "memory.events")
        for path in candidates:
            if (kills := _read_kills(path)) is not None:
                return OomCounter(path, kills)
    return None


def _counter_files(fs_type: str, option: str | None, group: str, name: str) -> list[Path]:
    files = []
    for line in _MOUNTS.read_text(errors="replace").splitlines():
        _device, mount_point, kind, options, *_ = line.split(" ")
        if kind == fs_type and (option is None or option in options.split(",")):
            mount = Path(mount_point.replace("\\040", " "))
            # Inside a container the mount is often the group itself while the path is the host's.
            files += [mount / group.lstrip("/") / name, mount / name]
    return files


def _read_kills(path: Path) -> int | None:
    try:
        pairs = (line.partition(" ") for line in path.read_text().splitlines())
    except OSError:
        return None
    return next((int(value) for key, _, value in pairs if key == "oom_kill" and value.isdigit()), None)
