from __future__ import annotations

from lanelib import model


def test_vocabulary_fills_the_model_exactly():
    vocabulary, _ = model.vocabulary_and_merges()

    assert sorted(vocabulary.values()) == list(range(model.VOCABULARY))


def test_every_merge_makes_a_token_from_tokens():
    vocabulary, merges = model.vocabulary_and_merges()

    assert all({first, second, first + second} <= vocabulary.keys() for first, second in merges)


def test_byte_alphabet_writes_each_byte_differently():
    alphabet = model.byte_alphabet()

    assert len(set(alphabet)) == 256
    assert alphabet[ord("A")] == "A"
    assert alphabet[ord(" ")] == "Ġ"
