"""What `explain` answers to the cases of test/corpus, as scripts/score counts it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lanelib.scoring import CHANGES, Row, score_folder, summary

CORPUS = Path(__file__).parents[2] / "corpus"
#: Of all cases, how many are right at least: raise it with each improvement.
RIGHT = 0.90
#: An eighth of the cases may have fewer by so much: which ones it holds is chance, and changes with each new case.
BY_CHANCE, SAMPLE = 0.03, 400
#: How far a change of the carrier may lower that. A head that is cut takes the arguments with it.
BY_CARRIER = {"cut-head": 0.03, "colours": 0.02, "prefix": 0.02}


@pytest.fixture(
    scope="module", params=[pytest.param(8, id="an eighth"), pytest.param(1, id="all", marks=pytest.mark.wide)]
)
def rows(request: pytest.FixtureRequest) -> list[Row]:
    return score_folder(CORPUS, every=request.param)


def share(rows: list[Row]) -> float:
    return sum(row.result == "right" for row in rows) / len(rows)


def test_most_cases_are_right(rows: list[Row]) -> None:
    assert share(rows) >= (RIGHT if len(rows) > SAMPLE else RIGHT - BY_CHANCE), [summary(rows)] + [
        f"{row.case}: {'; '.join(row.short)}" for row in rows if row.result != "right"
    ]


def test_no_answer_is_wrong_and_sure_of_it(rows: list[Row]) -> None:
    assert [row.case for row in rows if row.result == "wrong, established"] == []


def test_nothing_is_told_where_nothing_failed(rows: list[Row]) -> None:
    assert [(row.case, row.kind) for row in rows if row.result == "false alarm"] == []


@pytest.mark.wide
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows", [1], ids=["all"], indirect=True)
def test_the_carrier_of_a_log_changes_nothing(change: str, rows: list[Row]) -> None:
    changed = score_folder(CORPUS, [change])
    assert share(changed) >= share(rows) - BY_CARRIER[change], Counter(row.result for row in changed)
