from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest

from sglang_crashkit.notifications.messages import body_of, short_of, signature_of

DOCUMENT: dict[str, Any] = {
    "id": "0123abcd",
    "kind": "killed",
    "trigger": {"time": "2026-01-01T00:00:00.000000Z"},
    "server": {"hostname": "h1", "pid": 7, "sglang_version": "0.5.23"},
    "verdict": {
        "first_failure": {"pid": 9, "title": "sglang::scheduler_TP1"},
        "text": "a <b> & c",
        "level": "supported",
    },
    "cause": {"class": "host_oom", "words": "the host ran out of memory"},
    "requests": {"unfinished": 3},
    "fault": {"key": "f00d", "count": 2},
    "suspects": [{"rid": "secret-rid"}],
}


def test_the_little_that_is_told_is_told() -> None:
    short = short_of(DOCUMENT, "/crash/x")
    assert (short["host"], short["cause"], short["seen"], short["path"]) == ("h1", "host_oom", 2, "/crash/x")
    assert short["headline"] == "killed: sglang::scheduler_TP1 (pid 9)"


@pytest.mark.parametrize("document", [{}, {"verdict": None, "server": [], "cause": "x"}, DOCUMENT | {"fault": None}])
@pytest.mark.parametrize("kind", ["slack", "alertmanager", "json"])
def test_an_incident_with_gaps_can_be_told(document: dict[str, Any], kind: Any) -> None:
    assert json.loads(body_of(short_of(document, "/x"), kind))


def test_slack_marks_are_escaped() -> None:
    text = json.loads(body_of(short_of(DOCUMENT, "/x"), "slack"))["text"]
    assert "a &lt;b&gt; &amp; c" in text
    assert "seen 2 times" in text


@pytest.mark.parametrize(("kind", "severity"), [("killed", "critical"), ("hang", "warning")])
def test_an_alert_has_labels_to_route_by(kind: str, severity: str) -> None:
    (alert,) = json.loads(body_of(short_of(DOCUMENT | {"kind": kind}, "/x"), "alertmanager"))
    assert alert["labels"] == {
        "alertname": "SGLangIncident",
        "severity": severity,
        "instance": "h1",
        "kind": kind,
        "cause": "host_oom",
        "fault": "f00d",
        "release": "0.5.23",
    }
    assert alert["startsAt"] == "2026-01-01T00:00:00.000000Z"


def test_the_signature_is_of_time_and_body() -> None:
    expected = hmac.new(b"key", b"17.body", hashlib.sha256).hexdigest()
    assert signature_of("key", "17", b"body") == expected
