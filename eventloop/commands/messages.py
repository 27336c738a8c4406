"""Define a command and its answer, which are JSON files in the directory of a run.

The file of a command is renamed atomically: `inbox/ID.json` is a sent command, `inbox/ID.claimed` a command
that the run has claimed in order to apply it, and `outbox/ID.json` the answer. Until the command is claimed
its sender may withdraw it, by removing the file.
"""

from __future__ import annotations

import json
import re
import time
from secrets import token_hex
from typing import Any, Literal

import msgspec

from eventloop.util.formatting import on_a_line

INBOX, OUTBOX = "inbox", "outbox"
"""The folders of a run for commands and for answers; only the run's user can read and write them."""
SENT, CLAIMED = ".json", ".claimed"
"""The suffixes of the file of a sent command, and of a command that the run has claimed."""
HIDDEN = ".tmp"
"""The suffix of the hidden file to which a sender writes a command before it is renamed."""
LARGEST = 64 * 1024
"""The largest command in bytes."""
PROGRAM = "program"
"""The `source` of a command that the training's own program requests; a repetition requests it again."""
EVALUATED = "evaluated"
"""The name of the command with which an evaluator reports the metrics of a checkpoint to the run.

If the run has ended, the command stays in the inbox for the next run, so that no metrics are lost.
"""
_ID = re.compile(r"[0-9]{1,20}-[0-9a-f]{8}")


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command to a running training.

    Attributes:
        id: the name of its file, which begins with the time; commands are applied in the order of their ids.
        command: its name, such as "set".
        words: arguments without a name, in the order of the command's parameters.
        arguments: arguments by name, as JSON values.
        source: the sender, such as "anna@login1".
    """

    id: str
    command: str
    words: list[str] = []
    arguments: dict[str, Any] = {}
    source: str = PROGRAM

    @property
    def shown(self) -> dict[str, Any]:
        """The arguments by name, and the words under "words", for events and records."""
        return {"words": self.words, **self.arguments} if self.words else {**self.arguments}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a command.

        answer = send("runs/digits", "prune", "0.3")
        print(answer.outcome, answer.iteration, answer.reason or answer.result)

    Attributes:
        id, command: the id and the name of the command.
        outcome: "applied" or "refused".
        iteration: the number of completed iterations when it was applied or refused.
        reason: the reason of a refusal.
        result: the result of the command, such as {"path": "runs/a/iter_50"}.
        warning: a problem with a command that was applied, such as a full disk.
    """

    id: str
    command: str
    outcome: Literal["applied", "refused"]
    iteration: int = 0
    reason: str = ""
    result: dict[str, Any] = {}
    warning: str = ""

    @property
    def result_text(self) -> str:
        """The result as a line such as "lr 0.1 -> 0.05"; for `help` and `stacks` a text of several lines."""
        if [*self.result] == ["text"]:
            return str(self.result["text"])
        return on_a_line(", ".join(_entry_text(name, value) for name, value in self.result.items()))


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was applied, as `commands.jsonl` and checkpoints record it.

    Attributes:
        iter, epoch: the number of completed iterations and epochs when it was applied.
        id, command, words, arguments, source: see `Command`.
        time: the time at which it was applied, as in ISO 8601.
    """

    iter: int
    epoch: int
    id: str
    command: str
    words: list[str] = []
    arguments: dict[str, Any] = {}
    source: str = ""
    time: str = ""


def _entry_text(name: str, value: Any) -> str:
    """Return an entry of a result as a text, such as "lr 0.1 -> 0.05" or a path alone."""
    if isinstance(value, dict) and [*value] == ["old", "new"]:  # the result of `set`
        return f"{name} {value['old']} -> {value['new']}"
    if isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    return text if name in ("path", "result") else f"{name} {text}"


def new_id() -> str:
    """Return an id that no other command has."""
    return f"{time.time_ns()}-{token_hex(4)}"


def is_id(text: str) -> bool:
    """Return whether a text is the id of a command."""
    return _ID.fullmatch(text) is not None


def decode_command(raw: bytes, name: str) -> Command:
    """Decode a command from its file.

    Args:
        raw: the contents of the file.
        name: the name of the file without the suffix, which must be the command's id.

    Raises:
        ValueError: the file is not a command; the text says what was expected.
    """
    try:
        command = msgspec.json.decode(raw, type=Command)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected a command as JSON, got {raw[:80]!r}: {error}") from None
    if command.id != name or not is_id(name):
        raise ValueError(
            f"expected a command whose id is the name of its file, got the id {command.id!r} in {name!r}"
        )
    if command.source == PROGRAM:  # written by hand: commands with this source would not be recorded
        return msgspec.structs.replace(command, source="unknown")
    return command


def decode_answer(raw: bytes, name: str) -> Answer:
    """Decode an answer from its file.

    Args:
        raw: the contents of the file.
        name: the name of the file without the suffix, which must be the command's id.

    Raises:
        ValueError: the file is not an answer to this command.
    """
    try:
        answer = msgspec.json.decode(raw, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected an answer as JSON, got {raw[:80]!r}: {error}") from None
    if answer.id != name:
        raise ValueError(f"expected the answer to {name!r}, got the one to {answer.id!r}")
    return answer
