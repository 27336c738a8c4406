"""Show every few seconds that the owner of a directory lives, and give the directory back.

A `Heartbeat` serves all directories of a run, on a thread of its own, which also does what the run does each
second. A forked child neither gives signs of life nor gives anything back.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic

import msgspec

from eventloop.ownership.owner import Record, State, create_record, held, owners_in, write_record
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

BEAT_SECONDS = 5.0
"""Seconds between two signs of life."""
TICK_SECONDS = 1.0
"""Seconds between two calls of the functions that the run has given."""
JOIN_SECONDS = 2.0
"""Seconds that the end of a run waits for a heartbeat that hangs in the file system."""


class Held:
    """A directory that a run of this process owns.

    Args:
        path: the file of its record, which `create` makes.
        record: what the file says.
    """

    def __init__(self, path: Path, record: Record) -> None:
        self.directory, self._path, self._record = path.parent, path, record
        self._process, self._reported, self._released = os.getpid(), False, False
        self._opened: list[int] = []  # the descriptor of the directory
        self.lost = False
        """True once another run has taken the directory, because this one was silent for too long."""

    def create(self) -> None:
        """Create the file, and keep the directory open.

        A directory that is made again then does not get the same inode number.

        Raises:
            OSError: the directory cannot be written, or no descriptor is left.
        """
        held.add(self._path.name)
        create_record(self._path, self._record)
        self._opened.append(os.open(self.directory, os.O_RDONLY))

    def beat(self) -> None:
        """Show that the owner lives, and find out whether another run has taken the directory."""
        try:
            os.utime(self._path)
        except FileNotFoundError:
            self._check_file()
        except OSError as error:  # of a file system that will be well again, or will not
            logger.debug("%s: %s", self._path, error)

    def change(self, state: State) -> None:
        """Write into the file what the owner does now."""
        self._record = msgspec.structs.replace(self._record, state=state)
        try:
            write_record(self._path, self._record)
        except FileNotFoundError:
            self._check_file()
        except OSError as error:
            logger.warning("%s does not say that its run is %s: %s", self.directory, state, error)

    def release(self) -> None:
        """Give the directory back; the file of another owner is not touched. It may be called again."""
        if self._process != os.getpid():
            return
        held.discard(self._path.name)  # first: whatever fails now, no later run of this process is refused
        try:
            if not self._released:
                self._path.unlink()
        except FileNotFoundError:
            if self._opened:
                with suppress(OSError):
                    self._check_file(ends=True)
        except OSError as error:
            logger.warning("%s was not removed, though its run has ended: %s", self._path, error)
        self._released = True
        while self._opened:
            os.close(self._opened.pop())

    def _check_file(self, *, ends: bool = False) -> None:
        """Check why the file is gone; write it again unless another run has the directory or ours ends."""
        if any(owner.lives is not False and owner.state != "claiming" for owner in owners_in(self.directory)):
            self.lost = True
            return
        is_there = self.directory.is_dir()
        same = is_there and os.path.samestat(self.directory.stat(), os.fstat(self._opened[0]))
        if not self._reported and not same:
            self._reported = True
            logger.warning(
                "%s was renamed or removed while a run writes there: what the run writes from now on is in a "
                "new directory of that name, and open files stay where they are",
                self.directory,
            )
        if is_there and not (ends or self._released):
            with suppress(OSError):
                create_record(self._path, self._record)


class Heartbeat:
    """The signs of life of a run in all its directories, and its end there.

    Args:
        directories: the directories of the run.
        lost: called once, on the heartbeat's thread, with the directory that another run has taken.
        each_second: functions that are called on the heartbeat's thread at once, each second, and a last time
            when the run ends. The first error of each is logged.
    """

    def __init__(
        self,
        directories: Sequence[Held],
        lost: Callable[[Path], object],
        each_second: Sequence[Callable[[], object]] = (),
    ) -> None:
        self._directories, self._lost, self._process = directories, lost, os.getpid()
        self._each_second, self._failed = each_second, set[int]()
        self._reported = self.ends = False
        self.ended = False
        """True from the last call of the functions on, and at no call before it."""
        self._words: SimpleQueue[State | None] = SimpleQueue()  # a signal handler may put into it
        self._thread = threading.Thread(target=self._run, name="eventloop heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to give signs of life, if the system has a thread for it."""
        with suppress(RuntimeError):  # there are no more threads, or the interpreter ends
            self._thread.start()

    def ending(self) -> None:
        """Record for runs that wait for the directories that this one ends; signal handlers may call this."""
        if self._process == os.getpid() and not self.ends:
            self.ends = True
            self._words.put("ending")

    def end(self) -> None:
        """Give all directories back; it may be called again."""
        if self._process != os.getpid():
            return
        self._words.put(None)
        try:
            if self._thread.is_alive():
                self._thread.join(JOIN_SECONDS)
        finally:  # also after a Ctrl-C
            self._give_back()

    def _give_back(self) -> None:
        for directory in self._directories:
            directory.release()

    def _run(self) -> None:
        self._call_each()
        beaten = monotonic()
        while True:
            try:
                state = self._words.get(timeout=TICK_SECONDS)
            except Empty:
                if monotonic() - beaten >= BEAT_SECONDS:
                    beaten = monotonic()
                    for directory in self._directories:
                        self._beat(directory)
                self._call_each()
                continue
            if state is not None:
                for directory in self._directories:
                    with suppress(OSError):
                        directory.change(state)
            self.ended = state is None
            self._call_each()
            if self.ended:
                return

    def _call_each(self) -> None:
        for number, function in enumerate([*self._each_second]):
            try:
                function()
            except Exception as error:
                if number not in self._failed:
                    self._failed.add(number)
                    logger.warning("the run goes on without %s: %s", function.__qualname__, error_text(error))

    def _beat(self, directory: Held) -> None:
        with suppress(OSError):
            directory.beat()
        if directory.lost and not self._reported:
            self._reported = True
            self._lost(directory.directory)
