"""Keep the events that were undelivered at the end of a run, and deliver them later.

    eventloop replay runs/digits          # delivers the events in runs/digits/undelivered

Each subscriber that was not ready in time has its own event log in the folder `undelivered` of the run. A
writer's log is accompanied by a JSON file with the writer's class and arguments. In Python, `replay(log,
onto)` delivers such a log to a bus or to any writer. A subscriber may receive the event that it was handling
at the end a second time. If an interrupt or an error of the writer ends a delivery, the next one continues
it; after a kill, the next one repeats it.
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
from eventloop.eventlog.replay import ReplayReport, into_writers, report_of
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


class Recipe(msgspec.Struct, frozen=True):
    """The subscriber of a log, and the class and arguments with which its writer can be created again."""

    name: str
    writer: str = ""
    """The registered class name; "" if the subscriber is not a writer, or has arguments that JSON cannot
    hold.
    """
    module: str = ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    """The keyword arguments; without `secret_arguments`, which the writer takes from the environment."""
    delivered: int = 0
    """The number of events at the start of the log that have been delivered."""


def store_undelivered(bus: Bus, facts: CurrentRun, writers: list[Any]) -> None:
    """Make `bus` write the events that its close leaves undelivered to the folder `undelivered`.

    Args:
        bus: the bus.
        facts: the facts of the run, with its directory.
        writers: the writers of the run, whose classes and arguments are stored next to their events.
    """
    if facts.run.rank == 0:
        set_aside(Path(facts.run.work_dir))
    bus.on_undelivered(_Undelivered(facts, writers).store, f"eventloop replay {quote(facts.run.work_dir)}")


class _Undelivered:
    def __init__(self, facts: CurrentRun, writers: list[Any]) -> None:
        self._facts = facts
        self._writers = writers
        self._logs: set[str] = set()

    def store(self, name: str, events: Iterable[Event]) -> bool:
        """Write the events of the subscriber `name`, after the class and arguments of its writer.

        Return whether the command can make that writer again, and deliver them.

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
        stem = f"rank{rank}_" * bool(rank) + re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        while stem in self._logs:
            stem += "_"
        self._logs.add(stem)
        return stem

    def _recipe(self, name: str) -> Recipe:
        for writer in self._writers:
            cls = type(writer)
            if name == (writer.name or cls.__name__) and WRITERS.find(cls.__name__) is cls:
                made, _ = writer.worker_recipe()
                with suppress(TypeError, ValueError):
                    args, kwargs = _open_arguments(made, cls.secret_arguments)
                    plain = msgspec.json.decode(msgspec.json.encode([args, kwargs], enc_hook=_plain_value))
                    return Recipe(name, cls.__name__, cls.__module__, *plain)
        return Recipe(name)


def set_aside(work_dir: Path) -> None:
    """Rename the folder of a former run, because writers are about to continue the same files."""
    folder = work_dir / FOLDER
    if not folder.is_dir():
        return
    number = 1
    while (aside := work_dir / f"{FOLDER}_{number}").exists():
        number += 1
    try:
        folder.rename(aside)
    except OSError as error:
        logger.error("%s holds events of a former run and cannot be renamed: %s", folder, error)
        return
    logger.warning(
        "%s holds events that the run before did not deliver to its subscribers. This run writes to the same "
        "files, so `eventloop replay %s --to WRITER` now writes each log to a folder of its own",
        aside,
        aside / "NAME.evl",
    )


class UndeliveredLog(NamedTuple):
    """The log of one subscriber, with its writer; None if the writer cannot be created again."""

    log: Path
    recipe: Recipe
    writer: Sink | None


def find_undelivered(work_dir: Path) -> list[UndeliveredLog]:
    """Return the event logs in a run's folder `undelivered`, each with its writer.

    Raises:
        ValueError: a writer's class is unknown, or refuses its arguments.
    """
    found = []
    for log in sorted((work_dir / FOLDER).glob("*.evl")):
        try:
            recipe = msgspec.json.decode(log.with_suffix(".json").read_bytes(), type=Recipe)
        except (OSError, msgspec.MsgspecError):
            recipe = Recipe(log.stem)
        found.append(UndeliveredLog(log, recipe, _made_again(log, recipe) if recipe.writer else None))
    return found


