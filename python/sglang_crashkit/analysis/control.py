"""Which control request a scheduler worked on as it failed, such as an update of the weights; that is nobody's prompt.

The frames of its main thread tell, in all releases: whatever is received is handled in one function of the scheduler.
Of a process that died without a word there are none, and its record of steps tells.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sglang_crashkit.model.incident import ProcessReport

_FRAME = re.compile(r"(?:[\w<>]+\.)*(?P<name>[\w<>]+) \((?P<path>[^)]*)\)")
#: Where a scheduler handles what it received, by the type of each.
_RECEIVED = "process_input_requests"
#: What calls that, and all else that a scheduler does.
_LOOP = re.compile(r"event_loop\w*|run_scheduler_process")
#: What was asked for goes on with the batches after it.
_PROFILES = re.compile(r"_?(start|stop|init)_profile")
#: What picks the handler, what stands between both, and the handlers of requests for an answer and of their ends.
_DISPATCHER = "__call__"
_BETWEEN = re.compile(r"handle|\w*wrap\w*|decorate_\w+|<lambda>")
_NO_CONTROL = re.compile(r"_?handle_(batch_)?(generate|embedding)\w*|abort_request")


def control_in(frames: Sequence[str]) -> str | None:
    """Return the name of the control request that frames, innermost first, are in.

    Returns:
        Empty where they are in something else, None where they do not reach to where that shows.
    """
    names = [found["name"] for frame in frames if (found := _FRAME.match(frame))]
    if any(map(_PROFILES.fullmatch, names)):
        return "profile"
    if _RECEIVED not in names:
        return "" if any(map(_LOOP.fullmatch, names)) else None
    dispatched, *inner = (*reversed(names[: names.index(_RECEIVED)]), "")
    name = next((one for one in inner if one and not _BETWEEN.fullmatch(one)), "") if dispatched == _DISPATCHER else ""
    return "" if _NO_CONTROL.fullmatch(name) else name


def frames_of(process: ProcessReport) -> list[str]:
    """Return the frames of what a process raised, or of its main thread as far as they are known, innermost first."""
    threads = process.samples[-1].threads if process.samples else ()
    sampled = [str(frame) for frame in threads[0].frames] if threads else []
    return process.raised_through or sampled or process.doing


def control_of(process: ProcessReport) -> str:
    """Return the control request that a scheduler worked on as it failed or hung; empty where it did on none.

    What it has by now is of its record, which keeps one from where it is received to where a batch or a round begins.
    """
    found = control_in(frames_of(process))
    return ("" if process.raised_through else process.control) if found is None else found
