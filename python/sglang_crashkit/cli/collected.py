"""What ``sglang-crashkit collect`` tells of one host, or of all nodes, for a person and for a program."""

from __future__ import annotations

import contextlib
import itertools
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_crashkit.analysis.ranks import rank_of
from sglang_crashkit.analysis.stack_tree import PrefixTree, format_tree
from sglang_crashkit.capture.debugger import Debugged
from sglang_crashkit.cli.output import say, say_title
from sglang_crashkit.collect.collection import SCHEMA_VERSION, SUMMARY, VERDICT, Collected, Collection
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.kernel.discovery import Discovery
from sglang_crashkit.kernel.private_files import make_private_folder, read_regular, write_json, write_private
from sglang_crashkit.model.case import Case
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.verdict import Verdict
from sglang_crashkit.redact import redact_text

if TYPE_CHECKING:
    from sglang_crashkit.collect.gather import Gathered

#: What the text files that are printed may take together, in bytes: the snapshots beside them count for more.
_MAX_TEXTS = 32 << 20
#: The file with all that is told of all nodes, and the merged stacks of all ranks.
EXPLANATION = "explanation.txt"
#: More lines, of processes or of what is missing, are in the file only.
_MAX_LINES = 100


class TextReport:
    """The lines for a person: the snapshots, later what the debuggers added, and the verdict."""

    def __init__(self, collection: Collection, output: Path) -> None:
        self._collection, self._output = collection, output
        self._is_begun = False

    def snapshots_taken(self) -> None:
        """Print what the processes did, and in a sentence the verdict, before the debuggers, which take minutes."""
        self._is_begun = True
        for one in self._collection.collected:
            say(f"{one.process.title} (pid {one.process.pid})")
            for line in _moments(one):
                say(f"    {line}")
        verdict, _case = self._collection.judged()
        if self._collection.rounds:
            found = self._collection.divergence
            told = "; ".join([verdict.headline, *([found.statement] if found else [])])
            say(f"by the snapshots ({verdict.level}): {told}")

    def ended(self) -> None:
        """Print the rest."""
        if not self._is_begun:
            self.snapshots_taken()
        if self._collection.spared:
            say(f"native stacks: not taken: {self._collection.spared}")
        for one in self._collection.collected:
            if one.debugged is not None and not self._collection.spared:
                say(f"{one.process.title} (pid {one.process.pid}): {_debugged(one.debugged)}")
        if self._collection.missing:
            say(self._collection.missing)
        say(f"files: {self._output}")
        _say_verdict(self._collection.judged())


def _say_verdict(judged: tuple[Verdict, Case]) -> None:
    """Print it as ``sglang-crashkit explain`` does, where any stack was seen."""
    from sglang_crashkit.view.verdict import screen

    if any(process.stacks for process in judged[1].processes.values()):
        head, *rest = screen(*judged)
        say("")
        say_title(redact_text(head))
        say(*map(redact_text, rest))


def _debugged(it: Debugged) -> str:
    stacks = f"{len(it.threads)} native stacks in {it.seconds:.1f} s"
    kernels = f", CUDA kernels: {', '.join(it.kernels)}" if it.kernels else ""
    return f"{it.tool}: {it.problem or stacks + kernels}"


def _moments(one: Collected) -> Iterator[str]:
    """Yield a line for each run of moments in which the process was in the same state and place."""
    start = 1
    for (state, place), group in itertools.groupby(one.moments, _place_of):
        first, *others = group
        end = start + len(others)
        cpu = f", {others[-1].cpu_secs - first.cpu_secs:.1f} s of CPU time between" if others else ""
        yield f"{f'{start}-{end}' if others else start:<4}{state}  {place}{cpu}"
        start = end + 1


def _place_of(moment: Sample) -> tuple[str, str]:
    thread = moment.main_thread
    frames = thread.frames if thread is not None else ()
    unseen = moment.problem or ("no Python frame" if moment.state else "it has ended")
    return moment.state or "-", str(frames[0]) if frames else unseen


def as_json(
    collection: Collection,
    output: Path,
    status: ExitCode,
    found: Discovery,
    *,
    with_snapshots: bool,
    with_texts: bool,
) -> dict[str, Any]:
    """Return the same for a program, as JSON values; on request with the snapshots, and what is in the text files."""
    return {
        "exit_code": int(status),
        "host": collection.host,
        "output_dir": str(output.absolute()),
        "snapshots": collection.snapshot_files,
        "missing": collection.missing,
        "processes": [_process_json(one) for one in collection.collected],
        "verdict": msgspec.to_builtins(collection.judged()[0]),
        "divergence": msgspec.to_builtins(collection.divergence),
        "other_users": {name_of(user): list(pids) for user, pids in found.others.items()},
        "other_jobs": [
            {"job_id": place and place.job_id, "node": place and place.node, "pids": list(pids)}
            for place, pids in found.elsewhere.items()
        ],
        **({"rounds": [one.to_json() for one in collection.rounds]} if with_snapshots else {}),
        **({"texts": _texts(collection, output)} if with_texts else {}),
    }


