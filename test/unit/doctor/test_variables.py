from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_crashkit.doctor.variables import OWN, VALUES, check_variables

_TABLES = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
FOLDER = ["--crash-dump-folder", "/crash"]


def levels(environ: dict[str, str], arguments: list[str] = FOLDER) -> list[str]:
    return [finding.level for finding in check_variables(environ, arguments)]


def test_every_documented_variable_is_known() -> None:
    documented = set(re.findall(r"SGLANG_CRASHKIT_[A-Z_]*[A-Z]\b", _TABLES))
    assert set(VALUES) | OWN == documented


def test_all_is_well_without_any() -> None:
    assert levels({}) == ["ok"]


@pytest.mark.parametrize(
    "environ",
    [
        {"SGLANG_CRASHKIT_ENABLED": "Yes", "SGLANG_CRASHKIT_EXIT_SECS": "60.5", "SGLANG_CRASHKIT_PROMPTS": "IDS"},
        {"SGLANG_CRASHKIT_HANG_SECS": " 30 ", "SGLANG_CRASHKIT_TERMINATION_LOG": "0", "SGLANG_CRASHKIT_SOCKET": "/x"},
    ],
)
def test_what_can_be_read_is_well(environ: dict[str, str]) -> None:
    assert levels(environ) == ["ok"]


def test_a_misspelt_variable_is_named_right() -> None:
    (finding,) = check_variables({"SGLANG_CRASHKIT_HANG_SEC": "5"}, FOLDER)
    assert (finding.level, finding.next) == ("warning", ("SGLANG_CRASHKIT_HANG_SECS=5",))


@pytest.mark.parametrize(
    ("environ", "arguments", "level"),
    [
        ({"SGLANG_CRASHKIT_STEPS": "on"}, FOLDER, "warning"),
        ({"SGLANG_CRASHKIT_EXIT_SECS": "1m"}, FOLDER, "warning"),
        ({"SGLANG_CRASHKIT_ENABLED": "0"}, FOLDER, "problem"),
        ({"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}, [], "problem"),
        ({"SGLANG_CRASHKIT_BUDGET_SECS": "120"}, FOLDER, "warning"),
        ({"SGLANG_CRASHKIT_HANG_SECS": "0"}, FOLDER, "note"),
        ({"SGLANG_CRASHKIT_HANG_SECS": "30"}, [*FOLDER, "--watchdog-timeout=20"], "warning"),
        ({"SGLANG_CRASHKIT_MAX_USE_MB": "100"}, FOLDER, "warning"),
        ({"SGLANG_CRASHKIT_QUARANTINE": "refuse"}, [], "warning"),
        ({"SGLANG_CRASHKIT_PHOTOGRAPH_SECS": "1"}, FOLDER, "note"),
    ],
)
def test_settings_against_each_other_are_found(environ: dict[str, str], arguments: list[str], level: str) -> None:
    assert levels(environ, arguments) == [level]


def test_no_default_is_warned_of() -> None:
    assert levels({"SGLANG_CRASHKIT_EXIT_SECS": "15"}) == ["ok"]
    (finding,) = check_variables({}, [*FOLDER, "--watchdog-timeout=20"])
    assert (finding.level, finding.next) == ("note", ("SGLANG_CRASHKIT_HANG_SECS=10",))


@pytest.mark.parametrize("name", ["SGLANG_CRASHKIT_WEBHOOK", "SGLANG_CRASHKIT_WEBHOOK_SECRT"])
def test_what_may_be_a_key_is_not_shown(name: str) -> None:
    (finding,) = check_variables({name: "hunter2"}, FOLDER)
    assert finding.level == "warning"
    assert "hunter2" not in repr(finding)
