"""Find a Slurm job's nodes, and run a command on each: one ``srun --overlap`` a node.

Only options and formats that squeue(1), scontrol(1) and srun(1) have had since ``srun --overlap`` came (20.11) are
used: ``--json`` has another form in every release.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.capture.tools import ToolRun, run_tool
from sglang_crashkit.collect.gather import Limits, NodeRun, Transport, run_on_nodes
from sglang_crashkit.errors import CrashkitError, NothingToDoError, UsageError

#: What srun and the node say of the step.
ERRORS = "srun.log"
#: A job, a task of an array, or a component of a heterogeneous job.
_JOB_ID = re.compile(r"\d+(_\d+|\+\d+)?")
#: One line for each job: the number that srun takes, the one that people see, and the rest.
_FORMAT = "%A|%i|%T|%N"
#: The controller of a busy cluster takes seconds to answer.
_ASK_SECS = 60.0
#: Of the variables that a job's environment holds, which srun would take for options, these say where Slurm is.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER")
_FOREIGN = ("SLURM_", "SRUN_", "SBATCH_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_")
#: Words with which Slurm only says that something ended.
_NOISE = re.compile(r"Exited with exit code|Terminating StepId|Terminating Job Step|Job step aborted|launch/slurm")
#: Before a message: the program, the node, the task, the level.
_MARKS = re.compile(r"^(?:(?:srun|slurmstepd(?:-[\w.-]+)?|slurmd(?:-[\w.-]+)?): )?(?:error: |fatal: )?")
#: As `gather.Transport.reasons` has them.
_REASONS = (
    (
        r"unrecognized option '--container",
        "this Slurm has no pyxis: {said}",
        "leave --container-name out, or run it where srun --help names --container-name",
    ),
    (
        r"pyxis|container",
        "its container cannot be entered: {said}",
        "srun --overlap --jobid=JOB --nodelist={node} enroot list --fancy",
    ),
    (
        r"Requested node configuration is not available|Invalid node name|DOWN|drained|not in this allocation",
        "Slurm has no such node for the job: {said}",
        "{look}",
    ),
    (
        r"launch failed|Communication connection|Unable to contact|timed out|not responding|Connection refused",
        "it does not answer Slurm: {said}",
        "{look}",
    ),
    (
        r"step creation temporarily disabled|Unable to create step|nodes are busy",
        "Slurm starts no step on it: {said}",
        "squeue --steps --jobs=JOB",
    ),
)


@dataclass(frozen=True)
class Job:
    """A job that runs."""

    job_id: str  # the number that srun takes
    name: str  # the job's id as it was asked for, such as ``12_3``
    nodes: tuple[str, ...]  # the names of its nodes, in Slurm's order


def job_nodes(job: Job, container: str | None = None) -> Transport:
    """Return the nodes of a running job, each to be reached by a step of its own; see `step_command`."""

    def run(
        commands: Mapping[str, Sequence[str]], on_end: Callable[[NodeRun], None], output: Path, limits: Limits
    ) -> KeyboardInterrupt | None:
        # Two who collect at the same time must not cancel each other's steps.
        step = f"crashkit-{secrets.token_hex(4)}"
        steps = {
            node: step_command(job, node, command, step=step, container=container) for node, command in commands.items()
        }
        return run_steps(job, steps, on_end, step=step, output=output, limits=limits)

    return Transport(
        nodes=job.nodes,
        noun="node",
        title=f"job {job.name} on {len(job.nodes)} nodes",
        identity={"job": job.name},
        log=ERRORS,
        returns_files=False,
        reasons=[(pattern, why, following.replace("JOB", job.job_id)) for pattern, why, following in _REASONS],
        noise=_NOISE,
        marks=_MARKS,
        look=lambda node: f"scontrol show node {node}",
        run=run,
    )


def find_job(name: str) -> Job:
    """Return the running job with the id `name`.

    Raises:
        UsageError: that is no id, or the id of several jobs.
        NothingToDoError: there is no such job, or it does not run.
        CrashkitError: Slurm is not here or does not answer.
    """
    if not _JOB_ID.fullmatch(name):
        raise UsageError(f"{name!r} is not the id of a Slurm job", next_step="squeue --me")
    done = _ask_slurm("squeue", "--noheader", "--states=all", f"--jobs={name}", f"--format={_FORMAT}")
    lines = [line.strip().split("|", 3) for line in done.text.splitlines() if line.count("|") >= 3]
    if done.status and "Invalid job id" not in done.errors:
        raise CrashkitError(f"squeue says nothing of job {name}: {_last_line(done.errors)}", next_step="scontrol ping")
    if not lines:
        raise NothingToDoError(f"Slurm knows no job {name}, or no longer", next_step="squeue --me")
    if len(lines) > 1:
        parts = ", ".join(shown for _number, shown, _state, _nodes in lines[:8])
        raise UsageError(f"job {name} is {len(lines)} jobs: {parts}", next_step=f"name one: --slurm-job {lines[0][1]}")
    number, _shown, state, nodes = lines[0]
    if state != "RUNNING" or not nodes:
        raise NothingToDoError(f"job {name} does not run: {state}", next_step=f"scontrol show job {name}")
    # The list of nodes is as in ``n[1-2],m7``.
    done = _ask_slurm("scontrol", "show", "hostnames", nodes)
    if done.status or not done.text.split():
        raise CrashkitError(f"scontrol cannot read the list of nodes {nodes}: {_last_line(done.errors)}")
    return Job(number, name, tuple(done.text.split()))


def find_steps(job: Job, name: str) -> list[str]:
    """Return the ids (``12.3``) of the steps of `job` that have this name, none where Slurm does not answer."""
    try:
        done = _ask_slurm("squeue", "--noheader", "--steps", f"--jobs={job.job_id}", "--format=%i|%j")
    except CrashkitError:
        return []
    pairs = [line.strip().partition("|") for line in done.text.splitlines()]
    return [step for step, _bar, its in pairs if its == name]


def step_name(step: str, node: str) -> str:
    """Return the name of the step on `node`, where `step` names those on all nodes."""
    return f"{step}-{node}"


def step_command(
    job: Job,
    node: str,
    command: Sequence[str],
    *,
    step: str,
    container: str | None = None,
) -> list[str]:
    """Return the arguments that run `command` on one node of a running job, beside what the job runs there.

    The step is called by `step_name`. `container` is a pattern of the name of the pyxis container to run it in, with
    ``{job_id}`` and ``{node}``.

    Raises:
        UsageError: the pattern has other braces.
    """
    argv = ["srun", "--overlap", f"--jobid={job.job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
    # Pyxis runs it inside the container where one of that name runs, in the namespaces of the workers.
    argv += [] if container is None else [f"--container-name={_expand(container, job_id=job.job_id, node=node)}"]
    return [*argv, f"--job-name={step_name(step, node)}", *command]


def run_steps(
    job: Job,
    commands: Mapping[str, Sequence[str]],
    on_end: Callable[[NodeRun], None],
    *,
    step: str,
    output: Path,
    limits: Limits,
) -> KeyboardInterrupt | None:
    """Run the commands that `step_command` made, and cancel the steps, which `step` names, of nodes that are given up.

    See `gather.run_on_nodes` for the rest.
    """

    def cancel(node: str) -> None:
        # Killing srun does not end what it has started on a node.
        _cancel(job, step_name(step, node))

    return run_on_nodes(
        commands, on_end, output=output, log=ERRORS, environ=client_environ(os.environ), limits=limits, give_up=cancel
    )


def _cancel(job: Job, name: str) -> None:
    """Have Slurm kill what runs in a step; a node that does not answer does so when it is back."""
    # With one name for all, the steps of nodes that are still at work would be killed too.
    if steps := find_steps(job, name):
        with contextlib.suppress(CrashkitError):
            _ask_slurm("scancel", "--signal=KILL", *steps)


def _ask_slurm(*argv: str) -> ToolRun:
    """Run one of Slurm's clients and return what it printed.

    Raises:
        CrashkitError: it is not here, or did not answer in time.
    """
    done = run_tool(argv, _ASK_SECS, environ=client_environ(os.environ), apart=True)
    if done.status is None:
        next_step = "scontrol ping" if shutil.which(argv[0]) else "run it where Slurm's commands are on PATH"
        raise CrashkitError(f"Slurm does not answer: {done.reason}", next_step=next_step)
    return done


def client_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what a job's environment would have Slurm's clients do.

    In a job's script ``SLURM_NTASKS``, ``SLURM_MEM_PER_NODE`` and others are options that the step must not have.
    """
    return {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_FOREIGN)}


def _expand(pattern: str, **values: str) -> str:
    try:
        fields = [name for _text, name, _spec, _conversion in string.Formatter().parse(pattern) if name is not None]
        if not set(fields) <= values.keys():
            raise ValueError
        return pattern.format_map(values)
    except (ValueError, LookupError):
        raise UsageError(
            f"{pattern} is not a pattern of a container's name",
            next_step="use {job_id} and {node} in it, such as sglang_{job_id}_{node}",
        ) from None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"
