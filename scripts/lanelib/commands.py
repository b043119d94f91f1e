"""Run a command with a deadline in a clean environment, lock a file between processes, and run a script's `main`."""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lanelib.paths import ROOT

#: How much of a failed command's output an error repeats.
TAIL_LINES = 15
#: Seconds that pytest has to stop its servers, and the status that stands for a command that did not end.
END_S, NO_END = 120, 124
UNWANTED_VARIABLES = (
    # They would point a child python at other packages.
    *("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "UV_SYSTEM_PYTHON"),
    # Without cached bytecode each of a server's processes compiles SGLang and torch anew: minutes.
    "PYTHONDONTWRITEBYTECODE",
)
#: Have uv use the system's certificates, as pip, git and curl do, instead of its own: a proxy's are only there.
UV_SETTINGS = {"UV_SYSTEM_CERTS": "true"}


class LaneError(Exception):
    """Something is missing or failed; the message is a sentence about it, `next_step` the command that helps.

    A script ends with `exit_code`: 1 for a failure, 2 for wrong usage.
    """

    def __init__(self, message: str, *, next_step: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.exit_code = exit_code

    def __str__(self) -> str:
        return self.message if self.next_step is None else f"{self.message}\n  next: {self.next_step}"


def run_script(name: str, main: Callable[[], int]) -> int:
    """Run `main` and turn a `LaneError`, Ctrl-C or SIGTERM into one message and an exit status."""
    # Without this, SIGTERM would leave the started servers behind: each has a session of its own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return main()
    except LaneError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script with this docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def say(text: str) -> None:
    """Print one line of progress; stdout is kept for results."""
    print(text, file=sys.stderr, flush=True)


def clean_environment(*, without: Sequence[str] = (), kept: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment without variables that would mislead or slow a child python, and with those of uv.

    Variables that begin with one of `without` are left out too, except those that begin with one of `kept`.
    """
    return UV_SETTINGS | {
        name: value
        for name, value in os.environ.items()
        if name not in UNWANTED_VARIABLES and (name.startswith(tuple(kept)) or not name.startswith(tuple(without)))
    }


def run_command(
    argv: Sequence[object], *, timeout_s: float, env: Mapping[str, str] | None = None, quiet: bool = True
) -> str:
    """Run `argv`, kill it with its children after `timeout_s` seconds, and return its output.

    Unless `quiet`, its output goes to stderr instead, and an empty text is returned.
    """
    words = [str(word) for word in argv]
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if quiet else 2,
            stderr=subprocess.STDOUT,
            env=dict(clean_environment() if env is None else env),
            start_new_session=True,  # so that its children can be killed with it
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise LaneError(f"cannot run {words[0]}: {error.strerror}", next_step=f"install {words[0]}") from error
    with process:
        try:
            text, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LaneError(f"no end after {timeout_s:.0f} s: {shlex.join(words)}", next_step="repeat it") from error
        finally:
            if process.poll() is None:  # out of time, or Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        tail = "".join(f"\n{line}" for line in (text or "").splitlines()[-TAIL_LINES:])
        raise LaneError(f"exit status {process.returncode}: {shlex.join(words)}{tail}")
    return text or ""


def run_in_terminal(argv: Sequence[object], *, timeout_s: float, env: Mapping[str, str]) -> int:
    """Run a check or pytest in the checkout with its output on this terminal, where Ctrl-C reaches it.

    After `timeout_s` seconds the process gets SIGINT, so that it can stop its servers, and SIGKILL `END_S` seconds
    later; `NO_END` is then returned in place of its exit status.
    """
    process = subprocess.Popen([str(word) for word in argv], cwd=ROOT, env=dict(env))
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
        say(f"no end after {timeout_s:.0f} s: {argv[0]}")
        return NO_END


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; the kernel releases it when the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that holds {path.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
