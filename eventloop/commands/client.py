"""Send commands to a running training from another process, and wait for the answers.

`eventloop tell` and programs use `send`. If the answer does not come in time, the command is withdrawn: its
file is removed, which succeeds only if the run has not yet renamed it in order to apply the command.
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
"""The least number of seconds that `send` waits on after the timeout while a run applies the command."""
SHORTEST_SECONDS, LONGEST_SECONDS = 0.01, 0.1
"""Seconds between the first two checks for an answer, and the most between later ones."""
LIFE_SECONDS = 1.0
"""Seconds between two checks of whether the run's process is alive."""
ROOM = 4096
"""The least size of the file of a command in bytes.

The run overwrites the file with its answer, which needs no further space on a full disk.
"""


class NoRunError(Exception):
    """Raised when no training runs in a directory; the text says what was found there.

    try:
        send("runs/digits", "stop")
    except NoRunError as error:
        print(error)
    """


class NoAnswerError(Exception):
    """Raised when a run has not answered a command in time; the text says why.

        try:
            answer = send("runs/digits", "checkpoint", timeout=60.0)
        except NoAnswerError as error:
            print(error, error.withdrawn)

    Attributes:
        withdrawn: True if the command was withdrawn, so that it is not applied later.
        lives: whether the run's process is alive; None if that is not known.
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

    If the run has begun to apply the command when the timeout ends, the command cannot be withdrawn any more.
    The function then waits for ten seconds more, or for the timeout again if that is longer.

    Args:
        run: the directory of the run, its `work_dir`.
        command: the name of the command, such as "stop".
        words: arguments in the order of the command's parameters, as texts.
        arguments: arguments by name, as JSON values or texts.
        timeout: seconds to wait for the answer.
        source: the name of the sender, for the run's record; None means "USER@HOST".

    Raises:
        NoRunError: no training runs in the directory.
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
    command_id = post(directory, command, *words, arguments=arguments, source=source)
    return _SentCommand(directory, command_id).wait(timeout)


def post(
    run: str | PathLike[str],
    command: str,
    *words: str,
    arguments: Mapping[str, Any] | None = None,
    source: str | None = None,
) -> str:
    """Send a command without waiting, and return its id.

    The run writes the answer to `outbox/ID.json`, and removes it after an hour. If the run's process is dead,
    the next run in the directory receives the command.

    Args:
        run, command, words, arguments, source: see `send`.

    Raises:
        NoRunError, ValueError, OSError: see `send`.
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
    """Return the owner of a directory: the training that runs there, or was killed.

    Raises:
        NoRunError: the directory does not exist, or has no such training.
    """
    owner = read_owner(directory)
    if owner is None:
        problem = "has no run under way" if directory.is_dir() else "is no directory"
        raise NoRunError(f"expected the directory of a training that runs, and {directory} {problem}")
    if owner.state in ("pruning", "replaying", "evaluating") and owner.lives is not False:
        raise NoRunError(f"expected a training in {directory}, got a process that is {owner.state}")
    return owner


def described(owner: Owner) -> str:
    """Return a text with the machine, the process and the start of a run."""
    if not owner.host:
        return "its record is damaged"
    return f"{owner.host}, process {owner.pid}, since {owner.since}"


