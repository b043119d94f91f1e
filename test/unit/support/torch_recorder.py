"""Stands for PyTorch's flight recorder in a process with NCCL: makes the pipe, and writes a dump when it is asked."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

#: PyTorch looks once a second.
_LOOK_SECS = 0.02


def open_pipe(name: str, flags: int = os.O_RDONLY | os.O_NONBLOCK) -> int:
    """Make a pipe of this name as PyTorch and the CUDA driver do, and return what they read it by."""
    Path(name).unlink(missing_ok=True)
    # It has its reader before it has its name: the process that sees the pipe may write to it.
    unnamed = Path(f"{name}.unnamed")
    os.mkfifo(unnamed, 0o666)
    descriptor = os.open(unnamed, flags)
    unnamed.rename(name)
    return descriptor


def answer(pipe: int, dump: str, content: bytes, seconds: float, how: str = "") -> None:
    """Answer triggers for ever.

    Args:
        pipe: see `open_pipe`.
        dump: the file to write.
        content: what is written.
        seconds: how long the writing takes, in ten steps.
        how: ``deaf`` answers none; ``half`` writes half of it; ``hang`` keeps the file open; ``die`` ends the process
            in the middle.
    """
    while True:
        try:
            is_asked = bool(os.read(pipe, 128))
        except BlockingIOError:
            # Somebody has opened the pipe and not written yet.
            is_asked = False
        if not is_asked or how == "deaf":
            time.sleep(_LOOK_SECS)
            continue
        data = content[: len(content) // 2] if how == "half" else content
        step = len(data) // 10 + 1
        with Path(dump).open("wb", buffering=0) as file:
            for start in range(0, len(data), step):
                if how == "die" and start > len(data) // 2:
                    os._exit(1)
                file.write(data[start : start + step])
                time.sleep(seconds / 10)
            if how == "hang":
                time.sleep(3600)


def main() -> None:
    """Run as a program: stem of the pipe, stem of the dump, rank, file with the content, seconds, how."""
    pipe_stem, dump_stem, rank, content, seconds, how = sys.argv[1:]
    pipe, data = open_pipe(f"{pipe_stem}{rank}.pipe"), Path(content).read_bytes()
    # From now on the process that started it may write the content of the next one.
    os.write(1, b"ready\n")
    answer(pipe, f"{dump_stem}{rank}", data, float(seconds), how)


if __name__ == "__main__":
    main()
