"""The states of a trainer's hooks in a checkpoint that it resumes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from eventloop.undo import Undo

logger = logging.getLogger("eventloop")


class HookStates:
    """Gives hooks what a checkpoint has of them, by name.

    Args:
        hooks: all of the trainer's.
        states: the checkpoint's.
        source: where it is from, for messages.
    """

    def __init__(self, hooks: Iterable[Any], states: Mapping[str, Any], source: object) -> None:
        self._hooks, self._states, self._source = list(hooks), states, source
        self._given = [hook for hook in self._hooks if hook.stateful and hook.name in states]

    def prepare(self) -> list[Callable[[], object]]:
        """Let hooks check their states; return what takes these, and cannot fail."""
        takes = []
        for hook in self._given:
            if not hook.loads_itself:
                with self._named(hook):
                    takes.append(hook.prepare_state(self._states[hook.name]))
        return takes

    def load(self, undo: Undo) -> None:
        """Load the states of hooks that have a `load_state_dict` of their own, which may fail half-way."""
        for hook in self._given:
            if hook.loads_itself:
                with self._named(hook):
                    undo.keep(f"the hook {hook.name}", hook)
                    hook.load_state_dict(self._states[hook.name])

    @contextmanager
    def _named(self, hook: Any) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(
                f"raised by the hook {hook.name}, which was given its state of {self._source}. A run without that hook, or "
                "with it under another name, leaves the state"
            )
            raise

    def tell(self) -> None:
        """Log the hooks that the checkpoint has no state of, and the states that no hook was given."""
        for hook in self._hooks:
            if hook.stateful and hook.name not in self._states:
                logger.warning("%s has no state of the hook %s, which starts afresh", self._source, hook.name)
        stateful = {hook.name: hook.stateful for hook in self._hooks}
        for name in self._states:
            if name not in stateful:
                logger.warning("%s has a state of %s, which is no hook of this trainer's", self._source, name)
            elif not stateful[name]:
                text = "%s has a state of the hook %s, which keeps none as this trainer was built: it is left"
                logger.warning(text, self._source, name)
