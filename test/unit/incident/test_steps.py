from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.steps import read_steps
from sglang_crashkit.model.step import Step


def line(number: int) -> str:
    return json.dumps(Step(number, 1.0, 1.5, "processed", "decode", (), 0, 0).to_json()) + "\n"


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    # Two records of one ring may come in another order, and a killed handler leaves a torn last line.
    (ranks / "scheduler_TP1-12.steps.jsonl").write_text(line(4) + line(3) + '{"number": 5, "mo')
    (ranks / "scheduler_TP0-11.steps.jsonl").write_text(line(3))
    (ranks / "scheduler_TP0-11.exception.txt").write_text("no steps")
    return tmp_path


def test_steps_come_by_rank_and_number_without_torn_lines(incident: Path) -> None:
    first, second = read_steps(incident)
    assert (first.title, first.pid, first.ranks, first.unread) == ("sglang::scheduler_TP0", 11, {"tp": 0}, 0)
    assert ([step.number for step in second.steps], second.unread) == ([3, 4], 1)


def test_one_step_is_read_alone(incident: Path) -> None:
    assert [[step.number for step in rank.steps] for rank in read_steps(incident, 4)] == [[], [4]]


def test_what_cannot_be_read_is_named(incident: Path) -> None:
    (incident / "ranks" / "x.steps.jsonl").mkdir()
    with pytest.raises(CrashkitError, match=f"{incident} cannot be read"):
        read_steps(incident)
