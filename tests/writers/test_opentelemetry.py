"""OpenTelemetryWriter: what a collector receives over HTTP."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from copy import copy
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import Any

import msgspec
import pytest

from eventloop import replay
from eventloop.background.queues import subscriber
from eventloop.events import (
    AfterRun,
    AfterTrainEpoch,
    AfterVal,
    BeforeRun,
    BeforeTrain,
    BeforeTrainEpoch,
    BeforeVal,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    HandlerFailed,
    RunInfo,
    SlowRank,
)
from eventloop.events.deferred import Timed
from eventloop.events.run import Run
from eventloop.hooks import TraceHook
from eventloop.writers import EventLogWriter, OpenTelemetryWriter
from tests.support.trainers import batches, build_trainer
from tests.writers.conftest import Account, Attach, emit, train, val, write
from tests.writers.otlp_collector import Collector, is_missing

if is_missing("opentelemetry.proto"):
    pytest.skip(
        "opentelemetry-proto is not installed, so OpenTelemetryWriter is NOT tested: "
        "pip install 'torch-eventloop[otlp]'",
        allow_module_level=True,
    )

KEY = "Bearer s3cr3t"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def make(collector: Collector, **options: Any) -> OpenTelemetryWriter:
    return OpenTelemetryWriter(
        collector.url, **{"headers": {"authorization": KEY}, "offload": "thread", **options}
    )


@pytest.mark.parametrize("offload", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_every_value_is_a_point_with_a_step(attach: Attach, collector: Collector, offload: str) -> None:
    """A gauge of each name, and one of the step at the same time; rank and service are of the resource."""
    write(
        attach(make(collector, offload=offload, service="digits"), rank=1, world_size=2),
        *train(1, 2, 3), val(3, acc=0.5), AfterRun(),
    )  # fmt: skip

    assert collector.points() == [("train/loss", s, s / 4) for s in (1, 2, 3)] + [("val/acc", 3, 0.5)]
    (resource,) = (m.resource_metrics[0].resource for m in collector.messages["/v1/metrics"][1:])
    attributes = {a.key: a.value.string_value or a.value.int_value for a in resource.attributes}
    assert (attributes["service.name"], attributes["eventloop.rank"]) == ("digits", 1)
    assert {headers["authorization"] for headers in collector.headers} == {KEY}


def test_a_metric_of_the_name_step_has_a_name_of_its_own(attach: Attach, collector: Collector) -> None:
    """It is sent under the name that it has in JSON lines, beside the gauge of the step."""
    write(attach(make(collector)), *train(1, step=777.0, loss=0.5), AfterRun())

    assert sorted(collector.points()) == [("train/loss", 1, 0.5), ("train/scalars/step", 1, 777.0)]


def test_traces_of_another_rank_cost_no_value(attach: Attach, collector: Collector, tmp_path: Path) -> None:
    """Where only another rank has written its traces at the end of an epoch, every value is sent, once."""
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "iterations_0-9.rank1.json").write_text("{}")

    write(attach(make(collector)), *train(1, 2), AfterTrainEpoch(iter=2), *train(3), AfterRun())

    assert collector.points() == [("train/loss", s, s / 4) for s in (1, 2, 3)]


def test_values_beside_a_damaged_trace_arrive(attach: Attach, collector: Collector, tmp_path: Path) -> None:
    """An error while requests are made leaves the values for the next time."""
    bus = attach(make(collector))
    emit(bus, *train(1))
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "iterations_0-9.json").write_text("damaged")

    write(bus, *train(2), AfterTrainEpoch(iter=20), *train(3), AfterRun())

    assert collector.points() == [("train/loss", s, s / 4) for s in (1, 2, 3)]


def test_values_that_are_not_finite_come_back(attach: Attach, collector: Collector) -> None:
    """A gauge may have any float."""
    values = (math.nan, math.inf, -math.inf)

    write(attach(make(collector)), *(train(s, loss=v)[0] for s, v in enumerate(values, start=1)), AfterRun())

    assert repr([value for _, _, value in collector.points()]) == "[nan, inf, -inf]"


def test_stages_are_spans_and_health_is_in_the_logs(attach: Attach, collector: Collector) -> None:
    """A run holds epochs, validations and checkpoints; failures are errors."""
    write(
        attach(make(collector)),
        BeforeRun(), RunInfo(info={"model": "Net"}), BeforeTrain(), BeforeTrainEpoch(), AfterTrainEpoch(epoch=1),
        BeforeVal(), AfterVal(), CheckpointSaved(path="runs/a/epoch_1", seconds=0.5),
        CheckpointFailed(path="runs/a/epoch_2", error="full"), HandlerFailed(handler="x", error="ValueError"),
        SlowRank(rank=1),
        AfterRun(reason="error", error="ValueError: no"),
    )  # fmt: skip

    spans = {span.name: span for span in collector.spans()}
    assert {"run", "epoch", "validation", "checkpoint"} == {*spans}
    assert {span.parent_span_id for name, span in spans.items() if name != "run"} == {spans["run"].span_id}
    assert spans["run"].status.message == "ValueError: no"
    saved, failed = (span for span in collector.spans() if span.name == "checkpoint")
    assert saved.end_time_unix_nano - saved.start_time_unix_nano == 500_000_000
    assert failed.status.message == "full"
    assert [(r.event_name, r.severity_text) for r in collector.logs()] == [
        ("checkpoint_failed", "ERROR"),
        ("handler_failed", "ERROR"),
        ("slow_rank", "WARN"),
    ]


def test_the_facts_of_the_run_are_attributes_without_the_plan(attach: Attach, collector: Collector) -> None:
    """A query finds runs by a fact of `run_info`; the table of the handlers is not sent."""
    info = {"model": "Net", "seed": "7", "plan": "a long table"}

    write(attach(make(collector)), BeforeRun(), RunInfo(info=info), AfterRun())

    (run,) = collector.spans()
    facts = {item.key: item.value.string_value for item in run.attributes}
    assert {key: text for key, text in facts.items() if key.startswith("eventloop.")} == {
        "eventloop.model": "Net",
        "eventloop.seed": "7",
    }


def test_a_span_has_the_times_of_its_emits(attach: Attach, collector: Collector) -> None:
    """A stage is as long as it was by an own clock, though its begin and end are delivered together."""
    writer = make(collector)
    writer.linger = 1000.0
    bus = attach(writer)
    emit(bus, BeforeRun())  # later events gather

    clock = []
    for event in (BeforeTrainEpoch(), AfterTrainEpoch(epoch=1)):
        clock.append(perf_counter())
        bus.emit(event)
        clock.append(perf_counter())
    write(bus, AfterRun())

    (epoch,) = (span for span in collector.spans() if span.name == "epoch")
    seconds = (epoch.end_time_unix_nano - epoch.start_time_unix_nano) / 1e9
    rounding = 1e-6  # of Unix times
    assert clock[2] - clock[1] - rounding <= seconds <= clock[3] - clock[0] + rounding


@pytest.mark.slow
def test_traced_iterations_are_spans_with_phases(tmp_path: Path, collector: Collector) -> None:
    """The iterations of a TraceHook are in their epoch, with their phases as children; so they are in a replay."""
    hooks = [TraceHook(begin=5, iterations=4)]
    writers = [EventLogWriter(), make(collector)]
    trainer = build_trainer(tmp_path, train_loader=batches(3), max_epochs=4, hooks=hooks, writers=writers)
    trainer.train()
    trainer.close()
    live = collector.spans()

    epochs = {span.span_id: epoch for epoch, span in enumerate(s for s in live if s.name == "epoch")}
    iterations = {span.span_id: span for span in live if span.name == "iteration"}
    found = [(_attribute(span, "iter"), epochs[span.parent_span_id]) for span in iterations.values()]
    assert found == [(5, 1), (6, 2), (7, 2), (8, 2)]
    phases = [span for span in live if span.parent_span_id in iterations]
    assert {span.name for span in phases} >= {"forward"}
    for phase in phases:
        around = iterations[phase.parent_span_id]
        assert around.start_time_unix_nano <= phase.start_time_unix_nano
        assert phase.end_time_unix_nano <= around.end_time_unix_nano

    replay(tmp_path, make(collector), work_dir=tmp_path)

    again = collector.spans()[len(live) :]
    assert {(s.span_id, s.parent_span_id) for s in again} == {(s.span_id, s.parent_span_id) for s in live}


def _attribute(span: Any, key: str) -> int:
    return next(int(a.value.int_value) for a in span.attributes if a.key == key)


def test_a_resumed_run_continues_its_trace(attach: Attach, collector: Collector) -> None:
    """The trace has the same id, and steps that are run again are not sent again."""
    write(attach(make(collector)), BeforeRun(), BeforeTrain(), *train(1, 2, 3, loss=1.0), AfterRun())

    write(
        attach(make(collector), start_iter=2),
        BeforeRun(), BeforeTrain(iter=2), *train(3, 4, loss=2.0), AfterRun(),
    )  # fmt: skip

    assert [(step, value) for _, step, value in collector.points()] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
    ]
    assert len({span.trace_id for span in collector.spans()}) == 1


def test_a_request_that_a_kill_interrupted_is_sent_again(
    attach: Attach, collector: Collector, tmp_path: Path
) -> None:
    """The same points come once more, with the same times, which a database merges."""
    bus = attach(make(collector))
    emit(bus, *train(1, 2))
    state = (tmp_path / "otlp_run.json").read_bytes()
    in_flight = (tmp_path / "otlp_run.inflight").read_bytes()
    write(bus)
    (tmp_path / "otlp_run.json").write_bytes(state.replace(b'"train/loss":2', b'"train/loss":0'))
    (tmp_path / "otlp_run.inflight").write_bytes(in_flight)
    before = len(collector.messages["/v1/metrics"])

    write(attach(make(collector), start_iter=1), BeforeTrain(iter=1), *train(2, 3), AfterRun())

    assert len(collector.messages["/v1/metrics"]) == before + 2
    assert [step for _, step, _ in collector.points()] == [1, 2, 3]
    write(attach(make(collector), start_iter=3), BeforeTrain(iter=3))
    asked = collector.messages["/v1/metrics"].pop()
    assert not asked.resource_metrics
    assert len(collector.messages["/v1/metrics"]) == before + 2  # what was received is not sent again


class Kill:
    """Keep the files of the writer as a kill would leave them, and put them back after a close."""

    def __init__(self, folder: Path) -> None:
        self._files = {path: path.read_bytes() for path in folder.glob("otlp_run.*")}

    def restore(self) -> None:
        for path, data in self._files.items():
            path.write_bytes(data)


def parts(spans: list[Any]) -> list[tuple[str, str]]:
    """The name and the error of each span, after a check that each is there once, and in one that is there."""
    ids = [span.span_id for span in spans]
    assert len({*ids}) == len(ids)
    assert {span.parent_span_id for span in spans} <= {*ids, b""}
    return sorted((span.name, span.status.message) for span in spans)


def test_stages_that_a_kill_interrupted_end_with_it(
    attach: Attach, collector: Collector, tmp_path: Path
) -> None:
    """The resumed run sends the spans of the killed part, which end at its last event; none is sent twice."""
    bus = attach(make(collector))
    emit(bus, BeforeRun(), RunInfo(info={"model": "Net"}), BeforeTrain(), BeforeTrainEpoch())
    emit(bus, CheckpointSaved(path="iter_1", iter=1), *train(1))
    ((_, last),) = (key for key in collector.series() if key[0] == "train/loss")
    kill, spans = Kill(tmp_path), collector.spans()
    bus.close()
    kill.restore()
    collector.messages["/v1/traces"].clear()

    write(
        attach(make(collector), trainer_id="b", start_iter=1),
        BeforeRun(iter=1), BeforeTrain(iter=1), BeforeTrainEpoch(iter=1), *train(2), AfterTrainEpoch(iter=2),
        AfterRun(iter=2),
    )  # fmt: skip

    spans += collector.spans()
    assert parts(spans) == [
        ("checkpoint", ""),
        ("epoch", ""),
        ("epoch", "killed"),
        ("run", ""),
        ("run", "killed"),
    ]
    killed = {span.name: span for span in spans if span.status.message == "killed"}
    assert {span.end_time_unix_nano for span in killed.values()} == {last}
    assert [item.value.string_value for item in killed["run"].attributes] == ["Net"]


def test_what_a_kill_took_is_read_from_the_log(collector: Collector, tmp_path: Path) -> None:
    """Stages, checkpoints and health after the last request are in the event log, and arrive once."""
    sent = at(1e9, BeforeRun(), BeforeTrain(), BeforeTrainEpoch(), CheckpointSaved(path="iter_1", iter=1))
    taken = at(
        1e9 + 1, AfterTrainEpoch(iter=1), BeforeVal(iter=1), AfterVal(iter=1), BeforeTrainEpoch(iter=1, epoch=1),
        HandlerFailed(handler="x", error="ValueError"), *train(2),
    )  # fmt: skip
    run = Run(work_dir=str(tmp_path), trainer_id="a")
    writer, log, again = make(collector), EventLogWriter(), make(collector)
    writer.open(run)
    writer.write_timed(sent)
    log.open(run)
    log.write_timed([*sent, *taken])
    log.close()
    kill, spans = Kill(tmp_path), collector.spans()
    writer.close()
    kill.restore()
    collector.messages["/v1/traces"].clear()

    again.open(Run(work_dir=str(tmp_path), trainer_id="b", start_iter=1))
    again.write_timed(at(1e9 + 9, BeforeRun(iter=1), BeforeTrain(iter=1), *train(2), AfterRun(iter=2)))
    again.close()

    assert parts(spans + collector.spans()) == [
        ("checkpoint", ""), ("epoch", ""), ("epoch", "killed"), ("run", ""), ("run", "killed"), ("validation", ""),
    ]  # fmt: skip
    assert [record.event_name for record in collector.logs()] == ["handler_failed"]
    assert [step for _, step, _ in collector.points()] == [2]


def test_the_rest_of_a_run_ends_its_spans(collector: Collector, tmp_path: Path) -> None:
    """Events that a hanging collector did not take are delivered later, without those before them."""
    begin, rest = (
        at(1e9, BeforeRun(), BeforeTrainEpoch()),
        at(1e9 + 1, AfterTrainEpoch(iter=1), AfterRun(iter=1)),
    )
    writer, later = make(collector), make(collector)
    writer.open(Run(work_dir=str(tmp_path), trainer_id="a"))
    writer.write_timed(begin)
    kill = Kill(tmp_path)
    writer.close()
    kill.restore()
    collector.messages["/v1/traces"].clear()

    later.open(Run(work_dir=str(tmp_path)))
    later.write_timed(rest)
    later.close()

    assert parts(collector.spans()) == [("epoch", ""), ("run", "")]


def test_many_resumes_send_each_checkpoint_once(collector: Collector, tmp_path: Path) -> None:
    """However many there are, and however often the run is killed, or its worker."""
    saved = [CheckpointSaved(path=f"iter_{number}", iter=number) for number in range(20)]
    for number, trainer in enumerate("aabc"):
        run = Run(work_dir=str(tmp_path), trainer_id=trainer, start_iter=20 if number else 0)
        events = at(
            1e9 + number, BeforeRun(iter=run.start_iter), *(saved if not number else []), *train(21 + number)
        )
        writer, log = make(collector), EventLogWriter()
        for each in (log, writer):
            each.open(run)
            each.write_timed(events)
        log.close()
        kill = Kill(tmp_path)
        before = dict(collector.messages)
        writer.close()
        kill.restore()
        collector.messages.update(before)

    sent = [span.span_id for span in collector.spans() if span.name == "checkpoint"]
    assert len(sent) == len({*sent}) == 20


def test_what_came_after_the_end_of_a_killed_part_is_in_its_run(collector: Collector, tmp_path: Path) -> None:
    """A worker process that outlived the kill has ended the run; the log may have later events."""
    sent = at(1e9, BeforeRun(), BeforeTrain(), BeforeTrainEpoch())
    taken = at(1e9 + 1, CheckpointSaved(path="iter_1", iter=1), AfterTrainEpoch(iter=1), BeforeVal(iter=1))
    run = Run(work_dir=str(tmp_path), trainer_id="a")
    writer, log, again = make(collector), EventLogWriter(), make(collector)
    for each, events in ((writer, sent), (log, [*sent, *taken])):
        each.open(run)
        each.write_timed(events)
        each.close()

    again.open(Run(work_dir=str(tmp_path), trainer_id="b", start_iter=1))
    again.write_timed(at(1e9 + 9, BeforeRun(iter=1), AfterRun(iter=2)))
    again.close()

    assert parts(collector.spans()) == [
        ("checkpoint", ""), ("epoch", "killed"), ("run", ""), ("run", "killed"), ("validation", "killed"),
    ]  # fmt: skip
    killed = next(span for span in collector.spans() if (span.name, span.status.message) == ("run", "killed"))
    assert {span.parent_span_id for span in collector.spans() if span.name != "run"} == {killed.span_id}


def test_a_writer_that_outlives_a_kill_ends_the_spans(attach: Attach, collector: Collector) -> None:
    """A close without the end of the run sends the spans that are open, as a worker process does."""
    bus = attach(make(collector))
    emit(bus, BeforeRun(), BeforeTrain(), BeforeTrainEpoch(), *train(1))

    bus.close()
    write(attach(make(collector), trainer_id="b", start_iter=1), BeforeRun(iter=1), AfterRun(iter=1))

    assert parts(collector.spans()) == [("epoch", "killed"), ("run", ""), ("run", "killed")]


def test_a_worker_that_died_goes_on_with_its_spans(
    attach: Attach, collector: Collector, tmp_path: Path
) -> None:
    """A writer that is made again in the middle of a run ends the stages that the former one began."""
    bus = attach(make(collector), trainer_id="a")
    emit(bus, BeforeRun(), BeforeTrain(), BeforeTrainEpoch(), *train(1))
    kill = Kill(tmp_path)
    bus.close()
    kill.restore()
    collector.messages["/v1/traces"].clear()

    write(attach(make(collector), trainer_id="a"), *train(2), AfterTrainEpoch(iter=2), AfterRun(iter=2))

    assert parts(collector.spans()) == [("epoch", ""), ("run", "")]
    assert all(span.start_time_unix_nano < span.end_time_unix_nano for span in collector.spans())


def at(begin: float, *events: Event) -> list[Timed]:
    """The events, 10 ms after each other."""
    return [Timed(begin + number / 100, event) for number, event in enumerate(events)]


@pytest.mark.parametrize("sent", ["the begin", "all"])
def test_a_new_worker_makes_no_spans_of_what_was_sent(
    collector: Collector, tmp_path: Path, sent: str
) -> None:
    """A worker may die after it has sent events and before it acknowledges them: another receives them again."""
    begin = at(1e9, BeforeRun(), BeforeTrain(), BeforeTrainEpoch(), *train(1))
    end = at(1e9 + 1, AfterTrainEpoch(iter=1), AfterRun(iter=1))
    run = Run(work_dir=str(tmp_path), trainer_id="a")
    first, again = make(collector), make(collector)
    first.open(run)
    first.write_timed([*begin, *(end if sent == "all" else [])])
    kill, spans = Kill(tmp_path), collector.spans()
    first.close()
    kill.restore()
    collector.messages["/v1/traces"].clear()

    again.open(run)
    again.write_timed([*([] if sent == "all" else begin), *end])
    again.close()

    assert parts(spans + collector.spans()) == [("epoch", ""), ("run", "")]


def test_iterations_of_a_new_worker_are_in_their_epoch(
    attach: Attach, collector: Collector, tmp_path: Path
) -> None:
    """The epoch is known although its begin was another worker's."""
    bus = attach(make(collector), trainer_id="a")
    emit(bus, BeforeRun(), BeforeTrain(), BeforeTrainEpoch())
    kill = Kill(tmp_path)
    bus.close()
    kill.restore()
    collector.messages["/v1/traces"].clear()
    iteration = {
        "ph": "X", "cat": "iteration", "name": "1", "tid": 1, "ts": 0.0, "dur": 5.0, "args": {"iter": 1},
    }  # fmt: skip
    again = attach(make(collector), trainer_id="a")
    emit(again, *train(2))
    trace = {"otherData": {"began": time()}, "traceEvents": [iteration]}
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/iterations_0-1.json").write_bytes(msgspec.json.encode(trace))

    write(again, AfterTrainEpoch(iter=2), AfterRun(iter=2))

    spans = {span.name: span for span in collector.spans()}
    assert spans["iteration"].parent_span_id == spans["epoch"].span_id


