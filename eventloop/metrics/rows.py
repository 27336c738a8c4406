"""Numbers on their way from the training thread to the writers: rows, and the packet of one interval."""

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
    """Where in the run values were put."""

    iteration: int
    step: int
    epoch: int
    mode: str


class Shape:
    """Names that are put together, and their smoothing hint; one object for as long as a storage remembers it."""

    __slots__ = ("names", "smooth")

    def __init__(self, names: tuple[str, ...], smooth: bool) -> None:
        self.names, self.smooth = names, smooth


class Phase(msgspec.Struct, frozen=True, gc=False):
    """What stays over many values: the epoch and mode, and whether they are of the iteration that is running, whose
    step is one more, or of the moment before it."""

    epoch: int
    mode: str
    trains: bool

    def at(self, iteration: int) -> Moment:
        """The place of an iteration."""
        return Moment(iteration, iteration + self.trains, self.epoch, self.mode)


class Row(msgspec.Struct, gc=False):
    """Values that were put together, and where in the run that was. One of these is all that putting makes: what a
    name has of its own is sorted out on the background side."""

    shape: Shape
    values: Scalar | list[Scalar]
    """One a name. Of one name the value itself: a list of it would be a third of what putting costs."""
    iteration: int
    phase: Phase

    def scalars(self) -> dict[str, Any]:
        """The values by their names; floats, once they have been read."""
        values = self.values if isinstance(self.values, list) else (self.values,)
        return dict(zip(self.shape.names, values, strict=True))

    @property
    def step(self) -> int:
        """As the moment's."""
        return self.iteration + self.phase.trains

    @property
    def moment(self) -> Moment:
        """The place alone."""
        return self.phase.at(self.iteration)


def by_step(place: Moment | Row) -> tuple[int, int]:
    """Sorts what was put in the order of a run."""
    return place.iteration, place.step


class Place(NamedTuple):
    """The counters that the events of a packet carry besides their own iteration."""

    max_iters: int | None = None
    max_epochs: int | None = None


class Block:
    """Rows of the same names, in the order they were put: a table, and cheaper to read by its columns than by its
    values. They must have been read."""

    __slots__ = ("columns", "rows", "shape")

    def __init__(self, shape: Shape, rows: list[Row]) -> None:
        self.shape, self.rows = shape, rows
        values: list[Any] = [row.values for row in rows]
        self.columns: list[Sequence[Any]] = (
            [values] if len(shape.names) == 1 else [*zip(*values, strict=True)]
        )

    def means(self) -> dict[str, float]:
        """Of each column."""
        count = len(self.rows)
        return {
            name: sum(column) / count for name, column in zip(self.shape.names, self.columns, strict=True)
        }


def blocks_of(rows: list[Row]) -> list[Block]:
    """The rows by their shapes. Where a name is in two of them each name gets a block of its own, so that all its
    values are in one place, and in order."""
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
    """A row for each value."""
    shapes = {name: Shape((name,), row.shape.smooth) for row in rows for name in row.shape.names}
    return [
        Row(shapes[name], value, row.iteration, row.phase)
        for row in rows
        for name, value in row.scalars().items()
    ]


def enter(rows: list[Row], histories: dict[str, HistoryBuffer], latest: dict[str, tuple[float, Row]]) -> None:
    """Append rows, which must have been read, to the histories of their names, and note each name's last value."""
    for block in blocks_of(rows):
        iterations = [row.iteration for row in block.rows]
        for name, values in zip(block.shape.names, block.columns, strict=True):
            history = histories.get(name)
            if history is None:
                history = histories[name] = HistoryBuffer()
            history.extend(values, iterations)
            latest[name] = values[-1], block.rows[-1]


def tensors_in(rows: Iterable[Row]) -> list[torch.Tensor]:
    """The values that are tensors, in order."""
    # to ask a float whether it is a tensor takes 0.4 us, and this is done on the training thread
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
    """Replace the tensors by their numbers: from a copy under way, or by reading each, which on the CPU is a
    sixth of the cost of stacking them. Values that cannot be read are taken out of the rows, and returned."""
    try:
        numbers = iter(copy.values()) if copy is not None else None
        _replace_tensors(rows, _number_of if numbers is None else lambda _: next(numbers))
    except Exception:  # of one of them: the others are read one by one
        if copy is not None:
            copy.wait()
        return _read_what_can_be(rows)
    return []


