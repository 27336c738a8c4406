"""Store the events that were not delivered at the end of a run, and deliver them later.

    eventloop replay runs/digits          # delivers the events in runs/digits/undelivered

Each subscriber with undelivered events has its own event log in the folder `undelivered` of the run. A
JSON file with the same name has the class and arguments of a writer. In Python, `replay(log, onto)` delivers
such a log to a bus or to any writer. The event that a subscriber was handling at the end is delivered again.
If an interrupt or an error of the writer ends a delivery, the next delivery continues after it. After a kill,
the next delivery begins again.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import msgspec

from eventloop.bus import Bus
from eventloop.eventlog.format import HEADER, RUN_TAG, EventRecord, pack
from eventloop.eventlog.reader import EventReader
from eventloop.eventlog.replay import ReplayReport, report_of
from eventloop.eventlog.replay_writers import into_writers
from eventloop.eventlog.sinks import Sink
from eventloop.events import Event
from eventloop.events.base import event_name, step_of
from eventloop.events.run import CurrentRun, Run
from eventloop.registry import WRITERS
from eventloop.util.append_file import replacing
from eventloop.util.errors import WorkDirInUseError
from eventloop.util.suggest import suggest
from eventloop.util.surrogates import without_surrogates
from eventloop.util.text import UnavailableError, error_text

logger = logging.getLogger("eventloop")

FOLDER = "undelivered"
"""The folder in the run's directory with the logs of undelivered events."""


class Recipe(msgspec.Struct, frozen=True):
    """The contents of the JSON file of a log: its subscriber, and how to create the writer again."""

    name: str
    """The name of the subscriber."""
    writer: str = ""
    """The registered name of the writer's class.

    It is "" if the subscriber is not a writer, or has arguments that JSON cannot represent.
    """
    module: str = ""
    """The module of the class."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    """The keyword arguments without `secret_arguments`, which the writer reads from the environment."""
    delivered: int = 0
    """The number of events at the start of the log that were delivered already."""


def store_undelivered(bus: Bus, facts: CurrentRun, writers: list[Any]) -> None:
    """Make `bus` store the events that it has not delivered when it is closed.

    A folder with such events of an earlier run is renamed.

    Args:
        bus: the bus.
        facts: the facts of the run, with its directory.
        writers: the writers of the run, whose classes and arguments are stored next to their events.
    """
    if facts.run.rank == 0:
        set_aside(Path(facts.run.work_dir))
    bus.on_undelivered(_Undelivered(facts, writers).store, f"eventloop replay {quote(facts.run.work_dir)}")


class _Undelivered:
    """Store the undelivered events of a run, with a log for each subscriber."""

    def __init__(self, facts: CurrentRun, writers: list[Any]) -> None:
        self._facts = facts
        self._writers = writers
        self._logs: set[str] = set()

    def store(self, name: str, events: Iterable[Event]) -> bool:
        """Write the undelivered events of a subscriber to a log, and its writer's class to a JSON file.

        Args:
            name: the name of the subscriber.
            events: the events.

        Returns:
            whether `eventloop replay` can create the writer again, and so deliver the events.

        Raises:
            OSError: a file cannot be written.
        """
        run, recipe = self._facts.run, self._recipe(name)
        log = Path(run.work_dir, FOLDER, f"{self._new_stem(name, run.rank)}.evl")
        log.parent.mkdir(exist_ok=True)
        _write_recipe(log, recipe)
        _write(log, run, events)
        return bool(recipe.writer) and recipe.module != "__main__"

    def _new_stem(self, name: str, rank: int) -> str:
        """Return the name of a log without its suffix, different for each subscriber."""
        prefix = f"rank{rank}_" if rank else ""
        stem = prefix + re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        while stem in self._logs:
            stem += "_"
        self._logs.add(stem)
        return stem

    def _recipe(self, name: str) -> Recipe:
        """Return the recipe of a subscriber, with its class and arguments if it is a registered writer."""
        for writer in self._writers:
            cls = type(writer)
            if name == (writer.name or cls.__name__) and WRITERS.find(cls.__name__) is cls:
                constructor, _ = writer.worker_recipe()
                with suppress(TypeError, ValueError):  # JSON cannot represent an argument
                    args, kwargs = _public_arguments(constructor, cls.secret_arguments)
                    plain = msgspec.json.decode(msgspec.json.encode([args, kwargs], enc_hook=_plain_value))
                    return Recipe(name, cls.__name__, cls.__module__, *plain)
        return Recipe(name)


def set_aside(work_dir: Path) -> None:
    """Rename the folder `undelivered` of an earlier run to `undelivered_1` or the next free number.

    Its events can no longer be appended to the earlier run's files, because a new run writes these files.
    """
    folder = work_dir / FOLDER
    if not folder.is_dir():
        return
    number = 1
    while (new_path := work_dir / f"{FOLDER}_{number}").exists():
        number += 1
    try:
        folder.rename(new_path)
    except OSError as error:
        logger.error("%s holds events of a former run and cannot be renamed: %s", folder, error)
        return
    logger.warning(
        "%s holds events that the run before did not deliver to its subscribers. This run writes to the same "
        "files, so `eventloop replay %s --to WRITER` now writes each log to a folder of its own",
        new_path,
        new_path / "NAME.evl",
    )


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
                _write_recipe(self._log, msgspec.structs.replace(self._recipe, delivered=self.written))
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
        """Yield the remaining records in lists, with a `run.start_iter` after the delivered ones."""
        for records in super().blocks():
            skipped = sum(record.sequence < self._delivered for record in records)
            if self.run is not None and skipped:
                # a writer removes the rows after `start_iter`, but must not remove those of delivered events
                steps = [step_of(record.event) for record in records[:skipped]]
                start = max(self.run.start_iter, *steps)
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


def _public_arguments(
    constructor: Callable[..., object], secret: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments in a `partial` of a writer's class.

    Args:
        constructor: the partial, or the class itself, which has no arguments.
        secret: the names of the arguments to leave out, even if they are positional.
    """
    if not isinstance(constructor, partial):
        return (), {}
    bound = inspect.signature(constructor.func).bind(*constructor.args, **constructor.keywords)
    for name in secret:
        bound.arguments.pop(name, None)
    return bound.args, bound.kwargs


