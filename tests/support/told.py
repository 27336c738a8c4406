"""Tell runs of other engines commands, by files as `eventloop tell` writes them, and read the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eventloop import Bus
from eventloop.commands.messages import INBOX, OUTBOX, SENT, Answer, Command, new_id

Words = Sequence[Any]
"""A command: its name, words, and at last, if there are any, its arguments by name as a dict."""


def send_command(directory: Path, name: str, *words: Any) -> str:
    """Send a command to the run in a directory, and return its id."""
    arguments = dict(words[-1]) if words and isinstance(words[-1], Mapping) else {}
    plain = [each for each in words if not isinstance(each, Mapping)]
    command = Command(id=new_id(), command=name, words=plain, arguments=arguments, source="anna@login1")
    inbox = directory / INBOX
    inbox.mkdir(mode=0o700, exist_ok=True)
    draft = inbox / f"{command.id}.tmp"
    draft.write_bytes(msgspec.json.encode(command))
    draft.rename(inbox / (command.id + SENT))
    return command.id


def send_at(bus: Bus, plan: Mapping[int, Sequence[Words]]) -> None:
    """Send commands in the iterations of a plan, by the number of completed iterations at which they are applied.

    The run reads its inbox at once, as its background does each second. Of several ranks the first one does.
    """

    def send(trainer: Any, event: Any) -> None:
        for words in plan.get(event.iter + 1, ()) if trainer.rank == 0 else ():
            send_command(trainer.work_dir, *words)
            for look in trainer.ownership.each_second:
                look()

    bus.subscribe(send, "after_train_iter", name="send")


def answers(directory: Path) -> list[Answer]:
    """Return the answers of a run, in the order of the commands."""
    files = sorted((directory / OUTBOX).glob(f"*{SENT}"))
    return [msgspec.json.decode(file.read_bytes(), type=Answer) for file in files]


def outcomes(directory: Path) -> list[tuple[str, str, int]]:
    """Return the name, the outcome and the iteration of each answer."""
    return [(each.command, each.outcome, each.iteration) for each in answers(directory)]
