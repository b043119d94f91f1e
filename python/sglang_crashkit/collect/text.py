"""What was collected of a process in words: its two files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_crashkit.capture.debugger import Debugged
from sglang_crashkit.kernel.discovery import FoundProcess
from sglang_crashkit.model.incident import iso_time
from sglang_crashkit.model.sample import Sample, format_threads

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "stopped by its tracer",
    "Z": "dead, not reaped",
}


def python_stacks(process: FoundProcess, host: str, moments: Sequence[Sample]) -> str:
    """Return the text of ``pyspy_*.txt``: the Python stacks of each moment."""
    lines = [*_head(process, host)]
    for number, moment in enumerate(moments, start=1):
        lines += ["", f"== snapshot {number}, {iso_time(moment.time)}: {state_in_words(moment)}"]
        if moment.threads:
            lines += format_threads(process.title, process.pid, moment.threads)
        else:
            lines.append(f"no Python stacks: {moment.problem}")
    return "\n".join(lines) + "\n"


def native_stacks(process: FoundProcess, host: str, debugged: Debugged, missing: str) -> str:
    """Return the text of ``cudagdb_*.txt``: what the debugger printed, and what of it is missing and why."""
    lines = [*_head(process, host)]
    if missing:
        lines.append(f"# {missing}")
    ran = f"# {debugged.tool}: {debugged.seconds:.1f} s" if debugged.seconds else f"# {debugged.tool}"
    lines.append(f"{ran}: {debugged.problem}" if debugged.problem else ran)
    return "\n".join([*lines, "", debugged.text]).rstrip() + "\n"


def state_in_words(moment: Sample) -> str:
    """Return the state of a process at a moment as a phrase."""
    if not moment.state:
        return "it had ended"
    words = f"{_STATES.get(moment.state, 'state')} ({moment.state})"
    if moment.wchan:
        words += f" in {moment.wchan}"
    if moment.tracer:
        words += f", traced by process {moment.tracer}"
    return f"{words}, {moment.cpu_secs:.2f} s of CPU time used"


def _head(process: FoundProcess, host: str) -> Iterator[str]:
    server = f", server {process.server}" if process.server is not None else ""
    yield f"# {process.title} (pid {process.pid}) on {host}{server}"
