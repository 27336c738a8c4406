"""Limit the number of batches of a pass over a loader, and count the batches of an iteration.

The trainer's `Limits` gives the length of a pass in batches, and its `Counting` in iterations. The loops, the
position in the loader, and hooks that need the length of an epoch use both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from eventloop.data.loader_info import named_loaders
from eventloop.util.checks import check_choice, check_keys, length_of

T = TypeVar("T")

Unit = Literal["batch", "update"]

Limit = int | float
LimitBatches = Limit | Mapping[str, Limit]

MODES = ("train", "val", "test")
_EXPECTED = "a number of batches (an int of at least 1) or a share of them (a float above 0, at most 1.0)"
_ROUNDING = 1e-9
"""A number of batches that is added before rounding down, because 0.29 * 100 is a little below 29."""


class Limits:
    """The largest number of batches of a pass, for each mode.

    Args:
        given: a number of batches, a share of them, a mapping of these by mode, or None for no limit.

    Raises:
        TypeError, ValueError: `given` is something else, or out of range.
    """

    def __init__(self, given: LimitBatches | None = None) -> None:
        self.given = given
        """The argument `limit_batches`: one limit for all modes, or a mapping of modes to limits."""
        self._of_all: Limit | None = None
        self._by_mode: dict[str, Limit] = {}
        if isinstance(given, Mapping):
            check_keys("limit_batches", given, MODES)
            self._by_mode = {mode: _checked(f"limit_batches[{mode!r}]", one) for mode, one in given.items()}
        elif given is not None:
            self._of_all = _checked("limit_batches", given)

    def length(self, mode: str, loader: Iterable[Any] | None) -> int | None:
        """Return the number of batches of a pass, or None if it is not known.

        For a loader without a length this is its limit, although its passes may be shorter.

        Raises:
            ValueError: the limit is a share, and the loader has no length or too few batches for it.
        """
        limit = self._by_mode.get(mode, self._of_all) if mode in MODES else None  # a prediction has no limit
        length = length_of(loader)
        if loader is None or limit is None:
            return length
        if isinstance(limit, int):
            return limit if length is None else min(limit, length)
        if limit == 1.0:
            return length
        if length is None:
            raise ValueError(
                f"limit_batches={limit} for {mode!r} is a share of the batches, and the {mode} loader has no "
                "length: give a number of batches, an int"
            )
        batches = int(limit * length + _ROUNDING)
        if not batches:
            raise ValueError(
                f"limit_batches={limit} of the {length} batches of the {mode} loader is less than one batch: "
                f"give at least {1 / length:.3g}, or a number of batches, an int"
            )
        return batches

    def check(self, **loaders: Iterable[Any] | None) -> None:
        """Refuse a share of loaders that have no length, or too few batches for it.

        Args:
            loaders: for each mode a loader, or a mapping of several loaders by name.
        """
        for mode, of_mode in loaders.items():
            for loader in named_loaders(of_mode).values():
                self.length(mode, loader)

    def cut(self, mode: str, loader: Iterable[Any]) -> int | None:
        """Return the number of batches after which a pass is cut short, or None if it ends by itself."""
        batches = self.length(mode, loader)
        return None if batches == length_of(loader) else batches


@runtime_checkable
class Accumulator(Protocol):
    """A hook that makes the optimizer's steps, and may add the gradients of several batches for one."""

    cumulative_iters: int
    """Batches per optimizer step."""

    def begin_update(self) -> None:
        """Begin an iteration of several batches: drop gradients that a failed iteration has left."""

    def begin_batch(self, trainer: Any) -> None:
        """Prepare the forward pass of a further batch."""

    def add_batch(self, trainer: Any) -> None:
        """Run backward on the loss in `trainer.outputs`, and replace the outputs by their means so far."""


class Counting:
    """Count the batches of a training's iterations: one each, or as many as an optimizer step has.

    Args:
        unit: "batch" or "update".

    Raises:
        ValueError: `unit` is something else.
    """

    def __init__(self, unit: Unit) -> None:
        check_choice("unit", unit, ("batch", "update"))
        self.unit = unit
        self.batches_per_step = 1
        """The number of batches whose gradients the optimizer hook adds for a step, in either unit."""
        self.batches_per_iter = 1
        """The number of batches in an iteration; the last iteration of a pass may have fewer."""
        self.batches = 1
        """The number of batches in the current iteration, by which its end advances the position."""
        self.before = 0
        """The number of batches of the current iteration that came before the current batch."""
        self.accumulator: Accumulator | None = None
        """The hook that runs backward on each batch, if an iteration has several batches; else None."""

    def iterations(self, batches: int | None) -> int | None:
        """Return the number of iterations in `batches` batches of a pass; None for an unknown number."""
        return None if batches is None else -(-batches // self.batches_per_iter)

    def begin(self, accumulator: Accumulator, left: int | None = None) -> None:
        """Begin an iteration of several batches.

        Args:
            accumulator: the hook that adds their gradients.
            left: the number of batches that are left in the pass; None if it is unknown.
        """
        whole = self.batches_per_iter
        self.batches = left if left is not None and 0 < left < whole else whole
        self.before = 0
        accumulator.begin_update()


def first(batches: Iterator[T], limit: int | None, skipped: int = 0) -> Iterator[T]:
    """Return the batches of a pass up to its limit, without fetching a batch beyond it.

    Args:
        batches: the pass, perhaps without its first batches.
        limit: the number of batches in the whole pass; None for no limit.
        skipped: the number of batches of the pass that `batches` does not have.
    """
    return batches if limit is None else islice(batches, max(0, limit - skipped))


def _checked(name: str, limit: object) -> Limit:
    """Return a limit; raise TypeError or ValueError if it is neither a number of batches nor a share."""
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise TypeError(f"{name} must be {_EXPECTED}, got {limit!r}")
    if limit < 1 if isinstance(limit, int) else not 0 < limit <= 1:
        raise ValueError(f"{name} must be {_EXPECTED}, got {limit!r}")
    return limit
