"""The storage that hooks put numbers into on the training thread, without waiting for the device.

`EventStorage.put_scalar` keeps a float, or a reference to a tensor that may still be in computation. At the
end of a logging interval, `collect` starts one copy of the interval's tensors to the host and returns a
`Packet`; the background loop turns the packet into `scalars_logged` events when the copy is complete. The
training thread reads no values from a device, unless code asks for them, as by `latest`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from eventloop.metrics.device import HostCopy, PinnedPool
from eventloop.metrics.history import HistoryBuffer
from eventloop.metrics.latest import ByName, LatestValue
from eventloop.metrics.media import Kind, MediaPacket, Medium, PendingMedia, histogram_of, image_of
from eventloop.metrics.rows import (
    Packet,
    Phase,
    Place,
    Row,
    Scalar,
    Shape,
    Unread,
    enter,
    read_on_host,
    read_rows,
    tensors_in,
)
from eventloop.metrics.scalar_value import is_number, own, refuse_unreadable, single_number, unreadable_kind
from eventloop.state.sharded import refuse_sharded
from eventloop.util.checks import at_least

logger = logging.getLogger("eventloop")

Value = float | int | torch.Tensor

PENDING_LIMIT = 8192
"""At most so many values of a name wait for `collect`; beyond, the oldest are not logged, to limit memory."""
COLLECT_AT = PENDING_LIMIT // 2
"""From so many values of a name on, the storage asks for a `collect`."""
CHECK_EVERY = 512
"""After so many new rows, the storage reads those on the CPU and checks how many wait."""
SHAPES_LIMIT = 1024
"""At most so many sets of names are cached."""
ENTER_AT = 1024
"""Rows that were read are entered into the histories so many at once, at a third of the cost.

