"""Read what a node answered, or tell from what Slurm and the node said why there is no answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_crashkit.collect.slurm_steps import ERRORS, NodeRun
from sglang_crashkit.model.snapshot import Problem

#: The name that says in an answer whether debuggers were still to be run.
PENDING = "debuggers_pending"

#: What stands in the place of the reason where Slurm only says that something ended.
_EMPTY_WORDS = (
    "Exited with exit code",
    "Terminating StepId",
    "Terminating Job Step",
    "Job step aborted",
    "launch/slurm",
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


@dataclass(frozen=True)
class Answer:
    """What a node answered.

    Attributes:
        node: the node's name.
        document: the JSON object that the collector printed there, None where it printed none.
        problem: why there is none, or not all.
    """

    node: str
    document: dict[str, Any] | None
    problem: Problem | None = None


def read_answer(run: NodeRun, job_id: str, *, needed: str) -> Answer:
    """Return the answer in what a node printed.

    Args:
        run: what became of the command.
        job_id: the job, for the next step.
        needed: a name that the answer's JSON object has; a container may print other things before it.
    """
    answers = find_documents(run.output.decode(errors="replace"), needed)
    last = next(answers, None)
    if last is None:
        return Answer(run.node, None, why_silent(run, job_id))
    what = f"native stacks of node {run.node}"
    if "error" in last and (earlier := next(answers, None)) is not None:
        return Answer(run.node, earlier, Problem(what, str(last["error"]), str(last.get("next") or "")))
    if last.get(PENDING) is True:
        why = run.problem or f"the collector ended there with status {run.status}"
        following = "raise --node-timeout, or leave the debuggers out: --no-native" if run.late else ""
        return Answer(run.node, last, Problem(what, f"the debuggers had not ended: {why}", following))
    return Answer(run.node, last)


def find_documents(text: str, needed: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in `text` that begin a line and have the name `needed`, the last one first."""
    decoder = json.JSONDecoder()
    end = len(text)
    while end > 0:
        # One that is indented has no other brace at the beginning of a line.
        line = text.rfind("\n{", 0, end)
        opened, end = line + 1, line
        if not text.startswith("{", opened):
            continue
        try:
            value, _end = decoder.raw_decode(text, opened)
        except (ValueError, RecursionError):
            continue
        if needed in value:
            yield value


def why_silent(run: NodeRun, job_id: str) -> Problem:
    """Return why a node gave no answer, with the step that helps."""
    what = f"node {run.node}"
    said = reason_in(run.errors)
    for pattern, why, following in _REASONS:
        if re.search(pattern, said):
            return Problem(what, why.format(said=said), following.format(job=job_id, node=run.node))
    if run.late:
        why = f"{run.problem}{f': {said}' if said else ''}"
        return Problem(what, why, f"raise --node-timeout, or ask Slurm: scontrol show node {run.node}")
    if run.problem:
        return Problem(what, run.problem)
    status = f"the collector ended there with status {run.status} and without a result"
    return Problem(what, f"{status}{f': {said}' if said else ''}", f"read all it said: {run.node}/{ERRORS}")


def reason_in(errors: str) -> str:
    """Return the line of what was said that tells the most: the first that Slurm calls an error, else the last."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    lines = [line for line in lines if not any(words in line for words in _EMPTY_WORDS)]
    telling = [line for line in lines if any(re.search(pattern, line) for pattern, _why, _next in _REASONS)]
    chosen = (telling or lines[-1:] or [""])[0]
    return _MARKS.sub("", chosen)[:_WIDEST]
