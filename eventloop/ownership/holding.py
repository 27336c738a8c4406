"""Renew the record of a directory's owner every few seconds, and release the directory at the end.

A `Heartbeat` does this for all directories of a run, on a thread of its own. The thread also calls functions
of the run each second. A forked child process renews and releases nothing.
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
"""Seconds between two renewals of the records, whose files get the present time."""
TICK_SECONDS = 1.0
"""Seconds between two calls of the run's functions."""
JOIN_SECONDS = 2.0
"""Seconds for which the end of a run waits for its heartbeat thread, which may hang in the file system."""


class Held:
    """A directory that a run of this process owns, or claims.

    Args:
        path: the path of the run's record in the directory; `create` creates the file.
        record: the contents of the file.
    """

    def __init__(self, path: Path, record: Record) -> None:
        self.directory, self._path, self._record = path.parent, path, record
        self._process, self._reported, self._released = os.getpid(), False, False
        self._opened: list[int] = []  # the descriptor of the directory while it is open
        self.lost = False
        """True once another run owns the directory, because this run has not renewed its record in time."""

    def create(self) -> None:
        """Create the file of the run's record in the directory, and keep the directory open.

        As long as it is open, a new directory at its path cannot get the same inode number. So a later check
        finds out whether the directory was replaced.

        Raises:
            OSError: the directory cannot be written, or no descriptor is left.
        """
        held.add(self._path.name)
        create_record(self._path, self._record)
        self._opened.append(os.open(self.directory, os.O_RDONLY))

    def beat(self) -> None:
        """Renew the record, and set `lost` if another run owns the directory now."""
        try:
            os.utime(self._path)
        except FileNotFoundError:
            self._check_file()
        except OSError as error:  # the next renewal may succeed
            logger.debug("%s: %s", self._path, error)

    def change(self, state: State) -> None:
        """Write into the record what the owner does now."""
        self._record = msgspec.structs.replace(self._record, state=state)
        try:
            write_record(self._path, self._record)
        except FileNotFoundError:
            self._check_file()
        except OSError as error:
            logger.warning("%s does not say that its run is %s: %s", self.directory, state, error)

    def release(self) -> None:
        """Release the directory by removing this run's record; later calls do nothing more."""
        if self._process != os.getpid():
            return
        # first, so that a later run of this process is not refused, even if the file cannot be removed
        held.discard(self._path.name)
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
        """Find the reason why the record is gone: set `lost`, log a rename, or create the record again.

        Args:
            ends: whether this run releases the directory, so that the record is not created again.
        """
        if any(owner.lives is not False and owner.state != "claiming" for owner in owners_in(self.directory)):
            self.lost = True
            return
        exists = self.directory.is_dir()
        is_same = exists and os.path.samestat(self.directory.stat(), os.fstat(self._opened[0]))
        if not self._reported and not is_same:
            self._reported = True
            logger.warning(
                "%s was renamed or removed while a run writes there: what the run writes from now on is in a "
                "new directory of that name, and open files stay where they are",
                self.directory,
            )
        if exists and not (ends or self._released):
            with suppress(OSError):
                create_record(self._path, self._record)


class Heartbeat:
    """Renew the records of a run in all its directories, and release these at the end.

    Args:
        directories: the directories of the run; directories may be added until the start.
        lost: called once, on the heartbeat's thread, with a directory that another run owns now.
        each_second: functions that the heartbeat's thread calls at once, each second, and a last time when
            the run ends. The first error of each is logged.
    """

    def __init__(
        self,
        directories: Sequence[Held],
        lost: Callable[[Path], object],
        each_second: Sequence[Callable[[], object]] = (),
    ) -> None:
        self._directories, self._lost, self._process = directories, lost, os.getpid()
        self._each_second, self._failed = each_second, set[int]()
        self._reported = self.ends = False  # whether `lost` was called, and whether the run is ending
        self.ended = False
        """False at all calls of the functions except the last one; True at that call and after it."""
        # states to write into the records, then None for the end; a signal handler may put one
        self._words: SimpleQueue[State | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="eventloop heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread; a run for which the system has no thread does without."""
        with suppress(RuntimeError):  # the limit of threads is reached, or the interpreter is ending
            self._thread.start()

    def ending(self) -> None:
        """Record in the directories that the run is ending; signal handlers may call this."""
        if self._process == os.getpid() and not self.ends:
            self.ends = True
            self._words.put("ending")

    def end(self) -> None:
        """End the thread and release all directories; later calls do nothing more."""
        if self._process != os.getpid():
            return
        self._words.put(None)
        try:
            if self._thread.is_alive():
                self._thread.join(JOIN_SECONDS)
        finally:  # also after a Ctrl-C
            self._release()

    def _release(self) -> None:
        for directory in self._directories:
            directory.release()

    def _run(self) -> None:
        """Renew the records until the run ends, and call the functions of each second; a thread runs this."""
        self._call_each()
        last_beat = monotonic()
        while True:
            try:
                state = self._words.get(timeout=TICK_SECONDS)
            except Empty:
                if monotonic() - last_beat >= BEAT_SECONDS:
                    last_beat = monotonic()
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
        """Call each function; log the first error of each, and go on."""
        for number, function in enumerate([*self._each_second]):
            try:
                function()
            except Exception as error:
                if number not in self._failed:
                    self._failed.add(number)
                    logger.warning("the run goes on without %s: %s", function.__qualname__, error_text(error))

    def _beat(self, directory: Held) -> None:
        """Renew the record of a directory, and report once that another run has taken it."""
        with suppress(OSError):
            directory.beat()
        if directory.lost and not self._reported:
            self._reported = True
            self._lost(directory.directory)
