"""Measure the phases of an iteration on a GPU; the training thread only queues the work and runs ahead."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eventloop.costs.records import Phases
from eventloop.costs.step_clock import (
    BACKWARD_BEGINS,
    BACKWARD_ENDS,
    FORWARD_BEGINS,
    FORWARD_ENDS,
    OPTIMIZER_ENDS,
)
from eventloop.events import Event
from eventloop.events.deferred import Deferred

WARM_UP = 3
"""The iterations before the first sample, in which kernels are chosen and memory is reserved."""
MEASURED_FIRST = 8
PERIOD = 101

Marks = dict[int, list[torch.cuda.Event]]
"""The marks of an iteration in their order: one of each, or one for each of its batches."""


class DeviceClock:
    """Sample the phases of iterations on one CUDA device.

    CUDA events are recorded on the current stream, and read in the background once the device has passed
    the last of them. The training thread never waits.

    Args:
        device: the CUDA device.
        post: hands a deferred object to the background, such as `Bus.post`.
    """

    def __init__(self, device: torch.device, post: Callable[[Deferred], None]) -> None:
        self._device = device
        self._post = post
        self._marks: Marks | None = None
        self.samples = 0
        self.forward = self.backward = self.optimizer = 0.0

    def begin(self, iterations: int) -> None:
        """Begin a sample if this iteration is to be sampled; `iterations` were completed before it."""
        if WARM_UP <= iterations < WARM_UP + MEASURED_FIRST or iterations % PERIOD == PERIOD - 1:
            self._marks = {}
            self.mark(FORWARD_BEGINS)

    def mark(self, what: int) -> None:
        """Record a mark on the current stream, in a sampled iteration."""
        if self._marks is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.setdefault(what, []).append(event)

    def end(self) -> None:
        """End the sample, which is read in the background once the device has passed it."""
        if self._marks is not None:
            marks, self._marks = self._marks, None
            self._post(_Sample(self, marks))

    def add(self, marks: Marks) -> None:
        """Add the phases of one sampled iteration; called in the background.

        A phase counts as 0 if its marks are missing, because some optimizer hooks set none.
        """
        self.samples += 1
        self.forward += _seconds(marks, FORWARD_BEGINS, FORWARD_ENDS)
        self.backward += _seconds(marks, BACKWARD_BEGINS, BACKWARD_ENDS)
        last = {BACKWARD_ENDS: marks.get(BACKWARD_ENDS, [])[-1:]}
        self.optimizer += _seconds(marks | last, BACKWARD_ENDS, OPTIMIZER_ENDS)

    @property
    def phases(self) -> Phases:
        """The phases, summed over the sampled iterations."""
        return Phases(
            iterations=self.samples, forward=self.forward, backward=self.backward, optimizer=self.optimizer
        )


def device_clock(model: torch.nn.Module, post: Callable[[Deferred], None]) -> DeviceClock | None:
    """Return a clock for the device that `model` is on, or None if that is not a CUDA device."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cuda":
        return None
    return DeviceClock(parameter.device, post)


class _Sample:
    """A deferred sample, which adds itself to its clock and creates no event."""

    def __init__(self, clock: DeviceClock, marks: Marks) -> None:
        self._clock = clock
        self._marks = marks

    def ready(self) -> bool:
        return all(event.query() for events in self._marks.values() for event in events)

    def events(self) -> list[Event]:
        self._clock.add(self._marks)
        return []


def _seconds(marks: Marks, begin: int, end: int) -> float:
    pairs = zip(marks.get(begin, ()), marks.get(end, ()), strict=False)
    return sum(float(first.elapsed_time(last)) for first, last in pairs) / 1e3
