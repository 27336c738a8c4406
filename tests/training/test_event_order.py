"""Which events a run emits, in which order, and what the counters say at each."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from eventloop.costs.spans import SpanRecorder
from eventloop.events import ScalarsLogged
from eventloop.hooks import CheckpointHook, EMAHook
from tests.support.trainers import DEADLINE, MakeTrainer, batches, collect, event_name, names, record


def val_rows(iteration: int, epoch: int) -> list[tuple[str, int, int]]:
    """A validation of one batch."""
    inner = ("before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch")
    return [(name, iteration, epoch) for name in ("before_val", *inner, "after_val")]


def test_epoch_based_training_with_validation(make_trainer: MakeTrainer) -> None:
    """Two epochs of two batches, each followed by a validation: every event, in MMEngine's order, with MMEngine's
    counters (`iter` is the one just run in after_train_iter and the next in after_train_epoch; a validation after
    an epoch counts the completed ones)."""
    trainer = make_trainer(train_loader=batches(2), val_loader=batches(1), max_epochs=2)
    rows = record(trainer)

    trainer.train()

    assert rows == [
        ("before_run", 0, 0),
        ("before_train", 0, 0),
        ("before_train_epoch", 0, 0),
        ("before_train_iter", 0, 0),
        ("after_train_iter", 0, 0),
        ("before_train_iter", 1, 0),
        ("after_train_iter", 1, 0),
        ("after_train_epoch", 2, 0),
        *val_rows(2, 1),
        ("before_train_epoch", 2, 1),
        ("before_train_iter", 2, 1),
        ("after_train_iter", 2, 1),
        ("before_train_iter", 3, 1),
        ("after_train_iter", 3, 1),
        ("after_train_epoch", 4, 1),
        *val_rows(4, 2),
        ("after_train", 4, 2),
        ("after_run", 4, 2),
    ]


def test_iteration_based_run_is_one_epoch(make_trainer: MakeTrainer) -> None:
    """A run measured in iterations goes through its loader as often as it must, and is one epoch."""
    trainer = make_trainer(train_loader=batches(2), max_iters=5)
    rows = record(trainer)

    trainer.train()

    opening, iterations = (
        ("before_run", "before_train", "before_train_epoch"),
        ("before_train_iter", "after_train_iter"),
    )
    assert rows == [
        *((name, 0, 0) for name in opening),
        *((name, i, 0) for i in range(5) for name in iterations),
        ("after_train_epoch", 5, 0),
        ("after_train", 5, 1),
        ("after_run", 5, 1),
    ]


def test_iteration_based_validation_lies_between_two_iterations(make_trainer: MakeTrainer) -> None:
    """In a run measured in iterations a validation comes after an iteration was counted, inside the epoch."""
    trainer = make_trainer(train_loader=batches(2), val_loader=batches(1), max_iters=4, val_interval=2)
    rows = record(trainer)

    trainer.train()

    at = rows.index(("before_val", 2, 0))
    assert rows[at - 1] == ("after_train_iter", 1, 0)
    assert rows[at : at + 6] == val_rows(2, 0)
    assert rows[at + 6] == ("before_train_iter", 2, 0)
    assert rows[-4:-3] == [("after_val", 4, 0)]


def test_a_frozen_module_stays_in_eval_mode_after_a_validation(make_trainer: MakeTrainer) -> None:
    """A validation within an epoch gives each module its own mode again, as in Lightning."""
    trainer = make_trainer(val_loader=batches(2), max_iters=3, val_interval=1)
    trainer.bus.subscribe(lambda event: trainer.model[1].eval(), "before_train_epoch")  # type: ignore[index]
    modes: list[list[bool]] = []
    trainer.bus.subscribe(
        lambda event: modes.append([module.training for module in trainer.model.children()]),
        "before_train_iter",
    )

    trainer.train()

    assert modes == [[True, False, True, True]] * 3


@pytest.mark.parametrize("mode", ["val", "test"])
def test_an_evaluation_alone(make_trainer: MakeTrainer, mode: str) -> None:
    """`val()` and `test()` are runs of their own, each on its loader, with nothing of training in them. The closing
    events have the metrics that the call returns."""
    trainer = make_trainer(**{f"{mode}_loader": batches(2)})
    rows, closing = record(trainer), collect(trainer, f"after_{mode}_epoch", f"after_{mode}")

    metrics = getattr(trainer, mode)()

    inner = [f"before_{mode}_iter", f"after_{mode}_iter"] * 2
    phase = [f"before_{mode}", f"before_{mode}_epoch", *inner, f"after_{mode}_epoch", f"after_{mode}"]
    assert names(rows) == ["before_run", *phase, "after_run"]
    assert set(metrics) == {"loss", "accuracy"}
    assert [event.metrics for event in closing] == [metrics, metrics]


def test_one_run_per_call(make_trainer: MakeTrainer) -> None:
    """before_run and after_run are emitted once per call of train, val and test."""
    trainer = make_trainer(val_loader=batches(1), test_loader=batches(1))
    rows = record(trainer, "before_run", "after_run")

    trainer.train()
    trainer.val()
    trainer.test()

    assert names(rows) == ["before_run", "after_run"] * 3


def test_val_inside_a_hand_written_loop_is_no_run_of_its_own(make_trainer: MakeTrainer) -> None:
    """`trainer.val()` inside a run nests: no second before_run, and training goes on after it."""
    trainer = make_trainer(val_loader=batches(1), val_interval=100, max_epochs=1)
    rows = record(trainer, "before_run", "after_run", "before_val", "after_val", "after_train_epoch")

    for _ in trainer.epochs():
        for batch in trainer.batches(batches(1)):
            trainer.outputs = trainer.train_step(batch)
        trainer.val()

    assert names(rows) == ["before_run", "after_train_epoch", *["before_val", "after_val"] * 2, "after_run"]


def test_val_called_by_a_handler_leaves_the_step_as_it_was(make_trainer: MakeTrainer) -> None:
    """A validation started within an iteration gives batch, outputs, mode and train() back."""
    trainer = make_trainer(val_loader=batches(1), val_interval=100, max_epochs=1)
    seen: list[tuple[Any, ...]] = []

    @trainer.bus.on("before_train_iter", once=True)
    def validate(trainer: Any, event: Any) -> None:
        before = (trainer.batch, trainer.outputs, trainer.mode, trainer.model.training)
        trainer.val()
        after = (trainer.batch, trainer.outputs, trainer.mode, trainer.model.training)
        seen.append((before, after))

    trainer.train()

    before, after = seen[0]
    assert before[0] is after[0]
    assert before[1:] == after[1:] == (None, "train", True)


def test_val_called_by_a_handler_has_the_iter_of_its_iteration(make_trainer: MakeTrainer) -> None:
    """One of the schedule, which comes after the iteration, has the next `iter`; both are logged at the same step."""
    trainer = make_trainer(val_loader=batches(1), val_interval=2, max_iters=2)
    trainer.bus.subscribe(lambda trainer, event: trainer.val(), "after_train_iter", start=1)
    seen = collect(trainer, "after_val_epoch")
    with trainer.bus.capture(ScalarsLogged) as logged:
        trainer.train()

    assert [event.iter for event in seen] == [1, 2]
    steps = [event.step for event in logged if isinstance(event, ScalarsLogged) and event.mode == "val"]
    assert steps == [2, 2]


class Unsized:
    """A loader without a length."""

    def __iter__(self) -> Any:
        return iter(batches(3))


@pytest.mark.parametrize(("loader", "iters"), [(batches(3), 6), (Unsized(), None)], ids=["sized", "unsized"])
def test_events_carry_the_maxima(make_trainer: MakeTrainer, loader: Any, iters: int | None) -> None:
    """`max_iters` and `max_epochs` are on every event; a loader without a length leaves `max_iters` unknown."""
    trainer = make_trainer(train_loader=loader, max_epochs=2)
    seen = collect(trainer, "before_run", "after_train_iter", "after_run")

    trainer.train()

    assert len(seen) == 8
    assert {(event.max_iters, event.max_epochs) for event in seen} == {(iters, 2)}


def test_batch_idx_counts_within_the_pass(make_trainer: MakeTrainer) -> None:
    """`batch_idx` starts anew with every pass over a loader. In a run measured in iterations it alone shows a new pass, as
    `epoch` stays 0. A run that reaches its end says "completed" in every closing event."""
    trainer = make_trainer(train_loader=batches(2), val_loader=batches(3), max_iters=5, val_interval=2)
    closing = ("after_train_epoch", "after_val_epoch", "after_val", "after_train", "after_run")
    seen = collect(trainer, "after_train_iter", "after_val_iter", *closing)

    trainer.train()

    trained = [event for event in seen if event_name(event) == "after_train_iter"]
    assert [(event.iter, event.epoch, event.batch_idx) for event in trained] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 0, 0),
        (3, 0, 1),
        (4, 0, 0),
    ]
    assert [event.batch_idx for event in seen if event_name(event) == "after_val_iter"] == [0, 1, 2] * 3
    assert {event.reason for event in seen if event_name(event) in closing} == {"completed"}
    assert seen[-1].error is None


def test_order_within_a_train_iteration(make_trainer: MakeTrainer) -> None:
    """before_train_iter, forward, then after_train_iter with the optimizer's events at priority 30."""
    rows: list[str] = []

    def step(trainer: Any, batch: Any) -> Any:
        rows.append("forward")
        return trainer.model(batch[0]).sum()

    trainer = make_trainer(train_step=step, train_loader=batches(1), max_epochs=1)
    for event in ("before_train_iter", "after_backward", "before_optimizer_step", "after_optimizer_step"):
        trainer.bus.subscribe(lambda event, name=event: rows.append(name), event)
    trainer.bus.subscribe(lambda event: rows.append("29"), "after_train_iter", priority=29)
    trainer.bus.subscribe(lambda event: rows.append("31"), "after_train_iter", priority=31)

    trainer.train()

    assert rows == [
        "before_train_iter",
        "forward",
        "29",
        "after_backward",
        "before_optimizer_step",
        "after_optimizer_step",
        "31",
    ]


