"""mmcv's learning rate policies; each also takes the warm-up arguments of `LrUpdaterHook`.

    hooks=[CosineAnnealingLrUpdaterHook(min_lr_ratio=1e-3, warmup="linear", warmup_iters=500)]

p is the epoch, or the iteration with `by_epoch=False`, and P is the number of them in the run. The last one
trains with p = P - 1, as with PyTorch's schedulers. After a completed run the rate is that of p = P, the
exact end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eventloop.hooks.lr_updater import LrUpdaterHook
from eventloop.optim.formulas import (
    Minimum,
    Steps,
    annealing_cos,
    annealing_linear,
)
from eventloop.optim.param_groups import number

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class FixedLrUpdaterHook(LrUpdaterHook):
    """Keep the initial rate; used for its warm-up.

        hooks=[FixedLrUpdaterHook(warmup="linear", warmup_iters=500, warmup_ratio=0.001)]

    The arguments are those of `LrUpdaterHook`.
    """

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return base_lr."""
        return base_lr


class StepLrUpdaterHook(LrUpdaterHook):
    """Multiply the rate by `gamma` every `step`, or at each of a list of steps, but not below `min_lr`.

        hooks=[StepLrUpdaterHook(step=[16, 22], gamma=0.1)]

    Raises:
        TypeError, ValueError: `step` is not a positive int or a rising list of them, `gamma` is not above 0,
            or `min_lr` is below 0.
    """

    def __init__(
        self, step: int | Sequence[int], gamma: float = 0.1, min_lr: float | None = None, *,
        by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._steps = Steps(step)
        self._gamma = number("gamma", gamma, above=0)
        self._min = 0.0 if min_lr is None else number("min_lr", min_lr, least=0)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return max(base_lr gamma^n, min_lr) after n steps."""
        value: float = base_lr * self._gamma ** self._steps.decays(self.progress(trainer))
        return max(value, self._min)


class ExpLrUpdaterHook(LrUpdaterHook):
    """Multiply the rate by `gamma` every epoch, or every iteration with `by_epoch=False`.

        hooks=[ExpLrUpdaterHook(gamma=0.95)]

    Raises:
        TypeError, ValueError: `gamma` is not a number above 0.
    """

    def __init__(
        self, gamma: float, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._gamma = number("gamma", gamma, above=0)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return base_lr gamma^p."""
        value: float = base_lr * self._gamma ** self.progress(trainer)
        return value


class InvLrUpdaterHook(LrUpdaterHook):
    """Lower the rate as (1 + gamma p)^-power.

        hooks=[InvLrUpdaterHook(gamma=1e-4, power=0.75, by_epoch=False)]

    Raises:
        TypeError, ValueError: `gamma` or `power` is not a number above 0.
    """

    def __init__(
        self, gamma: float, power: float = 1.0, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._gamma, self._power = number("gamma", gamma, above=0), number("power", power, above=0)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return base_lr (1 + gamma p)^-power."""
        value: float = base_lr * (1 + self._gamma * self.progress(trainer)) ** -self._power
        return value


class PolyLrUpdaterHook(LrUpdaterHook):
    """Lower the rate to `min_lr` as (1 - p / P)^power.

        hooks=[PolyLrUpdaterHook(power=0.9, min_lr=1e-4, by_epoch=False)]

    Raises:
        TypeError, ValueError: `power` is not a number above 0, or `min_lr` is below 0.
    """

    reaches_end = True

    def __init__(
        self, power: float = 1.0, min_lr: float = 0.0, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._power, self._min = number("power", power, above=0), number("min_lr", min_lr, least=0)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return min_lr + (base_lr - min_lr) (1 - p / P)^power."""
        value: float = self._min + (base_lr - self._min) * (1 - self.done(trainer)) ** self._power
        return value


class CosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """Lower the rate to the minimum along half a cosine.

        hooks=[CosineAnnealingLrUpdaterHook(min_lr_ratio=1e-3)]

    Args:
        min_lr, min_lr_ratio: the minimum, or its ratio to the initial rate; exactly one of the two.

    Raises:
        TypeError, ValueError: both minima or neither are given, or one is below 0.
    """

    reaches_end = True

    def __init__(
        self, min_lr: float | None = None, min_lr_ratio: float | None = None, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._minimum = Minimum("min_lr", min_lr, min_lr_ratio)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return min + (base_lr - min) (1 + cos(pi p / P)) / 2."""
        return annealing_cos(base_lr, self._minimum.of(base_lr), self.done(trainer))


class LinearAnnealingLrUpdaterHook(LrUpdaterHook):
    """Lower the rate to the minimum along a line.

        hooks=[LinearAnnealingLrUpdaterHook(min_lr=0.0)]

    Args:
        min_lr, min_lr_ratio: see `CosineAnnealingLrUpdaterHook`.

    Raises:
        TypeError, ValueError: both minima or neither are given, or one is below 0.
    """

    reaches_end = True

    def __init__(
        self, min_lr: float | None = None, min_lr_ratio: float | None = None, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._minimum = Minimum("min_lr", min_lr, min_lr_ratio)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return base_lr + (min - base_lr) p / P."""
        return annealing_linear(base_lr, self._minimum.of(base_lr), self.done(trainer))


class FlatCosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """Keep the initial rate for `start_percent` of the run, then lower it along half a cosine.

        hooks=[FlatCosineAnnealingLrUpdaterHook(start_percent=0.75, min_lr=0.0)]

    This is fastai's flat_cos.

    Args:
        start_percent: a float in [0, 1).
        min_lr, min_lr_ratio: see `CosineAnnealingLrUpdaterHook`.

    Raises:
        TypeError, ValueError: `start_percent` is not such a float, both minima or neither are given, or one
            is below 0.
    """

    reaches_end = True

    def __init__(
        self, start_percent: float = 0.75, min_lr: float | None = None, min_lr_ratio: float | None = None, *,
        by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        if not isinstance(start_percent, float):
            raise TypeError(f"start_percent must be a float in [0, 1), got {start_percent!r}")
        self._start = number("start_percent", start_percent, least=0, below=1)
        self._minimum = Minimum("min_lr", min_lr, min_lr_ratio)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """Return base_lr until s = round(start_percent P), then the cosine of (p - s) / (P - s)."""
        total = self.max_progress(trainer)
        start = round(total * self._start)
        progress = min(self.progress(trainer), total)
        if progress < start:
            return base_lr
        done = (progress - start) / (total - start) if total > start else 1.0
        return annealing_cos(base_lr, self._minimum.of(base_lr), done)
