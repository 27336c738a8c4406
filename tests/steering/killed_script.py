"""A steered run that is killed somewhere, or not; `test_killed` starts it.

Arguments: a JSON object with `folder`, `plan` (commands by iteration, sent as files), `by_epoch`, `record` (of the
run to repeat), `resume`, and `kill`, which is [what, iteration]: "recorded" kills once the record on the disk has the
commands of that iteration and the checkpoint before it is durable, "applied" kills in the moment of the application.
Prints the weights' hash and the applied commands.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from eventloop import Trainer
from eventloop.commands.messages import INBOX, SENT
from eventloop.commands.private_directory import create_private
from eventloop.ownership import holding
from tests.steering.job import applied, build, command, recorded, weights

POLL = 0.005
holding.TICK_SECONDS = 0.02  # of the background that reads the inbox and writes the record


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition; the test has a timeout."""
    while not condition():
        time.sleep(POLL)


def send(folder: Path, *words: str) -> None:
    """Send a command as `eventloop tell` does."""
    sent = command(*words)
    inbox = folder / INBOX
    create_private(inbox)
    (inbox / f"{sent.id}.tmp").write_bytes(msgspec.json.encode(sent))
    (inbox / f"{sent.id}.tmp").rename(inbox / (sent.id + SENT))


def main(task: dict[str, Any]) -> None:
    """Train, and print what came of it."""
    folder = Path(task["folder"])
    plan = {int(at): words for at, words in task["plan"].items()}
    trainer = build(folder, by_epoch=task["by_epoch"], commands=task.get("record"))
    if task.get("resume"):
        trainer.resume(task["resume"])

    def steer(trainer: Trainer, event: Any) -> None:
        for words in plan.get(event.iter + 1, ()):
            send(folder, *words)
        wait_until(lambda: len(trainer.stops.commands) >= len(plan.get(event.iter + 1, ())))

    trainer.bus.subscribe(steer, "after_train_iter", name="steer")
    if kill := task.get("kill"):
        install_kill(trainer, folder, *kill)
    trainer.train()
    said = {"weights": weights(trainer), "applied": applied(trainer.applied_commands)}
    sys.stdout.write(json.dumps(said))


def install_kill(trainer: Trainer, folder: Path, what: str, at: int) -> None:
    """Let the process kill itself."""

    def kill(event: Any) -> None:
        if event.iter != at:
            return
        if what == "recorded":
            rows = applied(trainer.applied_commands)
            wait_until(lambda: (folder / f"iter_{(at - 1) // 5 * 5}" / "manifest.json").exists())
            if rows:
                record = folder / "commands.jsonl"
                wait_until(lambda: record.exists() and recorded(folder)[: len(rows)] == rows)
        os.kill(os.getpid(), signal.SIGKILL)

    trainer.bus.subscribe(kill, "command_applied" if what == "applied" else "before_train_iter", name="kill")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
