"""Save and load states that a program keeps in variables of its own, each by a name.

`Trainer.remember` registers a function that returns the state, and a function that sets it. A checkpoint has
the states under `remembered`, and each rank has its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from eventloop.state.plain_values import plain
from eventloop.state.tensors import with_tensors
from eventloop.util.functions import check_call

if TYPE_CHECKING:
    from eventloop.state.rollback import Rollback

KEY = "remembered"
"""The key of the states in a checkpoint."""
Get = Callable[[], Any]
"""A function that returns the present state."""
Set = Callable[[Any], object]
"""A function that sets a state."""


class Remembered:
    """Hold the functions that get and set the states of a program; the training thread calls them."""

    def __init__(self) -> None:
        self._functions: dict[str, tuple[Get, Set]] = {}  # by the name of the state

    def add(self, name: str, get: Get, set: Set) -> None:
        """Register a state; `Trainer.remember` documents the arguments and errors."""
        if not isinstance(name, str) or not name:
            kind = ValueError if isinstance(name, str) else TypeError
            raise kind(f"remember: the name of a state must be a str that is not empty, got {name!r}")
        if name in self._functions:
            raise ValueError(
                f"remember: expected a new name, got {name!r}, which has its functions already: a checkpoint "
                "could hold only one state of that name"
            )
        check_call(f"remember({name!r}): get", get)
        check_call(f"remember({name!r}): set", set, "state")
        plain(state := get(), f"{KEY}[{name!r}]")
        if (other := _other_container(state)) is not None:
            raise TypeError(
                f"remember({name!r}): expected dicts, lists and tuples, which a resume returns as they are, "
                f"got a {type(other).__name__}: let get return dict(...) or list(...) of it, and convert it "
                "in set"
            )
        self._functions[name] = get, set

    def state_dict(self) -> dict[str, Any]:
        """Return the present states by name, in a dict at `KEY`, without the autograd graphs of tensors.

        Without a registered state return {}.
        """
        states = {}
        for name, (get, _) in self._functions.items():
            with annotate_errors(f"raised by get of trainer.remember({name!r}, get, set)"):
                states[name] = with_tensors(get(), torch.Tensor.detach)
        return {KEY: states} if states else {}

    def load(self, states: Mapping[str, Any], rollback: Rollback) -> list[str]:
        """Set the states of a checkpoint; return a line for each name that only it or the program has.

        Args:
            states: the states in the checkpoint, by name.
            rollback: gets a function for each state that sets its present value, for a load that fails.
        """
        for name, (_, set_state) in self._functions.items():
            if name in states:
                rollback.on_rollback(f"the remembered state {name!r}", self.restorer(name))
                note = f"raised by set of trainer.remember({name!r}, get, set), for {rollback.source}"
                with annotate_errors(note):
                    set_state(with_tensors(states[name], torch.clone))
        missing = [name for name in self._functions if name not in states]
        unknown = [name for name in states if name not in self._functions]
        return [
            *(f"it has no remembered state {name!r}, which stays as it is" for name in missing),
            *(
                f"it has a remembered state {name!r}, which this program does not register: call "
                "trainer.remember before the resume"
                for name in unknown
            ),
        ]

    def restorer(self, name: str) -> Callable[[], object]:
        """Return a function that sets the state of a name back to its present value."""
        get, set_state = self._functions[name]
        return partial(set_state, with_tensors(get(), lambda tensor: tensor.detach().clone()))

    def restorers(self) -> list[Callable[[], object]]:
        """Return a function for each state that sets it back to its present value."""
        return [*map(self.restorer, self._functions)]


def _other_container(state: Any) -> Any:
    """Return a container in a state whose class a load would change, such as a Counter; None without one."""
    if not isinstance(state, Mapping | list | tuple) or type(state) is torch.Size:
        return None
    if type(state) not in (dict, OrderedDict, list, tuple):
        return state
    inner = state.values() if isinstance(state, Mapping) else state
    return next((other for each in inner if (other := _other_container(each)) is not None), None)


@contextmanager
def annotate_errors(text: str) -> Iterator[None]:
    """Make a context that adds a note to an error of its block, in which code of the user is called."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise
