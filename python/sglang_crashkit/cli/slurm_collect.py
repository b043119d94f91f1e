"""The part of ``sglang-crashkit collect`` that asks every node of a Slurm job."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_crashkit.cli.argument_types import positive
from sglang_crashkit.cli.ending import Terminated
from sglang_crashkit.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from sglang_crashkit.analysis.explain import Explanation
    from sglang_crashkit.analysis.sightings import Seen
    from sglang_crashkit.collect.slurm_gather import JobResult
    from sglang_crashkit.model.sample import Sample


_AT_ONCE, _NODE_SECS = 32, 300
#: More lines, of processes or of what is missing, are in the file only.
_MOST_LINES = 100
_EXPLANATION = "explanation.txt"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    group = parser.add_argument_group("on every node of a Slurm job")
    group.add_argument("--slurm-job", metavar="ID", help="on each node of this job, one result for all")
    group.add_argument(
        "--container-name",
        metavar="PATTERN",
        help="in each node's pyxis container of this name, such as sglang_{job_id}_{node}",
    )
    group.add_argument("--fan-out", metavar="N", type=positive, default=_AT_ONCE, help=f"nodes at a time ({_AT_ONCE})")
    group.add_argument(
        "--node-timeout",
        metavar="S",
        type=positive,
        default=_NODE_SECS,
        help=f"seconds until a node is given up ({_NODE_SECS})",
    )
    group.add_argument(
        "--remote-command",
        metavar="COMMAND",
        help='the kit on the nodes (this Python; in a container "python3 -m sglang_crashkit")',
    )
    group.add_argument(
        "--srun-option",
        metavar="OPTION",
        action="append",
        default=[],
        help="one more option of srun, as --srun-option=...",
    )

    # What such a command runs on each node; see `node_answer`.
    group.add_argument("--gathered-within", metavar="S", type=positive, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, output: Path, wait: Callable[[], None], say: Callable[[str], None]) -> ExitCode:
    """Collect on all nodes, and print one result.

    Args:
        args: those of ``collect``.
        output: the folder for the files.
        wait: waits for as long as was asked for.
        say: prints a line for a person.

    Raises:
        UsageError: an argument is for one machine only, or makes no sense.
        NothingToDoError: there is no such job, it does not run, or nothing of SGLang runs in it.
        CrashkitError: Slurm is not here or does not answer.
    """
    from sglang_crashkit.analysis.explain import explain
    from sglang_crashkit.collect.slurm_gather import Request, gather
    from sglang_crashkit.collect.slurm_job import find_job

    if args.pid is not None:
        raise UsageError("--pid names a process of one machine", next_step="leave it out, or leave --slurm-job out")
    output = output.absolute()
    request = Request(
        output=output,
        command=_remote_command(args),
        container=args.container_name,
        options=args.srun_option,
        at_once=args.fan_out,
        deadline_secs=args.node_timeout,
    )
    # What is wrong with it is better told before a long wait than after it.
    find_job(args.slurm_job)
    wait()
    job = find_job(args.slurm_job)
    say(f"collecting on {len(job.nodes)} nodes of job {job.name}, {args.fan_out} at a time: {', '.join(job.nodes[:8])}")
    result = gather(job, request, say)
    status, explanation = _status_of(result), explain(result.sightings)
    _write_explanation(result, explanation, output, say)
    if args.json:
        print(json.dumps(_as_json(result, output, status) | {"verdict": explanation.to_json()}, indent=2))
    else:
        for line in _as_text(result, explanation, output):
            print(line)
    if result.interrupt is not None:
        say("interrupted; what was collected until then is kept")
    return status


def _remote_command(args: argparse.Namespace) -> list[str]:
    if args.remote_command is not None:
        try:
            command = shlex.split(args.remote_command)
        except ValueError as error:
            raise UsageError(f"--remote-command {args.remote_command}: {error}") from None
        if not command:
            raise UsageError("--remote-command is empty", next_step="leave it out")
    elif args.container_name is not None:
        # The image has a Python of its own; its path is not this one's.
        command = ["python3", "-m", "sglang_crashkit"]
    else:
        command = [sys.executable, "-m", "sglang_crashkit"]
    command += [
        "collect",
        "--json",
        f"--gathered-within={args.node_timeout}",
        f"--snapshots={args.snapshots}",
        f"--interval={args.interval:g}",
    ]
    command += ["--all"] if args.all else []
    command += ["--routers"] if args.routers else []
    command += ["--any-user"] if args.any_user else []
    command += [f"--user={args.user}"] if args.user is not None else []
    # An older kit on the nodes would run the debuggers unless it is told not to.
    return [*command, "--native" if args.native else "--no-debugger"]


def _status_of(result: JobResult) -> ExitCode:
    if result.interrupt is not None:
        return ExitCode.TERMINATED if isinstance(result.interrupt, Terminated) else ExitCode.INTERRUPTED
    statuses = {node.status for node in result.nodes}
    if statuses == {ExitCode.NOTHING}:
        return ExitCode.NOTHING
    # A node that nothing of SGLang runs on is no failure: the router may have one of its own.
    if statuses <= {ExitCode.DONE, ExitCode.NOTHING}:
        return ExitCode.DONE if all(node.visible for node in result.nodes) else ExitCode.PARTIAL
    return ExitCode.PARTIAL if statuses & {ExitCode.DONE, ExitCode.PARTIAL} else ExitCode.FAILED


def _write_explanation(result: JobResult, explanation: Explanation, output: Path, say: Callable[[str], None]) -> None:
    """Write all that is told of the job, with the merged stacks of all its ranks."""
    from sglang_crashkit.analysis.explanation_text import format_explanation
    from sglang_crashkit.kernel.private_files import make_private_folder, write_private

    lines = [*_process_lines(result), *_problem_lines(result), ""]
    lines += format_explanation(explanation, result.sightings.tree)
    try:
        make_private_folder(output)
        write_private(output / _EXPLANATION, "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
    except OSError as error:
        say(f"cannot write {output / _EXPLANATION}: {error.strerror or error}")


def _as_text(result: JobResult, explanation: Explanation, output: Path) -> Iterator[str]:
    yield f"job {result.job.name} on {len(result.nodes)} nodes"
    for lines in (list(_process_lines(result)), list(_problem_lines(result))):
        yield from lines[:_MOST_LINES]
        if len(lines) > _MOST_LINES:
            yield f"... and {len(lines) - _MOST_LINES} lines more in {output / _EXPLANATION}"
    yield f"files: {output}/<node>/, {output / _EXPLANATION}"
    if any(node.processes for node in result.nodes):
        yield f"verdict ({explanation.level}): {explanation.statement}"


def _process_lines(result: JobResult) -> Iterator[str]:
    from sglang_crashkit.collect.slurm_gather import describe

    width = max(len(node.node) for node in result.nodes)
    for node in result.nodes:
        if not node.processes:
            yield f"{node.node:<{width}}  {describe(node)}"
        for seen in node.processes:
            who = f"{rank_label(seen.process):<12} pid {seen.process.pid:<8}"
            yield f"{node.node:<{width}}  {who} {_doing(seen)}"


def _problem_lines(result: JobResult) -> Iterator[str]:
    for problem in (problem for node in result.nodes for problem in node.problems):
        yield f"{problem.what}: {problem.why}"
        if problem.next:
            yield f"  next: {problem.next}"


def rank_label(process: Sample) -> str:
    """Return the rank of a process, such as ``DP0 TP3``; its role where it has none."""
    return " ".join(f"{name.upper()}{number}" for name, number in process.ranks.items()) or process.role


def _doing(seen: Seen) -> str:
    """Return the states and innermost frames of a process's main thread at several looks, each once."""
    doings = [
        f"{sight.state or '-'}  {sight.frames[0] if sight.frames else sight.problem or 'no Python frame'}"
        for sight in seen.in_order()
    ]
    return "; ".join(dict.fromkeys([*doings, *(["-  it has ended"] if seen.gone else [])]))


def _as_json(result: JobResult, output: Path, status: ExitCode) -> dict[str, Any]:
    return {
        "exit_code": int(status),
        "job": result.job.name,
        "output_dir": str(output),
        "explanation": _EXPLANATION,
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
                        "states": [sight.state for sight in seen.in_order()] + [""] * seen.gone,
                    }
                    for seen in node.processes
                ],
                "problems": [vars(problem) for problem in node.problems],
            }
            for node in result.nodes
        ],
    }
