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
from eventloop.hooks.log_files import copy_logs
from eventloop.metrics.packet import Packet, lost_loss_text
from eventloop.metrics.reduce import LAST, Reduced, Reducer
from eventloop.metrics.rows import Loss
from eventloop.metrics.statistics import LogStatistics, refuse_epochs
from eventloop.migration.names import knowing_others
from eventloop.optim.optimizers import named_values
from eventloop.steering.tunable import TunableInterval
from eventloop.stops.ending import ERROR
from eventloop.util.checks import check_bools, check_path, positive

if TYPE_CHECKING:
    from eventloop.metrics import EventStorage
    from eventloop.training.trainer import Trainer


COPY_PRIORITY = 5
"""The priority at which the copying of log files is registered. Callbacks run in reverse order: the copying
runs after hooks of priority 10 and above have closed their files, and while PreemptionHook (0) still handles
signals."""

REDUCE_MAX = ("data_time", "memory")
"""Metrics whose maximum over ranks matters more than the mean: the slowest loader, the largest memory use."""


class LoggerHook(TunableInterval, Hook):
    """Send the learning rate and the new metrics to the writers every `interval` iterations.

        default_hooks=dict(logger=dict(interval=50))
        hooks=[LoggerHook(interval=50, out_dir="logs")]    # replaces the default logger, and copies the files

    The events, `scalars_logged`, are made in the background, so the training thread waits for no value. An
    interval in which nothing subscribes to them has no event: its values stay in `trainer.metrics`. A run
    that is stopped within an interval logs its remaining metrics, with the learning rate of their last
    iteration. This rate is left out with several ranks, and if a handler after the logger requested the stop,
    because a scheduler may have changed the rate by then.

    The first loss that is NaN or infinite is logged as a warning, and emitted as `invalid_loss`, once its
    value is on the host. No step waits for it, so this may come an interval later.

    Args:
        interval: iterations between two logs, counted from the start of the epoch, as in MMEngine.
        ignore_last: log the metrics at the end of an epoch with the next interval; False logs them at once.
            The last metrics of the run are logged at its end in either case.
        out_dir: a directory to which log files are copied, into a folder with the name of `work_dir`: the
            files in `work_dir` and its folders that end in one of `out_suffix`. They are copied after a run
            that ended without an error has delivered every event. Files of checkpoints are not copied.
        out_suffix: endings of the files to copy.
        custom_cfg: statistics of training metrics other than the mean of the interval, in MMEngine's form:
            `[dict(data_src="loss", method_name="mean", window_size=100, log_name="loss_smooth")]`. Methods
            are mean, min, max and current. With an int as window, median and any function of the values are
            possible too. Windows are an int, "epoch" or "global", the default. Without `log_name` the
            statistic replaces the mean. The values are saved in checkpoints, and a resumed run goes on with
            them.
        reduce: log a training's metrics as means over all ranks, iteration by iteration. All ranks must use
            it, and log in the same iterations. In an interval in which the ranks recorded different names,
            each rank logs its own values, and warns once. The ranks communicate in the background, and
            `trainer.metrics` of each rank keeps its own values. If a rank does not answer for 30 s, or for
            half of the bus's `patience` at the end of a run, the others log their own values.
        reduce_max: metrics whose maximum over the ranks is logged, as names or groups ("memory" for
            "memory/..."). With the maximum of `data_time`, `time` is no longer the sum of its parts.

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
        self._reducer = Reducer(reduce_max) if reduce else None
        self._statistics = LogStatistics(custom_cfg) if custom_cfg else None
        self._metrics: EventStorage | None = None
        self._interval = interval
        self._ignore_last = ignore_last
        if out_dir is not None:
            check_path("out_dir", out_dir)
        self._out_dir = None if out_dir is None else Path(out_dir).absolute()
        self._ended_well = False
        self._announced: Loss | None = None
        self._unheard = 0  # metrics of iterations before this one belong to intervals that nothing has heard
        self._out_suffix = (out_suffix,) if isinstance(out_suffix, str) else tuple(out_suffix)

    def check(self, trainer: Trainer) -> None:
        """Refuse a second logger, because the first to log would take the other's values.

        Raises:
            ValueError: the trainer has another LoggerHook, or `custom_cfg` has a window of an epoch in a run
                that is measured in iterations.
        """
        self._metrics = trainer.metrics
        if self._statistics is not None:
            refuse_epochs(self._statistics.entries, by_epoch=trainer.by_epoch)
        if sum(isinstance(hook, LoggerHook) for hook in trainer.hooks) > 1:
            raise ValueError(
                "the trainer has two LoggerHooks (a PeriodicWriter is one), and each would take the other's "
                "values: keep one, and give a writer that needs fewer events a filter `when` or its own "
                "interval"
            )

    @on(priority=COPY_PRIORITY)
    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Start the background loop, and reset the state of the last run.

        Otherwise the first log would start the background loop in the middle of an iteration. The callback
        `metrics.post_pending` posts metrics when too many have accumulated within an interval or a
        validation, and at the very end of the run.
        """
        self._ended_well = False
        trainer.metrics.crowded = False  # may be set by a stop that came after the logger's turn
        if self._out_dir is not None and trainer.rank == 0:
            trainer.during_run.push(partial(self._copy_logs, trainer, self._out_dir))
        self._unheard = 0
        if self._has_subscribers(trainer):
            trainer.bus.warm_up()
        if self._reducer is not None:
            self._reducer.begin_run()
        trainer.metrics.post_pending = lambda: self._post(trainer)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Log at the interval, in the last iteration, and at the end of an epoch shorter than an interval."""
        done = (event.iter if event.max_epochs is None else event.batch_idx) + 1
        if (
            done % self._interval == 0
            or trainer.metrics.crowded
            or event.iter + 1 == event.max_iters
            or (
                trainer.position.batches + trainer.counting.batches == trainer.position.length
                and self._is_tail(event.batch_idx, event.max_epochs)
            )
        ):
            self._log(trainer)
        if trainer.metrics.losses.lost is not self._announced:
            self._announce_lost_loss(trainer)

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Log the metrics that are left of an epoch whose loader has no length: its end is known only now."""
        done = trainer.counting.iterations(trainer.position.batches)
        if trainer.position.length is None and done and self._is_tail(done - 1, event.max_epochs):
            self._log_rest(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Log the remaining metrics when training ended before its last iteration."""
        reducer = self._reducer
        if reducer is not None and event.reason == ERROR:
            reducer.stop()
        if reducer is not None and reducer.reduces:
            self._post(trainer, LAST)  # posted even if empty, so that all ranks post
        else:
            self._log_rest(trainer)

    @on(priority=Priority.LOWEST)
    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Log the metrics that were recorded since the last log, such as those of hooks at the run's end.

        Metrics that are recorded after this call are posted at the end of the run, by `metrics.post_pending`.
        """
        if trainer.bus.wants(InvalidLoss):  # the background, which reads the rest too, may be later
            trainer.metrics.check_losses()
        if trainer.metrics.losses.lost is not self._announced:
            self._announce_lost_loss(trainer)
        self._log_rest(trainer)
        if self._reducer is not None and event.reason == ERROR:
            self._reducer.stop()
        elif self._reducer is not None:
            self._reducer.limit_wait(trainer.bus.patience / 2)
        self._ended_well = event.reason != ERROR

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Log the metrics of a validation."""
        self._log_metrics(trainer, "val", event.metrics)

    def after_test_epoch(self, trainer: Trainer, event: AfterTestEpoch) -> None:
        """Log the metrics of a test."""
        self._log_metrics(trainer, "test", event.metrics)

    def checkpoint_evaluated(self, trainer: Trainer, event: CheckpointEvaluated) -> None:
        """Log the metrics of a checkpoint under "val", at its step and with its counters."""
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
        """True with `custom_cfg`, whose statistics need values logged earlier."""
        return self._statistics is not None or type(self).state_dict is not LoggerHook.state_dict

    def state_dict(self) -> dict[str, Any]:
        """Return the values that the statistics of `custom_cfg` have so far.

        The method waits for values that are still on the device, and with `reduce` for the other ranks.
        Metrics recorded since the last log count with this rank's own values.
        """
        if self._statistics is None:
            return {}
        return self._statistics.state_dict([] if self._metrics is None else self._metrics.read_pending())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load saved values of the `custom_cfg` statistics; a statistic without saved values starts empty.

        Raises:
            CheckpointError: `state` does not have the fields of this hook's state.
        """
        if self._statistics is not None:
            self._statistics = self._statistics.loaded(state)

    def _copy_logs(
        self, trainer: Trainer, out_dir: Path, kind: type[BaseException] | None, *error: object
    ) -> None:
        delivered = kind in (None, GeneratorExit) and trainer.failure is None
        if delivered and self._ended_well:
            copy_logs(trainer.work_dir, out_dir / trainer.work_dir.name, self._out_suffix)

    def _is_tail(self, last: int, max_epochs: int | None) -> bool:
        """Return whether the metrics that are left at the end of an epoch are logged at once.

        Otherwise they are logged with the next interval.

        Args:
            last: the index of the last iteration of the epoch.
            max_epochs: None for a run that is measured in iterations.
        """
        return max_epochs is not None and (not self._ignore_last or last < self._interval)

    def _announce_lost_loss(self, trainer: Trainer) -> None:
        """Emit `invalid_loss` with the counters of its iteration; the log has its line already."""
        self._announced = lost = trainer.metrics.losses.lost
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
        for name, rate in _rates(trainer).items():
            trainer.metrics.put_scalar(name, rate, smoothing_hint=False)
        if self._has_subscribers(trainer) or trainer.metrics.crowded:
            self._post(trainer, trainer.iter)
        else:
            self._unheard = trainer.iter + 1

    def _has_subscribers(self, trainer: Trainer) -> bool:
        """Return whether the metrics of an interval have a use now, beyond their histories."""
        metrics = trainer.metrics
        collects = self._reducer is not None or self._statistics is not None or metrics.pending_media
        return bool(collects or metrics.followers) or trainer.bus.wants(ScalarsLogged)

    def _log_rest(self, trainer: Trainer) -> None:
        if trainer.metrics.pending or trainer.metrics.pending_media:
            self._post(trainer)

    def _post(self, trainer: Trainer, iteration: int | None = None) -> None:
        """Post the metrics since the last log to the background, reduced over ranks if all ranks log now."""
        metrics, place = trainer.metrics, trainer.place
        packet: Packet | Reduced = (collected := metrics.collect(place, since=self._unheard))
        self._unheard = 0
        if self._reducer is not None and iteration is not None:
            packet = self._reducer.reduce(collected, iteration)
        trainer.bus.post(packet if self._statistics is None else self._statistics.wrap(packet), ScalarsLogged)
        if metrics.pending_media:
            trainer.bus.post(metrics.collect_media(place), ImageLogged, HistogramLogged)

    def _log_metrics(self, trainer: Trainer, mode: str, metrics: dict[str, float]) -> None:
        if metrics:
            step = trainer.iter + (trainer.within == "iter")  # completed iterations
            trainer.announce(ScalarsLogged, mode=mode, step=step, scalars=metrics)


def _rates(trainer: Trainer) -> dict[str, Any]:
    """Return the learning rates by name; empty if the train step or another hook records them.

    The logger runs before the schedulers (70), so these are the rates that the iteration was trained with;
    those of another engine run before it, and its bridge notes the rates.
    """
    returned = isinstance(trainer.outputs, Mapping) and "lr" in trainer.outputs
    if returned or any(getattr(hook, "puts_lr", False) for hook in trainer.hooks):
        return {}
    rates = {
        name: optimizer.param_groups[0]["lr"] for name, optimizer in named_values("lr", trainer.optimizer)
    }
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
