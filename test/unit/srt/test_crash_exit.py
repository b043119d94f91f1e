"""How a process ends after a crash, each time in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from sglang_crashkit.incident.exit_status import OUT_OF_MEMORY, ServerExit
from sglang_crashkit.settings import SOCKET_VARIABLE
from unit.srt.conftest import Listener
from unit.support.targets import is_gone
from unit.support.waiting import LONG, wait_until

BEGIN, KILL = "crash_exit.begin(82, 60)", "kill_process_tree(os.getpid())"
CONTAINER = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
UPSTREAM, OFF = {"SGLANG_CRASHKIT_EXIT_STATUS": "upstream"}, {"SGLANG_CRASHKIT_ENABLED": "0"}
#: As the supervisor of tokenizer workers does, in another thread; large children take a while to go.
REPLACED = """
from sglang_crashkit.srt.utils import common

wait, is_replaced = common.wait_for_reap_or_raise, threading.Event()
common._wait_for_reap_or_raise = lambda *arguments: (wait(*arguments), is_replaced.wait(60))
first = subprocess.Popen(["sleep", "120"])

def start_another():
    first.wait()
    print(subprocess.Popen(["sleep", "120"]).pid, flush=True)
    is_replaced.set()

threading.Thread(target=start_another, daemon=True).start()
"""
#: What a signal may interrupt: the start of a thread, and a line of the log.
LOCKED = """
import logging
start_child()
threading._active_limbo_lock.acquire()
logging._lock.acquire()
crash_exit.begin(82, 0.3)
while True:
    time.sleep(60)
"""
#: It keeps the interpreter's lock.
STANDS_STILL = "crash_exit.TIMER_SECS = 0.2; crash_exit.begin(82, 0.2); ctypes.PyDLL(None).pause()"
NOT_STARTED = "crash_exit.state.started = False; "
PRELUDE = """
import ctypes, os, signal, subprocess, sys, threading, time
import psutil
from sglang_crashkit.srt import crash_exit
from sglang_crashkit.srt.utils.common import on_kill_process_tree

@on_kill_process_tree
def kill_process_tree(parent_pid, include_parent=True, skip_pid=None):
    # As upstream's, to which process 1 is deaf.
    for child in psutil.Process(parent_pid).children(recursive=True):
        if child.pid != skip_pid:
            child.kill()
    if include_parent:
        psutil.Process(parent_pid).kill()
        sys.exit(0)

def start_child():
    command = "import os; print(flush=True); os.read(0, 1)"
    child = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
    return child.pid

