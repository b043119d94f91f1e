"""The activity of one process in a sample: by its kernel state, its native frames and its Python frames, in that order.

Frames count up to the first frame of SGLang: a call into the driver above a Triton frame is the driver's, a barrier
above a compiler's frame is a barrier. The tables are in ``knowledge/activities.yaml``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_crashkit.judge.finding import fill
from sglang_crashkit.judge.knowledge import load, pattern, rows
from sglang_crashkit.model.sample import Frame, Sample, Thread, main_thread

_MAX_FRAMES = 400
_rows, _pattern = functools.partial(rows, "activities"), functools.partial(pattern, "activities")


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """What a process does, in one sample."""

    kind: str  # a key of ``kinds`` in ``activities.yaml``
    operation: str = ""  # the collective, a transfer's direction (``send``, ``recv``), the driver's function
    backend: str = ""  # ``NCCL``, ``gloo``, ``DeepEP`` …; empty if not known
    leaf: Frame | None = None  # the innermost frame that shows what it waits in
    place: Frame | None = None  # the innermost frame of SGLang that is not a wrapper
    purpose: str = ""  # what SGLang does there: a name of ``purposes``; empty if not known
    detail: str = ""  # more about the kernel's state, such as its function or the tracer; or the CUDA kernels that run

    @property
    def waits(self) -> str:
        """What it waits for: ``ranks``, ``gpu``, ``driver``, ``peer``, ``host``, ``file``, ``lock`` or ``none``."""
        return str(_kind(self.kind)["waits"])

    @property
    def is_work(self) -> bool:
        """Whether it may take minutes without being a hang."""
        return bool(_kind(self.kind).get("work"))

    @property
    def needs_all(self) -> bool:
        """Whether it returns only after all ranks of the group joined it; the sender of a broadcast does not wait."""
        return self.kind == "collective" and _pattern("symmetric").match(self.operation) is not None

    @property
    def is_for_requests(self) -> bool:
        """Whether it waits for new requests, or sends them to other ranks, as an idle process does."""
        # Code called from there, such as a signal handler, has nothing to do with requests.
        is_in_it = self.leaf == self.place or (self.leaf is not None and _is_wrapper(self.leaf))
        kinds = ("own",) if is_in_it else ()
        is_passing_on = self.kind in ("collective", "socket", "gil", "p2p", *kinds)
        return self.kind == "idle" or (is_passing_on and self.purpose in ("requests", "idle"))

    @property
    def where(self) -> str:
        """The place as ``function (file:line)``, in SGLang's code if known; empty without a stack."""
        frame = self.place or self.leaf
        return str(frame) if frame else ""

    @property
    def words(self) -> str:
        """The activity as the predicate of a sentence."""
        purpose = next((row["words"] for row in _rows("purposes") if row["name"] == self.purpose), "")
        told = purpose if self.kind not in ("idle", "unknown") else ""
        fields = {"operation": self.operation, "backend": self.backend, "detail": self.detail, "purpose": told}
        template = _kind(self.kind)["words"] + "[ of {backend}][ ({detail})][ for {purpose}][ in {where}]"
        return fill(template, {**fields, "where": self.where})[0]


def _kind(kind: str) -> dict[str, Any]:
    return load("activities")["kinds"][kind]  # type: ignore[no-any-return]


def bare(function: str) -> str:
    """Return the name of a function without its class and outer functions."""
    return function.rpartition(".")[2]


def is_own(frame: Frame) -> bool:
    """Return whether a frame is in SGLang's code."""
    return _pattern("own").search(frame.file) is not None


def is_loop(frame: Frame) -> bool:
    """Return whether a frame is a loop of SGLang, or dispatches all work, so that it alone shows no activity."""
    name = bare(frame.function)
    return bool(_pattern("loops").match(name) or _pattern("steps").match(name))


