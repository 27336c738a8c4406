"""Send commands from the live page to runs, and keep their answers for all open pages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from eventloop.commands.client import NoAnswerError, NoRunError, send
from eventloop.commands.messages import Answer
from eventloop.util.formatting import on_a_line
from eventloop.util.surrogates import escaped
from eventloop.watching.web.threads import call_in_thread

SECONDS = 120.0
"""The longest wait for an answer in seconds; it is longer once the run has begun to apply the command."""
AT_ONCE = 8
"""The largest number of commands that wait for their answers at a time."""
SHOWN = 20
"""How many of the last commands the pages show."""

Outcome = Literal["waiting", "applied", "refused", "no answer"]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold a command as the page requests it.

    Attributes:
        run: the index of the run.
        command, words, arguments: as in `eventloop.commands.messages.Command`.
    """

    run: int
    command: str
    words: list[str] = []
    arguments: dict[str, str] = {}


class Sent(msgspec.Struct, kw_only=True):
    """Hold a command that was sent, with its outcome and its answer."""

    number: int
    run: int
    text: str
    """The command with its arguments, as a user would type it."""
    time: float
    outcome: Outcome = "waiting"
    answer: str = ""


class Busy(Exception):
    """Raised when too many commands wait for their answers."""


class SentCommands:
    """Send the commands of all pages, and keep the last ones to be shown.

    Args:
        runs: the directories of the runs.
        changed: called when a command was sent or answered.
    """

    def __init__(self, runs: list[Path], changed: Callable[[], object]) -> None:
        self._runs, self._changed = runs, changed
        self._waiting = 0
        self._number = 0
        self.shown: deque[Sent] = deque(maxlen=SHOWN)

    def begin(self, request: Request) -> Sent:
        """Add a command to those shown, and return it. `finish` must be called to send it.

        Raises:
            IndexError: there is no such run.
            Busy: too many commands wait for their answers.
        """
        if not 0 <= request.run < len(self._runs):
            raise IndexError(f"expected a run from 0 to {len(self._runs) - 1}, got {request.run}")
        if self._waiting >= AT_ONCE:
            raise Busy(f"{self._waiting} commands wait for their answers already: wait for one of them")
        self._waiting += 1
        self._number += 1
        words = [*request.words, *(f"{name}={value}" for name, value in request.arguments.items())]
        text = on_a_line(escaped(" ".join([request.command, *words])), 200)
        sent = Sent(number=self._number, run=request.run, text=text, time=time.time())
        self.shown.append(sent)
        self._changed()
        return sent

    async def finish(self, request: Request, sent: Sent) -> None:
        """Send a command that `begin` has returned, wait for its answer, and store that in `sent`."""
        run = self._runs[request.run]
        try:
            sent.outcome, sent.answer = await call_in_thread(
                lambda: _answer(run, request.command, request.words, request.arguments)
            )
        finally:
            self._waiting -= 1
            self._changed()


def _answer(run: Path, command: str, words: list[str], arguments: Mapping[str, Any]) -> tuple[Outcome, str]:
    """Send a command, and return its outcome and the text for the page; wait for a limited time."""
    try:
        answer = send(run, command, *words, arguments=arguments, timeout=SECONDS)
    except NoAnswerError as error:
        return "no answer", escaped(str(error))
    except (NoRunError, OSError, ValueError) as error:
        return "refused", escaped(str(error))
    return answer.outcome, escaped(_text(answer))


def _text(answer: Answer) -> str:
    """Return an answer of a run as text, perhaps of several lines."""
    if answer.outcome == "refused":
        return answer.reason
    between = "\n" if "text" in answer.result else ": "
    text = f"after iteration {answer.iteration:,}{between}{answer.result_text}".removesuffix(": ")
    return f"{text}\n{answer.warning}".rstrip()
