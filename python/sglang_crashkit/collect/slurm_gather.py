"""Run the collector on every node of a Slurm job, and take in what the nodes answer.

A node's answer is one JSON object, with its snapshots in it. It comes through srun's standard output, so that nothing
depends on a file system that all nodes and containers share; where a node's files cannot be seen here, the snapshots
are written again. They are merged as the answers come, and not kept.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_crashkit.analysis.sightings import Seen, Sightings
from sglang_crashkit.collect.slurm import ERRORS, Job, Limits, NodeRun, run_steps, step_command
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.kernel.private_files import write_json
from sglang_crashkit.model import snapshot
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem

#: Words with which Slurm only says that something ended.
_EMPTY_WORDS = re.compile(
    r"Exited with exit code|Terminating StepId|Terminating Job Step|Job step aborted|launch/slurm"
)
#: Slurm's marks before a message: the program, the node, the task, the level.
_MARKS = re.compile(r"^(?:(?:srun|slurmstepd(?:-[\w.-]+)?|slurmd(?:-[\w.-]+)?): )?(?:error: |fatal: )?")
_WIDEST = 300
#: Words in what was said, why there is no answer, and what to do about it. The first that fits tells.
_REASONS = (
    (
        r"execve\(\)|command not found|No module named '?sglang_crashkit|invalid choice: 'collect'"
        r"|can't open file|unrecognized arguments",
        "the collector cannot be run there: {said}",
        "install sglang-crashkit in that environment or container, or name its command with --remote-command",
    ),
    (
        r"unrecognized option '--container",
        "this Slurm has no pyxis: {said}",
        "leave --container-name out, or run it where srun --help names --container-name",
    ),
    (
        r"pyxis|container",
        "its container cannot be entered: {said}",
        "srun --overlap --jobid={job} --nodelist={node} enroot list --fancy",
    ),
    (
        r"Requested node configuration is not available|Invalid node name|DOWN|drained|not in this allocation",
        "Slurm has no such node for the job: {said}",
        "scontrol show node {node}",
    ),
    (
        r"launch failed|Communication connection|Unable to contact|timed out|not responding|Connection refused",
        "it does not answer Slurm: {said}",
        "scontrol show node {node}",
    ),
    (
        r"step creation temporarily disabled|Unable to create step|nodes are busy",
        "Slurm starts no step on it: {said}",
        "squeue --steps --jobs={job}",
    ),
)


@dataclass
class NodeResult:
    """What came of one node."""

    node: str
    status: int | None  # the collector's exit status there, None where it gave no answer
    folder: Path  # where its files are, or would be if they could be seen here
    files: tuple[str, ...] = ()  # names of the files in it
    visible: bool = True  # whether these files can be seen here
    problems: list[Problem] = field(default_factory=list)  # what could not be had, and why
    #: What was seen of each process on it, in the order of their ranks.
    processes: list[Seen] = field(default_factory=list)


@dataclass(frozen=True)
class JobResult:
    """What came of the job."""

    job: Job
    nodes: tuple[NodeResult, ...]  # a result for each of its nodes
    sightings: Sightings  # what all nodes saw, merged
    interrupt: KeyboardInterrupt | None = None  # what ended it before all nodes had answered, None where nothing did


def gather(
    job: Job,
    command: Sequence[str],
    output: Path,
    tell: Callable[[str], None],
    *,
    container: str | None = None,
    options: Sequence[str] = (),
    limits: Limits,
) -> JobResult:
    """Collect on all nodes of a running job.

    Args:
        job: which.
        command: the collector's command and arguments, to which each node's own folder is added.
        output: the folder for the files, with a folder for each node in it.
        tell: called with a line for a person as each node ends.
        container: see `slurm.step_command`, as `options`.
        options: more options of srun.
        limits: how many nodes are asked at the same time, and for how long.

    Raises:
        UsageError: the container's name is no pattern.
    """
    # Two who collect at the same time must not cancel each other's steps.
    step = f"crashkit-{secrets.token_hex(4)}"
    commands = {
        node: step_command(
            job, node, [*command, f"--output-dir={output / node}"], step=step, container=container, options=options
        )
        for node in job.nodes
    }
    results: dict[str, NodeResult] = {}
    sightings = Sightings()

    def take_in(run: NodeRun) -> None:
        if run.node in results:
            return
        result, rounds = _read(run, job, output / run.node)
        results[run.node] = result
        for one in rounds:
            sightings.add(one)
        if not run.problem.startswith("interrupted"):
            count = len({(seen.pid, seen.start_ticks) for one in rounds for seen in one.processes})
            so_far = f"{len(results)} of {len(job.nodes)} nodes, {run.secs:.0f} s"
            tell(f"{run.node}: {describe(result.status, count)} ({so_far})")

    interrupt = run_steps(job, commands, take_in, step=step, output=output, limits=limits)
    for seen in sightings.processes():
        results[seen.process.host].processes.append(seen)
    for result in results.values():
        result.processes.sort(key=_by_rank)
    return JobResult(job, tuple(results[node] for node in job.nodes), sightings, interrupt)


def describe(status: int | None, processes: int) -> str:
    """Return in a few words what came of a node, by its collector's exit status, and of how many processes."""
    if status is None:
        return "no answer"
    if not processes:
        return "no process of SGLang" if status == ExitCode.NOTHING else "the collector failed there"
    return f"{processes} process{'' if processes == 1 else 'es'}"


