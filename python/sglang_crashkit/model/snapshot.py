"""What one round saw of the processes on one host: the data that is collected, gathered from hosts and analysed.

As JSON each frame (function, file, line) and each stack (numbers of frames, innermost first) stands once, in a table:
the stacks of a server's ranks are mostly the same, and read back they are the same objects. A thread is a list as well:
name, native id, whether active, whether it owns the interpreter lock, number of its stack. `SCHEMA_VERSION` grows when
a reader of the older form would misread it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from sglang_crashkit.model import checked_json as checked
from sglang_crashkit.model.sample import Frame, Sample, Thread

SCHEMA_VERSION = 1

#: Equal frames of many hosts are one object, which makes them quick to compare.
_frame = lru_cache(maxsize=1 << 16)(Frame)
#: How a sample was taken; of no use elsewhere.
_LOCAL = frozenset({"source", "seconds", "gil", "doing"})


@dataclass(frozen=True)
class Problem:
    """Something that could not be had.

    Attributes:
        what: what is missing, with the process, path or host.
        why: the reason.
        next: the command or step that would get it; empty where there is none.
    """

    what: str
    why: str
    next: str = ""


@dataclass(frozen=True)
class NodeSnapshot:
    """What one round saw on one host.

    Attributes:
        host: the host's name.
        time: when the round began, in seconds since the epoch.
        processes: the processes, each once.
        problems: what could not be had.
    """

    host: str
    time: float
    processes: tuple[Sample, ...] = ()
    problems: tuple[Problem, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as JSON values, ``schema_version`` first."""
        stacks: dict[tuple[Frame, ...], int] = {}
        processes = [process_to_json(process, stacks) for process in self.processes]
        return {
            "schema_version": SCHEMA_VERSION,
            "host": self.host,
            "time": self.time,
            "processes": processes,
            "problems": [asdict(problem) for problem in self.problems],
            **stacks_to_json(stacks),
        }


def parse(text: str | bytes) -> NodeSnapshot:
    """Read a snapshot from the text of its JSON.

    Raises:
        ValueError: it is not one, or of a newer kit.
    """
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("not a snapshot: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not a snapshot: it is not JSON ({error})") from None
    return from_json(document)


def from_json(document: Any) -> NodeSnapshot:
    """Return the snapshot of which `document` holds the JSON values.

    Raises:
        ValueError: it is not one, or of a newer kit.
    """
    checked.check_version(document, "snapshot", SCHEMA_VERSION)
    try:
        stacks = stacks_from_json(document)
        return NodeSnapshot(
            host=checked.text(document["host"]),
            time=checked.number(document["time"]),
            processes=tuple(process_from_json(entry, stacks) for entry in checked.entries(document["processes"])),
            problems=problems_from_json(document["problems"]),
        )
    except KeyError as error:
        raise ValueError(f"not a snapshot: it lacks {error}") from None
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"not a snapshot: {error}") from None


def stacks_to_json(stacks: Iterable[tuple[Frame, ...]]) -> dict[str, Any]:
    """Return the two tables of `stacks`, each of which is there once, as JSON values."""
    frames: dict[Frame, int] = {}
    return {
        "stacks": [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in stacks],
        "frames": [[frame.function, frame.file, frame.line] for frame in frames],
    }


def stacks_from_json(document: Mapping[str, Any]) -> list[tuple[Frame, ...]]:
    """Return the stacks of which `document` holds the two tables.

    Raises:
        KeyError, TypeError, ValueError: it does not.
    """
    frames = [
        _frame(checked.text(function), checked.text(file), checked.whole(line))
        for function, file, line in checked.entries(document["frames"])
    ]
    return [tuple(checked.pick(frames, checked.entries(numbers))) for numbers in checked.entries(document["stacks"])]


def problems_from_json(document: Any) -> tuple[Problem, ...]:
    """Return the problems of which `document` holds the JSON values.

    Raises:
        KeyError, TypeError, ValueError: it does not.
    """
    return tuple(
        Problem(checked.text(entry["what"]), checked.text(entry["why"]), checked.text(entry["next"]))
        for entry in checked.entries(document)
    )


def process_to_json(process: Sample, table: dict[tuple[Frame, ...], int]) -> dict[str, Any]:
    """Return a process as JSON values.

    Args:
        process: which.
        table: the number of each stack, to which those of the process are added.
    """
    document: dict[str, Any] = {name: value for name, value in vars(process).items() if name not in _LOCAL}
    document["ranks"] = dict(process.ranks)
    document["kernels"] = list(process.kernels)
    for name in ("threads", "native"):
        document[name] = [
            [thread.name, thread.native_id, thread.active, thread.owns_gil, table.setdefault(thread.frames, len(table))]
            for thread in document[name]
        ]
    return document


def process_from_json(entry: Mapping[str, Any], stacks: Sequence[tuple[Frame, ...]]) -> Sample:
    """Return the process of which `entry` holds the JSON values.

    Args:
        entry: as `process_to_json` makes it.
        stacks: by their numbers.

    Raises:
        AttributeError, KeyError, OverflowError, TypeError, ValueError: it is none.
    """
    server, rendezvous, side = entry["server"], entry["rendezvous"], entry["side"]
    if side not in (None, "prefill", "decode"):
        raise ValueError(f"{side!r} is neither prefill nor decode")
    return Sample(
        host=checked.text(entry["host"]),
        pid=checked.whole(entry["pid"]),
        start_ticks=checked.whole(entry["start_ticks"]),
        title=checked.text(entry["title"]),
        role=checked.text(entry["role"]),
        ranks={checked.text(name): checked.whole(number) for name, number in entry["ranks"].items()},
        time=checked.number(entry["time"]),
        server=None if server is None else checked.whole(server),
        rendezvous=None if rendezvous is None else checked.text(rendezvous),
        side=side,
        state=checked.text(entry["state"]),
        wchan=checked.text(entry["wchan"]),
        tracer=checked.whole(entry["tracer"]),
        cpu_secs=checked.number(entry["cpu_secs"]),
        threads=_threads(entry["threads"], stacks),
        native=_threads(entry["native"], stacks),
        kernels=tuple(checked.text(kernel) for kernel in checked.entries(entry["kernels"])),
        problem=checked.text(entry["problem"]),
    )


def _threads(rows: Any, stacks: Sequence[tuple[Frame, ...]]) -> tuple[Thread, ...]:
    # Of 100,000 ranks there are millions of threads: they are checked column by column.
    if not checked.entries(rows):
        return ()
    names, native_ids, active, owns_gil, places = zip(*rows, strict=True)
    if not {*map(type, native_ids)} <= {int, type(None)}:
        raise ValueError("the id of a thread is not a whole number")
    columns = zip(checked.texts(names), native_ids, active, owns_gil, checked.pick(stacks, places), strict=True)
    return tuple([Thread(name, id_, runs is True, owns is True, frames) for name, id_, runs, owns, frames in columns])
