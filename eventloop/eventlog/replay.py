"""Replay the event log of a run onto a bus, or directly into writers.

    from eventloop import replay

    replay("runs/digits", bus, only="scalars_logged")
    replay("runs/digits", TensorBoardWriter(), work_dir="runs/digits/again")

Handlers and writers receive the events in the order of the run, as fast as they can process them. All names
but `replay` are imported from this module: `from eventloop.eventlog.replay import ReplayReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from time import sleep
from typing import Any

import msgspec

from eventloop.bus import Bus
from eventloop.bus.subscription import SubscriptionStats
from eventloop.eventlog.format import EventRecord
from eventloop.eventlog.reader import EventReader, OnTorn, TornTail
from eventloop.eventlog.sinks import Sink, TimedSink, Written
from eventloop.events import Event
from eventloop.events.catalogue import find_event, several
from eventloop.events.deferred import Timed
from eventloop.events.run import Run
from eventloop.ownership.acquiring import owning
from eventloop.registry import WRITERS

REMEDY = "wait until it has ended, or choose another folder (--out DIR, work_dir=)"
FOLDER = "replay"
"""The folder in the run's directory for the files of writers, separate from the run's own files."""
BUS_BATCH = 256
"""The number of events between two waits for a bus's background subscribers.

A queue with at least this capacity drops no events.
"""
POLL_SECONDS = 0.0005


class Loss(msgspec.Struct, frozen=True):
    """The events of a replay that a background subscriber of the bus did not process."""

    failed: int = 0
    """The number of events at which the subscriber raised an error or stalled."""
    dropped: int = 0
    """The number of events that it never received, because its queue was full or it had ended."""
    error: str = ""
    """Its last error, and whether the error ended it."""

    def __str__(self) -> str:
        parts = [f"{n:,} {what}" for n, what in ((self.failed, "failed"), (self.dropped, "dropped")) if n]
        if not parts:
            return f"failed: {self.error}"
        reason = f" ({self.error})" if self.error else ""
        return f"lost {_count(self.failed + self.dropped, 'event')}: {', '.join(parts)}{reason}"


class ReplayReport(msgspec.Struct, frozen=True):
    """The counts of a log's events: replayed, left out, unreadable or lost."""

    emitted: int
    """The number of events that were emitted, or written by the writers."""
    left_out: int
    """The number of events that `only` does not name, or that no writer takes."""
    unknown: dict[str, int]
    """The events that no imported module declares: counts by name."""
    unreadable: dict[str, int]
    """The events whose fields do not fit the class any more: counts by name."""
    damaged: int
    """The number of bytes with a wrong checksum before the last complete record."""
    torn: TornTail | None
    """The bytes after the last complete record; None without any."""
    lost: dict[str, Loss] = {}
    """The losses of the background subscribers of the bus, by name.

    A subscriber that received all events and failed when the bus was flushed has only an `error`.
    """
    written: list[Written] = []
    """The values that experiment trackers were given, and that they had already."""
    flushed: bool = True
    """False if a subscriber was still busy after the bus was flushed for its `drain_timeout`."""
    not_taken: int = 0
    """The number of events that no writer takes, a part of `left_out`."""

    @property
    def empty(self) -> bool:
        """Return whether the log contains no events at all."""
        return not (self.emitted or self.left_out or self.unknown or self.unreadable)

    def __str__(self) -> str:
        return self.describe()

    def describe(self, into: object = "", unknown: str = "") -> str:
        """Return the report in one line.

        Args:
            into: the destination of the events.
            unknown: the advice for events of an unknown type; "" means to import their module.
        """
        where = f" into {into}" if into else ""
        lines = [f"{_count(self.emitted, 'event')} replayed{where}"]
        if self.not_taken:
            lines.append(f"{_of_kinds(self.not_taken)} that the target does not take")
        if unnamed := self.left_out - self.not_taken:
            lines.append(f"{_of_kinds(unnamed)} that `only` does not name")
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

    On a bus each event is emitted as in the run, including those that background subscribers emitted, so that
    every subscriber receives it; handlers that take the trainer get None. The replay waits for background
    subscribers regularly, so that no queue of at least 256 events overflows; it waits for a subscriber that
    hangs as long as its `stall_timeout`. The bus is flushed at the end. `report.lost` names the subscribers
    that did not process everything.

    Writers are opened, called and closed here, without a bus and a thread, so their errors are raised; they
    receive the facts of the run that the log holds.

    Args:
        run: the directory of the run, or its log.
        onto: a bus, a writer that is not attached to a bus, or several writers.
        only: names or classes of events; all others are left out.
        on_torn: the reaction to a torn tail or damaged bytes: "warn", "ignore", or "raise".
        work_dir: the directory for the writers; by default `replay` in the run's directory.

    Raises:
        FileNotFoundError: there is no run, or no log in it.
        EventLogError: the file is not an event log, or of another version, or damaged or torn with
            `on_torn="raise"`.
        TypeError, ValueError: an unknown event, something that is neither a bus nor a writer, or a bad
            option; the default `work_dir` is a link, or a link in it leads out of it.
        WorkDirInUseError: a live run owns `work_dir`.
        RuntimeError: the bus is closed, or was closed before it had delivered everything.
        Exception: any error of a handler or a writer.
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
    """Return the default folder for writers, next to a log.

    Raises:
        ValueError: the folder is a link, or contains a link that leads out of it.
    """
    folder = log.parent / FOLDER
    inside = log.parent.resolve() / FOLDER
    for path in chain([folder], folder.rglob("*")):
        leads_out = path.is_symlink() and not path.resolve().is_relative_to(inside)
        if leads_out and not any(path.match(pattern) for pattern in _links_of_libraries()):
            raise ValueError(
                f"{path} is a link, which leads out of {folder}: remove it, or choose another folder "
                "(--out DIR, work_dir=)"
            )
    return folder


