"""Where the time of an iteration goes."""

from __future__ import annotations


class StepClock:
    """Seconds of the iteration under way, and their sums over the run.

    `data` is the wait for the loader and the move to the device, `forward` the train step (in a hand-written
    loop everything the body does), `optimize` what the optimizer hook does: backward, clipping and step. What is
    left of the wall time went to hooks and to the loop itself. On a GPU these are the times of the training
    thread, which runs ahead of the device.
    """

    __slots__ = (
        "data",
        "data_sum",
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

    def commit(self, total: float) -> None:
        """Add the iteration, which took `total` seconds in all, to the sums."""
        self.data_sum += self.data
        self.forward_sum += self.forward
        self.optimize_sum += self.optimize
        self.total_sum += total
        self.iterations += 1
        self.optimize = 0.0
