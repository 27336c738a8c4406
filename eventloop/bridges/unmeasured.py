"""Suppress errors of measuring, which must not end the training of another engine (the host)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("eventloop")
_warned: set[str] = set()


@contextmanager
def measuring_only(subject: str) -> Iterator[None]:
    """Suppress an error of the block, and log it once for each `subject`.

        with measuring_only("a hook of MMEngine"):
            methods.replace(hook, "after_train_iter", measured)

    Args:
        subject: the name, for the log, of the thing that then has no row in the costs.
    """
    try:
        yield
    except Exception as error:
        if subject not in _warned:
            _warned.add(subject)
            logger.warning(
                "%s has no row in the costs, because measuring it failed: %s: %s",
                subject,
                type(error).__name__,
                error,
                exc_info=True,
            )
