"""What one round saw of the processes on one host: the data that is collected, gathered from hosts and analysed.

As JSON each frame (function, file, line) and each stack (numbers of frames, innermost first) stands once, in a table:
the stacks of a server's ranks are mostly the same, and read back they are the same objects. A thread is a list as well:
name, native id, whether active, whether it owns the GIL, number of its stack. `SCHEMA_VERSION` grows when
a reader of the older form would misread it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
#: Of each field of a process that holds a single value, what checks it.
_PLAIN: dict[str, Callable[[object], Any]] = {
    **dict.fromkeys(("host", "title", "role", "state", "wchan", "problem"), checked.text),
    **dict.fromkeys(("pid", "start_ticks", "tracer"), checked.whole),
    **dict.fromkeys(("time", "cpu_secs"), checked.number),
}


@dataclass(frozen=True)
class Problem:
    """Something that could not be had."""

    what: str  # what is missing, with the process, path or host
    why: str  # the reason
    next: str = ""  # the command or step that would get it; empty if absent


@dataclass(frozen=True)
class NodeSnapshot:
    """What one round saw on one host."""

    host: str
    time: float  # when the round began, in seconds since the epoch
    processes: tuple[Sample, ...] = ()
    problems: tuple[Problem, ...] = field(default=())  # what could not be had

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
    text = checked.text
    try:
        rows, stack_rows = checked.entries(document["frames"]), checked.entries(document["stacks"])
        frames = [_frame(text(function), text(file), checked.whole(line)) for function, file, line in rows]
        stacks = [tuple(checked.pick(frames, checked.entries(numbers))) for numbers in stack_rows]
        problems = checked.entries(document["problems"])
        return NodeSnapshot(
            host=text(document["host"]),
            time=checked.number(document["time"]),
            processes=tuple(_process_from_json(entry, stacks) for entry in checked.entries(document["processes"])),
            problems=tuple(Problem(text(one["what"]), text(one["why"]), text(one["next"])) for one in problems),
        )
    except KeyError as error:
        raise ValueError(f"not a snapshot: it lacks {error}") from None
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"not a snapshot: {error}") from None


def _process_to_json(process: Sample, table: dict[tuple[Frame, ...], int]) -> dict[str, Any]:
    """Return a process as JSON values; `table` has the number of each stack, and gets those of the process."""
    document: dict[str, Any] = {name: value for name, value in vars(process).items() if name not in _LOCAL}
    document["ranks"] = dict(process.ranks)
    document["kernels"] = list(process.kernels)
    for name in ("threads", "native"):
        document[name] = [
            [thread.name, thread.native_id, thread.active, thread.owns_gil, table.setdefault(thread.frames, len(table))]
            for thread in document[name]
        ]
    return document


def _process_from_json(entry: Mapping[str, Any], stacks: Sequence[tuple[Frame, ...]]) -> Sample:
    server, rendezvous, side = entry["server"], entry["rendezvous"], entry["side"]
    if side not in (None, "prefill", "decode"):
        raise ValueError(f"{side!r} is neither prefill nor decode")
    return Sample(
        **{name: check(entry[name]) for name, check in _PLAIN.items()},
        ranks={checked.text(name): checked.whole(number) for name, number in entry["ranks"].items()},
        server=None if server is None else checked.whole(server),
        rendezvous=None if rendezvous is None else checked.text(rendezvous),
        side=side,
        threads=_threads(entry["threads"], stacks),
        native=_threads(entry["native"], stacks),
        kernels=tuple(checked.text(kernel) for kernel in checked.entries(entry["kernels"])),
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
