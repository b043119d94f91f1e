from __future__ import annotations

import os
import select
import signal
import subprocess
from dataclasses import replace

import pytest

from sglang_crashkit.kernel import procfs
from sglang_crashkit.kernel.pidfd import ExitStatus, ProcessHandle
from unit.support.targets import run_unprivileged
from unit.support.waiting import LONG, child, descriptors, wait_until


def test_nothing_is_known_of_a_process_that_lives() -> None:
    with child("ready(); pause()") as process:
        handle = ProcessHandle(process.pid)
        assert not handle.has_exited()
        assert not handle.exit_status().known
        process.kill()
        assert wait_until(handle.has_exited, "it is dead")
        # What was asked too early is asked again.
        assert handle.exit_status() == ExitStatus(signal="SIGKILL")
        handle.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os._exit(0)", ExitStatus(code=0)),
        ("os._exit(3)", ExitStatus(code=3)),
        ("os.kill(os.getpid(), signal.SIGKILL)", ExitStatus(signal="SIGKILL")),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", ExitStatus(signal="SIG37")),
    ],
)
@pytest.mark.parametrize("reaped", [False, True])
def test_the_end_is_known_of_zombies_and_the_reaped(code: str, expected: ExitStatus, reaped: bool) -> None:
    with child(f"ready(); sys.stdin.readline(); {code}") as process:
        handle = ProcessHandle(process.pid)
        process.stdin.close()
        process.stdin = None
        assert select.select([handle], [], [], LONG)[0]
        if reaped:
            process.wait(LONG)
        status = handle.exit_status()
        handle.close()
    if reaped and not status.known:
        pytest.skip("this kernel does not tell how a reaped process ended (before 6.15)")
    assert status == expected


def test_a_process_whose_main_thread_ended_has_not_exited() -> None:
    code = """
import threading, ctypes
def last():
    time.sleep(0.05)
    ready()
    sys.stdin.readline()
    os._exit(4)
threading.Thread(target=last).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    with child(code) as process:
        handle = ProcessHandle(process.pid)
        wait_until(lambda: procfs.read_stat(process.pid).state == "Z", "its main thread is a zombie")  # type: ignore[union-attr]
        assert not handle.has_exited()
        assert not handle.exit_status().known
        handle.close()


@pytest.mark.parametrize("has_functions", [True, False])
def test_a_signal_reaches_the_process_and_never_its_successor(
    monkeypatch: pytest.MonkeyPatch, has_functions: bool
) -> None:
    if not has_functions:
        # As a Python that was built on an older system, such as one of uv's.
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")
        with pytest.raises(ProcessLookupError):
            ProcessHandle(2**22 + 1)
    process = subprocess.Popen(["sleep", "60"])
    handle = ProcessHandle(process.pid)
    assert not os.get_inheritable(handle.fd)
    handle.send_signal(signal.SIGTERM)
    assert process.wait(LONG) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        handle.send_signal(signal.SIGTERM)
    handle.close()


def test_an_untraceable_processs_end_is_not_taken_for_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a zombie that was killed, of a user with more rights than the crash handler; no kernel that tells otherwise
    code = "import sys\nfrom sglang_crashkit.kernel.pidfd import ProcessHandle\n"
    code += "ProcessHandle._from_kernel = lambda self: None\n"
    code += "print(ProcessHandle(int(sys.argv[1])).exit_status())"
    with subprocess.Popen(["sleep", "60"]) as process:
        process.kill()
        wait_until(lambda: (stat := procfs.read_stat(process.pid)) and stat.state == "Z", "it is a zombie")
        said = run_unprivileged(code, str(process.pid))
    # Where this test has no more rights than the handler, the zombie tells.
    expected = ExitStatus() if os.geteuid() == 0 else ExitStatus(signal="SIGKILL")
    assert said == f"{expected}\n"


def test_one_that_is_reaped_while_it_is_looked_at_is_not_taken_for_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    # A process that may not be traced: its status reads 0, and inspecting it is refused until it is gone.
    read_stat, may_inspect = procfs.read_stat, procfs.may_inspect

    def may_inspect_after_reaping(pid: int) -> bool:
        os.waitpid(pid, 0)
        return may_inspect(pid)

    def read_stat_without_status(pid: int) -> procfs.ProcStat | None:
        stat = read_stat(pid)
        return stat and replace(stat, wait_status=0)

    pid = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
    handle = ProcessHandle(pid)
    os.kill(pid, signal.SIGKILL)
    assert handle.has_exited(LONG)
    monkeypatch.setattr(procfs, "may_inspect", may_inspect_after_reaping)
    monkeypatch.setattr(procfs, "read_stat", read_stat_without_status)
    # Newer kernels also report how a reaped process ended.
    assert handle.exit_status() in (ExitStatus(), ExitStatus(signal="SIGKILL"))
    handle.close()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, ExitStatus(code=0)),
        (3, ExitStatus(code=3)),
        (-9, ExitStatus(signal="SIGKILL")),
        (-46, ExitStatus(signal="SIG46")),
    ],
)
def test_a_reaped_process_keeps_its_status_and_no_descriptor(code: int, status: ExitStatus) -> None:
    before = descriptors()
    handle = ProcessHandle.of_reaped(os.getpid(), ExitStatus.from_exit_code(code))
    assert descriptors() == before
    assert handle.has_exited()
    assert handle.exit_status() == status
    # This process has its pid now, and does not concern it.
    with pytest.raises(OSError, match="Bad file descriptor"):
        handle.send_signal(signal.SIGTERM)
    handle.close()
