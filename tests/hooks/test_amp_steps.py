"""Mixed precision: steps that are skipped, what is put as metrics, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

from eventloop import Trainer
from eventloop.hooks import AmpOptimizerHook as Amp
from eventloop.hooks import ExpLrUpdaterHook
from eventloop.hooks import Fp16OptimizerHook as Fp16
from eventloop.hooks import GradientCumulativeFp16OptimizerHook as CumulativeFp16
from eventloop.hooks import GradientCumulativeOptimizerHook as Cumulative
from tests.hooks.amp_recipe import Overflow, assert_same, by_hand, scale_of

Batches = Callable[[int], list[tuple[torch.Tensor, torch.Tensor]]]
MakeTrainer = Callable[..., Trainer]


def test_non_finite_gradients_make_no_step(
    make_trainer: MakeTrainer, make_batches: Batches, record_names: Callable[..., list[str]]
) -> None:
    """The step is skipped and said to be; the scale is halved, and the parameters stay."""
    hook = Fp16(loss_scale={"init_scale": 64.0})
    trainer = make_trainer(hooks=[hook, Overflow(1)], batches=3)
    names = ["before_optimizer_step", "after_optimizer_step", "optimizer_step_skipped"]
    seen = record_names(trainer, *names)
    reasons: list[str] = []
    trainer.bus.subscribe(lambda event: reasons.append(event.reason), "optimizer_step_skipped")

    trainer.train()

    before, after, skipped = names
    assert seen == [before, after, skipped, before, after]
    assert reasons == ["non-finite gradients"]
    assert scale_of(hook) == 32.0
    first, _, third = make_batches(3)
    assert_same(trainer.model, by_hand([first, third], torch.float16, [1, 1], init_scale=64.0))


def test_static_scale_stays_after_a_skipped_step(make_trainer: MakeTrainer) -> None:
    """Only a dynamic one moves."""
    hook = Fp16()

    make_trainer(hooks=[hook, Overflow(1, 2)]).train()

    assert scale_of(hook) == 512.0


def test_skipped_step_is_no_step_for_schedulers(make_trainer: MakeTrainer) -> None:
    """Even when it is the first, before which a scheduler would warn."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)

    hooks = [Amp({"init_scale": 64.0}, "float16"), Overflow(0, 2)]
    make_trainer(model=model, optimizer=optimizer, schedulers=[scheduler], hooks=hooks).train()

    assert optimizer.param_groups[0]["lr"] == 0.5**2


def test_skipped_step_counts_for_a_policy(make_trainer: MakeTrainer) -> None:
    """mmcv's policies are functions of the run's counters: an iteration whose step was skipped has its rate, too."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rates: dict[int, float] = {}
    hooks = [Amp({"init_scale": 64.0}, "float16"), Overflow(0, 2), ExpLrUpdaterHook(0.5, by_epoch=False)]
    trainer = make_trainer(model=model, optimizer=optimizer, hooks=hooks)
    trainer.bus.subscribe(
        lambda event: rates.update({event.iter: optimizer.param_groups[0]["lr"]}), "before_optimizer_step"
    )

    trainer.train()

    assert rates == {1: 0.5, 3: 0.125}  # of 1, 0.5, 0.25, 0.125, those of the steps that were made


def test_an_epoch_without_a_step_is_no_mistake(make_trainer: MakeTrainer) -> None:
    """A scheduler by epoch steps after it without PyTorch's warning about the order of the calls."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    scheduler.by_epoch = True  # type: ignore[attr-defined]

    hooks = [Amp({"init_scale": 64.0}, "float16"), Overflow(*range(100))]
    make_trainer(model=model, optimizer=optimizer, schedulers=[scheduler], hooks=hooks, max_epochs=1).train()

    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_window_with_a_non_finite_gradient_is_skipped_whole(
    make_trainer: MakeTrainer, make_batches: Batches
) -> None:
    """What it would add is not finite; the next window begins with none of it."""
    hook = CumulativeFp16(2, loss_scale={"init_scale": 64.0})
    trainer = make_trainer(hooks=[hook, Overflow(0)])

    trainer.train()

    expected = by_hand(make_batches(4)[2:], torch.float16, [2], init_scale=32.0)
    assert_same(trainer.model, expected)
    assert scale_of(hook) == 32.0


