from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from sglang_crashkit.capture.debugger import MAY_TRACE
from sglang_crashkit.collect.collection import Collection, Plan
from sglang_crashkit.kernel.discovery import FoundProcess
from sglang_crashkit.model.snapshot import NodeSnapshot, parse
from sglang_crashkit.model.step import Step
from unit.capture.conftest import use_tool as use_tool
from unit.support.targets import SLEEPER, TITLE, functions_of, hooked, settle_in_sleep, start_ticks
from unit.support.waiting import child

ARGUMENTS = ("python", "-m", "sglang.launch_server", "--dist-init-addr", "10.0.0.1:5000")
ARGUMENTS += ("--disaggregation-mode", "decode")


def found(pid: int, server: int | None = 1, number: int = 0, arguments: tuple[str, ...] = ARGUMENTS) -> FoundProcess:
    title = f"sglang::scheduler_TP{number}"
    return FoundProcess(pid, start_ticks(pid), title, "scheduler", {"tp": number}, server, arguments, 0, "title")


def collect(output: Path, *processes: FoundProcess, **plan) -> tuple[Collection, list[NodeSnapshot]]:
    """Collect; gives the collection, and the snapshots as they are in the files."""
    options = {"snapshots": 1, "interval_secs": 0.0, "native": False} | plan
    collection = Collection(processes, Plan(output, **options), lambda _line: None)
    collection.take_snapshots()
    collection.debug()
    rounds = [parse((output / name).read_bytes()) for name in collection.snapshot_files]
    assert rounds == collection.rounds
    return collection, rounds


@pytest.fixture
def no_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_crashkit.collect.collection.find_cuda_gdb", lambda: None)


def test_without_permission_the_next_step_is_named(tmp_path: Path, use_tool) -> None:
    use_tool("echo Error: Permission denied >&2; exit 1")
    with child(SLEEPER) as process:
        _collection, (seen,) = collect(tmp_path / "out", found(process.pid))
    assert (seen.problems[0].why, seen.problems[0].next) == ("Permission denied", MAY_TRACE)


def test_a_patched_server_tells_its_stacks_where_py_spy_cannot(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, use_tool
) -> None:
    monkeypatch.setattr("sglang_crashkit.collect.collection.socket_of", lambda _pid: runtime / "handler.sock")
    use_tool("exit 1")
    with hooked(runtime, SLEEPER) as target:
        _collection, (seen,) = collect(tmp_path / "out", found(target.pid))
    assert "inner_function" in functions_of(seen.processes[0].threads)


def test_processes_of_different_servers_are_captured_side_by_side(tmp_path: Path, use_tool) -> None:
    # GIVEN a py-spy that ends only when three of it run at the same time
    stack = [{"thread_id": 1, "os_thread_id": 1, "thread_name": "MainThread", "active": True, "owns_gil": False}]
    stack[0]["frames"] = [{"name": "waits", "filename": "a.py", "short_filename": "a.py", "line": 1}]
    (tmp_path / "stack").write_text(json.dumps(stack))
    others = f"touch {tmp_path}/$5.here; until [ $(ls {tmp_path}/*.here | wc -l) = 3 ]; do sleep 0.05; done"
    use_tool(f"{others}; cat {tmp_path}/stack")
    with child(SLEEPER) as one, child(SLEEPER) as another, child(SLEEPER) as third:
        # The servers of two are gone, so that each counts as one.
        processes = [found(one.pid), found(another.pid, server=None), found(third.pid, server=None)]
        _collection, (seen,) = collect(tmp_path / "out", *processes)
    assert [functions_of(process.threads) for process in seen.processes] == [["waits"]] * 3, seen.problems


def test_without_a_debugger_py_spy_takes_native_stacks(tmp_path: Path, no_debugger: None) -> None:
    with child(SLEEPER) as process:
        settle_in_sleep(process.pid)
        collection, (seen,) = collect(tmp_path, found(process.pid), native=True)
    assert [bool(one.native) for one in seen.processes] == [True]
    text = (tmp_path / collection.collected[0].files[1]).read_text()
    assert "# cuda-gdb is not installed, so CUDA kernels are not listed; next: apt-get install " in text
    assert "    inner_function (" in text


