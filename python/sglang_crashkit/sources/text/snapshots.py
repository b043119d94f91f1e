"""Reads a ``snapshot_*.json`` of ``collect``: the processes of a host at one time, with their stacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from sglang_crashkit.model.event import Stack
from sglang_crashkit.model.snapshot import NodeSnapshot

#: The beginning of a file with such a snapshot.
HEAD = re.compile(rb'\A\s*\{\s*"schema_version": *\d+,\s*"host": .{1,300}?,\s*"time": *[\d.]+,\s*"processes":')
_RANKS = ("pp", "dp", "tp", "ep")
#: The judge's names of roles, by the kit's names that differ.
_ROLES = {"server": "tokenizer", "tokenizer_worker": "tokenizer", "detokenizer_router": "detokenizer"}
_ROLES |= {"data_parallel_controller": "controller", "starting": ""}


def stacks_in(snapshot: NodeSnapshot) -> Iterator[Stack]:
    """Yield the stacks of each process in a snapshot."""
    for one in snapshot.processes:
        # A process without a state had ended by then.
        sample, who = replace(one, state=one.state or "X"), _ROLES.get(one.role, one.role)
        if one.role == "scheduler" and one.ranks:
            who = " ".join(f"{axis.upper()}{one.ranks[axis]}" for axis in _RANKS if axis in one.ranks)
        yield Stack(at=one.time, who=who, node=one.host, side=one.side or "", sample=sample)
