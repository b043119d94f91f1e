"""Follow a server from outside, and tell when it crashes, hangs and goes on: observations in, events out.

A server hangs that answers neither its health check nor, as a paused one does, anything else, and of which a rank
stands where it is; see `analysis.explain.judge_silence`. Where all ranks go on it may be a
long batch, and more patience is had.

What counts is time that was seen to pass: of a suspended machine, or of a watcher that was stopped or got no CPU,
nothing was seen, and the watch starts over. A server that was not ready yet loads its model or compiles, which is no
hang, whatever its health check says.

It crashed where one of its processes ended that was not asked to, while the others were to live. Who was first is told
once, and what follows from it, that the others stand still or the main process ends, is no hang.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from sglang_crashkit.analysis.explain import MIN_SAMPLES, Outcome, Silence, judge_silence, ranks_of
from sglang_crashkit.analysis.member import Member
from sglang_crashkit.incident.exit_status import is_orderly
from sglang_crashkit.model.incident import Level
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import NodeSnapshot
from sglang_crashkit.watch.health import Health
from sglang_crashkit.watch.server import Death

Kind = Literal["serving", "crash", "hang", "progress", "excused", "started_over", "gone"]
Phase = Literal["starting", "serving", "suspect", "hung", "crashed"]

#: Two observations further apart than this, in seconds, are not of one watch; between them so much is counted at most,
#: and no more than this share of the time to a hang.
_TOO_LATE_SECS, _MAX_SECS, _MAX_SHARE = 15.0, 5.0, 0.25
#: Where all ranks go on it may be a long batch, and where none is left the server may end: so many times as long each
#: may take. With the default it is reported after 240 s; upstream's watchdog ends the server after 300 s of a batch.
_PATIENCE = 4
#: The schedulers are given so much time to answer something else, in seconds.
_ANSWER_SECS = 5.0
#: Share of the time after which samples are taken, and of the time between two; so many are compared.
_SAMPLE_AFTER, _SAMPLE_AGAIN, _MAX_SAMPLES = 0.5, 0.1, 8
#: Whoever asks a server's processes to end has ended more than one of them by this time, in seconds.
_ORDERLY_SECS = 5.0
#: The health check of the moment before a crash has failed by then, in seconds, unless the server serves on.
_SERVES_ON_SECS = 15.0


@dataclass(frozen=True)
class Observation:
    """What was seen of a server at one moment."""

    at: float  # when, in seconds of the monotonic clock
    health: Health  # its health check
    #: Of its processes on this host, with stacks where these were wanted; empty where none is known.
    samples: tuple[Sample, ...] = ()
    server_state: str = ""  # state letter of its main process, empty where it is not known
    #: Whether its schedulers answered something else than a health check since `Watching.wants_answer`; None where that
    #: is not known.
    answers: bool | None = None
    asking: bool = False  # the schedulers were asked and have not answered yet
    gone: bool = False  # its main process has ended
    deaths: tuple[Death, ...] = ()  # which of its processes have ended, the main one included, the first one first

    @property
    def is_unreachable(self) -> bool:
        """Whether its port refuses connections, and no process of it is known here."""
        return self.health == "refused" and not self.samples and not self.server_state


@dataclass(frozen=True)
class Event:
    """What there is to tell."""

    kind: Kind
    text: str
    #: Of a hang, for how long there was no answer; of progress, for how long the hang lasted; in seconds.
    secs: float = 0.0
    level: Level = "supported"  # of a hang or a crash, how well it is supported
    ranks: tuple[Member, ...] = ()  # of a hang, what was seen of each rank
    first: Death | None = None  # of a crash, who ended first, where that was seen


class Watching:
    """The watch over one server.

    It hangs after `hang_secs` without an answer. To get ready it may take `start_secs`, 0 for any time.
    """

    def __init__(self, hang_secs: float, start_secs: float = 0.0) -> None:
        self._hang_secs, self._start_secs = hang_secs, start_secs
        self._max_secs = min(_MAX_SECS, _MAX_SHARE * hang_secs)
        self._at: float | None = None
        # It may take health checks in without having answered one.
        self._has_served = self._has_answered = self._is_late = self._is_ending = False
        self._starting_secs = 0.0
        self.silent_secs = 0.0  # for how long its health check was not answered, as far as was seen
        self._rounds: deque[NodeSnapshot] = deque(maxlen=_MAX_SAMPLES)
        self._sampled_at: float | None = None
        self._hung_at: float | None = None
        self._refused_secs = self._asking_secs = 0.0
        self._was_asking = self._has_health = False
        self._excuse = ""
        self._crashed_at: float | None = None
        self._told_dead: set[int] = set()

    @property
    def phase(self) -> Phase:
        """How the server is."""
        if self._crashed_at is not None:
            return "crashed"
        if self._hung_at is not None:
            return "hung"
        if not self._has_served:
            return "starting"
        return "suspect" if self.silent_secs >= _SAMPLE_AFTER * self._hang_secs else "serving"

    @property
    def wants_answer(self) -> bool:
        """Whether it helps to know if its schedulers answer something else than a health check."""
        return self.phase == "suspect"

    def wants_stacks(self, at: float) -> bool:
        """Say whether the next observation is to have stacks."""
        # Without a health check nothing but the ranks tells that a hang is over.
        if self.phase != "suspect" and (self.phase != "hung" or self._has_health):
            return False
        return self._sampled_at is None or at >= self._sampled_at + max(0.5, _SAMPLE_AGAIN * self._hang_secs)

    def skip(self, at: float) -> None:
        """Do not count the time until `at`, in which the watcher did something else."""
        self._at = at

    def observe(self, seen: Observation) -> list[Event]:
        """Take in an observation, later than the one before, and return what there is to tell."""
        crash = self._crash_of(seen)
        if seen.gone:
            return [*crash, Event("gone", "the server has ended")]
        if crash:
            self._at = seen.at
            return crash
        secs = seen.at - self._at if self._at is not None else 0.0
        self._at = seen.at
        if secs > _TOO_LATE_SECS:
            self._forget()
            return [Event("started_over", f"nothing was seen for {secs:.0f} s, so the watch starts over", secs)]
        if self._crashed_at is not None and (seen.health != "ok" or seen.at < self._crashed_at + _SERVES_ON_SECS):
            # What a crash leads to was told with it, but for the end of a server of another host.
            return [Event("gone", "its port refuses connections")] if seen.is_unreachable else []
        self._has_health = seen.health != "none"
        if self.wants_stacks(seen.at):
            self._sampled_at = seen.at
            left = tuple(one for one in seen.samples if one.pid not in self._told_dead)
            self._rounds.append(NodeSnapshot("", seen.at, left))
        if seen.health == "ok":
            return self._on_answer(seen)
        counted = min(secs, self._max_secs)
        if self._hung_at is not None:
            return self._while_hung(seen, counted)
        if not self._has_served:
            return self._on_start(seen, counted)
        if seen.health == "starting":
            # It ends: upstream refuses at once from then on, and answers nothing while it waits for its ranks' exit.
            self._is_ending = True
            self._forget()
            return []
        self.silent_secs += counted
        self._asking_secs = self._asking_secs + counted if seen.asking and self._was_asking else 0.0
        self._was_asking = seen.asking
        if self.silent_secs < self._hang_secs:
            return []
        if seen.is_unreachable:
            return [Event("gone", f"its port has refused connections for {self.silent_secs:.1f} s", self.silent_secs)]
        return self._on_silence(seen)

    def _crash_of(self, seen: Observation) -> list[Event]:
        """Return who ended first, where that was no end that somebody asked for; once for all that follow from it."""
        new = [death for death in seen.deaths if death.pid not in self._told_dead]
        if self._is_ending or self._crashed_at is not None or not new:
            return []
        first = new[0]
        if is_orderly(first.end):
            # Those that were asked to end do so one after the other.
            if not first.alone or len(new) > 1 or seen.gone or seen.at < first.at + _ORDERLY_SECS:
                return []
        elif not first.alone and (not first.end.known or first.end.signal == "SIGKILL"):
            # By SIGKILL upstream ends all of its processes in good order, too.
            return []
        self._crashed_at, self._hung_at = seen.at, None
        self._told_dead |= {death.pid for death in seen.deaths}
        others = "; the others went on" if len(new) == 1 else f"; {len(new) - 1} more ended after it"
        level: Level = "established" if first.alone else "supported"
        return [Event("crash", f"{first}{others if first.alone else ''}", level=level, first=first)]

    def _on_answer(self, seen: Observation) -> list[Event]:
        events = []
        if self._hung_at is not None:
            events = [self._progress(seen)]
        elif not self._has_answered:
            events = [Event("serving", "the server answers")]
        elif self._crashed_at is not None:
            events = [Event("serving", "the server serves on")]
        elif self._excuse:
            events = [Event("serving", "the server answers health checks again")]
        self._has_served = self._has_answered = True
        self._is_ending = False
        self._excuse, self._crashed_at = "", None
        self._forget()
        return events

    def _while_hung(self, seen: Observation, counted: float) -> list[Event]:
        if seen.health == "none":
            if len(self._rounds) < MIN_SAMPLES or self._judge(seen).outcome == "hang":
                return []
            event = self._progress(seen)
            self._forget()
            return [event]
        self._refused_secs = self._refused_secs + counted if seen.is_unreachable else 0.0
        if self._refused_secs < self._hang_secs:
            return []
        return [Event("gone", f"its port has refused connections for {self._refused_secs:.1f} s", self._refused_secs)]

    def _on_start(self, seen: Observation, counted: float) -> list[Event]:
        if seen.health in ("failed", "silent", "none"):
            # It takes health checks in, so it was ready before it was watched.
            self._has_served = True
            return []
        self._starting_secs += counted
        if not self._start_secs or self._starting_secs < self._start_secs or self._is_late:
            return []
        self._is_late = True
        text = f"the server is not ready after {self._starting_secs:.0f} s"
        return [self._hang(seen, text, self._starting_secs, "unknown")]

    def _on_silence(self, seen: Observation) -> list[Event]:
        has_patience = self.silent_secs < _PATIENCE * self._hang_secs
        by_health = seen.health != "none"
        if self._is_ending and has_patience:
            return self._excused("patience", "it refused them at once before, as one does that is to end")
        may_answer = seen.asking and self._asking_secs < _ANSWER_SECS
        judged = self._judge(seen)
        outcome, reason, level = judged.outcome, judged.reason, judged.level
        if may_answer and level != "established":
            return []
        if outcome == "patience":
            if has_patience:
                return self._excused("patience", reason) if reason else []
            outcome, level = "hang", "unknown"
        if outcome == "excused":
            self._forget()
            return self._excused("excused", reason) if by_health else []
        if outcome == "crash":
            if self.silent_secs < 2 * self._hang_secs:
                # It may have been the first of all, and the server about to end.
                return []
            self._crashed_at = seen.at
            self._told_dead |= {one.source.pid for one in judged.ranks if one.manner() == "gone"}
            return [Event("crash", reason, level="supported", ranks=judged.ranks)]
        what = "no health check was answered" if by_health else "a rank stood still"
        # That it hangs is an inference, whatever is established of a rank.
        level = "supported" if level == "established" else level
        return [self._hang(seen, f"{what} for {self.silent_secs:.1f} s: {reason}", self.silent_secs, level)]

    def _judge(self, seen: Observation) -> Silence:
        by_health = seen.health != "none"
        return judge_silence(self._rounds, seen.server_state, answers=seen.answers, by_health=by_health)

    def _excused(self, outcome: Outcome, reason: str) -> list[Event]:
        """Tell once why it is no hang."""
        if self._excuse == outcome:
            return []
        self._excuse = outcome
        end = "" if outcome == "excused" else f"; it is given {_PATIENCE} times the time"
        return [Event("excused", f"no health check is answered, but {reason}{end}", self.silent_secs)]

    def _hang(self, seen: Observation, text: str, secs: float, level: Level) -> Event:
        ranks = ranks_of(self._rounds or [NodeSnapshot("", seen.at, seen.samples)])
        self._hung_at = seen.at - secs
        self._rounds.clear()
        return Event("hang", text, secs, level, ranks)

    def _progress(self, seen: Observation) -> Event:
        assert self._hung_at is not None
        secs, self._hung_at = seen.at - self._hung_at, None
        return Event("progress", f"progress returned after {secs:.1f} s", secs)

    def _forget(self) -> None:
        self.silent_secs = self._asking_secs = 0.0
        self._rounds.clear()
        self._sampled_at = None
