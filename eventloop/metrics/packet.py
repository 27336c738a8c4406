"""Read the values of a logging interval, a `Packet`, and add them to the histories of their names.

`EventStorage` creates packets on the training thread. `Readings` reads each packet once, in order: on the
background thread, or earlier on the training thread if code there needs the values.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

import torch

from eventloop.events import Event
from eventloop.metrics.device import HostCopy, PinnedPool
from eventloop.metrics.history import HistoryBuffer
from eventloop.metrics.rows import (
    Loss,
    NameSet,
    Row,
    RunLimits,
    Scalar,
    UnreadableValue,
    events_of,
    losses_in,
    number_of,
    put_by_two,
    tables_of,
)

logger = logging.getLogger("eventloop")

APPEND_AT = 1024
"""The number of rows that are added to the histories together.

This takes 0.8 us of each iteration, instead of 4 us if the rows of each iteration are added by themselves.
When a history is read, all rows are added first.
"""


class Packet:
    """Hold the values of one logging interval, and create their events in the background.

    It is a `Deferred`, which is passed to `Bus.post`.

    Args:
        rows: the values put in the interval, with one row for each call of the storage.
        appended: the number of rows that are already in the histories.
        since: the first iteration whose rows are logged.
        readings: reads the values.
        limits: the limits of the run, which are fields of the events.
        copy: the copy of the rows' tensors to the host; None if no tensor is on CUDA.
    """

    prompt = True

    def __init__(
        self,
        rows: list[Row],
        appended: int,
        since: int,
        readings: Readings,
        limits: RunLimits,
        copy: HostCopy | None,
    ) -> None:
        self.rows = rows
        self.appended, self._since = appended, since
        self.copy = copy
        self._readings = readings
        self._limits = limits

    def __repr__(self) -> str:
        if not self.rows:
            return "Packet(no metrics)"
        return f"Packet(metrics of iterations {self.rows[0].iteration} to {self.rows[-1].iteration})"

    def ready(self) -> bool:
        """Return whether the values are on the host."""
        return self.copy is None or self.copy.ready()

    def resolve(self) -> list[Row]:
        """Read this and all earlier packets, and return the rows; waits for the device if necessary."""
        self._readings.read(self)
        return self.rows

    def events(self) -> list[Event]:
        """Return the `scalars_logged` events of the interval; waits for the device if necessary."""
        return self.events_of(self.resolve())

    def events_of(self, rows: list[Row]) -> list[Event]:
        """Return the `scalars_logged` events of rows whose values were already read."""
        logged = [row for row in rows if row.iteration >= self._since]
        self._readings.warn_of_two_sources(logged)
        return events_of(logged, self._limits)


class Readings:
    """Read the values in the packets of a storage, and keep the history and the last value of each name."""

    def __init__(self) -> None:
        self.histories: dict[str, HistoryBuffer] = {}
        self.latest: dict[str, tuple[float, Row]] = {}
        """The last value of each name, and its row."""
        self.unreadable: Counter[str] = Counter()
        """The number of values of each name that could not be read."""
        self.histories_in_use = False
        """Whether code outside of the storage has a history, so that each reading must update it."""
        self._unread: deque[Packet] = deque()
        self._unappended: list[Row] = []  # rows that were read and are not in the histories yet
        self._pool = PinnedPool()
        self._warned: set[str] = set()  # names for which `warn_of_two_sources` has logged a warning
        self._lock = threading.Lock()
        self.losses = Losses()
        self.followers: list[Callable[[list[Row]], None]] = []
        """Functions to call with rows once they are read, in order, on the thread that reads them."""

    def pack(self, rows: list[Row], appended: int, limits: RunLimits, since: int = 0) -> Packet:
        """Start the copy of tensors in rows to the host; return the rows as the next packet to be read.

        Args:
            rows: the rows of a logging interval.
            appended: the number of rows that are already in the histories.
            limits: the limits of the run, which are fields of the events.
            since: the first iteration whose rows are logged.
        """
        tensors = tensors_in(rows)
        has_cuda_tensor = any(tensor.is_cuda for tensor in tensors)
        copy = HostCopy(tensors, self._pool) if has_cuda_tensor else None
        packet = Packet(rows, appended, since, self, limits, copy)
        self._unread.append(packet)
        return packet

    def read(self, packet: Packet | None = None) -> None:
        """Read all packets, or those up to `packet`, in order; waits for the device if necessary.

        The values are added to the histories at once if all packets are read or a history is in use, and else
        in groups of `APPEND_AT` rows or more.
        """
        unreadable: list[UnreadableValue] = []
        with self._lock:
            if packet is not None and packet not in self._unread:
                return  # it was read already, and reading later packets could wait for a device
            while self._unread:
                oldest = self._unread.popleft()
                unreadable += read_rows(oldest.rows, oldest.copy)
                oldest.copy = None
                new_rows = oldest.rows[oldest.appended :]
                self._check(new_rows)
                self._unappended += new_rows
                if oldest is packet:
                    break
            if packet is None or self.histories_in_use or len(self._unappended) >= APPEND_AT:
                rows, self._unappended = self._unappended, []
                self._append(rows)
        self.count_unreadable(unreadable)

    def read_with(self, rows: list[Row]) -> None:
        """Read all packets, then rows that are in no packet yet; unreadable values are removed from them."""
        self.read()
        if not rows:
            return
        unreadable = read_rows(rows, None)
        self._check(rows)
        self._append(rows)
        self.count_unreadable(unreadable)

    def _check(self, rows: list[Row]) -> None:
        """Check the losses in rows that were read, and call the followers with the rows."""
        self.losses.check(rows)
        for follow in self.followers:
            follow(rows)

    def check_unread(self, rows: list[Row]) -> None:
        """Check the losses of unread packets and then of `rows`, up to the first loss on a device.

        Args:
            rows: rows that are in no packet yet.
        """
        unread_packets = [*self._unread]  # atomic, because the background reads packets at the same time
        unread_rows = [row for packet in unread_packets for row in packet.rows[packet.appended :]]
        self.losses.check([*unread_rows, *rows])

    def waits(self, rows: list[Row]) -> bool:
        """Return whether `read_with(rows)` would wait for a device."""
        unread_packets = [*self._unread]  # atomic, because the background reads packets at the same time
        uncopied_rows = [row for packet in unread_packets if packet.copy is None for row in packet.rows]
        tensors = tensors_in([*uncopied_rows, *rows])
        has_device_tensor = any(tensor.device.type != "cpu" for tensor in tensors)
        return has_device_tensor or not all(packet.ready() for packet in unread_packets)

    def count_unreadable(self, values: list[UnreadableValue]) -> None:
        """Count values that could not be read, and log the 1st, 2nd, 4th, 8th, ... of each name."""
        for name, iteration, error in values:
            with self._lock:
                self.unreadable[name] += 1
                count = self.unreadable[name]
            if count & (count - 1) == 0:  # a power of two
                logger.error(
                    "metric %r of iteration %d cannot be read and is left out (%d so far): %s: %s",
                    name,
                    iteration,
                    count,
                    type(error).__name__,
                    error,
                )

    def warn_of_two_sources(self, rows: list[Row]) -> None:
        """Log a warning, once per name, if two sources put different numbers under it in one iteration."""
        for name, iteration in put_by_two(rows).items():
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "metric %r was put by two sources in iteration %d, such as the train step and a hook: "
                    "the log has the mean of both; give one of them another name",
                    name,
                    iteration,
                )

    def _append(self, rows: list[Row]) -> None:
        """Add the values of rows to the histories and to `latest`."""
        for table in tables_of(rows) if rows else ():
            iterations = [row.iteration for row in table.rows]
            for name, values in zip(table.name_set.names, table.columns, strict=True):
                history = self.histories.get(name)
                if history is None:
                    history = self.histories[name] = HistoryBuffer()
                history.extend(values, iterations)
                self.latest[name] = values[-1], table.rows[-1]


class Losses:
    """Check the training losses in order, and record when they stop being finite."""

    def __init__(self) -> None:
        self.lost: Loss | None = None
        """The first NaN or infinite loss after the last finite one; None if all losses were finite."""
        # `check` is called in the background, and by a save on the training thread
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget all losses, because other weights were loaded."""
        with self._lock:
            self.lost = None
            self._is_lost = False  # whether the last checked loss was NaN or infinite
            self._lost_count = 0  # how often the losses have stopped being finite
            self._checked_at = -1  # the iteration of the last checked loss

    def check(self, rows: list[Row]) -> None:
        """Check the losses in rows, up to the first loss on a device.

        It logs a warning when losses stop being finite for the 1st, 2nd, 4th, 8th, ... time.
        """
        with self._lock:
            # the losses of iterations before `_checked_at` were checked already, for example at a save
            for loss in losses_in(rows, self._checked_at):
                self._check_loss(loss)

    def _check_loss(self, loss: Loss) -> None:
        """Record a loss that is not finite, if the loss before it was finite."""
        was_lost, self._is_lost = self._is_lost, not isfinite(loss.value)
        self._checked_at = loss.iteration
        is_recorded = self.lost is not None and self.lost.iteration == loss.iteration
        if not self._is_lost or was_lost or is_recorded:
            return
        self.lost = loss
        self._lost_count += 1
        if self._lost_count & (self._lost_count - 1) == 0:  # a power of two
            logger.warning("%s", lost_loss_text(loss))


