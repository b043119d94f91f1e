"""What ``sglang-crashkit collect`` saw of live processes: the lines for a person, and the texts of its files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from sglang_crashkit.analysis.ranks import RankSet, rank_of
from sglang_crashkit.analysis.stack_tree import Node, format_tree
from sglang_crashkit.capture.debugger import Debugged
from sglang_crashkit.kernel.discovery import FoundProcess
from sglang_crashkit.model.incident import Divergence, iso_time
from sglang_crashkit.model.sample import Sample, format_threads
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem
from sglang_crashkit.model.verdict import Verdict
from sglang_crashkit.view import words
from sglang_crashkit.view.model import Section

#: Innermost frames of each process in the summary.
_MAX_FRAMES = 4
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "stopped by its tracer",
    "Z": "dead, not reaped",
}


def summary(rounds: Sequence[NodeSnapshot], verdict: Verdict, divergence: Divergence | None, more: str) -> Section:
    """Return ``summary.md`` of one host: verdict, place and time, and the processes' frames in the last snapshot."""
    times = " to ".join(dict.fromkeys(iso_time(one.time) for one in (rounds[0], rounds[-1])))
    lines = [f"{words.count(len(rounds), 'snapshot')} on {rounds[0].host}, {times}"]
    lines += [f"to be looked at first: {verdict.first}"] if verdict.first else []
    lines += [f"{divergence.statement} ({divergence.level})"] if divergence is not None else []
    lines += [*(f"next: {step}" for step in verdict.next), f"more: {more}, and the stacks of each process in its file"]
    groups: dict[tuple[str, tuple[str, ...]], list[Sample]] = {}
    for sample in rounds[-1].processes:
        thread = sample.main_thread
        frames = tuple(map(str, thread.frames[:_MAX_FRAMES])) if thread is not None else ()
        groups.setdefault((sample.state, frames), []).append(sample)
    processes = []
    for (_letter, frames), samples in groups.items():
        ranks = [sample for sample in samples if sample.ranks]
        told = RankSet(map(rank_of, ranks))
        names = [told.format(hide=[place for place in told.places() if place[0] == "server"])] if ranks else []
        names += (f"{one.title} (pid {one.pid})" for one in samples if not one.ranks)
        title = f"{', '.join(names)}: {_state(samples[0])}"
        processes.append(Section(title, frames or [samples[0].problem or "no Python frame"]))
    parts = [Section("Processes", parts=processes)]
    return Section(f"{verdict.kind} ({verdict.level})", lines, f"**{verdict.headline}**", parts)


def _state(moment: Sample) -> str:
    if not moment.state:
        return "it had ended"
    slept = f" in {moment.wchan}" if moment.wchan else ""
    traced = f", traced by process {moment.tracer}" if moment.tracer else ""
    return f"{_STATES.get(moment.state, 'state')} ({moment.state}){slept}{traced}"


# -- files of one process


def python_stacks(process: FoundProcess, host: str, moments: Sequence[Sample]) -> str:
    """Return the text of ``pyspy_*.txt``: the Python stacks of each snapshot."""
    lines = [_head(process, host)]
    for number, moment in enumerate(moments, start=1):
        used = f", {moment.cpu_secs:.2f} s of CPU time used" if moment.state else ""
        lines += ["", f"== snapshot {number}, {iso_time(moment.time)}: {_state(moment)}{used}"]
        stacks = format_threads(process.title, process.pid, moment.threads) if moment.threads else ()
        lines += stacks or [f"no Python stacks: {moment.problem}"]
    return "\n".join(lines) + "\n"


def native_stacks(process: FoundProcess, host: str, debugged: Debugged, missing: str) -> str:
    """Return the text of ``cudagdb_*.txt``: what the debugger printed, and what is missing from it and why."""
    took = f": {debugged.seconds:.1f} s" if debugged.seconds else ""
    ran = f"# {debugged.tool}{took}{f': {debugged.problem}' if debugged.problem else ''}"
    missed = [f"# {missing}"] if missing else []
    return "\n".join([_head(process, host), *missed, ran, "", debugged.text]).rstrip() + "\n"


def _head(process: FoundProcess, host: str) -> str:
    server = f", server {process.server}" if process.server is not None else ""
    return f"# {process.title} (pid {process.pid}) on {host}{server}"


# -- on a terminal


def moment_lines(moments: Sequence[Sample]) -> Iterator[str]:
    """Yield a line for each run of snapshots that show a process in the same state and innermost frame."""
    start = 1
    for (state, place), group in itertools.groupby(moments, _place_of):
        first, *others = group
        end = start + len(others)
        cpu = f", {others[-1].cpu_secs - first.cpu_secs:.1f} s of CPU time between" if others else ""
        yield f"    {f'{start}-{end}' if others else start:<4}{state}  {place}{cpu}"
        start = end + 1


def _place_of(moment: Sample) -> tuple[str, str]:
    thread = moment.main_thread
    unseen = moment.problem or ("no Python frame" if moment.state else "it has ended")
    return moment.state or "-", str(thread.frames[0]) if thread is not None and thread.frames else unseen


def debugged_line(it: Debugged) -> str:
    """Return a debugger's problem, or its number of native stacks, its seconds and its CUDA kernels, as a line."""
    stacks = f"{len(it.threads)} native stacks in {it.seconds:.1f} s"
    kernels = f", CUDA kernels: {', '.join(it.kernels)}" if it.kernels else ""
    return f"{it.tool}: {it.problem or stacks + kernels}"


def node_lines(nodes: Sequence[tuple[str, str, Sequence[Sequence[Sample]]]]) -> Iterator[str]:
    """Yield a line for each process of each node, with what was seen of it; for a node without one, its outcome."""
    width = max(len(node) for node, _what, _processes in nodes)
    for node, what, processes in nodes:
        if not processes:
            yield f"{node:<{width}}  {what}"
        for samples in processes:
            last = samples[-1]
            rank = " ".join(f"{name.upper()}{number}" for name, number in last.ranks.items()) or last.role
            # States and innermost frames of its main thread, each once.
            doings = dict.fromkeys("  ".join(_place_of(sample)) for sample in samples)
            yield f"{node:<{width}}  {rank:<12} pid {last.pid:<8} {'; '.join(doings)}"


def problem_lines(problems: Iterable[Problem]) -> Iterator[str]:
    """Yield what could not be collected, why, and what to do."""
    for problem in problems:
        yield f"{problem.what}: {problem.why}"
        if problem.next:
            yield f"  next: {problem.next}"


def tree_lines(rounds: Sequence[NodeSnapshot]) -> Iterator[str]:
    """Yield the merged stacks of all ranks."""
    tree = Node()
    for sample in (sample for one in rounds for sample in one.processes):
        # Most threads of a pool share one stack, which is one object: add it once.
        for frames in {id(thread.frames): thread.frames for thread in sample.threads}.values():
            tree.add(rank_of(sample), frames)
    if tree.children:
        # Threads of native libraries, such as NCCL's, have no Python stack and are not in the tree.
        yield from ("", "Python stacks of all threads, outermost call first, what the fewest ranks do first:")
        yield from (f"  {line}" for line in format_tree(tree))
