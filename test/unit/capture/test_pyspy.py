from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from sglang_crashkit.capture.pyspy import find_pyspy, sample_all
from sglang_crashkit.kernel import procfs
from unit.targets import SLEEPER, make_tool
from unit.waiting import LONG, child, descriptors, wait_until

GOOD = '[{"thread_name": "MainThread", "os_thread_id": 1, "frames": [{"name": "f", "filename": "x.py", "line": 1}]}]'


def children() -> set[int]:
    return procfs.TreeScanner(os.getpid()).scan()


def test_a_sleeping_process_is_photographed() -> None:
    with child(SLEEPER) as process:
        wait_until(lambda: procfs.read_stat(process.pid).state == "S", "it sleeps")  # type: ignore[union-attr]
        (sample,) = sample_all([process.pid], LONG)
        assert sample.problem == ""
        assert sample.threads
        functions = [frame.function for thread in sample.threads for frame in thread.frames]
        assert functions == ["inner_function", "outer_function", "<module>"]
        assert sample.threads[0].native_id == process.pid
        assert sample.seconds > 0


def test_a_stopped_process_is_photographed_and_stays_stopped() -> None:
    with child(SLEEPER) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: procfs.read_stat(process.pid).state == "T", "it is stopped")  # type: ignore[union-attr]
        (sample,) = sample_all([process.pid], LONG)
        assert sample.threads
        stat = procfs.read_stat(process.pid)
        assert stat is not None
        assert stat.state == "T"


def test_each_process_gets_its_result_in_the_order_given() -> None:
    with contextlib.ExitStack() as stack:
        alive = [stack.enter_context(child(SLEEPER)).pid for _ in range(2)]
        with child("ready()") as process:
            process.wait(LONG)
        wanted = [alive[0], process.pid, alive[1]]
        samples = sample_all([*wanted, alive[0]], LONG)
    assert [sample.pid for sample in samples] == wanted
    assert [bool(sample.threads) for sample in samples] == [True, False, True]
    assert samples[1].problem


def test_nothing_is_photographed_of_nobody() -> None:
    assert sample_all([], LONG) == []


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
    (sample,) = sample_all([1], LONG)
    assert (sample.threads, sample.problem) == ((), "py-spy is not installed; next: pip install py-spy")


def test_another_py_spy_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_PYSPY", "/opt/py-spy")
    assert find_pyspy() == "/opt/py-spy"
    monkeypatch.setenv("SGLANG_CRASHKIT_PYSPY", "")
    assert find_pyspy() != ""


def test_what_a_hanging_one_started_is_killed_with_it(tmp_path: Path) -> None:
    (sample,) = sample_all([1], 0.6, make_tool(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait"))
    assert sample.problem == "py-spy did not end within 0.6 s"
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: (stat := procfs.read_stat(pid)) is None or stat.state == "Z", "its child is gone")


def leaves_nothing(before: set[int]) -> bool:
    """Say whether no child is there that was not there before; what is slow to die is reaped by a later round."""
    sample_all([], LONG)
    return children() <= before


def test_many_that_hang_cost_no_more_time_than_one(tmp_path: Path) -> None:
    started = time.monotonic()
    samples = sample_all(range(1, 33), 0.5, make_tool(tmp_path, "trap '' TERM; exec sleep 600"))
    assert time.monotonic() - started < LONG / 4
    assert [sample.threads for sample in samples] == [()] * 32


def test_one_that_prints_for_ever_is_given_up_early(tmp_path: Path) -> None:
    before = children()
    started = time.monotonic()
    (sample,) = sample_all([1], LONG, make_tool(tmp_path, "exec yes"))
    assert sample.problem == "py-spy printed more than 16 MiB"
    assert time.monotonic() - started < LONG
    wait_until(lambda: leaves_nothing(before), "it is reaped")


def test_one_that_hangs_is_killed_at_the_deadline_and_leaves_nothing(tmp_path: Path) -> None:
    before, fds = children(), descriptors()
    started = time.monotonic()
    samples = sample_all([1, 2], 0.4, make_tool(tmp_path, "exec sleep 600"))
    assert time.monotonic() - started < LONG
    assert [sample.problem for sample in samples] == ["py-spy did not end within 0.4 s"] * 2
    wait_until(lambda: leaves_nothing(before), "they are reaped")
    assert descriptors().items() <= fds.items()


def test_one_that_is_slow_to_die_is_reaped_later_and_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_slow(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired(process.args, timeout or 0)

    before = children()
    with monkeypatch.context() as loaded:
        loaded.setattr(subprocess.Popen, "wait", too_slow)
        sample_all([1], 0.3, make_tool(tmp_path, "exec sleep 600"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert caught == []
    wait_until(lambda: leaves_nothing(before), "the next round reaps it")


def test_one_that_hangs_does_not_cost_the_others_their_result(tmp_path: Path) -> None:
    tool = make_tool(tmp_path, f"[ $5 = 1 ] && exec sleep 600; echo '{GOOD}'")
    first, second = sample_all([1, 2], 5.0, tool)
    assert not first.threads
    assert second.threads
    assert second.threads[0].frames[0].function == "f"


def test_one_that_closes_its_pipes_and_stays_is_killed(tmp_path: Path) -> None:
    before = children()
    (sample,) = sample_all([1], 0.3, make_tool(tmp_path, "exec >&- 2>&-; exec sleep 600"))
    assert sample.problem == "py-spy did not end within 0.3 s"
    wait_until(lambda: leaves_nothing(before), "it is reaped")


@pytest.mark.parametrize("script", ["echo rubbish", "echo '{}'", "echo '[{\"frames\": []}]'", "exit 1", "kill -9 $$"])
def test_one_that_fails_is_tried_six_times(tmp_path: Path, script: str) -> None:
    (sample,) = sample_all([1], LONG, make_tool(tmp_path, f"echo x >> {tmp_path}/tries\n{script}"))
    assert not sample.threads
    assert sample.problem
    assert (tmp_path / "tries").read_text() == "x\n" * 6


def test_one_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    script = f"[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; echo 'Error: inconsistent' >&2; exit 1; }}"
    (sample,) = sample_all([1], LONG, make_tool(tmp_path, f"{script}\necho '{GOOD}'"))
    assert sample.threads
    assert sample.problem == ""


def test_the_reason_is_what_it_says_first(tmp_path: Path) -> None:
    tool = make_tool(tmp_path, "printf 'Error: Permission denied\\nReason: ptrace\\n' >&2; exit 1")
    assert sample_all([1], LONG, tool)[0].problem == "Permission denied"


def test_much_output_is_read_whole(tmp_path: Path) -> None:
    frames = ", ".join(['{"name": "f", "filename": "x.py", "line": 1}'] * 20_000)
    (tmp_path / "output").write_text(f'[{{"frames": [{frames}]}}]')
    (sample,) = sample_all([1], LONG, make_tool(tmp_path, f"cat {tmp_path}/output"))
    assert sample.threads
    assert len(sample.threads[0].frames) == 20_000


def test_one_that_cannot_be_run_is_said_to(tmp_path: Path) -> None:
    (sample,) = sample_all([1], LONG, str(tmp_path))
    assert "Permission denied" in sample.problem
