"""Decide when a training validates: at an interval as in MMEngine, or as mmcv's workflow says."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast

from eventloop.util.checks import check_bools, check_choice, positive

Evaluate = Literal["val", "test"]
Workflow = Sequence[tuple[str, int]]


class Schedule(Protocol):
    """The evaluations of a run, by the number of completed units: epochs, or iterations in a run of these."""

    before_train: bool
    """Whether a validation precedes the first iteration."""

    def after(self, done: int, total: int) -> list[Evaluate]:
        """Return the evaluations after `done` of `total` units; `done` is 0 before the training."""

    def validates(self, total: int) -> bool:
        """Return whether a run of `total` units has a validation."""

    def settings(self) -> dict[str, Any]:
        """Return the options that a resume compares."""


class Never:
    """The schedule of a run without evaluations."""

    before_train = False

    def after(self, done: int, total: int) -> list[Evaluate]:
        """Return []."""
        return []

    def validates(self, total: int) -> bool:
        """Return False."""
        return False

    def settings(self) -> dict[str, Any]:
        """Return {}."""
        return {}


class ValSchedule:
    """Validate at an interval and at the end of the run, and on request before the training.

    Args:
        interval: the number of units from one validation to the next: of epochs, or of iterations if the run
            is measured in iterations.
        begin: the unit, counted from 1, after which the first validation may follow.
        dynamic_intervals: pairs (milestone, interval) for another interval from the unit `milestone`, counted
            from 1, on, as in MMEngine.
        before_train: True validates before the first iteration too, whatever `begin` is.

    Raises:
        TypeError, ValueError: a number is not a positive int, or milestones are out of order.
    """

    def __init__(
        self,
        interval: int = 1,
        begin: int = 1,
        dynamic_intervals: Sequence[tuple[int, int]] | None = None,
        before_train: bool = False,
    ) -> None:
        if isinstance(interval, int) and interval < 1:
            raise ValueError(
                f"val_interval must be at least 1, got {interval}: to validate in handlers alone, give "
                "val_begin a number beyond the end of the run"
            )
        positive("val_interval", interval)
        positive("val_begin", begin)
        self._begin, self.before_train = begin, before_train
        self._milestones, self._intervals = [0], [interval]  # the interval from each milestone to the next
        for entry in dynamic_intervals or ():
            self._add_interval(entry, dynamic_intervals)

    def _add_interval(self, entry: object, dynamic_intervals: object) -> None:
        """Add an entry of `dynamic_intervals`; refuse one that is no pair or out of order."""
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise TypeError(f"dynamic_intervals is a list of (milestone, interval), got the entry {entry!r}")
        milestone, interval = entry
        positive("a milestone of dynamic_intervals", milestone)
        positive("an interval of dynamic_intervals", interval)
        if milestone <= self._milestones[-1]:
            raise ValueError(f"dynamic_intervals must have rising milestones, got {dynamic_intervals!r}")
        self._milestones.append(milestone)
        self._intervals.append(interval)

    def after(self, done: int, total: int) -> list[Evaluate]:
        """Return ["val"] if a validation follows `done` of `total` units, else []."""
        if done == 0:
            return ["val"] if self.before_train else []
        # that of the next unit, which has the number done + 1: as in MMEngine
        interval = self._intervals[bisect_right(self._milestones, done + 1) - 1]
        is_due = done % interval == 0 or done == total
        return ["val"] if is_due and done >= self._begin else []

    def validates(self, total: int) -> bool:
        """Return whether a run of `total` units has a validation, at its end at the latest."""
        return self._begin <= total or self.before_train

    def settings(self) -> dict[str, Any]:
        """Return the arguments, which a resume compares."""
        dynamic = [*zip(self._milestones, self._intervals, strict=True)][1:]
        return {
            "val_interval": self._intervals[0],
            "val_begin": self._begin,
            "dynamic_intervals": [*map(list, dynamic)],
        }


def schedule_of(
    validates: bool,
    by_epoch: bool,
    interval: int | None,
    begin: int,
    dynamic_intervals: Sequence[tuple[int, int]] | None,
    before_train: bool,
    dev_run: int,
) -> Schedule:
    """Return the schedule of a trainer's validations, by the trainer's arguments.

    Args:
        validates: whether the trainer has a `val_loader`.
        by_epoch: whether the run is measured in epochs.
        interval: None for every epoch, or every 1000 iterations.
        begin, dynamic_intervals, before_train: see `ValSchedule`.
        dev_run: the number of batches of a `fast_dev_run`, which validates at its end; 0 for a normal run.

    Raises:
        TypeError, ValueError: an argument is invalid, or `before_train` is True without a `val_loader`.
    """
    check_bools(val_before_train=before_train)
    if interval is None:
        interval = 1 if by_epoch else 1000
    schedule = ValSchedule(interval, begin, dynamic_intervals, before_train)
    if not validates:
        if before_train:
            raise ValueError("val_before_train=True needs batches to validate: give the Trainer a val_loader")
        return Never()
    return ValSchedule(dev_run, before_train=before_train) if dev_run else schedule


class WorkflowSchedule:
    """Evaluate as in mmcv's workflow: `[("train", 2), ("val", 1)]` trains two units, validates, and repeats.

    A unit is an epoch, or an iteration in a run measured in iterations. If the run ends within a cycle, the
    remaining evaluations of the cycle follow its last unit: three epochs of the example are T T V T V.

    Raises:
        TypeError, ValueError: `workflow` is not a list of `(mode, times)`, a mode is unknown, or none trains.
    """

    before_train = False

    def __init__(self, workflow: Workflow) -> None:
        if not isinstance(workflow, tuple | list):
            raise TypeError(f"a workflow is a list of (mode, times), got {workflow!r}")
        self._evaluations: list[list[Evaluate]] = [[]]
        """The evaluations before the cycle, and after each training unit of the cycle."""
        for entry in workflow:
            if not isinstance(entry, tuple | list) or len(entry) != 2:
                raise TypeError(f"a workflow is a list of (mode, times), got the entry {entry!r}")
            mode, times = entry
            positive(f"the times of {mode!r} in a workflow", times)
            check_choice("a mode of the workflow", mode, ("train", "val", "test"))
            if mode == "train":
                self._evaluations += [[] for _ in range(times)]
            else:
                self._evaluations[-1] += [cast(Evaluate, mode)] * times
        self.modes = list(dict.fromkeys(mode for mode, _ in workflow))
        self._cycle = len(self._evaluations) - 1
        if self._cycle == 0:
            raise ValueError(f"a workflow must train, got {workflow!r}")

    def after(self, done: int, total: int) -> list[Evaluate]:
        """Return the evaluations after `done` of `total` units, and before the next unit."""
        if done == 0:
            return self._evaluations[0]
        in_cycle = done % self._cycle or self._cycle  # the number of units done in the current cycle
        if done == total:
            return [mode for evaluations in self._evaluations[in_cycle:] for mode in evaluations]
        if in_cycle == self._cycle:
            return self._evaluations[-1] + self._evaluations[0]
        return self._evaluations[in_cycle]

    def validates(self, total: int) -> bool:
        """Return whether the workflow has a validation, which comes at the end of the run at the latest."""
        return "val" in self.modes

    def settings(self) -> dict[str, Any]:
        """Return {}: a resume compares nothing, because the workflow is an argument of `run`."""
        return {}