def test_default_order_of_after_train_iter(make_trainer: MakeTrainer) -> None:
    """RuntimeInfo 10, Optimizer 30, IterTimer 50, Logger 60, ParamScheduler 70, Checkpoint 90, GarbageCollection
    and Costs 100."""
    trainer = make_trainer()

    plan = [(row.priority, row.name.split(".")[0]) for row in trainer.bus.plan("after_train_iter")]

    assert plan == [
        (10, "RuntimeInfoHook"),
        (30, "OptimizerHook"),
        (50, "IterTimerHook"),
        (60, "LoggerHook"),
        (70, "ParamSchedulerHook"),
        (90, "CheckpointHook"),
        (100, "GarbageCollectionHook"),
        (100, "CostsHook"),
    ]


def test_the_default_stack_runs_in_the_planned_order(make_trainer: MakeTrainer) -> None:
    """The handlers of each event that ran are those of the plan, less those whose filter held them back, in its order."""
    trainer = make_trainer(hooks=[EMAHook(), CheckpointHook(interval=1)], val_loader=batches(1), max_epochs=1)
    recorder = SpanRecorder()
    with trainer.bus.record(recorder) as recording:
        trainer.train()
    recording.wait(DEADLINE)
    ran: dict[str, list[str]] = defaultdict(list)
    for span in recorder.spans:
        if span.kind == "handler" and span.name not in ran[span.event]:
            ran[span.event].append(span.name)

    assert len(ran["after_train_iter"]) > 6
    for event, handlers in ran.items():
        planned = [row.name for row in trainer.bus.plan(event) if row.runs_on == "sync"]
        assert handlers == [name for name in planned if name in handlers]


def test_evaluation_runs_without_grad_and_in_eval_mode(make_trainer: MakeTrainer) -> None:
    """A validation runs the model in eval mode, records no gradient, and puts the model back to training."""
    seen: list[Any] = []

    def val_step(trainer: Any, batch: Any) -> dict[str, Any]:
        out = trainer.model(batch[0])
        seen.append((trainer.model.training, out.requires_grad, trainer.mode))
        return {"score": out.sum()}

    trainer = make_trainer(val_loader=batches(1), val_step=val_step)
    trainer.model.train()
    trainer.val()

    assert seen == [(False, False, "val")]
    assert trainer.model.training
