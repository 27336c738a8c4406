"""Read a run's inbox on a background thread, and write the records and answers of applied commands."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from eventloop.commands.inbox import Inbox
from eventloop.commands.messages import EVALUATED, Answer, Applied, Command
from eventloop.commands.record import NAME, set_aside, write_record
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

END_SECONDS = 2.0
"""Seconds for which the end of a run waits for a poll that hangs in the file system."""
EARLIER_RUN_SECONDS, UNFETCHED_SECONDS = 60.0, 3600.0
"""Seconds after which answers are removed: at the start of a run, and during the run."""
CLEANING = 600
"""The number of polls between two removals of old answers."""


class Mailbox:
    """Read the inbox of one run, and write its record of commands and its answers; used on rank 0.

    `poll` is called on a background thread, all other methods on the training thread. They raise no error of
    the file system: it is logged once, and a later poll writes again.

    Args:
        directory: the directory of the run.
        record: the commands in its record: those that were applied, and those to be applied again.
        keeps: True if the file of the record, if there is one, belongs to this run; False renames it.
        receive: called with each command, on the background thread; returns the answer, or None if the
            training thread will apply the command.
    """

    def __init__(
        self,
        directory: Path,
        record: Sequence[Applied],
        receive: Callable[[Command], Answer | None],
        *,
        keeps: bool,
    ) -> None:
        self._inbox, self._path, self._receive = Inbox(directory), directory / NAME, receive
        # the arguments of `post`, until the next poll writes them
        self._posted: deque[tuple[Answer | None, list[Applied] | None]] = deque()
        self._in_inbox: set[str] = set()  # the ids of received commands that are not answered
        self._claimed: set[str] = set()  # the ids of those that are being applied, or wait for their answer
        self._unwritten_answers: deque[Answer] = deque(maxlen=1000)  # a full disk has refused them
        self._unwritten_record, self._must_rename = [*record], not keeps
        self._polling, self._polls, self._logged = threading.Lock(), 0, set[str]()
        self._closed = False
        self._write_record()
        self._inbox.return_claimed({applied.id: _answer(applied) for applied in record})
        self._inbox.remove_old(EARLIER_RUN_SECONDS)

    def claim(self, command: Command) -> bool:
        """Claim a command just before it is applied; return False if its sender has withdrawn it."""
        if command.id not in self._in_inbox or command.id in self._claimed:
            return True  # it has no file in the inbox, or is claimed already
        claimed = self._inbox.claim(command.id)
        if claimed:
            self._claimed.add(command.id)
        else:
            self._in_inbox.discard(command.id)
        return claimed

    def post(self, answer: Answer | None, record: list[Applied] | None = None) -> None:
        """Queue an answer and a record, which the next poll writes; the record is written first.

        Args:
            answer: the answer to a command; None if it is given later.
            record: all commands of the record; None if they have not changed.
        """
        if answer is not None and answer.id not in self._in_inbox:
            answer = None  # the command came from the program or a repetition, so nobody waits for the answer
        self._posted.append((answer, record))

    def poll(self) -> None:
        """Write the posted records and answers, then read the inbox; do nothing in a run that has ended."""
        with self._polling:
            if self._closed:  # `close` has run while this call waited for the lock
                return
            self._write_posted()
            self._polls += 1
            if self._polls % CLEANING == 0:
                self._inbox.remove_old(UNFETCHED_SECONDS)
            for each in self._inbox.receive():
                if self._closed:  # `receive` has hung for so long that `close` has given up waiting
                    return
                answer = each if isinstance(each, Answer) else self._received(each)
                if answer is not None and self._inbox.claim(each.id):
                    self._answer(answer)

    def close(self, refusal: Callable[[Command], Answer], waiting: deque[Command]) -> None:
        """Write the posted records and answers, and refuse the commands that were not applied.

        Metrics that an evaluator reports stay in the inbox, for the next run in the directory.

        Args:
            refusal: returns the answer that refuses a command.
            waiting: the commands that were received and not applied; it is cleared.
        """
        self._closed = True
        if not self._polling.acquire(timeout=END_SECONDS):
            waiting.clear()
            return
        try:
            self._write_posted()
            unapplied = [command for command in waiting if command.id in self._in_inbox]
            waiting.clear()
            self._refuse(unapplied, refusal)
            while received := self._inbox.receive():  # again, for commands that arrive meanwhile
                self._refuse(received, refusal)
        finally:
            self._polling.release()

    def _refuse(self, received: Sequence[Command | Answer], refusal: Callable[[Command], Answer]) -> None:
        """Answer commands by refusals, except commands that report metrics, and write other answers."""
        for each in received:
            if isinstance(each, Command) and each.command == EVALUATED:
                continue
            if each.id in self._claimed or self._inbox.claim(each.id):
                self._answer(each if isinstance(each, Answer) else refusal(each))

    def _received(self, command: Command) -> Answer | None:
        """Return the answer to a received command; None if the training thread will apply it."""
        self._in_inbox.add(command.id)  # before `_receive`, after which the training thread may apply it
        try:
            answer = self._receive(command)
        except Exception as error:
            text = f"it cannot be read: {error_text(error)}"
            answer = Answer(id=command.id, command=command.command, outcome="refused", reason=text)
        if answer is not None:
            self._in_inbox.discard(command.id)
        return answer

    def _write_posted(self) -> None:
        """Write the record, then the answers, with a warning in them if the record could not be written."""
        posted = [self._posted.popleft() for _ in range(len(self._posted))]
        for _, record in posted:
            if record is not None:
                self._unwritten_record = record  # the latest record includes the earlier ones
        warning = self._write_record()
        for unwritten in [self._unwritten_answers.popleft() for _ in range(len(self._unwritten_answers))]:
            self._answer(unwritten)
        for answer, record in posted:
            if answer is not None:
                self._in_inbox.discard(answer.id)
                self._claimed.discard(answer.id)
                of_record = warning if record is not None else ""
                self._answer(msgspec.structs.replace(answer, warning=of_record))

    def _write_record(self) -> str:
        """Write the record if it has changed; return a warning if it cannot be written, else ""."""
        try:
            if self._must_rename:
                set_aside(self._path)
                self._must_rename = False
            if self._unwritten_record:
                write_record(self._path, self._unwritten_record)
        except OSError as error:
            warning = f"{self._path} does not have this command yet: {error_text(error)}"
            self._log(f"{self._path} is not written", error)
            return warning
        self._unwritten_record = []
        return ""

    def _answer(self, answer: Answer) -> None:
        """Write an answer; if that fails, a later poll writes it."""
        try:
            self._inbox.answer(answer)
        except FileNotFoundError:  # the file of the command was removed, for example by hand
            return
        except OSError as error:
            self._unwritten_answers.append(answer)
            self._log(f"the answer to {answer.command or 'a file'} is not written", error)

    def _log(self, text: str, error: OSError) -> None:
        """Log a warning, once for each kind of error, and at most 20 warnings."""
        kind = (
            f"{text}: {type(error).__name__} {error.errno}"  # the error's text may name a new file each time
        )
        if kind not in self._logged and len(self._logged) < 20:
            self._logged.add(kind)
            logger.warning(
                "%s: %s; the training goes on, and writes it later if it can", text, error_text(error)
            )


def _answer(applied: Applied) -> Answer:
    """Return the answer to a command that a record has."""
    return Answer(id=applied.id, command=applied.command, outcome="applied", iteration=applied.iter)
