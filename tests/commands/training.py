"""A training in a process of its own, whose one weight only commands change, and which may be killed at a point.

It is run by `steered`; the options are a JSON object. The weight begins at 1, the learning rate is 0, and the
command `double` doubles it. Looks into the inbox come fifty times a second, so that tests are short.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eventloop import Trainer
from eventloop.checkpoint.retention import pending
from eventloop.checkpoint.saving.saver import Saver
from eventloop.commands import inbox
from eventloop.events import AfterTrainIter
from eventloop.hooks import CheckpointHook
from eventloop.ownership import holding

KEPT_ON = 300
"""Iterations that a resumed run makes at least, in which a command could be applied a second time."""
CALLS = {"claim": "rename", "record": "replace", "answer": "pwrite", "publish": "replace"}
"""The call of `os` that each step of a command ends with."""


class Weight(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.w * batch


def train_step(trainer: Trainer, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss after a millisecond, which stands for the work of a model."""
    time.sleep(0.001)
    loss: torch.Tensor = trainer.model(batch).sum()
    return loss


def kill_at(step: str, when: str, ready: Callable[[], bool]) -> None:
    """Have this process killed before or after a step of the first command, once something is ready."""
    name = CALLS[step]
    call = getattr(os, name)

    def is_it(arguments: tuple[Any, ...]) -> bool:
        if step == "answer":
            return True
        end = {"claim": ".claimed", "record": "commands.jsonl", "publish": ".json"}[step]
        target = os.fspath(arguments[1])
        return target.endswith(end) and (step != "publish" or "outbox" in target)

    def killing(*arguments: Any) -> Any:
        found = is_it(arguments)
        while found and not ready():
            time.sleep(0.002)
        if found and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*arguments)
        if found:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, name, killing)


def add_commands(trainer: Trainer, state: dict[str, Any]) -> None:
    """Add the commands that the tests send."""

    @trainer.command
    def double(trainer: Trainer) -> None:
        """Double the weight."""
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight.mul_(2)
        state["doubled_at"] = trainer.iter
        if state.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)

    @trainer.command
    def push(trainer: Trainer, number: int) -> dict[str, int]:
        """Keep a number."""
        state["pushed"].append(number)
        return {"number": number}

    @trainer.command
    def pushed(trainer: Trainer) -> list[int]:
        """Return the numbers that were kept."""
        return [*state["pushed"]]

    @trainer.command
    def scale(trainer: Trainer, amount: float, times: int = 1, name: str = "all") -> dict[str, Any]:
        """Return the arguments, by name."""
        return {"amount": amount, "times": times, "name": name}

    @trainer.command
    def talk(trainer: Trainer, length: int) -> str:
        """Return a long text."""
        return "x" * length


def main(options: dict[str, Any]) -> None:
    """Train until a command stops the run, or a resumed run has gone on for long enough."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    vars(holding)["TICK_SECONDS"] = 0.02
    vars(inbox)["WRITING_SECONDS"] = options.get("writing", 0.1)
    vars(pending)["Saver"] = lambda **given: Saver(process=False, **given)
    run = Path(options["run"])
    state: dict[str, Any] = {"pushed": [], "dies": options.get("kill") == "apply after"}
    model = Weight()
    interval = options.get("interval")
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        train_step=train_step,
        train_loader=[torch.ones(1)] * 1000,
        max_epochs=10_000,
        work_dir=run,
        hooks=[CheckpointHook(interval, by_epoch=False, max_keep_ckpts=3)] if interval else [],
        default_hooks=None if interval else {"checkpoint": None},
    )
    add_commands(trainer, state)
    start = last = 0
    if options.get("resume"):
        trainer.resume("auto")
        start = last = trainer.iter
        if (record := run / "commands.jsonl").exists():  # commands that are applied again
            last = max([start, *(json.loads(line)["iter"] for line in record.read_text().splitlines())])

    @trainer.bus.on("after_train_iter")
    def end(trainer: Trainer, event: AfterTrainIter) -> None:
        if event.iter == start:
            write_line("trains")
        name = options.get("until_answered")
        if name and event.iter > last + KEPT_ON and not any((run / "inbox").glob(f"{name}*")):
            trainer.stop("done")

    if kill := options.get("kill"):
        step, when = kill.split()
        if step in CALLS:
            kill_at(step, when, lambda: not options.get("saved") or _is_saved(run, state))
    if size := options.get("largest_file"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    trainer.train()
    state |= {"iter": trainer.iter, "w": model.w.item(), "reason": trainer.stop_reason}
    write_line(json.dumps(state))


def write_line(text: str) -> None:
    """Write a line for the test that has started this process."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _is_saved(run: Path, state: dict[str, Any]) -> bool:
    """Return whether a checkpoint is durable that has the command."""
    names = [path.name for path in run.glob("iter_*")]
    return any(int(name[5:]) > state.get("doubled_at", 1 << 60) for name in names)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
