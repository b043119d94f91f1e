"""A process that does not let itself be read holds up no process for longer than the deadline."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.kernel import guarded_read, procfs
from sglang_crashkit.kernel.guarded_read import BlockedReadError, GuardedReader, guard_reads
from sglang_crashkit.kernel.private_files import FolderLock
from unit.support.locked_memory import locked_process
from unit.support.waiting import descriptors, wait_until

DEADLINE_SECS = 0.1


@pytest.fixture
def reader() -> Iterator[GuardedReader]:
    one = GuardedReader(DEADLINE_SECS)
    yield one
    one.close()
    # The kernel ends one that was killed once a processor is free for it.
    wait_until(lambda: helpers() == [], "the helpers have ended")


def helpers() -> list[int]:
    """Return the processes that read for this one."""
    stats = {pid: procfs.read_stat(pid) for pid in procfs.TreeScanner(os.getpid()).scan()}
    return [pid for pid, stat in stats.items() if stat and stat.state != "Z" and stat.comm == "crashkit_reader"]


def fifo(folder: Path) -> Path:
    """Return a file whose opening waits, as no file but one of ``/proc`` is to."""
    folder.mkdir(exist_ok=True)
    path = folder / "maps"
    os.mkfifo(path)
    return path


def test_a_file_is_read_whole(reader: GuardedReader, tmp_path: Path) -> None:
    assert reader.read(Path("/proc/self/cmdline")) == Path("/proc/self/cmdline").read_bytes()
    for size in (0, 1, 5_000_000):
        (tmp_path / "file").write_bytes(b"x" * size)
        assert len(reader.read(tmp_path / "file")) == size
    first = helpers()
    with pytest.raises(FileNotFoundError, match="No such file"):
        reader.read(tmp_path / "none")
    assert helpers() == first


def test_a_blocked_read_is_ended_and_the_next_works(reader: GuardedReader, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert reader.read(tmp_path / "file") == b"x"
    (first,) = helpers()
    with pytest.raises(BlockedReadError):
        reader.read(fifo(tmp_path / "stuck"))
    assert reader.read(tmp_path / "file") == b"x"
    assert helpers() != [first]
    wait_until(lambda: not procfs.is_running(first), "the first helper has ended")


def test_who_blocked_a_read_is_left_alone_for_a_while(reader: GuardedReader, tmp_path: Path) -> None:
    path = fifo(tmp_path / "stuck")
    with pytest.raises(BlockedReadError, match="in time"):
        reader.read(path)
    for _again in range(100):
        with pytest.raises(BlockedReadError, match="recent read"):
            reader.read(path)


def test_the_helper_holds_nothing_of_its_starter(reader: GuardedReader, tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert lock.acquire() == "held"
    with socket.socket() as one:
        reader.read(Path("/proc/self/stat"))
        held = descriptors(*helpers())
        assert one.fileno() not in held
    assert [path for path in held.values() if not path.startswith("pipe:")] == []
    assert len(held) == 2
    lock.release()


def test_after_a_fork_each_process_has_its_own(reader: GuardedReader, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    reader.read(tmp_path / "file")
    (first,) = helpers()
    pid = os.fork()
    if pid == 0:
        is_right = reader.read(tmp_path / "file") == b"x" and helpers() not in ([], [first])
        os._exit(0 if is_right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert reader.read(tmp_path / "file") == b"x"
    assert helpers() == [first]


def test_readers_that_outlive_a_kill_are_limited(
    reader: GuardedReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_read, "is_reaped", lambda _pid: False)
    for number in range(8):
        with pytest.raises(BlockedReadError):
            reader.read(fifo(tmp_path / str(number)))
    with pytest.raises(OSError, match="8 helper processes of timed-out reads have not ended yet"):
        reader.read(Path("/proc/self/stat"))
    monkeypatch.undo()
    wait_until(lambda: reader.read(Path("/proc/self/stat")), "the next helper")


def test_a_process_with_a_locked_memory_map_is_read(tmp_path: Path, reader: GuardedReader) -> None:
    with locked_process(tmp_path, title="sglang::scheduler_TP1") as process:
        guard_reads(reader)
        try:
            assert procfs.read_cmdline(process.pid) == []
            assert procfs.read_environ(process.pid) == {}
            # The kernel keeps the first letters elsewhere.
            assert procfs.read_title(process.pid) == "sglang::schedul"
            assert procfs.is_python(process.pid)
            with pytest.raises(BlockedReadError):
                procfs.read_maps(process.pid)
            assert procfs.read_title(os.getpid()) != ""
        finally:
            guard_reads(None)
        wait_until(lambda: helpers() == [], "the helpers have ended")
