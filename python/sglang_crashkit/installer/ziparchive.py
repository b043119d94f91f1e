"""Write a zip archive whose bytes depend on its members alone."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: The earliest time that the format can hold.
_TIME = (1980, 1, 1, 0, 0, 0)
_UNIX = 3


@dataclass(frozen=True)
class Member:
    """One file of an archive."""

    name: str
    data: bytes
    #: File type and permission bits, as in `os.stat_result.st_mode`.
    mode: int = 0o100644


def write_archive(path: Path, members: Iterable[Member]) -> None:
    """Write `members` to `path` in the order given, with a fixed time and compression.

    Raises:
        OSError: it cannot be written.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for member in members:
            info = zipfile.ZipInfo(member.name, date_time=_TIME)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = _UNIX
            info.external_attr = member.mode << 16
            archive.writestr(info, member.data)
