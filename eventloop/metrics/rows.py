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


class Moment(msgspec.Struct, frozen=True, gc=False):
    """The position in the run at which values were put."""

    iteration: int
    step: int
    epoch: int
    mode: str


class Shape:
    """The names of the values in a row, and the smoothing hint of each name.

    A storage uses one object for equal names, so that rows can be grouped by identity.
    """

    __slots__ = ("names", "smooth")

    def __init__(self, names: tuple[str, ...], smooth: bool) -> None:
        self.names, self.smooth = names, smooth


class Phase(msgspec.Struct, frozen=True, gc=False):
    """The epoch and mode of values, and whether they belong to the running iteration or precede it.

    With `trains` the step is `iteration + 1`, otherwise `iteration`.
    """

    epoch: int
    mode: str
    trains: bool

    def at(self, iteration: int) -> Moment:
        """Return the position of an iteration in this phase."""
        return Moment(iteration, iteration + self.trains, self.epoch, self.mode)


class Row(msgspec.Struct, gc=False):
    """Values that were put by one call, with their position in the run.

    This is the only object that a call creates; the background sorts the values by name.
    """

    shape: Shape
    values: Scalar | list[Scalar]
    """One value for each name.

    A single value is not in a list, because a list would take a third of the time of a put.
    """
    iteration: int
    phase: Phase

    def scalars(self) -> dict[str, Any]:
        """Return the values by name; they are floats once they have been read."""
        values = self.values if isinstance(self.values, list) else (self.values,)
        return dict(zip(self.shape.names, values, strict=True))

    @property
    def step(self) -> int:
        """Return the number of completed iterations that the values belong to."""
        return self.iteration + self.phase.trains

    @property
    def moment(self) -> Moment:
        """Return the position in the run."""
        return self.phase.at(self.iteration)


def by_step(position: Moment | Row) -> tuple[int, int]:
    """Return the key that sorts rows and moments in the order of the run."""
    return position.iteration, position.step


class Place(NamedTuple):
    """The limits of the run, which are fields of every logging event."""

    max_iters: int | None = None
    max_epochs: int | None = None


class Loss(NamedTuple):
    """A loss of the training, which may be NaN or infinite."""

    value: float
    iteration: int
    epoch: int


class Unread(NamedTuple):
    """A value that could not be read."""

    name: str
    iteration: int
    error: Exception


class Block:
    """Rows with the same names, in order, as a table whose columns are the names.

    All values must have been read. Working by columns is cheaper than by values.
    """

    __slots__ = ("columns", "rows", "shape")

    def __init__(self, shape: Shape, rows: list[Row]) -> None:
        self.shape, self.rows = shape, rows
        values: list[Any] = [row.values for row in rows]
        self.columns: list[Sequence[Any]] = (
            [values] if len(shape.names) == 1 else [*zip(*values, strict=True)]
        )

    def means(self) -> dict[str, float]:
        """Return the mean of each column, by name."""
        count = len(self.rows)
        return {
            name: sum(column) / count for name, column in zip(self.shape.names, self.columns, strict=True)
        }


def blocks_of(rows: list[Row]) -> list[Block]:
    """Group rows by their shapes; if a name occurs in two shapes, create a block for each name instead.

    All values of a name are then in one block, in order.
    """
    by_shape: dict[Shape, list[Row]] = {}
    for row in rows:
        own = by_shape.get(row.shape)
        if own is None:
            by_shape[row.shape] = [row]
        else:
            own.append(row)
    names = [name for shape in by_shape for name in shape.names]
    if len({*names}) < len(names):
        return blocks_of(_singles(rows))
    return [Block(shape, own) for shape, own in by_shape.items()]


def _singles(rows: list[Row]) -> list[Row]:
    """Return one row for each value."""
    shapes = {name: Shape((name,), row.shape.smooth) for row in rows for name in row.shape.names}
    return [
        Row(shapes[name], value, row.iteration, row.phase)
        for row in rows
        for name, value in row.scalars().items()
    ]


