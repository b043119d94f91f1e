"""What follows once an incident is whole: notices and a page, each by a child that no server and no incident waits for.

Whatever becomes of a child, the incident is as it was. Where a container ends with its server, they end with that, too;
so the next crash handler on the same crash folder notifies of the last hour's incidents that nobody was notified of.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.incident.store import is_finished, parse_name
from sglang_crashkit.notifications import plan

logger = logging.getLogger(__name__)

#: How far back it looks for incidents that nobody was notified of, in seconds.
_RECENT_SECS = 3600.0
#: A server in a crash loop, and whoever is notified hangs.
_MAX_AT_ONCE = 4
#: A killed child is gone a moment later, in seconds; one in uninterruptible sleep is left to the end of this process.
_REAP_SECS = 1.0
PAGE = "incident.html"
#: Makes a page of the folder that comes behind it, in the file behind that.
_PROGRAM = (sys.executable, "-m", "sglang_crashkit.cli.reporters.html")
#: The longest page that it writes, in bytes, and with 512 ranks twice what one takes.
_MAX_BYTES = 8 << 20
#: Of 512 ranks it takes two seconds of processor time. It gives way to all others: where two processes for each core
#: keep a machine busy, each of those seconds takes two minutes.
_PAGE_SECS = 300.0


class Child:
    """A program in a session of its own; what it prints goes where this process's own log goes.

    Args:
        argv: the program and its arguments.
        deadline_secs: the longest that it may take, in seconds; without end where it has deadlines of its own.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], deadline_secs: float = math.inf) -> None:
        self._process = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, start_new_session=True)
        self._deadline_secs = deadline_secs
        self._deadline = time.monotonic() + deadline_secs
        #: Why it did not do what it was to do; empty as long as it is at work, and where it did.
        self.problem = ""

    def has_ended(self) -> bool:
        """Say whether it is at work no more; at its deadline it is killed."""
        status = self._process.poll()
        if status is None and time.monotonic() >= self._deadline:
            self.kill()
            self.problem = f"did not end within {self._deadline_secs:g} s"
            return True
        if status:
            self.problem = f"ended with status {status}"
        return status is not None

    def wait(self) -> None:
        """Wait for its end, until its deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, self._deadline - time.monotonic()))

    def kill(self) -> None:
        """Kill it, and all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_SECS)
        self.leave()

    def leave(self) -> None:
        """Let it work on, and never wait for it."""
        # Otherwise it would be a ResourceWarning.
        self._process.returncode = self._process.poll() or 0


class Notices:
    """Has those notified whom the environment names."""

    def __init__(self) -> None:
        self._is_wanted = plan.is_wanted(os.environ)
        self._children: list[Child] = []
        self._waiting: list[Path] = []

    def begin(self, folder: Path) -> None:
        """Have them notified of the finished incident in a folder, once the server was answered and there is room."""
        if self._is_wanted:
            self._waiting.insert(0, folder)

    def act_on_time(self) -> None:
        """Start what waits, the newest incident first, as far as there is room; what cannot be started is logged."""
        self._children = [child for child in self._children if not child.has_ended()]
        while self._waiting and len(self._children) < _MAX_AT_ONCE:
            self._start(self._waiting.pop(0))

    def _start(self, folder: Path) -> None:
        try:
            self._children.append(Child([sys.executable, "-m", "sglang_crashkit.notifications", str(folder)]))
        except OSError as error:
            logger.error("nobody is notified of incident %s: %s", folder, error)

    def catch_up(self, incidents: Path) -> None:
        """Have them notified of the incidents of the last hour in a folder that nobody was notified of."""
        if not self._is_wanted:
            return
        with contextlib.suppress(OSError):
            for path in sorted(incidents.iterdir()):
                name = parse_name(path.name)
                if name is None or name.kind in plan.QUIET_KINDS or not 0 <= time.time() - name.seconds < _RECENT_SECS:
                    continue
                if is_finished(path.name) and not (path / plan.OUTCOME).exists():
                    self.begin(path)

    def close(self) -> None:
        """Start what there is room for, and leave those alone that are at work: each has a deadline of its own."""
        self.act_on_time()
        for child in self._children:
            child.leave()


class HtmlPage:
    """Makes the page of one incident at a time, where it is wanted."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._made = ""
        self._maker: Child | None = None

    def begin(self, run: IncidentRun, *, again: bool = False) -> None:
        """Have the page of a finished incident made.

        Args:
            run: the incident.
            again: also where it was made, or is being made: something was added to it since.
        """
        if not self._wanted or not run.finished or run.problem or (self._made == run.incident.id and not again):
            return
        self.cancel()
        self._made = run.incident.id
        try:
            # It counts as any other file of the incident does.
            run.folder.charge(PAGE, _MAX_BYTES)
            self._maker = Child([*_PROGRAM, str(run.path), str(run.path / PAGE)], _PAGE_SECS)
        except (OSError, CrashkitError) as error:
            logger.warning("no page of incident %s: %s", run.path, error)

    def act_on_time(self) -> None:
        """Take in that the page is made, or that the time for it is over."""
        if self._maker is not None and self._maker.has_ended():
            if self._maker.problem:
                logger.warning("no page of incident %s: its program %s", self._made, self._maker.problem)
            self._maker = None

    def wait(self) -> None:
        """Wait until the page is made, or the time for it is over."""
        if self._maker is not None:
            self._maker.wait()
            self.act_on_time()

    def cancel(self) -> None:
        """End what makes a page, where something does."""
        if self._maker is not None:
            self._maker.kill()
            self._maker = None
