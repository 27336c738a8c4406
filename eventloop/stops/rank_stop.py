"""Stop all ranks, or apply a command on all of them, at the same iteration.

If one rank stopped earlier, the others would wait for it in their next collective forever. So the ranks add
up the number of their requests to stop, by an all-reduce on the CPU in a gloo group that is used for nothing
else. An all-reduce starts at the end of each iteration, and its result is read at the end of the next one, so
training does not wait for it. A request of one rank therefore ends the run of all ranks after the next
iteration. A rank with a request reads the result at once: if all ranks have a request, the run ends after
this iteration.

All ranks must make these calls in the same order, so they must train the same number of iterations, as
DistributedDataParallel requires too. A rank that begins a run waits for the others. In a pass over loaders of
unequal lengths the ranks make the calls only while all of them have batches. Every few all-reduces also carry
the times of the ranks (`Carried`).
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
"""Seconds for which a rank waits for the others at the start of its first run before it logs a warning."""


class Request(NamedTuple):
    """A request to stop the run."""

    reason: str
    signum: int | None = None
    """The number of the signal that caused the request; None for a call of `trainer.stop`."""


class Carried(Protocol):
    """Numbers that some of the all-reduces add up over all ranks, besides the requests to stop."""

    every: int
    """How often the numbers are sent: 1 if with each all-reduce, 100 if with every hundredth."""

    def numbers(self) -> list[float]:
        """Return a list with a place for each rank's numbers: this rank's, and zeros for the others."""

    def receive(self, numbers: Sequence[float]) -> None:
        """Receive the numbers of all ranks; every rank receives them at the same boundary."""


def _new_group() -> Any:
    """Create a gloo group of all ranks; log a warning if other ranks do not make this call."""
    text = (
        "rank %d of %d has waited %g s for the other ranks to begin the run: begin it on every rank; in "
        "another engine's loop, every rank needs the bridge"
    )
    arguments = [text, dist.get_rank(), dist.get_world_size(), WAIT_SECONDS]
    warning = Timer(WAIT_SECONDS, logger.warning, arguments)
    warning.daemon = True
    warning.start()
    try:
        return dist.new_group(backend="gloo")
    finally:
        warning.cancel()


class _Sum:
    """An all-reduce that counts the ranks with a request to stop, and adds up carried numbers.

    It uses a Python array and the group's own method, which take about 80 us an iteration; `dist.all_reduce`
    with a new tensor and all checks takes 300 us, both with cold caches.
    """

    def __init__(self, carried: Carried | None = None) -> None:
        self._carried = carried
        # first the number of ranks with a request
        self._numbers = array("d", [0.0, *(carried.numbers() if carried is not None else [])])
        self._tensors = [torch.frombuffer(self._numbers, dtype=torch.float64)]  # the same memory
        self._work: Any = None

    def begin(self, group: Any, *, requested: bool) -> None:
        """Start the all-reduce; `requested` is True if this rank has a request."""
        self._numbers[0] = requested
        self._work = group.allreduce(self._tensors, dist.AllreduceOptions())  # adds up, by default

    def wait(self, name: str) -> int:
        """Wait for the result, and return the number of ranks with a request.

        Args:
            name: the name of the wait in the costs.
        """
        with nullcontext() if self._work.is_completed() else waiting("ranks", name):
            self._work.wait()
        return int(self._numbers[0])

    def resolve(self, name: str) -> int:
        """Wait for the result, deliver the carried numbers, and return the number of ranks with a request.

        Args:
            name: the name of the wait in the costs.
        """
        requests = self.wait(name)
        if self._carried is not None:
            self._carried.receive(self._numbers[1:])
        return requests

    def wait_for_end_of_run(self) -> None:
        """Wait for the result in short sleeps, between which Python's signal handlers can run."""
        with waiting("ranks", "the end of the run"):
            while not self._work.is_completed():
                sleep(POLL_SECONDS)
        self._work.wait()  # it is completed: raises the error of the collective, if there is one


class Agreement:
    """Let all ranks agree whether the run stops. The constructor is a collective: it makes a gloo group."""

    def __init__(self) -> None:
        self._world = dist.group.WORLD  # the default process group, to notice a new one
        self._size = dist.get_world_size()
        self._group = _new_group()
        self._sums = _Sum(), _Sum()  # used alternately: one may be unread when the next one starts
        self._count = 0  # the number of sums in this run
        self._pending: _Sum | None = None  # started at the last boundary, not read
        self._carried: Carried | None = None

    @staticmethod
    def needed() -> bool:
        """Return whether there are other ranks, and gloo is available to reach them."""
        if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
            return False
        return dist.get_world_size() > 1

    def begin(self) -> bool:
        """Begin a run without sums of an earlier one; return False if the default process group is a new one.

        In that case a new Agreement is needed.
        """
        self._sums, self._pending, self._count = (_Sum(), _Sum()), None, 0
        return self._world is dist.group.WORLD

    def carry(self, carried: Carried) -> None:
        """Send these numbers with the sums of this run; all ranks must call this, with equally long lists."""
        self._carried = carried

    def boundary(self, *, requested: bool) -> bool:
        """Return at the end of an iteration whether all ranks know that a rank has a request.

        All ranks return the same value. A request of this rank may be returned only at the next boundary.

        Args:
            requested: whether this rank has a request to stop, or a command.
        """
        if self._any_pending_request():
            return True
        self._pending = pending = self._start_sum(requested)
        if not requested or pending.wait(ITERATION) != self._size:
            return False  # a rank without a request does not wait, and reads the sum at the next boundary
        return self._any_pending_request()

    def edge(self, *, requested: bool) -> bool:
        """Wait for all ranks at the end of a pass, and return whether one of them has a request.

        Args:
            requested: whether this rank has a request to stop, or a command.
        """
        if self._any_pending_request():
            return True
        return self._start_sum(requested).resolve(EDGE) > 0

    def extremes(self, number: int) -> tuple[int, int]:
        """Return the smallest and the largest of the ranks' numbers; a collective.

        Args:
            number: the number of this rank.
        """
        tensor = torch.tensor([number, -number])  # so that one all-reduce of minima gives both
        with waiting("ranks", EDGE):
            dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return int(tensor[0]), -int(tensor[1])

    def gather(self, own: T) -> list[T]:
        """Return the values of all ranks in their order; a collective.

        Args:
            own: the value of this rank.
        """
        values = [own] * self._size
        with waiting("ranks", EDGE):
            dist.all_gather_object(values, own, group=self._group)
        return values

    def wait_for_all_ranks(self) -> None:
        """Wait until all ranks make this call or one has ended; signal handlers may run and raise."""
        try:
            self._start_sum(False).wait_for_end_of_run()
        except RuntimeError as error:
            logger.warning("the end of all other ranks could not be waited for: %s", error)

    def _any_pending_request(self) -> bool:
        """Read the sum that was started at the last boundary; return whether it counts a request."""
        pending, self._pending = self._pending, None
        return pending is not None and pending.resolve(ITERATION) > 0

    def _start_sum(self, requested: bool) -> _Sum:
        """Start an all-reduce, which also adds up the carried numbers if they are due."""
        self._count += 1
        if self._carried is not None and self._count % self._carried.every == 0:
            new_sum = _Sum(self._carried)
        else:
            self._sums = self._sums[1], self._sums[0]
            new_sum = self._sums[0]
        new_sum.begin(self._group, requested=requested)
        return new_sum
