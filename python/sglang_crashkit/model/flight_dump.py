"""The data of one rank's dump of PyTorch's flight recorder.

The recorder is a ring buffer of a process's last collectives, each with its process group and state.
Source of the format: ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, format version 2.10, which PyTorch 2.9 to
2.14 write. The number before the dot changes when an existing field changes its meaning.

The recorder does not see collectives that are replayed from a CUDA graph, nor those that SGLang runs without
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
#: Upper bound of the containers in a pickle, by the bytes that may create one; an empty one takes 64 bytes of memory.
MAX_CONTAINERS = 2_000_000
#: Each place of a pickle that refers to a value counts, also when it is the same value.
MAX_PARTS = 5_000_000
MAX_FRAMES = 16
#: PyTorch's own limit.
MAX_DIMENSIONS = 64
MAX_TEXT = 500
_VERSION = re.compile(r"2\.\d{1,9}")
#: The instructions of pickle protocol 2 that build plain data, and those among them that create a container or a mark.
_PLAIN, _CONTAINERS = b"\x80.(1}])tNaesu\x85\x86\x87\x88\x89\x8aKMJGXqrhj", b"(}])t\x85\x86\x87"

Sizes = tuple[tuple[int, ...], ...]


class FlightDumpError(Exception):
    """There is no readable dump; the message is a short reason."""

    def __init__(self, message: str, *, is_cut_off: bool = False) -> None:
        super().__init__(message)
        self.is_cut_off = is_cut_off  # the data is a valid dump up to its end


@dataclass(frozen=True)
class Entry:
    """One collective that the rank began."""

    group: str  # name of the process group, the same on all its ranks
    operation: str  # the operation, such as ``all_reduce``
    sequence: int  # its number in the group, the same on all ranks; coalesced collectives share a number
    is_done: bool  # whether it is complete on this rank
    input_sizes: Sizes  # the shape of each input tensor
    dtypes: tuple[str, ...]  # the types of the input tensors, by PyTorch's names
    created: float  # when it was begun, in seconds since the epoch
    frames: tuple[Frame, ...]  # the Python stack that began it, innermost first; empty where it was not kept


@dataclass(frozen=True)
class Group:
    """A process group that the rank is in."""

    description: str  # the purpose that its creator gave it; empty if none was given
    ranks: tuple[int, ...]  # the global ranks in it


@dataclass(frozen=True)
class FlightDump:
    """The dump of one rank."""

    groups: dict[str, Group]  # the rank's process groups by name, which is the same on all ranks of a group
    entries: tuple[Entry, ...]  # the collectives that were begun, the oldest first; messages are left out
    is_from_the_start: bool  # the recorder has not overwritten any entry yet


class _PlainUnpickler(pickle._Unpickler):
    """Unpickler that executes instructions for plain data, and refuses all others.

    It is not the C unpickler because that clears 34 GB of memory for five bytes with a high index into its memo.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")

    def set_items(self: Any, items: list[Any]) -> None:
        # Crafted keys can make filling a dict take quadratic time, and crafted tuples can take exponential time to
        # hash.
        if type(self.stack[-1]) is not dict or len(items) % 2 or any(type(key) is not str for key in items[::2]):
            raise pickle.UnpicklingError("a key in it is no text")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch = {code: pickle._Unpickler.dispatch[code] for code in _PLAIN}  # noqa: RUF012 - as in the class above
    dispatch[ord("s")] = lambda self: self.set_items([self.stack.pop(-2), self.stack.pop()])  # type: ignore[attr-defined]
    dispatch[ord("u")] = lambda self: self.set_items(self.pop_mark())  # type: ignore[attr-defined]


def load_plain(data: bytes) -> Any:
    """Return the plain data in a pickle of protocol 2, in bounded time and memory; raises FlightDumpError for others.

    A value may occur in several places, also within itself, so a caller that walks the data must count its steps.
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
    """Return the dump in the content of a dump file; raises FlightDumpError for anything else."""
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
    # The limits keep the calculation of the number of elements fast.
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
    entries: list[_Entry] = []  # absent if nothing was recorded at all


def parse_document(document: Any) -> FlightDump:
    """Return the dump in the unpickled value of a dump file; raises FlightDumpError for anything else."""
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
    # Many groups may have the same text, which is parsed only once.
    texts = {group.ranks for group in told.pg_config.values()}
    ranks = {text: tuple(sorted(set(map(int, re.findall(r"\d{1,9}", text))))) for text in texts}
    groups = {
        name: Group(_text(group.desc).removeprefix("undefined"), ranks[group.ranks])
        for name, group in told.pg_config.items()
        if name
    }
    is_from_the_start = not told.entries or told.entries[0].record_id == 0
    # Point-to-point messages are left out: the other ranks of the group do not take part in them.
    return FlightDump(groups, tuple([_entry(one) for one in told.entries if not one.is_p2p]), is_from_the_start)


def _count_parts(document: Any) -> None:
    """Raise ValueError for a value that is larger than any recorder writes, or that contains itself."""
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
    # A CPU backend has no events to query; that an entry is retired is the only sign that it is over.
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
