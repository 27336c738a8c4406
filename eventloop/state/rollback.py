"""Roll back a partly loaded checkpoint, so that a failed load leaves every object as it was.

`Trainer.resume` and `Trainer.load_checkpoint` use it. An object with a `load_state_dict` of the user's may
fail to load, so a copy of its former state is kept until the load is complete. All other parts, such as the
weights, are checked first, and loaded at the end by steps that cannot fail.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from eventloop.state.sharded import local_part
from eventloop.state.undo import TRIES

logger = logging.getLogger("eventloop")


class Rollback:
    """A context that runs the recorded rollback actions if its block raises.

        rollback = Rollback(path)
        with rollback, rollback:  # entered twice: an interrupt may skip the exit of one of the two
            rollback.snapshot("the hook mine", hook)
            hook.load_state_dict(state)      # an error in the block from here on restores the hook
            rollback.commit([load_weights, load_counters])

    Args:
        source: the path of the checkpoint, for messages.
    """

    def __init__(self, source: object) -> None:
        self.source = source
        self._actions: list[tuple[str, Callable[[], object]]] = []  # each with the name of its object
        self._failed: list[str] = []  # the names of objects that could not be restored
        self._committing = False

    def on_rollback(self, name: str, action: Callable[[], object]) -> None:
        """Record an action that is called if the block raises; the last recorded action is called first.

        Args:
            name: the name, in messages, of the object that the action restores.
        """
        self._actions.append((name, action))

    def snapshot(self, name: str, owner: Any, *, copies: bool = True) -> None:
        """Record an object's attributes and a copy of its `state_dict()`, and restore them on rollback.

        On rollback, `load_state_dict` is called only if restoring the attributes did not restore the state.

        Args:
            name: the name of the object in messages.
            owner: the object.
            copies: whether the state is copied. False for an object whose `load_state_dict` replaces its
                attributes and changes none in place: to restore the attributes is enough then.
        """
        self.on_rollback(name, restorer(owner, copies=copies))

    def commit(self, steps: Sequence[Callable[[], object]]) -> None:
        """Complete the load by calling `steps`; from the first step on, nothing is rolled back.

        If Ctrl-C interrupts them, all steps are called once more before KeyboardInterrupt is raised. So a
        step must be harmless to repeat.
        """
        try:
            self._complete(steps)
        except KeyboardInterrupt:
            self._complete(steps)
            raise

    def _complete(self, steps: Sequence[Callable[[], object]]) -> None:
        """Drop the rollback actions, and call the steps, which cannot be rolled back."""
        self._actions.clear()
        self._committing = True
        for step in steps:
            step()
        self._committing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """After an error undo the recorded actions, and add a note to the error on the trainer's state."""
        if error is None:
            return
        if self._actions:
            interrupt = self._roll_back()
            failed = self._failed
            but = f", except {' and '.join(failed)}, which could not be restored: build a new trainer"
            restored = f"everything is restored as it was before{but if failed else ''}"
            for each in {error, interrupt or error}:
                each.add_note(f"nothing of {self.source} is loaded: {restored}")
            if interrupt is not None:
                raise interrupt
        elif self._committing:
            error.add_note(
                f"the trainer has loaded only a part of {self.source}: load it again, or build a new trainer"
            )
            self._committing = False

    def _roll_back(self) -> BaseException | None:
        """Run the actions, the last one first, and log those that fail.

        An action that is interrupted, such as by Ctrl-C, is run again.

        Returns:
            The last interrupt, to be raised; None without one.
        """
        interrupt, tries = None, 0
        while self._actions:
            name, action = self._actions[-1]
            try:
                action()
            except BaseException as error:
                tries += 1
                interrupt = interrupt if isinstance(error, Exception) else error
                if interrupt is error and tries < TRIES:
                    continue
                logger.exception("%s could not be restored to its state before loading %s", name, self.source)
                self._failed.append(name)
            del self._actions[-1]
            tries = 0
        return interrupt


def restorer(owner: Any, *, copies: bool = True) -> Callable[[], None]:
    """Return a function that restores an object's present attributes and state; see `Rollback.snapshot`."""
    state = copy.deepcopy(owner.state_dict()) if copies else None
    return partial(_restore, owner, dict(getattr(owner, "__dict__", {})), state)


def _restore(owner: Any, attributes: dict[str, Any], state: Any) -> None:
    """Restore an object's attributes, and load its state only if this was not enough."""
    own = getattr(owner, "__dict__", {})
    own.clear()
    own.update(attributes)
    if state is not None and not same_state(owner.state_dict(), state):
        owner.load_state_dict(state)


def same_state(a: Any, b: Any) -> bool:
    """Return whether two states are equal, where NaN equals NaN.

    Values that cannot be compared count as different. Each rank compares its own parts of DTensors, without
    communication.
    """
    if type(a) is not type(b):
        return False
    a, b = local_part(a), local_part(b)
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
    except ValueError:  # NumPy's arrays, which compare item by item
        return False
