"""GradientCumulativeOptimizerHook: one step for several iterations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

from eventloop import SkipIteration, Trainer
from eventloop.hooks import CheckpointHook, Hook
from eventloop.hooks import GradientCumulativeOptimizerHook as Cumulative

Batches = Callable[[int], list[tuple[torch.Tensor, torch.Tensor]]]
MakeTrainer = Callable[..., Trainer]


class Unsized:
    """A loader that does not say how many batches it has."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def by_hand(
    batches: list[Any], windows: list[int], grad_clip: float | None = None
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Train the model of `make_trainer` with a plain loop whose steps have so many iterations each."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    left = iter(batches)
    for window in windows:
        optimizer.zero_grad()
        for _ in range(window):
            inputs, target = next(left)
            (F.mse_loss(model(inputs), target) / window).backward()
        if grad_clip is not None:
            clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
    return model, optimizer


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """To the last bit."""
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("every", "batches", "epochs", "windows"),
    [
        (1, 3, 1, [1, 1, 1]),
        (2, 4, 1, [2, 2]),
        (3, 8, 1, [3, 3, 2]),
        (4, 3, 1, [3]),
        (2, 3, 2, [2, 2, 2]),
        (2, 3, 3, [2, 2, 2, 2, 1]),
    ],
    ids=["one", "even", "mmcv's tail", "longer than the run", "across epochs", "tail across epochs"],
)
def test_training_equals_a_hand_written_loop_bitwise(
    make_trainer: MakeTrainer,
    make_batches: Batches,
    every: int,
    batches: int,
    epochs: int,
    windows: list[int],
) -> None:
    """Windows are counted over the run; each loss is divided by the iterations of its window."""
    trainer = make_trainer(hooks=[Cumulative(every)], batches=batches, max_epochs=epochs)

    trainer.train()

    assert_same(trainer.model, by_hand(make_batches(batches) * epochs, windows)[0])


