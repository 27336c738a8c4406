"""Undo what a block changes, completely, wherever Ctrl-C interrupts it.

Trial trainings, evaluations, predictions and passes for statistics use it. Restoring code can be interrupted
at each of its lines, also before its first and in the exit of a context manager. So the steps are kept apart
from the block, may be repeated, and are made by two contexts, of which one interrupt can stop only one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch

TRIES = 100
"""How often a step is made again that interrupts, or a step that exits the program, have ended."""


class Undo:
    """Steps that restore what a block changes; all are made when the block ends, the last one first.

        undo = Undo()
        with undo, undo:  # entered twice: an interrupt may keep one of the two from being left
            undo.attributes(trainer, "batch", "outputs")
            ...

    A step is recorded before its change is made, and must be harmless to repeat. A step that is interrupted
    is made again, and the interrupt is raised after the last step. An error of a step does not keep the other
    steps from being made. A `try` directly in the block belongs into a
    function: in Python 3.11 an interrupt at its first line would leave both contexts without an exit.

    Args:
        grad_mode: whether the grad mode is restored, too, as the last step; a generator must not, because the
            code around it may have set another one.
    """

    def __init__(self, *, grad_mode: bool = True) -> None:
        self._steps: list[Callable[[], object]] = []
        if grad_mode:
            self.step(torch.set_grad_enabled, torch.is_grad_enabled())

    def step(self, action: Callable[..., object], *arguments: Any) -> None:
        """Record a step."""
        self._steps.append(partial(action, *arguments))

    def attributes(self, owner: Any, *names: str) -> None:
        """Record a step that sets attributes to their present values."""
        self.step(_set_attributes, owner, {name: getattr(owner, name) for name in names})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
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
