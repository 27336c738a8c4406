"""AmpOptimizerHook and mmcv's Fp16OptimizerHook: training equals PyTorch's recipe, autocast is on where it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eventloop import SkipIteration, Trainer
from eventloop.hooks import AmpOptimizerHook as Amp
from eventloop.hooks import Fp16OptimizerHook as Fp16
from eventloop.hooks import GradientCumulativeFp16OptimizerHook as CumulativeFp16
from eventloop.hooks import Hook, OptimizerHook
from tests.hooks.amp_recipe import GROWING, assert_same, by_hand

Batches = Callable[[int], list[tuple[torch.Tensor, torch.Tensor]]]
MakeTrainer = Callable[..., Trainer]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("hook", "dtype", "windows", "options"),
    [
        (lambda: Amp(), torch.bfloat16, [1] * 8, {}),
        (
            lambda: Amp(dtype="bfloat16", grad_clip={"max_norm": 0.1}),
            torch.bfloat16,
            [1] * 8,
            {"max_norm": 0.1},
        ),
        (lambda: Amp(dtype="float16"), torch.float16, [1] * 8, {"init_scale": 65536.0}),
        (lambda: Amp(GROWING, torch.float16), torch.float16, [1] * 8, GROWING),
        (lambda: Amp("dynamic", "bfloat16"), torch.bfloat16, [1] * 8, {"init_scale": 65536.0}),
        (lambda: Fp16(), torch.float16, [1] * 8, {"init_scale": 512.0, "growth_interval": 10**6}),
        (lambda: Fp16(loss_scale=8), torch.float16, [1] * 8, {"init_scale": 8.0, "growth_interval": 10**6}),
        (
            lambda: Fp16({"max_norm": 0.1}, "dynamic"),
            torch.float16,
            [1] * 8,
            {"init_scale": 65536.0, "max_norm": 0.1},
        ),
        (
            lambda: CumulativeFp16(3, {"max_norm": 0.1}, GROWING),
            torch.float16,
            [3, 3, 2],
            {**GROWING, "max_norm": 0.1},
        ),
        (lambda: Amp(dtype="bfloat16", cumulative_iters=3), torch.bfloat16, [3, 3, 2], {}),
        (lambda: OptimizerHook(dtype="auto"), torch.bfloat16, [1] * 8, {}),
        (lambda: OptimizerHook(loss_scale=GROWING, dtype="float16"), torch.float16, [1] * 8, GROWING),
        (lambda: OptimizerHook(cumulative_iters=3, dtype="bfloat16"), torch.bfloat16, [3, 3, 2], {}),
    ],
    ids=[
        "default on the CPU",
        "bfloat16 clipped",
        "float16",
        "growing scale",
        "scaled bfloat16",
        "mmcv's default",
        "static",
        "dynamic clipped",
        "accumulating, clipped, growing",
        "accumulating bfloat16",
        "option auto",
        "options of float16",
        "options of accumulation",
    ],
)
def test_training_equals_pytorchs_recipe_bitwise(
    make_trainer: MakeTrainer,
    make_batches: Batches,
    hook: Callable[[], OptimizerHook],
    dtype: torch.dtype,
    windows: list[int],
    options: dict[str, Any],
) -> None:
    """Autocast, scale, backward, unscale, clip, step, update: the weights are those of the plain loop."""
    trainer = make_trainer(hooks=[hook()], batches=8)

    trainer.train()

    assert_same(trainer.model, by_hand(make_batches(8), dtype, windows, **options))


def test_hand_written_loop(make_trainer: MakeTrainer, make_batches: Batches) -> None:
    """Its body runs under autocast by itself, and nothing after it does."""
    trainer = make_trainer(hooks=[Fp16()], batches=8)
    inside: list[bool] = []

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(make_batches(8)):
            inside.append(torch.is_autocast_enabled("cpu"))
            trainer.outputs = {"loss": F.mse_loss(trainer.model(inputs), target)}

    assert_same(trainer.model, by_hand(make_batches(8), torch.float16, [1] * 8, init_scale=512.0))
    assert inside == [True] * 8
    assert not torch.is_autocast_enabled("cpu")


def test_backward_and_hooks_are_outside_autocast(make_trainer: MakeTrainer) -> None:
    """It is left before backward."""
    seen: list[bool] = []

    class Look(Hook):
        priority = "HIGHEST"

        def before_train_iter(self, trainer: Trainer, event: Any) -> None:
            seen.append(torch.is_autocast_enabled("cpu"))

        def after_backward(self, trainer: Trainer, event: Any) -> None:
            seen.append(torch.is_autocast_enabled("cpu"))

    make_trainer(hooks=[Amp(), Look()], batches=2).train()

    assert seen == [False] * 4


def test_validation_runs_under_autocast(make_trainer: MakeTrainer) -> None:
    """`val_step` does, also without a training; the evaluator does not."""
    seen: list[Any] = []

    def val_step(trainer: Trainer, batch: Any) -> dict[str, torch.Tensor]:
        preds = trainer.model(batch)
        seen.append(preds.dtype)
        return {"preds": preds, "target": preds}

    def evaluator(preds: torch.Tensor, target: torch.Tensor) -> float:
        seen.append(torch.is_autocast_enabled("cpu"))
        return 0.0

    trainer = make_trainer(
        hooks=[Amp()], val_loader=[torch.ones(1, 2)], val_step=val_step, evaluator=evaluator
    )

    trainer.val()

    assert seen == [torch.bfloat16, False]


def test_autocast_for_other_forward_passes(make_trainer: MakeTrainer) -> None:
    """`trainer.autocast()` is what the hook trains under; without the hook it changes nothing."""
    inputs = torch.ones(1, 2)
    types = []
    for hooks in ([Amp(dtype="float16")], []):
        trainer = make_trainer(hooks=hooks)
        with trainer.autocast():
            types.append(trainer.model(inputs).dtype)

    assert types == [torch.float16, torch.float32]


@pytest.mark.parametrize("way", ["train", "by hand", "break"])
def test_autocast_ends_with_a_loop_that_fails(
    make_trainer: MakeTrainer, make_batches: Batches, way: str
) -> None:
    """An error in the forward pass, or a `break`, leaves nothing switched on."""

    def fail(trainer: Trainer, batch: Any) -> torch.Tensor:
        assert torch.is_autocast_enabled("cpu")
        raise ArithmeticError

    def loop() -> None:
        if way == "train":
            trainer.train()
        for _ in trainer.epochs():
            for batch in trainer.batches(make_batches(2)):
                if way == "break":
                    break
                fail(trainer, batch)
            break
        raise ArithmeticError

    trainer = make_trainer(hooks=[Amp()], train_step=fail)

    with pytest.raises(ArithmeticError):
        loop()

    assert not torch.is_autocast_enabled("cpu")


def test_skipped_batch_leaves_autocast(make_trainer: MakeTrainer, make_batches: Batches) -> None:
    """Also one skipped by a handler after the hook's own, at the end of the epoch."""
    trainer = make_trainer(hooks=[Amp()], batches=3)

    @trainer.bus.on("before_train_iter", priority="LOWEST")
    def skip(trainer: Trainer, event: Any) -> None:
        if event.batch_idx > 0:
            raise SkipIteration

    trainer.train()

    assert trainer.iter == 1
    assert not torch.is_autocast_enabled("cpu")
