from __future__ import annotations

import json

import pytest

from sglang_crashkit.collect.slurm_answer import PENDING, find_documents, read_answer, reason_in
from sglang_crashkit.collect.slurm_steps import NodeRun
from sglang_crashkit.model.snapshot import Problem

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


def run_of(errors: str, status: int | None = 1, **more: object) -> NodeRun:
    return NodeRun("n2", status, b"", errors, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("errors", "why", "following"),
    [
        (NO_TOOL, "the collector cannot be run there: execve(): sglang-crashkit: No such file", "--remote-command"),
        (NO_MODULE, "/usr/bin/python3: No module named sglang_crashkit", "install sglang-crashkit"),
        (NO_SLURMD, "it does not answer Slurm: Task launch for StepId=1.5 failed", "scontrol show node n2"),
        (NO_NODE, "Slurm has no such node for the job: Unable to create step for job 7", "scontrol show node n2"),
        (NO_CONTAINER, "couldn't get a running container: sglang_7_n2", "--jobid=7 --nodelist=n2 enroot list"),
        (NO_PYXIS, "this Slurm has no pyxis: unrecognized option '--container-name=x'", "leave --container-name out"),
        ("Traceback\nOSError: no space\n", "ended there with status 1 and without a result: OSError", "n2/srun.log"),
        ("", "ended there with status 1 and without a result", ""),
    ],
)
def test_why_a_node_gave_no_answer_is_told_with_what_helps(errors: str, why: str, following: str) -> None:
    answer = read_answer(run_of(errors), "7", needed="schema_version")
    assert answer.document is None
    assert answer.problem is not None
    assert answer.problem.what == "node n2"
    assert why in answer.problem.why
    assert following in answer.problem.next


def test_a_node_that_was_given_up_is_told_so_with_what_it_had_said() -> None:
    late = run_of(
        "srun: Job 7 step creation still disabled, retrying\n", None, late=True, problem="no answer within 9 s"
    )
    problem = read_answer(late, "7", needed="x").problem
    assert problem is not None
    assert problem.why == "no answer within 9 s: Job 7 step creation still disabled, retrying"
    assert "--node-timeout" in problem.next


def test_the_answer_is_found_in_what_a_container_prints_around_it() -> None:
    answer = {"schema_version": 1, "nested": {"schema_version": "no"}, "text": "}\n{"}
    printed = f"== PyTorch ==\n{{not json}}\n{{}}\n{json.dumps(answer, indent=2)}\nbye {{}}\n"
    run = NodeRun("n1", 0, printed.encode(), "")
    assert read_answer(run, "7", needed="schema_version").document == answer


@pytest.mark.parametrize("text", ["", "{", "[1]", "nothing", '{"other": 1}', "{" * 100_000])
def test_what_is_no_answer_is_not_taken_for_one(text: str) -> None:
    assert list(find_documents(text, "schema_version")) == []


def test_the_last_answer_that_came_whole_counts() -> None:
    first, second = ({"exit_code": 0, PENDING: pending, "big": {"a": 1}} for pending in (True, False))
    printed = f"hello\n{json.dumps(first)}\n{json.dumps(second)}\n".encode()
    assert read_answer(NodeRun("n1", 0, printed, ""), "7", needed="exit_code").document == second
    late = NodeRun("n1", None, printed[:-5], "", "no answer within 9 s", late=True)
    answer = read_answer(late, "7", needed="exit_code")
    assert answer.document == first
    assert answer.problem == Problem(
        "native stacks of node n1",
        "the debuggers had not ended: no answer within 9 s",
        "raise --node-timeout, or leave the debuggers out: --no-native",
    )
    killed = NodeRun("n1", 137, printed[:-5], "")
    problem = read_answer(killed, "7", needed="exit_code").problem
    assert problem is not None
    assert problem.why == "the debuggers had not ended: the collector ended there with status 137"


def test_a_failure_after_an_answer_takes_nothing_of_it() -> None:
    first = {"exit_code": 0, PENDING: True}
    error = {"error": "cannot write to /x: No space left on device", "next": "name another", "exit_code": 1}
    run = NodeRun("n1", 1, f"{json.dumps(first)}\n{json.dumps(error)}\n".encode(), "")
    answer = read_answer(run, "7", needed="exit_code")
    assert answer.document == first
    assert answer.problem == Problem("native stacks of node n1", error["error"], "name another")


def test_the_reason_is_cut_where_it_goes_on_for_ever() -> None:
    assert len(reason_in("x" * 10_000)) == 300
