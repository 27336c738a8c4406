"""Deliver the events that were not delivered at the end of a run, which `undelivered` has stored.

    eventloop replay runs/digits          # delivers the events in runs/digits/undelivered

In Python, `replay(log, onto)` delivers such a log to a bus or to any writer. The event that a subscriber was
handling at the end of the run is delivered again. If an interrupt or an error of the writer ends a delivery,
the next delivery continues after the last delivered event. After a kill, the next delivery begins again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from eventloop.eventlog.format import EventRecord
from eventloop.eventlog.reader import EventReader
from eventloop.eventlog.replay import ReplayReport, report_of
from eventloop.eventlog.replay_writers import into_writers
from eventloop.eventlog.sinks import Sink
from eventloop.eventlog.undelivered import FOLDER, Recipe, write_recipe
from eventloop.events import Event
from eventloop.events.base import step_of
from eventloop.registry import WRITERS
from eventloop.util.errors import WorkDirInUseError
from eventloop.util.suggest import suggest
from eventloop.util.text import UnavailableError, error_text

logger = logging.getLogger("eventloop")


class UndeliveredLog(NamedTuple):
    """The log with the undelivered events of one subscriber."""

    log: Path
    recipe: Recipe
    writer: Sink | None
    """The subscriber, created again; None if it was no writer, or cannot be created again."""


def find_undelivered(work_dir: Path) -> list[UndeliveredLog]:
    """Return the event logs in a run's folder `undelivered`, each with its writer.

    Raises:
        ValueError: the class of a writer is unknown, or refuses its arguments.
    """
    undelivered = []
    for log in sorted((work_dir / FOLDER).glob("*.evl")):
        try:
            recipe = msgspec.json.decode(log.with_suffix(".json").read_bytes(), type=Recipe)
        except (OSError, msgspec.MsgspecError):
            recipe = Recipe(log.stem)
        writer = _create_writer(log, recipe) if recipe.writer else None
        undelivered.append(UndeliveredLog(log, recipe, writer))
    return undelivered


class Delivery:
    """Deliver a log to its writer, which continues its files in the run's directory.

    If the delivery is interrupted or the writer fails, the next delivery continues after the events that were
    delivered. Their number is stored when the writer is closed, because until then the writer may have them
    only in a buffer. After a kill, the next delivery therefore begins again.

    Args:
        undelivered: the log, with its writer.
        work_dir: the run's directory.
        progress: called with this object after each write.

    Raises:
        OSError, EventLogError: the log cannot be read.
    """

    def __init__(
        self, undelivered: UndeliveredLog, work_dir: Path, progress: Callable[[Delivery], None]
    ) -> None:
        assert undelivered.writer is not None
        self._log, self._recipe, self._writer = undelivered.log, undelivered.recipe, undelivered.writer
        self._work_dir, self._progress = work_dir, progress
        self.written = self.stored = undelivered.recipe.delivered
        """The number of events that were written, and of those that the next delivery would leave out."""
        blocks = EventReader(undelivered.log, on_torn="ignore").blocks()
        self.total = max((block[-1].sequence + 1 for block in blocks), default=0)
        """The number of events in the log, including those that were delivered."""

    def run(self) -> ReplayReport:
        """Deliver the events that were not delivered yet, and remove the log.

        Raises:
            WorkDirInUseError: a live run owns the directory.
            BaseException: an interrupt, or any error of the writer; the log is not removed then.
        """
        reader, closing = _RemainingReader(self._log, self.stored), ExitStack()
        try:
            counts = into_writers(reader, [self._writer], self._work_dir, closing, self._record_written)
        except WorkDirInUseError:  # the writer was not opened
            raise
        except BaseException as error:
            self._stop(closing, error)
            raise
        closing.close()
        for path in (self._log, self._log.with_suffix(".json")):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder has logs of other subscribers
            self._log.parent.rmdir()
        return report_of(reader, [self._writer], *counts)

    def _record_written(self, sequence: int) -> None:
        """Record that all events up to the one with this sequence number were written."""
        self.written = sequence + 1
        self._progress(self)

    def _stop(self, closing: ExitStack, error: BaseException) -> None:
        """Close the writer after an error or a signal, and store how many events were delivered."""
        try:
            with closing:
                if self.written > self.stored:
                    self._writer.flush()
            # after an UnavailableError, the tracker may not have the events that were written before
            if not isinstance(error, UnavailableError):
                write_recipe(self._log, msgspec.structs.replace(self._recipe, delivered=self.written))
                self.stored = self.written
        except Exception as close_error:
            logger.error(
                "%s: all events of this delivery will be delivered again, because the writer did not close: "
                "%s",
                self._recipe.name,
                error_text(close_error),
            )


class _RemainingReader(EventReader):
    """Read the events of a log after the first `delivered` ones."""

    def __init__(self, log: Path, delivered: int) -> None:
        super().__init__(log, on_torn="ignore")
        self._delivered = delivered

    def blocks(self) -> Iterator[list[EventRecord[Event]]]:
        """Yield the remaining records in lists, and set `run.start_iter` to the last delivered step."""
        for records in super().blocks():
            skipped = sum(record.sequence < self._delivered for record in records)
            if self.run is not None and skipped:
                # a writer removes the rows after `start_iter`, but must not remove those of delivered events
                delivered_steps = [step_of(record.event) for record in records[:skipped]]
                start = max(self.run.start_iter, *delivered_steps)
                self.run = msgspec.structs.replace(self.run, start_iter=start)
            if skipped < len(records):
                yield records[skipped:]


def _create_writer(log: Path, recipe: Recipe) -> Sink:
    """Create the writer that a recipe describes; raise ValueError if that is impossible."""
    cls = WRITERS.find(recipe.writer)
    if cls is None:
        remedy = f"add --import {recipe.module}"
        if recipe.module == "__main__":
            remedy = (
                "its class is in the training script: move it to a module and add --import MODULE, or call "
                "eventloop.replay(log, writer) in Python"
            )
        raise ValueError(
            f"{log} is for the writer {recipe.writer}, which is not registered"
            f"{suggest(recipe.writer, WRITERS.names())}: {remedy}"
        )
    try:
        writer: Sink = cls(*recipe.args, **recipe.kwargs)
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(f"{log}: {recipe.writer} cannot be made again: {error}") from error
    return writer
