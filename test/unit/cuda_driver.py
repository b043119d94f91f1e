"""Stands for the CUDA driver in a process: makes the pipe, reads the trigger, and writes a core as slowly as a GPU."""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
CUDA_MACHINE = 190


def core_bytes(payload: int = 4096, *, many_sections: bool = False) -> bytes:
    """Return a small GPU core: one section of `payload` bytes, the section table behind it."""
    names = _HEADER.size + payload
    count = 2
    identity = b"\x7fELF\x02\x01\x01\x33".ljust(16, b"\0")
    numbers = (_HEADER.size, 0, 0, _SECTION.size, 0 if many_sections else count, 0)
    header = _HEADER.pack(identity, 4, CUDA_MACHINE, 1, 0, 0, names, 0, *numbers)
    first = _SECTION.pack(0, 0, 0, 0, 0, count if many_sections else 0, 0, 0, 0, 0)
    return header + b"g" * payload + first + _SECTION.pack(0, 1, 0, 0, _HEADER.size, payload, 0, 0, 1, 0)


def run(pipe: str, core: str, seconds: float, *, fraction: float = 1.0, then: str = "") -> None:
    """Answer one trigger.

    Args:
        pipe: the named pipe to make.
        core: the file to write.
        seconds: how long the writing takes, in ten steps.
        fraction: how much of the core is written.
        then: ``hang`` keeps the file open, ``die`` ends the process, when that much is written.
    """
    # It has its reader before it has its name: whoever sees the pipe may write to it.
    unnamed = Path(f"{pipe}.unnamed")
    os.mkfifo(unnamed, 0o600)
    with os.fdopen(os.open(unnamed, os.O_RDWR), "rb", buffering=0) as trigger:
        unnamed.rename(pipe)
        trigger.read(1)
    data = core_bytes()
    data = data[: int(len(data) * fraction)]
    step = len(data) // 10 + 1
    with Path(core).open("wb", buffering=0) as file:
        for start in range(0, len(data), step):
            file.write(data[start : start + step])
            time.sleep(seconds / 10)
        if then == "hang":
            time.sleep(3600)
        if then == "die":
            os._exit(1)


def main() -> None:
    """Run as a program: pipe, core, seconds, fraction, what then; and live on."""
    pipe, core, seconds, fraction, then = sys.argv[1:]
    names = {"%p": str(os.getpid()), "%t": str(int(time.time()))}
    for mark, value in names.items():
        pipe, core = pipe.replace(mark, value), core.replace(mark, value)
    os.write(1, b"ready\n")
    run(pipe, core, float(seconds), fraction=float(fraction), then=then)
    Path(f"{core}.done").touch()
    time.sleep(3600)


if __name__ == "__main__":
    main()
