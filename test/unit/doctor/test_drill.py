from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.doctor.drill import check_incident, drill
from sglang_crashkit.doctor.findings import has_problem

SOUND: dict[str, Any] = {
    "verdict": {"first_failure": {"pid": 2, "title": "sglang::scheduler_TP1"}},
    "processes": [
        {"title": "sglang::scheduler_TP1", "exit": {"signal": "SIGKILL"}},
        {"title": "sglang::scheduler_TP0", "evidence": [{"kind": "stack", "status": "captured", "source": "py-spy"}]},
    ],
}


def test_a_drill_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_BUDGET_SECS", "5")
    began = time.monotonic()
    findings = list(drill(tmp_path))
    assert [finding.level for finding in findings] == ["ok", "ok"], findings
    assert time.monotonic() - began < 30
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    assert has_problem(drill(tmp_path / "missing"))


def test_a_handler_that_cannot_start_is_a_problem(tmp_path: Path) -> None:
    (finding,) = drill(tmp_path, {"PYTHONHOME": "/nonexistent"})
    assert finding.level == "problem"


def test_a_sound_incident_passes() -> None:
    assert [finding.level for finding in check_incident(SOUND)] == ["ok"]


@pytest.mark.parametrize("document", [{}, SOUND | {"verdict": None}, SOUND | {"processes": []}])
def test_an_incident_that_says_something_else_is_a_problem(document: dict[str, Any]) -> None:
    assert has_problem(check_incident(document))
