import os
import stat
from pathlib import Path

import pytest

from sglang_crashkit.installer.files import FileOps, read_or_none, staged_name, undo_name


def test_a_new_file_takes_the_mode_of_the_one_it_will_replace(tmp_path):
    old = tmp_path / "old"
    old.write_text("old")
    old.chmod(0o640)
    FileOps().write_new(tmp_path / "new", b"new", like=old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    assert (tmp_path / "new").read_bytes() == b"new"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_new_file_takes_the_owner_of_the_one_it_will_replace(tmp_path):
    old = tmp_path / "old"
    old.write_text("old")
    os.chown(old, 1234, 2345)
    FileOps().write_new(tmp_path / "new", b"new", like=old)
    assert ((tmp_path / "new").stat().st_uid, (tmp_path / "new").stat().st_gid) == (1234, 2345)


def test_a_left_over_is_not_written_into(tmp_path):
    cache, left_over = tmp_path / "cache", tmp_path / "left-over"
    cache.write_text("cached")
    os.link(cache, left_over)
    FileOps().write_new(left_over, b"new")
    assert cache.read_text() == "cached"


def test_the_old_file_is_kept_where_links_do_not_work(tmp_path, monkeypatch):
    file = tmp_path / "a.py"
    file.write_text("old")

    def refuse(*_args, **_kwargs):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    FileOps().keep_old(file)
    assert undo_name(file).read_text() == "old"


def test_bytecode_of_this_module_goes_and_that_of_others_stays(tmp_path):
    cache = tmp_path / "__pycache__"
    cache.mkdir()
    names = ["a.cpython-311.pyc", "a.cpython-312.opt-1.pyc", "ab.cpython-311.pyc", "a.b.txt"]
    for name in names:
        (cache / name).touch()
    FileOps().remove_bytecode(tmp_path / "a.py")
    assert sorted(path.name for path in cache.iterdir()) == ["a.b.txt", "ab.cpython-311.pyc"]


def test_every_step_is_announced_before_it_is_taken(tmp_path):
    steps: list[str] = []
    ops = FileOps(steps.append)
    file = tmp_path / "sub" / "a.py"
    made: list[Path] = []
    ops.make_folders(file.parent, made)
    assert made == [file.parent]
    ops.write_new(staged_name(file), b"new")
    ops.replace(staged_name(file), file)
    ops.sync_folders([file.parent, tmp_path / "gone"])
    ops.unlink(file)
    ops.unlink(file)
    ops.remove_empty(file.parent)
    assert [step.split()[0] for step in steps] == ["make", "create", "fill", "replace", "sync", "remove", "remove"]
    assert read_or_none(file) is None
    assert read_or_none(Path(__file__) / "no") is None
