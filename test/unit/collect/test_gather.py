"""What the nodes of a job answer, and why there is no answer."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.capture.tools import ToolRun
from sglang_crashkit.collect import gather as gathering
from sglang_crashkit.collect.gather import Gathered, gather, why_silent
from sglang_crashkit.collect.via import hosts_via, job_via
from sglang_crashkit.errors import UsageError
from unit.secret_forms import FORMS, holds_secret
from unit.support.targets import make_tool

#: What the srun of Slurm 22.05 prints, of which the last line never is the reason.
NO_TOOL = """slurmstepd-n2: error: execve(): sglang-crashkit: No such file or directory
srun: error: n2: task 0: Exited with exit code 2
"""
NO_MODULE = """/usr/bin/python3: No module named sglang_crashkit
srun: error: n2: task 0: Exited with exit code 1
"""
NO_SLURMD = """srun: error: Task launch for StepId=1.5 failed on node n2: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted
"""
NO_NODE = "srun: error: Unable to create step for job 7: Requested node configuration is not available\n"
#: Pyxis prefixes what it says, and what enroot said.
NO_CONTAINER = """slurmstepd-n2: error: pyxis: couldn't get a running container: sglang_7_n2
slurmstepd-n2: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
srun: error: n2: task 0: Exited with exit code 1
"""
NO_PYXIS = """srun: unrecognized option '--container-name=x'
Try "srun --help" for more information
"""
NO_STEP = "srun: Job 7 step creation still disabled, retrying\n"
#: What carriers and shells print, of which the telling line tells, without the marks before it.
NO_PYTHON = 'error: Internal error occurred: OCI runtime exec failed: "python3": executable file not found in $PATH'
NO_POD = 'Error from server (NotFound): pods "h" not found\n'
NO_CONTAINER_IN_POD = 'Defaulted container "a"\nerror: unable to upgrade connection: container not found ("sglang")\n'
#: Stand-ins for Slurm's clients.
SLURM = {
    "squeue": "case $* in *--steps*) cat {0}/steps;; *) echo '7|7|RUNNING|n[1-2]';; esac",
    "scontrol": "echo n1; echo n2",
    "scancel": 'echo "$@" >{0}/cancelled',
}
LATE = {"status": None, "seconds": 9.0}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder ahead of all others on PATH, with a Slurm that knows one job."""
    for name, script in SLURM.items():
        make_tool(tmp_path / "slurm", script.format(tmp_path / "slurm"), name)
    monkeypatch.setenv("PATH", str(tmp_path / "slurm"), prepend=os.pathsep)
    return tmp_path / "slurm"


@pytest.mark.parametrize(
    ("errors", "fields", "why", "following"),
    [
        (NO_TOOL, {}, "without a result: execve(): sglang-crashkit: No such file", "--remote-command"),
        (NO_MODULE, {}, "/usr/bin/python3: No module named sglang_crashkit", "install sglang-crashkit"),
        (NO_SLURMD, {}, "status 1 and without a result: Task launch for StepId=1.5", "scontrol show node n2"),
        (NO_NODE, {}, "without a result: Unable to create step for job 7", "scontrol show node n2"),
        (NO_CONTAINER, {}, "couldn't get a running container: sglang_7_n2", "n2/srun.log"),
        (NO_PYXIS, {}, "without a result: unrecognized option '--container-name=x'", "leave --container-name out"),
        (NO_STEP, LATE, "no answer within 9 s: Job 7 step creation still disabled, retrying", "--node-timeout"),
        ("sh: 1: python3: not found\n", {}, "without a result: sh: 1: python3: not found", "--remote-command"),
        (NO_PYTHON, {}, "without a result: Internal error occurred: OCI runtime", "--remote-command"),
        (NO_POD, {}, "without a result: (NotFound): pods", "scontrol show node n2"),
        (NO_CONTAINER_IN_POD, {}, "unable to upgrade connection: container not found", "scontrol show node n2"),
        ("me@h: Permission denied (publickey).\n", {}, "Permission denied (publickey).", "BatchMode=yes"),
        ("kex_exchange_identification: Connection closed\n", {}, "kex_exchange", "--fan-out"),
        ("Host key verification failed.\n", {}, "Host key verification failed.", "known_hosts"),
        ("command terminated with exit code 137\n", {}, "status 1 and without a result", "n2/srun.log"),
        ("snapshot 1 of 3\nKilled\n", {}, "without a result: Killed", "n2/srun.log"),
    ],
)
def test_why_a_node_is_silent_is_told_with_what_helps(
    slurm: Path, errors: str, fields: dict[str, Any], why: str, following: str
) -> None:
    done = ToolRun("", "", **{"seconds": 1.0, "errors": errors, "status": 1, **fields})
    problem = why_silent(job_via("7"), "n2", done, 9.0)
    assert problem.what == "node n2"
    assert why in problem.why
    assert following in problem.next


