"""Read what Python's faulthandler writes, also when it was cut off.

Its form is that of ``Python/traceback.c`` and ``Modules/faulthandler.c`` of CPython 3.10 to 3.14: threads from the
newest to the oldest, so that the main thread comes last, at most 100 threads of at most 100 frames.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_crashkit.model.sample import Frame, Thread

_FATAL = re.compile(r"Fatal Python error: (.*)")
_THREAD = re.compile(r"(Thread|Current thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
#: Where a thread's stack begins: the interpreter's own entry, or threading's.
_OUTERMOST = frozenset({"<module>", "_bootstrap"})
_CUT_OFF = "..."


@dataclass(frozen=True)
class FaulthandlerOutput:
    """What faulthandler wrote."""

    error: str  # the fatal error in its words, such as ``Segmentation fault``; empty where there was none
    #: The threads, the current one first; `Thread.active` is true of the one that hit the error.
    threads: tuple[Thread, ...]
    is_whole: bool  # the main thread is among them, to its outermost frame


@dataclass
class _Section:
    ident: int
    name: str
    is_current: bool
    frames: list[Frame]
    is_cut_off: bool = False


def parse_faulthandler(text: str, pid: int, main_thread: int, roots: Sequence[str] = ()) -> FaulthandlerOutput:
    """Read faulthandler's output, or as much of it as there is.

    `main_thread` is Python's identifier of process `pid`'s main thread. Paths are shortened by the folders `roots`.
    """
    error = ""
    sections: list[_Section] = []
    ordered_roots = sorted((root.rstrip("/") + "/" for root in roots if root), key=len, reverse=True)
    # What has no newline is being written.
    for line in text[: text.rfind("\n") + 1].splitlines():
        if found := _THREAD.fullmatch(line):
            ident = int(found[2], 16)
            if any(section.ident == ident for section in sections):
                # It was told to write once more; the first time is that of the event.
                break
            name = "MainThread" if ident == main_thread else found[3] or ""
            sections.append(_Section(ident, name, found[1] != "Thread", []))
        elif sections and (found := _FRAME.fullmatch(line)):
            number = int(found[2]) if found[2].isdigit() else 0
            sections[-1].frames.append(Frame(found[3], _shorten(found[1], ordered_roots), number))
        elif sections and line.strip() == _CUT_OFF:
            sections[-1].is_cut_off = True
        elif found := _FATAL.match(line):
            error = found[1].strip()
    threads = sorted((_thread(section, pid, main_thread, error) for section in sections), key=lambda t: not t.active)
    return FaulthandlerOutput(error, tuple(threads), any(_is_whole(section, main_thread) for section in sections))


def _thread(section: _Section, pid: int, main_thread: int, error: str) -> Thread:
    return Thread(
        name=section.name,
        native_id=pid if section.ident == main_thread else None,
        # It is the one that got the signal; one that was asked for a stack need not have been at work.
        active=section.is_current and bool(error),
        owns_gil=False,
        frames=tuple(section.frames),
    )


def _is_whole(section: _Section, main_thread: int) -> bool:
    if section.ident != main_thread or not section.frames:
        return False
    return section.is_cut_off or section.frames[-1].function in _OUTERMOST


def _shorten(path: str, roots: Iterable[str]) -> str:
    return next((path[len(root) :] for root in roots if path.startswith(root)), path)
