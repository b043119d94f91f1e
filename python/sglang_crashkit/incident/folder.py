"""Write the folder of an incident, under a temporary name that is replaced when the incident is complete.

::

    <crash folder>/<hostname>/incidents/<UTC time>-<kind>-<id>/
        events.jsonl    each piece of the incident in order of arrival; see `model.incident_log`
        incident.json   the incident, once it is complete; ``schema_version`` is the version of its format
        summary.md      the incident for a human reader
        environment.json  the server's environment: arguments, versions, limits, pressure
        logs/           the last log records of each process
        stacks/         the stacks of each process, a text file and a JSON file
        ranks/          files that a failing rank wrote about itself
        requests/       the requests in flight, as ``SGLANG_CRASHKIT_PROMPTS`` allows
        gpu/            the contents of the GPU cores, one file a process; the flight recorders,
                        ``[gloo_]flight_recorder_<rank>``, in the format that PyTorch's ``torchfrtrace`` reads

A folder whose name begins with ``.partial-`` is not finished. Its writer locks it for as long as the writer lives, so a
folder without a lock is one that its writer left behind.
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
#: The contents of the request journals, one JSON object a line.
REQUESTS = "requests/requests.jsonl"
MAX_REASON = 1000
#: Twice the size of the essential files of a few dozen processes: the old file stays until the new one is written.
_RESERVE_BYTES = 512 * 1024
_LEAST_RESERVE_BYTES = 16 * 1024
#: The most bytes of a file that is moved into the folder: what a failing rank wrote about itself, or a flight recorder.
_MAX_ADOPTED = 256 << 20
#: Characters that are searched for secrets in 30 ms; and seconds for a longer text, which a child searches.
_AT_ONCE, SEARCH_SECS = 256 * 1024, 10.0
WITHHELD = "<withheld: it could not be searched for secrets: {}>\n"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class IncidentFolder:
    """The folder of one incident that is being written; opened at `seconds` since the epoch; `server` is a pid.

    Raises NoRoomError if there is no room even for the essential files, another OSError if the folder cannot be
    created, and CrashkitError if a folder on its path belongs to another user.
    """

    problem = ""  # why nothing can be written to this folder; empty if it can

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
        self.final_path = incidents / name  # the path of the finished folder
        self.path = incidents / f"{PARTIAL}{name}"  # the current path, for other processes; writes go through `opened`
        # A link that is made later has no effect: the host's folder and those below are reached by their descriptors.
        self._host = OwnFolder(incidents.parent)
        self._incidents = OwnFolder(incidents, within=self._host)
        place = (self._incidents.path, self._host.path)
        self._retention = Retention(*place, incident_id, limits or DiskLimits(), server)
        self._folder = OwnFolder(self.path, within=self._incidents)
        #: A path that leads to this folder, in this process only, even if another one takes its name; see `OwnFolder`.
        self.opened = self._folder.path
        self.ownership = FolderLock(self._incidents.path / self.path.name)
        self.ownership.acquire()
        if not self._hold_reserve():
            self._retention.make_room(_LEAST_RESERVE_BYTES)
            if not self._hold_reserve():
                self.discard()
                raise NoRoomError(errno.ENOSPC, FULL)

    def rename(self, kind: str) -> None:
        """Change the kind of incident in the name that the folder gets when it is finished."""
        name = parse_name(self.final_path.name)
        assert name is not None
        self.final_path = self.final_path.with_name(str(replace(name, kind=kind)))

    def write_text(self, name: str, text: str) -> str:
        """Write a file below the folder, without secrets, and return its name.

        A text that cannot be searched for secrets is withheld. Raises NoRoomError if there is no room for the file,
        another OSError if the folder is gone.
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
        """Remove a file below the folder if it exists; OSError if the folder can no longer be written to."""
        size = self._size_of(name)
        (self.opened / name).unlink(missing_ok=True)
        self._retention.take(-size)

    def adopt(self, source: Path, name: str) -> str:
        """Move a file of this user's into the folder and return its name relative to it; see `write_text`."""
        self.write_bytes(name, read_adopted(source))
        source.unlink()
        return name

    def charge(self, growth: int) -> None:
        """Make room for `growth` bytes that another process writes below `opened`; see `Retention.take`."""
        self._retention.take(growth)

    def make_room_beside(self, folder: Path, size: int) -> str:
        """Make room in another folder; see `Retention.make_room`."""
        try:
            return self._retention.make_room(size, folder)
        except OSError as error:
            return f"{folder} cannot be written to: {error.strerror}"

    def save(self, document: Mapping[str, Any], summary: str, *, is_redacted: bool = False, sync: bool = False) -> None:
        """Write ``incident.json`` and ``summary.md`` without secrets, if need be into the space reserved for them.

        With `sync`, ``incident.json`` has reached the disk on return. Raises OSError if there is no room even so, or
        the folder is gone; the previous files are kept then.
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
        # Count whole blocks, so that many small lines count no more than they take; the first adds the folder's block.
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
            # The essential files may have exceeded the limits.
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
        # The complete incident is worth more than its log and than its last summary, which is written again later.
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
        """Call `write`; if the disk is full, release the reserve, call it again and restore the reserve."""
        try:
            write()
        except OSError as error:
            if error.errno not in _NO_SPACE or not self._release_reserve():
                raise
            write()
            self._hold_reserve()

    def _hold_reserve(self) -> bool:
        """Reserve disk space for the essential files, as much as there is; return whether it is enough."""
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
                # Try a block less at a time: evidence takes the space that the reserve does not hold.
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
    """Stands in for a folder that cannot be created: each piece of evidence is refused for `reason`."""

    def __init__(self, reason: str) -> None:
        self.id = new_id()
        self.path = self.final_path = self.opened = Path("nowhere")
        self.problem = reason[:MAX_REASON]

    def _do_nothing(self, *_arguments: Any, **_options: Any) -> None:
        """Stand in for the methods that write, rename or remove the folder."""

    rename = save = append = discard = _do_nothing

    def make_room_beside(self, folder: Path, size: int) -> str:
        """Return why there is no incident."""
        return f"{self.problem} (there would be {size} bytes in {folder})"

    def write_bytes(self, name: str, data: bytes) -> str:
        """Refuse it."""
        raise NoRoomError(errno.ENOSPC, f"{self.problem} ({name} would take {len(data)} bytes)")


def read_adopted(source: Path) -> bytes:
    """Return the contents of a file without secrets, as the incident's folder holds them. Raises OSError."""
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
    """Return the result of `search` on a text of `size`, run in a child if it is long; OSError if that fails."""
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
