"""The bus in an engine of pytorch-ignite."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("ignite", reason="pytorch-ignite is not installed: pip install 'torch-eventloop[ignite]'")

from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import EarlyStopping, Timer
from ignite.metrics import Accuracy

from eventloop import Bus
from eventloop.bridges.ignite import attach
from eventloop.costs.records import read_costs
from eventloop.hooks import EMAHook, OptimizerHook
from eventloop.writers import JSONLWriter, read_jsonl
from tests.support.ignite_host import handlers_of
from tests.support.trainers import batches, tiny_model


class Training:
    """A supervised training by ignite, as its documentation writes it."""

    def __init__(self, accumulate: int = 1, dtype: torch.dtype | None = None) -> None:
        self.model = tiny_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.accumulate, self.dtype = accumulate, dtype
        self.engine = Engine(self.step)
        self.evaluator = create_supervised_evaluator(self.model, metrics={"accuracy": Accuracy()})

    def step(self, engine: Engine, batch: Any) -> float:
        self.model.train()
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            loss = F.cross_entropy(self.model(batch[0]), batch[1]) / self.accumulate
        loss.backward()
        if engine.state.iteration % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def attach(self, work_dir: Path, **options: Any) -> Bus:
        options = {"work_dir": work_dir, "evaluators": {"val": self.evaluator}, **options}
        return attach(self.engine, model=self.model, optimizer=self.optimizer, **options)

    def run(self, epochs: int = 2) -> None:
        torch.manual_seed(3)
        self.engine.run(batches(4), max_epochs=epochs)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_are_those_without_the_bridge(
    tmp_path: Path, accumulate: int, dtype: torch.dtype | None
) -> None:
    """The weights of a training with the bridge are bitwise those without it."""
    alone, ours = Training(accumulate, dtype), Training(accumulate, dtype)
    ours.attach(tmp_path, hooks=[EMAHook()], writers=[JSONLWriter()])

    alone.run()
    ours.run()

    assert all(
        torch.equal(a, b) for a, b in zip(alone.model.parameters(), ours.model.parameters(), strict=True)
    )


def test_events_and_their_counters(tmp_path: Path) -> None:
    """A run emits the events of a training and its validations in order, with completed counters."""
    training = Training()
    bus = training.attach(tmp_path)
    rows: list[tuple[Any, ...]] = []
    training.engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: training.evaluator.run(batches(1)))

    @bus.on("*")
    def record(event: Any) -> None:
        if hasattr(event, "batch_idx") or hasattr(event, "epoch"):
            rows.append((type(event).__name__, event.iter, event.epoch))

    training.engine.run(batches(2), max_epochs=1)

    step = ["BeforeTrainIter", "BeforeOptimizerStep", "AfterOptimizerStep", "AfterTrainIter"]
    val = ["BeforeVal", "BeforeValEpoch", "BeforeValIter", "AfterValIter", "AfterValEpoch", "AfterVal"]
    assert [row[0] for row in rows] == [
        "BeforeRun",
        "BeforeTrain",
        "BeforeTrainEpoch",
        *step,
        *step,
        "AfterTrainEpoch",
        *val,
        "AfterTrain",
        "AfterRun",
    ]
    assert [row[1] for row in rows if row[0] == "AfterTrainIter"] == [0, 1]
    assert (after_val := bus.latest("after_val_epoch")) is not None
    assert after_val.metrics.keys() == {"accuracy"}


def test_what_is_logged(tmp_path: Path) -> None:
    """Writers get the losses, the learning rate and the metrics of evaluators."""
    training = Training()
    training.attach(tmp_path, writers=[JSONLWriter()])
    training.engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: training.evaluator.run(batches(1)))

    training.run()

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "lr"} <= set().union(*lines)
    assert [line["step"] for line in lines if "accuracy" in line] == [4, 8]


VALUES = {
    "np.float32": np.float32(0.5),
    "np.float64": np.float64(0.5),
    "array": np.array([0.5]),
    "tensor": torch.tensor([0.5]),
    "fraction": Fraction(1, 2),
    "float": 0.5,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_numbers_of_every_kind(tmp_path: Path, value: Any) -> None:
    """NumPy's numbers, and tensors and arrays of one, are logged as outputs and as metrics of both engines."""
    engine, evaluator = Engine(lambda engine, batch: value), Engine(lambda engine, batch: value)
    bus = attach(engine, evaluators={"val": evaluator}, writers=[JSONLWriter()], work_dir=tmp_path)

    def put(engine: Engine) -> None:
        engine.state.metrics |= {"mine": value, "text": "good", "several": np.eye(2)}

    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    engine.add_event_handler(Events.ITERATION_COMPLETED, put)
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, put)
    engine.run([0, 0], max_epochs=1)

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == [0.5]
    assert [line["mine"] for line in lines if "mine" in line] == [0.5, 0.5]
    assert (event := bus.latest("after_val_epoch")) is not None
    assert event.metrics == {"mine": 0.5}


