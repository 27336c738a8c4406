"""Keep the record of the regular checkpoints, and decide which ones `max_keep_ckpts` removes.

`CheckpointHook` uses it. A checkpoint is removed only after its successor is durable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Going(NamedTuple):
    """The names to remove once a save is durable.

    Attributes:
        surely: removed in any case.
        if_former: removed only if the save before it has become durable too.
    """

    surely: tuple[str, ...] = ()
    if_former: tuple[str, ...] = ()


@dataclass
class _Begun:
    """A running save: its name, its iteration, and the names that it removes."""

    name: str
    iter: int
    goes: set[str]
    if_former: set[str]


class Kept:
    """The record of the durable checkpoints that `max_keep_ckpts` counts, and of the running saves.

    A running save may still fail, so the removals of the next save depend on its result.

    Args:
        limit: the number of newest checkpoints that stay; -1 keeps all.
        names: the checkpoints that exist.
    """

    def __init__(self, limit: int = -1, names: Iterable[str] = ()) -> None:
        self.limit = limit
        self._durable = [*names]
        self._durable_at = -1
        self._begun: list[_Begun] = []

    @property
    def durable(self) -> list[str]:
        """Return the names of the durable checkpoints, oldest first."""
        return list(self._durable)

    @property
    def names(self) -> list[str]:
        """Return the names of the durable checkpoints, then those of the running saves."""
        coming = [begun.name for begun in self._begun]
        return [*(name for name in self._durable if name not in coming), *coming]

    @property
    def saved_at(self) -> int:
        """Return the iteration of the last durable checkpoint or running save; -1 before the first."""
        return self._begun[-1].iter if self._begun else self._durable_at

    def begin(self, name: str, iteration: int) -> Going:
        """Record that a save begins; return the names to remove when it is durable."""
        coming = [begun.name for begun in self._begun]
        there = [each for each in self._durable if each != name]
        surely = self._beyond([each for each in there if each not in coming], name)
        together = self._beyond([*(each for each in there if each not in coming), *coming], name)
        going = Going(tuple(surely), tuple(each for each in together if each not in surely))
        self._begun.append(_Begun(name, iteration, {*going.surely}, {*going.if_former}))
        return going

    def done(self, name: str) -> None:
        """Record that a save is durable, and that the names it removes are gone."""
        if (begun := self._take(name)) is None:
            return
        for later in self._begun:
            later.goes |= later.if_former
        self._durable = [*(each for each in self._durable if each not in begun.goes and each != name), name]
        self._durable_at = begun.iter

    def failed(self, name: str) -> None:
        """Record that a save failed or was skipped; the former checkpoint of its name still exists."""
        if self._take(name) is not None:
            for later in self._begun:
                later.if_former.clear()

    def resumed_from(self, iteration: int) -> None:
        """Set the iteration of the newest existing checkpoint."""
        self._durable_at = iteration

    def only(self, there: Collection[str]) -> None:
        """Forget the names that are not in `there`, such as that of a save that failed."""
        self._durable = [name for name in self._durable if name in there]

    def _take(self, name: str) -> _Begun | None:
        begun = next((begun for begun in self._begun if begun.name == name), None)
        if begun is not None:
            self._begun.remove(begun)
        return begun

    def _beyond(self, older: list[str], name: str) -> list[str]:
        return [*older, name][: -self.limit] if self.limit > 0 else []
