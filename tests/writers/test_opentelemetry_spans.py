"""OpenTelemetryWriter: the spans and log records of a run, also of one that is killed and resumed."""

from __future__ import annotations

from copy import copy
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import Any

import msgspec
import pytest

from eventloop import replay
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
    Timed,
)
from eventloop.events.run import Run
from eventloop.hooks import TraceHook
from eventloop.writers import EventLogWriter
from tests.support.trainers import batches, build_trainer
from tests.writers.conftest import Attach, emit, train, write
from tests.writers.otlp_collector import Collector, is_missing, make

if is_missing("opentelemetry.proto"):
    pytest.skip(
        "opentelemetry-proto is not installed, so OpenTelemetryWriter is NOT tested: "
        "pip install 'torch-eventloop[otlp]'",
        allow_module_level=True,
    )


def test_stages_are_spans_and_health_is_in_the_logs(attach: Attach, collector: Collector) -> None:
    """A run holds epochs, validations and checkpoints; failures are errors."""
    write(
        attach(make(collector)),
        BeforeRun(),
        RunInfo(info={"model": "Net"}),
        BeforeTrain(),
        BeforeTrainEpoch(),
        AfterTrainEpoch(epoch=1),
        BeforeVal(),
        AfterVal(),
        CheckpointSaved(path="runs/a/epoch_1", seconds=0.5),
        CheckpointFailed(path="runs/a/epoch_2", error="full"),
        HandlerFailed(handler="x", error="ValueError"),
        SlowRank(rank=1),
        AfterRun(reason="error", error="ValueError: no"),
    )

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
    """A query finds runs by a fact or a setting of `run_info`; the table of the handlers is not sent."""
    info = {"model": "Net", "seed": "7", "plan": "a long table"}

    settings = RunInfo(info=info, config={"size": 3}, options={"optimizer": {"lr": 0.1}})
    write(attach(make(collector)), BeforeRun(), settings, AfterRun())

    (run,) = collector.spans()
    facts = {item.key: item.value.string_value for item in run.attributes}
    assert {key: text for key, text in facts.items() if key.startswith("eventloop.")} == {
        "eventloop.config.size": "3",
        "eventloop.optimizer.lr": "0.1",
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
        BeforeRun(iter=1),
        BeforeTrain(iter=1),
        BeforeTrainEpoch(iter=1),
        *train(2),
        AfterTrainEpoch(iter=2),
        AfterRun(iter=2),
    )

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
        1e9 + 1,
        AfterTrainEpoch(iter=1),
        BeforeVal(iter=1),
        AfterVal(iter=1),
        BeforeTrainEpoch(iter=1, epoch=1),
        HandlerFailed(handler="x", error="ValueError"),
        *train(2),
    )
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
        ("checkpoint", ""),
        ("epoch", ""),
        ("epoch", "killed"),
        ("run", ""),
        ("run", "killed"),
        ("validation", ""),
    ]
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
        ("checkpoint", ""),
        ("epoch", "killed"),
        ("run", ""),
        ("run", "killed"),
        ("validation", "killed"),
    ]
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


def test_a_new_worker_does_not_continue_another_run(collector: Collector, tmp_path: Path) -> None:
    """A worker that dies before its first request leaves the file of the run that was killed before."""
    for trainer, events in (("a", at(1e9, BeforeRun(), BeforeTrainEpoch())), ("b", [])):
        writer = make(collector)
        writer.open(Run(work_dir=str(tmp_path), trainer_id=trainer))
        writer.write_timed(events)
        kill = Kill(tmp_path)
        writer.close()
        kill.restore()
    collector.messages["/v1/traces"].clear()

    again = make(collector)
    again.open(Run(work_dir=str(tmp_path), trainer_id="b"))
    again.write_timed(at(1e9 + 9, BeforeRun(), AfterRun()))
    again.close()

    killed = {span.trace_id for span in collector.spans() if span.status.message == "killed"}
    (run,) = (span for span in collector.spans() if span.status.message == "")
    assert run.trace_id not in killed


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
        "ph": "X",
        "cat": "iteration",
        "name": "1",
        "tid": 1,
        "ts": 0.0,
        "dur": 5.0,
        "args": {"iter": 1},
    }
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
