"""Where the time of an iteration goes: phases that add up to the wall time, and their trend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pytest
import torch

from eventloop import SkipIteration, Trainer
from eventloop.costs.records import PHASES, Phases
from eventloop.costs.step_clock import POINTS, StepClock
from tests.support.internals import set_clock
from tests.support.trainers import MakeTrainer

DATA, FORWARD, BACKWARD, INNER, HOOK, VAL = 0.5, 0.25, 0.125, 2.0, 4.0, 64.0


@dataclass
class Clock:
    """A `perf_counter` that stands still until it is moved."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        """Move it."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all that measures phases."""
    clock = Clock()
    set_clock(monkeypatch, clock, "step_clock", "optimizer", "update_batches", "position")
    return clock


class Loader:
    """Batches that take their time."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.count):
            self.clock.now += DATA
            yield torch.ones(2, 4)


def timed(clock: Clock, **options: Any) -> dict[str, Any]:
    """Trainer options of a run of three batches whose forward and backward take time on the clock."""

    def step(trainer: Trainer, batch: torch.Tensor) -> torch.Tensor:
        clock.now += FORWARD
        loss: torch.Tensor = trainer.model(batch).square().mean()
        loss.register_hook(lambda gradient: clock.pass_by(BACKWARD))
        return loss

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "train_step": step,
        "train_loader": Loader(clock, 3),
        "max_epochs": 1,
        **options,
    }


def test_each_phase_is_booked_where_it_belongs(make_trainer: MakeTrainer, clock: Clock) -> None:
    """Loader, forward, backward, and handlers before, within and after the step each have their own."""
    trainer = make_trainer(**timed(clock))
    trainer.bus.subscribe(lambda event: clock.pass_by(HOOK), "before_train_iter")
    trainer.bus.subscribe(lambda event: clock.pass_by(INNER), "after_backward")
    trainer.bus.subscribe(lambda event: clock.pass_by(HOOK), "after_train_iter")

    trainer.train()

    assert trainer.clock.phases == Phases(
        iterations=3, data=3 * DATA, forward=3 * FORWARD, backward=3 * BACKWARD, hooks=3 * (2 * HOOK + INNER)
    )


def test_phases_of_an_iteration_of_several_batches(make_trainer: MakeTrainer, clock: Clock) -> None:
    """Those of its batches are summed, and handlers after each backward are hooks' time."""
    options = timed(clock, unit="update", default_hooks={"optimizer": {"cumulative_iters": 2}})
    trainer = make_trainer(**options)
    options["optimizer"].register_step_post_hook(lambda *args: clock.pass_by(1.0))
    trainer.bus.subscribe(lambda event: clock.pass_by(HOOK), "before_train_iter", "after_train_iter")
    trainer.bus.subscribe(lambda event: clock.pass_by(INNER), "after_backward")

    trainer.train()

    assert trainer.clock.phases == Phases(
        iterations=2,
        data=3 * DATA,
        forward=3 * FORWARD,
        backward=3 * BACKWARD,
        optimizer=2.0,
        hooks=2 * 2 * HOOK + 3 * INNER,
    )


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_optimizers_part_has_no_handler_in_it(
    make_trainer: MakeTrainer, clock: Clock, accumulate: bool
) -> None:
    """Handlers of the events around the step are hooks' time; the step itself is the optimizer's."""
    options = timed(clock)
    optimizer = options["optimizer"]
    optimizer.register_step_post_hook(lambda *args: clock.pass_by(1.0))
    hooks = [{"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 1}] if accumulate else []
    trainer = make_trainer(**options, hooks=hooks, default_hooks={"optimizer": None} if accumulate else {})
    for event in ("before_optimizer_step", "after_optimizer_step"):
        trainer.bus.subscribe(lambda event: clock.pass_by(INNER), event)

    trainer.train()

    assert trainer.clock.phases.optimizer == 3.0
    assert trainer.clock.phases.backward == 3 * BACKWARD
    assert trainer.clock.phases.hooks == 3 * 2 * INNER


def test_a_skipped_batch_is_data_and_hooks_of_the_next_iteration(
    make_trainer: MakeTrainer, clock: Clock
) -> None:
    """What a batch cost that no iteration was made of is part of the iteration that follows."""
    trainer = make_trainer(**timed(clock))

    @trainer.bus.on("before_train_iter")
    def skip(event: Any) -> None:
        clock.now += HOOK
        if event.batch_idx == 1:
            raise SkipIteration

    trainer.train()

    phases = trainer.clock.phases
    assert (phases.iterations, phases.data, phases.hooks) == (2, 3 * DATA, 3 * HOOK)


def test_an_evaluation_is_in_no_phase(make_trainer: MakeTrainer, clock: Clock) -> None:
    """Neither one between two iterations, nor one that a handler calls."""

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        clock.now += VAL
        return {"acc": 1.0}

    loaders = {"train_loader": Loader(clock, 1), "val_loader": [torch.ones(1)]}
    trainer = make_trainer(**timed(clock, **loaders, val_step=val_step, max_epochs=2))
    trainer.bus.subscribe(lambda trainer, event: trainer.val(), "after_train_iter", once=True)

    trainer.train()

    assert trainer.clock.phases.wall == 2 * (DATA + FORWARD + BACKWARD)


def test_the_parts_add_up_to_the_wall_time(make_trainer: MakeTrainer) -> None:
    """On the real clock, with the default hooks: none is negative, and together they are no longer than the epoch. (That
    nothing is left out is shown on a clock that stands still.)"""
    trainer = make_trainer(max_epochs=1)
    times: list[float] = []
    trainer.bus.subscribe(lambda event: times.append(perf_counter()), "before_train_epoch", priority=100)
    trainer.bus.subscribe(lambda event: times.append(perf_counter()), "after_train_epoch", priority=0)

    trainer.train()

    phases = trainer.clock.phases
    assert min(getattr(phases, name) for name in PHASES) >= 0.0
    assert 0 < phases.wall < times[1] - times[0]


def test_nothing_between_two_iterations_is_left_out(make_trainer: MakeTrainer, clock: Clock) -> None:
    """Handlers of health events run at the end of an iteration, and are charged to its hooks."""

    trainer = make_trainer(**timed(clock, train_loader=Loader(clock, 4), max_epochs=1))
    trainer.bus.subscribe(lambda event: clock.pass_by(HOOK), "slow_handler", name="slow")
    health = trainer.bus._background.health
    trainer.bus.subscribe(
        lambda event: health.report_slow("x", "after_train_iter", 1.0, 2.0, 3), "after_train_iter"
    )
    began = clock.now

    trainer.train()

    phases = trainer.clock.phases
    (cost,) = (h for h in trainer.costs().handlers if h.name == "slow")
    assert (cost.calls, cost.in_iteration, cost.seconds > 0) == (4, False, True)
    assert phases.hooks == 4 * HOOK
    assert phases.wall == clock.now - began


def run_iterations(clock: StepClock, time: Clock, count: int, seconds: float = 0.5) -> None:
    """Let the clock see iterations of `seconds` each, all of it in the forward pass."""
    clock.begin_pass()
    for _ in range(count):
        clock.end_data()
        clock.begin_forward()
        time.now += seconds
        clock.end_forward()
        clock.end()
        clock.begin()


@pytest.mark.parametrize("iterations", [0, 1, POINTS - 1, POINTS, POINTS + 1, 5000])
def test_the_trend_covers_every_iteration_once(iterations: int, clock: Clock) -> None:
    """Its points follow one another without a gap, their sums are the run's, and there are at most `POINTS`, each of
    as many iterations but the last."""
    step_clock = StepClock()
    run_iterations(step_clock, clock, iterations)

    trend = step_clock.trend

    assert sum(point.phases.iterations for point in trend) == iterations
    assert sum(point.phases.wall for point in trend) == iterations * 0.5
    starts = [point.first_iter for point in trend]
    assert starts == [sum(p.phases.iterations for p in trend[:i]) for i in range(len(trend))]
    assert len(trend) <= POINTS
    assert len({point.phases.iterations for point in trend[:-1]}) <= 1


def test_the_trend_of_a_resumed_run_begins_where_it_was_resumed(make_trainer: MakeTrainer) -> None:
    """`first_iter` is the run's count, not the process's."""
    first = make_trainer()
    first.train()
    resumed = make_trainer(max_epochs=2 * (first.max_epochs or 1))
    resumed.resume()

    resumed.train()

    assert resumed.clock.first_iter == first.iter
    assert resumed.clock.trend[0].first_iter == first.iter


def test_the_body_of_a_hand_written_loop_is_forward(make_trainer: MakeTrainer, clock: Clock) -> None:
    """Everything the body does is the forward phase."""
    trainer = make_trainer(**timed(clock))

    for _ in trainer.epochs():
        for batch in trainer.batches(trainer.train_loader or ()):
            trainer.outputs = trainer.train_step(batch)
            clock.pass_by(HOOK)

    assert trainer.clock.phases.forward == 3 * (FORWARD + HOOK)
