"""What one rank's dump of PyTorch's flight recorder says, as data.

The recorder keeps the last so many collectives of a process: which of which process group, and how far each came.
Source of the form: ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, version 2.10 of it, which PyTorch 2.9 to 2.14
write; the number before the dot changes where what is there changes its meaning.

What it does not see: collectives that are replayed from a CUDA graph, and those that SGLang runs past
``torch.distributed`` (its own all-reduce, and NCCL called directly).
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglang_crashkit.model.plain_pickle import CutOffError, PickleError, load_plain
from sglang_crashkit.model.sample import Frame

State = Literal["scheduled", "started", "completed"]

#: 2,000 entries with their stacks take half a megabyte.
_MOST_BYTES = 32 << 20
_MOST_ENTRIES = 100_000
#: A value may stand in many places of a pickle: of all of a dump, so many numbers, names and frames are looked at.
_MOST_PARTS = 5_000_000
_MOST_FRAMES = 16
#: PyTorch allows no more.
_MOST_DIMENSIONS = 64
_MOST_TEXT = 500
_VERSION = re.compile(r"2\.\d{1,9}")
_STATES: dict[str, State] = {"scheduled": "scheduled", "started": "started", "completed": "completed"}

Sizes = tuple[tuple[int, ...], ...]


class FlightDumpError(Exception):
    """There is no dump that could be read; the message says why, in a few words.

    Attributes:
        is_cut_off: it is a dump as far as it goes.
    """

    def __init__(self, message: str, *, is_cut_off: bool = False) -> None:
        super().__init__(message)
        self.is_cut_off = is_cut_off


@dataclass(frozen=True)
class Entry:
    """One collective, or one message between two ranks, that the rank began.

    Attributes:
        record: the how-manieth entry it is of all that the process recorded, from 0.
        group: name of the process group, the same on all ranks of it.
        operation: what it is, such as ``all_reduce`` or ``send 0->1``, with the numbers of the ranks in the group.
        backend: who carries it out, such as ``nccl``.
        sequence: the how-manieth collective of the group it is, the same on all ranks; several that are carried out as
            one have one. Of a message, that of the last collective before it.
        message_sequence: the how-manieth message of the group; 0 of a collective before any.
        is_message: it goes from one rank to another, and the others of the group have no part in it.
        state: how far the GPU was seen to have come; ``started`` only where ``TORCH_NCCL_ENABLE_TIMING`` is set.
        retired: nobody follows it any more: it is done, or it was given up.
        input_sizes: the shape of each tensor that goes in.
        output_sizes: the shape of each that comes out.
        dtypes: the types of those that go in, by the names of PyTorch.
        created: when it was begun, in seconds since the epoch.
        frames: the Python stack that began it, innermost first; empty where it was not kept.
    """

    record: int
    group: str
    operation: str
    backend: str
    sequence: int
    message_sequence: int
    is_message: bool
    state: State
    retired: bool
    input_sizes: Sizes
    output_sizes: Sizes
    dtypes: tuple[str, ...]
    created: float
    frames: tuple[Frame, ...]

    @property
    def is_done(self) -> bool:
        """Whether it is over on this rank; of a CPU backend, which has no events to look at, that is all there is."""
        return self.state == "completed" or (self.retired and self.backend == "gloo")


@dataclass(frozen=True)
class Group:
    """A process group that the rank is in.

    Attributes:
        name: the same on all ranks of it.
        description: what it is for, as far as whoever made it said so; empty otherwise.
        ranks: the global ranks in it.
    """

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class GroupStatus:
    """How far a process group of the rank came: the last one's number, -1 where there is none or it is not known."""

    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True)
class FlightDump:
    """The dump of one rank.

    Attributes:
        version: of the form.
        groups: the rank's process groups by name.
        status: how far they came, by PyTorch's number for each in the process.
        entries: what was begun, the oldest first; those before are not kept any more.
    """

    version: str
    groups: dict[str, Group]
    status: dict[str, GroupStatus]
    entries: tuple[Entry, ...]

    @property
    def is_from_the_start(self) -> bool:
        """Whether nothing has fallen out of it yet."""
        return not self.entries or self.entries[0].record == 0


def read_dump(path: Path, owner: int) -> FlightDump:
    """Return what is in the file `path`, which must be a regular file of user `owner`.

    Raises:
        FlightDumpError: it is not, or no dump.
    """
    return parse_dump(read_bytes(path, owner))


