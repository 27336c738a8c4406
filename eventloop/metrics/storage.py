"""Define the storage into which hooks put numbers on the training thread, without waiting for the device.

`EventStorage.put_scalar` stores a float, or a tensor that the device may not have computed yet. At the end of
a logging interval, `collect` starts one copy of the interval's tensors to the host and returns a `Packet`.
When the copy is complete, the background turns the packet into `scalars_logged` events. The training thread
reads no values from a device, unless code on it calls a method such as `latest`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Self

import torch

from eventloop.costs.device_reads import DeviceReads
from eventloop.metrics.history import HistoryBuffer
from eventloop.metrics.latest import ByName, LatestValue
from eventloop.metrics.media import Kind, MediaPacket, Medium, PendingMedia, histogram_of, image_of
from eventloop.metrics.name_sets import NameSets
from eventloop.metrics.packet import Packet, Readings, read_on_host
from eventloop.metrics.rows import Loss, Phase, Row, RunLimits, Scalar
from eventloop.metrics.scalar_value import is_readable, not_a_mapping, single_number, single_numbers
from eventloop.migration.names import knowing_renamed, knowing_storages
from eventloop.util.checks import at_least

logger = logging.getLogger("eventloop")

Value = float | int | torch.Tensor

PENDING_LIMIT = 16_384
"""The largest number of rows that wait for `collect`; beyond it, the older half is dropped and not logged."""
COLLECT_AT = PENDING_LIMIT // 2
"""The number of waiting rows above which `EventStorage.crowded` requests a `collect`."""
CHECK_EVERY = 512
"""The number of new rows after which the storage reads waiting CPU tensors and limits the waiting rows."""
ENTERED: ContextVar[tuple[EventStorage, ...]] = ContextVar("eventloop_storages", default=())
"""The storages whose `with` block is active in this context, the innermost last."""


@knowing_renamed
@knowing_storages
class EventStorage:
    """Store the numbers, images and histograms of a run, as `trainer.metrics` or for a loop of your own.

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
        """The phase of values within iterations, the phase between iterations, and the current phase."""
        self.stepped = False
        """Whether an evaluation that begins within an iteration begins after the optimizer's step."""
        self._set_phase(0, "train")
        self.crowded = False
        """Whether to collect values before the end of their interval: many wait, or the run will stop."""
        self.post_pending: Callable[[], None] | None = None
        """A function to call if too many values wait; it collects them, or else the older half is dropped."""
        self._dropped = False  # whether values were dropped, which is logged once
        self._rows: list[Row] = []
        self._appended = 0  # how many of `_rows` are in the histories already, because they were read early
        self._checked = 0  # the number of rows at the last `_check_pending`
        self._media = PendingMedia()
        self._readings, self._name_sets, self._prefix = Readings(), NameSets(), ""
        self.losses = self._readings.losses
        self.followers = self._readings.followers
        """Functions to call with each list of rows once it is read, on the thread that reads it."""
        self.device_reads = DeviceReads()
        """The waits for the device when code on the training thread reads values, in training iterations."""
        self.entered_in = 0  # the id of the thread that entered the `with` block

    def __enter__(self) -> Self:
        """Make `get_event_storage` return this storage until the block ends."""
        self.entered_in = threading.get_ident()
        ENTERED.set((*ENTERED.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        """Make `get_event_storage` return the outer storage again."""
        entered = ENTERED.get()  # lacks this storage if a generator is closed in another context
        if self in entered:
            position = len(entered) - 1 - entered[::-1].index(self)
            ENTERED.set(entered[:position] + entered[position + 1 :])

    def step(self) -> None:
        """Increment the iteration in a loop without a trainer; later values belong to the next iteration."""
        self.iter += 1

    @property
    def epoch(self) -> int:
        """Return the epoch to which new values belong."""
        return self.inside.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._set_phase(epoch, self.mode)

    @property
    def mode(self) -> str:
        """Return the mode to which new values belong: "train", "val", "test" or "predict"."""
        return self.inside.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._set_phase(self.epoch, mode)

    @property
    def in_iteration(self) -> bool:
        """Return whether new values belong to iteration `iter` itself; False if they precede it."""
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
        number = value if type(value) is float else single_number(name, value)
        self._put((name,), [number], smoothing_hint, cur_iter)

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
            scalars: numbers by name; needed for names that are not identifiers, or that this method takes.
            smoothing_hint, cur_iter: as in `put_scalar`, for all of the numbers.
            named: numbers by name, as in detectron2: `put_scalars(time=seconds)`.

        Raises:
            TypeError, ValueError: `put_scalar` would refuse one of the numbers; then none of them is put.
        """
        if isinstance(scalars, str):
            raise not_a_mapping(scalars)
        if named:
            scalars = {**scalars, **named}
        if self._prefix:
            scalars = {self._prefix + name: value for name, value in scalars.items()}
        numbers = [
            value if type(value) is float else single_number(name, value) for name, value in scalars.items()
        ]
        self._put(tuple(scalars), numbers, smoothing_hint, cur_iter)

    def put_floats(self, names: tuple[str, ...], values: list[float]) -> None:
        """Put one float per name with a smoothing hint; faster than `put_scalars`, without checks of types.

        Raises:
            ValueError: `values` and `names` differ in length, or a name was put with another hint before.
        """
        if len(names) != len(values):
            raise ValueError(
                f"put_floats expects one float per name, got {len(values)} for {', '.join(names)}"
            )
        if self._prefix:
            names = tuple(self._prefix + name for name in names)
        self._put(names, [*values], True, None)

    def put_numbers(self, values: Mapping[str, Any]) -> None:
        """Put the single numbers among `values`, such as the outputs of a train step, and ignore the rest.

        Raises:
            TypeError: a tensor of one element is sharded over ranks.
        """
        numbers = single_numbers(values)
        if self._prefix:
            numbers = {self._prefix + name: number for name, number in numbers.items()}
        try:
            self._put(tuple(numbers), [*numbers.values()], True, None)
        except TypeError:  # a tensor cannot be read: put the other numbers
            numbers = {name: value for name, value in numbers.items() if is_readable(value)}
            self._put(tuple(numbers), [*numbers.values()], True, None)

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

    def collect(self, place: RunLimits | None = None, *, since: int = 0) -> Packet:
        """Start the copy of all values put since the last call to the host, and return them as a packet.

        Args:
            place: the limits of the run, which are fields of the events.
            since: values of iterations before this one are added to the histories, but not logged.
        """
        rows, self._rows = self._rows, []
        appended, self._appended = self._appended, 0
        self.crowded = False
        self._checked = 0
        return self._readings.pack(rows, appended, place or RunLimits(), since)

    def collect_media(self, place: RunLimits | None = None) -> MediaPacket:
        """Return the images and histograms put since the last call, without waiting for their copies.

        Args:
            place: the limits of the run, which are fields of the events.
        """
        return self._media.pop_packet(place or RunLimits(), self._readings.count_unreadable)

    @property
    def pending(self) -> int:
        """Return the number of values put since the last `collect`."""
        return sum(len(row.name_set.names) for row in self._rows)

    @property
    def pending_media(self) -> int:
        """Return the number of images and histograms put since the last `collect_media`."""
        return len(self._media)

    @property
    def unreadable(self) -> Counter[str]:
        """Return the number of values of each name that could not be read."""
        return self._readings.unreadable

    def check_losses(self) -> Loss | None:
        """Check the losses on the host; return the first NaN or infinite one since the last finite one."""
        self._readings.check_unread(self._rows[self._appended :])
        return self.losses.lost

    # --- reading, which may wait for the device ------------------------------------------------------------

    def latest(self) -> dict[str, LatestValue]:
        """Return the last value and step of each name; waits for the device. Unknown names raise KeyError."""
        self._read_all()
        latest = {**self._readings.latest}  # atomic, because the background may add values at the same time
        return ByName(
            {name: LatestValue(value, row.iteration, row.step) for name, (value, row) in latest.items()}
        )

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, LatestValue]:
        """Return the last value of each name; waits for the device.

        A name with a smoothing hint has the median of the last `window_size` iterations instead.
        """
        latest = self.latest()
        for name, (_, iteration) in latest.items():
            if self._name_sets.hints.get(name):
                median = self._readings.histories[name].median(window_size)
                latest[name] = LatestValue(median, iteration, latest[name].step)
        return latest

    def history(self, name: str) -> HistoryBuffer:
        """Return the history of one name; waits for the device. An unknown name raises KeyError."""
        return self.histories()[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """Return the history of each name; waits for the device. Unknown names raise a KeyError."""
        self._read_all()
        self._readings.histories_in_use = True
        return ByName(self._readings.histories)

    def read_pending(self) -> list[Row]:
        """Read and return the rows put since the last `collect`, which stay; waits for the device."""
        self._read_all()
        return [*self._rows]

    def read_collected(self) -> None:
        """Read the values of all collected packets; waits for the device if necessary."""
        self._readings.read()

    def _read_all(self) -> None:
        """Read all values; those that no packet has yet are still logged at the end of their interval."""
        new_rows = self._rows[self._appended :]
        is_training = self.in_iteration and self.mode == "train" and threading.get_ident() == self.entered_in
        # `device_reads` counts only the waits that delay a training iteration
        is_clocked = is_training and self._readings.waits(new_rows)
        with self.device_reads.clocked() if is_clocked else nullcontext():
            self._readings.read_with(new_rows)
        self._rows[self._appended :] = new_rows  # without the rows that `read_with` could not read
        self._appended = len(self._rows)

    def _put(self, names: tuple[str, ...], values: list[Scalar], smooth: bool, cur_iter: int | None) -> None:
        """Append a row with one value for each name, at the current iteration or at `cur_iter`."""
        if not names:
            return
        name_set = self._name_sets.of(names, smooth, values)
        numbers = values if len(values) > 1 else values[0]
        if cur_iter is None:
            self._rows.append(Row(name_set, numbers, self.iter, self.phase))
        else:
            self._rows.append(Row(name_set, numbers, cur_iter, self.inside))
        if len(self._rows) - self._checked > CHECK_EVERY:
            self._check_pending()

    def _set_phase(self, epoch: int, mode: str) -> None:
        """Set the epoch and mode of new values, and keep whether they are within an iteration."""
        in_iteration = self.in_iteration
        self.inside = Phase(epoch, mode, trains=mode == "train" or self.stepped)
        self.outside = Phase(epoch, mode, trains=False)
        self.in_iteration = in_iteration

    def _put_medium(self, kind: Kind, name: str, on_host: torch.Tensor, source: Any) -> None:
        """Append an image or histogram whose copy from `source` to `on_host` has begun."""
        self._media.add(Medium(kind, self._prefix + name, self.phase.at(self.iter), on_host), source)
        if self._media.crowded and self.post_pending is not None:
            self.post_pending()
        self._media.drop_excess()  # unless `post_pending` has collected them

    def _check_pending(self) -> None:
        """Read the waiting tensors that are on the CPU, and limit the number of waiting rows."""
        read_on_host(self._rows[self._checked :])  # to free them: small tensors fragment the memory
        self.crowded = self.crowded or len(self._rows) > COLLECT_AT
        if len(self._rows) > PENDING_LIMIT and self.post_pending is not None:
            self.post_pending()
        if len(self._rows) > PENDING_LIMIT:  # `post_pending` is None or has not collected them
            self._drop_oldest()
        self._checked = len(self._rows)

    def _drop_oldest(self) -> None:
        """Add all waiting rows to the histories, and drop the older half, which is not logged."""
        if not self._dropped:
            self._dropped = True
            logger.warning(
                "metrics are not collected: older values are in the histories, but not logged. Add a "
                "LoggerHook, or call bus.post(storage.collect(), ScalarsLogged)"
            )
        self._read_all()
        del self._rows[: len(self._rows) // 2]
        self._appended = len(self._rows)
