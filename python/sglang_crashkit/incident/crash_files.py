"""What a crash leaves beside its incident: GPU cores, which the driver writes, and upstream's dumps of requests.

They lie in the host's folder, and an incident names its own. By their names alone they are nobody's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.kernel import procfs

#: As ``--crash-dump-folder`` has the driver name its cores, and as SGLang names its dumps.
_NAMES = re.compile(r"core\.cuda\.\d+\.\d+|crash_dump_[\w.-]+\.pkl")
_MOST_JSON = 8 << 20


@dataclass(frozen=True)
class CrashFile:
    """A GPU core or a dump of requests.

    Attributes:
        path: where it is.
        size: how many bytes of the disk it takes.
        inode: of the file that was found, so that another one of its name is not taken for it.
        age_secs: how long ago it changed, in seconds.
    """

    path: Path
    size: int
    inode: int
    age_secs: float

    def remove(self) -> None:
        """Remove it, where it is there still."""
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self.inode:
                self.path.unlink()


def find_crash_files(incidents: Iterable[Path]) -> list[CrashFile]:
    """Return the GPU cores and the dumps of requests beside folders of incidents; only files of this user.

    Args:
        incidents: the folders. The driver names a host's folder by gethostname(2), which may be another one.
    """
    hosts = dict.fromkeys(folder.parent for folder in incidents)
    folders = dict.fromkeys([*hosts, *(folder.parent / socket.gethostname() for folder in hosts)])
    found = []
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if not _NAMES.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        age_secs = time.time() - status.st_mtime
                        found.append(CrashFile(Path(entry.path), status.st_blocks * 512, status.st_ino, age_secs))
    return found


def named_in(incidents: Iterable[Path], files: Sequence[CrashFile]) -> dict[Path, list[CrashFile]]:
    """Return which of `files` each incident names; the first one has those that several name.

    Args:
        incidents: their folders.
        files: what lies beside them.
    """
    left, found = list(files), {}
    for path in incidents:
        if not left:
            break
        text = _text_of(path)
        own = [file for file in left if file.path.name.encode() in text and _names(text, file.path.name)]
        if own:
            found[path] = own
            left = [file for file in left if file not in own]
    return found


def is_of_living_server(incident: Path, *, but: int) -> bool:
    """Say whether an incident's server lives on this machine.

    Args:
        incident: its folder.
        but: the pid of a server that does not count.
    """
    try:
        server = json.loads(_text_of(incident))["server"]
        pid, start_ticks = int(server["pid"]), int(server["start_ticks"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return False
    stat_line = procfs.read_stat(pid) if pid != but else None
    return stat_line is not None and stat_line.start_ticks == start_ticks and stat_line.state not in "ZX"


def _names(text: bytes, name: str) -> bool:
    # The name of another one may begin or end with this one.
    return re.search(rb"(?<![\w.-])" + re.escape(name).encode() + rb"(?![\w-])", text) is not None


def _text_of(incident: Path) -> bytes:
    try:
        with (incident / "incident.json").open("rb") as file:
            return file.read(_MOST_JSON)
    except OSError:
        return b""