LOOP = "def recv_requests(): time.sleep(120)\ndef event_loop_normal(): recv_requests()\nready(); event_loop_normal()"
IDLE = f"exec(compile({LOOP!r}, '/x/site-packages/sglang/srt/managers/scheduler.py', 'exec'))"


def test_a_server_that_does_not_hang_is_spared(tmp_path: Path, no_debugger: None) -> None:
    # GIVEN one that waits for requests in each of several looks, and one of which nothing is certain
    with child(IDLE, title=TITLE) as idle, child(SLEEPER) as unclear:
        settle_in_sleep(idle.pid)
        settle_in_sleep(unclear.pid)
        arguments = ("python", "-m", "sglang.launch_server")
        one = found(idle.pid, 2**22 + 1, arguments=arguments)
        other = found(unclear.pid, 2**22 + 2, arguments=arguments)
        collection, _rounds = collect(tmp_path, one, other, native=True, snapshots=2)
        assert collection.skipped == ""
        problems = [each.debugged.problem for each in collection.collected if each.debugged is not None]
        assert problems == ["not run: no hang is seen", ""]
        alone, _rounds = collect(tmp_path / "alone", one, native=True, snapshots=2)
    assert alone.skipped == "no hang is seen"


def test_no_process_is_signalled_for_its_stacks(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, use_tool
) -> None:
    # GIVEN a process that would answer nothing but the signal on which faulthandler writes
    monkeypatch.setattr("sglang_crashkit.collect.collection.socket_of", lambda _pid: runtime / "handler.sock")
    monkeypatch.setattr("sglang_crashkit.capture.ladder.ask_responders", lambda *_args: [])
    asked: list[int] = []
    monkeypatch.setattr(
        "sglang_crashkit.capture.ladder.ask_faulthandler",
        lambda hooked, *_args: asked.extend(a.pid for a in hooked) or [],
    )
    use_tool("exit 1")
    with hooked(runtime, SLEEPER) as target:
        _collection, (seen,) = collect(tmp_path / "out", found(target.pid))
    assert (asked, seen.processes[0].threads) == ([], ())


#: A rank that ran three steps a while ago, of which the last one may be its own.
RANK = """
import time
from sglang_crashkit.memory.steps import StepWriter
writer = StepWriter({{"1": "extend", "2": "decode"}})
for number in range(1, 4):
    rids, mode = (["ab12"], 1) if number == 3 and {odd} else (["cd34"], 2)
    writer.schedule(number, time.monotonic() - 123 + number, mode, rids, [5], [5], 5, {{}}, 0)
    writer.end(number, time.monotonic())
ready()
time.sleep(1000)
"""
#: One without any, as of a server that is not patched.
UNPATCHED = "ready()\nimport time; time.sleep(1000)"


@pytest.mark.parametrize(
    ("odd", "statement"),
    [
        (False, "No divergence in the last 3 steps of TP0-1."),
        (
            True,
            "TP0 ran decode of request cd34 (5 tokens) in step 3 where TP1 ran extend of request ab12 (5 tokens); 2"
            " minutes before it was looked at.",
        ),
    ],
)
def test_where_the_ranks_of_a_patched_server_diverged_is_told(tmp_path: Path, odd: bool, statement: str) -> None:
    with contextlib.ExitStack() as stack:
        codes = (RANK.format(odd=False), RANK.format(odd=odd), UNPATCHED, UNPATCHED)
        pids = [stack.enter_context(child(code)).pid for code in codes]
        ranks = [found(pid, 1 + at // 2, at % 2, ()) for at, pid in enumerate(pids)]
        collection, _rounds = collect(tmp_path, *ranks)
    assert collection.divergence.statement == statement
    assert statement in (tmp_path / "summary.md").read_text()
    (name,) = [name for name in collection.collected[1].files if name.startswith("steps_")]
    last = Step.from_json(json.loads((tmp_path / name).read_text().splitlines()[-1]))
    assert (last.number, last.mode) == (3, "extend" if odd else "decode")
    assert not [name for name in collection.collected[2].files if name.startswith("steps_")]
