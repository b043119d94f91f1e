"""What was collected on one host, for whoever opens the folder first: ``summary.md`` and ``verdict.json``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sglang_crashkit.analysis.divergence import Divergence
from sglang_crashkit.analysis.explain import Explanation
from sglang_crashkit.analysis.ranks import RankSet, rank_of
from sglang_crashkit.capture.debugger import Debugged
from sglang_crashkit.kernel.discovery import FoundProcess
from sglang_crashkit.model.incident import iso_time
from sglang_crashkit.model.sample import Sample, format_threads
from sglang_crashkit.model.snapshot import NodeSnapshot

SUMMARY, VERDICT = "summary.md", "verdict.json"
_MAX_FRAMES = 4
_SCHEMA_VERSION = 1


def as_json(rounds: Sequence[NodeSnapshot], explanation: Explanation, divergence: Divergence | None) -> dict[str, Any]:
    """Return the verdict on all rounds of one host as JSON values, ``schema_version`` first."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "host": rounds[0].host,
        "times": [iso_time(one.time) for one in rounds],
        "verdict": explanation.to_json(),
        "divergence": divergence.to_json() if divergence is not None else None,
    }


def format_summary(
    rounds: Sequence[NodeSnapshot], explanation: Explanation, divergence: Divergence | None
) -> Iterator[str]:
    """Yield the lines of ``summary.md``: the verdict, where and when, and where the processes were at last."""
    yield f"# {explanation.kind} ({explanation.level})"
    yield ""
    yield f"**{explanation.statement}**"
    yield ""
    times = (
        f"{iso_time(rounds[0].time)} to {iso_time(rounds[-1].time)}" if len(rounds) > 1 else iso_time(rounds[0].time)
    )
    yield f"- {len(rounds)} snapshot{'' if len(rounds) == 1 else 's'} on {rounds[0].host}, {times}"
    if explanation.named:
        yield f"- to be looked at: {', '.join(member.name for member in explanation.named)}"
    if divergence is not None:
        yield f"- {divergence.statement} ({divergence.level})"
    yield f"- more: {VERDICT}, and the stacks of each process in its own file"
    yield ""
    yield "## Processes"
    groups: dict[tuple[str, tuple[str, ...]], list[Sample]] = {}
    for sample in rounds[-1].processes:
        thread = sample.main_thread
        frames = tuple(str(frame) for frame in thread.frames[:_MAX_FRAMES]) if thread is not None else ()
        groups.setdefault((sample.state, frames), []).append(sample)
    for (_state, frames), samples in groups.items():
        yield ""
        yield f"### {_names(samples)}: {state_in_words(samples[0]).partition(',')[0]}"
        yield from (f"- {frame}" for frame in frames)
        if not frames:
            yield f"- {samples[0].problem or 'no Python frame'}"


def _names(samples: Sequence[Sample]) -> str:
    ranks = [sample for sample in samples if sample.ranks]
    told = RankSet(map(rank_of, ranks))
    names = [told.format(hide=[place for place in told.places() if place[0] == "server"])] if ranks else []
    return ", ".join([*names, *(f"{one.title} (pid {one.pid})" for one in samples if not one.ranks)])


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
