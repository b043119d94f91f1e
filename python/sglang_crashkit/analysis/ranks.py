"""Ranks: the place of a process among all, the groups that work together, and sets in short form: ``TP0-6,8``.

Of the axes in a scheduler's title, tensor parallelism numbers all ranks of a stage. Expert parallelism, context
parallelism and DP attention divide the same ranks again. Each replica numbers its ranks from 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from sglang_crashkit.model.sample import Sample

#: The order in which the axes of a scope are written.
_ORDER = ("side", "server", "role", "attn_cp", "moe_dp", "dp", "pp", "tp", "ep")
#: Axes that divide the TP ranks again; they distinguish no ranks that have a TP number.
_WITHIN_TP = frozenset({"ep", "attn_cp", "moe_dp"})
#: Most scopes to name in a text; of the others only the number of ranks is given.
_MAX_SCOPES = 8
_BY_PREFERENCE = ("tp", "dp", "pp", "ep", "attn_cp", "moe_dp")

#: What distinguishes ranks with the same number: names of axes with a place on each, such as ``(("pp", 1),)``.
Scope = tuple[tuple[str, int | str], ...]
_Member = TypeVar("_Member")


@dataclass(frozen=True)
class Rank:
    """One rank."""

    scope: Scope  # distinguishes ranks with the same number; in the order of `scope_of`
    axis: str  # the axis that numbers it, such as ``tp``
    number: int  # its number on that axis


def scope_of(places: dict[str, int | str]) -> Scope:
    """Return the scope with these places, its axes in the order of `_ORDER`."""
    return tuple((name, places[name]) for name in _in_order(places))


def rank_of(process: Sample) -> Rank:
    """Return the place of a process among all processes."""
    # All processes of one server share this, on all its hosts if the rendezvous address is known.
    here = process.host if process.server is None else f"{process.host}:{process.server}"
    places: dict[str, int | str] = {"server": process.rendezvous or here}
    if process.side is not None:
        places["side"] = process.side
    if process.role != "scheduler":
        return Rank(scope_of({**places, "role": f"{process.role} on {process.host}"}), "pid", process.pid)
    return rank_at(process.ranks, places)


def rank_at(numbers: Mapping[str, int], places: Mapping[str, int | str] = MappingProxyType({})) -> Rank:
    """Return the place of a scheduler with these numbers in its title; `places` distinguish equal numbers."""
    axis = next((axis for axis in _BY_PREFERENCE if axis in numbers), "")
    without = _WITHIN_TP if axis == "tp" else ()
    others = {name: number for name, number in numbers.items() if name != axis and name not in without}
    return Rank(scope_of({**places, **others}), axis, numbers.get(axis, 0))


def groups_of(members: Iterable[tuple[Rank, _Member]]) -> list[list[_Member]]:
    """Return the members by group; each replica is a group of its own, except with DP attention."""
    found: dict[Scope, dict[int, dict[int, list[_Member]]]] = {}
    for rank, member in members:
        # The ranks of one server, side and stage share this key, in all replicas.
        places = {name: place for name, place in rank.scope if name != "dp"}
        group = scope_of(places | ({rank.axis: rank.number} if rank.axis == "pp" else {}))
        dp = rank.number if rank.axis == "dp" else int(dict(rank.scope).get("dp", 0))
        tp = rank.number if rank.axis == "tp" else 0
        found.setdefault(group, {}).setdefault(dp, {}).setdefault(tp, []).append(member)
    groups = []
    for by_dp in found.values():
        replicas = [[one for _tp, its in sorted(tps.items()) for one in its] for _dp, tps in sorted(by_dp.items())]
        # If TP ranks are numbered across the replicas, it is DP attention, and all replicas are one group.
        size = len(by_dp[min(by_dp)])
        is_one = all(sorted(tps) == list(range(dp * size, (dp + 1) * size)) for dp, tps in by_dp.items())
        groups += [[one for some in replicas for one in some]] if is_one else replicas
    return groups


class RankSet(set[Rank]):
    """A set of ranks with a short text form."""

    def __str__(self) -> str:
        return self.format()

    def places(self) -> Iterator[tuple[str, int | str]]:
        """Yield each pair of an axis and a place that is in all scopes."""
        scopes = [set(scope) for scope in {rank.scope for rank in self}]
        yield from sorted(set.intersection(*scopes), key=str) if scopes else ()

    def format(self, hide: Collection[tuple[str, int | str]] = ()) -> str:
        """Return the set in words, such as ``PP0-1 TP0-3, 7``, without the pairs of an axis and a place in `hide`."""
        numbers: dict[tuple[Scope, str], list[int]] = {}
        for rank in self:
            numbers.setdefault((rank.scope, rank.axis), []).append(rank.number)
        lines: dict[_Line, int] = {}
        for (scope, axis), its in numbers.items():
            key = (tuple((name, str(at)) for name, at in scope if (name, at) not in hide), axis, ranges(its))
            lines[key] = lines.get(key, 0) + len(its)
        shown = sorted(_join_scopes(lines).items(), key=lambda item: (-item[1], item[0]))
        words = []
        for (places, axis, text), _count in shown[:_MAX_SCOPES]:
            told = [f"{name.upper()}{at}" if at[:1].isdigit() and name != "server" else at for name, at in places]
            words.append(" ".join([*told, f"{axis.upper()}{text}" if axis else ""]).strip() or "the only rank")
        if len(shown) > _MAX_SCOPES:
            words.append(f"{sum(count for _key, count in shown[_MAX_SCOPES:])} more ranks")
        return "; ".join(words) or "no rank"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: ``0-3,5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


_Places = tuple[tuple[str, str], ...]
_Line = tuple[_Places, str, str]


def _join_scopes(lines: dict[_Line, int]) -> dict[_Line, int]:
    """Return the lines; lines that differ only in the place on one axis are joined."""
    names = {name for places, _axis, _text in lines for name, _place in places}
    for name in reversed(_in_order(names)):
        joined: dict[tuple[_Places, _Places, str, str], list[str]] = {}
        counts: dict[tuple[_Places, _Places, str, str], int] = {}
        for (places, axis, text), count in lines.items():
            at = next((at for at, (other, _place) in enumerate(places) if other == name), len(places))
            key = (places[:at], places[at + 1 :], axis, text)
            joined.setdefault(key, []).extend(place for other, place in places if other == name)
            counts[key] = counts.get(key, 0) + count
        lines = {}
        for key, found in joined.items():
            text = ranges(map(int, found)) if all(map(str.isdigit, found)) else ",".join(sorted(found))
            line = (key[0] + (((name, text),) if found else ()) + key[1], *key[2:])
            lines[line] = counts[key]
    return lines


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))


def name_some(names: Sequence[str], most: int = 8) -> str:
    """Return names as part of a sentence, at most `most` of them."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
