from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sglang_crashkit.replay.values import MAX_FAILURES, reduce_value


class Fault:
    """Fails on values that a rule names, and counts how often."""

    def __init__(self, fails: Callable[[Any], bool]) -> None:
        self._fails = fails
        self.failures = 0
        self.tried = 0

    def first_failing(self, values: Sequence[Any]) -> int | None:
        self.tried += len(values)
        at = next((place for place, value in enumerate(values) if self._fails(value)), None)
        self.failures += at is not None
        return at


def _types(schema: object) -> set[object]:
    inner = schema.get("properties", {}) if isinstance(schema, dict) else {}
    return {one.get("type") for one in inner.values() if isinstance(one, dict)} if isinstance(inner, dict) else set()


def _schema(text: str) -> bool:
    try:
        return "poison" in _types(json.loads(text))
    except ValueError:
        return False


SCHEMA = json.dumps(
    {"title": "x", "properties": {name: {"type": "poison" if name == "f" else "string"} for name in "abcdefgh"}}
)


@pytest.mark.parametrize(
    ("value", "fails", "expected"),
    [
        (["a", "b", "bad", "c"], lambda value: "bad" in value, ["bad"]),
        ([f"word {n}" for n in range(1000)], lambda value: any(" 637" in one for one in value), [" 637"]),
        (["l", "x", "y", "r", "z"], lambda value: {"l", "r"} <= set(value), ["l", "r"]),
        ({"3": 1.0, "600": 5, "7": 2.0}, lambda value: "600" in value, {"600": 0}),
        ({"a": {"b": [1, 600]}}, lambda value: 600 in value.get("a", {}).get("b", []), {"a": {"b": [600]}}),
        ("some ((text", lambda value: "((" in value, "(("),
        ("y" * 100_000, lambda value: len(value) >= 70_000, "y" * 70_000),
        (SCHEMA, _schema, '{"properties": {"f": {"type": "poison"}}}'),
        (640, lambda value: value > 512, 513),
        (True, lambda value: value is True, True),
        (None, lambda value: value is None, None),
        (float("inf"), lambda value: value == float("inf"), float("inf")),
        ([], lambda _value: True, []),
        ("abc", lambda _value: True, ""),
    ],
)
def test_a_value_is_reduced_to_what_it_takes(value: Any, fails: Callable[[Any], bool], expected: Any) -> None:
    fault = Fault(fails)
    assert reduce_value(value, fault.first_failing) == expected
    assert fault.failures <= MAX_FAILURES
    assert fault.tried < 300


def test_it_ends_after_so_many_failures() -> None:
    value = [{f"k{number}": "x" * 1000 for number in range(50)} for _ in range(50)]
    fault = Fault(lambda value: len(json.dumps(value)) > 9000)
    found = reduce_value(value, fault.first_failing, 3)
    assert fault.failures <= 3
    assert 9000 < len(json.dumps(found)) < len(json.dumps(value))


def test_what_fails_as_it_is_only_is_kept() -> None:
    value = {"stop": ["a", "b"], "schema": {"type": "object"}}
    assert reduce_value(value, lambda _values: None) == value
