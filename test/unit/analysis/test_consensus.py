"""What SGLang's rank consensus checker found, by what its ranks log: upstream's own words, of 0.5.23."""

from __future__ import annotations

import pytest

from sglang_crashkit.analysis.consensus import disagreement, events_in

LINE = "2026-11-28T18:00:00.000000Z CRITICAL sglang.srt.utils.rank_consensus_checker: Found rank divergence for "
SAME = "get_next_batch_to_run called params=<no check>"


def logged(*events: str) -> str:
    return f"{LINE}{len(events)} events(s)! local hash: {'0f' * 20}, events = {list(events)}\n"


@pytest.mark.parametrize(
    ("log", "events"),
    [
        ("", None),
        ("it is ready\n", None),
        (logged("a's", 'b "c"', "d"), ["a's", 'b "c"', "d"]),
        (logged("old") + logged("new"), ["new"]),
        (logged("whole", "is cut off here")[:-6], ["whole"]),
    ],
)
def test_events_are_read_as_they_were_logged(log: str, events: list[str] | None) -> None:
    assert events_in(log) == events


@pytest.mark.parametrize(
    ("ranks", "words", "outliers"),
    [
        (
            {"TP0": [SAME, "x returns result=1"], "TP1": [SAME, "x returns result=2"]},
            "TP0: x returns result=1; TP1:",
            0,
        ),
        ({"TP0": ["x" * 500], "TP1": ["x" * 500 + " (odd)"]}, f"TP1: ...{'x' * 60} (odd)", 0),
        ({"TP0": ["1"], "TP1": ["2"], "TP2": ["1"]}, "TP0 and TP2: 1; TP1: 2", 1),
        ({"TP0": [SAME], "TP1": [SAME]}, "they differ behind the first 1 events", 0),
        ({"TP1": [SAME]}, "only what TP1 did is known", 0),
    ],
)
def test_the_first_event_that_differs_is_told(ranks: dict[str, list[str]], words: str, outliers: int) -> None:
    found = disagreement({pid: (name, events) for pid, (name, events) in enumerate(ranks.items(), 10)})
    assert found.is_one
    assert words in found.statement
    assert found.pids == ((11,) if outliers else tuple(range(10, 10 + len(ranks))))
    assert bool(found.against) == bool(outliers)


def test_without_a_word_of_it_there_is_none() -> None:
    assert disagreement({}) is None
