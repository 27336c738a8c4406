"""OpenTelemetryWriter: a collector that refuses single requests, for their size or for a value, is not away."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.events import AfterRun, BeforeRun, BeforeTrain, CheckpointFailed, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import EventLogWriter
from tests.support.internals import substitute
from tests.writers.conftest import Account, Attach, emit, train, write
from tests.writers.otlp_collector import Collector, is_missing, make

if is_missing("opentelemetry.proto"):
    pytest.skip(
        "opentelemetry-proto is not installed, so OpenTelemetryWriter is NOT tested: "
        "pip install 'torch-eventloop[otlp]'",
        allow_module_level=True,
    )

Judge = Callable[[str, Any, int], int]


def larger_than(size: int) -> Judge:
    """Refuse requests of more bytes, as a proxy with a limit does."""
    return lambda path, message, sent: 413 if sent > size else 200


def with_metric(*refused: str) -> Judge:
    """Refuse requests with one of these metrics, as a collector does that checks names."""

    def judge(path: str, message: Any, size: int) -> int:
        names = {m.name for r in getattr(message, "resource_metrics", ()) for m in r.scope_metrics[0].metrics}
        return 400 if names & {*refused} else 200

    return judge


def points_of(message: Any) -> list[tuple[str, float]]:
    """The name and value of each point of a request."""
    metrics = [m for r in getattr(message, "resource_metrics", ()) for m in r.scope_metrics[0].metrics]
    return [(metric.name, point.as_double) for metric in metrics for point in metric.gauge.data_points]


def without_nan(path: str, message: Any, size: int) -> int:
    """Refuse requests with a NaN, as a collector does that writes JSON."""
    return 400 if any(math.isnan(value) for _, value in points_of(message)) else 200


def count_posts(collector: Collector, judge: Judge) -> list[tuple[str, int]]:
    """Have the collector judge in this way; return a list of the path and the status of each further request."""
    posts: list[tuple[str, int]] = []

    def judged(path: str, message: Any, size: int) -> int:
        posts.append((path, judge(path, message, size)))
        return posts[-1][1]

    collector.judge = judged
    return posts


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "left out" in (text := record.getMessage())]


def wide(step: int, names: int) -> ScalarsLogged:
    return ScalarsLogged(step=step, iter=step - 1, scalars={f"m{i}": float(i) for i in range(names)})


def test_a_request_that_is_too_large_is_split(
    attach: Attach, collector: Collector, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    """Every value of a step with many names arrives at a collector with a limit, and so do the later steps."""
    collector.judge = larger_than(20_000)
    bus = attach(make(collector))

    write(bus, BeforeRun(), *(wide(step, 2000) for step in (1, 2, 3)), AfterRun())

    assert sorted(collector.points()) == sorted(
        (f"train/m{i}", step, float(i)) for step in (1, 2, 3) for i in range(2000)
    )
    assert (account(bus).failed, account(bus).dropped, caplog.records) == (0, 0, [])


def test_many_steps_of_one_name_are_split(attach: Attach, collector: Collector) -> None:
    """A request has the points of up to 256 events; those of one metric may be too many, too."""
    collector.judge = larger_than(500)

    write(attach(make(collector)), *train(*range(1, 201)), AfterRun())

    assert sorted(step for _, step, _ in collector.points()) == [*range(1, 201)]


def test_no_request_is_larger_than_a_proxy_takes(attach: Attach, collector: Collector) -> None:
    """nginx, with its default of 1 MB, is never asked to take more."""
    sizes: list[int] = []

    def judge(path: str, message: Any, size: int) -> int:
        sizes.append(size)
        return 200

    collector.judge = judge
    write(attach(make(collector)), wide(1, 20_000), wide(2, 20_000), AfterRun())

    assert len(collector.points()) == 40_000
    assert max(sizes) <= 1_000_000


def test_a_metric_that_is_refused_is_left_out(
    attach: Attach, collector: Collector, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once, each of its events counts as failed, and all other values arrive."""
    collector.judge = with_metric("train/m7")
    bus = attach(make(collector))

    emit(bus, wide(1, 20))
    emit(bus, wide(2, 20), *train(3))
    write(bus, AfterRun())

    expected = [(f"train/m{i}", step, float(i)) for step in (1, 2) for i in range(20) if i != 7]
    assert sorted(collector.points()) == sorted([*expected, ("train/loss", 3, 0.75)])
    assert (account(bus).failed, account(bus).delivered) == (2, 2)
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert (
        line
        == f"the OTLP collector: left out are train/m7: {collector.url}/v1/metrics answered 400 Bad Request"
    )


def test_a_refused_value_is_not_sent_first_by_a_resume(
    attach: Attach, collector: Collector, tmp_path: Path
) -> None:
    """A request that a kill interrupted, and that the collector refuses, holds up no later one."""
    bus = attach(make(collector))
    emit(bus, *train(1))
    collector.status = 503
    emit(bus, wide(2, 20))
    left = (tmp_path / "otlp_run.inflight").read_bytes()
    write(bus)
    (tmp_path / "otlp_run.inflight").write_bytes(left)
    collector.status = 200
    collector.judge = with_metric("train/m7")

    for step in (3, 4):
        write(attach(make(collector), start_iter=step), BeforeTrain(iter=step), *train(step), AfterRun())

    found = collector.points()
    assert {("train/loss", step, step / 4) for step in (1, 3, 4)} <= {*found}
    assert sorted(name for name, step, _ in found if step == 2) == sorted(
        f"train/m{i}" for i in range(20) if i != 7
    )


