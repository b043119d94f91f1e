"""A request has one fingerprint, whether SGLang filled in its defaults or the client gave them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.incident.request_fingerprint import fingerprint_of

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
