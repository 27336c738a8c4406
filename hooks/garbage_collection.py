"""A hook that runs Python's garbage collector between the steps of a training, never within one."""

from __future__ import annotations

import atexit
import gc
import os
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import nn
from torch.nn.parameter import is_lazy

from eventloop.bus import Bus
from eventloop.events import (
    AfterRun,
    AfterTest,
    AfterTrain,
    AfterVal,
    BeforeTrain,
)
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook, on
from eventloop.state.tensors import bytes_of
from eventloop.util.checks import check_bools, positive

if TYPE_CHECKING:
    from eventloop.hooks.points import IterEvent
    from eventloop.training.trainer import Trainer

YOUNG, MIDDLE, ALL = range(3)
"""Generations of Python's collector; collecting a generation includes the younger ones."""
FROZEN_AT_START = 1000
"""Frozen objects up to this number are Python's own: Python 3.12 starts with 375."""
LARGE = 16 << 20
"""Bytes of a model that are worth the time of a full collection, if they may be garbage."""

_switched_off: WeakSet[GarbageCollectionHook] = WeakSet()
"""The hooks that have switched the automatic collection off in this process."""
_trained: WeakSet[Trainer] = WeakSet()
"""The trainers that have trained in this process. The parts of a trainer refer to each other, in cycles."""


class GarbageCollectionHook(Hook):
    """Collect Python's garbage at the ends of iterations and after evaluations.

        default_hooks=dict(garbage_collection=dict(interval=50))
        default_hooks=dict(garbage_collection=None)    # Python decides when to collect

    During a training nothing is collected automatically. Left alone, Python walks all objects of the process
    whenever their number has grown by a quarter. That takes about 100 ms within an arbitrary step, and within
    a different step on each rank, so that all ranks wait each time. With this hook all ranks collect after
    the same iterations.

    Objects that exist after the first `interval` iterations are frozen (`gc.freeze`), so a full collection
    later looks only at newer objects, in less than a millisecond. Garbage from before the training is frozen
    with them: a reference cycle that Python had not freed by then, or that is dropped in the first `interval`
    iterations, is kept until the training has ended. To free it call `gc.collect()` before `train()`, which
    takes 100 to 300 ms. A training begins with that only if an earlier trainer of this process still exists
    and its model has more than 16 MiB, as between the folds of a cross-validation.

    Reference cycles that steps leave behind are freed after `interval` iterations. Cycles still in use at
    that time are freed after 10 or 100 times as many iterations, or after an evaluation. All other objects
    are freed at once, because only cycles need a collector. Use a smaller interval for cycles that hold large
    tensors.

    After the training, for whatever reason it ended, collection is automatic again and nothing is frozen. The
    hook does nothing where the automatic collection was off before. If the program has frozen objects itself,
    the hook freezes and unfreezes nothing. Processes forked during the training, such as loader workers,
    collect automatically.

    Args:
        interval: iterations between two collections of the youngest objects. Every tenth one includes the
            middle generation, every hundredth all; batches of an evaluation are counted in the same way.
        freeze: False never freezes, so each full collection looks at all objects.

    Raises:
        TypeError, ValueError: `interval` is not a positive int, or `freeze` is not True or False.
    """

    priority = Priority.LOWEST

    def __init__(self, interval: int = 10, freeze: bool = True) -> None:
        positive("interval", interval)
        check_bools(freeze=freeze)
        self._interval, self._freeze = interval, freeze
        self._will_freeze = self._unfreezes = False

    def attach(self, bus: Bus) -> None:
        """Subscribe the event methods, with `after_iter` only at every `interval`-th iteration."""
        super().attach(bus)
        if events := self._points.get("after_iter"):
            bus.off(self.after_iter)
            interval, budget_us = self._interval, self.budget_us
            bus.subscribe(
                self.after_iter, *events, priority=self.priority, every=interval, budget_us=budget_us
            )

    @property
    def active(self) -> bool:
        """True while this hook controls the collector."""
        return self in _switched_off

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Switch the automatic collection off; free what a large earlier training has left."""
        if not gc.isenabled():
            return
        self._will_freeze, self._unfreezes = self._freeze and _nothing_is_frozen(), False
        _switched_off.add(self)  # first: after a Ctrl-C in between the hook must still switch it on again
        gc.disable()
        if any(_bytes_of(each.model) > LARGE for each in list(_trained) if each is not trainer):
            gc.collect()  # garbage that gets frozen would stay in memory, its optimizer's state too
        _trained.add(trainer)

    def after_iter(self, trainer: Trainer, event: IterEvent) -> None:
        """Collect the generation that is due after this iteration or batch."""
        if not self.active:
            return
        training = event.mode == "train"
        if training and self._will_freeze:
            self._freeze_lasting()
            return
        turn = (event.iter if training else event.batch_idx) // self._interval + 1
        self._collect(ALL if turn % 100 == 0 else MIDDLE if turn % 10 == 0 else YOUNG)

    def after_val(self, trainer: Trainer, event: AfterVal) -> None:
        """Run a full collection of the objects that the validation left."""
        self._collect(ALL)

    def after_test(self, trainer: Trainer, event: AfterTest) -> None:
        """Run a full collection of the objects that the test left."""
        self._collect(ALL)

    @on(priority=Priority.HIGHEST)
    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Switch the automatic collection on again, and unfreeze."""
        self._restore()

    @on(priority=Priority.HIGHEST)
    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Switch the automatic collection on again if a Ctrl-C prevented this hook's `after_train`."""
        self._restore()

    def _freeze_lasting(self) -> None:
        """Freeze the objects that exist after the first iterations, such as the optimizer's state."""
        self._will_freeze = False
        if _nothing_is_frozen():  # else other code froze objects meanwhile
            # MIDDLE reaches all objects since `before_train`, as only YOUNG was collected until now
            gc.collect(MIDDLE)
            self._unfreezes = True
            gc.freeze()

    def _collect(self, generation: int) -> None:
        if self.active:
            # until the freeze only YOUNG: garbage that moved to the oldest generation would be frozen
            gc.collect(YOUNG if self._will_freeze else generation)

    def _restore(self) -> None:
        if self.active:
            gc.enable()
            if self._unfreezes:
                gc.unfreeze()
            _switched_off.discard(self)


def _bytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return bytes_of(p for p in model.parameters() if not is_lazy(p))


def _nothing_is_frozen() -> bool:
    """Return whether no code but Python's own has frozen objects; counting them takes up to 30 ms."""
    return gc.get_freeze_count() <= FROZEN_AT_START


def _collect_in_child() -> None:
    """Switch the automatic collection on in a forked child, which inherits the setting without the hook."""
    if _switched_off:
        _switched_off.clear()
        gc.enable()


@atexit.register
def _restore_all() -> None:
    """Switch the collection on again at exit, for a training on a daemon thread that has not ended.

    The interpreter frees only objects that are not frozen, and libraries such as Triton print the objects
    that are left.
    """
    for hook in list(_switched_off):
        hook._restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collect_in_child)
