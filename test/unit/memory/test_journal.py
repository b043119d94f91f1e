from __future__ import annotations

import json
import math
import operator
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_crashkit.memory import journal
from sglang_crashkit.memory.journal import (
    MAX_CHARACTERS,
    MAX_IDS,
    MAX_WEIGHT,
    MAX_WIDE,
    JournalReader,
    JournalWriter,
    decode_request,
    describe,
    encode_begin,
    weigh,
)

SIZE = 2**20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0, time=lambda: clock.now)
    monkeypatch.setattr(journal, "time", clock)
    return clock


@pytest.fixture
def writer() -> Iterator[JournalWriter]:
    writer = JournalWriter(SIZE)
    yield writer
    writer.close()


def test_an_abort_is_told_of_a_request(writer: JournalWriter, clock: SimpleNamespace) -> None:
    under_way, ended, finished = (writer.begin({"rid": rid}) for rid in ("under way", "ended", "finished"))
    clock.now = 1001.0
    for number in (under_way, ended):
        writer.abort(number)
    clock.now = 1002.0
    # SGLang calls an abort finished, too.
    writer.end(ended, finished=True)
    writer.end(finished, finished=True)
    found = {(JournalReader(writer.fd).load(one) or {})["rid"]: one for one in JournalReader(writer.fd).requests}
    assert {rid: (one.ended, one.finished, one.aborted) for rid, one in found.items()} == {
        "under way": (None, False, 1001.0),
        "ended": (1002.0, False, 1001.0),
        "finished": (1002.0, True, None),
    }


# -- one record


MOST = 100_000
texts = st.text(st.characters(exclude_categories=[]), max_size=200)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


def test_a_clock_that_is_set_back_hides_no_request(writer: JournalWriter, clock: SimpleNamespace) -> None:
    clock.now = 10_000.0
    writer.end(writer.begin({"rid": "before"}), finished=True)
    clock.now -= 3600.0
    for number in range(3):
        writer.end(writer.begin({"rid": f"after-{number}"}), finished=True)
        clock.now += 1.0
    reader = JournalReader(writer.fd)
    assert all(one.ended is not None for one in reader.requests)
    assert [reader.load(one)["rid"] for one in reader.requests] == ["after-2", "after-1", "after-0", "before"]


#: A short text many times over: one that is drawn whole is more than hypothesis wants to draw.
long_texts = st.builds(operator.mul, st.text(min_size=1, max_size=8), st.integers(700, 6000))
names = texts.filter(lambda name: name not in ("omitted", "text", "input_ids"))


def begin(fields: dict[str, Any], text: object = None, input_ids: object = None, most: int = MOST) -> bytes:
    return encode_begin(7, 1.5, fields, text, input_ids, most)


@given(
    st.integers(0, 2**64 - 1),
    st.floats(0, 8e9),
    st.dictionaries(names, values, max_size=5),
    st.none() | texts,
    st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50),
)
def test_a_request_comes_back_as_it_was(
    number: int, seconds: float, fields: dict[str, Any], text: str | None, input_ids: list[int] | None
) -> None:
    record = encode_begin(number, seconds, fields, text, input_ids, MOST)
    expected = fields | ({} if text is None else {"text": text})
    assert decode_request(record) == expected | ({} if input_ids is None else {"input_ids": input_ids})


@pytest.mark.parametrize("ids", [[[1, 2], [3]], ["a"], [1.5], [2**70], {1: 2}], ids=repr)
def test_what_is_no_list_of_integers_is_described(ids: object) -> None:
    request = decode_request(begin({"rid": "r"}, input_ids=ids))
    assert request == {"rid": "r", "omitted": {"input_ids": describe(ids)}}


@pytest.mark.parametrize("length", [MAX_IDS, MAX_IDS + 1, 900_000])
def test_of_many_token_ids_both_ends_are_kept(length: int) -> None:
    ids = list(range(length))
    record = begin({"rid": "r"}, input_ids=ids, most=2**20)
    assert begin({"rid": "r"}, input_ids=array("q", ids), most=2**20) == record
    request = decode_request(record)
    if length <= MAX_IDS:
        assert request == {"rid": "r", "input_ids": ids}
        return
    half = MAX_IDS // 2
    assert request["input_ids"] == ids[:half] + ids[-half:]
    assert request["truncated"] == {"input_ids": {"first": half, "last": half, "of": length}}


@pytest.mark.parametrize("letter", ["x", "ж", "漢", "😀", "\ud800"])
def test_of_a_long_text_both_ends_are_kept(letter: str) -> None:
    text = f"begin{letter * 900_000}end"
    record = begin({"rid": "r"}, text=text, most=2**20)
    assert len(record) <= 2**20
    request = decode_request(record)
    told = request["truncated"]["text"]
    assert told["of"] == len(text)
    assert request["text"] == text[: told["first"]] + text[-told["last"] :]
    assert abs(told["first"] - told["last"]) <= 5
    assert len(request["text"]) == (MAX_CHARACTERS if letter == "x" else MAX_WIDE)


def test_what_does_not_fit_the_record_is_kept_in_part() -> None:
    request = decode_request(begin({"rid": "r"}, text="x" * 9000, most=8192))
    told = request["truncated"]["text"]
    assert told["first"] + told["last"] == len(request["text"]) > 6000
    assert told["of"] == 9000
    # The first of them that takes eight bytes may be anywhere.
    ids = [1] * 8000 + [2**40]
    request = decode_request(begin({"rid": "r"}, text="x", input_ids=ids, most=8192))
    told = request["truncated"]["input_ids"]
    assert request["text"] == "x"
    assert request["input_ids"] == ids[: told["first"]] + ids[-told["last"] :]
    assert (told["of"], request["input_ids"][-1]) == (8001, 2**40)


def test_what_is_heavy_is_not_looked_through() -> None:
    assert weigh({"temperature": 0.5, "stop": ["</s>"]}, 1000) == 5 * 64 + 15 + 4
    assert weigh("x" * 10, 5) > 5
    for heavy in ([0] * 10**6, {str(number): 1 for number in range(10**5)}, [["x"] * 1000] * 1000, {"x" * 10**6: 1}):
        assert weigh(heavy, MAX_WEIGHT) > MAX_WEIGHT
    circle: list[object] = []
    circle.append(circle)
    assert weigh(circle, MAX_WEIGHT) > MAX_WEIGHT
    request = decode_request(begin({}, text=["x" * 10**6, "y"]))
    assert request == {"omitted": {"text": "list of 2, 1000001 characters"}}


@settings(max_examples=25)
@given(st.dictionaries(names, values | long_texts, max_size=6), texts, st.integers(4096, 9000))
def test_no_record_is_longer_than_it_may_be(fields: dict[str, Any], text: str, most: int) -> None:
    assert len(begin(fields, text=text, input_ids=[1] * len(text), most=most)) <= most


def test_numbers_that_json_does_not_know_come_back_as_words() -> None:
    request = decode_request(begin({"a": math.nan, "b": math.inf, "c": -math.inf}))
    assert request == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    json.dumps(request, allow_nan=False)
