"""Trackers that are 50 ms away, and a collector in a process of its own.

python -m benchmarks.helpers.slow_trackers       # prints the port of a collector that takes everything
"""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eventloop.events.deferred import Timed
from eventloop.writers import MLflowWriter, OpenTelemetryWriter, TrackioWriter, WandbWriter
from eventloop.writers.tracker import TrackerWriter

LATENCY_SECONDS = 0.05


class _Away:
    """Wait before each request."""

    def send(self: Any, events: list[Timed]) -> None:
        """Write events, later."""
        time.sleep(LATENCY_SECONDS)
        super().send(events)  # type: ignore[misc]


class SlowWandb(_Away, WandbWriter):
    """W&B, offline and slow."""


class SlowMLflow(_Away, MLflowWriter):
    """MLflow with SQLite, and slow."""


class SlowTrackio(_Away, TrackioWriter):
    """A slow trackio."""


class SlowOpenTelemetry(_Away, OpenTelemetryWriter):
    """A collector that is far away."""


def slow_trackers(folder: Path, port: int, offload: str) -> list[TrackerWriter]:
    """Return all four; `folder` is where MLflow's database is."""
    return [
        SlowWandb("benchmark", mode="offline", offload=offload),
        SlowMLflow(f"sqlite:///{folder}/mlflow.db", "benchmark", offload=offload),
        SlowTrackio("benchmark", offload=offload),
        SlowOpenTelemetry(f"http://127.0.0.1:{port}", offload=offload),
    ]


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    """Serve until the process is ended."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
