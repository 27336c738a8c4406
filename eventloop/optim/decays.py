"""Define schedulers that only lower or only raise a value, with MMEngine's names and parameters.

Each is a `Window` over a scheduler of PyTorch. `eventloop.optim.schedulers` exports them; `cycles` uses the
checks of arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_lr

from eventloop.optim.param_groups import check_has_value, initial_value
from eventloop.optim.windows import Window, check_window
from eventloop.util.checks import number, positive

_IN_EPOCHS = ("begin", "end", "step_size", "milestones", "T_max", "periods", "total_steps")
"""The arguments of schedulers that are numbers of epochs, or of iterations with `by_epoch=False`."""


class NamedWindow(Window):
    """A base class for windows with the name and parameters of one of MMEngine's schedulers."""

    length_from: ClassVar[str | None] = None
    """The argument that may set the length in place of `end`; None if the schedule needs no length."""

    @classmethod
    def build_iter_from_epoch(
        cls, optimizer: Optimizer, *, epoch_length: int, by_epoch: bool = True, **arguments: Any
    ) -> Any:
        """Build a scheduler whose arguments are in epochs, but which is stepped after each iteration.

            CosineAnnealingLR.build_iter_from_epoch(opt, T_max=10, epoch_length=len(loader))

        Every count among the arguments is multiplied by `epoch_length`.

        Args:
            epoch_length: the number of iterations in an epoch.
            arguments: the arguments of the class.

        Raises:
            TypeError, ValueError: `epoch_length` is not a positive int, or the schedule already counts
                iterations.
        """
        positive("epoch_length", epoch_length)
        if not by_epoch:
            raise ValueError(
                f"{cls.__name__} already counts iterations (by_epoch=False): convert_to_iter_based is for "
                "epochs"
            )
        for name in _IN_EPOCHS:
            value = arguments.get(name)
            if isinstance(value, list | tuple):
                arguments[name] = [item * epoch_length for item in value]
            elif value is not None:
                arguments[name] = value * epoch_length
        return cls(optimizer, by_epoch=False, **cls._per_iter(arguments, epoch_length))

    @classmethod
    def _per_iter(cls, arguments: dict[str, Any], epoch_length: int) -> dict[str, Any]:
        """Convert the arguments that are neither numbers of epochs nor independent of the unit."""
        return arguments


class StepLR(NamedWindow):
    """Multiply the value by `gamma` every `step_size` steps: PyTorch's StepLR in a window.

    Raises:
        TypeError, ValueError: `step_size` is not a positive int, `gamma` is not above 0, or the window is
            invalid.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step_size: int,
        gamma: float = 0.1,
        *,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
    ) -> None:
        positive("step_size", step_size)
        number("gamma", gamma, above=0)
        super().__init__(
            optimizer, lambda o: torch_lr.StepLR(o, step_size, gamma), begin=begin, end=end, by_epoch=by_epoch
        )


class MultiStepLR(NamedWindow):
    """Multiply the value by `gamma` at each of `milestones`: PyTorch's MultiStepLR in a window.

    A milestone that is listed twice multiplies twice.

    Raises:
        TypeError, ValueError: a milestone is not a positive int, they do not rise, `gamma` is not above 0, or
            the window is invalid.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        *,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
    ) -> None:
        stones = positives("milestones", milestones)
        if stones != sorted(stones):
            raise ValueError(f"milestones must rise, got {stones!r}")
        number("gamma", gamma, above=0)
        super().__init__(
            optimizer,
            lambda o: torch_lr.MultiStepLR(o, stones, gamma),
            begin=begin,
            end=end,
            by_epoch=by_epoch,
        )


class ConstantLR(NamedWindow):
    """Multiply the value by `factor` until the window's last step: PyTorch's ConstantLR.

    The last step undoes the multiplication. PyTorch's `total_iters` is `end - begin - 1`, as in MMEngine.

    Raises:
        TypeError, ValueError: `factor` is not in (0, 1], `end` is missing, or the window is shorter than two
            steps.
    """

    length_from = "end"

    def __init__(
        self,
        optimizer: Optimizer,
        factor: float = 1.0 / 3,
        *,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
    ) -> None:
        number("factor", factor, above=0, most=1)
        total = steps_to_last(type(self).__name__, begin, end, by_epoch, least=2)
        super().__init__(
            optimizer,
            lambda o: torch_lr.ConstantLR(o, factor, total),
            begin=begin,
            end=end,
            by_epoch=by_epoch,
        )


class LinearLR(NamedWindow):
    """Multiply the value by a factor that changes along a line: PyTorch's LinearLR in a window.

    The factor is `start_factor` at the window's first step and `end_factor` at its last step, `end - 1`:
    PyTorch's `total_iters` is `end - begin - 1`, as in MMEngine.

    Raises:
        TypeError, ValueError: `start_factor` is not in (0, 1], `end_factor` is not in [0, 1], `end` is
            missing, or the window is shorter than two steps.
    """

    length_from = "end"

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        *,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
    ) -> None:
        number("start_factor", start_factor, above=0, most=1)
        number("end_factor", end_factor, least=0, most=1)
        total = steps_to_last(type(self).__name__, begin, end, by_epoch, least=2)
        super().__init__(
            optimizer,
            lambda o: torch_lr.LinearLR(o, start_factor, end_factor, total),
            begin=begin,
            end=end,
            by_epoch=by_epoch,
        )


