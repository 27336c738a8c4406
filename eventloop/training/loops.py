"""Run the epochs and iterations of a training: fetch batches, emit events, count. Hooks do the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from eventloop.data.loader_info import to_device
from eventloop.data.position import batches_of_update
from eventloop.evaluation.schedule import Evaluate, Schedule
from eventloop.stops.stopping import Pass
from eventloop.training.evaluation_loop import evaluate
from eventloop.training.protocols import LoopTrainer
from eventloop.training.scopes import retain_until_end

logger = logging.getLogger("eventloop")

_NONE = object()


class TrainLoop:
    """The epochs and iterations of one training, as generators.

    Closing a generator emits no event: the classes of `scopes` emit the events that begin and end a run, its
    parts and its epochs.
    """

    def __init__(self, trainer: LoopTrainer, schedule: Schedule) -> None:
        self._trainer = trainer
        self._schedule = schedule
        self._pass: Iterator[Any] = iter(())

    def epochs(self) -> Iterator[int]:
        """Yield the index of each remaining epoch, and run the evaluations in between.

        A run measured in iterations is one epoch.
        """
        trainer = self._trainer
        trainer.stops.edge()
        trainer.commands.begin_training()
        total = (trainer.max_epochs if trainer.by_epoch else trainer.max_iters) or 0
        trainer.monitored.sanity_check(validates=self._schedule.validates(total))
        if not (trainer.by_epoch and trainer.position.batches):
            self._warn_if_done()
            self._evaluate()  # those due at the start, or when the checkpoint was taken
        while not self._finished():
            began_at, began_in = trainer.iter, trainer.epoch
            yield trainer.epoch
            if self._epoch_edge():
                return
            if trainer.iter == began_at and trainer.epoch == began_in:
                raise RuntimeError(
                    f"epoch {trainer.epoch} trained no iteration: inside `for epoch in trainer.epochs()` "
                    "write `for batch in trainer.batches(loader)`"
                )
            if trainer.by_epoch:
                self._evaluate()

    def _epoch_edge(self) -> bool:
        """Apply commands between two epochs, and return whether a stop ends the run.

        Several ranks do not agree after the last batch of an epoch, so epochs of one batch have no other
        place. A run measured in iterations has a boundary after each.
        """
        trainer = self._trainer
        trainer.commands.repeat_due()
        return trainer.stops.edge("all" if trainer.by_epoch else "program")

    def has_pass(self) -> bool:
        """Return whether a hand-written loop may begin a pass; False once all iterations of a run are done.

        Raises:
            RuntimeError: the pass is outside of a run, or one more than the run has epochs.
        """
        trainer = self._trainer
        if not trainer.running:
            raise RuntimeError(
                "trainer.batches belongs inside `for epoch in trainer.epochs()`, which begins the run"
            )
        if not self._finished() or trainer.stopping:
            return True
        if trainer.by_epoch:
            raise RuntimeError(
                f"each call of trainer.batches is an epoch: expected at most max_epochs={trainer.max_epochs} "
                "of them, got one more; count the passes in max_epochs, or call it once for each epoch that "
                "trainer.epochs() yields"
            )
        return False

    def iterations(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, and emit the events of an iteration around each.

        The caller runs the forward pass between two batches. With `unit="update"` the events are around the
        batches of one optimizer step.

        Raises:
            ValueError: the loader is empty, or every batch of a pass was skipped.
        """
        trainer = self._trainer
        counting, accumulator = trainer.counting, trainer.counting.accumulator
        length = counting.iterations(trainer.limits.length("train", loader)) if trainer.by_epoch else None
        trainer.passing = passing = Pass(trainer.stops, length, endless=length is None, trains=True)
        reading = self._batches(loader)
        trainer.clock.begin_pass()
        if trainer.position.to_skip and self._skip(reading):
            return
        for batch in reading:
            if trainer.stopping and trainer.position.at_end:
                return  # the loader has more batches than its length
            if accumulator is not None:
                counting.begin(accumulator, trainer.position.left)
            if trainer.begin_iter(to_device(batch, trainer.device)):
                yield from self._body(trainer.batch)
                if accumulator is not None:
                    for further in batches_of_update(trainer, accumulator, self._pass):
                        yield from self._body(further)
                trainer.end_iter(trainer.outputs)
                ends = self._iteration_boundary()
            else:
                ends = self._cut_short()
            if ends:
                self._exit_pass(reading)
                return
        passing.end(counting.iterations(trainer.position.batches) or 0)

    def _skip(self, reading: Iterator[Any]) -> bool:
        """Skip the batches that a rollback leaves out; return whether a stop ends the epoch meanwhile."""
        trainer = self._trainer
        while trainer.position.to_skip and next(reading, _NONE) is not _NONE:
            trainer.skip_iter()
            if self._cut_short():
                self._exit_pass(reading)
                return True
        return False

    def _exit_pass(self, reading: Iterator[Any]) -> None:
        """Leave an unfinished pass; its workers end at once only if the run goes back."""
        if not self._trainer.stops.goes_back:
            retain_until_end(self._trainer, reading)

    def _body(self, batch: Any) -> Iterator[Any]:
        """Yield the batch to the caller's loop body, and log a warning if the loop ends within the body.

        A closed generator cannot see why it was closed, so `trainer.outputs` may come from a body that raised
        an error. The iteration is therefore not trained on.
        """
        try:
            yield batch
        except GeneratorExit:
            trainer = self._trainer
            if trainer.outputs is not None:
                step = "the optimizer makes no step for its outputs, and " if trainer.steps_in_hook else ""
                logger.warning(
                    "iteration %d was left within its body, by break, return or an exception: %sit is not "
                    "counted; "
                    'trainer.stop("...") ends the loop once an iteration is done',
                    trainer.iter,
                    step,
                )
            raise

    def _iteration_boundary(self) -> bool:
        """Run the evaluations that are due after an iteration, and return whether the epoch ends here.

        Only a run measured in iterations evaluates at this place.
        """
        trainer = self._trainer
        if trainer.by_epoch or trainer.stopping:
            return self._cut_short()
        self._evaluate()
        trainer.clock.begin()
        return trainer.stopping or self._finished()

    def _cut_short(self) -> bool:
        """Return whether a stop ends the epoch early.

        An epoch without further batches is not ended here: its pass goes on to the end of the loader, at
        which samplers may draw random numbers once more.
        """
        trainer = self._trainer
        ends = trainer.by_epoch and trainer.position.at_end and not trainer.stops.goes_back
        return trainer.stopping and not ends

    def _finished(self) -> bool:
        trainer = self._trainer
        if trainer.stopping:
            return True
        if trainer.max_epochs is not None:
            return trainer.epoch >= trainer.max_epochs
        return trainer.iter >= (trainer.max_iters or 0)

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a pass; in a run measured in iterations, of one pass after another.

        A resumed run begins at the position in the checkpoint.
        """
        trainer = self._trainer
        while True:
            before = trainer.iter
            try:
                self._pass = trainer.position.open(loader)
                yield from self._pass
            except RuntimeError as error:
                if not self._ends_without(error):
                    raise
                return
            if trainer.iter == before and not trainer.position.skipped:
                once = "; an iterator gives its batches only once: pass a DataLoader, or a list"
                raise ValueError(
                    "a whole pass over the train loader trained no iteration: it is empty, or every batch "
                    f"was skipped{once if isinstance(loader, Iterator) else ''}"
                )
            if trainer.by_epoch:
                return

    def _ends_without(self, error: RuntimeError) -> bool:
        """Return whether an error of the loader is ignored, because the run is stopping.

        The signal that stops the run may have ended the loader's workers, too. With several ranks the error
        is raised, because the other ranks may need another batch.
        """
        trainer = self._trainer
        if trainer.stops.together or not trainer.stopping:
            return False
        logger.warning("the run is stopping, and its loader gave no further batch: %s", error)
        return True

    def _evaluate(self) -> None:
        """Run the evaluations that are due now, except those that a resumed checkpoint already includes."""
        trainer = self._trainer
        for mode in self._due():
            if not trainer.stopping:
                evaluate(trainer, mode, scheduled=True)
                trainer.stops.edge("program")

    def _due(self) -> list[Evaluate]:
        trainer = self._trainer
        done, total = (
            (trainer.epoch, trainer.max_epochs) if trainer.by_epoch else (trainer.iter, trainer.max_iters)
        )
        return self._schedule.after(done, total or 0)[trainer.position.evaluated :]

    def _warn_if_done(self) -> None:
        """Warn if no iteration is left, as a run resumed from its end looks like one that has trained."""
        trainer = self._trainer
        if trainer.stopping or not self._finished():
            return
        unit, done = ("epochs", trainer.epoch) if trainer.by_epoch else ("iters", trainer.iter)
        logger.warning(
            "nothing is left to train: max_%s=%s, and %d are done%s; build the Trainer with more to go on",
            unit,
            getattr(trainer, f"max_{unit}"),
            done,
            ", and only the evaluation after them is missing" if self._due() else "",
        )
