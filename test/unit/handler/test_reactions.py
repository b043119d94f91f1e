"""The handler's reaction to single messages, in this process and in a fixed order."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.core.channel import Mailbox, Message
from sglang_crashkit.core.incident_store import find_incidents
from sglang_crashkit.core.settings import Settings
from sglang_crashkit.handler.loop import CrashHandler
from sglang_crashkit.handler.place import Place
from unit.handler.launching import LAUNCHER, Case
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
PEER = {"role": "prefill", "address": "10.0.0.1:8998", "sign": "refused", "waiting": [], "count": 0}


@pytest.mark.parametrize(
    ("event", "fields", "kind"),
    [
        ("peer_lost", PEER, "peer_lost"),
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
        assert found["killed"]["peers"] == []
        assert found[kind]["complete"] is True
        wait_until(lambda: handler._current.act_on_time() or process.poll() is not None, "the server is told")
        assert process.poll() == 7
        for one in handler._tree:
            one.handle.close()
        handler._selector.close()
