"""Facts about the GPUs from their driver: one child process queries it with a deadline, another watches for Xid events.

The driver's library is not loaded here: it is big, and a driver that hangs blocks its caller. A child that even SIGKILL
does not end is left behind. See `gpu_facts_child`.
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
from typing import Any

from sglang_crashkit.capture.tools import BackgroundTool, ToolRun

_CHILD = "sglang_crashkit.capture.gpu_facts_child"
#: Device files that NVIDIA's driver creates if there is a GPU; the second is for WSL.
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
_NVML = "libnvidia-ml.so.1"
#: The most bytes of output; a hundred GPUs with all their links take less.
_MAX_OUTPUT = 8 << 20
#: Seconds to wait for the end of a killed child: in uninterruptible sleep it cannot end yet.
_REAP_SECS = 0.2


def has_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this machine has a GPU driver, by its device files or its library."""
    folders = environ.get("LD_LIBRARY_PATH", "").split(":")
    return any(map(os.path.exists, _DEVICES)) or any(Path(folder, _NVML).exists() for folder in folders if folder)


@dataclass(frozen=True)
class GpuFacts:
    """The driver's answer."""

    #: ``version``, ``cuda`` and the number of ``gpus``; empty if the driver did not answer.
    driver: dict[str, Any] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)  # each GPU read so far, in `gpu_facts_child`'s format
    reason: str = ""  # why the answer is incomplete; empty if it is complete
    seconds: float = 0.0  # how long it took


def ask_driver(seconds: float) -> BackgroundTool:
    """Query the driver once, for at most `seconds`; see `facts_of`.

    Raises:
        RuntimeError: no thread can be started.
    """
    return BackgroundTool("GPU facts", _command("facts"), seconds, _MAX_OUTPUT)


def facts_of(run: ToolRun) -> GpuFacts:
    """Return the facts in the output of the child."""
    answers: dict[str, Any] = {}
    gpus = []
    for one in _objects(run.text):
        answers |= one
        gpus += [one["gpu"]] if "gpu" in one else []
    driver, problem = answers.get("driver", {}), str(answers.get("error", ""))
    if not problem and run.reason:
        where = f"at GPU {len(gpus)} of {driver.get('gpus', 0)}" if driver else "before it said anything"
        problem = f"the driver did not answer, {where}: {run.reason}"
    return GpuFacts(driver, gpus, problem, run.seconds)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        # The last line may be cut off.
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


class XidWatch:
    """A child that reports Xid events from `begin` on, and lives as long as this process.

    `look` reads its reports and never waits for them.

    Attributes:
        start: ``time``, when the watch began, in seconds since the epoch; the ``gpus`` with their error counters at
            that time; and ``errors``, each with the GPUs that could not be watched. Empty until the child reports it.
        xids: the events, each with ``xid``, ``bus_id`` (None if that is not known) and ``time``.
        problem: why no events are reported, or no more; empty while the watch runs.
        pid: of the child; 0 before it begins.
    """

    def __init__(self) -> None:
        self.start: dict[str, Any] = {}
        self.xids: list[dict[str, Any]] = []
        self.problem, self.pid = "not watched", 0
        self._text = b""
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the child. Call this from the main thread: the kernel kills the child when the calling thread ends.

        Raises:
            OSError: the child cannot be started.
        """
        self._process = subprocess.Popen(
            _command("watch"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.problem, self.pid = "the driver has not answered since the server started", self._process.pid
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def look(self) -> None:
        """Read the child's reports since the last call."""
        while self._process is not None and self._process.stdout is not None:
            try:
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                self.close("its watcher ended")
                break
            whole, _, self._text = (self._text + chunk).rpartition(b"\n")
            for event in _objects(whole.decode(errors="replace")):
                if "start" in event:
                    self.start, self.problem = event["start"], ""
                elif "error" in event:
                    self.close(str(event["error"]))
                else:
                    self.xids.append(event)

    def close(self, problem: str = "the crash handler ended") -> None:
        """End the child; `problem` is the reason."""
        if self._process is None or self._process.stdout is None:
            return
        self._process.stdout.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECS)
        self._process, self.problem = None, problem


def _command(what: str) -> list[str]:
    return [sys.executable, "-m", _CHILD, str(os.getpid()), what]
