"""A hook that steps the trainer's schedulers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from eventloop.events import (
    COMPLETED,
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    AfterValEpoch,
    BeforeTrain,
    CheckpointEvaluated,
    OptimizerStepSkipped,
)
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.optim.foreign_schedulers import refuse_needed_arguments, refuse_without_step
from eventloop.optim.horizons import mistaken_count, mistaken_unit
from eventloop.optim.optimizers import each_optimizer
from eventloop.optim.param_groups import apply_factors, has_factors, record_last_rates, remove_factors
from eventloop.optim.schedulers import build_schedulers, check_windows
from eventloop.optim.windows import PlateauWindow
from eventloop.util.checks import check_bools, check_metric
from eventloop.util.suggest import suggest

if TYPE_CHECKING:
    from eventloop.bus.event_signal import EventSignal
    from eventloop.training.trainer import Trainer


logger = logging.getLogger("eventloop")


class ParamSchedulerHook(Hook):
    """Step the trainer's schedulers after each iteration, each epoch or each validation.

        default_hooks=dict(param_scheduler=ParamSchedulerHook(by_epoch=True))

    A scheduler changes the learning rate or another value. It is one of PyTorch's, such a scheduler limited
    to a window of the run, or a config from which one is built with the trainer and its optimizer
    (`eventloop.optim.schedulers`). A scheduler that needs a metric is stepped after each validation within a
    training. An iteration whose optimizer step was skipped (`optimizer_step_skipped`) does not count, nor
    does an epoch that was cut short.

    A warning is logged for a schedule that is stepped by iteration although its length equals the run's
    number of epochs, or the other way round. Where gradients are accumulated, one is logged for a schedule
    that counts batches although its length is the run's number of updates, or the other way round.

    Args:
        by_epoch: the unit of schedulers without an attribute `by_epoch`. The default counts iterations:
            `T_max`, `milestones` and `total_steps` are iterations.
        monitor: the metric with which `ReduceLROnPlateau` is stepped after each validation; a scheduler's
            attribute `monitor` takes precedence.

    Raises:
        TypeError: `by_epoch` is not a bool, or `monitor` is not the name of a metric.

    Warns:
        UserWarning: a window reaches past the run, or a scheduler belongs to another optimizer than the
            trainer's.
    """

    priority = Priority.LOW
    owns = "the steps of the schedulers"

    def __init__(self, by_epoch: bool = False, monitor: str = "loss") -> None:
        check_bools(by_epoch=by_epoch)
        check_metric("monitor", monitor)
        self._by_epoch = by_epoch
        self._monitor = monitor
        self._each_iter: list[Callable[[], object]] = []
        self._each_epoch: list[Any] = []
        self._plateaus: list[Any] = []
        self._step_skipped = False
        self._schedulers: list[Any] = []
        self._stepped: list[Any] = []  # the optimizers
        self._warning: Callable[[], object] | None = None
        self._warned = False  # whether the warnings about units were logged
        self._signal: EventSignal | None = None

    def check(self, trainer: Trainer) -> None:
        """Build schedulers from configs, and refuse schedulers that would never be stepped.

        Raises:
            TypeError: an object is not a scheduler, or its `step` needs an argument, as timm's do.
            ValueError: a config has an unknown type or argument, a scheduler counts epochs in a run measured
                in iterations, or `ReduceLROnPlateau` has no validation or a metric that it does not report.
        """
        build_schedulers(trainer.schedulers, trainer.optimizer, trainer.facts.run)
        for scheduler in trainer.schedulers:
            name = type(scheduler).__name__
            if isinstance(scheduler, type):
                raise TypeError(
                    f"expected a scheduler, got the class {scheduler.__name__}: "
                    f"write {scheduler.__name__}(optimizer, ...)"
                )
            refuse_without_step(scheduler)
            if _uses_metric(scheduler):
                if trainer.val_loader is None:
                    raise ValueError(f"{name} needs a validation: give the Trainer a val_loader")
                monitor = self._monitor_of(scheduler)
                trainer.monitored.require(monitor, f"{name} with monitor={monitor!r}")
            else:
                refuse_needed_arguments(scheduler)
            if self._counts_epochs(scheduler) and not trainer.by_epoch:
                raise ValueError(
                    f"{name} counts epochs, and a run measured in iterations has none: leave by_epoch out "
                    "and count iterations, or give the Trainer max_epochs"
                )
            _warn_of_another_optimizer(scheduler, self._optimizers(trainer))
        check_windows(trainer.schedulers, trainer.facts.run)
        if trainer.max_iters is not None:
            for text in self._unit_warnings(trainer) or self._count_warnings(trainer, trainer.max_iters):
                logger.warning(text)

    def settings(self) -> dict[str, Any]:
        """Return the default unit of schedulers, and the metric with which `ReduceLROnPlateau` is stepped."""
        return {"by_epoch": self._by_epoch, "monitor": self._monitor}

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Sort the schedulers into those stepped by iteration, by epoch and with a metric."""
        self._step_skipped = False
        self._signal = trainer.bus.signal(AfterTrainIter)
        self._plateaus = [s for s in trainer.schedulers if _uses_metric(s)]
        others = [s for s in trainer.schedulers if not isinstance(s, ReduceLROnPlateau)]
        self._each_epoch = [s for s in others if self._counts_epochs(s)]
        self._each_iter = [s.step for s in others if s not in self._each_epoch]
        self._schedulers, self._stepped = trainer.schedulers, self._optimizers(trainer)
        # max_iters is None for a loader without a length, and for a hand-written loop
        if trainer.max_iters is None and not self._warned and (texts := self._unit_warnings(trainer)):
            self._warning = partial(self._warn_at_second_batch, trainer, trainer.epoch, texts)
            self._each_iter.append(self._warning)
        self.follow_factors()

    def follow_factors(self) -> None:
        """Step schedulers without the factors that commands have set, and apply these afterwards.

        A command calls it when it has set one. Until then the steps of an iteration are the schedulers' only.
        """
        if not has_factors(self._stepped):
            return
        self._apply_factors()
        if self._each_iter and self._apply_factors not in self._each_iter:
            self._each_iter = [partial(remove_factors, self._stepped), *self._each_iter, self._apply_factors]

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Stop stepping schedulers after validations, because the training is over."""
        self._plateaus = []

    def optimizer_step_skipped(self, trainer: Trainer, event: OptimizerStepSkipped) -> None:
        """Record that this iteration made no optimizer step."""
        self._step_skipped = True

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Step schedulers that count iterations; a failed optimizer step does not count."""
        if self._step_skipped:
            self._step_skipped = False
            return
        if self._signal is not None and self._signal.failing is not None and not trainer.within:
            return
        for step in self._each_iter:
            step()

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Step schedulers that count epochs; an epoch that was cut short does not count."""
        if event.reason == COMPLETED and self._each_epoch:
            with self._without_factors():
                for scheduler in self._each_epoch:
                    scheduler.step()

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Step schedulers that watch a metric.

        Raises:
            ValueError: the validation does not have the metric (the message suggests one).
        """
        if event.reason == COMPLETED:
            self._step_plateaus(event.metrics)

    def checkpoint_evaluated(self, trainer: Trainer, event: CheckpointEvaluated) -> None:
        """Step schedulers that watch a metric with the metrics of a checkpoint.

        Raises:
            ValueError: they do not have the metric (the message suggests one).
        """
        self._step_plateaus(event.metrics)

    def _step_plateaus(self, metrics: Mapping[str, float]) -> None:
        for scheduler in self._plateaus:
            monitor = self._monitor_of(scheduler)
            if monitor not in metrics:
                known = suggest(monitor, [*metrics])
                raise ValueError(
                    f"{type(scheduler).__name__} watches {monitor!r}, which the validation does not "
                    f"report{known}"
                )
            with self._without_factors():
                scheduler.step(metrics[monitor])

    @contextmanager
    def _without_factors(self) -> Iterator[None]:
        """Remove the factors of commands for a step of the schedulers."""
        remove_factors(self._stepped)
        try:
            yield
        finally:
            if has_factors(self._stepped):
                self._apply_factors()

    def _apply_factors(self) -> None:
        """Apply the factors of commands, also to what the schedulers' `get_last_lr` returns."""
        apply_factors(self._stepped)
        record_last_rates(self._schedulers)

    def _optimizers(self, trainer: Trainer) -> list[Any]:
        """Return the optimizers whose schedulers are stepped without a warning."""
        return list(each_optimizer(trainer.optimizer))

    def _unit_warnings(self, trainer: Trainer) -> list[str]:
        """Return a warning for each scheduler whose length seems to be in another unit than its steps."""
        if trainer.max_epochs is None:
            return []
        found = [
            mistaken_unit(scheduler, self._counts_epochs(scheduler), trainer.max_epochs, trainer.max_iters)
            for scheduler in trainer.schedulers
            if not _uses_metric(scheduler)
        ]
        return [text for text in found if text is not None]

    def _count_warnings(self, trainer: Trainer, iterations: int) -> list[str]:
        """Return a warning for each schedule whose length is in updates, not batches, or the reverse."""
        counting, by_update = trainer.counting, trainer.counting.unit == "update"
        per_step = counting.batches_per_step
        if per_step == 1:
            return []
        length, epochs = trainer.limits.length("train", trainer.train_loader), trainer.max_epochs
        if epochs is None or length is None:
            batches = iterations * counting.batches_per_iter
            updates = {-(-batches // per_step)}
        else:
            batches = epochs * length
            updates = {-(-batches // per_step), epochs * -(-length // per_step)}
        found = [
            mistaken_count(scheduler, per_step, batches, updates, by_update=by_update)
            for scheduler in trainer.schedulers
            if not (_uses_metric(scheduler) or self._counts_epochs(scheduler))
        ]
        return [text for text in found if text is not None]

    def _warn_at_second_batch(self, trainer: Trainer, first_epoch: int, texts: list[str]) -> None:
        """Log the warnings when an epoch has a second batch; with one batch, iterations equal epochs."""
        if trainer.position.batches == 0 and trainer.epoch == first_epoch:
            return
        self._each_iter = [step for step in self._each_iter if step is not self._warning]
        self._warned = True
        if trainer.position.batches > 0:
            for text in texts:
                logger.warning(text)

    def _monitor_of(self, scheduler: Any) -> str:
        monitor: str = getattr(scheduler, "monitor", self._monitor)
        return monitor

    def _counts_epochs(self, scheduler: Any) -> bool:
        """Return True if the scheduler counts epochs; `ReduceLROnPlateau` counts validations."""
        if isinstance(scheduler, ReduceLROnPlateau):
            return False
        return bool(getattr(scheduler, "by_epoch", self._by_epoch))


def _uses_metric(scheduler: Any) -> bool:
    """Return True for a scheduler that is stepped with a metric."""
    return isinstance(scheduler, ReduceLROnPlateau | PlateauWindow)


def _warn_of_another_optimizer(scheduler: Any, own: list[Any]) -> None:
    optimizer = getattr(scheduler, "optimizer", None)
    groups = getattr(optimizer, "param_groups", None)  # a wrapped optimizer has those it wraps
    if own and groups is not None and not any(groups is each.param_groups for each in own):
        warnings.warn(
            f"{type(scheduler).__name__} is of another optimizer than the trainer's, which it does not "
            "change: make it with the optimizer that is passed as optimizer=...",
            UserWarning,
            stacklevel=2,
        )
