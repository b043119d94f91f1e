"""`sglang-crashkit collect --when-unhealthy` on a real, unpatched server, one rank of which stops."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from integration.faults import TP1, UNHEALTHY
from integration.scenario import stopped
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

#: In seconds, on a busy machine.
COLLECT_S = 300.0


def test_a_stopped_rank_is_collected_and_named(tmp_path: Path, release: str) -> None:
    with Server.start(ensure_lane(release, pristine=True), tp=2, env=UNHEALTHY) as server:
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
            rank = server.pid_of(TP1)
            with stopped(rank):
                try:
                    output, _none = collect.communicate(timeout=COLLECT_S)
                finally:
                    collect.kill()
        assert collect.returncode == 0, said.read_text()
        assert "is unhealthy: its health check" in said.read_text()
        document = json.loads(output)
        assert document["verdict"]["headline"].startswith("TP1 is stopped")
        assert len([*(tmp_path / "out").glob("pyspy_*.txt")]) == 2
