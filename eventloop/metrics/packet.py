"""Read the values of a logging interval, a `Packet`, and add them to the histories of their names.

`EventStorage` creates packets on the training thread. `Readings` reads them, in order and each once: in the
background, or on the training thread if code asks for values.
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
"""The number of rows that are added to the histories at a time: 0.8 us an iteration instead of 4.

When a history is read, all rows are added at once.
"""


class Packet:
    """The values of one logging interval; a `Deferred`, handled in the background.

    Args:
        rows: the rows put in the interval.
        appended: the number of rows that are already in the histories.
        readings: reads the values.
        limits: the limits of the run, which are fields of the events.
        copy: the copy of the rows' tensors to the host; None if no tensor is on CUDA.
        since: rows of iterations before this one become no event.
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
        """Return the rows after reading this and all earlier packets; waits for the device if necessary."""
        self._readings.read(self)
        return self.rows

    def events(self) -> list[Event]:
        """Return the `scalars_logged` events of the interval; waits for the device if necessary."""
        return self.events_of(self.resolve())

    def events_of(self, rows: list[Row]) -> list[Event]:
        """Return the `scalars_logged` events for rows whose values were already read."""
        logged = [row for row in rows if row.iteration >= self._since]
        self._readings.warn_of_two_sources(logged)
        return events_of(logged, self._limits)


class Readings:
    """The values of a storage that were already read: the history and the last value of each name."""

    def __init__(self) -> None:
        self.histories: dict[str, HistoryBuffer] = {}
        self.latest: dict[str, tuple[float, Row]] = {}
        self.unreadable: Counter[str] = Counter()
        self.followed = False
        """Whether code outside of the storage holds a history, so that reading must update it at once."""
        self._unread: deque[Packet] = deque()
        self._unappended: list[Row] = []  # read, and not in the histories yet
        self._pool = PinnedPool()
        self._warned: set[str] = set()  # names that two sources put
        self._lock = threading.Lock()
        self.losses = Losses()
        self.followers: list[Callable[[list[Row]], None]] = []
        """Functions to call with the rows that are read, in their order, on the thread that reads them."""

    def pack(self, rows: list[Row], appended: int, limits: RunLimits, since: int = 0) -> Packet:
        """Start the copy of rows to the host, and return the rows as the next packet to read."""
        tensors = tensors_in(rows)
        on_device = any(tensor.is_cuda for tensor in tensors)
        copy = HostCopy(tensors, self._pool) if on_device else None
        packet = Packet(rows, appended, since, self, limits, copy)
        self._unread.append(packet)
        return packet

    def read(self, packet: Packet | None = None) -> None:
        """Read the packets in order, up to `packet` or all; waits for the device if necessary.

        If all are read or a history is in use, the values are added to the histories at once, else in groups.
        """
        unread: list[UnreadableValue] = []
        with self._lock:
            if packet is not None and packet not in self._unread:
                return  # read already, by a caller that waited; later packets may not be ready
            while self._unread:
                oldest = self._unread.popleft()
                unread += read_rows(oldest.rows, oldest.copy)
                oldest.copy = None
                fresh = oldest.rows[oldest.appended :]
                self._check(fresh)
                self._unappended += fresh
                if oldest is packet:
                    break
            if packet is None or self.followed or len(self._unappended) >= APPEND_AT:
                rows, self._unappended = self._unappended, []
                self._append(rows)
        self.count_unreadable(unread)

    def read_with(self, rows: list[Row]) -> None:
        """Read all packets, then rows that are not collected yet; rows that cannot be read are removed."""
        self.read()
        unread = read_rows(rows, None)
        self._check(rows)
        self._append(rows)
        self.count_unreadable(unread)

    def _check(self, rows: list[Row]) -> None:
        self.losses.check(rows)
        for follow in self.followers:
            follow(rows)

    def check_unread(self, rows: list[Row]) -> None:
        """Look for a lost loss in unread packets, then in uncollected rows, up to the first on a device."""
        unread = [*self._unread]  # an atomic copy: the background reads packets at the same time
        self.losses.check([*(row for packet in unread for row in packet.rows[packet.appended :]), *rows])

    def waits(self, rows: list[Row]) -> bool:
        """Return whether reading all packets, and uncollected rows, would wait for a device."""
        unread = [*self._unread]  # an atomic copy: the background reads packets at the same time
        uncopied = [row for packet in unread if packet.copy is None for row in packet.rows]
        on_device = any(tensor.device.type != "cpu" for tensor in tensors_in([*uncopied, *rows]))
        return on_device or not all(packet.ready() for packet in unread)

    def count_unreadable(self, unread: list[UnreadableValue]) -> None:
        """Count values that could not be read, and log the 1st, 2nd, 4th, 8th, ... of each name."""
        for name, iteration, error in unread:
            with self._lock:
                self.unreadable[name] += 1
                count = self.unreadable[name]
            if count & (count - 1) == 0:
                logger.error(
                    "metric %r of iteration %d cannot be read and is left out (%d so far): %s: %s",
                    name,
                    iteration,
                    count,
                    type(error).__name__,
                    error,
                )

    def warn_of_two_sources(self, rows: list[Row]) -> None:
        """Warn of each name under which two sources put different numbers in one iteration, once a name."""
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
        for table in tables_of(rows):
            iterations = [row.iteration for row in table.rows]
            for name, values in zip(table.name_set.names, table.columns, strict=True):
                history = self.histories.get(name)
                if history is None:
                    history = self.histories[name] = HistoryBuffer()
                history.extend(values, iterations)
                self.latest[name] = values[-1], table.rows[-1]


