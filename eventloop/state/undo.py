"""Undo the changes of a block completely, even if Ctrl-C interrupts it, at any line.

Trial trainings, evaluations, predictions and passes for statistics use this module. Ctrl-C can also interrupt
the code that restores, before its first line and in the exit of a context manager. So the steps that restore
are recorded in an object, can be repeated, and are made at the exits of two contexts: one interrupt prevents
only one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch

TRIES = 100
"""How often a step is tried again that was interrupted, or that calls `sys.exit`."""


class Undo:
    """A context that undoes changes: when its block ends it makes the recorded steps, the last first.

        undo = Undo()
        with undo, undo:  # entered twice: an interrupt may skip the exit of one of the two
            undo.attributes(trainer, "batch", "outputs")
            ...

    A step is recorded before the change that it undoes, and must be harmless to repeat. An interrupted step
    is made again, and the interrupt is raised after the last step. After an error of a step the other steps
    are made all the same, and the first error is raised. A `try` statement in the block must be put into a
    function: in Python 3.11 an interrupt at its first line would skip the exits of both contexts.

    Args:
        grad_mode: whether a last step restores the grad mode. False in a generator, because the code that
            iterates over it may have set another mode meanwhile.
    """

    def __init__(self, *, grad_mode: bool = True) -> None:
        self._steps: list[Callable[[], object]] = []
        if grad_mode:
            self.step(torch.set_grad_enabled, torch.is_grad_enabled())

    def step(self, action: Callable[..., object], *arguments: Any) -> None:
        """Record a step: the call of `action` with these arguments."""
        self._steps.append(partial(action, *arguments))

    def attributes(self, owner: Any, *names: str) -> None:
        """Record a step that sets attributes to their present values."""
        self.step(_set_attributes, owner, {name: getattr(owner, name) for name in names})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Make all steps, each again if an interrupt cuts it short; then raise the interrupt or error."""
        raised: BaseException | None = None
        while self._steps:
            for _ in range(TRIES):
                try:
                    self._steps[-1]()
                    break
                except Exception as failure:
                    raised = raised or failure
                    break
                except BaseException as interrupt:
                    raised = interrupt
            del self._steps[-1]
        if raised is not None:
            raise raised


def _set_attributes(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)
