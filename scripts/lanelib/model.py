"""The tiny model that the lanes serve: the same bytes on every machine, random weights.

A lane's own python runs this file, because a release cannot read a tokenizer that a later transformers
wrote: ``LANE_PYTHON model.py FOLDER``.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

VOCABULARY = 512
CONTEXT_TOKENS = 4096
UNKNOWN, FIRST, LAST = SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
#: Pairs of these become one token each; English text shrinks to about two thirds.
FREQUENT_LETTERS = "etaoinshrdlucmfw"


def byte_alphabet() -> list[str]:
    """Return the printable character that byte-level BPE writes for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def vocabulary_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a byte-level BPE of exactly `VOCABULARY` tokens, without training one."""
    base = [*SPECIAL_TOKENS, *byte_alphabet()]
    pairs = list(product(FREQUENT_LETTERS, repeat=2))[: VOCABULARY - len(base)]
    tokens = base + [first + second for first, second in pairs]
    return {token: number for number, token in enumerate(tokens)}, pairs


def write_model(folder: Path) -> None:
    """Write the configuration and the tokenizer into `folder`; servers generate random weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    vocabulary, merges = vocabulary_and_merges()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"unk_token": UNKNOWN, "bos_token": FIRST, "eos_token": LAST}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=vocabulary[FIRST],
        eos_token_id=vocabulary[LAST],
        architectures=["LlamaForCausalLM"],
        torch_dtype="float32",
    )
    config.save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
