"""Run a command with a deadline, and kill its whole group at the end of it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lanelib.errors import LaneError

#: How much of a failed command's output an error repeats.
TAIL_LINES = 15
#: What an outer environment sets that would point a child python at other packages.
FOREIGN_PYTHON_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "UV_SYSTEM_PYTHON")
#: Without cached bytecode each of a server's processes compiles SGLang and torch anew: minutes.
SLOW_PYTHON_VARIABLES = ("PYTHONDONTWRITEBYTECODE",)
UNWANTED_VARIABLES = (*FOREIGN_PYTHON_VARIABLES, *SLOW_PYTHON_VARIABLES)


def say(text: str) -> None:
    """Print one line of progress; stdout is kept for results."""
    print(text, file=sys.stderr, flush=True)


def clean_environment() -> dict[str, str]:
    """Return the environment without what would mislead or slow a child python."""
    return {k: v for k, v in os.environ.items() if k not in UNWANTED_VARIABLES}


def run_command(
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    quiet: bool = True,
) -> str:
    """Run `argv` and return what it printed.

    Args:
        argv: the program and its arguments.
        timeout_s: seconds until the program and its children are killed.
        env: its environment; `clean_environment` by default.
        cwd: its working directory.
        quiet: keep its output for the return value or the error; otherwise it goes straight to
            this process's stderr, so that a person sees the progress, and "" is returned.

    Raises:
        LaneError: it is not there, failed, or ran out of time.
    """
    words = [str(word) for word in argv]
    output = subprocess.PIPE if quiet else 2
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(clean_environment() if env is None else env),
            cwd=cwd,
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
            raise LaneError(
                f"no end after {timeout_s:.0f} s: {shlex.join(words)}",
                next_step="repeat it; it starts over where it left off",
            ) from error
        finally:
            if process.poll() is None:  # out of time, or Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        tail = "\n".join((text or "").splitlines()[-TAIL_LINES:])
        raise LaneError(
            f"exit status {process.returncode}: {shlex.join(words)}" + (f"\n{tail}" if tail else ""),
        )
    return text or ""