class Slow:
    """A handler that works for some time, by a clock of its own."""

    seconds = 0.0

    def __call__(self, engine: Engine) -> None:
        began = perf_counter()
        while perf_counter() - began < 2e-3:
            pass
        self.seconds += perf_counter() - began


def test_each_handler_has_its_cost(tmp_path: Path) -> None:
    """Every handler of the engine has a row in the costs, with all the seconds of a clock of its own."""
    training, slow = Training(), Slow()
    training.attach(tmp_path)
    training.engine.add_event_handler(Events.ITERATION_COMPLETED, slow)
    training.engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda engine: None)

    began = perf_counter()
    training.run(epochs=3)
    wall = perf_counter() - began

    costs = {cost.name: cost for cost in read_costs(tmp_path).handlers if cost.event == "iteration_completed"}
    assert costs["Slow"].calls == 12
    assert slow.seconds <= costs["Slow"].seconds <= wall
    assert costs["Slow"].in_iteration
    assert any("<lambda>" in name for name in costs)


def test_a_handler_of_the_begin_has_a_row(tmp_path: Path) -> None:
    """So has a handler that it attaches; a second run, which goes on with the epochs, adds to the rows."""
    training = Training()
    training.attach(tmp_path)

    def prepare(engine: Engine) -> None:
        engine.add_event_handler(Events.EPOCH_COMPLETED, record, 3)

    training.engine.add_event_handler(Events.STARTED, prepare)

    training.run()
    training.run(epochs=4)

    calls = {cost.name.rpartition(".")[2]: cost.calls for cost in read_costs(tmp_path).handlers}
    assert (calls["prepare"], calls["record"]) == (2, 6)


def test_handlers_of_one_name_have_rows_of_their_own(tmp_path: Path) -> None:
    """The second object of a class has rows with its number, as has the second function of a name."""
    training, timers = Training(), [Timer(), Timer()]
    training.attach(tmp_path)
    for timer in timers:
        timer.attach(training.engine, resume=Events.EPOCH_STARTED, step=Events.ITERATION_COMPLETED)
    for every in (1, 2):
        training.engine.add_event_handler(Events.ITERATION_COMPLETED(every=every), Slow())
        training.engine.add_event_handler(Events.EPOCH_COMPLETED, partial(record, every))
    training.evaluator.add_event_handler(Events.COMPLETED, record, 3)
    training.engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: training.evaluator.run(batches(1)))

    training.run()

    calls = {(cost.name, cost.event): cost.calls for cost in read_costs(tmp_path).handlers}
    assert {key: count for key, count in calls.items() if key[0].startswith(("Timer", "Slow", "record"))} == {
        ("Timer.reset", "started"): 1,
        ("Timer #2.reset", "started"): 1,
        ("Timer.pause", "completed"): 1,
        ("Timer #2.pause", "completed"): 1,
        ("Timer.resume", "epoch_started"): 2,
        ("Timer #2.resume", "epoch_started"): 2,
        ("Timer.step", "iteration_completed"): 8,
        ("Timer #2.step", "iteration_completed"): 8,
        ("Slow", "iteration_completed"): 8,
        ("Slow #2", "iteration_completed"): 8,
        ("record", "epoch_completed"): 2,
        ("record #2", "epoch_completed"): 2,
        ("record #3", "completed"): 2,
    }


def record(every: int) -> None:
    """Do nothing."""


