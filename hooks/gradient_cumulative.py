"""An optimizer hook that accumulates the gradients of several iterations for one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eventloop.hooks.optimizer import OptimizerHook


class GradientCumulativeOptimizerHook(OptimizerHook):
    """Make an optimizer step every `cumulative_iters` iterations, with the mean of their gradients.

        hooks=[GradientCumulativeOptimizerHook(cumulative_iters=4, grad_clip=dict(max_norm=35))]

    A step then acts like a step with a batch `cumulative_iters` times larger. A window is the iterations
    whose gradients one step uses. Windows are counted over the whole run, across epochs, as in mmcv and
    MMEngine, so the last window of a run may be shorter. Each loss is divided by the number of iterations in
    its window: 8 iterations with `cumulative_iters=3` have the divisors `3 3 3 3 3 3 2 2`. If the length of
    the run is not known in advance, the gradients of a shorter last window are rescaled when the last epoch
    ends. A run that is stopped within a window saves its gradients in the checkpoint, and continues the
    window when it is resumed.

    `after_backward` is emitted in every iteration, `before_optimizer_step` and `after_optimizer_step` only
    in iterations with a step. Schedulers that count iterations count all iterations, as in MMEngine. Under
    `DistributedDataParallel` the ranks exchange gradients once a window, and under FSDP2 (`fully_shard`) too
    if the length of the run is known in advance; other wrappers exchange them in every iteration.

    With `Trainer(unit="update")` an iteration is an optimizer step over `cumulative_iters` batches, and
    everything that counts iterations counts steps. The last step of an epoch then has the remaining batches,
    and `after_backward` is emitted once a batch.

    Args:
        cumulative_iters: iterations per optimizer step, or batches with `unit="update"`.
        grad_clip, detect_anomalous_params: see `OptimizerHook`; gradients are clipped once per step.

    Raises:
        TypeError, ValueError: `cumulative_iters` is not a positive int, or `grad_clip` is invalid.

    Warns:
        UserWarning: the model has BatchNorm, whose statistics remain those of single batches.
    """

    def __init__(
        self,
        cumulative_iters: int = 1,
        grad_clip: Mapping[str, Any] | None = None,
        detect_anomalous_params: bool = False,
    ) -> None:
        super().__init__(grad_clip, detect_anomalous_params, cumulative_iters=cumulative_iters)
