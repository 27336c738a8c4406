"""Define the trainer of a bridge, which ends epochs and iterations that the host has begun but not ended."""

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
    """Accept calls in an unusual order, such as a new epoch before the end of the last one.

    `DrivenTrainer` raises an error for them. The host's user may end an epoch early, interrupt a run, or emit
    the host's events by hand, and none of that is an error of the program. An epoch or evaluation that is
    still open when another begins is ended with the reason "left". An end without a beginning does nothing.
    Each kind is logged once.
    """

    _native: Any = None
    by_command = False
    """True during a validation that a command has requested."""
    evaluated: Mapping[str, float] = MappingProxyType({})
    """The metrics of the last evaluation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._warned: set[str] = set()
        super().__init__(*args, **kwargs)

    @property
    def native(self) -> Any:
        """The host's own trainer. A weak reference holds it, because that trainer owns the bridge."""
        return self._native() if isinstance(self._native, ref) else self._native

    @native.setter
    def native(self, native: Any) -> None:
        """Set the host's trainer, by a strong reference if its class allows no weak one."""
        try:
            self._native = ref(native)
        except TypeError:
            self._native = native

    def follow(self, *, iter: int) -> None:
        """Set the number of completed iterations to that of the host.

        ignite also counts iterations that it does not complete, so the trainer's own count may differ.

        Args:
            iter: the number of completed iterations.
        """
        self.iter = self.metrics.iter = iter

    def begin_epoch(self, length: int | None = None) -> None:
        """Begin an epoch; first end an epoch or evaluation that the host has not ended."""
        self._exit_within("run")
        super().begin_epoch(length)

    def resume_epoch(self, length: int | None = None) -> None:
        """Begin an epoch that the host continues in its middle, after the last batch that was trained.

        Args:
            length: the number of batches of the whole epoch; None if it is unknown.
        """
        next_batch_idx = self.batch_idx
        self.begin_epoch(length)
        self.batch_idx = next_batch_idx

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
        """End the iteration; do nothing if none is under way. Return whether the host should stop."""
        if self.passing is None or not self.metrics.in_iteration:
            self._warn_once("the end of an iteration without its beginning", "does nothing")
            return False
        self.exit_evaluation()
        return super().end_iter(outputs)

    def end_epoch(self) -> None:
        """End the epoch; do nothing if none is under way."""
        if self.passing is None:
            self._warn_once("the end of an epoch without its beginning", "does nothing")
            return
        self._exit_within("epoch")
        super().end_epoch()

    def begin_val(self, mode: Evaluate = "val") -> None:
        """Begin an evaluation; first end an evaluation that the host has not ended."""
        self.exit_evaluation()
        super().begin_val(mode)
        if self.by_command:
            # of both closing events: hooks such as early stopping ignore an evaluation with this reason
            for scope in self._evaluated:
                scope.reason = BY_COMMAND

    def begin_val_iter(self, batch: Any, batch_idx: int, loader: str = "") -> None:
        """Begin an iteration of the evaluation; do nothing if no evaluation is under way."""
        if self._evaluates():
            super().begin_val_iter(batch, batch_idx, loader)

    def end_val_iter(self, outputs: Any, batch_idx: int, loader: str = "") -> None:
        """End an iteration of the evaluation; do nothing if no evaluation is under way."""
        if self._evaluates():
            super().end_val_iter(outputs, batch_idx, loader)

    def end_val(self, metrics: Mapping[str, float]) -> None:
        """End the evaluation with its metrics; do nothing if none is under way."""
        if self._evaluates():
            self.evaluated = dict(metrics)
            super().end_val(metrics)

    def exit_evaluation(self) -> None:
        """End the evaluation if one is still open, because an error has kept the host from ending it."""
        if self.mode != "train":
            self._exit_part("evaluation")

    def _evaluates(self) -> bool:
        """Return whether an evaluation is under way, and log a warning if not."""
        if self.mode == "train":
            self._warn_once("a part of an evaluation without its beginning", "does nothing")
        return self.mode != "train"

    def _exit_within(self, part: str) -> None:
        """End everything open inside `part` ("run" or "epoch"): epochs, evaluations and the iteration."""
        if self.metrics.in_iteration:
            self._warn_once("an iteration without its end", "does not count it")
            self.drop_iter()
        while self._open and self._open[-1][0] != part:
            self._exit_part(self._open[-1][0])

    def _exit_part(self, part: str) -> None:
        """End `part` ("epoch" or "evaluation"), the last begun, with the reason "left", and log it once."""
        self._warn_once(f"an {part} without its end", 'ends it with the reason "left"')
        error = GeneratorExit()  # as when a program breaks out of the trainer's own loop
        self._begun(part).__exit__(GeneratorExit, error, None)

    def _warn_once(self, problem: str, reaction: str) -> None:
        """Log a problem in the host's calls and the reaction of the bridge, once for each problem."""
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("%s had %s; the bridge %s, and says so once", self.host, problem, reaction)
