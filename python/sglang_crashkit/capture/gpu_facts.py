"""What the GPUs' driver says of them: asked by a child process with a deadline, and watched by another for Xid events.

Neither library is loaded here: they are big, and a driver that hangs holds up its caller. A child that even
SIGKILL does not end is left behind. See `gpu_facts_child`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sglang_crashkit.capture.tools import BackgroundTool, ToolRun
from sglang_crashkit.kernel.kernel_log import KERNEL_LOG

Library = Literal["pynvml", "amdsmi"]

_CHILD = "sglang_crashkit.capture.gpu_facts_child"
#: What the drivers make where there is a GPU; the second is that of WSL.
_NVIDIA, _AMD = ("/dev/nvidiactl", "/dev/dxg"), ("/dev/kfd",)
_NVML = "libnvidia-ml.so.1"
#: A hundred GPUs with all their links take less.
_MAX_OUTPUT = 8 << 20
#: A killed child is waited for this long, in seconds: in uninterruptible sleep it cannot end yet.
_REAP_SECS = 0.2


def find_library(environ: Mapping[str, str] = os.environ) -> Library | None:
    """Return which library knows the GPUs of this machine, None if absent."""
    folders = environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(map(os.path.exists, _NVIDIA)) or any(Path(folder, _NVML).exists() for folder in folders if folder):
        return "pynvml"
    return "amdsmi" if any(map(os.path.exists, _AMD)) else None


@dataclass(frozen=True)
class GpuFacts:
    """What the driver said."""

    #: ``version`` and ``cuda``, and how many ``gpus`` there are; empty where it did not answer.
    driver: dict[str, Any] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)  # each as `gpu_facts_child` has it; those that it came to
    #: The Xid lines of the kernel's log, each with ``xid``, ``bus_id``, ``time`` in seconds since the epoch, and
    #: ``pid``.
    kernel_xids: list[dict[str, Any]] = field(default_factory=list)
    kernel_problem: str = ""  # why that log could not be read; empty where it could
    reason: str = ""  # why that is not all; empty where it is
    seconds: float = 0.0  # how long it took


class GpuFactsReader(BackgroundTool[GpuFacts]):
    """Asks the driver once, for at most so many seconds, and the kernel's log for Xid lines `since` a time.

    Raises:
        RuntimeError: the system gives no thread.
    """

    def __init__(self, library: Library, seconds: float, since: float, kernel_log: str = KERNEL_LOG) -> None:
        command = _command("facts", library, kernel_log, str(since))
        super().__init__("GPU facts", command, seconds, _facts_of, _MAX_OUTPUT)


def _facts_of(run: ToolRun) -> GpuFacts:
    answers: dict[str, Any] = {}
    gpus = []
    for one in _objects(run.text):
        answers |= one
        gpus += [one["gpu"]] if "gpu" in one else []
    driver, kernel, problem = answers.get("driver", {}), answers.get("kernel", {}), str(answers.get("error", ""))
    count = driver.get("gpus", 0)
    if run.is_own_failure:
        problem = f"the kit failed to read what the driver said: {run.reason}"
    elif not problem and run.reason:
        where = f"at GPU {len(gpus)} of {count}" if driver else "before it said anything"
        problem = f"the driver did not answer, {where}: {run.reason}"
    return GpuFacts(driver, gpus, kernel.get("xids", []), kernel.get("problem", ""), problem, run.seconds)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        # The last one may be cut off.
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


class XidWatch:
    """A child that lives as long as this process, and tells of Xid events. To be made by the main thread.

    What it says is read when somebody wants to know, and never waited for.

    Attributes:
        start: ``time`` since when it watches, in seconds since the epoch, the ``gpus`` with their error counters of
            that time, and ``errors`` by the GPUs that they keep from being watched; empty where it has not said so.
        xids: the events, each with ``xid``, ``bus_id`` (None where that is not known) and ``time``.
        problem: why it tells of none, or no more; empty where it does.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        self.start: dict[str, Any] = {}
        self.xids: list[dict[str, Any]] = []
        self.problem = "the driver has not answered since the server started"
        self._text = b""
        # Of this thread's end the kernel would tell the child, too.
        self._process = subprocess.Popen(
            _command("watch", "pynvml"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """The child's pid."""
        return self._process.pid

    def look(self) -> None:
        """Take in what it said since the last look."""
        while not self._pipe.closed:
            try:
                chunk = os.read(self._pipe.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                self._end("its watcher ended")
                break
            whole, _, self._text = (self._text + chunk).rpartition(b"\n")
            for event in _objects(whole.decode(errors="replace")):
                if "start" in event:
                    self.start, self.problem = event["start"], ""
                elif "error" in event:
                    self._end(str(event["error"]))
                else:
                    self.xids.append(event)

    def close(self) -> None:
        """End it."""
        self._end("the crash handler ended")

    def _end(self, problem: str) -> None:
        if self._pipe.closed:
            return
        self.problem = problem
        self._pipe.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECS)


def _command(what: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", _CHILD, str(os.getpid()), what, *arguments]
