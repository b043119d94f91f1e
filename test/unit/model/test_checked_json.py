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
