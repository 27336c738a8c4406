"""Turn the events of a run, and the trace files of `TraceHook`, into OpenTelemetry spans and log records."""

from __future__ import annotations

from collections.abc import Mapping
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
"""A second in nanoseconds."""
RECENT = 16
"""The number of ended spans whose ids are stored, to recognize an event that is received again.

It is larger than the number of spans that end within `SAME`.
"""
SAME = SECOND // 1000
"""The most nanoseconds by which the times of one event differ if it is received twice."""
BEGINS: dict[type[Event], str] = {
    BeforeRun: "run",
    BeforeTrainEpoch: "epoch",
    BeforeVal: "validation",
    BeforeTest: "test",
}
"""The events that begin a stage, which becomes a span, and the name of the stage."""
ENDS: dict[type[Event], str] = {
    AfterRun: "run",
    AfterTrainEpoch: "epoch",
    AfterVal: "validation",
    AfterTest: "test",
}
"""The events that end a stage, and the name of the stage."""
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
"""The events that become log records."""
ERRORS = (HandlerFailed, EventsDropped, CheckpointFailed)
"""The events whose log records are errors; all others are warnings."""


class SpanFacts(NamedTuple):
    """A finished span; times are nanoseconds since 1970."""

    name: str
    began: int
    ended: int
    span_id: bytes
    parent: bytes = b""
    """The id of the parent span; empty for the span of the run."""
    attributes: Mapping[str, object] = {}
    error: str = ""


class LogLine(NamedTuple):
    """A log record about a problem of the run."""

    time: int
    """Nanoseconds since 1970."""
    event: str
    """The name of the event."""
    text: str
    is_error: bool
    attributes: Mapping[str, object] = {}


class Stages(msgspec.Struct):
    """The open stages of a run, such as its epoch, and the state that a restarted process needs to end them.

    Times are nanoseconds since 1970.
    """

    run: int = 0
    """The number of runs of this trace that have begun, including resumed runs."""
    open: dict[str, tuple[int, bytes]] = {}
    """For each stage that has begun and not ended, by name: the time of its begin, and the id of its span."""
    epochs: list[tuple[int, bytes]] = []
    """For each epoch of the run, its first iteration and the id of its span."""
    info: dict[str, str] = {}
    """The facts and settings of the run, which become attributes of its span."""
    last_time: int = 0
    """The time of the last event."""
    recent: list[bytes] = []
    """The ids of the last `RECENT` spans that ended."""


