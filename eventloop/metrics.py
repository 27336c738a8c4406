"""Numbers of a run: put on the training thread without waiting for the device, read in the background.

`EventStorage.put_scalar` keeps a reference, whatever the value: a float, or a 0-dim tensor that is still being
computed. At the end of a logging interval `collect` packs the tensors of the interval into one, starts one copy
to the host, and returns a `Packet`; the background loop turns that into `scalars_logged` events when the copy is
there. Nothing on the training thread asks a tensor for its value.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch

from eventloop.catalogue import suggest
from eventloop.device import HostCopy, PinnedPool
from eventloop.events import Event, ScalarsLogged
from eventloop.history import HistoryBuffer

Scalar = float | int | torch.Tensor

PENDING_LIMIT = 8192
"""Puts that may wait for `collect` before the storage reads them itself, so that one nobody logs stays bounded."""


class Moment(msgspec.Struct, frozen=True, gc=False):
    """Where in the run values were put."""

    iteration: int
    step: int
    epoch: int
    mode: str


def _by_step(moment: Moment) -> tuple[int, int]:
    return moment.iteration, moment.step


class Row(msgspec.Struct, gc=False):
    """Values put at one moment, by name; `read` once they are floats, and in their histories.

    An iteration makes two or three of these, and no other object the garbage collector would have to look at.
    """

    moment: Moment
    values: dict[str, Scalar]
    smooth: bool
    read: bool = False


class Place(NamedTuple):
    """The counters that the events of a packet carry besides their own iteration."""

    max_iters: int | None = None
    max_epochs: int | None = None


class Packet:
    """The values of one interval on their way from the device; a `Deferred` of the background loop."""

    def __init__(self, rows: list[Row], storage: EventStorage, place: Place, copy: HostCopy | None) -> None:
        self.rows = rows
        self._storage = storage
        self._place = place
        self._copy = copy

    def ready(self) -> bool:
        """True when the values are on the host."""
        return self._copy is None or self._copy.ready()

    def read(self) -> None:
        """Make every value a float; waits for the device if need be. The storage calls it, once."""
        read_rows(self.rows, self._copy)
        self._copy = None

    def events(self) -> list[Event]:
        """One `scalars_logged` per iteration that has something of its own to say.

        A name with a smoothing hint says one thing per interval, its mean, at its last iteration in it; every
        other value is said at the iteration it was put for.
        """
        self._storage.settle(self)
        told = _Told()
        smooth: dict[tuple[str, str], list[tuple[Moment, float]]] = {}
        for row in self.rows:
            for name, value in row.values.items():
                if row.smooth:
                    smooth.setdefault((row.moment.mode, name), []).append((row.moment, float(value)))
                else:
                    told.say(row.moment, name, float(value))
        for (_, name), pairs in smooth.items():
            last = max((moment for moment, _ in pairs), key=_by_step)
            told.say(last, name, sum(value for _, value in pairs) / len(pairs))
        return told.events(self._place)


def read_rows(rows: list[Row], copy: HostCopy | None) -> None:
    """Replace the tensors of `rows` by their numbers, from a copy under way or, without one, by reading them."""
    found = [
        (row, name) for row in rows for name, value in row.values.items() if isinstance(value, torch.Tensor)
    ]
    if not found:
        return
    if copy is None:
        copy = HostCopy(tensors_in(rows), PinnedPool())
    for (row, name), number in zip(found, copy.values(), strict=True):
        row.values[name] = number


def tensors_in(rows: list[Row]) -> list[torch.Tensor]:
    """The values that are tensors, in order."""
    return [value for row in rows for value in row.values.values() if isinstance(value, torch.Tensor)]


class _Told:
    """Scalars gathered into events: one per mode and place in the run, in order."""

    def __init__(self) -> None:
        self._rows: dict[Moment, list[dict[str, float]]] = {}

    def say(self, moment: Moment, name: str, value: float) -> None:
        """Enter a value; a name said at that moment before gets another row, and loses nothing."""
        rows = self._rows.setdefault(moment, [{}])
        row = next((row for row in rows if name not in row), None)
        if row is None:
            rows.append(row := {})
        row[name] = value

    def events(self, place: Place) -> list[Event]:
        """The rows in the order of their steps; those of one place in the order they were begun."""
        return [
            ScalarsLogged(
                mode=moment.mode, iter=moment.iteration, step=moment.step, epoch=moment.epoch, scalars=scalars,
                max_iters=place.max_iters, max_epochs=place.max_epochs,
            )
            for moment, rows in sorted(self._rows.items(), key=lambda item: _by_step(item[0]))
            for scalars in rows
        ]  # fmt: skip


class EventStorage:
    """Where hooks put numbers and read them back: `trainer.metrics`.

    storage.put_scalar("loss", loss.detach())
    storage.latest()["loss"]          # (value, iteration); reads the device
    storage.history("loss").avg(20)

    `iter`, `epoch` and `mode` are kept by the trainer; a value is put for the current iteration unless `cur_iter` says
    otherwise. detectron2's EventStorage, without its global stack: pass the storage on.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self.iter = start_iter
        self.epoch = 0
        self.mode = "train"
        self.in_iteration = True
        """Whether what is put belongs to the iteration `iter` (its step is `iter + 1`), or to the moment before it."""
        self._pending: list[Row] = []
        self._on_device = False  # whether a tensor is pending that has to be copied from its device in time
        self._unread: deque[Packet] = deque()
        self._histories: dict[str, HistoryBuffer] = {}
        self._hints: dict[str, bool] = {}
        self._prefix = ""
        self._pool = PinnedPool()
        self._lock = threading.Lock()

    def put_scalar(
        self, name: str, value: Scalar, smoothing_hint: bool = True, cur_iter: int | None = None
    ) -> None:
        """Put one number: a float, an int, or a tensor or array of one element.

        Args:
            name: a "/" makes groups; names under `name_scope` get its prefix.
            smoothing_hint: whether the mean over a logging interval stands for the value; constant per name.
            cur_iter: the 0-based iteration it belongs to; the current one by default.

        Raises:
            TypeError: `value` is no single number.
            ValueError: the name was put with another hint before.
        """
        self.put_scalars({name: value}, smoothing_hint, cur_iter)

    def put_scalars(
        self, scalars: Mapping[str, Scalar], smoothing_hint: bool = True, cur_iter: int | None = None
    ) -> None:
        """Put several numbers; a mapping, so that no metric's name can collide with an argument's."""
        prefix, hints = self._prefix, self._hints
        values = {prefix + name: value for name, value in scalars.items()} if prefix else dict(scalars)
        for name, value in values.items():
            if type(value) is not float:
                values[name] = self._single_number(name, value)
            if hints.setdefault(name, smoothing_hint) is not smoothing_hint:
                raise ValueError(
                    f"scalar {name!r} was put with smoothing_hint={not smoothing_hint} before: "
                    "keep one hint per name"
                )
        iteration = self.iter if cur_iter is None else cur_iter
        trained = self.mode == "train" and (self.in_iteration or cur_iter is not None)
        moment = Moment(iteration, iteration + trained, self.epoch, self.mode)
        self._pending.append(Row(moment, values, smoothing_hint))
        if len(self._pending) > PENDING_LIMIT:
            self._forget_half()

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Prefix the names put inside with `name/`; restored also when the block raises."""
        outer = self._prefix
        self._prefix = f"{outer}{name.rstrip('/')}/"
        try:
            yield
        finally:
            self._prefix = outer

    def collect(self, place: Place | None = None) -> Packet:
        """Take everything put since the last call, and start its way to the host. Does not wait."""
        rows, self._pending = self._pending, []
        copy = HostCopy(tensors_in(rows), self._pool) if self._on_device else None
        self._on_device = False
        packet = Packet(rows, self, place or Place(), copy)
        self._unread.append(packet)
        return packet

    @property
    def pending(self) -> int:
        """How many values were put since the last `collect`."""
        return sum(len(row.values) for row in self._pending)

    # --- reading, which may wait for the device ------------------------------------------------------------

    def latest(self) -> dict[str, tuple[float, int]]:
        """The last value of each name and its iteration. Waits for values that are still on the device."""
        self._read_all()
        return {name: history.values()[-1] for name, history in self._histories.items()}

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """As `latest`, with the median over the last `window_size` iterations for names with a smoothing hint."""
        return {
            name: (self._histories[name].median(window_size) if self._hints.get(name) else value, iteration)
            for name, (value, iteration) in self.latest().items()
        }

    def history(self, name: str) -> HistoryBuffer:
        """The history of one name. Waits for values that are still on the device.

        Raises:
            KeyError: nothing was put under that name.
        """
        self._read_all()
        if name not in self._histories:
            raise KeyError(f"no history for scalar {name!r}{suggest(name, [*self._histories])}")
        return self._histories[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """All of them, by name."""
        self._read_all()
        return dict(self._histories)

    def settle(self, packet: Packet | None = None) -> None:
        """Enter collected values into the histories, oldest packet first: up to `packet`, or all of them."""
        with self._lock:
            if packet is not None and packet not in self._unread:
                return  # read early, by somebody who waited for it; those after it may not be there yet
            while self._unread:
                oldest = self._unread.popleft()
                oldest.read()
                for row in oldest.rows:
                    self._enter(row)
                if oldest is packet:
                    return

    def _read_all(self) -> None:
        self.settle()
        # What is read early is still logged at the end of its interval: it stays pending, as floats.
        read_rows(self._pending, None)
        for row in self._pending:
            self._enter(row)

    def _forget_half(self) -> None:
        """Nobody collects: keep the histories going, and the memory bounded."""
        self._read_all()
        del self._pending[: PENDING_LIMIT // 2]

    def _enter(self, row: Row) -> None:
        if row.read:
            return
        row.read = True
        for name, value in row.values.items():
            history = self._histories.get(name)
            if history is None:
                history = self._histories[name] = HistoryBuffer()
            history.update(float(value), row.moment.iteration)

    def _single_number(self, name: str, value: Any) -> Scalar:
        if not isinstance(value, torch.Tensor):
            return _single_float(name, value)
        if value.numel() != 1:
            raise TypeError(f"scalar {name!r} must be one number, got a tensor of shape {tuple(value.shape)}")
        self._on_device = self._on_device or value.is_cuda
        # A result of the graph is nobody else's; any other tensor may be a buffer its owner goes on changing,
        # and a view would keep all that it is a view of.
        own = value.grad_fn is not None and value._base is None
        return value.detach() if own else value.detach().clone()


def _single_float(name: str, value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "size", 1) == 1:
        return float(item())
    raise TypeError(f"scalar {name!r} must be a number or a tensor of one element, got {value!r}")
