"""Send OTLP requests over HTTP: messages of the OpenTelemetry protocol, encoded by its protobuf package.

`OpenTelemetryWriter` uses this module instead of OpenTelemetry's SDK, because the SDK has a queue and threads
of its own, gives points its own times and drops what it cannot send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import (
    SEVERITY_NUMBER_ERROR,
    SEVERITY_NUMBER_WARN,
    LogRecord,
    ResourceLogs,
    ScopeLogs,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Gauge,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from eventloop._version import __version__
from eventloop.writers.otlp_spans import LogLine, SpanFacts

Points = dict[str, list[tuple[int, float]]]
"""Values of each metric with their times, in nanoseconds since 1970."""
METRICS, TRACES, LOGS = "v1/metrics", "v1/traces", "v1/logs"
SCOPE = InstrumentationScope(name="eventloop", version=__version__)


class Client:
    """Post requests to a collector.

    Args:
        endpoint: the URL of the collector without `/v1/metrics`.
        headers: sent with each request, such as a key.
        timeout: seconds that a request may take.
    """

    def __init__(self, endpoint: str, headers: Mapping[str, str], timeout: float) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._headers = {**headers, "Content-Type": "application/x-protobuf"}
        self._timeout = timeout
        self._opener = build_opener(_NoRedirect)

    def post(self, path: str, body: bytes) -> None:
        """Send one request.

        Raises:
            OSError: the collector is away, or its answer is not 200.
        """
        request = Request(f"{self._endpoint}/{path}", body, self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                answer.read(1 << 16)
        except HTTPError as error:
            with error:
                raise OSError(f"{self._endpoint}/{path} answered {error.code} {error.reason}") from None
        except URLError as error:
            raise OSError(f"{self._endpoint} cannot be reached: {error.reason}") from None


class _NoRedirect(HTTPRedirectHandler):
    """Follow no redirect, which would send the headers to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def metrics_request(resource: Resource, points: Points) -> bytes:
    """Encode values as gauges."""
    metrics = [
        Metric(
            name=name,
            gauge=Gauge(data_points=[NumberDataPoint(time_unix_nano=t, as_double=v) for t, v in values]),
        )
        for name, values in points.items()
    ]
    scope = ScopeMetrics(scope=SCOPE, metrics=metrics)
    of_resource = ResourceMetrics(resource=resource, scope_metrics=[scope])
    return _encoded(ExportMetricsServiceRequest(resource_metrics=[of_resource]))


def traces_request(resource: Resource, trace_id: bytes, spans: Iterable[SpanFacts]) -> bytes:
    """Encode spans of one trace."""
    encoded = [
        Span(
            trace_id=trace_id, span_id=span.span_id, parent_span_id=span.parent, name=span.name,
            kind=Span.SPAN_KIND_INTERNAL, start_time_unix_nano=span.began, end_time_unix_nano=span.ended,
            attributes=_key_values(span.attributes),
            status=Status(code=Status.STATUS_CODE_ERROR, message=span.error) if span.error else None,
        )
        for span in spans
    ]  # fmt: skip
    scope = ScopeSpans(scope=SCOPE, spans=encoded)
    of_resource = ResourceSpans(resource=resource, scope_spans=[scope])
    return _encoded(ExportTraceServiceRequest(resource_spans=[of_resource]))


def logs_request(resource: Resource, trace_id: bytes, lines: Iterable[LogLine]) -> bytes:
    """Encode log records, as warnings or errors."""
    records = [
        LogRecord(
            time_unix_nano=line.time, observed_time_unix_nano=line.time, trace_id=trace_id,
            severity_number=SEVERITY_NUMBER_ERROR if line.is_error else SEVERITY_NUMBER_WARN,
            severity_text="ERROR" if line.is_error else "WARN",
            body=AnyValue(string_value=line.text), event_name=line.event,
            attributes=_key_values(line.attributes),
        )
        for line in lines
    ]  # fmt: skip
    scope = ScopeLogs(scope=SCOPE, log_records=records)
    of_resource = ResourceLogs(resource=resource, scope_logs=[scope])
    return _encoded(ExportLogsServiceRequest(resource_logs=[of_resource]))


def _encoded(request: Any) -> bytes:
    data: bytes = request.SerializeToString()
    return data


def resource_of(attributes: Mapping[str, object]) -> Resource:
    """Return the source of the data, which every request names."""
    return Resource(attributes=_key_values(attributes))


def _key_values(attributes: Mapping[str, object]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any_value(value)) for key, value in attributes.items()]


def _any_value(value: object) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
    return AnyValue(string_value=str(value))
