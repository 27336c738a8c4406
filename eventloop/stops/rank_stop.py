"""Stop all ranks, or apply a command on all of them, at the same iteration.

If one rank stopped earlier, the others would wait for it in their next collective forever. So the ranks add
up the number of their requests to stop, by an all-reduce on the CPU in a gloo group of its own. The sum
begins at the end of each iteration, and is read at the end of the next one, when it has long arrived:
training does not wait for it. A request of one rank therefore ends the run of all ranks after the next
iteration. A rank with a request reads the sum at once: if all ranks have a request, the run ends after that
same iteration.

All ranks must reach the same places in the same order, as the collectives of DistributedDataParallel require;
they must train the same number of iterations. A rank that begins a run waits for the others. In passes over
loaders of unequal lengths the ranks agree as long as all of them have batches; the log warns of a training
pass with unequal lengths. Every few sums also carry the times of the ranks (`Carried`).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from threading import Timer
from time import sleep
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from eventloop.costs.waits import waiting

logger = logging.getLogger("eventloop")

T = TypeVar("T")
ITERATION, EDGE = "the end of an iteration", "the begin or end of an epoch or evaluation"
"""The names of waits for other ranks in the costs."""

POLL_SECONDS = 0.01
"""Seconds between two checks of whether all ranks have reached the end of a run."""
WAIT_SECONDS = 30.0
"""Seconds that a rank waits for the others at the begin of its first run before it logs a warning."""


class Request(NamedTuple):
    """A request to stop the run."""

    reason: str
    signum: int | None = None
    """The number of the signal that caused the request; None for a call of `trainer.stop`."""


class Carried(Protocol):
    """Numbers that are added up over all ranks together with some of the requests to stop."""

    every: int
    """The number of sums from one that carries the numbers to the next that does."""

    def numbers(self) -> list[float]:
        """Return a list, equally long on all ranks: this rank's numbers, and zeros in the others' places."""

    def receive(self, numbers: Sequence[float]) -> None:
        """Receive the numbers of all ranks, at the same boundary on each."""


def _new_group() -> Any:
    """Create the ranks' group, and log a warning if other ranks do not come to create it."""
    text = (
        "rank %d of %d has waited %g s for the other ranks to begin the run: begin it on every rank; in "
        "another engine's loop, every rank needs the bridge"
    )
    waiting = Timer(
        WAIT_SECONDS, logger.warning, [text, dist.get_rank(), dist.get_world_size(), WAIT_SECONDS]
    )
    waiting.daemon = True
    waiting.start()
    try:
        return dist.new_group(backend="gloo")
    finally:
        waiting.cancel()


class _Sum:
    """An all-reduce in progress, which counts the ranks with a request to stop and adds up other numbers.

    The numbers are in a Python array, and the group's own method is called instead of `dist.all_reduce` with
    its checks: about 80 us an iteration rather than 300, with cold caches.
    """

    def __init__(self, carried: Carried | None = None) -> None:
        self._carried = carried
        self._numbers = array("d", [0.0, *(carried.numbers() if carried is not None else [])])
        self._tensors = [torch.frombuffer(self._numbers, dtype=torch.float64)]  # the same memory
        self._work: Any = None

    def begin(self, group: Any, *, requested: bool) -> None:
        self._numbers[0] = requested
        self._work = group.allreduce(self._tensors, dist.AllreduceOptions())  # the sum, by default

    def wait(self, name: str) -> int:
        with nullcontext() if self._work.is_completed() else waiting("ranks", name):
            self._work.wait()
        return int(self._numbers[0])

    def resolve(self, name: str) -> int:
        """Wait for the sum, pass on the carried numbers, and return how many ranks have a request.

        `name` is that of the wait in the costs.
        """
        requests = self.wait(name)
        if self._carried is not None:
            self._carried.receive(self._numbers[1:])
        return requests

    def wait_awake(self) -> None:
        """Wait as `wait` does, while Python's signal handlers can run."""
        with waiting("ranks", "the end of the run"):
            while not self._work.is_completed():
                sleep(POLL_SECONDS)
        self._work.wait()  # done: raises the error of the collective, if any


class Agreement:
    """The process group of the ranks and their latest sum; creating an Agreement is a collective."""

    def __init__(self) -> None:
        self._world = dist.group.WORLD
        self._size = dist.get_world_size()
        self._group = _new_group()
        self._sums = _Sum(), _Sum()  # used alternately
        self._count = 0  # the number of sums in this run
        self._pending: _Sum | None = None
        self._carried: Carried | None = None

    @staticmethod
    def needed() -> bool:
        """Return whether there are other ranks, and gloo is available to reach them."""
        if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
            return False
        return dist.get_world_size() > 1

    def begin(self) -> bool:
        """Drop the sums of an earlier run; return False if the default process group was replaced since."""
        self._sums, self._pending, self._count = (_Sum(), _Sum()), None, 0
        return self._world is dist.group.WORLD

    def carry(self, carried: Carried) -> None:
        """Let the sums of this run carry numbers; all ranks must call it, with equally long lists."""
        self._carried = carried

    def boundary(self, *, requested: bool) -> bool:
        """Agree at the end of an iteration; return whether a rank has a request, the same on all ranks.

        Args:
            requested: whether this rank has a request to stop, or a command.
        """
        if self._arrived():
            return True
        self._pending = pending = self._add_up(requested)
        if not requested or pending.wait(ITERATION) != self._size:
            return False  # a rank without a request has gone on, and reads the sum at the next boundary
        return self._arrived()

    def edge(self, *, requested: bool) -> bool:
        """Agree at the end of a pass: wait for all ranks, and return whether one of them has a request.

        Args:
            requested: whether this rank has a request to stop.
        """
        if self._arrived():
            return True
        return self._add_up(requested).resolve(EDGE) > 0

    def extremes(self, number: int) -> tuple[int, int]:
        """Return the smallest and the largest of the ranks' numbers, of which `number` is this rank's."""
        tensor = torch.tensor([number, -number])
        with waiting("ranks", EDGE):
            dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return int(tensor[0]), -int(tensor[1])

    def gather(self, own: T) -> list[T]:
        """Return the value of each rank, of which `own` is this rank's."""
        values = [own] * self._size
        with waiting("ranks", EDGE):
            dist.all_gather_object(values, own, group=self._group)
        return values

    def wait_for_all_ranks(self) -> None:
        """Wait for all ranks, or until one has ended; signal handlers run meanwhile, and may raise."""
        try:
            self._add_up(False).wait_awake()
        except RuntimeError as error:
            logger.warning("the end of all other ranks could not be waited for: %s", error)

    def _arrived(self) -> bool:
        pending, self._pending = self._pending, None
        return pending is not None and pending.resolve(ITERATION) > 0

    def _add_up(self, requested: bool) -> _Sum:
        self._count += 1
        if self._carried is not None and self._count % self._carried.every == 0:
            latest = _Sum(self._carried)
        else:
            self._sums = self._sums[1], self._sums[0]
            latest = self._sums[0]
        latest.begin(self._group, requested=requested)
        return latest
