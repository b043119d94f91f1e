from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang_crashkit.model import checked_json as checked


@pytest.mark.parametrize(
    ("check", "value", "why"),
    [
        (checked.whole, True, "True is not a whole number"),
        (checked.whole, 1.0, "1.0 is not a whole number"),
        (checked.number, "1", "'1' is not a number"),
        (checked.number, True, "True is not a number"),
        (checked.number, float("-inf"), "-inf is not a number"),
        (checked.text, None, "None is not text"),
        (checked.texts, ["a", 5], "5 is not text"),
        (checked.entries, "ab", "'ab' is not a list"),
        *[(lambda numbers: checked.pick("ab", numbers), numbers, "") for numbers in ([2], [-1], [True], [0, None])],
    ],
)
def test_a_value_of_another_type_is_refused_by_name(check: Callable[[Any], Any], value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$" if why else "in a table"):
        check(value)


def test_values_of_the_type_are_returned() -> None:
    assert (checked.whole(3), checked.number(3), checked.pick("ab", [1, 0])) == (3, 3.0, ["b", "a"])
    # No file takes a lone surrogate.
    assert checked.text("é\ud800") == "é\\ud800"
    assert checked.texts(["a", "é\ud800"]) == ["a", "é\\ud800"]


@pytest.mark.parametrize("time", [None, 5, "yesterday", "0000-00-00T00:00:00Z"])
def test_what_is_no_time_is_none(time: object) -> None:
    assert checked.seconds_of(time) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1970-01-01T00:00:00.000000Z"), (1_700_000_000.25, "2023-11-14T22:13:20.250000Z")],
)
def test_a_time_is_utc_with_microseconds(seconds: float, text: str) -> None:
    assert checked.iso_time(seconds) == text
