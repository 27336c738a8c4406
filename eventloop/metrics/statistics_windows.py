"""The values that a statistic of the log is of: the last so many, or sums of all of them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from eventloop.state.schema import Count, read_as
from eventloop.util.suggest import suggest

Method = Callable[[Sequence[float]], float]
Result = Callable[[], float]

METHODS: dict[str, Method] = {
    "mean": statistics.fmean, "min": min, "max": max, "median": statistics.median, "current": lambda values: values[-1],
}  # fmt: skip
RUNNING = ("mean", "min", "max", "current")
"""What needs no value but a few sums: windows that have no bound are of these."""


class Window(Protocol):
    """The values that a statistic is of."""

    kind: str
    """Windows of one kind take each other's state."""

    def take(self, value: float, epoch: int) -> None:
        """One more."""

    def result(self) -> Result:
        """What works out the statistic of the values there are now, wherever and whenever it is called."""

    def state_dict(self) -> dict[str, Any]:
        """The values, as plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take those of another one of this kind.

        Raises:
            CheckpointError: they are none.
        """


class Last:
    """Of the last `size` values."""

    kind = "last"

    def __init__(self, method: Method, size: int) -> None:
        self._method, self._values = method, deque[float](maxlen=size)

    def take(self, value: float, epoch: int) -> None:
        """See `Window`."""
        self._values.append(value)

    def result(self) -> Result:
        """See `Window`."""
        return partial(self._method, tuple(self._values))

    def state_dict(self) -> dict[str, Any]:
        """See `Window`."""
        return {"values": [*self._values]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Window`; of a longer one these are the last."""
        values = read_as(list[float], state.get("values"), "a statistic of custom_cfg cannot take its values")
        self._values.clear()
        self._values.extend(values)


class Running:
    """Of all values, or of those of the epoch that is running."""

    def __init__(self, method: str, *, by_epoch: bool) -> None:
        self.kind = "epoch" if by_epoch else "global"
        self._method, self._by_epoch, self._epoch = method, by_epoch, -1
        self._count, self._sum, self._least, self._most, self._current = 0, 0.0, 0.0, 0.0, 0.0

    def take(self, value: float, epoch: int) -> None:
        """See `Window`."""
        if not self._count or (self._by_epoch and epoch != self._epoch):
            self._count, self._sum, self._least, self._most, self._epoch = 0, 0.0, value, value, epoch
        self._count += 1
        self._sum += value
        self._least, self._most, self._current = min(self._least, value), max(self._most, value), value

    def result(self) -> Result:
        """See `Window`."""
        results = {
            "mean": self._sum / self._count, "min": self._least, "max": self._most, "current": self._current,
        }  # fmt: skip
        return partial(results.__getitem__, self._method)

    def state_dict(self) -> dict[str, Any]:
        """See `Window`."""
        return {
            "count": self._count, "sum": self._sum, "least": self._least, "most": self._most,
            "current": self._current, "epoch": self._epoch,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Window`."""
        saved = read_as(_Sums, state, "a statistic of custom_cfg cannot take its sums")
        self._count, self._sum, self._epoch = saved.count, saved.sum, saved.epoch
        self._least, self._most, self._current = saved.least, saved.most, saved.current


class _Sums(msgspec.Struct):
    count: Count
    sum: float
    least: float
    most: float
    current: float
    epoch: int


def window_of(method: object, size: object) -> Window:
    """The window of an entry of a `custom_cfg`, without values.

    Raises:
        ValueError: there is no such method or window, or the method needs the values of a window that has no bound.
    """
    if not callable(method) and method not in METHODS:
        raise ValueError(
            f"method_name must be one of {', '.join(METHODS)} or a function of the values, got "
            f"{method!r}{suggest(str(method), [*METHODS])}"
        )
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return Last(method if callable(method) else METHODS[str(method)], size)
    if size not in ("epoch", "global"):
        raise ValueError(f'window_size must be a positive int, "epoch" or "global", got {size!r}')
    if method not in RUNNING:
        raise ValueError(
            f"method_name={method!r} needs the values themselves, which are not kept without bound: give it a "
            f"window_size, or one of {', '.join(RUNNING)}"
        )
    return Running(str(method), by_epoch=size == "epoch")
