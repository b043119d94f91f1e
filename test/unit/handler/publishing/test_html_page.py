from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_crashkit.handler.publishing.html_page import NAME, HtmlPage
from unit.handler.driver import Server
from unit.stored import make_incident
from unit.waiting import wait_until

#: Says who it is in the file that it is to write, and hangs.
HANGS = (sys.executable, "-c", "import os, sys, time; open(sys.argv[2], 'w').write(str(os.getpid())); time.sleep(1000)")
FAILS = (sys.executable, "-c", "raise SystemExit('out of paper')")


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
    written = run.path / NAME
    assert written.read_text().startswith("<!doctype html>")
    assert written.stat().st_mode & 0o777 == 0o600


def test_by_default_nothing_is_made(run: Any) -> None:
    page = HtmlPage(False, HANGS)
    page.begin(run)
    page.wait()
    assert not (run.path / NAME).exists()


@pytest.mark.parametrize("fields", [{"finished": False}, {"problem": "the disk is full"}])
def test_an_incident_that_is_not_whole_on_disk_has_none(run: Any, fields: dict[str, Any]) -> None:
    vars(run).update(fields)
    page = HtmlPage(True, HANGS)
    page.begin(run)
    page.wait()
    assert not (run.path / NAME).exists()


def test_one_that_hangs_is_killed_at_its_deadline(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = (run.path / "incident.json").read_bytes()
    page = HtmlPage(True, HANGS, deadline_secs=0.5)
    page.begin(run)
    page.wait()
    assert "did not end within 0.5 s" in caplog.text
    assert is_gone(pid_in(run.path / NAME))
    assert (run.path / "incident.json").read_bytes() == before


def test_one_that_fails_is_logged_and_no_more(
    run: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    page = HtmlPage(True, FAILS)
    page.begin(run)
    page.wait()
    assert "ended with status 1" in caplog.text
    assert "out of paper" in capfd.readouterr().err


def test_it_is_made_once_unless_something_was_added(run: Any) -> None:
    page = HtmlPage(True, HANGS)
    page.begin(run)
    first = pid_in(run.path / NAME)
    page.begin(run)
    assert not is_gone(first)
    (run.path / NAME).unlink()
    page.begin(run, again=True)
    assert is_gone(first)
    second = pid_in(run.path / NAME)
    page.cancel()
    assert is_gone(second)


def test_without_room_there_is_none(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    def charge(name: str, size: int) -> None:
        raise OSError("there is no room")

    run.folder.charge = charge
    page = HtmlPage(True, HANGS)
    page.begin(run)
    page.wait()
    assert "there is no room" in caplog.text
    assert not (run.path / NAME).exists()


def test_a_crash_leaves_a_page_with_its_end(start_server: Callable[..., Server]) -> None:
    server = start_server(environ={"SGLANG_CRASHKIT_HTML": "1"})
    server.kill("scheduler_TP1")
    incident = server.wait_for_the_end()
    assert incident is not None
    page = (incident.path / NAME).read_text()
    assert "server exited" in page
    assert "SIGKILL" in page