def activity_of(sample: Sample) -> Activity:
    """Return the activity of a process, by the kernel's state, else by its main thread."""
    if by_kernel := of_state(sample.state, sample.wchan, sample.tracer):
        return by_kernel
    thread = _main(sample.threads, sample.pid)
    seen = _of_threads(thread, _main(sample.native, sample.pid), sample)
    if seen.kind in ("lock", "own") and thread is not None:
        # The main thread only waits for the thread that runs the batch.
        runs = _pattern("batch_threads")
        for one in sample.threads:
            names = (*(bare(frame.function) for frame in one.frames), one.name.rpartition("(")[2].rstrip(")"))
            if one is not thread and any(map(runs.match, names)):
                native = next((other for other in sample.native if other.native_id == one.native_id), None)
                return _of_threads(one, native, sample)
    return seen


def _of_threads(thread: Thread | None, native: Thread | None, sample: Sample) -> Activity:
    python = thread.frames[:_MAX_FRAMES] if thread else ()
    mixed = native.frames[:_MAX_FRAMES] if native else ()
    return of_frames(python, mixed, tuple(sample.kernels), thread is not None and thread.owns_gil)


def frames_of(sample: Sample) -> tuple[Frame, ...]:
    """Return the frames of the main thread, innermost first: Python frames, or native frames if there are no others."""
    thread = _main(sample.threads, sample.pid) or _main(sample.native, sample.pid)
    return thread.frames[:_MAX_FRAMES] if thread else ()


def _main(threads: Sequence[Thread], pid: int) -> Thread | None:
    # Without names, as in a pasted stack, take the thread that runs SGLang's loop, else the last thread: faulthandler
    # and gdb print the main thread last.
    loops = (one for one in threads if role_by(one.frames))
    return main_thread(threads, pid) or next(loops, threads[-1] if threads else None)


def of_state(state: str, wchan: str = "", tracer: int = 0) -> Activity | None:
    """Return the activity that the kernel's state of a process shows by itself; None if it shows none."""
    for row in _rows("states"):
        if row["pattern"].match(f"{state} {wchan}"):
            detail, _ = fill(row["detail"], {"state": state, "wchan": wchan, "tracer": tracer or None})
            return Activity(kind=row["kind"], detail=detail)
    return None


@functools.lru_cache(maxsize=8192)
def of_frames(
    frames: tuple[Frame, ...], native: tuple[Frame, ...] = (), kernels: tuple[str, ...] = (), holds_gil: bool = False
) -> Activity:
    """Return the activity that a thread's frames show: Python frames and those of a mixed stack, innermost first.

    `kernels` are the CUDA kernels that run for the process.
    """
    python = frames or tuple(one for one in native if _is_python(one))
    above = _native_head(native)
    head = _head(python)
    named = ((row, frame) for row in _rows("native") for frame in above if row["function"].search(frame.function))
    by_native, by_python = next(named, None), _by_python(python, head)
    row: dict[str, Any] = {}
    leaf = next(iter(python or above), None)
    waits_for_ranks = by_python is not None and by_python[0]["kind"] in ("collective", "p2p", "store")
    if by_native and by_python and waits_for_ranks and by_native[0]["kind"] in ("collective", "gpu_sync", "gpu_launch"):
        # NCCL's barrier waits for a CUDA stream, but it is still a barrier.
        row, leaf = by_python
        row = {**row, "backend": by_native[0].get("backend") or row.get("backend", "")}
    elif by_native and (not by_native[0].get("weak") or by_python is None or by_python[0].get("weak")):
        row, leaf = by_native
    elif by_python:
        row, leaf = by_python
    kind = str(row.get("kind", ""))
    if kind in ("", "lock", "socket", "sleep", "file") and _is_idle(python):
        kind = "idle"
    elif not kind:
        # A tensor's `.item()` or `nonzero()` has no Python frame: the innermost frame is its caller's.
        name, file = (bare(leaf.function), leaf.file) if leaf is not None else ("", "")
        on_gpu = not holds_gil and (_pattern("gpu_files").search(file) or _pattern("gpu_functions").match(name))
        kind = "unknown" if leaf is None else "gpu_sync" if on_gpu else "own"
    operation, backend = "", str(row.get("backend", ""))
    if kind in ("collective", "store"):
        operation = next((found[1] for one in head if (found := _pattern("operation").match(bare(one.function)))), "")
    elif kind == "p2p":
        names = [name for one in python[:8] if not _pattern("both_ways").search(name := bare(one.function))]
        operation = next((found[1] for name in names if (found := _pattern("direction").search(name))), "")
    elif kind in ("driver", "gpu_sync", "gpu_launch") and leaf is not None:
        operation = leaf.function
    if kind in ("gpu_sync", "gpu_launch", "own") and kernels and all("nccl" in name.lower() for name in kernels):
        kind, backend, operation = "collective", "NCCL", ""
    purposes = (str(row["name"]) for one in python if is_own(one) for row in _rows("purposes") if _matches(row, one))
    own = [frame for frame in python if is_own(frame)]
    place = next((frame for frame in own if not _is_wrapper(frame)), own[0] if own else None)
    purpose, detail = next(purposes, ""), ", ".join(dict.fromkeys(kernels))[:120]
    return Activity(
        kind=kind, operation=operation, backend=backend, leaf=leaf, place=place, purpose=purpose, detail=detail
    )


