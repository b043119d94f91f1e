"""Read a core in a process of its own, for who must neither wait nor grow for it: the crash handler.

Whatever the core does to its reader, the handler is not touched by it: the process has limits of memory and time, and
is killed when its time is over. Run as a program with the core's path and the time in seconds, it writes one JSON
object: what `Reading` has, or ``error``.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_crashkit.capture.cuda_core.core_file import CudaCoreError
from sglang_crashkit.capture.cuda_core.model import CudaCore
from sglang_crashkit.capture.cuda_core.reading import read_cuda_core
from sglang_crashkit.capture.cuda_core.text import brief
from sglang_crashkit.capture.tools import ToolRun, run_tool

#: Python with a core of a whole GPU takes 100 MB of address space and 30 MB of memory.
MAX_MEMORY = 1 << 30
#: What an incident keeps of a core: so many kernels and exceptions.
MAX_KEPT = 256
MAX_OUTPUT = 16 << 20
#: After its deadline the process has this long to end by itself, in seconds, if its starter is gone.
_GRACE_SECS = 5


@dataclass(frozen=True)
class Reading:
    """What came of reading a core.

    Attributes:
        core: what `CudaCore.to_json` gives, without the single warps; None where it could not be read.
        brief: the same in a few lines.
        reason: why it could not be read; empty where it could.
    """

    core: dict[str, Any] | None
    brief: list[str] = field(default_factory=list)
    reason: str = ""


class CoreReader:
    """Reads one core; ask `look` until it has an answer.

    Args:
        path: the core.
        seconds: the longest that it may take.

    Raises:
        RuntimeError: the system gives no thread.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        command = [sys.executable, "-m", __name__, str(path), str(seconds)]
        self._reading: Reading | None = None

        def read() -> None:
            try:
                run = run_tool(command, seconds, apart=True, max_output=MAX_OUTPUT)
            except Exception as error:  # noqa: BLE001 - whoever asks for the answer waits for one
                self._reading = Reading(None, reason=f"its reader: {error}")
            else:
                self._reading = _reading_of(run)

        threading.Thread(target=read, name="core reader", daemon=True).start()

    def look(self) -> Reading | None:
        """Return what came of it, None while it is under way; never wait."""
        return self._reading


def _reading_of(run: ToolRun) -> Reading:
    if run.reason:
        return Reading(None, reason=f"its reader: {run.reason}")
    try:
        answer = json.loads(run.text)
        if "error" in answer:
            return Reading(None, reason=str(answer["error"]))
        return Reading(dict(answer["core"]), [str(line) for line in answer["brief"]])
    except (ValueError, TypeError, LookupError, RecursionError):
        return Reading(None, reason="its reader wrote no answer")


def _kept(core: CudaCore) -> CudaCore:
    left_out = max(0, len(core.kernels) - MAX_KEPT) + max(0, len(core.faults) - MAX_KEPT)
    notes = (*core.notes, f"{left_out} kernels and exceptions are left out here") if left_out else core.notes
    return replace(core, kernels=core.kernels[:MAX_KEPT], faults=core.faults[:MAX_KEPT], notes=notes)


def main(arguments: Sequence[str]) -> int:
    """Read the core and write what it says."""
    path, seconds = Path(arguments[0]), float(arguments[1])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(int(seconds) + _GRACE_SECS)
    answer: dict[str, Any]
    try:
        core = read_cuda_core(path, most_seconds=seconds)
        answer = {"core": _kept(core).to_json(warps=False), "brief": list(brief(core))}
    except CudaCoreError as error:
        answer = {"error": error.message}
    except MemoryError:
        answer = {"error": f"{path}: it takes more memory to read than {MAX_MEMORY >> 20} MiB"}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
