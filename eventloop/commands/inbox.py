"""Receive the commands that other processes send to a run, as files in its directory, and answer them.

The run reads the inbox every second, on a background thread. The training thread claims a command, by one
rename of its file, just before it applies it, so a command is either applied or withdrawn. The file is then
overwritten with the answer, which needs no space on a full disk, and moved to the outbox.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic

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
    decode_command,
    is_id,
)
from eventloop.commands.private_directory import create_private, make_private
from eventloop.temporary.names import directory_time

logger = logging.getLogger("eventloop")

AT_ONCE = 256
"""The most commands that one call of `receive` returns."""
WRITING_SECONDS = 2.0
"""Seconds for which a file that is no command must not have grown before it is refused."""
REPORTED = 20
"""The most warnings that a run logs about files that it ignores."""


class _IgnoredError(Exception):
    """Raised for a file that is not read; the text is the reason."""


class Inbox:
    """The folders of a run for commands and for answers.

    Args:
        directory: the directory of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._inbox, self._outbox = directory / INBOX, directory / OUTBOX
        self._done: set[str] = set()  # the names of files that `receive` has returned or ignored
        self._incomplete: dict[str, tuple[int, float]] = {}
        """The size of each file that is no command, and the time since which it has this size."""
        self._reported: set[str] = set()

    def receive(self) -> list[Command | Answer]:
        """Return the commands that arrived since the last call, in the order in which they were sent.

        For a file that is no command, the answer that refuses it is returned. Links, files of other users,
        files that are not regular, and files whose name is no id are ignored, with one warning each.
        """
        try:
            names = os.listdir(self._inbox)
            make_private(self._inbox)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._report(self._inbox, str(error))
            return []
        self._done.intersection_update(names)
        for name in self._incomplete.keys() - names:
            del self._incomplete[name]
        new = [name for name in sorted(names) if name.endswith(SENT) and name not in self._done]
        return [*self._commands(new[:AT_ONCE])]

    def return_claimed(self, answers: Mapping[str, Answer]) -> None:
        """Return commands that a killed run has claimed, and not applied, to the inbox.

        A command that the run has recorded is answered. Answers that the run has written are moved to the
        outbox.

        Args:
            answers: the answers to the recorded commands, by id.
        """
        with suppress(OSError):
            for name in os.listdir(self._inbox):
                command_id = name.removesuffix(CLAIMED)
                if name == command_id or not is_id(command_id):
                    continue
                if (raw := self._read(name)) is not None:
                    with suppress(OSError):
                        self._return(command_id, raw, answers.get(command_id))

    def remove_old(self, seconds: float) -> None:
        """Remove answers, and unfinished files of killed senders, that are older than so many seconds."""
        for folder in (self._inbox, self._outbox):
            with suppress(OSError):
                names = [name for name in os.listdir(folder) if _is_removable(folder.name, name)]
                oldest_kept = directory_time(folder) - seconds if names else 0.0
                for name in names:
                    if os.lstat(folder / name).st_mtime < oldest_kept:
                        os.unlink(folder / name)

    def claim(self, command_id: str) -> bool:
        """Claim a command, so that its sender cannot withdraw it; return False if it was withdrawn."""
        sent = self._inbox / (command_id + SENT)
        try:
            os.rename(sent, self._inbox / (command_id + CLAIMED))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._report(sent, f"it cannot be renamed: {error}")
            return False
        return True

    def answer(self, answer: Answer) -> None:
        """Answer a claimed command; shorten an answer for which the disk has no space.

        Raises:
            FileNotFoundError: the file of the command was removed.
            OSError: the answer cannot be written or moved to the outbox; the call may be repeated.
        """
        claimed = self._inbox / (answer.id + CLAIMED)
        descriptor = os.open(claimed, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _overwrite(descriptor, answer)
        finally:
            os.close(descriptor)
        create_private(self._outbox)
        os.replace(claimed, self._outbox / (answer.id + SENT))

    def _return(self, command_id: str, raw: bytes, answer: Answer | None) -> None:
        """Return a file that a killed run has claimed: to the outbox if it is an answer, else to the inbox.

        Args:
            raw: the contents of the file.
            answer: the answer to the command if the run has recorded it; it is then written.
        """
        claimed = self._inbox / (command_id + CLAIMED)
        try:
            decode_answer(raw, command_id)
        except ValueError:
            if answer is None:
                os.rename(claimed, self._inbox / (command_id + SENT))
            else:
                self.answer(answer)
        else:
            create_private(self._outbox)
            os.replace(claimed, self._outbox / (command_id + SENT))

    def _commands(self, names: Iterable[str]) -> Iterator[Command | Answer]:
        """Yield the command in each file, or the answer that refuses it; skip files that may still grow."""
        for name in names:
            command_id = name.removesuffix(SENT)
            if (raw := self._read(name)) is None:
                continue
            try:
                command: Command | Answer | None = decode_command(raw, command_id)
            except ValueError as error:
                command = self._refusal(command_id, len(raw), str(error))
            if command is not None:
                self._done.add(name)
                self._incomplete.pop(name, None)
                yield command

    def _read(self, name: str) -> bytes | None:
        """Return the contents of a file; None if it does not exist, or is ignored with a warning."""
        descriptor = -1
        try:
            if not is_id(os.path.splitext(name)[0]):
                raise _IgnoredError("expected a name TIME-NUMBER.json, which is the id of a command")
            descriptor = os.open(
                self._inbox / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
            _check_file(os.fstat(descriptor))
            return os.read(descriptor, LARGEST)
        except FileNotFoundError:
            return None
        except (OSError, _IgnoredError) as error:
            self._done.add(name)
            self._report(self._inbox / name, str(error))
            return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _refusal(self, command_id: str, size: int, reason: str) -> Answer | None:
        """Return the answer to a file that is no command; None if its sender may still be writing it."""
        size_before, since = self._incomplete.get(command_id + SENT, (-1, 0.0))
        if size_before != size:
            self._incomplete[command_id + SENT] = size, monotonic()
        elif monotonic() - since >= WRITING_SECONDS:
            return Answer(id=command_id, command="", outcome="refused", reason=reason)
        return None

    def _report(self, path: Path, reason: str) -> None:
        """Log a warning that a file is ignored, once for each path."""
        text = str(path)
        if text in self._reported or len(self._reported) > REPORTED:
            return
        self._reported.add(text)
        more = "; further files are ignored without a line" if len(self._reported) > REPORTED else ""
        logger.warning("%s is ignored: %s%s", ascii(text)[1:-1], ascii(reason)[1:-1], more)


def _is_removable(folder: str, name: str) -> bool:
    """Return whether a file is an answer in the outbox, or a hidden file of a sender in the inbox."""
    suffix = SENT if folder == OUTBOX else HIDDEN
    return name.endswith(suffix) and is_id(name.removesuffix(suffix).lstrip("."))


def _overwrite(descriptor: int, answer: Answer) -> None:
    """Write an answer over a command; if the disk is full, write a shorter answer with a warning.

    Raises:
        OSError: not even the shortest answer can be written.
    """
    warning = "the disk is full, so this answer is not whole"
    short = msgspec.structs.replace(answer, result={}, warning=warning)
    shortest = msgspec.structs.replace(short, reason=answer.reason[:80])
    size_of_command = os.fstat(descriptor).st_size
    for each in (answer, short, shortest):
        raw = msgspec.json.encode(each).ljust(size_of_command)
        try:
            written = os.pwrite(descriptor, raw, 0)
        except OSError as error:
            failure: OSError | None = error
        else:
            if written == len(raw):
                os.ftruncate(descriptor, written)
                return
            failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if failure is not None:
        raise failure


def _check_file(status: os.stat_result) -> None:
    """Raise an error for a file that is not regular, of another user, or too large."""
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise _IgnoredError("it is no regular file with one name")
    if status.st_uid not in (os.geteuid(), 0):
        raise _IgnoredError(f"it belongs to user {status.st_uid}")
    if status.st_size > LARGEST:
        raise _IgnoredError(f"it has {status.st_size:,} bytes, and a command at most {LARGEST:,}")
