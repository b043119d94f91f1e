from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from sglang_crashkit.notifications import kubernetes, sending
from sglang_crashkit.notifications.kubernetes import EVENT, Cluster, event_of, find_cluster
from sglang_crashkit.notifications.messages import short_of
from sglang_crashkit.notifications.plan import OUTCOME
from unit.notifications.hook import hook
from unit.stored import make_incident

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
    monkeypatch.setattr(kubernetes.find_cluster, "__defaults__", (account,))
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
