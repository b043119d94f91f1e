"""Who is told of an incident: those who wait for it, the server's log, and the user's command.

The server's log is written by its main process: the crash handler holds none of it open. It also has what the crash
handler itself is short of.

The command follows once the incident is whole, by a child that no server and no incident waits for. Where a container
ends with its server, the child ends with that, too; so the next crash handler on the same crash folder runs the command
for the last hour's incidents that had none.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_crashkit.capture.tools import BackgroundTool
from sglang_crashkit.handler import on_incident
from sglang_crashkit.handler.processes import TrackedProcess
from sglang_crashkit.incident.store import is_finished, parse_name
from sglang_crashkit.kernel.stack_hooks import HookFiles
from sglang_crashkit.protocol import WAIT_FIELD, HandlerUnreachableError, Mailbox, Message, notify

logger = logging.getLogger(__name__)

_LAST_LOOK_SECS = 5.0  # what comes after the last GPU core, up to the answer, takes no longer
_MAX_LINE, _MAX_UNSAID = 3000, 100
_RECENT_SECS = 3600.0  # how far back it looks for incidents without a command
MAX_AT_ONCE = 4  # of a server in a crash loop, and commands that hang
_AROUND_COMMAND_SECS = 30.0  # what comes before and after a command takes no longer, also on a busy machine
#: Whether a command has ended is looked at so often, in seconds.
_LOOK_SECS = 2.0
#: What it prints is a line or two, in bytes.
_MAX_OUTPUT = 1 << 20
#: One incident takes fewer descriptors at a time than are held back; more than the latter a handler never has.
_HELD_BACK, _MAX_DESCRIPTORS = 48, 1 << 16
_WORDS = {
    errno.EMFILE: ("file descriptors", "raise the limit of open files (ulimit -n)"),
    errno.ENFILE: ("file descriptors on this machine", "raise fs.file-max"),
    errno.ENOMEM: ("memory", "raise the memory limit of the container"),
    errno.EAGAIN: ("processes or threads", "raise the limit of processes (ulimit -u, pids.max)"),
    errno.ENOSPC: ("room on a disk", "df -h"),
    errno.EDQUOT: ("room in a disk quota", "quota"),
}


class Answers:
    """Those who wait for the current incident, and are answered by a mailbox."""

    def __init__(self, mailbox: Mailbox, step_secs: float) -> None:
        self._mailbox = mailbox
        #: A new end of the wait is told only when it has moved by so much: of a sender that reads nothing, as it is
        #: stopped, the kernel keeps ten answers and loses the last.
        self._step_secs = step_secs
        self._waiting: list[Message] = []
        self._asked_until = 0.0

    def add(self, message: Message, secs_left: float | None) -> None:
        """Note that the sender waits: for GPU cores at most `secs_left` seconds more, None where none is awaited."""
        self._waiting.append(message)
        if secs_left is not None:
            self.ask_to_wait(message, secs_left)

    def ask_all_to_wait(self, secs_left: float | None) -> None:
        """Ask all of them to wait on, where they were not asked for so long; see `add`."""
        if secs_left is None or time.monotonic() + secs_left < self._asked_until + self._step_secs:
            return
        self._asked_until = time.monotonic() + secs_left
        for message in self._waiting:
            self.ask_to_wait(message, secs_left)

    def give(self, answer: Callable[[Message], None]) -> None:
        """Answer all of them."""
        for message in self._waiting:
            answer(message)
        self._waiting.clear()
        self._asked_until = 0.0

    def ask_to_wait(self, message: Message, secs_left: float) -> None:
        """Ask one sender to wait while GPU cores are written."""
        self._mailbox.acknowledge(message, ack="wait", **{WAIT_FIELD: secs_left + _LAST_LOOK_SECS})


class ServerLog:
    """The log of a server with this main process, whose other end `srt.stack_hooks` has in the folder `runtime`."""

    def __init__(self, root: TrackedProcess, runtime: Path) -> None:
        self._socket = HookFiles.of(runtime, root.pid, root.handle.start_ticks).say
        self._unsaid: deque[str] = deque(maxlen=_MAX_UNSAID)

    def say(self, text: str) -> None:
        """Have the main process write one line, once it listens; it may be the one that hangs."""
        self._unsaid.append(text[:_MAX_LINE])
        self.say_rest()

    def say_rest(self) -> None:
        """Have it write the lines that came before it listened, where it does by now."""
        while self._unsaid and self._socket.exists():
            self.notify("say", text=self._unsaid.popleft())

    def notify(self, event: str, **fields: Any) -> None:
        """Tell the main process what it is to write or show; that it does not hear it is logged."""
        try:
            notify(str(self._socket), event, **fields)
        except HandlerUnreachableError as error:
            logger.warning("the server's own log does not report it: %s", error)


class Shortages:
    """Tells once, in the server's log, what this process runs out of: descriptors, memory, processes, room on the disk.

    Some descriptors are held back, and given up where no others are left: an incident can still be written.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._told: set[int] = set()
        self._held: list[int] = []

    def raise_limit(self) -> None:
        """Let this process have as many descriptors as it may."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def look(self) -> None:
        """Hold descriptors back while there are plenty; give them up, and say so, where nearly none are left."""
        try:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            limit = _MAX_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
            left = limit - len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            if left < _HELD_BACK // 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            while len(self._held) < _HELD_BACK and left > 2 * _HELD_BACK:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.note(error)

    def note(self, error: BaseException) -> bool:
        """Say whether an error is one of a resource that ran out, which is told the first time."""
        number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
        if "start new thread" in str(error):
            number = errno.EAGAIN
        if number not in _WORDS:
            return False
        if number in (errno.EMFILE, errno.ENFILE):
            self.close()
        if number not in self._told:
            self._told.add(number)
            what, next_step = _WORDS[number]
            words = f"the crash handler has no {what} left: incidents may lack evidence; next: {next_step}"
            logger.error("%s (%s)", words, error)
            self._say(words)
        return True

    def close(self) -> None:
        """Give up what is held back."""
        while self._held:
            os.close(self._held.pop())


class Commands:
    """Runs the user's command for each incident that is whole, where there is one."""

    def __init__(self) -> None:
        self._is_wanted = bool(os.environ.get(on_incident.COMMAND, "").strip())
        self._running: list[tuple[Path, BackgroundTool]] = []
        self._waiting: list[Path] = []

    def begin(self, folder: Path) -> None:
        """Have it run for the finished incident in a folder, once the server was answered and there is room."""
        if self._is_wanted:
            self._waiting.insert(0, folder)

    def act_on_time(self) -> float:
        """Start what waits, the newest incident first, as far as there is room; return when to look again."""
        self._running, before = [], self._running
        for folder, tool in before:
            run = tool.look()
            if run is None:
                self._running.append((folder, tool))
            elif run.reason:
                words = "; ".join([run.reason, *run.errors.strip().splitlines()[-1:]])
                logger.error("%s for incident %s: %s", on_incident.COMMAND, folder, words)
        while self._waiting and len(self._running) < MAX_AT_ONCE:
            folder = self._waiting[0]
            argv = [sys.executable, "-m", "sglang_crashkit.handler.on_incident", str(folder)]
            # It has a deadline of its own for the command, and none for a disk that does not answer.
            secs = on_incident.deadline_secs() + _AROUND_COMMAND_SECS
            self._running.append((folder, BackgroundTool("crashkit-command", argv, secs, _MAX_OUTPUT)))
            # Only now: there may be no thread to be had.
            self._waiting.pop(0)
        return time.monotonic() + _LOOK_SECS if self._running else float("inf")

    def catch_up(self, incidents: Path) -> None:
        """Have it run for the incidents of the last hour in a folder for which it was not."""
        if not self._is_wanted:
            return
        with contextlib.suppress(OSError):
            for path in sorted(incidents.iterdir()):
                name = parse_name(path.name)
                if name is None or name.kind in on_incident.QUIET_KINDS:
                    continue
                is_recent = 0 <= time.time() - name.seconds < _RECENT_SECS
                if is_recent and is_finished(path.name) and not (path / on_incident.OUTCOME).exists():
                    self.begin(path)
