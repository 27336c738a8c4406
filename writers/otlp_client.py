"""Encode requests of the OpenTelemetry protocol (OTLP) with its protobuf package, and post them over HTTP.

`OpenTelemetryWriter` uses this module instead of OpenTelemetry's SDK. The SDK has a queue and threads of its
own, sets the times of points itself, and drops data that it cannot send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
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

REFUSALS = (400, 413, 422)
"""The HTTP status codes with which a collector refuses the content or the size of a request.

The same request would be refused again. Other errors concern the collector or the login.
"""
REQUEST_BYTES = 900_000
"""The size in bytes above which a request is split: nginx accepts 1 MB by default, the collector 20 MiB."""
SHOWN = 500
"""The most characters of a collector's message that are shown."""
Points = dict[str, list[tuple[int, float]]]
"""For each metric by name, its points: the time in nanoseconds since 1970, and the value."""
METRICS, TRACES, LOGS = "v1/metrics", "v1/traces", "v1/logs"
"""The paths of the three kinds of requests."""
SCOPE = InstrumentationScope(name="eventloop", version=__version__)
"""The library that has recorded the data, which every request names."""


class RefusedError(OSError):
    """Raised if the collector refuses a request, and would refuse it again.

    Args:
        text: the message.
        too_large: whether the collector refuses the size of the request, not its content.
    """

    def __init__(self, text: str, *, too_large: bool) -> None:
        super().__init__(text)
        self.too_large = too_large


class Rejected(NamedTuple):
    """The items that a collector has rejected in a request that it has accepted."""

    number: int
    """How many data points, spans or log records the collector has rejected."""
    why: str
    """The reason, in the collector's words."""


