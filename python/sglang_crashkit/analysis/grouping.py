"""Which ranks work together: those of one server, side and pipeline stage, and of one replica.

Of the axes in a scheduler's title, tensor parallelism numbers all ranks of a stage; expert and context parallelism,
and data parallelism of the attention alone, divide the same ranks once more. Replicas number theirs from 0 each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from sglang_crashkit.analysis.rank_set import Rank, Scope, scope_of
from sglang_crashkit.model.sample import Sample

#: What divides the ranks of tensor parallelism once more, and tells nobody apart where those are numbered.
_WITHIN_TP = frozenset({"ep", "attn_cp", "moe_dp"})
_BY_PREFERENCE = ("tp", "dp", "pp", "ep", "attn_cp", "moe_dp")

_Member = TypeVar("_Member")


def server_of(process: Sample) -> str:
    """Return what the processes of one server have in common, on all its hosts where that is known."""
    if process.rendezvous:
        return process.rendezvous
    return process.host if process.server is None else f"{process.host}:{process.server}"


def rank_of(process: Sample) -> Rank:
    """Return the place of a process among all."""
    places: dict[str, int | str] = {"server": server_of(process)}
    if process.side is not None:
        places["side"] = process.side
    if process.role != "scheduler":
        return Rank(scope_of({**places, "role": f"{process.role} on {process.host}"}), "pid", process.pid)
    return rank_at(process.ranks, places)


def rank_at(numbers: Mapping[str, int], places: Mapping[str, int | str] = MappingProxyType({})) -> Rank:
    """Return the place of a scheduler with these numbers in its title; see `titles.rank_of`.

    Args:
        numbers: by the axis.
        places: what else tells it from others with the same numbers.
    """
    axis = next((axis for axis in _BY_PREFERENCE if axis in numbers), "")
    without = _WITHIN_TP if axis == "tp" else ()
    others = {name: number for name, number in numbers.items() if name != axis and name not in without}
    return Rank(scope_of({**places, **others}), axis, numbers.get(axis, 0))


def group_of(rank: Rank) -> Scope:
    """Return what the ranks of one server, side and stage have in common, of whichever replica."""
    places = {name: place for name, place in rank.scope if name != "dp"}
    return scope_of(places | ({rank.axis: rank.number} if rank.axis == "pp" else {}))


def groups_of(members: Iterable[tuple[Rank, _Member]]) -> list[list[_Member]]:
    """Return the members group by group, those of each replica as one."""
    found: dict[Scope, dict[Rank, list[_Member]]] = {}
    for rank, member in members:
        found.setdefault(group_of(rank), {}).setdefault(rank, []).append(member)
    return [
        [member for some in lists for member in some]
        for ranks in found.values()
        for _dp, lists in split_replicas(ranks)
    ]


def split_replicas(members: Mapping[Rank, _Member]) -> list[tuple[int | None, list[_Member]]]:
    """Return the members of one group by replica, with its number; together where they are of one.

    Args:
        members: of one group, see `group_of`.
    """
    by_dp: dict[int, dict[int, list[_Member]]] = {}
    for rank, member in members.items():
        dp = rank.number if rank.axis == "dp" else int(dict(rank.scope).get("dp", 0))
        by_dp.setdefault(dp, {}).setdefault(rank.number if rank.axis == "tp" else 0, []).append(member)
    if len(by_dp) == 1 or _are_numbered_through({dp: sorted(numbers) for dp, numbers in by_dp.items()}):
        return [(None, [member for _dp, tp in sorted(by_dp.items()) for member in _in_order(tp)])]
    return [(dp, list(_in_order(tp))) for dp, tp in sorted(by_dp.items())]


def _in_order(members: Mapping[int, list[_Member]]) -> Iterable[_Member]:
    return (member for _number, some in sorted(members.items()) for member in some)


def _are_numbered_through(by_dp: Mapping[int, list[int]]) -> bool:
    """Say whether the ranks of all replicas are numbered as one: data parallelism is of the attention alone."""
    size = len(by_dp[min(by_dp)])
    return all(numbers == list(range(dp * size, (dp + 1) * size)) for dp, numbers in by_dp.items())