def test_one_optimizer_that_overflows_stops_all(make_trainer: MakeTrainer) -> None:
    """Several optimizers make the step of one loss together, or none of them does."""
    model = torch.nn.Linear(2, 1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}

    make_trainer(model=model, optimizer=optimizers, hooks=[Fp16(), Overflow(0)], batches=1).train()

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_several_optimizers_equal_one(make_trainer: MakeTrainer, make_batches: Batches) -> None:
    """Without an overflow each is unscaled and stepped."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizers = {name: torch.optim.SGD([p], lr=0.125) for name, p in model.named_parameters()}

    make_trainer(model=model, optimizer=optimizers, hooks=[Fp16()]).train()

    assert_same(model, by_hand(make_batches(4), torch.float16, [1] * 4, init_scale=512.0))


@pytest.mark.parametrize("loss_scale", [512.0, "dynamic"])
def test_optimizer_without_any_gradient_is_an_error(
    make_trainer: MakeTrainer, loss_scale: float | str
) -> None:
    """The loss of another part of the model than the optimizer's is refused; with the right optimizer it trains."""
    model = torch.nn.ModuleDict({"trained": torch.nn.Linear(2, 1), "other": torch.nn.Linear(2, 1)})
    trainer = make_trainer(
        model=model,
        hooks=[Fp16(loss_scale=loss_scale)],
        optimizer=torch.optim.SGD(model["other"].parameters(), lr=0.1),
        train_step=lambda trainer, batch: F.mse_loss(model["trained"](batch[0]), batch[1]),
    )

    with pytest.raises(RuntimeError, match="left no gradient for any parameter"):
        trainer.train()
    trainer.optimizer = torch.optim.SGD(model["trained"].parameters(), lr=0.1)
    trainer.train()


def test_norm_is_that_of_unscaled_gradients(make_trainer: MakeTrainer, make_batches: Batches) -> None:
    """`grad_norm` does not depend on the scale."""
    trainer = make_trainer(batches=1, hooks=[Fp16(grad_clip={"max_norm": 0.01}, loss_scale=1024)])
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    inputs, target = make_batches(1)[0]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(inputs), target)
    loss.backward()

    trainer.train()

    norm = clip_grad_norm_(model.parameters(), 0.01).item()
    assert trainer.metrics.latest()["grad_norm"][0] == pytest.approx(norm, rel=1e-2)


def test_dynamic_scale_is_put(make_trainer: MakeTrainer) -> None:
    """As `loss_scale`, the one this iteration's loss was multiplied with; one that stays is not news."""
    dynamic = make_trainer(hooks=[Fp16(loss_scale={"init_scale": 64.0}), Overflow(2)])
    dynamic.train()
    static = make_trainer(hooks=[Fp16()])
    static.train()

    assert dynamic.metrics.latest()["loss_scale"] == (32.0, 3)
    assert "loss_scale" not in static.metrics.latest()


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (Amp(dtype="bfloat16", grad_clip={"max_norm": 1.0}), []),
        (Cumulative(2, grad_clip={"max_norm": 1.0}), []),
        (Amp(dtype="float16", grad_clip={"max_norm": 1.0}), ["item"] * 8),
        (CumulativeFp16(2), ["item"] * 4),
    ],
    ids=["bfloat16", "accumulating", "float16", "accumulating float16"],
)
def test_what_a_step_reads(
    make_trainer: MakeTrainer, value_reads: list[str], hook: Any, expected: list[str]
) -> None:
    """Scaled losses are waited for once a step; nothing else is."""
    make_trainer(batches=8, hooks=[hook]).train()

    assert value_reads == expected
