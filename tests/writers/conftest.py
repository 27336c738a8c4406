"""What the tests of the writers share: a real bus, a run in a temporary folder, events, and readers of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eventloop.background.workers.process_runner import ProcessRunner
from eventloop.bus import Bus
from eventloop.bus.subscription import SubscriptionStats
from eventloop.events import Event, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import Writer
from tests.conftest import DEADLINE
from tests.writers.otlp_collector import Collector
from tests.writers.visdom_server import env, server

__all__ = ["env", "server"]


Attach = Callable[..., Bus]
Account = Callable[[Bus], SubscriptionStats]

FLOATS = pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), 0.1, -0.0, 5e-324, 1.7976931348623157e308]
)
"""Floats that a careless writer would lose or round."""


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Attach]:
    """`attach(writer, **facts)` puts a writer on a bus of its own, which is closed after the test."""
    buses: list[Bus] = []

    def make(writer: Writer, **facts: Any) -> Bus:
        bus = Bus(drain_timeout=DEADLINE)
        buses.append(bus)
        run = Run(**({"work_dir": str(tmp_path)} | facts))
        writer.attach(bus, lambda: run)
        return bus

    yield make
    for bus in buses:
        bus.close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    """An OTLP collector, which ends with the test."""
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def account() -> Account:
    """The account of the one subscription of a bus."""

    def find(bus: Bus) -> SubscriptionStats:
        (stats,) = bus.stats()
        return stats

    return find


def emit(bus: Bus, *events: Event) -> None:
    """Emit events, and wait until they are written."""
    for event in events:
        bus.emit(event)
    bus.flush(DEADLINE)


def write(bus: Bus, *events: Event) -> None:
    """Emit all events of a run, and close its bus."""
    for event in events:
        bus.emit(event)
    bus.close(DEADLINE)


def train(*steps: int, **scalars: float) -> list[ScalarsLogged]:
    """Training values at each step; a loss, unless others are given."""
    return [ScalarsLogged(step=step, iter=step - 1, scalars=scalars or {"loss": step / 4}) for step in steps]


def val(step: int, **scalars: float) -> ScalarsLogged:
    """Values of a validation after so many iterations."""
    return ScalarsLogged(mode="val", step=step, iter=step, scalars=scalars)


def in_process(writer: Any) -> Any:
    """The writer, to run in a worker process."""
    writer.offload = "process"
    return writer


def worker_of(bus: Bus) -> int:
    """The pid of the worker process of the one writer of a bus."""
    subscribers = [s.subscriber for s in bus._subscribers._subscriptions if s.subscriber is not None]
    (runner,) = (s.runner for s in subscribers if isinstance(s.runner, ProcessRunner))
    assert runner.worker is not None
    return runner.worker.pid


def tensorboard(folder: Path) -> Any:
    """All that TensorBoard's own reader finds in a folder, without the limit on points that its server applies."""
    sizes = {"scalars": 0, "tensors": 0, "images": 0, "histograms": 0}
    reader = EventAccumulator(str(folder), size_guidance=sizes)
    reader.Reload()
    return reader


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The points of a curve that TensorBoard's reader finds."""
    return [(point.step, point.value) for point in tensorboard(folder).Scalars(tag)]
