"""Numbers of a run: put on the training thread without waiting for the device, read in the background.

`EventStorage.put_scalar` keeps a reference, whatever the value: a float, or a 0-dim tensor that is still being
computed. At the end of a logging interval `collect` packs the tensors of the interval into one, starts one copy
to the host, and returns a `Packet`; the background loop turns that into `scalars_logged` events when the copy is
there. Nothing on the training thread asks a tensor for its value.
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
"""Values of one name that may wait for `collect` before the storage reads them itself, so that one nobody logs
stays bounded."""
CROWD = PENDING_LIMIT // 2
"""Values of one name from which on the storage asks for a `collect`."""
LOOK_EVERY = 512
"""Rows from one look at what waits to the next."""
SHAPES_LIMIT = 1024
"""Sets of names that are remembered, at most."""
LATE_LIMIT = 1024
"""Rows that were read and may wait to be entered into the histories together, at a third of the cost: until somebody
asks for a history."""


class EventStorage:
    """Where hooks put numbers and read them back: `trainer.metrics`.

    storage.put_scalar("loss", loss.detach())
    storage.latest()["loss"].value    # waits for the device
    storage.history("loss").avg(20)

    `iter`, `epoch` and `mode` are kept by the trainer; a value is put for the current iteration unless `cur_iter` says
    otherwise. A loop without a trainer counts by itself, and may post the values to the writers of a bus:

        JSONLWriter().attach(bus, lambda: Run(work_dir="runs/mine"))
        with EventStorage(start_iter) as storage:
            for batch in loader:
                storage.put_scalars(loss=train_step(batch), time=perf_counter() - began)
                storage.step()
                if storage.iter % 20 == 0:
                    bus.post(storage.collect(), ScalarsLogged)

    Inside the `with`, and inside a run of a trainer for its metrics, `get_event_storage()` returns the storage.

    Args:
        start_iter: the 0-based iteration that counting begins with.

    Raises:
        TypeError, ValueError: `start_iter` is not an int of at least 0.
    """

    def __init__(self, start_iter: int = 0) -> None:
        at_least("start_iter", start_iter, 0)
        self.iter = start_iter
        self.inside = self.outside = self.phase = Phase(0, "train", trains=True)
        """In an iteration, between two, and the one of them that what is put now belongs to."""
        self.stepped = False
        """Whether a mode that begins within an iteration begins after its step, as an evaluation that a handler asks for."""
        self._set_phase(0, "train")
        self.crowded = False
        """Whether what waits should be collected before its interval ends: it is much, or the run is to stop."""
        self.relieve: Callable[[], None] | None = None
        """Called when there is no room for more, to collect at once; what is left then is given up."""
        self.unreadable: Counter[str] = Counter()
        """How many values of a name could not be read, and are logged nowhere."""
        self._gave_up = False
        self._rows: list[Row] = []
        self._entered = 0  # how many of them are in the histories: what was read early
        self._look_at = LOOK_EVERY  # rows at which it is looked at what waits,
        self._looked_at = 0  # how many of them were there the last time,
        self._crowd_at = CROWD  # and at which the values of each name are counted
        self._media = PendingMedia()
        self._unread: deque[Packet] = deque()
        self._late: list[Row] = []  # those read, and not entered
        self._followed = False  # whether somebody holds a history, and may look at it again
        self._histories: dict[str, HistoryBuffer] = {}
        self._latest: dict[str, tuple[float, Row]] = {}
        self._hints: dict[str, bool] = {}
        self._shapes: dict[str | tuple[str, ...], Shape] = {}  # a single name is its own key
        self._floats = Shape((), True)  # of the last `put_floats`
        self._prefix = ""
        self._entered_in = 0  # the thread whose `with` it is
        self._pool = PinnedPool()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Make `get_event_storage` return this storage until the block ends."""
        self._entered_in = threading.get_ident()
        _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the previous storage. A generator may be closed in a context that never entered it."""
        entered = _ENTERED.get()
        if self in entered:
            last = len(entered) - 1 - entered[::-1].index(self)
            _ENTERED.set(entered[:last] + entered[last + 1 :])

    def step(self) -> None:
        """Count one iteration, in a loop without a trainer; later values belong to the next one."""
        self.iter += 1

    @property
    def epoch(self) -> int:
        """What is put belongs to this epoch."""
        return self.inside.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._set_phase(epoch, self.mode)

    @property
    def mode(self) -> str:
        """ "train", "val" or "test"."""
        return self.inside.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._set_phase(self.epoch, mode)

    @property
    def in_iteration(self) -> bool:
        """Whether what is put belongs to the iteration `iter` (its step is `iter + 1`), or to the moment before it."""
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
            smoothing_hint: whether the mean over a logging interval stands for the value; constant per name.
            cur_iter: the 0-based iteration it belongs to; the current one by default.

        Raises:
            TypeError: `value` is no single number. Whether the kind of a tensor has numbers (a complex or sparse one,
                or one of the meta device, has none) is seen at the first put of a name; later ones that cannot be read
                are left out of what is logged, counted in `unreadable` and told in the log.
            ValueError: the name was put with another hint before.
        """
        if self._prefix:
            name = self._prefix + name
        number: Scalar
        if type(value) is float:
            number = value
        elif type(value) is Tensor and value.numel() == 1:
            # `own` of a result of the graph, which a loss is
            number = own(value) if value.is_leaf or value._is_view() else value.data
        else:
            number = single_number(name, value)
        shape = self._shapes.get(name)
        if shape is None or shape.smooth is not smoothing_hint:
            shape = self._begin(name, smoothing_hint, (number,))
        # `_put` of one value, in place where it is called most: the call would be a tenth of the time
        rows = self._rows
        if cur_iter is None:
            rows.append(Row(shape, number, self.iter, self.phase))
        else:
            rows.append(Row(shape, number, cur_iter, self.inside))
        if len(rows) > self._look_at:
            self._look()

    def put_scalars(
        self,
        scalars: Mapping[str, Value] = MappingProxyType({}),
        /,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        **named: Value,
    ) -> None:
        """Put several numbers: a mapping, keywords, or both, as `dict` takes them.

        Args:
            scalars: numbers by name; needed for names that are no identifiers, or those of an argument here.
            smoothing_hint, cur_iter: as of `put_scalar`.
            named: numbers by name, as in detectron2: `put_scalars(time=seconds)`.

        Raises:
            TypeError, ValueError: as `put_scalar`; then none of them is put.
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
        """Put floats, one a name, whose type is not checked: `put_scalars` for a hook that does so in every iteration.

        Raises:
            ValueError: there are more or fewer of them than names, or a name was put with another hint before.
        """
        if len(names) != len(values):
            raise ValueError(f"put_floats needs one float a name, got {len(values)} for {', '.join(names)}")
        shape = self._floats
        if (
            shape.names is not names or self._prefix
        ):  # else it is who put the last ones: no hash of the names is made
            own_names = tuple(self._prefix + name for name in names) if self._prefix else names
            found = self._shapes.get(own_names)
            shape = self._floats = (
                found if found is not None and found.smooth else self._begin(own_names, True, ())
            )
        rows = self._rows
        rows.append(Row(shape, [*values] if len(values) > 1 else values[0], self.iter, self.phase))
        if len(rows) > self._look_at:
            self._look()

    def put_numbers(self, values: Mapping[str, Any]) -> None:
        """Put those of the values that are single numbers, and leave the rest: for what a train step returned.

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
        except (
            TypeError
        ):  # names of which some are new, with tensors of no numbers: their kind is looked at there alone
            self._put_readable(names, numbers)

    def put_image(self, name: str, image: Any) -> None:
        """Put one image for the current iteration; `image_logged` delivers it, with the next `collect_media`.

        Args:
            image: tensor or array (channels, height, width), 1, 3 or 4 channels; uint8, or floats in [0, 1]. Floats
                beyond are cut, NaN is black: the values are looked at in the background, and the log has a warning,
                one a name.

        Raises:
            TypeError, ValueError: it has another shape or type, or no values to read.
        """
        self._put_medium("image", name, image_of(name, image), image)

    def put_histogram(self, name: str, values: Any) -> None:
        """Put the values of a histogram, of any shape, for the current iteration; the writer makes the bins.
        `histogram_logged` delivers them, as float32.

        Raises:
            TypeError, ValueError: it is no tensor or array of real numbers, or empty.
        """
        self._put_medium("histogram", name, histogram_of(name, values), values)

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
        rows, self._rows = self._rows, []
        entered, self._entered = self._entered, 0
        self.crowded = False
        self._look_at, self._looked_at, self._crowd_at = LOOK_EVERY, 0, CROWD
        tensors = tensors_in(rows)
        on_device = tensors and any(tensor.is_cuda for tensor in tensors)
        copy = HostCopy(tensors, self._pool) if on_device else None
        packet = Packet(rows, entered, self, place or Place(), copy)
        self._unread.append(packet)
        return packet

    def collect_media(self, place: Place | None = None) -> MediaPacket:
        """Take the images and histograms put since the last call. Does not wait."""
        return self._media.take(place or Place(), self._leave_out)

    @property
    def pending(self) -> int:
        """How many values were put since the last `collect`."""
        return sum(len(row.shape.names) for row in self._rows)

    @property
    def pending_media(self) -> int:
        """How many images and histograms were put since the last `collect_media`."""
        return len(self._media)

    # --- reading, which may wait for the device ------------------------------------------------------------

    def latest(self) -> dict[str, LatestValue]:
        """Return the last value of each name, with its step; an unknown name in it is a KeyError that suggests one.

        Waits for values that are still on the device.
        """
        self._read_all()
        latest = {**self._latest}  # one C call: the background may enter values meanwhile
        return ByName(
            {name: LatestValue(value, row.iteration, row.step) for name, (value, row) in latest.items()}
        )

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, LatestValue]:
        """As `latest`, with the median over the last `window_size` iterations for names with a smoothing hint."""
        latest = self.latest()
        for name, (_, iteration) in latest.items():
            if self._hints.get(name):
                median = self._histories[name].median(window_size)
                latest[name] = LatestValue(median, iteration, latest[name].step)
        return latest

    def history(self, name: str) -> HistoryBuffer:
        """The history of one name. Waits for values that are still on the device.

        Raises:
            KeyError: nothing was put under that name (with a suggestion).
        """
        return self.histories()[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """Return all of them, by name; an unknown name in it is a KeyError that suggests one."""
        self._read_all()
        self._followed = True
        return ByName(self._histories)

    def read_pending(self) -> list[Row]:
        """What was put since the last `collect`, as numbers; it stays. Waits for values that are still on the device."""
        self._read_all()
        return [*self._rows]

    def settle(self, packet: Packet | None = None) -> None:
        """Read collected values, oldest packet first: up to `packet`, or all of them. All are then entered into the
        histories; those of a packet only where somebody follows one, or many have come together."""
        unread: list[Unread] = []
        with self._lock:
            if packet is not None and packet not in self._unread:
                return  # read early, by somebody who waited for it; those after it may not be there yet
            while self._unread:
                oldest = self._unread.popleft()
                unread += oldest.read()
                self._late += oldest.rows[oldest.entered :]
                if oldest is packet:
                    break
            if packet is None or self._followed or len(self._late) >= LATE_LIMIT:
                late, self._late = self._late, []
                enter(late, self._histories, self._latest)
        self._leave_out(unread)

    def _read_all(self) -> None:
        self.settle()
        # What is read early is still logged at the end of its interval: it stays pending, as floats.
        fresh = self._rows[self._entered :]
        unread = read_rows(fresh, None)
        enter(fresh, self._histories, self._latest)
        if unread:
            self._rows[self._entered :] = fresh  # without them
        self._entered = len(self._rows)
        self._leave_out(unread)

    def _leave_out(self, unread: list[Unread]) -> None:
        """Count values that could not be read, and tell of the 1st, 2nd, 4th, 8th, ... of a name."""
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
            shape = self._begin(key, smooth, values)
        numbers = values if len(values) > 1 else values[0]
        rows = self._rows
        if cur_iter is None:
            rows.append(Row(shape, numbers, self.iter, self.phase))
        else:
            rows.append(Row(shape, numbers, cur_iter, self.inside))
        if len(rows) > self._look_at:
            self._look()

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

    def _begin(self, key: str | tuple[str, ...], smooth: bool, values: Sequence[Scalar]) -> Shape:
        """Names are put together for the first time: they must be texts, and the values, if there are any to look at,
        numbers."""
        names = key if isinstance(key, tuple) else (key,)
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"the name of a scalar must be a text, got {wrong[0]!r}")
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
        # values of one name that were put both ways are in one block
        alike = self._shapes.get(names[0]) if len(names) == 1 else None
        shape = self._shapes[names] = alike or Shape(names, smooth)
        if len(names) == 1:
            self._shapes[names[0]] = shape
        return shape

    def _look(self) -> None:
        """Read what can be had at once: small tensors that stay for long lie between the large ones of the steps, whose
        places then fit nothing, and the process grows. Where more waits than should, see to that."""
        read_on_host(self._rows[self._looked_at :])
        if len(self._rows) > self._crowd_at:
            self._crowd()
        self._looked_at = len(self._rows)
        self._look_at = min(self._looked_at + LOOK_EVERY, max(self._crowd_at, self._looked_at))

    def _crowd(self) -> None:
        """Ask for a `collect` where a name has too many values; where nobody hears it, keep the histories going, and the
        memory bounded. Counts them, and is called again when a name can have too many at the earliest."""
        counts = Counter(name for row in self._rows for name in row.shape.names)
        name, most = counts.most_common(1)[0]
        if most > PENDING_LIMIT:
            if self.relieve is not None:
                self.relieve()
            if self._rows:  # nobody took them
                self._give_up({name for name, count in counts.items() if count > PENDING_LIMIT}, name)
                self._crowd_at = len(self._rows)
            return
        self.crowded = self.crowded or most > CROWD
        self._crowd_at = len(self._rows) + (PENDING_LIMIT if self.crowded else CROWD) - most

    def _give_up(self, crowded: set[str], most: str) -> None:
        """Forget the oldest rows of names that nobody collects; the histories have them."""
        if not self._gave_up:
            self._gave_up = True
            logger.warning(
                "nobody collects the metrics (a LoggerHook does, or bus.post(storage.collect(), ScalarsLogged)): their "
                "histories go on, and older values of %s and others are logged nowhere", most,
            )  # fmt: skip
        self._read_all()
        kept: list[Row] = []
        left: dict[Shape, int] = {}
        for row in self._rows:
            if left.setdefault(row.shape, PENDING_LIMIT - CROWD) and not crowded.isdisjoint(row.shape.names):
                left[row.shape] -= 1
            else:
                kept.append(row)
        self._rows, self._entered = kept, len(kept)


_ENTERED: ContextVar[tuple[EventStorage, ...]] = ContextVar("eventloop_storages", default=())
"""The storages that were entered and not left, the innermost last."""


def get_event_storage() -> EventStorage:
    """Return the storage of the innermost `with`, or the metrics of the trainer that runs: for code given neither.

        class Detector(nn.Module):
            def forward(self, images):
                get_event_storage().put_scalar("num_boxes", boxes.shape[0])

    Only the thread of the `with` has it: neither a thread that is started inside nor a background subscriber does. An
    asyncio task has that of the code which created it.

    Raises:
        RuntimeError: this thread entered no storage.
    """
    entered = _ENTERED.get()
    # the context of another thread may have been copied, as asyncio does: two threads must not put into one storage
    if entered and entered[-1]._entered_in == threading.get_ident():
        return entered[-1]
    raise RuntimeError(
        "get_event_storage() found no storage: call it inside `with EventStorage(start_iter) as storage:`, or while a "
        "Trainer runs; another thread has none, pass it the storage"
    )
