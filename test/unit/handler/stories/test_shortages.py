"""A crash handler that lacks something of its own says so once, in its log and the server's, and does what it can."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from sglang_crashkit.handler.notices import Shortages
from unit.support.server_driver import Start
from unit.support.waiting import wait_until

DESCRIPTORS = "the crash handler has no file descriptors left"


def test_without_descriptors_it_says_so_once_and_writes_the_incident(start_server: Start) -> None:
    server = start_server()
    pid = server.handler.pid
    descriptors = Path(f"/proc/{pid}/fd")
    wait_until(lambda: len(list(descriptors.iterdir())) > 48, "it holds some back")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(list(descriptors.iterdir())), 4096))
    server.kill("scheduler_TP1")
    incident = server.wait_for_the_end()
    assert incident.document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    log = (server.crash_folder / "test-host" / "crash_handler.log").read_text()
    assert log.count(f"ERROR {DESCRIPTORS}") == 1
    assert "ulimit -n" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "file descriptors"),
        (OSError(errno.ENFILE, "Too many open files in system"), "file descriptors on this machine"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "processes or threads"),
        (RuntimeError("can't start new thread"), "processes or threads"),
        (OSError(errno.ENOSPC, "No space left on device"), "room on a disk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "room in a disk quota"),
    ],
    ids=lambda value: str(value),
)
def test_whatever_runs_out_is_told_once(error: Exception, what: str) -> None:
    told = list[str]()
    shortages = Shortages(told.append)
    assert shortages.note(error)
    assert shortages.note(error)
    (said,) = told
    assert said.startswith(f"the crash handler has no {what} left: incidents may lack evidence; next: ")


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "No such file"), RuntimeError("x"), ValueError("x")])
def test_another_error_is_no_shortage(error: Exception) -> None:
    told = list[str]()
    assert not Shortages(told.append).note(error)
    assert told == []


def test_the_limit_is_raised_as_far_as_it_may_be(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
        Shortages(print).raise_limit()
        os._exit(0 if resource.getrlimit(resource.RLIMIT_NOFILE) == (512, 512) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
