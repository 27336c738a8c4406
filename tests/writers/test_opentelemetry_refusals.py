"""OpenTelemetryWriter: a collector that refuses single requests, for their size or for a value, is not away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.events import AfterRun, BeforeRun, BeforeTrain, CheckpointFailed, ScalarsLogged
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
