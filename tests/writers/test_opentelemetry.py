"""OpenTelemetryWriter: the values that a collector receives over HTTP, and a collector that is away."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from eventloop import replay
from eventloop.events import (
    AfterRun,
    AfterTrainEpoch,
    BeforeRun,
    BeforeTrain,
)
from eventloop.events.run import Run
from eventloop.writers import EventLogWriter, OpenTelemetryWriter
from tests.conftest import DEADLINE
from tests.support.internals import drain_after, substitute
from tests.writers.conftest import Account, Attach, emit, train, val, write
from tests.writers.otlp_collector import KEY, Collector, is_missing, make

if is_missing("opentelemetry.proto"):
    pytest.skip(
        "opentelemetry-proto is not installed, so OpenTelemetryWriter is NOT tested: "
        "pip install 'torch-eventloop[otlp]'",
        allow_module_level=True,
    )


@pytest.mark.parametrize("offload", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_every_value_is_a_point_with_a_step(attach: Attach, collector: Collector, offload: str) -> None:
    """A gauge of each name, and one of the step at the same time; rank and service are of the resource."""
    write(
        attach(make(collector, offload=offload, service="digits"), rank=1, world_size=2),
        *train(1, 2, 3),
        val(3, acc=0.5),
        AfterRun(),
    )

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


def test_a_resumed_run_continues_its_trace(attach: Attach, collector: Collector) -> None:
    """The trace has the same id, and steps that are run again are not sent again."""
    write(attach(make(collector)), BeforeRun(), BeforeTrain(), *train(1, 2, 3, loss=1.0), AfterRun())

    write(
        attach(make(collector), start_iter=2),
        BeforeRun(),
        BeforeTrain(iter=2),
        *train(3, 4, loss=2.0),
        AfterRun(),
    )

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
    substitute(monkeypatch, "awaited.STUCK_SECONDS", 0.0)
    bus = attach(OpenTelemetryWriter(collector.url, offload=offload))
    emit(bus, *train(1))
    collector.status = 503
    emit(bus, *train(2))

    collector.delay = DEADLINE
    drain_after(monkeypatch, collector.delayed.is_set)
    assert not bus.flush(0.1)

    waiting = (
        f", waiting for the OTLP collector at {collector.url} (OSError: {collector.url}/v1/metrics "
        "answered 503 Service Unavailable), for which 1 event waits; `eventloop replay "
    )
    assert waiting in account(bus).error
    collector.go_on.set()


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
