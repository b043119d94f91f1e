"""Python stacks as data: what py-spy and the kit's own processes say as JSON, and their form as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Frame:
    """One Python frame.

    Attributes:
        function: name of the function.
        file: path of the file, shortened as py-spy does where it can.
        line: line number, 0 where unknown.
    """

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Thread:
    """One Python thread, innermost frame first.

    Attributes:
        name: Python's name of the thread, empty where it could not be read.
        native_id: the kernel's thread id; equals the pid for the main thread.
        active: it was running on a CPU, as far as py-spy can tell.
        owns_gil: it held the global interpreter lock.
        frames: innermost first.
    """

    name: str
    native_id: int | None
    active: bool
    owns_gil: bool
    frames: tuple[Frame, ...]


def parse_pyspy(text: str) -> tuple[Thread, ...]:
    """Parse the output of ``py-spy dump --json``, which is also the form in which a process speaks of itself.

    Raises:
        ValueError: it is not such an output.
    """
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("the JSON of the stacks is nested too deeply") from None
    if not isinstance(document, list):
        raise ValueError("the JSON of the stacks is not a list of threads")
    try:
        return tuple(_thread(entry) for entry in document)
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"the JSON of the stacks lacks {error}") from error


def _thread(entry: dict[str, Any]) -> Thread:
    frames = (
        Frame(_text(frame["name"]), _text(frame.get("short_filename") or frame["filename"]), int(frame["line"]))
        for frame in entry["frames"]
    )
    native_id = entry.get("os_thread_id")
    return Thread(
        name=_text(entry.get("thread_name") or ""),
        native_id=native_id if isinstance(native_id, int) else None,
        active=bool(entry.get("active")),
        owns_gil=bool(entry.get("owns_gil")),
        frames=tuple(frames),
    )


def _text(value: object) -> str:
    # A lone surrogate, which no file would take, may stand in a name that is not UTF-8.
    return str(value).encode(errors="backslashreplace").decode()


def main_thread(threads: Iterable[Thread], pid: int) -> Thread | None:
    """Return the main thread of process `pid`, None when it is not among `threads`."""
    found = None
    for thread in threads:
        if thread.native_id == pid:
            return thread
        if thread.name == "MainThread":
            found = thread
    return found


def format_threads(title: str, pid: int, threads: Iterable[Thread]) -> Iterator[str]:
    """Yield the lines of a stack file: the process first, then thread by thread."""
    yield f"Process {pid}: {title}"
    for thread in threads:
        state = "active" if thread.active else "idle"
        gil = "+gil" if thread.owns_gil else ""
        yield ""
        yield f'Thread {thread.native_id or "?"} ({state}{gil}): "{thread.name or "unnamed"}"'
        for frame in thread.frames:
            yield f"    {frame}"
