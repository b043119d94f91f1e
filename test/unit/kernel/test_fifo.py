from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.kernel.fifo import FifoError, open_files, write_to_fifo

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
    (link,) = [link for link, path in open_files(os.getpid()) if str(path).startswith(str(tmp_path))]
    write_to_fifo(link, b"1", ME, follow=True)
    assert os.read(reader, 10) == b"1"


def test_a_full_pipe_is_no_wait(reader: int, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    held = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while os.write(held, b"1" * 4096):
                pass
        with pytest.raises(FifoError, match="unavailable"):
            write_to_fifo(path, b"1", ME)
    finally:
        os.close(held)


@pytest.mark.parametrize("outcome", ["no_pipe", "no_reader", "foreign_pipe"])
def test_why_nothing_was_written_is_told_to_programs_too(tmp_path: Path, outcome: str) -> None:
    path = tmp_path / "pipe"
    if outcome == "no_reader":
        os.mkfifo(path)
    elif outcome == "foreign_pipe":
        path.touch()
    with pytest.raises(FifoError) as caught:
        write_to_fifo(path, b"1", ME)
    assert caught.value.outcome == outcome


def test_a_file_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(FifoError, match="not a pipe of the process's own user"):
        write_to_fifo(tmp_path / "file", b"1", ME)
    assert (tmp_path / "file").read_bytes() == b"before"


@pytest.mark.parametrize("owner", [ME + 1, None])
def test_the_pipe_of_another_user_is_not_written_to(reader: int, tmp_path: Path, owner: int | None) -> None:
    with pytest.raises(FifoError, match="not a pipe of the process's own user"):
        write_to_fifo(tmp_path / "pipe", b"1", owner)
    assert os.read(reader, 1) == b""
