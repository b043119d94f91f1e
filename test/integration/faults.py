"""The ways in which a real server is broken, each with what its incident must say."""

from __future__ import annotations

import functools
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from integration import import_hook
from lanelib.servers import Server
from sglang_crashkit.incident.exit_status import ServerExit

TP0, TP1, DP1 = "sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::scheduler_DP1"
DETOKENIZER = "sglang::detokenizer"
CONTROLLER = "sglang::data_parallel_controller"
MAIN = "python -m sglang.launch_server"
HEALTH_TIMEOUT_S = 60.0

#: What a process does in its main thread, in the middle of its work, when it gets one of these signals.
SPIN_SIGNAL, HOARD_SIGNAL, RAISE_SIGNAL = signal.SIGRTMIN + 7, signal.SIGRTMIN + 8, signal.SIGRTMIN + 9
# SIGRTMIN + 11 is what the kit has stacks written on.
PANIC_SIGNAL, EXIT_SIGNAL, VANISH_SIGNAL = signal.SIGRTMIN + 10, signal.SIGRTMIN + 16, signal.SIGRTMIN + 12
START_SIGNAL, ABORT_SIGNAL, STACKS_SIGNAL = signal.SIGRTMIN + 13, signal.SIGRTMIN + 14, signal.SIGRTMIN + 15
#: What C++ says on standard error as it aborts.
ABORT_WORDS = "CUDA error: an illegal memory access was encountered"
#: Python runs it before anything else.
SITE_CODE = f"""
import ctypes
import os
import signal
import subprocess
import sys
import threading

hoard = []


def spin_in_python(*_):
    while True:
        pass


def take_memory(*_):
    for _ in range(64):
        hoard.append(b"x" * (64 << 20))


def fail(*_):
    raise RuntimeError("asked to raise")


def start_helper(*_):
    hoard.append(subprocess.Popen(["sleep", "600"]))


# An exception that nothing of C++ catches.
def abort_in_cpp(*_):
    ctypes.CDLL("libstdc++.so.6")._ZSt21__throw_runtime_errorPKc({ABORT_WORDS.encode()!r})


# As PyO3 has it: no except Exception catches it.
PanicException = type("PanicException", (BaseException,), {{"__module__": "pyo3_runtime"}})


def panic(*_):
    raise PanicException("index out of bounds: the len is 3 but the index is 7")


# As a watchdog of upstream's would; in a thread, because a signal handler must not wait.
def want_stacks(*_):
    from sglang.srt.utils.cudacore_pyspy_dump_utils import pyspy_dump_schedulers

    threading.Thread(target=pyspy_dump_schedulers, daemon=True).start()


signal.signal(signal.SIGRTMIN + 7, spin_in_python)
signal.signal(signal.SIGRTMIN + 8, take_memory)
signal.signal(signal.SIGRTMIN + 9, fail)
signal.signal(signal.SIGRTMIN + 10, panic)
signal.signal(signal.SIGRTMIN + 16, lambda *_: sys.exit(3))
signal.signal(signal.SIGRTMIN + 12, lambda *_: os._exit(1))
signal.signal(signal.SIGRTMIN + 13, start_helper)
signal.signal(signal.SIGRTMIN + 14, abort_in_cpp)
signal.signal(signal.SIGRTMIN + 15, want_stacks)
"""


@dataclass(frozen=True)
class Fault:
    """One way to break a server."""

    name: str  # what it is called
    strike: Callable[[Server], None]  # breaks the server, which is ready and works on requests
    #: how the title of the process begins that the incident must name first; None where no one failed alone
    first: str | None
    status: int  # the exit status that the server must end with, negative for a signal
    kinds: tuple[str, ...] = ("killed",)  # the kinds of incident that may come of it
    #: the cause and the signal of the end of `first`; None where it lives, or may be ended by another
    end: tuple[str, str | None] | None = None
    stopped: tuple[str, ...] = ()  # the titles of those that are stopped and must stay so until they are killed
    dp: int = 1  # data-parallel ranks; 1 for `tp` tensor-parallel ranks instead
    tp: int = 2  # tensor-parallel ranks
    env: Mapping[str, str] = field(default_factory=dict)  # more environment for the server
    args: tuple[str, ...] = ()  # more arguments for the server
    requests: int = 3  # how many requests are in flight; 0 for a server that was never asked anything
    most_s: float = 60.0  # from what ends the server to its exit, in seconds, with a margin for a busy machine
    is_rare: bool = True  # whether it belongs to the full matrix on every release

    def __str__(self) -> str:
        return self.name


