"""The loops: they count, fetch, run and announce, and leave everything else to whoever subscribed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from eventloop.data.loader_info import persists, to_device
from eventloop.data.rng import random_state, set_random_state
from eventloop.events import (
    AfterTestEpoch,
    AfterTestIter,
    AfterTrainIter,
    AfterValEpoch,
    AfterValIter,
    BeforeTestIter,
    BeforeTrainIter,
    BeforeValIter,
)
from eventloop.training.device_clock import FORWARD_ENDS
from eventloop.training.evaluation import Evaluation, batch_size, before_drawing
from eventloop.training.schedule import Evaluate, Schedule
from eventloop.training.scopes import EpochScope, EvalScope
from eventloop.training.stopping import Pass
from eventloop.util.checks import length_of

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

_END = object()


class SkipIteration(Exception):
    """Raised by a handler of `before_train_iter`: the batch is skipped, no iteration is counted."""


class TrainLoop:
    """Epochs and iterations of one trainer. Plain generators: closing one has no effect of its own, the events
    that begin and end things are the business of `scopes`."""

    def __init__(self, trainer: Trainer, schedule: Schedule) -> None:
        self._trainer = trainer
        self._schedule = schedule

    def epochs(self) -> Iterator[int]:
        """Yield the index of each epoch that is left; an iteration-based run is one epoch."""
        trainer = self._trainer
        trainer.stops.edge()
        trainer.monitored.sanity_check()
        if not (trainer.by_epoch and trainer.batch_idx):
            self._tell_done()
            self._evaluate()  # what is due at the start, or was when a checkpoint was taken
        while not self._finished():
            began_at, began_in = trainer.iter, trainer.epoch
            yield trainer.epoch
            if trainer.stops.edge():
                return
            if trainer.iter == began_at and trainer.epoch == began_in:
                raise RuntimeError(
                    f"epoch {trainer.epoch} trained no iteration: inside `for epoch in trainer.epochs()` write "
                    "`for batch in trainer.batches(loader)`"
                )
            if trainer.by_epoch:
                self._evaluate()

    def iterations(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, announcing each iteration around the body of the caller's loop.

        Raises:
            ValueError: the loader is empty, or every batch of a pass was skipped.
        """
        # Spelled out where it is in each iteration: between two kernels the caches hold little of Python, and a call of
        # one of its functions costs a step up to a microsecond.
        trainer = self._trainer
        bus, clock, by_epoch = trainer.bus, trainer.clock, trainer.by_epoch
        wanted, health = bus.wanted(BeforeTrainIter, AfterTrainIter), bus.health
        polls = trainer.stops.together or not by_epoch
        length = length_of(loader) if by_epoch else None
        self._pass = Pass(trainer.stops, length, endless=length is None, trains=True)
        began = asked = clock.begin()
        between = 0.0  # handlers of what the background sent
        reading = self._batches(loader)
        for batch in reading:
            if trainer.asked_to_stop and trainer.stopping and trainer.position.at_end:
                return  # the loader has more batches than it said
            trainer.batch = batch if trainer.device is None else to_device(batch, trainer.device)
            started = fetched = perf_counter() - clock.excluded
            clock.data += fetched - asked
            trainer.outputs = None
            metrics = trainer.metrics
            metrics.phase = metrics.inside
            try:
                if wanted[BeforeTrainIter]:
                    before = BeforeTrainIter(
                        iter=trainer.iter, epoch=trainer.epoch, max_iters=trainer.max_iters,
                        max_epochs=trainer.max_epochs, batch_idx=trainer.batch_idx,
                    )  # fmt: skip
                    bus.emit(before, trainer)
                    started = perf_counter() - clock.excluded
            except SkipIteration:
                if self._skip():
                    _leave_open(trainer, reading)
                    return
                asked = perf_counter() - clock.excluded
                clock.hooks += asked - fetched
                continue
            if clock.device is not None:
                clock.device.begin(clock.iterations)
                started = perf_counter() - clock.excluded
            try:
                yield trainer.batch
            except GeneratorExit:
                self._left_within()
                raise
            ended = perf_counter() - clock.excluded
            if clock.device is not None:
                clock.device.mark(FORWARD_ENDS)
            clock.forward = ended - started
            if not trainer.steps_in_hook:
                trainer.within = "iter"
            if wanted[AfterTrainIter]:
                event = AfterTrainIter(
                    iter=trainer.iter, epoch=trainer.epoch, max_iters=trainer.max_iters,
                    max_epochs=trainer.max_epochs, batch_idx=trainer.batch_idx,
                )  # fmt: skip
                try:
                    bus.emit(event, trainer)
                except BaseException:
                    if trainer.within:  # its step was made: a run that goes on does not repeat it
                        trainer.completed_iteration()
                    raise
            handled = perf_counter() - clock.excluded - ended
            clock.hooks += between + (started - fetched) + handled - clock.backward - clock.optimizer
            trainer.completed_iteration()
            if clock.device is not None:
                clock.device.end()
            ended = perf_counter() - clock.excluded
            clock.commit(ended - began)
            between = 0.0
            if health.mail or health.errors:
                bus.poll(trainer)
                between = perf_counter() - clock.excluded - ended
            if (trainer.asked_to_stop or polls) and self._iteration_boundary():
                _leave_open(trainer, reading)
                return
            began, asked = ended, clock.begin()  # what was between belongs to the next one
        self._pass.end(trainer.batch_idx)

    def _left_within(self) -> None:
        """Tell the author of a hand-written loop what does not become of a body's outputs. To go on here would train on
        those of a body that raised: a generator that is closed does not learn why."""
        trainer = self._trainer
        if trainer.outputs is not None:
            step = "the optimizer makes no step for its outputs, and " if trainer.steps_in_hook else ""
            logger.warning(
                "iteration %d was left within its body, by break, return or an exception: %sit is not counted; "
                'trainer.stop("...") ends the loop once an iteration is done',
                trainer.iter,
                step,
            )

    def _skip(self) -> bool:
        """Count a batch that a handler did not want; True when the epoch ends here."""
        trainer = self._trainer
        trainer.batch_idx += 1
        trainer.metrics.in_iteration = False
        if trainer.by_epoch:
            self._pass.stops(trainer.batch_idx)
        return self._cut_short()

    def _iteration_boundary(self) -> bool:
        """Evaluate where a run measured in iterations says so; True when the epoch ends here."""
        trainer = self._trainer
        if self._pass.stops(trainer.batch_idx) or trainer.by_epoch or trainer.stopping:
            return self._cut_short()
        self._evaluate()
        return trainer.stopping or self._finished()

    def _cut_short(self) -> bool:
        """True when a stop ends the epoch before its end. One that has no batch left ends by itself, so that the
        loader's end is met, where samplers may draw once more."""
        trainer = self._trainer
        return trainer.stopping and not (trainer.by_epoch and trainer.position.at_end)

    def _finished(self) -> bool:
        trainer = self._trainer
        if trainer.stopping:
            return True
        if trainer.max_epochs is not None:
            return trainer.epoch >= trainer.max_epochs
        return trainer.iter >= (trainer.max_iters or 0)

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """One pass over the loader, from where a checkpoint was taken; pass after pass in an iteration-based run."""
        trainer = self._trainer
        while True:
            before = trainer.iter
            try:
                yield from trainer.position.open(loader)
            except RuntimeError as error:
                if not self._ends_without(error):
                    raise
                return
            if trainer.iter == before and not trainer.position.skipped:
                once = "; an iterator, as a generator is one, gives its batches once: pass a DataLoader, or a list"
                raise ValueError(
                    "a whole pass over the train loader trained no iteration: it is empty, or every batch was skipped"
                    f"{once if isinstance(loader, Iterator) else ''}"
                )
            if trainer.by_epoch:
                return

    def _ends_without(self, error: RuntimeError) -> bool:
        """True when a batch cannot be had, and none is needed: the signal that stops the run went to all processes, and
        ended the loader's workers. Other ranks may need one."""
        trainer = self._trainer
        if trainer.stops.together or not trainer.stopping:
            return False
        logger.warning("the run is stopping, and its loader gave no further batch: %s", error)
        return True

    def _evaluate(self) -> None:
        """Run the evaluations that are due now, less those that were completed before a checkpoint was taken."""
        trainer = self._trainer
        for mode in self._due():
            if not trainer.stopping:
                evaluate(trainer, mode, scheduled=True)
                trainer.stops.edge()

    def _due(self) -> list[Evaluate]:
        trainer = self._trainer
        done, total = (
            (trainer.epoch, trainer.max_epochs) if trainer.by_epoch else (trainer.iter, trainer.max_iters)
        )
        return self._schedule.after(done, total or 0)[trainer.position.evaluated :]

    def _tell_done(self) -> None:
        """Of a run that was resumed from its end, or begun once more: it looks like one that has trained."""
        trainer = self._trainer
        if trainer.stopping or not self._finished() or self._due():
            return
        unit, done = ("epochs", trainer.epoch) if trainer.by_epoch else ("iters", trainer.iter)
        logger.warning(
            "nothing is left to train: max_%s=%s, and %d are done; build the Trainer with more to go on",
            unit,
            getattr(trainer, f"max_{unit}"),
            done,
        )


