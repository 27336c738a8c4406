"""The bus in an ignite engine whose user ends epochs early, interrupts it, or fires its events by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

pytest.importorskip("ignite", reason="pytorch-ignite is not installed: pip install 'torch-eventloop[ignite]'")

from ignite.engine import Engine, Events

from eventloop import SkipIteration
from eventloop.bridges.ignite import attach
from eventloop.costs.records import read_costs
from eventloop.writers import JSONLWriter

Steer = Callable[[Engine], object]
MOMENTS = {
    "STARTED": Events.STARTED(once=1),
    "EPOCH_STARTED": Events.EPOCH_STARTED(once=2),
    "GET_BATCH_STARTED": Events.GET_BATCH_STARTED(once=7),
    "GET_BATCH_COMPLETED": Events.GET_BATCH_COMPLETED(once=7),
    "ITERATION_STARTED": Events.ITERATION_STARTED(once=7),
    "ITERATION_COMPLETED": Events.ITERATION_COMPLETED(once=7),
    "EPOCH_COMPLETED": Events.EPOCH_COMPLETED(once=1),
    "COMPLETED": Events.COMPLETED(once=1),
}


def fail(engine: Engine) -> None:
    raise OSError("broken")


def evaluate_badly(engine: Engine) -> None:
    """Catch the error of an evaluator's run within the training."""
    with pytest.raises(ZeroDivisionError):
        EVALUATORS[engine].run([1, 0])


def longer(engine: Engine) -> None:
    engine.state.max_epochs = 4


def another_epoch(engine: Engine) -> None:
    engine.state.epoch = 2


def another_iteration(engine: Engine) -> None:
    engine.state.iteration = 2


EVALUATORS: WeakKeyDictionary[Engine, Engine] = WeakKeyDictionary()
STEERS: dict[str, Steer] = {
    "fail": fail,
    "evaluate_badly": evaluate_badly,
    "evaluate": lambda engine: EVALUATORS[engine].run([1]),
    "run again": lambda engine: engine.run(list(range(20, 25)), max_epochs=3),
    "set_data": lambda engine: engine.set_data(list(range(10, 15))),
    "longer": longer,
    "another epoch": another_epoch,
    "another iteration": another_iteration,
    "load_state_dict": lambda engine: engine.load_state_dict(engine.state_dict()),
    "load an older state": lambda engine: engine.load_state_dict(
        {"iteration": 5, "epoch_length": 5, "max_epochs": 3}
    ),
    "terminate": lambda engine: engine.terminate(),
    "terminate, no COMPLETED": lambda engine: engine.terminate(skip_completed=True),
    "terminate_epoch": lambda engine: engine.terminate_epoch(),
    "terminate_epoch, no EPOCH_COMPLETED": lambda engine: engine.terminate_epoch(skip_epoch_completed=True),
    "interrupt": lambda engine: engine.interrupt(),
}


class Ran:
    """An engine that notes its events and batches, steered at one moment of its run of three epochs of five."""

    def __init__(self, moment: Any, steer: Steer, *, takes_errors: bool = False) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.engine = Engine(lambda engine, batch: self.rows.append(("batch", batch)))
        self.evaluator = EVALUATORS[self.engine] = Engine(lambda engine, batch: 1 / batch)
        self.steers = [steer]  # once
        self.engine.add_event_handler(moment, lambda engine: self.steers and self.steers.pop()(engine))
        for event in (*Events,):
            if event is not Events.EXCEPTION_RAISED:  # its handler would take every error
                self.engine.add_event_handler(event, self._record, event.name)
        if takes_errors:
            self.engine.add_event_handler(
                Events.EXCEPTION_RAISED, lambda engine, error: self.rows.append(("taken", str(error)))
            )

    def _record(self, *args: Any, **kwargs: Any) -> None:
        self.rows.append((args[-1], self.engine.state.iteration, self.engine.state.epoch))

    def run(self, times: int = 2) -> Ran:
        for _ in range(times):
            self.rows.append(("run",))
            try:
                self.engine.run(list(range(5)), max_epochs=3)
            except Exception as error:
                self.rows.append((f"{type(error).__name__}: {error}",))
        return self


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("steer", STEERS)
@pytest.mark.parametrize("takes_errors", [False, True], ids=["errors leave", "errors are taken"])
def test_a_steered_engine_runs_as_without_the_bridge(
    tmp_path: Path, moment: str, steer: str, takes_errors: bool
) -> None:
    """An engine that its user steers has the events, counters and batches that it has without the bridge."""
    alone = Ran(MOMENTS[moment], STEERS[steer], takes_errors=takes_errors).run()
    ours = Ran(MOMENTS[moment], STEERS[steer], takes_errors=takes_errors)
    bus = attach(ours.engine, work_dir=tmp_path, evaluators={"val": ours.evaluator})
    opened: list[str] = []
    bus.on("*")(lambda event: opened.append(type(event).__name__))

    ours.run()

    assert ours.rows == alone.rows
    for part in ("Run", "Train", "TrainEpoch", "Val"):
        assert opened.count(f"Before{part}") == opened.count(f"After{part}"), part


