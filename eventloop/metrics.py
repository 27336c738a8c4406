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
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace

from eventloop.catalogue import suggest
from eventloop.device import HostCopy, PinnedPool
from eventloop.events import Event, ScalarsLogged

Scalar = float | int | torch.Tensor

WINDOW = 10_000
"""Values a `HistoryBuffer` keeps."""
PENDING_LIMIT = 8192
"""Values that may wait for `collect` before the storage reads them itself, so that one nobody logs stays bounded."""


class HistoryBuffer:
    """The last values of one scalar with the iteration each belongs to: O(1) to append, bounded.

    `global_avg` is over everything that was ever appended, what has left the window included.
    """

    def __init__(self, max_length: int = WINDOW) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self._values: deque[tuple[float, int]] = deque(maxlen=max_length)
        self._sum = 0.0
        self._count = 0

    def update(self, value: float, iteration: int) -> None:
        """Append a value."""
        self._values.append((value, iteration))
        self._sum += value
        self._count += 1

    def latest(self) -> float:
        """The last value.

        Raises:
            ValueError: there is none.
        """
        if not self._values:
            raise ValueError("the history is empty: nothing was put under this name yet")
        return self._values[-1][0]

    def values(self) -> list[tuple[float, int]]:
        """`(value, iteration)` pairs, oldest first."""
        return list(self._values)  # one C call: the background may append meanwhile

    def window(self, iterations: int) -> list[float]:
        """The values of the last `iterations` iterations."""
        pairs = self.values()
        if not pairs:
            return []
        first = pairs[-1][1] - iterations + 1
        return [value for value, iteration in pairs if iteration >= first]

    def median(self, iterations: int) -> float:
        """Median over the last `iterations` iterations."""
        return median(self.window(iterations))

    def avg(self, iterations: int) -> float:
        """Mean over the last `iterations` iterations."""
        window = self.window(iterations)
        return sum(window) / len(window)

    @property
    def global_avg(self) -> float:
        """Mean over everything."""
        return self._sum / self._count

    def __len__(self) -> int:
        return self._count


class Moment(msgspec.Struct, frozen=True, gc=False):
    """Where in the run values were put."""

    iteration: int
    step: int
    epoch: int
    mode: str


def _by_step(moment: Moment) -> tuple[int, int]:
    return moment.iteration, moment.step


class Put(msgspec.Struct, frozen=True, gc=False):
    """One value as it was put; `read` once it is a float in its history. Thousands of tuples in their place would
    wake the garbage collector."""

    moment: Moment
    name: str
    value: Scalar
    smooth: bool
    read: bool = False


class Place(NamedTuple):
    """The counters that the events of a packet carry besides their own iteration."""

    max_iters: int | None = None
    max_epochs: int | None = None


class Packet:
    """The values of one interval on their way from the device; a `Deferred` of the background loop."""

    def __init__(self, puts: list[Put], storage: EventStorage, place: Place, pool: PinnedPool) -> None:
        self.puts = puts
        self._storage = storage
        self._place = place
        tensors = [put.value for put in puts if isinstance(put.value, torch.Tensor)]
        self._copy = HostCopy(tensors, pool) if tensors else None

    def ready(self) -> bool:
        """True when the values are on the host."""
        return self._copy is None or self._copy.ready()

    def read(self) -> None:
        """Make every value a float; waits for the device if need be. The storage calls it, once."""
        if self._copy is not None:
            numbers = iter(self._copy.values())
            self.puts = [
                replace(put, value=next(numbers)) if isinstance(put.value, torch.Tensor) else put
                for put in self.puts
            ]
            self._copy = None

    def events(self) -> list[Event]:
        """One `scalars_logged` per iteration that has something of its own to say.

        A name with a smoothing hint says one thing per interval, its mean, at its last iteration in it; every
        other value is said at the iteration it was put for.
        """
        self._storage.settle(self)
        rows = _Rows()
        smooth: dict[tuple[str, str], list[Put]] = {}
        for put in self.puts:
            if put.smooth:
                smooth.setdefault((put.moment.mode, put.name), []).append(put)
            else:
                rows.say(put.moment, put.name, float(put.value))
        for (_, name), puts in smooth.items():
            mean = sum(float(put.value) for put in puts) / len(puts)
            last = max((put.moment for put in puts), key=_by_step)
            rows.say(last, name, mean)
        return rows.events(self._place)


class _Rows:
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
        self._pending: list[Put] = []
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
        moment = self._moment(cur_iter)
        pending, prefix, hints = self._pending, self._prefix, self._hints
        for name, value in scalars.items():
            if not isinstance(value, float):
                value = _single_number(name, value)
            if prefix:
                name = prefix + name
            if hints.setdefault(name, smoothing_hint) is not smoothing_hint:
                raise ValueError(
                    f"scalar {name!r} was put with smoothing_hint={not smoothing_hint} before: "
                    "keep one hint per name"
                )
            pending.append(Put(moment, name, value, smoothing_hint))
        if len(pending) > PENDING_LIMIT:
            self._forget_half()

    def _moment(self, cur_iter: int | None) -> Moment:
        iteration = self.iter if cur_iter is None else cur_iter
        trained = self.mode == "train" and (self.in_iteration or cur_iter is not None)
        return Moment(iteration, iteration + trained, self.epoch, self.mode)

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
        puts, self._pending = self._pending, []
        packet = Packet(puts, self, place or Place(), self._pool)
        self._unread.append(packet)
        return packet

    @property
    def pending(self) -> int:
        """How many values were put since the last `collect`."""
        return len(self._pending)

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
                for put in oldest.puts:
                    if not put.read:
                        self._enter(put)
                if oldest is packet:
                    return

    def _read_all(self) -> None:
        self.settle()
        # What is read early is still logged at the end of its interval: it stays pending, as a float.
        early = Packet([put for put in self._pending if not put.read], self, Place(), self._pool)
        early.read()
        for put in early.puts:
            self._enter(put)
        done = [put for put in self._pending if put.read]
        self._pending = done + [replace(put, read=True) for put in early.puts]

    def _forget_half(self) -> None:
        """Nobody collects: keep the histories going, and the memory bounded."""
        self._read_all()
        self._pending = self._pending[PENDING_LIMIT // 2 :]

    def _enter(self, put: Put) -> None:
        history = self._histories.get(put.name)
        if history is None:
            history = self._histories[put.name] = HistoryBuffer()
        history.update(float(put.value), put.moment.iteration)


def _single_number(name: str, value: Any) -> Scalar:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(f"scalar {name!r} must be one number, got a tensor of shape {tuple(value.shape)}")
        # A result of the graph is nobody else's; any other tensor may be a buffer its owner goes on changing,
        # and a view would keep all that it is a view of.
        own = value.grad_fn is not None and value._base is None
        return value.detach() if own else value.detach().clone()
    if isinstance(value, int):
        return float(value)
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "size", 1) == 1:
        return float(item())
    raise TypeError(f"scalar {name!r} must be a number or a tensor of one element, got {value!r}")
