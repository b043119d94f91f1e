"""Ask Slurm for a job's nodes, and compose the command that runs something beside the job on one of them.

Only options and formats that squeue(1), scontrol(1) and srun(1) have had since ``srun --overlap`` came (20.11) are
used: ``--json`` has another form in every release.
"""

from __future__ import annotations

import os
import re
import string
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_crashkit.errors import CrashkitError, NothingToDoError, UsageError

#: A job, a task of an array, or a component of a heterogeneous job.
_JOB_ID = re.compile(r"\d+(_\d+|\+\d+)?")
#: One line for each job: the number that srun takes, the one that people see, and the rest.
_FORMAT = "%A|%i|%T|%N"
#: The controller of a busy cluster takes seconds to answer.
_ASK_SECS = 60.0
#: Of the variables that a job's environment holds, which srun would take for options, these say where Slurm is.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER")
_FOREIGN = ("SLURM_", "SRUN_", "SBATCH_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_")


@dataclass(frozen=True)
class Job:
    """A job that runs.

    Attributes:
        job_id: the number that srun takes.
        name: the job's id as it was asked for, such as ``12_3``.
        nodes: the names of its nodes, in Slurm's order.
    """

    job_id: str
    name: str
    nodes: tuple[str, ...]


def find_job(name: str) -> Job:
    """Return the running job with the id `name`.

    Raises:
        UsageError: that is no id, or the id of several jobs.
        NothingToDoError: there is no such job, or it does not run.
        CrashkitError: Slurm is not here or does not answer.
    """
    if not _JOB_ID.fullmatch(name):
        raise UsageError(f"{name!r} is not the id of a Slurm job", next_step="squeue --me")
    done = ask_slurm(["squeue", "--noheader", "--states=all", f"--jobs={name}", f"--format={_FORMAT}"])
    lines = [line.strip().split("|", 3) for line in done.stdout.splitlines() if line.count("|") >= 3]
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        raise CrashkitError(f"squeue says nothing of job {name}: {_last_line(done.stderr)}", next_step="scontrol ping")
    if not lines:
        raise NothingToDoError(f"Slurm knows no job {name}, or no longer", next_step="squeue --me")
    if len(lines) > 1:
        parts = ", ".join(shown for _number, shown, _state, _nodes in lines[:8])
        raise UsageError(f"job {name} is {len(lines)} jobs: {parts}", next_step=f"name one: --slurm-job {lines[0][1]}")
    number, _shown, state, nodes = lines[0]
    if state != "RUNNING" or not nodes:
        raise NothingToDoError(f"job {name} does not run: {state}", next_step=f"scontrol show job {name}")
    return Job(number, name, tuple(_expand(nodes)))


def _expand(nodes: str) -> list[str]:
    """Return the names in a list such as ``n[1-2],m7``."""
    done = ask_slurm(["scontrol", "show", "hostnames", nodes])
    names = done.stdout.split()
    if done.returncode != 0 or not names:
        raise CrashkitError(f"scontrol cannot read the list of nodes {nodes}: {_last_line(done.stderr)}")
    return names


def find_steps(job: Job, name: str) -> list[str]:
    """Return the ids (``12.3``) of the steps of `job` that have this name, none where Slurm does not answer."""
    try:
        done = ask_slurm(["squeue", "--noheader", "--steps", f"--jobs={job.job_id}", "--format=%i|%j"])
    except CrashkitError:
        return []
    pairs = [line.strip().partition("|") for line in done.stdout.splitlines()]
    return [step for step, _bar, its in pairs if its == name]


def kill_steps(steps: Sequence[str]) -> None:
    """Have Slurm kill what runs in `steps`; a node that does not answer does so when it is back."""
    if steps:
        ask_slurm(["scancel", "--signal=KILL", *steps])


def ask_slurm(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's clients and return what it printed.

    Raises:
        CrashkitError: it is not here, or did not answer in time.
    """
    try:
        return subprocess.run(
            list(argv),
            env=client_environ(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_SECS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CrashkitError(f"{argv[0]} did not answer within {_ASK_SECS:g} s", next_step="scontrol ping") from None
    except OSError as error:
        raise CrashkitError(
            f"{argv[0]} cannot be run: {error.strerror}", next_step="run it where Slurm's commands are on PATH"
        ) from error


def client_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what a job's environment would have Slurm's clients do.

    In a job's script ``SLURM_NTASKS``, ``SLURM_MEM_PER_NODE`` and others are options that the step must not have.
    """
    return {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_FOREIGN)}


def expand_pattern(pattern: str, job: Job, node: str) -> str:
    """Return `pattern` with ``{job_id}`` and ``{node}`` replaced.

    Raises:
        UsageError: it has other braces.
    """
    values = {"job_id": job.job_id, "node": node}
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


def step_command(
    job: Job,
    node: str,
    command: Sequence[str],
    *,
    step: str,
    container: str | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """Return the arguments that run `command` on one node, beside what the job runs there.

    Args:
        job: a running job.
        node: one of its nodes.
        command: what to run there.
        step: what the names of its steps on all nodes begin with; see `step_name`.
        container: a pattern of the name of the container to run it in; see `expand_pattern`.
        options: more options of srun.

    Raises:
        UsageError: the pattern is none.
    """
    argv = ["srun", "--overlap", f"--jobid={job.job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
    # Pyxis runs it inside the container where one of that name runs, in the namespaces of the workers.
    argv += [] if container is None else [f"--container-name={expand_pattern(container, job, node)}"]
    return [*argv, f"--job-name={step_name(step, node)}", *options, *command]


def step_name(step: str, node: str) -> str:
    """Return the name of the step on `node`, where `step` names those on all nodes."""
    return f"{step}-{node}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"
