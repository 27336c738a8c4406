"""Train with a schedule, and write the rate of each iteration; run by test_set_told.py, which tells and kills it."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Event
from typing import Any

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.steering.set_runs import ITERS, set_run, values

WAIT_AT, KILL_AT = (int(argument) for argument in sys.argv[1:])


def wait_for_command(trainer: Trainer, event: Any) -> None:
    """Stay in an iteration until a command has come, and in another one until the process is killed."""
    if event.iter + 1 == WAIT_AT:
        Path("waits").touch()
    while event.iter + 1 == WAIT_AT and not trainer.stops.commands:
        Event().wait(0.01)
    if event.iter + 1 == KILL_AT:
        Path("reached").touch()
        Event().wait()


def main() -> None:
    trainer = set_run(
        Path("run"), "SequentialLR", hooks=[CheckpointHook(interval=2, by_epoch=False)], writers=[]
    )
    if any(Path("run").glob("iter_*")):
        trainer.resume()
    trainer.bus.subscribe(wait_for_command, "after_train_iter", priority="LOWEST")
    first = trainer.iter
    rates = values(trainer)
    assert first + len(rates) == ITERS
    weights = b"".join(value.numpy().tobytes() for value in trainer.model.state_dict().values())
    Path("found").write_text(f"{rates[-1]} {weights.hex()}")


if __name__ == "__main__":
    main()
