"""Measure the phases of an iteration on a GPU with CUDA events.

The training thread runs ahead of the GPU, so the host's clock cannot measure the phases. The trainer uses
this module.
"""

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
"""The number of iterations before the first sample, in which kernels are chosen and memory is reserved."""
MEASURED_FIRST = 8
"""The number of iterations after the warm-up that are all measured."""
PERIOD = 101
"""Of all other iterations, one in so many is measured, because recording events takes time."""

Marks = dict[int, list[torch.cuda.Event]]
"""The CUDA events of an iteration by what they mark, such as `FORWARD_ENDS`; several for several batches."""


class DeviceClock:
    """Measure the phases of some of the iterations on one CUDA device.

    CUDA events are recorded on the current stream, and read in the background once the device has passed
    the last of them. The training thread never waits.

    Args:
        device: the CUDA device.
        post: a function such as `Bus.post`, which queues an object for the background.
    """

    def __init__(self, device: torch.device, post: Callable[[Deferred], None]) -> None:
        self._device = device
        self._post = post
        self._marks: Marks | None = None  # of the present iteration, if it is measured
        self.samples = 0
        """The number of measured iterations."""
        self.forward = self.backward = self.optimizer = 0.0
        """The seconds of each phase, summed over the measured iterations."""

    def begin(self, iterations: int) -> None:
        """Begin to measure an iteration if `WARM_UP`, `MEASURED_FIRST` and `PERIOD` select it.

        Args:
            iterations: the number of iterations that were completed before.
        """
        if WARM_UP <= iterations < WARM_UP + MEASURED_FIRST or iterations % PERIOD == PERIOD - 1:
            self._marks = {}
            self.mark(FORWARD_BEGINS)

    def mark(self, kind: int) -> None:
        """Record a CUDA event on the current stream if the iteration is measured.

        Args:
            kind: the event's meaning, such as `FORWARD_ENDS`.
        """
        if self._marks is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.setdefault(kind, []).append(event)

    def end(self) -> None:
        """End the iteration; its CUDA events are read in the background once the device has passed them."""
        if self._marks is not None:
            marks, self._marks = self._marks, None
            self._post(_Sample(self, marks))

    def add(self, marks: Marks) -> None:
        """Add the seconds of the phases of one measured iteration; called in the background.

        A phase without its events counts as 0, because some optimizer hooks record none.
        """
        self.samples += 1
        self.forward += _seconds(marks, FORWARD_BEGINS, FORWARD_ENDS)
        self.backward += _seconds(marks, BACKWARD_BEGINS, BACKWARD_ENDS)
        # the optimizer's step follows the last backward pass of several batches
        last_backward = {BACKWARD_ENDS: marks.get(BACKWARD_ENDS, [])[-1:]}
        self.optimizer += _seconds(marks | last_backward, BACKWARD_ENDS, OPTIMIZER_ENDS)

    @property
    def phases(self) -> Phases:
        """Return the seconds of the phases, summed over the measured iterations."""
        return Phases(
            iterations=self.samples, forward=self.forward, backward=self.backward, optimizer=self.optimizer
        )


def device_clock(model: torch.nn.Module, post: Callable[[Deferred], None]) -> DeviceClock | None:
    """Return a clock for the device of a model's first parameter, or None if it is not a CUDA device."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cuda":
        return None
    return DeviceClock(parameter.device, post)


class _Sample:
    """Add the marks of an iteration to a clock in the background; a `Deferred` without events."""

    def __init__(self, clock: DeviceClock, marks: Marks) -> None:
        self._clock = clock
        self._marks = marks

    def ready(self) -> bool:
        return all(event.query() for events in self._marks.values() for event in events)

    def events(self) -> list[Event]:
        self._clock.add(self._marks)
        return []


def _seconds(marks: Marks, begin: int, end: int) -> float:
    """Return the seconds between the events of two kinds, summed over the batches of the iteration."""
    pairs = zip(marks.get(begin, ()), marks.get(end, ()), strict=False)
    return sum(float(begin_event.elapsed_time(end_event)) for begin_event, end_event in pairs) / 1e3
