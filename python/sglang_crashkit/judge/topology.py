"""The ranks of a server by its arguments, which of them work together, and which the evidence shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sglang_crashkit.analysis.ranks import name_some, ranges
from sglang_crashkit.model.case import Case, Process

_MAX_NAMED = 4
_MAX_SIZE = 1 << 20
#: Most ranks of a larger server may have no stack.
_SMALL = 64
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


class Topology(msgspec.Struct, kw_only=True):
    """The ranks of one server, by its arguments or by the ranks that the evidence shows; unknown sizes are 1."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1
    is_dp_attention: bool = False  # its DP ranks are also TP ranks, and work together
    side: str = ""  # ``prefill`` or ``decode``; empty if the server is not half of a pair
    is_known: bool = False  # the sizes come from arguments
    seen: list[Mapping[str, int]] = []  # the ranks in the evidence

    @property
    def ranks(self) -> int:
        """The number of schedulers."""
        return self.tp * self.pp * (1 if self.is_dp_attention else self.dp)

    @property
    def unseen_nodes(self) -> list[int]:
        """The nodes, counted from 0, without a rank in the evidence."""
        per_stage = max(self.nodes // self.pp, 1)
        stages, size = max(self.pp // self.nodes, 1), max(self.tp // per_stage, 1)  # per node
        there = {one.get("pp", 0) // stages * per_stage + one.get("tp", 0) // size for one in self.seen}
        return [node for node in range(self.nodes) if node not in there] if self.nodes > 1 else []

    def group_of(self, ranks: Mapping[str, int]) -> tuple[int, int]:
        """Return the group of a rank, within which ranks work together: its replica and its pipeline stage."""
        return 0 if self.is_dp_attention else ranks.get("dp", 0), ranks.get("pp", 0)


def topology_of(case: Case, side: str = "", members: Iterable[Mapping[str, int]] | None = None) -> Topology:
    """Return the topology of the server of a side (empty: of the only server), by its arguments and ranks.

    `members` are the ranks of its schedulers in the evidence; None for all schedulers of the case.
    """
    all_arguments = [one for one in case.servers if one.values]
    own = [one for one in all_arguments if side and _side(one.values, one.side) == side]
    values = next((one.values for one in own or all_arguments), case.arguments)
    long_names = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
    sizes = {axis: _size(values, f"{axis}_size", axis, f"{long}_parallel_size") for axis, long in long_names.items()}
    known = Topology(
        **sizes,
        nodes=_size(values, "nnodes"),
        is_dp_attention=bool(values.get("enable_dp_attention")),
        side=side or _side(values, ""),
        is_known=any(f"{axis}_size" in values for axis in long_names),
        seen=[one.ranks for one in case.schedulers] if members is None else [*members],
    )
    seen = sorted({ranks["tp"] for ranks in known.seen if "tp" in ranks})
    if not known.is_known and seen and seen[0] % len(seen) == 0 and seen == list(range(seen[0], seen[0] + len(seen))):
        # The log shows one node, and every node before it has as many ranks.
        known.nodes = max(known.nodes, (seen[-1] + 1) // len(seen)) if len(seen) > 1 else known.nodes
    for ranks in known.seen:
        for axis in long_names:
            setattr(known, axis, min(_MAX_SIZE, max(getattr(known, axis), ranks.get(axis, 0) + 1)))
    if known.dp > 1 and not known.is_dp_attention:
        # With DP attention, TP ranks are numbered across the replicas.
        places = {(ranks.get("dp", 0), ranks.get("tp", 0)) for ranks in known.seen}
        replicas, numbers = {dp for dp, _ in places}, {tp for _, tp in places}
        known.is_dp_attention = len(replicas) > 1 and len(places) == len(numbers)
    return known


def _size(values: Mapping[str, Any], *names: str) -> int:
    for value in map(values.get, names):
        size = int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
        if type(size) is int and 0 <= size <= _MAX_SIZE:
            return max(1, size)
    return 1


def _side(values: Mapping[str, Any], said: str) -> str:
    mode = str(values.get("disaggregation_mode") or "")
    return said or (mode if mode in ("prefill", "decode") else "")


def unseen_ranks(topology: Topology, seen: Iterable[Mapping[str, int]]) -> list[str]:
    """Return the names of the ranks, by PP and TP, that the arguments imply and the evidence does not show."""
    if not topology.is_known or topology.ranks > _SMALL:
        return []
    there = {(one.get("pp", 0), one.get("tp", 0)) for one in seen}
    missing = ((pp, tp) for pp in range(topology.pp) for tp in range(topology.tp) if (pp, tp) not in there)
    return [f"PP{pp} TP{tp}" if topology.pp > 1 else f"TP{tp}" for pp, tp in missing]


def name_nodes(nodes: Sequence[int]) -> str:
    """Return a short name of nodes: ``node 1``, ``nodes 1, 2 and 3``; empty without nodes."""
    return f"node{'s' * (len(nodes) > 1)} {name_some([*map(str, nodes)], _MAX_NAMED)}" if nodes else ""


def name_ranks(names: Sequence[str]) -> str:
    """Return the names of ranks as part of a sentence; many TP ranks as a range: ``8 ranks (TP0-7)``."""
    if len(names) <= _MAX_NAMED:
        return name_some(names) if names else ""
    numbers = [int(name[2:]) for name in names if re.fullmatch(r"TP\d{1,6}", name)]
    told = f"TP{ranges(numbers)}" if len(numbers) == len(names) else f"{', '.join(names[:2])} … {names[-1]}"
    return f"{len(names)} ranks ({told})"


def short_name(process: Process) -> str:
    """Return the name of a process in a verdict: its ``PP``, ``DP`` and ``TP`` ranks if it has a ``TP`` rank."""
    if "tp" in process.ranks:
        names = [f"{axis.upper()}{process.ranks[axis]}" for axis in ("pp", "dp", "tp") if axis in process.ranks]
        return " ".join(names)
    return process.who or process.role
