"""Send a run by OpenTelemetry: numbers as gauges, stages of the run as spans, problems as log records.

`otlp_spans` makes spans of events, `otlp_client` encodes requests, `otlp_outbox` sends them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from eventloop.eventlog.format import FILE_NAME
from eventloop.eventlog.reader import EventReader
from eventloop.events import (
    AfterRun,
    AfterTest,
    AfterTrainEpoch,
    AfterVal,
    BeforeTest,
    BeforeTrainEpoch,
    BeforeVal,
    CheckpointSaved,
    RunInfo,
    ScalarsLogged,
)
from eventloop.events.base import event_name
from eventloop.events.deferred import Timed
from eventloop.events.encoding_errors import BadEvent
from eventloop.events.run import Run
from eventloop.util.append_file import replacing
from eventloop.writers.otlp_arguments import (
    check_endpoint,
    check_headers,
    check_protocol,
    check_timeout,
    headers_of_environment,
)
from eventloop.writers.otlp_spans import HEALTH, SAME, SECOND, Spans, Stages, log_line
from eventloop.writers.tracker import RUN_EVENTS, TrackerWriter
from eventloop.writers.tracker_arguments import (
    check_texts,
    secrets_of_headers,
    setting,
)
from eventloop.writers.tracker_state import Known
from eventloop.writers.tracker_values import run_name_of, values_of

NAMED = 5
"""The most refused metrics that are named in one warning."""


class _InFlight(msgspec.Struct):
    """The contents of the `.inflight` file, which the next run in the folder reads after a kill."""

    id: str = ""
    """The id of the run, as 32 hexadecimal digits."""
    requests: list[tuple[str, bytes]] = []
    """The path and body of each request without an answer; after a kill they are sent again, unchanged."""
    last: dict[str, int] = {}
    """The last step of each metric by name, including the steps in `requests`."""
    stages: Stages = msgspec.field(default_factory=Stages)
    """The stages of the run that have begun and not ended; after a kill their spans are ended."""


class OpenTelemetryWriter(TrackerWriter):
    """Send a run to an OpenTelemetry collector by OTLP over HTTP.

        OpenTelemetryWriter("http://localhost:4318", headers={"authorization": "Bearer ..."})

    A number is a gauge `{mode}/{name}`. A gauge `{mode}/step` has the step at the same time; if the step were
    an attribute, each step would be a time series of its own. Spans are the run, its epochs, validations,
    tests and checkpoints, and in an epoch the iterations that a `TraceHook` recorded, with their phases.
    Events such as `handler_failed`, `loader_stall` and `slow_rank` are log records. The service, the run and
    the rank are attributes of the resource.

    Spans, numbers and log records have the time of the event's emit, also if the collector receives them
    later. An event that waited in a spill file has the time of an earlier event. A replay sends spans with
    the same ids again.

    A request that the collector refuses (400, 422), or that is too large (413, or more than 900 kB), is split
    until it is accepted or has one value. A refused value is left out: the log names its metric once, and its
    event counts as failed. The same applies to values that the collector rejects in an accepted request. The
    search for refused values costs at most about 200 requests; after that, refused requests are left out as a
    whole. After any other answer than 200 the events wait, and the writer retries.

    A resumed run continues the trace whose id is in `<work_dir>/otlp_run.json`. Steps that are run again are
    not sent again. A request that a kill interrupted is sent again, unchanged; the collector merges points of
    the same series and time. Spans that were open at a kill end at the last event before it, with the error
    "killed". A worker process, which outlives the program, sends them at once; without one, the next run in
    the folder does. Events that a kill lost are read from the run's event log, if the run has an
    `EventLogWriter`.

    Headers are written to no file of the run: `eventloop replay` reads them from OTEL_EXPORTER_OTLP_HEADERS.

    Args:
        endpoint: the URL of the collector, to which `/v1/metrics` and so on are added; by default
            OTEL_EXPORTER_OTLP_ENDPOINT.
        headers: HTTP headers of each request, such as a key; by default OTEL_EXPORTER_OTLP_HEADERS.
        service: the attribute `service.name`; by default OTEL_SERVICE_NAME, or else the name of the work dir.
        timeout: the most seconds of a request.
        name: the writer's name in reports; needed if a bus has two writers of this class.
        offload: "process", "thread", or "auto", the default: a process if possible.

    Raises:
        ImportError: opentelemetry-proto is not installed.
        TypeError, ValueError: there is no endpoint, it is not an HTTP URL, or another argument,
            OTEL_EXPORTER_OTLP_HEADERS or OTEL_EXPORTER_OTLP_PROTOCOL is wrong.
    """

    events = (
        *RUN_EVENTS,
        ScalarsLogged,
        RunInfo,
        CheckpointSaved,
        BeforeTrainEpoch,
        AfterTrainEpoch,
        BeforeVal,
        AfterVal,
        BeforeTest,
        AfterTest,
        *HEALTH,
    )
    service: ClassVar[str] = "the OTLP collector"
    target: ClassVar[str] = "otlp"
    secret_arguments = ("headers",)

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        service: str | None = None,
        timeout: float = 10.0,
        name: str | None = None,
        offload: str | None = None,
    ) -> None:
        super().__init__(name, offload)
        if not endpoint:  # the endpoint is in the environment, and so is its protocol
            check_protocol()
        self._endpoint = check_endpoint(
            *setting("endpoint", endpoint, "OTEL_EXPORTER_OTLP_ENDPOINT", "OpenTelemetryWriter")
        )
        if headers is None:
            headers_of_environment()  # raises if they are wrong; `connect` reads them again
        self._headers = None if headers is None else check_headers("headers", headers)
        check_texts(service=service)
        self._service = service or os.environ.get("OTEL_SERVICE_NAME")
        self._timeout = check_timeout(timeout)
        _, self._lib, self._outboxes = self.import_library(
            "opentelemetry.proto", "eventloop.writers.otlp_client", "eventloop.writers.otlp_outbox"
        )

    def connect(self, run: Run, known: Known) -> Known:
        """Send the requests that a kill interrupted, and continue the trace that `known` names or begin one.

        Returns:
            the id of the trace, and the last step of each metric that was sent.
        """
        headers = self._headers if self._headers is not None else headers_of_environment()
        self._secrets = secrets_of_headers(headers)
        self._client = self._lib.Client(self._endpoint, headers, self._timeout)
        self._clock = 0  # the time of the last point, in nanoseconds since 1970
        self._outbox = self._outboxes.Outbox(self._client, self._report_loss)
        self._encoded = 0  # how many of the waiting events are encoded in requests of the outbox
        # the waiting scalar events without a refused number, by their times, which are all different
        self._unrefused_times: set[int] = set()
        self._bad: list[BadEvent] = []  # the waiting events with a refused number
        self._named: set[tuple[str, str]] = set()  # path and name of each metric in a warning
        run_id, self._last_before = known.id or os.urandom(16).hex(), known.last
        self._resource = self._resource_of(run, run_id)
        in_flight = self._send_interrupted()
        self._resumes = in_flight.id == run_id and run.trainer_id not in ("", known.trainer_id)
        stages = self._stages_to_continue(run, known, in_flight)
        self._spans = Spans(bytes.fromhex(run_id), time.time(), stages, of_log=not run.trainer_id)
        return Known(run_id, in_flight.last if in_flight.id == run_id else known.last)

    def _stages_to_continue(self, run: Run, known: Known, in_flight: _InFlight) -> Stages:
        """Return the open stages of the run; if `in_flight` is of another run, end the spans of that run."""
        if in_flight.id == known.id:
            return in_flight.stages
        if run.trainer_id:  # "" in a replay
            self._send_killed(run, in_flight)
        return Stages()

    def _send_logged(self, start: int) -> None:
        """Send the logged numbers up to step `start`, and all other logged events after the last sent one.

        Spans that a kill left open are ended.
        """
        stages = self._spans.stages
        # the last event's time may differ by `SAME` in the log; with open stages it may not have been sent
        sent_until = (stages.last_time + (-SAME if stages.open else SAME)) / SECOND
        super()._send_logged(start)
        if not self._resumes:
            return
        if (log := self._work_dir / FILE_NAME).is_file():
            types = [event for event in self.events if event is not ScalarsLogged]
            reader = EventReader(log, only=types, on_torn="ignore")
            for records in reader.blocks():
                is_own = reader.run is not None and reader.run.trainer_id == self._known.trainer_id
                if not is_own:  # the bus delivers the events of this run to the writer later
                    unsent = [
                        Timed(record.time, record.event) for record in records if record.time > sent_until
                    ]
                    self._enqueue_and_send(unsent)
        self._spans.end_killed()

    def had_before(self, known: Known) -> dict[str, int]:
        return self._last_before  # `known.last` also has the steps that `connect` itself has sent

    def send(self, events: list[Timed]) -> None:
        """Encode new events, store the requests in the `.inflight` file, and send them.

        After an error, the next call sends the remaining requests, and encodes only the events that were
        added since.
        """
        if new_events := events[self._encoded :]:
            self._outbox.requests += self._requests_of(new_events)
            self._encoded = len(events)
            self._write_in_flight()
        self._outbox.send()
        self._encoded = 0
        self._unrefused_times.clear()
        self._refused, self._bad = self._refused + self._bad, []
        self._write_in_flight()

    def end(self, status: str) -> None:
        """Send the last traces and spans; spans that are still open end with the error "killed"."""
        self._spans.read_traces(self._work_dir)
        self._spans.end_killed()
        self._outbox.requests += self._span_requests()
        self._outbox.send()
        self._write_in_flight()

    def where(self) -> str:
        return f" at {self._endpoint}"

    def secrets(self) -> list[str]:
        return [*getattr(self, "_secrets", ()), *secrets_of_headers(self._headers or {})]

    # --- requests ------------------------------------------------------------------------------------------

    def _report_loss(self, path: str, body: bytes, reason: str, count: int | None) -> None:
        """Warn about the items of a request that the collector has refused, and record the failed events.

        Args:
            path: the path of the request.
            body: the request.
            reason: the collector's error.
            count: how many of the request's items are lost; None for all.
        """
        kind = f"{path} {'' if count is None else 'partly'}"
        new_names = {name: None for name in self._lib.names(path, body) if (kind, name) not in self._named}
        if new_names:
            self._named |= {(kind, name) for name in new_names}
            more = f" and {len(new_names) - NAMED:,} more" if len(new_names) > NAMED else ""
            names = ", ".join([*new_names][:NAMED]) + more
            lost = names if count is None else f"{count:,} of the values or records {names}"
            self.warn_once(f"{kind} {names}", f"left out are {lost}: {reason}")
        # the time of a point stands for its event; reversed, so that the event's first metric is named
        points = reversed(self._lib.points_of(path, body))
        refused_names = {
            point_time: name for name, point_time in points if point_time in self._unrefused_times
        }
        for point_time in sorted(refused_names)[:count]:
            self._unrefused_times.remove(point_time)
            name = refused_names[point_time]
            self._bad.append(BadEvent(event_name(ScalarsLogged), name, reason, reported=True))

    def _requests_of(self, events: list[Timed]) -> list[tuple[str, bytes]]:
        """Return the path and body of the requests with the spans, numbers and log records of events."""
        points: dict[str, list[tuple[int, float]]] = {}
        doubtful_points: dict[str, list[tuple[int, float]]] = {}  # in another request: they may be refused
        lines = []
        for timestamp, event in events:
            nanoseconds = int(timestamp * SECOND)
            self._spans.receive(nanoseconds, event)
            if isinstance(event, ScalarsLogged):
                point_time = self._next_time(nanoseconds)
                self._unrefused_times.add(point_time)
                for name, value in _gauges(event).items():
                    group = doubtful_points if name in self._outbox.doubtful else points
                    group.setdefault(name, []).append((point_time, value))
                continue
            if (line := log_line(nanoseconds, event)) is not None:
                lines.append(line)
            if isinstance(event, AfterTrainEpoch | AfterRun):
                self._spans.read_traces(self._work_dir, event.iter)
        lib, requests = self._lib, self._span_requests()
        for group in filter(None, (points, doubtful_points)):
            requests.append((lib.METRICS, lib.metrics_request(self._resource, group)))
        if lines:
            requests.append((lib.LOGS, lib.logs_request(self._resource, self._trace_id, lines)))
        return requests

    def _span_requests(self) -> list[tuple[str, bytes]]:
        """Return a list with the request for the spans that have finished since the last call, or []."""
        spans, self._spans.finished = self._spans.finished, []
        if not spans:
            return []
        return [(self._lib.TRACES, self._lib.traces_request(self._resource, self._trace_id, spans))]

    @property
    def _trace_id(self) -> bytes:
        return bytes.fromhex(self._known.id)

    def _next_time(self, nanoseconds: int) -> int:
        """Return `nanoseconds`, or one more than the last result if that is later; no time repeats."""
        self._clock = max(nanoseconds, self._clock + 1)
        return self._clock

    def _resource_of(self, run: Run, run_id: str) -> Any:
        """Return the OTLP resource with the service, the run and the rank."""
        return self._lib.resource_of(
            {
                "service.name": run_name_of(run, self._service),
                "service.instance.id": run_id,
                "eventloop.rank": run.rank,
                "eventloop.world_size": run.world_size,
                "eventloop.start_iter": run.start_iter,
            }
        )

    # --- the file for the next run after a kill ------------------------------------------------------------

    @property
    def _in_flight_path(self) -> Path:
        return self._state_path.with_suffix(".inflight")

    def _write_in_flight(self) -> None:
        """Store the requests without an answer and the open stages, for the next run after a kill."""
        in_flight = _InFlight(self._known.id, self._outbox.requests, self._known.last, self._spans.stages)
        with replacing(self._in_flight_path, durable=False) as file:
            file.write(msgspec.msgpack.encode(in_flight))

    def _send_interrupted(self) -> _InFlight:
        """Read the `.inflight` file and send its requests, or else an empty one, to check the collector.

        Raises:
            OSError: the collector does not answer.
        """
        try:
            in_flight = msgspec.msgpack.decode(self._in_flight_path.read_bytes(), type=_InFlight)
        except FileNotFoundError:
            in_flight = _InFlight()
        if in_flight.requests:
            self._outbox.requests = in_flight.requests
            self._outbox.send()
        else:
            self._client.post(self._lib.METRICS, b"")
        return in_flight

    def _send_killed(self, run: Run, in_flight: _InFlight) -> None:
        """End and send the spans that an earlier, killed run in this folder has left open."""
        trace_id = bytes.fromhex(in_flight.id)
        spans = Spans(trace_id, stages=in_flight.stages)
        spans.end_killed()
        if spans.finished:
            resource = self._resource_of(run, in_flight.id)
            request = self._lib.traces_request(resource, trace_id, spans.finished)
            self._outbox.requests.append((self._lib.TRACES, request))
            self._outbox.send()


def _gauges(event: ScalarsLogged) -> dict[str, float]:
    """Return the numbers of an event and its step by the names of their gauges, such as "train/loss"."""
    gauges, step_name = values_of(event), f"{event.mode}/step"
    if step_name in gauges:  # a metric called "step" is renamed, as in `JSONLWriter`'s lines
        gauges[f"{event.mode}/scalars/step"] = gauges.pop(step_name)
    return {**gauges, step_name: float(event.step)}
