from __future__ import annotations

import random

import pytest

from sglang_crashkit.cli.without_prompts import RUN, PromptIndex
from sglang_crashkit.redact import redact_shared, redact_spans

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"


def hidden(text: str, *prompts: str) -> str:
    return redact_spans(text, PromptIndex(prompts).spans_in(text))


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_the_search_of_a_crash_finds(seed: int) -> None:
    chance = random.Random(seed)
    prompts = ["".join(chance.choices(LETTERS, k=chance.randint(12, 400))) for _ in range(30)]
    parts = []
    for _ in range(200):
        prompt = chance.choice(prompts)
        start = chance.randrange(len(prompt))
        parts += [prompt[start : start + chance.randint(1, 60)], "".join(chance.choices(LETTERS, k=5))]
    text = "".join(parts)
    assert hidden(text, *prompts) == redact_shared(text, prompts)


def test_fewer_characters_than_a_run_stay() -> None:
    prompt = "".join(map(chr, range(0x100, 0x180)))
    for start in range(len(prompt) - RUN):
        part = prompt[start : start + RUN - 1]
        assert hidden(f"-{part}-", prompt) == f"-{part}-"
        assert hidden(f"-{prompt[start : start + RUN]}-", prompt) == "-<redacted>-"


def test_a_prompt_ends_where_the_next_begins() -> None:
    assert hidden("a" * 20 + "b" * 20, "c" * 30 + "a" * 20, "b" * 20 + "c" * 30) == "a" * 20 + "b" * 20


def test_a_block_that_stands_everywhere_costs_no_more_than_once() -> None:
    prompt = "".join(f"{number:x}{' ' * 40}" for number in range(2000))
    text = f"{' ' * 50_000}x"
    assert hidden(text, prompt) == "<redacted>x"
