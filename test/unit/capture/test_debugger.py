from __future__ import annotations

import contextlib
import itertools
import signal
from pathlib import Path

import pytest

from sglang_crashkit.capture.debugger import (
    Debugged,
    command_of,
    debug_all,
    find_cuda_gdb,
    parse_kernels,
    parse_stacks,
)
from sglang_crashkit.model.sample import Frame
from unit.support.targets import (
    SLEEPER,
    functions_of,
    make_tool,
    runs_on,
    settle,
    settle_in_sleep,
    start_ticks,
    state_of,
)
from unit.support.waiting import LONG, child


def stand_in(folder: Path, script: str) -> str:
    """Write a stand-in for cuda-gdb, and return its path; its last but fourth argument is the pid."""
    return make_tool(folder, f'while [ "$1" != -p ]; do shift; done; PID=$2\n{script}', "cuda-gdb")


def debugged_by(cuda_gdb: str | None, pid: int, secs: float = LONG) -> Debugged:
    """Return what came of debugging a process, which runs on afterwards."""
    taken: dict[int, Debugged] = {}
    debug_all(cuda_gdb, {pid: start_ticks(pid)}, secs, taken.__setitem__)
    runs_on(pid)
    return taken[pid]


def test_cuda_gdb_gives_all_stacks_and_the_target_runs_on(cuda_gdb: str) -> None:
    code = "import threading\ndef work(): time.sleep(120)\nthreading.Thread(target=work, daemon=True).start()\n"
    with child(code + "secret = 'hunter2-in-a-local'\n" + SLEEPER) as process:
        debugged = debugged_by(cuda_gdb, process.pid, 4 * LONG)
    assert (debugged.problem, debugged.tool) == ("", "cuda-gdb")
    assert len(debugged.threads) == 2
    assert process.pid in {thread.native_id for thread in debugged.threads}
    assert any("sleep" in function or "select" in function for function in functions_of(debugged.threads))
    # Arguments of functions may be prompts: python's main has the whole program as one.
    assert "hunter2" not in debugged.text


def test_the_command_line_reads_no_user_files_and_asks_nothing() -> None:
    command = command_of("/opt/cuda-gdb", 7)
    assert command[:3] == ["/opt/cuda-gdb", "-nx", "-batch"]
    assert command[3:5] == ["-iex", "set debuginfod enabled off"]
    listings = [word for option, word in itertools.pairwise(command) if option == "-ex"]
    assert [word for word in listings if not word.startswith("echo")] == [
        *("info cuda devices", "info cuda kernels", "thread apply all bt"),
    ]


def test_py_spy_takes_the_stacks_where_cuda_gdb_prints_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEBUGINFOD_URLS", "http://127.0.0.1:9/")
    with child(SLEEPER) as process:
        settle_in_sleep(process.pid)
        debugged = debugged_by(stand_in(tmp_path, 'echo "servers: $DEBUGINFOD_URLS"'), process.pid)
    assert (debugged.tool, debugged.problem) == ("py-spy --native", "")
    assert debugged.text.startswith("servers: \n\n== cuda-gdb printed no stack; py-spy --native:\n")
    assert "inner_function" in functions_of(debugged.threads)


@pytest.mark.parametrize(
    ("script", "secs", "problem"),
    [
        (
            "kill -STOP $PID; until grep -q '^State:.T' /proc/$PID/status; do :; done; sleep 600",
            1.0,
            "cuda-gdb did not end within 1 s; it left the process stopped, which was sent SIGCONT",
        ),
        (
            "echo 'ptrace: Operation not permitted.'",
            LONG,
            "it may not be traced; next: run it as root or with CAP_SYS_PTRACE (docker run --cap-add=SYS_PTRACE)",
        ),
    ],
    ids=["left it stopped", "no permission"],
)
def test_one_that_fails_is_made_good_and_says_why(tmp_path: Path, script: str, secs: float, problem: str) -> None:
    with child(SLEEPER) as process:
        debugged = debugged_by(stand_in(tmp_path, script), process.pid, secs)
    assert (debugged.tool, debugged.problem) == ("cuda-gdb", problem)


@pytest.mark.wide
def test_all_together_are_called_off_in_time_with_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_crashkit.capture.debugger.max_at_once", lambda: 2)
    listing = 'Thread 1 (LWP 7 "x"):\\n#0  main ()\\n'
    # GIVEN one that ends, and more that do not than may run at once
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(child(SLEEPER)).pid for _each in range(4)]
        tool = stand_in(tmp_path, f"printf 'of %s\\n{listing}' $PID; [ $PID = {pids[0]} ] || exec sleep 600")
        taken: dict[int, Debugged] = {}
        debug_all(tool, {pid: start_ticks(pid) for pid in pids}, 2 * LONG, taken.__setitem__, 2.0)
    called_off = "cuda-gdb was called off"
    told = [taken[pid].problem for pid in pids]
    assert told == ["", called_off, called_off, "not run: called off before its turn"]
    assert [taken[pid].text.partition("\n")[0] for pid in pids] == [*(f"of {pid}" for pid in pids[:3]), ""]