Reading a history enters them at once."""


class EventStorage:
    """The numbers, images and histograms of a run, as `trainer.metrics` or for a loop of your own.

        storage.put_scalar("loss", loss.detach())
        storage.latest()["loss"].value    # waits for the device
        storage.history("loss").avg(20)

    The trainer sets `iter`, `epoch` and `mode`. A value belongs to the current iteration unless `cur_iter` is
    given. A loop without a trainer calls `step`, and may post the values to the writers of a bus:

        JSONLWriter().attach(bus, lambda: Run(work_dir="runs/mine"))
        with EventStorage(start_iter) as storage:
            for batch in loader:
                storage.put_scalars(loss=train_step(batch), time=perf_counter() - began)
                storage.step()
                if storage.iter % 20 == 0:
                    bus.post(storage.collect(), ScalarsLogged)

    Inside the `with` block `get_event_storage()` returns this storage; during a trainer's run it returns the
    metrics of the trainer. The `put_*` and `collect*` methods are called on the training thread.

    Args:
        start_iter: the 0-based iteration at which counting begins.

    Raises:
        TypeError, ValueError: `start_iter` is not an int of at least 0.
    """

    def __init__(self, start_iter: int = 0) -> None:
        at_least("start_iter", start_iter, 0)
        self.iter = start_iter
        self.inside = self.outside = self.phase = Phase(0, "train", trains=True)
        """The phases within an iteration and between two, and the current one, which new values belong to."""
        self.stepped = False
        """True if a mode that begins within an iteration begins after its optimizer step."""
        self._set_phase(0, "train")
        self.crowded = False
        """True if values should be collected before their interval ends: many wait, or the run is to stop."""
        self.relieve: Callable[[], None] | None = None
        """Called when a limit is exceeded, to collect at once; values that it leaves are dropped."""
        self.unreadable: Counter[str] = Counter()
        """The number of values of each name that could not be read, and are not logged."""
        self._dropped = False  # whether values were dropped, which is logged once
        self._rows: list[Row] = []
        self._entered = 0  # how many of them are in the histories, because they were read early
        self._check_at = CHECK_EVERY  # the number of rows at which `_check_pending` runs next
        self._checked = 0  # the number of rows at its last run
        self._count_at = COLLECT_AT  # the number of rows at which the values of each name are counted
        self._media = PendingMedia()
        self._unread: deque[Packet] = deque()
        self._unentered: list[Row] = []  # read, and not in the histories yet
        self._followed = False  # whether a caller has a history, which must then stay up to date
        self._histories: dict[str, HistoryBuffer] = {}
        self._latest: dict[str, tuple[float, Row]] = {}
        self._hints: dict[str, bool] = {}
        self._shapes: dict[str | tuple[str, ...], Shape] = {}  # a single name is its own key
        self._floats = Shape((), True)  # of the last `put_floats`
        self._prefix = ""
        self._entered_in = 0  # the id of the thread that entered the `with` block
        self._pool = PinnedPool()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Make `get_event_storage` return this storage until the block ends."""
        self._entered_in = threading.get_ident()
        _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the previous storage; do nothing in a context that never entered this one.

        A generator may be closed in another context than its own.
        """
        entered = _ENTERED.get()
        if self in entered:
            last = len(entered) - 1 - entered[::-1].index(self)
            _ENTERED.set(entered[:last] + entered[last + 1 :])

    def step(self) -> None:
        """Increment the iteration, in a loop without a trainer; later values belong to the next one."""
        self.iter += 1

    @property
    def epoch(self) -> int:
        """Return the epoch that new values belong to."""
        return self.inside.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._set_phase(epoch, self.mode)

    @property
    def mode(self) -> str:
        """Return the mode that new values belong to: "train", "val" or "test"."""
        return self.inside.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._set_phase(self.epoch, mode)

    @property
    def in_iteration(self) -> bool:
        """Return whether new values belong to iteration `iter`, with step `iter + 1`, or precede it."""
        return self.phase is self.inside

    @in_iteration.setter
    def in_iteration(self, inside: bool) -> None:
        self.phase = self.inside if inside else self.outside

    def put_scalar(
        self, name: str, value: Value, smoothing_hint: bool = True, cur_iter: int | None = None
    ) -> None:
        """Put one number: a float, an int, or a tensor or array of one element.

        Args:
            name: a "/" makes groups; names under `name_scope` get its prefix.
            smoothing_hint: True logs the mean over a logging interval, False each value; constant per name.
            cur_iter: the 0-based iteration that the value belongs to; the current one by default.

        Raises:
            TypeError: `value` is not a single number, or the first tensor of a name is complex, sparse,
                quantized or on the meta device. Later tensors of the name that cannot be read are not logged,
                but counted in `unreadable` and reported as errors in the Python log.
            ValueError: the name was put with another hint before.
        """
        if self._prefix:
            name = self._prefix + name
        number: Scalar
        if type(value) is float:
            number = value
        elif type(value) is Tensor and value.numel() == 1:
            # a loss is a result of the graph, for which `own` returns `data`
            number = own(value) if value.is_leaf or value._is_view() else value.data
        else:
            number = single_number(name, value)
        shape = self._shapes.get(name)
        if shape is None or shape.smooth is not smoothing_hint:
            shape = self._new_shape(name, smoothing_hint, (number,))
        # the body of `_put` for one value: the call would be a tenth of the time
        rows = self._rows
        if cur_iter is None:
            rows.append(Row(shape, number, self.iter, self.phase))
        else:
            rows.append(Row(shape, number, cur_iter, self.inside))
        if len(rows) > self._check_at:
            self._check_pending()

    def put_scalars(
        self,
        scalars: Mapping[str, Value] = MappingProxyType({}),
        /,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        **named: Value,
    ) -> None:
        """Put several numbers, given as a mapping, as keywords, or both.

        Args:
            scalars: numbers by name; needed for names that are not identifiers, or are arguments of this
                method.
            smoothing_hint, cur_iter: the arguments of `put_scalar`, for all of the numbers.
            named: numbers by name, as in detectron2: `put_scalars(time=seconds)`.

        Raises:
            TypeError, ValueError: `put_scalar` would refuse one of the numbers; then none of them is put.
        """
        if named:
            scalars = {**scalars, **named}
        if self._prefix:
            scalars = {self._prefix + name: value for name, value in scalars.items()}
        numbers = [
            value if type(value) is float else single_number(name, value) for name, value in scalars.items()
        ]
        if numbers:
            self._put(tuple(scalars), numbers, smoothing_hint, cur_iter)

    def put_floats(self, names: tuple[str, ...], values: list[float]) -> None:
        """Put one float per name, with a smoothing hint, without a check of their types.

        It is cheaper than `put_scalars` for a hook that passes the same tuple of names in each iteration.

        Raises:
            ValueError: `values` and `names` differ in length, or a name was put with another hint before.
        """
        if len(names) != len(values):
            raise ValueError(
                f"put_floats expects one float per name, got {len(values)} for {', '.join(names)}"
            )
        shape = self._floats
        if shape.names is not names or self._prefix:  # the same tuple as last time needs no hash of the names
            own_names = tuple(self._prefix + name for name in names) if self._prefix else names
            found = self._shapes.get(own_names)
            shape = self._floats = (
                found if found is not None and found.smooth else self._new_shape(own_names, True, ())
            )
        rows = self._rows
        rows.append(Row(shape, [*values] if len(values) > 1 else values[0], self.iter, self.phase))
        if len(rows) > self._check_at:
            self._check_pending()

    def put_numbers(self, values: Mapping[str, Any]) -> None:
        """Put those of `values` that are single numbers, and ignore others; for the outputs of a train step.

        Raises:
            TypeError: a tensor of one element is sharded over ranks.
        """
        names: list[str] = []
        numbers: list[Scalar] = []
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    continue
                refuse_sharded(f"scalar {name!r}", value)
                numbers.append(own(value))
            elif is_number(value):
                try:
                    numbers.append(single_number(name, value))
                except TypeError:
                    continue
            else:
                continue
            names.append(self._prefix + name if self._prefix else name)
        if not names:
            return
        try:
            self._put(tuple(names), numbers, True, None)
        except TypeError:  # a tensor of a new set of names cannot be read: put the others
            self._put_readable(names, numbers)

    def put_image(self, name: str, image: Any) -> None:
        """Put an image for the current iteration; the next `collect_media` delivers it as `image_logged`.

        Args:
            name: a "/" makes groups; names under `name_scope` get its prefix.
            image: a tensor or array (channels, height, width) with 1, 3 or 4 channels; uint8, or floats in
                [0, 1]. Other floats are clipped, with one warning per name from the background; NaN is black.

        Raises:
            TypeError, ValueError: the shape or dtype is another one, or the tensor has no readable values.
        """
        self._put_medium("image", name, image_of(name, image), image)

    def put_histogram(self, name: str, values: Any) -> None:
        """Put the values of a histogram, a tensor or array of any shape, for the current iteration.

        The next `collect_media` delivers them as `histogram_logged`, in float32; writers make the bins.

        Raises:
            TypeError, ValueError: `values` is not a tensor or array of real numbers, or is empty.
        """
        self._put_medium("histogram", name, histogram_of(name, values), values)

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Prefix the names that are put inside the block with `name/`; scopes nest."""
        outer = self._prefix
        self._prefix = f"{outer}{name.rstrip('/')}/"
        try:
            yield
        finally:
            self._prefix = outer

    def collect(self, place: Place | None = None) -> Packet:
        """Take all values put since the last call, and start their copy to the host without waiting.

        Args:
            place: the limits of the run, for the events.
        """
        rows, self._rows = self._rows, []
        entered, self._entered = self._entered, 0
        self.crowded = False
        self._check_at, self._checked, self._count_at = CHECK_EVERY, 0, COLLECT_AT
        tensors = tensors_in(rows)
        on_device = tensors and any(tensor.is_cuda for tensor in tensors)
        copy = HostCopy(tensors, self._pool) if on_device else None
        packet = Packet(rows, entered, self, place or Place(), copy)
        self._unread.append(packet)
        return packet

    def collect_media(self, place: Place | None = None) -> MediaPacket:
        """Take the images and histograms put since the last call, without waiting for their copies.

        Args:
            place: the limits of the run, for the events.
        """
        return self._media.take(place or Place(), self._leave_out)

    @property
    def pending(self) -> int:
        """Return the number of values put since the last `collect`."""
        return sum(len(row.shape.names) for row in self._rows)

    @property
    def pending_media(self) -> int:
        """Return the number of images and histograms put since the last `collect_media`."""
        return len(self._media)

    # --- reading, which may wait for the device ------------------------------------------------------------

    def latest(self) -> dict[str, LatestValue]:
        """Return the last value of each name, with its step, after waiting for values on the device.

        Looking up an unknown name raises a KeyError that suggests a known one.
        """
        self._read_all()
        latest = {**self._latest}  # an atomic copy: the background may enter values at the same time
        return ByName(
            {name: LatestValue(value, row.iteration, row.step) for name, (value, row) in latest.items()}
        )

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, LatestValue]:
        """Return the last value of each name, or its median if the name has a smoothing hint.

        The median is over the last `window_size` iterations. Waits for values on the device.
        """
        latest = self.latest()
        for name, (_, iteration) in latest.items():
            if self._hints.get(name):
                median = self._histories[name].median(window_size)
                latest[name] = LatestValue(median, iteration, latest[name].step)
        return latest

    def history(self, name: str) -> HistoryBuffer:
        """Return the history of one name, after waiting for values on the device.

        Raises:
            KeyError: no value was put under that name; the message suggests a known one.
        """
        return self.histories()[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """Return the histories of all names, after waiting for values on the device.

        Looking up an unknown name raises a KeyError that suggests a known one.
        """
        self._read_all()
        self._followed = True
        return ByName(self._histories)

    def read_pending(self) -> list[Row]:
        """Return the rows put since the last `collect`, as numbers, after waiting for values on the device.

        The rows stay in the storage.
        """
        self._read_all()
        return [*self._rows]

    def settle(self, packet: Packet | None = None) -> None:
        """Read the collected packets in order, up to `packet` or all; waits for the device if necessary.

        The values are entered into the histories at once if all are read or a history is in use, else in
        groups.
        """
        unread: list[Unread] = []
        with self._lock:
            if packet is not None and packet not in self._unread:
                return  # read already, by a caller that waited; later packets may not be ready
            while self._unread:
                oldest = self._unread.popleft()
                unread += oldest.read()
                self._unentered += oldest.rows[oldest.entered :]
                if oldest is packet:
                    break
            if packet is None or self._followed or len(self._unentered) >= ENTER_AT:
                rows, self._unentered = self._unentered, []
                enter(rows, self._histories, self._latest)
        self._leave_out(unread)

    def _read_all(self) -> None:
        self.settle()
        # Values that are read early are still logged at the end of their interval: they stay, as floats.
        fresh = self._rows[self._entered :]
        unread = read_rows(fresh, None)
        enter(fresh, self._histories, self._latest)
        if unread:
            self._rows[self._entered :] = fresh  # `read_rows` removed the unreadable values
        self._entered = len(self._rows)
        self._leave_out(unread)

    def _leave_out(self, unread: list[Unread]) -> None:
        """Count values that could not be read, and log the 1st, 2nd, 4th, 8th, ... of each name."""
        for name, iteration, error in unread:
            with self._lock:
                self.unreadable[name] += 1
                count = self.unreadable[name]
            if count & (count - 1) == 0:
                logger.error(
                    "metric %r of iteration %d cannot be read and is left out (%d so far): %s: %s",
                    name, iteration, count, type(error).__name__, error,
                )  # fmt: skip

    def _put(self, names: tuple[str, ...], values: list[Scalar], smooth: bool, cur_iter: int | None) -> None:
        key = names if len(names) > 1 else names[0]
        shape = self._shapes.get(key)
        if shape is None or shape.smooth is not smooth:
            shape = self._new_shape(key, smooth, values)
        numbers = values if len(values) > 1 else values[0]
        rows = self._rows
        if cur_iter is None:
            rows.append(Row(shape, numbers, self.iter, self.phase))
        else:
            rows.append(Row(shape, numbers, cur_iter, self.inside))
        if len(rows) > self._check_at:
            self._check_pending()

    def _put_readable(self, names: list[str], values: list[Scalar]) -> None:
        pairs = zip(names, values, strict=True)
        kept = {name: v for name, v in pairs if not isinstance(v, torch.Tensor) or not unreadable_kind(v)}
        if kept:
            self._put(tuple(kept), [*kept.values()], True, None)

    def _set_phase(self, epoch: int, mode: str) -> None:
        inside = self.in_iteration
        self.inside = Phase(epoch, mode, trains=mode == "train" or self.stepped)
        self.outside = Phase(epoch, mode, trains=False)
        self.in_iteration = inside

    def _put_medium(self, kind: Kind, name: str, on_host: torch.Tensor, source: Any) -> None:
        self._media.add(Medium(kind, self._prefix + name, self.phase.at(self.iter), on_host), source)
        if self._media.crowded and self.relieve is not None:
            self.relieve()
        self._media.make_room()

    def _new_shape(self, key: str | tuple[str, ...], smooth: bool, values: Sequence[Scalar]) -> Shape:
        """Register a new set of names.

        Raises:
            TypeError: a name is not a str, or a value is a tensor that cannot be read as a number.
            ValueError: a name was put with another hint before.
        """
        names = key if isinstance(key, tuple) else (key,)
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"the name of a scalar must be a str, got {wrong[0]!r}")
        if values:
            refuse_unreadable(names, values)
        for name in names:
            if self._hints.get(name, smooth) is not smooth:
                raise ValueError(
                    f"scalar {name!r} was put with smoothing_hint={not smooth} before: keep one hint per name"
                )
        self._hints.update(dict.fromkeys(names, smooth))
        if len(self._shapes) >= SHAPES_LIMIT:
            self._shapes.clear()
        # a name alone and in a tuple of one name has one shape, so that its values are in one block
        alike = self._shapes.get(names[0]) if len(names) == 1 else None
        shape = self._shapes[names] = alike or Shape(names, smooth)
        if len(names) == 1:
            self._shapes[names[0]] = shape
        return shape

    def _check_pending(self) -> None:
        """Read the waiting tensors that are on the CPU, and limit the number of waiting values.

        Small tensors that live long fragment the memory between the large tensors of the steps: the process
        would grow.
        """
        read_on_host(self._rows[self._checked :])
        if len(self._rows) > self._count_at:
            self._limit_pending()
        self._checked = len(self._rows)
        self._check_at = min(self._checked + CHECK_EVERY, max(self._count_at, self._checked))

    def _limit_pending(self) -> None:
        """Ask for a `collect` if many values of a name wait, and drop the oldest if they are not collected.

        Counts the values, and sets the number of rows at which a name can have too many at the earliest.
        """
        counts = Counter(name for row in self._rows for name in row.shape.names)
        name, most = counts.most_common(1)[0]
        if most > PENDING_LIMIT:
            if self.relieve is not None:
                self.relieve()
            if self._rows:  # they were not collected
                self._drop_oldest({name for name, count in counts.items() if count > PENDING_LIMIT}, name)
                self._count_at = len(self._rows)
            return
        self.crowded = self.crowded or most > COLLECT_AT
        self._count_at = len(self._rows) + (PENDING_LIMIT if self.crowded else COLLECT_AT) - most

    def _drop_oldest(self, crowded: set[str], most: str) -> None:
        """Remove the oldest rows of the `crowded` names, after entering them into the histories."""
        if not self._dropped:
            self._dropped = True
            logger.warning(
                "metrics are not collected: older values of %s and others are in the histories, but not "
                "logged. Add a LoggerHook, or call bus.post(storage.collect(), ScalarsLogged)", most,
            )  # fmt: skip
        self._read_all()
        kept: list[Row] = []
        left: dict[Shape, int] = {}
        per_shape = PENDING_LIMIT - COLLECT_AT
        for row in self._rows:
            if left.setdefault(row.shape, per_shape) and not crowded.isdisjoint(row.shape.names):
                left[row.shape] -= 1
            else:
                kept.append(row)
        self._rows, self._entered = kept, len(kept)


_ENTERED: ContextVar[tuple[EventStorage, ...]] = ContextVar("eventloop_storages", default=())
"""The storages whose `with` block is active in this context, the innermost last."""


def get_event_storage() -> EventStorage:
    """Return the storage of the innermost `with` block, or the metrics of the running trainer.

    Use it in code that has no reference to the storage or the trainer:

        class Detector(nn.Module):
            def forward(self, images):
                get_event_storage().put_scalar("num_boxes", boxes.shape[0])

    It works only on the thread of the `with` block, not on threads started inside or in background
    subscribers. An asyncio task has the storage of the code that created it.

    Raises:
        RuntimeError: this thread has no storage.
    """
    entered = _ENTERED.get()
    # asyncio copies contexts to other threads, and two threads must not put into one storage
    if entered and entered[-1]._entered_in == threading.get_ident():
        return entered[-1]
    raise RuntimeError(
        "get_event_storage() found no storage on this thread: call it inside `with EventStorage(start_iter) "
        "as storage:`, or while a Trainer runs; pass the storage to other threads explicitly"
    )
