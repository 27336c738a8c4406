"""LoggerHook(reduce=True): which of its packets are reduced over the ranks, and how long it waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.hooks import LoggerHook
from eventloop.metrics.packet import Packet
from eventloop.metrics.reduce import LAST, Reduced, Reducer
from tests.hooks.conftest import Make, PutNumber, Record
from tests.support.meeting import Meeting, Present


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank is expected, and never comes."""
    monkeypatch.setattr(Reducer, "begin_run", lambda self: self.join(Present(Meeting(2), 0), 0))


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The iterations whose logs were to be reduced."""
    reduce, iterations = Reducer.reduce, list[int]()

    def recording(reducer: Reducer, packet: Packet, iteration: int) -> Packet | Reduced:
        iterations.append(iteration)
        return reduce(reducer, packet, iteration)

    monkeypatch.setattr(Reducer, "reduce", recording)
    return iterations


@pytest.fixture
def waits_limited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how many seconds the ends of runs would wait for other ranks; here they do not."""
    limit_wait, seconds = Reducer.limit_wait, list[float]()

    def at_once(reducer: Reducer, given: float) -> None:
        seconds.append(given)
        limit_wait(reducer, 0.0)

    monkeypatch.setattr(Reducer, "limit_wait", at_once)
    return seconds


def test_one_process_logs_the_same_with_reduce(make_trainer: Make, record_scalars: Record) -> None:
    """Without other ranks nothing is reduced, and no log is added at the end."""

    def logged(hook: LoggerHook) -> list[tuple[int, float]]:
        trainer = make_trainer(batches=5, max_epochs=2, hooks=[PutNumber(), hook])
        seen = record_scalars(trainer)
        trainer.train()
        return [(event.step, event.scalars["number"]) for event in seen]

    assert logged(LoggerHook(2, reduce=True)) == logged(LoggerHook(2)) != []


@pytest.mark.usefixtures("alone")
def test_the_end_of_a_run_waits_for_half_of_what_its_writers_get(
    make_trainer: Make, record_scalars: Record, waits_limited: list[float]
) -> None:
    """Where the other ranks do not come all values are logged even so, as the rank's own, within the bus's time."""
    trainer = make_trainer(batches=5, hooks=[PutNumber(), LoggerHook(2, reduce=True)])
    seen = record_scalars(trainer)

    trainer.train()

    assert [(event.step, event.scalars["number"]) for event in seen] == [(2, 0.5), (4, 2.5), (5, 4.0)]
    assert waits_limited == [trainer.bus.drain_timeout / 2]


@pytest.mark.usefixtures("alone")
def test_a_run_that_fails_waits_for_no_rank(
    make_trainer: Make, record_scalars: Record, reduced: list[int]
) -> None:
    """Its values are logged at once, as the rank's own, and nothing more is begun with the others."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        if trainer.iter == 3:
            raise ZeroDivisionError("on purpose")
        return trainer.model(batch[0]).sum()  # type: ignore[no-any-return]

    trainer = make_trainer(train_step=step, hooks=[PutNumber(), LoggerHook(2, reduce=True)])
    seen = record_scalars(trainer)

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert [(event.step, event.scalars["number"]) for event in seen] == [(2, 0.5), (3, 2.0)]
    assert reduced == [1]


@pytest.mark.usefixtures("alone", "waits_limited")
def test_what_all_ranks_log_alike_is_reduced(make_trainer: Make, reduced: list[int]) -> None:
    """The logs of the interval, and one at the training's end without a value too; not what has no room on one rank."""

    def no_room(trainer: Trainer, event: Any) -> None:
        assert trainer.metrics.post_pending is not None
        trainer.metrics.post_pending()

    trainer = make_trainer(batches=6, hooks=[LoggerHook(2, reduce=True)])
    trainer.bus.subscribe(no_room, "before_train_iter", start=1, once=True)

    trainer.train()

    assert reduced == [1, 3, 5, LAST]
