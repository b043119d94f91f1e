"""The marker of a server program: a file in its spool that its crash handler touches, and removes when the server ends.

If all processes of a server are killed at once, with their container or node, the marker is the only trace of it.
`handler.unfinished` makes an incident of it at the next start. The lock on the spool shows whether the handler lives.
The file holds one JSON object a line. It is empty until the kit knows that the server is a program of its own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import setproctitle

from sglang_crashkit import __version__
from sglang_crashkit.kernel import cgroup, procfs
from sglang_crashkit.kernel.forked import ForkedCall, is_reaped
from sglang_crashkit.kernel.kernel_log import KERNEL_LOG, lines_since
from sglang_crashkit.kernel.private_files import read_regular
from sglang_crashkit.kernel.procfs import boot_id, own_namespace
from sglang_crashkit.model import lenient
from sglang_crashkit.model.incident import Incident, ServerInfo, Trigger, iso_time
from sglang_crashkit.redact import redact_text
from sglang_crashkit.visible import visible

logger = logging.getLogger(__name__)

MARKER = "serving.jsonl"
#: The kind of the incident that is made of a marker, and its trigger.
VANISHED = "vanished"
#: Seconds between touches of a marker.
TOUCH_SECS = 30.0
#: Seconds between checks of whether the child has ended.
_LOOK_SECS = 0.5
#: A child's answers: the marker does not exist; its folder does not exist either.
_GONE, _LOST = -1, -2
_MAX_BYTES, _MAX_WORDS, _MAX_KERNEL_LINES = 1 << 16, 200, 3
#: The kernel's messages on processes that it ends and on failures of the machine; and how many lines to search.
_TELLING = re.compile(
    r"oom-kill:|[Oo]ut of memory|Killed process|segfault at|NVRM: Xid|Hardware Error|blocked for more than|BUG:|panic"
)
_MAX_READ = 100_000


class Count(msgspec.Struct):
    """A count in a file of a cgroup at the launch of the server."""

    path: str
    name: str  # the name of the count in the file: ``oom_kill``, ``max``
    inode: int  # of the cgroup's folder, by which a later one at the same path is recognised
    count: int


class Marker(msgspec.Struct):
    """The contents of a marker; times are in seconds since the epoch."""

    server: ServerInfo
    title: str
    started: float
    boot_id: str
    arguments: str  # a hash of the command line, to compare two starts
    counts: list[Count] = []
    asked_to_end: float = 0.0  # when the server was asked to end; 0.0 if it was not
    touched: float = 0.0  # when its handler last touched the file, whose mtime this is; not in its contents


def server_info(pid: int, start_ticks: int) -> ServerInfo:
    """Return what identifies a server: its process, host and versions."""
    try:
        release = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        release = "unknown"
    return ServerInfo(pid, release, __version__, socket.gethostname(), start_ticks, own_namespace())


class ServerMarker:
    """Keeps the marker of one server in its spool; `say` writes to the server's own log, `now` is a monotonic clock.

    The crash folder may be on a disk that does not answer, so a child touches the file, one child at a time. A child
    never creates it: a late child must not restore a file that was removed.
    """

    def __init__(self, spool: Path, say: Callable[[str], object], now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._say, self._now = spool / MARKER, say, now
        self._due = float("inf")
        self._lines: list[Callable[[], Any]] = []
        self._written = 0
        self._call: ForkedCall | None = None
        self._pid, self._begun = 0, 0.0
        self._is_told = False

    def create(self) -> None:
        """Create the empty file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            os.close(os.open(self._path, flags, 0o600))
        except OSError as error:
            self._fail(error)

    def begin(self, pid: int, start_ticks: int) -> None:
        """Record that a server program has begun."""
        if not self._lines:
            # Read here, not in the child: the child has no helper process for a read that may block.
            cmdline = procfs.read_cmdline(pid)
            self._add(lambda: msgspec.to_builtins(_describe(pid, start_ticks, cmdline)))

    def ask_to_end(self, seconds: float) -> None:
        """Record that the server was asked to end, at `seconds` since the epoch."""
        if self._lines:
            self._add(lambda: {"asked_to_end": seconds})

    def act_on_time(self) -> float:
        """Touch the file if that is due; return when to call this again, by the monotonic clock."""
        if self._now() < self._due:
            return self._due
        if self._call is not None and self._now() < self._begun + TOUCH_SECS and not is_reaped(self._pid):
            self._due = self._now() + _LOOK_SECS
            return self._due
        self._due = self._now() + TOUCH_SECS
        if self._call is not None:
            call, self._call = self._call, None
            try:
                written = int(call.wait(0.0))
            except OSError as error:
                self._fail(error)
            else:
                if written in (_GONE, _LOST):
                    # The server's end is known or a user removed the file (_GONE); or the crash folder is gone.
                    logger.info("the marker %s is gone", self._path)
                    if written == _LOST:
                        self._fail(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
                    self._due = float("inf")
                    return self._due
                self._written = written
        # A child that even SIGKILL does not end is blocked on the disk, as another child would be.
        if self._pid and not is_reaped(self._pid):
            return self._due
        lines, written = self._lines[self._written :], len(self._lines)
        try:
            self._call = ForkedCall(lambda: _touch(self._path, [line() for line in lines], written))
            self._pid, self._begun = self._call.pid, self._now()
        except OSError as error:
            self._fail(error)
        return self._due

    def _add(self, line: Callable[[], Any]) -> None:
        self._lines.append(line)
        self._due = self._now()

    def _fail(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            why = error.strerror or str(error)
            words = "should all processes of this server be killed at once, the next start will not know"
            self._say(f"the marker {self._path} cannot be kept ({why}): {words}")


def _touch(path: Path, lines: list[Any], written: int) -> bytes:
    # A child that is blocked on a disk must not look like a crash handler.
    setproctitle.setproctitle("crashkit_marker")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return str(_GONE if path.parent.is_dir() else _LOST).encode()
    # With a newline on both sides, a line that is cut off does not damage the next one.
    data = "".join(f"\n{json.dumps(line)}\n" for line in lines).encode()
    if os.write(descriptor, data) < len(data):
        raise OSError("no space left on the disk")
    os.utime(descriptor)
    return str(written).encode()


def _describe(pid: int, start_ticks: int, cmdline: Sequence[str]) -> Marker:
    arguments = hashlib.sha256(redact_text("\0".join(cmdline)).encode(errors="replace")).hexdigest()[:16]
    server, started = server_info(pid, start_ticks), procfs.started_at(start_ticks)
    title = procfs.title_of(cmdline, f"process {pid}")
    return Marker(server, title, started, boot_id(), arguments, list(_counts(pid)))


def _counts(pid: int) -> Iterator[Count]:
    for controller, files, name in (
        ("memory", ("memory.oom_control", "memory.events"), "oom_kill"),
        ("pids", ("pids.events", "pids.events"), "max"),
    ):
        group = cgroup.find_group(pid, controller, files)
        if group is not None:
            path = group.folder / files[group.version - 1]
            if (count := cgroup.read_count(path, name)) is not None:
                yield Count(str(path), name, group.folder.stat().st_ino, count)


def read_marker(spool: Path) -> Marker | None:
    """Return the marker in a spool; None if it is absent or empty, OSError if it cannot be read."""
    try:
        data, touched = read_regular(spool / MARKER, _MAX_BYTES), (spool / MARKER).lstat().st_mtime
    except FileNotFoundError:
        return None
    told: dict[str, Any] = {}
    for line in filter(None, data.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            told |= value if isinstance(value := json.loads(line), dict) else {}
    return lenient.read(told | {"touched": touched}, Marker) if told.get("server") else None


def incident_of(marker: Marker, incident_id: str) -> Incident:
    """Return the incident, not judged yet, of a server that is gone together with its crash handler."""
    server, now = marker.server, time.time()
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    is_same_boot = marker.boot_id == boot_id()
    gone_by = now if is_same_boot else max(marker.touched, now - since_boot)
    trigger = Trigger(VANISHED, iso_time(marker.touched), server.pid, visible(marker.title)[:_MAX_WORDS])
    incident = Incident(incident_id, VANISHED, trigger, server, complete=True)
    incident.requests.reason = "what the server worked on was in the memory of its processes"
    about = {"boot_id": marker.boot_id, "arguments": marker.arguments}
    incident.note(marker.started, "server_started", pid=server.pid, **about)
    # The processes of another PID namespace cannot be seen: only the handler's lock shows that they are gone.
    is_seen = not is_same_boot or server.pid_namespace == own_namespace()
    incident.note(gone_by, "found_gone", pid=server.pid, is_seen=is_seen)
    if marker.asked_to_end:
        secs = max(0.0, marker.touched - marker.asked_to_end)
        asked = iso_time(marker.asked_to_end)
        incident.remarks.append(f"It had been asked to end (SIGTERM) at {asked}, {secs:.0f} s or more before.")
    if is_same_boot:
        incident.remarks.append("The machine has run on since.")
        incident.remarks += [*_counted(marker), *_of_kernel(marker.touched - TOUCH_SECS)]
    else:
        incident.remarks.append(f"The machine was started anew at {iso_time(now - since_boot)}.")
    return incident


def _counted(marker: Marker) -> Iterator[str]:
    what = {"oom_kill": "OOM kills", "max": "processes refused for its limit"}
    for one in marker.counts[: len(what)]:
        path = Path(one.path)
        try:
            is_same = path.parent.stat().st_ino == one.inode
        except OSError:
            is_same = False
        count = cgroup.read_count(path, one.name) if is_same and one.name in what else None
        if count is not None:
            yield f"Its cgroup counts {count - one.count} {what[one.name]} since it was launched ({path})."
    if not marker.counts:
        yield "No count of its cgroup could be read."


def _of_kernel(since: float) -> Iterator[str]:
    try:
        lines = [text for _seconds, text in islice(lines_since(since, KERNEL_LOG), _MAX_READ) if _TELLING.search(text)]
    except OSError as error:
        yield f"The kernel's log cannot be read here ({KERNEL_LOG}: {error.strerror})."
        return
    yield (
        "The kernel's log says nothing of it."
        if not lines
        else "The kernel's log has from then on: "
        + "; ".join(f'"{visible(redact_text(text))[:_MAX_WORDS]}"' for text in lines[:_MAX_KERNEL_LINES])
        + "."
    )
