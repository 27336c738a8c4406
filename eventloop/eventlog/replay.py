"""Replay the event log of a run onto a bus, or directly into writers.

    from eventloop import replay

    replay("runs/digits", bus, only="scalars_logged")
    replay("runs/digits", TensorBoardWriter(), work_dir="runs/digits/again")

Handlers and writers receive the events in the order of the run, as fast as they can process them. Import all
other names from this module: `from eventloop.eventlog.replay import ReplayReport`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from time import sleep
from typing import Any

import msgspec

from eventloop.bus import Bus
from eventloop.bus.subscription import SubscriptionStats
from eventloop.eventlog.reader import EventReader, OnTorn, TornTail
from eventloop.eventlog.replay_writers import into_writers
from eventloop.eventlog.sinks import Sink, Written
from eventloop.events import Event
from eventloop.registry import WRITERS

FOLDER = "replay"
"""The folder in the run's directory for the files of writers, separate from the run's own files."""
BUS_BATCH = 256
"""The number of events between two waits for the background subscribers of a bus.

A queue with at least this capacity drops no events.
"""
POLL_SECONDS = 0.0005
"""The seconds between two checks whether the background subscribers have processed all events."""


class Loss(msgspec.Struct, frozen=True):
    """The events of a replay that a background subscriber of the bus did not process."""

    failed: int = 0
    """The number of events at which the subscriber raised an error or stalled."""
    dropped: int = 0
    """The number of events that the subscriber never received: its queue was full, or it had ended."""
    error: str = ""
    """The subscriber's last error, and whether this error ended the subscriber."""

    def __str__(self) -> str:
        """Describe the loss: the numbers of failed and dropped events, or the error if no event was lost."""
        parts = []
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.dropped:
            parts.append(f"{self.dropped:,} dropped")
        if not parts:
            return f"failed: {self.error}"
        reason = f" ({self.error})" if self.error else ""
        return f"lost {_count(self.failed + self.dropped, 'event')}: {', '.join(parts)}{reason}"


class ReplayReport(msgspec.Struct, frozen=True):
    """The counts of a log's events after a replay: replayed, left out, unreadable or lost."""

    emitted: int
    """The number of events that were emitted on the bus, or written by the writers."""
    left_out: int
    """The number of events that `only` does not name, or that no writer receives."""
    unknown: dict[str, int]
    """The events that no imported module declares: counts by name."""
    unreadable: dict[str, int]
    """The events whose fields no longer fit their class: counts by name."""
    damaged: int
    """The number of damaged bytes before the last complete record."""
    torn: TornTail | None
    """The bytes after the last complete record; None without any."""
    lost: dict[str, Loss] = {}
    """The losses of the background subscribers of the bus, by name.

    A subscriber that received all events and failed when the bus was flushed has only an `error`.
    """
    written: list[Written] = []
    """For each experiment tracker, the number of values that were new to it, and that it had already."""
    flushed: bool = True
    """Whether all subscribers finished within the bus's `drain_timeout` at the end of the replay."""
    not_taken: int = 0
    """The number of events in `left_out` that no writer receives."""

    @property
    def empty(self) -> bool:
        """Return whether the log has no events at all."""
        return not (self.emitted or self.left_out or self.unknown or self.unreadable)

    def __str__(self) -> str:
        return self.describe()

    def describe(self, into: object = "", unknown: str = "") -> str:
        """Return the report in one line.

        Args:
            into: the destination of the events, "" to leave it out.
            unknown: the advice for events of an unknown type; by default to import their module.
        """
        destination = f" into {into}" if into else ""
        lines = [f"{_count(self.emitted, 'event')} replayed{destination}"]
        if self.not_taken:
            lines.append(f"{_of_kinds(self.not_taken)} that the target does not take")
        if not_named := self.left_out - self.not_taken:
            lines.append(f"{_of_kinds(not_named)} that `only` does not name")
        if self.unknown:
            lines.append(_named("of an unknown type", self.unknown))
            lines.append(unknown or "import the module that declares them first")
        if self.unreadable:
            lines.append(_named("no longer readable", self.unreadable))
        if self.damaged:
            lines.append(
                f"{self.damaged:,} bytes in the middle of the log are damaged, and their events are lost"
            )
        if self.torn is not None:
            lines.append(f"the last {self.torn.size:,} bytes are a torn record")
        lines += map(str, self.written)
        lines += [f"{name} {loss}" for name, loss in self.lost.items()]
        if not self.flushed:
            lines.append("the bus was not flushed within its drain_timeout")
        return "; ".join(lines)