class Losses:
    """Check the training losses in order, and record each time at which they stop being finite."""

    def __init__(self) -> None:
        self.lost: Loss | None = None
        """The first loss that is NaN or infinite since losses were last finite."""
        self._lock = threading.Lock()  # the background checks, and a save on the training thread
        self.reset()

    def reset(self) -> None:
        """Reset the record, because other weights were loaded."""
        with self._lock:
            self.lost, self._is_lost, self._found, self._checked_at = None, False, 0, -1

    def check(self, rows: list[Row]) -> None:
        """Check the losses of these rows, and log the 1st, 2nd, 4th, ... finding; waits for no device."""
        with self._lock:
            # a save checks rows that are read, and checked, again later
            for loss in losses_in(rows, self._checked_at):
                self._check_loss(loss)

    def _check_loss(self, loss: Loss) -> None:
        was_lost, self._is_lost, self._checked_at = self._is_lost, not isfinite(loss.value), loss.iteration
        if not self._is_lost or was_lost or (self.lost and self.lost.iteration == loss.iteration):
            return
        self.lost = loss
        self._found += 1
        if self._found & (self._found - 1) == 0:
            logger.warning("%s", lost_loss_text(loss))


def lost_loss_text(lost: Loss) -> str:
    """Return a sentence about a loss that is NaN or infinite, with a remedy."""
    return (
        f"the loss is {lost.value} in iteration {lost.iteration} (epoch {lost.epoch}), weights may be lost: "
        "checkpoints saved before this was found are kept; CheckInvalidLossHook() ends such a training, and "
        "OptimizerHook(grad_clip=...) clips gradients"
    )


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


def read_rows(rows: list[Row], copy: HostCopy | None) -> list[UnreadableValue]:
    """Replace tensors by their numbers; remove values that cannot be read from the rows, and return them.

    The numbers come from `copy`; without one each tensor is read by itself, which on the CPU takes a sixth of
    the time of a stack.
    """
    try:
        numbers = iter(copy.values()) if copy is not None else None
        _replace_tensors(rows, number_of if numbers is None else lambda _: next(numbers))
    except Exception:  # of one value: read one by one to keep the others
        if copy is not None:
            copy.wait()
        return _read_one_by_one(rows)
    return []


def read_on_host(rows: Iterable[Row]) -> None:
    """Replace tensors on the CPU by their numbers; unreadable ones are left to `read_rows`."""
    _replace_tensors(rows, _number_if_on_host)


def _replace_tensors(rows: Iterable[Row], by: Callable[[torch.Tensor], Scalar]) -> None:
    for row in rows:
        values: Any = row.values
        if type(values) is list:
            values[:] = [value if type(value) is float else by(value) for value in values]
        elif type(values) is not float:
            row.values = by(values)


def _read_one_by_one(rows: list[Row]) -> list[UnreadableValue]:
    """Read each value by itself; remove those that cannot be read from `rows` in limits, and return them."""
    unread: list[UnreadableValue] = []
    kept: list[Row] = []
    for row in rows:
        values = row.values if isinstance(row.values, list) else [row.values]
        names: list[str] = []
        numbers: list[Scalar] = []
        for name, value in zip(row.name_set.names, values, strict=True):
            try:
                numbers.append(value if type(value) is float else float(value.item()))  # type: ignore[union-attr]
            except Exception as error:
                unread.append(UnreadableValue(name, row.iteration, error))
            else:
                names.append(name)
        if len(names) < len(values):
            row.name_set = NameSet(tuple(names), row.name_set.smooth)
        if numbers:
            row.values = numbers if len(numbers) > 1 else numbers[0]
            kept.append(row)
    rows[:] = kept
    return unread


def _number_if_on_host(tensor: torch.Tensor) -> Scalar:
    try:
        return number_of(tensor) if tensor.device.type == "cpu" else tensor
    except Exception:
        return tensor
