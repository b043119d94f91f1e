from __future__ import annotations

import io
import os
import socket
import tempfile
from pathlib import Path

import pytest

from sglang_crashkit.capture.cuda_core.source import CudaCoreError, Source, Window, parsing


def test_it_reads_pieces(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(b"0123456789")
    with Source(path) as source:
        assert source.size == 10
        assert source.read(2, 3, "a piece") == b"234"
        assert source.read(10, 0, "nothing") == b""
        with pytest.raises(CudaCoreError, match="a piece reaches to byte 11, and the file has 10"):
            source.read(8, 3, "a piece")
        with pytest.raises(CudaCoreError):
            source.read(-1, 1, "a piece")


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket", "device"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "core"
    if kind == "fifo":
        # Nobody writes to it: to open it as a file is would take for ever.
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        folder = tempfile.mkdtemp(prefix="ck-")
        path = Path(folder) / "core"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            with pytest.raises(CudaCoreError, match="cannot be opened"):
                Source(path)
        path.unlink()
        path.parent.rmdir()
        return
    else:
        path = Path("/dev/zero")
    with pytest.raises(CudaCoreError, match="is no file"):
        Source(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "core")
    with pytest.raises(CudaCoreError, match="is a link") as caught:
        Source(tmp_path / "link")
    assert caught.value.next_step == "name the file itself"


@pytest.mark.parametrize("name", ["none", "nul\0byte"])
def test_a_file_that_is_not_there_is_told_of(tmp_path: Path, name: str) -> None:
    with pytest.raises(CudaCoreError, match="cannot be opened"):
        Source(tmp_path / name)


def test_what_is_read_in_all_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(bytes(1000))
    with Source(path, most_bytes=2000) as source:
        source.read(0, 1000, "all")
        source.read(0, 1000, "all")
        with pytest.raises(CudaCoreError, match="take more than is read of a core"):
            source.read(0, 1, "a byte")


def test_small_reads_are_bounded_too(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(b"x")
    with Source(path, most_bytes=2560) as source:
        for _ in range(10):
            source.read(0, 1, "a byte")
        with pytest.raises(CudaCoreError, match="take more"):
            source.read(0, 1, "a byte")


def test_time_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(b"x")
    with Source(path, most_seconds=-1.0) as source, pytest.raises(CudaCoreError, match="in time"):
        source.read(0, 1, "a byte")


def test_a_file_that_shrinks_meanwhile_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(bytes(100))
    with Source(path) as source:
        os.truncate(path, 50)
        with pytest.raises(CudaCoreError, match="all was cut off while it was read"):
            source.read(0, 100, "all")


def test_a_window_is_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(b"0123456789")
    with Source(path) as source:
        window = io.BufferedReader(Window(source, 2, 5, "a part"), 4)
        assert window.read() == b"23456"
        assert window.seek(0, io.SEEK_END) == 5
        assert window.read(1) == b""
        window.seek(1)
        assert (window.read(2), window.tell()) == (b"34", 3)
        # A part that is said to be longer than the file ends with it.
        assert io.BufferedReader(Window(source, 8, 1 << 60, "a part"), 4).read() == b"89"
        assert io.BufferedReader(Window(source, 1 << 60, 1, "a part"), 4).read() == b""
        raw = Window(source, 0, 10, "a part")
        for offset in (-1, 1 << 63):
            with pytest.raises(ValueError, match="there is no byte"):
                raw.seek(offset)


@pytest.mark.parametrize("error", [ValueError("odd"), OverflowError("big"), KeyError("key"), MemoryError()])
def test_errors_of_the_parser_name_the_file(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "core"
    path.write_bytes(b"x")
    with Source(path) as source, pytest.raises(CudaCoreError, match=r"core: a header cannot be read: ."):  # noqa: SIM117
        with parsing(source, "a header"):
            raise error


def test_without_pyelftools_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = tmp_path / "core"
    path.write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "elftools.common.exceptions", None)
    with Source(path) as source, pytest.raises(CudaCoreError, match="pyelftools is not installed"):  # noqa: SIM117
        with parsing(source, "a header"):
            pass