def test_cuda_gdb_is_found_where_the_toolkit_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_crashkit.capture.debugger.TOOLKITS", (str(tmp_path / "toolkit"),))
    homes = [tmp_path / "path", tmp_path / "bin", tmp_path / "toolkit"]
    environ = {"PATH": str(homes[0]), "CUDA_HOME": str(tmp_path)}
    tools = [stand_in(home, "") for home in homes]
    for tool in tools:
        assert find_cuda_gdb(environ) == tool
        Path(tool).unlink()
    assert find_cuda_gdb(environ) is None


def test_without_cuda_gdb_py_spy_takes_native_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    # One after the other: that one has ended calls no other off.
    monkeypatch.setattr("sglang_crashkit.capture.debugger.max_at_once", lambda: 1)
    with child(SLEEPER) as first, child(SLEEPER) as running, child(SLEEPER) as stopped:
        for each in (first, running, stopped):
            settle_in_sleep(each.pid)
        stopped.send_signal(signal.SIGSTOP)
        settle(stopped.pid, "T")
        found: dict[int, Debugged] = {}
        processes = {one.pid: start_ticks(one.pid) for one in (first, running, stopped)}
        debug_all(None, processes, LONG, found.__setitem__)
        runs_on(running.pid)
        assert state_of(stopped.pid) == "T"
    assert found[running.pid].problem == ""
    assert "inner_function" in functions_of(found[running.pid].threads)
    assert "inner_function" in found[running.pid].text
    assert found[stopped.pid].problem == "not run: it is stopped, and must stay as it was found"


STACKS = """
[New LWP 8784]
[Thread debugging using libthread_db enabled]
__GI___clock_nanosleep (clock_id=...) at ../sysdeps/unix/sysv/linux/clock_nanosleep.c:71
71\t../sysdeps/unix/sysv/linux/clock_nanosleep.c: No such file or directory.

== thread apply all bt

Thread 2 (Thread 0x7f9043fff6c0 (LWP 8784) "pt_gloo_runloop"):
#0  futex_wake (private=...) at ../sysdeps/nptl/futex-internal.h:209
#1  0x00007f91bef01d3e in c10d::ProcessGroupGloo::broadcast(std::vector<at::Tensor, std::allocator<at::Tensor> >&) () \
from /lib/libtorch_cpu.so
#2  0x0000000000000000 in ?? ()

Thread 1 (LWP 7359 "sglang::schedul"):
#0  <signal handler called>
#1  main ()
[Inferior 1 (process 7359) detached]
"""
KERNELS = """
  Kernel Parent Dev Grid Status                 SMs Mask     GridDim  BlockDim Invocation
*      0      -   0   27 Active 0x00000000000000ffffffff (132,1,1) (640,1,1) ncclDevKernel_AllReduce_Sum_f32(args=...)
       1      -   0   28 Active 0x00000000000000ffffffff  (32,1,1) (128,1,1) void flash_fwd_kernel<128, true>(p=0x7f)
       2      -   1   28 Active 0x00000000000000ffffffff  (32,1,1) (128,1,1) void flash_fwd_kernel<128, true>(p=0x80)
       3      -   1   29 Active 0x00000000000000ffffffff (32,1,1) (128,1,1) void (anonymous namespace)::topk<4>(p=(a=1))
       4      -   1   30 Active 0x00ffffff (240,1,1) (128,1,1) acos_main parms=...

== thread apply all bt
"""


def test_stacks_are_read_thread_by_thread_innermost_first() -> None:
    second, first = parse_stacks(STACKS)
    assert (second.native_id, second.name) == (8784, "pt_gloo_runloop")
    assert second.frames == (
        Frame("futex_wake", "../sysdeps/nptl/futex-internal.h", 209),
        Frame(
            "c10d::ProcessGroupGloo::broadcast(std::vector<at::Tensor, std::allocator<at::Tensor> >&)",
            "/lib/libtorch_cpu.so",
            0,
        ),
        Frame("??", "", 0),
    )
    assert (first.native_id, first.name) == (7359, "sglang::schedul")
    assert first.frames == (Frame("<signal handler called>", "", 0), Frame("main", "", 0))


def test_what_is_no_listing_holds_nothing() -> None:
    assert parse_stacks("ptrace: Operation not permitted.\n#0  in a message") == ()
    assert parse_kernels("No CUDA kernels.\n") == ()
    assert parse_kernels(STACKS) == ()


def test_kernels_are_named_once_without_the_values_of_their_arguments() -> None:
    assert parse_kernels(KERNELS) == (
        *("ncclDevKernel_AllReduce_Sum_f32", "void flash_fwd_kernel<128, true>"),
        *("void (anonymous namespace)::topk<4>", "acos_main"),
    )
