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
"""Generations for `gc.collect`, which collects a generation and the younger ones."""
FROZEN_AT_START = 1000
"""The most objects that Python itself may have frozen at its start; Python 3.12 freezes 375."""
LARGE = 16 << 20
"""Bytes of an earlier model that justify a full collection (100 to 300 ms) before a training."""

_active_hooks: WeakSet[GarbageCollectionHook] = WeakSet()
"""The hooks that have switched the automatic collection off in this process."""
_trainers: WeakSet[Trainer] = WeakSet()
"""The trainers that have trained in this process and are not freed; reference cycles may keep them alive."""


class GarbageCollectionHook(Hook):
    """Collect Python's garbage at the ends of iterations and after evaluations.

        default_hooks=dict(garbage_collection=dict(interval=50))
        default_hooks=dict(garbage_collection=None)    # Python decides when to collect

    During a training Python's automatic collection is switched off. Python would walk all objects of the
    process whenever their number has grown by a quarter. That takes about 100 ms within an arbitrary step,
    and within a different step on each rank, so that all ranks wait each time. With this hook all ranks
    collect after the same iterations.

    Objects that exist after the first `interval` iterations are frozen (`gc.freeze`), so a later full
    collection walks only newer objects, in less than a millisecond. Reference cycles that have become garbage
    before the freeze, and that Python has not freed, are frozen too and stay in memory until the training has
    ended. To free them call `gc.collect()` before `train()`, which takes 100 to 300 ms. The hook makes this
    call itself only if an earlier trainer of this process still exists and its model has more than 16 MiB, as
    between the folds of a cross-validation.

    Reference cycles that steps leave behind are freed after `interval` iterations. Cycles still in use at
    that time are freed after 10 or 100 times as many iterations, or after an evaluation. All other objects
    are freed at once, because only cycles need a collector. Use a smaller interval for cycles that hold large
    tensors.

    After the training, for whatever reason it ended, collection is automatic again and nothing is frozen. The
    hook does nothing if the program had switched the automatic collection off. If the program has frozen
    objects itself, the hook freezes and unfreezes nothing. Processes forked during the training, such as
    loader workers, collect automatically.

    Args:
        interval: iterations between two collections of the youngest generation. Every tenth collection
            includes the middle generation, every hundredth all objects. In an evaluation batches are counted.
        freeze: False never freezes, so each full collection walks all objects.

    Raises:
        TypeError, ValueError: `interval` is not a positive int, or `freeze` is not True or False.
    """

    priority = Priority.LOWEST

    def __init__(self, interval: int = 10, freeze: bool = True) -> None:
        positive("interval", interval)
        check_bools(freeze=freeze)
        self._interval, self._freeze = interval, freeze
        self._will_freeze = self._has_frozen = False  # in this training

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
        return self in _active_hooks

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Switch the automatic collection off, and collect if a large earlier trainer still exists."""
        if not gc.isenabled():
            return
        self._will_freeze, self._has_frozen = self._freeze and _nothing_is_frozen(), False
        # before gc.disable: a Ctrl-C between the two lines must not leave the collection off for ever
        _active_hooks.add(self)
        gc.disable()
        # no local variable may refer to an earlier model here: the collection would not free it
        if any(_bytes_of(other.model) > LARGE for other in list(_trainers) if other is not trainer):
            gc.collect()  # else an earlier trainer that is garbage would be frozen, and stay in memory
        _trainers.add(trainer)

    def after_iter(self, trainer: Trainer, event: IterEvent) -> None:
        """Freeze after the first `interval` iterations, later collect the generation that is due."""
        if not self.active:
            return
        training = event.mode == "train"
        if training and self._will_freeze:
            self._freeze_objects()
            return
        number = (event.iter if training else event.batch_idx) // self._interval + 1  # of this collection
        if number % 100 == 0:
            self._collect(ALL)
        else:
            self._collect(MIDDLE if number % 10 == 0 else YOUNG)

    def after_val(self, trainer: Trainer, event: AfterVal) -> None:
        """Run a full collection after a validation."""
        self._collect(ALL)

    def after_test(self, trainer: Trainer, event: AfterTest) -> None:
        """Run a full collection after a test."""
        self._collect(ALL)

    @on(priority=Priority.HIGHEST)
    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Switch the automatic collection on again, and unfreeze the objects that this hook has frozen."""
        self._restore()

    @on(priority=Priority.HIGHEST)
    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Switch the automatic collection on again if a Ctrl-C prevented this hook's `after_train`."""
        self._restore()

    def _freeze_objects(self) -> None:
        """Freeze the objects that exist now, such as the optimizer's state, unless others are frozen."""
        self._will_freeze = False
        if _nothing_is_frozen():
            # until now only YOUNG was collected, so MIDDLE includes all objects created since the start
            gc.collect(MIDDLE)
            self._has_frozen = True
            gc.freeze()

    def _collect(self, generation: int) -> None:
        """Collect a generation; before the freeze only the youngest one.

        A collection of MIDDLE moves the objects that survive it to the oldest generation. Of these, objects
        that become garbage before the freeze would be frozen.
        """
        if self.active:
            gc.collect(YOUNG if self._will_freeze else generation)

    def _restore(self) -> None:
        """Switch the automatic collection on and unfreeze, if this hook has switched it off."""
        if self.active:
            gc.enable()
            if self._has_frozen:
                gc.unfreeze()
            _active_hooks.discard(self)


def _bytes_of(model: nn.Module) -> int:
    """Return the number of bytes of a model's parameters."""
    return bytes_of(p for p in model.parameters() if not is_lazy(p))


def _nothing_is_frozen() -> bool:
    """Return whether nobody but Python itself has frozen objects; counting them takes up to 30 ms."""
    return gc.get_freeze_count() <= FROZEN_AT_START


def _collect_in_child() -> None:
    """Switch the automatic collection on in a forked child, where this hook's methods are not called."""
    if _active_hooks:
        _active_hooks.clear()
        gc.enable()


@atexit.register
def _restore_all() -> None:
    """Switch the collection on again at exit, if a training on a daemon thread has not ended.

    At exit the interpreter frees only objects that are not frozen, and libraries such as Triton print the
    objects that it has not freed.
    """
    for hook in list(_active_hooks):
        hook._restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collect_in_child)