def lost_loss_text(lost: Loss) -> str:
    """Return a sentence about a loss that is NaN or infinite, with a remedy."""
    return (
        f"the loss is {lost.value} in iteration {lost.iteration} (epoch {lost.epoch}), weights may be lost: "
        "checkpoints saved before this was found are kept; CheckInvalidLossHook() ends such a training, and "
        "OptimizerHook(grad_clip=...) clips gradients"
    )


def tensors_in(rows: Iterable[Row]) -> list[torch.Tensor]:
    """Return the tensors among the values of rows, in order."""
    # not `isinstance(value, Tensor)`, which takes 0.4 us, because this runs on the training thread
    tensors: list[Any] = []
    for row in rows:
        values = row.values
        if type(values) is list:
            tensors += [value for value in values if type(value) is not float]
        elif type(values) is not float:
            tensors.append(values)
    return tensors


def read_rows(rows: list[Row], copy: HostCopy | None) -> list[UnreadableValue]:
    """Replace the tensors among the values of rows by numbers, in place; waits for the device if necessary.

    Args:
        rows: the rows; values that cannot be read are removed.
        copy: the copy of the tensors to the host. Without it, each tensor is read by itself, which on the
            CPU takes a sixth of the time of a stack.

    Returns:
        the removed values.
    """
    try:
        numbers = iter(copy.values()) if copy is not None else None
        _replace_tensors(rows, number_of if numbers is None else lambda _: next(numbers))
    except Exception:  # at least one tensor cannot be read: read each by itself
        if copy is not None:
            copy.wait()
        return _read_one_by_one(rows)
    return []


