from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sglang_crashkit.handler.folders import remove_empty_spools, remove_runtime_folders
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.folder_lock import FolderLock
from sglang_crashkit.kernel.identity_key import own_namespace, server_key

DEAD = f"4194305-1-{own_namespace()}"


@pytest.fixture
def living() -> str:
    stat = procfs.read_stat(os.getpid())
    assert stat is not None
    return server_key(stat.pid, stat.start_ticks)


def make(parent: Path, *names: str, file: str = "") -> None:
    for name in names:
        (parent / name).mkdir()
        if file:
            (parent / name / file).touch()
        os.utime(parent / name, (time.time() - 60,) * 2)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_empty_spool_of_a_server_that_is_gone_is_removed(tmp_path: Path, living: str) -> None:
    make(tmp_path, f".spool-{DEAD}", ".spool-1-2-3", f".spool-{living}", "20261121T012613.582Z-killed-56e794fa")
    remove_empty_spools(tmp_path)
    assert names_in(tmp_path) == {f".spool-{living}", "20261121T012613.582Z-killed-56e794fa"}


def test_a_record_that_nobody_took_in_stays(tmp_path: Path) -> None:
    make(tmp_path, f".spool-{DEAD}", file="exception-8.json")
    remove_empty_spools(tmp_path)
    assert (tmp_path / f".spool-{DEAD}" / "exception-8.json").exists()


def test_a_spool_in_use_or_just_made_stays(tmp_path: Path) -> None:
    make(tmp_path, ".spool-1-2-3")
    (tmp_path / ".spool-1-2-4").mkdir()
    lock = FolderLock(tmp_path / ".spool-1-2-3")
    assert lock.acquire() == "held"
    remove_empty_spools(tmp_path)
    assert names_in(tmp_path) == {".spool-1-2-3", ".spool-1-2-4"}
    lock.release()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / f".spool-{DEAD}").symlink_to(tmp_path / "theirs")
    remove_empty_spools(tmp_path)
    assert names_in(tmp_path) == {"theirs", f".spool-{DEAD}"}


def test_the_runtime_folder_of_a_server_that_is_gone_is_removed_with_all_in_it(tmp_path: Path, living: str) -> None:
    """A server that lives on without its handler has its sockets there; one of another namespace cannot be seen."""
    make(tmp_path, DEAD, living, "1-2-3", "notes", file="handler.pid")
    remove_runtime_folders(tmp_path)
    assert names_in(tmp_path) == {living, "1-2-3", "notes"}


def test_a_runtime_folder_whose_handler_is_at_work_stays(tmp_path: Path) -> None:
    make(tmp_path, DEAD)
    lock = FolderLock(tmp_path / DEAD)
    assert lock.acquire() == "held"
    remove_runtime_folders(tmp_path)
    assert names_in(tmp_path) == {DEAD}
    lock.release()


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    remove_empty_spools(tmp_path / "absent")
    remove_runtime_folders(tmp_path / "absent")
