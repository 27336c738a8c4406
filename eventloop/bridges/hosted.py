"""Define the trainer of a bridge, which ends what its host has left open."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from weakref import ref

from eventloop.bridges.driven import DrivenTrainer
from eventloop.evaluation.schedule import Evaluate
from eventloop.events import BY_COMMAND

logger = logging.getLogger("eventloop")


class HostedTrainer(DrivenTrainer):
    """A driven trainer that ends what its host has left open, where `DrivenTrainer` raises an error.

    The host's user may end an epoch early, interrupt a run, or emit the host's events by hand, and none of
    that is an error of the program. A part of the run that the host has left is ended with the reason "left".
    An end without a beginning does nothing. Each kind is logged once.
    """

    _native: Any = None
    by_command = False
    """True within a validation that a command has asked for."""
    evaluated: Mapping[str, float] = MappingProxyType({})
    """The metrics of the last evaluation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._warned: set[str] = set()
        super().__init__(*args, **kwargs)

    @property
    def native(self) -> Any:
        """The host's own trainer, which owns the bridge, and so is not kept alive by it."""
        return self._native() if isinstance(self._native, ref) else self._native

    @native.setter
    def native(self, native: Any) -> None:
        try:
            self._native = ref(native)
        except TypeError:
            self._native = native

    def follow(self, *, iter: int) -> None:
        """Take over the host's number of completed iterations, which it may count in another way.

        Args:
            iter: the number; ignite counts iterations that it does not complete.
        """
        self.iter = self.metrics.iter = iter

    def begin_epoch(self, length: int | None = None) -> None:
        """Begin an epoch, after the end of what the host has left open."""
        self._exit_within("run")
        super().begin_epoch(length)

    def resume_epoch(self, length: int | None = None) -> None:
        """Begin an epoch in whose middle the host goes on, with the batch after the last one of its last run.

        Args:
            length: the number of batches of the whole epoch; None if it is unknown.
        """
        done = self.batch_idx
        self.begin_epoch(length)
        self.batch_idx = done

    def begin_iter(self, batch: Any) -> bool:
        """Begin an iteration, and before it an epoch if the host has begun none.

        Raises:
            RuntimeError: a handler raised `SkipIteration`.
        """
        if self.passing is None:
            self.resume_epoch()
        self._exit_within("epoch")
        if not super().begin_iter(batch):
            raise RuntimeError(
                f"a handler of before_train_iter raised SkipIteration, and {self.host} cannot skip a batch: "
                "filter the data set instead"
            )
        return True

    def end_iter(self, outputs: Any) -> bool:
        """End the iteration; do nothing without one."""
        if self.passing is None or not self.metrics.in_iteration:
            self._warn_once("the end of an iteration without its beginning", "does nothing")
            return False
        self.exit_evaluation()
        return super().end_iter(outputs)

    def end_epoch(self) -> None:
        """End the epoch; do nothing without one."""
        if self.passing is None:
            self._warn_once("the end of an epoch without its beginning", "does nothing")
            return
        self._exit_within("epoch")
        super().end_epoch()

    def begin_val(self, mode: Evaluate = "val") -> None:
        """Begin an evaluation, after the end of what the host has left open."""
        self.exit_evaluation()
        super().begin_val(mode)
        if self.by_command:  # hooks that act on scores leave it out
            for scope in self._evaluated:
                scope.reason = BY_COMMAND

    def begin_val_iter(self, batch: Any, batch_idx: int, loader: str = "") -> None:
        """Begin an iteration of the evaluation; do nothing without one."""
        if self._evaluates():
            super().begin_val_iter(batch, batch_idx, loader)

    def end_val_iter(self, outputs: Any, batch_idx: int, loader: str = "") -> None:
        """End an iteration of the evaluation; do nothing without one."""
        if self._evaluates():
            super().end_val_iter(outputs, batch_idx, loader)

    def end_val(self, metrics: Mapping[str, float]) -> None:
        """End the evaluation; do nothing without one."""
        if self._evaluates():
            self.evaluated = dict(metrics)
            super().end_val(metrics)

    def exit_evaluation(self) -> None:
        """End an evaluation that an error of the host has left open, if there is one."""
        if self.mode != "train":
            self._exit_part("evaluation")

    def _evaluates(self) -> bool:
        if self.mode == "train":
            self._warn_once("a part of an evaluation without its beginning", "does nothing")
        return self.mode != "train"

    def _exit_within(self, part: str) -> None:
        """End all parts within `part` that are open."""
        if self.metrics.in_iteration:
            self._warn_once("an iteration without its end", "does not count it")
            self.drop_iter()
        while self._open and self._open[-1][0] != part:
            self._exit_part(self._open[-1][0])

    def _exit_part(self, part: str) -> None:
        """End the part of the run that was begun last, which the host has left open."""
        self._warn_once(f"an {part} without its end", 'ends it with the reason "left"')
        left = GeneratorExit()  # as if a loop of one's own had been left
        self._begun(part).__exit__(GeneratorExit, left, None)

    def _warn_once(self, what: str, instead: str) -> None:
        """Log what the host did and what is done about it, once for each kind."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s had %s; the bridge %s, and says so once", self.host, what, instead)
