"""The heartbeat of one scheduler as the handler follows it."""

from __future__ import annotations

from sglang_crashkit.handler.tree import TrackedProcess
from sglang_crashkit.memory.heartbeat import Beat, BeatReader


class Pulse:
    """Counts for how long a scheduler was seen to be silent.

    What counts is time that the handler saw pass, look by look: of a suspended machine, or of a handler that got no
    CPU, it saw nothing.

    Args:
        process: the scheduler.
        reader: its heartbeat.

    Attributes:
        beat: what the heartbeat said at the last look.
        silent_secs: for how long it has said nothing else, in seconds.
        signs: at how many looks it had moved on since `signs` was last set to 0.
    """

    def __init__(self, process: TrackedProcess, reader: BeatReader) -> None:
        self.process = process
        self._reader = reader
        self.beat: Beat = reader.read()
        self.silent_secs = 0.0
        self.signs = 0

    def look(self, seen_secs: float) -> None:
        """Take in what the heartbeat says now.

        Args:
            seen_secs: what the handler saw pass since the last look, in seconds.
        """
        beat = self._reader.read()
        if beat == self.beat:
            self.silent_secs += seen_secs
        else:
            self.beat = beat
            self.silent_secs = 0.0
            self.signs += 1

    def catch_up(self, now: float) -> None:
        """Take in what the heartbeat says now, and count all of the time since its last sign, seen or not.

        Args:
            now: the time by the clock of the heartbeat, in seconds.
        """
        beat = self._reader.read()
        self.signs += beat != self.beat
        self.beat = beat
        self.silent_secs = max(0.0, now - beat.at)

    def hold(self, seen_secs: float) -> None:
        """Do not count the time since the last look."""
        self.silent_secs = max(0.0, self.silent_secs - seen_secs)

    def last(self) -> Beat:
        """Return what the heartbeat says now, or said last, without taking it for a sign."""
        return self._reader.read()

    def close(self) -> None:
        """Give the heartbeat back."""
        self._reader.close()
