"""Suppress errors of measuring, which must not end the training of another engine (the host)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("eventloop")
_warned: set[str] = set()


@contextmanager
def measuring_only(what: str) -> Iterator[None]:
    """Suppress an error of the block, and log it once for each `what`.

        with measuring_only("a hook of MMEngine"):
            methods.replace(hook, "after_train_iter", measured)

    Args:
        what: the name, for the log, of the thing that then has no row in the costs.
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