@pytest.mark.representative(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("every", [2, 3, 5, 7, 49])
def test_gradients_are_those_of_a_divided_loss_bitwise(
    make_trainer: MakeTrainer, dtype: torch.dtype, every: int
) -> None:
    """In any type, and for a loss of shape (1,) too."""
    weight = torch.nn.Parameter(torch.rand(5, dtype=dtype))
    model, theirs = torch.nn.Module(), weight.detach().clone().requires_grad_()
    model.weight = weight

    def loss_of(weight: torch.Tensor) -> torch.Tensor:
        return weight.sin().sum(0, keepdim=True)

    hook = Cumulative(every)
    trainer = make_trainer(
        model=model,
        optimizer=torch.optim.SGD([weight], lr=0.0),
        batches=every,
        hooks=[hook],
        train_step=lambda trainer, batch: loss_of(weight),
    )
    trainer.train()
    for _ in range(every):
        (loss_of(theirs) / every).backward()

    assert weight.grad is not None
    assert theirs.grad is not None
    assert torch.equal(weight.grad, theirs.grad)


def test_option_of_the_optimizer_hook_accumulates(make_trainer: MakeTrainer, make_batches: Batches) -> None:
    """The default hook with `cumulative_iters` trains as the hook of this name."""
    config = {"cumulative_iters": 3, "grad_clip": {"max_norm": 0.1}}
    trainer = make_trainer(default_hooks={"optimizer": config}, batches=8)

    trainer.train()

    assert_same(trainer.model, by_hand(make_batches(8), [3, 3, 2], 0.1)[0])


def test_run_measured_in_iterations(make_trainer: MakeTrainer, make_batches: Batches) -> None:
    """The tail is that of `max_iters`, wherever the loader begins anew."""
    trainer = make_trainer(hooks=[Cumulative(3)], batches=4, max_iters=7)

    trainer.train()

    assert_same(trainer.model, by_hand(make_batches(4) * 2, [3, 3, 1])[0])


def test_hand_written_loop(make_trainer: MakeTrainer, make_batches: Batches) -> None:
    """The same hook accumulates there."""
    trainer = make_trainer(hooks=[Cumulative(3)], batches=8)

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(make_batches(8)):
            trainer.outputs = {"loss": F.mse_loss(trainer.model(inputs), target)}

    assert_same(trainer.model, by_hand(make_batches(8), [3, 3, 2])[0])


def test_clipping_is_once_a_step(make_trainer: MakeTrainer, make_batches: Batches) -> None:
    """What is clipped is the sum of the window."""
    trainer = make_trainer(hooks=[Cumulative(2, grad_clip={"max_norm": 0.1})])

    trainer.train()

    assert_same(trainer.model, by_hand(make_batches(4), [2, 2], grad_clip=0.1)[0])
    assert trainer.metrics.latest()["grad_norm"][1] == 3


@pytest.mark.parametrize("batches", [4, 5], ids=["whole windows", "a tail"])
def test_loader_of_unknown_length(make_trainer: MakeTrainer, make_batches: Batches, batches: int) -> None:
    """What is left when the last epoch ends is weighted by the iterations there were, and stepped."""
    loader = Unsized(make_batches(batches))
    trainer = make_trainer(hooks=[Cumulative(4)], train_loader=loader)

    trainer.train()

    windows = [4] * (batches // 4) + [1] * (batches % 4)
    for ours, theirs in zip(
        trainer.model.parameters(), by_hand(make_batches(batches), windows)[0].parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_skipped_batches_do_not_lose_the_tail(make_trainer: MakeTrainer, make_batches: Batches) -> None:
    """A window that was to have more iterations than came is weighted anew too."""

    class SkipLast(Hook):
        def before_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.batch_idx == 3:
                raise SkipIteration

    trainer = make_trainer(hooks=[Cumulative(2), SkipLast()])

    trainer.train()

    expected = by_hand(make_batches(3), [2, 1])[0]
    for ours, theirs in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_validation_after_the_last_epoch_sees_the_last_step(
    make_trainer: MakeTrainer, make_batches: Batches
) -> None:
    """A tail is stepped before the epoch is evaluated and saved."""
    seen: list[torch.Tensor] = []

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        seen.extend(p.detach().clone() for p in trainer.model.parameters())
        return {"acc": 1.0}

    trainer = make_trainer(
        hooks=[Cumulative(4)], train_loader=Unsized(make_batches(5)), val_loader=[0], val_step=val_step
    )

    trainer.train()

    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), seen, strict=True))


def test_events(make_trainer: MakeTrainer, record_names: Callable[..., list[str]]) -> None:
    """Backward is announced in every iteration, a step where there is one, and accumulating is no skipped step."""
    trainer = make_trainer(hooks=[Cumulative(2)], batches=3)
    names = ["after_backward", "before_optimizer_step", "after_optimizer_step", "optimizer_step_skipped"]
    seen = record_names(trainer, *names)

    trainer.train()

    backward, *step = names[:3]
    assert seen == [backward, backward, *step, backward, *step]


def test_schedulers_count_every_iteration(make_trainer: MakeTrainer) -> None:
    """As in MMEngine; and the scheduler does not warn that the optimizer was not stepped yet."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)

    make_trainer(model=model, optimizer=optimizer, schedulers=[scheduler], hooks=[Cumulative(2)]).train()

    assert optimizer.param_groups[0]["lr"] == 0.5**4


def test_several_optimizers(make_trainer: MakeTrainer, make_batches: Batches) -> None:
    """All of them accumulate and step together."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizers = {name: torch.optim.SGD([p], lr=0.125) for name, p in model.named_parameters()}

    make_trainer(model=model, optimizer=optimizers, hooks=[Cumulative(3)], batches=8).train()

    assert_same(model, by_hand(make_batches(8), [3, 3, 2])[0])


