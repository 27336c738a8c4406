"""When Python's garbage collector runs: between the steps of a training, and never in the middle of one."""

from __future__ import annotations

import atexit
import gc
import os
from time import perf_counter
from typing import TYPE_CHECKING
from weakref import WeakSet

from eventloop.bus import Bus
from eventloop.events import (
    AfterRun,
    AfterTest,
    AfterTrain,
    AfterTrainEpoch,
    AfterVal,
    BeforeTest,
    BeforeTrain,
    BeforeVal,
)
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook, on
from eventloop.util.checks import check_bools, positive

if TYPE_CHECKING:
    from eventloop.hooks.points import IterEvent
    from eventloop.training.trainer import Trainer

YOUNG, MIDDLE, ALL = range(3)
"""Python's generations; a collection of one takes the younger ones too."""
RATIO = 10
"""Collections of one generation to one of the next older, as in Python's own thresholds."""
CHEAP_SECONDS = 0.002
"""A collection that takes no longer may be made whenever it is due."""
SHARE = 0.01
"""Of the time, at the most, for collections that take longer."""
FROZEN_AT_START = 1000
"""Objects that may be frozen although nobody froze any: Python 3.12 starts with 375."""

_switched_off: WeakSet[GarbageCollectionHook] = WeakSet()
"""Those that have the automatic collection off in this process."""


