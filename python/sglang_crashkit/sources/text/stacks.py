"""Stacks as text, of py-spy, faulthandler, gdb and cuda-gdb: blocks of lines that end where another thing begins."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sglang_crashkit.model.sample import Frame, Sample, Thread, short_path

_PROCESS = re.compile(r"Process (\d{1,9}): ?(.*)")
_PYTHON = re.compile(r"Python v?\d+\.\d+")
_THREAD = re.compile(r'Thread (0x[0-9A-Fa-f]+|\d+)(?: \(([\w+ ]{1,40})\))?(?:: "(.{0,200})")?\s*$')
_PYSPY_FRAME = re.compile(
    r"\s{1,12}(?!File )(\S[^()]{0,400}?(?:\([^()]{0,80}\))?[^()]{0,200}?) \(([^()]{1,600}?)(?::(\d{1,9}))?\)\s*$"
)
#: A frame that somebody pasted without the thread that it is of.
_BARE_FRAME = re.compile(
    r"\s{0,12}([A-Za-z_<][\w.<>]{0,120}) \(((?:[\w.-]{1,80}/){0,12}[\w-]{1,80}\.py):(\d{1,9})\)\s*$"
)
_SAID = re.compile(r"\b(?:TP|[Rr]anks? ?)(\d{1,4})(?: ?(?:-|\u2013|to|\.\.) ?(?:TP)?(\d{1,4}))?")
_FAULT = re.compile(r"Fatal Python error: (.{1,200})")
_FAULT_THREAD = re.compile(
    r"(Current thread|Thread) (0x[0-9a-fA-F]+|\d+)(?: \[?([^()\]]{0,80})\]?)? ?\(most recent call first\):"
)
_FAULT_FRAME = re.compile(r'\s+File "([^"]{1,600})", line (\d{1,9}|\?{3}) in (.{1,300})')
_GDB_THREAD = re.compile(r"Thread (\d+) \((?:Thread 0x[0-9a-f]+ )?\(?LWP (\d+)\)?(?: \"([^\"]{0,80})\")?\)?")
_GDB_FRAME = re.compile(
    r"#(\d{1,4})\s{1,8}(?:0x[0-9a-f]{1,16} in )?([^\s(][^(]{0,400}?) ?\((.{0,1000}?)\)?"
    r"(?: (?:at|from) (\S{1,600}?)(?::(\d{1,9}))?)?$"
)
_RANKS = re.compile(r"(PP|DP|TP|EP|ATTN_CP|MOE_DP|CP)_?(\d+)")
#: Frames of one thread, threads of one process.
_MAX_FRAMES, _MAX_THREADS = 400, 2000


@dataclass
class StackBlock:
    """One process's stacks while their lines are read."""

    by: str
    pid: int = 0
    title: str = ""
    fatal: str = ""
    is_bare: bool = False  # without any header; the title is what was said before it
    threads: list[tuple[str, int | None, bool, bool, list[Frame]]] = field(default_factory=list)

    def begin(self, name: str, native_id: int | None, *, active: bool = False, gil: bool = False) -> None:
        """Begin another thread."""
        if len(self.threads) < _MAX_THREADS:
            self.threads.append((name, native_id, active, gil, []))

    def add(self, frame: Frame) -> None:
        """Add the next outer frame to the last thread."""
        if not self.threads:
            self.begin("MainThread", self.pid or None)
        if len(self.threads[-1][4]) < _MAX_FRAMES:
            self.threads[-1][4].append(frame)

    def sample(self) -> Sample:
        """Return what was read of it."""
        every = [
            Thread(name, native_id, active=active, owns_gil=gil, frames=tuple(frames))
            for name, native_id, active, gil, frames in self.threads
            if frames
        ]
        python = tuple(
            Thread(
                one.name,
                one.native_id,
                one.active,
                one.owns_gil,
                tuple(frame for frame in one.frames if is_python(frame)),
            )
            for one in every
        )
        has_native = any(not is_python(frame) for one in every for frame in one.frames)
        # gdb names no process: its first thread, which it prints last, has the process's id and its name.
        name, native_id = self.threads[-1][:2] if self.by == "gdb" and self.threads else ("", 0)
        return Sample(
            pid=self.pid or native_id or 0,
            title=self.title or name,
            threads=tuple(one for one in python if one.frames),
            native=tuple(every) if has_native else (),
        )


