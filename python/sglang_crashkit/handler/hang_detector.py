"""Notice a hang by itself: the processes without which no request is answered beat.

Every scheduler beats in each round of its event loop, idle, busy or paused, at least once a second; the event loop of
each tokenizer manager once a second; a detokenizer with each message. One that is silent for
``SGLANG_CRASHKIT_HANG_SECS`` hangs, and so do those that wait for it. That becomes one observed incident of kind
``hang`` with several snapshots, which says when the server goes on. ``docs/hangs.md`` has what is no hang, and what has
more time. A scheduler that cannot be followed is seen by the silence of those that wait for it.

Where the stacks then say that the rank which the others wait for is at work, the incident says *busy*. It is withdrawn
when the server goes on, and taken for a hang after a long time.
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
#: Rounds of an idle server take up to one second; no silence that is shorter than this is a hang.
_SHORTEST_SECS = 2.0
#: Control requests move all the weights: so many times as long they may take.
_BUSY_FACTOR = 10
#: The first batches compile kernels, also without a process that is a compiler. With the default that is a hang after
#: 180 s, whose stacks are on disk before upstream's watchdog ends the server, after 300 s.
_FIRST_BATCHES, _FIRST_FACTOR = 8, 3
#: FlashInfer's and DeepGEMM's larger kernels take nvcc minutes each.
_COMPILING_FACTOR = 20
#: So many tokens at once have the usual time; upstream's chunks have no more on any GPU. More have more.
_USUAL_TOKENS = 16_384
#: Share of the time from which on compilers are looked for; between two of them there may be none for a moment.
_LOOK_FOR_COMPILERS = 0.5
#: A server that is asked to end may be killed 10 s later: from then on a rank that gives no sign for so many seconds is
#: a hang, which is looked for so often, and whose snapshots follow each other so fast, in seconds.
_AT_END_SECS, _LOOK_AT_END_SECS, _SNAPSHOT_AT_END_SECS = 3.0, 0.5, 1.0
#: What proved to be busy, as the server is asked to end, is looked at again after this time, in seconds.
_BUSY_AT_END_SECS = 5.0
#: Where no incident could be begun, it is tried again after this time, in seconds.
_RETRY_SECS = 10.0
#: One that is silent for this share of the time that another was, hangs with it.
_TOGETHER = 0.5
SNAPSHOTS, SNAPSHOT_INTERVAL_SECS = 3, 2.0
#: One sign is not yet a server that goes on: the batch that was stuck may end, and the next one not.
_SIGNS_OF_PROGRESS = 2


class HangDetector:
    """Decides by the heartbeats of one server, and by their clock, whether it hangs; says so in the server's log."""

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
        """Do what is due by now, and return when something is due next, by the monotonic clock."""
        if self._is_at_end and not self._was_at_end and self._hang is None:
            # It may be killed soon: what was silent before counts at once. It may be no more than a long batch, so the
            # incident is removed where the schedulers go on, or the server ends in good order, before it is whole.
            self._heartbeats.silent(_AT_END_SECS)
            self._looked_at, self._not_before = self._clock(), 0.0
            self._look(0.0)
        self._was_at_end = self._is_at_end
        now, last_look = self._clock(), self._last_look
        if self._heartbeats.followed and now >= last_look + self._interval_secs:
            self._looked_at = now
            # A look that comes late saw nothing of what it missed.
            self._look(min(now - last_look, 2 * self._interval_secs))
        if self._hang is not None and self._clock() >= self._hang.next_snapshot:
            self._go_on(self._hang)
        if not self._heartbeats.followed:
            return float("inf")
        look = self._last_look + self._interval_secs
        return look if self._hang is None else min(look, self._hang.next_snapshot)

    def _go_on(self, hang: Hang) -> None:
        """Take the snapshot of a hang that is due; after the last one, finish its incident."""
        if self._session.writing_cores:
            # A snapshot may signal the processes.
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
            # Where no scheduler is late itself, none is counted into a hang of the processes beside them.
            patient = () if late else heartbeats
            # The main process may wait for its schedulers as it ends.
            others = [one for one in others if not (self._is_at_end and one.process.is_root)]
            late += [one for one in others if one.silent_secs >= self._limit_secs]
            silent = by_last_sign(late)
            # The loop of one beside the schedulers goes on between two of its beats.
            stuck = (one for one in everybody if one.is_rank or one.silent_secs > 2 * BEAT_SECS)
            together = by_last_sign(one for one in stuck if one.silent_secs >= _TOGETHER * longest)
            if self._hang is None:
                is_compiling = self._is_compiling(together, longest, limit)
                if silent and not is_compiling and self._looked_at >= self._not_before:
                    # A rank with a longer limit can be the only one that was silent for half as long as the longest.
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
        # Otherwise it is over because they are dead.
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
        """Say whether there is a reason for silence that is not the schedulers', with these states, by pid."""
        root, shutdown = self._tree.root, self._session.triage.shutdown
        if shutdown.gone_at is not None or shutdown.expected & {root.pid, *states} or self._is_starting():
            return True
        stopped_as_a_whole = set(states.values()) <= {"T"} and root.state in "Tt"
        return stopped_as_a_whole or "t" in states.values()

    def _is_starting(self) -> bool:
        """Say whether a scheduler may not be ready yet; where one has begun a batch, all are."""
        heartbeats = self._heartbeats
        if any(heartbeat.sign.batches for heartbeat in heartbeats.followed.values()):
            return False
        known = heartbeats.followed.keys() | heartbeats.unfollowed
        return any(process.role == "scheduler" and process.pid not in known for process in self._tree.alive())

    def _patience(self, states: dict[int, str]) -> int:
        """Return by what the time is multiplied after which a silence is a hang."""
        # Whatever one that is stopped has to do, it does not do it.
        running = (pid for pid, state in states.items() if state != "T")
        signs = [self._heartbeats.followed[pid].sign for pid in running]
        if any(sign.is_busy and not sign.in_batch for sign in signs):
            return _BUSY_FACTOR
        working = [sign for sign in signs if sign.in_batch]
        # As the server is asked to end there is no time for that: the stacks say whether one compiles.
        is_first = not self._is_at_end and any(sign.batches <= _FIRST_BATCHES for sign in working)
        first = _FIRST_FACTOR if is_first else 1
        longest = max((sign.tokens for sign in working), default=0)
        return max(first, min(longest // _USUAL_TOKENS, _COMPILING_FACTOR))

    def _is_compiling(self, silent: list[Followed], longest: float, limit: float) -> bool:
        """Say whether a compiler ran lately for a silent scheduler, as long as that may take."""
        if longest < _LOOK_FOR_COMPILERS * limit or longest >= _COMPILING_FACTOR * self._hang_secs:
            return False
        # The schedulers' own are among the descendants of the main process.
        if any(has_compiler(one.process.pid) for one in silent if one.is_rank):
            self._compiled_at = self._looked_at
        return self._looked_at - self._compiled_at < limit

    def _begin(self, silent: Sequence[Followed], trigger: str) -> None:
        longest = max(heartbeat.silent_secs for heartbeat in silent)
        process, secs, at_end = silent[0].process, self._budget_secs, self._is_at_end
        its = Seen("observed", process.pid, process.role, kind="hang", trigger=trigger, secs=secs, withdrawable=at_end)
        run = self._session.open_observed(its, process)
        if run is None:
            # Something worse is under way, or there is no room for it.
            self._not_before = self._looked_at + _RETRY_SECS
            return
        interval_secs = _SNAPSHOT_AT_END_SECS if at_end else SNAPSHOT_INTERVAL_SECS
        self._hang = Hang(run, longest, self._clock, interval_secs)
        self._hang.spread(silent)
        self._session.hang = run
        # Only now: for it exits are taken in, and one of them is an incident of its own, which refers to this one.
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
        self.ended = ""  # that the server goes on and since when, in words; empty before
        self.next_snapshot = clock() + interval_secs  # when it is due, by the clock

    def spread(self, silent: Iterable[Followed]) -> None:
        """Take in the processes that are silent, those that are not in it yet."""
        for heartbeat in silent:
            if heartbeat not in self._heartbeats:
                heartbeat.signs = 0
                self._heartbeats.append(heartbeat)
                sign = heartbeat.sign if heartbeat.is_rank else None
                self.run.add_silence(heartbeat.process, sign, heartbeat.silent_secs, heartbeat.how)

    def take_silence(self) -> None:
        """Take in who did not go on while a snapshot was taken: only of these it shows what they hang in."""
        silent = [one for one in self._living if not one.signs and not (one.is_rank and one.last() != one.sign)]
        self._silent_in |= dict.fromkeys((one.process.pid for one in silent), self._snapshots)

    def judge_silence(self) -> None:
        """Judge what those that go on by now did as long as they were silent."""
        for one in self._heartbeats:
            self.run.drop_snapshots(one.process, self._silent_in.get(one.process.pid, 0))
        self.run.ask()

    def take_snapshot(self) -> bool:
        """Take the snapshot that is due, and say whether all are there, and judged."""
        are_silent = True
        if self._snapshots < SNAPSHOTS:
            self.run.take(Moment.CAPTURE)
            self._snapshots += 1
            self.take_silence()
            # Of one that went on meanwhile it is known soon whether that was all.
            are_silent = all(self._silent_in.get(one.process.pid) == self._snapshots for one in self._living)
        is_whole = are_silent and self._snapshots >= SNAPSHOTS
        if is_whole:
            self.run.ask()
        self.next_snapshot = float("inf") if is_whole else self._clock() + self._interval_secs
        return is_whole

    @property
    def _living(self) -> list[Followed]:
        """Those of which something is known yet: they live, and their heartbeat was not switched off."""
        return [one for one in self._heartbeats if one.process.exited_at is None and not one.sign.is_off]

    @property
    def is_busy(self) -> bool:
        """Whether the stacks say that the schedulers are at work."""
        verdict = self.run.incident.verdict
        return verdict is not None and verdict.kind == "busy"

    def is_over(self) -> bool:
        """Say whether all that hung go on or are dead; those that go on are noted in the incident, finished or not."""
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
