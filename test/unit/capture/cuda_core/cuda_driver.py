"""Stands for the CUDA driver in a process: makes the pipe, reads the trigger, and writes a core as slowly as a GPU."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from unit.capture.cuda_core.synthetic_core import core_bytes
from unit.support.torch_recorder import open_pipe


def name_of(template: str) -> str:
    """Return a name with the pid of this process in the place of ``%p``, and the time in that of ``%t``."""
    return template.replace("%p", str(os.getpid())).replace("%t", str(int(time.time())))


def answer(pipe: int, core: str, seconds: float, *, fraction: float = 1.0, then: str = "", steps: int = 10) -> None:
    """Answer one trigger.

    Args:
        pipe: what it reads its pipe by, which it could write to as well.
        core: the file to write; see `name_of`.
        seconds: how long the writing takes.
        fraction: how much of the core is written.
        then: ``hang`` keeps the file open, ``die`` ends the process, when that much is written.
        steps: in how many pieces it is written.
    """
    os.read(pipe, 1)
    os.close(pipe)
    data = core_bytes()
    data = data[: int(len(data) * fraction)]
    step = len(data) // steps + 1
    with Path(name_of(core)).open("wb", buffering=0) as file:
        for start in range(0, len(data), step):
            file.write(data[start : start + step])
            time.sleep(seconds / steps)
        if then == "hang":
            time.sleep(3600)
        if then == "die":
            os._exit(1)


def main() -> None:
    """Run as a program: pipe and core; and live on."""
    pipe = open_pipe(name_of(sys.argv[1]), os.O_RDWR)
    os.write(1, b"ready\n")
    answer(pipe, sys.argv[2], 0.5)
    time.sleep(3600)


if __name__ == "__main__":
    main()
