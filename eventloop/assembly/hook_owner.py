"""Let each hook belong to one trainer: if a second trainer is given a hook, the hook starts over.

The state of a hook, such as a best score, belongs to one training. So a hook that has served a trainer is
constructed again for the next one, as it was when the first trainer got it. The assembly does this for hooks
with a state and for eventloop's own hooks; a hook of the user's without a state may serve several trainers.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from eventloop.state.containers import copied, same_objects
from eventloop.state.rollback import same_state

logger = logging.getLogger("eventloop")

_numbers = itertools.count(1)
_trainers: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The trainers by number. A hook stores the number of its trainer, so that it can be copied and pickled."""
_Making = tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]
"""The values to construct a hook again from: the arguments of its constructor by position, those by name, and
the attributes that were set after the construction."""
_PLAIN = (str, int, float, bool, type(None), tuple, type)
"""The types of attributes of a dataclass that count as set after its construction, unless they are fields.

An attribute of another type, such as a list, counts as made by the construction.
"""


@contextmanager
def owning_hooks(trainer: Any, hooks: Iterable[Any]) -> Iterator[None]:
    """Make a trainer the owner of hooks; in the context it names, checks and attaches them.

    A hook that another trainer has owned is constructed again, with the arguments of its construction. The
    attributes that were set between its construction and its first trainer are set again. After an error in
    the context every hook is as before, with its former owner.

    Raises:
        ValueError: a hook cannot be constructed again, or its former trainer is in a run now.
    """
    before = [(vars(hook), dict(vars(hook))) for hook in hooks if _has_owner(hook)]
    try:
        _own(trainer, hooks)
        yield
    except BaseException:
        for attributes, former in before:
            attributes.clear()
            attributes.update(former)
        raise


def _own(trainer: Any, hooks: Iterable[Any]) -> None:
    """Store the trainer's number in each hook, with the values to construct the hook again from."""
    number = trainer.hook_owner = next(_numbers)
    _trainers[number] = trainer
    for hook in filter(_has_owner, hooks):
        former, making, first = vars(hook).get("_owned", (None, None, None))
        if former is None:
            making = _making(hook)
            first = copied(making)
        elif former != number:
            making = _start_over(hook, _trainers.get(former), making, first)
        vars(hook)["_owned"] = number, making, first


def check_hooks_owned(trainer: Any) -> None:
    """Refuse a run of a trainer if a later trainer has taken over one of its hooks.

    In a run that another engine drives, through a bridge, an error is logged instead.

    Raises:
        RuntimeError: a later trainer owns a hook; the message names it.
    """
    for hook in filter(_has_owner, trainer.hooks):
        if vars(hook)["_owned"][0] == trainer.hook_owner:
            continue
        text = (
            f"the hook {hook.name} was given to another trainer since this one was built, and started over "
            f"there: expected a hook of this trainer, give each trainer a {type(hook).__name__} of its own"
        )
        if not trainer.host:
            raise RuntimeError(text)
        logger.error("%s", text)


def _has_owner(hook: Any) -> bool:
    """Return whether a hook may belong to one trainer only: it has a state, or is one of eventloop's."""
    return hasattr(hook, "__dict__") and (hook.stateful or type(hook).__module__.startswith("eventloop."))


def _making(hook: Any) -> _Making | None:
    """Return the values to construct a hook again from; None if its arguments are unknown.

    The constructor of an eventloop hook stores its arguments in `_made_with`, and its attributes at the end
    of the construction in `_as_made`.
    """
    attributes = vars(hook)
    as_made, arguments = attributes.pop("_as_made", None), attributes.get("_made_with")
    if arguments is None and dataclasses.is_dataclass(hook):  # its constructor stores no arguments
        arguments = (), _arguments(hook)
        fields = {field.name for field in dataclasses.fields(hook) if field.init}
        as_made = {k: v for k, v in attributes.items() if k in fields or not isinstance(v, _PLAIN)}
    elif arguments is None and type(hook).__init__ is object.__init__:
        arguments, as_made = ((), {}), {}
    if arguments is None:
        return None
    as_made = attributes if as_made is None else as_made
    given = {
        name: value
        for name, value in attributes.items()
        if name != "_made_with" and not (name in as_made and same_objects(value, as_made[name]))
    }
    return *arguments, given


def given_arguments(hook: Any) -> dict[str, Any]:
    """Return the arguments that a hook was constructed with, by name; {} if it stores none."""
    args, options = getattr(hook, "__dict__", {}).get("_made_with", ((), {}))
    names = [*inspect.signature(type(hook).__init__).parameters][1:] if args else []
    return {**dict(zip(names, args, strict=False)), **options}


def _arguments(hook: Any) -> dict[str, Any]:
    """Return the arguments with which a dataclass was constructed, by name.

    Arguments that equal the result of a default factory, such as an empty list, are left out: the new object
    makes its own.
    """
    arguments = {}
    for field in dataclasses.fields(hook):
        value = getattr(hook, field.name)
        if field.default_factory is not dataclasses.MISSING:
            if same_objects(value, field.default_factory()):
                continue
            value = copy.copy(value)
        if field.init:
            arguments[field.name] = value
    return arguments


def _start_over(hook: Any, former: Any, making: _Making | None, first: _Making) -> _Making:
    """Construct a hook again, and return the values with which that was done.

    A container among the arguments that has changed since may be one that the hook reports to, and is passed
    to it again. But if the state of the new hook depends on it, it holds the state of the former training.
    Then copies from before the first training are passed.

    Args:
        former: the former trainer; None if it does not exist any more.
        making: the values to construct the hook again from; None if they are unknown.
        first: a copy of these values from before the first training.

    Raises:
        ValueError: the former trainer is in a run, or the hook cannot start over.
    """
    kind, of_its_own = type(hook).__name__, f"give each trainer a {type(hook).__name__} of its own"
    if former is not None and former.running:
        raise ValueError(f"the hook {hook.name} serves a run of another trainer just now: {of_its_own}")
    if making is None or not hook.can_start_over:
        raise ValueError(
            f"the hook {hook.name} has the state of another trainer, and a {kind} cannot start over: "
            f"{of_its_own}"
        )
    try:
        _construct(hook, making)
        if same_objects(making, first):
            return making
        own: _Making = copied(first)
        shared = dict(vars(hook))
        state = _state(hook)
        _construct(hook, own)
    except BaseException as error:
        error.add_note(
            f"raised by {kind}, which is constructed again because another trainer has used it: {of_its_own}"
        )
        raise
    if not same_state(_state(hook), state):
        return own
    vars(hook).clear()
    vars(hook).update(shared)
    return making


def _construct(hook: Any, making: _Making) -> None:
    """Construct a hook again in place, and set its attributes again."""
    args, kwargs, given = making
    vars(hook).clear()
    hook.__init__(*args, **kwargs)
    vars(hook).pop("_as_made", None)
    vars(hook).update(given)


def _state(hook: Any) -> Any:
    """Return the state of a hook; None if it cannot be read before a run."""
    try:
        return hook.state_dict()
    except Exception:
        return None
