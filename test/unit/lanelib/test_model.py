from __future__ import annotations

from lanelib import model


def test_the_vocabulary_has_a_token_for_every_byte_and_merge():
    vocabulary, merges = model.vocabulary_and_merges()
    assert sorted(vocabulary.values()) == list(range(model.VOCABULARY))
    assert all({first, second, first + second} <= vocabulary.keys() for first, second in merges)
    alphabet = model.byte_alphabet()
    assert (len(set(alphabet)), alphabet[ord("A")], alphabet[ord(" ")]) == (256, "A", "Ġ")
