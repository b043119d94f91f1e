from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_crashkit.capture import pyspy
from sglang_crashkit.capture.pyspy import find_pyspy, sample_all
from sglang_crashkit.capture.tools import ToolRun
from sglang_crashkit.kernel import procfs
from sglang_crashkit.model.sample import Frame
from unit.support.targets import SLEEPER, make_tool
from unit.support.waiting import LONG, child, descriptors, spawned, wait_until

FRAME = {"name": "<module>", "filename": "x.py", "line": 1}
GOOD = json.dumps([{"thread_name": "MainThread", "os_thread_id": 1, "frames": [FRAME]}])


def children() -> set[int]:
    return procfs.TreeScanner(os.getpid()).scan()


def test_each_process_gets_its_result_in_the_order_given() -> None:
    with contextlib.ExitStack() as stack:
        alive = [stack.enter_context(child(SLEEPER)).pid for _ in range(2)]
        with child("ready()") as process:
            process.wait(LONG)
        wanted = [alive[0], process.pid, alive[1]]
        results = sample_all([*wanted, alive[0]], LONG)
    assert [result.pid for result in results] == wanted
    assert [bool(result.threads) for result in results] == [True, False, True]
    assert results[1].problem


def test_py_spy_is_found_beside_the_interpreter_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, on_path = tmp_path / "beside", tmp_path / "path"
    for folder in (beside, on_path):
        folder.mkdir()
        make_tool(folder, "true")
    monkeypatch.setattr("sys.executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(on_path))
    assert find_pyspy() == str(beside / "py-spy")
    (beside / "py-spy").unlink()
    assert find_pyspy() == str(on_path / "py-spy")
    (on_path / "py-spy").unlink()
    assert find_pyspy() is None
    (result,) = sample_all([1], LONG)
    assert (result.threads, result.problem) == ((), "py-spy is not installed; next: pip install py-spy")


def test_many_that_hang_are_killed_at_one_deadline(use_tool) -> None:
    use_tool("trap '' TERM; exec sleep 600")
    before, fds = children(), descriptors()
    results = sample_all(range(1, 33), 0.5)
    assert not any(result.threads for result in results)
    assert all(re.fullmatch(r"py-spy did not end within 0\.\d+ s", result.problem) for result in results)
    assert max(result.seconds for result in results) < LONG / 4
    wait_until(lambda: children() <= before, "they are gone")
    assert descriptors().items() <= fds.items()


def test_those_that_block_leave_the_others_their_turn(use_tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    use_tool(f"[ $5 -le 8 ] && exec sleep 600; echo '{GOOD}'")
    results = sample_all(range(1, 25), 6.0)
    assert [bool(result.threads) for result in results] == [False] * 8 + [True] * 16
    assert all(result.problem.startswith("py-spy did not end within ") for result in results[:8])


@pytest.mark.parametrize(("mode", "is_tried_again"), [("--nonblocking", True), ("--native", False)])
def test_one_cut_off_at_its_share_is_tried_again(
    tmp_path: Path, use_tool, monkeypatch: pytest.MonkeyPatch, mode: pyspy.Mode, is_tried_again: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    use_tool(f"[ $5 = 1 ] && mkdir {tmp_path}/tried && exec sleep 600; echo '{GOOD}'")
    results = sample_all(range(1, 10), 4.0, mode)
    assert [bool(result.threads) for result in results] == [is_tried_again] + [True] * 8
    assert [result.pid for result in results] == list(range(1, 10))


def test_those_of_one_round_get_the_same_time(use_tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    use_tool("true")
    given: dict[str, float] = {}

    def run_tool(argv: Sequence[str], secs: float, *_others: object, **_options: object) -> ToolRun:
        given[argv[-1]] = secs
        return ToolRun(GOOD, "", 0.0, status=0)

    monkeypatch.setattr(pyspy, "run_tool", run_tool)
    sample_all(range(1, 18), 3000.0)
    # What the earlier ones left is for the later ones.
    expected = [1000.0] * 8 + [1500.0] * 8 + [3000.0]
    assert [given[str(pid)] for pid in range(1, 18)] == pytest.approx(expected, abs=100)


def test_of_many_on_few_cores_some_run_at_a_time(tmp_path: Path, use_tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    log = tmp_path / "log"
    use_tool(f"echo 1 >> {log}; sleep 0.05; echo -1 >> {log}; echo '{GOOD}'")
    assert all(result.threads for result in sample_all(range(1, 25), LONG))
    running = list(itertools.accumulate(map(int, log.read_text().split())))
    assert (len(running), max(running) <= 8) == (48, True)


@pytest.mark.parametrize("script", ["echo rubbish", "echo '{}'", "echo '[{\"frames\": []}]'", "exit 1", "kill -9 $$"])
def test_one_that_fails_is_tried_six_times(tmp_path: Path, use_tool, script: str) -> None:
    use_tool(f"echo x >> {tmp_path}/tries\n{script}")
    (result,) = sample_all([1], LONG)
    assert not result.threads
    assert result.problem
    assert (tmp_path / "tries").read_text() == "x\n" * 6


def test_without_a_thread_or_a_descriptor_there_is_a_reason(use_tool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tool(f"echo '{GOOD}'")

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("selectors.DefaultSelector.__enter__", refuse)
        (sample,) = sample_all([1], LONG)
    assert sample.problem == "py-spy could not be read: Too many open files"
    monkeypatch.setattr("threading.Thread.start", lambda _thread: (_ for _ in ()).throw(RuntimeError("no new thread")))
    assert [sample.problem for sample in sample_all([1, 2], LONG)] == ["py-spy: no new thread"] * 2


TORN = GOOD.replace("MainThread", "Thread-1").replace('"os_thread_id": 1', '"os_thread_id": 7')
#: Its main thread ends in a frame that another called.
CUT_OFF = GOOD.replace("<module>", "f")


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        (TORN, f"echo '{GOOD}'", ("MainThread", "<module>")),
        (TORN, f"echo '{TORN}'", ("Thread-1", "<module>")),
        (TORN, "exit 1", ("Thread-1", "<module>")),
        (CUT_OFF, f"echo '{GOOD}'", ("MainThread", "<module>")),
        (CUT_OFF, f"echo '{CUT_OFF}'", ("MainThread", "f")),
        (CUT_OFF, f"echo '{TORN}'", ("MainThread", "f")),
        (CUT_OFF, "exit 1", ("MainThread", "f")),
    ],
)
def test_one_without_its_whole_main_thread_is_taken_again(
    tmp_path: Path, use_tool, first: str, then: str, kept: tuple[str, str]
) -> None:
    # GIVEN a list of threads, or of frames, that was torn at the first attempt
    log = tmp_path / "log"
    use_tool(f"echo x >> {log}; [ $(wc -l < {log}) = 1 ] && {{ echo '{first}'; exit; }}; {then}")
    (result,) = sample_all([os.getpid()], LONG)
    assert ([(thread.name, thread.frames[-1].function) for thread in result.threads], result.problem) == ([kept], "")
    # It is not taken for ever: one that ends has no more, and begins alike each time.
    assert len(log.read_text().split()) == (2 if GOOD in then or (first == CUT_OFF and CUT_OFF in then) else 3)


#: Has a process that was started in the way of its last argument, whose pid it prints.
STARTER = """
import multiprocessing, os, sys, threading, time

def sleep():
    time.sleep(120)

def start():
    process = context.Process(target=sleep, daemon=True)
    process.start()
    print(process.pid, flush=True)
    process.join()

if __name__ == "__main__":
    method = sys.argv[-1]
    if method == "program":
        print(os.getpid(), flush=True)
        sleep()
    context = multiprocessing.get_context(method.partition(" ")[0])
    thread = threading.Thread(target=start)
    thread.start() if method.endswith("in a thread") else start()
"""


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (["starter.py"], "program"),
        (["-m", "starter"], "program"),
        (["-c", STARTER], "program"),
        (["starter.py"], "spawn"),
        (["-m", "starter"], "forkserver"),
        (["starter.py"], "fork in a thread"),
    ],
    ids=["script", "module", "command", "spawn", "forkserver", "fork-in-a-thread"],
)
def test_however_it_was_started_its_main_thread_is_whole(
    tmp_path: Path, use_tool, options: list[str], method: str
) -> None:
    (tmp_path / "starter.py").write_text(STARTER)
    log = tmp_path / "log"
    use_tool(f'echo x >> {log}; exec {find_pyspy()} "$@"')
    # A forkserver that is killed leaves its socket behind, whose path must be short.
    with tempfile.TemporaryDirectory(prefix="ck-", ignore_cleanup_errors=True) as short:
        env = os.environ | {"TMPDIR": short}
        with spawned([sys.executable, *options, method], cwd=tmp_path, env=env) as process:
            pid = int(process.first_line)
            wait_until(lambda: "sleep (" in "".join(map(str, frames_of(pid))), "it sleeps")
            log.write_text("")
            frames_of(pid)
            os.kill(pid, signal.SIGKILL)
    assert log.read_text() == "x\n"


def frames_of(pid: int) -> tuple[Frame, ...]:
    (result,) = sample_all([pid], LONG)
    return result.main_thread.frames if result.main_thread else ()
