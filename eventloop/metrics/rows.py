"""Hold logged numbers as rows, and turn the rows of a logging interval, a `Packet`, into events.

`EventStorage` makes rows on the training thread and packs them; the background reads the packets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from eventloop.events import Event, ScalarsLogged
from eventloop.metrics.device import HostCopy
from eventloop.metrics.history import HistoryBuffer

Scalar = float | torch.Tensor


class Moment(msgspec.Struct, frozen=True, gc=False):
    """The position in the run at which values were put."""

    iteration: int
    step: int
    epoch: int
    mode: str


class Shape:
    """The names of a row and their smoothing hint.

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

    A call makes only this object; the background sorts the values by name.
    """

    shape: Shape
    values: Scalar | list[Scalar]
    """One value a name. A single value is not in a list, which would be a third of the cost of putting it."""
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


class Block:
    """Rows of the same names, in order, as a table whose columns are the names.

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
    """Group rows by their shapes; if a name is in two shapes, make a block for each name instead.

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


def enter(rows: list[Row], histories: dict[str, HistoryBuffer], latest: dict[str, tuple[float, Row]]) -> None:
    """Append rows that were read to the histories of their names, and set each name's last value."""
    for block in blocks_of(rows):
        iterations = [row.iteration for row in block.rows]
        for name, values in zip(block.shape.names, block.columns, strict=True):
            history = histories.get(name)
            if history is None:
                history = histories[name] = HistoryBuffer()
            history.extend(values, iterations)
            latest[name] = values[-1], block.rows[-1]


def tensors_in(rows: Iterable[Row]) -> list[torch.Tensor]:
    """Return the values that are tensors, in order."""
    # isinstance(float, Tensor) takes 0.4 us, and this runs on the training thread
    found: list[Any] = []
    for row in rows:
        values = row.values
        if type(values) is list:
            found += [value for value in values if type(value) is not float]
        elif type(values) is not float:
            found.append(values)
    return found


class Unread(NamedTuple):
    """A value that could not be read."""

    name: str
    iteration: int
    error: Exception


def read_rows(rows: list[Row], copy: HostCopy | None) -> list[Unread]:
    """Replace tensors by their numbers; remove values that cannot be read from the rows, and return them.

    The numbers come from `copy`, or from each tensor without one: on the CPU this is a sixth of the cost of
    a stack.
    """
    try:
        numbers = iter(copy.values()) if copy is not None else None
        _replace_tensors(rows, _number_of if numbers is None else lambda _: next(numbers))
    except Exception:  # of one value: read one by one to keep the others
        if copy is not None:
            copy.wait()
        return _read_one_by_one(rows)
    return []


def read_on_host(rows: Iterable[Row]) -> None:
    """Replace the tensors on the CPU by their numbers, and leave those that cannot be read to `read_rows`."""
    _replace_tensors(rows, _number_if_on_host)


def _replace_tensors(rows: Iterable[Row], by: Callable[[torch.Tensor], Scalar]) -> None:
    for row in rows:
        values: Any = row.values
        if type(values) is list:
            values[:] = [value if type(value) is float else by(value) for value in values]
        elif type(values) is not float:
            row.values = by(values)


def _read_one_by_one(rows: list[Row]) -> list[Unread]:
    """Read each value alone, remove those that cannot be read from `rows` in place, and return them."""
    unread: list[Unread] = []
    kept: list[Row] = []
    for row in rows:
        values = row.values if isinstance(row.values, list) else [row.values]
        names: list[str] = []
        numbers: list[Scalar] = []
        for name, value in zip(row.shape.names, values, strict=True):
            try:
                numbers.append(value if type(value) is float else float(value.item()))  # type: ignore[union-attr]
            except Exception as error:
                unread.append(Unread(name, row.iteration, error))
            else:
                names.append(name)
        if len(names) < len(values):
            row.shape = Shape(tuple(names), row.shape.smooth)
        if numbers:
            row.values = numbers if len(numbers) > 1 else numbers[0]
            kept.append(row)
    rows[:] = kept
    return unread


def _number_if_on_host(tensor: torch.Tensor) -> Scalar:
    try:
        return _number_of(tensor) if tensor.device.type == "cpu" else tensor
    except Exception:
        return tensor


