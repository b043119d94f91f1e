from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sglang_crashkit.cli.commands import doctor
from sglang_crashkit.cli.main import main
from sglang_crashkit.doctor import facts
from sglang_crashkit.doctor.facts import Installation
from sglang_crashkit.doctor.rules import Finding


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server of another test is looked at, and SGLang is what it should be."""
    monkeypatch.setattr(doctor, "_find_servers", lambda _pid: [])
    monkeypatch.setattr(facts, "read_installation", lambda _python: Installation("patched", "SGLang 0.5.23"))


def test_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--crash-dump-folder", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is True
    assert {"kit", "py-spy", "crash folder", "grace period"} <= {finding["topic"] for finding in told["findings"]}


def test_a_problem_is_the_exit_status_with_its_path_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a\x1b[2J").write_text("")
    assert main(["doctor", "--crash-dump-folder", str(tmp_path / "a\x1b[2J")]) == 1
    text = capsys.readouterr().out
    assert "problem  crash folder" in text
    assert "\x1b" not in text


def test_a_process_of_no_server_is_nothing_to_look_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    assert main(["doctor", "--pid", str(os.getpid())]) == 3
    assert "is of no server" in capsys.readouterr().err


def test_a_drill_is_of_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--drill", "--pid", "7"]) == 2
    assert "next: sglang-crashkit doctor --drill" in capsys.readouterr().err


def test_a_finding_has_its_reason_and_what_mends_it() -> None:
    lines = doctor.format_findings([Finding("warning", "disk", "is full", "no room", ("rm a", "rm b"))])
    assert [line.split(":")[0].strip() for line in lines] == [
        "warning  disk",
        "why",
        "next",
        "next",
        "result   1 warning",
    ]


def test_what_is_wrong_is_counted_at_the_end() -> None:
    found = [Finding("problem", "a", "b"), Finding("ok", "a", "b"), Finding("warning", "a", "b")]
    assert doctor.format_findings(found)[-1] == "result   1 problem, 1 warning"
    assert doctor.format_findings([*found, *found])[-1] == "result   2 problems, 2 warnings"
    assert doctor.format_findings(found[1:2])[-1] == "result   nothing is wrong"
