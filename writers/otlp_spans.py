"""Turn the events of a run, and the trace files of `TraceHook`, into OpenTelemetry spans and log records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from eventloop.description.plain_values import flat
from eventloop.events import (
    AfterRun,
    AfterTest,
    AfterTrainEpoch,
    AfterVal,
    BeforeRun,
    BeforeTest,
    BeforeTrainEpoch,
    BeforeVal,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    EventsDropped,
    HandlerFailed,
    InvalidLoss,
    LoaderStall,
    OptimizerStepSkipped,
    PreemptionRequested,
    RunInfo,
    SlowHandler,
    SlowRank,
    StopRequested,
)
from eventloop.events.base import event_name
from eventloop.events.outcome import RunOutcome
from eventloop.tracing.files import find_traces

SECOND = 1_000_000_000
RECENT = 16
"""More spans than end within `SAME`."""
SAME = SECOND // 1000
"""The most nanoseconds by which the times of an event in two deliveries differ."""
BEGINS: dict[type[Event], str] = {
    BeforeRun: "run",
    BeforeTrainEpoch: "epoch",
    BeforeVal: "validation",
    BeforeTest: "test",
}
ENDS: dict[type[Event], str] = {
    AfterRun: "run",
    AfterTrainEpoch: "epoch",
    AfterVal: "validation",
    AfterTest: "test",
}
HEALTH: tuple[type[Event], ...] = (
    HandlerFailed,
    EventsDropped,
    LoaderStall,
    SlowHandler,
    SlowRank,
    InvalidLoss,
    OptimizerStepSkipped,
    PreemptionRequested,
    StopRequested,
    CheckpointFailed,
)
ERRORS = (HandlerFailed, EventsDropped, CheckpointFailed)


class SpanFacts(NamedTuple):
    """A finished span; times are nanoseconds since 1970."""

    name: str
    began: int
    ended: int
    span_id: bytes
    parent: bytes = b""
    attributes: Mapping[str, object] = {}
    error: str = ""


class LogLine(NamedTuple):
    """A log record about the run's health."""

    time: int
    event: str
    text: str
    is_error: bool
    attributes: Mapping[str, object] = {}


class Stages(msgspec.Struct):
    """The stages of a trace that have begun and not ended; times are nanoseconds since 1970."""

    run: int = 0
    """The number of runs that have begun, resumed ones included."""
    open: dict[str, tuple[int, bytes]] = {}
    """When each stage began, and the id of its span, by its name, such as "epoch"."""
    epochs: list[tuple[int, bytes]] = []
    """For each epoch of the run, its first iteration and the id of its span."""
    info: dict[str, str] = {}
    """The facts of the run."""
    last_time: int = 0
    """The time of the last event."""
    recent: list[bytes] = []
    """The ids of the last spans that ended."""


