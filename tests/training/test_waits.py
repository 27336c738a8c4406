"""A run's waits are rows of their own, by a clock around them, and no other row has them."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.costs.records import Cause, Place, RunCosts, read_costs
from eventloop.costs.waits import Wait
from eventloop.hooks import CheckpointHook
from eventloop.writers import JSONLWriter
from tests.support.internals import substitute
from tests.support.saving import Writes
from tests.support.trainers import MakeTrainer, batches
from tests.support.waited_for import WaitedFor

SLOW = 0.15
"""The seconds that the disk, or a subscriber, takes for one thing."""


class Around:
    """The seconds from the first handler of an event to the last one of it, or of another event."""

    def __init__(self, trainer: Trainer, event: str, last: str = "") -> None:
        self.seconds = self._began = 0.0
        trainer.bus.subscribe(self._begin, event, priority=0, name=f"first {id(self)}")
        trainer.bus.subscribe(self._end, last or event, priority=100, name=f"last {id(self)}")

    def _begin(self, event: Any) -> None:
        self._began = perf_counter()

    def _end(self, event: Any) -> None:
        self.seconds += perf_counter() - self._began


def train(trainer: Trainer) -> tuple[RunCosts, float]:
    """Train; return the record in the run's directory, and the seconds by a clock around the training."""
    began = perf_counter()
    trainer.train()
    seconds = perf_counter() - began
    return read_costs(trainer.work_dir), seconds


def waited(costs: RunCosts, cause: Cause, place: Place | None = None) -> float:
    return sum(w.seconds for w in costs.waits if w.cause == cause and place in (None, w.place))


def seconds_of(costs: RunCosts, handler: str) -> float:
    return sum(cost.seconds for cost in costs.handlers if cost.name == handler)


def parts(costs: RunCosts) -> float:
    """Return the sum of the rows that divide a run: iterations, evaluations, and waits outside of iterations."""
    apart = sum(wait.seconds for wait in costs.waits if wait.place != "iterations")
    return costs.phases.wall + costs.evaluation + apart


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> WaitedFor:
    """Work that takes its time while the training thread waits for it."""
    return WaitedFor(monkeypatch)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch, waited_for: WaitedFor) -> None:
    """A disk that takes its time for each checkpoint, with room for one."""
    Writes.of_hooks(monkeypatch, lambda path: waited_for.work(SLOW))
    substitute(monkeypatch, "saver.QUEUE_BYTES", 0)


@pytest.mark.usefixtures("slow_disk")
def test_a_slow_disk_is_waited_for_in_the_iterations(make_trainer: MakeTrainer) -> None:
    """Not in the hooks phase, nor in the row of the hook that saves; the row is what a clock around it says."""
    trainer = make_trainer(max_epochs=None, max_iters=6, hooks=[CheckpointHook(interval=1, by_epoch=False)])
    around = Around(trainer, "after_train_iter")

    costs, seconds = train(trainer)

    row = waited(costs, "checkpoint", "iterations")
    assert SLOW < row < around.seconds
    assert costs.phases.checkpoint == pytest.approx(row)
    assert seconds_of(costs, "CheckpointHook.after_train_iter") < around.seconds - row
    assert costs.phases.hooks + costs.phases.backward + costs.phases.optimizer < seconds - row
    assert costs.phases.unaccounted >= 0.0
    assert row < parts(costs) < seconds


@pytest.mark.usefixtures("slow_disk")
def test_the_end_of_a_run_waits_for_its_last_checkpoint(make_trainer: MakeTrainer) -> None:
    """Under another place than the waits in the loop, because the cure is another one."""
    trainer = make_trainer(hooks=[CheckpointHook(interval=-1)])
    around = Around(trainer, "after_train", "after_run")  # the hook may wait once more in `after_run`

    costs, seconds = train(trainer)

    row = waited(costs, "checkpoint", "end")
    assert 0.5 * SLOW < row <= around.seconds
    assert seconds_of(costs, "CheckpointHook.after_train") <= around.seconds - row
    assert costs.phases.checkpoint == 0.0
    assert parts(costs) < seconds


