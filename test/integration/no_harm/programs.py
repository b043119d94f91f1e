"""A user's own Python program with an ``Engine`` in it, told line by line what to do next."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.scenario import HANDLER
from lanelib.lanes import Lane
from lanelib.procs import Process, alive, send, title_of, tree_of, wait_gone, watchers_of

#: Beside other servers an engine takes minutes to start.
STEP_TIMEOUT_S = 600.0
#: Where multiprocessing imports it anew, it does nothing.
PROGRAM = """
import faulthandler, json, os, signal, subprocess, sys, traceback

OPTIONS = json.loads(sys.argv[1])


def note(number, _frame):
    with open(OPTIONS["signals"], "a") as file:
        print(number, file=file)


def launch(**options):
    import sglang
    return sglang.Engine(**{**OPTIONS["engine"], **options})


if __name__ == "__main__":
    # What is run must not change what runs it.
    space = dict(globals())
    for number, line in enumerate(sys.stdin):
        try:
            exec(json.loads(line), space)
        except Exception:
            traceback.print_exc()
            print(f"step {number} failed", flush=True)
        else:
            print(f"step {number} done", flush=True)
"""


class Program:
    """A program that runs the Python source that it is sent, one piece after the other.

    ``launch(**options)`` makes an ``Engine`` on the lane's tiny model, which sleeps when it is idle; `crash_folder` is
    given to it. ``note`` is a signal handler that records. Its source, its log and its record of signals are in
    `folder`, which is created.
    """

    def __init__(
        self, lane: Lane, folder: Path, crash_folder: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        self.log, self._signals, script = folder / "log", folder / "signals", folder / "program.py"
        script.write_text(PROGRAM)
        engine: dict[str, Any] = {
            "model_path": str(lane.model_dir),
            "load_format": "dummy",
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "max_total_tokens": 8192,
            "mem_fraction_static": 0.2,
            "sleep_on_idle": True,
        }
        if crash_folder is not None:
            engine["crash_dump_folder"] = str(crash_folder)
        options = json.dumps({"engine": engine, "signals": str(self._signals)})
        self._steps = 0
        self._known: dict[tuple[int, int], Process] = {}
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [lane.python, script, options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=lane.serve_env() | dict(env or {}),
                start_new_session=True,
            )

    @property
    def signals(self) -> list[int]:
        """The numbers of the signals that ``note`` recorded."""
        return [int(line) for line in self._signals.read_text().split()] if self._signals.exists() else []

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.note_processes()
        handlers = [one for one in watchers_of(pid for pid, _ in self._known) if title_of(one.pid) == HANDLER]
        for process in [*self._known.values(), *tree_of(self.popen.pid)]:
            send(process, signal.SIGKILL)
        self.popen.wait(60)
        self.popen.stdin.close()
        for process in wait_gone(handlers, 60):
            send(process, signal.SIGKILL)

    def tell(self, source: str) -> None:
        """Let it run `source` next, and do not wait for it."""
        self.popen.stdin.write(f"{json.dumps(source)}\n".encode())
        self.popen.stdin.flush()
        self._steps += 1

    def do(self, source: str, timeout_s: float = STEP_TIMEOUT_S) -> str:
        """Let it run `source`, and return what it printed since its start once that is done."""
        self.tell(source)
        return self.await_done(source, timeout_s)

    def await_done(self, source: str, timeout_s: float = STEP_TIMEOUT_S) -> str:
        """Return what it printed since its start once what it was told last is done; `source` is for messages."""
        done, deadline = f"step {self._steps - 1} done\n", time.monotonic() + timeout_s
        while done not in (said := self.log.read_text(errors="replace")):
            assert f"step {self._steps - 1} failed\n" not in said, said[-3000:]
            assert self.popen.poll() is None, f"status {self.popen.returncode}: {said[-3000:]}"
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {source}: {said[-3000:]}"
            time.sleep(0.1)
        self.note_processes()
        return said

    def value(self, expression: str) -> Any:
        """Let it evaluate `expression`, and return its value, which JSON must know."""
        mark = f"value-{self._steps}="
        said = self.do(f"print({mark!r} + json.dumps({expression}), flush=True)")
        return json.loads(next(line for line in said.splitlines() if line.startswith(mark)).removeprefix(mark))

    def tokens(self) -> list[int]:
        """Return what its engine answers to a greedy request."""
        parameters = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        found: list[int] = self.value(f"engine.generate('Hello', {parameters!r})['output_ids']")
        return found

    def pid_of(self, title: str) -> int:
        """Return the pid of the only living process below it whose title begins with `title`."""
        pids = [process.pid for process in tree_of(self.popen.pid) if title_of(process.pid).startswith(title)]
        assert len(pids) == 1, f"{len(pids)} processes titled {title}"
        return pids[0]

    def note_processes(self) -> None:
        """Take note of its processes, so that they can be ended."""
        if self.popen.poll() is None or alive(self._known.values()):
            self._known |= {process.key: process for process in tree_of(self.popen.pid)}
