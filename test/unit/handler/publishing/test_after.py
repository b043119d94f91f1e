from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_crashkit.handler.publishing.after import AfterIncident
from sglang_crashkit.notifications.plan import OUTCOME
from unit.handler.driver import Server
from unit.stored import make_incident
from unit.waiting import wait_until

TELL = {"SGLANG_CRASHKIT_ON_INCIDENT": "true"}


@pytest.fixture
def incidents(tmp_path: Path) -> Path:
    (tmp_path / "incidents").mkdir()
    return tmp_path / "incidents"


def told(incident: Path) -> bool:
    return (incident / OUTCOME).exists()


def test_nothing_is_started_where_nothing_is_wanted(incidents: Path) -> None:
    after = AfterIncident({})
    after.begin(make_incident(incidents))
    assert after._children == []


def test_the_last_hours_incidents_are_told_of_once(incidents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TELL.items():
        monkeypatch.setenv(name, value)
    old, recent = make_incident(incidents), make_incident(incidents, seconds=time.time() - 60)
    unfinished = make_incident(incidents, seconds=time.time() - 30, publish=False)
    after = AfterIncident()
    after.catch_up(incidents)
    after.act_on_time()
    wait_until(lambda: told(recent), "it is told of")
    for child in after._children:
        child.wait()
    after.catch_up(incidents)
    after.act_on_time()
    assert after._children == []
    assert not told(old)
    assert not told(unfinished)


def test_the_newest_comes_first_and_the_rest_wait_for_room(incidents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Path] = []
    monkeypatch.setattr(AfterIncident, "_start", lambda self, folder: started.append(folder))
    monkeypatch.setattr("sglang_crashkit.handler.publishing.after._MAX_AT_ONCE", 1)
    oldest, newest = (make_incident(incidents, seconds=time.time() - secs) for secs in (60, 30))
    quiet = make_incident(incidents, seconds=time.time() - 10, kind="snapshot")
    after = AfterIncident(TELL)
    after.catch_up(incidents)
    assert started == []
    after._children.append(Sleeping())
    after.act_on_time()
    assert started == []
    after._children.clear()
    after.act_on_time()
    assert started == [newest, oldest]
    assert quiet not in started


class Sleeping:
    """Stands for a child that is at work."""

    def has_ended(self) -> bool:
        return False


def test_a_process_that_cannot_be_started_costs_nothing(incidents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent")
    after = AfterIncident(TELL)
    after.begin(make_incident(incidents))
    after.close()
    assert after._children == []


def test_a_crash_is_told_of_by_the_users_command(start_server: Callable[..., Server], tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    server = start_server(environ={"SGLANG_CRASHKIT_ON_INCIDENT": f"cp /dev/stdin {copy}"})
    server.kill("scheduler_TP1")
    incident = server.incident()
    wait_until(lambda: told(incident.path), "the command was run")
    assert json.loads(copy.read_text())["id"] == incident.document["id"]
    assert json.loads((incident.path / OUTCOME).read_text())["command"]["done"] is True