def test_each_run_has_spans_of_its_own(attach: Attach, collector: Collector, tmp_path: Path) -> None:
    """Runs that begin at the same iteration, of one trainer or resumed from one checkpoint again and again."""
    evaluation = [BeforeRun(iter=4), BeforeVal(iter=4), AfterVal(iter=4), AfterRun(iter=4)]
    for trainer in "ab":
        bus = attach(make(collector), trainer_id=trainer, start_iter=4)
        run = Run(work_dir=str(tmp_path), trainer_id=trainer, start_iter=4)
        EventLogWriter().attach(bus, partial(copy, run))
        write(bus, *evaluation, *evaluation)

    live = collector.spans()
    assert parts(live) == [("run", "")] * 4 + [("validation", "")] * 4
    replay(tmp_path, make(collector), work_dir=tmp_path)
    again = collector.spans()[len(live) :]
    assert {(s.span_id, s.parent_span_id) for s in again} == {(s.span_id, s.parent_span_id) for s in live}


def test_an_error_ends_the_stage_that_it_was_in(attach: Attach, collector: Collector) -> None:
    """An epoch or validation that an error has left has a span with this error, in its run."""
    events = [BeforeRun(), BeforeTrainEpoch(), BeforeVal(), AfterRun(reason="error", error="ValueError: no")]

    write(attach(make(collector)), *events)

    assert parts(collector.spans()) == [(name, "ValueError: no") for name in ("epoch", "run", "validation")]


