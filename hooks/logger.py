"""Sends the numbers of each interval to the writers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop.events import (
    AfterRun,
    AfterTestEpoch,
    AfterTrain,
    AfterTrainIter,
    AfterValEpoch,
    BeforeRun,
    HistogramLogged,
    ImageLogged,
    ScalarsLogged,
)
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook, on
from eventloop.hooks.log_files import copy_logs
from eventloop.metrics.reduce import LAST, Reduced, Reducer
from eventloop.metrics.rows import Packet, Scalar
from eventloop.metrics.scalar_value import single_number
from eventloop.metrics.statistics import LogStatistics, refuse_epochs
from eventloop.migration.arguments import knowing_others
from eventloop.optim.optimizers import named_values
from eventloop.training.scopes import ERROR
from eventloop.util.checks import check_bools, check_path, positive

if TYPE_CHECKING:
    from eventloop.metrics import EventStorage
    from eventloop.training.trainer import Trainer


BEHIND_THE_SIGNALS = 5
"""What a run's end copies is copied while the PreemptionHook (0) still takes the signals, and after the hooks (10 and
on) whose files it copies have ended them: contexts are left in the opposite order."""

REDUCE_MAX = ("data_time", "memory")
"""What is worst on one rank says more of than their mean: the slowest loader, and the memory that must suffice."""


class LastRates(NamedTuple):
    """The learning rates of an epoch's last iteration."""

    iter: int
    epoch: int
    rates: dict[str, Scalar]


