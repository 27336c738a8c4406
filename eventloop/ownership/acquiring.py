"""Make a process the owner of a directory; wait for an owner that is ending, and refuse any other.

A process first claims the directory: it creates a record in state "claiming". It is the owner if it then
finds no other living run with a record there. Otherwise it removes its record, and tries again.
"""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep

from eventloop.ownership.holding import Heartbeat, Held
from eventloop.ownership.owner import Owner, Record, State, new_path, owners_in, read_owner
from eventloop.temporary.leftovers import running_saves
from eventloop.temporary.names import process_of
from eventloop.temporary.process_identity import this_process
from eventloop.util.errors import WorkDirInUseError

logger = logging.getLogger("eventloop")

ENDING_SECONDS = 120.0
"""The longest wait, in seconds, for a run that is ending, and for a save of a run that has ended."""
POLL_SECONDS = 0.2
"""Seconds between two checks of whether that run or save has ended."""
CLAIM_SECONDS = 0.05
"""The longest pause, in seconds, after another run was found to claim the directory at the same time.

The pause is random, so that one of the two runs is the first to try again.
"""
CLAIMED_SECONDS = 5.0
"""The longest wait, in seconds, for another run to become the owner, or to give up its claim."""
ANOTHER = "wait until it has ended, or end it, or give this run a directory of its own (work_dir=)"
OURS = "end that run first (trainer.close() ends a loop of your own), or give this one another work_dir"


def acquire(
    directory: Path,
    state: State,
    *,
    waits: bool = True,
    remedy: str = ANOTHER,
    acquired: list[Held] | None = None,
) -> Held:
    """Make this process the owner of a directory, which is created if it does not exist.

    Args:
        directory: the directory.
        state: what this process does there.
        waits: whether to wait for a run that is ending, or that may have died on another machine, and for a
            running save of a run that has ended. If False, such a run is refused as a living one.
        remedy: the end of the text of an error: what the user can do.
        acquired: a list to which the result is added before anything is done, so that the caller can release
            the directory even if an interrupt prevents this function from returning.

    Returns:
        The directory with its record, to be renewed by a `Heartbeat` and released at the end.

    Raises:
        WorkDirInUseError: a live run owns it. Nothing was changed.
        OSError: the directory cannot be written.
    """
    directory, acquired = directory.absolute(), [] if acquired is None else acquired
    waiting = _Waiting(waits, remedy)
    while True:
        owner = read_owner(directory)
        if owner is not None and owner.lives is not False:
            waiting.for_owner(owner)
        elif waits and (saves := running_saves(directory)):
            waiting.for_save(saves[0])
        else:
            directory.mkdir(parents=True, exist_ok=True)
            if _claim(directory, state, acquired):
                return acquired[-1]
            sleep(random.uniform(0, CLAIM_SECONDS))


def _claim(directory: Path, state: State, acquired: list[Held]) -> bool:
    """Claim a directory, and become its owner if no other living run has a record there.

    Then the records of killed runs are removed.

    Returns:
        Whether this process is the owner now; if not, the claim is withdrawn.
    """
    process = this_process()
    record = Record(
        host=socket.gethostname(),
        pid=process.pid,
        place=process.place,
        start=process.start,
        since=datetime.now().astimezone().isoformat(timespec="seconds"),
        state="claiming",
        directory=os.fsencode(os.path.realpath(directory)),
    )
    path = new_path(directory)
    claim = Held(path, record)
    acquired.append(claim)  # before the record is created, so that no interrupt leaves one unknown
    try:
        claim.create()
        others = [owner for owner in owners_in(directory) if owner.path.name != path.name]
        is_alone = all(owner.lives is False for owner in others)
        if is_alone:
            claim.change(state)
    except BaseException:
        claim.release()
        acquired.remove(claim)
        raise
    if not is_alone or claim.lost:
        claim.release()
        acquired.remove(claim)
        return False
    for owner in others:
        with suppress(OSError):
            owner.path.unlink()
    return True


