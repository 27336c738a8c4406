"""A hook that steps the trainer's schedulers of learning rate and other values."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import ceil
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
from eventloop.optim.optimizers import each_optimizer
from eventloop.optim.param_groups import apply_factors, has_factors, record_last_rates, remove_factors
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

    A scheduler changes the learning rate or another value of the optimizer. `Trainer(schedulers=...)` takes
    PyTorch's schedulers, schedulers that act only in a range of iterations or epochs, and configs from which
    they are built (`eventloop.optim.schedulers`). `ReduceLROnPlateau` is stepped after each validation within
    a training. Iterations whose optimizer step was skipped (`optimizer_step_skipped`) do not count, nor do
    epochs that were cut short.

    A warning is logged if a schedule is stepped by iteration but its length equals the run's number of
    epochs, or is stepped by epoch but has the length of the run's iterations. With accumulated gradients, a
    warning is logged if a schedule counts batches but has the length of the optimizer steps, or the reverse.

    Args:
        by_epoch: True steps schedulers after each epoch, False after each iteration, so that `T_max`,
            `milestones` and `total_steps` count iterations. A scheduler's attribute `by_epoch` takes
            precedence.
        monitor: the metric with which `ReduceLROnPlateau` is stepped after each validation. A scheduler's
            attribute `monitor` takes precedence.

    Raises:
        TypeError: `by_epoch` is not a bool, or `monitor` is not the name of a metric.

    Warns:
        UserWarning: the range of a scheduler ends after the run, or a scheduler belongs to an optimizer that
            is not the trainer's.
    """

    priority = Priority.LOW
    owns = "the steps of the schedulers"

    def __init__(self, by_epoch: bool = False, monitor: str = "loss") -> None:
        check_bools(by_epoch=by_epoch)
        check_metric("monitor", monitor)
        self._by_epoch = by_epoch
        self._monitor = monitor
        self._calls_each_iter: list[Callable[[], object]] = []  # `step` of the schedulers, and more
        self._stepped_each_epoch: list[Any] = []
        self._stepped_with_metric: list[Any] = []
        self._step_skipped = False  # in this iteration
        self._schedulers: list[Any] = []
        self._scheduled_optimizers: list[Any] = []
        self._warning: Callable[[], object] | None = None  # the call that logs the warnings of units
        self._unit_warnings_logged = False
        self._signal: EventSignal | None = None  # of `after_train_iter`

    def check(self, trainer: Trainer) -> None:
        """Build schedulers from configs, and refuse schedulers that cannot be stepped.

        Raises:
            TypeError: an object is not a scheduler, or its `step` needs an argument, as timm's do.
            ValueError: a config has an unknown type or argument, a scheduler counts epochs in a run measured
                in iterations, or a validation with the metric of `ReduceLROnPlateau` is missing.
        """
        if not trainer.schedulers:
            return
        from eventloop.optim.schedulers import build_schedulers, check_windows

        build_schedulers(trainer.schedulers, trainer.optimizer, trainer.facts.run)
        for scheduler in trainer.schedulers:
            self._check_scheduler(trainer, scheduler)
        check_windows(trainer.schedulers, trainer.facts.run)
        if trainer.max_iters is not None:
            for text in self._unit_warnings(trainer) or self._count_warnings(trainer, trainer.max_iters):
                logger.warning(text)

    def _check_scheduler(self, trainer: Trainer, scheduler: Any) -> None:
        """Refuse a scheduler that cannot be stepped, and warn of one with another optimizer."""
        from eventloop.optim.scheduler_checks import refuse_needed_arguments, refuse_without_step

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

    def settings(self) -> dict[str, Any]:
        """Return the default unit of schedulers, and the metric with which `ReduceLROnPlateau` is stepped."""
        return {"by_epoch": self._by_epoch, "monitor": self._monitor}

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Sort the schedulers into those stepped by iteration, by epoch and with a metric."""
        self._step_skipped = False
        self._signal = trainer.bus.signal(AfterTrainIter)
        self._schedulers, self._scheduled_optimizers = trainer.schedulers, self._optimizers(trainer)
        self._stepped_with_metric = [s for s in trainer.schedulers if _uses_metric(s)]
        others = [s for s in trainer.schedulers if not isinstance(s, ReduceLROnPlateau)]
        self._stepped_each_epoch = [s for s in others if self._counts_epochs(s)]
        self._calls_each_iter = [s.step for s in others if s not in self._stepped_each_epoch]
        # max_iters is None for a loader without a length, and for a hand-written loop
        if trainer.max_iters is None and not self._unit_warnings_logged:
            self._warn_later(trainer, self._unit_warnings(trainer))
        self.follow_factors()

    def follow_factors(self) -> None:
        """From now on, remove the factors that commands have set before each step, and apply them after it.

        A scheduler computes the next value from the last one, which must not include a factor. A command such
        as `set "lr*=0.5"` calls this method after it has set a factor.
        """
        if not has_factors(self._scheduled_optimizers):
            return
        self._apply_factors()
        if self._calls_each_iter and self._apply_factors not in self._calls_each_iter:
            remove = partial(remove_factors, self._scheduled_optimizers)
            self._calls_each_iter = [remove, *self._calls_each_iter, self._apply_factors]

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Step no schedulers after validations outside of a training, which may follow."""
        self._stepped_with_metric = []

    def optimizer_step_skipped(self, trainer: Trainer, event: OptimizerStepSkipped) -> None:
        """Do not step schedulers in this iteration, whose optimizer step was skipped."""
        self._step_skipped = True

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Step schedulers that count iterations, unless the optimizer step was skipped or failed."""
        if self._step_skipped:
            self._step_skipped = False
            return
        # after an error of an earlier handler the schedulers step only if the optimizer has stepped
        handler_failed = self._signal is not None and self._signal.failing is not None
        optimizer_stepped = bool(trainer.within)
        if handler_failed and not optimizer_stepped:
            return
        for call in self._calls_each_iter:
            call()

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Step schedulers that count epochs, unless the epoch was cut short."""
        if event.reason == COMPLETED and self._stepped_each_epoch:
            with self._without_factors():
                for scheduler in self._stepped_each_epoch:
                    scheduler.step()

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Pass the metrics of a validation to the schedulers that need a metric.

        Raises:
            ValueError: the validation does not have the metric (the message suggests one).
        """
        if event.reason == COMPLETED:
            self._step_with_metric(event.metrics)

    def checkpoint_evaluated(self, trainer: Trainer, event: CheckpointEvaluated) -> None:
        """Pass the metrics that another process computed for a checkpoint to schedulers that need a metric.

        Raises:
            ValueError: the metric is missing (the message suggests one).
        """
        self._step_with_metric(event.metrics)

    def _step_with_metric(self, metrics: Mapping[str, float]) -> None:
        """Step each scheduler that needs a metric; raise ValueError if its metric is missing."""
        for scheduler in self._stepped_with_metric:
            monitor = self._monitor_of(scheduler)
            if monitor not in metrics:
                suggestion = suggest(monitor, [*metrics])
                raise ValueError(
                    f"{type(scheduler).__name__} watches {monitor!r}, which the validation does not "
                    f"report{suggestion}"
                )
            with self._without_factors():
                scheduler.step(metrics[monitor])

    @contextmanager
    def _without_factors(self) -> Iterator[None]:
        """Return a context in whose block the optimizers have their values without factors of commands."""
        remove_factors(self._scheduled_optimizers)
        try:
            yield
        finally:
            if has_factors(self._scheduled_optimizers):
                self._apply_factors()

    def _apply_factors(self) -> None:
        """Multiply the optimizers' values by the factors of commands, and update `get_last_lr`."""
        apply_factors(self._scheduled_optimizers)
        record_last_rates(self._schedulers)

    def _optimizers(self, trainer: Trainer) -> list[Any]:
        """Return the optimizers that the schedulers may have; a subclass adds others."""
        return list(each_optimizer(trainer.optimizer))

    def _unit_warnings(self, trainer: Trainer) -> list[str]:
        """Return warnings for schedules that count iterations and have a length in epochs, or the reverse."""
        if trainer.max_epochs is None:
            return []
        from eventloop.optim.scheduler_checks import mistaken_unit

        texts = [
            mistaken_unit(scheduler, self._counts_epochs(scheduler), trainer.max_epochs, trainer.max_iters)
            for scheduler in trainer.schedulers
            if not _uses_metric(scheduler)
        ]
        return [text for text in texts if text is not None]

    def _count_warnings(self, trainer: Trainer, iterations: int) -> list[str]:
        """Return warnings for schedules that count batches and have a length in steps, or the reverse."""
        counting, by_update = trainer.counting, trainer.counting.unit == "update"
        batches_per_step = counting.batches_per_step
        if batches_per_step == 1:
            return []
        from eventloop.optim.scheduler_checks import mistaken_count

        epoch_length, epochs = trainer.limits.length("train", trainer.train_loader), trainer.max_epochs
        if epochs is None or epoch_length is None:
            batches = iterations * counting.batches_per_iter
            steps = {ceil(batches / batches_per_step)}
        else:
            batches = epochs * epoch_length
            # the steps of a run whose windows cross epochs, and of a run in which each epoch ends with a step
            steps = {ceil(batches / batches_per_step), epochs * ceil(epoch_length / batches_per_step)}
        texts = [
            mistaken_count(scheduler, batches_per_step, batches, steps, by_update=by_update)
            for scheduler in trainer.schedulers
            if not (_uses_metric(scheduler) or self._counts_epochs(scheduler))
        ]
        return [text for text in texts if text is not None]

    def _warn_later(self, trainer: Trainer, texts: list[str]) -> None:
        """Log `texts` later, when the first epoch turns out to have more than one batch."""
        if texts:
            self._warning = partial(self._warn_at_second_batch, trainer, trainer.epoch, texts)
            self._calls_each_iter.append(self._warning)

    def _warn_at_second_batch(self, trainer: Trainer, first_epoch: int, texts: list[str]) -> None:
        """Log the warnings in the second batch of the first epoch; drop them if that epoch has one batch.

        With one batch in an epoch, iterations and epochs are the same unit.
        """
        if trainer.position.batches == 0 and trainer.epoch == first_epoch:
            return
        self._calls_each_iter = [call for call in self._calls_each_iter if call is not self._warning]
        self._unit_warnings_logged = True
        if trainer.position.batches > 0:
            for text in texts:
                logger.warning(text)

    def _monitor_of(self, scheduler: Any) -> str:
        """Return the name of the metric with which a scheduler is stepped."""
        monitor: str = getattr(scheduler, "monitor", self._monitor)
        return monitor

    def _counts_epochs(self, scheduler: Any) -> bool:
        """Return True if the scheduler is stepped after each epoch."""
        if isinstance(scheduler, ReduceLROnPlateau):  # it is stepped after each validation
            return False
        return bool(getattr(scheduler, "by_epoch", self._by_epoch))


def _uses_metric(scheduler: Any) -> bool:
    """Return True for a scheduler that is stepped with a metric."""
    return isinstance(scheduler, ReduceLROnPlateau | PlateauWindow)


def _warn_of_another_optimizer(scheduler: Any, optimizers: list[Any]) -> None:
    """Warn if a scheduler has an optimizer that is not among `optimizers`."""
    # optimizers are compared by their param groups, which an optimizer shares with its wrapper
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if not optimizers or groups is None:
        return
    if not any(groups is optimizer.param_groups for optimizer in optimizers):
        warnings.warn(
            f"{type(scheduler).__name__} is of another optimizer than the trainer's, which it does not "
            "change: make it with the optimizer that is passed as optimizer=...",
            UserWarning,
            stacklevel=2,
        )