def put_by_two(rows: list[Row]) -> dict[str, int]:
    """Find names under which two sources put different numbers in one training iteration.

    The log would have the mean of both. Two puts are of different sources if the sets of names that they put
    together differ. Names without a smoothing hint have no mean, and a train step may put its loss and return
    it too, so these do not count.

    Returns:
        The first such iteration of each name.
    """
    count = Counter(name for shape in {row.shape for row in rows} if shape.smooth for name in shape.names)
    shared = {name for name, shapes in count.items() if shapes > 1}
    if not shared:
        return {}
    found: dict[str, int] = {}
    first: dict[tuple[str, int], tuple[Shape, float]] = {}
    for row in rows:
        # the batches of a validation have one iteration, and each may put other names
        if row.phase.mode != "train" or shared.isdisjoint(row.shape.names):
            continue
        for name, value in row.scalars().items():
            if name not in shared:
                continue
            shape, before = first.setdefault((name, row.step), (row.shape, value))
            if shape.names != row.shape.names and value != before:
                found.setdefault(name, row.iteration)
    return found


def losses_in(rows: Iterable[Row], since: int) -> Iterator[Loss]:
    """Yield the training losses from iteration `since` on, in order, up to the first on a device."""
    for row in rows:
        if row.iteration < since or "loss" not in row.shape.names or row.phase.mode != "train":
            continue
        value = row.scalars()["loss"]
        if type(value) is not float:
            if value.device.type != "cpu":
                return
            value = number_of(value)
        yield Loss(value, row.iteration, row.phase.epoch)


def number_of(tensor: torch.Tensor) -> float:
    """Return the only element of a tensor.

    On the CPU, `tolist` keeps the interpreter's lock, while `item` releases it and must wait to get it back.
    Subclasses of `Tensor` may refuse `tolist`.
    """
    number: Any = tensor.tolist() if type(tensor) is torch.Tensor else None
    return number if type(number) is float else float(tensor.item())


def events_of(rows: list[Row], place: Place) -> list[Event]:
    """Return the `scalars_logged` events for `rows` that were read: one for each position with values.

    A name with a smoothing hint has one value per interval and mode: its mean, at the last iteration of the
    name. Any other value is at the iteration for which it was put.
    """
    scalars = _ScalarsByMoment()
    if _each_name_once(rows):  # an interval of one iteration
        for row in rows:
            scalars.add(row.moment, row.scalars())
        return scalars.events(place)
    for block in blocks_of(rows):
        if block.shape.smooth:
            for own in _by_mode(block):
                scalars.add(_last(own.rows).moment, own.means())
        else:
            for row in block.rows:
                scalars.add(row.moment, row.scalars())
    return scalars.events(place)


def _each_name_once(rows: list[Row]) -> bool:
    """Return whether every name has one value, so that there is no mean to compute."""
    if len({row.shape for row in rows}) < len(rows):
        return False
    names = [name for row in rows for name in row.shape.names]
    return len({*names}) == len(names)


def _by_mode(block: Block) -> list[Block]:
    """Split a block by the modes of its rows, such as "train" and "val"."""
    rows = block.rows
    modes = dict.fromkeys([row.phase.mode for row in rows])
    if len(modes) == 1:
        return [block]
    return [Block(block.shape, [row for row in rows if row.phase.mode == mode]) for mode in modes]


def _last(rows: list[Row]) -> Row:
    """Return the row with the last position in the run; if several have it, the first of them."""
    return rows[0] if len(rows) == 1 else max(rows, key=by_step)


class _ScalarsByMoment:
    """Scalars grouped by mode and position in the run; each group becomes an event."""

    def __init__(self) -> None:
        self._rows: dict[Moment, list[dict[str, float]]] = {}

    def add(self, moment: Moment, scalars: dict[str, float]) -> None:
        """Add values at a position; if a name already has a value there, they start another event."""
        rows = self._rows.get(moment)
        if rows is None:
            self._rows[moment] = [scalars]
            return
        for row in rows:
            if row.keys().isdisjoint(scalars):
                row.update(scalars)
                return
        rows.append(scalars)

    def events(self, place: Place) -> list[Event]:
        """Return the events in the order of their steps; those at one position in the order of `add`."""
        return [
            _logged(moment, scalars, place)
            for moment in sorted(self._rows, key=by_step)
            for scalars in self._rows[moment]
        ]


def _logged(moment: Moment, scalars: dict[str, float], place: Place) -> ScalarsLogged:
    return ScalarsLogged(
        mode=moment.mode,
        iter=moment.iteration,
        step=moment.step,
        epoch=moment.epoch,
        scalars=scalars,
        max_iters=place.max_iters,
        max_epochs=place.max_epochs,
    )
