"""Report an incident: to the processes that wait for it, in the server's log, and by the user's command.

The server's main process writes the log, because the crash handler has no descriptor of it. The log also reports which
resources the crash handler lacks.

A child runs the command once the incident is complete; neither the server nor an incident waits for the child. If a
container ends with its server, the child ends too. So the next crash handler on the same crash folder runs the commands
that are missing for the incidents of the last hour.
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

_LAST_LOOK_SECS = 5.0  # the longest time from the last GPU core to the answer
_MAX_LINE, _MAX_UNSAID = 3000, 100
_RECENT_SECS = 3600.0  # the age up to which `catch_up` runs the command for an incident
MAX_AT_ONCE = 4  # commands: the server may be in a crash loop, and commands may hang
_AROUND_COMMAND_SECS = 30.0  # the longest time spent before and after a command, even on a busy machine
#: Seconds between checks of whether a command has ended.
_LOOK_SECS = 2.0
#: The size limit of the child's output, which is a line or two, in bytes.
_MAX_OUTPUT = 1 << 20
#: Descriptors held back, more than an incident needs at once; and the highest limit, more than a handler ever needs.
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
    """The messages whose senders wait for the current incident; a mailbox sends the answers."""

    def __init__(self, mailbox: Mailbox, step_secs: float) -> None:
        self._mailbox = mailbox
        #: The least seconds by which the end of the wait must move before it is sent again: for a stopped sender, which
        #: reads nothing, the kernel keeps ten answers and drops the final one.
        self._step_secs = step_secs
        self._waiting: list[Message] = []
        self._asked_until = 0.0

    def add(self, message: Message, secs_left: float | None) -> None:
        """Note that the sender waits; `secs_left`: the most seconds left for GPU cores, None if none is awaited."""
        self._waiting.append(message)
        if secs_left is not None:
            self.ask_to_wait(message, secs_left)

    def ask_all_to_wait(self, secs_left: float | None) -> None:
        """Ask all senders to wait longer, unless they were asked to wait that long already; see `add`."""
        if secs_left is None or time.monotonic() + secs_left < self._asked_until + self._step_secs:
            return
        self._asked_until = time.monotonic() + secs_left
        for message in self._waiting:
            self.ask_to_wait(message, secs_left)

    def give(self, answer: Callable[[Message], None]) -> None:
        """Answer all senders."""
        for message in self._waiting:
            answer(message)
        self._waiting.clear()
        self._asked_until = 0.0

    def ask_to_wait(self, message: Message, secs_left: float) -> None:
        """Ask one sender to wait while GPU cores are written."""
        self._mailbox.acknowledge(message, ack="wait", **{WAIT_FIELD: secs_left + _LAST_LOOK_SECS})


class ServerLog:
    """The log of a server, whose main process `root` receives lines at a socket of `srt.stack_hooks` in `runtime`."""

    def __init__(self, root: TrackedProcess, runtime: Path) -> None:
        self._socket = HookFiles.of(runtime, root.pid, root.handle.start_ticks).say
        self._unsaid: deque[str] = deque(maxlen=_MAX_UNSAID)

    def say(self, text: str) -> None:
        """Have the main process write one line once it listens; it may be hanging."""
        self._unsaid.append(text[:_MAX_LINE])
        self.say_rest()

    def say_rest(self) -> None:
        """Send the lines from before the main process listened, if it listens by now."""
        while self._unsaid and self._socket.exists():
            self.notify("say", text=self._unsaid.popleft())

    def notify(self, event: str, **fields: Any) -> None:
        """Send the main process something to write or show; log it if that fails."""
        try:
            notify(str(self._socket), event, **fields)
        except HandlerUnreachableError as error:
            logger.warning("a message to the server's main process was not delivered: %s", error)


class Shortages:
    """Reports once in the server's log when this process runs out of descriptors, memory, processes or disk space.

    It holds some descriptors back, and closes them when no others are left, so that an incident can still be written.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._told: set[int] = set()
        self._held: list[int] = []

    def raise_limit(self) -> None:
        """Raise the limit of this process's descriptors as far as allowed, to at most `_MAX_DESCRIPTORS`."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def look(self) -> None:
        """Hold descriptors back while there are plenty; close them and report it when almost none are left."""
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
        """Return whether an error means that a resource ran out; report each resource the first time."""
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
        """Close the descriptors that are held back."""
        while self._held:
            os.close(self._held.pop())


class Commands:
    """Runs the user's command, if there is one, for each complete incident."""

    def __init__(self) -> None:
        self._is_wanted = bool(os.environ.get(on_incident.COMMAND, "").strip())
        self._running: list[tuple[Path, BackgroundTool]] = []
        self._waiting: list[Path] = []

    def begin(self, folder: Path) -> None:
        """Queue the command for the finished incident in `folder`; it starts after the server was answered."""
        if self._is_wanted:
            self._waiting.insert(0, folder)

    def act_on_time(self) -> float:
        """Start queued commands, the newest incident first, up to `MAX_AT_ONCE`; return when to call this again."""
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
            # The child limits the time of the command itself, but not of a disk that does not answer.
            secs = on_incident.deadline_secs() + _AROUND_COMMAND_SECS
            self._running.append((folder, BackgroundTool("crashkit-command", argv, secs, _MAX_OUTPUT)))
            # Only after the start, which fails if the system gives no thread.
            self._waiting.pop(0)
        return time.monotonic() + _LOOK_SECS if self._running else float("inf")

    def catch_up(self, incidents: Path) -> None:
        """Queue the command for the incidents of the last hour in a folder for which it was not run."""
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
