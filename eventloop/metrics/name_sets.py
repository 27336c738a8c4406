"""Cache the sets of names that an `EventStorage` receives, and the smoothing hint of each name."""

from __future__ import annotations

from collections.abc import Sequence

from eventloop.metrics.rows import NameSet, Scalar
from eventloop.metrics.scalar_value import refuse_unreadable

NAME_SETS_LIMIT = 1024
"""The largest number of cached sets of names; beyond it, the cache is cleared."""


class NameSets:
    """Return the same `NameSet` object for equal names, and refuse two smoothing hints for one name."""

    def __init__(self) -> None:
        self.hints: dict[str, bool] = {}  # the smoothing hint of each name
        self._name_sets: dict[tuple[str, ...], NameSet] = {}

    def of(self, names: tuple[str, ...], smooth: bool, values: Sequence[Scalar]) -> NameSet:
        """Return the `NameSet` object for a set of names, after a check of the values of a new set.

        Args:
            names: the names.
            smooth: the smoothing hint of all names.
            values: one value for each name.

        Raises:
            TypeError: a name is not a str, or a value is a tensor that cannot be read as a number.
            ValueError: a name was put with another hint before.
        """
        name_set = self._name_sets.get(names)
        if name_set is None or name_set.smooth is not smooth:
            name_set = self._register(names, smooth, values)
        return name_set

    def _register(self, names: tuple[str, ...], smooth: bool, values: Sequence[Scalar]) -> NameSet:
        """Check, create and cache the `NameSet` of new names."""
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"the name of a scalar must be a str, got {name!r}")
        refuse_unreadable(names, values)
        for name in names:
            if self.hints.get(name, smooth) is not smooth:
                raise ValueError(
                    f"scalar {name!r} was put with smoothing_hint={not smooth} before: keep one hint per name"
                )
        self.hints.update(dict.fromkeys(names, smooth))
        if len(self._name_sets) >= NAME_SETS_LIMIT:
            self._name_sets.clear()
        name_set = self._name_sets[names] = NameSet(names, smooth)
        return name_set
