"""What ``sglang-crashkit collect`` tells of all nodes of a job, or of all hosts, for a person and for a program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_crashkit.analysis.explain import Explanation, format_explanation
from sglang_crashkit.analysis.sightings import Seen
from sglang_crashkit.collect.account import SUMMARY, VERDICT
from sglang_crashkit.collect.gather import Gathered, describe
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.kernel.private_files import make_private_folder, write_json, write_private

#: The file with all that is told, and the merged stacks of all ranks.
EXPLANATION = "explanation.txt"
#: More lines, of processes or of what is missing, are in the file only.
_MAX_LINES = 100


def write_explanation(result: Gathered, explanation: Explanation, output: Path) -> None:
    """Write what is reported of all nodes, with the merged stacks of all ranks.

    Raises:
        CrashkitError: the folder is no folder of this user.
        OSError: it cannot be written to.
    """
    lines = [*_process_lines(result), *_problem_lines(result), ""]
    lines += format_explanation(explanation, result.sightings.tree)
    head = [f"# {explanation.kind} ({explanation.level})", "", f"**{explanation.statement}**", ""]
    head.append(f"- {result.reach.title}; more: {EXPLANATION}, {VERDICT}, a folder each {result.reach.noun}")
    silent = [node for node in result.nodes if node.status is None]
    for node in silent[:_MAX_LINES]:
        head += [f"- {problem.what} gave no answer: {problem.why}" for problem in node.problems]
    make_private_folder(output)
    for name, text in ((EXPLANATION, lines), (SUMMARY, head)):
        write_private(output / name, "".join(f"{line}\n" for line in text).encode(errors="backslashreplace"))
    verdict = {"verdict": explanation.to_json(), "silent": [node.node for node in silent]}
    write_json(output / VERDICT, {"schema_version": 1, **result.reach.identity, **verdict})


def as_text(result: Gathered, explanation: Explanation, output: Path) -> Iterator[str]:
    """Yield the lines for a person."""
    yield result.reach.title
    for lines in (list(_process_lines(result)), list(_problem_lines(result))):
        yield from lines[:_MAX_LINES]
        if len(lines) > _MAX_LINES:
            yield f"... and {len(lines) - _MAX_LINES} lines more in {output / EXPLANATION}"
    yield f"files: {output}/<{result.reach.noun}>/, {output / EXPLANATION}"
    if any(node.processes for node in result.nodes):
        yield f"verdict ({explanation.level}): {explanation.statement}"


def as_json(result: Gathered, explanation: Explanation, output: Path, status: ExitCode) -> dict[str, Any]:
    """Return the same for a program, as JSON values."""
    return {
        "exit_code": int(status),
        **result.reach.identity,
        "output_dir": str(output),
        "explanation": EXPLANATION,
        "nodes": [
            {
                "node": node.node,
                "exit_code": node.status,
                "folder": str(node.folder),
                "files_visible": node.visible,
                "files": list(node.files),
                "processes": [
                    {
                        "pid": seen.process.pid,
                        "title": seen.process.title,
                        "role": seen.process.role,
                        "ranks": dict(seen.process.ranks),
                        "states": [moment.state for moment in seen.in_order()] + [""] * seen.gone,
                    }
                    for seen in node.processes
                ],
                "problems": [vars(problem) for problem in node.problems],
            }
            for node in result.nodes
        ],
        "verdict": explanation.to_json(),
    }


def _process_lines(result: Gathered) -> Iterator[str]:
    width = max(len(node.node) for node in result.nodes)
    for node in result.nodes:
        if not node.processes:
            yield f"{node.node:<{width}}  {describe(node.status, 0)}"
        for seen in node.processes:
            process = seen.process
            rank = " ".join(f"{name.upper()}{number}" for name, number in process.ranks.items()) or process.role
            yield f"{node.node:<{width}}  {rank:<12} pid {process.pid:<8} {_doing(seen)}"


def _problem_lines(result: Gathered) -> Iterator[str]:
    for problem in (problem for node in result.nodes for problem in node.problems):
        yield f"{problem.what}: {problem.why}"
        if problem.next:
            yield f"  next: {problem.next}"


def _doing(seen: Seen) -> str:
    """Return the states and innermost frames of a process's main thread at several looks, each once."""
    doings = [
        f"{moment.state or '-'}  {moment.frames[0] if moment.frames else moment.problem or 'no Python frame'}"
        for moment in seen.in_order()
    ]
    return "; ".join(dict.fromkeys([*doings, *(["-  it has ended"] if seen.gone else [])]))