@pytest.mark.parametrize("name", ["", "x", "-1", "12;reboot", "12_", "12 13", "12,13", "--help"])
def test_what_is_no_job_id_is_never_given_to_slurm(name: str) -> None:
    with pytest.raises(UsageError, match="is not the id of a Slurm job"):
        job_via(name)


def test_a_jobs_environment_gives_its_options_to_no_step(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"SLURM_CONF": "/etc/slurm/slurm.conf", "SGLANG_X": "1"}
    foreign = dict.fromkeys(("SLURM_NTASKS", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SQUEUE_FORMAT"), "8")
    for name, value in (kept | foreign).items():
        monkeypatch.setenv(name, value)
    environ = job_via("7").environ
    assert kept.items() <= environ.items()
    assert not foreign.keys() & environ.keys()


def test_the_step_of_a_node_that_is_given_up_is_cancelled_alone(slurm: Path) -> None:
    job = job_via("7")
    steps = {node: job.argv(node, [])[-1].removeprefix("--job-name=") for node in job.nodes}
    (slurm / "steps").write_text(f"7.1|{steps['n1']}\n7.2|{steps['n2']}\n7.3|another\n")
    job.give_up("n2")
    assert (slurm / "cancelled").read_text() == "--signal=KILL 7.2\n"


#: A node that answers.
WELL = ["sh", "-c", "echo '{\"exit_code\": 3}'; echo why >&2; exit 3"]
FOREVER = "import sys\nwhile True: sys.{stream}.write('x' * 9999)"


def gather_of(commands: dict[str, list[str]], output: Path, given_up: list[str]) -> Gathered:
    """Run each command here, in the place of its node."""
    hosts = hosts_via("sh {host}", list(commands))
    here = replace(hosts, argv=lambda node, _command: commands[node], give_up=given_up.append)
    return gather(here, [], output, lambda _line: None, at_once=2, node_secs=2.0)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["sleep", "600"], "no answer within 2 s"),
        (["sh", "-c", "trap '' TERM INT; while :; do sleep 600; done"], "no answer within 2 s"),
        ([sys.executable, "-c", FOREVER.format(stream="stdout")], "printed more than 1 MiB"),
        ([sys.executable, "-c", FOREVER.format(stream="stderr")], "printed more than 1 MiB"),
        (["/no/kubectl"], "/no/kubectl: No such file or directory"),
    ],
    ids=["hangs", "ignores signals", "prints for ever", "complains for ever", "cannot be run"],
)
def test_a_node_that_ends_badly_is_given_up_alone(
    argv: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "MAX_OUTPUT", 1 << 20)
    given_up: list[str] = []
    bad, well = gather_of({"bad": argv, "well": WELL}, tmp_path, given_up).nodes
    assert (bad.status, well.status, given_up) == (None, 3, ["bad"])
    assert problem in bad.problems[0].why
    assert (tmp_path / "well/sh.log").read_text() == "why\n"
    assert (tmp_path / "bad/sh.log").stat().st_size <= 1 << 20


def test_what_a_node_says_beside_its_answer_is_kept_without_secrets(tmp_path: Path) -> None:
    script = "import sys; sys.stderr.write(sys.argv[1])"
    gather_of({"n": [sys.executable, "-c", script, "\n".join(FORMS)]}, tmp_path, [])
    assert not holds_secret((tmp_path / "n/sh.log").read_text())