def _texts(collection: Collection, output: Path) -> dict[str, str]:
    """Return what is in each text file, by its name; one that is too long is left out."""
    names = [SUMMARY, VERDICT, *(name for one in collection.collected for name in one.files)]
    texts, left = dict[str, str](), _MAX_TEXTS
    for name in names:
        # One that was interrupted has not all of them.
        with contextlib.suppress(OSError):
            text = read_regular(output / name, left + 1)
            if len(text) <= left:
                texts[name], left = text.decode(errors="replace"), left - len(text)
    return texts


def _process_json(one: Collected) -> dict[str, Any]:
    process, debugged = one.process, one.debugged
    return {
        "pid": process.pid,
        "title": process.title,
        "role": process.role,
        "ranks": dict(process.ranks),
        "server": process.server,
        "user": process.user,
        "found_by": process.way,
        "states": [moment.state for moment in one.moments],
        "problems": [moment.problem for moment in one.moments if moment.problem],
        "debugger": debugged and {"tool": debugged.tool, "problem": debugged.problem, "secs": debugged.seconds},
        "files": one.files,
    }


def name_of(user: int) -> str:
    """Return the name of a user, the id where it has none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def write_explanation(result: Gathered, judged: tuple[Verdict, Case], output: Path) -> None:
    """Write what is reported of all nodes, with the merged stacks of all ranks.

    Raises:
        CrashkitError: the folder is no folder of this user.
        OSError: it cannot be written to.
    """
    from sglang_crashkit.view.verdict import screen

    verdict = judged[0]
    lines = [*_process_lines(result), *_problem_lines(result), "", *map(redact_text, screen(*judged))]
    tree = PrefixTree()
    for sample in (sample for one in result.rounds for sample in one.processes):
        # Threads of a pool mostly have the same stack, as the same object.
        for frames in {id(thread.frames): thread.frames for thread in sample.threads}.values():
            tree.add(rank_of(sample), frames)
    if tree.root.children:
        # Threads of native libraries, such as NCCL's, have no such stacks.
        lines += ["", "Python stacks of all threads, outermost call first, what the fewest ranks do first:"]
        lines += (f"  {line}" for line in format_tree(tree))
    head = [f"# {verdict.kind} ({verdict.level})", "", f"**{redact_text(verdict.headline)}**", ""]
    head.append(f"- {result.transport.title}; more: {EXPLANATION}, {VERDICT}, a folder each {result.transport.noun}")
    silent = [node for node in result.nodes if node.status is None]
    for node in silent[:_MAX_LINES]:
        head += [f"- {problem.what} gave no answer: {problem.why}" for problem in node.problems]
    make_private_folder(output)
    for name, text in ((EXPLANATION, lines), (SUMMARY, head)):
        write_private(output / name, "".join(f"{line}\n" for line in text).encode(errors="backslashreplace"))
    told = {"verdict": msgspec.to_builtins(verdict), "silent": [node.node for node in silent]}
    write_json(output / VERDICT, {"schema_version": SCHEMA_VERSION, **result.transport.identity, **told})


def say_nodes(result: Gathered, judged: tuple[Verdict, Case], output: Path) -> None:
    """Print what there is for a person."""
    say(result.transport.title)
    for lines in (list(_process_lines(result)), list(_problem_lines(result))):
        say(*lines[:_MAX_LINES])
        if len(lines) > _MAX_LINES:
            say(f"... and {len(lines) - _MAX_LINES} lines more in {output / EXPLANATION}")
    say(f"files: {output}/<{result.transport.noun}>/, {output / EXPLANATION}")
    _say_verdict(judged)


def nodes_as_json(result: Gathered, verdict: Verdict, output: Path, status: ExitCode) -> dict[str, Any]:
    """Return the same for a program, as JSON values."""
    return {
        "exit_code": int(status),
        **result.transport.identity,
        "output_dir": str(output),
        "explanation": EXPLANATION,
        "nodes": [
            {
                "node": node.node,
                "exit_code": node.status,
                "folder": str(node.folder),
                "files": list(node.files),
                "processes": [
                    {
                        "pid": samples[-1].pid,
                        "title": samples[-1].title,
                        "role": samples[-1].role,
                        "ranks": dict(samples[-1].ranks),
                        "states": [sample.state for sample in samples],
                    }
                    for samples in node.processes
                ],
                "problems": [vars(problem) for problem in node.problems],
            }
            for node in result.nodes
        ],
        "verdict": msgspec.to_builtins(verdict),
    }


def _process_lines(result: Gathered) -> Iterator[str]:
    from sglang_crashkit.collect.gather import describe

    width = max(len(node.node) for node in result.nodes)
    for node in result.nodes:
        if not node.processes:
            yield f"{node.node:<{width}}  {describe(node.status, 0)}"
        for samples in node.processes:
            last = samples[-1]
            rank = " ".join(f"{name.upper()}{number}" for name, number in last.ranks.items()) or last.role
            # States and innermost frames of its main thread, each once.
            doings = dict.fromkeys("  ".join(_place_of(sample)) for sample in samples)
            yield f"{node.node:<{width}}  {rank:<12} pid {last.pid:<8} {'; '.join(doings)}"


def _problem_lines(result: Gathered) -> Iterator[str]:
    for problem in (problem for node in result.nodes for problem in node.problems):
        yield f"{problem.what}: {problem.why}"
        if problem.next:
            yield f"  next: {problem.next}"
