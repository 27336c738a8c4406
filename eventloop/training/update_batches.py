"""Run backward on each batch of an iteration if the iteration is an optimizer step over several batches."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING

from eventloop.costs.step_clock import FORWARD_BEGINS, FORWARD_ENDS
from eventloop.events import AfterBackward, AfterOptimizerStep, BeforeOptimizerStep, Event
from eventloop.training.accumulation import Accumulation
from eventloop.training.mixed_precision import MixedPrecision
from eventloop.training.outputs import MeanOutputs

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

StepEvent = AfterBackward | BeforeOptimizerStep | AfterOptimizerStep


class UpdateBatches:
    """The methods of an optimizer hook that the loops call between the batches of an iteration."""

    _window: Accumulation | None
    _precision: MixedPrecision | None
    _wanted: Mapping[type[Event], bool]
    """Whether each type of event has a subscriber."""
    _other_seconds: float
    """The seconds that handlers of the step's events took within a call of the hook."""

    def _run_backward(self, trainer: Trainer) -> float:
        raise NotImplementedError

    def begin_update(self) -> None:
        """Begin an iteration of several batches, and drop gradients that an error has left."""
        self._means = MeanOutputs()
        if self._window is not None:
            self._window.count = 0

    def begin_batch(self, trainer: Trainer) -> None:
        """Begin the forward pass of a batch: enter autocast, and suspend the exchange of gradients.

        The exchange between ranks takes place only in the last batch of the iteration.
        """
        if self._window is not None:
            self._window.suspend_exchange(trainer)
        if self._precision is not None:
            self._precision.begin_forward()
        if trainer.clock.device is not None:
            trainer.clock.device.mark(FORWARD_BEGINS)

    def add_batch(self, trainer: Trainer) -> None:
        """Run backward on the loss of a batch, and set `trainer.outputs` to the means of all batches so far.

        Raises:
            TypeError: `trainer.outputs` holds no loss tensor.
            RuntimeError: the loss requires no grad, its graph is freed, or the trainer has no optimizer.
        """
        clock = trainer.clock
        if clock.device is not None:
            clock.device.mark(FORWARD_ENDS)
        clock.charge("backward", self._run_backward(trainer))
        if self._window is not None:
            self._window.resume_exchange()
            self._window.copy_first_gradients(trainer)
        if self._wanted[AfterBackward]:
            self._other_seconds = 0.0
            self._announce(trainer, AfterBackward)
            clock.charge("hooks", self._other_seconds)
        trainer.outputs = self._means.add(trainer.outputs)

    def _announce(self, trainer: Trainer, event_type: type[StepEvent]) -> None:
        """Emit an event of the optimizer's step, and add the time of its handlers to `_other_seconds`."""
        clock = trainer.clock
        began = perf_counter() - clock.excluded
        # not `trainer.announce`, whose check for subscribers costs 10 us for the three events of a step
        event = event_type(
            iter=trainer.iter, epoch=trainer.epoch, max_iters=trainer.max_iters, max_epochs=trainer.max_epochs
        )
        trainer.bus.emit(event, trainer)
        self._other_seconds += perf_counter() - clock.excluded - began
