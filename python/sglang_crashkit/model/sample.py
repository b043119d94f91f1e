"""What a process did at one time. Every stack in the kit, by whatever tool, is part of a `Sample`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_crashkit.model.lenient import writable

#: The path up to the folder of the installed modules: of packages, of Python itself, or of an SGLang checkout.
_ROOT = re.compile(r"^.*/(?:(?:site|dist)-packages|lib/python3\.\d+|python(?=/sglang(?:_crashkit)?/))/")

#: Outermost functions of a thread's stack: of a script, of ``python -m``, or of threading, without and with the name
#: of the class.
_OUTERMOST = frozenset({"<module>", "_run_module_as_main", "_bootstrap", "Thread._bootstrap"})

_FRAME = re.compile(r"(?P<function>[^()]{1,300}) \((?P<file>[^()]{1,600}?):(?P<line>\d{1,9})\)")

#: Kernel functions in which a process that a version 2 cgroup freezes sleeps; no other process sleeps there.
FREEZER = frozenset({"do_freezer_trap", "get_signal"})

#: How a stack was taken: by py-spy from outside; by a thread of the process; by faulthandler in a signal handler.
Source = Literal["py-spy", "in-process", "faulthandler"]

#: State of a process's GIL: ``main``, its main thread held it; ``taken``, another of its threads did not get it in
#: time, and the thread that held it is not known; empty where the GIL was not observed.
Gil = Literal["", "main", "taken"]

#: Role of a server in a pair with separate prefill and decode (``--disaggregation-mode``).
Side = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Frame:
    """One Python frame."""

    function: str
    file: str  # path of the file from its package on, as `short_path` returns it
    line: int  # line number, 0 where unknown

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})" if self.line else f"{self.function} ({self.file})"

    @staticmethod
    def read(text: str) -> Frame | None:
        """Return the frame in a text of the form ``function (file:line)``; None for other text."""
        found = _FRAME.fullmatch(text)
        return Frame(found["function"], found["file"], int(found["line"])) if found else None


@dataclass(frozen=True)
class Thread:
    """One Python thread, innermost frame first."""

    name: str  # Python's name of the thread, empty where it could not be read
    native_id: int | None  # the kernel's thread id; equals the pid for the main thread
    active: bool  # it was running on a CPU, as far as py-spy can tell
    owns_gil: bool  # it held the GIL
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Sample:
    """What one process did at one moment, as far as it is known."""

    host: str = ""
    pid: int = 0
    start_ticks: int = 0  # start time in clock ticks since boot; with host and pid it identifies a process
    title: str = ""  # process title, without arguments that may be secret
    role: str = ""  # as `titles.role_of` returns it
    ranks: Mapping[str, int] = field(default_factory=dict)  # ``{"tp": 0, "pp": 1}``; empty for a single rank
    time: float = 0.0  # when, in seconds since the epoch; 0 where it is not known
    server: int | None = None  # pid of the process on this host that launched its server, None where it is not known
    rendezvous: str | None = None  # ``--dist-init-addr``, which a server's processes share on all hosts; None if absent
    side: Side | None = None  # from its server's command line; None where prefill and decode are not separate
    state: str = ""  # the state letter of its main thread in ``/proc``; empty where the process was gone
    wchan: str = ""  # the kernel function in which the main thread slept; empty if it was awake or can't be read
    tracer: int = 0  # pid of the process that traced it; 0 if absent
    cpu_secs: float = 0.0  # CPU time that all its threads had used since its start, in seconds
    threads: tuple[Thread, ...] = ()  # its Python stacks, innermost frame first; empty if absent
    native: tuple[Thread, ...] = ()  # stacks with native frames, whose file is a source or a library, if known
    kernels: tuple[str, ...] = ()  # names of the CUDA kernels that ran for it, as the debugger prints them
    problem: str = ""  # why there are no Python stacks, or why a method before the successful one gave none; or empty
    source: Source = "py-spy"  # the method that took the stacks, or the last one tried
    seconds: float = 0.0  # from the start of the round to its stacks, in seconds
    gil: Gil = ""  # the observed state of its GIL
    doing: tuple[str, ...] = ()  # the innermost frames that show what it was doing, as an incident shows them

    @property
    def main_thread(self) -> Thread | None:
        """Its main thread; None where that thread has no stack."""
        return main_thread(self.threads, self.pid)


def parse_pyspy(text: str) -> tuple[Thread, ...]:
    """Return the threads in the output of ``py-spy dump --json``; a process that dumps itself writes the same form.

    Raises ValueError if the text is not of that form or has no frame.
    """
    try:
        document = json.loads(text)
        if not isinstance(document, list):
            raise ValueError("the JSON of the stacks is not a list of threads")
        threads = tuple(_thread(entry) for entry in document)
    except RecursionError:
        raise ValueError("the JSON of the stacks is nested too deeply") from None
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"the JSON of the stacks lacks {error}") from error
    if not any(thread.frames for thread in threads):
        raise ValueError("there is no Python frame")
    return threads


def short_path(path: str) -> str:
    """Return the path of a module's file from its package on, such as ``sglang/srt/server.py``, or the path unchanged.

    The install folder is recognized by folder names, because the ``sys.path`` of a process can't be read from outside.
    """
    return _ROOT.sub("", path)


def _thread(entry: dict[str, Any]) -> Thread:
    frames = []
    for frame in entry["frames"]:
        name, whole = writable(str(frame["name"])), writable(str(frame["filename"]))
        # py-spy's short form omits package folders without __init__.py, of which SGLang has many.
        short = short_path(whole)
        path = short if short != whole else writable(str(frame.get("short_filename") or whole))
        frames.append(Frame(name, path, int(frame["line"])))
    native_id = entry.get("os_thread_id")
    return Thread(
        name=writable(str(entry.get("thread_name") or "")),
        native_id=native_id if isinstance(native_id, int) else None,
        active=bool(entry.get("active")),
        owns_gil=bool(entry.get("owns_gil")),
        frames=tuple(frames),
    )


def main_thread(threads: Iterable[Thread], pid: int) -> Thread | None:
    """Return the main thread of process `pid`, None when it is not among `threads`."""
    found = None
    for thread in threads:
        if thread.native_id == pid:
            return thread
        if thread.name == "MainThread":
            found = thread
    return found


def are_whole(frames: Sequence[Frame]) -> bool:
    """Return whether frames, innermost first, reach the start of a thread; those of an ending thread may not."""
    return bool(frames) and frames[-1].function in _OUTERMOST


def format_threads(title: str, pid: int, threads: Iterable[Thread], doing: Iterable[str] = ()) -> Iterator[str]:
    """Yield the lines of a stack file: the process, what it was `doing`, then its threads, the main thread first."""
    yield f"Process {pid}: {title}"
    if frames := list(doing):
        yield ""
        yield "What it was doing, innermost first:"
        yield from (f"    {frame}" for frame in frames)
    threads = list(threads)
    main = main_thread(threads, pid)
    for thread in sorted(threads, key=lambda one: one is not main):
        state = "active" if thread.active else "idle"
        gil = "+gil" if thread.owns_gil else ""
        yield ""
        yield f'Thread {thread.native_id or "?"} ({state}{gil}): "{thread.name or "unnamed"}"'
        for frame in thread.frames:
            yield f"    {frame}"
