"""Run one command for each node of a Slurm job, so many at once, each within a deadline.

A node of which nothing is heard is not counted any longer: the next one is asked beside it, before the silent one's
deadline. Killing srun does not end what it has started on a node: the step is cancelled as well.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from sglang_crashkit.collect.slurm_job import Job, client_environ, find_steps, kill_steps, step_name
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel.private_files import create_private, make_private_folder

#: What srun and the node say of the step.
ERRORS = "srun.log"
#: A program that was killed and is stuck in the kernel is not waited for longer, in seconds.
_REAP_SECS = 5.0
#: A collector says that it is there as soon as it runs; its container may have to be entered first, in seconds.
SILENT_SECS = 60.0
_POLL_SECS = 1.0


@dataclass(frozen=True)
class NodeRun:
    """What became of the command for one node.

    Attributes:
        node: the node's name.
        status: srun's exit status, None where it did not end by itself or was not started.
        output: what the command printed on the node, to standard output.
        errors: what it and Slurm printed to standard error.
        problem: why there is no status; empty where there is one.
        secs: how long it took, in seconds.
        late: it was killed at its deadline.
    """

    node: str
    status: int | None
    output: bytes
    errors: str
    problem: str = ""
    secs: float = 0.0
    late: bool = False


class Steps:
    """The commands for the nodes of a job.

    Args:
        job: the job that the steps are in.
        step: what the commands name their steps by.
        folders: where to note what each node's srun says, by node.
        deadline_secs: how long each may take, in seconds.
        at_once: how many run at the same time, silent ones left out.
        silent_secs: how long one that prints nothing is counted, in seconds.

    Attributes:
        interrupt: what ended it before all nodes had answered, None where nothing did.
    """

    def __init__(
        self,
        job: Job,
        *,
        step: str,
        folders: Mapping[str, Path],
        deadline_secs: float,
        at_once: int,
        silent_secs: float = SILENT_SECS,
    ) -> None:
        self.interrupt: KeyboardInterrupt | None = None
        self._job = job
        self._step = step
        self._folders = folders
        self._deadline_secs = deadline_secs
        self._silent_secs = min(silent_secs, deadline_secs)
        # All that may be silent at the same time, and those that are not.
        self._most = at_once * math.ceil(deadline_secs / self._silent_secs)
        self._turns = threading.Semaphore(at_once)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, commands: Mapping[str, Sequence[str]], on_end: Callable[[NodeRun], None]) -> None:
        """Run the command of each node, by its name.

        Ctrl-C ends all that run and starts no more. What a node printed is not kept, for a thousand nodes print much.

        Args:
            commands: as `slurm.step_command` makes them.
            on_end: called for each node in this thread, as it ends; once more where Ctrl-C came in between.
        """
        with ThreadPoolExecutor(max_workers=max(1, min(self._most, len(commands)))) as pool:
            pending = {pool.submit(self._run_one, node, argv): node for node, argv in commands.items()}
            try:
                for future in as_completed(tuple(pending)):
                    on_end(future.result())
                    del pending[future]
            except KeyboardInterrupt as error:
                self.interrupt = error
                self._stop()
        # Those that the interruption ended, in the order of the commands.
        for future in pending:
            on_end(future.result())

    def _stop(self) -> None:
        self._stopping.set()
        with self._lock:
            for process in self._running:
                _kill(process)

    def _run_one(self, node: str, argv: Sequence[str]) -> NodeRun:
        while not self._turns.acquire(timeout=_POLL_SECS):
            if self._stopping.is_set():
                return NodeRun(node, None, b"", "", "interrupted before its turn")
        with contextlib.ExitStack() as turn:
            turn.callback(self._turns.release)
            return self._run_in_turn(node, argv, turn)

    def _run_in_turn(self, node: str, argv: Sequence[str], turn: contextlib.ExitStack) -> NodeRun:
        if self._stopping.is_set():
            return NodeRun(node, None, b"", "", "interrupted before its turn")
        began = time.monotonic()
        try:
            folder = make_private_folder(self._folders[node])
            (folder / ERRORS).unlink(missing_ok=True)
            with create_private(folder / ERRORS) as log:
                status, output = self._wait(self._start(argv, log.fileno()), turn)
            errors = (folder / ERRORS).read_text(errors="replace")
        except (OSError, CrashkitError) as error:
            return NodeRun(node, None, b"", "", f"srun was not started: {error}")
        secs = time.monotonic() - began
        if status is not None and not self._stopping.is_set():
            return NodeRun(node, status, output, errors, secs=secs)
        self._cancel(node)
        if self._stopping.is_set():
            return NodeRun(node, None, output, errors, "interrupted", secs)
        return NodeRun(node, None, output, errors, f"no answer within {self._deadline_secs:g} s", secs, late=True)

    def _start(self, argv: Sequence[str], errors: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            list(argv),
            env=client_environ(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            # srun has a child of its own, and Ctrl-C is not for it.
            start_new_session=True,
        )
        with self._lock:
            self._running.add(process)
        if self._stopping.is_set():
            _kill(process)
        return process

    def _wait(self, process: subprocess.Popen[bytes], turn: contextlib.ExitStack) -> tuple[int | None, bytes]:
        """Return its status, None where it was killed, and what it printed; end its turn where that is nothing."""
        try:
            return self._communicate(process, turn)
        finally:
            with self._lock:
                self._running.discard(process)

    def _communicate(self, process: subprocess.Popen[bytes], turn: contextlib.ExitStack) -> tuple[int | None, bytes]:
        for secs in (self._silent_secs, self._deadline_secs - self._silent_secs):
            try:
                output, _errors = process.communicate(timeout=secs)
            except subprocess.TimeoutExpired as error:
                if not error.stdout:
                    turn.close()
            else:
                return process.returncode, output
        _kill(process)
        try:
            return None, process.communicate(timeout=_REAP_SECS)[0]
        except subprocess.TimeoutExpired as error:
            return None, error.stdout or b""

    def _cancel(self, node: str) -> None:
        # With one name for all, the steps of nodes that are still at work would be killed too.
        with contextlib.suppress(CrashkitError):
            kill_steps(find_steps(self._job, step_name(self._step, node)))


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