def _number_of(tensor: torch.Tensor) -> float:
    """Return the one element of a tensor.

    On the CPU, `tolist` keeps the interpreter's lock, while `item` releases it and must wait for it again.
    Subclasses of `Tensor` may refuse `tolist`.
    """
    number: Any = tensor.tolist() if type(tensor) is torch.Tensor else None
    return number if type(number) is float else float(tensor.item())


class ReadsPackets(Protocol):
    """The method of a storage that its packets call."""

    def settle(self, packet: Packet | None = None) -> None:
        """Read the values of `packet` and of all packets before it."""


class Packet:
    """The values of one logging interval; a `Deferred` of the background loop.

    Args:
        rows: the rows put in the interval.
        entered: how many of the rows are in the histories already.
        copy: the copy of their tensors to the host, if one was started.
    """

    prompt = True

    def __init__(
        self, rows: list[Row], entered: int, storage: ReadsPackets, place: Place, copy: HostCopy | None
    ) -> None:
        self.rows = rows
        self.entered = entered
        self._storage = storage
        self._place = place
        self._copy = copy

    def __repr__(self) -> str:
        if not self.rows:
            return "Packet(no metrics)"
        return f"Packet(metrics of iterations {self.rows[0].iteration} to {self.rows[-1].iteration})"

    def ready(self) -> bool:
        """Return whether the values are on the host."""
        return self._copy is None or self._copy.ready()

    def read(self) -> list[Unread]:
        """Make every value a float, after waiting for the device; return those that cannot be read.

        They are removed from the rows. Only the storage calls this, and once.
        """
        unread = read_rows(self.rows, self._copy)
        self._copy = None
        return unread

    def settled(self) -> list[Row]:
        """Return the rows after reading them and all packets before; waits for the device if necessary."""
        self._storage.settle(self)
        return self.rows

    def events(self) -> list[Event]:
        """Return the `scalars_logged` events of the interval; waits for the device if necessary."""
        return self.events_of(self.settled())

    def events_of(self, rows: list[Row]) -> list[Event]:
        """Return the `scalars_logged` events of `rows`, which were read: one for each position with values.

        A name with a smoothing hint has one value per interval and mode: its mean, at the last iteration of
        the name. Any other value is at the iteration that it was put for.
        """
        scalars = _ScalarsByMoment()
        if _each_name_once(rows):  # an interval of one iteration
            for row in rows:
                scalars.add(row.moment, row.scalars())
            return scalars.events(self._place)
        for block in blocks_of(rows):
            if block.shape.smooth:
                for own in _by_mode(block):
                    scalars.add(_last(own.rows).moment, own.means())
            else:
                for row in block.rows:
                    scalars.add(row.moment, row.scalars())
        return scalars.events(self._place)


def _each_name_once(rows: list[Row]) -> bool:
    """Return whether every name has one value, so that there is no mean to compute."""
    if len({row.shape for row in rows}) < len(rows):
        return False
    names = [name for row in rows for name in row.shape.names]
    return len({*names}) == len(names)


def _by_mode(block: Block) -> list[Block]:
    """Split a block by the modes of its rows."""
    rows = block.rows
    modes = dict.fromkeys([row.phase.mode for row in rows])
    if len(modes) == 1:
        return [block]
    return [Block(block.shape, [row for row in rows if row.phase.mode == mode]) for mode in modes]


def _last(rows: list[Row]) -> Row:
    """Return the row with the last position in the run; of rows at one position the first."""
    return rows[0] if len(rows) == 1 else max(rows, key=by_step)


class _ScalarsByMoment:
    """Scalars grouped by mode and position in the run; each group becomes an event."""

    def __init__(self) -> None:
        self._rows: dict[Moment, list[dict[str, float]]] = {}

    def add(self, moment: Moment, scalars: dict[str, float]) -> None:
        """Add values at a position; a name that has a value there already starts another event."""
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
        mode=moment.mode, iter=moment.iteration, step=moment.step, epoch=moment.epoch, scalars=scalars,
        max_iters=place.max_iters, max_epochs=place.max_epochs,
    )  # fmt: skip