class Spans:
    """Collect the finished spans of a run: run > epoch > iteration > phases; run > validation, checkpoint.

    The id of a span is a hash of its stage, so a replay gives the same ids.

    Args:
        trace_id: the trace of the run.
        since: the Unix time before which trace files are ignored; a run that began earlier sets it back.
        stages: those that a killed program or worker process has left open.
        of_log: whether the events are those of a log: all of them, if the first one begins a run, else the
            last ones of the run.
    """

    def __init__(
        self, trace_id: bytes, since: float = inf, stages: Stages | None = None, *, of_log: bool = False
    ) -> None:
        self.finished: list[SpanFacts] = []
        self.stages = stages or Stages()
        self._trace_id = trace_id
        self._since = since
        self._of_log = of_log
        self._outcome = RunOutcome()
        self._read: set[Path] = set()

    def receive(self, time: int, event: Event) -> None:
        """Note what an event begins or ends; `time` is nanoseconds since 1970."""
        kind = type(event)
        self._outcome.receive(event)
        if self._of_log and isinstance(event, BeforeRun):
            self.stages = Stages()
        self._of_log = False
        if isinstance(event, BeforeRun):
            if "run" in self.stages.open and abs(time - self.stages.open["run"][0]) < SAME:
                return  # the same event once more, for a new worker process, or from the log
            self.end_killed()
            self.stages = Stages(self.stages.run + 1, info=self.stages.info, recent=self.stages.recent)
            self._since = min(self._since, time / SECOND)
        # a resumed run reads events of its log, which are older than the last one
        self.stages.last_time = max(self.stages.last_time, time)
        if name := BEGINS.get(kind):
            span_id = self._id("run") if name == "run" else self._id(name, getattr(event, "iter", 0))
            self.stages.open[name] = (time, span_id)
            if isinstance(event, BeforeTrainEpoch):
                self.stages.epochs.append((event.iter, span_id))
        elif name := ENDS.get(kind):
            if name in self.stages.open:  # else a new worker process receives the end once more
                self._end(name, _fields(event), self._outcome.error if name == "run" else "")
        elif isinstance(event, CheckpointSaved | CheckpointFailed):
            began = time - int(event.seconds * SECOND)
            span_id = self._id("checkpoint", event.path, event.iter)
            self._add("checkpoint", began, time, span_id, _fields(event), getattr(event, "error", ""))
        elif isinstance(event, RunInfo):
            # the plan is a table of several kilobytes for reading, of no use to a query for runs
            facts = {key: text for key, text in event.info.items() if key != "plan"}
            settings = {
                **{f"config.{key}": item for key, item in flat(event.config)},
                **dict(flat(event.options)),
            }
            facts |= {key: str(value) for key, value in settings.items()}
            self.stages.info = {f"eventloop.{key}": text for key, text in facts.items()}

    def end_killed(self) -> None:
        """End all open stages, the run last, with the error "killed"."""
        for name in [*reversed(self.stages.open)]:
            self._end(name, {}, "killed")

    def read_traces(self, work_dir: Path, done: float = inf) -> None:
        """Add the iterations, with their phases, of this run's trace files of the first `done` iterations."""
        try:
            traces = find_traces(work_dir)
        except (FileNotFoundError, ValueError):  # there is none yet of rank 0
            return
        for trace in traces:
            new = trace.path not in self._read and trace.path.stat().st_mtime >= self._since
            if new and trace.last < done:  # in a replay, others are of epochs that have not begun yet
                self._read.add(trace.path)
                self._add_iterations(msgspec.json.decode(trace.path.read_bytes()))

    def _id(self, *stage: object) -> bytes:
        return sha256(repr((self._trace_id, self.stages.run, *stage)).encode()).digest()[:8]

    def _end(self, name: str, attributes: dict[str, object], error: str) -> None:
        time = self.stages.last_time
        if name == "run":
            # an error or a kill has interrupted the others, the innermost of which began last
            for inner in [each for each in reversed(self.stages.open) if each != "run"]:
                self._end(inner, {}, error)
            attributes |= self.stages.info
        began, span_id = self.stages.open.pop(name)
        self._add(name, began, time, span_id, attributes, error)

    def _add(
        self,
        name: str,
        began: int,
        ended: int,
        span_id: bytes,
        attributes: dict[str, object],
        error: str = "",
    ) -> None:
        if span_id in self.stages.recent:  # read from the log once more
            return
        self.stages.recent = [*self.stages.recent, span_id][-RECENT:]
        parent = b"" if name == "run" else self._run_span()
        self.finished.append(SpanFacts(name, began, ended, span_id, parent, attributes, error))

    def _run_span(self) -> bytes:
        """Return the id of the span of the last run, which may have ended; b"" before the first."""
        return self._id("run") if self.stages.run else b""

    def _epoch_of(self, iteration: int) -> bytes:
        """Return the span of the epoch with an iteration; that of the run if there is no such epoch."""
        begun = [span_id for first, span_id in self.stages.epochs if first <= iteration]
        return begun[-1] if begun else self._run_span()

    def _add_iterations(self, trace: Any) -> None:
        origin = int(trace["otherData"]["began"] * SECOND)
        spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        spans.sort(key=lambda span: (span["ts"], span["cat"] != "iteration"))
        latest: dict[object, SpanFacts] = {}  # the iteration that began last on each thread
        for span in spans:
            name, (began, ended), around = span["name"], _extent(origin, span), latest.get(span["tid"])
            if span["cat"] == "iteration":
                number = span["args"].get("iter", -1)
                span_id, parent = self._id("iteration", number), self._epoch_of(number)
                around = SpanFacts("iteration", began, ended, span_id, parent, {"iter": number})
                latest[span["tid"]] = around
                self.finished.append(around)
            elif span["cat"] == "phase" and around is not None and ended <= around.ended:
                span_id = self._id("phase", around.attributes["iter"], name, began - around.began)
                self.finished.append(SpanFacts(name, began, ended, span_id, around.span_id))


def log_line(time: int, event: Event) -> LogLine | None:
    """Return the log record of an event about the run's health, None for another event."""
    if not isinstance(event, HEALTH):
        return None
    attributes = _fields(event)
    name = event_name(type(event))
    told = ", ".join(f"{key}: {value}" for key, value in attributes.items())
    return LogLine(time, name, f"{name.replace('_', ' ')}: {told}", isinstance(event, ERRORS), attributes)


def _fields(event: Event) -> dict[str, object]:
    return dict(_plain_fields(event))


def _plain_fields(event: Event) -> Iterator[tuple[str, object]]:
    for name, value in msgspec.structs.asdict(event).items():
        if isinstance(value, bool | int | float | str):
            yield name, value


def _extent(origin: int, span: Any) -> tuple[int, int]:
    began = origin + int(span["ts"] * 1000)
    return began, began + int(span["dur"] * 1000)
