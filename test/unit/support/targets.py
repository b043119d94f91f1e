"""Processes in the states that a crash handler meets: with stack hooks, untraceable, keeping the GIL, stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.stack_hooks import StackHooks, read_stack_hooks
from unit.support.waiting import child, wait_until

TITLE = "sglang::scheduler_TP0"
#: The runtime folder is the first argument.
INSTALL = """
os.environ["SGLANG_CRASHKIT_SOCKET"] = sys.argv[1] + "/handler.sock"
from sglang_crashkit.srt.stack_hooks import install_in_worker
install_in_worker()
"""
SLEEPER = """
def outer_function(): inner_function()
def inner_function(): time.sleep(120)
ready()
outer_function()
"""
#: C code that keeps the GIL, here by waiting for a mutex for ever: no thread of the process runs Python.
HOLD = """
import ctypes
def hold_the_lock():
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)
"""
LOCK_HOLDER = (
    HOLD
    + """
ready()
hold_the_lock()
"""
)
#: Its main thread waits in vfork(2) for a child that opens a pipe which no one writes to, and holds the lock.
ASLEEP = """
def sleep_uninterruptibly():
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[2], os.O_RDONLY, 0)])
ready()
sleep_uninterruptibly()
"""
#: No one may trace it but with CAP_SYS_PTRACE; PR_SET_DUMPABLE is 4.
UNDUMPABLE = """
import ctypes
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
"""
PTRACE = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
def attach(thread):
    if libc.ptrace(16, thread, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")
"""


def start_ticks(pid: int) -> int:
    stat = procfs.read_stat(pid)
    return stat.start_ticks


def state_of(pid: int) -> str:
    stat = procfs.read_stat(pid)
    return stat.state if stat else ""


def is_gone(pid: int) -> bool:
    """Say whether a process has ended, reaped or not."""
    return state_of(pid) in ("", "Z", "X")


def runs_on(pid: int) -> None:
    """Wait until a process is neither stopped nor traced, and check that it has no stop ahead."""
    wait_until(lambda: not any(procfs.read_tracer(pid, one) for one in procfs.thread_states(pid)), "no one traces it")
    wait_until(lambda: set(procfs.thread_states(pid).values()) <= set("RSD"), "it runs on")
    for thread in procfs.thread_states(pid):
        assert not procfs.in_mask(procfs.read_status(pid, thread)["SigPnd"], signal.SIGSTOP)


def settle(pid: int, state: str) -> None:
    """Wait until a process's main thread is in `state`."""
    wait_until(lambda: state_of(pid) == state, f"process {pid} is in {state}")


def settle_in_lock(pid: int) -> None:
    """Wait until a `LOCK_HOLDER` holds the lock: it sleeps in a mutex."""
    wait_until(lambda: "futex" in procfs.read_wchan(pid), f"process {pid} waits for a mutex")


def settle_in_sleep(pid: int) -> None:
    """Wait until a `SLEEPER` is in its sleep."""
    # Python 3.10 sleeps in select(2).
    places = ("nanosleep", "poll_schedule", "do_select")
    wait_until(lambda: any(place in procfs.read_wchan(pid) for place in places), f"process {pid} sleeps")


@contextlib.contextmanager
def hooked(folder: Path, code: str, *, before: str = "", arguments: tuple[str, ...] = ()) -> Iterator[StackHooks]:
    """Run `code` in a worker with stack hooks in the runtime folder `folder`; see `waiting.child`."""
    with child(before + INSTALL + code, str(folder), *arguments, title=TITLE) as process:
        found = read_stack_hooks(folder, process.pid, start_ticks(process.pid))
        assert found is not None, "it has no hooks"
        yield found


@contextlib.contextmanager
def asleep(folder: Path) -> Iterator[StackHooks]:
    """A worker with stack hooks whose main thread is in uninterruptible sleep (state D) until the end of the block."""
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    with hooked(folder, ASLEEP, arguments=(str(fifo),)) as target:
        settle(target.pid, "D")
        try:
            yield target
        finally:
            # The child, which SIGKILL of its parent does not reach.
            os.close(wait_until(lambda: _open_writer(fifo), "the child opens the pipe"))


@contextlib.contextmanager
def traced(pid: int) -> Iterator[int]:
    """Let another process trace `pid` until the end of the block; gives the tracer's pid. The target runs on."""
    code = PTRACE + "attach(int(sys.argv[1])); os.waitpid(int(sys.argv[1]), 0x40000000)\n"
    code += "libc.ptrace(7, int(sys.argv[1]), None, None); ready(); pause()"
    with child(code, str(pid)) as tracer:
        wait_until(lambda: procfs.read_tracer(pid) == tracer.pid, "it is traced")
        yield tracer.pid


def unprivileged(argv: list[str]) -> list[str]:
    """Return the command that runs `argv` without the capability to trace whom it may not."""
    if os.geteuid() != 0:
        return argv
    assert shutil.which("setpriv"), "setpriv (util-linux) is needed to drop a capability"
    return ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace", *argv]


def run_unprivileged(code: str, *arguments: str) -> str:
    """Run Python `code` without the capability to trace, and return what it printed."""
    done = subprocess.run(
        unprivileged([sys.executable, "-c", code, *arguments]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_tool(folder: Path, script: str, name: str = "py-spy") -> str:
    """Write a stand-in for a program: what the real one does too rarely. The fifth argument of py-spy is the pid."""
    folder.mkdir(exist_ok=True)
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return str(tool)


def functions_of(threads: object) -> list[str]:
    """Return the names of all functions on the stacks, thread by thread, innermost first."""
    return [frame.function for thread in threads for frame in thread.frames]  # type: ignore[attr-defined]


def nothing_where_forbidden(read_maps: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Return a reader that says of a process which may not be read, such as one that set the machine up, nothing."""

    def read(pid: int) -> bytes:
        try:
            return read_maps(pid)
        except PermissionError:
            return b""

    return read


def _open_writer(fifo: Path) -> int | None:
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
