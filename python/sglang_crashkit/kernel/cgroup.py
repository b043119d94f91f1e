"""Distinguish an out-of-memory kill from any other SIGKILL by the counters of the process's memory cgroup.

``oom_kill`` is cumulative and, in cgroup v2, hierarchical. So only the difference between two readings is meaningful.
Sources: cgroup-v2 (``memory.events``) and cgroup-v1 (``memory.oom_control``) in the kernel's admin guide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
MOUNTS = PROC / "self/mounts"


@dataclass(frozen=True)
class OomCounter:
    """The file in which a memory cgroup counts its OOM kills."""

    path: Path  # ``memory.events`` (v2) or ``memory.oom_control`` (v1)
    kills: int  # the count when the file was read

    def grown_by(self) -> int | None:
        """Return how many processes of the cgroup the OOM killer has ended since; None if the file cannot be read."""
        now = self.read_again()
        return None if now is None else now.kills - self.kills

    def read_again(self) -> OomCounter | None:
        """Return a counter with the present count; None if the file cannot be read."""
        now = read_count(self.path, "oom_kill")
        return None if now is None else OomCounter(self.path, now)


@dataclass(frozen=True)
class Group:
    """A cgroup."""

    version: int  # 1 or 2
    folder: Path  # where its files are
    mount: Path  # the mount point of its hierarchy, in this process's view


def find_counter(pid: int) -> OomCounter | None:
    """Return the OOM counter of the memory cgroup of `pid`, None if no cgroup can be read."""
    files = ("memory.oom_control", "memory.events")
    if (group := find_group(pid, "memory", files)) is None:
        return None
    return OomCounter(group.folder / files[group.version - 1], 0).read_again()


def find_group(pid: int, controller: str, files: Sequence[str]) -> Group | None:
    """Return the cgroup of `pid` for a controller, such as ``memory``; None if no cgroup can be read.

    `files` names a file of the cgroup's folder: first its name in cgroup v1, then in v2. The folder must contain it.
    """
    try:
        memberships = (PROC / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return None
    for line in memberships.splitlines():
        _hierarchy, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            version, mounts = 1, _mount_points("cgroup", controller)
        elif not controllers:
            version, mounts = 2, _mount_points("cgroup2", None)
        else:
            continue
        for mount in mounts:
            # Inside a container the mount point is often the cgroup itself, while the path is relative to the host's.
            for folder in (mount / group.lstrip("/"), mount):
                if (folder / files[version - 1]).exists():
                    return Group(version, folder, mount)
    return None


def _mount_points(fs_type: str, option: str | None) -> Iterator[Path]:
    for line in MOUNTS.read_text(errors="replace").splitlines():
        _device, mount_point, kind, options, *_ = line.split(" ")
        if kind == fs_type and (option is None or option in options.split(",")):
            yield Path(mount_point.replace("\\040", " "))


def read_count(path: Path, name: str) -> int | None:
    """Return the counter `name` in a cgroup file such as ``memory.events``; None if it is absent or unreadable."""
    try:
        pairs = (line.partition(" ") for line in path.read_text().splitlines())
    except OSError:
        return None
    return next((int(value) for key, _, value in pairs if key == name and value.isdigit()), None)
