from __future__ import annotations

import json
from dataclasses import replace

from sglang_crashkit.analysis.explain import explain
from sglang_crashkit.analysis.member import SampledProcesses
from sglang_crashkit.capture.debugger import Debugged
from sglang_crashkit.collect.account import as_json, format_summary, native_stacks, python_stacks, state_in_words
from sglang_crashkit.kernel.discovery import FoundProcess
from sglang_crashkit.model.sample import Frame, Sample, Thread
from sglang_crashkit.model.snapshot import NodeSnapshot

WAITS = (
    Frame("all_reduce", "torch/distributed/distributed_c10d.py", 3913),
    Frame("event_loop_normal", "sglang/srt/managers/scheduler.py", 2000),
)
RUNS = (Frame("sleeps", "sglang/x.py", 1), *WAITS[1:])


def sample(number: int, time: float, frames: tuple[Frame, ...], state: str = "S") -> Sample:
    thread = Thread("MainThread", 100 + number, False, False, frames)
    title = f"sglang::scheduler_TP{number}"
    ranks = {"tp": number}
    return Sample("node7", 100 + number, 1, title, "scheduler", ranks, time, server=1, state=state, threads=(thread,))


OTHER = Sample("node7", 9, 1, "sglang::detokenizer", "detokenizer", server=1, state="S", problem="no")


def rounds() -> list[NodeSnapshot]:
    """Two looks at four ranks, of which one is stopped and the others wait for it."""
    return [
        NodeSnapshot(
            "node7",
            time,
            (
                *(sample(number, time, WAITS) for number in (0, 1, 3)),
                sample(2, time, RUNS, "T"),
                replace(OTHER, time=time),
            ),
        )
        for time in (1_700_000_000.0, 1_700_000_005.0)
    ]


def test_the_verdict_comes_first_and_ranks_that_agree_are_one() -> None:
    seen = rounds()
    lines = list(format_summary(seen, explain(SampledProcesses.of(seen)), None))
    assert lines[0] == "# outlier (established)"
    assert "sglang::scheduler_TP2 (pid 102)" in lines[2]
    assert lines[4] == "- 2 snapshots on node7, 2023-11-14T22:13:20.000000Z to 2023-11-14T22:13:25.000000Z"
    text = "\n".join(lines)
    assert "### TP0-1,3: sleeping (S)\n- all_reduce (torch/distributed/distributed_c10d.py:3913)\n" in text
    assert "### TP2: stopped (T)\n- sleeps (sglang/x.py:1)\n" in text
    assert "### sglang::detokenizer (pid 9): sleeping (S)\n- no" in text


def test_a_program_gets_the_same() -> None:
    seen = rounds()[:1]
    document = json.loads(json.dumps(as_json(seen, explain(SampledProcesses.of(seen)), None)))
    assert (document["schema_version"], document["host"], document["divergence"]) == (1, "node7", None)
    assert document["verdict"]["kind"] == "outlier"
    assert document["times"] == ["2023-11-14T22:13:20.000000Z"]


TITLE = "sglang::scheduler_TP1"
PROCESS = FoundProcess(7, 1, TITLE, "scheduler", {"tp": 1}, 5, (), 0, "title")
THREADS = (Thread("MainThread", 7, True, True, (Frame("forward", "scheduler.py", 12),)),)


def moment(**fields) -> Sample:
    return Sample("node7", 7, 1, TITLE, "scheduler", {"tp": 1}, 0.0, **fields)


def test_every_moment_has_a_section_with_its_time_and_state() -> None:
    moments = [moment(state="R", cpu_secs=1.5, threads=THREADS), moment(state="T", problem="py-spy failed")]
    assert python_stacks(PROCESS, "node7", moments) == (
        f"# {TITLE} (pid 7) on node7, server 5\n"
        "\n"
        "== snapshot 1, 1970-01-01T00:00:00.000000Z: running (R), 1.50 s of CPU time used\n"
        f"Process 7: {TITLE}\n"
        "\n"
        'Thread 7 (active+gil): "MainThread"\n'
        "    forward (scheduler.py:12)\n"
        "\n"
        "== snapshot 2, 1970-01-01T00:00:00.000000Z: stopped (T), 0.00 s of CPU time used\n"
        "no Python stacks: py-spy failed\n"
    )


def test_the_debuggers_output_stands_below_what_is_missing_of_it() -> None:
    debugged = Debugged("gdb", "Thread 1 ...\n", "gdb did not end within 60 s", 60.0)
    assert native_stacks(PROCESS, "node7", debugged, "cuda-gdb is not installed; next: get it") == (
        f"# {TITLE} (pid 7) on node7, server 5\n"
        "# cuda-gdb is not installed; next: get it\n"
        "# gdb: 60.0 s: gdb did not end within 60 s\n"
        "\n"
        "Thread 1 ...\n"
    )
    assert native_stacks(PROCESS, "node7", Debugged("gdb", problem="not run: it has ended"), "").splitlines() == [
        f"# {TITLE} (pid 7) on node7, server 5",
        "# gdb: not run: it has ended",
    ]


def test_a_state_says_where_in_the_kernel_and_who_traces() -> None:
    assert state_in_words(moment()) == "it had ended"
    assert state_in_words(moment(state="D", wchan="nfs_wait", tracer=9)) == (
        "in uninterruptible sleep (D) in nfs_wait, traced by process 9, 0.00 s of CPU time used"
    )
    assert state_in_words(moment(state="I")).startswith("state (I)")
