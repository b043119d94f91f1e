"""A scheduler that was asked to kill its group on an exception waits for the dump and the incident."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from unit.handler.driver import HOST, Server
from unit.waiting import wait_until

Start = Callable[..., Server]
FLAG = "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION"
DUMP_SECS = 1.0


def test_the_group_is_killed_when_the_requests_are_saved_and_the_incident_is_whole(start_server: Start) -> None:
    # The server does not end by itself: only the failing rank does it.
    server = start_server(environ={FLAG: "1"}, dump_secs=DUMP_SECS, ends_after_dump=False)
    began = time.monotonic()
    server.say("tell scheduler_TP1 raise odd")
    stored = server.wait_for_the_end()
    assert time.monotonic() - began >= DUMP_SECS
    assert server.process.returncode == -signal.SIGKILL
    assert stored.finished
    assert stored.document["complete"] is True
    assert stored.document["verdict"]["first_failure"]["title"] == "sglang::scheduler_TP1"
    assert stored.document["requests"]["path"] is not None
    assert server.crash_folder is not None
    assert (server.crash_folder / HOST / "crash_dump.pkl").read_bytes() == b"requests"


@pytest.mark.story
def test_without_the_flag_no_group_is_killed(start_server: Start) -> None:
    server = start_server(ends_after_dump=False)
    server.say("tell scheduler_TP1 raise odd")
    assert server.incident().document
    time.sleep(0.3)
    assert server.process.poll() is None
    assert server.ask("reap") == "sigquit"


@pytest.mark.parametrize("dump_secs", [0.0, DUMP_SECS])
def test_without_a_handler_the_dump_is_written_before_the_kill(start_server: Start, dump_secs: float) -> None:
    server = start_server(environ={FLAG: "1"}, dump_secs=dump_secs)
    server.handler.send_signal(signal.SIGKILL)
    server.wait_for_handler()
    server.say("tell scheduler_TP1 raise odd")
    server.process.wait(30)
    assert server.crash_folder is not None
    assert (server.crash_folder / HOST / "crash_dump.pkl").read_bytes() == b"requests"
    wait_until(lambda: not any(map(_alive, server.ranks.values())), "all ranks are gone")


def test_without_a_handler_a_server_that_does_not_end_is_killed_after_the_budget(start_server: Start) -> None:
    environ = {FLAG: "1", "SGLANG_CRASHKIT_BUDGET_SECS": "1"}
    server = start_server(environ=environ, ends_after_dump=False)
    server.handler.send_signal(signal.SIGKILL)
    server.wait_for_handler()
    server.say("tell scheduler_TP1 raise odd")
    assert server.process.wait(30) == -signal.SIGKILL


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
