"""Wait for what other processes do, always with an end; children that say when they are ready."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

#: Longer than anything takes on a loaded machine; only a failing test ever waits this long.
LONG = 120.0


def wait_until(condition: Callable[[], Value], what: str, timeout_secs: float = LONG) -> Value:
    """Return the first true value of `condition`."""
    deadline = time.monotonic() + timeout_secs
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_secs:g} s: {what}")
        time.sleep(0.01)


@contextlib.contextmanager
def spawned(argv: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, which prints one line when it is ready, `first_line`, and end it at the end of the block."""
    with subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, **options) as process:
        try:
            first = process.stdout.readline()
            assert first, "the child ended before it was ready"
            process.first_line = first.decode().strip()  # type: ignore[attr-defined]
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(LONG)


def child(
    code: str, *arguments: str, title: str | None = None, wrapper: Sequence[str] = ()
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """Run Python `code` as `spawned` does.

    Args:
        code: the source; `ready()` and `pause()` are there for it.
        arguments: its ``sys.argv[1:]``.
        title: set with setproctitle before it begins.
        wrapper: a program with its arguments that runs it.
    """
    head = "import os, signal, sys, time\n"
    head += "def ready(text='ready'): print(text, flush=True)\ndef pause(): time.sleep(120)\n"
    if title is not None:
        head += f"import setproctitle; setproctitle.setproctitle({title!r})\n"
    environ = os.environ | {"PYTHONFAULTHANDLER": ""}
    return spawned([*wrapper, sys.executable, "-c", head + code, *arguments], stdin=subprocess.PIPE, env=environ)


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """Return the open descriptors of a process and what they point to."""
    if pid == "self":
        # Those that other tests left to the collector are closed at any time.
        gc.collect()
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[int(entry.name)] = str(entry.readlink())
    return found


def close_all_but(kept: Collection[int]) -> None:
    """Close the descriptors that were opened since these were all."""
    for descriptor in descriptors().keys() - kept:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def memory_named(name: str, but: Collection[int] = ()) -> int | None:
    """Return the descriptor of this process's memory of that name, as ``/proc`` has it; not one of the earlier ones."""
    found = [fd for fd, path in descriptors().items() if path.startswith(f"/memfd:{name}") and fd not in but]
    # That of the mapping is a copy.
    return min(found, default=None)


def watched_pids(pid: int) -> set[int]:
    """Return the processes that `pid` holds a pidfd of."""
    watched = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
            with contextlib.suppress(OSError):
                for line in entry.read_text().splitlines():
                    if line.startswith("Pid:"):
                        watched.add(int(line.split()[1]))
    return watched
