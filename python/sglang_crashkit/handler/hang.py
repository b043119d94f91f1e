"""One hang, from when it is noticed until the schedulers go on: what its incident is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sglang_crashkit.analysis.verdict import FailureEvent
from sglang_crashkit.handler.incident_run import IncidentRun
from sglang_crashkit.handler.pulse import Pulse

SNAPSHOTS, SNAPSHOT_INTERVAL_SECS = 3, 2.0
#: One sign is not yet a server that goes on: the batch that was stuck may end, and the next one not.
_SIGNS_OF_PROGRESS = 2


def note_silence(run: IncidentRun, pulse: Pulse) -> None:
    """Take into an incident that a scheduler is silent."""
    now, process, beat, secs = time.time(), pulse.process, pulse.beat, pulse.silent_secs
    details = {"silent_secs": round(secs, 3), "doing": beat.doing, "batches": beat.batches}
    message = f"made no progress for {secs:.1f} s; the last sign was of {beat.doing}"
    run.note(now, "no_progress", pid=process.pid, title=process.title, **details)
    run.tell_last_sign(process, beat, secs)
    run.add_failure(FailureEvent(process.pid, now - secs, "hang", message))


class Hang:
    """Schedulers that make no progress.

    Args:
        run: the incident, of which the first snapshot is taken at once.
        silent_secs: for how long the first of them was silent by now, in seconds.
        clock: the monotonic clock.

    Attributes:
        run: the incident.
        next_snapshot: when the next snapshot is due, by the clock.
        ended: that the server goes on and since when, in words; empty before.
    """

    def __init__(self, run: IncidentRun, silent_secs: float, clock: Callable[[], float]) -> None:
        self.run = run
        self._clock = clock
        self._since = clock() - silent_secs
        self._pulses: list[Pulse] = []
        self._snapshots = 1
        self.ended = ""
        self.next_snapshot = clock() + SNAPSHOT_INTERVAL_SECS

    def spread(self, silent: Iterable[Pulse]) -> None:
        """Take in the schedulers that are silent, those that are not in it yet."""
        for pulse in silent:
            if pulse in self._pulses:
                continue
            pulse.signs = 0
            self._pulses.append(pulse)
            note_silence(self.run, pulse)

    def take_snapshot(self) -> bool:
        """Take the snapshot that is due, and say whether it was the last one."""
        self.run.photograph()
        self._snapshots += 1
        self.next_snapshot = self._clock() + SNAPSHOT_INTERVAL_SECS
        if self._snapshots < SNAPSHOTS:
            return False
        self.end_snapshots()
        return True

    def end_snapshots(self) -> None:
        """Take no more snapshots."""
        self.next_snapshot = float("inf")

    @property
    def is_busy(self) -> bool:
        """Whether the stacks say that the schedulers are at work."""
        verdict = self.run.incident.verdict
        return verdict is not None and verdict.kind == "busy"

    def told(self) -> str:
        """Return in one line what is known of it and where."""
        run = self.run
        words = run.incident.verdict.text if run.incident.verdict is not None else "no progress."
        return f"{words} Incident: {run.problem or run.path}"

    def is_over(self) -> bool:
        """Say whether all that hung go on or are dead; those that go on are noted in the incident, finished or not.

        Of one whose heartbeat was switched off nothing more is known.
        """
        living = [pulse for pulse in self._pulses if pulse.process.exited_at is None and not pulse.beat.is_off]
        if any(pulse.signs < _SIGNS_OF_PROGRESS for pulse in living):
            return False
        if living:
            secs = self._clock() - self._since
            titles = [pulse.process.title for pulse in living]
            self.run.note(time.time(), "progress_returned", hung_secs=round(secs, 3), titles=titles)
            self.ended = f"Progress returned after {secs:.1f} s"
            self.run.add_afterword(f"{self.ended}.")
        return True
