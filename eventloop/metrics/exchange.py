"""Values of all ranks made one, by collectives that nobody waits for.

A collective over tensors of unequal lengths crashes, or hangs. So the ranks first compare, in a tensor of five
numbers, how far each has come, and a digest of what it has up to there: names, iterations, their order. Only where all
have the same are the values themselves added up. Where they differ the ranks gather what each has, and add up what all
of them have; whatever else there is stays as it is.

An exchange is a generator: it yields as long as the ranks' answer is under way. Each rank decides by what was reduced
alone, so that all of them come to the same collectives in the same order.
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
"""Sets of names whose digests are remembered, at most."""


class Work(Protocol):
    """A collective under way."""

    def is_completed(self) -> bool: ...
    def wait(self) -> Any: ...


class Ranks(Protocol):
    """The ranks that exchange; each method begins a collective."""

    size: int

    def total(self, tensor: torch.Tensor) -> Work:
        """Replace each element by its sum over the ranks."""

    def largest(self, tensor: torch.Tensor) -> Work:
        """Replace each element by its maximum."""

    def gather(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Work]:
        """All ranks' tensors, which are of one length."""


class Kind(NamedTuple):
    """What an exchange needs to know of names that are put together."""

    number: int
    """A digest of them."""
    maxima: list[bool]
    """Which of them are maxima."""


class Kinds:
    """Tells which values take the maximum over the ranks: those of these names, and of the groups named so."""

    def __init__(self, maxima: Sequence[str]) -> None:
        self._names = frozenset(maxima)
        self._groups = tuple(f"{name}/" for name in maxima)
        self._found: dict[Shape, Kind] = {}

    def of(self, shape: Shape) -> Kind:
        """The kind of a shape."""
        kind = self._found.get(shape)
        if kind is None:
            maxima = [name in self._names or name.startswith(self._groups) for name in shape.names]
            kind = Kind(_digest(repr([shape.names, maxima]).encode()), maxima)
            if len(self._found) >= SHAPES_LIMIT:
                self._found.clear()
            self._found[shape] = kind
        return kind


class Table:
    """The values of rows, which were read, in their order.

    Args:
        mark: how far the rank has come with them.
    """

    def __init__(self, mark: int, rows: Iterable[Row], kinds: Kinds) -> None:
        self.mark = mark
        self.rows = [*rows]
        self.values: list[float] = []
        self.maxima: list[bool] = []
        """Whether the value is one."""
        places: list[int] = []
        for row in self.rows:
            kind, values = kinds.of(row.shape), row.values
            places += (kind.number, row.iteration, row.phase.trains)
            self.maxima += kind.maxima
            self.values += values if isinstance(values, list) else (values,)  # type: ignore[arg-type]
        self.digest = _digest(array("q", places).tobytes())

    def names(self) -> list[str]:
        """Of each value."""
        return [name for row in self.rows for name in row.shape.names]

    def keys(self) -> list[int]:
        """A number for each value that says which it is: its name, its place in the run, and whether it is the first of
        them there, the second and so on. None is 0, and no two are the same."""
        seen: Counter[str] = Counter()
        keys = []
        places = (f"{row.iteration} {row.step} {name}" for row in self.rows for name in row.shape.names)
        for place, is_maximum in zip(places, self.maxima, strict=True):
            seen[place] += 1
            keys.append(_digest(f"{seen[place]} {is_maximum} {place}".encode()))
        return keys


class Outcome(NamedTuple):
    """What an exchange came to: the values up to the mark, and the names of those that some rank has not."""

    mark: int
    values: list[float]
    own: list[str]


def exchange(ranks: Ranks, latest: int, table_to: Callable[[int], Table]) -> Steps[Outcome]:
    """Reduce what all ranks have up to the mark that the last of them has come to.

    Args:
        latest: the mark that this rank has come to.
        table_to: gives its values up to a mark.

    Raises:
        RuntimeError: a rank is gone, or did not come in time.
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
    """Reduce the values that all ranks have; `length` is the number of values of whoever has most."""
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
    """The means, or maxima, of values that all ranks have in this order. A NaN of any rank is the result."""
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
    # what all ranks have alike, as a learning rate, stays what it is: the sum of three 0.1 is not 0.3
    rounding = torch.finfo(torch.float64).eps * ranks.size
    mean = torch.where((mean - own).abs() <= rounding * own.abs(), own, mean)
    mean[is_maximum] = torch.where(total[is_maximum].isnan(), torch.nan, largest)
    return mean.tolist()


def _arrival(*works: Work) -> Steps[None]:
    while not all(work.is_completed() for work in works):
        yield
    for work in works:
        work.wait()  # it is over: this raises its error, where it has one


def _digest(text: bytes) -> int:
    """56 bits, the same in every process, and negated still an int64."""
    return int.from_bytes(blake2b(text, digest_size=7).digest())