def find_answer(output: str) -> dict[str, Any] | None:
    """Return the JSON object of a collector on the last line of `output` that is one; containers print around it."""
    for line in reversed(output.split("\n")):
        if line.startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                document: dict[str, Any] = json.loads(line)
                if "exit_code" in document:
                    return document
    return None


def why_silent(run: NodeRun, job_id: str) -> Problem:
    """Return why a node gave no answer, with the step that helps."""
    what, said = f"node {run.node}", _telling_line(run.errors)
    for pattern, why, following in _REASONS:
        if re.search(pattern, said):
            return Problem(what, why.format(said=said), following.format(job=job_id, node=run.node))
    said = f": {said}" if said else ""
    if run.late:
        following = f"raise --node-timeout or --timeout, or ask Slurm: scontrol show node {run.node}"
        return Problem(what, f"{run.problem}{said}", following)
    if run.problem:
        return Problem(what, run.problem)
    status = f"the collector ended there with status {run.status} and without a result"
    return Problem(what, f"{status}{said}", f"read all it said: {run.node}/{ERRORS}")


def _telling_line(errors: str) -> str:
    """Return the line of what was said that tells the most: the first that has a known reason, else the last."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not _EMPTY_WORDS.search(line)]
    telling = [line for line in lines if any(re.search(pattern, line) for pattern, _why, _next in _REASONS)]
    return _MARKS.sub("", (telling or lines[-1:] or [""])[0])[:_WIDEST]


def _read(run: NodeRun, job: Job, folder: Path) -> tuple[NodeResult, list[NodeSnapshot]]:
    """Return what came of a node, and its snapshots."""
    document = find_answer(run.output)
    if document is None:
        return NodeResult(run.node, None, folder, problems=[why_silent(run, job.job_id)]), []
    status = document["exit_code"]
    result = NodeResult(run.node, status if isinstance(status, int) else ExitCode.FAILED, folder)
    rounds: list[NodeSnapshot] = []
    try:
        result.files = tuple(_files_in(document))
        rounds += (_renamed(snapshot.from_json(entry), run.node) for entry in document.get("rounds", []))
        result.visible = all((folder / name).is_file() for name in result.files)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        result.status = ExitCode.PARTIAL
        result.problems.append(
            Problem(f"a snapshot of node {run.node}", str(error), "install the same release of the kit")
        )
    found = dict.fromkeys(problem for one in rounds for problem in one.problems)
    result.problems += [replace(problem, what=f"node {run.node}: {problem.what}") for problem in found]
    # Where there is nothing to collect, that is the answer.
    if "error" in document and status != ExitCode.NOTHING:
        result.problems.append(Problem(f"node {run.node}", str(document["error"]), str(document.get("next") or "")))
    if not result.visible:
        result.problems += _write_here(run.node, rounds, folder, str(document.get("output_dir") or folder))
    return result, rounds


def _files_in(document: Mapping[str, Any]) -> list[str]:
    of_processes = [name for process in document.get("processes", []) for name in process["files"]]
    return [str(name) for name in (*document.get("snapshots", []), *of_processes)]


def _renamed(one: NodeSnapshot, node: str) -> NodeSnapshot:
    """Return a snapshot with Slurm's name of its node, which in a container is not the host's name."""
    if one.host == node and all(process.host == node for process in one.processes):
        return one
    return replace(one, host=node, processes=tuple(replace(process, host=node) for process in one.processes))


def _write_here(node: str, rounds: Sequence[NodeSnapshot], folder: Path, where: str) -> list[Problem]:
    """Write the snapshots of a node whose files, in folder `where` on it, cannot be seen here.

    Returns:
        What is missing nevertheless.
    """
    why = f"they are where the collector ran, in {where}, which cannot be seen here"
    following = "name a folder that the nodes and their containers share with --output-dir"
    problems = [Problem(f"the text files of node {node}", why, following)]
    try:
        for number, one in enumerate(rounds, start=1):
            write_json(folder / f"snapshot.{number}.json", one.to_json())
    except OSError as error:
        problems.append(Problem(f"the snapshots of node {node}", f"{error}"))
    return problems


def _by_rank(seen: Seen) -> tuple[bool, list[tuple[str, int]], int]:
    return not seen.process.ranks, sorted(seen.process.ranks.items()), seen.process.pid