LEFT_OUT_NAMES: WeakKeyDictionary[Trainer, set[str]] = WeakKeyDictionary()
"""What validations of a trainer returned that is no number, and was told."""
_EVENTS: dict[str, tuple[type[Any], type[Any], type[Any]]] = {
    "val": (BeforeValIter, AfterValIter, AfterValEpoch),
    "test": (BeforeTestIter, AfterTestIter, AfterTestEpoch),
}


def evaluate(trainer: Trainer, mode: Evaluate, *, scheduled: bool = False) -> dict[str, float]:
    """Validate or test once, with all events, and return the metrics; {} when a stop cut the pass short.

    Args:
        scheduled: the loop's own evaluation, which a run resumed from a checkpoint of it does not repeat.

    Raises:
        ValueError: the trainer has no loader for `mode`, or it is empty.
    """
    loader = check_loader(trainer, mode)
    with trainer.clock.excluding():
        put_back = before_drawing(trainer, loader) if scheduled else None
        with EvalScope(trainer, mode) as scope:
            _evaluate(trainer, mode, loader, scope, counts=scheduled)
        if put_back is not None and not scope.complete:  # it is run again, and draws the same once more
            put_back()
    return scope.metrics


def _evaluate(
    trainer: Trainer, mode: Evaluate, loader: Iterable[Any], scope: EvalScope, *, counts: bool
) -> None:
    batch, outputs, was_training = trainer.batch, trainer.outputs, trainer.model.training
    trainer.model.eval()
    try:
        with EpochScope(trainer, mode) as epoch:
            evaluation = Evaluation(trainer.evaluator, LEFT_OUT_NAMES.setdefault(trainer, set()))
            if _run_pass(trainer, mode, loader, evaluation):
                epoch.metrics = scope.metrics = evaluation.compute()
                epoch.complete = scope.complete = True
                trainer.position.evaluated += counts
    finally:
        trainer.model.train(was_training)
        trainer.batch, trainer.outputs = batch, outputs


