"""Run another program with a deadline; at its end the whole process group is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sglang_crashkit.errors import CrashkitError


@dataclass(frozen=True)
class Finished:
    """A program that ended by itself."""

    exit_code: int
    stdout: str
    stderr: str


def run_tool(argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> Finished:
    """Run `argv` and return what it printed.

    Args:
        argv: the program and its arguments.
        timeout: seconds until it and its children are killed.
        env: its environment, by default this process's.

    Raises:
        CrashkitError: it could not be started, or had to be killed.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise CrashkitError(f"cannot run {argv[0]}: {error.strerror}") from error
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException as error:
            # The group, not the process: a child of it could hold the pipes open.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CrashkitError(f"{argv[0]} did not end within {timeout:g} s") from error
            raise
    return Finished(process.returncode, stdout, stderr)
