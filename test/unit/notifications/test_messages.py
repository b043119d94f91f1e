from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.notifications import __main__ as sending
from sglang_crashkit.notifications import messages
from sglang_crashkit.notifications.messages import (
    Cluster,
    body_of,
    event_of,
    find_cluster,
    short_of,
    signature_of,
)
from sglang_crashkit.notifications.plan import EVENT, OUTCOME
from unit.notifications.hook import hook
from unit.support.stored import make_incident

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


def test_health_checks_are_not_among_the_requests() -> None:
    journal = {"path": "requests/requests.jsonl", "finished": 1, "unfinished": 3, "lost": 0, "left_out": 0}
    saved = {"finished": 2, "unfinished": 5, "path": "/x.pkl", "source": "pickle", "journal": journal}
    assert short_of(DOCUMENT | {"requests": saved}, "/x")["requests_unfinished"] == 3


def test_without_a_cause_an_alert_has_the_verdict() -> None:
    (alert,) = json.loads(body_of(short_of(DOCUMENT | {"cause": None}, "/x"), "alertmanager"))
    assert alert["annotations"]["description"] == "a <b> & c"


def test_what_slack_shows_names_kind_host_and_rank_once() -> None:
    text = json.loads(body_of(short_of(DOCUMENT, "/x"), "slack"))["text"]
    assert text.splitlines()[0] == "*SGLang killed on h1*: sglang::scheduler_TP1 (pid 9)"
    # Slack's own marks are escaped.
    assert text.splitlines()[1] == "a &lt;b&gt; &amp; c"
    assert text.splitlines()[-1] == "SGLang 0.5.23, 3 requests in flight, seen 2 times; /x"


@pytest.mark.parametrize("document", [{}, {"verdict": None, "server": [], "cause": "x"}, DOCUMENT | {"fault": None}])
@pytest.mark.parametrize("kind", ["slack", "alertmanager", "json"])
def test_an_incident_with_gaps_can_be_told(document: dict[str, Any], kind: Any) -> None:
    assert json.loads(body_of(short_of(document, "/x"), kind))


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


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443", "HOSTNAME": "pod-1"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "namespace").write_text("prod\n")
    (folder / "token").write_text("token\n")
    return folder


def test_a_pod_finds_its_api(account: Path) -> None:
    cluster = find_cluster(POD, account)
    assert isinstance(cluster, Cluster)
    assert cluster.url == "https://10.0.0.1:6443/api/v1/namespaces/prod/events"
    assert cluster.pod == "pod-1"
    assert isinstance(find_cluster(POD | {"KUBERNETES_SERVICE_HOST": "fd00::1"}, account), Cluster)


@pytest.mark.parametrize(("environ", "why"), [({}, "no pod"), (POD, "no service account")])
def test_what_is_no_pod_says_so(environ: dict[str, str], why: str, tmp_path: Path) -> None:
    found = find_cluster(environ, tmp_path)
    assert isinstance(found, str)
    assert why in found


def test_an_event_is_one_of_the_pod(account: Path) -> None:
    cluster = find_cluster(POD, account)
    assert isinstance(cluster, Cluster)
    document = {"kind": "killed", "trigger": {"time": "2026-01-01T00:00:00.123456Z"}, "verdict": {"text": "x" * 5000}}
    event = json.loads(event_of(short_of(document, "/crash"), cluster))
    assert (event["involvedObject"]["name"], event["metadata"]["namespace"]) == ("pod-1", "prod")
    assert event["firstTimestamp"] == "2026-01-01T00:00:00Z"
    assert len(event["message"]) <= 1024


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes a certificate, is not installed")
@pytest.mark.parametrize(("status", "done"), [(201, True), (403, False)])
def test_an_event_is_made_over_tls_with_the_accounts_token(
    account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, done: bool
) -> None:
    monkeypatch.setattr(messages.find_cluster, "__defaults__", (account,))
    key, certificate = tmp_path / "key.pem", account / "ca.crt"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=api"]
    subprocess.run(
        [*make, "-keyout", key, "-out", certificate, "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    (tmp_path / "incidents").mkdir()
    incident = make_incident(tmp_path / "incidents")
    with hook(status) as api:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        api.socket = context.wrap_socket(api.socket, server_side=True)
        pod = POD | {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.server_port)}
        assert sending.tell(incident, pod | {EVENT: "1"}, lambda _secs: None)
    outcome = json.loads((incident / OUTCOME).read_text())["kubernetes_event"]
    assert (outcome["done"], outcome["status"]) == (done, status), outcome
    assert api.headers[0]["Authorization"] == "Bearer token"
    assert json.loads(api.bodies[0])["reason"] == "SGLangIncident"
