"""Run a PyTorch scheduler from one step of the run to another, on one value of the param groups.

`schedulers` defines MMEngine's schedulers with this class; the ParamSchedulerHook steps them, and a resume
loads their states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from eventloop.optim.param_groups import check_has_value, initial_value, read_value, write_value
from eventloop.util.checks import at_least, check_bools, check_metric

logger = logging.getLogger("eventloop")

Schedule = Callable[[Optimizer], LRScheduler]
"""A function that makes a PyTorch scheduler of an optimizer."""

PROGRESS = frozenset(
    {
        *("last_epoch", "last_step", "_step_count", "_last_lr", "base_lrs", "best", "num_bad_epochs"),
        *("cooldown_counter", "T_cur", "T_i", "verbose", "_get_lr_called_within_step", "_is_initial"),
    }
)
"""The keys of a scheduler's state that are no arguments of its constructor: it counts or derives them."""


class Window:
    """A PyTorch scheduler that runs from step `begin` up to, but not including, step `end`.

        warm = Window(opt, lambda o: LinearLR(o, 0.001, total_iters=500), end=500, by_epoch=False)
        main = Window(opt, lambda o: MultiStepLR(o, [8, 11]), by_epoch=True)
        Trainer(..., schedulers=[warm, main])

    Outside the window it does nothing. The scheduler is created when its window begins, so its first step is
    `begin`. PyTorch's schedulers continue from the current value. So the factors of overlapping windows are
    multiplied, and between two windows the value stays the same. `eventloop.optim.schedulers` has MMEngine's
    schedulers, built on this class.

    The scheduler is given another optimizer without parameters, whose `lr` is the scheduled value. So every
    PyTorch scheduler can schedule a momentum (the first of `betas`, too) or a weight decay.

    Args:
        optimizer: the optimizer whose param groups are scheduled.
        schedule: `(optimizer) -> PyTorch scheduler`.
        begin, end: in epochs, or in iterations with `by_epoch=False`; without `end` the window stays open.
        by_epoch: the unit: the param_scheduler hook steps the window after each epoch, or after each
            iteration.
        param_name: "lr", "momentum" or another number in the groups. A subclass may set it as an attribute.
        floor: a number, or one for each param group, that is subtracted from the value before the scheduler
            computes with it, and added again afterwards.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or range, the optimizer has no such value, or
            the scheduler refuses its arguments.
    """

    param_name: str = "lr"

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        begin: int = 0,
        end: int | None = None,
        by_epoch: bool = True,
        param_name: str | None = None,
        floor: float | Sequence[float] = 0.0,
    ) -> None:
        check_window(begin, end, by_epoch)
        self.param_name = param_name or type(self).param_name
        check_has_value(optimizer, self.param_name)
        self.optimizer = optimizer
        self.begin, self.end, self.by_epoch = begin, end, by_epoch
        self._schedule, self._floor = schedule, floor
        self._initial = [initial_value(group, self.param_name) for group in optimizer.param_groups]
        self._shadow = _Shadow(optimizer, self.param_name, floor)
        self._scheduler: LRScheduler | None = None
        self.last_step = 0
        if self.active:
            self._advance()
        # made now even if the window begins later, so that wrong arguments are refused before the run
        scheduler = self._scheduler or self._make(_Shadow(optimizer, self.param_name, floor))
        self._built = dict(scheduler.state_dict())

    @property
    def active(self) -> bool:
        """Return whether `last_step` lies in the window."""
        return self.begin <= self.last_step and (self.end is None or self.last_step < self.end)

    def step(self) -> None:
        """Count one epoch or iteration; within the window, step the scheduler and write its value."""
        self.last_step = step = self.last_step + 1
        if self.begin <= step and (self.end is None or step < self.end):  # as `active`, without its call
            self._advance()

    def get_last_value(self) -> list[Any]:
        """Return the current value of each param group."""
        return [read_value(group, self.param_name) for group in self.optimizer.param_groups]

    get_last_lr = get_last_value

    def state_dict(self) -> dict[str, Any]:
        """Return the arguments of the window, the number of steps, and the state of PyTorch's scheduler.

        Before the window begins, None stands for the scheduler's state.
        """
        scheduler = None if self._scheduler is None else self._scheduler.state_dict()
        return {"last_step": self.last_step, **self._window(), "scheduler": scheduler}

    def written(self) -> list[tuple[float, float]]:
        """Return a pair for each param group: the initial value, and the value that was written last.

        With them a resume finds values that the user has changed since.
        """
        values = [
            float(rate) + floor for rate, floor in zip(self._shadow.rates(), self._shadow.floors, strict=True)
        ]
        return [*zip(self._initial, values, strict=True)]

    def built_state(self) -> dict[str, Any]:
        """Return the state, with PyTorch's scheduler as it was when it was made.

        It has the arguments of that scheduler even before the window begins. A resume compares them with the
        arguments in the checkpoint.
        """
        return {**self.state_dict(), "scheduler": self._built}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the optimizer's own state has to be loaded before.

        As with PyTorch's schedulers the arguments in the state replace those of the constructor. A difference
        is logged as a warning, because a changed argument has no effect.
        """
        changed = self._load_window(state)
        if changed:
            logger.warning(
                "%s continues with the arguments of the checkpoint, not with those it was built with: %s",
                type(self).__name__,
                "; ".join(changed),
            )

    def _window(self) -> dict[str, Any]:
        """Return the window's own arguments, without those of PyTorch's scheduler."""
        floor = self._floor if isinstance(self._floor, int | float) else list(self._floor)
        return {"begin": self.begin, "end": self.end, "by_epoch": self.by_epoch, "floor": floor}

    def _load_window(self, state: Mapping[str, Any]) -> list[str]:
        """Load a state, and return a text for each argument in which it differs from this window."""
        changed = _differences(self._window(), state)
        self.begin, self.end, self.by_epoch = state["begin"], state["end"], state["by_epoch"]
        self._floor = state["floor"]
        self.last_step = int(state["last_step"])
        self._shadow = _Shadow(self.optimizer, self.param_name, self._floor)
        self._scheduler = None
        if state["scheduler"] is not None:
            self._scheduler = self._make(self._shadow)
            changed += _differences(self._scheduler.state_dict(), state["scheduler"])
            self._scheduler.load_state_dict(dict(state["scheduler"]))
        return changed

    def _advance(self) -> None:
        """Let PyTorch's scheduler make its next step, or its first one, and write the value."""
        shadow, scheduler = self._shadow, self._scheduler
        if len(self.optimizer.param_groups) != shadow.size:
            self._refuse_groups()
        shadow.pull()
        if scheduler is None:
            self._scheduler = self._make(shadow)
        else:
            scheduler.step()
        shadow.push()

    def _make(self, shadow: _Shadow) -> LRScheduler:
        """Return PyTorch's scheduler of an optimizer; its constructor makes its first step."""
        scheduler = self._schedule(shadow)
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"schedule must return a scheduler of torch.optim.lr_scheduler, got {scheduler!r}"
            )
        if isinstance(scheduler, ReduceLROnPlateau) and not isinstance(self, PlateauWindow):
            raise TypeError("ReduceLROnPlateau is stepped with a metric: use ReduceOnPlateauLR")
        return scheduler

    def _refuse_groups(self) -> None:
        """Raise RuntimeError because a param group was added after the scheduler was built."""
        has = len(self.optimizer.param_groups)
        raise RuntimeError(
            f"{type(self).__name__} was built for {self._shadow.size} param groups, and the optimizer now "
            f"has {has}: build schedulers after the last add_param_group"
        )