class LoggerHook(Hook):
    """Every `interval` iterations: the learning rate, and what was put since the last time, become
    `scalars_logged` events, made in the background. The training thread waits for no value. A stop ends an interval: what
    is left is logged with the rate of its last iteration, unless there are several ranks, or the stop was asked for
    behind the logger, where a scheduler may have moved it.

        default_hooks=dict(logger=dict(interval=50))
        hooks=[LoggerHook(interval=50, out_dir="logs")]    # takes its place, and copies the files

    Args:
        interval: iterations between two logs, counted from the start of the epoch, as in MMEngine.
        ignore_last: what is left at the end of an epoch goes with the next interval; False logs it at once. The
            rest of the run is logged at its end in either case.
        out_dir: where the files of `work_dir` and its folders that end in one of `out_suffix` are copied to, in a
            folder named as `work_dir`: when a run that no error ended has delivered everything. Not those of checkpoints.
        custom_cfg: MMEngine's, for other statistics of a training's numbers than the mean of the interval:
            `[dict(data_src="loss", method_name="mean", window_size=100, log_name="loss_smooth")]`. Methods are mean, min,
            max, current, and with an int as window median and any function of the values; windows an int, "epoch" or
            "global", the default. Without `log_name` it takes the place of the mean. Their values are in the checkpoints, and
            a resumed run goes on with them.
        reduce: log a training's numbers as their means over all ranks, each of its iteration. All ranks need it then, and
            log alike; a value that not every rank put stays that of its own. The ranks talk in the background, and
            `trainer.metrics` of each keeps its own values. Where one does not answer for 30 s, or at the end of a run for
            half of the bus's `drain_timeout`, the others log their own.
        reduce_max: names, and groups ("memory" for "memory/..."), of which the maximum over the ranks is logged instead.
            With that of `data_time`, `time` is no longer the sum of its parts.

    Raises:
        TypeError, ValueError: `interval` is no positive int; `custom_cfg` says something that is not there;
            `ignore_last` or `reduce` is no bool, `out_dir` no path, or `reduce_max` no names.
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
        self._kept: LastRates | None = None
        self._interval = interval
        self._ignore_last = ignore_last
        if out_dir is not None:
            check_path("out_dir", out_dir)
        self._out_dir = None if out_dir is None else Path(out_dir).absolute()
        self._ended_well = False
        self._out_suffix = (out_suffix,) if isinstance(out_suffix, str) else tuple(out_suffix)

    def check(self, trainer: Trainer) -> None:
        """Refuse a second one: whichever logs first would take the other's values.

        Raises:
            ValueError: the trainer has another LoggerHook; `custom_cfg` has a window of an epoch in a run of iterations.
        """
        self._metrics = trainer.metrics
        if self._statistics is not None:
            refuse_epochs(self._statistics.entries, by_epoch=trainer.by_epoch)
        if sum(isinstance(hook, LoggerHook) for hook in trainer.hooks) > 1:
            raise ValueError(
                "the trainer has two LoggerHooks (a PeriodicWriter is one), and each would send what the other waits for: "
                "keep one, and let a writer that wants less choose by `when` or by its own interval"
            )

    @on(priority=BEHIND_THE_SIGNALS)
    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Start the background, which the first log would otherwise do, in the middle of an iteration; and be told when
        more is put than waits for an interval, or for the end of a validation, and when something is left at the run's
        very end."""
        self._ended_well = False
        self._kept = None
        trainer.metrics.crowded = False  # of a stop that came behind the logger
        if self._out_dir is not None and trainer.rank == 0:
            trainer.during_run.push(partial(self._copy_logs, trainer, self._out_dir))
        trainer.bus.warm_up()
        if self._reducer is not None:
            self._reducer.begin_run()
        trainer.metrics.relieve = lambda: self._post(trainer)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Log at the interval, in the last iteration, and at the end of an epoch too short for an interval."""
        done = (event.iter if event.max_epochs is None else event.batch_idx) + 1
        if done % self._interval == 0 or trainer.metrics.crowded or event.iter + 1 == event.max_iters:
            self._log(trainer)
        elif event.batch_idx + 1 == trainer.position.length:
            if self._is_tail(event):
                self._log(trainer)
            else:
                self._keep_rates(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Log what is left when training ended before its last iteration."""
        self._put_kept(trainer)
        reducer = self._reducer
        if reducer is not None and event.reason == ERROR:
            reducer.stop()
        if reducer is not None and reducer.reduces:
            self._post(trainer, LAST)  # without a value too, so that all ranks have it
        else:
            self._log_rest(trainer)

    @on(priority=Priority.LOWEST)
    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Log what other hooks put at the end, and what a validation or test of its own put; what comes after this is
        logged by the run itself, which relieves the metrics."""
        self._log_rest(trainer)
        if self._reducer is not None and event.reason == ERROR:
            self._reducer.stop()
        elif self._reducer is not None:
            self._reducer.hurry(trainer.bus.drain_timeout / 2)
        self._ended_well = event.reason != ERROR

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Log the metrics of a validation."""
        self._log_metrics(trainer, "val", event.metrics)

    def after_test_epoch(self, trainer: Trainer, event: AfterTestEpoch) -> None:
        """Log the metrics of a test."""
        self._log_metrics(trainer, "test", event.metrics)

    @property
    def stateful(self) -> bool:
        """True with `custom_cfg`, whose statistics are of values that were logged before."""
        return self._statistics is not None or type(self).state_dict is not LoggerHook.state_dict

    def state_dict(self) -> dict[str, Any]:
        """The values of the statistics, up to now. Waits for those that are still on the device; and with `reduce` for
        the other ranks, but for what was put since the last log: of that it has this rank's own."""
        if self._statistics is None:
            return {}
        return self._statistics.state_dict([] if self._metrics is None else self._metrics.read_pending())

    def prepare_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Go on with the values of a state; a statistic that it does not have begins anew.

        Raises:
            CheckpointError: it is the state of something else.
        """
        return (
            super().prepare_state(state)
            if self._statistics is None
            else self._statistics.prepare_state(state)
        )

    def _copy_logs(
        self, trainer: Trainer, out_dir: Path, kind: type[BaseException] | None, *error: object
    ) -> None:
        delivered = kind in (None, GeneratorExit) and trainer.failure is None
        if delivered and self._ended_well:
            copy_logs(trainer.work_dir, out_dir / trainer.work_dir.name, self._out_suffix)

    def _is_tail(self, event: AfterTrainIter) -> bool:
        """Whether the rest of an epoch, which ends with this iteration, is logged."""
        if event.max_epochs is None:
            return False
        return not self._ignore_last or event.batch_idx < self._interval

    def _log(self, trainer: Trainer) -> None:
        for name, rate in _rates(trainer).items():
            trainer.metrics.put_scalar(name, rate, smoothing_hint=False)
        self._post(trainer, trainer.iter)

    def _keep_rates(self, trainer: Trainer) -> None:
        """Of an epoch's last iteration, where what is left waits for the next interval: the validation may stop the run,
        and the scheduler has moved them then."""
        rates = {name: single_number(name, rate) for name, rate in _rates(trainer).items()}
        self._kept = LastRates(trainer.iter, trainer.epoch, rates)

    def _put_kept(self, trainer: Trainer) -> None:
        metrics, kept = trainer.metrics, self._kept
        if kept is None or kept.iter + 1 != trainer.iter:
            return
        epoch, metrics.epoch = metrics.epoch, kept.epoch
        metrics.put_scalars(kept.rates, smoothing_hint=False, cur_iter=kept.iter)
        metrics.epoch = epoch

    def _log_rest(self, trainer: Trainer) -> None:
        if trainer.metrics.pending or trainer.metrics.pending_media:
            self._post(trainer)

    def _post(self, trainer: Trainer, iteration: int | None = None) -> None:
        """Post what was put, to be reduced where all ranks do so in this iteration."""
        metrics, place = trainer.metrics, trainer.place
        packet: Packet | Reduced = (taken := metrics.collect(place))
        if self._reducer is not None and iteration is not None:
            packet = self._reducer.reduce(taken, iteration)
        trainer.bus.post(
            packet if self._statistics is None else self._statistics.reckon(packet), ScalarsLogged
        )
        if metrics.pending_media:
            trainer.bus.post(metrics.collect_media(place), ImageLogged, HistogramLogged)

    def _log_metrics(self, trainer: Trainer, mode: str, metrics: dict[str, float]) -> None:
        if metrics:
            step = trainer.iter + (trainer.within == "iter")  # completed iterations
            trainer.announce(ScalarsLogged, mode=mode, step=step, scalars=metrics)


def _rates(trainer: Trainer) -> dict[str, Any]:
    """The learning rates by name, unless the step, or a hook, puts them. Taken before the scheduler (70) moves them, they
    are those that the iteration was trained with."""
    returned = isinstance(trainer.outputs, Mapping) and "lr" in trainer.outputs
    if returned or any(getattr(hook, "puts_lr", False) for hook in trainer.hooks):
        return {}
    return {
        name: optimizer.param_groups[0]["lr"] for name, optimizer in named_values("lr", trainer.optimizer)
    }


def _check_reduce(reduce: object, names: object) -> None:
    """Refuse what does not say whether, and how, metrics are reduced.

    Raises:
        TypeError: see the message.
    """
    if not isinstance(reduce, bool):
        raise TypeError(
            f"reduce must be True or False, got {reduce!r}: names of maxima go to reduce_max=[...]"
        )
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"reduce_max must be a list of names, got {names!r}: write reduce_max=[...]")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"reduce_max must be a list of names, got {wrong[0]!r} in it")
