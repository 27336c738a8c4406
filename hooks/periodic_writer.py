"""detectron2's and Pet's place for writers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from eventloop.events.run import Run
from eventloop.hooks.logger import REDUCE_MAX, LoggerHook
from eventloop.migration.arguments import knowing_others
from eventloop.registry import WRITERS, build
from eventloop.util.checks import check_bools, positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class PeriodicWriter(LoggerHook):
    """Feeds writers every `period` iterations of the run, in the last one, and once more at the end.

        Trainer(..., hooks=[PeriodicWriter([JSONLWriter(), TensorBoardWriter()], period=20)])

    It takes the logger's place, and is `LoggerHook` and `writers=[...]` in one. Its writers are fed off the training
    thread; they are given every value, where detectron2's are given the newest of each name and lose what was put
    in between; when `train()` returns they have written all of it, also after an error, and closing the
    trainer closes them.

    Args:
        writers: as for the Trainer's `writers`: objects, or configs. They write on rank 0.
        period: iterations between two writes.
        by_epoch: count from the start of each epoch, and write at its end too, as in Pet.
        reduce, reduce_max: write the means and maxima over all ranks, as `LoggerHook`'s.

    Raises:
        TypeError, ValueError: `period` is no positive int, a writer is none, or as `LoggerHook`.
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
        several = writers if isinstance(writers, list | tuple) else [writers]
        self.writers: list[Any] = [build(w, WRITERS) if isinstance(w, Mapping) else w for w in several]
        for writer in self.writers:
            _check_writer(writer)
        self._facts: Callable[[], Run] | None = None

    def check(self, trainer: Trainer) -> None:
        """Learn what the writers are told of the run, and refuse a second one.

        Raises:
            ValueError: as `LoggerHook`.
        """
        super().check(trainer)
        self._facts = trainer.facts if trainer.rank == 0 else None

    def attach(self, bus: Bus) -> None:
        """Subscribe to the bus, and the writers too."""
        super().attach(bus)
        if self._facts is not None:
            for writer in self.writers:
                writer.attach(bus, self._facts)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Write at the period, in the last iteration, and in one that is to stop the run."""
        if self._by_epoch:
            super().after_train_iter(trainer, event)
        elif (
            (event.iter + 1) % self._interval == 0
            or trainer.metrics.crowded
            or event.iter + 1 == event.max_iters
        ):
            self._log(trainer)
        elif event.batch_idx + 1 == trainer.position.length:
            self._keep_rates(trainer)


def _check_writer(writer: object) -> None:
    if isinstance(writer, type):
        raise TypeError(f"expected a writer, got the class {writer.__name__}: write {writer.__name__}()")
    if not hasattr(writer, "attach") or not hasattr(writer, "write"):
        raise TypeError(
            f"expected a writer or a config dict(type=...), got {writer!r}: a writer of detectron2's kind, whose write() "
            "reads a global storage, becomes a subclass of eventloop.writers.Writer with write(event)"
        )
