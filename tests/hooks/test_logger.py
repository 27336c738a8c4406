"""LoggerHook: which numbers reach the writers, when, and for which iteration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from eventloop.bus import Bus
from eventloop.events import ImageLogged, ScalarsLogged
from eventloop.hooks import Hook, LoggerHook, PeriodicWriter, on
from eventloop.metrics.media import MEDIA_LIMIT
from eventloop.metrics.storage import COLLECT_AT, PENDING_LIMIT
from eventloop.training.trainer import Trainer
from eventloop.writers import JSONLWriter
from tests.conftest import DEADLINE

Record = Callable[[Trainer], list[ScalarsLogged]]
Make = Callable[..., Trainer]


class PutNumber(Hook):
    """Puts the number of each iteration."""

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Put it, early enough to be logged in the same iteration."""
        trainer.metrics.put_scalar("number", float(event.iter))


def steps(seen: list[ScalarsLogged]) -> list[int]:
    """The steps of what was logged."""
    return [event.step for event in seen]


@pytest.mark.parametrize(
    ("batches", "epochs", "interval", "ignore_last", "expected"),
    [
        (6, 2, 2, True, [2, 4, 6, 8, 10, 12]),
        (5, 2, 2, True, [2, 4, 7, 9, 10]),
        (5, 2, 2, False, [2, 4, 5, 7, 9, 10]),
        (3, 2, 10, True, [3, 6]),
        (3, 2, 10, False, [3, 6]),
        (3, 2, 3, True, [3, 6]),
        (4, 2, 1, True, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_interval_counts_the_batches_of_an_epoch(
    make_trainer: Make,
    record_scalars: Record,
    batches: int,
    epochs: int,
    interval: int,
    ignore_last: bool,
    expected: list[int],
) -> None:
    """Logs come every `interval` batches of an epoch, at the end of a short one, and in the last iteration."""
    logger = LoggerHook(interval, ignore_last)
    trainer = make_trainer(batches=batches, max_epochs=epochs, hooks=[logger])
    seen = record_scalars(trainer)

    trainer.train()

    assert steps(seen) == expected


@pytest.mark.parametrize(("interval", "expected"), [(2, [2, 4, 6, 7]), (3, [3, 6, 7]), (10, [7])])
def test_interval_counts_iterations_in_a_run_measured_in_them(
    make_trainer: Make, record_scalars: Record, interval: int, expected: list[int]
) -> None:
    """The passes over the loader do not matter there."""
    trainer = make_trainer(batches=4, max_iters=7, hooks=[LoggerHook(interval)])
    seen = record_scalars(trainer)

    trainer.train()

    assert steps(seen) == expected


def test_every_value_is_in_exactly_one_log(make_trainer: Make, record_scalars: Record) -> None:
    """The logged means, weighted by their iterations, add up to all that was put."""
    trainer = make_trainer(batches=5, max_epochs=2, hooks=[PutNumber(), LoggerHook(2)])
    seen = record_scalars(trainer)

    trainer.train()

    logged = [event.scalars["number"] for event in seen]
    assert logged == [0.5, 2.5, 5.0, 7.5, 9.0]  # 0 1 | 2 3 | 4 5 6 | 7 8 | 9


@pytest.mark.parametrize("unit", [{"max_epochs": 1}, {"max_iters": 7}], ids=["epochs", "iters"])
def test_leftovers_of_a_stopped_run_are_logged(
    make_trainer: Make, record_scalars: Record, unit: dict[str, int]
) -> None:
    """A stop between two logs loses nothing."""

    class Stop(Hook):
        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter == 4:
                trainer.stop("enough")

    trainer = make_trainer(batches=9, hooks=[PutNumber(), Stop(), LoggerHook(3)], **unit)
    seen = record_scalars(trainer)

    trainer.train()

    assert [(event.step, event.scalars["number"]) for event in seen] == [(3, 1.0), (5, 3.5)]


def test_leftovers_of_a_crashed_run_are_logged(make_trainer: Make, record_scalars: Record) -> None:
    """An error between two logs loses nothing that was put before it."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        if trainer.iter == 5:
            raise ZeroDivisionError("on purpose")
        return F.mse_loss(trainer.model(batch[0]), batch[1])

    trainer = make_trainer(batches=9, train_step=step, hooks=[PutNumber(), LoggerHook(3)])
    seen = record_scalars(trainer)

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert [(event.step, event.scalars["number"]) for event in seen] == [(3, 1.0), (5, 3.5)]


@pytest.mark.parametrize("event", ["after_train", "after_run"])
@pytest.mark.parametrize("priority", ["VERY_LOW", "LOWEST"])
def test_values_put_in_closing_hooks_are_logged(
    make_trainer: Make, record_scalars: Record, event: str, priority: str
) -> None:
    """What a hook puts at the very end, after the logger's own place, reaches the writers; also where it comes after
    every handler of the logger's."""

    def late(self: Hook, trainer: Trainer, event: Any) -> None:
        trainer.metrics.put_scalar("late", 1.0)

    closing = type("Closing", (Hook,), {"priority": priority, event: late})
    trainer = make_trainer(hooks=[closing()])
    seen = record_scalars(trainer)

    trainer.train()

    assert [logged.scalars["late"] for logged in seen if "late" in logged.scalars] == [1.0]


def put_last(trainer: Trainer, event: Any) -> None:
    """A handler that puts a number and an image."""
    trainer.metrics.put_scalar("late", 2.0)
    trainer.metrics.put_image("late", torch.zeros(1, 2, 2))


@pytest.mark.parametrize("logger", [LoggerHook, PeriodicWriter])
def test_what_is_put_behind_the_logger_is_logged_once(
    make_trainer: Make, record_scalars: Record, scripted: Callable[..., Any], logger: Callable[[], Hook]
) -> None:
    """Numbers and images of the last handler of after_run, in a run of each kind, beside what the logger itself logs."""
    trainer = make_trainer(hooks=[logger()], **scripted(0.5, 0.5))
    images: list[ImageLogged] = []
    trainer.bus.subscribe(images.append, "image_logged", offload="thread")
    trainer.bus.subscribe(lambda trainer, e: trainer.metrics.put_scalar("early", 1.0), "after_run")
    trainer.bus.subscribe(put_last, "after_run", priority="LOWEST")
    seen = record_scalars(trainer)

    for run in (trainer.train, trainer.val):
        run()
        ends = [event.scalars for event in seen if not event.scalars.keys().isdisjoint({"early", "late"})]
        assert (ends, len(images)) == ([{"early": 1.0}, {"late": 2.0}], 1)
        assert trainer.metrics.pending == trainer.metrics.pending_media == 0
        seen.clear()
        images.clear()


def test_an_error_of_a_handler_does_not_keep_back_what_others_put(
    make_trainer: Make, record_scalars: Record
) -> None:
    """Of a run whose after_run fails everything is logged, and the metrics hold the trainer no longer."""

    def fail(trainer: Trainer, event: Any) -> None:
        raise ZeroDivisionError("on purpose")

    trainer = make_trainer(hooks=[LoggerHook()])
    trainer.bus.subscribe(fail, "after_run")
    trainer.bus.subscribe(put_last, "after_run", priority="LOWEST")
    seen = record_scalars(trainer)

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert seen[-1].scalars == {"late": 2.0}
    assert trainer.metrics.relieve is None


def test_values_put_by_a_lone_validation_are_logged(
    make_trainer: Make, record_scalars: Record, scripted: Callable[..., dict[str, Any]]
) -> None:
    """`trainer.val()` without a training delivers what its hooks put, under its mode."""

    class PutInVal(Hook):
        def after_val_iter(self, trainer: Trainer, event: Any) -> None:
            trainer.metrics.put_scalar("seen", 1.0)

    trainer = make_trainer(hooks=[PutInVal()], **scripted(0.5))
    seen = record_scalars(trainer)

    trainer.val()

    assert [(event.mode, event.scalars) for event in seen] == [("val", {"acc": 0.5}), ("val", {"seen": 1.0})]


def test_lr_is_the_one_the_iteration_was_trained_with(make_trainer: Make, record_scalars: Record) -> None:
    """The scheduler moves the rate after the log, so log and step agree."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    used: list[float] = []

    class Used(Hook):
        def before_optimizer_step(self, trainer: Trainer, event: Any) -> None:
            used.append(optimizer.param_groups[0]["lr"])

    trainer = make_trainer(
        model=model, optimizer=optimizer, schedulers=[StepLR(optimizer, 1, gamma=0.5)], max_iters=4,
        hooks=[Used(), LoggerHook(1)],
    )  # fmt: skip
    seen = record_scalars(trainer)

    trainer.train()

    assert [event.scalars["lr"] for event in seen] == used == [1.0, 0.5, 0.25, 0.125]


def test_rate_kept_in_a_tensor_is_logged(make_trainer: Make, record_scalars: Record) -> None:
    """A capturable optimizer's `lr` is a tensor; its value of that iteration is logged."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0))
    trainer = make_trainer(
        model=model, optimizer=optimizer, schedulers=[StepLR(optimizer, 1, gamma=0.5)], max_iters=3,
        hooks=[LoggerHook(1)],
    )  # fmt: skip
    seen = record_scalars(trainer)

    trainer.train()

    assert [event.scalars["lr"] for event in seen] == [1.0, 0.5, 0.25]


def test_run_without_optimizer_logs_no_lr(make_trainer: Make, record_scalars: Record) -> None:
    """There is no rate, and the rest is logged."""
    trainer = make_trainer(optimizer=None, default_hooks={"optimizer": None}, hooks=[LoggerHook(2)])
    seen = record_scalars(trainer)

    trainer.train()

    assert all("loss" in event.scalars and "lr" not in event.scalars for event in seen)
    assert steps(seen) == [2, 4]


def test_outputs_named_lr_do_not_stop_the_run(make_trainer: Make, record_scalars: Record) -> None:
    """A train step that returns its own `lr` is believed."""

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        return {"loss": F.mse_loss(trainer.model(batch[0]), batch[1]), "lr": 0.75}

    trainer = make_trainer(train_step=step, hooks=[LoggerHook(2)])
    seen = record_scalars(trainer)

    trainer.train()

    assert [event.scalars["lr"] for event in seen] == [0.75, 0.75]


def test_validation_metrics_are_logged_with_their_step(
    make_trainer: Make, record_scalars: Record, scripted: Callable[..., dict[str, Any]]
) -> None:
    """Each validation is one event of mode val, at the number of trained iterations."""
    trainer = make_trainer(max_epochs=3, **scripted(0.25, 0.5, 0.75))
    seen = record_scalars(trainer)

    trainer.train()

    val = [(event.step, event.epoch, event.scalars) for event in seen if event.mode == "val"]
    assert val == [(4, 1, {"acc": 0.25}), (8, 2, {"acc": 0.5}), (12, 3, {"acc": 0.75})]


def test_test_metrics_are_logged(
    make_trainer: Make, record_scalars: Record, scripted: Callable[..., dict[str, Any]]
) -> None:
    """A test is logged under its own mode."""
    options = scripted(0.5)
    trainer = make_trainer(val_step=options["val_step"], test_loader=options["val_loader"])
    seen = record_scalars(trainer)

    trainer.test()

    assert [(event.mode, event.step, event.scalars) for event in seen] == [("test", 0, {"acc": 0.5})]


def test_late_value_keeps_its_own_iteration(make_trainer: Make, record_scalars: Record) -> None:
    """A value put for an earlier iteration is logged at that iteration."""

    class Late(Hook):
        @on(every=4)
        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            trainer.metrics.put_scalar("late", 7.0, cur_iter=1)

    trainer = make_trainer(hooks=[Late(), LoggerHook(4)])
    seen = record_scalars(trainer)

    trainer.train()

    assert [(event.iter, event.step) for event in seen if "late" in event.scalars] == [(1, 2)]


def test_value_put_in_a_validation_keeps_its_mode(
    make_trainer: Make, record_scalars: Record, scripted: Callable[..., dict[str, Any]]
) -> None:
    """What is put while validating is not mixed with training's values of the interval."""

    class PutInVal(Hook):
        def after_iter(self, trainer: Trainer, event: Any) -> None:
            trainer.metrics.put_scalar("both", 1.0 if event.mode == "val" else 3.0)

    trainer = make_trainer(batches=2, max_epochs=2, hooks=[PutInVal()], **scripted(0.5, 0.5))
    seen = record_scalars(trainer)

    trainer.train()

    both = {(event.mode, event.scalars["both"]) for event in seen if "both" in event.scalars}
    assert both == {("train", 3.0), ("val", 1.0)}


@pytest.mark.parametrize(
    ("interval", "message"),
    [(0, "interval must be at least 1, got 0"), (2.5, "interval must be an int, got 2.5")],
)
def test_bad_interval_is_refused(interval: Any, message: str) -> None:
    """The interval is checked when the hook is built."""
    with pytest.raises((TypeError, ValueError), match=message):
        LoggerHook(interval)


@pytest.mark.slow
def test_a_long_interval_loses_nothing(
    make_trainer: Callable[..., Trainer], record_scalars: Callable[[Trainer], list[ScalarsLogged]]
) -> None:
    """Values are sent before the storage would have to give one up, however long the interval."""
    count = 2 * COLLECT_AT

    def step(trainer: Trainer, batch: Any) -> None:
        for i in range(COLLECT_AT // 2):  # each call is a row
            trainer.metrics.put_scalar("value", float(i), smoothing_hint=False, cur_iter=i)

    trainer = make_trainer(max_epochs=1, hooks=[LoggerHook(interval=1000)])
    trainer.bus.subscribe(step, "before_train_iter")
    seen = record_scalars(trainer)
    trainer.train()

    assert sum("value" in event.scalars for event in seen) == trainer.iter * (COLLECT_AT // 2) >= count


@pytest.mark.slow
@pytest.mark.parametrize("hook", [LoggerHook(interval=1000), PeriodicWriter(period=1000)])
@pytest.mark.parametrize("when", ["before_train_iter", "before_val_iter"])
def test_more_than_the_storage_holds_is_sent_wherever_it_is_put(
    make_trainer: Make, record_scalars: Record, hook: LoggerHook, when: str
) -> None:
    """In one iteration, in one validation, with either logger: nothing waits for the end of its interval or its pass."""
    count = PENDING_LIMIT + 100

    def put(trainer: Trainer, event: Any) -> None:
        for i in range(count):
            trainer.metrics.put_scalar("value", float(i), smoothing_hint=False, cur_iter=i)

    trainer = make_trainer(
        max_epochs=1, batches=1, hooks=[hook], val_loader=[0], val_step=lambda trainer, batch: {"acc": 1.0},
        bus=Bus(drain_timeout=DEADLINE),
    )  # fmt: skip
    trainer.bus.subscribe(put, when)
    seen = record_scalars(trainer)
    trainer.train()

    assert [event.scalars["value"] for event in seen if "value" in event.scalars] == [
        *map(float, range(count))
    ]


def test_more_images_than_the_storage_holds_are_sent(make_trainer: Make) -> None:
    """As with scalars: those of a long validation do not wait for its end."""
    seen: list[ImageLogged] = []

    def put(trainer: Trainer, event: Any) -> None:
        for _ in range(MEDIA_LIMIT + 50):
            trainer.metrics.put_image("image", torch.zeros(1, 2, 2))

    trainer = make_trainer(
        max_epochs=1, hooks=[LoggerHook(1000)], val_loader=[0], val_step=lambda trainer, batch: {"acc": 1.0}
    )
    trainer.bus.subscribe(put, "before_val_iter")
    trainer.bus.subscribe(seen.append, "image_logged", offload="thread")
    trainer.train()
    trainer.bus.flush()

    assert len(seen) == MEDIA_LIMIT + 50


def test_without_a_subscriber_nothing_piles_up(make_trainer: Callable[..., Trainer]) -> None:
    """A trainer without writers, as on ranks other than 0, keeps the histories and no packet."""
    trainer = make_trainer(max_epochs=1, hooks=[LoggerHook(interval=1)])
    trainer.train()
    trainer.bus.flush()

    assert trainer.metrics.pending == 0
    assert len(trainer.metrics.history("loss")) == trainer.iter


def test_logs_are_copied(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """With `out_dir` the logs are there too once the run has ended, whole, in a folder named as work_dir."""
    hook = LoggerHook(interval=1, out_dir=tmp_path / "out", out_suffix=".jsonl")
    trainer = make_trainer(max_epochs=1, hooks=[hook], writers=[JSONLWriter()], default_hooks={"trace": None})
    trainer.train()

    (copied,) = (tmp_path / "out" / trainer.work_dir.name).iterdir()
    assert copied.read_text() == (trainer.work_dir / "metrics.jsonl").read_text() != ""


def test_two_loggers_are_refused(make_trainer: Callable[..., Trainer]) -> None:
    """Each would send what the other waits for."""
    with pytest.raises(ValueError, match="the trainer has two LoggerHooks"):
        make_trainer(hooks=[LoggerHook(), LoggerHook(interval=5)])
