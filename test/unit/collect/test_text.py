from __future__ import annotations

from sglang_crashkit.capture.debugger import Debugged
from sglang_crashkit.collect.text import native_stacks, python_stacks, state_in_words
from sglang_crashkit.kernel.discovery import FoundProcess
from sglang_crashkit.model.sample import Frame, Sample, Thread

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


def test_a_state_says_where_the_kernel_has_it_and_who_traces_it() -> None:
    assert state_in_words(moment()) == "it had ended"
    assert state_in_words(moment(state="D", wchan="nfs_wait", tracer=9)) == (
        "in uninterruptible sleep (D) in nfs_wait, traced by process 9, 0.00 s of CPU time used"
    )
    assert state_in_words(moment(state="I")).startswith("state (I)")
