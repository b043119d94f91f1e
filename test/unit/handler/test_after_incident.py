from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.handler import after_incident
from sglang_crashkit.handler.after_incident import PAGE, Child, HtmlPage, Notices
from sglang_crashkit.notifications.plan import OUTCOME
from unit.support.server_driver import Server
from unit.support.stored import make_incident
from unit.support.waiting import wait_until


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CRASHKIT_ON_INCIDENT", "true")


@pytest.fixture
def incidents(tmp_path: Path) -> Path:
    (tmp_path / "incidents").mkdir()
    return tmp_path / "incidents"


def told(incident: Path) -> bool:
    return (incident / OUTCOME).exists()


def test_nothing_is_started_where_nothing_is_wanted(incidents: Path) -> None:
    after = Notices()
    after.begin(make_incident(incidents))
    assert after._children == []


@pytest.mark.usefixtures("wanted")
def test_the_last_hours_incidents_are_told_of_once(incidents: Path) -> None:
    old, recent = make_incident(incidents), make_incident(incidents, seconds=time.time() - 60)
    unfinished = make_incident(incidents, seconds=time.time() - 30, publish=False)
    after = Notices()
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


@pytest.mark.usefixtures("wanted")
def test_the_newest_comes_first_and_the_rest_wait_for_room(incidents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Path] = []
    monkeypatch.setattr(Notices, "_start", lambda self, folder: started.append(folder))
    monkeypatch.setattr("sglang_crashkit.handler.after_incident._MAX_AT_ONCE", 1)
    oldest, newest = (make_incident(incidents, seconds=time.time() - secs) for secs in (60, 30))
    quiet = make_incident(incidents, seconds=time.time() - 10, kind="snapshot")
    after = Notices()
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


@pytest.mark.usefixtures("wanted")
def test_a_process_that_cannot_be_started_costs_nothing(incidents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent")
    after = Notices()
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


#: Starts another, and waits for it.
WAITS = """
import subprocess, sys
other = subprocess.Popen(["sleep", "600"])
open(sys.argv[1], "w").write(str(other.pid))
other.wait()
"""


@pytest.mark.parametrize(
    ("code", "problem"), [("pass", ""), ("raise SystemExit(3)", "ended with status 3")], ids=["well", "failed"]
)
def test_how_it_ended_is_known(code: str, problem: str) -> None:
    child = Child([sys.executable, "-c", code])
    child.wait()
    assert child.has_ended()
    assert child.problem == problem


def test_at_its_deadline_all_that_it_started_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    child = Child([sys.executable, "-c", WAITS, str(file)], 3.0)
    wait_until(lambda: file.exists() and file.read_text(), "it has started another")
    child.wait()
    assert child.has_ended()
    assert child.problem == "did not end within 3 s"
    wait_until(lambda: not Path(f"/proc/{file.read_text()}").exists(), "that is gone, too")


def test_one_that_is_left_works_on(tmp_path: Path) -> None:
    file = tmp_path / "done"
    Child([sys.executable, "-c", "import sys; open(sys.argv[1], 'w')", str(file)]).leave()
    wait_until(file.exists, "it is done")


#: Says who it is in the file that it is to write, and hangs.
HANGS = (sys.executable, "-c", "import os, sys, time; open(sys.argv[2], 'w').write(str(os.getpid())); time.sleep(1000)")
FAILS = (sys.executable, "-c", "raise SystemExit('out of paper')")


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_incident, "_PROGRAM", HANGS)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """What the page needs of an incident that is finished."""
    path = make_incident(tmp_path)
    folder = SimpleNamespace(charge=lambda name, size: None)
    return SimpleNamespace(finished=True, problem="", path=path, folder=folder, incident=SimpleNamespace(id="0123abcd"))


def pid_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text(), "it has begun")
    return int(path.read_text())


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_child_makes_the_page_beside_the_incident(run: Any) -> None:
    page = HtmlPage(True)
    page.begin(run)
    page.wait()
    written = run.path / PAGE
    assert written.read_text().startswith("<!doctype html>")
    assert written.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("hangs")
def test_by_default_nothing_is_made(run: Any) -> None:
    page = HtmlPage(False)
    page.begin(run)
    page.wait()
    assert not (run.path / PAGE).exists()


@pytest.mark.usefixtures("hangs")
@pytest.mark.parametrize("fields", [{"finished": False}, {"problem": "the disk is full"}])
def test_an_incident_that_is_not_whole_on_disk_has_none(run: Any, fields: dict[str, Any]) -> None:
    vars(run).update(fields)
    page = HtmlPage(True)
    page.begin(run)
    page.wait()
    assert not (run.path / PAGE).exists()


@pytest.mark.usefixtures("hangs")
def test_one_that_hangs_is_killed_at_its_deadline(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(after_incident, "_PAGE_SECS", 0.5)
    before = (run.path / "incident.json").read_bytes()
    page = HtmlPage(True)
    page.begin(run)
    page.wait()
    assert "did not end within 0.5 s" in caplog.text
    assert is_gone(pid_in(run.path / PAGE))
    assert (run.path / "incident.json").read_bytes() == before


def test_one_that_fails_is_logged_and_no_more(
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(after_incident, "_PROGRAM", FAILS)
    page = HtmlPage(True)
    page.begin(run)
    page.wait()
    assert "ended with status 1" in caplog.text
    assert "out of paper" in capfd.readouterr().err


@pytest.mark.usefixtures("hangs")
def test_it_is_made_once_unless_something_was_added(run: Any) -> None:
    page = HtmlPage(True)
    page.begin(run)
    first = pid_in(run.path / PAGE)
    page.begin(run)
    assert not is_gone(first)
    (run.path / PAGE).unlink()
    page.begin(run, again=True)
    assert is_gone(first)
    second = pid_in(run.path / PAGE)
    page.cancel()
    assert is_gone(second)


@pytest.mark.usefixtures("hangs")
def test_without_room_there_is_none(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    def charge(name: str, size: int) -> None:
        raise OSError("there is no room")

    run.folder.charge = charge
    page = HtmlPage(True)
    page.begin(run)
    page.wait()
    assert "there is no room" in caplog.text
    assert not (run.path / PAGE).exists()


def test_a_crash_leaves_a_page_with_its_end(start_server: Callable[..., Server]) -> None:
    server = start_server(environ={"SGLANG_CRASHKIT_HTML": "1"})
    server.kill("scheduler_TP1")
    incident = server.wait_for_the_end()
    assert incident is not None
    page = (incident.path / PAGE).read_text()
    assert "server exited" in page
    assert "SIGKILL" in page
