"""Emit or log the texts of hooks, such as a timer's summary at the end of a training."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from eventloop.events import TextLogged

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")


def log_text(trainer: Trainer, name: str, text: str) -> None:
    """Emit a text as `text_logged`, or log it if no writer receives texts; ranks above 0 do nothing."""
    if trainer.rank != 0:
        return
    if trainer.bus.wants(TextLogged):
        trainer.announce(TextLogged, mode=trainer.mode, step=trainer.iter, name=name, text=text)
    else:
        logger.info("%s", text)