def test_a_new_run_after_a_kill_loses_no_value(attach: Attach, collector: Collector, tmp_path: Path) -> None:
    """A training from the beginning in the folder of a killed one has a trace and steps of its own."""
    bus = attach(make(collector), trainer_id="a")
    emit(bus, BeforeRun(), BeforeTrain(), *train(1, 2, loss=1.0))
    kill = Kill(tmp_path)
    bus.close()
    kill.restore()
    collector.messages["/v1/traces"].clear()

    write(
        attach(make(collector), trainer_id="b"),
        BeforeRun(),
        BeforeTrain(),
        *train(1, 2, loss=2.0),
        AfterRun(),
    )

    assert [value for _, _, value in collector.points()] == [1.0, 1.0, 2.0, 2.0]
    killed, new = collector.spans()
    assert (killed.status.message, new.status.message) == ("killed", "")
    assert killed.trace_id != new.trace_id


@pytest.mark.parametrize("status", [401, 302, 429, 503, 507])
def test_a_collector_that_refuses_is_one_line(
    attach: Attach, collector: Collector, account: Account, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """A refused login disables the writer, a redirection is not followed, and the key is in no message."""
    collector.status = status
    bus = attach(make(collector))

    emit(bus, *train(1))

    (line,) = [r.getMessage() for r in caplog.records if r.name == "eventloop"]
    assert f"v1/metrics answered {status}" in line
    assert "s3cr3t" not in line
    assert account(bus).failed + account(bus).dropped == 1


def test_no_secret_is_in_the_writer_s_text(collector: Collector) -> None:
    """A debugger or a report that prints the writer shows no header."""
    assert "s3cr3t" not in repr(make(collector))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {},
            ValueError,
            "OpenTelemetryWriter needs endpoint, got None: pass endpoint=, or set OTEL_EXPORTER_",
        ),
        (
            {"endpoint": "localhost:4318"},
            ValueError,
            "endpoint must be an http or https URL .*'localhost:4318'",
        ),
        (
            {"endpoint": "http://me:pw1@h"},
            ValueError,
            r"endpoint must not contain a password, got http://me:\*\*\*@h",
        ),
        (
            {"endpoint": "http://h/x?api-key=pw1"},
            ValueError,
            r"endpoint must not contain a password, got http://h/x\?api-key=\*\*\*: pass it in headers, or",
        ),
        (
            {"endpoint": "http://h/x?a=pw1"},
            ValueError,
            r"endpoint must be a URL without \? and #, got 'http://h/x' and more: pass a key in headers",
        ),
        ({"endpoint": "http://h:x"}, ValueError, "endpoint must be an http .*, got 'http://h:x': Port could"),
        ({"endpoint": "http://:4318"}, ValueError, "endpoint must be an http .*, got 'http://:4318'"),
        ({"endpoint": "http://me@h"}, ValueError, "endpoint must be an http .*, got 'http://me@h'"),
        ({"endpoint": "http://my h"}, ValueError, "endpoint must be an http .*, got 'http://my h'"),
        ({"endpoint": "http://h/\u00e4"}, ValueError, "endpoint must be an http .*, got 'http://h/\u00e4'"),
        (
            {"endpoint": "http://h/v1/traces/"},
            ValueError,
            "endpoint must be the URL of the collector without /v1/metrics .*, got 'http://h/v1/traces/'",
        ),
        ({"headers": {1: "a"}}, TypeError, "the names in headers must be a str, got 1"),
        ({"headers": "a=b"}, TypeError, "headers must be a mapping of names to values, got str"),
        (
            {"headers": {"a b": "c"}},
            ValueError,
            "the names in headers may have only letters, digits.*, got 'a b'",
        ),
        *(
            (
                {"headers": {key: "x"}},
                ValueError,
                f"headers must not have '{key}', which the writer sets: leave",
            )
            for key in ("Content-Length", "content-type", "HOST", "transfer-encoding")
        ),
        ({"headers": {"key": 3}}, TypeError, r"headers\['key'\] must be a str, got int"),
        ({"headers": {"key": "a\n"}}, ValueError, r"headers\['key'\] must be printable ASCII, got other"),
        ({"timeout": 0}, ValueError, "timeout must be above 0 seconds and finite, got 0"),
        ({"timeout": math.inf}, ValueError, "timeout must be above 0 seconds and finite, got inf"),
        ({"timeout": "1"}, TypeError, "timeout must be a number of seconds, got '1'"),
        ({"service": 1}, TypeError, "service must be a str or None, got int"),
    ],
)
def test_bad_arguments(
    options: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong argument is an error where the writer is made."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    if options and "endpoint" not in options:
        options = {"endpoint": "http://localhost:4318", **options}

    with pytest.raises(error, match=text):
        OpenTelemetryWriter(**options)


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ("s3cr3t", "OTEL_EXPORTER_OTLP_HEADERS must be key=value,key=value .*, got another part 1 of 1"),
        (
            "a=b,s3cr3t c=d",
            "OTEL_EXPORTER_OTLP_HEADERS must be key=value,.* letters, .*, got another part 2 of 2",
        ),
        ("Authorization: Bearer s3cr3t==", "OTEL_EXPORTER_OTLP_HEADERS must be .*, got another part 1 of 1"),
        ("a=b,Host=s3cr3t", "^OTEL_EXPORTER_OTLP_HEADERS must not have 'Host', which the writer sets: leave"),
        ("content-length=s3cr3t", "^OTEL_EXPORTER_OTLP_HEADERS must not have 'content-length', which the"),
        ("a=s3cr3t%0A", r"OTEL_EXPORTER_OTLP_HEADERS\['a'\] must be printable ASCII, got other characters"),
    ],
)
def test_wrong_headers_of_the_environment(
    headers: str, text: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are an error where the writer is made, unless it is given others; the message has no key."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)

    with pytest.raises(ValueError, match=text) as caught:
        OpenTelemetryWriter(collector.url)

    assert "s3cr3t" not in str(caught.value)
    OpenTelemetryWriter(collector.url, headers={})


def test_headers_of_the_environment_are_sent(
    attach: Attach, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value is as in a URL, and an empty part is none."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Basic%20cHc=, x-team = a,")

    write(attach(OpenTelemetryWriter(collector.url, offload="thread")), *train(1))

    assert {("authorization", "Basic cHc="), ("x-team", "a")} <= collector.headers[0].items()


def test_a_service_that_is_not_utf8_has_escapes(attach: Attach, collector: Collector) -> None:
    """Its default is the name of the work dir, which may be any bytes."""
    writer = OpenTelemetryWriter(collector.url, service=os.fsdecode(b"caf\xe9"), offload="thread")

    write(attach(writer), *train(1))

    assert collector.points() == [("train/loss", 1, 0.25)]
    (resource,) = (m.resource_metrics[0].resource for m in collector.messages["/v1/metrics"][1:])
    assert resource.attributes[0].value.string_value == "caf\\udce9"


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_password_in_the_environment_is_refused_and_masked(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """urllib would take it for a part of the host, and name it in its error."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{scheme}://me:pw1@h")

    with pytest.raises(
        ValueError,
        match=rf"^OTEL_EXPORTER_OTLP_ENDPOINT must not contain a password, got {scheme}://me:\*\*\*@h: pass it in",
    ):
        OpenTelemetryWriter()


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("localhost", "must be an http or https URL such as http://localhost:4318, got 'localhost'"),
        ("http://h:x", "must be an http or https URL .*, got 'http://h:x': Port could"),
        (
            "http://h/v1/logs",
            "must be the URL of the collector without /v1/metrics .*, got 'http://h/v1/logs'",
        ),
        ("http://h?a=b", r"must be a URL without \? and #, got 'http://h' and more"),
    ],
)
def test_a_wrong_endpoint_of_the_environment(
    endpoint: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the variable."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)

    with pytest.raises(ValueError, match=f"^OTEL_EXPORTER_OTLP_ENDPOINT {text}"):
        OpenTelemetryWriter()


@pytest.mark.parametrize("protocol", ["grpc", "http/json"])
def test_another_protocol_is_refused(
    protocol: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port of another protocol would not answer; the message says what to do."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)

    with pytest.raises(
        ValueError,
        match=f"^OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf .*, got '{protocol}': unset it, and .* 4318",
    ):
        OpenTelemetryWriter()

    OpenTelemetryWriter(collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    OpenTelemetryWriter()


def test_an_unreachable_collector_is_named(attach: Attach, collector: Collector, account: Account) -> None:
    """The line says which collector; an empty header and a short one mask nothing in it."""
    headers = {"tenant": "", "x-scope-orgid": "1"}
    bus = attach(OpenTelemetryWriter(collector.url, headers=headers, offload="thread"))
    collector.close()

    write(bus, *train(1))

    assert f"{collector.url} cannot be reached: [Errno 111] Connection refused" in account(bus).error


@pytest.mark.parametrize("offload", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_collector_that_hangs_is_named_with_its_error(
    offload: str, attach: Attach, collector: Collector, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is waited for in vain says what it waits for, and how the collector refused it before."""
    monkeypatch.setattr(subscriber, "STUCK_SECONDS", 0.0)
    bus = attach(OpenTelemetryWriter(collector.url, offload=offload))
    emit(bus, *train(1))
    collector.status = 503
    emit(bus, *train(2))

    collector.delay = 2.0
    assert not bus.flush(0.1)

    waiting = (
        f", waiting for the OTLP collector at {collector.url} (OSError: {collector.url}/v1/metrics "
        "answered 503 Service Unavailable), for which 1 event waits; `eventloop replay "
    )
    assert waiting in account(bus).error


@pytest.mark.parametrize("offload", ["thread", "process"])
def test_an_absence_is_in_the_log_of_the_program(
    attach: Attach, collector: Collector, caplog: pytest.LogCaptureFixture, offload: str
) -> None:
    """A writer in a worker process warns where one on a thread does, and once."""
    bus = attach(OpenTelemetryWriter(collector.url, offload=offload))
    emit(bus, *train(1))
    collector.status = 503
    emit(bus, *train(2), *train(3))

    (record,) = caplog.records
    assert (record.name, record.levelname) == ("eventloop", "WARNING")
    assert record.getMessage() == (
        "the OTLP collector does not take the events, which wait until it does: OSError: "
        f"{collector.url}/v1/metrics answered 503 Service Unavailable"
    )


def test_a_replay_counts_what_an_absence_left(attach: Attach, collector: Collector, tmp_path: Path) -> None:
    """Values that a collector refused until the end of the run are new to it, and are sent."""
    bus = attach(make(collector))
    EventLogWriter().attach(bus, lambda: Run(work_dir=str(tmp_path)))
    emit(bus, *train(1))
    collector.status = 503
    write(bus, *train(2, 3))
    collector.status = 200

    reports = [replay(tmp_path, make(collector), work_dir=tmp_path) for _ in range(2)]

    assert [(report.written[0].new, report.written[0].known) for report in reports] == [(2, 1), (0, 3)]
    assert [step for _, step, _ in collector.points()] == [1, 2, 3]
