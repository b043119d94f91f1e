from __future__ import annotations

import pytest

from sglang_crashkit.incident.names import Names, join_names, short_name, stopped_state

DOCUMENT = {
    "server": {"pid": 7},
    "processes": [
        {"pid": 8, "title": "sglang::scheduler_TP1", "role": "scheduler"},
        {"pid": 88, "title": "sglang::scheduler_TP11", "role": "scheduler"},
        {"pid": 9, "title": "python -m sglang.launch_server", "role": "server"},
    ],
}


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        ([], ""),
        (["TP0"], "TP0"),
        ([f"TP{number}" for number in (7, 0, 2, 3, 4, 5, 6)], "TP0, TP2-7"),
        (["DP1_TP0", "DP0_TP0", "DP0_TP1"], "DP0_TP0-1, DP1_TP0"),
        (["detokenizer", "TP10", "TP9", "the main process"], "TP9-10, detokenizer, the main process"),
        (["TP0", "TP0"], "TP0"),
    ],
)
def test_names_in_a_row_are_one(names: list[str], joined: str) -> None:
    assert join_names(names) == joined


@pytest.mark.parametrize(
    ("title", "role", "short"),
    [
        ("sglang::scheduler_DP0_TP1", "scheduler", "DP0_TP1"),
        ("sglang::scheduler", "scheduler", "scheduler"),
        ("sglang::detokenizer", "detokenizer", "detokenizer"),
        ("python -m x", "server", "the main process"),
        ("Rank 1 scheduler", "starting", "Rank 1 scheduler"),
    ],
)
def test_what_goes_without_saying_is_left_out(title: str, role: str, short: str) -> None:
    assert short_name(title, role) == short


def test_sentences_get_short_names() -> None:
    names = Names(DOCUMENT)
    text = "python -m sglang.launch_server (pid 9) lost sglang::scheduler_TP1 (pid 8), sglang::scheduler_TP11 (pid 88)."
    assert names.in_words(text) == "the main process lost TP1, TP11."
    assert [names.short({"pid": 8}), names.short({"pid": 5, "title": "x"}), names.short({"pid": 7})] == [
        "TP1",
        "x",
        "the main process",
    ]


@pytest.mark.parametrize(
    ("process", "words"),
    [
        ({}, ""),
        ({"state": {"State": "S (sleeping)"}}, ""),
        ({"state": {"State": "T (stopped)"}}, "stopped (T)"),
        ({"state": {"State": "t (tracing stop)"}}, "stopped (t)"),
        ({"looks": [{"state": "T"}, {"state": ""}], "state": {"State": "S (sleeping)"}}, "stopped (T)"),
    ],
)
def test_who_was_stopped_is_told(process: dict[str, object], words: str) -> None:
    assert stopped_state(process) == words
