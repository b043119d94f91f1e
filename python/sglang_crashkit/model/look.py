"""What a process was seen doing at one of several moments, as an incident has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_crashkit.model.stacks import Frame

#: What was seen of a process's interpreter lock: ``main`` where its main thread held it; ``taken`` where another thread
#: of it did not get it in time, and who held it is not known; empty where nothing was seen.
Lock = Literal["", "main", "taken"]


@dataclass
class Look:
    """One process at one moment.

    Attributes:
        time: when, as `incident.iso_time` has it.
        state: the letter that ``/proc`` has for the state of its main thread; empty where it was gone.
        cpu_secs: CPU time that it had used since its start, in seconds.
        doing: as in `ProcessReport`; empty where its stack could not be taken.
        lock: what was seen of its interpreter lock.
        frames: its main thread's frames that are not the kit's own, innermost first; not part of the JSON, because the
            incident has them in a file of their own.
    """

    time: str
    state: str
    cpu_secs: float
    doing: list[str] = field(default_factory=list)
    lock: Lock = ""
    frames: tuple[Frame, ...] = ()


def without_frames(look: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON values of a look."""
    return {name: value for name, value in look.items() if name != "frames"}
