"""Decide when a training validates: at an interval as in MMEngine, or by a workflow as in mmcv."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast

from eventloop.util.checks import check_bools, check_choice, positive

Evaluate = Literal["val", "test"]
Workflow = Sequence[tuple[str, int]]


class Schedule(Protocol):
    """Decides which evaluations follow `done` of `total` epochs or iterations; `done` is 0 at the start.

    `validates` says whether any of them is a validation.
    """

    def after(self, done: int, total: int) -> list[Evaluate]: ...

    def validates(self, total: int) -> bool: ...

    def settings(self) -> dict[str, Any]: ...


class Never:
    """The schedule of a run without validations."""

    def after(self, done: int, total: int) -> list[Evaluate]:
        """Return no validations, whatever part of the run is done."""
        return []

    def validates(self, total: int) -> bool:
        """Return False."""
        return False

    def settings(self) -> dict[str, Any]:
        """Return {}."""
        return {}


class ValSchedule:
    """Validate from `begin` on, every `interval`, and at the end, and perhaps before the training.

    Args:
        interval, begin: in epochs, or in iterations if the run is measured in iterations.
        dynamic_intervals: `(milestone, interval)` pairs; as in MMEngine an interval applies once
            `done + 1 >= milestone`.
        before_train: whether to validate before the first iteration too, whatever `begin` is.

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
        self._begin, self._before_train = begin, before_train
        self._milestones, self._intervals = [0], [interval]
        for entry in dynamic_intervals or ():
            if not isinstance(entry, tuple | list) or len(entry) != 2:
                raise TypeError(
                    f"dynamic_intervals is a list of (milestone, interval), got the entry {entry!r}"
                )
            milestone, later = entry
            positive("a milestone of dynamic_intervals", milestone)
            positive("an interval of dynamic_intervals", later)
            if milestone <= self._milestones[-1]:
                raise ValueError(f"dynamic_intervals must have rising milestones, got {dynamic_intervals!r}")
            self._milestones.append(milestone)
            self._intervals.append(later)

    def after(self, done: int, total: int) -> list[Evaluate]:
        """Return ["val"] if a validation is due."""
        interval = self._intervals[bisect_right(self._milestones, done + 1) - 1]
        due = done >= self._begin and (done % interval == 0 or done == total)
        return ["val"] if (due if done else self._before_train) else []

    def validates(self, total: int) -> bool:
        """Return whether a validation is due in the run, at its end at the latest."""
        return self._begin <= total or self._before_train

    def settings(self) -> dict[str, Any]:
        """Return the arguments, for a resumed run to compare."""
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
    """Return the schedule of a trainer's validations, by its arguments.

    Args:
        interval: None for every epoch, or every 1000 iterations.
        dev_run: the number of batches of a dev run, which validates at its end; 0 for a normal run.

    Raises:
        TypeError, ValueError: an argument is invalid, or there is no loader for `before_train`.
    """
    check_bools(val_before_train=before_train)
    interval = interval if interval is not None else 1 if by_epoch else 1000
    schedule = ValSchedule(interval, begin, dynamic_intervals, before_train)
    if not validates:
        if before_train:
            raise ValueError("val_before_train=True needs batches to validate: give the Trainer a val_loader")
        return Never()
    return ValSchedule(dev_run, before_train=before_train) if dev_run else schedule


class WorkflowSchedule:
    """mmcv's workflow: `[("train", 2), ("val", 1)]` trains two units and validates once, repeatedly.

    The evaluations after the last training unit of a cycle also follow the last unit of the run: three epochs
    of the example are T T V T V.

    Raises:
        TypeError, ValueError: not a list of `(mode, times)`, an unknown mode, or no training.
    """

    def __init__(self, workflow: Workflow) -> None:
        if not isinstance(workflow, tuple | list):
            raise TypeError(f"a workflow is a list of (mode, times), got {workflow!r}")
        self._follow: list[list[Evaluate]] = [[]]
        for entry in workflow:
            if not isinstance(entry, tuple | list) or len(entry) != 2:
                raise TypeError(f"a workflow is a list of (mode, times), got the entry {entry!r}")
            mode, times = entry
            positive(f"the times of {mode!r} in a workflow", times)
            check_choice("a mode of the workflow", mode, ("train", "val", "test"))
            if mode == "train":
                self._follow += [[] for _ in range(times)]
            else:
                self._follow[-1] += [cast(Evaluate, mode)] * times
        self.modes = list(dict.fromkeys(mode for mode, _ in workflow))
        self._cycle = len(self._follow) - 1
        if self._cycle == 0:
            raise ValueError(f"a workflow must train, got {workflow!r}")

    def after(self, done: int, total: int) -> list[Evaluate]:
        """Return the evaluations between this training unit and the next."""
        place = done % self._cycle
        if done == 0:
            return self._follow[0]
        if done == total:
            return [mode for follow in self._follow[place or self._cycle :] for mode in follow]
        return self._follow[place] if place else self._follow[-1] + self._follow[0]

    def validates(self, total: int) -> bool:
        """Return whether the workflow has a validation, which comes at the end of the run at the latest."""
        return "val" in self.modes

    def settings(self) -> dict[str, Any]:
        """Return {}, because a resumed run gets its workflow from the call of `run`."""
        return {}
