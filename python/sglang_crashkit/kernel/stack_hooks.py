"""What a process of the server prepares at its start, so that its stacks can be had without tracing it.

Its files in the crash handler's runtime folder, which has mode 0700, named after the process's pid and start time:

- ``.json`` says which hooks are installed, and is there for as long as they may be used;
- ``.sock`` is where a thread of the process answers with the stacks of all its threads (see `responder`);
- ``.stack`` takes what faulthandler writes when the process gets the signal (see `capture.ladder`);
- ``.fault`` takes what faulthandler writes when a fatal signal ends the process;
- ``.say`` is where a thread of the server's main process takes lines for the server's log, and the word that a worker
  wrote a ``.fault``;
- ``.flight`` says where its flight recorder of NCCL is asked (see `capture.flight_request`).
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_crashkit.kernel.private_files import read_json, read_regular, write_private

#: In the middle of the real-time signals: programs take theirs from either end, systemd takes 34 to 40 and 47 to 64.
DEFAULT_SIGNAL = 45
HANDLER_PID = "handler.pid"
#: The event by which the main process is told that a worker wrote its stacks as it died; see ``.say``.
FAULT = "fault"

MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class StackHooks:
    """What one process installed."""

    pid: int
    start_ticks: int  # see `procfs.ProcStat`
    main_thread: int  # Python's identifier of its main thread, by which faulthandler names threads
    signal: int  # on which faulthandler writes the stacks; 0 for none
    roots: tuple[str, ...] = ()  # its folders of modules, which stacks are shortened by


@dataclass(frozen=True)
class HookFiles:
    """The files of one process in the runtime folder."""

    description: Path
    socket: Path
    stack: Path
    fault: Path
    say: Path
    flight: Path

    @classmethod
    def of(cls, folder: Path, pid: int, start_ticks: int) -> HookFiles:
        """Return the files of the process `pid` that started at `start_ticks`."""
        name = f"{pid}-{start_ticks}"
        suffixes = (".json", ".sock", ".stack", ".fault", ".say", ".flight")
        return cls(*(folder / f"{name}{suffix}" for suffix in suffixes))


def describe(folder: Path, hooks: StackHooks) -> None:
    """Write down which hooks are installed, the last step of the installation; raises OSError."""
    files = HookFiles.of(folder, hooks.pid, hooks.start_ticks)
    write_private(files.description, json.dumps(asdict(hooks)).encode(errors="backslashreplace"))


def read_stack_hooks(folder: Path, pid: int, start_ticks: int) -> StackHooks | None:
    """Return what the process `pid` that started at `start_ticks` installed, None where that is nothing."""
    try:
        document = read_json(HookFiles.of(folder, pid, start_ticks).description, MAX_BYTES)
        roots = tuple(map(str, document["roots"]))
        hooks = StackHooks(pid, start_ticks, int(document["main_thread"]), int(document["signal"]), roots)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return hooks if hooks.signal == 0 or signal.SIGRTMIN <= hooks.signal <= signal.SIGRTMAX else None


def read_handler_pid(folder: Path) -> int | None:
    """Return the pid of the crash handler whose runtime folder this is, None where it has not said."""
    try:
        pid = int(read_regular(folder / HANDLER_PID, MAX_BYTES))
    except (OSError, ValueError):
        return None
    return pid if pid > 0 else None
