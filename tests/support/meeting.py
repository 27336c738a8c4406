"""Ranks in one process: collectives over their tensors, and packets that each posts and tells in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from eventloop.events import ScalarsLogged
from eventloop.metrics import EventStorage
from eventloop.metrics.reduce import Reducer

ROUNDS = 200
"""Polls against hangs; an exchange takes some five."""

Tensors = Sequence[torch.Tensor]
OPERATIONS: dict[str, Callable[[Tensors], Tensors]] = {
    "total": lambda tensors: [sum(tensors, torch.zeros_like(tensors[0]))],
    "largest": lambda tensors: [reduce(torch.fmax, tensors)],  # it leaves out a NaN, as gloo's may
}


class Collective:
    """One that each rank comes to, and is done once all have; a `Work`."""

    def __init__(self, operation: str, size: int) -> None:
        self.operation = operation
        self.error: RuntimeError | None = None
        self._given: list[torch.Tensor | None] = [None] * size
        self._taken: list[Tensors] = [()] * size

    def begin(self, rank: int, operation: str, given: torch.Tensor, taken: Tensors) -> None:
        """A rank comes to it; gloo would crash, or hang, where it is another one than the others'."""
        for other in self._given:
            if other is not None:
                assert (self.operation, other.shape, other.dtype) == (operation, given.shape, given.dtype)
        self._given[rank], self._taken[rank] = given.clone(), taken
        everybodys = [tensor for tensor in self._given if tensor is not None]
        if len(everybodys) == len(self._given):
            results = OPERATIONS[operation](everybodys)
            for tensors in self._taken:
                for tensor, result in zip(tensors, results, strict=True):
                    tensor.copy_(result)

    def is_completed(self) -> bool:
        """True once all have come, or one is gone."""
        return self.error is not None or all(tensor is not None for tensor in self._given)

    def wait(self) -> None:
        """Raise its error; nobody waits."""
        assert self.is_completed()
        if self.error is not None:
            raise self.error


class Meeting:
    """The collectives of some ranks, in the order that each comes to them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.collectives: list[Collective] = []
        self._begun = [0] * size
        self._gone: RuntimeError | None = None

    @property
    def operations(self) -> list[str]:
        """What they were."""
        return [collective.operation for collective in self.collectives]

    def begin(self, rank: int, operation: str, given: torch.Tensor, taken: Tensors) -> Collective:
        """A rank comes to its next one."""
        number = self._begun[rank]
        self._begun[rank] += 1
        if number == len(self.collectives):
            self.collectives.append(Collective(operation, self.size))
        collective = self.collectives[number]
        collective.begin(rank, operation, given, taken)
        if not collective.is_completed():
            collective.error = self._gone
        return collective

    def disconnect(self) -> None:
        """A rank's process ends: the collectives without it fail."""
        self._gone = RuntimeError("Connection closed by peer")
        for collective in self.collectives:
            if not collective.is_completed():
                collective.error = self._gone


class Present:
    """One rank's part in a meeting; see `Ranks`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.size = meeting.size
        self._meeting, self._rank = meeting, rank

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> Collective:
        """Come to the next collective of the meeting."""
        return self._meeting.begin(self._rank, "largest" if maximum else "total", tensor, [tensor])


class Rank:
    """A rank with its metrics, what it has posted, and what was logged of it."""

    def __init__(self, meeting: Meeting, number: int, maxima: Sequence[str] = ()) -> None:
        self.storage = EventStorage()
        self.reducer = Reducer(maxima)
        self.reducer.join(Present(meeting, number), number)
        self.posted: deque[Any] = deque()
        self.logged: list[ScalarsLogged] = []

    def put(self, iteration: int, smoothing_hint: bool = False, /, **scalars: float) -> None:
        """Put values for an iteration, each for itself."""
        for name, value in scalars.items():
            self.storage.put_scalar(name, value, smoothing_hint, iteration)

    def post(self, iteration: int) -> None:
        """Post what was put, as a logger does in this iteration."""
        self.posted.append(self.reducer.reduce(self.storage.collect(), iteration))

    def log(self, iteration: int, **scalars: float) -> None:
        """Put values, and post them."""
        self.put(iteration, **scalars)
        self.post(iteration)

    def poll(self) -> None:
        """Tell what is ready, in order, as the background loop does."""
        while self.posted and self.posted[0].ready():
            events = self.posted.popleft().events()
            self.logged += [event for event in events if isinstance(event, ScalarsLogged)]

    @property
    def scalars(self) -> list[tuple[int, dict[str, float]]]:
        """What was logged, by iteration."""
        return [(event.iter, event.scalars) for event in self.logged]


def poll_ranks(*ranks: Rank) -> None:
    """Let each look for as long as anything can come of it."""
    for _ in range(ROUNDS):
        for rank in ranks:
            rank.poll()


def poll_in_turn(*ranks: Rank) -> None:
    """Let each look until all is told."""
    poll_ranks(*ranks)
    assert not any(rank.posted for rank in ranks), "a rank waits for another one"