def _links_of_libraries() -> set[str]:
    """Return the patterns of the links of every known writer, because each of them may have run before."""
    classes = map(WRITERS.find, WRITERS.names())
    return {pattern for cls in classes for pattern in getattr(cls, "library_links", ())}


def _check_target(onto: Any, work_dir: object) -> list[Sink]:
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
    """Emit the events; return their number, and whether the bus was flushed in time."""
    emitted = 0
    for record in reader:
        if bus.closed:
            bus.close()  # waits for the thread that closes it
            raise _closed(bus, emitted)
        bus.emit(record.event)
        emitted += 1
        if emitted % BUS_BATCH == 0:
            _drain(bus, emitted)
    _drain(bus, emitted)
    flushed = bus.flush().complete
    bus.poll()  # a queue counts a failure before the bus has it, and `flush` waits only for the queue
    return emitted, flushed


def _lost_since(before: list[SubscriptionStats], after: list[SubscriptionStats]) -> dict[str, Loss]:
    """Return each subscriber's loss between two results of `Bus.stats`, by name."""
    earlier = {stats.name: stats for stats in before}
    lost = {}
    for now in after:
        then = earlier.get(now.name)
        failed, dropped, error = (then.failed, then.dropped, then.error) if then is not None else (0, 0, "")
        loss = Loss(now.failed - failed, now.dropped - dropped, now.error)
        if loss.failed or loss.dropped or loss.error != error:
            lost[now.name] = loss
    return lost


def _drain(bus: Bus, emitted: int) -> None:
    """Wait until the background subscribers have processed the emitted events.

    `bus.flush` is not used, because some writers take it as the end. A subscriber that hangs is ended after
    its `stall_timeout`.

    Raises:
        RuntimeError: the bus was closed in the meantime, and will not deliver the rest.
    """
    while _undelivered(bus):
        if bus.closed:
            bus.close()  # waits for the thread that closes it
            if _undelivered(bus):
                raise _closed(bus, emitted)
        sleep(POLL_SECONDS)
    bus.poll()


def _undelivered(bus: Bus) -> dict[str, int]:  # without those that a writer holds for an absent tracker
    return {each.name: left for each in bus.stats() if (left := each.queued - each.untaken)}


def _closed(bus: Bus, emitted: int) -> RuntimeError:
    left = ", ".join(f"{name} ({count:,})" for name, count in _undelivered(bus).items())
    return RuntimeError(
        f"the replay ends after {emitted:,} events, because the bus was closed meanwhile; not delivered: "
        f"{left or 'none'}"
    )


