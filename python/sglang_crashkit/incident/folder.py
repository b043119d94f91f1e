"""Where incidents lie on disk: written under a temporary name, renamed when whole.

::

    <crash folder>/<hostname>/incidents/<UTC time>-<kind>-<id>/
        events.jsonl    each piece of the incident as it came; see `model.incident_log`
        incident.json   the incident (``schema_version`` tells the form), once it is whole
        summary.md      the same for a person
        environment.json  what surrounded the server: arguments, versions, limits, pressure
        logs/           the last log records of each process
        stacks/         one file a process, as text and as JSON
        ranks/          what a failing rank wrote of itself
        requests/       the requests in flight, as ``SGLANG_CRASHKIT_PROMPTS`` allows
        gpu/            what the GPU cores say, one file a process; the flight recorders, ``flight_recorder_<rank>`` and
                        ``gloo_flight_recorder_<rank>``, as PyTorch's own ``torchfrtrace`` reads them

A folder that begins with ``.partial-`` is not finished. Its writer holds a lock on it for as long as it lives, so that
one whose writer died is told from one that is still written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_crashkit.incident.retention import BLOCK, FULL, NoRoomError, Retention
from sglang_crashkit.incident.store import PARTIAL, IncidentName, parse_name
from sglang_crashkit.kernel.forked import call_within
from sglang_crashkit.kernel.private_files import (
    FolderLock,
    OwnFolder,
    append_private,
    create_private,
    encode_json,
    make_private_folder,
    read_regular,
    sync_folder,
    write_private,
)
from sglang_crashkit.model.incident_log import LOG, MAX_BYTES
from sglang_crashkit.redact import redact_json, redact_text
from sglang_crashkit.settings import DiskLimits

RESERVE = ".reserve"
SUMMARY = "summary.md"
#: What the journals of requests hold, one JSON object a line.
REQUESTS = "requests/requests.jsonl"
MAX_REASON = 1000
#: Twice what ``incident.json`` and ``summary.md`` of a few dozen processes take: each is written anew beside its elder.
_RESERVE_BYTES = 512 * 1024
_LEAST_RESERVE_BYTES = 16 * 1024
#: What a failing rank wrote of itself, or a flight recorder.
_MAX_ADOPTED = 256 << 20
#: So many characters are searched for secrets in 30 ms; longer texts in a child, within so many seconds.
_AT_ONCE, SEARCH_SECS = 256 * 1024, 10.0
WITHHELD = "<withheld: it could not be searched for secrets: {}>\n"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class IncidentFolder:
    """The folder of one incident while it is written, opened at `seconds` since the epoch, for the server of that pid.

    Raises NoRoomError where there is no room even for what is essential, another OSError where it cannot be created,
    and CrashkitError where a folder on the way is not this user's.
    """

    problem = ""  # why what is written to it goes nowhere; empty where it does not

    def __init__(
        self,
        incidents: Path,
        kind: str,
        incident_id: str,
        seconds: float,
        limits: DiskLimits | None = None,
        server: int = 0,
    ) -> None:
        name = str(IncidentName(seconds, kind, incident_id))
        self.id = incident_id
        self.final_path = incidents / name  # where it is when it is finished
        self.path = incidents / f"{PARTIAL}{name}"  # where it is now, for others; it is written to by `opened`
        # A link that is made later changes nothing: what is in the host's folder, and below, is reached by descriptors.
        self._host = OwnFolder(incidents.parent)
        self._incidents = OwnFolder(incidents, within=self._host)
        place = (self._incidents.path, self._host.path)
        self._retention = Retention(*place, incident_id, limits or DiskLimits(), server)
        self._folder = OwnFolder(self.path, within=self._incidents)
        #: A way to it that is good in this process whatever is put in its place; see `OwnFolder`.
        self.opened = self._folder.path
        self.ownership = FolderLock(self._incidents.path / self.path.name)
        self.ownership.acquire()
        if not self._hold_reserve():
            self._retention.make_room(_LEAST_RESERVE_BYTES)
            if not self._hold_reserve():
                self.discard()
                raise NoRoomError(errno.ENOSPC, FULL)

    def rename(self, kind: str) -> None:
        """Have it called after another kind of incident when it is finished."""
        name = parse_name(self.final_path.name)
        assert name is not None
        self.final_path = self.final_path.with_name(str(replace(name, kind=kind)))

    def write_text(self, name: str, text: str) -> str:
        """Write a file below the folder, without secrets, and return its name.

        What cannot be searched for secrets is withheld. Raises NoRoomError where there is no room for it, another
        OSError where the folder is gone.
        """
        return self.write_bytes(name, _redacted_text(text))

    def write_json(self, name: str, value: Any) -> str:
        """Write `value` as JSON; see `write_text`."""
        return self.write_bytes(name, _redacted_json(json.dumps(value, indent=1, default=str)))

    def write_bytes(self, name: str, data: bytes) -> str:
        """Write `data`; see `write_text`."""
        path, growth = self.opened / name, len(data) - self._size_of(name)
        self._retention.take(growth)
        try:
            if path.parent != self.opened:
                make_private_folder(path.parent)
            write_private(path, data)
        except OSError as error:
            self._retention.take(-growth)
            if error.errno in _NO_SPACE:
                raise NoRoomError(error.errno, FULL) from error
            raise
        return name

    def remove(self, name: str) -> None:
        """Remove a file below the folder where it is there; OSError where that may not be written any more."""
        size = self._size_of(name)
        (self.opened / name).unlink(missing_ok=True)
        self._retention.take(-size)

    def adopt(self, source: Path, name: str) -> str:
        """Move a file of this user's into the folder and return its name relative to it; see `write_text`."""
        self.write_bytes(name, read_adopted(source))
        source.unlink()
        return name

    def charge(self, growth: int) -> None:
        """Count so many more bytes, which somebody else writes below `opened`, and make room; see `Retention.take`."""
        self._retention.take(growth)

    def make_room_beside(self, folder: Path, size: int) -> str:
        """Make room in another folder; see `Retention.make_room`."""
        try:
            return self._retention.make_room(size, folder)
        except OSError as error:
            return f"{folder} cannot be written to: {error.strerror}"

    def save(self, document: Mapping[str, Any], summary: str, *, is_redacted: bool = False, sync: bool = False) -> None:
        """Write ``incident.json`` and ``summary.md`` as they are now, without secrets, for which room is kept.

        With `sync` they are on the disk before it returns. Raises OSError where there is no room even so, or the folder
        is gone; what was there before is still there.
        """
        data = encode_json(document)
        if not is_redacted:
            data = _searched(len(data), lambda: encode_json(redact_json(json.loads(data))).decode()).encode()
            summary = _searched(len(summary), lambda: redact_text(summary))
        self._write_essential("incident.json", data, sync=sync)
        self._write_essential(SUMMARY, summary.encode(errors="backslashreplace"))

    def append(self, name: str, lines: Sequence[str]) -> None:
        """Add lines, without secrets, to a file below the folder; see `save`."""
        told = "".join(f"{line}\n" for line in lines)
        text = _searched(len(told), lambda: "".join(f"{json.dumps(redact_json(json.loads(line)))}\n" for line in lines))
        data, path = text.encode(), self.opened / name
        before = self._size_of(name)
        # By blocks: many small lines take no more than they do. The first brings the folder itself.
        growth = _blocks(before + len(data)) - _blocks(before) + (0 if before else BLOCK)
        self._retention.take(growth, essential=True)
        try:
            self._with_reserve(lambda: append_private(path, data))
        except OSError:
            self._retention.take(-growth)
            raise

    def publish(self) -> Path:
        """Give the folder its final name and return it."""
        if self.path != self.final_path:
            self._release_reserve()
            (self._incidents.path / self.path.name).rename(self._incidents.path / self.final_path.name)
            self.path = self.final_path
            sync_folder(self._incidents.path)
            self.ownership.release()
            # For what the essential files took beyond the limits.
            self._retention.make_room(0)
        return self.path

    def discard(self) -> None:
        """Remove the folder and what is in it."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._incidents.path / self.path.name)
        self.ownership.release()

    def _size_of(self, name: str) -> int:
        with contextlib.suppress(OSError):
            return (self.opened / name).lstat().st_size
        return 0

    def _write_essential(self, name: str, data: bytes, *, sync: bool = False) -> None:
        path, given_up = self.opened / name, dict[Path, bytes]()
        self._retention.take(len(data) - self._size_of(name), essential=True)
        try:
            return self._with_reserve(lambda: write_private(path, data, sync=sync))
        except OSError as error:
            problem = error
        # The whole incident is worth more than its log, and than its last summary, which is made anew.
        for spare in (self.opened / LOG, self.opened / SUMMARY) if problem.errno in _NO_SPACE else ():
            with contextlib.suppress(OSError):
                given_up[spare] = read_regular(spare, MAX_BYTES)
                spare.unlink()
            try:
                write_private(path, data, sync=sync)
                return self._retention.take(-sum(len(held) for one, held in given_up.items() if one != path))
            except OSError as error:
                problem = error
        for spare, held in given_up.items():
            with contextlib.suppress(OSError):
                append_private(spare, held)
        raise problem

    def _with_reserve(self, write: Callable[[], None]) -> None:
        """Write, and where the disk is full once more in the room that is kept."""
        try:
            write()
        except OSError as error:
            if error.errno not in _NO_SPACE or not self._release_reserve():
                raise
            write()
            self._hold_reserve()

    def _hold_reserve(self) -> bool:
        """Hold as much disk space for the essential files as there may be; say whether it is enough."""
        size = min(_RESERVE_BYTES, self._retention.share)
        if size < _LEAST_RESERVE_BYTES:
            return True
        self._release_reserve()
        with contextlib.suppress(OSError), create_private(self.opened / RESERVE) as file:
            while size >= _LEAST_RESERVE_BYTES:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), 0, size)
                    self._retention.take(size, essential=True)
                    return True
                os.ftruncate(file.fileno(), 0)
                # What it does not hold, the next piece of evidence takes.
                size -= BLOCK
        return False

    def _release_reserve(self) -> bool:
        size = self._size_of(RESERVE)
        try:
            (self.opened / RESERVE).unlink()
        except OSError:
            return False
        self._retention.take(-size)
        return True


class NullFolder(IncidentFolder):
    """Takes the place of a folder that cannot be written anywhere: each piece of evidence is refused for `reason`."""

    def __init__(self, reason: str) -> None:
        self.id = new_id()
        self.path = self.final_path = self.opened = Path("nowhere")
        self.problem = reason[:MAX_REASON]

    def _do_nothing(self, *_arguments: Any, **_options: Any) -> None:
        """Take the place of what writes, names or removes the folder."""

    rename = save = append = discard = _do_nothing

    def make_room_beside(self, folder: Path, size: int) -> str:
        """Return that there is no incident."""
        return f"{self.problem} (there would be {size} bytes in {folder})"

    def write_bytes(self, name: str, data: bytes) -> str:
        """Refuse it."""
        raise NoRoomError(errno.ENOSPC, f"{self.problem} ({name} would take {len(data)} bytes)")


def read_adopted(source: Path) -> bytes:
    """Return what the folder holds of a file that is moved into it: without secrets. Raises OSError."""
    data = read_regular(source, _MAX_ADOPTED)
    try:
        return _redacted_json(json.dumps(json.loads(data), indent=1))
    except (ValueError, RecursionError):
        return _redacted_text(data.decode(errors="backslashreplace"))


def _redacted_text(text: str) -> bytes:
    try:
        searched = _searched(len(text), lambda: redact_text(text))
    except OSError as error:
        searched = WITHHELD.format(error)
    return searched.encode(errors="backslashreplace")


def _redacted_json(text: str) -> bytes:
    try:
        return _searched(len(text), lambda: json.dumps(redact_json(json.loads(text)), indent=1)).encode()
    except OSError as error:
        return json.dumps({"withheld": WITHHELD.format(error)}).encode()


def _searched(size: int, search: Callable[[], str]) -> str:
    """Return what `search` makes of a text, a long one in a child; OSError where that comes to no end."""
    if size <= _AT_ONCE:
        try:
            return search()
        except (ValueError, RecursionError) as error:
            raise OSError(errno.EIO, f"it cannot be searched: {error}") from error
    most = 2 * size + _AT_ONCE
    found = call_within(SEARCH_SECS, lambda: search().encode(errors="surrogatepass"), most)
    return found.decode(errors="surrogatepass")


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def new_id() -> str:
    """Return a new incident id: eight hexadecimal digits."""
    return os.urandom(4).hex()
