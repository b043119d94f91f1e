"""`sglang-crashkit collect --when-unhealthy` on a real, unpatched server, one rank of which stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integration.scenario import RELEASES
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

#: In seconds, on a busy machine.
COLLECT_S = 300.0


@pytest.mark.parametrize("release", RELEASES)
def test_a_stopped_rank_is_collected_and_named(tmp_path: Path, release: str) -> None:
    env = {"SGLANG_HEALTH_CHECK_TIMEOUT": "3"}
    with Server.start(ensure_lane(release, pristine=True), tp=2, env=env) as server:
        server.wait_ready()
        said = tmp_path / "said"
        words = [sys.executable, "-m", "sglang_crashkit", "collect", "--json", "-o", str(tmp_path / "out")]
        with (
            said.open("w") as stderr,
            subprocess.Popen(
                [*words, "--when-unhealthy", f"http://127.0.0.1:{server.port}", "--interval", "1"],
                stdout=subprocess.PIPE,
                stderr=stderr,
            ) as collect,
        ):
            wait_until(lambda: "it is healthy" in said.read_text(), "its health was asked for")
            rank = server.pid_of("sglang::scheduler_TP1")
            os.kill(rank, signal.SIGSTOP)
            try:
                output, _none = collect.communicate(timeout=COLLECT_S)
            finally:
                collect.kill()
                os.kill(rank, signal.SIGCONT)
        assert collect.returncode == 0, said.read_text()
        assert "is unhealthy: its health check" in said.read_text()
        document = json.loads(output)
        assert document["verdict"]["headline"].startswith("TP1 is stopped")
        assert len([*(tmp_path / "out").glob("pyspy_*.txt")]) == 2
