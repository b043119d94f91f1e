"""The handler's reaction to single messages, in this process and in a fixed order."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.handler.folders import Place
from sglang_crashkit.handler.loop import CrashHandler
from sglang_crashkit.incident.store import find_incidents
from sglang_crashkit.protocol import Mailbox, Message
from sglang_crashkit.settings import Settings
from unit.handler.launching import LAUNCHER, Case, launch
from unit.waiting import child, wait_until


def test_a_time_that_is_no_time_is_now(launching: Case) -> None:
    launching.fail({}, time=10**400)
    assert launching.verdict().first_failure is None


def test_a_message_that_cannot_be_taken_in_does_not_end_the_handler(
    launching: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(launching.handler._reactions, "take", fail)
    message = Message("teardown", {}, launching.titled, os.getuid(), None)
    monkeypatch.setattr(launching.handler._mailbox, "receive", lambda **_: [message])
    launching.handler._take_messages()
    assert "message 'teardown'" in caplog.text
    assert "unforeseen" in caplog.text


def test_what_strangers_say_is_ignored_and_told_ever_more_rarely(
    launching: Case, caplog: pytest.LogCaptureFixture
) -> None:
    message = Message("x" * 500, {}, os.getpid(), os.getuid(), None)
    for _ in range(1234):
        launching.handler._reactions.take(message, None)
    told = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert [text[text.index("ignored") :] for text in told] == [
        f"ignored ({count} so far)" for count in (1, 10, 100, 1000)
    ]
    assert max(map(len, told)) < 300


#: A main process that ends with status 7 when it is told of a death, and a rank.
SERVING = LAUNCHER.replace("import ctypes", "signal.signal(signal.SIGQUIT, lambda *_: os._exit(7))\nimport ctypes")


@pytest.mark.parametrize(
    ("event", "fields", "kind"),
    [
        ("watchdog_timeout", {"name": "Scheduler", "soft": True}, "hang"),
        ("stacks_wanted", {}, "snapshot"),
    ],
)
def test_a_death_while_an_incident_of_a_server_that_goes_on_is_opened_ends_the_server(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch, event: str, fields: dict[str, Any], kind: str
) -> None:
    settings = dataclasses.replace(Settings.from_environ({}), stacks=False)
    place = Place(host_folder=tmp_path / "host", spool=tmp_path / "spool", runtime=short_folder)
    with child(SERVING) as process, Mailbox.bind(short_folder / "sock") as receiver:
        handler = CrashHandler(process.pid, Mailbox(receiver), place, settings)
        launch(handler, int(process.first_line.split()[0]))
        handler.look()
        (rank,) = (one for one in handler._tree if one.title == "sglang::scheduler_TP0")

        def look_and_kill() -> None:
            if not rank.handle.has_exited():
                os.kill(rank.pid, signal.SIGKILL)
                wait_until(rank.handle.has_exited, "the rank is dead")

        monkeypatch.setattr(handler, "look", look_and_kill)
        message = Message(event, fields, process.pid, os.getuid(), None)
        handler._reactions.take(message, handler._tree.root)
        found = {stored.document["kind"]: stored.document for stored in find_incidents(tmp_path) if stored.document}
        assert set(found) == {kind, "killed"}
        assert found["killed"]["verdict"]["first_failure"]["pid"] == rank.pid
        assert found[kind]["complete"] is True
        wait_until(lambda: handler._current.act_on_time() or process.poll() is not None, "the server is told")
        assert process.poll() == 7
        for one in handler._tree:
            one.handle.close()
        handler._selector.close()


# -- what is finished is never joined

TIMEOUT = {"name": "Manager", "silent_secs": 20.0, "soft": True}


def tell(case: Case, event: str, pid: int, **fields: Any) -> None:
    """Let a process of the server say something."""
    case.handler._reactions.take(Message(event, fields, pid, os.getuid(), None), case.handler._tree.get(pid))


def documents(tmp_path: Path) -> list[dict[str, Any]]:
    """Return the incidents, oldest first."""
    return [stored.document for stored in find_incidents(tmp_path) if stored.document][::-1]


def events_of(document: dict[str, Any]) -> list[str]:
    return [entry["event"] for entry in document["timeline"]]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_watchdog_of_another_process_is_an_incident_of_its_own(
    launching: Case, tmp_path: Path, is_whole: bool
) -> None:
    root, current = launching.handler._tree.root, launching.handler._current
    # GIVEN the tokenizer manager's watchdog, which trips first where a start is slow
    tell(launching, "watchdog_timeout", root.pid, **TIMEOUT)
    if is_whole:
        current.finish_observed()
    # WHEN that of the process trips which is really stuck
    tell(launching, "watchdog_timeout", launching.titled, **TIMEOUT)
    current.finish_observed()
    # THEN each has its own incident, which names it
    found = documents(tmp_path)
    assert [document["trigger"]["pid"] for document in found] == [root.pid, launching.titled]
    assert [document["verdict"]["first_failure"]["pid"] for document in found] == [root.pid, launching.titled]
    for document in found:
        assert document["complete"]
        assert events_of(document).count("watchdog_timeout") == events_of(document).count("photographed") == 1


@pytest.mark.parametrize(
    ("event", "fields", "kind"),
    [
        ("watchdog_timeout", TIMEOUT, "hang"),
        ("watchdog_timeout", TIMEOUT | {"soft": False}, "hang"),
        ("stacks_wanted", {}, "snapshot"),
        ("exception", {"message": "ValueError: 1"}, "exception"),
        ("crash_dump_begun", {}, "child_failure"),
        ("crash_dump_ended", {"reason": "no"}, "child_failure"),
        ("launch_failed", {"message": "died"}, "failed_start"),
        ("child_failed", {"message": "died"}, "child_failure"),
    ],
)
def test_nothing_joins_a_finished_incident_of_a_server_that_went_on(
    launching: Case, tmp_path: Path, event: str, fields: dict[str, Any], kind: str
) -> None:
    tell(launching, "watchdog_timeout", launching.titled, **TIMEOUT)
    launching.handler._current.finish_observed()
    (before,) = documents(tmp_path)
    tell(launching, event, launching.titled, **fields)
    launching.handler._current.finish()
    first, second = documents(tmp_path)
    assert first == before
    assert (second["kind"], second["trigger"]["pid"]) == (kind, launching.titled)
    assert "photographed" in events_of(second)


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("exception", {"message": "RuntimeError: Connection closed by peer"}),
        ("launch_failed", {"message": "died"}),
        ("child_failed", {"message": "died"}),
    ],
)
def test_what_follows_while_the_server_ends_is_noted_and_changes_no_verdict(
    launching: Case, tmp_path: Path, event: str, fields: dict[str, Any]
) -> None:
    current = launching.handler._current
    tell(launching, "exception", launching.starting, message="ValueError: the first")
    current.finish()
    (before,) = documents(tmp_path)
    tell(launching, event, launching.titled, **fields)
    (after,) = documents(tmp_path)
    assert after["verdict"] == before["verdict"]
    assert [report["evidence"] for report in after["processes"]] == [
        report["evidence"] for report in before["processes"]
    ]
    assert current.run is not None
    assert current.run.incident.timeline[-1]["event"] == event


def test_a_watchdog_after_a_crash_that_did_not_end_the_server_is_an_incident_of_its_own(
    launching: Case, tmp_path: Path
) -> None:
    tell(launching, "exception", launching.starting, message="ValueError: the first")
    launching.handler._current.finish()
    tell(launching, "watchdog_timeout", launching.titled, **TIMEOUT)
    launching.handler._current.finish_observed()
    assert [document["kind"] for document in documents(tmp_path)] == ["exception", "hang"]


def test_the_record_of_a_rank_that_raised_too_late_is_kept(launching: Case, tmp_path: Path) -> None:
    tell(launching, "exception", launching.starting, message="ValueError: the first")
    launching.handler._current.finish()
    record = tmp_path / "spool" / "record.json"
    record.parent.mkdir(exist_ok=True)
    record.write_text("{}")
    tell(launching, "exception", launching.titled, message="RuntimeError: reset by peer", record=str(record))
    (stored,) = find_incidents(tmp_path)
    assert not record.exists()
    (kept,) = (stored.path / "ranks").iterdir()
    assert kept.read_text() == "{}"
