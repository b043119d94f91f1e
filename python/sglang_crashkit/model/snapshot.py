"""The processes on one host in one round: the data that is collected, gathered from hosts and analysed.

The stacks of a server's ranks are mostly equal. So the JSON has tables in which each frame (function, file, line) and
each stack (numbers of frames, innermost first) occurs once, and equal stacks that are read back are the same object.
`SCHEMA_VERSION` grows when a reader of the older form would misread it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from sglang_crashkit.model import lenient
from sglang_crashkit.model.sample import Frame, Sample, Thread

SCHEMA_VERSION = 1

_Entry = TypeVar("_Entry")
#: A thread: name, native id, whether active, whether it owns the GIL, number of its stack.
_Row = tuple[str, int | None, bool, bool, int]
#: Equal frames of many hosts are the same object, which makes comparison fast.
_frame = lru_cache(maxsize=1 << 16)(Frame)
#: Fields about how a sample was taken, which other hosts do not use.
_LOCAL = frozenset({"source", "seconds", "gil", "doing"})


@dataclass(frozen=True)
class Problem:
    """Something that could not be collected."""

    what: str  # what is missing, with the process, path or host
    why: str  # the reason
    next: str = ""  # the command or step that would get it; empty if absent


@dataclass(frozen=True)
class NodeSnapshot:
    """The result of one round on one host."""

    host: str
    time: float  # when the round began, in seconds since the epoch
    processes: tuple[Sample, ...] = ()
    problems: tuple[Problem, ...] = ()  # what could not be collected

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as JSON values, ``schema_version`` first."""
        stacks: dict[tuple[Frame, ...], int] = {}
        frames: dict[Frame, int] = {}
        return {
            "schema_version": SCHEMA_VERSION,
            "host": self.host,
            "time": self.time,
            "processes": [_process_to_json(process, stacks) for process in self.processes],
            "problems": [asdict(problem) for problem in self.problems],
            "stacks": [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in stacks],
            "frames": [[frame.function, frame.file, frame.line] for frame in frames],
        }


class _Document(msgspec.Struct):
    """The JSON form of a snapshot; the content of the processes is checked separately."""

    schema_version: int
    host: str
    time: float
    frames: list[tuple[str, str, int]]
    stacks: list[list[int]]
    processes: list[dict[str, Any]]
    problems: tuple[Problem, ...]


def parse(text: str | bytes) -> NodeSnapshot:
    """Return the snapshot in JSON text; raises ValueError for anything else, or for a newer `SCHEMA_VERSION`."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a snapshot: it is not JSON ({error})") from None
    return from_json(document)


def from_json(document: Any) -> NodeSnapshot:
    """Return the snapshot in JSON values; raises ValueError for anything else, or for a newer `SCHEMA_VERSION`."""
    version = document.get("schema_version") if isinstance(document, dict) else None
    if type(version) is int and version > SCHEMA_VERSION:
        raise ValueError(f"the snapshot has schema_version {version}, this kit reads up to {SCHEMA_VERSION}")
    told = lenient.read_whole(document, _Document, "snapshot")
    try:
        frames = [_frame(*row) for row in told.frames]
        stacks = [tuple(_pick(frames, numbers)) for numbers in told.stacks]
        processes = tuple(_process_from_json(entry, stacks) for entry in told.processes)
    except (LookupError, ValueError) as error:
        raise ValueError(f"not a snapshot: {error}") from None
    return NodeSnapshot(told.host, told.time, processes, told.problems)


def _process_to_json(process: Sample, table: dict[tuple[Frame, ...], int]) -> dict[str, Any]:
    """Return a process as JSON values, and add its stacks to `table`, which maps each stack to its number."""
    document: dict[str, Any] = {name: value for name, value in vars(process).items() if name not in _LOCAL}
    document["ranks"] = dict(process.ranks)
    document["kernels"] = list(process.kernels)
    for name in ("threads", "native"):
        document[name] = [
            [thread.name, thread.native_id, thread.active, thread.owns_gil, table.setdefault(thread.frames, len(table))]
            for thread in document[name]
        ]
    return document


def _process_from_json(entry: dict[str, Any], stacks: Sequence[tuple[Frame, ...]]) -> Sample:
    known = {name: value for name, value in entry.items() if name not in _LOCAL}
    for name in ("threads", "native"):
        # All rows are converted at once: 100,000 ranks have millions of threads.
        rows = msgspec.convert(entry.get(name), list[_Row])
        frames = _pick(stacks, [row[-1] for row in rows])
        known[name] = tuple([Thread(*row[:-1], stack) for row, stack in zip(rows, frames, strict=True)])
    return msgspec.convert(known, Sample)


def _pick(table: Sequence[_Entry], numbers: Sequence[int]) -> list[_Entry]:
    """Return the entries of a table at these positions; raises LookupError if one is out of range."""
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(table):
        raise LookupError(f"there are numbers from {min(numbers)} to {max(numbers)} in a table of {len(table)}")
    return [table[place] for place in numbers]