def check_loader(trainer: Trainer, mode: str) -> Iterable[Any]:
    """The loader of a mode.

    Raises:
        ValueError: the trainer has none.
    """
    loaders = {"train": trainer.train_loader, "val": trainer.val_loader, "test": trainer.test_loader}
    if (loader := loaders[mode]) is None:
        does = "train" if mode == "train" else "evaluate"
        raise ValueError(f"the trainer has no {mode}_loader to {does} on: pass {mode}_loader=...")
    return loader


def _run_pass(trainer: Trainer, mode: Evaluate, loader: Iterable[Any], evaluation: Evaluation) -> bool:
    before, after, _ = _EVENTS[mode]
    bus = trainer.bus
    passing, batches = Pass(trainer.stops, length_of(loader)), 0
    reading = _opened(trainer, loader)
    for batch_idx, batch in enumerate(reading):
        trainer.batch = to_device(batch, trainer.device)
        if bus.wants(before):
            trainer.announce(before, batch_idx=batch_idx)
        with torch.no_grad():
            trainer.outputs = trainer.val_step(trainer.batch)
        evaluation.add(trainer.outputs, batch_size(trainer.batch))
        if bus.wants(after):
            trainer.announce(after, batch_idx=batch_idx)
        batches += 1
        bus.poll(trainer)
        if passing.stops(batches):
            _leave_open(trainer, reading)
            return False
    passing.end(batches)
    if not batches:
        raise ValueError(f"the {mode} loader is empty: a pass over it gave no batch")
    return True


def _opened(trainer: Trainer, loader: Iterable[Any]) -> Iterator[Any]:
    """A pass. Workers that persist draw their seed in the first one of a process, which in a resumed run is another one:
    the training gets the same random numbers with it and without."""
    if not persists(loader):
        return iter(loader)
    trains_with = random_state(trainer.loader)
    iterator = iter(loader)
    set_random_state(trainer.loader, trains_with)
    return iterator


def _leave_open(trainer: Trainer, reading: Iterator[Any]) -> None:
    """Let go of a pass that is cut short only at the end of the run: a DataLoader waits for each of its workers then, up
    to five seconds, and a signal's grace may not last until the state is saved."""
    trainer.during_run.callback(lambda: reading)
