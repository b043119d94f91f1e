from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from sglang_crashkit.core import journal_place, procfs
from sglang_crashkit.core.ring import RingWriter
from unit.waiting import child, wait_until


def test_a_ring_is_named_after_its_writer(tmp_path: Path) -> None:
    first = journal_place.new_ring(tmp_path)
    first.touch()
    second = journal_place.new_ring(tmp_path)
    second.touch()
    assert first != second
    assert {journal_place.writer_of(ring) for ring in (first, second)} == {os.getpid()}
    (tmp_path / "7-1.ring").symlink_to(first)
    (tmp_path / "notes.txt").touch()
    assert journal_place.rings_in(tmp_path) == sorted([first, second])
    assert journal_place.rings_in(tmp_path / "gone") == []


def test_local_file_systems_are_safe_to_map(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(journal_place, "_MOUNTS", mounts)
    for kind, is_safe in (("ext4", True), ("xfs", True), ("nfs4", False), ("fuse.s3fs", False), ("btrfs", False)):
        mounts.write_text(f"1 2 0:99 / /other rw - ext4 x rw\n36 35 {device} / / rw,noatime shared:1 - {kind} x rw\n")
        assert journal_place.is_safe_to_map(tmp_path) == is_safe
    mounts.write_text("1 2 0:99 / /other rw - ext4 x rw\n")
    assert not journal_place.is_safe_to_map(tmp_path)
    assert not journal_place.is_safe_to_map(tmp_path / "gone")


def test_the_file_system_of_this_machine_is_found(tmp_path: Path) -> None:
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, timeout=30, check=True
    ).stdout.strip()
    assert journal_place.is_safe_to_map(tmp_path) == (kind in ("ext2/ext3", "xfs", "tmpfs", "overlayfs", "f2fs"))


def server_folder(host: Path, pid: int, start_ticks: int) -> Path:
    folder = journal_place.journal_folder(host, pid, start_ticks)
    folder.mkdir(parents=True)
    return folder


def test_what_nobody_holds_was_left_behind(tmp_path: Path) -> None:
    stat = procfs.read_stat(os.getpid())
    assert stat is not None
    server_folder(tmp_path, stat.pid, stat.start_ticks)
    # The pid is another process's by now.
    recycled = server_folder(tmp_path, stat.pid, stat.start_ticks + 1)
    dead = server_folder(tmp_path, 4194305, 1)
    assert journal_place.left_behind(tmp_path) == sorted([recycled, dead])
    held = journal_place.lock(dead)
    assert journal_place.left_behind(tmp_path) == [recycled]
    assert journal_place.lock(dead) is None
    journal_place.unlock(held)
    writer = RingWriter(recycled / "4194305-1.ring", 2**20)
    assert journal_place.left_behind(tmp_path) == [dead]
    writer.close()
    assert journal_place.left_behind(tmp_path) == sorted([recycled, dead])
    journal_place.remove(recycled)
    assert journal_place.left_behind(tmp_path) == [dead]
    assert journal_place.left_behind(tmp_path / "gone") == []


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = "from sglang_crashkit.core import journal_place; from pathlib import Path\n"
    code += "assert journal_place.lock(Path(sys.argv[1])) is not None; ready(); pause()"
    with child(code, str(tmp_path)) as process:
        assert journal_place.lock(tmp_path) is None
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        descriptor = journal_place.lock(tmp_path)
        assert descriptor is not None
        journal_place.unlock(descriptor)


def test_a_ring_whose_writer_is_gone_is_told_by_its_name(tmp_path: Path) -> None:
    stat = procfs.read_stat(os.getpid())
    assert stat is not None
    ours = [f"{stat.pid}-{ticks}{more}.ring" for ticks in (stat.start_ticks, 0) for more in ("", "-1")]
    # The pid is another process's by now.
    gone = [f"{stat.pid}-{stat.start_ticks + 1}.ring", "4194305-1.ring", "4194305-1-2.ring"]
    assert [journal_place.is_writer_gone(tmp_path / name) for name in ours] == [False] * len(ours)
    assert [journal_place.is_writer_gone(tmp_path / name) for name in gone] == [True] * len(gone)
    assert not journal_place.is_writer_gone(tmp_path / "notes.txt")
    with child("ready(); pause()") as process:
        started = procfs.read_stat(process.pid)
        assert started is not None
        ring = tmp_path / f"{process.pid}-{started.start_ticks}.ring"
        assert not journal_place.is_writer_gone(ring)
        process.send_signal(signal.SIGKILL)
        # Its parent, a server that hangs, may never take its status.
        wait_until(lambda: journal_place.is_writer_gone(ring), "it is a zombie")


def test_what_is_no_ring_is_not_removed(tmp_path: Path) -> None:
    folder = server_folder(tmp_path, 4194305, 1)
    (folder / "7-1.ring").touch()
    (folder / "notes.txt").touch()
    journal_place.remove(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
