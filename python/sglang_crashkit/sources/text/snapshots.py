"""What ``collect`` saw of the processes of a host at one moment: a ``snapshot_*.json`` of its folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from sglang_crashkit.model.event import Stack
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import NodeSnapshot

_HEAD = re.compile(rb'\s*\{\s*"schema_version": *\d+,\s*"host": .{1,300}?,\s*"time": *[\d.]+,\s*"processes":')
_RANKS = ("pp", "dp", "tp", "ep")
#: Roles of the kit's own names that the judge calls otherwise.
_ROLES = {"server": "tokenizer", "tokenizer_worker": "tokenizer", "detokenizer_router": "detokenizer"}
_ROLES |= {"data_parallel_controller": "controller", "starting": ""}


def is_snapshot(head: bytes) -> bool:
    """Return whether a file begins as such a snapshot does."""
    return _HEAD.match(head) is not None


def stacks_in(snapshot: NodeSnapshot) -> Iterator[Stack]:
    """Yield the stacks of each process in a snapshot."""
    for one in snapshot.processes:
        # One that had ended by then has no state.
        sample = replace(one, state=one.state or "X")
        yield Stack(at=one.time, who=_name(one), node=sample.host, side=one.side or "", sample=sample)


def _name(sample: Sample) -> str:
    if sample.role == "scheduler" and sample.ranks:
        return " ".join(f"{axis.upper()}{sample.ranks[axis]}" for axis in _RANKS if axis in sample.ranks)
    return _ROLES.get(sample.role, sample.role)
