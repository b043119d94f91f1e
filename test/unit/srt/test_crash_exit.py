"""How a process ends after a crash, each time in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_crashkit.incident.exit_status import OUT_OF_MEMORY, ServerExit
from sglang_crashkit.settings import SOCKET_VARIABLE
from sglang_crashkit.srt import crash_exit
from unit.srt.conftest import Listener
from unit.waiting import LONG, wait_until

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

crash_exit.note_server_program()
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


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_crash_ends_the_children_and_then_the_process_with_its_status() -> None:
    done = run(
        """
        start_child()
        crash_exit.begin(82, 60)
        kill_process_tree(os.getpid())
        """
    )
    assert done.returncode == 82
    pid = int(done.stdout)
    wait_until(lambda: is_gone(pid), "the child is gone")


def test_a_child_that_is_started_in_the_place_of_one_that_was_ended_is_ended_too() -> None:
    # As the supervisor of tokenizer workers does, in another thread; large children take a while to go.
    code = """
from sglang_crashkit.srt.utils import common

wait = common._OwnNames._wait_for_reap_or_raise
common._OwnNames._wait_for_reap_or_raise = staticmethod(lambda *arguments: (wait(*arguments), time.sleep(0.3)))
first = subprocess.Popen(["sleep", "120"])

def start_another():
    first.wait()
    print(subprocess.Popen(["sleep", "120"]).pid, flush=True)

threading.Thread(target=start_another, daemon=True).start()
crash_exit.begin(82, 60)
kill_process_tree(os.getpid())
"""
    done = run(code)
    assert done.returncode == 82, done.stderr
    pid = int(done.stdout)
    wait_until(lambda: is_gone(pid), "the other child is gone")


@pytest.mark.parametrize("arguments", ["os.getpid(), include_parent=False", "None"])
def test_after_a_crash_no_part_of_the_server_lives_on(arguments: str) -> None:
    # Upstream ends the children of a server that hangs, and then its main process with 0.
    assert run(f"crash_exit.begin(85, 60); kill_process_tree({arguments}); sys.exit(0)").returncode == 85


def test_a_child_that_is_to_live_on_does() -> None:
    done = run("pid = start_child(); crash_exit.begin(82, 60); kill_process_tree(os.getpid(), skip_pid=pid)")
    assert done.returncode == 82
    pid = int(done.stdout)
    # With the end of its standard input.
    wait_until(lambda: is_gone(pid), "the child ends by itself")


def test_without_a_crash_upstreams_function_does_what_it_does() -> None:
    assert run("kill_process_tree(os.getpid())").returncode == -signal.SIGKILL
    assert run("kill_process_tree(os.getpid(), include_parent=False); sys.exit(7)").returncode == 7


def test_whoever_wants_upstreams_exit_status_gets_it() -> None:
    code = "start_child(); crash_exit.begin(82, 60); kill_process_tree(os.getpid())"
    done = run(code, SGLANG_CRASHKIT_EXIT_STATUS="upstream")
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    wait_until(lambda: is_gone(pid), "the child is gone")


@pytest.mark.parametrize("mode", ["library", "elastic"])
def test_a_crash_ends_nobody_but_a_server_program(mode: str) -> None:
    arguments = "types.SimpleNamespace(elastic_ep_backend='mooncake')" if mode == "elastic" else "None"
    code = f"""
        import types
        crash_exit._crash.is_program = {mode == "elastic"}
        crash_exit.note_launch({arguments})
        crash_exit.begin(82, 0.1)
        time.sleep(0.5)
        print(crash_exit.has_begun(), crash_exit.is_due(whole=False))
        """
    done = run(code)
    assert (done.returncode, done.stdout.split()) == (0, ["False", "False"])


def test_with_the_kit_off_upstreams_function_does_what_it_does() -> None:
    code = "crash_exit.begin(82, 60); kill_process_tree(os.getpid())"
    assert run(code, SGLANG_CRASHKIT_ENABLED="0").returncode == -signal.SIGKILL


def test_who_ends_the_process_waits_for_the_thread_that_noted_the_crash() -> None:
    code = """
def has_failed():
    print("the incident is whole", flush=True)
    return True
crash_exit.ask_before_the_end(has_failed)
crash_exit.begin(82, 60)
kill_process_tree(os.getpid())
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (82, "the incident is whole\n"), done.stderr


@pytest.mark.parametrize(("code", "status"), [("", 81), ("crash_exit.begin(83, 60)", 83)])
def test_process_1_does_not_end_with_success(code: str, status: int) -> None:
    container = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
    done = run(f"assert os.getpid() == 1; {code}\nkill_process_tree(os.getpid())", prefix=container)
    assert done.returncode == status, done.stderr


def test_process_1_ends_with_success_where_it_was_asked_to() -> None:
    container = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
    done = run("crash_exit.note_draining(); kill_process_tree(os.getpid())", prefix=container)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", ["RuntimeError('left')", "KeyboardInterrupt()", "SystemExit(0)"])
