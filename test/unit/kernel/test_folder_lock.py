from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from sglang_crashkit.kernel.folder_lock import FolderLock
from unit.support.waiting import LONG, child, descriptors

HOLD = "import fcntl; fd = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX); ready(); pause()"


def test_one_holds_it_at_a_time(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    assert first.acquire() == "held"
    assert second.acquire() == "taken"
    first.release()
    first.release()
    assert second.acquire() == "held"
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_it_is_waited_for(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    timer = threading.Timer(0.1, first.release)
    timer.start()
    assert second.acquire(LONG) == "held"
    timer.join()
    second.release()


def test_the_death_of_its_holder_frees_it(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with child(HOLD, str(tmp_path)) as holder:
        assert lock.acquire() == "taken"
        holder.kill()
        holder.wait(LONG)
        assert lock.acquire(LONG) == "held"
    lock.release()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(OSError, match="link"):
        FolderLock(tmp_path / "link").acquire()
    with pytest.raises(FileNotFoundError):
        FolderLock(tmp_path / "absent").acquire()


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    before = len(descriptors())
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert FolderLock(tmp_path).acquire(LONG) == "unsupported"
    assert len(descriptors()) <= before
