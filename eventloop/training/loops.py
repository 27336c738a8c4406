"""Run the epochs and iterations of a training: fetch batches, emit events and count.

Hooks do the rest: the optimizer's step, logging and checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from eventloop.data.loader_info import to_device
from eventloop.data.position import batches_of_update
from eventloop.evaluation.compiled_outputs import begin_compiled_step
from eventloop.evaluation.schedule import Evaluate, Schedule
from eventloop.stops.stopping import Pass
from eventloop.training.evaluation_loop import evaluate
from eventloop.training.protocols import LoopTrainer
from eventloop.training.scopes import retain_until_end

logger = logging.getLogger("eventloop")

_NO_BATCH = object()


class TrainLoop:
    """The epochs and iterations of one training, as generators.

    The generators emit only the events of iterations. The context managers in `scopes` emit the events that
    begin and end a run, a training and an epoch, also if a generator is closed early.
    """

    def __init__(self, trainer: LoopTrainer, schedule: Schedule) -> None:
        self._trainer = trainer
        self._schedule = schedule
        self._pass: Iterator[Any] = iter(())

    def epochs(self) -> Iterator[int]:
        """Yield the index of each remaining epoch, and run the evaluations between epochs.

        If `max_iters` measures the run, it is one epoch.

        Raises:
            RuntimeError: a hand-written loop has trained no iteration in an epoch.
        """
        trainer = self._trainer
        trainer.stops.edge()
        trainer.commands.begin_training()
        total = (trainer.max_epochs if trainer.by_epoch else trainer.max_iters) or 0
        trainer.monitored.sanity_check(validates=self._schedule.validates(total))
        if not (trainer.by_epoch and trainer.position.batches):
            self._warn_if_done()
            self._evaluate()  # before the first iteration, or those that the resumed checkpoint lacks
        while not self._finished():
            iter_before, epoch_before = trainer.iter, trainer.epoch
            yield trainer.epoch
            if self._epoch_edge():
                return
            if trainer.iter == iter_before and trainer.epoch == epoch_before:
                raise RuntimeError(
                    f"epoch {trainer.epoch} trained no iteration: inside `for epoch in trainer.epochs()` "
                    "write `for batch in trainer.batches(loader)`"
                )
            if trainer.by_epoch:
                self._evaluate()

    def _epoch_edge(self) -> bool:
        """Apply commands after an epoch, and return whether a stop ends the run.

        A run measured in epochs applies all commands here, because ranks exchange none after the last batch
        of an epoch, which may be the only one. A run measured in iterations applies commands from outside
        after each iteration, and here only those of the program itself.
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
        """Yield the batches of an epoch, with the events of an iteration around each.

        The caller runs the forward pass of a batch before it asks for the next one. With `unit="update"` the
        events are around all batches of one optimizer step.

        Raises:
            ValueError: the loader is empty, or every batch of a pass was skipped.
        """
        trainer = self._trainer
        counting, accumulator = trainer.counting, trainer.counting.accumulator
        length = counting.iterations(trainer.limits.length("train", loader)) if trainer.by_epoch else None
        trainer.passing = passing = Pass(trainer.stops, length, endless=length is None, trains=True)
        batches = self._batches(loader)
        trainer.clock.begin_pass()
        if trainer.position.to_skip and self._skip(batches):
            return
        for batch in batches:
            if trainer.stopping and trainer.position.at_end:
                return  # a stop was requested in the last batch by `len(loader)`, but the loader has more
            if accumulator is not None:
                counting.begin(accumulator, trainer.position.left)
            if trainer.begin_iter(to_device(batch, trainer.device)):
                yield from self._body(trainer.batch)
                if accumulator is not None:
                    for next_batch in batches_of_update(trainer, accumulator, self._pass):
                        if trainer.compiled:
                            begin_compiled_step()
                        yield from self._body(next_batch)
                trainer.end_iter(trainer.outputs)
                ends = self._iteration_boundary()
            else:
                ends = self._cut_short()
            if ends:
                self._exit_pass(batches)
                return
        passing.end(counting.iterations(trainer.position.batches) or 0)

    def _skip(self, batches: Iterator[Any]) -> bool:
        """Skip the batches that a rollback leaves out; return whether a stop ends the epoch meanwhile."""
        trainer = self._trainer
        while trainer.position.to_skip and next(batches, _NO_BATCH) is not _NO_BATCH:
            trainer.skip_iter()
            if self._cut_short():
                self._exit_pass(batches)
                return True
        return False

    def _exit_pass(self, batches: Iterator[Any]) -> None:
        """Leave an unfinished pass over the loader, whose worker processes end with the run.

        After a rollback they end at once, because the run goes on with another pass.
        """
        if not self._trainer.stops.goes_back:
            retain_until_end(self._trainer, batches)

    def _body(self, batch: Any) -> Iterator[Any]:
        """Yield the batch to the caller's loop body, and log a warning if the loop is left within the body.

        The optimizer makes no step for this iteration: a generator cannot find out why it was closed, and the
        body may have raised an error after it set `trainer.outputs`.
        """
        try:
            yield batch
        except GeneratorExit:
            trainer = self._trainer
            if trainer.outputs is not None:
                no_step = "the optimizer makes no step for its outputs, and " if trainer.steps_in_hook else ""
                logger.warning(
                    "iteration %d was left within its body, by break, return or an exception: %sit is not "
                    "counted; "
                    'trainer.stop("...") ends the loop once an iteration is done',
                    trainer.iter,
                    no_step,
                )
            raise

    def _iteration_boundary(self) -> bool:
        """Run the evaluations that are due after an iteration, and return whether the epoch ends here.

        A run measured in epochs evaluates only between epochs.
        """
        trainer = self._trainer
        if trainer.by_epoch or trainer.stopping:
            return self._cut_short()
        self._evaluate()
        trainer.clock.begin()
        return trainer.stopping or self._finished()

    def _cut_short(self) -> bool:
        """Return whether a stop ends the epoch early.

        After the last batch of an epoch the answer is False: the pass over the loader then goes on to its
        end, where samplers may draw random numbers once more, as without a stop.
        """
        trainer = self._trainer
        is_complete = trainer.by_epoch and trainer.position.at_end and not trainer.stops.goes_back
        return trainer.stopping and not is_complete

    def _finished(self) -> bool:
        """Return whether all epochs or iterations of the run are done, or a stop ends it."""
        trainer = self._trainer
        if trainer.stopping:
            return True
        if trainer.max_epochs is not None:
            return trainer.epoch >= trainer.max_epochs
        return trainer.iter >= (trainer.max_iters or 0)

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a pass over the loader; in a run measured in iterations, of endless passes.

        A resumed run begins at the position in the checkpoint.

        Raises:
            ValueError: no iteration was trained in a pass.
        """
        trainer = self._trainer
        while True:
            iter_before = trainer.iter
            try:
                self._pass = trainer.position.open(loader)
                yield from self._pass
            except RuntimeError as error:
                if not self._is_ignored(error):
                    raise
                return
            if trainer.iter == iter_before and not trainer.position.skipped:
                advice = "; an iterator gives its batches only once: pass a DataLoader, or a list"
                raise ValueError(
                    "a whole pass over the train loader trained no iteration: it is empty, or every batch "
                    f"was skipped{advice if isinstance(loader, Iterator) else ''}"
                )
            if trainer.by_epoch:
                return

    def _is_ignored(self, error: RuntimeError) -> bool:
        """Return whether to ignore an error of the loader because the run is stopping; log it in that case.

        The signal that stops the run may have ended the loader's workers, too. With several ranks no error is
        ignored, because the other ranks may wait for another batch of this rank.
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
        """Return the evaluations that the schedule has now, without those that were made already."""
        trainer = self._trainer
        if trainer.by_epoch:
            completed, total = trainer.epoch, trainer.max_epochs
        else:
            completed, total = trainer.iter, trainer.max_iters
        return self._schedule.after(completed, total or 0)[trainer.position.evaluated :]

    def _warn_if_done(self) -> None:
        """Log a warning if no iteration is left to train, as after a resume from the end of a run."""
        trainer = self._trainer
        if trainer.stopping or not self._finished():
            return
        unit, completed = ("epochs", trainer.epoch) if trainer.by_epoch else ("iters", trainer.iter)
        logger.warning(
            "nothing is left to train: max_%s=%s, and %d are done%s; build the Trainer with more to go on",
            unit,
            getattr(trainer, f"max_{unit}"),
            completed,
            ", and only the evaluation after them is missing" if self._due() else "",
        )