def test_a_log_record_that_is_refused_costs_no_number(
    attach: Attach, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named by its event; numbers and spans beside it arrive."""
    collector.judge = lambda path, message, size: 400 if path == "/v1/logs" else 200

    write(
        attach(make(collector)), BeforeRun(), *train(1), CheckpointFailed(path="a", error="full"), AfterRun()
    )

    assert collector.points() == [("train/loss", 1, 0.25)]
    assert {span.name for span in collector.spans()} == {"run", "checkpoint"}
    assert any("left out are checkpoint_failed: " in record.getMessage() for record in caplog.records)


def test_only_the_refused_values_of_a_metric_are_left_out(
    attach: Attach, collector: Collector, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    """Its values before, beside and after a NaN arrive, and so do all other metrics; the log names it once."""
    values = {step: math.nan if step in (7, 8, 40) else step / 4 for step in range(1, 61)}
    collector.judge = without_nan
    bus = attach(make(collector))

    for steps in (range(1, 31), range(31, 51), range(51, 61)):
        emit(bus, *(train(s, norm=values[s], loss=1.0)[0] for s in steps))
    write(bus, AfterRun())

    assert {step: value for name, step, value in collector.points() if name == "train/norm"} == {
        step: value for step, value in values.items() if not math.isnan(value)
    }
    assert sorted(step for name, step, _ in collector.points() if name == "train/loss") == [*range(1, 61)]
    assert (account(bus).failed, account(bus).delivered) == (3, 58)
    (line,) = left_out(caplog)
    assert "left out are train/norm: " in line


def test_one_bad_value_among_many_metrics_costs_few_requests(attach: Attach, collector: Collector) -> None:
    """It is found by halves, and later only its own metric is sent apart."""
    bus = attach(make(collector))
    emit(bus, *train(1))
    posts = count_posts(collector, with_metric("train/m1234"))

    emit(bus, wide(2, 4000))
    assert len(posts) <= 2 * math.log2(4000) + 3
    posts.clear()
    emit(bus, wide(3, 4000))

    assert len(posts) == 2
    assert sum(name == "train/m1233" for name, _, _ in collector.points()) == 2


@pytest.mark.parametrize("status", [400, 413])
def test_a_collector_that_refuses_everything_is_asked_a_bounded_number_of_times(
    attach: Attach, collector: Collector, account: Account, status: int
) -> None:
    """Some 200 times for 2,000 values, then about once a delivery; values after that arrive again."""
    bus = attach(make(collector))
    emit(bus, *train(1))
    posts = count_posts(collector, lambda path, message, size: status)

    emit(bus, wide(2, 2000))
    assert len(posts) <= 250
    posts.clear()
    for step in range(3, 8):
        emit(bus, wide(step, 2000))
    assert len(posts) <= 5 * 4
    collector.judge = without_nan
    emit(bus, wide(8, 2000))

    assert (account(bus).failed, account(bus).delivered) == (6, 2)
    assert sorted({step for _, step, _ in collector.points()}) == [1, 8]
    assert len(collector.points()) == 1 + 2000


def test_a_partial_success_is_no_success(
    attach: Attach, collector: Collector, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    """What an accepted request says to have rejected counts as failed, and is named once with the reason."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

    bus = attach(make(collector))
    emit(bus, *train(1))
    rejects = ExportMetricsServiceResponse()
    rejects.partial_success.rejected_data_points = 2
    rejects.partial_success.error_message = "2 samples are\ntoo old, Bearer s3cr3t"
    collector.answer = lambda path, message: rejects.SerializeToString() if points_of(message) else b""

    emit(bus, *train(2, 3, 4))
    emit(bus, *train(5, 6))
    collector.answer = lambda path, message: b"<html>junk"
    write(bus, *train(7))

    assert (account(bus).failed, account(bus).delivered) == (4, 3)
    (line,) = left_out(caplog)
    assert "left out are 2 of the values or records train/loss, train/step: 2 samples are too old" in line
    assert "s3cr3t" not in line


def test_refused_values_that_waited_have_failed(
    attach: Attach, collector: Collector, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of earlier deliveries, more than the last delivery has events, which were sent after an outage."""
    substitute(monkeypatch, "tracker.RETRY_SECONDS", 0.0)
    bus = attach(make(collector))
    emit(bus, *train(1))
    collector.status = 503
    emit(bus, *train(2, 3, 4, loss=math.nan), *train(5))
    assert (account(bus).delivered, account(bus).queued) == (1, 4)
    collector.judge = without_nan

    emit(bus, *train(6))
    assert account(bus).failed + account(bus).queued == 3
    report: Any = bus.close()

    (stats,) = report.stats
    assert (stats.delivered, stats.failed, stats.dropped, stats.queued) == (3, 3, 0, 0)
    assert sorted(step for _, step, _ in collector.points()) == [1, 5, 6]


def test_a_resume_catches_up_beside_refused_values(
    attach: Attach, collector: Collector, account: Account, tmp_path: Path
) -> None:
    """Values of the event log that the collector refuses keep the writer of the resumed run not off."""
    bus = attach(make(collector))
    EventLogWriter().attach(bus, lambda: Run(work_dir=str(tmp_path)))
    emit(bus, BeforeTrain(), *train(1))
    collector.status = 503
    write(bus, *train(2, loss=math.nan), *train(3))
    collector.judge = without_nan

    bus = attach(make(collector), start_iter=3)
    write(bus, BeforeTrain(iter=3), *train(4), AfterRun())

    assert sorted(step for _, step, _ in collector.points()) == [1, 3, 4]
    assert (account(bus).failed, account(bus).delivered) == (0, 3)
