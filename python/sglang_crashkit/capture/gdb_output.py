"""Read what gdb and cuda-gdb print: the stacks of all threads, and the CUDA kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_crashkit.model.sample import Frame, Thread

_THREAD = re.compile(r'^Thread \d+ \((?:Thread 0x[0-9a-f]+ )?\(?(?:LWP |process )(\d+)\)?(?: "(.*)")?\):$')
_FRAME = re.compile(r"^#\d+ +(?:0x[0-9a-f]+ in )?(.+)$")
_PLACE = re.compile(r"(?s)^(?P<function>.*?)(?: at (?P<file>[^:]+):(?P<line>\d+)| from (?P<library>\S+))?$")
#: A row of the table ends with the dimensions of grid and block (and cluster), then the kernel with its arguments.
_KERNEL = re.compile(r"^[\s*]*\d+\s.*?(?:\(\d+,\d+,\d+\)\s+){2,3}(\S.*)$")
_VALUES = re.compile(r"(?:\((?:[^()]|\([^()]*\))*\)| parms=.*)\s*$")
#: gdb prints a frame's arguments in parentheses behind its function's name, which may hold some itself.
_ARGUMENTS = re.compile(r" \((?:.*)\)$")
_MOST_NAME = 200


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """Return the stacks in the output of ``thread apply all bt``, innermost frame first; empty where there are none."""
    return tuple(_threads(text))


def _threads(text: str) -> Iterator[Thread]:
    head: tuple[int, str] | None = None
    frames: list[Frame] = []
    for line in text.splitlines():
        started = _THREAD.match(line)
        if started or not line.strip():
            if head is not None and frames:
                yield _thread(head, frames)
            head, frames = (int(started[1]), started[2] or "") if started else None, []
        elif head is not None and (found := _FRAME.match(line)):
            frames.append(_frame(found[1]))
    if head is not None and frames:
        yield _thread(head, frames)


def _thread(head: tuple[int, str], frames: list[Frame]) -> Thread:
    return Thread(name=head[1], native_id=head[0], active=False, owns_gil=False, frames=tuple(frames))


def _frame(text: str) -> Frame:
    match = _PLACE.match(text)
    assert match is not None
    function = _ARGUMENTS.sub("", match["function"])[:_MOST_NAME]
    return Frame(function, match["file"] or match["library"] or "", int(match["line"] or 0))


def parse_kernels(text: str) -> tuple[str, ...]:
    """Return the kernels in the output of ``info cuda kernels``, each once, without the values of their arguments."""
    rows = (_KERNEL.match(line) for line in text.splitlines())
    names = (_VALUES.sub("", row[1]).strip()[:_MOST_NAME] for row in rows if row)
    return tuple(dict.fromkeys(name for name in names if name))
