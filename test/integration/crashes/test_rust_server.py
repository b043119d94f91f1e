"""The Rust server, whose requests no Python process but the first rank ever has."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from integration.crashes.whole import journaled
from integration.faults import TP1
from integration.scenario import EXIT_TIMEOUT_S, IN_FLIGHT_S, PATIENCE, Sent, ask, journaled_rids, serving
from sglang_crashkit.incident.exit_status import ServerExit
from sglang_crashkit.incident.store import find_incidents
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]


def test_a_killed_rank_is_told_with_the_requests(tmp_path: Path) -> None:
    env = PATIENCE | {"SGLANG_RUST_SERVER": "1"}
    sent = [Sent(f"in-flight-{number}", f"Once upon a time there were {number}") for number in range(2)]
    with serving("0.5.23", tmp_path, tp=2, env=env) as server:
        for request in sent:
            ask(server, request)
        wait_until(lambda: len(journaled_rids(server.pid)) == len(sent), "the requests are under way", IN_FLIGHT_S)
        os.kill(server.pid_of(TP1), signal.SIGKILL)
        status = server.popen.wait(EXIT_TIMEOUT_S)
    (stored,) = find_incidents(tmp_path)
    assert status == ServerExit.KILLED
    assert stored.document["verdict"]["first_failure"]["title"] == TP1
    # The Rust server makes each id its own by what it appends.
    found = journaled(stored.document, stored.path, "unfinished")
    assert {rid.partition("#")[0]: text for rid, text in found.items()} == {one.rid: one.text for one in sent}
