"""What is for operators, on one real server: the doctor, metrics in its own /metrics and in a file, and who is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from integration.scenario import RELEASES
from lanelib.lanes import ensure_lane
from lanelib.servers import Server
from unit.notifications.hook import Hook, hook
from unit.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


class Operated(NamedTuple):
    """A server, and who is told of it."""

    server: Server
    python: Path
    metrics_file: Path
    copy: Path
    hook: Hook
    crash_folder: Path


@pytest.fixture(scope="module", params=RELEASES)
def operated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """A server that has answered a request."""
    folder = tmp_path_factory.mktemp("operated")
    lane = ensure_lane(request.param)
    with hook(200) as told:
        env = {
            "SGLANG_CRASHKIT_METRICS_FILE": str(folder / "kit.prom"),
            "SGLANG_CRASHKIT_ON_INCIDENT": f"cp /dev/stdin {folder / 'copy.json'}",
            "SGLANG_CRASHKIT_WEBHOOK": told.url,
            "SGLANG_CRASHKIT_WEBHOOK_SECRET": "key",
        }
        arguments = ["--enable-metrics", "--crash-dump-folder", str(folder / "crash")]
        with Server.start(lane, extra_args=arguments, env=env) as server:
            server.wait_ready()
            server.generate("Hello", max_new_tokens=4)
            python = Path(lane.python)
            yield Operated(server, python, folder / "kit.prom", folder / "copy.json", told, folder / "crash")


def values(text: str) -> dict[str, float]:
    """Return the kit's samples by name, with the sum of each."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("sglang_crashkit_"):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def doctor(operated: Operated) -> tuple[int, dict[str, Any]]:
    command = [operated.python, "-m", "sglang_crashkit", "doctor", "--pid", str(operated.server.pid), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)


def test_sglangs_own_metrics_tell_of_the_kit(operated: Operated) -> None:
    step = "sglang_crashkit_rank_last_step_timestamp_seconds"
    text = wait_until(
        lambda: text if step in (text := operated.server.ask("metrics").decode()) else "", "a step is told", 60
    )
    # SGLang's own are there as before.
    assert "sglang:" in text
    found = values(text)
    assert found["sglang_crashkit_handler_up"] == 1.0
    assert found["sglang_crashkit_journal_bytes"] > 0


def test_the_file_says_the_same_to_node_exporter(operated: Operated) -> None:
    wait_until(operated.metrics_file.exists, "the file is there", 60)
    found = values(operated.metrics_file.read_text())
    assert found["sglang_crashkit_handler_up"] == 1.0
    assert "sglang_crashkit_disk_limit_bytes" in found


def test_the_doctor_finds_nothing_wrong(operated: Operated) -> None:
    status, told = doctor(operated)
    problems = [finding for finding in told["findings"] if finding["level"] == "problem"]
    assert (status, problems) == (0, [])
    (server,) = told["servers"]
    assert (server["pid"], server["mode"]) == (operated.server.pid, "server")
    assert server["handler"] is not None
    assert server["policy"]["died"]["ends"] is True
    topics = {finding["topic"]: finding["level"] for finding in told["findings"]}
    assert (topics["kit"], topics["release"], topics["py-spy"]) == ("ok", "ok", "ok")


def test_a_crash_is_told_of(operated: Operated) -> None:
    os.kill(operated.server.pid_of("sglang::scheduler"), signal.SIGKILL)
    document = json.loads(
        wait_until(lambda: operated.copy.exists() and operated.copy.read_text(), "the command ran", 60)
    )
    wait_until(lambda: operated.hook.bodies, "the hook was told", 60)
    (body,) = operated.hook.bodies
    assert json.loads(body)["id"] == document["id"]
    assert (document["kind"], json.loads(body)["cause"]) == ("killed", document["cause"]["class"])
    assert "Hello" not in body.decode()
    (incident,) = (operated.crash_folder).glob("*/incidents/*-killed-*")
    wait_until((incident / "notifications.json").exists, "the outcome is noted", 60)
    last = wait_until(
        lambda: (
            "sglang_crashkit_handler_up" in (text := operated.metrics_file.read_text())
            and values(text)["sglang_crashkit_handler_up"] == 0
            and text
        ),
        "the handler has left",
        60,
    )
    assert 'kind="killed"' in last
