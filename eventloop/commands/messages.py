"""Define a command and its answer, which travel as JSON between processes.

A command moves through three names, each by an atomic rename: `inbox/ID.json` is sent, `inbox/ID.claimed` is
being applied, and `outbox/ID.json` is its answer. Who sent it may withdraw it, by removing the first file,
until the run has claimed it.
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
"""The folders of a run for commands and for answers; both are open to the run's user alone."""
SENT, CLAIMED = ".json", ".claimed"
"""The suffixes of a command that was sent, and of one that the run has claimed."""
HIDDEN = ".tmp"
"""The suffix of the hidden file in which a sender writes a command."""
LARGEST = 64 * 1024
"""The largest command in bytes."""
PROGRAM = "program"
"""The `source` of a command that the training's own program gives, and gives again in a repetition."""
EVALUATED = "evaluated"
"""The name of the command by which an evaluator reports the metrics of a checkpoint to the run.

If the run has ended, it stays in the inbox for the next run, so that no result is lost.
"""
_ID = re.compile(r"[0-9]{1,20}-[0-9a-f]{8}")


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command.

    Attributes:
        id: the name of its file, which begins with the time; commands are applied in the order of their ids.
        command: its name, such as "set".
        words: arguments without a name, in the order of the command's parameters.
        arguments: arguments by name, as JSON values.
        source: who sent it, such as "anna@login1".
    """

    id: str
    command: str
    words: list[str] = []
    arguments: dict[str, Any] = {}
    source: str = PROGRAM

    @property
    def shown(self) -> dict[str, Any]:
        """All arguments by name, for events and records; words come under "words"."""
        return {**({"words": self.words} if self.words else {}), **self.arguments}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a command.

        answer = send("runs/digits", "prune", "0.3")
        print(answer.outcome, answer.iteration, answer.reason or answer.result)

    Attributes:
        id, command: those of the command.
        outcome: whether it was applied.
        iteration: the number of completed iterations when it was applied or refused.
        reason: why it was refused.
        result: what it returned, such as {"path": "runs/a/iter_50"}.
        warning: what went wrong though it was applied, such as a full disk.
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
        """What it returned: a line such as "lr 0.1 -> 0.05", or the text of `help` and `stacks`."""
        if [*self.result] == ["text"]:
            return str(self.result["text"])
        return on_a_line(", ".join(_shown(name, value) for name, value in self.result.items()))


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was applied, as `commands.jsonl` and checkpoints record it.

    Attributes:
        iter, epoch: the number of completed iterations and epochs when it was applied.
        id, command, words, arguments, source: those of the command.
        time: when it was applied, ISO 8601.
    """

    iter: int
    epoch: int
    id: str
    command: str
    words: list[str] = []
    arguments: dict[str, Any] = {}
    source: str = ""
    time: str = ""


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict) and [*value] == ["old", "new"]:  # the answer of `set`
        return f"{name} {value['old']} -> {value['new']}"
    text = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, float):
        text = f"{value:.6g}"
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
        name: its name without the suffix, which must be the command's id.

    Raises:
        ValueError: it is not a command; the text says what was expected.
    """
    try:
        command = msgspec.json.decode(raw, type=Command)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected a command as JSON, got {raw[:80]!r}: {error}") from None
    if command.id != name or not is_id(name):
        raise ValueError(
            f"expected a command whose id is the name of its file, got the id {command.id!r} in {name!r}"
        )
    if command.source == PROGRAM:  # by hand; a program's commands are in no record
        return msgspec.structs.replace(command, source="unknown")
    return command


def decode_answer(raw: bytes, name: str) -> Answer:
    """Decode an answer from its file.

    Args:
        raw: the contents of the file.
        name: its name without the suffix, which must be the command's id.

    Raises:
        ValueError: it is not an answer.
    """
    try:
        answer = msgspec.json.decode(raw, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected an answer as JSON, got {raw[:80]!r}: {error}") from None
    if answer.id != name:
        raise ValueError(f"expected the answer to {name!r}, got the one to {answer.id!r}")
    return answer