def _is_python(frame: Frame) -> bool:
    return frame.file.endswith(".py") or frame.file.startswith("<")


def _native_head(native: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the native frames above SGLang's first Python frame, or the interpreter's first, innermost first."""
    interpreter = _pattern("interpreter")

    def ends(frame: Frame) -> bool:
        return is_own(frame) if _is_python(frame) else interpreter.search(frame.function) is not None

    above = itertools.takewhile(lambda frame: not ends(frame), native)
    return tuple(frame for frame in above if not _is_python(frame))


def _head(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the Python frames up to and including the first of SGLang that is not a wrapper."""
    ends = (index for index, frame in enumerate(frames, 1) if is_own(frame) and not _is_wrapper(frame))
    return tuple(frames[: next(ends, len(frames))])


def _is_wrapper(frame: Frame) -> bool:
    return bool(_pattern("wrappers").search(frame.file) or _pattern("wrapper_functions").match(bare(frame.function)))


def _matches(row: dict[str, Any], frame: Frame) -> bool:
    texts = {"file": frame.file, "function": bare(frame.function)}
    return all(row[column].search(text) for column, text in texts.items() if column in row)


def _by_python(frames: Sequence[Frame], head: Sequence[Frame]) -> tuple[dict[str, Any], Frame] | None:
    strong = [row for row in _rows("python") if not row.get("weak")]
    for place, frame in enumerate(head):
        is_passed = all(_pattern("passes").search(above.file) for above in head[:place])
        for row in strong:
            if row["kind"] == "collective" and not is_passed:
                continue  # other code runs inside the collective, such as a signal handler
            if not row.get("anywhere") and (frame is head[0] or not row.get("leaf")) and _matches(row, frame):
                return row, frame
    anywhere = [(row, frames) for row in strong if row.get("anywhere")]
    for row, some in (*anywhere, *((row, head) for row in _rows("python") if row.get("weak"))):
        if found := next((frame for frame in some if _matches(row, frame)), None):
            return row, found
    return None


def _is_idle(frames: Sequence[Frame]) -> bool:
    """Return whether a thread waits for work: above its loop are only frames of libraries that wait."""
    caller = innermost(frames)
    if caller is not None and is_own(caller):
        return _pattern("receiving").match(bare(caller.function)) is not None
    return any(_pattern("serving").search(frame.file) for frame in ([caller] if caller is not None else frames))


def innermost(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame outside the libraries that only wait."""
    outside = _pattern("outside")
    return next((frame for frame in frames if not outside.search(frame.file)), None)


def role_by(frames: Sequence[Frame]) -> str:
    """Return the role of a process by its main thread's frames: ``scheduler``, ``tokenizer`` …; empty if not known."""
    return next((str(row["role"]) for row in _rows("roles") if any(_matches(row, one) for one in frames)), "")


def front_work(frames: Sequence[Frame]) -> tuple[str, str]:
    """Return what a front end does on its event loop, and the component of that; empty strings if not known."""
    texts = [f"{frame.file} {frame.function}" for frame in frames[:40]]
    found = (row for row in _rows("front") if any(map(row["pattern"].search, texts)))
    return next(((str(row["name"]), str(row["component"])) for row in found), ("", ""))
