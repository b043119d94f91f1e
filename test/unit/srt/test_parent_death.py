"""Workers whose parent ends, as the kernel sees it: a reaper's child starts a worker and is killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_crashkit.core import procfs
from sglang_crashkit.core.armed import DEFAULT_PARENT_SIGNAL, HANDLER_PID, ArmedFiles, read_armed
from sglang_crashkit.core.faulthandler_output import FaulthandlerOutput, parse_faulthandler
from unit.targets import ARM, HOLD, TITLE, functions_of, settle, settle_in_lock, start_ticks
from unit.targets import runtime as runtime
from unit.waiting import LONG, child, wait_until

#: PR_SET_CHILD_SUBREAPER is 36: whose parent ended becomes this process's child, which says how it ended.
FAMILY = """
import ctypes
libc = ctypes.CDLL(None)
libc.prctl(36, 1, 0, 0, 0)
reader, writer = os.pipe()
parent = os.fork()
if parent == 0:
    if os.fork() == 0:
        libc.prctl(1, 9, 0, 0, 0)
        {arm}
        asked = ctypes.c_int(0)
        libc.prctl(2, ctypes.byref(asked), 0, 0, 0)
        outer_function(f"{{os.getpid()}} {{asked.value}}".encode())
    pause()
worker, asked = os.read(reader, 100).decode().split()
ready(f"{{parent}} {{worker}} {{asked}}")
while True:
    pid, status = os.wait()
    if pid == int(worker):
        break
print(os.WTERMSIG(status), flush=True)
"""
BODY = HOLD + "def outer_function(text): inner_function(text)\n"
BODY += "def inner_function(text):\n    os.write(writer, text)\n    {work}\n"


@dataclass(frozen=True)
class Family:
    reaper: subprocess.Popen[bytes]
    parent: int
    worker: int
    asked: int
    files: ArmedFiles
    main_thread: int

    def orphaned(self) -> int:
        """Kill the parent, and return the signal that ended the worker."""
        os.kill(self.parent, signal.SIGKILL)
        return self.status()

    def await_written(self) -> list[str]:
        """Return the functions on the stacks that it wrote, once they are whole."""
        wait_until(lambda: self._output().is_whole, "the stacks are whole")
        return functions_of(self._output().threads)

    def _output(self) -> FaulthandlerOutput:
        return parse_faulthandler(self.files.orphan.read_text(), self.worker, self.main_thread)

    def status(self, secs: float = LONG) -> int:
        """Return the signal that ended the worker."""
        assert self.reaper.stdout is not None
        assert select.select([self.reaper.stdout], [], [], secs)[0], "the worker lives on"
        return int(self.reaper.stdout.readline())


@contextlib.contextmanager
def family(runtime: Path, *, arm: str = "arm_worker()", before: str = "", work: str = "time.sleep(120)") -> Iterator:
    """Start a worker whose parent may be killed, armed by `arm` after `before`, which does `work`."""
    code = ARM.replace("arm_worker()", "") + BODY.format(work=work)
    code += FAMILY.format(arm="\n        ".join([*before.splitlines(), *arm.splitlines()]))
    with child(code, str(runtime), title=TITLE) as reaper:
        parent, worker, asked = (int(word) for word in reaper.first_line.split())  # type: ignore[attr-defined]
        pidfd = os.pidfd_open(worker)
        try:
            started = start_ticks(worker)
            armed = read_armed(runtime, worker, started)
            main_thread = armed.main_thread if armed else 0
            yield Family(reaper, parent, worker, asked, ArmedFiles.of(runtime, worker, started), main_thread)
        finally:
            for end in (lambda: os.kill(parent, signal.SIGKILL), lambda: signal.pidfd_send_signal(pidfd, 9)):
                with contextlib.suppress(ProcessLookupError):
                    end()
            os.close(pidfd)


@pytest.fixture
def handler(runtime: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What the runtime folder calls the crash handler."""
    with child("ready(); pause()") as process:
        (runtime / HANDLER_PID).write_text(str(process.pid))
        yield process


def test_it_writes_its_stacks_and_lives_until_it_was_looked_at(runtime: Path, handler: object) -> None:
    with family(runtime) as one:
        assert one.asked == DEFAULT_PARENT_SIGNAL
        assert one.files.orphan.stat().st_mode & 0o777 == 0o600
        os.kill(one.parent, signal.SIGKILL)
        assert {"inner_function", "outer_function"} <= set(one.await_written())
        os.kill(one.worker, signal.SIGKILL)
        assert one.status() == signal.SIGKILL
        assert one.files.fault.read_text() == one.files.stack.read_text() == ""


def test_so_does_one_whose_interpreter_lock_is_not_to_be_had(runtime: Path, handler: object) -> None:
    with family(runtime, work="hold_the_lock()") as one:
        settle_in_lock(one.worker)
        os.kill(one.parent, signal.SIGKILL)
        assert "hold_the_lock" in one.await_written()


@pytest.mark.parametrize("work", ["[None for _ in iter(int, 1)]", "[time.sleep(0) for _ in iter(int, 1)]"])
def test_so_does_one_that_never_rests(runtime: Path, handler: object, work: str) -> None:
    with family(runtime, work=work) as one:
        os.kill(one.parent, signal.SIGKILL)
        assert "inner_function" in one.await_written()


def test_it_writes_all_of_them_although_it_is_told_again_and_again(runtime: Path, handler: object) -> None:
    # So many calls take a while to write.
    deep = "(lambda f: f(f, 90))(lambda f, n: f(f, n - 1) if n else time.sleep(120))"
    with family(runtime, work=deep) as one:
        for _ in range(10):
            os.kill(one.worker, DEFAULT_PARENT_SIGNAL)
        os.kill(one.parent, signal.SIGKILL)
        assert one.await_written().count("inner_function") == 1


