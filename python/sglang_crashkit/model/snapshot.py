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
from typing import Any, Literal

from sglang_crashkit.model import checked_json as checked
from sglang_crashkit.model.stacks import Frame, Thread

SCHEMA_VERSION = 1

#: Equal frames of many hosts are one object, which makes them quick to compare.
_frame = lru_cache(maxsize=1 << 16)(Frame)

#: What a server of a pair with separate prefill and decode does (``--disaggregation-mode``).
Side = Literal["prefill", "decode"]


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
class ProcessSnapshot:
    """One process at one moment.

    Attributes:
        host: the host's name.
        pid: process id.
        start_ticks: start time in clock ticks since boot; with host and pid it identifies a process.
        title: process title, without arguments that may be secret.
        role: as `titles.role_of` has it.
        ranks: as `titles.rank_of` has them, such as ``{"tp": 0, "pp": 1}``; empty where there is one rank only.
        server: pid of the process on this host that launched its server, None where it is not known.
        rendezvous: the address (``--dist-init-addr``) that the processes of one server have in common on all its
            hosts, None where its command line names none.
        side: what its server does, by the server's command line; None where prefill and decode are not separate.
        time: when, in seconds since the epoch.
        state: the letter that ``/proc`` has for the state of its main thread; empty where it was gone.
        wchan: the kernel function in which the main thread slept, empty where it did not or could not be read.
        tracer: pid of the process that traced it, 0 where there was none.
        cpu_secs: CPU time that all its threads had used since its start, in seconds.
        threads: its Python stacks, innermost frame first; empty where there are none.
        native: its stacks with native frames, of a debugger or py-spy, where they were taken; the file of a native
            frame is its source or library, as far as it is known.
        kernels: names of the CUDA kernels that were running for it, as the debugger has them.
        problem: why there are no Python stacks, empty where there are.
    """

    host: str
    pid: int
    start_ticks: int
    title: str
    role: str
    ranks: Mapping[str, int]
    time: float
    server: int | None = None
    rendezvous: str | None = None
    side: Side | None = None
    state: str = ""
    wchan: str = ""
    tracer: int = 0
    cpu_secs: float = 0.0
    threads: tuple[Thread, ...] = ()
    native: tuple[Thread, ...] = ()
    kernels: tuple[str, ...] = ()
    problem: str = ""


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
    processes: tuple[ProcessSnapshot, ...] = ()
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


def process_to_json(process: ProcessSnapshot, table: dict[tuple[Frame, ...], int]) -> dict[str, Any]:
    """Return a process as JSON values.

    Args:
        process: which.
        table: the number of each stack, to which those of the process are added.
    """
    document: dict[str, Any] = dict(vars(process))
    document["ranks"] = dict(process.ranks)
    document["kernels"] = list(process.kernels)
    for name in ("threads", "native"):
        document[name] = [
            [thread.name, thread.native_id, thread.active, thread.owns_gil, table.setdefault(thread.frames, len(table))]
            for thread in document[name]
        ]
    return document


def process_from_json(entry: Mapping[str, Any], stacks: Sequence[tuple[Frame, ...]]) -> ProcessSnapshot:
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
    return ProcessSnapshot(
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
