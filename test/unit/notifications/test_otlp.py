"""What a real exporter sends a real gRPC server, and a real HTTP server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from sglang_crashkit.model.incident import iso_time
from sglang_crashkit.notifications import __main__ as sending
from sglang_crashkit.notifications.otlp import attributes_of, logs_endpoint
from sglang_crashkit.notifications.plan import OUTCOME
from sglang_crashkit.settings import OTLP_ENDPOINT
from unit.notifications.collector import collector, only_record_in, values_of
from unit.notifications.hook import hook
from unit.support.stored import NOON, make_incident
from unit.support.waiting import LONG

VERDICT = {"kind": "killed", "first_failure": {"pid": 9, "title": "sglang::scheduler_TP1"}, "level": "established"}
CAUSE: dict[str, Any] = {"cause": {"class": "host_oom"}, "trigger": {"time": iso_time(NOON)}}


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Tell of an incident, and return what came of the log record."""
    (tmp_path / "incidents").mkdir()
    # A busy machine takes long to import an exporter.
    monkeypatch.setattr(sending, "_OTLP_SECS", LONG)

    def tell(endpoint: str, kind: str = "killed", **environ: str) -> dict[str, Any]:
        incident = make_incident(tmp_path / "incidents", kind=kind, verdict=VERDICT, **CAUSE)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        assert sending.tell(incident, kept | {OTLP_ENDPOINT: endpoint} | environ)
        outcome: dict[str, Any] = json.loads((incident / OUTCOME).read_text())["opentelemetry"]
        return outcome

    return tell


def test_a_collector_gets_one_record(tell: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with collector() as receiver:
        assert tell(receiver.endpoint, OTEL_SERVICE_NAME="chat") == {"done": True}
    (request,) = receiver.requests
    service, record = only_record_in(request)
    assert service["service.name"] == "chat"
    (incident,) = (tmp_path / "incidents").glob("*-killed-*")
    document = json.loads((incident / "incident.json").read_text())
    assert record.event_name == "sglang.incident"
    assert record.body.string_value == "killed: sglang::scheduler_TP1 (pid 9)"
    assert record.severity_text == "FATAL"
    assert record.time_unix_nano == NOON * 1e9
    assert values_of(record.attributes) == {
        "sglang.incident.id": document["id"],
        "sglang.incident.kind": "killed",
        "sglang.incident.cause": "host_oom",
        "sglang.incident.level": "established",
        "sglang.incident.rank": "scheduler_TP1",
        "sglang.incident.path": str(incident),
        "sglang.release": "0.5.23",
        "host.name": "h",
        "process.pid": 1,
    }


def test_a_server_that_went_on_is_a_warning(tell: Callable[..., dict[str, Any]]) -> None:
    with collector() as receiver:
        tell(receiver.endpoint, kind="hang")
    assert only_record_in(receiver.requests[0])[1].severity_text == "WARN"


def test_it_is_sent_over_http_where_traces_are(tell: Callable[..., dict[str, Any]]) -> None:
    with hook(200) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        assert tell(endpoint, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf")["done"]
    (body,) = server.bodies
    assert only_record_in(ExportLogsServiceRequest.FromString(body))[1].event_name == "sglang.incident"


@pytest.mark.parametrize(
    ("endpoint", "protocol", "where"),
    [
        ("collector:4317", "grpc", "collector:4317"),
        ("http://c:4318/v1/traces", "http/protobuf", "http://c:4318/v1/logs"),
        ("http://c:4318/own", "http/protobuf", "http://c:4318/own"),
    ],
)
def test_logs_go_beside_the_traces(endpoint: str, protocol: str, where: str) -> None:
    assert logs_endpoint(endpoint, protocol) == where


def test_a_collector_of_traces_alone_says_so(tell: Callable[..., dict[str, Any]]) -> None:
    with collector(refuses=True) as receiver:
        outcome = tell(receiver.endpoint)
    assert outcome["done"] is False
    assert "UNIMPLEMENTED" in outcome["reason"]


def test_what_is_not_installed_is_named(tell: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "opentelemetry.py").touch()
    outcome = tell("127.0.0.1:9", PYTHONPATH=os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")]))
    assert outcome["done"] is False
    assert "pip install 'sglang[tracing]'" in outcome["reason"]


def test_a_collector_that_is_not_there_is_given_up(
    tell: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_OTLP_SECS", 1.0)
    outcome = tell("http://127.0.0.1:9/key/v1/traces", OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf")
    assert "did not end within 1 s" in outcome["reason"]
    assert "key" not in json.dumps(outcome)


def test_what_is_not_known_is_left_out() -> None:
    assert attributes_of({"id": "x", "rank": None, "requests_unfinished": 0}) == {
        "sglang.incident.id": "x",
        "sglang.incident.requests_unfinished": 0,
    }
