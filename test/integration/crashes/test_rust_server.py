"""The Rust server, whose requests no Python process but the first rank ever has."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from integration.crashes.whole import assert_whole
from integration.faults import SIGKILLED, TP1
from integration.scenario import PATIENCE, wreck
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from sglang_crashkit.incident.exit_status import ServerExit

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]


def test_a_killed_rank_is_told_with_the_requests(tmp_path: Path) -> None:
    options = ["--crash-dump-folder", str(tmp_path)]
    env = PATIENCE | {"SGLANG_RUST_SERVER": "1"}
    with Server.start(ensure_lane("0.5.23"), tp=2, extra_args=options, env=env) as server:
        server.wait_ready()
        left = wreck(server, tmp_path, lambda server: os.kill(server.pid_of(TP1), signal.SIGKILL))
    assert (left.status, left.left) == (ServerExit.KILLED, [])
    assert_whole(left, {TP1: SIGKILLED})
