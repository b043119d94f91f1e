"""Start programs, adopt whatever they leave behind, and kill all of it when the test is gone that asked for it.

The daemons of Slurm and Docker leave their parents, and the processes of a job or a container leave theirs. A keeper is
the subreaper of all of them, so none can get out of its tree; it ends them when its standard input ends. It reads one
JSON object a line, ``{"argv": [...], "log": path, "env": {...}}``, and answers each with a pid, or with why not.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from lanelib.commands import clean_environment
from lanelib.procs import send, tree_of

_PR_SET_CHILD_SUBREAPER = 36
#: How often the dead are reaped meanwhile, in seconds.
_REAP_S = 0.2
_KILL_TIMEOUT_S = 30.0
_Self = TypeVar("_Self", bound="Daemon")


class Daemon:
    """What starts daemons, to be used as a context manager: `close` ends them, also where they did not all start."""

    def __enter__(self: _Self) -> _Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Keeper:
    """The end of the test: a keeper in a process of its own, until `close`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=clean_environment() | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A signal that ends the test by its group leaves this one to end what was started.
            start_new_session=True,
        )

    def start(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> int:
        """Start a program that prints to `log`, and return its pid."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"argv": [*argv], "log": str(log), "env": dict(env)}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer.isdigit(), answer
        return int(answer)

    def close(self) -> None:
        """End all that was started, and what that left behind."""
        with self._process:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            status = self._process.wait(4 * _KILL_TIMEOUT_S)
        assert status == 0, "processes survive SIGKILL"


def main() -> int:
    """Serve until standard input ends; 1 where something survived."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
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
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def kill_everything() -> int:
    """Kill the whole tree, whose members may be starting others; return 1 where something survives."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while (left := [one for one in tree_of(os.getpid()) if one.pid != os.getpid()]) and time.monotonic() < deadline:
        for process in left:
            send(process, signal.SIGKILL)
        time.sleep(0.02)
        reap()
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
