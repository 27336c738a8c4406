"""Define the results of `EventStorage.latest`: a scalar's newest value, and a dict of them by name."""

from __future__ import annotations

from typing import Any, NoReturn, Self, TypeVar

from eventloop.util.suggest import near

V = TypeVar("V")


class LatestValue(tuple[float, int]):
    """Hold the newest value of a scalar, which prints as `0.693147 (step 12)` and compares like the number.

        loss = trainer.metrics.latest()["loss"]
        if loss < 0.3: ...              # loss.value is the number alone

    It is also the tuple `(value, iteration)`, as detectron2's `EventStorage.latest` returns it.

    Args:
        value: the number.
        iteration: the 0-based training iteration of the value; for a value between two iterations, the next.
        step: the number of completed training iterations, as in `scalars_logged`.
    """

    step: int

    def __new__(cls, value: float, iteration: int, step: int) -> Self:
        self = super().__new__(cls, (value, iteration))
        self.step = step
        return self

    @property
    def value(self) -> float:
        """Return the number alone."""
        return self[0]

    def __float__(self) -> float:
        return self.value

    def __lt__(self, other: Any) -> bool:
        return self.value < other if isinstance(other, int | float) else super().__lt__(other)

    def __le__(self, other: Any) -> bool:
        return self.value <= other if isinstance(other, int | float) else super().__le__(other)

    def __gt__(self, other: Any) -> bool:
        return self.value > other if isinstance(other, int | float) else super().__gt__(other)

    def __ge__(self, other: Any) -> bool:
        return self.value >= other if isinstance(other, int | float) else super().__ge__(other)

    def __repr__(self) -> str:
        return f"{self.value:.6g} (step {self.step})"

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else repr(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return LatestValue, (self.value, self[1], self.step)


class ByName(dict[str, V]):
    """A dict by the names of scalars, whose KeyError for an unknown name suggests the nearest known one."""

    def __missing__(self, name: object) -> NoReturn:
        if not self:
            raise KeyError(f"no scalar {name!r}: nothing was put yet")
        raise KeyError(f"no scalar {name!r}{near(str(name), self)}; known are {', '.join(sorted(self))}")
