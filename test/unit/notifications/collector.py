"""A collector of OpenTelemetry log records: a real gRPC server that decodes what it is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import (
    LogsServiceServicer,
    add_LogsServiceServicer_to_server,
)

from unit.support.waiting import LONG


class Collector(LogsServiceServicer):
    """Takes log records, or refuses them as a collector of traces does.

    Attributes:
        requests: what it was sent.
        refuses: see above.
        endpoint: where it listens, as host and port.
    """

    def __init__(self, refuses: bool) -> None:
        self.requests: list[ExportLogsServiceRequest] = []
        self.refuses = refuses
        self.endpoint = ""

    def Export(self, request: ExportLogsServiceRequest, context: Any) -> ExportLogsServiceResponse:  # noqa: N802
        if self.refuses:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "traces alone")
        self.requests.append(request)
        return ExportLogsServiceResponse()


@contextlib.contextmanager
def collector(*, refuses: bool = False) -> Iterator[Collector]:
    """Run a collector until the end of the block."""
    server, servicer = grpc.server(ThreadPoolExecutor(2)), Collector(refuses)
    add_LogsServiceServicer_to_server(servicer, server)
    servicer.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(None).wait(LONG)


def only_record_in(request: ExportLogsServiceRequest) -> tuple[dict[str, Any], Any]:
    """Return the attributes of the service, and the one log record that is sent."""
    (resource_logs,) = request.resource_logs
    (scope_logs,) = resource_logs.scope_logs
    (record,) = scope_logs.log_records
    return values_of(resource_logs.resource.attributes), record


def values_of(attributes: Any) -> dict[str, Any]:
    """Return attributes by name."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
