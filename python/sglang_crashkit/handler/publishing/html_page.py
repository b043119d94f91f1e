"""The page of an incident, ``incident.html`` beside its ``incident.json``, made by a child process where it is wanted.

The incident is whole before it begins, and nobody waits for it but a crash handler that has nothing else to do any
more. Whatever becomes of the child, the incident is as it was.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.publishing.children import Child

logger = logging.getLogger(__name__)

NAME = "incident.html"
#: The longest page that this program writes, in bytes, and with 512 ranks twice what one takes.
_PROGRAM, _MAX_BYTES = "sglang_crashkit.cli.reporters.html", 8 << 20
#: Of 512 ranks it takes two seconds of processor time. It gives way to all others: where two processes for each core
#: keep a machine busy, each of those seconds takes two minutes.
DEADLINE_SECS = 300.0


class HtmlPage:
    """Makes the page of one incident at a time.

    Args:
        wanted: whether there is to be any; where not, nothing here does anything.
        program: what is run, with the folder and the file behind it.
        deadline_secs: the longest that it may take, in seconds.
    """

    def __init__(
        self,
        wanted: bool,
        program: Sequence[str] = (sys.executable, "-m", _PROGRAM),
        deadline_secs: float = DEADLINE_SECS,
    ) -> None:
        self._wanted = wanted
        self._program = program
        self._deadline_secs = deadline_secs
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
            run.folder.charge(NAME, _MAX_BYTES)
            self._maker = Child([*self._program, str(run.path), str(run.path / NAME)], self._deadline_secs)
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
