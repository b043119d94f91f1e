"""Judge from what was seen of a server's ranks whether it stands still, while its health check is not answered.

A health check that fails says little by itself: it waits behind a long batch, and a paused server does not take it in.
So the ranks decide. One stands still that is stopped, asleep in the kernel, or at the same line all the time without
waking up or with all of its CPU time. Where all go on it may be a long batch, and more patience is had. Where the
schedulers answer something else than a health check, their loops go round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_crashkit.analysis.states import Activity, of_frames, of_state
from sglang_crashkit.model.sample import Frame

Manner = Literal["gone", "traced", "stopped", "asleep", "still", "spinning", "moving", "unknown"]
Outcome = Literal["crash", "hang", "patience", "excused"]
Level = Literal["supported", "unknown"]

#: A rank that goes on changes context more often a second; one that waits for something else to come, not at all.
_FEWEST_SWITCHES = 0.2
#: Shares of one core: less is no work, more is work all the time.
_NO_CPU, _ALL_CPU = 0.02, 0.5
#: So many stacks, and one line in all of them, before it is said of a process that works that it does not go on.
_FEWEST_STACKS = 3
#: A healthy process is in D for a moment now and then.
_FEWEST_ASLEEP = 3


@dataclass(frozen=True)
class RankLook:
    """One rank at one moment.

    Attributes:
        at: when, in seconds of the monotonic clock.
        pid: its process id.
        title: its title.
        state: state letter of its main thread; ``X`` where it has ended.
        cpu_secs: CPU time that all its threads had used, in seconds.
        switches: how often its main thread had given up its core to wait for something.
        wchan: the kernel function in which the main thread slept, empty where it is not known.
        frames: its main thread's Python frames, innermost first; empty where they were not looked at or are not known.
    """

    at: float
    pid: int
    title: str
    state: str
    cpu_secs: float = 0.0
    switches: int = 0
    wchan: str = ""
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Standing:
    """How a rank fared during a few looks.

    Attributes:
        pid: its process id.
        title: its title.
        manner: the same in one word.
        words: what was seen, as the rest of a sentence that begins with its title.
        activity: what its last known stack says.
    """

    pid: int
    title: str
    manner: Manner
    words: str
    activity: Activity

    @property
    def stands(self) -> bool:
        """Whether it does not go on."""
        return self.manner in ("gone", "stopped", "asleep", "still", "spinning")


@dataclass(frozen=True)
class Judgement:
    """What the ranks say of a server whose health check is not answered, or that has none.

    Attributes:
        outcome: ``crash`` where a rank has ended; ``excused`` where something else than a hang is the reason;
            ``patience`` where it may be.
        reason: one sentence; empty where too little was seen yet.
        level: ``unknown`` where it is not seen that any rank stands still.
    """

    outcome: Outcome
    reason: str
    level: Level = "supported"


def standing_of(looks: Sequence[RankLook]) -> Standing:
    """Return how a rank fared.

    Args:
        looks: at the same process, in order of time; not empty.
    """
    last = looks[-1]
    stacks = [look for look in looks if look.frames]
    activity = of_frames(stacks[-1].frames if stacks else ())
    by_kernel = of_state(last.state, last.wchan)
    if by_kernel is not None and _is_settled(by_kernel, looks):
        manners: dict[str, Manner] = {"stopped": "stopped", "traced": "traced", "disk_sleep": "asleep"}
        return Standing(last.pid, last.title, manners.get(by_kernel.kind, "gone"), by_kernel.words, activity)
    first = stacks[0] if stacks else looks[0]
    secs = last.at - first.at
    if secs <= 0:
        return Standing(last.pid, last.title, "unknown", activity.words, activity)
    cpu = max(0.0, last.cpu_secs - first.cpu_secs)
    switches = last.switches - first.switches
    is_one_place = len({look.frames for look in stacks}) <= 1
    used = f"used {cpu:.1f} s of CPU time in {secs:.1f} s"
    manner: Manner = "moving"
    words = f"went on and {used}"
    if is_one_place and cpu <= _NO_CPU * secs and switches <= _FEWEST_SWITCHES * secs:
        manner, words = "still", f"stood still for {secs:.1f} s"
    elif is_one_place and len(stacks) >= _FEWEST_STACKS and cpu >= _ALL_CPU * secs:
        manner, words = "spinning", f"{used} at one line"
    seen = f"; it {activity.words}" if activity.function else ""
    return Standing(last.pid, last.title, manner, words + seen, activity)


def judge(
    standings: Sequence[Standing], *, server_state: str = "", answers: bool | None = None, by_health: bool = True
) -> Judgement:
    """Judge a server.

    Args:
        standings: its ranks on this host; empty where nothing is known of them.
        server_state: state letter of its main process, empty where it is not known.
        answers: whether its schedulers answered something else than a health check; None where that is not known.
        by_health: its health check failed; false where it has none, and nothing but the ranks speaks.
    """
    traced = [one for one in standings if one.manner == "traced"]
    if traced:
        return Judgement("excused", f"{_names(traced)} {traced[0].words}")
    if standings and all(one.manner == "stopped" for one in standings) and server_state in ("T", "t"):
        return Judgement("excused", "the whole server is stopped (state T)")
    if by_health and standings and all(one.manner == "gone" for one in standings):
        # Upstream waits for them to end before it ends itself, and answers nothing meanwhile.
        return Judgement("patience", f"{_say(standings)}; whether the server ends too cannot be seen", "unknown")
    ended = [one for one in standings if one.manner == "gone"]
    if ended:
        return Judgement("crash", _say(ended))
    by_kernel = [one for one in standings if one.manner in ("stopped", "asleep")]
    if by_kernel:
        return Judgement("hang", _say(by_kernel))
    still = [one for one in standings if one.manner == "still"]
    if answers and not still:
        return Judgement(
            "excused", "its schedulers answer other questions than a health check: it is paused, or updates its weights"
        )
    slow = [one for one in standings if one.activity.kind in ("loading", "compiling", "profiling")]
    if slow:
        return Judgement("patience" if by_health else "excused", _say(slow))
    standing = [one for one in standings if one.stands]
    if not by_health:
        # A rank that waits for requests does not need to move for that.
        standing = [one for one in still if one.activity.kind != "idle"]
        return Judgement("hang", _say(standing)) if standing else Judgement("excused", "its ranks go on")
    if standing:
        return Judgement("hang", _say(standing))
    moving = [one for one in standings if one.manner == "moving"]
    if moving:
        return Judgement("patience", f"{_say(moving)}; whether they get on with the batch cannot be seen", "unknown")
    # Too few looks say nothing yet.
    return Judgement("patience", "") if standings else Judgement("hang", "nothing is known of its ranks", "unknown")


def _is_settled(activity: Activity, looks: Sequence[RankLook]) -> bool:
    """Say whether what the kernel says is more than of this moment."""
    if activity.kind != "disk_sleep":
        return True
    return len(looks) >= _FEWEST_ASLEEP and all(look.state == "D" for look in looks[-_FEWEST_ASLEEP:])


def _say(standings: Sequence[Standing], most: int = 8) -> str:
    said = [f"{one.title} (pid {one.pid}) {one.words}" for one in standings[:most]]
    if len(standings) > most:
        said.append(f"{len(standings) - most} more")
    return "; ".join(said)


def _names(standings: Sequence[Standing]) -> str:
    return ", ".join(f"{one.title} (pid {one.pid})" for one in standings)
