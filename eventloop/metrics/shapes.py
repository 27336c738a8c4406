"""Register the sets of names under which values are put, with one smoothing hint for each name."""

from __future__ import annotations

from collections.abc import Sequence

from eventloop.metrics.rows import Scalar, Shape
from eventloop.metrics.scalar_value import refuse_unreadable

SHAPES_LIMIT = 1024
"""The largest number of sets of names that are kept."""


class Shapes:
    """The shapes of a storage: one for each set of names, and one smoothing hint for each name."""

    def __init__(self) -> None:
        self.hints: dict[str, bool] = {}
        self._shapes: dict[tuple[str, ...], Shape] = {}

    def of(self, names: tuple[str, ...], smooth: bool, values: Sequence[Scalar]) -> Shape:
        """Return the one `Shape` object for a set of names; the first values of a new set are checked.

        Raises:
            TypeError: a name is not a str, or a value is a tensor that cannot be read as a number.
            ValueError: a name was put with another hint before.
        """
        shape = self._shapes.get(names)
        if shape is None or shape.smooth is not smooth:
            shape = self._register(names, smooth, values)
        return shape

    def _register(self, names: tuple[str, ...], smooth: bool, values: Sequence[Scalar]) -> Shape:
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"the name of a scalar must be a str, got {wrong[0]!r}")
        refuse_unreadable(names, values)
        for name in names:
            if self.hints.get(name, smooth) is not smooth:
                raise ValueError(
                    f"scalar {name!r} was put with smoothing_hint={not smooth} before: keep one hint per name"
                )
        self.hints.update(dict.fromkeys(names, smooth))
        if len(self._shapes) >= SHAPES_LIMIT:
            self._shapes.clear()
        shape = self._shapes[names] = Shape(names, smooth)
        return shape