def read_on_host(rows: Iterable[Row]) -> None:
    """Replace the tensors in rows that are on the CPU and readable by their numbers, in place."""
    _replace_tensors(rows, _number_if_on_host)


def _replace_tensors(rows: Iterable[Row], convert: Callable[[torch.Tensor], Scalar]) -> None:
    """Replace each tensor among the values of rows by the result of `convert`, in place."""
    for row in rows:
        values: Any = row.values
        if type(values) is list:
            values[:] = [value if type(value) is float else convert(value) for value in values]
        elif type(values) is not float:
            row.values = convert(values)


def _read_one_by_one(rows: list[Row]) -> list[UnreadableValue]:
    """Read each value by itself; remove values that cannot be read from the rows, and return them."""
    unreadable: list[UnreadableValue] = []
    readable_rows: list[Row] = []
    for row in rows:
        values = row.values if isinstance(row.values, list) else [row.values]
        names: list[str] = []
        numbers: list[Scalar] = []
        for name, value in zip(row.name_set.names, values, strict=True):
            try:
                numbers.append(value if type(value) is float else float(value.item()))  # type: ignore[union-attr]
            except Exception as error:
                unreadable.append(UnreadableValue(name, row.iteration, error))
            else:
                names.append(name)
        if len(names) < len(values):
            row.name_set = NameSet(tuple(names), row.name_set.smooth)
        if numbers:
            row.values = numbers if len(numbers) > 1 else numbers[0]
            readable_rows.append(row)
    rows[:] = readable_rows
    return unreadable


def _number_if_on_host(tensor: torch.Tensor) -> Scalar:
    """Return the number of a readable tensor on the CPU, and any other tensor unchanged."""
    try:
        return number_of(tensor) if tensor.device.type == "cpu" else tensor
    except Exception:
        return tensor