def read_bytes(path: Path, owner: int) -> bytes:
    """Return the content of a dump; see `read_dump`."""
    try:
        # Not blocking, and not through a link: in a shared folder anybody may have put something else there.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise FlightDumpError(f"{path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != owner:
            raise FlightDumpError(f"{path} is not a file of user {owner}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise FlightDumpError(f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if len(data) > _MOST_BYTES:
        raise FlightDumpError(f"{path} has more than {_MOST_BYTES >> 20} MB")
    return data


def parse_dump(data: bytes) -> FlightDump:
    """Return what the content of a dump says.

    Raises:
        FlightDumpError: it is none.
    """
    try:
        document = load_plain(data)
    except PickleError as error:
        raise FlightDumpError(f"no dump: {error}", is_cut_off=isinstance(error, CutOffError)) from None
    try:
        return _Parser().dump(document)
    except (KeyError, ValueError) as error:
        words = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise FlightDumpError(f"no dump of a flight recorder: {words}") from None


class _Parser:
    """Takes over what is of interest, and counts what it looks at."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def dump(self, document: Any) -> FlightDump:
        document = _mapping(document)
        version = _text(document["version"])
        if not _VERSION.fullmatch(version):
            raise ValueError(f"it is of version {version!r:.20}, of which nothing is known")
        # Where nothing was recorded at all, it is left out.
        entries = self._list(document.get("entries", []))
        if len(entries) > _MOST_ENTRIES:
            raise ValueError(f"it has more than {_MOST_ENTRIES} entries")
        groups = [self._group(name, its) for name, its in self._items(document["pg_config"])]
        status = {name: _status(_mapping(its)) for name, its in self._items(document.get("pg_status", {}))}
        by_name = {group.name: group for group in groups if group.name}
        return FlightDump(version, by_name, status, tuple([self._entry(_mapping(entry)) for entry in entries]))

    def _entry(self, entry: dict[str, Any]) -> Entry:
        self._count(1)
        group = entry["process_group"]
        if not isinstance(group, tuple) or len(group) != 2:
            # Its own words may be without end: a part of it may stand in many places.
            raise ValueError(f"what names its process group is no pair ({type(group).__name__})")
        backend, colon, operation = _text(entry["profiling_name"]).partition(":")
        state = _STATES.get(_text(entry["state"]))
        if state is None:
            raise ValueError(f"{entry['state']!r:.80} is no state")
        return Entry(
            record=_whole(entry["record_id"]),
            group=_text(group[0]),
            operation=operation if colon else backend,
            backend=backend if colon else "",
            sequence=_whole(entry["collective_seq_id"]),
            message_sequence=_whole(entry["p2p_seq_id"]),
            is_message=entry.get("is_p2p") is True,
            state=state,
            retired=entry.get("retired") is True,
            input_sizes=self._sizes(entry["input_sizes"]),
            output_sizes=self._sizes(entry["output_sizes"]),
            dtypes=tuple([_text(name) for name in self._list(entry.get("input_dtypes", []))]),
            created=_whole(entry["time_created_ns"]) / 1e9,
            frames=tuple([_frame(_mapping(frame)) for frame in self._list(entry.get("frames", []))[:_MOST_FRAMES]]),
        )

    def _group(self, name: str, config: Any) -> Group:
        config = _mapping(config)
        ranks = re.findall(r"\d{1,9}", _text(config.get("ranks", ""), most=1 << 20))
        self._count(len(ranks))
        description = _text(config.get("desc", ""))
        return Group(
            _text(name), "" if description == "undefined" else description, tuple(sorted(set(map(int, ranks))))
        )

    def _sizes(self, value: Any) -> Sizes:
        return tuple([tuple([_size(number) for number in self._shape(sizes)]) for sizes in self._list(value)])

    def _shape(self, value: Any) -> list[Any]:
        shape = self._list(value)
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor in it has more than {_MOST_DIMENSIONS} dimensions")
        return shape

    def _list(self, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError(f"a {type(value).__name__} stands in it where a list belongs")
        self._count(len(value))
        return value

    def _items(self, value: Any) -> list[tuple[str, Any]]:
        items = list(_mapping(value).items())
        self._count(len(items))
        return items

    def _count(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise ValueError(f"it has more than {_MOST_PARTS} parts")


def _status(status: dict[str, Any]) -> GroupStatus:
    return GroupStatus(*(_whole(status[f"last_{step}_collective"]) for step in ("enqueued", "started", "completed")))


def _frame(frame: dict[str, Any]) -> Frame:
    return Frame(_text(frame["name"]), _text(frame["filename"]), _whole(frame["line"]))


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} stands in it where a dictionary belongs")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"a {type(value).__name__} stands in it where a whole number belongs")
    return value


def _size(value: Any) -> int:
    # So that as many as a tensor has of them can be multiplied in no time.
    if not 0 <= _whole(value) < 1 << 63:
        raise ValueError(f"{value} is no size of a tensor")
    return _whole(value)


def _text(value: Any, most: int = _MOST_TEXT) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} stands in it where a text belongs")
    text = value[:most]
    # A lone surrogate, which no file would take, may stand in it.
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()
