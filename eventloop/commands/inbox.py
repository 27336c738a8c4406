"""Receive the commands that other processes send to a run, as files in its directory, and answer them.

The run looks every second, on a background thread. The training thread claims a command by one rename at the
moment at which it applies it, so a command is either applied or withdrawn. A claimed file is overwritten by
the answer, which needs no room on a full disk, and then moves to the outbox.
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
"""The most commands that one look reads; the next look reads others."""
WRITING_SECONDS = 2.0
"""Seconds for which a file that is no command may still be being written."""
REPORTED = 20
"""The most lines that a run logs about files that it ignores."""


class _IgnoredError(Exception):
    """Raised for a file that is not read; the text says why."""


class Inbox:
    """The commands that a run receives, and its answers.

    Args:
        directory: the directory of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._inbox, self._outbox = directory / INBOX, directory / OUTBOX
        self._done: set[str] = set()  # names of files that were handed on or ignored
        self._unread: dict[str, tuple[int, float]] = {}  # size of a file that is no command, and since when
        self._reported: set[str] = set()

    def receive(self) -> list[Command | Answer]:
        """Return the commands that arrived since the last call, in the order in which they were sent.

        A file that is no command gives the answer that refuses it. Links, files of other users, files that
        are not regular, and names that are no ids are ignored with one line in the log.
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
        for name in self._unread.keys() - names:
            del self._unread[name]
        new = [name for name in sorted(names) if name.endswith(SENT) and name not in self._done]
        return [*self._commands(new[:AT_ONCE])]

    def return_claimed(self, answers: Mapping[str, Answer]) -> None:
        """Put the commands that a killed run of the directory has claimed among those that were sent.

        Answers that it has written are moved to the outbox.

        Args:
            answers: the answers to commands that it has recorded, by id; such a command is answered.
        """
        with suppress(OSError):
            for name in os.listdir(self._inbox):
                stem = name.removesuffix(CLAIMED)
                if name != stem and is_id(stem) and (raw := self._read(name)) is not None:
                    with suppress(OSError):
                        self._return(stem, raw, answers.get(stem))

    def remove_old(self, seconds: float) -> None:
        """Remove answers that have not been fetched for so long, and what killed senders have left."""
        for folder in (self._inbox, self._outbox):
            with suppress(OSError):
                old = [name for name in os.listdir(folder) if _is_left(folder.name, name)]
                before = directory_time(folder) - seconds if old else 0.0
                for name in old:
                    if os.lstat(folder / name).st_mtime < before:
                        os.unlink(folder / name)

    def claim(self, name: str) -> bool:
        """Claim a command by its id, so that its sender cannot withdraw it; False if it was withdrawn."""
        sent = self._inbox / (name + SENT)
        try:
            os.rename(sent, self._inbox / (name + CLAIMED))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._report(sent, f"it cannot be renamed: {error}")
            return False
        return True

    def answer(self, answer: Answer) -> None:
        """Answer a claimed command; an answer for which the disk has no room is shortened.

        Raises:
            FileNotFoundError: the file of the command was removed.
            OSError: the answer cannot be written or moved to the outbox; calling this again is right.
        """
        claimed = self._inbox / (answer.id + CLAIMED)
        descriptor = os.open(claimed, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _overwrite(descriptor, answer)
        finally:
            os.close(descriptor)
        create_private(self._outbox)
        os.replace(claimed, self._outbox / (answer.id + SENT))

    def _return(self, stem: str, raw: bytes, known: Answer | None) -> None:
        claimed = self._inbox / (stem + CLAIMED)
        try:
            decode_answer(raw, stem)
        except ValueError:
            if known is None:
                os.rename(claimed, self._inbox / (stem + SENT))
            else:
                self.answer(known)
        else:
            create_private(self._outbox)
            os.replace(claimed, self._outbox / (stem + SENT))

    def _commands(self, names: Iterable[str]) -> Iterator[Command | Answer]:
        for name in names:
            stem = name.removesuffix(SENT)
            if (raw := self._read(name)) is None:
                continue
            try:
                command: Command | Answer | None = decode_command(raw, stem)
            except ValueError as error:
                command = self._refusal(stem, len(raw), str(error))
            if command is not None:
                self._done.add(name)
                self._unread.pop(name, None)
                yield command

    def _read(self, name: str) -> bytes | None:
        """Return the contents of a file of this user, or None after one line in the log."""
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

    def _refusal(self, stem: str, size: int, reason: str) -> Answer | None:
        """Return the answer to a file that is no command; None as long as it may still be being written."""
        before, since = self._unread.get(stem + SENT, (-1, 0.0))
        if before != size:
            self._unread[stem + SENT] = size, monotonic()
        elif monotonic() - since >= WRITING_SECONDS:
            return Answer(id=stem, command="", outcome="refused", reason=reason)
        return None

    def _report(self, path: Path, why: str) -> None:
        text = str(path)
        if text in self._reported or len(self._reported) > REPORTED:
            return
        self._reported.add(text)
        more = "; further files are ignored without a line" if len(self._reported) > REPORTED else ""
        logger.warning("%s is ignored: %s%s", ascii(text)[1:-1], ascii(why)[1:-1], more)


def _is_left(folder: str, name: str) -> bool:
    """Return whether a file is an answer in the outbox, or a hidden file of a sender in the inbox."""
    end = SENT if folder == OUTBOX else HIDDEN
    return name.endswith(end) and is_id(name.removesuffix(end).lstrip("."))


def _overwrite(descriptor: int, answer: Answer) -> None:
    """Write an answer over a command, shorter if the disk is too full for all of it.

    Raises:
        OSError: it cannot be written.
    """
    full = "the disk is full, so this answer is not whole"
    short = msgspec.structs.replace(answer, result={}, warning=full)
    shortest = msgspec.structs.replace(short, reason=answer.reason[:80])
    room = os.fstat(descriptor).st_size
    for each in (answer, short, shortest):
        raw = msgspec.json.encode(each).ljust(room)
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
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise _IgnoredError("it is no regular file with one name")
    if status.st_uid not in (os.geteuid(), 0):
        raise _IgnoredError(f"it belongs to user {status.st_uid}")
    if status.st_size > LARGEST:
        raise _IgnoredError(f"it has {status.st_size:,} bytes, and a command at most {LARGEST:,}")
