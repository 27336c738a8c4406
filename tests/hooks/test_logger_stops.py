"""LoggerHook: the learning rate beside what a stop leaves of an interval."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop import Trainer
from eventloop.events import ScalarsLogged
from eventloop.hooks import LoggerHook, PeriodicWriter
from tests.hooks.conftest import Make, Record, rates


def steps(seen: list[ScalarsLogged]) -> list[int]:
    """The steps of what was logged."""
    return [event.step for event in seen]


@pytest.mark.representative(2)
@pytest.mark.parametrize("unit", [{"max_epochs": 1}, {"max_iters": 9}], ids=["epochs", "iters"])
@pytest.mark.parametrize("logger", [LoggerHook, PeriodicWriter])
@pytest.mark.parametrize("ask", [Trainer.stop, Trainer.request_stop])
@pytest.mark.parametrize("event", ["before_train_iter", "after_train_iter"])
def test_a_stop_between_two_logs_logs_the_rate_too(
    make_trainer: Make, record_scalars: Record, unit: dict[str, int], logger: Any, ask: Any, event: str
) -> None:
    """That of the last iteration, at its step, beside what is left; a training after it keeps its intervals."""
    hooks = [logger([], 3) if logger is PeriodicWriter else logger(3)]
    trainer = make_trainer(batches=9, hooks=hooks, **rates(), **unit)
    stop = trainer.bus.subscribe(lambda trainer, e: ask(trainer, "enough"), event, when=lambda e: e.iter == 4)
    seen = record_scalars(trainer)

    trainer.train()

    assert [(e.step, e.scalars["lr"], "loss" in e.scalars) for e in seen] == [
        (3, 0.25, True),
        (5, 0.0625, True),
    ]

    stop.cancel()
    seen.clear()
    trainer.train()
    assert all({"lr", "loss"} <= e.scalars.keys() for e in seen)
    assert steps(seen) == [6, 9]


def test_a_stop_behind_the_logger_does_not_shorten_the_next_interval(
    make_trainer: Make, record_scalars: Record
) -> None:
    """Its own run logs what is left without a rate, which the scheduler has moved."""
    trainer = make_trainer(max_iters=9, hooks=[LoggerHook(3)], **rates())
    stop = trainer.bus.subscribe(
        lambda trainer, e: trainer.stop("enough") if e.iter in (2, 4) else None,
        "after_train_iter",
        priority="LOWEST",
    )
    seen = record_scalars(trainer)

    trainer.train()
    assert [(e.step, e.scalars.get("lr")) for e in seen] == [(3, 0.25)]
    trainer.train()
    assert [(e.step, e.scalars.get("lr")) for e in seen] == [(3, 0.25), (5, None)]
    stop.cancel()
    trainer.train()
    assert steps(seen) == [3, 5, 6, 9]
