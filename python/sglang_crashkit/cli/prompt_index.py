"""Find what texts share with prompts, however long these are.

Every twelfth character of a prompt begins a block of twelve. What shares 24 characters in a row with a prompt has one
of its blocks whole, and the rest within twelve characters on either side of it. So the prompts are walked once, and
each text once.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile

#: As many characters in a row that a text shares with a prompt are taken for the prompt's.
RUN = 24
_BLOCK = RUN // 2
#: A block with more than so many surroundings, such as of blanks, is taken for a prompt's wherever it stands.
_MAX_PLACES = 16
#: So many comparisons are kept in mind.
_MAX_KEPT = 4096
#: Parts the prompts; no text that is read has it.
_EDGE = "\ud800"


class PromptIndex:
    """The blocks of prompts.

    It takes about fifteen bytes for each of their characters.

    Args:
        prompts: what is looked for; of those shorter than `RUN` the whole, whatever that is.
    """

    def __init__(self, prompts: Iterable[str]) -> None:
        prompts = list(dict.fromkeys(prompts))
        self._short = [prompt for prompt in prompts if len(prompt) < RUN]
        long = [prompt for prompt in prompts if len(prompt) >= RUN]
        self._all = _EDGE + _EDGE.join(long) + _EDGE
        self._places: dict[str, int | list[int]] = {}
        # What is much repeated, such as blanks, is compared once.
        self._shared = functools.lru_cache(_MAX_KEPT)(self._find_shared)
        begin = len(_EDGE)
        for prompt in long:
            self._add(begin, begin + len(prompt))
            begin += len(prompt) + len(_EDGE)

    def _add(self, begin: int, end: int) -> None:
        for place in range(begin, end - _BLOCK + 1, _BLOCK):
            block = self._all[place : place + _BLOCK]
            known = self._places.setdefault(block, place)
            if known == place:
                continue
            if isinstance(known, int):
                known = self._places[block] = [known]
            # Many requests begin with the same words.
            if len(known) < _MAX_PLACES and self._around(place) not in map(self._around, known):
                known.append(place)

    def _around(self, place: int) -> str:
        return self._all[max(0, place - _BLOCK) : place + RUN]

    def spans_in(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield each place in `text` that has `RUN` characters in a row of a prompt, or a shorter one."""
        for prompt in self._short:
            yield from (match.span() for match in re.finditer(re.escape(prompt), text))
        for start in range(len(text) - _BLOCK + 1):
            places = self._places.get(text[start : start + _BLOCK])
            if places is None:
                continue
            if not isinstance(places, int) and len(places) == _MAX_PLACES:
                yield start, start + _BLOCK
            before, behind = text[max(0, start - _BLOCK) : start], text[start + _BLOCK : start + RUN]
            for left, right in self._shared(before, text[start : start + _BLOCK], behind):
                yield start - left, start + _BLOCK + right

    def _find_shared(self, before: str, block: str, behind: str) -> tuple[tuple[int, int], ...]:
        """Return how many characters before a block, and behind it, make it a run of a prompt, for each that does."""
        places = self._places[block]
        found = []
        for place in [places] if isinstance(places, int) else places:
            left = _count_shared(before[::-1], self._all[max(0, place - _BLOCK) : place][::-1])
            right = _count_shared(behind, self._all[place + _BLOCK : place + RUN])
            if left + _BLOCK + right >= RUN:
                found.append((left, right))
        return tuple(found)


def _count_shared(one: str, other: str) -> int:
    """Return with how many of the same characters two texts begin."""
    return sum(1 for _ in takewhile(bool, map(operator.eq, one, other)))
