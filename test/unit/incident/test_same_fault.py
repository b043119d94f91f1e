from __future__ import annotations

from typing import Any

import pytest

from sglang_crashkit.incident.fingerprint import is_same_fault

LOOP = ["spin (model.py:7)", "forward (model.py:3)", "run_batch (scheduler.py:2)", "event_loop (scheduler.py:1)"]
OUTER = ["main (scheduler.py:9)"]


def hung(doing: list[str], *, kind: str = "hang", first: int | None = 8, **more: Any) -> dict[str, Any]:
    """Return an incident of two ranks, of which one hangs, or both where none is named."""
    rank = {"role": "scheduler", "doing": doing, **more}
    waiting = {"role": "scheduler", "doing": doing if first is None else ["wait (y.py:1)"]}
    processes = [{"pid": 8, "rank": {"tp": 0}, **rank}, {"pid": 9, "rank": {"tp": 1}, **waiting}]
    failure = {"pid": first, "title": "x"} if first is not None else None
    return {"verdict": {"kind": kind, "first_failure": failure}, "processes": processes, "server": {}}


@pytest.mark.parametrize(
    "doing",
    [
        LOOP,
        ["spin (model.py:8)", *LOOP[1:]],
        ["helper (model.py:30)", "spin (model.py:8)", *LOOP[1:3]],
        ["spin (model.py:8)"],
        [],
    ],
)
def test_a_hang_is_the_same_whatever_line_it_is_on(doing: list[str]) -> None:
    assert is_same_fault(hung(LOOP), hung(doing))
    assert is_same_fault(hung(doing), hung(LOOP))
    assert is_same_fault(hung(LOOP, first=None), hung(doing, first=None))


def test_two_calls_of_one_loop_are_the_same_hang() -> None:
    assert is_same_fault(hung(["one (a.py:1)", *LOOP[:3]]), hung(["two (b.py:1)", *LOOP[:3]]))


@pytest.mark.parametrize(
    "other",
    [
        hung(["elsewhere (model.py:7)", "compute (model.py:3)", *LOOP[2:]]),
        hung(["spin (other.py:7)", "forward (other.py:3)", *LOOP[2:]]),
        hung(["x (a.py:1)", "y (a.py:1)", "z (a.py:1)", *OUTER]),
        hung(LOOP, kind="exception"),
        hung(LOOP, role="detokenizer"),
        hung(LOOP, state={"State": "T (stopped)"}),
        {"verdict": {"kind": "hang"}, "processes": []},
        {},
    ],
)
def test_another_hang_is_another_fault(other: dict[str, Any]) -> None:
    assert not is_same_fault(hung(LOOP), other)
    assert not is_same_fault(other, hung(LOOP))


def test_of_what_raised_the_line_counts() -> None:
    raised, later = hung(LOOP, kind="exception"), hung(["spin (model.py:8)", *LOOP[1:]], kind="exception")
    assert is_same_fault(raised, raised)
    assert not is_same_fault(raised, later)
