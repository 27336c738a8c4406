"""Store the events that were not delivered at the end of a run, so that `redelivery` can deliver them later.

Each subscriber with undelivered events has its own event log in the folder `undelivered` of the run. A JSON
file with the same name has the class and arguments of a writer.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from eventloop.bus import Bus
from eventloop.eventlog.format import HEADER, RUN_TAG, pack
from eventloop.events import Event
from eventloop.events.base import event_name, step_of
from eventloop.events.run import CurrentRun, Run
from eventloop.registry import WRITERS
from eventloop.util.append_file import replacing
from eventloop.util.surrogates import without_surrogates

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
    """Store the undelivered events of a run, in one log for each subscriber."""

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
        write_recipe(log, recipe)
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
                    encoded = msgspec.json.encode([args, kwargs], enc_hook=_plain_value)
                    return Recipe(name, cls.__name__, cls.__module__, *msgspec.json.decode(encoded))
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


def write_recipe(log: Path, recipe: Recipe) -> None:
    """Store the recipe of a log next to it."""
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
        for position, event in enumerate(events):
            if position == 0:
                # a writer that continues a file removes the rows after `start_iter`: with the step of the
                # first undelivered event, it keeps the rows of all events that were delivered
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
