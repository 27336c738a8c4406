"""A hook that sends metrics to writers at an interval, with the name and arguments of detectron2 and Pet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from eventloop.events.run import Run
from eventloop.hooks.logger import REDUCE_MAX, LoggerHook
from eventloop.migration.names import knowing_others
from eventloop.registry import WRITERS, build
from eventloop.util.checks import check_bools, positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class PeriodicWriter(LoggerHook):
    """Send metrics to writers every `period` iterations, in the last iteration, and at the end of the run.

        Trainer(..., hooks=[PeriodicWriter([JSONLWriter(), TensorBoardWriter()], period=20)])

    The hook replaces the default logger and `Trainer(writers=[...])`. Its writers do not run on the training
    thread. They receive every value; detectron2's writers receive only the newest value of each name. When
    `train()` returns, also with an error, the writers have written everything. Closing the trainer closes the
    writers.

    Args:
        writers: objects or configs, as for the Trainer's `writers`; they write on rank 0 only.
        period: iterations between two writes.
        by_epoch: True counts iterations from the start of each epoch, and writes at its end too, as in Pet.
        reduce, reduce_max: write the means and maxima over all ranks; see `LoggerHook`.

    Raises:
        TypeError, ValueError: `period` is not a positive int, an object is not a writer, or an argument is
            refused by `LoggerHook`.
    """

    @knowing_others
    def __init__(
        self,
        writers: Sequence[Any] | Any = (),
        period: int = 20,
        *,
        by_epoch: bool = False,
        reduce: bool = False,
        reduce_max: Sequence[str] = REDUCE_MAX,
    ) -> None:
        positive("period", period)
        check_bools(by_epoch=by_epoch)
        super().__init__(period, ignore_last=False, reduce=reduce, reduce_max=reduce_max)
        self._by_epoch = by_epoch
        given = writers if isinstance(writers, list | tuple) else [writers]
        self.writers: list[Any] = [
            build(each, WRITERS) if isinstance(each, Mapping) else each for each in given
        ]
        for writer in self.writers:
            _check_writer(writer)
        self._describe_run: Callable[[], Run] | None = None  # None on ranks above 0

    def check(self, trainer: Trainer) -> None:
        """Store the function that describes the run to writers, and refuse a second logger.

        Raises:
            ValueError: see `LoggerHook.check`.
        """
        super().check(trainer)
        self._describe_run = trainer.facts if trainer.rank == 0 else None

    def attach(self, bus: Bus) -> None:
        """Subscribe this hook to the bus, and on rank 0 the writers."""
        super().attach(bus)
        if self._describe_run is not None:
            for writer in self.writers:
                writer.attach(bus, self._describe_run)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Send the metrics to the writers if the iteration ends a period or the run."""
        if self._by_epoch:
            super().after_train_iter(trainer, event)
            return
        iterations = event.iter + 1
        # `crowded` is set if the run stops after this iteration, or too many metrics are not sent yet
        is_due = iterations % self._interval == 0 or trainer.metrics.crowded
        if is_due or iterations == event.max_iters:
            self._log(trainer)


def _check_writer(writer: object) -> None:
    """Refuse an object that is not a writer, such as a class or detectron2's writer."""
    if isinstance(writer, type):
        raise TypeError(f"expected a writer, got the class {writer.__name__}: write {writer.__name__}()")
    if not hasattr(writer, "attach") or not hasattr(writer, "write"):
        raise TypeError(
            f"expected a writer or a config dict(type=...), got {writer!r}: make a detectron2 writer, whose "
            "write() reads a global storage, a subclass of eventloop.writers.Writer with write(event)"
        )