def _write_recipe(log: Path, recipe: Recipe) -> None:
    with replacing(log.with_suffix(".json")) as file:
        file.write(msgspec.json.format(msgspec.json.encode(recipe), indent=1) + b"\n")


def _write(path: Path, run: Run, events: Iterable[Event]) -> None:
    """Write events to a new event log; an event that cannot be encoded is named in the Python log.

    Args:
        path: the path of the log.
        run: the facts of the run.
        events: the events.
    """
    encode = msgspec.msgpack.Encoder(enc_hook=_plain_value).encode
    count, unencodable = 0, set()
    with replacing(path) as file:
        for event in events:
            if not count:
                # a writer removes the rows after `start_iter`, which are only those of undelivered events
                start = max(run.start_iter, step_of(event))
                facts = msgspec.structs.replace(run, start_iter=start)
                file.write(HEADER + _record(_encoded(encode, (RUN_TAG, 0, time.time(), run.rank, facts))))
            name = event_name(type(event))
            try:
                file.write(_record(_encoded(encode, (name, count, time.time(), run.rank, event))))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                unencodable.add(f"{name} ({error})")
            else:
                count += 1
    for text in sorted(unencodable):
        logger.error("%s: events %s cannot be encoded, and are lost", path, text)


def _encoded(encode: Callable[[Any], bytes], record: tuple[Any, ...]) -> bytes:
    """Return a record as msgpack, with escapes for lone surrogates in texts."""
    try:
        return encode(record)
    except UnicodeEncodeError:
        *head, event = record
        return encode((*head, without_surrogates(msgspec.to_builtins(event, enc_hook=_plain_value))))


def _record(payload: bytes) -> bytes:
    """Return the frame of a payload."""
    return pack(payload) + payload


def _plain_value(value: Any) -> Any:
    """Convert a NumPy scalar to a number, or a path to a text; raise a TypeError for any other value."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if callable(item := getattr(value, "item", None)) and not getattr(value, "ndim", 0):
        return item()
    raise TypeError(f"{type(value).__name__} is no plain value")