@pytest.mark.representative(2)
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 7])
def test_resumed_run_equals_the_uninterrupted_one(
    make_trainer: MakeTrainer, make_batches: Batches, tmp_path: Path, at: int
) -> None:
    """From every iteration, within a window or at its end, to the last bit."""
    make_trainer(hooks=[Cumulative(3), CheckpointHook(1, by_epoch=False)], batches=4, max_epochs=2).train()
    trainer = make_trainer(hooks=[Cumulative(3)], batches=4, max_epochs=2, work_dir=tmp_path / "resumed")

    trainer.resume(tmp_path / "run" / f"iter_{at}")
    trainer.train()

    assert_same(trainer.model, by_hand(make_batches(4) * 2, [3, 3, 2])[0])


def test_stopped_run_goes_on_within_its_window(
    make_trainer: MakeTrainer, make_batches: Batches, caplog: pytest.LogCaptureFixture
) -> None:
    """The gradients that are in no step yet are announced, saved, and used by the run that is resumed."""

    class Stop(Hook):
        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter == 3:
                trainer.stop("enough")

    first = make_trainer(hooks=[Cumulative(3), CheckpointHook(1), Stop()], batches=8)
    with caplog.at_level(logging.WARNING, logger="eventloop"):
        first.train()
    trainer = make_trainer(hooks=[Cumulative(3), CheckpointHook(1)], batches=8)
    trainer.resume()
    trainer.train()

    assert (
        r"ended (enough) with the gradients of 1 iterations accumulated and not yet in a step" in caplog.text
    )
    assert_same(trainer.model, by_hand(make_batches(8), [3, 3, 2])[0])


def test_window_is_ended_as_it_was_begun(
    make_trainer: MakeTrainer, make_batches: Batches, tmp_path: Path
) -> None:
    """A resumed run with another `cumulative_iters` takes it up with the next window."""
    make_trainer(hooks=[Cumulative(3), CheckpointHook(1, by_epoch=False)], batches=8).train()
    trainer = make_trainer(hooks=[Cumulative(1)], batches=8, work_dir=tmp_path / "resumed")

    trainer.resume(tmp_path / "run" / "iter_4", changed="apply")
    trainer.train()

    assert_same(trainer.model, by_hand(make_batches(8), [3, 3, 1, 1])[0])


def test_gradients_of_other_parameters_are_refused(make_trainer: MakeTrainer) -> None:
    """A state that does not fit is named, and taken by nobody."""
    trainer = make_trainer(hooks=[hook := Cumulative(3)])
    for gradients in ([torch.zeros(1, 2)], [torch.zeros(1, 2), torch.zeros(7)]):
        state = {"count": 1, "loss_scaling": "none", "divisor": 3, "gradients": gradients}

        with pytest.raises(
            ValueError, match=rf"{len(gradients)} accumulated gradients do not fit .* 2 parame"
        ):
            hook.load_state_dict(state)

    assert all(p.grad is None for p in trainer.model.parameters())


def test_batchnorm_warns(make_trainer: MakeTrainer) -> None:
    """Accumulating enlarges the batch of the gradients, not that of the statistics."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))

    with pytest.warns(UserWarning, match=r"cumulative_iters=2 .* the statistics of BatchNorm"):
        make_trainer(model=model, hooks=[Cumulative(2)])
    make_trainer(model=model, hooks=[Cumulative(1)])


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "cumulative_iters must be at least 1, got 0"),
        (-2, ValueError, "cumulative_iters must be at least 1, got -2"),
        (2.0, TypeError, "cumulative_iters must be an int, got 2.0"),
        (True, TypeError, "cumulative_iters must be an int, got True"),
    ],
)
def test_bad_cumulative_iters_is_refused(value: Any, error: type[Exception], message: str) -> None:
    """When the hook is built."""
    with pytest.raises(error, match=message):
        Cumulative(value)
