"""Keep the recent values of one scalar and compute statistics of them.

`EventStorage.history` returns a `HistoryBuffer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isnan, nan
from statistics import median

from eventloop.util.checks import check_choice

WINDOW = 10_000
"""The default number of values that a `HistoryBuffer` keeps."""
STATISTICS = ("mean", "min", "max", "current", "median", "avg", "latest")
"""The names that `HistoryBuffer.statistics` accepts."""


class HistoryBuffer:
    """Keep the last values of one scalar with their iterations, and compute statistics of them.

        trainer.metrics.history("loss").median(20)    # over the last 20 iterations

    Appending a value takes constant time. A window of n iterations ends at the iteration of the last value.
    `global_avg` covers all values ever appended, including the dropped ones. `latest`, `median`, `avg` and
    `global_avg` have the names of detectron2; `mean`, `min`, `max` and `current` those of MMEngine.

    Args:
        max_length: the number of values to keep; older ones are dropped.

    Raises:
        ValueError: `max_length` is below 1.
    """

    def __init__(self, max_length: int = WINDOW) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self._values: deque[tuple[float, int]] = deque(maxlen=max_length)
        self._sum = 0.0
        self._count = 0

    def update(self, value: float, iteration: int | None = None) -> None:
        """Append a value; by default its iteration is 0 for the first value, then the last one plus 1."""
        if iteration is None:
            iteration = self._values[-1][1] + 1 if self._values else 0
        self._values.append((value, iteration))
        self._sum += value
        self._count += 1

    def extend(self, values: Sequence[float], iterations: Sequence[int]) -> None:
        """Append several values with their iterations."""
        self._values.extend(zip(values, iterations, strict=True))
        self._sum += sum(values)
        self._count += len(values)

    def latest(self) -> float:
        """Return the last value.

        Raises:
            ValueError: the history is empty.
        """
        self._check_not_empty()
        return self._values[-1][0]

    def values(self) -> list[tuple[float, int]]:
        """Return the `(value, iteration)` pairs, oldest first."""
        return list(self._values)  # atomic, because the background may append at the same time

    def window(self, iterations: int) -> list[float]:
        """Return the values of the last `iterations` iterations."""
        if iterations < 1:
            raise ValueError(f"a window must be at least 1 iteration long, got {iterations}")
        pairs = self.values()
        if not pairs:
            return []
        first_iteration = pairs[-1][1] - iterations + 1
        return [value for value, iteration in pairs if iteration >= first_iteration]

    def median(self, iterations: int) -> float:
        """Return the median over the last `iterations` iterations.

        Raises:
            ValueError: the history is empty, or `iterations` is below 1.
        """
        self._check_not_empty()
        return median(self.window(iterations))

    def avg(self, iterations: int) -> float:
        """Return the mean over the last `iterations` iterations.

        Raises:
            ValueError: the history is empty, or `iterations` is below 1.
        """
        self._check_not_empty()
        window = self.window(iterations)
        return sum(window) / len(window)

    def mean(self, window_size: int | None = None) -> float:
        """Return the mean over the last `window_size` iterations, or over all kept values.

        Raises:
            ValueError: the history is empty, or `window_size` is below 1.
        """
        values = self._last(window_size)
        return sum(values) / len(values)

    def max(self, window_size: int | None = None) -> float:
        """Return the maximum over the last `window_size` iterations, or over all kept values.

        It is NaN if any value is NaN.

        Raises:
            ValueError: the history is empty, or `window_size` is below 1.
        """
        values = self._last(window_size)
        return nan if any(map(isnan, values)) else max(values)

    def min(self, window_size: int | None = None) -> float:
        """Return the minimum over the last `window_size` iterations, or over all kept values.

        It is NaN if any value is NaN.

        Raises:
            ValueError: the history is empty, or `window_size` is below 1.
        """
        values = self._last(window_size)
        return nan if any(map(isnan, values)) else min(values)

    def current(self) -> float:
        """Return the last value; MMEngine's name for `latest`.

        Raises:
            ValueError: the history is empty.
        """
        return self.latest()

    def statistics(self, method_name: str, *args: int, **kwargs: int) -> float:
        """Return a statistic by its name: `history.statistics("max", 100)`.

        Raises:
            ValueError: the statistic is unknown (the message suggests one), or the history is empty.
        """
        check_choice("method_name", method_name, STATISTICS)
        result: float = getattr(self, method_name)(*args, **kwargs)
        return result

    def global_avg(self) -> float:
        """Return the mean of all values ever appended.

        Raises:
            ValueError: the history is empty.
        """
        self._check_not_empty()
        return self._sum / self._count

    def _last(self, window_size: int | None) -> list[float]:
        """Return the values of the last `window_size` iterations, or all kept values."""
        self._check_not_empty()
        if window_size is None:
            return [value for value, _ in self.values()]
        return self.window(window_size)

    def _check_not_empty(self) -> None:
        if not self._count:
            raise ValueError("the history is empty: nothing was put under this name yet")

    def __len__(self) -> int:
        """Return the number of values ever appended."""
        return self._count
