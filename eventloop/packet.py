"""Numbers on their way from the training thread to the writers: columns, and the packet of one interval."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple, Protocol

import msgspec
import torch

from eventloop.device import HostCopy
from eventloop.events import Event, ScalarsLogged
from eventloop.history import HistoryBuffer

Scalar = float | torch.Tensor


class Moment(msgspec.Struct, frozen=True, gc=False):
    """Where in the run values were put."""

    iteration: int
    step: int
    epoch: int
    mode: str


def by_step(moment: Moment) -> tuple[int, int]:
    """Sorts moments in the order of a run."""
    return moment.iteration, moment.step


class Place(NamedTuple):
    """The counters that the events of a packet carry besides their own iteration."""

    max_iters: int | None = None
    max_epochs: int | None = None


class Column:
    """The values of one name, in the order they were put, and when each was."""

    __slots__ = ("entered", "moments", "name", "smooth", "values")

    def __init__(self, name: str, smooth: bool) -> None:
        self.name, self.smooth = name, smooth
        self.values: list[Scalar] = []
        self.moments: list[Moment] = []
        self.entered = 0  # how many of them are in their history

    def enter(self, history: HistoryBuffer) -> None:
        """Append to `history` what is not in it. The values must have been read."""
        start, self.entered = self.entered, len(self.values)
        if (
            self.entered - start == 1
        ):  # logged every iteration: the most frequent case, at a third of the cost
            history.update(self.values[-1], self.moments[-1].iteration)  # type: ignore[arg-type]
            return
        iterations = [moment.iteration for moment in self.moments[start:]]
        history.extend([float(value) for value in self.values[start:]], iterations)

    def forget(self, count: int) -> None:
        """Give up the oldest values."""
        del self.values[:count], self.moments[:count]
        self.entered = max(0, self.entered - count)


def tensors_in(columns: Iterable[Column]) -> list[torch.Tensor]:
    """The values that are tensors, in order."""
    return [value for column in columns for value in column.values if isinstance(value, torch.Tensor)]


def read_columns(columns: Iterable[Column], copy: HostCopy | None) -> None:
    """Replace the tensors by their numbers: from a copy under way, or by reading each, which on the CPU is a
    sixth of the cost of stacking them."""
    numbers = iter(copy.values()) if copy is not None else None
    for column in columns:
        values = column.values
        for index, value in enumerate(values):
            if type(value) is not float and isinstance(value, torch.Tensor):
                values[index] = float(value.item()) if numbers is None else next(numbers)


class Settles(Protocol):
    """What a packet needs of the storage it came from."""

    def settle(self, packet: Packet | None = None) -> None:
        """Read `packet`, and those before it, and enter their values into the histories."""


class Packet:
    """The values of one interval on their way from the device; a `Deferred` of the background loop."""

    def __init__(self, columns: list[Column], storage: Settles, place: Place, copy: HostCopy | None) -> None:
        self.columns = columns
        self._storage = storage
        self._place = place
        self._copy = copy

    def ready(self) -> bool:
        """True when the values are on the host."""
        return self._copy is None or self._copy.ready()

    def read(self) -> None:
        """Make every value a float; waits for the device if need be. The storage calls it, once."""
        read_columns(self.columns, self._copy)
        self._copy = None

    def events(self) -> list[Event]:
        """One `scalars_logged` per iteration that has something of its own to say.

        A name with a smoothing hint says one thing per interval and mode, its mean, at its last iteration in it;
        every other value is said at the iteration it was put for.
        """
        self._storage.settle(self)
        if (moment := self._single_moment()) is not None:
            return [
                _logged(
                    moment, {column.name: float(column.values[0]) for column in self.columns}, self._place
                )
            ]
        told = _Told()
        for column in self.columns:
            if column.smooth:
                for last, mean in _means(column):
                    told.say(last, column.name, mean)
            else:
                for moment, value in zip(column.moments, column.values, strict=True):
                    told.say(moment, column.name, float(value))
        return told.events(self._place)

    def _single_moment(self) -> Moment | None:
        """The one moment all values were put at, as when every iteration is logged; None if there are several."""
        if not self.columns or any(len(column.values) != 1 for column in self.columns):
            return None
        first = self.columns[0].moments[0]
        return first if all(column.moments[0] == first for column in self.columns) else None


def _means(column: Column) -> list[tuple[Moment, float]]:
    """The last moment and the mean of each mode's values."""
    moments, values = column.moments, column.values
    if len(values) == 1:
        return [(moments[0], float(values[0]))]
    if len({moment.mode for moment in moments}) == 1:
        return [(max(moments, key=by_step), sum(values) / len(values))]  # type: ignore[list-item]
    pairs = sorted(zip(moments, values, strict=True), key=lambda pair: pair[0].mode)
    means = []
    for _, group in groupby(pairs, key=lambda pair: pair[0].mode):
        own = list(group)
        last = max((moment for moment, _ in own), key=by_step)
        means.append((last, sum(float(value) for _, value in own) / len(own)))
    return means


class _Told:
    """Scalars gathered into events: one per mode and place in the run, in order."""

    def __init__(self) -> None:
        self._rows: dict[Moment, list[dict[str, float]]] = {}

    def say(self, moment: Moment, name: str, value: float) -> None:
        """Enter a value; a name said at that moment before gets another row, and loses nothing."""
        rows = self._rows.get(moment)
        if rows is None:
            rows = self._rows[moment] = [{}]
        for row in rows:
            if name not in row:
                row[name] = value
                return
        rows.append({name: value})

    def events(self, place: Place) -> list[Event]:
        """The rows in the order of their steps; those of one place in the order they were begun."""
        return [
            _logged(moment, scalars, place)
            for moment in sorted(self._rows, key=by_step)
            for scalars in self._rows[moment]
        ]


def _logged(moment: Moment, scalars: dict[str, float], place: Place) -> ScalarsLogged:
    return ScalarsLogged(
        mode=moment.mode, iter=moment.iteration, step=moment.step, epoch=moment.epoch, scalars=scalars,
        max_iters=place.max_iters, max_epochs=place.max_epochs,
    )  # fmt: skip
