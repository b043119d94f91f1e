"""What one process of a group did in each sample, and whether it moved between them, as members are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sglang_crashkit.analysis.waits import WAITS_FOR_OTHERS, Activity
from sglang_crashkit.model.sample import Frame

#: What the samples of a process say together. ``still``: the same functions and hardly any CPU time; ``spinning``: the
#: same functions and much of it; ``moving``: other functions; ``unknown``: there are not two samples with a stack.
Motion = Literal["still", "spinning", "moving", "unknown"]

#: Shares of one CPU above which a process is busy, and below which it rests.
_BUSY, _RESTING = 0.5, 0.05
_MAX_NAMES = 8
#: Of several that did different things, so many are told.
_MAX_DESCRIBED = 4


@dataclass(frozen=True, slots=True)
class Moment:
    """What one sample shows, as far as it is compared."""

    state: str  # the letter that ``/proc`` has for the state of its main thread; empty where it is not known
    cpu_secs: float  # CPU time that it had used since its start, in seconds
    activity: Activity  # what it was doing
    frames: tuple[Frame, ...]  # its main thread, innermost first, as far as it is kept; empty without a stack
    time: float = 0.0  # when, in seconds since the epoch; 0 where it is not known


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a group."""

    name: str  # what it is called in sentences
    #: What each sample shows, in order of time; none of one that is only known to have been there.
    moments: tuple[Moment, ...]
    source: Any = None  # what it stands for

    @property
    def seen(self) -> tuple[Moment, ...]:
        """Those with a stack, or with native frames that tell as much."""
        return tuple(moment for moment in self.moments if moment.activity.function)

    @property
    def last(self) -> Activity | None:
        """What it did last, None where no sample tells."""
        return self.moments[-1].activity if self.moments else None

    def has_ended(self) -> bool:
        """Say whether it was only there as a zombie, or no more, in the last sample."""
        return self.last is not None and self.last.kind == "gone"

    def always(self, *kinds: str) -> bool:
        """Say whether it was in one of these states in each sample."""
        return bool(self.moments) and all(moment.activity.kind in kinds for moment in self.moments)

    def waits(self) -> bool:
        """Say whether it waited for others whenever its stack was seen."""
        return bool(self.seen) and all(moment.activity.kind in WAITS_FOR_OTHERS for moment in self.seen)

    def cpu_used(self) -> float:
        """Return the CPU time that it used from the first sample to the last, in seconds."""
        return self.moments[-1].cpu_secs - self.moments[0].cpu_secs if self.moments else 0.0

    def seconds(self) -> float:
        """Return the time from the first sample to the last, in seconds; 0 where it is not known."""
        return max(0.0, self.moments[-1].time - self.moments[0].time) if self.moments else 0.0

    def motion(self) -> Motion:
        """Compare its moments."""
        if len(self.seen) < 2:
            return "unknown"
        if len({tuple((frame.function, frame.file) for frame in moment.frames) for moment in self.seen}) > 1:
            return "moving"
        return "spinning" if self.cpu_used() >= _BUSY * self.seconds() > 0 else "still"

    def rests(self) -> bool:
        """Say whether it stayed in the same functions all the time and used hardly any CPU time."""
        return self.motion() == "still" and self.cpu_used() <= _RESTING * self.seconds()

    def innermost(self) -> frozenset[tuple[str, str]]:
        """Return the innermost function, with its file, of each sample that has one."""
        return frozenset((moment.frames[0].function, moment.frames[0].file) for moment in self.seen if moment.frames)

    def common_function(self) -> str:
        """Return the innermost call that all moments have in common, empty where there is none."""
        stacks = [tuple(reversed(moment.frames)) for moment in self.seen]
        common = ""
        for frames in zip(*stacks, strict=False):
            if any((frame.function, frame.file) != (frames[0].function, frames[0].file) for frame in frames):
                break
            common = frames[0].function
        return common


def is_for_requests(moment: Moment) -> bool:
    """Say whether a process waited for, or passed on, new requests at this moment."""
    activity = moment.activity
    return activity.kind == "idle" or (activity.kind in ("collective", "socket", "gil_wait") and activity.requests)


def name_some(names: Sequence[str], most: int = _MAX_NAMES) -> str:
    """Return the names as part of a sentence, at most `most` of them."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def name_members(members: Sequence[Member]) -> str:
    """Return who they are as part of a sentence."""
    return name_some([member.name for member in members])


def be(members: Sequence[Member]) -> str:
    """Return the form of "to be" that goes with them."""
    return "is" if len(members) == 1 else "are"


def describe(member: Member) -> str:
    """Return what it was seen doing, without its name and a full stop."""
    words = list(dict.fromkeys(moment.activity.words for moment in member.seen or member.moments))
    functions = list(dict.fromkeys(moment.activity.function for moment in member.seen))
    if len(functions) > 1:
        more = [f"{len(functions) - 3} more places"] if len(functions) > 3 else []
        words = [f"was in {' and '.join([*functions[:3], *more])}"]
    elif len(words) > 1:
        # The last one, with which native stacks are taken, tells most.
        words = words[-1:]
    samples = f" in {len(member.moments)} samples" if len(member.moments) > 1 else ""
    cpu = f" and used {member.cpu_used():.1f} s of CPU time meanwhile" if len(member.moments) > 1 else ""
    return f"{words[0] if words else 'was not seen'}{samples}{cpu}"


def describe_several(members: Sequence[Member]) -> str:
    """Return who they are and what they were seen doing, which is the same for all, without a full stop."""
    words = members[0].moments[-1].activity.words if members[0].moments else "are known from before only"
    words = f"were {words[4:]}" if words.startswith("was ") else words
    used = [member.cpu_used() for member in members]
    samples = len(members[0].moments)
    cpu = f" in the last of {samples} samples and used {min(used):.1f} to {max(used):.1f} s of CPU time meanwhile"
    return f"{name_members(members)} {words}{cpu if samples > 1 else ''}"


def describe_some(members: Sequence[Member]) -> str:
    """Return who they are, at least one, and what they were seen doing, those alike together, without a full stop."""
    alike: dict[str, list[Member]] = {}
    for member in members:
        alike.setdefault(member.moments[-1].activity.words, []).append(member)
    groups = list(alike.values())
    told = [f"{some[0].name} {describe(some[0])}" if len(some) == 1 else describe_several(some) for some in groups]
    if len(told) > _MAX_DESCRIBED:
        told[_MAX_DESCRIBED:] = [f"{sum(len(some) for some in groups[_MAX_DESCRIBED:])} more did other things"]
    return "; ".join(told)


def motion_words(member: Member) -> str:
    """Return what its samples say together, as the end of a sentence about it; empty where they say nothing."""
    motion = member.motion()
    if motion == "moving":
        common = member.common_function()
        return f"; it moved below {common}" if common else "; it moved"
    # One that waits may be busy with waiting.
    if motion == "unknown" or member.waits():
        return ""
    return "; it was stuck there" if motion == "still" else "; it spun there, busy all the time"
