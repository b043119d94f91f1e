"""Follow a server from outside, and tell when it crashes, hangs and goes on: observations in, events out.

What counts is time that was seen to pass, look by look: of a suspended machine, or of a watcher that was stopped or got
no CPU, nothing was seen, and the watch starts over. A server that was not ready yet loads its model or compiles, which
is no hang, whatever its health check says.

It crashed where one of its processes ended that was not asked to, while the others were to live. Who was first is told
once, and what follows from it, that the others stand still or the main process ends, is no hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_crashkit.incident.exit_status import is_orderly
from sglang_crashkit.model.incident import Level
from sglang_crashkit.watch.deaths import Death
from sglang_crashkit.watch.standstill import Judgement, RankLook, Standing, judge, standing_of

#: The last answer of the health check: ``starting`` is a 503 at once, as of a server that starts or ends; ``failed`` a
#: 503 after it tried; ``silent`` none in time; ``waiting`` none yet; ``none`` where there is nothing to ask.
Health = Literal["ok", "starting", "failed", "silent", "refused", "waiting", "none"]
Kind = Literal["serving", "crash", "hang", "progress", "excused", "started_over", "gone"]
Phase = Literal["starting", "serving", "suspect", "hung", "crashed"]

#: Two observations further apart than this, in seconds, are not of one watch; between them so much is counted at most,
#: and no more than this share of the time to a hang.
_TOO_LATE_SECS, _MOST_SECS, _MOST_SHARE = 15.0, 5.0, 0.25
#: Where all ranks go on it may be a long batch, and where none is left the server may end: so many times as long each
#: may take. With the default it is told of after 240 s; upstream's watchdog ends the server after 300 s of a batch.
_PATIENCE = 4
#: The schedulers are given so much time to answer something else, in seconds.
_ANSWER_SECS = 5.0
#: Share of the time after which the stacks are looked at, and of the time between two such looks.
_LOOK_AFTER, _LOOK_AGAIN = 0.5, 0.1
#: The rank that stood still went on if its main thread has waited for something else so many times since.
_SIGNS_OF_PROGRESS = 5
#: Whoever asks all processes of a server to end at once has ended them all by this time, in seconds.
_ORDERLY_SECS = 5.0
#: The health check of the moment before a crash has failed by then, in seconds, unless the server serves on.
_SERVES_ON_SECS = 15.0


@dataclass(frozen=True)
class Observation:
    """What was seen of a server at one moment.

    Attributes:
        at: when, in seconds of the monotonic clock.
        health: its health check.
        ranks: its ranks on this host, empty where nothing is known of them.
        server_state: state letter of its main process, empty where it is not known.
        answers: whether its schedulers answered something else than a health check since `Watching.wants_answer`; None
            where that is not known.
        asking: the schedulers were asked and have not answered yet.
        gone: its main process has ended.
        deaths: which of its processes have ended, the main one included, the first one first.
    """

    at: float
    health: Health
    ranks: tuple[RankLook, ...] = ()
    server_state: str = ""
    answers: bool | None = None
    asking: bool = False
    gone: bool = False
    deaths: tuple[Death, ...] = ()


@dataclass(frozen=True)
class Event:
    """What there is to tell.

    Attributes:
        kind: in one word.
        text: in one sentence.
        secs: of a hang, for how long there was no answer; of progress, for how long the hang lasted; in seconds.
        level: of a hang or a crash, how well it is supported.
        ranks: of a hang, how each rank fared.
        first: of a crash, who ended first, where that was seen.
    """

    kind: Kind
    text: str
    secs: float = 0.0
    level: Level = "supported"
    ranks: tuple[Standing, ...] = ()
    first: Death | None = None


class Watching:
    """The watch over one server.

    Args:
        hang_secs: how long a server may go without an answer, in seconds.
        start_secs: how long it may take to get ready, in seconds; 0 for any time.

    Attributes:
        silent_secs: for how long its health check was not answered, as far as was seen, in seconds.
    """

    def __init__(self, hang_secs: float, start_secs: float = 0.0) -> None:
        self._hang_secs, self._start_secs = hang_secs, start_secs
        self._most_secs = min(_MOST_SECS, _MOST_SHARE * hang_secs)
        self._at: float | None = None
        # It may take health checks in without having answered one.
        self._has_served = self._has_answered = self._is_late = self._is_ending = False
        self._starting_secs = self.silent_secs = 0.0
        self._looks: dict[int, list[RankLook]] = {}
        self._stacks_at: float | None = None
        self._hung_at: float | None = None
        self._refused_secs = self._asking_secs = 0.0
        self._was_asking = False
        self._stuck: dict[int, RankLook] = {}
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
        return "suspect" if self._is_suspect else "serving"

    @property
    def wants_answer(self) -> bool:
        """Whether it helps to know if its schedulers answer something else than a health check."""
        return self.phase == "suspect"

    def wants_stacks(self, at: float) -> bool:
        """Say whether the next observation is to have the ranks' stacks."""
        if self.phase != "suspect":
            return False
        return self._stacks_at is None or at >= self._stacks_at + max(0.5, _LOOK_AGAIN * self._hang_secs)

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
            return [Event("gone", "its port refuses connections")] if _is_unreachable(seen) else []
        self._take_in(seen)
        if seen.health == "ok":
            return self._on_answer(seen)
        counted = min(secs, self._most_secs)
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
        if _is_unreachable(seen):
            return [Event("gone", f"its port has refused connections for {self.silent_secs:.1f} s", self.silent_secs)]
        return self._judge(seen)

    @property
    def _is_suspect(self) -> bool:
        return self.silent_secs >= _LOOK_AFTER * self._hang_secs

    def _crash_of(self, seen: Observation) -> list[Event]:
        """Return who ended first, where that was no end that somebody asked for; once for all that follow from it."""
        new = [death for death in seen.deaths if death.pid not in self._told_dead]
        if self._is_ending or self._crashed_at is not None or not new:
            return []
        first = new[0]
        if first.end.signal is not None and is_orderly(first.end):
            if not first.alone or len(new) > 1 or seen.gone or seen.at < first.at + _ORDERLY_SECS:
                return []
        elif not first.alone and (not first.end.known or is_orderly(first.end) or first.end.signal == "SIGKILL"):
            # By SIGKILL upstream ends all of its processes in good order, too.
            return []
        self._crashed_at, self._hung_at = seen.at, None
        self._told_dead |= {death.pid for death in seen.deaths}
        others = "; the others went on" if len(new) == 1 else f"; {len(new) - 1} more ended after it"
        level: Level = "established" if first.alone else "supported"
        return [Event("crash", f"{first}{others if first.alone else ''}", level=level, first=first)]

    def _take_in(self, seen: Observation) -> None:
        if seen.health == "ok" or not self._is_suspect:
            self._looks = {}
        if any(look.frames for look in seen.ranks):
            self._stacks_at = seen.at
        for look in seen.ranks:
            if look.pid not in self._told_dead:
                self._looks.setdefault(look.pid, []).append(look)

    def _on_answer(self, seen: Observation) -> list[Event]:
        events = []
        if self._hung_at is not None:
            events = [_progress(seen.at - self._hung_at)]
        elif not self._has_answered:
            events = [Event("serving", "the server answers")]
        elif self._crashed_at is not None:
            events = [Event("serving", "the server serves on")]
        elif self._excuse:
            events = [Event("serving", "the server answers health checks again")]
        self._has_served = self._has_answered = True
        self._is_ending = False
        self._hung_at, self._excuse, self._crashed_at = None, "", None
        self._forget()
        return events

    def _while_hung(self, seen: Observation, counted: float) -> list[Event]:
        if seen.health == "none":
            return self._on_signs(seen)
        self._refused_secs = self._refused_secs + counted if _is_unreachable(seen) else 0.0
        if self._refused_secs < self._hang_secs:
            return []
        return [Event("gone", f"its port has refused connections for {self._refused_secs:.1f} s", self._refused_secs)]

    def _on_signs(self, seen: Observation) -> list[Event]:
        """Return progress where nothing but the ranks tells of it, and those that stood still go on."""
        assert self._hung_at is not None
        for look in seen.ranks:
            stuck = self._stuck.get(look.pid)
            if stuck is not None and look.state not in ("T", "t", "D"):
                if look.switches >= stuck.switches + _SIGNS_OF_PROGRESS:
                    del self._stuck[look.pid]
            elif stuck is not None:
                self._stuck[look.pid] = look
        if self._stuck:
            return []
        event = _progress(seen.at - self._hung_at)
        self._hung_at = None
        self._forget()
        return [event]

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

    def _judge(self, seen: Observation) -> list[Event]:
        standings = self._standings()
        by_health = seen.health != "none"
        if self._is_ending and self.silent_secs < _PATIENCE * self._hang_secs:
            return self._excused(Judgement("patience", "it refused them at once before, as one does that is to end"))
        if self._saw_an_end_lately(seen.at):
            return []
        may_answer = seen.asking and self._asking_secs < _ANSWER_SECS
        answers = True if may_answer else seen.answers
        judgement = judge(standings, server_state=seen.server_state, answers=answers, by_health=by_health)
        if may_answer and judgement.outcome != "hang":
            return []
        if judgement.outcome == "patience" and self.silent_secs < _PATIENCE * self._hang_secs:
            return self._excused(judgement) if judgement.reason else []
        if judgement.outcome == "excused":
            self._forget()
            return self._excused(judgement) if by_health else []
        if judgement.outcome == "crash":
            self._crashed_at = seen.at
            self._told_dead |= {one.pid for one in standings if one.manner == "gone"}
            return [Event("crash", judgement.reason, level=judgement.level, ranks=tuple(standings))]
        what = "no health check was answered" if by_health else "a rank stood still"
        text = f"{what} for {self.silent_secs:.1f} s: {judgement.reason}"
        return [self._hang(seen, text, self.silent_secs, judgement.level)]

    def _saw_an_end_lately(self, at: float) -> bool:
        """Say whether a rank ended so short a time ago that the server may be about to end, too."""
        if self.silent_secs >= 2 * self._hang_secs:
            return False
        ends = [next((look.at for look in looks if look.state in ("X", "Z")), None) for looks in self._looks.values()]
        return any(end is not None and at - end < self._hang_secs for end in ends)

    def _excused(self, judgement: Judgement) -> list[Event]:
        """Tell once why it is no hang."""
        kind = judgement.outcome
        if self._excuse == kind:
            return []
        self._excuse = kind
        end = "" if kind == "excused" else f"; it is given {_PATIENCE} times the time"
        return [Event("excused", f"no health check is answered, but {judgement.reason}{end}", self.silent_secs)]

    def _hang(self, seen: Observation, text: str, secs: float, level: Level) -> Event:
        standings = self._standings()
        self._hung_at = seen.at - secs
        stands = {one.pid for one in standings if one.stands}
        self._stuck = {look.pid: look for look in seen.ranks if look.pid in stands}
        return Event("hang", text, secs, level, tuple(standings))

    def _standings(self) -> list[Standing]:
        return [standing_of(looks) for looks in self._looks.values()]

    def _forget(self) -> None:
        self.silent_secs = 0.0
        self._asking_secs = 0.0
        self._looks = {}
        self._stacks_at = None


def _is_unreachable(seen: Observation) -> bool:
    return seen.health == "refused" and not seen.ranks and not seen.server_state


def _progress(secs: float) -> Event:
    return Event("progress", f"progress returned after {secs:.1f} s", secs)
