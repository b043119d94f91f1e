"""The hooks that a process of the server installs at its start, so that its stacks can be read without tracing it.

In the crash handler's runtime folder, which has mode 0700, its files are named after its pid and start time:

- ``.json`` describes the installed hooks, and exists as long as they may be used;
- ``.sock`` is the socket at which a thread of the process answers with the stacks of all threads (see `responder`);
- ``.stack`` receives the output of faulthandler when the process gets the signal (see `capture.ladder`);
- ``.fault`` receives the output of faulthandler when a fatal signal ends the process;
- ``.say`` is the socket at which a thread of the server's main process receives lines for the server's log, and the
  message that a worker wrote a ``.fault``;
- ``.flight`` has the paths of the pipe and the dump of its NCCL flight recorder (see `capture.flight_request`).
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_crashkit.kernel.private_files import read_json, read_regular, write_private

#: In the middle of the real-time signals: programs use them from either end, and systemd uses 34 to 40 and 47 to 64.
DEFAULT_SIGNAL = 45
HANDLER_PID = "handler.pid"
#: The event that reports to the main process that a worker wrote its stacks while it died; see ``.say``.
FAULT = "fault"

MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class StackHooks:
    """The hooks that a process installed."""

    pid: int
    start_ticks: int  # see `procfs.ProcStat`
    main_thread: int  # Python's identifier of the main thread, as in the output of faulthandler
    signal: int  # the signal on which faulthandler writes the stacks; 0 for none
    roots: tuple[str, ...] = ()  # the folders of its modules, which are cut off the file names in stacks


@dataclass(frozen=True)
class HookFiles:
    """The files of a process in the runtime folder."""

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
    """Write the ``.json`` of a process, as the last step of the installation; raises OSError."""
    files = HookFiles.of(folder, hooks.pid, hooks.start_ticks)
    write_private(files.description, json.dumps(asdict(hooks)).encode(errors="backslashreplace"))


def read_stack_hooks(folder: Path, pid: int, start_ticks: int) -> StackHooks | None:
    """Return the hooks of the process `pid` that started at `start_ticks`; None if it has no valid ``.json``."""
    try:
        document = read_json(HookFiles.of(folder, pid, start_ticks).description, MAX_BYTES)
        roots = tuple(map(str, document["roots"]))
        hooks = StackHooks(pid, start_ticks, int(document["main_thread"]), int(document["signal"]), roots)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return hooks if hooks.signal == 0 or signal.SIGRTMIN <= hooks.signal <= signal.SIGRTMAX else None


def read_handler_pid(folder: Path) -> int | None:
    """Return the pid of the crash handler whose runtime folder this is; None if it has not written its pid."""
    try:
        pid = int(read_regular(folder / HANDLER_PID, MAX_BYTES))
    except (OSError, ValueError):
        return None
    return pid if pid > 0 else None
