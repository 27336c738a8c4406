"""Give each hook one trainer: in a second trainer a hook starts over, as it was when the first one got it.

What a hook has seen, such as a best score, is of one training. The assembly calls this for hooks with a state
and for eventloop's own; a hook of the user's without a state may serve several trainers.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

logger = logging.getLogger("eventloop")

_numbers = itertools.count(1)
_trainers: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The trainers by their numbers, which their hooks store: a hook can then still be copied and pickled."""
_PLAIN = (str, int, float, bool, type(None), tuple, type)


@contextmanager
def taking_hooks(trainer: Any, hooks: Iterable[Any]) -> Iterator[None]:
    """Make a trainer the owner of its hooks while it names, checks and attaches them in the context.

    A hook that another trainer has owned is constructed again, with the arguments of its construction. Plain
    attributes that were set on it before its first trainer are kept. After an error every hook is as before,
    with its former owner.

    Raises:
        ValueError: a hook cannot be constructed again, or serves a run of its former trainer just now.
    """
    before = [(vars(hook), dict(vars(hook))) for hook in hooks if _has_owner(hook)]
    try:
        _take(trainer, hooks)
        yield
    except BaseException:
        for attributes, former in before:
            attributes.clear()
            attributes.update(former)
        raise


def _take(trainer: Any, hooks: Iterable[Any]) -> None:
    number = trainer.hook_owner = next(_numbers)
    _trainers[number] = trainer
    for hook in filter(_has_owner, hooks):
        former, given = vars(hook).get("_owned", (None, {}))
        if former is None:
            given = {k: v for k, v in vars(hook).items() if isinstance(v, _PLAIN) or callable(v)}
            if dataclasses.is_dataclass(hook):  # their constructors are made when nobody can look
                vars(hook).setdefault("_made_with", ((), _arguments(hook)))
        elif former != number:
            _start_over(hook, _trainers.get(former), given)
        vars(hook)["_owned"] = number, given


def check_hooks_owned(trainer: Any) -> None:
    """Refuse a run with a hook that a later trainer has got; in a host's run this is only logged.

    Raises:
        RuntimeError: naming the hook.
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
    return hasattr(hook, "__dict__") and (hook.stateful or type(hook).__module__.startswith("eventloop."))


def _arguments(hook: Any) -> dict[str, Any]:
    """Return the arguments of a dataclass, and copies of those that it makes by default, such as a list."""
    return {
        field.name: value if field.default_factory is dataclasses.MISSING else copy.copy(value)
        for field in dataclasses.fields(hook)
        if field.init
        for value in [getattr(hook, field.name)]
    }


def _start_over(hook: Any, former: Any, given: dict[str, Any]) -> None:
    kind, kept = type(hook).__name__, vars(hook)
    of_its_own = f"give each trainer a {kind} of its own"
    if former is not None and former.running:
        raise ValueError(f"the hook {hook.name} serves a run of another trainer just now: {of_its_own}")
    arguments = kept.get("_made_with")
    if arguments is None and type(hook).__init__ is object.__init__:
        arguments = ((), {})
    if arguments is None or not hook.can_start_over:
        raise ValueError(
            f"the hook {hook.name} has the state of another trainer, and a {kind} cannot start over: "
            f"{of_its_own}"
        )
    kept.clear()
    try:
        hook.__init__(*arguments[0], **arguments[1])
    except BaseException as error:
        error.add_note(
            f"raised by {kind}, which is constructed again because another trainer has used it: {of_its_own}"
        )
        raise
    kept.update(given)
