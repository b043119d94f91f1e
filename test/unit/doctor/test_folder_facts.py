from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_crashkit.doctor.folder_facts import file_system_of, read_folder
from unit.support.stored import make_incident


def test_what_incidents_take_is_counted(tmp_path: Path) -> None:
    (tmp_path / "host" / "incidents").mkdir(parents=True)
    make_incident(tmp_path / "host" / "incidents", pieces={"a": "x" * 9000})
    facts = read_folder(tmp_path, {"SGLANG_CRASHKIT_MAX_USE_MB": "5"})
    assert (facts.incidents, facts.max_use, facts.problem) == (1, 5 << 20, "")
    assert 9000 < facts.use < 100_000
    assert facts.has_locks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host"]


def test_a_missing_folder_is_judged_by_the_one_above(tmp_path: Path) -> None:
    facts = read_folder(tmp_path / "a" / "b", {})
    assert (facts.exists, facts.problem) == (False, "")
    assert facts.total > 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_its_place_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "crash").write_text("")
    assert "is not a folder" in read_folder(tmp_path / "crash", {}).problem


def test_a_folder_of_the_kernel_cannot_be_written_to() -> None:
    assert "cannot be written to" in read_folder(Path("/proc/self"), {}).problem


@pytest.mark.parametrize(("path", "kind"), [("/proc/self/status", "proc"), ("/dev/shm", "tmpfs"), ("/sys", "sysfs")])
def test_the_file_system_of_a_path_is_known(path: str, kind: str) -> None:
    if not os.path.ismount(f"/{path.split('/')[1]}") and not os.path.ismount(path):
        pytest.skip(f"nothing is mounted at {path}")
    assert file_system_of(Path(path)) == kind
