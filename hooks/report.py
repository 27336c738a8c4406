"""A line of text from a hook to whoever reads along."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from eventloop.events import TextLogged

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")


def report(trainer: Trainer, name: str, text: str) -> None:
    """Say it once, on rank 0: as `text_logged` where a writer shows those, else on the logger `eventloop`."""
    if trainer.rank != 0:
        return
    if trainer.bus.wants(TextLogged):
        trainer.announce(TextLogged, mode=trainer.mode, step=trainer.iter, name=name, text=text)
    else:
        logger.info("%s", text)
