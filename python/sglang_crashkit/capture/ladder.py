"""Take the Python stacks of processes by three methods in turn, until one succeeds, within one deadline.

1. py-spy, from outside, without a pause: it needs permission to trace, and nothing from the process.
2. A thread of the process itself: it needs the GIL, but no permission.
3. faulthandler, in a signal handler of the process: it needs neither, but a thread that takes a signal. It may crash
   the process, so it is only for a process that is about to be ended.

Methods 2 and 3 work only for a process that prepared them at its start; see `kernel.stack_hooks`.

A signal handler runs when the kernel delivers the signal, whichever thread holds the GIL. faulthandler walks the frames
of all threads without the GIL. If another thread runs Python at the same time, it may read a frame that is being freed.
So it is used only if the GIL cannot be had or no thread runs Python, and never on a stopped or traced process. Its
output has the format of ``Python/traceback.c`` and ``Modules/faulthandler.c`` of CPython 3.10 to 3.14: at most 100
threads with at most 100 frames each, the newest thread first, so that the main thread comes last.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_crashkit.capture.pyspy import sample_all
from sglang_crashkit.capture.responder import ask_responders
from sglang_crashkit.capture.tracing import stopper_of
from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.pidfd import open_pidfd, signal_pidfd
from sglang_crashkit.kernel.private_files import read_regular
from sglang_crashkit.kernel.stack_hooks import HookFiles, StackHooks, read_stack_hooks
from sglang_crashkit.model.sample import Frame, Sample, Thread, are_whole

#: The shares of the time for py-spy, if there is another method, and for the threads of the processes.
_PYSPY_SHARE, _RESPONDER_SHARE = 0.5, 0.2
#: The least share for each method inside the process, even after the deadline: a machine that was paused, as virtual
#: machines are now and then, let no process run in that time.
_LEAST_SHARE = 0.15

_POLL_SECS = 0.005
_MAX_BYTES = 4 << 20
_FATAL = re.compile(r"Fatal Python error: (.*)")
_THREAD = re.compile(r"(Thread|Current thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_CUT_OFF = "..."


def capture_all(
    processes: Mapping[int, int],
    folder: Path | Mapping[int, Path],
    deadline_secs: float,
    *,
    may_signal: bool = False,
) -> list[Sample]:
    """Take the stacks of all processes in parallel; return a result for each, in the order given.

    Args:
        processes: start time of each process by its pid; see `procfs.ProcStat`.
        folder: the runtime folder, in which processes register their hooks; by pid if they are of several servers.
        deadline_secs: the longest that this may take, in seconds; a third more if the machine was paused meanwhile.
        may_signal: the processes are about to be ended, so the third method may be used.
    """
    folders = dict.fromkeys(processes, folder) if isinstance(folder, Path) else folder
    started = time.monotonic()
    prepared = [
        hooks
        for pid, start_ticks in processes.items()
        if pid in folders and (hooks := read_stack_hooks(folders[pid], pid, start_ticks)) is not None
    ]
    results: dict[int, Sample] = {}

    def left(but: str) -> list[StackHooks]:
        """Return the prepared processes without a stack that still exist and are not in one of the states `but`."""
        without = [hooks for hooks in prepared if not results[hooks.pid].threads]
        stats = [(hooks, procfs.read_stat(hooks.pid, hooks.start_ticks)) for hooks in without]
        return [hooks for hooks, stat in stats if stat is not None and stat.state not in but]

    def remaining() -> float:
        return max(_LEAST_SHARE * deadline_secs, started + deadline_secs - time.monotonic())

    share = _PYSPY_SHARE if prepared else 1.0
    _take_in(results, sample_all(list(processes), share * deadline_secs), 0.0)
    # Not the stopped processes: to wait for their answer would take time from the others.
    if asked := left(but="ZXTt"):
        since = time.monotonic() - started
        files = {one.pid: HookFiles.of(folders[one.pid], one.pid, one.start_ticks).socket for one in asked}
        _take_in(results, ask_responders(files, min(remaining(), _RESPONDER_SHARE * deadline_secs)), since)
    if may_signal and (asked := left(but="ZX")):
        since = time.monotonic() - started
        _take_in(results, ask_faulthandler(asked, folders, remaining()), since)
    return [results[pid] for pid in processes]


def _take_in(results: dict[int, Sample], samples: Sequence[Sample], later_secs: float) -> None:
    """Replace earlier samples with new ones, but keep their problems; the new ones began `later_secs` later."""
    for new in samples:
        earlier = results.get(new.pid)
        problems = [earlier.problem] if earlier else []
        if new.problem:
            problems.append(new.problem if new.source == "py-spy" else f"{new.source}: {new.problem}")
        seconds = round(new.seconds + later_secs, 4)
        gil = new.gil or (earlier.gil if earlier is not None else "")
        results[new.pid] = replace(new, problem="; ".join(problems), seconds=seconds, gil=gil)


def ask_faulthandler(
    processes: Sequence[StackHooks], folders: Mapping[int, Path], deadline_secs: float
) -> list[Sample]:
    """Take stacks by faulthandler in parallel; return them in the order given. `folders` has runtime folders by pid."""
    started = time.monotonic()
    results: dict[int, Sample] = {}
    waiting: dict[StackHooks, Path] = {}
    for hooks in processes:
        file = HookFiles.of(folders[hooks.pid], hooks.pid, hooks.start_ticks).stack
        if refusal := _ask(hooks, file):
            results[hooks.pid] = Sample(pid=hooks.pid, problem=refusal, source="faulthandler")
        else:
            waiting[hooks] = file
    while waiting:
        is_last = time.monotonic() >= started + deadline_secs
        for hooks, file in list(waiting.items()):
            text = ""
            with contextlib.suppress(OSError):
                text = read_regular(file, _MAX_BYTES).decode(errors="replace")
            output = parse_faulthandler(text, hooks.pid, hooks.main_thread, hooks.roots)
            if output.is_whole or is_last:
                del waiting[hooks]
                threads, problem = output.threads, "" if output.is_whole else "what it wrote is not whole"
                secs = round(time.monotonic() - started, 4)
                if not any(thread.frames for thread in threads):
                    threads, problem = (), f"it wrote nothing within {secs:g} s"
                results[hooks.pid] = Sample(
                    pid=hooks.pid, threads=threads, problem=problem, source="faulthandler", seconds=secs
                )
        if waiting:
            time.sleep(_POLL_SECS)
    return [results[hooks.pid] for hooks in processes]


def _ask(hooks: StackHooks, file: Path) -> str:
    """Send the signal; return why it could not be sent, an empty text if it was."""
    if hooks.signal == 0:
        return "faulthandler has no signal there"
    try:
        pidfd = open_pidfd(hooks.pid)
    except OSError as error:
        return error.strerror or str(error)
    try:
        if reason := stopper_of(hooks.pid, hooks.start_ticks):
            return reason
        if not procfs.catches_signal(hooks.pid, hooks.signal):
            return f"it does not catch signal {hooks.signal} any more"
        thread = _thread_to_ask(hooks)
        if thread is None:
            return "no thread of it can take a signal now: all are in uninterruptible sleep or block it"
        os.truncate(file, 0)
        # glibc has tgkill since version 2.30.
        tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
        if thread == hooks.pid or tgkill is None:
            signal_pidfd(pidfd, hooks.signal)
        elif tgkill(hooks.pid, thread, hooks.signal):
            return os.strerror(ctypes.get_errno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(pidfd)
    return ""


def _thread_to_ask(hooks: StackHooks) -> int | None:
    """Return a thread that takes the signal at once: the main thread if it does, which the kernel prefers, too."""
    states = procfs.thread_states(hooks.pid)
    for thread in sorted(states, key=lambda thread: (thread != hooks.pid, thread)):
        if states[thread] in "RSI":
            blocked = procfs.read_status(hooks.pid, thread).get("SigBlk")
            if not procfs.in_mask(blocked, hooks.signal):
                return thread
    return None


@dataclass(frozen=True)
class FaulthandlerOutput:
    """The parsed output of faulthandler."""

    error: str  # the name of the fatal error, such as ``Segmentation fault``; empty if absent
    #: The threads, the one that hit the error first; `Thread.active` is true for that one.
    threads: tuple[Thread, ...]
    is_whole: bool  # the threads include the main thread up to its outermost frame


def parse_faulthandler(text: str, pid: int, main_thread: int, roots: Sequence[str] = ()) -> FaulthandlerOutput:
    """Parse faulthandler's output, which may be incomplete.

    `main_thread` is Python's identifier of the main thread of process `pid`. The folders `roots` are cut off paths.
    """
    error, is_whole, current = "", False, None
    stacks: dict[int, tuple[str, list[Frame]]] = {}  # name and frames of each thread by its identifier
    ordered_roots = sorted((root.rstrip("/") + "/" for root in roots if root), key=len, reverse=True)
    # A line without its newline is still being written.
    for line in text[: text.rfind("\n") + 1].splitlines():
        if found := _THREAD.fullmatch(line):
            ident = int(found[2], 16)
            if ident in stacks:
                # faulthandler wrote a second time; the first output is the one of the event.
                break
            stacks[ident] = ("MainThread" if ident == main_thread else found[3] or "", [])
            current = current if found[1] == "Thread" else ident
        elif stacks and (found := _FRAME.fullmatch(line)):
            number = int(found[2]) if found[2].isdigit() else 0
            path = next((found[1].removeprefix(root) for root in ordered_roots if found[1].startswith(root)), found[1])
            stacks[ident][1].append(Frame(found[3], path, number))
        elif stacks and line.strip() == _CUT_OFF:
            is_whole = is_whole or ident == main_thread
        elif found := _FATAL.match(line):
            error = found[1].strip()
    is_whole = is_whole or (main_thread in stacks and are_whole(stacks[main_thread][1]))
    threads = [
        # The current thread got the signal. If the signal asked for a stack, that thread need not have been active.
        Thread(name, pid if one == main_thread else None, one == current and bool(error), False, tuple(frames))
        for one, (name, frames) in stacks.items()
    ]
    return FaulthandlerOutput(error, tuple(sorted(threads, key=lambda thread: not thread.active)), is_whole)
