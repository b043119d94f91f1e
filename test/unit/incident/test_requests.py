from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.errors import NothingToDoError
from sglang_crashkit.incident.requests import StoredRequest, fingerprint_of, read_requests
from sglang_crashkit.incident.store import find_one
from unit.support.stored import make_incident

LINE = {
    "rid": "a",
    "state": "unfinished",
    "arrived": "2026-01-01T00:00:02.000000Z",
    "ended": None,
    "pid": 7,
    "text": "Hello",
    "sampling_params": {"max_new_tokens": 4},
    "stream": True,
    "bootstrap_room": 9,
}


def read(folder: Path, *lines: object, **fields: Any) -> list[StoredRequest]:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    make_incident(folder, pieces={"requests/requests.jsonl": text} if lines else None, **fields)
    return read_requests(find_one(str(folder)))


def test_a_journal_line_is_a_request_as_it_came(tmp_path: Path) -> None:
    earlier = {**LINE, "rid": "b", "state": "finished", "arrived": "2026-01-01T00:00:01.000000Z"}
    first, second = read(tmp_path, LINE, earlier)
    assert (first.rid, second.rid, second.arrived - first.arrived) == ("b", "a", 1.0)
    assert (first.was_running, second.was_running) == (False, True)
    assert second.body == {
        "rid": "a",
        "text": "Hello",
        "sampling_params": {"max_new_tokens": 4},
        "stream": True,
    }
    assert second.is_complete


@pytest.mark.parametrize(
    ("more", "lacks"),
    [
        ({"omitted": {"image_data": "3 images"}}, ("its image_data (3 images)",)),
        ({"truncated": {"text": {"first": 1}}}, ("the middle of its text",)),
        ({"text": None}, ("its prompt",)),
    ],
)
def test_what_the_journal_does_not_keep_is_said(tmp_path: Path, more: dict[str, Any], lacks: tuple[str]) -> None:
    (request,) = read(tmp_path, LINE | more)
    assert request.lacks == lacks
    assert not request.is_complete


def test_what_may_be_a_secret_is_not_sent_and_said(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 4, "custom_params": {"trigger_token": "<redacted>", "x": 1}}
    (request,) = read(tmp_path, LINE | {"sampling_params": sampling})
    assert request.lacks == ("its sampling_params.custom_params.trigger_token, as it may be a secret,",)
    assert request.body["sampling_params"] == {"max_new_tokens": 4, "custom_params": {"x": 1}}


def test_a_number_outside_json_is_sent_as_it_came(tmp_path: Path) -> None:
    came = {"temperature": float("-inf"), "logit_bias": {"5": float("inf")}, "stop": "NaN", "top_k": 5}
    line = LINE | {"sampling_params": {**came, "temperature": "-Infinity", "logit_bias": {"5": "Infinity"}}}
    (request,) = read(tmp_path, line)
    assert request.body["sampling_params"] == came


def test_one_that_wants_several_answers_is_sent_once(tmp_path: Path) -> None:
    several = LINE | {"sampling_params": {"n": 3}}
    made = [several | {"rid": f"part-{number}"} for number in range(4)]
    other = several | {"rid": "other", "text": "else", "state": "finished"}
    found = read(tmp_path, LINE, *made, other)
    assert [one.rids for one in found] == [("a",), ("part-0", "part-1", "part-2", "part-3"), ("other",)]
    assert found[1].body["sampling_params"] == {"n": 3}


@pytest.mark.parametrize("line", ["{", "[]\n", "\n", "{" * 100_000])
def test_a_broken_line_is_left_out_and_named(tmp_path: Path, line: str) -> None:
    broken, whole = read(tmp_path, LINE, line)
    assert (broken.rid, broken.is_complete, whole.is_complete) == ("line 2", False, True)


def test_an_embedding_is_asked_for_where_it_was(tmp_path: Path) -> None:
    (request,) = read(tmp_path, LINE | {"kind": "EmbeddingReqInput"})
    assert (request.path, "kind" in request.body) == ("/encode", False)


def test_an_incident_without_requests_is_nothing_to_do(tmp_path: Path) -> None:
    with pytest.raises(NothingToDoError, match=r"holds no requests\n  next: sglang-crashkit show \S+ --requests "):
        read(tmp_path)


TEXT = {"text": "Hello", "sampling_params": {"max_new_tokens": 4}}


@pytest.mark.parametrize(
    "other",
    [
        {"rid": "another", "stream": True, "priority": 0, "routed_dp_rank": 1, "state": "unfinished"},
        {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "token_ids_logprob": []},
        {"sampling_params": {"max_new_tokens": 4, "top_k": None}},
    ],
)
def test_what_is_not_given_or_asked_for_is_ignored(other: dict[str, Any]) -> None:
    assert fingerprint_of(TEXT | other) == fingerprint_of(TEXT)


@pytest.mark.parametrize(
    "other",
    [
        {"text": "hello"},
        {"text": None, "input_ids": [1, 2]},
        {"logprob_start_len": 0},
        {"return_logprob": True},
        {"sampling_params": {"max_new_tokens": 4, "temperature": 0}},
        {"sampling_params": {"max_new_tokens": 5}},
        {"token_ids_logprob": [1]},
    ],
)
def test_what_is_asked_for_counts(other: dict[str, Any]) -> None:
    assert fingerprint_of(TEXT | other) != fingerprint_of(TEXT)


@pytest.mark.parametrize(
    "other",
    [
        {"omitted": {"image_data": "3 images"}},
        {"truncated": {"text": {}}},
        {"image_data": ["x"]},
        {"text": None},
        {"text": None, "input_ids": [[1]]},
        {"text": None, "input_ids": ["a"]},
        {"text": ["a"]},
    ],
)
def test_what_is_not_whole_has_none(other: dict[str, Any]) -> None:
    assert fingerprint_of(TEXT | other) == ""


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["text", "input_ids", "sampling_params", "omitted", "lora_path"]), VALUES))
def test_whatever_a_file_holds_it_has_a_fingerprint_or_none(fields: dict[str, Any]) -> None:
    found = fingerprint_of(fields)
    assert found == fingerprint_of(json.loads(json.dumps(fields)))
