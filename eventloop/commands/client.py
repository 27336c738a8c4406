"""Send commands to a running training from another process, and wait for the answers.

`eventloop tell` and programs use `send`. A command whose answer does not come in time is withdrawn: its file
is removed, which succeeds only as long as the run has not claimed it.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import msgspec

from eventloop.commands.messages import (
    CLAIMED,
    HIDDEN,
    INBOX,
    LARGEST,
    OUTBOX,
    SENT,
    Answer,
    Command,
    decode_answer,
    new_id,
)
from eventloop.commands.private_directory import create_private
from eventloop.commands.record import NAME, read_record
from eventloop.ownership.owner import Owner, read_owner

PATIENCE_SECONDS = 10.0
"""Seconds, or the timeout if it is longer, for which the answer to a claimed command is awaited further."""
SHORTEST_SECONDS, LONGEST_SECONDS = 0.01, 0.1
"""Seconds between the first two looks for an answer, and between later ones."""
LIFE_SECONDS = 1.0
"""Seconds between two looks whether the run lives."""
ROOM = 4096
"""Bytes of the file of a command, which the run overwrites with the answer even if the disk is full."""


class NoRunError(Exception):
    """Raised when no training is under way in a directory; the text says what was found there.

    try:
        send("runs/digits", "stop")
    except NoRunError as error:
        print(error)
    """


class NoAnswerError(Exception):
    """Raised when a run has not answered a command in time; the text says why, and what became of it.

        try:
            answer = send("runs/digits", "checkpoint", timeout=60.0)
        except NoAnswerError as error:
            print(error, error.withdrawn)

    Attributes:
        withdrawn: whether the command was withdrawn, so that it is not applied later.
        lives: whether the run's process lives; None if that is not known.
    """

    def __init__(self, text: str, *, withdrawn: bool, lives: bool | None) -> None:
        super().__init__(text)
        self.withdrawn, self.lives = withdrawn, lives


def send(
    run: str | PathLike[str],
    command: str,
    *words: str,
    arguments: Mapping[str, Any] | None = None,
    timeout: float = 30.0,
    source: str | None = None,
) -> Answer:
    """Send a command to a running training, and return its answer.

        answer = send("runs/digits", "set", arguments={"lr": 1e-4})
        print(answer.outcome, answer.iteration, answer.reason, answer.result)

    If the run has begun to apply the command when the timeout ends, which cannot be undone, the answer is
    awaited for ten seconds more, or for the timeout again if that is longer.

    Args:
        run: the directory of the run, its `work_dir`.
        command: the name of the command, such as "stop".
        words: arguments in the order of the command's parameters, as texts.
        arguments: arguments by name, as JSON values or texts.
        timeout: seconds to wait for the answer.
        source: the name of the sender, for the run's record; None means "USER@HOST".

    Raises:
        NoRunError: no training is under way in the directory.
        NoAnswerError: the run's process is dead, or there was no answer in time.
        ValueError: the command is larger than 64 KiB.
        OSError: the command cannot be written, for example by a user other than the run's.
    """
    directory = Path(run)
    owner = find_run(directory)
    if owner.lives is False:
        raise NoAnswerError(
            f"no answer: the run's process is dead ({described(owner)}); the command was not sent",
            withdrawn=True,
            lives=False,
        )
    return _Waiting(directory, post(directory, command, *words, arguments=arguments, source=source)).wait(
        timeout
    )


def post(
    run: str | PathLike[str],
    command: str,
    *words: str,
    arguments: Mapping[str, Any] | None = None,
    source: str | None = None,
) -> str:
    """Send a command without waiting, and return its id; the answer will be `outbox/ID.json` for an hour.

    If the run's process is dead, the next run in the directory receives the command.

    Raises:
        NoRunError, ValueError, OSError: as `send`.
    """
    directory = Path(run)
    user = os.stat(find_run(directory).path).st_uid
    if os.geteuid() not in (user, 0):
        raise PermissionError(
            f"the run in {directory} belongs to user {user}, and takes commands of that user"
        )
    sent = Command(
        id=new_id(),
        command=command,
        words=[*words],
        arguments=dict(arguments or {}),
        source=_sender() if source is None else source,
    )
    raw = msgspec.json.encode(sent).ljust(ROOM)
    if len(raw) > LARGEST:
        raise ValueError(f"expected a command of at most {LARGEST:,} bytes, got {command!r} of {len(raw):,}")
    for folder in (INBOX, OUTBOX):
        create_private(directory / folder, user)
    _write(directory / INBOX, sent.id, raw, user)
    return sent.id


def find_run(directory: Path) -> Owner:
    """Return the owner of a run's directory, which may have been killed.

    Raises:
        NoRunError: the directory does not exist, or has no run that trains or was killed.
    """
    owner = read_owner(directory)
    if owner is None:
        what = "has no run under way" if directory.is_dir() else "is no directory"
        raise NoRunError(f"expected the directory of a training that runs, and {directory} {what}")
    if owner.state in ("pruning", "replaying", "evaluating") and owner.lives is not False:
        raise NoRunError(f"expected a training in {directory}, got a process that is {owner.state}")
    return owner


def described(owner: Owner) -> str:
    """Return the machine and the process of a run, and since when it has its directory."""
    if not owner.host:
        return "its record is damaged"
    return f"{owner.host}, process {owner.pid}, since {owner.since}"


class _Waiting:
    """A command that was sent, and whose answer is awaited."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._sent = directory / INBOX / (name + SENT)
        self._claimed = directory / INBOX / (name + CLAIMED)
        self._answer_path = directory / OUTBOX / (name + SENT)

    def wait(self, timeout: float) -> Answer:
        """Wait for the answer; withdraw the command if the time is over or the run's process has died."""
        try:
            if (answer := self._poll(timeout)) is not None:
                return answer
            withdrawn = _removed(self._sent)
            if not withdrawn:  # the run has claimed it
                answer = self._poll(max(PATIENCE_SECONDS, timeout))
        except BaseException:  # also a Ctrl-C
            _removed(self._sent)
            raise
        return answer if answer is not None else self._give_up(timeout, withdrawn=withdrawn)

    def _poll(self, timeout: float) -> Answer | None:
        """Look for the answer until the time is over or no process is left that could write it."""
        now = monotonic()
        deadline, life, pause = now + timeout, now + LIFE_SECONDS, SHORTEST_SECONDS
        while True:
            if (answer := self._fetched()) is not None:
                return answer
            now = monotonic()
            if now >= deadline:
                return None
            if now >= life:
                life = now + LIFE_SECONDS
                owner = read_owner(self._directory)
                if owner is None or owner.lives is False:
                    return self._fetched()
            sleep(min(pause, deadline - now))
            pause = min(1.5 * pause, LONGEST_SECONDS)

    def _fetched(self) -> Answer | None:
        """Return the answer and remove its file; None as long as there is none.

        The directory is listed, because a network disk may hold for a minute that a file is not there.
        """
        try:
            if self._answer_path.name not in os.listdir(self._answer_path.parent):
                return None
            answer = decode_answer(self._answer_path.read_bytes(), self._name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            answer = Answer(id=self._name, command="", outcome="refused", reason="the answer is damaged")
        self._answer_path.unlink(missing_ok=True)
        return answer

    def _give_up(self, timeout: float, *, withdrawn: bool) -> Answer:
        """Raise the error that says what became of the command; withdraw it from a run that is dead."""
        owner = read_owner(self._directory)
        lives = owner.lives if owner is not None else False
        what = "the command was withdrawn"
        if not withdrawn:
            if (answer := self._recorded() if lives is False else self._fetched()) is not None:
                _removed(self._claimed)
                return answer
            withdrawn = lives is False and (_removed(self._claimed) or _removed(self._sent))
            what = f"the run has begun to apply it, and will answer in {self._answer_path}"
            if withdrawn:
                what = "the command, which the run had begun to apply, was withdrawn"
        why = f"no answer within {timeout:g} s: the run's process lives"
        if owner is None:
            why = "no answer: the run has ended"
        elif not lives:
            why = "no answer: the run's process " + ("is dead" if lives is False else "gives no sign of life")
        who = f" ({described(owner)})" if owner is not None else ""
        raise NoAnswerError(f"{why}{who}; {what}", withdrawn=withdrawn, lives=lives)

    def _recorded(self) -> Answer | None:
        """Return the answer that the record of a dead run gives, or that it has written meanwhile."""
        if (answer := self._fetched()) is not None:
            return answer
        with suppress(OSError, ValueError):
            for applied in read_record(self._directory / NAME):
                if applied.id == self._name:
                    return Answer(
                        id=self._name, command=applied.command, outcome="applied", iteration=applied.iter
                    )
        return None


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _write(inbox: Path, name: str, raw: bytes, user: int) -> None:
    """Write a command under a hidden name, and rename it once it is whole."""
    hidden = inbox / f".{name}{HIDDEN}"
    descriptor = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(descriptor, 0o600)  # a umask may have taken bits of the owner
            if os.geteuid() != user:
                os.fchown(descriptor, user, -1)
            if os.write(descriptor, raw) != len(raw):
                raise OSError(f"{hidden} was not written as a whole: the disk is full")
        finally:
            os.close(descriptor)
        os.rename(hidden, inbox / (name + SENT))
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def _sender() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = str(os.geteuid())
    return f"{user}@{socket.gethostname()}"
