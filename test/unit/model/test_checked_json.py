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
        (checked.number, float("nan"), "nan is not a number"),
        (checked.number, float("-inf"), "-inf is not a number"),
        (checked.text, None, "None is not text"),
        (checked.entries, "ab", "'ab' is not a list"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(check: Callable[[Any], Any], value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        check(value)


def test_values_of_the_type_are_given_back() -> None:
    assert (checked.whole(3), checked.number(3), checked.entries([1])) == (3, 3.0, [1])
    # No file takes a lone surrogate.
    assert checked.text("é\ud800") == "é\\ud800"
    assert checked.texts(["a", "é\ud800"]) == ["a", "é\\ud800"]
    assert checked.texts(["a", "b"]) == ["a", "b"]


def test_of_many_texts_one_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^5 is not text$"):
        checked.texts(["a", 5])


@pytest.mark.parametrize("numbers", [[2], [-1], [True], ["0"], [0, None]])
def test_a_number_that_is_not_in_the_table_is_refused(numbers: list[Any]) -> None:
    assert checked.pick("ab", [1, 0]) == ["b", "a"]
    with pytest.raises(ValueError, match="in a table"):
        checked.pick("ab", numbers)


@pytest.mark.parametrize("document", [None, [], {}, {"schema_version": "1"}, {"schema_version": True}])
def test_what_has_no_version_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"^not a list of frogs: there is no schema_version$"):
        checked.check_version(document, "list of frogs", 1)
