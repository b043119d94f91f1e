"""Run the collector on every node of a Slurm job, and gather what the nodes answer.

The answer, with the snapshots in it, comes through srun's standard output, so that nothing depends on a file system
that all nodes and containers share; of two, the last that came whole counts (see `slurm_answer`). Where the node's
files cannot be seen here, the snapshots are written again. Each node has merged what its snapshots show; of all nodes
that is merged here as the answers come, and no snapshot is kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_crashkit.analysis import sightings_json
from sglang_crashkit.analysis.sightings import Seen, Sightings
from sglang_crashkit.collect.slurm_answer import read_answer
from sglang_crashkit.collect.slurm_job import Job, step_command
from sglang_crashkit.collect.slurm_steps import NodeRun, Steps
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.kernel.private_files import write_json
from sglang_crashkit.model import snapshot
from sglang_crashkit.model.snapshot import NodeSnapshot, Problem


@dataclass(frozen=True)
class Request:
    """What is to be run on the nodes.

    Attributes:
        output: the folder for the files, with a folder for each node in it.
        command: the collector's command and arguments, to which each node's own folder is added.
        container: a pattern of the name of each node's container, None for none; see `slurm.expand_pattern`.
        options: more options of srun.
        at_once: how many nodes are asked at the same time.
        deadline_secs: the longest that a node may take, in seconds.
    """

    output: Path
    command: Sequence[str]
    container: str | None = None
    options: Sequence[str] = ()
    at_once: int = 32
    deadline_secs: float = 180.0


@dataclass(frozen=True)
class NodeResult:
    """What came of one node.

    Attributes:
        node: the node's name.
        status: the collector's exit status there, None where it gave no answer.
        processes: what was seen of each process on it, in the order of their ranks.
        folder: where its files are, or would be if they could be seen here.
        files: names of the files in it.
        visible: whether these files can be seen here.
        problems: what could not be had, and why.
    """

    node: str
    status: int | None
    processes: tuple[Seen, ...] = ()
    folder: Path = field(default_factory=Path)
    files: tuple[str, ...] = ()
    visible: bool = True
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class JobResult:
    """What came of the job.

    Attributes:
        job: which.
        nodes: a result for each of its nodes.
        sightings: what all nodes saw, merged.
        interrupt: what ended it before all nodes had answered, None where nothing did.
    """

    job: Job
    nodes: tuple[NodeResult, ...]
    sightings: Sightings
    interrupt: KeyboardInterrupt | None = None


def gather(job: Job, request: Request, tell: Callable[[str], None]) -> JobResult:
    """Collect on all nodes of `job`.

    Args:
        job: a running job.
        request: what is to be run.
        tell: called with a line for a person as each node ends.

    Raises:
        UsageError: the container's name is no pattern.
    """
    # Two who collect at the same time must not cancel each other's steps.
    step = f"crashkit-{secrets.token_hex(4)}"
    folders = {node: request.output / node for node in job.nodes}
    commands = {node: _command(job, request, node, step) for node in job.nodes}
    steps = Steps(job, step=step, folders=folders, deadline_secs=request.deadline_secs, at_once=request.at_once)
    results: dict[str, NodeResult] = {}
    sightings = Sightings()

    def take_in(run: NodeRun) -> None:
        if run.node in results:
            return
        result, seen = _result_of(run, job, folders[run.node])
        results[run.node] = result
        sightings.merge(seen)
        if steps.interrupt is None:
            tell(f"{run.node}: {describe(result)} ({len(results)} of {len(job.nodes)} nodes, {run.secs:.0f} s)")

    steps.run(commands, take_in)
    return JobResult(job, tuple(results[node] for node in job.nodes), sightings, steps.interrupt)


def describe(result: NodeResult) -> str:
    """Return in a few words what came of a node."""
    if result.status is None:
        return "no answer"
    if not result.processes:
        return "no process of SGLang" if result.status == ExitCode.NOTHING else "the collector failed there"
    count = len(result.processes)
    return f"{count} process{'' if count == 1 else 'es'}"


def _command(job: Job, request: Request, node: str, step: str) -> list[str]:
    command = [*request.command, "--output-dir", str(request.output / node)]
    return step_command(job, node, command, step=step, container=request.container, options=request.options)


def _result_of(run: NodeRun, job: Job, folder: Path) -> tuple[NodeResult, Sightings]:
    answer = read_answer(run, job.job_id, needed="exit_code")
    problems = (answer.problem,) if answer.problem else ()
    if answer.document is None:
        return NodeResult(run.node, None, folder=folder, problems=problems), Sightings()
    result, sightings = read_document(run.node, answer.document, folder)
    if problems:
        result = replace(result, status=_not_all(result.status), problems=(*result.problems, *problems))
    return result, sightings


def _not_all(status: int | None) -> int | None:
    return ExitCode.PARTIAL if status == ExitCode.DONE else status


def read_document(node: str, document: Mapping[str, Any], folder: Path) -> tuple[NodeResult, Sightings]:
    """Return the result in the JSON object that the collector printed on a node, and what was seen there."""
    status = document.get("exit_code")
    status = status if isinstance(status, int) else ExitCode.FAILED
    files = tuple(_files_in(document))
    visible = all((folder / name).is_file() for name in files)
    merged = _merged_there(node, document)
    # What the node has merged and what is in its files here need not be read once more.
    rounds, problems = _read_rounds(node, document) if merged is None or not visible else ([], [])
    status = ExitCode.PARTIAL if problems else status
    sightings = merged or Sightings.of(rounds)
    problems += [replace(problem, what=f"node {node}: {problem.what}") for problem in sightings.problems()]
    # Where there is nothing to collect, that is the answer.
    if "error" in document and status != ExitCode.NOTHING:
        problems.append(Problem(f"node {node}", str(document["error"]), str(document.get("next") or "")))
    if not visible:
        problems += _write_here(node, rounds, folder, str(document.get("output_dir") or folder))
    processes = sorted(sightings.processes(), key=_by_rank)
    return NodeResult(node, status, tuple(processes), folder, files, visible, tuple(problems)), sightings


def _merged_there(node: str, document: Mapping[str, Any]) -> Sightings | None:
    """Return what a node has merged, None where its snapshots must be read instead."""
    try:
        merged = sightings_json.from_json(document.get("sightings"))
    except ValueError:
        return None
    # In a container that hides Slurm's name of the node, it has merged under another name.
    hosts = {*merged.rounds, *(seen.process.host for seen in merged.processes())}
    return merged if hosts <= {node} else None


def _read_rounds(node: str, document: Mapping[str, Any]) -> tuple[list[NodeSnapshot], list[Problem]]:
    rounds, problems = [], []
    for entry in document.get("rounds") or []:
        try:
            one = snapshot.parse(entry) if isinstance(entry, str) else snapshot.from_json(entry)
            rounds.append(renamed(one, node))
        except ValueError as error:
            problems.append(Problem(f"a snapshot of node {node}", str(error), "install the same release of the kit"))
    return rounds, problems


def _by_rank(seen: Seen) -> tuple[bool, list[tuple[str, int]], int]:
    return not seen.process.ranks, sorted(seen.process.ranks.items()), seen.process.pid


def _files_in(document: Mapping[str, Any]) -> Iterator[str]:
    yield from (str(name) for name in document.get("snapshots") or [])
    for process in document.get("processes") or []:
        yield from (str(name) for name in process.get("files") or [])


def _write_here(node: str, rounds: Sequence[NodeSnapshot], folder: Path, where: str) -> list[Problem]:
    """Write the snapshots of a node whose files, in folder `where` on it, cannot be seen here.

    Returns:
        What is missing nevertheless.
    """
    problems = [
        Problem(
            f"the text files of node {node}",
            f"they are where the collector ran, in {where}, which cannot be seen here",
            "name a folder that the nodes and their containers share with --output-dir",
        )
    ]
    try:
        for number, one in enumerate(rounds, start=1):
            write_json(folder / f"snapshot.{number}.json", one.to_json())
    except OSError as error:
        problems.append(Problem(f"the snapshots of node {node}", f"{error}"))
    return problems


def renamed(one: NodeSnapshot, node: str) -> NodeSnapshot:
    """Return a snapshot with Slurm's name of its node, which in a container is not the host's name."""
    return replace(one, host=node, processes=tuple(replace(process, host=node) for process in one.processes))
