"""What is seen of a server that hangs when SIGTERM comes: it ends soon, by itself or by whoever sent the signal."""

from __future__ import annotations

import time

from sglang_crashkit.analysis.verdict import UNHEALTHY
from sglang_crashkit.handler.current import CurrentIncident
from sglang_crashkit.handler.hang import note_silence
from sglang_crashkit.handler.hang_watch import HangWatch
from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.outlook import Outlook
from sglang_crashkit.handler.tree import TrackedProcess
from sglang_crashkit.policy import Event

#: A scheduler whose server's health check failed is silent when it gave no sign for so long, in seconds: an idle one
#: gives one every second.
_SILENT_SECS = 2.0
#: One look does not tell who stays where he is from who passes by. The second one comes this much later, in seconds:
#: upstream ends such a server within 5 s.
_SECOND_LOOK_SECS = 0.7


def dump_event(sender: TrackedProcess) -> Event:
    """Return which event it is that a process saves its requests: the HTTP server starts a tokenizer worker anew."""
    return Event.WORKER_DIED if sender.role == "tokenizer_worker" else Event.DUMPED


class AskedToEnd:
    """Takes the evidence of a server that is asked to end and hangs.

    Args:
        outlook: what was announced of the server's end.
        current: the incident at hand.
        hangs: who follows heartbeats.
    """

    def __init__(self, outlook: Outlook, current: CurrentIncident, hangs: HangWatch) -> None:
        self._outlook = outlook
        self._current = current
        self._hangs = hangs
        self._run: IncidentRun | None = None
        self._due = float("inf")
        self._finishes = False

    def hear(self, sender: TrackedProcess, seconds: float, *, unhealthy: bool) -> None:
        """Look at the server, which is asked to end.

        Args:
            sender: the process that was asked.
            seconds: when, since the epoch.
            unhealthy: its health check had failed, so that it will not wait for its requests.
        """
        if unhealthy:
            # Seconds may pass before it says so itself, and it may be killed before.
            self._current.make_room()
            self._open(UNHEALTHY, sender, seconds)
        else:
            self._hangs.begin_at_end()

    def join_dump(self, sender: TrackedProcess, seconds: float) -> IncidentRun | None:
        """Return the incident at hand, photographed; begin one where there is none, as `CurrentIncident.join` does.

        To be called as a process begins to save its requests, as one that drains does when its health check fails.
        """
        if self._outlook.draining and self._current.run is None and self._hangs.silent(_SILENT_SECS):
            self._open("crash_dump", sender, seconds)
        return self._current.join("child_failure", "crash_dump", sender, seconds, dump_event(sender))

    def finish(self) -> None:
        """Finish the incident at hand, after the second look where one is to come."""
        self._finishes = True
        if self._run is None:
            self._end_looks()

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do, by the monotonic clock."""
        return self._due

    def act_on_time(self) -> None:
        """Do what is due by now."""
        if time.monotonic() < self._due:
            return
        run, current = self._run, self._current
        # While a core is written nobody is to be signalled, as a photograph may.
        is_over = self._outlook.gone_at is not None or current.gpus.are_cores_asked
        if run is not None and run is current.run and not run.finished and not is_over:
            run.photograph()
        self._end_looks()

    def _open(self, trigger: str, sender: TrackedProcess, seconds: float) -> None:
        current = self._current
        is_new = current.run is None
        run = current.run or current.open("hang", trigger, sender, seconds)
        current.apply(Event.HUNG_AT_END)
        if is_new:
            for pulse in self._hangs.silent(_SILENT_SECS):
                note_silence(run, pulse)
        if not run.photographed:
            current.photograph()
        if is_new and current.run is run:
            self._run, self._due = run, time.monotonic() + _SECOND_LOOK_SECS

    def _end_looks(self) -> None:
        self._run, self._due = None, float("inf")
        if self._finishes:
            self._finishes = False
            self._current.finish()
