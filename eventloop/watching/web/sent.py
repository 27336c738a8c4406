"""Send commands of the page to runs, and collect the answers for all open pages."""

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
"""Seconds for which an answer is awaited; a command that the run has begun to apply is awaited longer."""
AT_ONCE = 8
"""The largest number of commands that wait for their answers."""
SHOWN = 20
"""The largest number of commands that pages show."""

Outcome = Literal["waiting", "applied", "refused", "no answer"]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command as the page requests it.

    Attributes:
        run: the index of the run.
        command, words, arguments: as those of `eventloop.commands.messages.Command`.
    """

    run: int
    command: str
    words: list[str] = []
    arguments: dict[str, str] = {}


class Sent(msgspec.Struct, kw_only=True):
    """A command that was sent, and what became of it."""

    number: int
    run: int
    text: str
    """The command with its arguments, as one would type it."""
    time: float
    outcome: Outcome = "waiting"
    answer: str = ""


class Busy(Exception):
    """Raised when too many commands wait for their answers."""


class SentCommands:
    """The commands of all pages, of which the last are shown.

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
        """Register a command; `finish` sends it.

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
        """Send a command that was begun, and wait for its answer."""
        run = self._runs[request.run]
        try:
            sent.outcome, sent.answer = await call_in_thread(
                lambda: _answer(run, request.command, request.words, request.arguments)
            )
        finally:
            self._waiting -= 1
            self._changed()


def _answer(run: Path, command: str, words: list[str], arguments: Mapping[str, Any]) -> tuple[Outcome, str]:
    try:
        answer = send(run, command, *words, arguments=arguments, timeout=SECONDS)
    except NoAnswerError as error:
        return "no answer", escaped(str(error))
    except (NoRunError, OSError, ValueError) as error:
        return "refused", escaped(str(error))
    return answer.outcome, escaped(_text(answer))


def _text(answer: Answer) -> str:
    """Return an answer as text, which may have several lines."""
    if answer.outcome == "refused":
        return answer.reason
    between = "\n" if "text" in answer.result else ": "
    text = f"after iteration {answer.iteration:,}{between}{answer.result_text}".removesuffix(": ")
    return f"{text}\n{answer.warning}".rstrip()
