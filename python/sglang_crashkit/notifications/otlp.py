"""Send one OpenTelemetry log record: ``python -m sglang_crashkit.notifications.otlp``, the incident on standard input.

It goes where SGLang's traces go, by OpenTelemetry's own exporter, which SGLang's extra ``tracing`` brings, from version
1.37 on. Headers, certificates and the rest are as OpenTelemetry's own variables say. The last line that is printed says
why nothing was sent. Whoever runs it ends it where it takes too long.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_crashkit.model.checked_json import seconds_of
from sglang_crashkit.notifications.messages import is_observed
from sglang_crashkit.settings import OTLP_ENDPOINT

#: As SGLang reads it for its traces.
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_TRACES, _LOGS = "/v1/traces", "/v1/logs"
_EVENT = "sglang.incident"
#: What is told, by OpenTelemetry's name of it where it has one.
_ATTRIBUTES = {
    "id": "sglang.incident.id",
    "kind": "sglang.incident.kind",
    "cause": "sglang.incident.cause",
    "cause_words": "sglang.incident.cause_words",
    "level": "sglang.incident.level",
    "rank": "sglang.incident.rank",
    "fault": "sglang.incident.fault",
    "seen": "sglang.incident.seen",
    "requests_unfinished": "sglang.incident.requests_unfinished",
    "path": "sglang.incident.path",
    "release": "sglang.release",
    "model": "sglang.model",
    "host": "host.name",
    "pid": "process.pid",
}


class _Noting:
    """An exporter that notes what another one says: a processor of log records keeps it to itself."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.was_taken = False

    def export(self, batch: Sequence[Any]) -> Any:
        result = self._exporter.export(batch)
        self.was_taken = result.name == "SUCCESS"
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, _timeout_millis: int = 30000) -> bool:
        """Say that nothing waits to be sent."""
        return True


def attributes_of(short: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a log record tells of an incident; see `messages.short_of`. What is not known is left out."""
    return {name: short[field] for field, name in _ATTRIBUTES.items() if short.get(field) is not None}


def logs_endpoint(endpoint: str, protocol: str) -> str:
    """Return where log records go, where SGLang's ``--otlp-traces-endpoint`` is this.

    To ``grpc`` one endpoint takes everything; by ``http/protobuf`` each kind has a path.
    """
    if protocol == "grpc" or not endpoint.endswith(_TRACES):
        return endpoint
    return endpoint.removesuffix(_TRACES) + _LOGS


def _exporter(endpoint: str, environ: Mapping[str, str]) -> Any:
    protocol = environ.get(_PROTOCOL, "grpc")
    where = logs_endpoint(endpoint, protocol)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as OverHttp

        return OverHttp(endpoint=where)
    if protocol != "grpc":
        raise ValueError(f"{_PROTOCOL} is neither grpc nor http/protobuf")
    from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as OverGrpc

    # As SGLang sends its traces.
    return OverGrpc(endpoint=where, insecure=True)


def send(short: Mapping[str, Any], endpoint: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send it, and say whether it was taken; see `messages.short_of` and `logs_endpoint`.

    Raises:
        ImportError: OpenTelemetry or one of its exporters is not installed.
        ValueError: the endpoint or the protocol cannot be understood.
    """
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
    from opentelemetry.sdk.resources import Resource

    noting: Any = _Noting(_exporter(endpoint, environ))
    # The name of the service is in OpenTelemetry's own variable.
    provider = LoggerProvider(Resource.create(), shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(noting))
    seconds = seconds_of(short["time"])
    severity = SeverityNumber.WARN if is_observed(short) else SeverityNumber.FATAL
    provider.get_logger("sglang_crashkit").emit(
        LogRecord(
            # Where it cannot be read, the record's own time counts.
            timestamp=None if seconds is None else int(seconds * 1e9),
            severity_number=severity,
            severity_text=severity.name,
            body=short["headline"],
            attributes=attributes_of(short),
            event_name=_EVENT,
        )
    )
    provider.shutdown()
    return bool(noting.was_taken)


def main() -> int:
    """Send it; where it is not taken, OpenTelemetry logs why."""
    try:
        return 0 if send(json.load(sys.stdin), os.environ[OTLP_ENDPOINT]) else 1
    except ImportError as error:
        reason = f"pip install 'sglang[tracing]': {error}"
    except ValueError as error:
        reason = str(error)
    print(reason)  # noqa: T201 - what it was asked for
    return 1


if __name__ == "__main__":
    sys.exit(main())