def test_children_that_cannot_be_ended_do_not_hold_it_up(error: str) -> None:
    done = run(
        f"""
        def fail():
            raise {error}
        crash_exit.begin(82, 60)
        crash_exit.end(fail)
        """
    )
    assert done.returncode == 82


def test_it_ends_in_time_whoever_hangs_and_whatever_is_locked() -> None:
    done = run(
        """
        import logging
        start_child()
        # What a signal may interrupt: the start of a thread, and a line of the log.
        threading._active_limbo_lock.acquire()
        logging._lock.acquire()
        crash_exit.begin(82, 0.3)
        while True:
            time.sleep(60)
        """
    )
    assert done.returncode == 82
    pid = int(done.stdout)
    wait_until(lambda: is_gone(pid), "the child is gone")


def test_it_ends_in_time_where_python_stands_still() -> None:
    done = run(
        """
        crash_exit._LAST_RESORT_SECS = 0.2
        crash_exit.begin(82, 0.2)
        ctypes.PyDLL(None).pause()  # keeps the interpreter's lock
        """
    )
    assert done.returncode == 1


def test_the_deadline_can_be_moved() -> None:
    done = run("crash_exit.begin(82, 0.2); crash_exit.allow(60); time.sleep(0.8); sys.exit(3)")
    assert done.returncode == 3


def test_a_process_of_no_server_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # This one, for example, in which a test may call a hooked function.
    monkeypatch.setattr(crash_exit, "_crash", crash_exit._Crash())
    crash_exit.begin(ServerExit.KILLED, 0.0)
    crash_exit.allow(0.0)
    assert not crash_exit.has_begun()
    assert not crash_exit.is_due(whole=True)


def test_what_the_handler_knows_of_the_cause_wins(listener: Listener) -> None:
    code = """
    crash_exit.begin(81, 60)
    crash_exit.learn({"exit_status": ANSWER})
    kill_process_tree(os.getpid())
    """
    for answer, status in ((139, 139), (None, 81), (0, 81), (256, 81), ("x", 81)):
        assert run(code.replace("ANSWER", repr(answer))).returncode == status


def test_a_crash_before_the_ranks_were_ready_is_a_failed_start() -> None:
    code = "crash_exit._crash.started = False; crash_exit.begin(STATUS, 60); kill_process_tree(os.getpid())"
    for status, expected in ((ServerExit.RAISED, ServerExit.FAILED_START), (OUT_OF_MEMORY, OUT_OF_MEMORY)):
        assert run(code.replace("STATUS", str(int(status)))).returncode == expected


def test_one_that_ends_itself_asks_the_handler_why(listener: Listener) -> None:
    environ = {SOCKET_VARIABLE: str(listener.path)}
    assert run("kill_process_tree(os.getpid())", **environ).returncode == ServerExit.HUNG
    assert [listener.heard()["event"] for _ in range(2)] == ["await_incident", "teardown"]
    # A shutdown needs no reason, and what a program does to its own children is its own affair.
    assert run("crash_exit.note_draining(); kill_process_tree(os.getpid())", **environ).returncode < 0
    assert run("kill_process_tree(os.getpid(), include_parent=False)", **environ).returncode == 0
    assert [listener.heard()["event"] for _ in range(2)] == ["teardown"] * 2


FAILED_START = """
try:
    try:
        error = RuntimeError("Rank 0 scheduler died")
        crash_exit._crash.started = False
        crash_exit.end_by_status(error, ANSWER)
        raise error
    finally:
        CLEAN_UP
except KeyError:
    pass
import atexit; atexit.register(print, "finished")
"""


@pytest.mark.parametrize(("answer", "status"), [("None", 86), ({"exit_status": 83}, 86), ({"exit_status": 137}, 137)])
def test_an_error_that_nobody_catches_ends_the_process_with_a_status(answer: object, status: int) -> None:
    done = run(FAILED_START.replace("ANSWER", str(answer)).replace("CLEAN_UP", "pass"))
    assert done.returncode == status
    assert "RuntimeError: Rank 0 scheduler died" in done.stderr


def test_an_error_that_follows_from_it_does_too() -> None:
    code = FAILED_START.replace("ANSWER", "None").replace("CLEAN_UP", "raise ValueError('clean-up')")
    done = run(code)
    assert done.returncode == ServerExit.FAILED_START
    assert "ValueError: clean-up" in done.stderr


def test_a_program_that_catches_it_goes_on() -> None:
    code = FAILED_START.replace("ANSWER", "None").replace("CLEAN_UP", "raise KeyError")
    done = run(code)
    assert (done.returncode, done.stdout) == (0, "finished\n")
    assert run(code + "\nraise ValueError('another')").returncode == 1


def test_a_server_serves_from_when_its_ranks_are_ready_until_others_are_waited_for() -> None:
    code = """
        print(crash_exit.is_serving(), crash_exit.is_draining())
        crash_exit.note_launch(None)
        print(crash_exit.is_serving(), crash_exit.has_started())
        crash_exit.note_started()
        crash_exit.note_draining()
        print(crash_exit.is_serving(), crash_exit.is_draining())
        """
    assert run(code).stdout.split() == ["True", "False", "False", "True", "True", "True"]
