"""A real file system with little room."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, options: str = "size=4m,mode=700", source: str | Path = "crashkit-test") -> Iterator[Path]:
    """Mount a tmpfs at `folder`, or a folder with the option ``bind``; skips the test where that is not permitted."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, source, folder],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # What is still open in it does not matter.
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=30)


def fill(folder: Path) -> None:
    """Fill the disk to the last block."""
    with (folder / f"filling-{os.urandom(4).hex()}").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
