from __future__ import annotations

import os
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from sglang_crashkit.core.shared_memory import FOLDER, Segment, mapped_by, of_server, remove_unused
from unit.waiting import child

HOLDS_A_SEGMENT = """
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
ready(segment.name)
pause()
"""


def test_what_a_killed_process_left_is_removed_when_nobody_maps_it() -> None:
    with child(HOLDS_A_SEGMENT) as process:
        name = process.first_line  # type: ignore[attr-defined]
        segments = mapped_by(process.pid)
        assert name in {segment.name for segment in segments}
        mine = {segment for segment in segments if segment.name == name}
        # GIVEN it is in use, it stays
        assert remove_unused(mine) == []
        process.kill()
        process.wait(30)
    # WHEN its only user is dead, it goes, once
    assert remove_unused(mine) == [name]
    assert remove_unused(mine) == []
    assert not (FOLDER / name).exists()


def test_a_name_that_was_given_again_is_another_segment() -> None:
    segment = shared_memory.SharedMemory(create=True, size=64)
    try:
        inode = (FOLDER / segment.name).stat().st_ino
        segment.close()
        assert remove_unused({Segment(segment.name, inode + 1)}) == []
        assert (FOLDER / segment.name).exists()
    finally:
        segment.unlink()


def test_files_with_other_names_are_nobodys_but_their_owners() -> None:
    path = FOLDER / f"weights-{os.getpid()}.safetensors"
    path.write_bytes(b"0" * 4096)
    code = f"""
import mmap
file = open({str(path)!r}, "r+b")
view = mmap.mmap(file.fileno(), 0)
ready()
pause()
"""
    try:
        with child(code) as process:
            assert path.name not in {segment.name for segment in mapped_by(process.pid)}
    finally:
        path.unlink()


def test_a_process_that_is_gone_maps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with child("ready()\npause()") as process:
        pid = process.pid
    assert mapped_by(pid) == set()
    monkeypatch.setattr("sglang_crashkit.core.shared_memory.FOLDER", tmp_path)
    assert of_server(pid) == set()
    (tmp_path / f"multi_tokenizer_args_{pid}").write_bytes(b"")
    assert {segment.name for segment in of_server(pid)} == {f"multi_tokenizer_args_{pid}"}
