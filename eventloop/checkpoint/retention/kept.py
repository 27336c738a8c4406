"""Which checkpoints of the interval there are, those under way among them, and which of them are to go."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Going(NamedTuple):
    """The names that go once a save is durable: in any case, and besides if the save before it is durable too."""

    surely: tuple[str, ...] = ()
    if_former: tuple[str, ...] = ()


@dataclass
class _Begun:
    """A save under way: its name, its iteration, and what goes for it."""

    name: str
    iter: int
    goes: set[str]
    if_former: set[str]


class Kept:
    """The record of what `max_keep_ckpts` counts: checkpoints that are durable. A save that is still under way may
    fail, so what goes for the next one depends on it.

    Args:
        limit: so many of the newest stay; -1 all.
        names: those that are there.
    """

    def __init__(self, limit: int = -1, names: Iterable[str] = ()) -> None:
        self.limit = limit
        self._durable = [*names]
        self._durable_at = -1
        self._begun: list[_Begun] = []

    @property
    def durable(self) -> list[str]:
        """The names of those that are there, oldest first."""
        return list(self._durable)

    @property
    def names(self) -> list[str]:
        """Those, and behind them the ones under way."""
        coming = [begun.name for begun in self._begun]
        return [*(name for name in self._durable if name not in coming), *coming]

    @property
    def saved_at(self) -> int:
        """The iteration of the last one that is durable or under way; -1 before the first."""
        return self._begun[-1].iter if self._begun else self._durable_at

    def begin(self, name: str, iteration: int) -> Going:
        """A save begins: what goes when it is durable."""
        coming = [begun.name for begun in self._begun]
        there = [each for each in self._durable if each != name]
        surely = self._beyond([each for each in there if each not in coming], name)
        together = self._beyond([*(each for each in there if each not in coming), *coming], name)
        going = Going(tuple(surely), tuple(each for each in together if each not in surely))
        self._begun.append(_Begun(name, iteration, {*going.surely}, {*going.if_former}))
        return going

    def done(self, name: str) -> None:
        """A save is durable, and what was to go for it is gone."""
        if (begun := self._take(name)) is None:
            return
        for later in self._begun:
            later.goes |= later.if_former
        self._durable = [*(each for each in self._durable if each not in begun.goes and each != name), name]
        self._durable_at = begun.iter

    def failed(self, name: str) -> None:
        """A save failed, or is left out; what had its name before is still there."""
        if self._take(name) is not None:
            for later in self._begun:
                later.if_former.clear()

    def resumed_from(self, iteration: int) -> None:
        """The newest one that is there is of this iteration."""
        self._durable_at = iteration

    def only(self, there: Collection[str]) -> None:
        """Forget names that are not there: a save that had been under way may have failed."""
        self._durable = [name for name in self._durable if name in there]

    def _take(self, name: str) -> _Begun | None:
        begun = next((begun for begun in self._begun if begun.name == name), None)
        if begun is not None:
            self._begun.remove(begun)
        return begun

    def _beyond(self, older: list[str], name: str) -> list[str]:
        return [*older, name][: -self.limit] if self.limit > 0 else []
