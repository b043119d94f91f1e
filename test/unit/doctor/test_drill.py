from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.doctor.drill import _crash, check_incident, drill
from sglang_crashkit.doctor.folder_facts import FolderFacts
from sglang_crashkit.doctor.rules import has_problem
from unit.support.waiting import LONG

SOUND: dict[str, Any] = {
    "verdict": {"first_failure": {"pid": 2, "title": "sglang::scheduler_TP1"}},
    "processes": [
        {"title": "sglang::scheduler_TP1", "exit": {"signal": "SIGKILL"}},
        {"title": "sglang::scheduler_TP0", "evidence": [{"kind": "stack", "status": "captured", "source": "py-spy"}]},
    ],
}


def test_a_drill_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, told = tmp_path / "crash", tmp_path / "told"
    folder.mkdir()
    # A busy machine takes longer than it is to take.
    for name, secs in (("_START_SECS", LONG), ("_INCIDENT_SECS", 2 * LONG), ("_END_SECS", LONG)):
        monkeypatch.setattr(f"sglang_crashkit.doctor.drill.{name}", secs)
    for name, secs in (("BUDGET", LONG), ("CAPTURE", LONG / 6)):
        monkeypatch.setenv(f"SGLANG_CRASHKIT_{name}_SECS", f"{secs}")
    monkeypatch.setenv("SGLANG_CRASHKIT_ON_INCIDENT", f"touch {told}")
    monkeypatch.setenv("SGLANG_CRASHKIT_METRICS_FILE", str(told))
    findings = list(drill(folder))
    assert [finding.level for finding in findings] == ["ok", "ok"], findings
    # And nobody is woken by it.
    assert list(tmp_path.iterdir()) == [folder]
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    folder = tmp_path / "not there"
    (finding,) = drill(folder)
    assert finding.level == "problem"
    assert finding.next == (f"df -h '{folder}'", f"ls -ld '{folder}'")


def test_a_folder_that_cannot_be_written_to_is_a_problem() -> None:
    (finding,) = drill(Path("/proc/self"))
    assert "cannot be written to" in finding.what
    assert finding.next == ("df -h /proc/self", "ls -ld /proc/self")


def test_a_full_folder_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = FolderFacts(str(tmp_path), free=1 << 20, max_use=1 << 32)
    monkeypatch.setattr("sglang_crashkit.doctor.drill.read_folder", lambda *_arguments: full)
    (finding,) = drill(tmp_path)
    assert finding.what.endswith("1 MB are free, and an incident has no room")


def test_an_incident_in_the_fallback_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fall_back(_folder: Path, environ: dict[str, str]) -> object:
        return _crash(Path("/proc/self"), environ)

    monkeypatch.setattr("sglang_crashkit.doctor.drill._crash", fall_back)
    problem, *rest = drill(tmp_path)
    assert problem.what.endswith("the incident went to the temporary folder")
    assert problem.next == (f"df -h {tmp_path}", f"ls -ld {tmp_path}")
    assert rest == []


def test_a_handler_that_cannot_start_is_a_problem(tmp_path: Path) -> None:
    (finding,) = drill(tmp_path, {"PYTHONHOME": "/nonexistent"})
    assert finding.level == "problem"


def test_a_sound_incident_passes() -> None:
    assert [finding.level for finding in check_incident(SOUND)] == ["ok"]


@pytest.mark.parametrize("document", [{}, SOUND | {"verdict": None}, SOUND | {"processes": []}])
def test_an_incident_that_says_something_else_is_a_problem(document: dict[str, Any]) -> None:
    assert has_problem(check_incident(document))
