"""What came of taking the Python stacks of one process, whatever took them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_crashkit.model.stacks import Thread

#: What took a stack: py-spy from outside; a thread of the process itself; faulthandler in a signal handler.
Source = Literal["py-spy", "in-process", "faulthandler"]


@dataclass(frozen=True)
class Photograph:
    """What came of photographing one process.

    Attributes:
        pid: the process.
        threads: its threads, None when there is no snapshot.
        reason: why there is none; where there is one, why what was tried before gave none, empty when it was the first.
        seconds: from the start of the round to this result.
        source: what took it, or what was tried last.
        lock_taken: a thread of it that was asked did not get its interpreter lock in time.
    """

    pid: int
    threads: tuple[Thread, ...] | None
    reason: str
    seconds: float
    source: Source = "py-spy"
    lock_taken: bool = False