def read_on_host(rows: Iterable[Row]) -> None:
    """Replace the tensors that nothing has to be waited for by their numbers: those of a CPU. One that cannot be read
    stays, for `read_rows` to tell of."""
    _replace_tensors(rows, _number_if_on_host)


def _replace_tensors(rows: Iterable[Row], by: Callable[[torch.Tensor], Scalar]) -> None:
    for row in rows:
        values: Any = row.values
        if type(values) is list:
            values[:] = [value if type(value) is float else by(value) for value in values]
        elif type(values) is not float:
            row.values = by(values)


def _read_what_can_be(rows: list[Row]) -> list[Unread]:
    """As `read_rows`, of rows in which something cannot be. Changes the list itself, which others have, too."""
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
    """Read the one element of a tensor. On the CPU `tolist` keeps the interpreter's lock, which `item` gives up and has to
    get back; subclasses of `Tensor` may refuse `tolist`."""
    number: Any = tensor.tolist() if type(tensor) is torch.Tensor else None
    return number if type(number) is float else float(tensor.item())


class Settles(Protocol):
    """What a packet needs of the storage it came from."""

    def settle(self, packet: Packet | None = None) -> None:
        """Read `packet`, and those before it."""


class Packet:
    """The values of one interval on their way from the device; a `Deferred` of the background loop.

    Args:
        rows: what was put.
        entered: how many of the rows are in the histories already.
    """

    prompt = True

    def __init__(
        self, rows: list[Row], entered: int, storage: Settles, place: Place, copy: HostCopy | None
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
        """True when the values are on the host."""
        return self._copy is None or self._copy.ready()

    def read(self) -> list[Unread]:
        """Make every value a float; waits for the device if need be. Returns those that cannot be read, which are not
        among the rows any more. The storage calls it, once."""
        unread = read_rows(self.rows, self._copy)
        self._copy = None
        return unread

    def settled(self) -> list[Row]:
        """The rows, once all of them are read, and those of the packets before; waits for the device if need be."""
        self._storage.settle(self)
        return self.rows

    def events(self) -> list[Event]:
        """See `events_of`."""
        return self.events_of(self.settled())

    def events_of(self, rows: list[Row]) -> list[Event]:
        """One `scalars_logged` per iteration that has something of its own to say in `rows`, which were read.

        A name with a smoothing hint says one thing per interval and mode, its mean, at its last iteration in it;
        every other value is said at the iteration it was put for.
        """
        told = _Told()
        if _each_name_once(rows):  # of an interval of one iteration
            for row in rows:
                told.say(row.moment, row.scalars())
            return told.events(self._place)
        for block in blocks_of(rows):
            if block.shape.smooth:
                for own in _by_mode(block):
                    told.say(_last(own.rows).moment, own.means())
            else:
                for row in block.rows:
                    told.say(row.moment, row.scalars())
        return told.events(self._place)


def _each_name_once(rows: list[Row]) -> bool:
    """Whether there is nothing to take a mean of."""
    if len({row.shape for row in rows}) < len(rows):
        return False
    names = [name for row in rows for name in row.shape.names]
    return len({*names}) == len(names)


def _by_mode(block: Block) -> list[Block]:
    """The block, or one for each mode there is in it."""
    rows = block.rows
    modes = dict.fromkeys([row.phase.mode for row in rows])
    if len(modes) == 1:
        return [block]
    return [Block(block.shape, [row for row in rows if row.phase.mode == mode]) for mode in modes]


def _last(rows: list[Row]) -> Row:
    """The one that comes last in the run; of those at one place the first."""
    return rows[0] if len(rows) == 1 else max(rows, key=by_step)


class _Told:
    """Scalars gathered into events: one per mode and place in the run, in order."""

    def __init__(self) -> None:
        self._rows: dict[Moment, list[dict[str, float]]] = {}

    def say(self, moment: Moment, scalars: dict[str, float]) -> None:
        """Enter values; a name said at that moment before gets another row, and loses nothing."""
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
