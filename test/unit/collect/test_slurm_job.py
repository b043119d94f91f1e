from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_crashkit.collect.slurm_job import Job, client_environ, expand_pattern, find_job, step_command
from sglang_crashkit.errors import CrashkitError, UsageError

JOB = Job("4712", "4711_3", ("gpu-a01", "gpu-a02"))
TOOL = ["python3", "-m", "sglang_crashkit", "collect"]


def test_a_step_runs_once_on_the_one_node_beside_what_the_job_runs() -> None:
    assert step_command(JOB, "gpu-a02", TOOL, step="look") == [
        "srun",
        "--overlap",
        "--jobid=4712",
        "--nodelist=gpu-a02",
        "--nodes=1",
        "--ntasks=1",
        "--job-name=look-gpu-a02",
        *TOOL,
    ]


def test_a_step_enters_the_container_that_the_workers_of_that_node_run_in() -> None:
    argv = step_command(JOB, "gpu-a01", TOOL, step="look", container="sglang_{job_id}_{node}")
    assert argv[-len(TOOL) :] == TOOL
    assert [word for word in argv if word.startswith("--container")] == ["--container-name=sglang_4712_gpu-a01"]


def test_a_name_without_a_pattern_is_every_nodes() -> None:
    argv = step_command(JOB, "gpu-a01", TOOL, step="look", container="sglang:exec")
    assert "--container-name=sglang:exec" in argv


def test_more_options_of_srun_stand_before_the_command() -> None:
    argv = step_command(JOB, "gpu-a01", TOOL, step="look", options=["--container-mounts=/logs:/logs", "--mem=0"])
    assert argv[-len(TOOL) - 2 :] == ["--container-mounts=/logs:/logs", "--mem=0", *TOOL]


@pytest.mark.parametrize("pattern", ["{rank}", "{}", "{0}", "{node", "node}", "{node.__class__}", "{job_id[0]}"])
def test_a_pattern_with_other_braces_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="is not a pattern of a container's name"):
        expand_pattern(pattern, JOB, "gpu-a01")


@pytest.mark.parametrize("name", ["", "x", "-1", "12;reboot", "12_", "12 13", "12,13", "--help"])
def test_what_is_no_id_of_a_job_is_never_given_to_slurm(name: str) -> None:
    with pytest.raises(UsageError, match="is not the id of a Slurm job"):
        find_job(name)


def test_where_there_is_no_slurm_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CrashkitError, match="squeue cannot be run: No such file or directory"):
        find_job("12")


def test_the_environment_of_a_job_gives_its_options_to_no_step() -> None:
    environ = {"PATH": os.defpath, "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    environ |= {"SLURM_MEM_PER_NODE": "100", "SRUN_CPUS_PER_TASK": "4", "SQUEUE_FORMAT": "%i", "SGLANG_X": "1"}
    assert client_environ(environ) == {
        "PATH": os.defpath,
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SGLANG_X": "1",
    }