def await_end(directories: list[Path]) -> None:
    """Wait for runs that are ending in any of the directories, and for saves of runs that have ended.

    After `ENDING_SECONDS` this returns all the same, because a resume, which calls it, only reads.
    """
    waiting = _Waiting(True, "")
    for directory in directories:
        while True:
            owner = read_owner(directory)
            lives = owner is not None and owner.lives is not False
            try:
                if owner is not None and lives:
                    if owner.ours or owner.state != "ending":
                        break
                    waiting.for_owner(owner)
                elif saves := running_saves(directory):
                    waiting.for_save(saves[0])
                else:
                    break
            except WorkDirInUseError:
                break


@contextmanager
def owning(directory: Path, state: State, remedy: str) -> Iterator[None]:
    """Make a context in which a command owns a directory, because it writes there.

    Args:
        directory: the directory.
        state: what the command does there.
        remedy: the end of the text of an error: what the user can do.

    Raises:
        WorkDirInUseError: a live run owns the directory.
        OSError: the directory cannot be written.
    """
    acquired: list[Held] = []
    heartbeat = Heartbeat(acquired, lambda place: logger.error("another run has taken %s meanwhile", place))
    try:
        acquire(directory, state, waits=False, remedy=remedy, acquired=acquired)
        heartbeat.start()
        yield
    finally:
        heartbeat.end()


class _Waiting:
    """Wait until a directory is free, by calls that each wait a moment, or raise an error.

    Args:
        waits, remedy: the arguments of `acquire`.
    """

    def __init__(self, waits: bool, remedy: str) -> None:
        self._waits, self._remedy = waits, remedy
        self._claims_until = monotonic() + CLAIMED_SECONDS  # until then it waits for runs that only claim
        self._until: float | None = None  # the end of the wait, from its begin on
        self._first: Owner | None = None  # the present owner, as it was found first

    def for_owner(self, owner: Owner) -> None:
        """Wait a moment for an owner that is ending, or may have died; refuse any other owner.

        Raises:
            WorkDirInUseError: the owner is alive and not ending, or the wait has taken too long.
        """
        if owner.state == "claiming" and monotonic() < self._claims_until:
            sleep(random.uniform(0, CLAIM_SECONDS))
            return
        if self._first is None or self._first.path != owner.path:
            self._first = owner
        is_alive = owner.lives or owner.touched != self._first.touched
        if not self._waits or owner.ours or (is_alive and owner.state != "ending"):
            remedy = OURS if owner.ours and self._remedy == ANOTHER else self._remedy
            raise WorkDirInUseError(f"{describe(owner)}: {remedy}")
        reason = "ends" if owner.state == "ending" else "may have died elsewhere"
        self._wait(f"{describe(owner)}. This run waits until it has ended, as it {reason}", describe(owner))

    def for_save(self, path: Path) -> None:
        """Wait a moment for a save that a process still writes for a run that has ended.

        Args:
            path: the temporary path of the save.

        Raises:
            WorkDirInUseError: the wait has taken too long.
        """
        writer = process_of(path)
        pid = 0 if writer is None else writer.pid
        text = f"process {pid} still saves {path}, for a run that has ended"
        self._wait(f"{text}. This run waits for it", text)

    def _wait(self, notice: str, refused: str) -> None:
        """Sleep for a moment; log `notice` at the begin of the wait, and raise `refused` after its end."""
        now = monotonic()
        if self._until is None:
            self._until = now + ENDING_SECONDS
            logger.warning("%s, for %.0f s at most", notice, ENDING_SECONDS)
        if now > self._until:
            raise WorkDirInUseError(f"{refused}, and has not ended in {ENDING_SECONDS:g} s: {self._remedy}")
        sleep(POLL_SECONDS)


def describe(owner: Owner) -> str:
    """Return a sentence about a living owner, with its machine, process, start and state."""
    if not owner.host:
        return f"{owner.directory} is in use by a run whose record, {owner.path}, cannot be read"
    process = f"process {owner.pid} on {owner.host}"
    if owner.ours:
        process = f"another run of this process ({owner.pid} on {owner.host})"
    return f"{owner.directory} is in use: {process} owns it since {owner.since}, and is {owner.state}"
