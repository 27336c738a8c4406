"""Acquire a directory without a live owner; wait for an owner that ends, and refuse during any other run."""

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
"""The longest wait for a run that is ending, and for a save of one that has ended."""
POLL_SECONDS = 0.2
CLAIM_SECONDS = 0.05
"""The longest pause of a run that found another one that claims the directory, too."""
CLAIMED_SECONDS = 5.0
"""The longest wait for a run that claims the directory, and then is its owner or not."""
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
        waits: whether to wait for a run that is ending, or may have died elsewhere, and for a save of a run
            that has ended. Without it, such a run counts as living.
        remedy: the end of an error's text: what the user can do.
        acquired: a list that gets the result before anything is done, for a caller that an interrupt may keep
            from getting it.

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
    """Claim a directory, and own it if no other run has claimed it too; return whether it is owned.

    The files of runs that were killed are removed.
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
    acquired.append(claim)  # before it has an effect
    try:
        claim.create()
        others = [owner for owner in owners_in(directory) if owner.path.name != path.name]
        alone = all(owner.lives is False for owner in others)
        if alone:
            claim.change(state)
    except BaseException:
        claim.release()
        acquired.remove(claim)
        raise
    if not alone or claim.lost:
        claim.release()
        acquired.remove(claim)
        return False
    for owner in others:
        with suppress(OSError):
            owner.path.unlink()
    return True


def await_end(directories: list[Path]) -> None:
    """Wait for runs that are ending in any of the directories, and for saves of runs that have ended.

    After `ENDING_SECONDS` this returns as well, because a resume only reads.
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
    """Own a directory within the block, for a command that writes there.

    Raises:
        WorkDirInUseError: a live run owns it.
        OSError: it cannot be written.
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
    """The wait for one directory: it ends with an error, or because there is nothing left to wait for."""

    def __init__(self, waits: bool, remedy: str) -> None:
        self._waits, self._remedy = waits, remedy
        self._claimed = monotonic() + CLAIMED_SECONDS
        self._until: float | None = None
        self._first: Owner | None = None

    def for_owner(self, owner: Owner) -> None:
        """Wait a moment for an owner that is ending or may have died; refuse if it is neither."""
        if owner.state == "claiming" and monotonic() < self._claimed:
            sleep(random.uniform(0, CLAIM_SECONDS))
            return
        if self._first is None or self._first.path != owner.path:
            self._first = owner
        living = owner.lives or owner.touched != self._first.touched
        if not self._waits or owner.ours or (living and owner.state != "ending"):
            remedy = OURS if owner.ours and self._remedy == ANOTHER else self._remedy
            raise WorkDirInUseError(f"{describe(owner)}: {remedy}")
        what = "ends" if owner.state == "ending" else "may have died elsewhere"
        self._wait(f"{describe(owner)}. This run waits until it has ended, as it {what}", describe(owner))

    def for_save(self, path: Path) -> None:
        """Wait a moment for the save of a run that has ended."""
        writer = process_of(path)
        pid = 0 if writer is None else writer.pid
        text = f"process {pid} still saves {path}, for a run that has ended"
        self._wait(f"{text}. This run waits for it", text)

    def _wait(self, notice: str, refused: str) -> None:
        now = monotonic()
        if self._until is None:
            self._until = now + ENDING_SECONDS
            logger.warning("%s, for %.0f s at most", notice, ENDING_SECONDS)
        if now > self._until:
            raise WorkDirInUseError(f"{refused}, and has not ended in {ENDING_SECONDS:g} s: {self._remedy}")
        sleep(POLL_SECONDS)


def describe(owner: Owner) -> str:
    """Return a sentence about a living owner: where and since when it does what."""
    if not owner.host:
        return f"{owner.directory} is in use by a run whose record, {owner.path}, cannot be read"
    who = f"process {owner.pid} on {owner.host}"
    if owner.ours:
        who = f"another run of this process ({owner.pid} on {owner.host})"
    return f"{owner.directory} is in use: {who} owns it since {owner.since}, and is {owner.state}"