class Client:
    """Post requests to a collector.

    Args:
        endpoint: the URL of the collector without `/v1/metrics`.
        headers: HTTP headers of each request, such as a key.
        timeout: the most seconds of a request.
    """

    def __init__(self, endpoint: str, headers: Mapping[str, str], timeout: float) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._headers = {**headers, "Content-Type": "application/x-protobuf"}
        self._timeout = timeout
        self._opener = build_opener(_NoRedirect)

    def post(self, path: str, body: bytes) -> Rejected | None:
        """Send one request.

        Args:
            path: METRICS, TRACES or LOGS.
            body: the encoded request.

        Returns:
            the items of the request that the collector has rejected, or None.

        Raises:
            RefusedError: the collector refuses the content or the size of this request.
            OSError: the collector cannot be reached, or its answer is not 200.
        """
        request = Request(f"{self._endpoint}/{path}", body, self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return _rejected(path, answer.read(1 << 16))
        except HTTPError as error:
            with error:
                text = f"{self._endpoint}/{path} answered {error.code} {error.reason}"
                if error.code in REFUSALS:
                    raise RefusedError(text, too_large=error.code == 413) from None
                raise OSError(text) from None
        except URLError as error:
            raise OSError(f"{self._endpoint} cannot be reached: {error.reason}") from None


def _rejected(path: str, body: bytes) -> Rejected | None:
    """Return the rejected items in the body of an answer with status 200, or None."""
    answer_class, count_field = _ANSWERS[path]
    try:
        partial = answer_class.FromString(body).partial_success
    except DecodeError:  # the server answers in another format, for example with a page
        return None
    count = getattr(partial, count_field)
    why = " ".join(partial.error_message.split())[:SHOWN] or "the collector gives no reason"
    return Rejected(count, why) if count > 0 else None


class _NoRedirect(HTTPRedirectHandler):
    """Refuse redirects, because they would send the headers to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def metrics_request(resource: Resource, points: Points) -> bytes:
    """Return the encoded request that sends points as gauges."""
    metrics = []
    for name, values in points.items():
        data_points = [NumberDataPoint(time_unix_nano=time, as_double=value) for time, value in values]
        metrics.append(Metric(name=name, gauge=Gauge(data_points=data_points)))
    scope = ScopeMetrics(scope=SCOPE, metrics=metrics)
    resource_metrics = ResourceMetrics(resource=resource, scope_metrics=[scope])
    return _encoded(ExportMetricsServiceRequest(resource_metrics=[resource_metrics]))


def traces_request(resource: Resource, trace_id: bytes, spans: Iterable[SpanFacts]) -> bytes:
    """Return the encoded request that sends spans of one trace."""
    encoded = [
        Span(
            trace_id=trace_id,
            span_id=span.span_id,
            parent_span_id=span.parent,
            name=span.name,
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=span.began,
            end_time_unix_nano=span.ended,
            attributes=_key_values(span.attributes),
            status=Status(code=Status.STATUS_CODE_ERROR, message=span.error) if span.error else None,
        )
        for span in spans
    ]
    scope = ScopeSpans(scope=SCOPE, spans=encoded)
    resource_spans = ResourceSpans(resource=resource, scope_spans=[scope])
    return _encoded(ExportTraceServiceRequest(resource_spans=[resource_spans]))


def logs_request(resource: Resource, trace_id: bytes, lines: Iterable[LogLine]) -> bytes:
    """Return the encoded request that sends log records, as warnings or errors."""
    records = [
        LogRecord(
            time_unix_nano=line.time,
            observed_time_unix_nano=line.time,
            trace_id=trace_id,
            severity_number=SEVERITY_NUMBER_ERROR if line.is_error else SEVERITY_NUMBER_WARN,
            severity_text="ERROR" if line.is_error else "WARN",
            body=AnyValue(string_value=line.text),
            event_name=line.event,
            attributes=_key_values(line.attributes),
        )
        for line in lines
    ]
    scope = ScopeLogs(scope=SCOPE, log_records=records)
    resource_logs = ResourceLogs(resource=resource, scope_logs=[scope])
    return _encoded(ExportLogsServiceRequest(resource_logs=[resource_logs]))


def halves(path: str, body: bytes, *, points: bool) -> list[bytes]:
    """Split a request into two; return [] if it has only one metric, span or log record.

    Args:
        path: METRICS, TRACES or LOGS.
        body: the encoded request.
        points: whether a request with only one metric is split into two requests with half of its points.
    """
    # two copies of the request: the first loses its second half, and the second its first half
    first, second = _decoded(path, body), _decoded(path, body)
    first_items, second_items = _items(path, first), _items(path, second)
    if len(first_items) == 1 and points and path == METRICS:
        first_items, second_items = first_items[0].gauge.data_points, second_items[0].gauge.data_points
    if (middle := len(first_items) // 2) == 0:
        return []
    del first_items[middle:]
    del second_items[:middle]
    return [_encoded(first), _encoded(second)]


def names(path: str, body: bytes) -> list[str]:
    """Return the names of the metrics or spans in a request, or of the events of its log records."""
    field = "event_name" if path == LOGS else "name"
    return [getattr(item, field) for item in _items(path, _decoded(path, body))]


def points_of(path: str, body: bytes) -> list[tuple[str, int]]:
    """Return the metric's name and the time, in nanoseconds since 1970, of each data point in a request.

    A request of spans or log records has no data points.
    """
    if path != METRICS:
        return []
    points = []
    for metric in _items(path, _decoded(path, body)):
        points += [(metric.name, point.time_unix_nano) for point in metric.gauge.data_points]
    return points


def _decoded(path: str, body: bytes) -> Any:
    """Return an encoded request as a protobuf message."""
    request_class, *_ = _KINDS[path]
    return request_class.FromString(body)


def _items(path: str, request: Any) -> Any:
    """Return the list of metrics, spans or log records in a request with one resource and one scope."""
    _, resources_field, scopes_field, items_field = _KINDS[path]
    resources = getattr(request, resources_field)
    if not resources:
        return []
    scopes = getattr(resources[0], scopes_field)
    return getattr(scopes[0], items_field)


_KINDS: dict[str, tuple[Any, str, str, str]] = {
    METRICS: (ExportMetricsServiceRequest, "resource_metrics", "scope_metrics", "metrics"),
    TRACES: (ExportTraceServiceRequest, "resource_spans", "scope_spans", "spans"),
    LOGS: (ExportLogsServiceRequest, "resource_logs", "scope_logs", "log_records"),
}
"""For each path, the class of its requests, and the names of the nested fields that lead to the items."""
_ANSWERS: dict[str, tuple[Any, str]] = {
    METRICS: (ExportMetricsServiceResponse, "rejected_data_points"),
    TRACES: (ExportTraceServiceResponse, "rejected_spans"),
    LOGS: (ExportLogsServiceResponse, "rejected_log_records"),
}
"""For each path, the class of its answers, and the field that has the number of rejected items."""


def _encoded(request: Any) -> bytes:
    data: bytes = request.SerializeToString()
    return data


def resource_of(attributes: Mapping[str, object]) -> Resource:
    """Return the resource, which names the source of the data in every request."""
    return Resource(attributes=_key_values(attributes))


def _key_values(attributes: Mapping[str, object]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any_value(value)) for key, value in attributes.items()]


def _any_value(value: object) -> AnyValue:
    """Return the value in OTLP's form; as text if it is no bool, int or float."""
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
    return AnyValue(string_value=str(value))
