from __future__ import annotations

from typing import Any

import pytest

from sglang_crashkit.incident.names import Names
from sglang_crashkit.incident.timeline_words import Run, runs_of


def event(number: int, name: str = "process_exited", **fields: Any) -> dict[str, Any]:
    time = f"2026-01-02T03:04:{number / 100:09.6f}Z"
    return {"time": time, "event": name, "pid": number, "title": f"sglang::scheduler_TP{number}"} | fields


def told(*events: dict[str, Any]) -> list[str]:
    document = {"timeline": list(events)}
    return [f"{run.who(Names(document))}: {run.details()}" for run in runs_of(document)]


def test_many_that_are_alike_are_one_line() -> None:
    assert told(*(event(number, signal="SIGKILL") for number in range(514))) == [
        "TP0-513 (514 processes): within 5.130 s, signal SIGKILL"
    ]


def test_numbers_that_differ_are_those_of_the_first() -> None:
    silent = [event(number, "no_progress", silent_secs=5.1 + number) for number in range(20)]
    assert told(*silent) == ["TP0-19 (20 processes): within 0.190 s, silent_secs 5.1 (the first)"]


@pytest.mark.parametrize(
    ("of_all", "of_one"),
    [({"code": 1}, {"code": 139}), ({"message": "expected 8 ranks, 7 came"}, {"message": "expected 8 ranks, 6 came"})],
)
def test_the_one_number_that_tells_stands_apart(of_all: dict[str, Any], of_one: dict[str, Any]) -> None:
    lines = told(*(event(number, **(of_one if number == 5 else of_all)) for number in range(20)))
    assert len(lines) == 2
    assert lines[0].startswith("TP0-4, TP6-19 (19 processes)")
    assert lines[1].startswith("TP5: ")


def test_few_events_and_those_of_no_process_stand_alone() -> None:
    assert len(told(*(event(number) for number in range(8)))) == 8
    assert len(told(*({"time": str(number), "event": "note"} for number in range(20)))) == 20


def test_what_happened_between_them_stands_at_its_own_time() -> None:
    lines = told(*(event(number, signal=f"SIG{'AB'[number == 10]}") for number in range(20)), {"time": "2026-01-02"})
    assert lines[1] == "TP0-9, TP11-19 (19 processes): within 0.190 s, signal SIGA"
    assert lines[2] == "TP10: signal SIGB"


def test_two_alternating_kinds_are_two_lines_and_later_ones_another() -> None:
    names = ("exception", "no_progress", "no_progress")
    events = [event(number * 10 + 900 * (part == 2), name) for number in range(9) for part, name in enumerate(names)]
    assert [line.partition(")")[0] for line in told(*events)] == [
        "TP0, TP10, TP20, TP30, TP40, TP50, TP60, TP70, TP80 (9 processes",
        "TP0, TP10, TP20, TP30, TP40, TP50, TP60, TP70, TP80 (9 processes",
        "TP900, TP910, TP920, TP930, TP940, TP950, TP960, TP970, TP980 (9 processes",
    ]


def test_what_is_long_is_cut() -> None:
    segments = [{"name": f"s{number}", "bytes": 4096, "why": "it is held"} for number in range(9)]
    run = Run([{"event": "x", "pids": list(range(512)), "segments": segments, "message": "m" * 300}])
    words = run.details()
    assert words.startswith("pids 0, 1, 2, 3, 4, 5, 6, 7 and 504 more, 9 segments left, 37 kB: s0 (it is held), ")
    assert words.endswith(f"s7 (it is held) and 1 more, {'m' * 97}...")