@pytest.mark.wide
def test_the_kernel_ends_it_where_nobody_else_does(runtime: Path, handler: object) -> None:
    # The smallest that can be had, for it is also a number of seconds.
    with family(runtime, before=f"os.environ['SGLANG_CRASHKIT_PARENT_SIGNAL'] = '{int(signal.SIGRTMIN)}'") as one:
        os.kill(one.parent, signal.SIGKILL)
        assert "inner_function" in one.await_written()
        assert one.status(2 * LONG) == signal.SIGALRM


def test_one_that_is_stopped_writes_when_it_goes_on(runtime: Path, handler: object) -> None:
    with family(runtime) as one:
        os.kill(one.worker, signal.SIGSTOP)
        settle(one.worker, "T")
        os.kill(one.parent, signal.SIGKILL)
        os.kill(one.worker, signal.SIGCONT)
        assert "inner_function" in one.await_written()


def test_without_its_crash_handler_even_a_stopped_one_ends_at_once(
    runtime: Path, handler: subprocess.Popen[bytes]
) -> None:
    with family(runtime) as one:
        handler.kill()
        handler.wait(LONG)
        # The thread that answers sees first that the crash handler is gone.
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(one.files.socket))
            connection.sendall(b"stacks\n")
            assert connection.recv(1)
        os.kill(one.worker, signal.SIGSTOP)
        settle(one.worker, "T")
        assert one.orphaned() == signal.SIGKILL


THREAD = "import threading; thread = threading.Thread(target=arm_worker); thread.start(); thread.join()"
CAUGHT = "signal.signal(46, lambda *_: None)\narm_worker()"
BLOCKED = "signal.pthread_sigmask(signal.SIG_BLOCK, [46])\narm_worker()"
OFF = "os.environ['SGLANG_CRASHKIT_PARENT_SIGNAL'] = '0'\narm_worker()"


@pytest.mark.parametrize("arm", [THREAD, CAUGHT, BLOCKED, OFF], ids=["a thread", "caught", "blocked", "off"])
def test_where_it_cannot_be_armed_the_parents_end_is_what_it_was(runtime: Path, handler: object, arm: str) -> None:
    with family(runtime, arm=arm) as one:
        assert one.asked == signal.SIGKILL
        assert one.orphaned() == signal.SIGKILL
        assert not one.files.orphan.exists() or one.files.orphan.read_text() == ""


def test_so_is_it_without_a_crash_handler(runtime: Path) -> None:
    with family(runtime) as one:
        assert one.asked == signal.SIGKILL
        assert procfs.catches_signal(one.worker, 45)


def test_one_that_asked_for_nothing_outlives_its_parent(runtime: Path, handler: object) -> None:
    with family(runtime, before="libc.prctl(1, 0, 0, 0, 0)") as one:
        assert one.asked == 0


def test_another_signal_can_be_named(runtime: Path, handler: object) -> None:
    with family(runtime, before="os.environ['SGLANG_CRASHKIT_PARENT_SIGNAL'] = '50'") as one:
        os.kill(one.parent, signal.SIGKILL)
        assert "inner_function" in one.await_written()


def test_armed_anew_it_ends_as_before(runtime: Path, handler: object) -> None:
    (runtime / "next").mkdir()
    (runtime / "next" / HANDLER_PID).write_text((runtime / HANDLER_PID).read_text())
    again = "arm_worker()\nos.environ['SGLANG_CRASHKIT_SOCKET'] = sys.argv[1] + '/next/handler.sock'\narm_worker()"
    with family(runtime, arm=again) as one:
        os.kill(one.parent, signal.SIGKILL)
        wait_until((runtime / "next" / one.files.orphan.name).read_text, "the stacks are there")
        assert one.files.orphan.read_text() == ""


#: A server that is killed while its worker is still imported, as Python's multiprocessing starts it.
STARTING = """
import multiprocessing
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=exec, args=(sys.argv[1],))
    worker.start()
    ready(worker.pid)
    pause()
"""
IMPORTED = """
import ctypes, multiprocessing, os, time
while os.getppid() == multiprocessing.parent_process().pid and {waits}:
    time.sleep(0.01)
ctypes.CDLL(None).prctl(1, {signum}, 0, 0, 0)
import setproctitle
setproctitle.setproctitle("sglang::detokenizer")
os.environ.update({environ})
from sglang_crashkit.srt.arming import arm_worker
arm_worker()
open({told!r}, "w").close()
time.sleep(120)
"""


@pytest.mark.parametrize(
    ("waits", "signum", "environ", "lives"),
    [
        (True, 9, {}, False),
        (True, 9, {"SGLANG_CRASHKIT_ENABLED": "0"}, True),
        (True, 0, {}, True),
        (False, 9, {}, True),
    ],
    ids=["orphan", "kit off", "one that did not ask", "one with a parent"],
)
def test_one_that_asked_when_its_parent_had_ended_ends(
    tmp_path: Path, waits: bool, signum: int, environ: dict[str, str], lives: bool
) -> None:
    told = tmp_path / "told"
    code = IMPORTED.format(waits=waits, signum=signum, environ=environ, told=str(told))
    with child(STARTING, code) as server:
        worker = int(server.first_line)
        pidfd = os.pidfd_open(worker)
        try:
            if waits:
                server.kill()
            if lives:
                wait_until(told.exists, "the worker goes on")
            else:
                assert select.select([pidfd], [], [], LONG)[0], "the worker lives on"
                assert not told.exists()
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