class GarbageCollectionHook(Hook):
    """Collects Python's garbage at the ends of iterations, at the ends of epochs, and before and after
    evaluations. During a training nothing is collected automatically.

        default_hooks=dict(garbage_collection=dict(interval=50))
        default_hooks=dict(garbage_collection=None)    # leave it to Python

    Left alone, Python walks all objects of the process whenever their number has grown by a quarter: some 100 ms in
    the middle of whichever step it happens to be, and of another step on each rank, where all others wait for it.
    Here every rank collects after the same iterations. The only long collection is made before the first of them.
    What exists when the first `interval` iterations are done is frozen (`gc.freeze`), so that a full collection
    afterwards looks only at what came later, in less than a millisecond. Where nothing is frozen they stay long, and
    are made only as often as takes a hundredth of the time. A cycle that is older than the training and is dropped in
    its first `interval` iterations is frozen too, and freed when the training ends.

    Reference cycles that steps leave behind are freed after `interval` iterations; those that were still in use then,
    after 10 or 100 times as many, after an evaluation, or at the end of an epoch, unless everything was looked at less
    than ten intervals before. Everything else is freed at once, as always: only cycles need a collector. One with
    large tensors in it is worth a smaller interval.

    After the training, however it ended, collection is automatic again and nothing is frozen. Nothing is done where
    the automatic collection was off before; where somebody had frozen objects, nothing is frozen in addition, or
    thawed. Processes forked meanwhile, such as loader workers, collect automatically.

    Args:
        interval: iterations from one collection of the youngest objects to the next. Each tenth collects the middle
            generation too, each hundredth all; batches of an evaluation are counted in the same way.
        freeze: False looks at all objects in each full collection.

    Raises:
        TypeError, ValueError: `interval` is no positive int, or `freeze` neither True nor False.
    """

    priority = Priority.LOWEST

    def __init__(self, interval: int = 10, freeze: bool = True) -> None:
        positive("interval", interval)
        check_bools(freeze=freeze)
        self._interval, self._freeze = interval, freeze
        self._settled = False
        """What lasts is frozen, or is not to be: full collections cost what they cost."""
        self._thaw = False
        self._looked_at_all = 0
        """The iteration after which everything was, or was to be, looked at last."""
        self._not_before = [0.0, 0.0, 0.0]
        """When the next collection of each generation may be, for those that take long."""

    def attach(self, bus: Bus) -> None:
        """Subscribe, to iterations at the interval only."""
        super().attach(bus)
        if events := self._points.get("after_iter"):
            bus.off(self.after_iter)
            interval, budget_us = self._interval, self.budget_us
            bus.subscribe(
                self.after_iter, *events, priority=self.priority, every=interval, budget_us=budget_us
            )

    @property
    def active(self) -> bool:
        """True while this hook decides what is collected."""
        return self in _switched_off

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Switch the automatic collection off, unless it is, and look at everything while no step waits for it."""
        if not gc.isenabled():
            return
        self._thaw, self._looked_at_all = False, event.iter
        # frozen objects are counted one by one: some 30 ms where half a torch is frozen
        self._settled = not self._freeze or gc.get_freeze_count() > FROZEN_AT_START
        _switched_off.add(self)  # first: a Ctrl-C in between must find what is to be undone
        gc.disable()
        if not self._settled:
            gc.collect()  # what is frozen as garbage would stay

    def after_iter(self, trainer: Trainer, event: IterEvent) -> None:
        """Collect what is due."""
        if not self.active:
            return
        training = event.mode == "train"
        turn = (event.iter if training else event.batch_idx) // self._interval + 1
        if training and not self._settled:
            self._settle()
            return
        if training and turn % RATIO**2 == 0:
            self._looked_at_all = event.iter + 1
        self._collect(ALL if turn % RATIO**2 == 0 else MIDDLE if turn % RATIO == 0 else YOUNG)

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Collect everything, in epochs that are not too short for that."""
        self._collect_at_edge(event.iter)

    def before_val(self, trainer: Trainer, event: BeforeVal) -> None:
        """The same, so that the evaluation has the memory for itself."""
        self._collect_at_edge(event.iter)

    def after_val(self, trainer: Trainer, event: AfterVal) -> None:
        """Collect everything that the evaluation left."""
        self._looked_at_all = event.iter
        self._collect(ALL)

    def before_test(self, trainer: Trainer, event: BeforeTest) -> None:
        """The same."""
        self._collect_at_edge(event.iter)

    def after_test(self, trainer: Trainer, event: AfterTest) -> None:
        """Collect everything that the test left."""
        self._looked_at_all = event.iter
        self._collect(ALL)

    @on(priority=Priority.HIGHEST)
    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Leave it to Python again."""
        self._restore()

    @on(priority=Priority.HIGHEST)
    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """The same, should a Ctrl-C have come between `after_train` and this hook."""
        self._restore()

    def _settle(self) -> None:
        """The first iterations have made what lasts, the optimizer's state above all: never look at it again."""
        self._settled = True
        if gc.get_freeze_count() > FROZEN_AT_START:
            return  # somebody was faster
        # enough for all that came since `before_train` looked at everything: only the youngest were collected since
        gc.collect(MIDDLE)
        self._thaw = True
        gc.freeze()

    def _collect_at_edge(self, done: int) -> None:
        """Collect everything after so many iterations; the younger generations where that was done not long ago."""
        if done - self._looked_at_all < RATIO * self._interval:
            self._collect(MIDDLE)
            return
        self._looked_at_all = done
        self._collect(ALL)

    def _collect(self, generation: int) -> None:
        """Collect a generation, or a younger one where it would take too much of the time."""
        if not self.active:
            return
        if not self._settled:
            generation = YOUNG  # no older, or it would be frozen as garbage
        began = perf_counter()
        while generation > YOUNG and began < self._not_before[generation]:
            generation -= 1
        gc.collect(generation)
        if (took := perf_counter() - began) > CHEAP_SECONDS:
            self._not_before[generation] = began + took / SHARE

    def _restore(self) -> None:
        if self.active:
            gc.enable()
            if self._thaw:
                gc.unfreeze()
            _switched_off.discard(self)


def _collect_in_child() -> None:
    """A forked child has the training's setting, and nobody who collects."""
    if _switched_off:
        _switched_off.clear()
        gc.enable()


@atexit.register
def _restore_all() -> None:
    """A daemon thread's training does not end before the interpreter, which frees what is not frozen; libraries print
    what of theirs is left then, as Triton does."""
    for hook in list(_switched_off):
        hook._restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collect_in_child)
