"""What one rank's dump of PyTorch's flight recorder says, as data.

The recorder keeps the last so many collectives of a process: which of which process group, and how far each came.
Source of the form: ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, version 2.10 of it, which PyTorch 2.9 to 2.14
write; the number before the dot changes where what is there changes its meaning.

What it does not see: collectives that are replayed from a CUDA graph, and those that SGLang runs past
``torch.distributed`` (its own all-reduce, and NCCL called directly).
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sglang_crashkit.model.lenient import writable
from sglang_crashkit.model.sample import Frame

#: 2,000 entries with their stacks take a megabyte.
MAX_BYTES = 16 << 20
#: Counted are the bytes that may make one; an empty one takes 64 bytes of memory.
MAX_CONTAINERS = 2_000_000
#: A value may stand in many places of a pickle, each of which counts.
MAX_PARTS = 5_000_000
MAX_FRAMES = 16
#: PyTorch allows no more.
MAX_DIMENSIONS = 64
MAX_TEXT = 500
_VERSION = re.compile(r"2\.\d{1,9}")
#: The instructions of protocol 2 that build plain data, and those of them that make a container or a mark.
_PLAIN, _CONTAINERS = b"\x80.(1}])tNaesu\x85\x86\x87\x88\x89\x8aKMJGXqrhj", b"(}])t\x85\x86\x87"

Sizes = tuple[tuple[int, ...], ...]


class FlightDumpError(Exception):
    """There is no dump that could be read; the message says why, in a few words."""

    def __init__(self, message: str, *, is_cut_off: bool = False) -> None:
        super().__init__(message)
        self.is_cut_off = is_cut_off  # it is a dump as far as it goes


@dataclass(frozen=True)
class Entry:
    """One collective that the rank began."""

    group: str  # name of the process group, the same on all ranks of it
    operation: str  # what it is, such as ``all_reduce``
    sequence: int  # its number in the group, the same on all ranks; several that are carried out as one have one
    is_done: bool  # whether it is over on this rank
    input_sizes: Sizes  # the shape of each tensor that goes in
    dtypes: tuple[str, ...]  # the types of those that go in, by the names of PyTorch
    created: float  # when it was begun, in seconds since the epoch
    frames: tuple[Frame, ...]  # the Python stack that began it, innermost first; empty where it was not kept


@dataclass(frozen=True)
class Group:
    """A process group that the rank is in."""

    description: str  # what it is for, as far as its maker said so; empty otherwise
    ranks: tuple[int, ...]  # the global ranks in it


@dataclass(frozen=True)
class FlightDump:
    """The dump of one rank."""

    groups: dict[str, Group]  # the rank's process groups by name, which is the same on all ranks of one
    entries: tuple[Entry, ...]  # the collectives that were begun, the oldest first; messages are left out
    is_from_the_start: bool  # nothing has fallen out of it yet


class _PlainUnpickler(pickle._Unpickler):
    """Carries out what builds plain data, and refuses everything else.

    That in C clears 34 GB of memory for five bytes that name a far place of its memo.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")

    def set_items(self: Any, items: list[Any]) -> None:
        # Keys can be chosen so that a table of them is filled in quadratic time, and tuples so that they are hashed in
        # exponential time.
        if type(self.stack[-1]) is not dict or len(items) % 2 or any(type(key) is not str for key in items[::2]):
            raise pickle.UnpicklingError("a key in it is no text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch = {code: pickle._Unpickler.dispatch[code] for code in _PLAIN}  # noqa: RUF012 - as in the class above
    dispatch[ord("s")] = lambda self: self.set_items([self.stack.pop(-2), self.stack.pop()])  # type: ignore[attr-defined]
    dispatch[ord("u")] = lambda self: self.set_items(self.pop_mark())  # type: ignore[attr-defined]


def load_plain(data: bytes) -> Any:
    """Return the plain data in a pickle of protocol 2, in bounded time and memory; FlightDumpError of another one.

    One value may stand in several places of it, also within itself: a reader that walks it counts the steps.
    """
    if len(data) > MAX_BYTES or sum(data.count(code) for code in _CONTAINERS) > MAX_CONTAINERS:
        raise FlightDumpError(f"it has more than {MAX_BYTES >> 20} MB or {MAX_CONTAINERS} containers")
    if not b"\x80\x02".startswith(data[:2]):
        raise FlightDumpError("it is no pickle of protocol 2")
    file = io.BytesIO(data)
    try:
        value = _PlainUnpickler(file).load()
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        is_at_end = file.tell() >= len(data) and not (isinstance(error, IndexError) and data.endswith(b"."))
        if is_at_end:
            raise FlightDumpError(f"it is cut off after {len(data)} bytes", is_cut_off=True) from None
        words = f"code {error} builds no plain data" if isinstance(error, KeyError) else str(error)
        raise FlightDumpError(f"byte {file.tell() - 1}: {words}") from None
    if file.tell() < len(data):
        raise FlightDumpError(f"{len(data) - file.tell()} bytes follow its end")
    return value


def parse_dump(data: bytes) -> FlightDump:
    """Return what the content of a dump says; raises FlightDumpError for anything else."""
    try:
        return parse_document(load_plain(data))
    except FlightDumpError as error:
        raise FlightDumpError(f"no dump: {error}", is_cut_off=error.is_cut_off) from None


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _Entry(msgspec.Struct):
    record_id: int
    process_group: tuple[str, str]
    collective_seq_id: int
    profiling_name: str
    state: Literal["scheduled", "started", "completed"]
    # So that the numbers of elements can be calculated in no time.
    input_sizes: list[Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]], Meta(max_length=MAX_DIMENSIONS)]]
    time_created_ns: int
    input_dtypes: list[str] = []
    frames: list[_Frame] = []
    retired: bool = False
    is_p2p: bool = False


