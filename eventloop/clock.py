"""Where the time of an iteration goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class StepClock:
    """Seconds of the iteration under way, and their sums over the run.

    `data` is the wait for the loader and the move to the device, `forward` the train step (in a hand-written
    loop everything the body does), `optimize` what the optimizer hook does: backward, clipping and step. What is
    left of the wall time went to hooks and to the loop itself. Evaluations are no part of any of it: `excluded` is
    what they have taken so far. On a GPU these are the times of the training
    thread, which runs ahead of the device.
    """

    __slots__ = (
        "data",
        "data_sum",
        "excluded",
        "excluded_before",
        "forward",
        "forward_sum",
        "iterations",
        "optimize",
        "optimize_sum",
        "total_sum",
    )

    def __init__(self) -> None:
        self.data = self.forward = self.optimize = 0.0
        self.data_sum = self.forward_sum = self.optimize_sum = self.total_sum = 0.0
        self.iterations = 0
        self.excluded = self.excluded_before = 0.0

    def begin(self) -> float:
        """An iteration begins, now."""
        self.data = self.optimize = 0.0
        self.excluded_before = self.excluded
        return perf_counter()

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """Leave the time of the block, an evaluation, out of the iteration it may fall into."""
        before, began = self.excluded, perf_counter()
        try:
            yield
        finally:
            self.excluded = before + perf_counter() - began

    def commit(self, total: float) -> None:
        """Add the iteration, which took `total` seconds in all, evaluations included, to the sums."""
        self.data_sum += self.data
        self.forward_sum += self.forward
        self.optimize_sum += self.optimize
        self.total_sum += total - (self.excluded - self.excluded_before)
        self.iterations += 1
