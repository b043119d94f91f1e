"""Start programs, adopt whatever they leave behind, and kill all of it when the one who asked is gone.

Slurm's daemons leave their parents, and a job's processes leave theirs. This one is the subreaper of all of them, so
none can get out of its tree; it ends them when its standard input ends, also because the test was killed. It reads
one JSON object a line, ``{"argv": [...], "log": path, "env": {...}}``, and answers each with a pid, or with why not.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time

from lanelib.procs import Process, send, tree_of

_PR_SET_CHILD_SUBREAPER = 36
#: How often the dead are reaped meanwhile, in seconds.
_REAP_S = 0.2
_KILL_TIMEOUT_S = 30.0


def main() -> int:
    """Serve until standard input ends; 1 where something survived."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # What was typed at a terminal is for the one who asked; its end is this one's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    pending = b""
    while True:
        reap()
        if not selector.select(_REAP_S):
            continue
        read = os.read(sys.stdin.fileno(), 1 << 16)
        if not read:
            return kill_everything()
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            sys.stdout.write(start(json.loads(line)) + "\n")
            sys.stdout.flush()


def start(order: dict[str, object]) -> str:
    """Start a program in a session of its own; return its pid, or why it did not start."""
    try:
        with open(str(order["log"]), "ab") as log:  # noqa: PTH123 - this one starts fast
            process = subprocess.Popen(
                order["argv"],  # type: ignore[arg-type]
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=order["env"],  # type: ignore[arg-type]
                start_new_session=True,
            )
    except OSError as error:
        return f"{order['argv']}: {error.strerror}"
    process.returncode = 0  # reaped below, with all others
    return str(process.pid)


def reap() -> None:
    """Reap the dead."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def below() -> list[Process]:
    """Return the living processes below this one."""
    return [process for process in tree_of(os.getpid()) if process.pid != os.getpid()]


def kill_everything() -> int:
    """Kill the whole tree, whose members may be starting others; return 1 where something survives."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while (left := below()) and time.monotonic() < deadline:
        for process in left:
            send(process, signal.SIGKILL)
        time.sleep(0.02)
        reap()
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
