"""What a crash folder is like: looked at by a child process, as the disk that it is on may not answer."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_crashkit.capture.tools import run_tool
from sglang_crashkit.incident.retention import limits_on, use_of
from sglang_crashkit.incident.store import is_finished
from sglang_crashkit.kernel.private_files import FolderLock
from sglang_crashkit.settings import DiskLimits

#: A disk that answers does it within this time, in seconds.
_DEADLINE_SECS = 5.0
#: What an incident of a few ranks takes with little evidence, in bytes.
_LEAST_INCIDENT = 4 << 20


@dataclass(frozen=True)
class FolderFacts:
    """A crash folder, or the nearest folder above it that is there."""

    path: str  # the crash folder
    problem: str = ""  # why no incident can be written to it; empty where one can
    exists: bool = True  # it is there
    file_system: str = ""  # the type of the file system, as in ``/proc/self/mountinfo``; empty where it is not known
    total: int = 0  # the size of the file system in bytes
    free: int = 0  # what is free of it for this user
    max_use: int = 0  # what all incidents may take of it, and `keep_free` what they leave
    keep_free: int = 0
    use: int = 0  # what they take
    incidents: int = 0  # how many are finished
    has_locks: bool = True  # flock(2) works there

    def has_no_room(self, limits: DiskLimits) -> bool:
        """Say whether so little is free that even the least of an incident may not fit."""
        return self.free < max(min(limits.max_incident, self.max_use) // 16, _LEAST_INCIDENT)


def read_folder(path: Path, environ: dict[str, str]) -> FolderFacts:
    """Look at a crash folder, which need not be there, within a deadline; the limits are set in `environ`."""
    limits = {name: value for name, value in environ.items() if name.endswith("_MB")}
    argv = [sys.executable, "-m", __name__, str(path), json.dumps(limits)]
    run = run_tool(argv, _DEADLINE_SECS, apart=True)
    try:
        told = json.loads(run.text)
        return FolderFacts(**{field.name: told[field.name] for field in fields(FolderFacts)})
    except (ValueError, KeyError, TypeError):
        reason = run.errors.strip().splitlines()[-1:] or [run.reason]
        return FolderFacts(str(path), f"it cannot be looked at: {reason[0]}", exists=False)


def _look(path: Path, limits: DiskLimits) -> FolderFacts:
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    told: dict[str, Any] = {"path": str(path), "exists": there == path, "file_system": file_system_of(there)}
    space = os.statvfs(there)
    told |= {"total": space.f_blocks * space.f_frsize, "free": space.f_bavail * space.f_frsize}
    told["max_use"], told["keep_free"] = limits_on(there, limits)
    if not there.is_dir():
        return FolderFacts(**told, problem=f"{there} is not a folder")
    for incidents in {*path.glob("incidents"), *path.glob("*/incidents")}:
        # Those of another user are not this one's to count.
        with contextlib.suppress(OSError):
            told["incidents"] = told.get("incidents", 0) + sum(is_finished(each.name) for each in incidents.iterdir())
            told["use"] = told.get("use", 0) + use_of(incidents)
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=there) as trial:
            # More than a block: a full disk takes an empty file.
            (Path(trial) / "trial").write_bytes(bytes(1 << 16))
            lock = FolderLock(Path(trial))
            told["has_locks"] = lock.acquire() == "held"
            lock.release()
    except OSError as error:
        return FolderFacts(**told, problem=f"it cannot be written to: {error.strerror}")
    return FolderFacts(**told)


def file_system_of(path: Path) -> str:
    """Return the type of the file system that `path` is on; empty where the kernel does not tell."""
    best, found = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            # proc(5): the mount point is the fifth field; the type follows a hyphen.
            before, _, after = line.partition(" - ")
            words = before.split(" ")
            point = Path(words[4].encode().decode("unicode_escape")) if len(words) > 4 else None
            # The last one of several at the same place is on top.
            if point is not None and path.resolve().is_relative_to(point) and len(point.parts) >= best:
                best, found = len(point.parts), after.partition(" ")[0]
    return found


if __name__ == "__main__":
    facts = _look(Path(sys.argv[1]).absolute(), DiskLimits.from_environ(json.loads(sys.argv[2])))
    sys.stdout.write(json.dumps(asdict(facts)))
