"""Write the handlers of a program to a file where its training would begin, and end the program there.

This is a dry run, as `eventloop plan` makes it. `Trainer.open_run` calls `stop_at_run`. A bus without a
trainer ends the program at the first event that has a subscriber. If the program ends earlier, the handlers
of all its buses are written.
"""

from __future__ import annotations

import atexit
import os
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from eventloop.bus.dispatch import Dispatch
from eventloop.bus.event_order import EventPlan, event_plans
from eventloop.bus.subscription import PlanRow
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.processes.dry_run import plan_file

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
"""The prefix of the paths of eventloop's files."""


class PlannedBus(Protocol):
    """A bus with the methods that a dry run needs."""

    for_runs: bool

    def plan(self, event: type[Event]) -> list[PlanRow]:
        """Return the handlers of an event in their order."""

    def signal(self, event: type[Event]) -> Any:
        """Return the `EventSignal` of an event."""


class ProgramPlan(msgspec.Struct, frozen=True):
    """The place where a program would begin to train, and the handlers of its buses."""

    ended: bool
    """Whether the program ended without a run and without an event."""
    where: str
    """The file and line of the program, such as `train.py:31`; "" if unknown."""
    event: str
    """The name of the event that a bus without a trainer emitted; "" if a trainer's run would begin."""
    max_epochs: int | None
    max_iters: int | None
    buses: list[list[EventPlan]]
    """The handlers of the trainer's bus, or of each bus that has handlers, in the order of creation."""


_buses: list[PlannedBus] = []


class FirstEvent(dict[type[Event], Dispatch]):
    """A bus's table of functions that dispatch events: in a dry run the first event ends the program.

    An event without a subscriber does not end it. A trainer's bus dispatches events as usual until the run
    begins, because handlers may change a checkpoint that is loaded before the run.
    """

    def __init__(self, bus: PlannedBus) -> None:
        super().__init__()
        self._bus = bus
        if not _buses:
            atexit.register(_write_at_exit)
        _buses.append(bus)

    def __getitem__(self, event_type: type[Event]) -> Dispatch:
        signal = self._bus.signal(event_type)
        dispatch: Dispatch = signal.dispatch
        return _stop_at_event if signal.wanted and not self._bus.for_runs else dispatch


def stop_at_run(bus: PlannedBus, max_epochs: int | None, max_iters: int | None) -> None:
    """Write the handlers of a trainer's bus and end the program if this is a dry run, else do nothing.

    Raises:
        SystemExit: this is a dry run.
    """
    if plan_file() is not None:
        _stop(ProgramPlan(False, _calling_line(), "", max_epochs, max_iters, [event_plans(bus.plan)]))


def _stop_at_event(event: Event, trainer: Any) -> NoReturn:
    _stop(ProgramPlan(False, _calling_line(), event_name(type(event)), None, None, _plans()))


def _stop(plan: ProgramPlan) -> NoReturn:
    """Write the plan and end the program."""
    _write(plan)
    raise SystemExit(0)  # not a subclass, with which a thread would end with a traceback


def _write_at_exit() -> None:
    _write(ProgramPlan(True, "", "", None, None, _plans()))


def _write(plan: ProgramPlan) -> None:
    """Write the plan, unless this or another process of the program has written one already."""
    path = plan_file()
    if path is not None:
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(msgspec.json.encode(plan))


def _plans() -> list[list[EventPlan]]:
    """Return the events and handlers of each bus of the program that has any."""
    return [plan for bus in _buses if (plan := event_plans(bus.plan))]


def _calling_line() -> str:
    """Return the file and line at which the program called eventloop, as "FILE:LINE"; "" if unknown."""
    for frame in reversed(traceback.extract_stack()):
        # "<" begins the file names of compiled code, such as `<plan of on_before_run>`
        if not frame.filename.startswith((PACKAGE, "<")):
            return f"{frame.filename}:{frame.lineno}"
    return ""
