"""The recent past of one scalar."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

WINDOW = 10_000
"""Values a `HistoryBuffer` keeps."""


class HistoryBuffer:
    """The last values of one scalar with the iteration each belongs to: O(1) to append, bounded.

    `global_avg` is over everything that was ever appended, what has left the window included.
    """

    def __init__(self, max_length: int = WINDOW) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self._values: deque[tuple[float, int]] = deque(maxlen=max_length)
        self._sum = 0.0
        self._count = 0

    def update(self, value: float, iteration: int) -> None:
        """Append a value."""
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

    @property
    def global_avg(self) -> float:
        """Mean over everything.

        Raises:
            ValueError: there is no value.
        """
        self._check()
        return self._sum / self._count

    def _check(self) -> None:
        if not self._count:
            raise ValueError("the history is empty: nothing was put under this name yet")

    def __len__(self) -> int:
        return self._count
