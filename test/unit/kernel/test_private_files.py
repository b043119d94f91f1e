from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel import private_files
from sglang_crashkit.kernel.private_files import create_private, make_private_folder, write_json, write_private


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> str:
    return oct(stat.S_IMODE(path.lstat().st_mode))


def test_a_folder_and_its_missing_parents_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    folder = make_private_folder(tmp_path / "a" / "b" / "c")
    assert folder == tmp_path / "a" / "b" / "c"
    assert [mode_of(path) for path in (folder, folder.parent, folder.parent.parent)] == ["0o700"] * 3


def test_a_folder_of_ones_own_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("kept")
    make_private_folder(tmp_path / "mine")
    assert (tmp_path / "mine" / "file").read_text() == "kept"


def test_a_relative_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_private_folder(Path("a/b"))
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("target", ["elsewhere", "missing"])
def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(CrashkitError, match="link is not a folder"):
        make_private_folder(tmp_path / "link")
    assert not (tmp_path / "missing").exists()


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CrashkitError, match="file is not a folder"):
        make_private_folder(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        make_private_folder(tmp_path / "file" / "below")


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


def test_json_reads_back(tmp_path: Path) -> None:
    value = {"text": "\udcff ü", "path": tmp_path, "list": [1, None]}
    write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == value | {"path": str(tmp_path)}


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
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == "27\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_private(tmp_path / "absent" / "file", b"")


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path) -> None:
    private_files.sync_folder(tmp_path)
    private_files.sync_folder(tmp_path / "absent")