class _SentCommand:
    """A command that was sent and is not answered."""

    def __init__(self, directory: Path, command_id: str) -> None:
        self._directory, self._id = directory, command_id
        self._sent_path = directory / INBOX / (command_id + SENT)
        self._claimed_path = directory / INBOX / (command_id + CLAIMED)
        self._answer_path = directory / OUTBOX / (command_id + SENT)

    def wait(self, timeout: float) -> Answer:
        """Wait for the answer; withdraw the command after `timeout` seconds, or if the run has died.

        Raises:
            NoAnswerError: there was no answer.
        """
        try:
            if (answer := self._poll(timeout)) is not None:
                return answer
            withdrawn = _remove(self._sent_path)
            if not withdrawn:  # the run has claimed it
                answer = self._poll(max(PATIENCE_SECONDS, timeout))
        except BaseException:  # including Ctrl-C
            _remove(self._sent_path)
            raise
        return answer if answer is not None else self._last_answer(timeout, withdrawn=withdrawn)

    def _poll(self, timeout: float) -> Answer | None:
        """Check for the answer repeatedly; return None after the timeout, or if the run has ended or died."""
        now = monotonic()
        deadline, next_life_check, pause = now + timeout, now + LIFE_SECONDS, SHORTEST_SECONDS
        while True:
            if (answer := self._fetch()) is not None:
                return answer
            now = monotonic()
            if now >= deadline:
                return None
            if now >= next_life_check:
                next_life_check = now + LIFE_SECONDS
                owner = read_owner(self._directory)
                if owner is None or owner.lives is False:
                    return self._fetch()  # the run may have written it before it ended
            sleep(min(pause, deadline - now))
            pause = min(1.5 * pause, LONGEST_SECONDS)

    def _fetch(self) -> Answer | None:
        """Return the answer and remove its file; return None while there is no file."""
        try:
            # not opened directly: a network disk may cache for a minute that a file does not exist
            if self._answer_path.name not in os.listdir(self._answer_path.parent):
                return None
            answer = decode_answer(self._answer_path.read_bytes(), self._id)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            answer = Answer(id=self._id, command="", outcome="refused", reason="the answer is damaged")
        self._answer_path.unlink(missing_ok=True)
        return answer

    def _last_answer(self, timeout: float, *, withdrawn: bool) -> Answer:
        """Check for the answer a last time, and else raise NoAnswerError.

        The answer may be in the record of a dead run. A command that a dead run had claimed is withdrawn.

        Args:
            timeout: the seconds that were waited, for the error.
            withdrawn: whether the command was withdrawn.
        """
        owner = read_owner(self._directory)
        lives = owner.lives if owner is not None else False
        outcome = "the command was withdrawn"
        if not withdrawn:
            answer = self._recorded() if lives is False else self._fetch()
            if answer is not None:
                _remove(self._claimed_path)
                return answer
            withdrawn = lives is False and (_remove(self._claimed_path) or _remove(self._sent_path))
            outcome = (
                "the command, which the run had begun to apply, was withdrawn"
                if withdrawn
                else f"the run has begun to apply it, and will answer in {self._answer_path}"
            )
        text = f"{_no_answer_text(owner, timeout)}; {outcome}"
        raise NoAnswerError(text, withdrawn=withdrawn, lives=lives)

    def _recorded(self) -> Answer | None:
        """Return the answer of a dead run: its file, or one made of the run's record; None without both."""
        if (answer := self._fetch()) is not None:
            return answer
        with suppress(OSError, ValueError):
            for applied in read_record(self._directory / NAME):
                if applied.id == self._id:
                    return Answer(
                        id=self._id, command=applied.command, outcome="applied", iteration=applied.iter
                    )
        return None


def _no_answer_text(owner: Owner | None, timeout: float) -> str:
    """Return why a run has not answered, with its machine and process."""
    if owner is None:
        return "no answer: the run has ended"
    if owner.lives:
        reason = f"no answer within {timeout:g} s: the run's process lives"
    elif owner.lives is False:
        reason = "no answer: the run's process is dead"
    else:
        reason = "no answer: the run's process gives no sign of life"
    return f"{reason} ({described(owner)})"


def _remove(path: Path) -> bool:
    """Remove a file; return False if that is not possible."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _write(inbox: Path, name: str, raw: bytes, user: int) -> None:
    """Write a command to a hidden file of the user, and rename the file when it is complete.

    Raises:
        OSError: the file cannot be written, for example on a full disk.
    """
    hidden = inbox / f".{name}{HIDDEN}"
    descriptor = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(descriptor, 0o600)  # the umask may have cleared some of these bits
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
    """Return the user and the host of this process, as "USER@HOST"."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        user = str(os.geteuid())
    return f"{user}@{socket.gethostname()}"
