"""Hold logged numbers as rows, and turn the rows of a logging interval into events.

`EventStorage` creates rows on the training thread; `eventloop.metrics.packet` reads them in the background.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from eventloop.events import Event, ScalarsLogged

Scalar = float | torch.Tensor
"""A number, or a tensor with one element that is not read yet."""


class Position(msgspec.Struct, frozen=True, gc=False):
    """The position in the run at which values were put."""

    iteration: int
    """The 0-based iteration; for values between two iterations the next one."""
    step: int
    """The number of completed iterations, including the running one for values within it."""
    epoch: int
    mode: str


class NameSet:
    """The names of the values in a row, and their common smoothing hint.

    A storage uses one object for equal names, so that rows can be grouped by identity.

    Args:
        names: the names.
        smooth: whether the mean of a logging interval is logged, not each value.
    """

    __slots__ = ("names", "smooth")

    def __init__(self, names: tuple[str, ...], smooth: bool) -> None:
        self.names, self.smooth = names, smooth


class Phase(msgspec.Struct, frozen=True, gc=False):
    """The part of a `Position` that stays the same over iterations, so that rows can share one object."""

    epoch: int
    mode: str
    trains: bool
    """Whether values belong to the running iteration, which `step` then counts as completed."""

    def at(self, iteration: int) -> Position:
        """Return the position of an iteration in this phase."""
        return Position(iteration, iteration + self.trains, self.epoch, self.mode)


class Row(msgspec.Struct, gc=False):
    """The values that were put by one call of the storage, with their position in the run.

    This is the only object that a call creates; the background groups the values by name.
    """

    name_set: NameSet
    values: Scalar | list[Scalar]
    """A list with one value for each name, or the value itself if there is one name.

    Creating a list would take a third of the time of a put.
    """
    iteration: int
    phase: Phase

    def scalars(self) -> dict[str, Any]:
        """Return the values by name; they are floats once they have been read."""
        values = self.values if isinstance(self.values, list) else (self.values,)
        return dict(zip(self.name_set.names, values, strict=True))

    @property
    def step(self) -> int:
        """Return the number of completed iterations, including the running one for values within it."""
        return self.iteration + self.phase.trains

    @property
    def position(self) -> Position:
        """Return the position in the run."""
        return self.phase.at(self.iteration)


def by_step(position: Position | Row) -> tuple[int, int]:
    """Return a sort key for rows and positions, which sorts them in the order of the run."""
    return position.iteration, position.step


class RunLimits(NamedTuple):
    """The limits of the run, which are fields of every logging event."""

    max_iters: int | None = None
    max_epochs: int | None = None


class Loss(NamedTuple):
    """A loss of the training, which may be NaN or infinite."""

    value: float
    iteration: int
    epoch: int


class UnreadableValue(NamedTuple):
    """The name and iteration of a value that could not be read from its tensor, and the error."""

    name: str
    iteration: int
    error: Exception


class RowTable:
    """Rows with the same names as a table with one column of values for each name.

    The values are floats. To work by columns takes less time than by values.
    """

    __slots__ = ("columns", "name_set", "rows")

    def __init__(self, name_set: NameSet, rows: list[Row]) -> None:
        self.name_set, self.rows = name_set, rows
        values: list[Any] = [row.values for row in rows]
        self.columns: list[Sequence[Any]]
        self.columns = [values] if len(name_set.names) == 1 else [*zip(*values, strict=True)]

    def means(self) -> dict[str, float]:
        """Return the mean of each column, by name."""
        count = len(self.rows)
        columns = zip(self.name_set.names, self.columns, strict=True)
        return {name: sum(column) / count for name, column in columns}


def tables_of(rows: list[Row]) -> list[RowTable]:
    """Group rows with equal names into tables, such that all values of a name are in one table, in order.

    If a name occurs in two sets of names, each name gets a table of its own.
    """
    rows_by_names: dict[NameSet, list[Row]] = {}
    for row in rows:
        group = rows_by_names.get(row.name_set)
        if group is None:
            rows_by_names[row.name_set] = [row]
        else:
            group.append(row)
    names = [name for name_set in rows_by_names for name in name_set.names]
    if len({*names}) < len(names):
        return tables_of(_single_value_rows(rows))
    return [RowTable(name_set, group) for name_set, group in rows_by_names.items()]


def _single_value_rows(rows: list[Row]) -> list[Row]:
    """Return a row for each value of `rows`, in order."""
    single_names = {
        name: NameSet((name,), row.name_set.smooth) for row in rows for name in row.name_set.names
    }
    single_rows = []
    for row in rows:
        for name, value in row.scalars().items():
            single_rows.append(Row(single_names[name], value, row.iteration, row.phase))
    return single_rows


def put_by_two(rows: list[Row]) -> dict[str, int]:
    """Find names under which two sources have put different numbers in one training iteration.

    The log would have the mean of both numbers. Two puts are of different sources if they have different sets
    of names. Equal numbers are no mistake, because a train step may put its loss and also return it. Names
    without a smoothing hint have no mean.

    Returns:
        the first such iteration of each name.
    """
    name_sets = {row.name_set for row in rows}
    count = Counter(name for name_set in name_sets if name_set.smooth for name in name_set.names)
    shared_names = {name for name, name_set_count in count.items() if name_set_count > 1}
    if not shared_names:
        return {}
    iterations: dict[str, int] = {}
    first_put: dict[tuple[str, int], tuple[NameSet, float]] = {}  # by name and step
    for row in rows:
        # in a validation two puts are no mistake, because all its batches belong to one iteration
        if row.phase.mode != "train" or shared_names.isdisjoint(row.name_set.names):
            continue
        for name, value in row.scalars().items():
            if name not in shared_names:
                continue
            first_name_set, first_value = first_put.setdefault((name, row.step), (row.name_set, value))
            if first_name_set.names != row.name_set.names and value != first_value:
                iterations.setdefault(name, row.iteration)
    return iterations


def losses_in(rows: Iterable[Row], since: int) -> Iterator[Loss]:
    """Yield the training losses from iteration `since` on, up to the first that is not on the host."""
    for row in rows:
        if row.iteration < since or "loss" not in row.name_set.names or row.phase.mode != "train":
            continue
        value = row.scalars()["loss"]
        if type(value) is not float:
            if value.device.type != "cpu":
                return
            value = number_of(value)
        yield Loss(value, row.iteration, row.phase.epoch)


def number_of(tensor: torch.Tensor) -> float:
    """Return the only element of a tensor.

    `tolist` is used because it keeps the interpreter lock on the CPU; `item` releases the lock and waits to
    acquire it again. Subclasses of `Tensor` may not support `tolist`.
    """
    number: Any = tensor.tolist() if type(tensor) is torch.Tensor else None
    return number if type(number) is float else float(tensor.item())


def events_of(rows: list[Row], limits: RunLimits) -> list[Event]:
    """Return the `scalars_logged` events of rows whose values are floats: one event for each position.

    A name with a smoothing hint gets one value per mode: the mean of its values in `rows`, at their last
    position. Any other value is logged at its own position.

    Args:
        rows: the rows of a logging interval.
        limits: the limits of the run, which are fields of the events.
    """
    scalars = _ScalarsByPosition()
    if _each_name_once(rows):  # the usual case for an interval of one iteration
        for row in rows:
            scalars.add(row.position, row.scalars())
        return scalars.events(limits)
    for table in tables_of(rows):
        if table.name_set.smooth:
            for mode_table in _by_mode(table):
                scalars.add(_last(mode_table.rows).position, mode_table.means())
        else:
            for row in table.rows:
                scalars.add(row.position, row.scalars())
    return scalars.events(limits)


def _each_name_once(rows: list[Row]) -> bool:
    """Return whether every name has only one value, so that no mean is computed."""
    if len({row.name_set for row in rows}) < len(rows):
        return False
    names = [name for row in rows for name in row.name_set.names]
    return len({*names}) == len(names)


def _by_mode(table: RowTable) -> list[RowTable]:
    """Split a table by the modes of its rows, such as "train" and "val"."""
    rows = table.rows
    modes = dict.fromkeys([row.phase.mode for row in rows])
    if len(modes) == 1:
        return [table]
    return [RowTable(table.name_set, [row for row in rows if row.phase.mode == mode]) for mode in modes]


def _last(rows: list[Row]) -> Row:
    """Return the row with the last position in the run; of several with that position, the first."""
    return rows[0] if len(rows) == 1 else max(rows, key=by_step)


class _ScalarsByPosition:
    """Group scalars by their positions in the run; each group becomes an event."""

    def __init__(self) -> None:
        self._groups: dict[Position, list[dict[str, float]]] = {}

    def add(self, position: Position, scalars: dict[str, float]) -> None:
        """Add scalars to the first group of their position that has no such name, or to a new group."""
        groups = self._groups.get(position)
        if groups is None:
            self._groups[position] = [scalars]
            return
        for group in groups:
            if group.keys().isdisjoint(scalars):
                group.update(scalars)
                return
        groups.append(scalars)

    def events(self, limits: RunLimits) -> list[Event]:
        """Return an event for each group, sorted by position, and at one position in the order of `add`."""
        events: list[Event] = []
        for position in sorted(self._groups, key=by_step):
            events += [_logged(position, scalars, limits) for scalars in self._groups[position]]
        return events


def _logged(position: Position, scalars: dict[str, float], limits: RunLimits) -> ScalarsLogged:
    """Return the event for scalars at a position."""
    return ScalarsLogged(
        mode=position.mode,
        iter=position.iteration,
        step=position.step,
        epoch=position.epoch,
        scalars=scalars,
        max_iters=limits.max_iters,
        max_epochs=limits.max_epochs,
    )
