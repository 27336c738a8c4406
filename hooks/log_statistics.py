"""Other statistics of what is logged than the mean of an interval: MMEngine's `custom_cfg`."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from eventloop.catalogue import suggest
from eventloop.events import Event, ScalarsLogged
from eventloop.packet import Packet, Row
from eventloop.reducer import Reduced

logger = logging.getLogger("eventloop")

Method = Callable[[Sequence[float]], float]

_KEYS = ["data_src", "method_name", "window_size", "log_name"]
_METHODS: dict[str, Method] = {
    "mean": statistics.fmean, "min": min, "max": max, "median": statistics.median, "current": lambda values: values[-1],
}  # fmt: skip
_RUNNING = ("mean", "min", "max", "current")
"""What needs no value but a few sums: windows that have no bound are of these."""


class _Window(Protocol):
    """The values that a statistic is of."""

    def take(self, value: float, epoch: int) -> None:
        """One more."""

    def result(self) -> float:
        """The statistic of them."""


class _Last:
    """Of the last `size` values."""

    def __init__(self, method: Method, size: int) -> None:
        self._method, self._values = method, deque[float](maxlen=size)

    def take(self, value: float, epoch: int) -> None:
        """See `_Window`."""
        self._values.append(value)

    def result(self) -> float:
        """See `_Window`."""
        return float(self._method(tuple(self._values)))


class _Running:
    """Of all values, or of those of the epoch that is running."""

    def __init__(self, method: str, *, by_epoch: bool) -> None:
        self._method, self._by_epoch, self._epoch = method, by_epoch, -1
        self._count, self._sum, self._least, self._most, self._current = 0, 0.0, 0.0, 0.0, 0.0

    def take(self, value: float, epoch: int) -> None:
        """See `_Window`."""
        if not self._count or (self._by_epoch and epoch != self._epoch):
            self._count, self._sum, self._least, self._most, self._epoch = 0, 0.0, value, value, epoch
        self._count += 1
        self._sum += value
        self._least, self._most, self._current = min(self._least, value), max(self._most, value), value

    def result(self) -> float:
        """See `_Window`."""
        results = {
            "mean": self._sum / self._count, "min": self._least, "max": self._most, "current": self._current,
        }  # fmt: skip
        return results[self._method]


class Statistic:
    """One entry of a `custom_cfg`.

    Raises:
        TypeError, ValueError: it is no mapping, lacks its `data_src`, has an unknown key, method or window.
    """

    def __init__(self, config: object) -> None:
        if not isinstance(config, Mapping):
            raise TypeError(f"an entry of custom_cfg must be a dict(data_src=..., ...), got {config!r}")
        if unknown := [key for key in config if key not in _KEYS]:
            raise ValueError(f"an entry of custom_cfg has no {unknown[0]!r}{suggest(str(unknown[0]), _KEYS)}")
        if "data_src" not in config:
            raise ValueError(
                f"an entry of custom_cfg needs data_src, the name of what is put, got {dict(config)!r}"
            )
        if not isinstance(config["data_src"], str):
            raise TypeError(f"data_src of custom_cfg must be a name, got {config['data_src']!r}")
        self.source: str = config["data_src"]
        self.name: str = config.get("log_name") or self.source
        self.size = config.get("window_size", "global")
        self._failed = False
        self.window = _window(config.get("method_name", "mean"), self.size)

    def result(self) -> float | None:
        """What it is now; None where a function of the user's failed, which is told once."""
        try:
            return self.window.result()
        except Exception:
            if not self._failed:
                logger.exception(
                    "the statistic %s of custom_cfg failed, and is left out of the log", self.name
                )
            self._failed = True
            return None


def _window(method: object, size: object) -> _Window:
    if not callable(method) and method not in _METHODS:
        raise ValueError(
            f"method_name must be one of {', '.join(_METHODS)} or a function of the values, got "
            f"{method!r}{suggest(str(method), [*_METHODS])}"
        )
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return _Last(method if callable(method) else _METHODS[str(method)], size)
    if size not in ("epoch", "global"):
        raise ValueError(f'window_size must be a positive int, "epoch" or "global", got {size!r}')
    if method not in _RUNNING:
        raise ValueError(
            f"method_name={method!r} needs the values themselves, which are not kept without bound: give it a "
            f"window_size, or one of {', '.join(_RUNNING)}"
        )
    return _Running(str(method), by_epoch=size == "epoch")


class LogStatistics:
    """Reckons statistics of the numbers of a training, in the background, as their packets come.

    Raises:
        TypeError, ValueError: as `Statistic`; or two of one name.
    """

    def __init__(self, custom_cfg: Iterable[object]) -> None:
        self.entries = [Statistic(config) for config in custom_cfg]
        names = [entry.name for entry in self.entries]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f"custom_cfg has two statistics that are logged as {twice!r}: give one a log_name"
            )
        sources = {entry.source for entry in self.entries}
        if taken := next((e for e in self.entries if e.name in sources and e.name != e.source), None):
            raise ValueError(
                f"log_name={taken.name!r} of custom_cfg is the name of what is put: choose another"
            )

    def reckon(self, packet: Packet | Reduced) -> Reckoned:
        """The packet, with them."""
        return Reckoned(packet, self)

    def of(self, rows: Sequence[Row], events: list[Event]) -> list[Event]:
        """The events with the statistics after these rows, each at the last iteration that has its source."""
        told = [event for event in events if isinstance(event, ScalarsLogged) and event.mode == "train"]
        scalars = {id(event): dict(event.scalars) for event in told}
        for entry in self.entries:
            if not _take(entry, rows):
                continue
            if (result := entry.result()) is None:
                continue
            own = [event for event in told if entry.source in event.scalars]
            for event in own if entry.name == entry.source else ():
                del scalars[id(event)][entry.name]
            scalars[id(own[-1])][entry.name] = result
        changed = [replace(e, scalars=scalars[id(e)]) if id(e) in scalars else e for e in events]
        return [event for event in changed if not isinstance(event, ScalarsLogged) or event.scalars]


def _take(entry: Statistic, rows: Sequence[Row]) -> int:
    """Let it have its values in these rows; returns how many there are."""
    taken = 0
    for row in rows:
        if entry.source in row.shape.names and row.phase.mode == "train":
            entry.window.take(row.scalars()[entry.source], row.phase.epoch)
            taken += 1
    return taken


class Reckoned:
    """A packet whose events have statistics; a `Deferred` of the background loop."""

    def __init__(self, packet: Packet | Reduced, statistics: LogStatistics) -> None:
        self._packet, self._statistics = packet, statistics

    def ready(self) -> bool:
        """True when the values are on the host."""
        return self._packet.ready()

    def events(self) -> list[Event]:
        """Those of the packet, with the statistics."""
        return self._statistics.of(self._packet.rows, self._packet.events())


def refuse_epochs(entries: Iterable[Statistic], *, by_epoch: bool) -> None:
    """Refuse windows of an epoch in a run that has none.

    Raises:
        ValueError: there is one.
    """
    if not by_epoch and any(entry.size == "epoch" for entry in entries):
        raise ValueError(
            'custom_cfg has a window_size="epoch", and a run measured in iterations has no epochs: give an int or "global"'
        )
