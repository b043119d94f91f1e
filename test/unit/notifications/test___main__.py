from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.capture.tools import ToolRun
from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.kernel.private_files import FolderLock
from sglang_crashkit.notifications import __main__ as sending
from sglang_crashkit.notifications.messages import signature_of
from sglang_crashkit.notifications.plan import COMMAND, COMMAND_SECS, OUTCOME, SECRET, WEBHOOK
from unit.notifications.hook import hook
from unit.support.stored import make_incident
from unit.support.waiting import LONG


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    (tmp_path / "incidents").mkdir()
    return make_incident(tmp_path / "incidents")


@pytest.fixture
def tell(incident: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Tell of the incident without waiting between tries, and return what came of it."""
    # A busy machine takes seconds to start an interpreter, and one that is late is tried again.
    monkeypatch.setattr(sending, "_REQUEST_SECS", LONG)

    def tell(**environ: str) -> dict[str, Any]:
        assert sending.tell(incident, dict(os.environ) | environ, lambda _secs: None)
        outcome: dict[str, Any] = json.loads((incident / OUTCOME).read_text())
        return outcome

    return tell


def test_a_hook_is_told_and_the_body_is_signed(tell: Callable[..., dict[str, Any]], incident: Path) -> None:
    with hook(200) as server:
        outcome = tell(**{WEBHOOK: server.url, SECRET: "key"})
    assert outcome["webhook"] == {"host": "127.0.0.1", "kind": "json", "tries": 1, "done": True, "status": 200}
    (body,), (headers,) = server.bodies, server.headers
    assert json.loads(body)["path"] == str(incident)
    timestamp = headers["X-Crashkit-Timestamp"]
    assert headers["X-Crashkit-Signature"] == f"sha256={signature_of('key', timestamp, body)}"
    assert abs(int(timestamp) - time.time()) < 60
    assert stat.S_IMODE((incident / OUTCOME).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("statuses", "tries", "done"),
    [((503, 200), 2, True), ((500,), 3, False), ((429, 204), 2, True), ((404, 200), 1, False), ((302, 200), 1, False)],
)
def test_a_failed_hook_is_tried_again_where_that_helps(
    tell: Callable[..., dict[str, Any]], statuses: tuple[int, ...], tries: int, done: bool
) -> None:
    with hook(*statuses) as server:
        outcome = tell(**{WEBHOOK: server.url})
    assert (outcome["webhook"]["tries"], outcome["webhook"]["done"]) == (tries, done)
    assert len(server.bodies) == tries
    assert len(set(server.bodies)) == 1


def test_a_hook_that_hangs_is_given_up(tell: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_REQUEST_SECS", 0.7)
    with hook(0) as server:
        outcome = tell(**{WEBHOOK: server.url})
    assert outcome["webhook"]["tries"] == 3
    assert "did not end within 0.7 s" in outcome["webhook"]["reason"]


def test_an_unreachable_hook_does_not_show_its_url(tell: Callable[..., dict[str, Any]]) -> None:
    outcome = tell(**{WEBHOOK: "http://127.0.0.1:9/services/token"})
    assert "Refused" in outcome["webhook"]["reason"]
    assert "token" not in json.dumps(outcome)


def test_the_command_reads_incident_and_folder_and_no_secret(
    tell: Callable[..., dict[str, Any]], incident: Path, tmp_path: Path
) -> None:
    code = "import json, os, sys; json.dump([sys.stdin.read(), dict(os.environ)], open(os.environ['TO'], 'w'))"
    outcome = tell(**{COMMAND: f'{sys.executable} -c "{code}"', "TO": str(tmp_path / "read"), SECRET: "key"})
    assert outcome["command"]["done"] is True
    document, environ = json.loads((tmp_path / "read").read_text())
    assert document == (incident / "incident.json").read_text()
    assert environ["SGLANG_CRASHKIT_INCIDENT"] == str(incident)
    assert SECRET not in environ


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("sleep 60", "did not end within 0.3 s"),
        ("false", "ended with status 1"),
        ("/nonexistent/command", "No such file"),
        ("page 'half", "cannot be split"),
        (f"{sys.executable} -c \"while True: print('x' * 9999)\"", "printed more than 1 MiB"),
    ],
)
def test_a_command_that_fails_is_noted(tell: Callable[..., dict[str, Any]], command: str, reason: str) -> None:
    secs = "0.3" if command.startswith("sleep") else "20"
    outcome = tell(**{COMMAND: command, COMMAND_SECS: secs})
    assert outcome["command"]["done"] is False
    assert reason in outcome["command"]["reason"]


def test_nobody_is_told_twice(tell: Callable[..., dict[str, Any]], incident: Path) -> None:
    with hook(200) as server:
        tell(**{WEBHOOK: server.url})
        assert not sending.tell(incident, {WEBHOOK: server.url})
    assert len(server.bodies) == 1


def test_nobody_is_told_while_another_process_is_at_it(incident: Path) -> None:
    lock = FolderLock(incident)
    assert lock.acquire() == "held"
    assert not sending.tell(incident, {COMMAND: "true"})
    lock.release()


@pytest.mark.parametrize(("kind", "verdict"), [("snapshot", None), ("hang", {"kind": "busy"})])
def test_nobody_is_woken_for_nothing(tmp_path: Path, kind: str, verdict: object) -> None:
    (tmp_path / "incidents").mkdir()
    incident = make_incident(tmp_path / "incidents", kind=kind, verdict=verdict)
    assert not sending.tell(incident, {COMMAND: "true"})
    assert not (incident / OUTCOME).exists()


def test_an_incident_that_was_withdrawn_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((OSError, CrashkitError)):
        sending.tell(tmp_path / "gone", {COMMAND: "true"})


@pytest.mark.parametrize(
    ("url", "text", "expected"),
    [
        (
            "http://h:1/e/r/v1/traces",
            "error: no route to http://h:1/e/r/v1/traces",
            "error: no route to http://h:1/.../.../v1/traces",
        ),
        ("http://h/kEy5/v1/traces", "url: /kEy5/v1/traces (kEy55 refused)", "url: /.../v1/traces (kEy55 refused)"),
        ("http://h/v1/traces", "url: /v1/traces", "url: /v1/traces"),
        ("http://h/a?token=kEy5", "POST /a?token=kEy5: a timeout", "POST /...?...=...: a timeout"),
        ("http://h?token=kEy5", "POST h?token=kEy5", "POST h?...=..."),
        ("http://e:pw@h/x", "for http://e:pw@h/x, e is pw", "for http://...@h/..., e is pw"),
        ("http://e:pw@h/x", "auth failed for e:pw", "auth failed for ..."),
        ("http://user:pa55word@h", "nonnumeric port: 'pa55word@h'", "nonnumeric port: '...@h'"),
        ("http://user:pw@h", "nonnumeric port: 'pw@h'; pwd", "nonnumeric port: '...@h'; pwd"),
        ("http://user:p%40ssword@h", "the password p@ssword is not p%40ssword", "the password ... is not ..."),
        ("http://a-long-token@h", "no a-long-token, user", "no ..., user"),
        ("http://key@h", "key: http://key@h, http://key", "key: http://...@h, http://..."),
        ("http://h/SECRETabc/v1/traces", "path='SECRETabc/v1/logs'", "path='.../v1/logs'"),
        ("http://h/kEy5", "path='kEy5/v1/logs'", "path='.../v1/logs'"),
        ("http://h/a/SECRETabc?k=SECRETabcdef", "SECRETabcdef, SECRETabc: a", "..., ...: a"),
        ("", "a reason: /v1/traces", "a reason: /v1/traces"),
    ],
)
def test_a_reason_is_told_without_the_keys_of_its_url(url: str, text: str, expected: str) -> None:
    assert sending._without_keys(text, url) == expected


def test_a_key_is_masked_before_a_reason_is_cut() -> None:
    text = f"{'x' * (sending._MAX_WORDS - 17)} SECRETabc"
    run = ToolRun(text, "it failed", 0.0)
    assert "SECRE" not in sending._words_of(run, "http://h/SECRETabc")
