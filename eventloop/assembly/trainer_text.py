"""Describe a trainer on a few lines, for `print(trainer)`."""

from __future__ import annotations

from eventloop.data.trainer_parts import TrainerParts
from eventloop.model.summary import count_text
from eventloop.optim.optimizers import classes_text


def trainer_text(trainer: TrainerParts) -> str:
    """Return a text with a trainer's model, optimizer, progress, hooks and directory.

    If the construction of the trainer has failed, a traceback may show it: return only the class then.
    """
    try:
        return _text(trainer)
    except Exception:
        return object.__repr__(trainer)


def _text(trainer: TrainerParts) -> str:
    """Return the text of a complete trainer; raise an error if its construction has failed."""
    counts = (trainer.epoch, trainer.max_epochs, "epochs"), (trainer.iter, trainer.max_iters, "iterations")
    lines = {
        "model": type(trainer.model).__name__,
        "parameters": count_text(trainer.model),
        "optimizer": classes_text(trainer.optimizer) or "none",
        "done": ", ".join(f"{n:,}{'' if of is None else f' of {of:,}'} {unit}" for n, of, unit in counts),
        "hooks": ", ".join(type(hook).__name__ for hook in trainer.hooks),
        "work_dir": str(trainer.work_dir),
    }
    return "\n  ".join([type(trainer).__name__, *(f"{name}: {text}" for name, text in lines.items())])
