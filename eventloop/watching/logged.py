"""Collect the scalars, curves, notices and the end of a run from its log files.

`RunReader` owns a `Logged`, which reads the scalars from the rows of `metrics.jsonl`, or from the event log
`events.evl` if there is no such file. Notices, lines on single events, come from the event log if there is
one, because it has events that the rows lack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from eventloop.eventlog.format import FILE_NAME as EVENTS
from eventloop.eventlog.format import EventRecord
from eventloop.eventlog.jsonl import FILE_NAME as ROWS
from eventloop.eventlog.jsonl import RESERVED, from_json_value, name_of
from eventloop.eventlog.notices import notice
from eventloop.events import AfterRun, BeforeRun, Event, ScalarsLogged
from eventloop.events.base import event_name
from eventloop.events.catalogue import find_event
from eventloop.ownership.status import Outcome
from eventloop.reporting.curves import as_number, is_step
from eventloop.util.formatting import on_a_line
from eventloop.watching.curves import Choice, Curve
from eventloop.watching.rows import EventLog, Row, RowLog
from eventloop.watching.view import CurveView, Notice

BAD = (
    "handler_failed",
    "events_dropped",
    "checkpoint_failed",
    "loader_stall",
    "slow_handler",
    "slow_rank",
    "invalid_loss",
    "rolled_back",
)
"""The events that report a problem."""
NOTED = (
    *BAD,
    "checkpoint_saved",
    "after_load_checkpoint",
    "stop_requested",
    "preemption_requested",
    "text_logged",
    "command_applied",
    "command_refused",
    "checkpoint_evaluated",
    "before_run",
    "after_run",
)
"""The events that are read from the logs: each becomes a notice, except `before_run`."""
MISSING = "No scalar"
"""The first words of a note on a chosen scalar that does not exist."""
LINES = 20
"""How many of the last notices are kept, and how many of the last notices on problems."""
TEXT = 500
"""The largest number of characters of a notice."""


class Logged:
    """Read the logs of a run, and hold what they have so far.

    Args:
        run: the run's directory.
        choice: the scalars that become curves.
        points: the largest number of points of a curve.
        most: the largest number of curves; None for any number.
    """

    def __init__(self, run: Path, choice: Choice, points: int, most: int | None = None) -> None:
        self._run, self._choice, self._points, self._most = run, choice, points, most
        self._sources: tuple[bool, bool] | None = None  # whether `metrics.jsonl` and `events.evl` exist
        self._clear()

    def read(self) -> None:
        """Read the records that were logged since the last call.

        Raises:
            OSError, ValueError: a file cannot be read, or has another format.
        """
        sources = (self._run / ROWS).is_file(), (self._run / EVENTS).is_file()
        if sources != self._sources:
            self._sources = sources
            self._clear()
            has_rows, has_events = sources
            self._has_rows, self._has_events = has_rows, has_events
            only = NOTED if has_rows else (*NOTED, "scalars_logged")
            self._rows = RowLog(self._run / ROWS, self._clear, self._read_row)
            restart = self._clear_notices if has_rows else self._clear
            self._events = EventLog(
                self._run / EVENTS, only, self._read_record, whole=not has_rows, restart=restart
            )
        self._rows.read()
        self._events.read()

    @property
    def names(self) -> list[str]:
        """The names of all scalars, such as "train/loss"."""
        return [
            f"{mode}/{name_of(key)}"
            for mode, row in self._latest.items()
            for key in row
            if key not in RESERVED
        ]

    def latest(self) -> dict[str, float]:
        """Return the last value of each scalar."""
        scalars = {}
        for mode, row in self._latest.items():
            for key, value in row.items():
                if key not in RESERVED and (number := as_number(value)) is not None:
                    scalars[f"{mode}/{name_of(key)}"] = number
        return scalars

    def curves(self) -> list[CurveView]:
        """Return the chosen curves that have records."""
        return [
            curve.view(name_of(key), mode)
            for (mode, key), curve in self._curves.items()
            if curve and not curve.empty
        ]

    def lines(self) -> list[Notice]:
        """Return the last notices, oldest first."""
        return [*self._lines]

    def health(self) -> list[Notice]:
        """Return the last notices on problems, oldest first."""
        return [*self._health]

    def notes(self) -> list[str]:
        """Return sentences on curves that are missing, with the reason.

        There is no log, a chosen scalar has no record, or there are more scalars than curves are allowed.
        """
        if self._sources == (False, False):
            reason = (
                f"no {ROWS} and no {EVENTS} here. JSONLWriter writes the first, EventLogWriter the second."
            )
            return [f"There are no curves: {reason}"]
        known = self.names
        existing = ", ".join(sorted(known)) or "none"
        missing = self._choice.missing(known)
        notes = [f"{MISSING} {name!r} so far, there are: {existing}." for name in missing]
        if self._left_out:
            notes.append(
                f"{self._left_out:,} scalars have no curve here, because {self._most:,} others have one: "
                f"choose by --metrics."
            )
        return notes

    # --- reading -------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Drop everything that was read, because the files are read from the begin."""
        self._latest: dict[str, dict[str, Any]] = {}
        self._curves: dict[tuple[str, str], Curve | None] = {}  # None: not chosen, or over the limit
        self._drawn = self._left_out = 0
        self.outcome: Outcome | None = None
        """How the last call of `train`, `val` and so on ended; None while one is under way, or if unknown."""
        self._clear_notices()

    def _clear_notices(self) -> None:
        self._lines: deque[Notice] = deque(maxlen=LINES)
        self._health: deque[Notice] = deque(maxlen=LINES)

    def _read_row(self, row: Row) -> None:
        """Read a row of `metrics.jsonl`; an event of it is a notice only without a log of events."""
        if "event" not in row:
            if isinstance(mode := row.get("mode"), str) and is_step(step := row.get("step")):
                self._add_scalars(mode, step, row)
            return
        if (name := row["event"]) in NOTED:
            with suppress(msgspec.MsgspecError, ValueError, TypeError, RecursionError):
                event: Event = msgspec.convert(from_json_value(row), type=find_event(name))
                self._follow_run(event)
                if not self._has_events:
                    self._add_notice(event, None)

    def _read_record(self, record: EventRecord[Event]) -> None:
        """Read an event of the event log, whose notices have a time."""
        event = record.event
        if isinstance(event, ScalarsLogged):
            self._add_scalars(event.mode, event.step, event.scalars)
            return
        if not self._has_rows:  # else `_read_row` does this, in the order of the scalars
            self._follow_run(event)
        self._add_notice(event, record.time)

    def _add_scalars(self, mode: str, step: int, row: Mapping[str, Any]) -> None:
        """Add numbers to their curves, and keep the last value of each name."""
        self._latest.setdefault(mode, {}).update(row)
        curves = self._curves
        for key, value in row.items():
            if key in RESERVED:
                continue
            try:
                curve = curves[mode, key]
            except KeyError:
                curve = curves[mode, key] = self._begin_curve(mode, name_of(key))
            if curve is not None:
                number = value if type(value) is float else as_number(value)
                if number is not None:
                    curve.add(step, number)

    def _begin_curve(self, mode: str, name: str) -> Curve | None:
        """Return a new curve; None if it was not chosen, or if there are enough curves."""
        if not self._choice.has(mode, name):
            return None
        if self._most is not None and self._drawn >= self._most:
            self._left_out += 1
            return None
        self._drawn += 1
        return Curve(self._points)

    def _follow_run(self, event: Event) -> None:
        """Record that a call such as `train` has begun, or how it has ended."""
        if isinstance(event, BeforeRun):
            self._begin_run(event.iter)
        elif isinstance(event, AfterRun):
            self.outcome = Outcome(event.reason, event.error, event.signal)

    def _add_notice(self, event: Event, time: float | None) -> None:
        """Add the line of an event, also to the health if the event is bad."""
        if isinstance(event, BeforeRun):
            return
        name, index = event_name(type(event)), getattr(event, "iter", None)
        bad = name in BAD or (isinstance(event, AfterRun) and event.error is not None)
        added = Notice(
            event=name,
            iter=index if isinstance(index, int) else None,
            time=time,
            text=on_a_line(notice(event), TEXT),
            bad=bad,
        )
        self._lines.append(added)
        if bad:
            self._health.append(added)

    def _begin_run(self, start: int) -> None:
        """Remove the records after the iteration `start`, from which a resumed run logs them again."""
        self.outcome = None
        for curve in self._curves.values():
            if curve is not None:
                curve.cut(start)
        if not start:
            self._latest.clear()