def test_handlers_are_put_back(tmp_path: Path) -> None:
    """A handler can be removed in the middle of a run, and the others are themselves again after it."""
    training, slow = Training(), Slow()
    training.attach(tmp_path)
    gone = training.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: None)
    training.engine.add_event_handler(Events.ITERATION_COMPLETED, slow)
    training.engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), gone.remove)

    training.run()

    assert training.engine.has_event_handler(slow, Events.ITERATION_COMPLETED)
    assert handlers_of(training.engine, Events.ITERATION_COMPLETED) == 3


def test_a_stop_ends_the_engine(tmp_path: Path) -> None:
    """`trainer.stop` in a handler terminates the engine after the iteration, with that reason."""
    training = Training()
    bus = training.attach(tmp_path)
    bus.on("after_train_iter", start=2)(lambda trainer, event: trainer.stop("enough"))

    training.run()

    assert training.engine.state.iteration == 3
    assert (after_run := bus.latest("after_run")) is None or after_run.reason == "enough"
    assert read_costs(tmp_path).outcome == "enough"


@pytest.mark.parametrize("event", ["after_train_epoch", "after_val_epoch"])
def test_a_stop_between_iterations(tmp_path: Path, event: str) -> None:
    """A stop at the end of an epoch or a validation terminates the engine without another iteration."""
    training = Training()
    bus = training.attach(tmp_path)
    training.engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: training.evaluator.run(batches(1)))
    bus.on(event)(lambda trainer, event: trainer.stop("enough"))

    training.run()

    assert training.engine.state.iteration == 4
    assert read_costs(tmp_path).outcome == "enough"


def test_terminate_closes_the_run(tmp_path: Path) -> None:
    """A run that the engine's own handler terminates closes its events, with that reason."""
    training = Training()
    bus = training.attach(tmp_path)
    stopping = EarlyStopping(
        patience=1, score_function=lambda engine: -engine.state.iteration, trainer=training.engine
    )
    training.engine.add_event_handler(Events.ITERATION_COMPLETED, stopping)
    seen: list[str] = []
    bus.on("after_train_epoch", "after_run")(lambda trainer, event: seen.append(type(event).__name__))

    training.run()

    assert training.engine.state.iteration == 2
    assert seen == ["AfterTrainEpoch", "AfterRun"]
    assert read_costs(tmp_path).outcome == "engine.terminate()"


