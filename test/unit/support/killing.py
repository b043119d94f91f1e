"""Stop a process at a chosen step of what it does to the file system, told by the interpreter's audit events."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: Events of what changes a file system, each raised before it happens.
CHANGING = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.chmod", "os.chown")


@dataclass(frozen=True)
class Step:
    """What the process is about to do."""

    #: From 0.
    number: int
    event: str
    #: The paths that it does it to.
    paths: tuple[str, ...] = ()
    #: Of the file that is written, where the step is to sync it.
    descriptor: int = -1


def run_in_child(action: Callable[[], object], site: Path, at_step: Callable[[Step], None]) -> int:
    """Run `action` in a child; return how it ended, as `os.waitpid` does: exit status 0 where `action` returned."""
    child = os.fork()
    if child == 0:
        try:
            _watch(site, at_step)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def run_and_kill(action: Callable[[], object], site: Path, number: int) -> bool:
    """Run `action` in a child that is killed at the step of that number, with half of what it was writing.

    Returns:
        Whether it was killed; False where it ended before that step.
    """

    def at_step(step: Step) -> None:
        if step.number == number:
            with suppress(OSError):
                os.ftruncate(step.descriptor, os.fstat(step.descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    status = run_in_child(action, site, at_step)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def _watch(site: Path, at_step: Callable[[Step], None]) -> None:
    numbers = iter(range(10_000))

    def hook(event: str, args: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        paths = tuple(str(each) for each in args if isinstance(each, str | Path))
        # By an opened folder, too.
        is_below = bool(paths) and paths[0].startswith((str(site), "/proc/self/fd/"))
        if (writes or event in CHANGING) and (is_below or event == "os.remove"):
            at_step(Step(next(numbers), event, paths))

    os.fsync = lambda descriptor: at_step(Step(next(numbers), "fsync", descriptor=descriptor))
    sys.addaudithook(hook)
