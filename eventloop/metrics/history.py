"""The recent past of one scalar."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isnan, nan
from statistics import median

from eventloop.util.suggest import suggest

WINDOW = 10_000
"""Values a `HistoryBuffer` keeps."""
STATISTICS = ("mean", "min", "max", "current", "median", "avg", "latest")
"""What `HistoryBuffer.statistics` knows."""


class HistoryBuffer:
    """The last values of one scalar with the iteration each belongs to: O(1) to append, bounded.

    Windows are counted in iterations, up to the one of the last value. `global_avg` is over everything that was ever
    appended, what has left the buffer included. detectron2's names, and MMEngine's: `mean`, `min`, `max`, `current`.
    """

    def __init__(self, max_length: int = WINDOW) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self._values: deque[tuple[float, int]] = deque(maxlen=max_length)
        self._sum = 0.0
        self._count = 0

    def update(self, value: float, iteration: int | None = None) -> None:
        """Append a value; without an iteration it is that of the next one: one after the last, the first is 0."""
        if iteration is None:
            iteration = self._values[-1][1] + 1 if self._values else 0
        self._values.append((value, iteration))
        self._sum += value
        self._count += 1

    def extend(self, values: Sequence[float], iterations: Sequence[int]) -> None:
        """Append several."""
        self._values.extend(zip(values, iterations, strict=True))
        self._sum += sum(values)
        self._count += len(values)

    def latest(self) -> float:
        """The last value.

        Raises:
            ValueError: there is none.
        """
        self._check()
        return self._values[-1][0]

    def values(self) -> list[tuple[float, int]]:
        """`(value, iteration)` pairs, oldest first."""
        return list(self._values)  # one C call: the background may append meanwhile

    def window(self, iterations: int) -> list[float]:
        """The values of the last `iterations` iterations.

        Raises:
            ValueError: `iterations` is below 1.
        """
        if iterations < 1:
            raise ValueError(f"a window must be at least 1 iteration long, got {iterations}")
        pairs = self.values()
        if not pairs:
            return []
        first = pairs[-1][1] - iterations + 1
        return [value for value, iteration in pairs if iteration >= first]

    def median(self, iterations: int) -> float:
        """Median over the last `iterations` iterations.

        Raises:
            ValueError: there is no value, or `iterations` is below 1.
        """
        self._check()
        return median(self.window(iterations))

    def avg(self, iterations: int) -> float:
        """Mean over the last `iterations` iterations.

        Raises:
            ValueError: there is no value, or `iterations` is below 1.
        """
        self._check()
        window = self.window(iterations)
        return sum(window) / len(window)

    def mean(self, window_size: int | None = None) -> float:
        """Mean over the last `window_size` iterations, or over all that is kept.

        Raises:
            ValueError: there is no value, or `window_size` is below 1.
        """
        values = self._last(window_size)
        return sum(values) / len(values)

    def max(self, window_size: int | None = None) -> float:
        """The greatest of the last `window_size` iterations, or of all that is kept; NaN where one of them is.

        Raises:
            ValueError: there is no value, or `window_size` is below 1.
        """
        values = self._last(window_size)
        return nan if any(map(isnan, values)) else max(values)

    def min(self, window_size: int | None = None) -> float:
        """The least of them, as `max`.

        Raises:
            ValueError: there is no value, or `window_size` is below 1.
        """
        values = self._last(window_size)
        return nan if any(map(isnan, values)) else min(values)

    def current(self) -> float:
        """The last value: MMEngine's name for `latest`.

        Raises:
            ValueError: there is none.
        """
        return self.latest()

    def statistics(self, method_name: str, *args: int, **kwargs: int) -> float:
        """One of them by its name: `history.statistics("max", 100)`.

        Raises:
            ValueError: there is no such statistic (with a suggestion), or no value.
        """
        if method_name not in STATISTICS:
            raise ValueError(
                f"a history has no statistic {method_name!r}{suggest(str(method_name), [*STATISTICS])}"
            )
        result: float = getattr(self, method_name)(*args, **kwargs)
        return result

    def global_avg(self) -> float:
        """Mean over everything.

        Raises:
            ValueError: there is no value.
        """
        self._check()
        return self._sum / self._count

    def _last(self, window_size: int | None) -> list[float]:
        self._check()
        return [value for value, _ in self.values()] if window_size is None else self.window(window_size)

    def _check(self) -> None:
        if not self._count:
            raise ValueError("the history is empty: nothing was put under this name yet")

    def __len__(self) -> int:
        return self._count