class _Group(msgspec.Struct):
    ranks: str = ""
    desc: str = ""


class _Document(msgspec.Struct):
    pg_config: dict[str, _Group]
    entries: list[_Entry] = []  # left out where nothing was recorded at all


def parse_document(document: Any) -> FlightDump:
    """Return what the value of a dump says; raises FlightDumpError for anything else."""
    try:
        if not isinstance(document, dict):
            raise ValueError(f"a {type(document).__name__} stands in it where a dict belongs")
        version = document.get("version")
        if not isinstance(version, str) or not _VERSION.fullmatch(version):
            raise ValueError(f"it is of version {version!r:.20}, of which nothing is known")
        _count_parts(document)
        told = msgspec.convert(document, _Document)
    except ValueError as error:
        raise FlightDumpError(f"no dump of a flight recorder: {error}") from None
    # One text may be that of many groups.
    texts = {group.ranks for group in told.pg_config.values()}
    ranks = {text: tuple(sorted(set(map(int, re.findall(r"\d{1,9}", text))))) for text in texts}
    groups = {
        name: Group(_text(group.desc).removeprefix("undefined"), ranks[group.ranks])
        for name, group in told.pg_config.items()
        if name
    }
    is_from_the_start = not told.entries or told.entries[0].record_id == 0
    # A message goes from one rank to another, and the others of the group have no part in it.
    return FlightDump(groups, tuple([_entry(one) for one in told.entries if not one.is_p2p]), is_from_the_start)


def _count_parts(document: Any) -> None:
    """Refuse a value that is larger than any recorder writes, or stands in itself."""
    waiting, count = [document], 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, list | tuple | dict):
            count += len(value)
            if count > MAX_PARTS:
                raise ValueError(f"it has more than {MAX_PARTS} parts")
            waiting += value.values() if isinstance(value, dict) else value


def _entry(told: _Entry) -> Entry:
    backend, colon, operation = told.profiling_name.partition(":")
    # Of a CPU backend, which has no events to look at, all there is is that it is not followed any more.
    is_retired = backend == "gloo" and told.retired
    return Entry(
        group=_text(told.process_group[0]),
        operation=_text(operation if colon else backend),
        sequence=told.collective_seq_id,
        is_done=told.state == "completed" or is_retired,
        input_sizes=tuple(map(tuple, told.input_sizes)),
        dtypes=tuple(map(_text, told.input_dtypes)),
        created=told.time_created_ns / 1e9,
        frames=tuple([Frame(_text(one.name), _text(one.filename), one.line) for one in told.frames[:MAX_FRAMES]]),
    )


def _text(value: str) -> str:
    return writable(value[:MAX_TEXT])
