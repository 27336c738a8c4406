"""Define the commands that every run knows; `eventloop tell RUN help` shows their docstrings."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import threading

from eventloop.events import TextLogged
from eventloop.steering.protocols import CommandError, Saving, SteeredTrainer, Tracer, savers
from eventloop.steering.rollback import INTERNAL, rollback
from eventloop.steering.set_values import set_values
from eventloop.steering.signature import CommandSpec


def checkpoint(trainer: SteeredTrainer) -> Saving:
    """Save a checkpoint, and answer with its path once it is durable."""
    if trainer.fast_dev_run:
        raise CommandError("a fast_dev_run saves no checkpoint")
    for hook in savers(trainer.hooks):
        return hook.save_now(trainer)
    raise CommandError("the run has no CheckpointHook whose checkpoints can be resumed from")


def validate(trainer: SteeredTrainer) -> dict[str, float]:
    """Validate now, and answer with the metrics; this does not change the course of the training."""
    if trainer.val_loader is None:
        raise CommandError("the trainer has no val_loader")
    metrics = trainer.val_aside()
    if not metrics and trainer.stopping:
        raise CommandError("a stop has cut the validation short")
    return metrics


def stop(trainer: SteeredTrainer, reason: str = "stopped by a command") -> None:
    """Stop the run, with every closing event and the last checkpoint."""
    trainer.commands.stop(reason)


def pause(trainer: SteeredTrainer) -> None:
    """Wait after this iteration until the command `go`; other commands are applied meanwhile."""
    trainer.commands.paused = True


def go(trainer: SteeredTrainer) -> None:
    """Go on after a pause."""
    if not trainer.commands.paused:
        raise CommandError("the run is not paused")
    trainer.commands.paused = False


def note(trainer: SteeredTrainer, text: str) -> None:
    """Log a text with the metrics of the run, at this iteration."""
    if trainer.rank == 0:
        trainer.announce(TextLogged, mode=trainer.mode, step=trainer.iter, name="note", text=text)


def trace(trainer: SteeredTrainer, iterations: int = 20) -> dict[str, str]:
    """Record the next iterations as a file for Perfetto and Chrome's tracing."""
    if iterations < 1:
        raise CommandError(f"trace expects at least 1 iteration, got {iterations}")
    for hook in trainer.hooks:
        if isinstance(hook, Tracer):
            return {"path": str(hook.trace_now(trainer, iterations))}
    raise CommandError("the run has no TraceHook")


def stacks() -> str:
    """Return the stack of each thread as `faulthandler` prints it, with the names of the threads."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    hex_digits = 2 * (sys.maxsize.bit_length() + 1) // 8
    for thread in threading.enumerate():
        if thread.ident is not None:
            header = f"Thread 0x{thread.ident:0{hex_digits}x}"
            text = text.replace(header, f'{header} "{thread.name}"')
    return text


BUILTIN = (
    CommandSpec("checkpoint", checkpoint),
    CommandSpec("validate", validate),
    CommandSpec("set", set_values, takes_any=True),
    CommandSpec("stop", stop),
    CommandSpec("pause", pause, repeated=False),
    CommandSpec("go", go, repeated=False),
    CommandSpec("note", note),
    CommandSpec("trace", trace),
    CommandSpec("rollback", rollback, internal=INTERNAL),
)
"""The commands that every run knows; its program may add others."""
