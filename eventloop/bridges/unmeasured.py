"""Go on without a measurement that fails, because a host's training must not end by being measured."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("eventloop")
_warned: set[str] = set()


@contextmanager
def measuring_only(what: str) -> Iterator[None]:
    """Log an error of the block, once for each `what`, and go on after the block without it.

        with measuring_only("a hook of MMEngine"):
            methods.replace(hook, "after_train_iter", measured)

    Args:
        what: what then has no row in the costs.
    """
    try:
        yield
    except Exception as error:
        if what not in _warned:
            _warned.add(what)
            logger.warning(
                "%s has no row in the costs, because measuring it failed: %s: %s",
                what,
                type(error).__name__,
                error,
                exc_info=True,
            )