class Spans:
    """Collect the finished spans of a run.

    The span of a run contains the spans of its epochs, validations, tests and checkpoints. The span of an
    epoch contains the recorded iterations, and an iteration contains its phases. The id of a span is a hash
    of its stage, so a replay gives the same ids.

    Args:
        trace_id: the trace of the run.
        since: the Unix time before which trace files are ignored. A `before_run` event with an earlier time
            replaces it.
        stages: the open stages of a killed program or worker process, to be continued.
        of_log: whether the events are read from a log. If the first event is a `before_run`, the log is read
            from its beginning, and `stages` is ignored.
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
        self._read_traces: set[Path] = set()

    def receive(self, time: int, event: Event) -> None:
        """Begin or end the stage that an event stands for; `time` is nanoseconds since 1970."""
        self._outcome.receive(event)
        if isinstance(event, BeforeRun) and not self._begin_run(time):
            return
        self._of_log = False
        # a resumed run also receives events of its log, which are older than the last event
        self.stages.last_time = max(self.stages.last_time, time)
        if name := BEGINS.get(type(event)):
            span_id = self._id("run") if name == "run" else self._id(name, getattr(event, "iter", 0))
            self.stages.open[name] = (time, span_id)
            if isinstance(event, BeforeTrainEpoch):
                self.stages.epochs.append((event.iter, span_id))
        elif name := ENDS.get(type(event)):
            if name in self.stages.open:  # a restarted worker process may receive the end again
                self._end(name, _fields(event), self._outcome.error if name == "run" else "")
        elif isinstance(event, CheckpointSaved | CheckpointFailed):
            began = time - int(event.seconds * SECOND)
            span_id = self._id("checkpoint", event.path, event.iter)
            self._add("checkpoint", began, time, span_id, _fields(event), getattr(event, "error", ""))
        elif isinstance(event, RunInfo):
            self.stages.info = _run_attributes(event)

    def _begin_run(self, time: int) -> bool:
        """Reset the stages for a run that begins at `time`; return False if it has begun already."""
        if self._of_log:
            self.stages = Stages()
        self._of_log = False
        if "run" in self.stages.open and abs(time - self.stages.open["run"][0]) < SAME:
            return False  # the event is received again, by a restarted worker process or from the log
        self.end_killed()
        self.stages = Stages(self.stages.run + 1, info=self.stages.info, recent=self.stages.recent)
        self._since = min(self._since, time / SECOND)
        return True

    def end_killed(self) -> None:
        """End all open stages, the run last, with the error "killed"."""
        for name in [*reversed(self.stages.open)]:
            self._end(name, {}, "killed")

    def read_traces(self, work_dir: Path, done: float = inf) -> None:
        """Add spans for the iterations, with their phases, in new trace files of `TraceHook`.

        Args:
            work_dir: the folder with the trace files.
            done: the number of completed iterations. Files with later iterations, which a replay finds, are
                skipped: their epochs have not begun yet.
        """
        try:
            traces = find_traces(work_dir)
        except (FileNotFoundError, ValueError):  # rank 0 has written no trace file yet
            return
        for trace in traces:
            is_new = trace.path not in self._read_traces and trace.path.stat().st_mtime >= self._since
            if is_new and trace.last < done:
                self._read_traces.add(trace.path)
                self._add_iterations(msgspec.json.decode(trace.path.read_bytes()))

    def _id(self, *stage: object) -> bytes:
        """Return the id of the span of a stage of the current run: the same in every process and replay."""
        return sha256(repr((self._trace_id, self.stages.run, *stage)).encode()).digest()[:8]

    def _end(self, name: str, attributes: dict[str, object], error: str) -> None:
        """Finish the span of a stage at the time of the last event; before the run, all stages within it."""
        time = self.stages.last_time
        if name == "run":
            # stages that are still open were interrupted; the innermost began last, and ends first
            for inner_stage in [stage for stage in reversed(self.stages.open) if stage != "run"]:
                self._end(inner_stage, {}, error)
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
        """Append a finished span of the run, unless it was appended before."""
        if span_id in self.stages.recent:  # its event was received before, and is now read from the log
            return
        self.stages.recent = [*self.stages.recent, span_id][-RECENT:]
        parent = b"" if name == "run" else self._run_span()
        self.finished.append(SpanFacts(name, began, ended, span_id, parent, attributes, error))

    def _run_span(self) -> bytes:
        """Return the id of the span of the last run, which may have ended; b"" before the first run."""
        return self._id("run") if self.stages.run else b""

    def _epoch_of(self, iteration: int) -> bytes:
        """Return the id of the span of an iteration's epoch, or of the run if no epoch has begun."""
        begun = [span_id for first_iter, span_id in self.stages.epochs if first_iter <= iteration]
        return begun[-1] if begun else self._run_span()

    def _add_iterations(self, trace: Any) -> None:
        """Append spans for the iterations in a trace file, and for the phases within them."""
        trace_began = int(trace["otherData"]["began"] * SECOND)
        entries = [entry for entry in trace["traceEvents"] if entry.get("ph") == "X"]  # "X": with a duration
        # by time, and an iteration before the phase that begins with it
        entries.sort(key=lambda entry: (entry["ts"], entry["cat"] != "iteration"))
        last_iteration: dict[object, SpanFacts] = {}  # on each thread
        for entry in entries:
            began, ended = _extent(trace_began, entry)
            iteration = last_iteration.get(entry["tid"])
            if entry["cat"] == "iteration":
                number = entry["args"].get("iter", -1)
                span_id, parent = self._id("iteration", number), self._epoch_of(number)
                iteration = SpanFacts("iteration", began, ended, span_id, parent, {"iter": number})
                last_iteration[entry["tid"]] = iteration
                self.finished.append(iteration)
            elif entry["cat"] == "phase" and iteration is not None and ended <= iteration.ended:
                name, offset = entry["name"], began - iteration.began
                span_id = self._id("phase", iteration.attributes["iter"], name, offset)
                self.finished.append(SpanFacts(name, began, ended, span_id, iteration.span_id))


def log_line(time: int, event: Event) -> LogLine | None:
    """Return the log record of an event about a problem of the run, None for any other event.

    Args:
        time: the time of the event, in nanoseconds since 1970.
        event: the event.
    """
    if not isinstance(event, HEALTH):
        return None
    attributes = _fields(event)
    name = event_name(type(event))
    text = ", ".join(f"{key}: {value}" for key, value in attributes.items())
    return LogLine(time, name, f"{name.replace('_', ' ')}: {text}", isinstance(event, ERRORS), attributes)


def _run_attributes(event: RunInfo) -> dict[str, str]:
    """Return the facts and settings of a run as attributes of its span."""
    # the plan of the handlers is a long table, of no use to a query for runs
    facts = {key: text for key, text in event.info.items() if key != "plan"}
    facts |= {f"config.{key}": str(value) for key, value in flat(event.config)}
    facts |= {key: str(value) for key, value in flat(event.options)}
    return {f"eventloop.{key}": text for key, text in facts.items()}


def _fields(event: Event) -> dict[str, object]:
    """Return the fields of an event that are numbers or texts."""
    fields = msgspec.structs.asdict(event)
    return {name: value for name, value in fields.items() if isinstance(value, bool | int | float | str)}


def _extent(trace_began: int, entry: Any) -> tuple[int, int]:
    """Return the begin and the end of an entry of a trace file, in nanoseconds since 1970.

    Args:
        trace_began: the nanoseconds since 1970 at which the times of the trace begin.
        entry: the entry, whose times are microseconds.
    """
    began = trace_began + int(entry["ts"] * 1000)
    return began, began + int(entry["dur"] * 1000)
