"""Sets of ranks that stay small for 100,000 of them and read as a person would write them: ``TP0-6,8``.

The ranks of one scope (a side, a server, a pipeline stage...) are numbered along one axis, mostly tensor parallelism.
The numbers are kept as bits, in pieces of `_BITS` of which there are only those that hold a rank: a set of one rank
costs as little as any small object, and one of all ranks a bit for each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_BITS = 1024
#: In which order the axes of a scope are written.
_ORDER = {
    name: number for number, name in enumerate(("side", "server", "role", "attn_cp", "moe_dp", "dp", "pp", "tp", "ep"))
}

#: What tells ranks with the same number apart: names of axes with a place on each, such as ``(("pp", 1),)``.
Scope = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class Rank:
    """One rank.

    Attributes:
        scope: which of those with the same number; in one order of axes, see `scope_of`.
        axis: along what it is numbered, such as ``tp``.
        number: its number on that axis.
    """

    scope: Scope
    axis: str
    number: int


def scope_of(places: dict[str, int | str]) -> Scope:
    """Return the scope with these places on its axes, in the one order."""
    return tuple((name, places[name]) for name in _in_order(places))


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (_ORDER.get(name, len(_ORDER)), name))


class RankSet:
    """A set of ranks.

    Args:
        ranks: the first of them.
    """

    __slots__ = ("_pieces",)

    def __init__(self, ranks: Iterable[Rank] = ()) -> None:
        self._pieces: dict[tuple[Scope, str], dict[int, int]] = {}
        for rank in ranks:
            self.add(rank)

    def add(self, rank: Rank) -> None:
        """Add one."""
        key = (rank.scope, rank.axis)
        pieces = self._pieces.get(key)
        if pieces is None:
            pieces = self._pieces[key] = {}
        index, bit = divmod(rank.number, _BITS)
        pieces[index] = pieces.get(index, 0) | 1 << bit

    def update(self, other: RankSet) -> None:
        """Add all of another set."""
        for key, theirs in other._pieces.items():
            pieces = self._pieces.setdefault(key, {})
            for index, bits in theirs.items():
                pieces[index] = pieces.get(index, 0) | bits

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, Rank):
            return False
        index, bit = divmod(rank.number, _BITS)
        return bool(self._pieces.get((rank.scope, rank.axis), {}).get(index, 0) >> bit & 1)

    def __len__(self) -> int:
        return sum(bits.bit_count() for pieces in self._pieces.values() for bits in pieces.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankSet) and self._pieces == other._pieces

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<RankSet {self}>"

    def __str__(self) -> str:
        return self.format()

    def places(self) -> Iterator[tuple[str, int | str]]:
        """Yield each pair of an axis and a place that is in all scopes."""
        scopes = [set(scope) for scope, _axis in self._pieces]
        yield from sorted(set.intersection(*scopes), key=str) if scopes else ()

    def format(self, hide: Collection[tuple[str, int | str]] = (), most: int = 8) -> str:
        """Return the set in words, such as ``PP0-1 TP0-3, 7``.

        Args:
            hide: pairs of an axis and a place that go without saying.
            most: of how many scopes it tells at most; of the others, how many ranks they have.
        """
        hidden = frozenset(hide)
        lines: dict[tuple[tuple[tuple[str, str], ...], str, str], int] = {}
        for (scope, axis), pieces in self._pieces.items():
            places = tuple((name, str(place)) for name, place in scope if (name, place) not in hidden)
            key = (places, axis, _ranges(pieces))
            lines[key] = lines.get(key, 0) + sum(bits.bit_count() for bits in pieces.values())
        merged = _join_scopes(lines)
        shown = sorted(merged.items(), key=lambda item: (-item[1], item[0]))
        words = [_line_text(*key) for key, _count in shown[:most]]
        if len(shown) > most:
            words.append(f"{sum(count for _key, count in shown[most:])} more ranks")
        return "; ".join(words) or "nobody"


def _runs(pieces: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield first and last number of each run, in order."""
    start = previous = -2
    for index in sorted(pieces):
        bits, base = pieces[index], index * _BITS
        while bits:
            low = (bits & -bits).bit_length() - 1
            # With the bits below filled, the first gap ends the run.
            high = ((bits >> low) ^ ((bits >> low) + 1)).bit_length() - 2
            first, last = base + low, base + low + high
            if first == previous + 1:
                previous = last
            else:
                if start >= 0:
                    yield start, previous
                start, previous = first, last
            bits = bits >> (low + high + 1) << (low + high + 1)
    if start >= 0:
        yield start, previous


def _ranges(pieces: dict[int, int]) -> str:
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in _runs(pieces))


_Line = tuple[tuple[tuple[str, str], ...], str, str]


def _join_scopes(lines: dict[_Line, int]) -> dict[_Line, int]:
    """Return the lines, with those as one that differ in the place on one axis only."""
    names = {name for places, _axis, _text in lines for name, _place in places}
    for name in reversed(_in_order(names)):
        joined: dict[tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...], str, str], list[str]] = {}
        counts: dict[Any, int] = {}
        for (places, axis, text), count in lines.items():
            position = next((at for at, (other, _place) in enumerate(places) if other == name), len(places))
            key = (places[:position], places[position + 1 :], axis, text)
            joined.setdefault(key, []).extend(place for other, place in places if other == name)
            counts[key] = counts.get(key, 0) + count
        lines = {
            (before + (((name, _places_text(places)),) if places else ()) + after, axis, text): counts[key]
            for key, places in joined.items()
            for before, after, axis, text in [key]
        }
    return lines


def _places_text(places: list[str]) -> str:
    if not all(place.isdigit() for place in places):
        return ",".join(sorted(places))
    return _ranges(RankSet(Rank((), "", int(place)) for place in places)._pieces[(), ""])


def _line_text(places: tuple[tuple[str, str], ...], axis: str, text: str) -> str:
    words = [f"{name.upper()}{place}" if place[:1].isdigit() and name != "server" else place for name, place in places]
    return " ".join([*words, f"{axis.upper()}{text}" if axis else ""]).strip() or "the only rank"
