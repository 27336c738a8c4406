"""What loading a checkpoint has changed, put back where a later part of the checkpoint does not fit."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

logger = logging.getLogger("eventloop")


class Undo:
    """Keeps what loading may have to give back: references, and copies of the states that code of a user's takes.

        with Undo(path) as undo:
            undo.keep("the hook mine", hook)
            hook.load_state_dict(state)      # an error of the block, from here on, gives the hook its own state again
            undo.finish([take_weights, take_counters])

    Args:
        source: the checkpoint, for messages.
    """

    def __init__(self, source: object) -> None:
        self.source = source
        self._kept: list[tuple[str, Callable[[], object]]] = []

    def add(self, name: str, put_back: Callable[[], object]) -> None:
        """Call `put_back` if the block fails; those that were added last come first."""
        self._kept.append((name, put_back))

    def keep(self, name: str, owner: Any, *, copies: bool = True) -> None:
        """Put back the attributes of an object, and the state behind them.

        Args:
            copies: its `load_state_dict` may change what its attributes refer to: copy its `state_dict` now.
        """
        state = copy.deepcopy(owner.state_dict()) if copies else None
        self.add(name, partial(_put_back, owner, dict(getattr(owner, "__dict__", {})), state))

    def finish(self, steps: Sequence[Callable[[], object]]) -> None:
        """Take the steps that cannot fail, after which nothing is put back. Where Ctrl-C comes between two of them, all
        are taken again before it is passed on: the trainer has all of the checkpoint, or nothing of it."""
        steps = [self._kept.clear, *steps]
        try:
            _take(steps)
        except KeyboardInterrupt:
            if not self._kept:
                _take(steps)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or not self._kept:
            return
        stuck = [name for name, put_back in reversed(self._kept) if not self._is_back(name, put_back)]
        but = (
            f", but {' and '.join(stuck)} could not be put back: build the trainer once more" if stuck else ""
        )
        error.add_note(
            f"nothing of {self.source} is loaded: what was loaded before this error is put back{but}"
        )

    def _is_back(self, name: str, put_back: Callable[[], object]) -> bool:
        try:
            put_back()
        except Exception:
            logger.exception("%s could not be put back to what it was before %s", name, self.source)
            return False
        return True


def _take(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()


def _put_back(owner: Any, attributes: Mapping[str, Any], state: Any) -> None:
    _set_attributes(owner, attributes)
    if state is None or same_state(owner.state_dict(), state):
        return
    try:
        owner.load_state_dict(state)
    except BaseException:
        _set_attributes(owner, attributes)
        raise


def _set_attributes(owner: Any, attributes: Mapping[str, Any]) -> None:
    own = getattr(owner, "__dict__", {})
    own.clear()
    own.update(attributes)


def same_state(a: Any, b: Any) -> bool:
    """True for states that are equal, NaN to NaN; False where that cannot be said."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return False
        return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    try:
        return bool(a == b)
    except ValueError:  # arrays
        return False
