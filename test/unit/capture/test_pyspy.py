from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from sglang_crashkit.capture.pyspy import find_pyspy, sample_all
from sglang_crashkit.kernel import procfs
from unit.support.targets import make_tool
from unit.support.waiting import LONG, descriptors, wait_until

FRAME = {"name": "<module>", "filename": "x.py", "line": 1}
GOOD = json.dumps([{"thread_name": "MainThread", "os_thread_id": 1, "frames": [FRAME]}])


def children() -> set[int]:
    return procfs.TreeScanner(os.getpid()).scan()


def test_py_spy_is_found_beside_the_interpreter_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, on_path = tmp_path / "beside", tmp_path / "path"
    for folder in (beside, on_path):
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
    assert all(re.fullmatch(r"py-spy did not end within 0(\.\d+)? s", result.problem) for result in results)
    assert max(result.seconds for result in results) < LONG / 4
    wait_until(lambda: children() <= before, "they are gone")
    assert descriptors().items() <= fds.items()


def test_those_that_block_leave_the_others_their_turn(use_tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    use_tool(f"[ $5 -le 8 ] && exec sleep 600; echo '{GOOD}'")
    results = sample_all(range(1, 25), 6.0)
    assert [bool(result.threads) for result in results] == [False] * 8 + [True] * 16
    assert all(result.problem.startswith("py-spy did not end within ") for result in results[:8])


@pytest.mark.parametrize("script", ["echo rubbish", "echo '{}'", "echo '[{\"frames\": []}]'", "exit 1", "kill -9 $$"])
def test_one_that_fails_is_tried_six_times(tmp_path: Path, use_tool, script: str) -> None:
    use_tool(f"echo x >> {tmp_path}/tries\n{script}")
    (result,) = sample_all([1], LONG)
    assert not result.threads
    assert result.problem
    assert (tmp_path / "tries").read_text() == "x\n" * 6


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
    # It is not taken for ever: one that ends has no more.
    assert len(log.read_text().split()) == (2 if GOOD in then else 3)
