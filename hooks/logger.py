"""A hook that sends the metrics of each interval to the writers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.events import (
    AfterRun,
    AfterTestEpoch,
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    AfterValEpoch,
    BeforeRun,
    CheckpointEvaluated,
    HistogramLogged,
    ImageLogged,
    InvalidLoss,
    ScalarsLogged,
)
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook, on
from eventloop.metrics.packet import Packet, lost_loss_text
from eventloop.metrics.rows import Loss
from eventloop.migration.names import knowing_others
from eventloop.optim.optimizers import named_values
from eventloop.steering.tunable import TunableInterval
from eventloop.stops.ending import ERROR
from eventloop.util.checks import check_bools, check_path, positive

if TYPE_CHECKING:
    from eventloop.metrics import EventStorage
    from eventloop.metrics.reduce import Reduced, Reducer
    from eventloop.metrics.statistics import LogStatistics
    from eventloop.training.trainer import Trainer


COPY_PRIORITY = 5
"""The priority at which `before_run` registers the copying of log files for the end of the run.

Callbacks for the end run in reverse order. So files are copied after hooks with priorities above 5 have
closed them, and while PreemptionHook (priority 0) still handles signals.
"""

REDUCE_MAX = ("data_time", "memory")
"""The metrics that are reduced to the maximum over ranks by default: slowest loader, largest memory use."""


class LoggerHook(TunableInterval, Hook):
    """Send the learning rate and the new metrics to the writers every `interval` iterations.

        default_hooks=dict(logger=dict(interval=50))
        hooks=[LoggerHook(interval=50, out_dir="logs")]    # replaces the default logger, and copies the files

    The events `scalars_logged` are created in the background, so the training thread never waits for a value
    on the device. Without a subscriber no event is created, and the values stay in `trainer.metrics`. A run
    that is stopped within an interval logs its remaining metrics, with the learning rate of their last
    iteration. This rate is left out with several ranks, and if a handler after the logger requested the stop,
    because a scheduler may already have changed the rate.

    The first loss that is NaN or infinite is logged as a warning, and emitted as `invalid_loss`, once its
    value is on the host. No step waits for the value, so the warning may come an interval later.

    Args:
        interval: iterations between two logs, counted from the start of the epoch, as in MMEngine.
        ignore_last: True logs the metrics of an epoch's last, incomplete interval in the next epoch; False
            logs them at the end of the epoch. Metrics that are left at the end of the run are always logged.
        out_dir: a directory to which log files are copied, into a folder with the name of `work_dir`: the
            files in `work_dir` and its subfolders that end in one of `out_suffix`. They are copied after a
            run that ended without an error has delivered every event. Files of checkpoints are not copied.
        out_suffix: endings of the files to copy.
        custom_cfg: statistics of training metrics other than the mean of the interval, in MMEngine's form:
            `[dict(data_src="loss", method_name="mean", window_size=100, log_name="loss_smooth")]`. The method
            is "mean", "min", "max" or "current"; with an int as window also "median", or any function of the
            values. The window is a number of values, "epoch", or "global" (the default). Without `log_name`
            the statistic replaces the mean. The values of the windows are saved in checkpoints.
        reduce: log the metrics of each training iteration as means over all ranks. All ranks must set it, and
            log in the same iterations. In an interval in which the ranks recorded different names, each rank
            logs its own values, and warns once. The ranks communicate in the background, and
            `trainer.metrics` of each rank keeps its own values. If a rank does not answer for 30 s, or for
            half of the bus's `patience` at the end of a run, the others log their own values.
        reduce_max: metrics whose maximum over the ranks is logged, as names or groups ("memory" for
            "memory/..."). `time` is the sum of its three parts only if their means are logged, so not with
            the maximum of `data_time`.

    Raises:
        TypeError, ValueError: `interval` is not a positive int; `custom_cfg` has an unknown method, window or
            key; `ignore_last` or `reduce` is not a bool, `out_dir` is not a path, or `reduce_max` is not a
            list of names.
    """

    priority = Priority.BELOW_NORMAL

    @knowing_others
    def __init__(
        self,
        interval: int = 10,
        ignore_last: bool = True,
        out_dir: str | Path | None = None,
        out_suffix: str | Sequence[str] = (".json", ".jsonl", ".log", ".csv", ".yaml", ".py"),
        custom_cfg: Sequence[Mapping[str, Any]] | None = None,
        reduce: bool = False,
        reduce_max: Sequence[str] = REDUCE_MAX,
    ) -> None:
        positive("interval", interval)
        check_bools(ignore_last=ignore_last)
        _check_reduce(reduce, reduce_max)
        self._reducer: Reducer | None = None
        self._statistics: LogStatistics | None = None
        if reduce:
            from eventloop.metrics.reduce import Reducer

            self._reducer = Reducer(reduce_max)
        if custom_cfg:
            from eventloop.metrics.statistics import LogStatistics

            self._statistics = LogStatistics(custom_cfg)
        self._metrics: EventStorage | None = None
        self._interval = interval
        self._ignore_last = ignore_last
        if out_dir is not None:
            check_path("out_dir", out_dir)
        self._out_dir = None if out_dir is None else Path(out_dir).absolute()
        self._ended_without_error = False
        self._emitted_loss: Loss | None = None  # the invalid loss for which `invalid_loss` was emitted last
        self._first_to_log = 0
        """The first iteration whose metrics are logged; earlier ones were recorded without a subscriber."""
        self._out_suffix = (out_suffix,) if isinstance(out_suffix, str) else tuple(out_suffix)

    def check(self, trainer: Trainer) -> None:
        """Refuse a second logger, because the metrics of an interval can be collected only once.

        Raises:
            ValueError: the trainer has another LoggerHook, or `custom_cfg` has a window of an epoch in a run
                that is measured in iterations.
        """
        self._metrics = trainer.metrics
        if self._statistics is not None:
            from eventloop.metrics.statistics import refuse_epochs

            refuse_epochs(self._statistics.entries, by_epoch=trainer.by_epoch)
        if sum(isinstance(hook, LoggerHook) for hook in trainer.hooks) > 1:
            raise ValueError(
                "the trainer has two LoggerHooks (a PeriodicWriter is one), and each would take the other's "
                "values: keep one, and give a writer that needs fewer events a filter `when` or its own "
                "interval"
            )

    @on(priority=COPY_PRIORITY)
    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Reset the state of the last run, and start the background thread before the first iteration.

        The trainer calls `metrics.post_pending` when too many metrics have accumulated within an interval or
        a validation, and at the very end of the run.
        """
        self._ended_without_error = False
        # set when metrics shall be logged before the interval ends, as by a stop of the last run
        trainer.metrics.crowded = False
        if self._out_dir is not None and trainer.rank == 0:
            trainer.during_run.push(partial(self._copy_logs, trainer, self._out_dir))
        self._first_to_log = 0
        if self._has_subscribers(trainer):
            trainer.bus.warm_up()
        if self._reducer is not None:
            self._reducer.begin_run()
        trainer.metrics.post_pending = lambda: self._post(trainer)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Log at the interval, in the run's last iteration, and at the end of an epoch if that is due."""
        if trainer.metrics.crowded or event.iter + 1 == event.max_iters or self._is_due(trainer, event):
            self._log(trainer)
        if trainer.metrics.losses.lost is not self._emitted_loss:  # the first invalid loss was found
            self._emit_invalid_loss(trainer)

    def _is_due(self, trainer: Trainer, event: AfterTrainIter) -> bool:
        """Return whether this iteration ends an interval, or an epoch whose metrics are logged at its end."""
        iterations = (event.iter if event.max_epochs is None else event.batch_idx) + 1
        if iterations % self._interval == 0:
            return True
        ends_epoch = trainer.position.batches + trainer.counting.batches == trainer.position.length
        return ends_epoch and self._logs_at_epoch_end(event.batch_idx, event.max_epochs)

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Log the remaining metrics of an epoch if its loader has no length.

        Then `after_train_iter` could not know that the epoch's last iteration was the last.
        """
        iterations = trainer.counting.iterations(trainer.position.batches)
        if trainer.position.length is not None or not iterations:
            return
        if self._logs_at_epoch_end(iterations - 1, event.max_epochs):
            self._log_remaining(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Log the remaining metrics when training ended before its last iteration."""
        reducer = self._reducer
        if reducer is not None and event.reason == ERROR:
            reducer.stop()
        if reducer is not None and reducer.reduces:
            from eventloop.metrics.reduce import LAST

            self._post(trainer, LAST)  # even without metrics, because the other ranks wait for this post
        else:
            self._log_remaining(trainer)

    @on(priority=Priority.LOWEST)
    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Log the metrics since the last log, such as those that hooks record at the end of the run.

        Metrics that are recorded after this call are posted at the end of the run, by `metrics.post_pending`.
        """
        if trainer.bus.wants(InvalidLoss):  # the background may check the last losses too late for an event
            trainer.metrics.check_losses()
        if trainer.metrics.losses.lost is not self._emitted_loss:
            self._emit_invalid_loss(trainer)
        self._log_remaining(trainer)
        if self._reducer is not None and event.reason == ERROR:
            self._reducer.stop()
        elif self._reducer is not None:
            self._reducer.limit_wait(trainer.bus.patience / 2)
        self._ended_without_error = event.reason != ERROR

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Log the metrics of a validation."""
        self._log_metrics(trainer, "val", event.metrics)

    def after_test_epoch(self, trainer: Trainer, event: AfterTestEpoch) -> None:
        """Log the metrics of a test."""
        self._log_metrics(trainer, "test", event.metrics)

    def checkpoint_evaluated(self, trainer: Trainer, event: CheckpointEvaluated) -> None:
        """Log the metrics of an evaluated checkpoint under "val", at the step of the checkpoint."""
        if event.metrics and trainer.bus.wants(ScalarsLogged):
            logged = ScalarsLogged(
                mode="val",
                step=event.iter,
                scalars=event.metrics,
                iter=event.iter,
                epoch=event.epoch,
                max_iters=event.max_iters,
                max_epochs=event.max_epochs,
            )
            trainer.bus.emit(logged, trainer)

    @property
    def stateful(self) -> bool:
        """True with `custom_cfg`, whose windows a resumed run continues, or if a subclass has a state."""
        return self._statistics is not None or type(self).state_dict is not LoggerHook.state_dict

    def state_dict(self) -> dict[str, Any]:
        """Return the values in the windows of `custom_cfg`.

        The method waits for values that are still on the device, and with `reduce` for the other ranks.
        Metrics since the last log are included, with this rank's own values.
        """
        if self._statistics is None:
            return {}
        return self._statistics.state_dict([] if self._metrics is None else self._metrics.read_pending())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the windows of `custom_cfg`; a statistic without saved values starts with an empty window.

        Raises:
            CheckpointError: `state` does not have the fields of this hook's state.
        """
        if self._statistics is not None:
            self._statistics = self._statistics.loaded(state)

    def _copy_logs(
        self, trainer: Trainer, out_dir: Path, kind: type[BaseException] | None, *error: object
    ) -> None:
        """Copy the log files at the end of a run, unless it or the delivery of its events has failed.

        Args:
            kind: the class of the exception that ends the run; GeneratorExit if a hand-written loop ends.
            error: the exception and its traceback.
        """
        delivered = kind in (None, GeneratorExit) and trainer.failure is None
        if delivered and self._ended_without_error:
            from eventloop.hooks.log_files import copy_logs

            copy_logs(trainer.work_dir, out_dir / trainer.work_dir.name, self._out_suffix)

    def _logs_at_epoch_end(self, last_index: int, max_epochs: int | None) -> bool:
        """Return whether the metrics of an incomplete interval are logged at the end of their epoch.

        Otherwise they are logged with the next interval.

        Args:
            last_index: the index of the last iteration of the epoch.
            max_epochs: None for a run that is measured in iterations.
        """
        return max_epochs is not None and (not self._ignore_last or last_index < self._interval)

    def _emit_invalid_loss(self, trainer: Trainer) -> None:
        """Emit `invalid_loss` with the iteration and epoch of the loss; `metrics.losses` has logged it."""
        self._emitted_loss = lost = trainer.metrics.losses.lost
        if lost is not None and trainer.bus.wants(InvalidLoss):
            event = InvalidLoss(
                iter=lost.iteration,
                epoch=lost.epoch,
                advice=lost_loss_text(lost),
                max_iters=trainer.max_iters,
                max_epochs=trainer.max_epochs,
            )
            trainer.bus.emit(event, trainer)

    def _log(self, trainer: Trainer) -> None:
        """Record the learning rates, and post the metrics of the interval if they have a subscriber."""
        for name, rate in _rates(trainer).items():
            trainer.metrics.put_scalar(name, rate, smoothing_hint=False)
        if self._has_subscribers(trainer) or trainer.metrics.crowded:
            self._post(trainer, trainer.iter)
        else:
            self._first_to_log = trainer.iter + 1

    def _has_subscribers(self, trainer: Trainer) -> bool:
        """Return whether anything uses the metrics of an interval: a writer, an option, or another hook."""
        metrics = trainer.metrics
        collects = self._reducer is not None or self._statistics is not None or metrics.pending_media
        return bool(collects or metrics.followers) or trainer.bus.wants(ScalarsLogged)

    def _log_remaining(self, trainer: Trainer) -> None:
        """Post the metrics since the last log, if there are any."""
        if trainer.metrics.pending or trainer.metrics.pending_media:
            self._post(trainer)

    def _post(self, trainer: Trainer, iteration: int | None = None) -> None:
        """Post the metrics since the last log to the background thread, which emits them.

        Args:
            iteration: the iteration in which all ranks log, if the values are to be reduced over them.
        """
        metrics, limits = trainer.metrics, trainer.place
        collected = metrics.collect(limits, since=self._first_to_log)
        packet: Packet | Reduced = collected
        self._first_to_log = 0
        if self._reducer is not None and iteration is not None:
            packet = self._reducer.reduce(collected, iteration)
        trainer.bus.post(packet if self._statistics is None else self._statistics.wrap(packet), ScalarsLogged)
        if metrics.pending_media:
            trainer.bus.post(metrics.collect_media(limits), ImageLogged, HistogramLogged)

    def _log_metrics(self, trainer: Trainer, mode: str, metrics: dict[str, float]) -> None:
        """Emit the metrics of a validation or test, if there are any, at the current step."""
        if metrics:
            step = trainer.iter + (trainer.within == "iter")  # completed iterations
            trainer.announce(ScalarsLogged, mode=mode, step=step, scalars=metrics)


def _rates(trainer: Trainer) -> dict[str, Any]:
    """Return the iteration's learning rates by name; {} if the train step or another hook records them.

    The logger runs before the schedulers (priority 70), so the optimizer still has the rates of this
    iteration. The schedulers of another engine run before the logger, and its bridge stores the rates in
    `trainer.step_rates`.
    """
    step_returns_lr = isinstance(trainer.outputs, Mapping) and "lr" in trainer.outputs
    hook_records_lr = any(getattr(hook, "puts_lr", False) for hook in trainer.hooks)
    if step_returns_lr or hook_records_lr:
        return {}
    optimizers = named_values("lr", trainer.optimizer)
    rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in optimizers}
    return {**rates, **trainer.step_rates}


def _check_reduce(reduce: object, names: object) -> None:
    """Refuse values of `reduce` and `reduce_max` that are of the wrong type."""
    if not isinstance(reduce, bool):
        raise TypeError(
            f"reduce must be True or False, got {reduce!r}: pass names of maxima as reduce_max=[...]"
        )
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"reduce_max must be a list of names, got {names!r}: write reduce_max=[...]")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"reduce_max must be a list of names, got {wrong[0]!r} in it")