@pytest.mark.parametrize(
    "error", [ValueError("bad batch"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_an_error_of_the_host(tmp_path: Path, error: BaseException) -> None:
    """An error in the process function reaches the caller as it is; events, writers and costs are complete."""
    training = Training()
    bus = training.attach(tmp_path, writers=[JSONLWriter()])

    def fail() -> None:
        raise error

    training.engine.add_event_handler(Events.ITERATION_STARTED(once=3), fail)

    with pytest.raises(type(error)) as raised:
        training.run()

    assert raised.value is error
    assert bus.closed
    assert read_costs(tmp_path).complete
    assert "loss" in (tmp_path / "metrics.jsonl").read_text()


def test_sigterm_ends_the_run_and_the_program(tmp_path: Path) -> None:
    """SIGTERM stops the engine after the iteration; with writers and costs complete the program ends with its code."""
    training = Training()
    training.attach(tmp_path, writers=[JSONLWriter()])
    training.engine.add_event_handler(
        Events.ITERATION_STARTED(once=2), lambda: os.kill(os.getpid(), signal.SIGTERM)
    )

    with pytest.raises(SystemExit) as ended:
        training.run()

    assert ended.value.code == 128 + signal.SIGTERM
    assert training.engine.state.iteration == 2
    assert [*read_jsonl(tmp_path / "metrics.jsonl")][-1]["reason"] == "preempted by SIGTERM"
    assert read_costs(tmp_path).complete
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_that_swallows_an_error_still_does(tmp_path: Path) -> None:
    """An engine whose own handler of exceptions goes on does so with the bridge."""
    training = Training()
    bus = training.attach(tmp_path)
    swallowed: list[BaseException] = []
    training.engine.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: swallowed.append(error))

    def fail() -> None:
        raise ValueError("bad batch")

    training.engine.add_event_handler(Events.ITERATION_STARTED(once=3), fail)

    training.run(epochs=1)

    assert [str(error) for error in swallowed] == ["bad batch"]
    assert bus.closed


def test_several_runs(tmp_path: Path) -> None:
    """A second run of the engine goes on with the same bus, files and counters."""
    training = Training()
    bus = training.attach(tmp_path, writers=[JSONLWriter()])
    rows: list[int] = []
    bus.on("after_train_iter")(lambda trainer, event: rows.append(event.iter))

    training.engine.run(batches(2), max_epochs=1)
    training.engine.run(batches(2), max_epochs=2)

    assert rows == [0, 1, 2, 3]
    assert bus.closed


def test_an_evaluator_outside_of_a_run(tmp_path: Path) -> None:
    """An evaluator that runs before the training does so as without the bridge."""
    training = Training()
    bus = training.attach(tmp_path)

    training.evaluator.run(batches(1))

    assert bus.latest("after_val_epoch") is None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda t: attach(cast(Any, print)),
            TypeError,
            "engine must be an ignite.engine.Engine, got <built-in",
        ),
        (
            lambda t: attach(t.engine, evaluators={"val": cast(Any, 3)}),
            TypeError,
            r"evaluators\['val'\] must be an ignite.engine.Engine, got 3",
        ),
        (
            lambda t: attach(t.engine, evaluators=cast(Any, [t.engine])),
            TypeError,
            "evaluators must be engines by mode, .* got \\[",
        ),
        (
            lambda t: attach(t.engine, evaluators={"val": t.engine}),
            ValueError,
            r"evaluators\['val'\] must be .* got the engine that trains",
        ),
        (
            lambda t: attach(t.engine, optimizer=cast(Any, 3)),
            TypeError,
            "optimizer must be a torch.optim.Optimizer, got 3",
        ),
        (lambda t: attach(t.engine, model=cast(Any, 3)), TypeError, "model must be a torch.nn.Module, got 3"),
        (
            lambda t: attach(t.engine, hooks=[EMAHook()]),
            ValueError,
            r"EMAHook needs a model, .* attach\(engine, model=\.\.\.\)",
        ),
        (
            lambda t: attach(t.engine, hooks=[OptimizerHook()]),
            ValueError,
            "OptimizerHook does backward .* ignite does",
        ),
        (lambda t: attach(t.engine, bus=cast(Any, 3)), TypeError, "bus must be a Bus, .* got 3"),
        (lambda t: attach(t.engine, measure=cast(Any, 1)), TypeError, "measure must be True or False, got 1"),
        (
            lambda t: attach(t.engine).on("after_backward")(print),
            ValueError,
            "after_backward, which this bus never has",
        ),
        (lambda t: attach(t.engine).on("after_val")(print), ValueError, "after_val, which .* evaluators="),
        (lambda t: attach(t.engine).on("after_optimizer_step")(print), ValueError, "optimizer=..."),
        (
            lambda t: [attach(t.engine), attach(t.engine)],
            ValueError,
            "the engine has a bridge to a bus already",
        ),
    ],
)
def test_bad_arguments(call: Callable[[Training], Any], error: type[Exception], words: str) -> None:
    """A bad argument is refused at its line, with what was expected and what came."""
    with pytest.raises(error, match=words):
        call(Training())


def test_engines_do_not_share_what_they_never_emit() -> None:
    """An engine without evaluators leaves the validations of the next engine alone."""
    first, second = Training(), Training()
    attach(first.engine, optimizer=first.optimizer)

    bus = attach(second.engine, optimizer=second.optimizer, evaluators={"val": second.evaluator})

    bus.on("after_val_epoch")(lambda event: None)


def test_without_a_model(tmp_path: Path) -> None:
    """An engine that trains no module can be attached, too."""
    engine = Engine(lambda engine, batch: batch)
    bus = attach(engine, work_dir=tmp_path)
    seen: list[Any] = []
    bus.on("after_train_iter")(lambda trainer, event: seen.append(trainer.outputs))

    engine.run([1.0, 2.0], max_epochs=1)

    assert seen == [{"loss": 1.0}, {"loss": 2.0}]
