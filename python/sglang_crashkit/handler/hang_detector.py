"""Detect hangs from the heartbeats of the processes that the server needs to answer requests.

Each scheduler beats in each round of its event loop, idle, busy or paused, at least once a second. The event loop of
each tokenizer manager beats once a second; a detokenizer beats with each message. A process that is silent for
``SGLANG_CRASHKIT_HANG_SECS`` hangs, and so do the processes that wait for it. The hang becomes one observed incident of
kind ``hang`` with several snapshots, which records when the server goes on. ``docs/hangs.md`` lists what is not a hang
and what has more time. The hang of a scheduler without a heartbeat shows in the silence of the processes that wait for
it. If the stacks show that the rank which the other ranks wait for is at work, the incident's verdict is *busy*. A busy
incident is withdrawn when the server goes on; after a long time, a hang incident replaces it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from sglang_crashkit.handler.heartbeats import Followed, by_last_sign
from sglang_crashkit.handler.incident_run import IncidentRun, Moment
from sglang_crashkit.handler.processes import ProcessTree
from sglang_crashkit.handler.session import Session
from sglang_crashkit.handler.triage import Seen
from sglang_crashkit.incident.judging import BUSY_TOO_LONG
from sglang_crashkit.kernel import clock, procfs
from sglang_crashkit.memory.heartbeat import BEAT_SECS
from sglang_crashkit.settings import Settings

logger = logging.getLogger(__name__)

_LONGEST_INTERVAL_SECS = 2.0
#: No shorter silence is a hang: a round of an idle server takes up to one second.
_SHORTEST_SECS = 2.0
#: The limit for a silence during a control request is this many times as long: it may move all the weights.
_BUSY_FACTOR = 10
#: The first batches may compile kernels without a compiler process, so their limit is this many times as long: 180 s by
#: default. The stacks of a hang are then on disk before upstream's watchdog ends the server, after 300 s.
_FIRST_BATCHES, _FIRST_FACTOR = 8, 3
#: The largest factor, such as while a compiler runs: nvcc takes minutes for a large kernel of FlashInfer or DeepGEMM.
_COMPILING_FACTOR = 20
#: A batch of up to this many tokens has the usual limit, a larger one more; upstream's chunks are no larger on any GPU.
_USUAL_TOKENS = 16_384
#: Look for compilers from this share of the limit on, not only at the limit: it may fall between two compilers.
_LOOK_FOR_COMPILERS = 0.5
#: While the server ends: the silence of a rank that is a hang, the interval between looks, and the interval between
#: snapshots, in seconds. A server that is asked to end may be killed 10 s later.
_AT_END_SECS, _LOOK_AT_END_SECS, _SNAPSHOT_AT_END_SECS = 3.0, 0.5, 1.0
#: While the server ends, seconds from a verdict *busy* until the next incident of a hang may open.
_BUSY_AT_END_SECS = 5.0
#: Seconds until the next try if no incident could be opened.
_RETRY_SECS = 10.0
#: A process that was silent for this share of the longest silence belongs to the same hang.
_TOGETHER = 0.5
SNAPSHOTS, SNAPSHOT_INTERVAL_SECS = 3, 2.0
#: One sign does not show that the server goes on: the stuck batch may end, and the next batch be stuck.
_SIGNS_OF_PROGRESS = 2


class HangDetector:
    """Detects hangs of one server by its heartbeats, and `clock`, which is theirs; reports them in the server's log."""

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
        self._heartbeats = session.received.heartbeats
        self._budget_secs = settings.budget_secs
        self._hang_secs = max(settings.hang_secs, _SHORTEST_SECS)
        self._hang: Hang | None = None
        self._looked_at = self._not_before = 0.0
        self._compiled_at = float("-inf")
        self._was_at_end = False

    @property
    def _is_at_end(self) -> bool:
        return self._session.triage.shutdown.draining

    @property
    def _limit_secs(self) -> float:
        return min(_AT_END_SECS, self._hang_secs) if self._is_at_end else self._hang_secs

    @property
    def _interval_secs(self) -> float:
        return min(_LOOK_AT_END_SECS if self._is_at_end else _LONGEST_INTERVAL_SECS, self._hang_secs / 10)

    def act_on_time(self) -> float:
        """Run the due steps, and return when the next is due, by the monotonic clock."""
        if self._is_at_end and not self._was_at_end and self._hang is None:
            # The server may be killed soon, so silence before SIGTERM counts at once. It may be only a long batch, so
            # the incident is removed if the schedulers go on, or the server ends in good order, before it is complete.
            self._heartbeats.silent(_AT_END_SECS)
            self._looked_at, self._not_before = self._clock(), 0.0
            self._look(0.0)
        self._was_at_end = self._is_at_end
        now, last_look = self._clock(), self._last_look
        if self._heartbeats.followed and now >= last_look + self._interval_secs:
            self._looked_at = now
            # The handler observed nothing while a look was overdue, so count at most two intervals as silence.
            self._look(min(now - last_look, 2 * self._interval_secs))
        if self._hang is not None and self._clock() >= self._hang.next_snapshot:
            self._go_on(self._hang)
        if not self._heartbeats.followed:
            return float("inf")
        look = self._last_look + self._interval_secs
        return look if self._hang is None else min(look, self._hang.next_snapshot)

    def _go_on(self, hang: Hang) -> None:
        """Take the due snapshot of a hang; after the last one, finish its incident."""
        if self._session.writing_cores:
            # A snapshot may signal a process, which must not happen while a core is written.
            hang.next_snapshot = self._clock() + self._interval_secs
        elif not hang.run.is_open:
            hang.next_snapshot = float("inf")
        elif not hang.take_snapshot():
            pass
        elif hang.is_busy and self._session.is_withdrawable(hang.run):
            logger.info("the schedulers are at work as the server is asked to end: it was no hang")
            self._withdraw(hang)
            self._not_before = self._clock() + _BUSY_AT_END_SECS
        else:
            self._session.finish_observed()
            run = hang.run
            if run.finished:
                words = run.incident.verdict.text if run.incident.verdict is not None else "no progress."
                last = f"{words} Incident: {run.folder.problem or run.folder.path}"
                for line in (*(run.conclusion.lines if run.conclusion is not None else ()), last):
                    self._say(line)

    @property
    def _last_look(self) -> float:
        return max(self._looked_at, self._heartbeats.began_at)

    def _look(self, seen_secs: float) -> None:
        self._heartbeats.look(seen_secs)
        heartbeats, others = self._heartbeats.living(), list(self._heartbeats.others.values())
        everybody = [*heartbeats, *others]
        longest = max((one.silent_secs for one in everybody), default=0.0)
        if longest > 2 * self._interval_secs:
            states = {heartbeat.process.pid: heartbeat.process.state for heartbeat in heartbeats}
            if self._is_excused(states):
                for one in everybody:
                    one.hold(seen_secs)
                return
            limit = self._limit_secs * self._patience(states)
            late = [one for one in heartbeats if one.silent_secs >= limit]
            # If no scheduler exceeds its own limit, a hang of other processes includes no schedulers.
            patient = () if late else heartbeats
            # While the server ends, the main process may wait for its schedulers.
            others = [one for one in others if not (self._is_at_end and one.process.is_root)]
            late += [one for one in others if one.silent_secs >= self._limit_secs]
            silent = by_last_sign(late)
            # The other processes beat only once a second; between two beats, a standing heartbeat is no sign of a hang.
            stuck = (one for one in everybody if one.is_rank or one.silent_secs > 2 * BEAT_SECS)
            together = by_last_sign(one for one in stuck if one.silent_secs >= _TOGETHER * longest)
            if self._hang is None:
                is_compiling = self._is_compiling(together, longest, limit)
                if silent and not is_compiling and self._looked_at >= self._not_before:
                    # `together` can hold only ranks with a longer limit; then report the late processes instead.
                    trigger = "silent_at_sigterm" if self._is_at_end else "no_progress"
                    self._begin([one for one in together if one not in patient] or silent, trigger)
            elif silent:
                self._hang.spread(silent)
                if self._hang.is_busy and longest >= _COMPILING_FACTOR * self._hang_secs:
                    self._withdraw(self._hang)
                    self._begin(silent, BUSY_TOO_LONG)
        if self._hang is not None and self._hang.is_over():
            self._end(self._hang)

    def _end(self, hang: Hang) -> None:
        # Without a scheduler to follow, the hang is over because they died.
        goes_on = bool(self._heartbeats.followed)
        if goes_on and hang.run.is_open:
            hang.judge_silence()
        if goes_on and (hang.is_busy or self._session.is_withdrawable(hang.run)):
            logger.info("the schedulers go on: it was no hang")
            self._withdraw(hang)
            if hang.is_busy:
                self._say(f"{hang.ended}: it was no hang, and incident {hang.run.incident.id} is withdrawn.")
        else:
            hang.run.refresh()
            self._hang = self._session.hang = None

    def _withdraw(self, hang: Hang) -> None:
        self._session.withdraw(hang.run)
        self._hang = self._session.hang = None

    def _is_excused(self, states: dict[int, str]) -> bool:
        """Return whether silence has a cause outside the schedulers; `states` are their process states by pid."""
        root, shutdown = self._tree.root, self._session.triage.shutdown
        if shutdown.gone_at is not None or shutdown.expected & {root.pid, *states} or self._is_starting():
            return True
        stopped_as_a_whole = set(states.values()) <= {"T"} and root.state in "Tt"
        return stopped_as_a_whole or "t" in states.values()

    def _is_starting(self) -> bool:
        """Return whether a scheduler may not be ready yet; once any has begun a batch, all are ready."""
        heartbeats = self._heartbeats
        if any(heartbeat.sign.batches for heartbeat in heartbeats.followed.values()):
            return False
        known = heartbeats.followed.keys() | heartbeats.unfollowed
        return any(process.role == "scheduler" and process.pid not in known for process in self._tree.alive())

    def _patience(self, states: dict[int, str]) -> int:
        """Return the factor for the limit after which a silence is a hang."""
        # A stopped process does not work, so its work is no reason for a longer limit.
        running = (pid for pid, state in states.items() if state != "T")
        signs = [self._heartbeats.followed[pid].sign for pid in running]
        if any(sign.is_busy and not sign.in_batch for sign in signs):
            return _BUSY_FACTOR
        working = [sign for sign in signs if sign.in_batch]
        # While the server ends there is no time for this factor; the stacks show whether a rank compiles.
        is_first = not self._is_at_end and any(sign.batches <= _FIRST_BATCHES for sign in working)
        first = _FIRST_FACTOR if is_first else 1
        longest = max((sign.tokens for sign in working), default=0)
        return max(first, min(longest // _USUAL_TOKENS, _COMPILING_FACTOR))

    def _is_compiling(self, silent: list[Followed], longest: float, limit: float) -> bool:
        """Return whether a compiler recently ran for a silent scheduler; False once that takes too long."""
        if longest < _LOOK_FOR_COMPILERS * limit or longest >= _COMPILING_FACTOR * self._hang_secs:
            return False
        # Only schedulers: the compilers of all schedulers are descendants of the main process.
        if any(has_compiler(one.process.pid) for one in silent if one.is_rank):
            self._compiled_at = self._looked_at
        return self._looked_at - self._compiled_at < limit

    def _begin(self, silent: Sequence[Followed], trigger: str) -> None:
        longest = max(heartbeat.silent_secs for heartbeat in silent)
        process, secs, at_end = silent[0].process, self._budget_secs, self._is_at_end
        its = Seen("observed", process.pid, process.role, kind="hang", trigger=trigger, secs=secs, withdrawable=at_end)
        run = self._session.open_observed(its, process)
        if run is None:
            # A worse incident is in progress, or this one could not be opened.
            self._not_before = self._looked_at + _RETRY_SECS
            return
        interval_secs = _SNAPSHOT_AT_END_SECS if at_end else SNAPSHOT_INTERVAL_SECS
        self._hang = Hang(run, longest, self._clock, interval_secs)
        self._hang.spread(silent)
        self._session.hang = run
        # Only after `session.hang` is set: the capture handles exits, and an incident of an exit refers to this hang.
        self._session.capture()
        self._hang.take_silence()
        logger.info("%d process(es) made no progress for %.1f s", len(silent), longest)


class Hang:
    """An incident of processes that make no progress; its first snapshot is taken at once."""

    def __init__(self, run: IncidentRun, silent_secs: float, clock: Callable[[], float], interval_secs: float) -> None:
        self.run = run
        self._clock = clock
        self._interval_secs = interval_secs
        self._since = clock() - silent_secs
        self._heartbeats: list[Followed] = []
        self._snapshots = 1
        self._silent_in: dict[int, int] = {}  # the last snapshot in which each was silent, by pid
        self.ended = ""  # the sentence that progress returned, and after how long; empty before
        self.next_snapshot = clock() + interval_secs  # when the next snapshot is due, by the clock

    def spread(self, silent: Iterable[Followed]) -> None:
        """Add the silent processes that the hang does not include yet."""
        for heartbeat in silent:
            if heartbeat not in self._heartbeats:
                heartbeat.signs = 0
                self._heartbeats.append(heartbeat)
                sign = heartbeat.sign if heartbeat.is_rank else None
                self.run.add_silence(heartbeat.process, sign, heartbeat.silent_secs, heartbeat.how)

    def take_silence(self) -> None:
        """Record which processes stayed silent during a snapshot: only for these it shows where they hang."""
        silent = [one for one in self._living if not one.signs and not (one.is_rank and one.last() != one.sign)]
        self._silent_in |= dict.fromkeys((one.process.pid for one in silent), self._snapshots)

    def judge_silence(self) -> None:
        """Drop the snapshots taken after the processes went on, and judge the rest."""
        for one in self._heartbeats:
            self.run.drop_snapshots(one.process, self._silent_in.get(one.process.pid, 0))
        self.run.ask()

    def take_snapshot(self) -> bool:
        """Take the due snapshot; return whether all snapshots were taken and judged."""
        are_silent = True
        if self._snapshots < SNAPSHOTS:
            self.run.take(Moment.CAPTURE)
            self._snapshots += 1
            self.take_silence()
            # If a process went on during the last snapshot, wait an interval: the hang may be over by then.
            are_silent = all(self._silent_in.get(one.process.pid) == self._snapshots for one in self._living)
        is_whole = are_silent and self._snapshots >= SNAPSHOTS
        if is_whole:
            self.run.ask()
        self.next_snapshot = float("inf") if is_whole else self._clock() + self._interval_secs
        return is_whole

    @property
    def _living(self) -> list[Followed]:
        """The heartbeats that can still show progress: the process lives, and its heartbeat was not switched off."""
        return [one for one in self._heartbeats if one.process.exited_at is None and not one.sign.is_off]

    @property
    def is_busy(self) -> bool:
        """Whether the stacks show that the schedulers are at work."""
        verdict = self.run.incident.verdict
        return verdict is not None and verdict.kind == "busy"

    def is_over(self) -> bool:
        """Return whether all processes of the hang go on or died; note which go on, even in a finished incident."""
        living = self._living
        if any(heartbeat.signs < _SIGNS_OF_PROGRESS for heartbeat in living):
            return False
        if living:
            secs = self._clock() - self._since
            titles = [heartbeat.process.title for heartbeat in living]
            self.run.incident.note(clock.now(), "progress_returned", hung_secs=round(secs, 3), titles=titles)
            self.ended = f"Progress returned after {secs:.1f} s"
            self.run.add_remark(f"{self.ended}.")
        return True


#: Names of compilers and build tools as the kernel has them, in at most 15 bytes.
_COMPILERS = frozenset(
    {"as", "c++", "cc1", "cc1plus", "cicc", "clang", "clang++", "cmake", "collect2", "cudafe++", "fatbinary", "g++"}
    | {"gcc", "hipcc", "ld", "ld.lld", "lld", "make", "ninja", "nvcc", "nvlink", "ptxas"}
)


def has_compiler(pid: int) -> bool:
    """Return whether a descendant of a process is a compiler or a tool that runs compilers."""
    for descendant in procfs.TreeScanner(pid).scan() - {pid}:
        stat = procfs.read_stat(descendant)
        if stat is not None and stat.state not in ("Z", "X") and stat.comm in _COMPILERS:
            return True
    return False
