"""Define windows over the values of a scalar: the last n values, or all values of an epoch or the run.

Each `Statistic` of a `custom_cfg` has one window.
"""

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
"""A function that computes a statistic of values."""
Result = Callable[[], float]
"""A function that returns a statistic of the values that a window had at a certain time."""

METHODS: dict[str, Method] = {
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "median": statistics.median,
    "current": lambda values: values[-1],
}
"""The statistics by their names in a `custom_cfg`."""
RUNNING = ("mean", "min", "max", "current")
"""The methods for windows of an epoch or the run, which need no list of the values."""


class Window(Protocol):
    """The values from which a statistic is computed."""

    kind: str
    """The kind of window, such as "last"; a window can load the state of another window of the same kind."""

    def add(self, value: float, epoch: int) -> None:
        """Add a value of an epoch."""

    def result(self) -> Result:
        """Return a function that computes the statistic of the present values, on any thread."""

    def state_dict(self) -> dict[str, Any]:
        """Return the values or sums, as plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the values by the values of a state of the same kind.

        Raises:
            CheckpointError: `state` has another form.
        """


class Last:
    """Hold the last `size` values of a scalar, and compute any statistic of them."""

    kind = "last"

    def __init__(self, method: Method, size: int) -> None:
        self._method, self._values = method, deque[float](maxlen=size)

    def add(self, value: float, epoch: int) -> None:
        """Append a value; the oldest one is dropped if there are more than `size`."""
        self._values.append(value)

    def result(self) -> Result:
        """Return a function that computes the statistic of the present values."""
        return partial(self._method, tuple(self._values))

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return {"values": [*self._values]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the last `size` values of a state.

        Raises:
            CheckpointError: `state` has no list of numbers.
        """
        values = read_as(list[float], state.get("values"), "a statistic of custom_cfg cannot take its values")
        self._values.clear()
        self._values.extend(values)


class Running:
    """Compute a statistic of all values, or of the current epoch's values, without storing the values.

    Args:
        method: one of `RUNNING`.
        by_epoch: whether only the values of the current epoch count.
    """

    def __init__(self, method: str, *, by_epoch: bool) -> None:
        self.kind = "epoch" if by_epoch else "global"
        self._method, self._by_epoch, self._epoch = method, by_epoch, -1
        self._count, self._sum, self._least, self._most, self._current = 0, 0.0, 0.0, 0.0, 0.0

    def add(self, value: float, epoch: int) -> None:
        """Add a value; with `by_epoch`, the first value of another epoch discards the earlier ones."""
        if not self._count or (self._by_epoch and epoch != self._epoch):
            self._count, self._sum, self._least, self._most, self._epoch = 0, 0.0, value, value, epoch
        self._count += 1
        self._sum += value
        self._least, self._most, self._current = min(self._least, value), max(self._most, value), value

    def result(self) -> Result:
        """Return a function that returns the statistic of the present values."""
        # computed now, because later values change the sums
        results = {
            "mean": self._sum / self._count,
            "min": self._least,
            "max": self._most,
            "current": self._current,
        }
        return partial(results.__getitem__, self._method)

    def state_dict(self) -> dict[str, Any]:
        """Return the count, the sum, the extremes, the last value and the epoch."""
        return {
            "count": self._count,
            "sum": self._sum,
            "least": self._least,
            "most": self._most,
            "current": self._current,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the count, the sum, the extremes, the last value and the epoch of a state.

        Raises:
            CheckpointError: `state` has another form.
        """
        saved = read_as(_Sums, state, "a statistic of custom_cfg cannot take its sums")
        self._count, self._sum, self._epoch = saved.count, saved.sum, saved.epoch
        self._least, self._most, self._current = saved.least, saved.most, saved.current


class _Sums(msgspec.Struct):
    """The state of a `Running` window."""

    count: Count
    sum: float
    least: float
    most: float
    current: float
    epoch: int


def window_of(method: object, size: object) -> Window:
    """Create an empty window for an entry of a `custom_cfg`.

    Args:
        method: the entry's `method_name`.
        size: the entry's `window_size`.

    Raises:
        ValueError: one of them is invalid, or the method needs the values and the window does not store them.
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
            f"method_name={method!r} needs the values, which window_size={size!r} does not keep: give an int "
            f"as window_size, or one of {', '.join(RUNNING)} as method_name"
        )
    return Running(str(method), by_epoch=size == "epoch")