def test_a_subscriber_that_blocks_is_waited_for_by_name(
    make_trainer: MakeTrainer, waited_for: WaitedFor
) -> None:
    """The wait is in no handler, and the hooks phase is without it."""
    trainer = make_trainer(max_epochs=1, train_loader=batches(8))
    trainer.bus.subscribe(
        lambda event: waited_for.work(SLOW),
        "after_train_iter",
        offload="thread",
        overflow="block",
        queue=1,
        name="slow upload",
    )

    costs, seconds = train(trainer)

    row = waited(costs, "background")
    named = sum(wait.seconds for wait in costs.waits if wait.name == "slow upload")
    assert 8 * SLOW < named <= row < seconds
    assert waited(costs, "background", "iterations") == pytest.approx(costs.phases.background)
    assert costs.phases.background > 3 * SLOW
    assert costs.phases.hooks < seconds - row
    assert parts(costs) < seconds


@pytest.mark.parametrize("event", ["after_backward", "after_train_iter", "after_val_epoch"])
def test_a_flush_in_a_handler_waits_for_the_background(
    make_trainer: MakeTrainer, waited_for: WaitedFor, event: str
) -> None:
    """It is taken out of the handler, of those around it, and of the phase or evaluation that it belongs to."""
    trainer = make_trainer(max_epochs=1, val_loader=batches(2))
    trainer.bus.subscribe(lambda event: waited_for.work(SLOW), event, offload="thread", name="slow")

    def flush(trainer: Trainer, event: Any) -> None:
        trainer.bus.flush()

    trainer.bus.subscribe(flush, event, name="flush")
    around, steps = Around(trainer, event), Around(trainer, "after_train_iter")
    validation = Around(trainer, "after_train_epoch", "after_train")

    costs, seconds = train(trainer)

    in_validation = event == "after_val_epoch"
    row = waited(costs, "background", "evaluations" if in_validation else "iterations")
    assert 0.5 * SLOW < row <= around.seconds
    assert seconds_of(costs, "flush") <= around.seconds - row
    if in_validation:
        assert costs.evaluation <= validation.seconds - row
    else:
        assert seconds_of(costs, "OptimizerHook.after_train_iter") <= steps.seconds - row
    assert parts(costs) < seconds


def test_the_end_of_a_run_waits_for_the_background(make_trainer: MakeTrainer, waited_for: WaitedFor) -> None:
    """For the subscriber that delivers last, by name."""
    trainer = make_trainer()
    trainer.bus.subscribe(lambda event: waited_for.work(SLOW), "after_run", offload="thread", name="slow")
    trainer.bus.subscribe(lambda event: None, "after_run", offload="thread", name="quick")
    costs, seconds = train(trainer)

    row = waited(costs, "background", "end")
    named = sum(wait.seconds for wait in costs.waits if wait.name == "slow")
    assert SLOW < named <= row < seconds
    assert parts(costs) < seconds


def test_a_run_that_does_not_wait_counts_no_wait(make_trainer: MakeTrainer) -> None:
    """In its iterations: nothing is done for the account of waits where nothing waits."""
    trainer = make_trainer(
        train_loader=batches(20),
        val_loader=batches(2),
        default_hooks={"checkpoint": None},
        writers=[JSONLWriter()],
    )
    found: list[tuple[Place, Wait]] = []
    trainer.clock.waits.watchers.append(lambda wait: found.append((trainer.clock.waits.place, wait)))

    trainer.train()

    assert [wait for place, wait in found if place != "end"] == []


def test_the_iteration_times_have_the_waits(make_trainer: MakeTrainer, waited_for: WaitedFor) -> None:
    """A step that was held up took as long as it was held up: in the maximum, and in the mean."""
    trainer = make_trainer(max_epochs=1, train_loader=batches(8))

    def flush(trainer: Trainer, event: Any) -> None:
        if event.iter == 4:
            trainer.bus.flush()

    trainer.bus.subscribe(
        lambda event: waited_for.work(SLOW), "after_train_iter", offload="thread", start=4, once=True
    )
    trainer.bus.subscribe(flush, "after_train_iter")

    costs, _ = train(trainer)

    assert costs.iteration.max > SLOW
    assert costs.iteration.mean * 8 == pytest.approx(costs.phases.wall)
    assert SLOW < costs.phases.background < costs.phases.wall
