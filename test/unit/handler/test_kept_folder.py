from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from sglang_crashkit.handler import folders
from sglang_crashkit.handler.folders import KeptFolder
from sglang_crashkit.settings import RUN


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    folder = tmp_path / "sglang-crashkit-0" / RUN / "1-2-3"
    folder.mkdir(parents=True)
    return folder


def may_be_cleaned(folder: Path) -> bool:
    """Say whether ``systemd-tmpfiles`` would go into a folder: where it can lock it for itself."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_no_cleaner_goes_into_the_folder_of_a_handler_at_work(runtime: Path) -> None:
    kept = KeptFolder(runtime)
    assert [may_be_cleaned(folder) for folder in (runtime, runtime.parent, runtime.parent.parent)] == [False] * 3
    assert may_be_cleaned(runtime.parent.parent.parent)
    kept.release()
    assert [may_be_cleaned(folder) for folder in (runtime, runtime.parent, runtime.parent.parent)] == [True] * 3


def test_servers_share_the_folders_above(runtime: Path) -> None:
    other = runtime.with_name("4-5-6")
    other.mkdir()
    one, another = KeptFolder(runtime), KeptFolder(other)
    one.release()
    assert may_be_cleaned(runtime)
    assert not may_be_cleaned(runtime.parent)
    assert not may_be_cleaned(other)
    another.release()


def test_a_folder_elsewhere_locks_nothing_above_it(tmp_path: Path) -> None:
    kept = KeptFolder(tmp_path)
    assert not may_be_cleaned(tmp_path)
    assert may_be_cleaned(tmp_path.parent)
    kept.release()


def test_what_is_there_is_touched_a_few_times_a_day(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(folders.time, "monotonic", lambda: now[0])
    kept = KeptFolder(runtime)
    paths = [runtime.parent.parent, runtime.parent, runtime, runtime / "1-2.sock"]
    paths[-1].touch()
    for path in paths:
        os.utime(path, (0, 0))
    kept.touch_on_time()
    assert [path.stat().st_mtime for path in paths] == [0.0] * 4
    now[0] += 6 * 3600
    kept.touch_on_time()
    assert min(path.stat().st_mtime for path in paths) > 1e9
    kept.release()


def test_a_folder_that_is_gone_is_said_once_a_turn(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(folders.time, "monotonic", lambda: now[0])
    kept = KeptFolder(runtime)
    runtime.rmdir()
    now[0] += 6 * 3600
    kept.touch_on_time()
    kept.touch_on_time()
    (line,) = caplog.messages
    assert str(runtime) in line
    kept.release()


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    KeptFolder(tmp_path / "absent").release()
