"""Stops that all ranks agree on: who goes on alone waits for the others in its next collective, forever.

The ranks add up who asks, over a gloo group of their own, on the host. At the end of each iteration a sum is begun,
and read at the end of the next one, when it has long arrived: training does not wait for it. So a stop that one rank
asks for in an iteration ends the run of all of them after the next. A rank that asks reads the sum at once: when all
of them asked, which each finds by itself, the run ends after the very iteration.

All ranks must come to the same places in the same order, as they must for the collectives of
DistributedDataParallel: they train equally many iterations. A run of one rank alone, while the others do something
else, would wait for them at its begin. In passes over loaders of unequal lengths they agree as long as all of them have
batches, which the lengths tell; of a training pass the log says that they differ.
"""

from __future__ import annotations

import logging
from array import array
from time import sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

logger = logging.getLogger("eventloop")

LOOK_SECONDS = 0.01
"""How often a rank looks whether the others have come to the end of a run."""


class Request(NamedTuple):
    """A request to stop the run."""

    reason: str
    signum: int | None = None
    """The signal that asks, or None."""


class _Sum:
    """The number of ranks that ask. It is read and written as Python's own array, and the group is called without
    the checks of `dist.all_reduce`: some 80 us an iteration in place of 300, where caches are cold."""

    def __init__(self) -> None:
        self._number = array("q", [0])
        self._tensors = [torch.frombuffer(self._number, dtype=torch.int64)]  # the same memory
        self._work: Any = None

    def begin(self, group: Any, *, asks: bool) -> None:
        self._number[0] = asks
        self._work = group.allreduce(self._tensors, dist.AllreduceOptions())  # the sum, by default

    def wait(self) -> int:
        self._work.wait()
        return self._number[0]

    def wait_awake(self) -> None:
        """`wait`, in which the interpreter can look for signals."""
        while not self._work.is_completed():
            sleep(LOOK_SECONDS)
        self._work.wait()  # it is over: this raises its error, where it has one


class Agreement:
    """The group of the ranks, and the sum that was begun last. Making one is a collective."""

    def __init__(self) -> None:
        self._world = dist.group.WORLD
        self._size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        self._sums = _Sum(), _Sum()  # in turn
        self._pending: _Sum | None = None

    @staticmethod
    def needed() -> bool:
        """True where there are other ranks, and a way to ask them."""
        if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
            return False
        return dist.get_world_size() > 1

    def begin(self) -> bool:
        """Forget what a run that was left began; False when the process group is another one now."""
        self._sums, self._pending = (_Sum(), _Sum()), None
        return self._world is dist.group.WORLD

    def boundary(self, *, asks: bool) -> bool:
        """At the end of an iteration: True on all ranks when they are to stop here."""
        if self._arrived():
            return True
        self._pending = pending = self._add_up(asks)
        # who did not ask is gone on, and reads it at the next boundary
        return asks and pending.wait() == self._size

    def edge(self, *, asks: bool) -> bool:
        """Between two passes: the same, without delay; waits for all ranks."""
        if self._arrived():
            return True
        return self._add_up(asks).wait() > 0

    def extremes(self, number: int) -> tuple[int, int]:
        """The smallest and the largest of the ranks' numbers."""
        tensor = torch.tensor([number, -number])
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return int(tensor[0]), -int(tensor[1])

    def requests(self, own: Request | None) -> list[Request | None]:
        """What each rank asks for."""
        requests = [own] * self._size
        dist.all_gather_object(requests, own, group=self._group)
        return requests

    def meet(self) -> None:
        """Wait for all ranks, or until one of them is gone; a signal's handler is run meanwhile, and may raise."""
        try:
            self._add_up(False).wait_awake()
        except RuntimeError as error:
            logger.warning("the end of all other ranks could not be waited for: %s", error)

    def _arrived(self) -> bool:
        pending, self._pending = self._pending, None
        return pending is not None and pending.wait() > 0

    def _add_up(self, asks: bool) -> _Sum:
        self._sums = self._sums[1], self._sums[0]
        self._sums[0].begin(self._group, asks=asks)
        return self._sums[0]
