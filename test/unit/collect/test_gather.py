"""What the nodes of a job answer, and why there is no answer."""

from __future__ import annotations

import json

import pytest

from sglang_crashkit.collect.fan_out import NodeRun
from sglang_crashkit.collect.gather import find_answer, why_silent
from sglang_crashkit.collect.slurm import Job, JobNodes

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
DRAINED = "srun: error: Unable to create step for job 7: Required node not available (down, drained or reserved)\n"
#: Pyxis prefixes what it says, and what enroot said.
NO_CONTAINER = """slurmstepd-n2: error: pyxis: couldn't get a running container: sglang_7_n2
slurmstepd-n2: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
srun: error: n2: task 0: Exited with exit code 1
"""
NO_PYXIS = """srun: unrecognized option '--container-name=x'
Try "srun --help" for more information
"""
NO_STEP = "srun: Job 7 step creation still disabled, retrying\n"
JOB = JobNodes(Job("7", "7", ("n1", "n2")))
LATE = {"status": None, "late": True, "problem": "no answer within 9 s"}


@pytest.mark.parametrize(
    ("errors", "fields", "why", "following"),
    [
        (NO_TOOL, {}, "the collector cannot be run there: execve(): sglang-crashkit: No such file", "--remote-command"),
        (NO_MODULE, {}, "/usr/bin/python3: No module named sglang_crashkit", "install sglang-crashkit"),
        (NO_SLURMD, {}, "it does not answer Slurm: Task launch for StepId=1.5 failed", "scontrol show node n2"),
        (NO_NODE, {}, "Slurm has no such node for the job: Unable to create step for job 7", "scontrol show node n2"),
        (DRAINED, {}, "Slurm has no such node for the job: Unable to create step for job 7", "scontrol show node n2"),
        (NO_CONTAINER, {}, "couldn't get a running container: sglang_7_n2", "--jobid=7 --nodelist=n2 enroot list"),
        (NO_PYXIS, {}, "this Slurm has no pyxis: unrecognized option '--container-name=x'", "leave --container-name"),
        ("Traceback\nOSError: no space\n", {}, "with status 1 and without a result: OSError", "n2/srun.log"),
        ("", {}, "ended there with status 1 and without a result", "n2/srun.log"),
        (NO_STEP, LATE, "no answer within 9 s: Job 7 step creation still disabled, retrying", "--node-timeout"),
        ("", {"status": None, "problem": "interrupted"}, "interrupted", ""),
        ("x" * 10_000, {}, f"without a result: {'x' * 300}", "n2/srun.log"),
    ],
)
def test_why_a_node_is_silent_is_told_with_what_helps(
    errors: str, fields: dict[str, object], why: str, following: str
) -> None:
    problem = why_silent(NodeRun(**{"node": "n2", "status": 1, "errors": errors, **fields}), JOB)
    assert problem.what == "node n2"
    assert why in problem.why
    assert len(problem.why) < 400
    assert following in problem.next


def test_the_answer_is_found_in_what_a_container_prints_around_it() -> None:
    answer = {"exit_code": 1, "nested": {"exit_code": 0}, "text": "}\n{"}
    printed = f"== PyTorch ==\n{{not json}}\n{{}}\n{json.dumps(answer)}\nbye {{}}\n{{}}\n"
    assert find_answer(printed) == answer


@pytest.mark.parametrize("text", ["", "{", "[1]", "nothing", '{"other": 1}', "{" * 100_000, '{"exit_code": 0'])
def test_what_is_no_answer_is_not_taken_for_one(text: str) -> None:
    assert find_answer(text) is None