# --- writers ----------------------------------------------------------------------------------------------


def into_writers(
    reader: EventReader,
    writers: list[Sink],
    work_dir: Path,
    closing: ExitStack,
    on_written: Callable[[int], None] = lambda sequence: None,
) -> tuple[int, int]:
    """Write the events; return the numbers of written events and of events that no writer takes.

    Args:
        reader: yields the events.
        writers: are opened here.
        work_dir: the directory for the writers' files; WorkDirInUseError is raised if a live run owns it.
        closing: closes the writers, and gives the directory back, when the caller leaves it.
        on_written: called after each write, with the sequence number of the last event in it.
    """
    wanted = [_types_of(writer) for writer in writers]
    everything = None in wanted
    received = {kind for kinds in wanted for kind in kinds or ()}
    emitted = not_taken = 0
    opened = False
    for records in reader.blocks():
        events = [record.event for record in records]
        if not opened:
            if _writes_files(writers):
                closing.enter_context(owning(work_dir, "replaying", REMEDY))
            work_dir.mkdir(parents=True, exist_ok=True)
            facts = _facts(reader.run, events, work_dir)
            for writer in writers:
                closing.callback(writer.close)
                writer.open(facts)
            opened = True
        for writer, kinds in zip(writers, wanted, strict=True):
            wanted_here = [r for r in records if kinds is None or type(r.event) in kinds]
            _write_all(writer, wanted_here, on_written)
        count = len(events) if everything else sum(type(event) in received for event in events)
        emitted += count
        not_taken += len(events) - count
    if opened:
        for writer in writers:
            writer.flush()
    return emitted, not_taken


def _writes_files(writers: list[Sink]) -> bool:
    """Return whether a writer may write files: not if all of them are console writers."""
    console: Any = WRITERS.find("ConsoleWriter")
    return not all(isinstance(writer, console) for writer in writers)


def report_of(reader: EventReader, writers: list[Sink], emitted: int, not_taken: int = 0) -> ReplayReport:
    """Return the report of a replay that has emitted or written everything."""
    written = [found for writer in writers if isinstance(found := getattr(writer, "written", None), Written)]
    left_out = reader.left_out + not_taken
    counts = reader.unknown, reader.unreadable, reader.damaged, reader.torn
    return ReplayReport(emitted, left_out, *counts, written=written, not_taken=not_taken)


def _types_of(writer: Sink) -> frozenset[type[Event]] | None:
    """Return the event types that a writer takes; None for every type."""
    events = several(writer.events)
    return None if "*" in events else frozenset(find_event(event) for event in events)


def _write_all(writer: Sink, records: list[EventRecord[Event]], on_written: Callable[[int], None]) -> None:
    most = max(1, len(records)) if writer.batch is True else writer.batch or 1
    timed = writer if isinstance(writer, TimedSink) and writer.takes_times else None
    for start in range(0, len(records), most):
        several = records[start : start + most]
        if timed is not None:
            timed.write_timed([Timed(record.time, record.event) for record in several])
        elif writer.batch:
            writer.write_batch([record.event for record in several])
        else:
            writer.write(several[0].event)
        on_written(several[-1].sequence)


def _facts(run: Run | None, events: list[Event], work_dir: Path) -> Run:
    """Return the facts of the run, with `work_dir` as its directory.

    If the log has no facts, only the limits of the run are known, from its first event.
    """
    if run is not None:
        return msgspec.structs.replace(run, work_dir=str(work_dir), trainer_id="")
    first = events[0]
    return Run(
        work_dir=str(work_dir),
        max_iters=getattr(first, "max_iters", None),
        max_epochs=getattr(first, "max_epochs", None),
    )


def _named(what: str, counts: dict[str, int]) -> str:
    names = [f"{name} ({count:,})" for name, count in islice(counts.items(), 20)]
    return f"{sum(counts.values()):,} {what}: {', '.join(names)}{', …' * (len(counts) > len(names))}"


def _of_kinds(number: int) -> str:
    return f"{number:,} of {'a kind' if number == 1 else 'kinds'}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
