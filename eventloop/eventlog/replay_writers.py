"""Write the events of a log with writers, for a replay and for the delivery of undelivered events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from eventloop.eventlog.format import EventRecord
from eventloop.eventlog.reader import EventReader
from eventloop.eventlog.sinks import Sink, TimedSink
from eventloop.events import Event
from eventloop.events.catalogue import find_event, several
from eventloop.events.deferred import Timed
from eventloop.events.run import Run
from eventloop.ownership.acquiring import owning
from eventloop.registry import WRITERS

REMEDY = "wait until it has ended, or choose another folder (--out DIR, work_dir=)"
"""The end of the error that is raised if a live run owns the directory of the writers."""


def into_writers(
    reader: EventReader,
    writers: list[Sink],
    work_dir: Path,
    closing: ExitStack,
    on_written: Callable[[int], None] = lambda sequence: None,
) -> tuple[int, int]:
    """Open writers, write the events of a log with them, and flush them.

    Args:
        reader: the reader of the log.
        writers: the writers.
        work_dir: the directory for the writers' files.
        closing: when the caller closes it, the writers are closed and `work_dir` is released.
        on_written: called after each write, with the sequence number of the last written event.

    Returns:
        the number of events that were written, and of events that no writer receives.

    Raises:
        WorkDirInUseError: a live run owns `work_dir`.
    """
    types_by_writer = [_types_of(writer) for writer in writers]
    all_received = None in types_by_writer
    received_types = {event_type for types in types_by_writer for event_type in types or ()}
    written = not_received = 0
    is_open = False
    for records in reader.blocks():
        events = [record.event for record in records]
        if not is_open:
            _open(writers, _facts(reader.run, events, work_dir), work_dir, closing)
            is_open = True
        for writer, types in zip(writers, types_by_writer, strict=True):
            own_records = [r for r in records if types is None or type(r.event) in types]
            _write_all(writer, own_records, on_written)
        count = len(events) if all_received else sum(type(event) in received_types for event in events)
        written += count
        not_received += len(events) - count
    if is_open:
        for writer in writers:
            writer.flush()
    return written, not_received


def _open(writers: list[Sink], facts: Run, work_dir: Path, closing: ExitStack) -> None:
    """Acquire the directory of the writers and open them; `closing` reverses both."""
    if _writes_files(writers):
        closing.enter_context(owning(work_dir, "replaying", REMEDY))
    work_dir.mkdir(parents=True, exist_ok=True)
    for writer in writers:
        closing.callback(writer.close)
        writer.open(facts)


def _writes_files(writers: list[Sink]) -> bool:
    """Return whether any of the writers is not a console writer, and so may write files."""
    console: Any = WRITERS.find("ConsoleWriter")
    return not all(isinstance(writer, console) for writer in writers)


def _types_of(writer: Sink) -> frozenset[type[Event]] | None:
    """Return the event types that a writer receives; None for every type."""
    events = several(writer.events)
    return None if "*" in events else frozenset(find_event(event) for event in events)


def _write_all(writer: Sink, records: list[EventRecord[Event]], on_written: Callable[[int], None]) -> None:
    """Write records with a writer, in batches of the size that the writer declares."""
    batch_size = max(1, len(records)) if writer.batch is True else writer.batch or 1
    timed_writer = writer if isinstance(writer, TimedSink) and writer.takes_times else None
    for start in range(0, len(records), batch_size):
        batch = records[start : start + batch_size]
        if timed_writer is not None:
            timed_writer.write_timed([Timed(record.time, record.event) for record in batch])
        elif writer.batch:
            writer.write_batch([record.event for record in batch])
        else:
            writer.write(batch[0].event)
        on_written(batch[-1].sequence)


def _facts(run: Run | None, events: list[Event], work_dir: Path) -> Run:
    """Return the facts of a run for the writers of a replay, whose directory is `work_dir`.

    If the log has no facts, only the limits of the run are known, from its first event.
    """
    if run is not None:
        return msgspec.structs.replace(run, work_dir=str(work_dir), trainer_id="")
    first_event = events[0]
    return Run(
        work_dir=str(work_dir),
        max_iters=getattr(first_event, "max_iters", None),
        max_epochs=getattr(first_event, "max_epochs", None),
    )
