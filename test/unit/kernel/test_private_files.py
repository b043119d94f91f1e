from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.private_files import (
    FifoError,
    FolderLock,
    create_private,
    files_below,
    make_private_folder,
    read_regular,
    write_named,
    write_private,
    write_to_fifo,
)
from unit.support.waiting import LONG, child, descriptors


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> str:
    return oct(stat.S_IMODE(path.lstat().st_mode))


def test_a_folder_with_its_parents_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    folder = make_private_folder(tmp_path / "a" / "b" / "c")
    assert folder == tmp_path / "a" / "b" / "c"
    assert [mode_of(path) for path in (folder, folder.parent, folder.parent.parent)] == ["0o700"] * 3


@pytest.mark.parametrize("target", ["elsewhere", "missing"])
def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(CrashkitError, match="link is not a folder"):
        make_private_folder(tmp_path / "link")
    assert not (tmp_path / "missing").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(CrashkitError, match="belongs to user 65534"):
        make_private_folder(tmp_path / "theirs")


def test_a_new_file_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    with create_private(tmp_path / "new") as file:
        file.write(b"x")
    write_private(tmp_path / "written", b"y", sync=True)
    assert [mode_of(tmp_path / name) for name in ("new", "written")] == ["0o600"] * 2


def test_a_new_file_follows_no_link_and_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    for name in ("target", "link", "dangling"):
        with pytest.raises(FileExistsError):
            create_private(tmp_path / name)
    assert (tmp_path / "target").read_text() == "kept"
    assert not (tmp_path / "absent").exists()


def test_writing_replaces_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_private(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_text() == "kept"
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_bytes() == b"new"


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    # A limit on the size of files stands for a disk without room: the write fails half-way.
    code = """
import resource, signal, sys
from pathlib import Path
from sglang_crashkit.kernel.private_files import write_private
path = Path(sys.argv[1]) / "file"
write_private(path, b"old")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_private(path, b"n" * 100_000)
except OSError as error:
    print(error.errno)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=LONG
    )
    assert done.stdout == "27\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_what_is_no_regular_file_is_neither_replaced_nor_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    opened = descriptors()
    for name, why, why_unread in (
        ("folder", "not a regular file", "is not a regular file"),
        ("link", "not a regular file", "levels of symbolic links"),
        ("pipe", "not a regular file", "is not a regular file"),
        ("file/below", "Not a directory", "Not a directory"),
    ):
        with pytest.raises(OSError, match=why):
            write_named(tmp_path / name, b"x")
        with pytest.raises(OSError, match=why_unread):
            read_regular(tmp_path / name, 10)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing", 10)
    assert descriptors().items() <= opened.items()
    assert read_regular(tmp_path / "file", 10) == b"kept"
    write_named(tmp_path / "file", b"new")
    assert read_regular(tmp_path / "file", 2) == b"ne"


ME = os.geteuid()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[int]:
    """A pipe that this process reads."""
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def test_a_pipe_without_a_name_is_written_to_by_link(reader: int, tmp_path: Path) -> None:
    (tmp_path / "pipe").unlink()
    (link,) = [link for link, path in procfs.open_files(os.getpid()) if str(path).startswith(str(tmp_path))]
    write_to_fifo(link, b"1", ME, follow=True)
    assert os.read(reader, 10) == b"1"


def test_a_full_pipe_is_no_wait(reader: int, tmp_path: Path) -> None:
    with os.fdopen(os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as held:
        while held.write(b"1" * 4096):
            pass
        with pytest.raises(FifoError, match="unavailable"):
            write_to_fifo(tmp_path / "pipe", b"1", ME)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("nothing", "No such file"),
        ("pipe", "it has no reader"),
        ("file", "not a pipe of the process's own user"),
        ("link", "levels of symbolic links"),
    ],
)
def test_what_is_no_pipe_that_is_read_stays_untouched(tmp_path: Path, kind: str, why: str) -> None:
    path, victim = tmp_path / "pipe", tmp_path / "victim"
    victim.write_bytes(b"before")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.hardlink_to(victim) if kind == "file" else path.symlink_to(victim)
    with pytest.raises(FifoError, match=why):
        write_to_fifo(path, b"1", ME)
    assert victim.read_bytes() == b"before"


@pytest.mark.parametrize("owner", [ME + 1, None])
def test_the_pipe_of_another_user_is_not_written_to(reader: int, tmp_path: Path, owner: int | None) -> None:
    with pytest.raises(FifoError, match="not a pipe of the process's own user"):
        write_to_fifo(tmp_path / "pipe", b"1", owner)
    assert os.read(reader, 1) == b""


HOLD = "import fcntl; fd = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX); ready(); pause()"


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


def test_files_below_a_folder_and_what_cannot_be_looked_into(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("z", "a/b/x"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe")
    problems: list[CrashkitError] = []
    assert files_below(tmp_path, problems) == [tmp_path / "a/b/x", tmp_path / "z"]
    assert problems == []
    assert files_below(tmp_path / "gone", problems) == []
    assert [one.message for one in problems] == [f"{tmp_path}/gone cannot be read: No such file or directory"]
