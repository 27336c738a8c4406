"""Reduce logged values over all ranks by asynchronous collectives; `Reducer` drives the exchanges.

A collective over tensors of unequal lengths crashes or hangs. The ranks therefore first compare five numbers:
how far each rank has come (its mark), and a digest of its values' names, iterations and order up to there. If
all digests are equal, the values are reduced. Otherwise the ranks gather the keys of their values and reduce
those that every rank has; other values are left unchanged.

An exchange is a generator that yields while a collective is in progress. Each rank decides only by reduced
numbers, so all ranks start the same collectives in the same order.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from eventloop.metrics.rows import Row, Shape

T = TypeVar("T")
Steps = Generator[None, None, T]

SHAPES_LIMIT = 1024
"""At most so many sets of names have their digests cached."""


class Work(Protocol):
    """A collective in progress, such as `torch.distributed.Work`."""

    def is_completed(self) -> bool:
        """Return whether the collective has ended, also by an error."""

    def wait(self) -> Any:
        """Wait for the end of the collective, and raise its error if it failed."""


class Ranks(Protocol):
    """The ranks of an exchange; each method starts a collective."""

    size: int

    def total(self, tensor: torch.Tensor) -> Work:
        """Start to replace each element by its sum over the ranks."""

    def largest(self, tensor: torch.Tensor) -> Work:
        """Start to replace each element by its maximum over the ranks."""

    def gather(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Work]:
        """Start to gather the tensors of all ranks, which have equal lengths; return them in rank order."""


class ShapeInfo(NamedTuple):
    """The digest of a shape's names, and which of them are reduced by their maximum."""

    digest: int
    maxima: list[bool]


class MaximumRules:
    """The names that are reduced by their maximum: those in `maxima`, and all names in such a group."""

    def __init__(self, maxima: Sequence[str]) -> None:
        self._names = frozenset(maxima)
        self._groups = tuple(f"{name}/" for name in maxima)
        self._cache: dict[Shape, ShapeInfo] = {}

    def of(self, shape: Shape) -> ShapeInfo:
        """Return the digest and the maxima of a shape, from the cache if possible."""
        info = self._cache.get(shape)
        if info is None:
            maxima = [name in self._names or name.startswith(self._groups) for name in shape.names]
            info = ShapeInfo(_digest(repr([shape.names, maxima]).encode()), maxima)
            if len(self._cache) >= SHAPES_LIMIT:
                self._cache.clear()
            self._cache[shape] = info
        return info


class Table:
    """The values of rows that were read, in order, with the digest that the ranks compare.

    Args:
        mark: how far the rank has come with them.
    """

    def __init__(self, mark: int, rows: Iterable[Row], rules: MaximumRules) -> None:
        self.mark = mark
        self.rows = [*rows]
        self.values: list[float] = []
        self.maxima: list[bool] = []
        """For each value, whether it is reduced by its maximum."""
        positions: list[int] = []
        for row in self.rows:
            info, values = rules.of(row.shape), row.values
            positions += (info.digest, row.iteration, row.phase.trains)
            self.maxima += info.maxima
            self.values += values if isinstance(values, list) else (values,)  # type: ignore[arg-type]
        self.digest = _digest(array("q", positions).tobytes())

    def names(self) -> list[str]:
        """Return the name of each value."""
        return [name for row in self.rows for name in row.shape.names]

    def keys(self) -> list[int]:
        """Return a key for each value, which is equal on all ranks and differs from 0 and from other keys.

        It is a digest of the name, the iteration and step, and the count of earlier values with the same
        three.
        """
        seen: Counter[str] = Counter()
        keys = []
        positions = (f"{row.iteration} {row.step} {name}" for row in self.rows for name in row.shape.names)
        for position, is_maximum in zip(positions, self.maxima, strict=True):
            seen[position] += 1
            keys.append(_digest(f"{seen[position]} {is_maximum} {position}".encode()))
        return keys


class Outcome(NamedTuple):
    """The result of an exchange: the values up to the mark, and the names that some rank did not have."""

    mark: int
    values: list[float]
    own: list[str]


def exchange(ranks: Ranks, latest: int, table_to: Callable[[int], Table]) -> Steps[Outcome]:
    """Reduce the values that all ranks have, up to the lowest mark of any rank.

    Args:
        latest: the mark that this rank has come to.
        table_to: returns this rank's values up to a mark.

    Raises:
        RuntimeError: a rank is gone, or did not answer in time.
    """
    table = table_to(latest)
    while True:
        header = [table.mark, -table.mark, table.digest, -table.digest, len(table.values)]
        reduced = torch.tensor(header, device="cpu")
        yield from _arrival(ranks.largest(reduced))
        most, least, digest, least_digest, length = reduced.tolist()
        if most == -least:
            break
        table = table_to(-least)
    if digest == -least_digest:
        if length:
            table.values = yield from _reduce(ranks, table.values, table.maxima)
        return Outcome(table.mark, table.values, [])
    return (yield from _reduce_common(ranks, table, length))


def _reduce_common(ranks: Ranks, table: Table, length: int) -> Steps[Outcome]:
    """Reduce the values that all ranks have; `length` is the largest number of values of a rank."""
    own = torch.zeros(length, dtype=torch.int64, device="cpu")
    own[: len(table.values)] = keys = torch.tensor(table.keys(), dtype=torch.int64, device="cpu")
    gathered, work = ranks.gather(own)
    yield from _arrival(work)
    found, counts = torch.cat(gathered).unique(return_counts=True)  # in one order on all ranks
    common = found[(counts == ranks.size) & (found != 0)]
    position = {key: i for i, key in enumerate(keys.tolist())}
    where = [position[key] for key in common.tolist()]
    if where:
        picked = [table.values[i] for i in where], [table.maxima[i] for i in where]
        reduced = yield from _reduce(ranks, *picked)
        for i, value in zip(where, reduced, strict=True):
            table.values[i] = value
    alone = {*range(len(table.values))}.difference(where)
    names = table.names() if alone else []
    return Outcome(table.mark, table.values, [*dict.fromkeys(names[i] for i in sorted(alone))])


def _reduce(ranks: Ranks, values: list[float], maxima: list[bool]) -> Steps[list[float]]:
    """Return the means or maxima of values that all ranks have in this order; a NaN of any rank wins."""
    own = torch.tensor(values, dtype=torch.float64, device="cpu")
    is_maximum = torch.tensor(maxima, device="cpu")
    # gloo's maximum may leave out a NaN, a sum does not
    total = own.masked_fill(is_maximum & ~own.isnan(), 0.0)
    largest = own[is_maximum].nan_to_num(-torch.inf, torch.inf, -torch.inf)
    works = [ranks.total(total)]
    if len(largest):
        works.append(ranks.largest(largest))
    yield from _arrival(*works)
    mean = total / ranks.size
    # a value equal on all ranks, such as a learning rate, stays exact: the sum of three 0.1 is not 0.3
    rounding = torch.finfo(torch.float64).eps * ranks.size
    mean = torch.where((mean - own).abs() <= rounding * own.abs(), own, mean)
    mean[is_maximum] = torch.where(total[is_maximum].isnan(), torch.nan, largest)
    return mean.tolist()


def _arrival(*works: Work) -> Steps[None]:
    while not all(work.is_completed() for work in works):
        yield
    for work in works:
        work.wait()  # it is complete; this raises its error, if it failed


def _digest(text: bytes) -> int:
    """Return a digest of 56 bits: equal in every process, and an int64 also when negated."""
    return int.from_bytes(blake2b(text, digest_size=7).digest())
