"""Roll back a partly loaded checkpoint, so that a failed load leaves every object as it was.

`Trainer.resume` and `load_model_state` use it.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn.parameter import is_lazy

logger = logging.getLogger("eventloop")


class Rollback:
    """A context that runs the recorded rollback actions if its block raises.

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
        """Record an action that is called if the block raises; actions run in reverse order.

        Args:
            name: what messages call the object that the action restores.
        """
        self._actions.append((name, action))

    def snapshot(self, name: str, owner: Any, *, copies: bool = True) -> None:
        """Record an object's attributes, and restore them on rollback.

        Args:
            name: what messages call the object.
            copies: also copy `state_dict()`, and the tensors and containers among the attributes, because
                loading may change objects in place. All tensors of an optimizer are in its `state_dict()`,
                and copied once.
        """
        state = copy.deepcopy(owner.state_dict()) if copies else None
        attributes = dict(getattr(owner, "__dict__", {}))
        contents = (
            [] if not copies or isinstance(owner, torch.optim.Optimizer) else list(_contents(attributes))
        )
        self.on_rollback(name, partial(_put_back, owner, attributes, contents, state))

    def keep(self, name: str, values: list[torch.Tensor]) -> None:
        """Copy tensors, and fill them with their former values on rollback."""
        self.on_rollback(name, partial(_run, list(_contents(values))))

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
            but = f", except {' and '.join(failed)}, which could not be restored: build a new trainer"
            restored = f"everything is restored as it was before{but if failed else ''}"
            error.add_note(f"nothing of {self.source} is loaded: {restored}")
            if interrupt is not None:
                raise interrupt
        elif self._committing:
            error.add_note(
                f"the trainer has loaded only a part of {self.source}: load it again, or build a new trainer"
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
                logger.exception("%s could not be restored to its state before loading %s", name, self.source)
                failed.append(name)
        return failed, interrupt


def _run(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()


def _contents(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Callable[[], object]]:
    """Copy the tensors and containers in a value, at any depth; yield functions that restore them.

    Other objects, such as a trainer or a module, are not entered.
    """
    seen = {} if seen is None else seen
    if id(value) in seen or not isinstance(value, torch.Tensor | dict | list | set | deque | tuple):
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        # a tensor without storage, or an expanded one, whose elements share memory, cannot be filled
        if not (is_lazy(value) or value.is_meta or (value.layout is torch.strided and 0 in value.stride())):
            yield partial(_fill_tensor, value, value.detach().clone())
        return
    if not isinstance(value, tuple):
        yield partial(_fill, value, copy.copy(value))
    for each in value.values() if isinstance(value, dict) else value:
        yield from _contents(each, seen)


def _fill_tensor(tensor: torch.Tensor, former: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(former)


def _fill(container: Any, former: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict | set) else container.extend)(former)


def _put_back(
    owner: Any, attributes: Mapping[str, Any], contents: Sequence[Callable[[], object]], state: Any
) -> None:
    _set_attributes(owner, attributes)
    _run(contents)
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