crash_exit.state.is_program = True
crash_exit.note_launch(None)
crash_exit.note_started()
"""


def run(code: str, *, prefix: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process that launched a server, to its end."""
    return subprocess.run(
        [*prefix, sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=LONG,
        env=os.environ | environ,
        check=False,
    )


@pytest.mark.parametrize(
    ("code", "environ", "status"),
    [
        # The children, and then the process with its status.
        (f"start_child(); {BEGIN}; {KILL}", {}, 82),
        (f"{REPLACED}{BEGIN}; {KILL}", {}, 82),
        # One that is to live on ends by itself, with the end of its standard input.
        (f"pid = start_child(); {BEGIN}; kill_process_tree(os.getpid(), skip_pid=pid)", {}, 82),
        # Upstream ends the children of a server that hangs, and then its main process with 0.
        (f"{BEGIN}; kill_process_tree(os.getpid(), include_parent=False); sys.exit(0)", {}, 82),
        (f"{BEGIN}; kill_process_tree(None); sys.exit(0)", {}, 82),
        # Upstream's function does what it does: without a crash, where somebody wants its status, with the kit off.
        (KILL, {}, -signal.SIGKILL),
        ("kill_process_tree(os.getpid(), include_parent=False); sys.exit(7)", {}, 7),
        (f"start_child(); {BEGIN}; {KILL}", UPSTREAM, -signal.SIGKILL),
        (f"{BEGIN}; {KILL}", OFF, -signal.SIGKILL),
        # It ends in time, the process that hangs and whatever is locked, unless the deadline is moved.
        (LOCKED, {}, 82),
        (STANDS_STILL, {}, 1),
        ("crash_exit.begin(82, 3); crash_exit.allow(60); time.sleep(3.5); sys.exit(3)", {}, 3),
        # A crash before the ranks were ready is a failed start, but for want of memory.
        (f"{NOT_STARTED}crash_exit.begin({ServerExit.RAISED:d}, 60); {KILL}", {}, ServerExit.FAILED_START),
        (f"{NOT_STARTED}crash_exit.begin({OUT_OF_MEMORY}, 60); {KILL}", {}, OUT_OF_MEMORY),
        # What the handler knows of the cause wins.
        *(
            (f"{BEGIN}; crash_exit.learn({{'exit_status': {answer!r}}}); {KILL}", {}, status)
            for answer, status in ((139, 139), (None, 82), (0, 82), (256, 82), ("x", 82))
        ),
        # Children that cannot be ended do not hold it up.
        *(
            (f"def fail():\n    raise {error}\n{BEGIN}\ncrash_exit.end(fail)", {}, 82)
            for error in ("RuntimeError('left')", "KeyboardInterrupt()", "SystemExit(0)")
        ),
    ],
)
def test_a_process_ends_with_a_status(code: str, environ: dict[str, str], status: int) -> None:
    done = run(code, **environ)
    assert done.returncode == status, done.stderr
    for pid in done.stdout.split():
        wait_until(lambda pid=pid: is_gone(int(pid)), "the child is gone")


@pytest.mark.parametrize(
    ("code", "status"), [("", 81), ("crash_exit.begin(83, 60)", 83), ("crash_exit.state.draining = True", 0)]
)
def test_process_1_ends_with_success_only_where_asked_to(code: str, status: int) -> None:
    done = run(f"assert os.getpid() == 1; {code}\n{KILL}", prefix=CONTAINER)
    assert done.returncode == status, done.stderr


@pytest.mark.parametrize("mode", ["library", "elastic"])
def test_a_crash_ends_nobody_but_a_server_program(mode: str) -> None:
    arguments = "types.SimpleNamespace(elastic_ep_backend='mooncake')" if mode == "elastic" else "None"
    code = f"""
        import types
        crash_exit.state.is_program = {mode == "elastic"}
        crash_exit.note_launch({arguments})
        crash_exit.begin(82, 0.1)
        time.sleep(0.5)
        print(crash_exit.has_begun(), crash_exit.is_due(whole=False))
        """
    done = run(code)
    assert (done.returncode, done.stdout.split()) == (0, ["False", "False"])


def test_the_end_waits_for_the_thread_that_noted_it() -> None:
    code = """
def has_failed():
    print("the incident is whole", flush=True)
    return True
crash_exit.state.has_failed = has_failed
crash_exit.begin(82, 60)
kill_process_tree(os.getpid())
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (82, "the incident is whole\n"), done.stderr


def test_one_that_ends_itself_asks_the_handler_why(listener: Listener) -> None:
    environ = {SOCKET_VARIABLE: str(listener.path)}
    assert run("kill_process_tree(os.getpid())", **environ).returncode == ServerExit.HUNG
    assert [listener.heard()["event"] for _ in range(2)] == ["await_incident", "teardown"]
    # A shutdown needs no reason, and what a program does to its own children is its own affair.
    assert run("crash_exit.state.draining = True; kill_process_tree(os.getpid())", **environ).returncode < 0
    assert run("kill_process_tree(os.getpid(), include_parent=False)", **environ).returncode == 0
    assert [listener.heard()["event"] for _ in range(2)] == ["teardown"] * 2


FAILED_START = """
try:
    try:
        error = RuntimeError("Rank 0 scheduler died")
        crash_exit.state.started = False
        crash_exit.end_by_status(error, ANSWER)
        raise error
    finally:
        CLEAN_UP
except KeyError:
    pass
import atexit; atexit.register(print, "finished")
"""


@pytest.mark.parametrize(
    ("answer", "clean_up", "status", "said"),
    [
        ("None", "pass", ServerExit.FAILED_START, "RuntimeError: Rank 0 scheduler died"),
        ("{'exit_status': 83}", "pass", ServerExit.FAILED_START, "RuntimeError: Rank 0 scheduler died"),
        ("{'exit_status': 137}", "pass", 137, "RuntimeError: Rank 0 scheduler died"),
        # An error that follows from it.
        ("None", "raise ValueError('clean-up')", ServerExit.FAILED_START, "ValueError: clean-up"),
        # A program that catches it goes on.
        ("None", "raise KeyError", 0, ""),
        ("None", "raise KeyError", 1, "ValueError: another"),
    ],
)
def test_an_uncaught_error_ends_it_with_a_status(answer: str, clean_up: str, status: int, said: str) -> None:
    code = FAILED_START.replace("ANSWER", answer).replace("CLEAN_UP", clean_up)
    done = run(code + "\nraise ValueError('another')" * (status == 1))
    assert (done.returncode, said in done.stderr) == (status, True)
    assert status or done.stdout == "finished\n"