class Delivery:
    """The delivery of a log to its writer, which continues its files in the run's directory.

    If it is interrupted or the writer fails, the next delivery continues after the events that were
    delivered. Their number is stored once the writer is closed, because until then it may hold events back;
    so after a kill the next delivery repeats this one.

    Args:
        undelivered: the log, with its writer.
        work_dir: the run's directory.
        progress: called after each write, with the delivery.

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
        """The numbers of events that were written, and that the next delivery leaves out."""
        blocks = EventReader(undelivered.log, on_torn="ignore").blocks()
        self.total = max((block[-1].sequence + 1 for block in blocks), default=0)
        """The number of events in the log, with those that were delivered."""

    def run(self) -> ReplayReport:
        """Deliver the events that are left, and remove the log.

        Raises:
            WorkDirInUseError: a live run owns the directory.
            BaseException: an interrupt, or any error of the writer; then the log is kept.
        """
        reader, closing = _Rest(self._log, self.stored), ExitStack()
        try:
            counts = into_writers(reader, [self._writer], self._work_dir, closing, self._record_written)
        except WorkDirInUseError:  # nothing has been written
            raise
        except BaseException as error:
            self._stop(closing, error)
            raise
        closing.close()
        for path in (self._log, self._log.with_suffix(".json")):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # others are left in it
            self._log.parent.rmdir()
        return report_of(reader, [self._writer], *counts)

    def _record_written(self, sequence: int) -> None:
        self.written = sequence + 1
        self._progress(self)

    def _stop(self, closing: ExitStack, error: BaseException) -> None:
        """Close the writer after an error or a signal, and store how many events were delivered."""
        try:
            with closing:
                if self.written > self.stored:
                    self._writer.flush()
            if not isinstance(error, UnavailableError):  # which says that events written before are lost
                _write_recipe(self._log, msgspec.structs.replace(self._recipe, delivered=self.written))
                self.stored = self.written
        except Exception as another:
            logger.error(
                "%s: all events of this delivery will be delivered again, because the writer did not close: "
                "%s",
                self._recipe.name,
                error_text(another),
            )


class _Rest(EventReader):
    """A reader of the events of a kept log after the first `delivered` ones."""

    def __init__(self, log: Path, delivered: int) -> None:
        super().__init__(log, on_torn="ignore")
        self._delivered = delivered

    def blocks(self) -> Iterator[list[EventRecord[Event]]]:
        for records in super().blocks():
            before = sum(record.sequence < self._delivered for record in records)
            if self.run is not None and before:
                # a writer removes its records after `start_iter`, but no delivered one may be removed
                steps = [step_of(record.event) for record in records[:before]]
                start = max(self.run.start_iter, *steps)
                self.run = msgspec.structs.replace(self.run, start_iter=start)
            if before < len(records):
                yield records[before:]


def _made_again(log: Path, recipe: Recipe) -> Sink:
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
        made: Sink = cls(*recipe.args, **recipe.kwargs)
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(f"{log}: {recipe.writer} cannot be made again: {error}") from error
    return made


def _open_arguments(
    made: Callable[..., object], secret: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a writer was made, without the secret ones, however they were given."""
    if not isinstance(made, partial):
        return (), {}
    bound = inspect.signature(made.func).bind(*made.args, **made.keywords)
    for name in secret:
        bound.arguments.pop(name, None)
    return bound.args, bound.kwargs


def _write_recipe(log: Path, recipe: Recipe) -> None:
    with replacing(log.with_suffix(".json")) as file:
        file.write(msgspec.json.format(msgspec.json.encode(recipe), indent=1) + b"\n")


def _write(path: Path, run: Run, events: Iterable[Event]) -> None:
    """Write a log of the events; log those that cannot be encoded."""
    encode = msgspec.msgpack.Encoder(enc_hook=_plain_value).encode
    count, refused = 0, set()
    with replacing(path) as file:
        for event in events:
            if not count:
                # as after the death of a worker process: a writer removes its records from this step on
                start = max(run.start_iter, step_of(event))
                facts = msgspec.structs.replace(run, start_iter=start)
                file.write(HEADER + _record(_encoded(encode, (RUN_TAG, 0, time.time(), run.rank, facts))))
            kind = event_name(type(event))
            try:
                file.write(_record(_encoded(encode, (kind, count, time.time(), run.rank, event))))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                refused.add(f"{kind} ({error})")
            else:
                count += 1
    for text in sorted(refused):
        logger.error("%s: events %s cannot be encoded, and are lost", path, text)


def _encoded(encode: Callable[[Any], bytes], record: tuple[Any, ...]) -> bytes:
    try:
        return encode(record)
    except UnicodeEncodeError:  # a path need not be UTF-8
        *head, event = record
        return encode((*head, without_surrogates(msgspec.to_builtins(event, enc_hook=_plain_value))))


def _record(payload: bytes) -> bytes:
    return pack(payload) + payload


def _plain_value(value: Any) -> Any:
    """Convert a NumPy scalar to a number, or a path to a text."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if callable(item := getattr(value, "item", None)) and not getattr(value, "ndim", 0):
        return item()
    raise TypeError(f"{type(value).__name__} is no plain value")
