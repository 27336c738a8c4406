"""Record statistics of the outputs of chosen modules as metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from eventloop.bus.modules import ModuleSubscription, match_modules
from eventloop.checkpoint.weights import unwrap
from eventloop.events import AfterTrain, BeforeTrain
from eventloop.hooks.hook import Hook
from eventloop.state.sharded import refuse_sharded
from eventloop.util.checks import check_bools, positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class ActivationStats(Hook):
    """Record the mean, standard deviation and share of near-zero outputs of chosen modules as metrics.

        ActivationStats("layers.*", interval=500)

    Every `interval` iterations each module gets the metrics `activation/<name>/mean`, `/std` and
    `/near_zero`, the fraction of outputs within `threshold` of 0 (fastai's measure of dead units). With
    `histogram` the distribution of the outputs is recorded as well. A compiled model runs eagerly in a
    measured iteration; in all others the modules have no forward hook. The values stay on their device until
    the logger's next log.

    Args:
        modules: one or several patterns for the names of modules; see `bus.on_module`.
        interval: iterations between two measurements.
        threshold: the largest absolute value that counts as near zero.
        histogram: also record the distribution of the outputs.

    Raises:
        TypeError: `histogram` is not a bool, or `interval` is not an int.
        ValueError: `interval` or `threshold` is not positive, or (when the trainer is built) a pattern
            matches no module.
    """

    def __init__(
        self,
        modules: str | Sequence[str] = "*",
        interval: int = 500,
        threshold: float = 0.05,
        histogram: bool = False,
    ) -> None:
        positive("interval", interval)
        check_bools(histogram=histogram)
        if not threshold > 0:
            raise ValueError(f"threshold must be above 0, got {threshold!r}")
        self._modules, self._interval = modules, interval
        self._threshold, self._histogram = threshold, histogram
        self._subscription: ModuleSubscription | None = None

    def check(self, trainer: Trainer) -> None:
        """Refuse patterns that match no module of the trainer's model.

        Raises:
            ValueError: a pattern matches no module.
        """
        match_modules(unwrap(trainer.model), self._modules)

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Subscribe to the modules' forward passes."""

        def record(name: str, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
            self._record(trainer, name, outputs)

        self._subscription = trainer.bus.subscribe_module(
            record, unwrap(trainer.model), self._modules, "forward", every=self._interval
        )

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Remove the subscription from the modules."""
        if self._subscription is not None:
            self._subscription.cancel()
            self._subscription = None

    def _record(self, trainer: Trainer, name: str, outputs: Any) -> None:
        """Record the statistics of the output of a module, or of its first output; ignore all but floats."""
        output = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
        refuse_sharded(f"ActivationStats: the output of the module {name!r}", output)
        if not isinstance(output, torch.Tensor) or not output.is_floating_point() or not output.numel():
            return
        values = output.detach().float()
        std, mean = torch.std_mean(values, correction=0)
        near_zero = (values.abs() <= self._threshold).float().mean()
        statistics = {"mean": mean, "std": std, "near_zero": near_zero}
        trainer.metrics.put_scalars(
            {f"activation/{name}/{statistic}": value for statistic, value in statistics.items()},
            smoothing_hint=False,
        )
        if self._histogram:
            trainer.metrics.put_histogram(f"activation/{name}", values)