def is_python(frame: Frame) -> bool:
    """Return whether a frame is one of Python's own."""
    return frame.file.endswith((".py", ".pyx")) or frame.file.startswith("<")


def who_of(title: str) -> str:
    """Return the short name in a process title: ``sglang::scheduler_DP1_TP3`` is ``DP1 TP3``."""
    if ranks := _RANKS.findall(title):
        return " ".join(f"{name}{number}" for name, number in ranks)
    # The kernel keeps fifteen characters of a thread's name.
    for word, role in (
        ("schedul", "scheduler"),
        ("detoken", "detokenizer"),
        ("router", "router"),
        ("trainer", "trainer"),
    ):
        if word in title:
            return role
    return "tokenizer" if "launch_server" in title or "sglang serve" in title or "tokenizer" in title else ""


def begins(text: str) -> bool:
    """Return whether a line may begin a block of stacks."""
    head = text.lstrip()[:8]
    return head.startswith(("Process ", "Thread ", "Current ", "Fatal Py", "#")) or (
        ".py:" in text and _BARE_FRAME.match(text) is not None
    )


def ranks_said(said: str) -> list[str]:
    """Return whose stack a sentence introduces: ``TP1-3 wait in:`` is of three; empty where it names no rank."""
    if (match := _SAID.search(said)) is None:
        return []
    first, last = int(match[1]), int(match[2] or match[1])
    return [f"TP{number}" for number in range(first, min(last, first + 63) + 1)]


def parse(block: StackBlock | None, line: str) -> tuple[StackBlock | None, bool]:
    """Take a line into a block of stacks.

    Returns:
        The block that goes on, another one where the line begins one; and whether the line belongs to it. None and
        False where the line belongs to no stack.
    """
    stripped = line.strip()
    if match := _PROCESS.match(line):
        # Of multiprocessing (``Process sglang::scheduler_TP0:``) there is no pid, so it does not match.
        return StackBlock("py-spy", int(match[1]), match[2].strip()), True
    if match := _FAULT.match(stripped):
        return StackBlock("faulthandler", fatal=match[1]), True
    if match := _FAULT_THREAD.match(stripped):
        if block is None or block.by != "faulthandler":
            block = StackBlock("faulthandler")
        is_current = match[1] == "Current thread"
        name = (match[3] or "").strip() or ("MainThread" if is_current and not block.threads else "")
        block.begin(name, None, active=is_current)
        return block, True
    if match := _GDB_THREAD.match(stripped):
        if block is None or block.by != "gdb":
            block = StackBlock("gdb")
        block.begin(match[3] or "", int(match[2]))
        return block, True
    if stripped.startswith("#") and (match := _GDB_FRAME.match(stripped)):
        if block is None or block.by not in ("gdb",) or (match[1] == "0" and block.threads and block.threads[-1][4]):
            block = StackBlock("gdb")
        path = short_path(match[4] or "")
        block.add(Frame(match[2].strip(), path, int(match[5] or 0)))
        return block, True
    if match := _THREAD.match(stripped):
        if block is None or block.by != "py-spy":
            block = StackBlock("py-spy")
        state, number = match[2] or "", match[1]
        native_id = int(number, 0) if number.isdigit() else None
        block.begin(match[3] or "", native_id, active="active" in state, gil="gil" in state)
        return block, True
    if (block is None or block.is_bare) and (match := _BARE_FRAME.match(line)):
        block = block or StackBlock("py-spy", is_bare=True)
        block.add(Frame(match[1], short_path(match[2]), int(match[3])))
        return block, True
    if block is None:
        return None, False
    if block.by == "faulthandler" and (match := _FAULT_FRAME.match(line)):
        block.add(Frame(match[3].strip(), short_path(match[1]), int(match[2]) if match[2].isdigit() else 0))
        return block, True
    if block.by == "py-spy" and (match := _PYSPY_FRAME.match(line)):
        block.add(Frame(match[1].strip(), short_path(match[2]), int(match[3] or 0)))
        return block, True
    if not stripped or (_PYTHON.match(stripped) and not any(one[4] for one in block.threads)):
        return block, True
    if block.by == "faulthandler" and (stripped.startswith(("<no Python frame>", "...")) or not block.threads):
        return block, not block.threads and not stripped.startswith("[")
    if block.by == "py-spy" and stripped.startswith(("Arguments:", "Locals:")):
        return block, True
    return None, False
