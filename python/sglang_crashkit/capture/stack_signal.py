"""Have faulthandler write the stacks of processes, in their signal handlers: the last rung, without their interpreter.

A signal handler runs when the kernel delivers the signal, whatever holds the GIL. faulthandler walks all
threads' frames without that lock; where another thread runs Python meanwhile it may read a frame that is being freed,
and crash the process. So it is asked only when the GIL is not to be had, when nothing runs Python. A
stopped or traced process is not asked: it would take the signal whenever it goes on.

The form of what it writes is that of ``Python/traceback.c`` and ``Modules/faulthandler.c`` of CPython 3.10 to 3.14:
threads from the newest to the oldest, so that the main thread comes last, at most 100 threads of at most 100 frames.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.pidfd import open_pidfd, signal_pidfd
from sglang_crashkit.kernel.stack_hooks import HookFiles, StackHooks
from sglang_crashkit.model.sample import Frame, Sample, Thread

_POLL_SECS = 0.005
#: Output that has not grown for this long, in seconds, is all there is, whatever it looks like.
_STILL_SECS = 0.1
_MAX_BYTES = 4 << 20
_FATAL = re.compile(r"Fatal Python error: (.*)")
_THREAD = re.compile(r"(Thread|Current thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
#: Where a thread's stack begins: the interpreter's own entry, or threading's.
_OUTERMOST = frozenset({"<module>", "_bootstrap"})
_CUT_OFF = "..."


@dataclass
class _Question:
    hooks: StackHooks
    file: Path
    size: int = 0
    grown_at: float = 0.0


def ask_faulthandler(
    processes: Sequence[StackHooks], folders: Mapping[int, Path], deadline_secs: float
) -> list[Sample]:
    """Ask all processes side by side, each with its runtime folder; return a result for each, in the order given."""
    started = time.monotonic()
    results: dict[int, Sample] = {}
    waiting: list[_Question] = []
    for hooks in processes:
        question = _Question(hooks, HookFiles.of(folders[hooks.pid], hooks.pid, hooks.start_ticks).stack)
        refusal = _ask(question)
        if refusal:
            results[hooks.pid] = Sample(pid=hooks.pid, problem=refusal, source="faulthandler")
        else:
            waiting.append(question)
    while waiting:
        is_last = time.monotonic() >= started + deadline_secs
        for question in list(waiting):
            output = _read(question, is_last=is_last)
            if output is not None:
                waiting.remove(question)
                results[question.hooks.pid] = _result(question, output, started)
        if waiting:
            time.sleep(_POLL_SECS)
    return [results[hooks.pid] for hooks in processes]


def _ask(question: _Question) -> str:
    """Send the signal; return why it was not sent, empty when it was."""
    hooks = question.hooks
    if hooks.signal == 0:
        return "faulthandler has no signal there"
    try:
        pidfd = open_pidfd(hooks.pid)
    except OSError as error:
        return error.strerror or str(error)
    try:
        stat = procfs.read_stat(hooks.pid, hooks.start_ticks)
        if stat is None or stat.state in "ZX":
            return "it has ended"
        if stat.state in "Tt":
            return "it is stopped, and would take the signal when it goes on"
        if tracer := procfs.read_tracer(hooks.pid):
            return f"process {tracer} traces it, and would take the signal"
        if not procfs.catches_signal(hooks.pid, hooks.signal):
            return f"it does not catch signal {hooks.signal} any more"
        thread = _thread_to_ask(hooks)
        if thread is None:
            return "no thread of it can take a signal now: all are in uninterruptible sleep or block it"
        os.truncate(question.file, 0)
        _send(pidfd, hooks, thread)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(pidfd)
    return ""


def _thread_to_ask(hooks: StackHooks) -> int | None:
    """Return a thread that takes the signal at once: the main thread where it does, as the kernel prefers it too."""
    states = procfs.thread_states(hooks.pid)
    for thread in sorted(states, key=lambda thread: (thread != hooks.pid, thread)):
        if states[thread] in "RSI":
            blocked = procfs.read_status(hooks.pid, thread).get("SigBlk")
            if not procfs.in_mask(blocked, hooks.signal):
                return thread
    return None


def _send(pidfd: int, hooks: StackHooks, thread: int) -> None:
    # Before glibc 2.30 there is no function for it.
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if thread == hooks.pid or tgkill is None:
        signal_pidfd(pidfd, hooks.signal)
    elif tgkill(hooks.pid, thread, hooks.signal):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _read(question: _Question, *, is_last: bool) -> FaulthandlerOutput | None:
    """Return the output once it is whole or stands still, and what there is of it when this is the last look."""
    now = time.monotonic()
    with contextlib.suppress(OSError):
        size = question.file.stat().st_size
        if size != question.size:
            question.size, question.grown_at = size, now
    if question.size == 0 and not is_last:
        return None
    text = ""
    with contextlib.suppress(OSError), question.file.open("rb") as file:
        text = file.read(_MAX_BYTES).decode(errors="replace")
    hooks = question.hooks
    output = parse_faulthandler(text, hooks.pid, hooks.main_thread, hooks.roots)
    stands_still = question.size > 0 and now - question.grown_at >= _STILL_SECS
    return output if output.is_whole or stands_still or is_last else None


def _result(question: _Question, output: FaulthandlerOutput, started: float) -> Sample:
    seconds = round(time.monotonic() - started, 4)
    if any(thread.frames for thread in output.threads):
        threads, problem = output.threads, "" if output.is_whole else "what it wrote is not whole"
    else:
        threads, problem = (), f"it wrote nothing within {seconds:g} s"
    return Sample(pid=question.hooks.pid, threads=threads, problem=problem, source="faulthandler", seconds=seconds)


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
