"""Kill a process at one of its file operations."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def kill_at_file_operation(folder: Path, step: int) -> None:
    """Have the kernel kill this process before it opens, creates, renames or removes number `step` below `folder`."""
    counter = iter(range(1_000_000))

    def count(event: str, arguments: tuple[object, ...]) -> None:
        is_file = event == "open" or event.startswith(("os.", "shutil."))
        if is_file and arguments and str(arguments[0]).startswith(str(folder)) and next(counter) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
