"""Train in mixed precision: autocast around the forward pass, and optimizer steps with scaled losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from eventloop.hooks.optimizer import OptimizerHook
from eventloop.training.mixed_precision import LossScale


class AmpOptimizerHook(OptimizerHook):
    """Train in mixed precision, with `torch.autocast` in the forward pass and a scaled loss in backward.

        hooks=[AmpOptimizerHook(dtype="bfloat16", grad_clip=dict(max_norm=1.0))]
        hooks=[AmpOptimizerHook(loss_scale=dict(init_scale=2.0**14), cumulative_iters=4)]

    Autocast is on from `before_train_iter` until backward, so it also covers the body of a hand-written loop,
    and it is on in every `val_step`. Use `trainer.autocast()` for other forward passes. Weights, gradients
    and optimizer state keep their types (float32).

    With scaled losses, gradients are unscaled before they are clipped and before `grad_norm` is recorded.
    When a gradient is not finite, no optimizer makes a step: `optimizer_step_skipped` is emitted in place of
    `before_optimizer_step` and `after_optimizer_step`. A dynamic scale is recorded as the metric `loss_scale`
    and saved in checkpoints.

    With scaled losses the training thread waits for the device once a step, as `torch.amp.GradScaler.step`
    does, because the next action depends on whether the gradients are finite. Saving a checkpoint waits
    twice. With bfloat16, which is not scaled by default, the thread never waits.

    Args:
        loss_scale: "dynamic"; a number, for a constant scale; or arguments of `torch.amp.GradScaler`, a dict
            of init_scale, growth_factor, backoff_factor, growth_interval. By default "dynamic" for float16
            and no scaling for bfloat16.
        dtype: "float16" or "bfloat16", or `torch.float16` or `torch.bfloat16`. By default autocast's type for
            the model's device: float16 on CUDA, bfloat16 on the CPU.
        cumulative_iters, grad_clip, detect_anomalous_params: see `GradientCumulativeOptimizerHook`.

    Raises:
        TypeError, ValueError: an option is unknown, of the wrong type or out of range.
    """

    def __init__(
        self,
        loss_scale: LossScale | None = None,
        dtype: str | torch.dtype | None = None,
        cumulative_iters: int = 1,
        grad_clip: Mapping[str, Any] | None = None,
        detect_anomalous_params: bool = False,
    ) -> None:
        super().__init__(
            grad_clip,
            detect_anomalous_params,
            cumulative_iters=cumulative_iters,
            loss_scale=loss_scale,
            dtype="auto" if dtype is None else dtype,
        )


class Fp16OptimizerHook(AmpOptimizerHook):
    """Train in float16, by default with a constant loss scale of 512; mmcv's name and arguments.

        hooks=[Fp16OptimizerHook(loss_scale="dynamic", grad_clip=dict(max_norm=35))]

    Args:
        grad_clip, loss_scale, detect_anomalous_params: see `AmpOptimizerHook`.

    Raises:
        TypeError, ValueError: see `AmpOptimizerHook`.
    """

    def __init__(
        self,
        grad_clip: Mapping[str, Any] | None = None,
        loss_scale: LossScale = 512.0,
        detect_anomalous_params: bool = False,
    ) -> None:
        super().__init__(loss_scale, torch.float16, 1, grad_clip, detect_anomalous_params)


class GradientCumulativeFp16OptimizerHook(AmpOptimizerHook):
    """Train in float16 and step every `cumulative_iters` iterations; mmcv's name and arguments.

        hooks=[GradientCumulativeFp16OptimizerHook(cumulative_iters=4)]

    Args:
        cumulative_iters, grad_clip, loss_scale, detect_anomalous_params: see `AmpOptimizerHook`.

    Raises:
        TypeError, ValueError: see `AmpOptimizerHook`.
    """

    def __init__(
        self,
        cumulative_iters: int = 1,
        grad_clip: Mapping[str, Any] | None = None,
        loss_scale: LossScale = 512.0,
        detect_anomalous_params: bool = False,
    ) -> None:
        super().__init__(loss_scale, torch.float16, cumulative_iters, grad_clip, detect_anomalous_params)
