"""What Slurm is asked for; what becomes of it on a real Slurm is in ``test/slurm/test_steps.py``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_crashkit.collect.slurm import Job, Limits, NodeRun, client_environ, find_job, run_steps, step_command
from sglang_crashkit.errors import CrashkitError, UsageError

JOB = Job("4712", "4711_3", ("gpu-a01", "gpu-a02"))
TOOL = ["python3", "-m", "sglang_crashkit", "collect"]


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (None, []),
        ("sglang_{job_id}_{node}", ["--container-name=sglang_4712_gpu-a02"]),
        ("sglang:exec", ["--container-name=sglang:exec"]),
    ],
)
def test_a_step_runs_once_on_the_one_node(container: str | None, expected: list[str]) -> None:
    argv = step_command(JOB, "gpu-a02", TOOL, step="look", container=container)
    assert argv[:6] == ["srun", "--overlap", "--jobid=4712", "--nodelist=gpu-a02", "--nodes=1", "--ntasks=1"]
    assert [word for word in argv[6:] if word != "--job-name=look-gpu-a02"] == [*expected, *TOOL]


@pytest.mark.parametrize("pattern", ["{rank}", "{}", "{0}", "{node", "node}", "{node.__class__}", "{job_id[0]}"])
def test_a_container_pattern_with_other_braces_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="is not a pattern of a container's name"):
        step_command(JOB, "gpu-a01", TOOL, step="look", container=pattern)


@pytest.mark.parametrize("name", ["", "x", "-1", "12;reboot", "12_", "12 13", "12,13", "--help"])
def test_what_is_no_job_id_is_never_given_to_slurm(name: str) -> None:
    with pytest.raises(UsageError, match="is not the id of a Slurm job"):
        find_job(name)


def test_where_there_is_no_slurm_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CrashkitError, match="Slurm does not answer: squeue: No such file or directory"):
        find_job("12")


def test_a_jobs_environment_gives_its_options_to_no_step() -> None:
    kept = {"PATH": os.defpath, "SLURM_CONF": "/etc/slurm/slurm.conf", "SGLANG_X": "1"}
    foreign = dict.fromkeys(("SLURM_NTASKS", "SLURM_JOB_ID", "SRUN_CPUS_PER_TASK", "SQUEUE_FORMAT"), "8")
    assert client_environ(kept | foreign) == kept


@pytest.mark.parametrize(("argv", "is_cancelled"), [(["sleep", "600"], True), (["/no/srun"], True), (["true"], False)])
def test_the_step_of_an_unanswering_node_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], is_cancelled: bool
) -> None:
    # GIVEN a stand-in for what is asked which step is to be cancelled
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '7.1|look-n1'\necho '7.2|look-n2'\n")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/cancelled\n')
    for name in ("squeue", "scancel"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    ended: list[NodeRun] = []
    limits = Limits(1, 60.0 if argv == ["true"] else 0.2)
    job, output = Job("7", "7", ("n1",)), tmp_path / "out"
    assert run_steps(job, {"n1": argv}, ended.append, step="look", output=output, limits=limits) is None
    assert [(run.node, run.status) for run in ended] == [("n1", None if is_cancelled else 0)]
    cancelled = tmp_path / "cancelled"
    assert cancelled.exists() == is_cancelled
    assert not is_cancelled or cancelled.read_text() == "--signal=KILL 7.1\n"