def send(title: str, signum: int = signal.SIGKILL) -> Callable[[Server], None]:
    """Return what sends a signal to the process of this title."""
    return lambda server: os.kill(server.pid_of(title), signum)


def wait(_server: Server) -> None:
    """Do nothing: the server breaks by itself."""


def then_terminate(*titles: str, signum: int = signal.SIGSTOP) -> Callable[[Server], None]:
    """Return what sends a signal, waits until the health check fails, and ends the server as an orchestrator would."""

    def strike(server: Server) -> None:
        for title in titles:
            os.kill(server.pid_of(title), signum)
        wait_until_unhealthy(server)
        os.kill(server.pid, signal.SIGTERM)

    return strike


def wait_until_unhealthy(server: Server) -> None:
    """Ask for the server's health until it answers that it is not well."""
    deadline = time.monotonic() + HEALTH_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{server.url}/health_generate", timeout=HEALTH_TIMEOUT_S):
                time.sleep(0.1)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return
            raise
    raise AssertionError(f"{server.url} is healthy after {HEALTH_TIMEOUT_S:g} s")


def write_site(folder: Path) -> dict[str, str]:
    """Write what makes a process obey the signals above; return the environment that brings it in."""
    return import_hook.write_site(folder, SITE_CODE)


UNHEALTHY = {"SGLANG_HEALTH_CHECK_TIMEOUT": "3"}
CRASH = {"SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS": "50"}
WATCHDOG = ("--watchdog-timeout", "5")
#: A server that hangs is gone this soon after SIGTERM, in seconds.
HANG_S = 10.0
HANG = ("child_failure", "hang")
SIGKILLED = ("signal", "SIGKILL")
killed = functools.partial(Fault, status=ServerExit.KILLED, end=SIGKILLED)
raised = functools.partial(Fault, status=ServerExit.RAISED, kinds=("exception",))
hung = functools.partial(Fault, status=ServerExit.HUNG, kinds=HANG, env=UNHEALTHY, most_s=HANG_S)

FAULTS = (
    Fault("segfault", send(TP0, signal.SIGSEGV), TP0, 128 + signal.SIGSEGV, end=("signal", "SIGSEGV")),
    Fault("abort", send(TP1, signal.SIGABRT), TP1, 128 + signal.SIGABRT, end=("signal", "SIGABRT")),
    raised("exception", wait, "sglang::scheduler_TP", env=CRASH),
    raised("exception-of-a-replica", wait, "sglang::scheduler_DP", env=CRASH, dp=2),
    raised("exception-of-the-detokenizer", send(DETOKENIZER, RAISE_SIGNAL), DETOKENIZER),
    raised("exception-of-the-controller", send(CONTROLLER, RAISE_SIGNAL), CONTROLLER, dp=2),
    # What SGLang does not catch, and what no one can.
    raised("panic", send(TP1, PANIC_SIGNAL), TP1, is_rare=False),
    raised("sys-exit", send(TP1, EXIT_SIGNAL), TP1),
    Fault("os-exit", send(TP1, VANISH_SIGNAL), TP1, ServerExit.EXITED, ("exited",), end=("exit_status", None)),
    killed("detokenizer", send(DETOKENIZER), DETOKENIZER, tp=1, is_rare=False),
    killed("controller", send(CONTROLLER), CONTROLLER, dp=2),
    killed("replica", send(DP1), DP1, dp=2),
    Fault("main", lambda server: os.kill(server.pid, signal.SIGKILL), MAIN, -signal.SIGKILL, end=SIGKILLED),
    killed("before-the-first-request", send(TP0), TP0, requests=0),
    # The health check is not asked: the scheduler that waits for the stopped one notices by its own watchdog.
    Fault(
        "stopped-in-a-decode",
        send(TP1, signal.SIGSTOP),
        "sglang::scheduler_TP",
        ServerExit.HUNG,
        ("hang",),
        stopped=(TP1,),
        args=WATCHDOG,
    ),
    hung("stopped", then_terminate(TP1), TP1, stopped=(TP1,)),
    hung("both-stopped", then_terminate(TP0, TP1), None, stopped=(TP0, TP1)),
    hung("spinning", then_terminate(TP1, signum=SPIN_SIGNAL), TP1),
)
