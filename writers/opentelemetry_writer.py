"""The OpenTelemetry writer: numbers as gauges, stages of the run as spans, its health as log records.

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
"""The number of refused metrics that a line in the log names."""


class _InFlight(msgspec.Struct):
    """The writer's state on the disk, which the next run in the folder reads after a kill or to resume."""

    id: str = ""
    """The id of the run, as 32 hexadecimal digits."""
    requests: list[tuple[str, bytes]] = []
    """Requests that may have been received; they are sent again, unchanged."""
    last: dict[str, int] = {}
    """The last step of each metric by name, steps in `requests` included."""
    stages: Stages = msgspec.field(default_factory=Stages)
    """The stages of the run that have begun and not ended, whose spans a kill leaves open."""


class OpenTelemetryWriter(TrackerWriter):
    """Send a run to an OpenTelemetry collector by OTLP over HTTP.

        OpenTelemetryWriter("http://localhost:4318", headers={"authorization": "Bearer ..."})

    A number is a gauge `{mode}/{name}`. At the same time there is a gauge `{mode}/step`: as an attribute,
    each step would be a time series of its own. Spans are the run, its epochs, validations, tests and
    checkpoints, and in an epoch the iterations that a `TraceHook` recorded, with their phases. Events such as
    `handler_failed`, `loader_stall` and `slow_rank` are log records. The service, the run and the rank are
    attributes of the resource.

    Spans, numbers and log records have the times of the emits, however late the collector receives them;
    an event that waited in a spill file has the time of one before it. A replay sends spans with the same ids
    once more.

    A request that the collector refuses (400, 422), or that is too large (413, or more than 900 kB), is split
    until it is accepted or has one value. A refused value is left out, its metric is named once, and its
    event counts as failed; so do events of values that the collector rejects in an accepted request. Many
    refusals cost no more than some 200 requests, and then refused requests are left out without a search.
    Any other answer than 200 is an outage, for which the events wait.

    A resumed run continues the trace whose id is in `<work_dir>/otlp_run.json`. Steps that are run again are
    not sent again. After a kill the request that was under way is sent again, unchanged; a collector merges
    points of the same series and time. The spans that were open end at the last event before the kill, with
    the error "killed": a worker process, which outlives the program, sends them at once, else the next run
    in the folder does. Events that a kill took are read from the run's event log, if the run has an
    `EventLogWriter`.

    Headers are in no file of the run: `eventloop replay` takes them from OTEL_EXPORTER_OTLP_HEADERS.

    Args:
        endpoint: the URL of the collector, to which `/v1/metrics` and so on are added; by default
            OTEL_EXPORTER_OTLP_ENDPOINT.
        headers: sent with each request, such as a key; by default OTEL_EXPORTER_OTLP_HEADERS.
        service: `service.name`, by default OTEL_SERVICE_NAME, else the name of the work dir.
        timeout: seconds that a request may take.
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
        if not endpoint:  # both variables are of one collector
            check_protocol()
        self._endpoint = check_endpoint(
            *setting("endpoint", endpoint, "OTEL_EXPORTER_OTLP_ENDPOINT", "OpenTelemetryWriter")
        )
        if headers is None:
            headers_of_environment()  # to refuse wrong ones now; they are read when the run begins
        self._headers = None if headers is None else check_headers("headers", headers)
        check_texts(service=service)
        self._service = service or os.environ.get("OTEL_SERVICE_NAME")
        self._timeout = check_timeout(timeout)
        _, self._lib, self._outboxes = self.import_library(
            "opentelemetry.proto", "eventloop.writers.otlp_client", "eventloop.writers.otlp_outbox"
        )

    def connect(self, run: Run, known: Known) -> Known:
        headers = self._headers if self._headers is not None else headers_of_environment()
        self._secrets = secrets_of_headers(headers)
        self._client = self._lib.Client(self._endpoint, headers, self._timeout)
        self._clock = 0
        self._outbox = self._outboxes.Outbox(self._client, self._drop)
        self._made = 0  # how many of the waiting events have their request
        self._unsent: set[int] = set()  # the times of the numbers that wait, of which none was refused
        self._bad: list[BadEvent] = []  # the waiting events with a number that was refused
        self._named: set[tuple[str, str]] = set()  # path and name of each metric that the log calls left out
        run_id, self._before = known.id or os.urandom(16).hex(), known.last
        self._resource = self._resource_of(run, run_id)
        left = self._send_again()
        self._resumes = left.id == run_id and run.trainer_id not in ("", known.trainer_id)
        stages = self._stages(run, known, left)
        self._spans = Spans(bytes.fromhex(run_id), time.time(), stages, of_log=not run.trainer_id)
        return Known(run_id, left.last if left.id == run_id else known.last)

    def _stages(self, run: Run, known: Known, left: _InFlight) -> Stages:
        """Return the stages to continue; if another run was killed in this folder, send its open spans."""
        if left.id == known.id:
            return left.stages
        if run.trainer_id:  # a training from the beginning, not a replay
            self._send_killed(run, left)
        return Stages()

    def _send_logged(self, start: int) -> None:
        """Write the logged numbers up to the checkpoint, and all other events after the last one sent."""
        stages = self._spans.stages
        since = (stages.last_time + (-SAME if stages.open else SAME)) / SECOND
        super()._send_logged(start)
        if not self._resumes:
            return
        if (log := self._work_dir / FILE_NAME).is_file():
            others = [event for event in self.events if event is not ScalarsLogged]
            reader = EventReader(log, only=others, on_torn="ignore")
            for records in reader.blocks():
                is_own = reader.run is not None and reader.run.trainer_id == self._known.trainer_id
                if not is_own:  # the events of this run itself are delivered to the writer later
                    self._enqueue_and_send(
                        [Timed(each.time, each.event) for each in records if each.time > since]
                    )
        self._spans.end_killed()

    def had_before(self, known: Known) -> dict[str, int]:
        return self._before  # not `known.last`, which has also the steps that `connect` has sent again

    def send(self, events: list[Timed]) -> None:
        if new := events[self._made :]:
            self._outbox.requests += self._requests_of(new)
            self._made = len(events)
            self._record_in_flight()
        self._outbox.send()
        self._made = 0
        self._unsent.clear()
        self._refused, self._bad = self._refused + self._bad, []
        self._record_in_flight()

    def end(self, status: str) -> None:
        self._spans.read_traces(self._work_dir)
        self._spans.end_killed()
        self._outbox.requests += self._span_requests()
        self._outbox.send()
        self._record_in_flight()

    def where(self) -> str:
        return f" at {self._endpoint}"

    def secrets(self) -> list[str]:
        return [*getattr(self, "_secrets", ()), *secrets_of_headers(self._headers or {})]

    # --- requests ------------------------------------------------------------------------------------------

    def _drop(self, path: str, body: bytes, why: str, count: int | None) -> None:
        """Name what the collector has not taken of a request, and note the events that have failed for it.

        Args:
            path, body: the request.
            why: the collector's words.
            count: how many of its items are lost; None for all.
        """
        kind = f"{path} {'' if count is None else 'partly'}"
        new = {name: None for name in self._lib.names(path, body) if (kind, name) not in self._named}
        if new:
            self._named |= {(kind, name) for name in new}
            more = f" and {len(new) - NAMED:,} more" if len(new) > NAMED else ""
            names = ", ".join([*new][:NAMED]) + more
            lost = names if count is None else f"{count:,} of the values or records {names}"
            self.warn_once(f"{kind} {names}", f"left out are {lost}: {why}")
        points = reversed(self._lib.points_of(path, body))
        bad = {at: name for name, at in points if at in self._unsent}
        for at in sorted(bad)[:count]:
            self._unsent.remove(at)
            self._bad.append(BadEvent(event_name(ScalarsLogged), bad[at], why, reported=True))

    def _requests_of(self, events: list[Timed]) -> list[tuple[str, bytes]]:
        points: dict[str, list[tuple[int, float]]] = {}
        doubtful: dict[str, list[tuple[int, float]]] = {}  # apart, because they may be refused again
        lines = []
        for when, event in events:
            self._spans.receive(int(when * SECOND), event)
            if isinstance(event, ScalarsLogged):
                at = self._next_time(when)
                values, step = values_of(event), f"{event.mode}/step"
                if step in values:  # a metric of this name, which has another one in JSON lines, too
                    values[f"{event.mode}/scalars/step"] = values.pop(step)
                self._unsent.add(at)
                for key, value in {**values, step: float(event.step)}.items():
                    of = doubtful if key in self._outbox.doubtful else points
                    of.setdefault(key, []).append((at, value))
                continue
            if (line := log_line(int(when * SECOND), event)) is not None:
                lines.append(line)
            if isinstance(event, AfterTrainEpoch | AfterRun):
                self._spans.read_traces(self._work_dir, event.iter)
        lib, requests = self._lib, self._span_requests()
        for of in filter(None, (points, doubtful)):
            requests.append((lib.METRICS, lib.metrics_request(self._resource, of)))
        if lines:
            requests.append((lib.LOGS, lib.logs_request(self._resource, self._trace_id, lines)))
        return requests

    def _span_requests(self) -> list[tuple[str, bytes]]:
        spans, self._spans.finished = self._spans.finished, []
        if not spans:
            return []
        return [(self._lib.TRACES, self._lib.traces_request(self._resource, self._trace_id, spans))]

    @property
    def _trace_id(self) -> bytes:
        return bytes.fromhex(self._known.id)

    def _next_time(self, when: float) -> int:
        """Return nanoseconds since 1970, later than all before: a time has one step."""
        self._clock = max(int(when * SECOND), self._clock + 1)
        return self._clock

    def _resource_of(self, run: Run, run_id: str) -> Any:
        return self._lib.resource_of(
            {
                "service.name": run_name_of(run, self._service),
                "service.instance.id": run_id,
                "eventloop.rank": run.rank,
                "eventloop.world_size": run.world_size,
                "eventloop.start_iter": run.start_iter,
            }
        )

    # --- what a kill leaves --------------------------------------------------------------------------------

    @property
    def _in_flight_path(self) -> Path:
        return self._state_path.with_suffix(".inflight")

    def _record_in_flight(self) -> None:
        left = _InFlight(self._known.id, self._outbox.requests, self._known.last, self._spans.stages)
        with replacing(self._in_flight_path, durable=False) as file:
            file.write(msgspec.msgpack.encode(left))

    def _send_again(self) -> _InFlight:
        """Send the requests that a kill interrupted; without any, ask the collector whether it answers."""
        try:
            left = msgspec.msgpack.decode(self._in_flight_path.read_bytes(), type=_InFlight)
        except FileNotFoundError:
            left = _InFlight()
        if left.requests:
            self._outbox.requests = left.requests
            self._outbox.send()
        else:
            self._client.post(self._lib.METRICS, b"")
        return left

    def _send_killed(self, run: Run, left: _InFlight) -> None:
        """Send the spans that a kill of the former program has left open."""
        trace_id = bytes.fromhex(left.id)
        spans = Spans(trace_id, stages=left.stages)
        spans.end_killed()
        if spans.finished:
            resource = self._resource_of(run, left.id)
            request = self._lib.traces_request(resource, trace_id, spans.finished)
            self._outbox.requests.append((self._lib.TRACES, request))
            self._outbox.send()
