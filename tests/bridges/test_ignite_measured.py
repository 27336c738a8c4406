"""What is measured in an ignite engine, whatever its handlers and events are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ignite", reason="pytorch-ignite is not installed: pip install 'torch-eventloop[ignite]'")

from ignite.engine import Engine, EventEnum, Events
from ignite.handlers import HandlersTimeProfiler

from eventloop.bridges.ignite import attach
from eventloop.costs.records import read_costs


class Own(EventEnum):  # type: ignore[misc]  # ignite is not typed
    """Events of a program."""

    SAVED = "saved by name"


@pytest.mark.parametrize("profiled", [False, True], ids=["", "HandlersTimeProfiler"])
@pytest.mark.parametrize("event", ["saved", Own.SAVED], ids=str)
def test_an_event_of_the_program(tmp_path: Path, event: Any, profiled: bool) -> None:
    """A handler of a program's own event is called and measured, whether the event is a text or an enum."""
    trained: list[int] = []
    engine = Engine(lambda engine, batch: trained.append(batch))
    calls: list[int] = []

    def saved(engine: Engine) -> None:
        calls.append(engine.state.iteration)

    engine.register_events(event)
    engine.add_event_handler(event, saved)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: engine.fire_event(event))
    if profiled:
        HandlersTimeProfiler().attach(engine)
    attach(engine, work_dir=tmp_path)

    engine.run(range(3), max_epochs=1)

    assert (trained, calls) == ([0, 1, 2], [1, 2, 3])
    rows = {cost.name: (cost.event, cost.calls) for cost in read_costs(tmp_path).handlers}
    assert rows["saved"] == (str(getattr(event, "value", event)), 3)


class Nameless:
    """A handler of which no attribute can be asked but its call."""

    calls = 0

    def __call__(self) -> None:
        self.calls += 1

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not for others")


def test_a_handler_that_cannot_be_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A handler whose measurement fails is called all the same, and a log line says that it has no row."""
    engine, handler = Engine(lambda engine, batch: None), Nameless()
    engine._event_handlers[Events.ITERATION_COMPLETED].append((handler, (), {}))  # as ignite's profilers do
    attach(engine, work_dir=tmp_path)

    with caplog.at_level(logging.WARNING, "eventloop"):
        engine.run(range(3), max_epochs=1)

    assert handler.calls == 3
    assert any("a handler of ignite has no row in the costs" in text for text in caplog.messages)


def test_an_error_at_the_begin_is_raised(tmp_path: Path) -> None:
    """A handler of before_run that fails ends the engine's run with its error, also if a profiler takes errors."""
    engine = Engine(lambda engine, batch: None)
    HandlersTimeProfiler().attach(engine)
    bus = attach(engine, work_dir=tmp_path)

    @bus.on("before_run")
    def fail(trainer: Any, event: Any) -> None:
        raise ValueError("no disk")

    with pytest.raises(ValueError, match="no disk"):
        engine.run(range(2), max_epochs=1)