def test_an_epoch_that_the_host_leaves_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such an epoch ends before the next with the reason "left", and the steps are those of the engine."""
    engine = Engine(lambda engine, batch: 0.5)
    bus = attach(engine, work_dir=tmp_path)
    rows: list[tuple[Any, ...]] = []
    engine.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: engine.terminate_epoch(True))
    bus.on("after_train_iter")(lambda trainer, event: rows.append((event.iter, event.batch_idx, event.epoch)))
    bus.on("after_train_epoch")(lambda trainer, event: rows.append((event.reason, event.epoch)))

    with caplog.at_level(logging.WARNING, "eventloop"):
        engine.run(range(4), max_epochs=2)

    # iteration 3 of the engine has begun, and has not ended
    assert rows == [
        (0, 0, 0),
        (1, 1, 0),
        ("left", 0),
        (3, 0, 1),
        (4, 1, 1),
        (5, 2, 1),
        (6, 3, 1),
        ("completed", 1),
    ]
    assert [text for text in caplog.messages if "an epoch without its end" in text] == [
        'ignite had an epoch without its end; the bridge ends it with the reason "left", and says so once'
    ]


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """An interrupted run ends with that reason; the next call is a run that goes on in the same epoch."""
    engine = Engine(lambda engine, batch: 0.5)
    bus = attach(engine, work_dir=tmp_path, writers=[JSONLWriter()])
    rows: list[tuple[Any, ...]] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=7), lambda: engine.interrupt())
    bus.on("after_train_iter")(lambda trainer, event: rows.append((event.iter, event.batch_idx, event.epoch)))
    bus.on("after_run")(lambda trainer, event: rows.append((event.reason,)))

    engine.run(range(5), max_epochs=2)
    engine.run(range(5), max_epochs=2)

    assert rows == [
        *((n, n, 0) for n in range(5)),
        (5, 0, 1),
        (6, 1, 1),
        ("engine.interrupt()",),
        (7, 2, 1),
        (8, 3, 1),
        (9, 4, 1),
        ("completed",),
    ]


@pytest.mark.parametrize("attached", [True, False], ids=["attached before", "attached after"])
def test_events_fired_by_hand(tmp_path: Path, attached: bool) -> None:
    """Events that a program fires without a run, or in the middle of one, reach its handlers and do no harm."""
    seen: list[Any] = []
    engine = Engine(lambda engine, batch: None)
    bus = attach(engine, work_dir=tmp_path) if attached else None
    names = ("EPOCH_STARTED", "ITERATION_STARTED", "ITERATION_COMPLETED", "EPOCH_COMPLETED")
    for name in names:
        engine.add_event_handler(Events[name], seen.append, name)
    bus = attach(engine, work_dir=tmp_path) if bus is None else bus
    iterations: list[int] = []
    bus.on("after_train_iter")(lambda trainer, event: iterations.append(event.iter))

    def fire_all() -> None:
        for name in names:
            engine.fire_event(Events[name])

    fire_all()
    assert seen == list(names)

    engine.add_event_handler(Events.GET_BATCH_STARTED, fire_all)
    engine.run(range(3), max_epochs=1)

    assert engine.state.iteration == 3
    assert bus.closed


NEEDS_MAX_ITERS = pytest.mark.skipif(
    "max_iters" not in signature(Engine.run).parameters, reason="this ignite has no run by iterations"
)


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, pytest.param({"max_iters": 7}, marks=NEEDS_MAX_ITERS)])
def test_a_whole_run_is_complete(tmp_path: Path, limits: dict[str, int]) -> None:
    """A run to its last epoch or iteration is complete, although ignite terminates one by iterations itself."""
    engine = Engine(lambda engine, batch: None)
    attach(engine, work_dir=tmp_path)

    engine.run(range(5), **limits)

    assert read_costs(tmp_path).outcome == "completed"


def test_a_batch_cannot_be_skipped(tmp_path: Path) -> None:
    """SkipIteration in a handler is an error, because an engine would train on the batch all the same."""
    engine = Engine(lambda engine, batch: None)
    bus = attach(engine, work_dir=tmp_path)

    @bus.on("before_train_iter")
    def skip(trainer: Any, event: Any) -> None:
        raise SkipIteration

    with pytest.raises(RuntimeError, match="SkipIteration, and ignite cannot skip a batch"):
        engine.run(range(2), max_epochs=1)