class PlateauWindow(Window):
    """A window for `ReduceLROnPlateau`: `step()` counts an epoch, `step(metric)` reports a validation.

    Args:
        monitor: the name of the metric.
        optimizer, schedule, begin, end: as `Window`; the unit is epochs.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        monitor: str,
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        check_metric("monitor", monitor)
        self.monitor = monitor
        super().__init__(optimizer, schedule, begin=begin, end=end)
        if self._scheduler is None:
            self._scheduler = self._make(self._shadow)

    def step(self, metric: float | None = None) -> None:
        """Count an epoch; or, with a metric and inside the window, step the scheduler with it."""
        if metric is None:
            self.last_step += 1
        elif self.active:
            assert isinstance(self._scheduler, ReduceLROnPlateau)
            if len(self.optimizer.param_groups) != self._shadow.size:
                self._refuse_groups()
            self._shadow.pull()
            self._scheduler.step(metric)
            self._shadow.push()


class _Shadow(Optimizer):
    """An optimizer without parameters that a window gives to PyTorch's scheduler instead of the real one.

    The `lr` of its groups is the scheduled value of the real optimizer's groups, minus the window's floor.

    `pull` and `push` are called in every iteration, so they are fast: the groups of the two optimizers are
    paired once, and again when a load of a checkpoint has replaced the list of groups. Floats, the usual
    values, are read and written without a call.
    """

    _opt_called = True  # without it PyTorch warns that the scheduler is stepped before its optimizer

    def __init__(self, optimizer: Optimizer, param_name: str, floor: float | Sequence[float]) -> None:
        self._real, self._name = optimizer, param_name
        groups = optimizer.param_groups
        self.floors = [floor] * len(groups) if isinstance(floor, int | float) else list(floor)
        self.size = len(groups)
        super().__init__(
            [
                {
                    "params": [torch.empty(0)],
                    "lr": read_value(group, param_name) - floor_of_group,
                    "initial_lr": initial_value(group, param_name) - floor_of_group,
                }
                for group, floor_of_group in zip(groups, self.floors, strict=True)
            ],
            {},
        )
        self._pair_up()

    def _pair_up(self) -> None:
        self._paired = self._real.param_groups
        self._pairs = [*zip(self.param_groups, self._paired, self.floors, strict=True)]

    def pull(self) -> None:
        """Copy the current values of the real optimizer into this one."""
        if self._real.param_groups is not self._paired:
            self._pair_up()
        name = self._name
        for shadow, group, floor in self._pairs:
            value = group.get(name)
            shadow["lr"] = (value if type(value) is float else read_value(group, name)) - floor

    def rates(self) -> list[Any]:
        """Return the scheduled values without the window's floor, as PyTorch's scheduler computes them."""
        return [shadow["lr"] for shadow in self.param_groups]

    def push(self) -> None:
        """Write the scheduled values to the real optimizer."""
        name = self._name
        for shadow, group, floor in self._pairs:
            if type(group.get(name)) is float:
                group[name] = shadow["lr"] + floor
            else:
                write_value(group, name, shadow["lr"] + floor)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing, because this optimizer has no parameters."""


def check_window(begin: object, end: object, by_epoch: object) -> None:
    """Check the begin, the end and the unit of a window.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it and its value.
    """
    at_least("begin", begin, 0)
    if end is not None:
        at_least(f"end, of a window with begin={begin},", end, cast(int, begin) + 1)
    check_bools(by_epoch=by_epoch)


def _differences(own: Mapping[str, Any], loaded: Mapping[str, Any]) -> list[str]:
    """Return a text for each argument that differs in two states of a scheduler."""
    return [
        f"{name} {loaded[name]!r} instead of {value!r}"
        for name, value in own.items()
        if name in loaded and not name.startswith("_") and name not in PROGRESS and loaded[name] != value
    ]
