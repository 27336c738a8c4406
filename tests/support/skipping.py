"""Skip an optimizer step."""

from __future__ import annotations

from typing import Any

from eventloop import Trainer
from eventloop.events import OptimizerStepSkipped
from eventloop.hooks import OptimizerHook


class SkipSecond(OptimizerHook):
    """Skip the step of the second iteration, as mixed precision does where gradients overflow."""

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        if event.iter == 1:
            trainer.announce(OptimizerStepSkipped, reason="on purpose")
        else:
            super().after_train_iter(trainer, event)