def replay(
    run: str | PathLike[str],
    onto: Bus | Sink | Sequence[Sink],
    *,
    only: str | type[Event] | Sequence[str | type[Event]] | None = None,
    on_torn: OnTorn = "warn",
    work_dir: str | PathLike[str] | None = None,
) -> ReplayReport:
    """Emit the events of a run's log on a bus, or write them with writers.

        report = replay("runs/digits", bus, only=("scalars_logged", "after_val_epoch"))
        report.emitted, report.unknown, report.torn

    On a bus, every event of the log is emitted, so that every subscriber receives it. A handler with the
    parameter `trainer` receives None for it. The replay waits for background subscribers after each 256
    events, so that no queue of that capacity overflows. It waits for a subscriber that hangs as long as its
    `stall_timeout`. The bus is flushed at the end. `report.lost` names the subscribers that did not process
    all events.

    Writers are opened, called and closed by this function, without a bus or a thread, so their errors are
    raised. They receive the facts of the run from the log.

    Args:
        run: the directory of the run, or its log.
        onto: a bus, a writer that is not attached to a bus, or several writers.
        only: names or classes of events; all others are left out.
        on_torn: what follows damaged bytes or an incomplete record at the end: "warn", "ignore" or "raise".
        work_dir: the directory for the writers' files; by default `replay` in the run's directory.

    Raises:
        FileNotFoundError: there is no run, or no log in it.
        EventLogError: the file is not an event log, has another version, or with `on_torn="raise"` is damaged
            or ends with an incomplete record.
        TypeError, ValueError: `only` has an unknown event, `onto` is neither a bus nor writers, or an option
            is wrong; the default `work_dir` is a link, or a link in it leads out of it.
        WorkDirInUseError: a live run owns `work_dir`.
        RuntimeError: the bus is closed, or was closed before it had delivered all events.
        Exception: a handler or a writer has raised an error.
    """
    writers = _check_target(onto, work_dir)
    reader = EventReader(run, only=only, on_torn=on_torn)
    if not isinstance(onto, Bus):
        target = folder_of(reader.path) if work_dir is None else Path(work_dir)
        with ExitStack() as closing:
            counts = into_writers(reader, writers, target, closing)
        return report_of(reader, writers, *counts)
    before = onto.stats()
    emitted, flushed = _onto_bus(reader, onto)
    lost = _lost_since(before, onto.stats())
    return msgspec.structs.replace(report_of(reader, [], emitted), lost=lost, flushed=flushed)


def folder_of(log: Path) -> Path:
    """Return the default folder for the files of writers, next to a log.

    Raises:
        ValueError: the folder is a symbolic link, or contains a link that leads out of it. Links that the
            libraries of writers make are allowed.
    """
    folder = log.parent / FOLDER
    resolved_folder = log.parent.resolve() / FOLDER
    for path in chain([folder], folder.rglob("*")):
        leads_out = path.is_symlink() and not path.resolve().is_relative_to(resolved_folder)
        if leads_out and not any(path.match(pattern) for pattern in _links_of_libraries()):
            raise ValueError(
                f"{path} is a link, which leads out of {folder}: remove it, or choose another folder "
                "(--out DIR, work_dir=)"
            )
    return folder


def _links_of_libraries() -> set[str]:
    """Return the patterns in `library_links` of all writers, because an earlier replay may have used them."""
    classes = map(WRITERS.find, WRITERS.names())
    return {pattern for cls in classes for pattern in getattr(cls, "library_links", ())}


def _check_target(onto: Any, work_dir: object) -> list[Sink]:
    """Check the destination of a replay; return its writers, [] for a bus."""
    if isinstance(onto, Bus):
        if onto.closed:
            raise RuntimeError("the bus is closed and delivers no more: replay onto a new one")
        if work_dir is not None:
            raise ValueError(
                "work_dir is for writers that replay opens; the writers of a bus have theirs: leave work_dir "
                "out"
            )
        return []
    writers = list(onto) if isinstance(onto, Sequence) else [onto]
    for writer in writers:
        if isinstance(writer, type) or not isinstance(writer, Sink):
            raise TypeError(f"replay drives a Bus, a writer or several writers, got {writer!r}")
        if writer.batch is not False and writer.batch < 1:
            raise ValueError(
                f"{type(writer).__name__}.batch must be True, False or at least 1 event, got {writer.batch}"
            )
    if not writers:
        raise ValueError("replay needs a bus or at least one writer, got none")
    return writers


