from __future__ import annotations

import json
import time
from typing import Any

import pytest

from sglang_crashkit.redact import (
    REDACTED,
    is_secret_name,
    redact_json,
    redact_prompts,
    redact_text,
    secrets_of_arguments,
    secrets_of_mapping,
)
from unit.secret_forms import FORMS, INNOCENT, PLANTED, holds_secret

SECRET_NAMES = [
    *("api_key", "--api-key", "--admin-api-key", "apikey", "X-Api-Key", "--hf-token", "HF_TOKEN", "client_secret"),
    *("AWS_SECRET_ACCESS_KEY", "secretAccessKey", "ssl_keyfile_password", "DB_PASSWORD", "Authorization"),
    *("watermark_key", "watermark_key_b", "PGPASSWORD", "api_keys", "Set-Cookie", "MYSQL_PWD", "_authToken"),
    *(
        "trust-store-password",
        "CACHE_PASSWORD",
        "primary_passwd",
        "group_secret",
        "node_credentials",
        "store_passwords",
    ),
]
ORDINARY_NAMES = [
    *("ssl_keyfile", "tokenizer_path", "max_total_tokens", "bucket_time_to_first_token", "speculative_token_map"),
    *("enable_forward_pass_metrics", "tokenizer_metrics_custom_labels_header", "routing_key", "KeyError", "monkey"),
    *("PWD", "tp", "rid", "a", "_", "-", "--", "", "eos_token", "cache_key", "missing_keys"),
]


@pytest.mark.parametrize("name", [*SECRET_NAMES, *ORDINARY_NAMES])
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_secret_name(name) is (name in SECRET_NAMES)


@pytest.mark.parametrize("text", FORMS)
def test_no_part_of_a_secret_stays(text: str) -> None:
    redacted = redact_text(text)
    assert holds_secret(text)
    assert not holds_secret(redacted)
    assert REDACTED in redacted
    assert redact_text(redacted) == redacted


@pytest.mark.parametrize("text", INNOCENT)
def test_what_only_looks_like_a_secret_stays_readable(text: str) -> None:
    assert redact_text(text) == text
    assert redact_json({"words": [text]}) == {"words": [text]}


@pytest.mark.parametrize("text", FORMS)
def test_in_json_a_secret_is_found_however_deep(text: str) -> None:
    value: Any = text
    for _ in range(30):
        value = {"list": [1, {"of": ["x", value]}]}
    assert not holds_secret(json.dumps(redact_json(value)))


def test_in_json_a_field_or_a_header_is_known_by_its_name() -> None:
    value = {
        "api_key": PLANTED,
        "n": 1,
        "headers": [["Authorization", PLANTED], ["a", "b"]],
        "tokens": [{"token": "a"}],
    }
    expected = {**value, "api_key": REDACTED, "headers": [["Authorization", REDACTED], ["a", "b"]]}
    assert redact_json(value) == expected
    assert redact_json({"token": PLANTED, "max_tokens": 5}, is_users=True) == {"token": REDACTED, "max_tokens": 5}
    deep: Any = PLANTED
    for _ in range(500):
        deep = [deep]
    assert not holds_secret(json.dumps(redact_json(deep)))


def test_known_secrets_are_found_wherever_they_stand() -> None:
    secrets = secrets_of_arguments(["x", "--api-key", "S3CRET", "--hf-token=S3CRET2", "--tp", "2", "--admin-api-key"])
    assert secrets == {"S3CRET", "S3CRET2"}
    assert redact_text("refused: S3CRET2, S3CRET", secrets) == f"refused: {REDACTED}, {REDACTED}"


def test_a_value_that_may_be_a_word_stays() -> None:
    assert secrets_of_mapping({"API_KEY": "abc", "HF_TOKEN": "S3CRET", "HOME": "/home/someone", "N_KEY": 7}) == {
        "S3CRET"
    }
    assert secrets_of_arguments(["--api-key", "--verbose"]) == set()
    # A command line that could not be read is empty.
    assert secrets_of_arguments([]) == set()


PROMPT = "Tell me, please, of the canary\nin the mine, and of its friends"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"ValueError: too long: {PROMPT}", f"ValueError: too long: {REDACTED}"),
        (f"ValueError: too long: {PROMPT!r}", f"ValueError: too long: '{REDACTED}'"),
        (f"ValueError: {PROMPT[8:40]}... is bad", f"ValueError: {REDACTED}... is bad"),
        ("ValueError: the canary", "ValueError: the canary"),
        ("", ""),
        # A short prompt is taken out as a whole.
        ("bad: my secret plan!", f"bad: {REDACTED}!"),
    ],
)
def test_what_a_text_shares_with_a_prompt_is_taken_out(text: str, expected: str) -> None:
    assert redact_prompts(text, ["another one", PROMPT, "my secret plan", "", "bad"]) == expected


def test_a_list_of_tokens_is_taken_out() -> None:
    assert (
        redact_prompts(f"bad ids {[*range(20)]} of shape [2, 3, 4]", []) == "bad ids [<20 numbers>] of shape [2, 3, 4]"
    )


@pytest.mark.wide
@pytest.mark.parametrize("part", ["a", "a: ", "a ", "--a ", "'", "a='", "\\", " ", "a:", "://", "1,", "api_key='", "("])
def test_hostile_text_takes_time_in_proportion(part: str) -> None:
    def seconds(length: int) -> float:
        text = part * (length // len(part))
        started = time.process_time()
        redact_text(text)
        redact_prompts(text, [text] * 4)
        redact_prompts(text, [])
        return time.process_time() - started

    # Quadratic work would be hundreds of seconds.
    assert seconds(200_000) < 20


def test_hostile_prompts_take_a_bounded_time() -> None:
    started = time.process_time()
    redact_prompts("a" * 4000, ["a" * 100_000] * 1000)
    assert time.process_time() - started < 20
