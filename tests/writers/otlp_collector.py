"""An OTLP collector over HTTP for tests: it decodes what it receives, and keeps it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

from eventloop.writers import OpenTelemetryWriter

KEY = "Bearer s3cr3t"


def is_missing(module: str) -> bool:
    """Return whether a module is not installed, or the package it is in."""
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:
        return True


class Collector:
    """Keep the messages of each path; `status` other than 200 refuses, `delay` makes each answer wait.

    `judge` returns the status for one request, given its path, its message and its size in bytes; `answer` the
    body of the answer with status 200.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.messages: dict[str, list[Any]] = {"/v1/metrics": [], "/v1/traces": [], "/v1/logs": []}
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.delay = delay
        self.delayed, self.go_on = threading.Event(), threading.Event()
        self.judge: Callable[[str, Any, int], int] = lambda path, message, size: self.status
        self.answer: Callable[[str, Any], bytes] = lambda path, message: b""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.headers.append({key.lower(): value for key, value in self.headers.items()})
                message = _decode(self.path, body)
                status = collector.judge(self.path, message, len(body))
                if status == 200:
                    collector.messages[self.path].append(message)
                if collector.delay:
                    collector.delayed.set()
                    collector.go_on.wait(collector.delay)
                try:
                    self.send_response(status)
                    if status == 302:
                        self.send_header("Location", "http://127.0.0.1:9/")
                    self.end_headers()
                    if status == 200:
                        self.wfile.write(collector.answer(self.path, message))
                except OSError:  # the client was killed
                    pass

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def series(self) -> dict[tuple[str, int], float]:
        """The values by name and time in nanoseconds; points of one series and time are one, as in a database."""
        series: dict[tuple[str, int], float] = {}
        for message in self.messages["/v1/metrics"]:
            for resource in message.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        for point in metric.gauge.data_points:
                            assert not point.attributes
                            series[metric.name, point.time_unix_nano] = point.as_double
        return series

    def points(self) -> list[tuple[str, int, float]]:
        """The name, step and value of each value."""
        series = self.series()
        return [
            (name, int(series[f"{name.partition('/')[0]}/step", time]), value)
            for (name, time), value in series.items()
            if name != f"{name.partition('/')[0]}/step"
        ]

    def spans(self) -> list[Any]:
        return [
            span
            for message in self.messages["/v1/traces"]
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def logs(self) -> list[Any]:
        return [
            record
            for message in self.messages["/v1/logs"]
            for resource in message.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]


def _decode(path: str, body: bytes) -> Any:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    kinds: dict[str, Any] = {
        "/v1/metrics": ExportMetricsServiceRequest,
        "/v1/traces": ExportTraceServiceRequest,
        "/v1/logs": ExportLogsServiceRequest,
    }
    return kinds[path].FromString(body)


def make(collector: Collector, **options: Any) -> OpenTelemetryWriter:
    """Return a writer on a thread that sends to a collector, with a key."""
    return OpenTelemetryWriter(
        collector.url, **{"headers": {"authorization": KEY}, "offload": "thread", **options}
    )
