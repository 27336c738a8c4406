"""mmcv's learning rate policies; each takes the warm-up of `LrUpdaterHook` besides its own arguments.

    hooks=[CosineAnnealingLrUpdaterHook(min_lr_ratio=1e-3, warmup="linear", warmup_iters=500, warmup_ratio=0.001)]

p is the epoch, or the iteration with `by_epoch=False`, and P how many the run has. The last one trains with p = P - 1, as
with PyTorch's schedulers; once the run is completed the rate is that of p = P, the exact end.
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
    """The initial rate, for its warm-up.

        hooks=[FixedLrUpdaterHook(warmup="linear", warmup_iters=500, warmup_ratio=0.001)]

    Its arguments are those of `LrUpdaterHook`.
    """

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """base_lr."""
        return base_lr


class StepLrUpdaterHook(LrUpdaterHook):
    """Times `gamma` every `step`, or at each of a list, and never below `min_lr`.

        hooks=[StepLrUpdaterHook(step=[16, 22], gamma=0.1)]

    Raises:
        TypeError, ValueError: `step` is no positive int and no rising list of them, `gamma` not above 0, `min_lr`
            below 0.
    """

    def __init__(
        self, step: int | Sequence[int], gamma: float = 0.1, min_lr: float | None = None, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._steps = Steps(step)
        self._gamma = number("gamma", gamma, above=0)
        self._min = 0.0 if min_lr is None else number("min_lr", min_lr, least=0)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """max(base_lr gamma^n, min_lr) after n steps."""
        value: float = base_lr * self._gamma ** self._steps.decays(self.progress(trainer))
        return max(value, self._min)


class ExpLrUpdaterHook(LrUpdaterHook):
    """Times `gamma` each time.

        hooks=[ExpLrUpdaterHook(gamma=0.95)]

    Raises:
        TypeError, ValueError: `gamma` is no number above 0.
    """

    def __init__(
        self, gamma: float, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._gamma = number("gamma", gamma, above=0)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """base_lr gamma^p."""
        value: float = base_lr * self._gamma ** self.progress(trainer)
        return value


class InvLrUpdaterHook(LrUpdaterHook):
    """Down as (1 + gamma p)^-power.

        hooks=[InvLrUpdaterHook(gamma=1e-4, power=0.75, by_epoch=False)]

    Raises:
        TypeError, ValueError: `gamma` or `power` is no number above 0.
    """

    def __init__(
        self, gamma: float, power: float = 1.0, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._gamma, self._power = number("gamma", gamma, above=0), number("power", power, above=0)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """base_lr (1 + gamma p)^-power."""
        value: float = base_lr * (1 + self._gamma * self.progress(trainer)) ** -self._power
        return value


class PolyLrUpdaterHook(LrUpdaterHook):
    """Down to `min_lr` as (1 - p / P)^power.

        hooks=[PolyLrUpdaterHook(power=0.9, min_lr=1e-4, by_epoch=False)]

    Raises:
        TypeError, ValueError: `power` is no number above 0, or `min_lr` below 0.
    """

    reaches_end = True

    def __init__(
        self, power: float = 1.0, min_lr: float = 0.0, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._power, self._min = number("power", power, above=0), number("min_lr", min_lr, least=0)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """min_lr + (base_lr - min_lr) (1 - p / P)^power."""
        value: float = self._min + (base_lr - self._min) * (1 - self.done(trainer)) ** self._power
        return value


class CosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """Half a cosine down to the minimum.

        hooks=[CosineAnnealingLrUpdaterHook(min_lr_ratio=1e-3)]

    Args:
        min_lr, min_lr_ratio: the minimum, or its ratio to the initial rate; exactly one.

    Raises:
        TypeError, ValueError: both minima or neither, or one below 0.
    """

    reaches_end = True

    def __init__(
        self, min_lr: float | None = None, min_lr_ratio: float | None = None, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._minimum = Minimum("min_lr", min_lr, min_lr_ratio)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """min + (base_lr - min) (1 + cos(pi p / P)) / 2."""
        return annealing_cos(base_lr, self._minimum.of(base_lr), self.done(trainer))


class LinearAnnealingLrUpdaterHook(LrUpdaterHook):
    """A line down to the minimum.

        hooks=[LinearAnnealingLrUpdaterHook(min_lr=0.0)]

    Args:
        min_lr, min_lr_ratio: as `CosineAnnealingLrUpdaterHook`.

    Raises:
        TypeError, ValueError: both minima or neither, or one below 0.
    """

    reaches_end = True

    def __init__(
        self, min_lr: float | None = None, min_lr_ratio: float | None = None, *, by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        self._minimum = Minimum("min_lr", min_lr, min_lr_ratio)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """base_lr + (min - base_lr) p / P."""
        return annealing_linear(base_lr, self._minimum.of(base_lr), self.done(trainer))


class FlatCosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """The initial rate for `start_percent` of the run, then half a cosine down to the minimum; fastai's flat_cos.

        hooks=[FlatCosineAnnealingLrUpdaterHook(start_percent=0.75, min_lr=0.0)]

    Args:
        start_percent: a float in [0, 1).
        min_lr, min_lr_ratio: as `CosineAnnealingLrUpdaterHook`.

    Raises:
        TypeError, ValueError: `start_percent` is no such float, both minima or neither, or one below 0.
    """

    reaches_end = True

    def __init__(
        self, start_percent: float = 0.75, min_lr: float | None = None, min_lr_ratio: float | None = None, *,
        by_epoch: bool = True,
        warmup: str | None = None, warmup_iters: int = 0, warmup_ratio: float = 0.1, warmup_by_epoch: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(by_epoch, warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        if not isinstance(start_percent, float):
            raise TypeError(f"start_percent must be a float in [0, 1), got {start_percent!r}")
        self._start = number("start_percent", start_percent, least=0, below=1)
        self._minimum = Minimum("min_lr", min_lr, min_lr_ratio)

    def get_lr(self, trainer: Trainer, base_lr: float) -> float:
        """base_lr until s = round(start_percent P), then the cosine of (p - s) / (P - s)."""
        total = self.max_progress(trainer)
        start = round(total * self._start)
        progress = min(self.progress(trainer), total)
        if progress < start:
            return base_lr
        done = (progress - start) / (total - start) if total > start else 1.0
        return annealing_cos(base_lr, self._minimum.of(base_lr), done)
