"""Check states before they are saved, and load those of hooks by name; `TrainerState` calls it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.option_states import unsaved_tensors
from eventloop.state.keys import SHARDED
from eventloop.state.plain_values import arrays_as_tensors, plain, with_arrays
from eventloop.state.rollback import Rollback
from eventloop.util.errors import CheckpointError

logger = logging.getLogger("eventloop")


def check_needed_hooks(hooks: Iterable[Any], meta: Mapping[str, Any], source: object) -> None:
    """Refuse a checkpoint if a hook that wrote into it, such as an averaging one, is missing here.

    Args:
        meta: the checkpoint's `meta`.
        source: its path, for the error.

    Raises:
        CheckpointError: a hook is missing.
    """
    own = {hook.name for hook in hooks}
    missing = [name for name in meta.get("needs_hooks", ()) if name not in own]
    if missing:
        raise CheckpointError(
            f"{source} cannot be resumed from without the hook {', '.join(missing)}, which wrote part of "
            "it: give the Trainer that hook under that name; load_checkpoint(path) loads the weights alone"
        )


def as_saved(checkpoint: Mapping[str, Any], *, shards: bool = False) -> dict[str, Any]:
    """Return a checkpoint as tensors and plain values; `meta` has the places of hooks' arrays.

    Args:
        checkpoint: the checkpoint.
        shards: whether its weights and its optimizers' states may be DTensors.

    Raises:
        TypeError: a value cannot be loaded with `weights_only=True`; the error names its place.
    """
    hooks, arrays = arrays_as_tensors(checkpoint.get("hooks", {}))
    found = {
        **checkpoint,
        **({"hooks": hooks, "meta": checkpoint["meta"] | {"arrays": arrays}} if arrays else {}),
    }
    return {key: plain(value, key, shards=shards and key in SHARDED) for key, value in found.items()}


def states_so_far(hooks: Iterable[Any]) -> dict[str, Any]:
    """Return the states of the hooks before the first iteration, without those that cannot be read yet."""
    states = {}
    for hook in hooks:
        if hook.stateful:
            try:
                states[hook.name] = hook.state_dict()
            except Exception as error:  # perhaps it makes its attributes later
                logger.warning(
                    "the state of the hook %s cannot be read before the first iteration, so nobody knows "
                    "whether it can be saved: %r",
                    hook.name,
                    error,
                )
    return states


def warn_of_unsaved_tensors(optimizer: Any) -> None:
    """Log the tensors of optimizers that no checkpoint will have."""
    for name, each in named_optimizers(optimizer).items():
        if found := unsaved_tensors(each):
            logger.warning(
                "%s%s holds tensors in %s, which its state_dict() does not have: no checkpoint saves them, "
                "and a resume begins them anew. Keep them in optimizer.state[parameter], or define "
                "state_dict() and load_state_dict()",
                type(each).__name__,
                f" (optimizer {name!r})" if name else "",
                ", ".join(found),
            )


def load_hooks(hooks: Iterable[Any], checkpoint: Mapping[str, Any], rollback: Rollback) -> None:
    """Load the states of the hooks.

    Args:
        checkpoint: the checkpoint, with the states by hook name, and the places of arrays in them.
        rollback: restores the hooks that are already loaded if a later part of the resume fails.
    """
    states = with_arrays(checkpoint["hooks"], checkpoint["meta"].get("arrays", ()))
    for hook in hooks:
        if hook.stateful and hook.name in states:
            with _named(hook, rollback.source):
                rollback.snapshot(f"the hook {hook.name}", hook)
                hook.load_state_dict(states[hook.name])


@contextmanager
def _named(hook: Any, source: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(
            f"raised by the hook {hook.name}, which was given its state of {source}. A run without that "
            "hook, or with it under another name, ignores the state"
        )
        raise


def log_mismatches(hooks: Iterable[Any], states: Mapping[str, Any], source: object) -> None:
    """Log each hook without a state in the checkpoint, and each state without a hook.

    Args:
        states: the states in the checkpoint, by hook name.
        source: the path of the checkpoint, for the log.
    """
    stateful = {hook.name: hook.stateful for hook in hooks}
    for name, keeps in stateful.items():
        if keeps and name not in states:
            logger.warning("%s has no state of the hook %s, which starts afresh", source, name)
    for name in states:
        if name not in stateful:
            logger.warning("%s has a state of %s, but this trainer has no such hook", source, name)
        elif not stateful[name]:
            logger.warning(
                "%s has a state of the hook %s, which is not stateful here; the state is ignored",
                source,
                name,
            )
