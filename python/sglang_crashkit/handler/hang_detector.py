"""Notice a hang by itself: every scheduler beats in each round of its event loop, idle, busy or paused.

A scheduler that is silent for ``SGLANG_CRASHKIT_HANG_SECS`` hangs, and so do those that wait for it. That becomes one
incident of kind ``hang`` with several snapshots; nothing is killed, and the incident says when the server goes on.

An idle server beats at least once a second in all supported releases (``--sleep-on-idle`` waits for 1000 ms at most), a
long prompt with every chunk. Silence is no hang, and is not counted,

* until every scheduler has begun its event loop, or one of them a batch: it loads the model, captures graphs;
* while one is held by a debugger, or the whole server is stopped;
* while the server is being ended.

A scheduler that cannot be followed is seen by the silence of those that wait for it.

More patience is had with the first batches, which compile kernels, with later ones while a compiler runs for them, with
very long prompts that are taken in at once, and with control requests, such as an update of the weights.

Where the stacks then say that the rank which the others wait for is at work, because it compiles, loads weights,
writes a profile, or takes in such a prompt, the incident says *busy*. It is withdrawn when the server goes on, and
taken for a hang after a long time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from sglang_crashkit.analysis.verdict import BUSY_TOO_LONG
from sglang_crashkit.handler.collectors.steps import modes_of
from sglang_crashkit.handler.incident import IncidentRun
from sglang_crashkit.handler.processes import ProcessTree, TrackedProcess
from sglang_crashkit.handler.session import Session
from sglang_crashkit.kernel import procfs
from sglang_crashkit.memory.heartbeat import Beat, BeatReader, NotABeatError
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

_LONGEST_INTERVAL_SECS = 2.0
#: Rounds of an idle server take up to one second; no silence that is shorter than this is a hang.
_SHORTEST_SECS = 2.0
#: Control requests move all the weights: so many times as long they may take.
_BUSY_FACTOR = 10
#: The first batches compile kernels. Compilers that run as processes are seen (below), and get more time; this is for
#: what a scheduler compiles itself, by Triton, NVRTC or the driver. With the default it is a hang after 180 s, whose
#: stacks are on disk before upstream's watchdog ends the server, which it does after 300 s.
_FIRST_BATCHES, _FIRST_FACTOR = 8, 3
#: FlashInfer's and DeepGEMM's larger kernels take nvcc minutes each.
_COMPILING_FACTOR = 20
#: So many tokens at once have the usual time; upstream's chunks have no more on any GPU. More have more.
_USUAL_TOKENS = 16_384
#: Share of the time from which on compilers are looked for; between two of them there may be none for a moment.
_LOOK_FOR_COMPILERS = 0.5
#: Of a server that is asked to end, a silence of so many seconds is looked at.
_AT_END_SECS = 5.0
#: Where no incident could be begun, it is tried again after this time, in seconds.
_RETRY_SECS = 10.0
#: Whoever is silent for this share of the time that one was, hangs with it.
_TOGETHER = 0.5


class HangDetector:
    """Follows the heartbeats of one server.

    Args:
        tree: the server's processes.
        session: the incident at hand.
        settings: how long a silence is a hang.
        say: writes a line to the server's own log.
        clock: the time in seconds, from wherever.
    """

    def __init__(
        self,
        tree: ProcessTree,
        session: Session,
        settings: Settings,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._say = say
        self._tree = tree
        self._session = session
        self._budget_secs = settings.budget_secs
        self._hang_secs = max(settings.hang_secs, _SHORTEST_SECS) if settings.hang_secs else 0.0
        self._interval_secs = min(_LONGEST_INTERVAL_SECS, self._hang_secs / 10)
        self._heartbeats: dict[int, Heartbeat] = {}
        #: Pids of schedulers that have begun their loop and cannot be followed.
        self._unfollowed: set[int] = set()
        self._hang: Hang | None = None
        self._looked_at = self._not_before = 0.0
        self._compiled_at = float("-inf")
        #: What the heartbeats of those that are not followed any more said last, by pid.
        self._last: dict[int, Beat] = {}
        session.silences = self

    def follow(self, process: TrackedProcess, descriptor: int | None, modes: object = None) -> None:
        """Follow the heartbeat of a scheduler.

        Args:
            process: the scheduler.
            descriptor: its heartbeat, passed on to this process; it stays open.
            modes: names of the forward modes by their number, as they came; may be anything.
        """
        if descriptor is None or not self._hang_secs:
            return
        if process.role != "scheduler":
            # The tree looks for titles every few seconds only, and this one may be newer.
            self._tree.reread_title(process)
            if process.role != "scheduler":
                return
        try:
            reader = BeatReader(os.getpid(), descriptor, modes_of(modes))
        except (OSError, NotABeatError) as error:
            self._unfollowed.add(process.pid)
            logger.warning(
                "%s (pid %d) cannot be followed, so that it hangs is seen only by others that wait for it: %s",
                process.title,
                process.pid,
                error,
            )
            return
        if not self._heartbeats:
            self._looked_at = self._clock()
        if process.pid in self._heartbeats:
            self._heartbeats[process.pid].close()
        self._heartbeats[process.pid] = Heartbeat(process, reader)

    def last_signs(self) -> dict[int, Beat]:
        """Return what the heartbeat of each scheduler says, or said last, by pid; it outlives the process."""
        return self._last | {pid: heartbeat.last() for pid, heartbeat in self._heartbeats.items()}

    def silent(self, secs: float) -> list[Heartbeat]:
        """Return the schedulers that gave no sign in the last `secs` seconds, that first which fell silent first.

        That one is silent does not mean that it hangs; see `begin_at_end`.
        """
        now = self._clock()
        for heartbeat in self._living():
            heartbeat.catch_up(now)
        return sorted(
            (heartbeat for heartbeat in self._living() if heartbeat.silent_secs >= secs and not heartbeat.beat.is_off),
            key=_by_last_sign,
        )

    def add_silence(self, run: IncidentRun, secs: float) -> None:
        """Take into an incident which schedulers are silent; see `silent`."""
        for heartbeat in self.silent(secs):
            run.add_silence(heartbeat.process, heartbeat.beat, heartbeat.silent_secs)

    def begin_at_end(self) -> None:
        """Take what is silent as the server is asked to end for a hang, unless one is at hand.

        Whoever asked it to end may kill it before a hang is noticed otherwise. It may be no more than a long batch, so
        the incident is removed where the schedulers go on, or the server ends in good order.
        """
        silent = self.silent(min(_AT_END_SECS, self._hang_secs / 2)) if self._hang is None else []
        if silent and not self._is_excused(
            {heartbeat.process.pid: _state_of(heartbeat.process) for heartbeat in self._living()}
        ):
            self._begin(silent, "silent_at_sigterm", pardonable=True)

    def next_due(self) -> float:
        """Return when `act_on_time` has something to do, by the monotonic clock."""
        if not self._heartbeats:
            return float("inf")
        look = self._looked_at + self._interval_secs
        return look if self._hang is None else min(look, self._hang.next_snapshot)

    def act_on_time(self) -> None:
        """Do what is due by now."""
        now = self._clock()
        if self._heartbeats and now >= self._looked_at + self._interval_secs:
            # A look that comes late saw nothing of what it missed.
            seen_secs = min(now - self._looked_at, 2 * self._interval_secs)
            self._looked_at = now
            self._look(seen_secs)
        if self._hang is not None and self._clock() >= self._hang.next_snapshot:
            if self._session.gpus.writing_cores:
                # A snapshot may signal the processes.
                self._hang.next_snapshot = self._clock() + self._interval_secs
            elif not self._hang.run.is_open:
                self._hang.end_snapshots()
            elif self._hang.take_snapshot():
                self._session.finish_observed()
                if self._hang.run.finished:
                    self._say(self._hang.in_words())

    def _look(self, seen_secs: float) -> None:
        for pid, heartbeat in list(self._heartbeats.items()):
            if heartbeat.process.exited_at is None:
                heartbeat.look(seen_secs)
            if heartbeat.process.exited_at is not None or heartbeat.beat.is_off:
                # One that lives beats no more, for a reason that it has logged.
                self._unfollowed.add(pid)
                if not heartbeat.beat.is_off:
                    self._last[pid] = heartbeat.last()
                del self._heartbeats[pid]
                heartbeat.close()
        longest = max((heartbeat.silent_secs for heartbeat in self._heartbeats.values()), default=0.0)
        if longest > 2 * self._interval_secs:
            states = {pid: _state_of(heartbeat.process) for pid, heartbeat in self._heartbeats.items()}
            if self._is_excused(states):
                for heartbeat in self._heartbeats.values():
                    heartbeat.hold(seen_secs)
                return
            limit = self._hang_secs * self._patience(states)
            silent = [heartbeat for heartbeat in self._heartbeats.values() if heartbeat.silent_secs >= limit]
            is_compiling = self._hang is None and self._is_compiling(longest, limit)
            if silent and self._hang is None and not is_compiling and self._looked_at >= self._not_before:
                together = [
                    heartbeat for heartbeat in self._heartbeats.values() if heartbeat.silent_secs >= _TOGETHER * longest
                ]
                self._begin(sorted(together, key=_by_last_sign), "no_progress")
            elif silent and self._hang is not None:
                self._hang.spread(silent)
                if self._hang.is_busy and longest >= _COMPILING_FACTOR * self._hang_secs:
                    self._session.withdraw(self._hang.run)
                    self._hang = self._session.hang = None
                    self._begin(sorted(silent, key=_by_last_sign), BUSY_TOO_LONG)
        if self._hang is not None and self._hang.is_over():
            hang = self._hang
            # Otherwise it is over because they are dead.
            if self._heartbeats and (hang.is_busy or self._session.is_pardonable(hang.run)):
                logger.info("the schedulers go on: it was no hang")
                self._session.withdraw(hang.run)
                if hang.is_busy:
                    self._say(f"{hang.ended}: it was no hang, and incident {hang.run.incident.id} is withdrawn.")
            else:
                self._session.page.begin(hang.run, again=True)
            self._hang = self._session.hang = None

    def _is_excused(self, states: Mapping[int, str]) -> bool:
        """Say whether there is a reason for silence that is none of the schedulers'.

        Args:
            states: state letter of each scheduler's main thread.
        """
        root, shutdown = self._tree.root, self._session.triage.shutdown
        expected = shutdown.expected
        if shutdown.gone_at is not None or root.pid in expected or expected & states.keys():
            return True
        if self._is_starting():
            return True
        stopped_as_a_whole = set(states.values()) <= {"T"} and _state_of(root) in "Tt"
        return stopped_as_a_whole or "t" in states.values()

    def _is_starting(self) -> bool:
        """Say whether a scheduler may not be ready yet; where one has begun a batch, all are."""
        if any(heartbeat.beat.batches for heartbeat in self._heartbeats.values()):
            return False
        known = self._heartbeats.keys() | self._unfollowed
        return any(process.role == "scheduler" and process.pid not in known for process in self._tree.alive())

    def _patience(self, states: Mapping[int, str]) -> int:
        """Return by what the time is multiplied after which a silence is a hang."""
        # Whatever one that is stopped has to do, it does not do it.
        beats = [heartbeat.beat for pid, heartbeat in self._heartbeats.items() if states[pid] != "T"]
        if any(beat.is_busy and not beat.in_batch for beat in beats):
            return _BUSY_FACTOR
        working = [beat for beat in beats if beat.in_batch]
        first = _FIRST_FACTOR if any(beat.batches <= _FIRST_BATCHES for beat in working) else 1
        longest = max((beat.tokens for beat in working), default=0)
        return max(first, min(longest // _USUAL_TOKENS, _COMPILING_FACTOR))

    def _is_compiling(self, longest: float, limit: float) -> bool:
        """Say whether a compiler ran lately for a silent scheduler, as long as that may take."""
        if longest < _LOOK_FOR_COMPILERS * limit or longest >= _COMPILING_FACTOR * self._hang_secs:
            return False
        silent = [
            heartbeat.process.pid
            for heartbeat in self._heartbeats.values()
            if heartbeat.silent_secs >= _TOGETHER * longest
        ]
        if any(has_compiler(pid) for pid in silent):
            self._compiled_at = self._looked_at
        return self._looked_at - self._compiled_at < limit

    def _living(self) -> list[Heartbeat]:
        return [heartbeat for heartbeat in self._heartbeats.values() if heartbeat.process.exited_at is None]

    def _begin(self, silent: Sequence[Heartbeat], trigger: str, *, pardonable: bool = False) -> None:
        longest = max(heartbeat.silent_secs for heartbeat in silent)
        process, secs = silent[0].process, self._budget_secs
        run = self._session.open_observed("hang", trigger, process, secs, pardonable=pardonable)
        if run is None:
            # Something worse is under way, or there is no room for it.
            self._not_before = self._looked_at + _RETRY_SECS
            return
        self._hang = Hang(run, longest, self._clock)
        self._hang.spread(silent)
        self._session.hang = run
        # Only now: for it exits are taken in, and one of them is an incident of its own, which refers to this one.
        self._session.capture()
        logger.info("%d scheduler(s) made no progress for %.1f s", len(silent), longest)


def _by_last_sign(heartbeat: Heartbeat) -> tuple[float, int]:
    return (heartbeat.beat.at, heartbeat.process.pid)


def _state_of(process: TrackedProcess) -> str:
    stat = procfs.read_stat(process.pid)
    return stat.state if stat is not None else "X"


SNAPSHOTS, SNAPSHOT_INTERVAL_SECS = 3, 2.0
#: One sign is not yet a server that goes on: the batch that was stuck may end, and the next one not.
_SIGNS_OF_PROGRESS = 2


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
        self._heartbeats: list[Heartbeat] = []
        self._snapshots = 1
        self.ended = ""
        self.next_snapshot = clock() + SNAPSHOT_INTERVAL_SECS

    def spread(self, silent: Iterable[Heartbeat]) -> None:
        """Take in the schedulers that are silent, those that are not in it yet."""
        for heartbeat in silent:
            if heartbeat in self._heartbeats:
                continue
            heartbeat.signs = 0
            self._heartbeats.append(heartbeat)
            self.run.add_silence(heartbeat.process, heartbeat.beat, heartbeat.silent_secs)

    def take_snapshot(self) -> bool:
        """Take the snapshot that is due, and say whether it was the last one."""
        self.run.capture()
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

    def in_words(self) -> str:
        """Return in one line what is known of it and where."""
        run = self.run
        words = run.incident.verdict.text if run.incident.verdict is not None else "no progress."
        return f"{words} Incident: {run.problem or run.path}"

    def is_over(self) -> bool:
        """Say whether all that hung go on or are dead; those that go on are noted in the incident, finished or not.

        Of one whose heartbeat was switched off nothing more is known.
        """
        living = [
            heartbeat
            for heartbeat in self._heartbeats
            if heartbeat.process.exited_at is None and not heartbeat.beat.is_off
        ]
        if any(heartbeat.signs < _SIGNS_OF_PROGRESS for heartbeat in living):
            return False
        if living:
            secs = self._clock() - self._since
            titles = [heartbeat.process.title for heartbeat in living]
            self.run.note(time.time(), "progress_returned", hung_secs=round(secs, 3), titles=titles)
            self.ended = f"Progress returned after {secs:.1f} s"
            self.run.add_afterword(f"{self.ended}.")
        return True


class Heartbeat:
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


#: As the kernel names them, in at most 15 bytes.
_COMPILERS = frozenset(
    {"as", "c++", "cc1", "cc1plus", "cicc", "clang", "clang++", "cmake", "collect2", "cudafe++", "fatbinary", "g++"}
    | {"gcc", "hipcc", "ld", "ld.lld", "lld", "make", "ninja", "nvcc", "nvlink", "ptxas"}
)


def has_compiler(pid: int) -> bool:
    """Say whether a compiler, or a tool that runs some, is among the descendants of a process."""
    for descendant in procfs.TreeScanner(pid).scan() - {pid}:
        stat = procfs.read_stat(descendant)
        if stat is not None and stat.state not in ("Z", "X") and stat.comm in _COMPILERS:
            return True
    return False
