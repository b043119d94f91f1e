"""One request that kills a real server, found among ordinary ones and reduced to the parameters that do it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lanelib.lanes import ensure_lane
from lanelib.servers import Server, command_of
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.replay.sender import send
from sglang_crashkit.watch.health import Address
from unit.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(1800)]

#: More than the tiny model has tokens.
POISON = {"return_logprob": True, "top_logprobs_num": 600}
ORDINARY = 60


ASKED: list[dict[str, Any]] = [
    {"rid": f"ordinary-{number}", "text": f"Once {number}", "sampling_params": {"max_new_tokens": 64}}
    for number in range(ORDINARY)
]
ASKED.insert(
    ORDINARY // 2,
    {"rid": "poison", "text": "hello", "sampling_params": {"max_new_tokens": 4, "temperature": 0.7}, **POISON},
)


def break_server(folder: Path) -> Path:
    """Serve ordinary requests and the poison, and return the crash folder."""
    crash_folder = folder / "crash"
    options = ["--crash-dump-folder", str(crash_folder), "--max-running-requests", "16"]
    with Server.start(ensure_lane("0.5.23"), extra_args=options) as server:
        server.wait_ready()
        address = Address("http", "127.0.0.1", server.port)
        threads = [threading.Thread(target=send, args=(address, body, 120.0), daemon=True) for body in ASKED]
        for thread in threads:
            thread.start()
        wait_until(
            lambda: crash_folder.is_dir() and any(one.finished for one in find_incidents(crash_folder)), "it broke"
        )
        server.popen.wait(timeout=120)
    return crash_folder


def test_a_poison_request_is_suspected_reduced_to_its_parameters_and_refused(tmp_path: Path) -> None:
    crash_folder = break_server(tmp_path)
    (incident,) = find_incidents(crash_folder)
    assert incident.document is not None
    assert "poison" in [suspect["rid"] for suspect in incident.document["suspects"]]
    lane = ensure_lane("0.5.23")
    command = " ".join(str(word) for word in command_of(lane, 0)).replace(" --port 0", "")
    argv = [
        sys.executable,
        "-m",
        "sglang_crashkit",
        "bisect",
        str(crash_folder),
        "--serve",
        command,
        "--json",
        "--quarantine",
    ]
    done = subprocess.run(
        [*argv, "-o", str(tmp_path / "out")],
        env=os.environ | lane.serve_env(),
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["rids"] == ["poison"]
    assert sorted(result["parameters"]) == sorted(POISON)
    assert result["prompt"] == "nothing"
    assert result["starts"] <= 10
    options, env = ["--crash-dump-folder", str(crash_folder)], {"SGLANG_CRASHKIT_QUARANTINE": "refuse"}
    with Server.start(lane, extra_args=options, env=env) as server:
        server.wait_ready()
        address = Address("http", "127.0.0.1", server.port)
        statuses = {body["rid"]: send(address, body, 120.0).status for body in ASKED}
    assert {rid for rid, status in statuses.items() if status == 422} == {"poison"}
    assert set(statuses.values()) == {200, 422}
