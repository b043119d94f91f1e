from __future__ import annotations

import time

import pytest

from sglang_crashkit.redact import (
    REDACTED,
    is_secret_name,
    redact_prompts,
    redact_text,
    secrets_of_arguments,
    secrets_of_mapping,
)

SECRET_NAMES = [
    *("api_key", "--api-key", "--admin-api-key", "apikey", "X-Api-Key", "--hf-token", "HF_TOKEN", "client_secret"),
    *("AWS_SECRET_ACCESS_KEY", "secretAccessKey", "ssl_keyfile_password", "DB_PASSWORD", "Authorization"),
    *("watermark_key", "watermark_key_b"),
]
ORDINARY_NAMES = [
    *("ssl_keyfile", "tokenizer_path", "max_total_tokens", "bucket_time_to_first_token", "speculative_token_map"),
    *("enable_forward_pass_metrics", "tokenizer_metrics_custom_labels_header", "routing_key", "KeyError", "monkey"),
    *("PWD", "tp", "rid", "a", "_", "-", "--", ""),
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_other_names_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: bad server_args: api_key='S3CRET with spaces', tp=2",
        "launch --api-key S3CRET --tp 2",
        "launch --api-key=S3CRET",
        r"{\"api_key\": \"S3CRET\", \"n\": 1}",
        r'{"nested": "{\"api_key\": \"S3CRET\"}"}',
        "curl -H 'Authorization: Bearer S3CRET' http://host",
        "authorization: basic S3CRET",
        "sent Bearer sk-S3CRET-123456",
        "{'Authorization': 'S3CRET', 'x-api-key': 'S3CRET'}",
        "password=S3CRET&user=x",
        "cannot reach redis://user:S3CRET@host/0",
        'api_key="S3CRET',
        "outer: api_key: S3CRET",
    ],
)
def test_a_text_loses_its_secrets(text: str) -> None:
    redacted = redact_text(text)
    assert "S3CRET" not in redacted
    assert REDACTED in redacted
    assert redact_text(redacted) == redacted


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'api_key'",
        "Unexpected token: }",
        "dict key: foo",
        "max_new_tokens: 5",
        "http://host:30000/v1?a=b",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "expected key: value, got --help",
        "Basic authentication failed: Bearer token missing",
        "",
    ],
)
def test_an_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redact_text(text) == text


def test_known_secrets_are_found_wherever_they_stand() -> None:
    secrets = secrets_of_arguments(["x", "--api-key", "S3CRET", "--hf-token=S3CRET2", "--tp", "2", "--admin-api-key"])
    assert secrets == {"S3CRET", "S3CRET2"}
    assert redact_text("refused: S3CRET2, S3CRET", secrets) == f"refused: {REDACTED}, {REDACTED}"


def test_a_value_that_may_be_a_word_stays() -> None:
    assert secrets_of_mapping({"API_KEY": "abc", "HF_TOKEN": "S3CRET", "HOME": "/home/someone", "N_KEY": 7}) == {
        "S3CRET"
    }
    assert secrets_of_arguments(["--api-key", "--verbose"]) == set()


PROMPT = "Tell me, please, of the canary\nin the mine, and of its friends"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"ValueError: too long: {PROMPT}", f"ValueError: too long: {REDACTED}"),
        (f"ValueError: too long: {PROMPT!r}", f"ValueError: too long: '{REDACTED}'"),
        (f"ValueError: {PROMPT[8:40]}... is bad", f"ValueError: {REDACTED}... is bad"),
        ("ValueError: the canary", "ValueError: the canary"),
        ("", ""),
    ],
)
def test_what_a_text_shares_with_a_prompt_is_taken_out(text: str, expected: str) -> None:
    assert redact_prompts(text, ["another one", PROMPT]) == expected


def test_a_short_prompt_is_taken_out_as_a_whole() -> None:
    assert redact_prompts("bad: my secret plan!", ["my secret plan", "", "bad"]) == f"bad: {REDACTED}!"


def test_a_list_of_tokens_is_taken_out() -> None:
    tokens = ", ".join(map(str, range(20)))
    assert redact_prompts(f"bad ids [{tokens}] of shape [2, 3, 4]", []) == "bad ids [<20 numbers>] of shape [2, 3, 4]"


@pytest.mark.parametrize("part", ["a", "a: ", "a ", "--a ", "'", "a='", "\\", " ", "a:", "://", "1,", "api_key='", "("])
def test_hostile_text_takes_time_in_proportion(part: str) -> None:
    def seconds(length: int) -> float:
        text = part * (length // len(part))
        started = time.process_time()
        redact_text(text)
        redact_prompts(text, [text] * 4)
        return time.process_time() - started

    # Quadratic work would be hundreds of seconds.
    assert seconds(200_000) < 20


def test_hostile_prompts_take_a_bounded_time() -> None:
    started = time.process_time()
    redact_prompts("a" * 4000, ["a" * 100_000] * 1000)
    assert time.process_time() - started < 20
