"""Roll back a partly loaded checkpoint."""

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


class Rollback:
    """Record rollback actions and run them if the block raises.

        with Rollback(path) as rollback:
            rollback.snapshot("the hook mine", hook)
            hook.load_state_dict(state)      # an error of the block, from here on, restores the hook
            rollback.commit([load_weights, load_counters])

    Args:
        source: the checkpoint, for messages.
    """

    def __init__(self, source: object) -> None:
        self.source = source
        self._actions: list[tuple[str, Callable[[], object]]] = []
        self._committing = False

    def on_rollback(self, name: str, action: Callable[[], object]) -> None:
        """Call `action` if the block raises. Rollback runs in reverse order."""
        self._actions.append((name, action))

    def snapshot(self, name: str, owner: Any, *, copies: bool = True) -> None:
        """Restore an object's attributes on rollback.

        Args:
            copies: also copy `state_dict()`, because loading may change objects in place.
        """
        state = copy.deepcopy(owner.state_dict()) if copies else None
        self.on_rollback(name, partial(_put_back, owner, dict(getattr(owner, "__dict__", {})), state))

    def commit(self, steps: Sequence[Callable[[], object]]) -> None:
        """Run the steps that complete the load; from the first one on, nothing is rolled back.

        Ctrl-C runs all steps again before it is raised, so a step must give the same result twice.
        """
        steps = [self._begin, *steps, self._end]
        try:
            _run(steps)
        except KeyboardInterrupt:
            if not self._actions:
                _run(steps)
            raise

    def _begin(self) -> None:
        self._committing = True
        self._actions.clear()

    def _end(self) -> None:
        self._committing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self._actions:
            failed, interrupt = self._roll_back()
            but = f", but {' and '.join(failed)} could not be put back: build the trainer once more"
            error.add_note(
                f"nothing of {self.source} is loaded: what was loaded before this error is put back{but if failed else ''}"
            )
            if interrupt is not None:
                raise interrupt
        elif self._committing:
            error.add_note(
                f"the trainer has only a part of {self.source}: load it again, or build the trainer once more"
            )

    def _roll_back(self) -> tuple[list[str], KeyboardInterrupt | None]:
        """Run all actions; return the names of those that failed, and a Ctrl-C that came meanwhile."""
        failed: list[str] = []
        interrupt: KeyboardInterrupt | None = None
        for name, action in reversed(self._actions):
            try:
                try:
                    action()
                except KeyboardInterrupt as error:
                    interrupt = error
                    action()  # again, because it may be half done
            except (Exception, KeyboardInterrupt):
                logger.exception("%s could not be put back to what it was before %s", name, self.source)
                failed.append(name)
        return failed, interrupt


def _run(steps: Sequence[Callable[[], object]]) -> None:
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
    """Return whether two states are equal (NaN equals NaN); False if they cannot be compared."""
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
