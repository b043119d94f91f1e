"""What is for operators, on one real server: the doctor, metrics, and who is told."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from integration.scenario import SCHEDULER, serving
from lanelib.lanes import Lane
from lanelib.servers import Server
from unit.support.waiting import wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

#: A folder has such a name only when its incident is whole.
KILLED = "crash/*/incidents/[0-9]*-killed-*"


class Operated(NamedTuple):
    """A server, and the folder in which those are told of it."""

    server: Server
    folder: Path


@pytest.fixture(scope="module")
def operated(lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """A server that has answered a request."""
    folder = tmp_path_factory.mktemp("operated")
    # The last argument of the command is the incident's folder.
    copies = f'cat > {folder}/copy; cp "$0"/incident.json {folder}/copy.json'
    env = {
        "SGLANG_CRASHKIT_METRICS_FILE": str(folder / "kit.prom"),
        "SGLANG_CRASHKIT_ON_INCIDENT": f"sh -c {shlex.quote(copies)}",
    }
    with serving(lane, folder / "crash", "--enable-metrics", env=env) as server:
        server.generate("Hello", max_new_tokens=4)
        yield Operated(server, folder)


def values(text: str) -> dict[str, float]:
    """Return the kit's samples by name, with the sum of each."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("sglang_crashkit_"):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def whole_json(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing before it is whole."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found


def test_sglangs_own_metrics_tell_of_the_kit(operated: Operated) -> None:
    sign = "sglang_crashkit_rank_last_sign_timestamp_seconds"
    text = wait_until(
        lambda: text if sign in (text := operated.server.ask("metrics").decode()) else "", "a sign is told", 60
    )
    # SGLang's own are there as before.
    assert "sglang:" in text
    found = values(text)
    assert found["sglang_crashkit_handler_up"] == 1.0


def test_the_file_says_the_same_to_node_exporter(operated: Operated) -> None:
    metrics_file = operated.folder / "kit.prom"
    wait_until(metrics_file.exists, "the file is there", 60)
    found = values(metrics_file.read_text())
    assert found["sglang_crashkit_handler_up"] == 1.0
    assert found["sglang_crashkit_last_incident_timestamp_seconds"] == 0.0


def test_the_doctor_finds_nothing_wrong(lane: Lane, operated: Operated) -> None:
    command = [lane.python, "-m", "sglang_crashkit", "doctor", "--pid", str(operated.server.pid), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = json.loads(done.stdout)
    problems = [finding for finding in told["findings"] if finding["level"] == "problem"]
    assert (done.returncode, problems) == (0, [])
    words = {finding["topic"]: finding["words"] for finding in told["findings"]}
    assert f"server {operated.server.pid} is watched by crash handler" in words["server"]
    topics = {finding["topic"]: finding["level"] for finding in told["findings"]}
    assert (topics["kit"], topics["py-spy"]) == ("ok", "ok")


def test_a_crash_is_told_of(operated: Operated) -> None:
    os.kill(operated.server.pid_of(SCHEDULER), signal.SIGKILL)
    document = wait_until(lambda: whole_json(operated.folder / "copy.json"), "the command ran", 60)
    (incident,) = operated.folder.glob(KILLED)
    assert document == json.loads((incident / "incident.json").read_text())
    summary = (operated.folder / "copy").read_text()
    assert summary == (incident / "summary.md").read_text()
    assert "Hello" not in summary
    wait_until((incident / "on_incident.json").exists, "the outcome is noted", 60)
    assert json.loads((incident / "on_incident.json").read_text())["done"] is True
    last = wait_until(
        lambda: (
            "sglang_crashkit_handler_up" in (text := (operated.folder / "kit.prom").read_text())
            and values(text)["sglang_crashkit_handler_up"] == 0
            and text
        ),
        "the handler has left",
        60,
    )
    assert 'kind="killed"' in last
