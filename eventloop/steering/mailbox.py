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
"""Seconds that the end of a run waits for a look into the inbox that hangs in the file system."""
LEFT_SECONDS, FETCHED_SECONDS = 60.0, 3600.0
"""Seconds after which answers are removed: those of an earlier run, and those that are not fetched."""
CLEANING = 600
"""The number of polls between two removals of old answers."""


class Mailbox:
    """The inbox, the outbox and the record of one run, on rank 0.

    `poll` is called on a background thread, `post` and `close` on the training thread. No error of the file
    system reaches them: it is logged once, and what was not written is written at a later poll.

    Args:
        directory: the directory of the run.
        record: the commands in its record: those that were applied, and those to be applied again.
        keeps: whether the file of the record, if there is one, is of this run, which goes on with it.
        receive: given each command, on the background thread; returns its answer, or None if the training
            thread will apply it.
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
        self._posted: deque[tuple[Answer | None, list[Applied] | None]] = deque()
        self._claims: set[str] = set()  # commands with a file in the inbox
        self._claimed: set[str] = set()  # those of them that were claimed; a rollback may delay them
        self._unanswered: deque[Answer] = deque(maxlen=1000)  # those whose answers could not be written
        self._unrecorded, self._sets_aside = [*record], not keeps
        self._writing, self._polls, self._logged = threading.Lock(), 0, set[str]()
        self._closed = False
        self._write_record()
        self._inbox.return_claimed({applied.id: _answer(applied) for applied in record})
        self._inbox.remove_old(LEFT_SECONDS)

    def claim(self, command: Command) -> bool:
        """Claim a command at the moment of its application; False if its sender has withdrawn it."""
        if command.id not in self._claims or command.id in self._claimed:
            return True
        claimed = self._inbox.claim(command.id)
        if claimed:
            self._claimed.add(command.id)
        else:
            self._claims.discard(command.id)
        return claimed

    def post(self, answer: Answer | None, record: list[Applied] | None = None) -> None:
        """Have an answer written soon, after the record that has its command."""
        if answer is not None and answer.id not in self._claims:
            answer = None  # of a command that was repeated, or that the program gave
        self._posted.append((answer, record))

    def poll(self) -> None:
        """Write what was posted, then read the inbox; do nothing in a run that has ended."""
        with self._writing:
            if self._closed:  # this call waited for `close`; the next run receives what came since
                return
            self._write()
            self._polls += 1
            if self._polls % CLEANING == 0:
                self._inbox.remove_old(FETCHED_SECONDS)
            for each in self._inbox.receive():
                if self._closed:  # without waiting for this look, which has hung
                    return
                answer = each if isinstance(each, Answer) else self._received(each)
                if answer is not None and self._inbox.claim(each.id):
                    self._answer(answer)

    def close(self, refusal: Callable[[Command], Answer], waiting: deque[Command]) -> None:
        """Write what was posted, and refuse the commands that were not applied.

        Results of an evaluator stay in the inbox, for the next run of the directory.

        Args:
            refusal: makes the answer to a command.
            waiting: the commands that were received and not applied; it is cleared.
        """
        self._closed = True
        if not self._writing.acquire(timeout=END_SECONDS):
            waiting.clear()
            return
        try:
            self._write()
            left = [command for command in waiting if command.id in self._claims] + self._inbox.receive()
            waiting.clear()
            while left:
                for each in left:
                    if isinstance(each, Command) and each.command == EVALUATED:
                        continue
                    if each.id in self._claimed or self._inbox.claim(each.id):
                        self._answer(each if isinstance(each, Answer) else refusal(each))
                left = self._inbox.receive()
        finally:
            self._writing.release()

    def _received(self, command: Command) -> Answer | None:
        self._claims.add(command.id)  # first: the training thread may apply it at once
        try:
            answer = self._receive(command)
        except Exception as error:
            text = f"it cannot be read: {error_text(error)}"
            answer = Answer(id=command.id, command=command.command, outcome="refused", reason=text)
        if answer is not None:
            self._claims.discard(command.id)
        return answer

    def _write(self) -> None:
        posted = [self._posted.popleft() for _ in range(len(self._posted))]
        for _, record in posted:
            if record is not None:
                self._unrecorded = record  # it has the former commands too
        warning = self._write_record()
        for former in [self._unanswered.popleft() for _ in range(len(self._unanswered))]:
            self._answer(former)
        for answer, record in posted:
            if answer is not None:
                self._claims.discard(answer.id)
                self._claimed.discard(answer.id)
                applied = warning if record is not None else ""
                self._answer(msgspec.structs.replace(answer, warning=applied))

    def _write_record(self) -> str:
        """Write the record if it has changed; return why it cannot be written, or ""."""
        try:
            if self._sets_aside:
                set_aside(self._path)
                self._sets_aside = False
            if self._unrecorded:
                write_record(self._path, self._unrecorded)
        except OSError as error:
            text = f"{self._path} does not have this command yet: {error_text(error)}"
            self._log(f"{self._path} is not written", error)
            return text
        self._unrecorded = []
        return ""

    def _answer(self, answer: Answer) -> None:
        try:
            self._inbox.answer(answer)
        except FileNotFoundError:  # the file was removed
            return
        except OSError as error:
            self._unanswered.append(answer)
            self._log(f"the answer to {answer.command or 'a file'} is not written", error)

    def _log(self, what: str, error: OSError) -> None:
        key = f"{what}: {type(error).__name__} {error.errno}"  # the text may name another file each time
        if key not in self._logged and len(self._logged) < 20:
            self._logged.add(key)
            logger.warning(
                "%s: %s; the training goes on, and writes it later if it can", what, error_text(error)
            )


def _answer(applied: Applied) -> Answer:
    return Answer(id=applied.id, command=applied.command, outcome="applied", iteration=applied.iter)
