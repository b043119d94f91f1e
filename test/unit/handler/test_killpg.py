"""A scheduler that was asked to kill its group on an exception waits for the dump and the incident."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from unit.handler.driver import HOST, Server
from unit.waiting import LONG, wait_until

Start = Callable[..., Server]
FLAG = "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION"
DUMP_SECS = 1.0


@pytest.mark.parametrize("dump_secs", [0.0, DUMP_SECS])
def test_without_a_handler_the_dump_is_written_before_the_kill(start_server: Start, dump_secs: float) -> None:
    server = start_server(environ={FLAG: "1"}, dump_secs=dump_secs)
    server.handler.send_signal(signal.SIGKILL)
    server.wait_for_handler()
    server.say("tell scheduler_TP1 raise odd")
    server.process.wait(LONG)
    assert server.crash_folder is not None
    assert (server.crash_folder / HOST / "crash_dump.pkl").read_bytes() == b"requests"
    wait_until(lambda: not any(map(_alive, server.ranks.values())), "all ranks are gone")


def test_a_server_that_does_not_end_is_killed(start_server: Start) -> None:
    environ = {FLAG: "1", "SGLANG_CRASHKIT_BUDGET_SECS": "1"}
    server = start_server(environ=environ, ends_after_dump=False)
    server.handler.send_signal(signal.SIGKILL)
    server.wait_for_handler()
    server.say("tell scheduler_TP1 raise odd")
    assert server.process.wait(LONG) == -signal.SIGKILL


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
