"""LoggerHook: which numbers reach the writers, when, and for which iteration."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eventloop import Trainer
from eventloop.bus import Bus
from eventloop.events import ImageLogged, ScalarsLogged
from eventloop.hooks import Hook, LoggerHook, PeriodicWriter, on
from eventloop.metrics.media import MEDIA_LIMIT
from eventloop.metrics.storage import COLLECT_AT, PENDING_LIMIT
from tests.conftest import DEADLINE
from tests.hooks.conftest import Make, PutNumber, Record, Scripted, rates

Put = Callable[[Trainer, Any], None]


def steps(seen: list[ScalarsLogged]) -> list[int]:
    """The steps of what was logged."""
    return [event.step for event in seen]


class Unsized:
    """A loader without a length."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.parametrize("loader", [list, Unsized])
@pytest.mark.parametrize(
    ("count", "epochs", "interval", "ignore_last", "expected"),
    [
        (6, 2, 2, True, [2, 4, 6, 8, 10, 12]),
        (5, 2, 2, True, [2, 4, 7, 9, 10]),
        (5, 2, 2, False, [2, 4, 5, 7, 9, 10]),
        (3, 2, 10, True, [3, 6]),
        (3, 2, 10, False, [3, 6]),
        (4, 2, 1, True, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_interval_counts_the_batches_of_an_epoch(
    make_trainer: Make,
    record_scalars: Record,
    make_batches: Callable[[int], Iterable[Any]],
    loader: Callable[[Iterable[Any]], Iterable[Any]],
    count: int,
    epochs: int,
    interval: int,
    ignore_last: bool,
    expected: list[int],
) -> None:
    """Logs come every `interval` batches of an epoch, at the end of a short one, and in the last iteration."""
    trainer = make_trainer(
        train_loader=loader(make_batches(count)), max_epochs=epochs, hooks=[LoggerHook(interval, ignore_last)]
    )
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


def test_a_subscriber_gets_no_interval_before_it(make_trainer: Make, record_scalars: Record) -> None:
    """A subscriber that comes on the way gets the means of its own intervals; the histories have all values."""
    trainer = make_trainer(batches=8, max_epochs=1, hooks=[PutNumber(), LoggerHook(2)])
    seen: list[list[ScalarsLogged]] = []
    trainer.bus.subscribe(
        lambda event: seen.append(record_scalars(trainer)), "after_train_iter", when=lambda e: e.iter == 4
    )

    trainer.train()

    assert [(event.step, event.scalars["number"]) for event in seen[0]] == [(6, 4.5), (8, 6.5)]
    assert trainer.metrics.history("number").values() == [(float(i), i) for i in range(8)]


def test_an_interval_without_a_subscriber_is_no_work(make_trainer: Make) -> None:
    """The background, which would make the events, is not started for values that nothing has subscribed to."""
    trainer = make_trainer(batches=8, max_epochs=1, hooks=[LoggerHook(2)])
    names: list[str] = []
    trainer.bus.subscribe(
        lambda event: names.extend(each.name for each in threading.enumerate()), "after_train_epoch"
    )

    trainer.train()

    assert "eventloop background" not in names
    assert trainer.metrics.latest()["loss"].step == 8


@pytest.mark.parametrize("unit", [{"max_epochs": 1}, {"max_iters": 7}], ids=["epochs", "iters"])
@pytest.mark.parametrize("how", ["stop", "error"])
def test_leftovers_of_a_run_cut_short_are_logged(
    make_trainer: Make, record_scalars: Record, unit: dict[str, int], how: str
) -> None:
    """A stop, or an error, between two logs loses nothing that was put before it."""

    def end(trainer: Trainer, event: Any) -> None:
        if how == "error":
            raise ZeroDivisionError("on purpose")
        trainer.stop("enough")

    trainer = make_trainer(batches=9, hooks=[PutNumber(), LoggerHook(3)], **unit)
    where, start = ("before_train_iter", 5) if how == "error" else ("after_train_iter", 4)
    trainer.bus.subscribe(end, where, start=start, once=True)
    seen = record_scalars(trainer)

    if how == "error":
        with pytest.raises(ZeroDivisionError):
            trainer.train()
    else:
        trainer.train()

    assert [(event.step, event.scalars["number"]) for event in seen] == [(3, 1.0), (5, 3.5)]


@pytest.mark.parametrize("event", ["after_train", "after_run"])
@pytest.mark.parametrize("priority", ["VERY_LOW", "LOWEST"])
def test_values_put_in_closing_hooks_are_logged(
    make_trainer: Make, record_scalars: Record, event: str, priority: str
) -> None:
    """What a hook puts at the very end reaches the writers; also where it comes after every handler of the logger's."""

    def late(self: Hook, trainer: Trainer, event: Any) -> None:
        trainer.metrics.put_scalar("late", 1.0)

    trainer = make_trainer(hooks=[type("Closing", (Hook,), {"priority": priority, event: late})()])
    seen = record_scalars(trainer)

    trainer.train()

    assert [logged.scalars["late"] for logged in seen if "late" in logged.scalars] == [1.0]


def put_last(trainer: Trainer, event: Any) -> None:
    """A handler that puts a number and an image."""
    trainer.metrics.put_scalar("late", 2.0)
    trainer.metrics.put_image("late", torch.zeros(1, 2, 2))


@pytest.mark.parametrize("logger", [LoggerHook, PeriodicWriter])
def test_what_is_put_behind_the_logger_is_logged_once(
    make_trainer: Make, record_scalars: Record, scripted: Scripted, logger: Callable[[], Hook]
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
    assert trainer.metrics.post_pending is None


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_lr_is_the_one_the_iteration_was_trained_with(
    make_trainer: Make, record_scalars: Record, kind: Callable[[float], Any]
) -> None:
    """The scheduler moves the rate after the log, so log and step agree; also where the rate is a tensor."""
    used: list[float] = []
    trainer = make_trainer(max_iters=4, hooks=[LoggerHook(1)], **rates(kind(1.0)))
    trainer.bus.subscribe(
        lambda event: used.append(float(trainer.optimizer.param_groups[0]["lr"])), "before_optimizer_step"
    )
    seen = record_scalars(trainer)

    trainer.train()

    assert [event.scalars["lr"] for event in seen] == used == [1.0, 0.5, 0.25, 0.125]


def test_run_without_optimizer_logs_no_lr(make_trainer: Make, record_scalars: Record) -> None:
    """There is no rate, and the rest is logged; a train step that returns its own `lr` is believed."""

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        loss = F.mse_loss(trainer.model(batch[0]), batch[1])
        return {"loss": loss, "lr": 0.75} if trainer.optimizer else {"loss": loss}

    without = {"optimizer": None, "default_hooks": {"optimizer": None}}
    for options, expected in ((without, None), ({}, 0.75)):
        trainer = make_trainer(train_step=step, hooks=[LoggerHook(2)], **options)
        seen = record_scalars(trainer)

        trainer.train()

        assert [event.scalars.get("lr") for event in seen if "loss" in event.scalars] == [expected] * 2
        assert steps(seen) == [2, 4]


def test_validation_metrics_are_logged_with_their_step(
    make_trainer: Make, record_scalars: Record, scripted: Scripted
) -> None:
    """Each validation is one event of mode val, at the number of trained iterations."""
    trainer = make_trainer(max_epochs=3, **scripted(0.25, 0.5, 0.75))
    seen = record_scalars(trainer)

    trainer.train()

    val = [(event.step, event.epoch, event.scalars) for event in seen if event.mode == "val"]
    assert val == [(4, 1, {"acc": 0.25}), (8, 2, {"acc": 0.5}), (12, 3, {"acc": 0.75})]


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
    make_trainer: Make, record_scalars: Record, scripted: Scripted
) -> None:
    """It is not mixed with training's values of the interval; `trainer.val()` without a training delivers it, too."""

    class Put(Hook):
        def after_iter(self, trainer: Trainer, event: Any) -> None:
            trainer.metrics.put_scalar("both", 1.0 if event.mode == "val" else 3.0)

    trainer = make_trainer(batches=2, hooks=[Put()], **scripted(0.5, 0.25))
    seen = record_scalars(trainer)

    trainer.train()
    assert {(e.mode, e.scalars["both"]) for e in seen if "both" in e.scalars} == {
        ("train", 3.0),
        ("val", 1.0),
    }
    seen.clear()
    trainer.val()
    assert [(event.mode, event.scalars) for event in seen] == [("val", {"acc": 0.25}), ("val", {"both": 1.0})]


def put_values(count: int) -> Put:
    """A handler that puts so many values, each in a row of its own."""

    def put(trainer: Trainer, event: Any) -> None:
        for i in range(count):
            trainer.metrics.put_scalar("value", float(i), smoothing_hint=False, cur_iter=i)

    return put


@pytest.mark.slow
def test_a_long_interval_loses_nothing(make_trainer: Make, record_scalars: Record) -> None:
    """Values are sent before the storage would have to give one up, however long the interval."""
    trainer = make_trainer(hooks=[LoggerHook(interval=1000)])
    trainer.bus.subscribe(put_values(COLLECT_AT // 2), "before_train_iter")
    seen = record_scalars(trainer)

    trainer.train()

    assert sum("value" in event.scalars for event in seen) == 4 * (COLLECT_AT // 2)


@pytest.mark.slow
@pytest.mark.parametrize("hook", [LoggerHook(interval=1000), PeriodicWriter(period=1000)])
@pytest.mark.parametrize("when", ["before_train_iter", "before_val_iter"])
def test_more_than_the_storage_holds_is_sent_wherever_it_is_put(
    make_trainer: Make, record_scalars: Record, scripted: Scripted, hook: LoggerHook, when: str
) -> None:
    """In one iteration, in one validation, with either logger: nothing waits for the end of its interval or its pass."""
    count = PENDING_LIMIT + 100
    trainer = make_trainer(batches=1, hooks=[hook], bus=Bus(drain_timeout=DEADLINE), **scripted(1.0))
    trainer.bus.subscribe(put_values(count), when)
    seen = record_scalars(trainer)

    trainer.train()

    values = [event.scalars["value"] for event in seen if "value" in event.scalars]
    assert values == [*map(float, range(count))]


def test_more_images_than_the_storage_holds_are_sent(make_trainer: Make, scripted: Scripted) -> None:
    """Those of a long validation do not wait for its end, either."""
    seen: list[ImageLogged] = []

    def put(trainer: Trainer, event: Any) -> None:
        for _ in range(MEDIA_LIMIT + 50):
            trainer.metrics.put_image("image", torch.zeros(1, 2, 2))

    trainer = make_trainer(hooks=[LoggerHook(1000)], **scripted(1.0))
    trainer.bus.subscribe(put, "before_val_iter")
    trainer.bus.subscribe(seen.append, "image_logged", offload="thread")
    trainer.train()
    trainer.bus.flush()

    assert len(seen) == MEDIA_LIMIT + 50


def test_without_a_subscriber_nothing_piles_up(make_trainer: Make) -> None:
    """A trainer without writers, as on ranks other than 0, keeps the histories and no packet."""
    trainer = make_trainer(hooks=[LoggerHook(interval=1)])
    trainer.train()
    trainer.bus.flush()

    assert trainer.metrics.pending == 0
    assert len(trainer.metrics.history("loss")) == trainer.iter


@pytest.mark.parametrize("kind", [LoggerHook, PeriodicWriter])
def test_two_loggers_are_refused(make_trainer: Make, kind: Callable[[], Hook]) -> None:
    """Each would send what the other waits for."""
    with pytest.raises(ValueError, match=r"two LoggerHooks \(a PeriodicWriter is one\), .* its own interval"):
        make_trainer(hooks=[kind(), kind()])