# --- a bus ------------------------------------------------------------------------------------------------


def _onto_bus(reader: EventReader, bus: Bus) -> tuple[int, bool]:
    """Emit the events; return their number, and whether the bus was flushed within its `drain_timeout`."""
    emitted = 0
    for record in reader:
        if bus.closed:
            bus.close()  # returns once the thread that closes the bus has finished
            raise _closed(bus, emitted)
        bus.emit(record.event)
        emitted += 1
        if emitted % BUS_BATCH == 0:
            _drain(bus, emitted)
    _drain(bus, emitted)
    flushed = bus.flush().complete
    bus.poll()  # `flush` waits for the queues, and the bus learns of their last failures only by `poll`
    return emitted, flushed


def _lost_since(before: list[SubscriptionStats], after: list[SubscriptionStats]) -> dict[str, Loss]:
    """Return the loss of each subscriber between two results of `Bus.stats`, by name."""
    stats_before = {stats.name: stats for stats in before}
    lost = {}
    for stats in after:
        loss, error_before = Loss(stats.failed, stats.dropped, stats.error), ""
        if (earlier := stats_before.get(stats.name)) is not None:
            loss = Loss(stats.failed - earlier.failed, stats.dropped - earlier.dropped, stats.error)
            error_before = earlier.error
        if loss.failed or loss.dropped or loss.error != error_before:
            lost[stats.name] = loss
    return lost


def _drain(bus: Bus, emitted: int) -> None:
    """Wait until the background subscribers have processed the emitted events.

    `bus.flush` would also call `flush` of the writers, which some writers take for the end of a run. A
    subscriber that hangs cannot block this loop for ever, because the bus ends it after its `stall_timeout`.

    Args:
        bus: the bus.
        emitted: the number of events emitted so far, for the error.

    Raises:
        RuntimeError: the bus was closed before it had delivered all events.
    """
    while _undelivered(bus):
        if bus.closed:
            bus.close()  # returns once the thread that closes the bus has finished
            if _undelivered(bus):
                raise _closed(bus, emitted)
        sleep(POLL_SECONDS)
    bus.poll()


def _undelivered(bus: Bus) -> dict[str, int]:
    """Return the number of undelivered events of each subscriber that has any.

    Events that a writer has received, and that wait in it for a tracker, do not count.
    """
    counts = {stats.name: stats.queued - stats.untaken for stats in bus.stats()}
    return {name: count for name, count in counts.items() if count}


def _closed(bus: Bus, emitted: int) -> RuntimeError:
    """Return the error to raise if the bus was closed during the replay."""
    counts = ", ".join(f"{name} ({count:,})" for name, count in _undelivered(bus).items())
    return RuntimeError(
        f"the replay ends after {emitted:,} events, because the bus was closed meanwhile; not delivered: "
        f"{counts or 'none'}"
    )


def report_of(reader: EventReader, writers: list[Sink], emitted: int, not_taken: int = 0) -> ReplayReport:
    """Return the report of a replay that has ended.

    Args:
        reader: the reader of the log, with the counts of skipped events.
        writers: the writers, some of which count what was new to a tracker.
        emitted: the number of events that were emitted or written.
        not_taken: the number of events that no writer receives.
    """
    results = [getattr(writer, "written", None) for writer in writers]
    written = [result for result in results if isinstance(result, Written)]
    left_out = reader.left_out + not_taken
    counts = reader.unknown, reader.unreadable, reader.damaged, reader.torn
    return ReplayReport(emitted, left_out, *counts, written=written, not_taken=not_taken)


def _named(description: str, counts: dict[str, int]) -> str:
    """Return a text such as "5 of an unknown type: spam (3), eggs (2)", with at most 20 names."""
    names = [f"{name} ({count:,})" for name, count in islice(counts.items(), 20)]
    more = ", …" if len(counts) > len(names) else ""
    return f"{sum(counts.values()):,} {description}: {', '.join(names)}{more}"


def _of_kinds(number: int) -> str:
    """Return the begin of a text about left out events: "1 of a kind" or, for example, "2 of kinds"."""
    return f"{number:,} of {'a kind' if number == 1 else 'kinds'}"


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 event" or "2 events" for the noun "event"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
