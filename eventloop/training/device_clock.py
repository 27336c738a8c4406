"""What the phases of an iteration take on a GPU, where the training thread's clock says only how long it took to
ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from eventloop.costs.records import Phases
from eventloop.events import Event
from eventloop.events.deferred import Deferred

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

WARM_UP = 3
"""Iterations in which kernels are chosen and memory is reserved; they stand for no others."""
MEASURED_FIRST = 8
PERIOD = 101

FORWARD_BEGINS, FORWARD_ENDS, BACKWARD_BEGINS, BACKWARD_ENDS, OPTIMIZER_ENDS = range(5)

Marks = dict[int, torch.cuda.Event]


class DeviceClock:
    """Sampled times on one CUDA device: events are recorded on the current stream, and read on the background loop
    once the device has passed the last of them. The training thread never waits.

    Args:
        post: hands a deferred to the background, as `Bus.post`.
    """

    def __init__(self, device: torch.device, post: Callable[[Deferred], None]) -> None:
        self._device = device
        self._post = post
        self._marks: Marks | None = None
        self.samples = 0
        self.forward = self.backward = self.optimizer = 0.0

    def begin(self, iterations: int) -> None:
        """The forward pass of an iteration begins; `iterations` have been before it."""
        if WARM_UP <= iterations < WARM_UP + MEASURED_FIRST or iterations % PERIOD == PERIOD - 1:
            self._marks = {}
            self.mark(FORWARD_BEGINS)

    def mark(self, what: int) -> None:
        """The device's queue has come to one of the marks; only in a sampled iteration it is noted."""
        if self._marks is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks[what] = event

    def end(self) -> None:
        """The iteration ends: what was noted is read when it is there."""
        if self._marks is not None:
            marks, self._marks = self._marks, None
            self._post(_Sample(self, marks))

    def add(self, marks: Marks) -> None:
        """Enter a sample; on the background loop. Another optimizer hook than ours leaves no mark of its own."""
        self.samples += 1
        self.forward += _seconds(marks, FORWARD_BEGINS, FORWARD_ENDS)
        self.backward += _seconds(marks, BACKWARD_BEGINS, BACKWARD_ENDS)
        self.optimizer += _seconds(marks, BACKWARD_ENDS, OPTIMIZER_ENDS)

    @property
    def phases(self) -> Phases:
        """The sums over the sampled iterations."""
        return Phases(
            iterations=self.samples, forward=self.forward, backward=self.backward, optimizer=self.optimizer
        )


def device_clock(trainer: Trainer) -> DeviceClock | None:
    """A clock for the device that the trainer's model is on; None where it is no GPU of CUDA's."""
    parameter = next(trainer.model.parameters(), None)
    if parameter is None or parameter.device.type != "cuda":
        return None
    return DeviceClock(parameter.device, trainer.bus.post)


class _Sample:
    """A `Deferred` that makes no event."""

    def __init__(self, clock: DeviceClock, marks: Marks) -> None:
        self._clock = clock
        self._marks = marks

    def ready(self) -> bool:
        return all(event.query() for event in self._marks.values())

    def events(self) -> list[Event]:
        self._clock.add(self._marks)
        return []


def _seconds(marks: Marks, begin: int, end: int) -> float:
    if begin not in marks or end not in marks:
        return 0.0
    return float(marks[begin].elapsed_time(marks[end])) / 1e3