class ExponentialLR(NamedWindow):
    """Multiply the value by `gamma` at every step after the first: PyTorch's ExponentialLR in a window.

    When it is converted to iterations, `gamma` is replaced by its `epoch_length`-th root, so that the decay
    in an epoch stays the same.

    Raises:
        TypeError, ValueError: `gamma` is not above 0, or the window is invalid.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gamma: float,
        *,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
    ) -> None:
        number("gamma", gamma, above=0)
        super().__init__(
            optimizer, lambda o: torch_lr.ExponentialLR(o, gamma), begin=begin, end=end, by_epoch=by_epoch
        )

    @classmethod
    def _per_iter(cls, arguments: dict[str, Any], epoch_length: int) -> dict[str, Any]:
        return {**arguments, "gamma": number("gamma", arguments["gamma"], above=0) ** (1 / epoch_length)}


class CosineAnnealingLR(NamedWindow):
    """Lower the value to the minimum along half a cosine in `T_max` steps: PyTorch's CosineAnnealingLR.

    After `T_max` steps the value goes up again.

    Args:
        T_max: the number of steps to the minimum; by default `end - begin`.
        eta_min, eta_min_ratio: the minimum, or its ratio to the initial value of each group; by default 0.

    Raises:
        TypeError, ValueError: `T_max` is not a positive int, or it and `end` are both missing; both minima
            are given; or the window is invalid.
    """

    length_from = "T_max"

    def __init__(
        self,
        optimizer: Optimizer,
        T_max: int | None = None,
        eta_min: float | None = None,
        *,
        eta_min_ratio: float | None = None,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
    ) -> None:
        if T_max is None:
            steps = steps_to_last(f"{type(self).__name__} without T_max", begin, end, by_epoch) + 1
        else:
            positive("T_max", T_max)
            steps = T_max
        check_has_value(optimizer, self.param_name)
        floor = minima_of(optimizer, self.param_name, eta_min, eta_min_ratio)
        super().__init__(
            optimizer,
            lambda o: torch_lr.CosineAnnealingLR(o, steps),
            floor=floor,
            begin=begin,
            end=end,
            by_epoch=by_epoch,
        )


class PolyLR(NamedWindow):
    """Lower the value to `eta_min` by the factor `(1 - t / N) ** power`: PyTorch's PolynomialLR.

    The factor multiplies the part of the value above `eta_min`. t is the number of steps since the window's
    first step, and N = `end - begin - 1`, so that `eta_min` is reached at the last step.

    Raises:
        TypeError, ValueError: `power` is not above 0, `eta_min` is below 0, `end` is missing, or the window
            is shorter than two steps.
    """

    length_from = "end"

    def __init__(
        self,
        optimizer: Optimizer,
        eta_min: float = 0.0,
        power: float = 1.0,
        *,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
    ) -> None:
        number("eta_min", eta_min, least=0)
        number("power", power, above=0)
        total = steps_to_last(type(self).__name__, begin, end, by_epoch, least=2)
        super().__init__(
            optimizer,
            lambda o: torch_lr.PolynomialLR(o, total, power),
            floor=eta_min,
            begin=begin,
            end=end,
            by_epoch=by_epoch,
        )


def steps_to_last(name: str, begin: int, end: int | None, by_epoch: bool, *, least: int = 1) -> int:
    """Return the number of steps from the first to the last step of a window, one less than it has steps.

    Args:
        name: the scheduler, for the messages.
        begin, end, by_epoch: the window.
        least: the fewest steps that the window may have: 2 if the result becomes PyTorch's `total_iters`,
            which must not be 0.

    Raises:
        TypeError, ValueError: `end` is missing, or the window is shorter than `least` steps.
    """
    check_window(begin, end, by_epoch)
    if end is None:
        raise ValueError(f"{name} needs end: the {'epoch' if by_epoch else 'iteration'} at which it ends")
    if end - begin < least:
        raise ValueError(f"{name} needs a window of at least {least} steps, got begin={begin}, end={end}")
    return end - begin - 1


def positives(what: str, values: Sequence[int]) -> list[int]:
    """Check that `values` is a list of positive ints, and return a copy.

    Raises:
        TypeError, ValueError: a value is wrong; the message names `what` and the value.
    """
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise TypeError(f"{what} must be a list of positive ints, got {values!r}")
    for value in values:
        positive(f"each of {what}", value)
    return [*values]


def minima_of(
    optimizer: Optimizer, param_name: str, eta_min: float | None, eta_min_ratio: float | None
) -> list[float]:
    """Return the minimum of each param group.

    Raises:
        TypeError, ValueError: both arguments are given, or one is not a number of at least 0.
    """
    if eta_min is not None and eta_min_ratio is not None:
        raise ValueError(f"give eta_min or eta_min_ratio, not both: got {eta_min!r} and {eta_min_ratio!r}")
    groups = optimizer.param_groups
    if eta_min_ratio is None:
        return [number("eta_min", 0.0 if eta_min is None else eta_min, least=0)] * len(groups)
    number("eta_min_ratio", eta_min_ratio, least=0)
    return [initial_value(group, param_name) * eta_min_ratio for group in groups]
