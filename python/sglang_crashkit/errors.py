"""The errors of the kit, and the exit codes with which they end a command.

::

    CrashkitError          1  failed
    ├── UsageError         2  the arguments make no sense
    ├── NothingToDoError   3  nothing to act on: no such process, incident or installation
    ├── RefusedError       4  refused: a foreign file, an unsupported release
    └── PartialError       5  done in part
"""

from __future__ import annotations

from enum import IntEnum

#: Comments at the end of a next step in which DIR is a crash folder, and of one that inspects an unreadable path.
WHAT_DIR_IS = "   # DIR: what the server was given as --crash-dump-folder"
WHOSE_IT_IS = "   # says whose it is: run this as that user"


class ExitCode(IntEnum):
    """The exit statuses of the kit's commands."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOTHING = 3
    REFUSED = 4
    PARTIAL = 5
    #: As a shell reports a program that a signal ended: 128 + SIGINT, 128 + SIGTERM.
    INTERRUPTED = 130
    TERMINATED = 143


class CrashkitError(Exception):
    """An error that says what happened, to which path or pid, and what to do next.

    Args:
        message: one sentence that names the thing (path, pid, release).
        next_step: the command or action that helps, without a leading "run".
    """

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        if self.next_step is None:
            return self.message
        return f"{self.message}\n  next: {self.next_step}"


class UsageError(CrashkitError):
    """The arguments make no sense."""

    exit_code = ExitCode.USAGE


class NothingToDoError(CrashkitError):
    """There is no such process, incident or installation."""

    exit_code = ExitCode.NOTHING


class RefusedError(CrashkitError):
    """The action would lose something, or rely on something that the kit does not know."""

    exit_code = ExitCode.REFUSED


class PartialError(CrashkitError):
    """The action is done in part; the message names what is not done."""

    exit_code = ExitCode.PARTIAL
