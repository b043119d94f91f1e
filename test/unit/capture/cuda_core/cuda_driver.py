"""Stands for the CUDA driver in a process: makes the pipe, reads the trigger, and writes a core as slowly as a GPU."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from unit.capture.cuda_core.synthetic_core import core_bytes


def run(pipe: str, core: str, seconds: float, *, fraction: float = 1.0, then: str = "", steps: int = 10) -> None:
    """Answer one trigger.

    Args:
        pipe: the named pipe to make, with ``%p`` for its pid and ``%t`` for the time.
        core: the file to write, so too.
        seconds: how long the writing takes.
        fraction: how much of the core is written.
        then: ``hang`` keeps the file open, ``die`` ends the process, when that much is written.
        steps: in how many pieces it is written.
    """
    for mark, value in (("%p", str(os.getpid())), ("%t", str(int(time.time())))):
        pipe, core = pipe.replace(mark, value), core.replace(mark, value)
    # It has its reader before it has its name: the process that sees the pipe may write to it.
    unnamed = Path(f"{pipe}.unnamed")
    os.mkfifo(unnamed, 0o600)
    with os.fdopen(os.open(unnamed, os.O_RDWR), "rb", buffering=0) as trigger:
        unnamed.rename(pipe)
        trigger.read(1)
    data = core_bytes()
    data = data[: int(len(data) * fraction)]
    step = len(data) // steps + 1
    with Path(core).open("wb", buffering=0) as file:
        for start in range(0, len(data), step):
            file.write(data[start : start + step])
            time.sleep(seconds / steps)
        if then == "hang":
            time.sleep(3600)
        if then == "die":
            os._exit(1)


def main() -> None:
    """Run as a program: pipe and core; and live on."""
    os.write(1, b"ready\n")
    run(*sys.argv[1:], 0.5)
    time.sleep(3600)


if __name__ == "__main__":
    main()
