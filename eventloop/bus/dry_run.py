"""Run a program up to the moment at which its training would begin.

    with Rehearsal() as rehearsal:
        train()                # anything; raises RunReached where its run would begin
    rehearsal.reached          # which run that was, and the handlers of each event

During a rehearsal a new bus lists its background subscribers and starts none of them: no thread, no process,
and no writer opens a file. A trainer's run does not begin. A bus without a trainer stops at the first event
with a subscriber.

A rehearsal covers the whole process, so runs on other threads do not begin either. It does not cover other
processes that the program starts.
"""

from __future__ import annotations

import os
import sys
import threading
from asyncio import AbstractEventLoop, new_event_loop
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol, Self

from eventloop.background.background import Background
from eventloop.background.queues.options import LaneOptions, Offload
from eventloop.background.queues.subscriber import Lane
from eventloop.background.runners import TaskLane
from eventloop.bus.event_order import EventPlan, event_plans
from eventloop.bus.subscription import PlanRow
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.deferred import Deferred


class PlannedBus(Protocol):
    """The parts of a bus that a plan is made of."""

    def plan(self, event: type[Event]) -> list[PlanRow]:
        """Return the handlers of an event."""

    def wants(self, event_type: type[Event]) -> bool:
        """Return whether an event has a handler."""


class PlannedRun(Protocol):
    """The parts of a trainer that a plan names."""

    @property
    def bus(self) -> PlannedBus:
        """The bus that would have begun."""

    max_epochs: int | None
    max_iters: int | None


PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
"""Prefix of the paths of eventloop's files."""
_under_way: list[Rehearsal] = []


class RunReached(SystemExit):
    """Raised in place of a run. As a SystemExit it ends the program as `sys.exit()` would.

    On a thread other than the main thread a plain SystemExit ends that thread.
    """


class Reached(NamedTuple):
    """Where a run would have begun."""

    where: str
    """File and line of the program, such as `train.py:31`; "" if unknown."""
    event: str
    """The event that a bus without a trainer would have emitted; "" for a trainer's run."""
    max_epochs: int | None
    max_iters: int | None
    plans: list[list[EventPlan]]
    """The plan of the trainer's bus, or of each bus of the program."""


class Rehearsal:
    """Hold back the runs of this process within the block."""

    def __init__(self) -> None:
        self.reached: Reached | None = None
        """The first run that would have begun."""
        self.made: list[Path] = []
        """Directories that were created for trainers, outermost first."""
        self._buses: list[PlannedBus] = []
        self._trainer_buses: set[int] = set()  # ids of the buses of trainers

    def __enter__(self) -> Self:
        _under_way.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        _under_way.remove(self)

    def plans(self) -> list[list[EventPlan]]:
        """Return the current plan of each bus with handlers, in the order of their creation."""
        return [plan for bus in self._buses if (plan := event_plans(bus.plan))]

    @property
    def has_buses(self) -> bool:
        """True once the program has created a bus."""
        return bool(self._buses)

    def remove_directories(self) -> list[Path]:
        """Remove the directories created for trainers, and return those that hold other files."""
        left: list[Path] = []
        for path in reversed(self.made):
            try:
                path.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                if not any(path in other.parents for other in left):
                    left.append(path)
        return left

    # --- what buses and trainers call ----------------------------------------------------------------------

    def admit(self, bus: PlannedBus) -> None:
        """Register a new bus."""
        self._buses.append(bus)
        setattr(bus, "emit", partial(self._emit, bus))  # noqa: B010  # on this bus only: other buses pay nothing

    def lead(self, bus: PlannedBus) -> list[Path]:
        """Register the bus of a trainer. Return the list to which its created directories are appended."""
        self._trainer_buses.add(id(bus))
        return self.made

    def begins(self, trainer: PlannedRun) -> NoReturn:
        """Stop the program where a trainer's run would begin.

        Raises:
            RunReached, SystemExit: always.
        """
        self._reach("", trainer.max_epochs, trainer.max_iters, lambda: [event_plans(trainer.bus.plan)])

    def _emit(self, bus: PlannedBus, event: Event, trainer: Any = None) -> None:
        if trainer is None and id(bus) not in self._trainer_buses and bus.wants(type(event)):
            self._reach(event_name(type(event)), None, None, self.plans)
        type(bus).emit(bus, event, trainer)  # type: ignore[attr-defined]

    def _reach(
        self,
        event: str,
        max_epochs: int | None,
        max_iters: int | None,
        plans: Callable[[], list[list[EventPlan]]],
    ) -> NoReturn:
        if self.reached is None:
            where = _calling_line(sys._getframe())
            # now, because the program may cancel subscriptions on its way out
            self.reached = Reached(where, event, max_epochs, max_iters, plans())
        if threading.current_thread() is not threading.main_thread():
            # threading ignores SystemExit silently, but not its subclasses such as RunReached
            raise SystemExit(0)
        raise RunReached(0)


def under_way() -> Rehearsal | None:
    """Return the current rehearsal, or None."""
    return _under_way[-1] if _under_way else None


def _calling_line(frame: FrameType | None) -> str:
    """Return file and line of the program's call into this package."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class DryRunBackground(Background):
    """The background of a bus in a rehearsal, which checks and lists subscribers but starts none.

    It discards events.
    """

    def add_lane(
        self,
        name: str,
        fn: Callable[..., Any],
        options: LaneOptions,
        offload: Offload | None,
        loop: AbstractEventLoop | None = None,
    ) -> Lane:
        """Create the queue of a subscriber without starting it.

        Raises:
            TypeError: offload="process", but a process could not import the subscriber.
            RuntimeError: the bus is closed.
        """
        if self.closed:
            raise RuntimeError(f"cannot subscribe {name}: the bus is closed and delivers no more")
        if offload is None:
            return TaskLane(name, fn, options, self.health.report, loop or new_event_loop())
        lane = self.make_lane(name, fn, options, offload, None)
        lane.incoming = deque(maxlen=0)
        return lane

    def gates(self, lane: Lane, event_type: type[Event]) -> tuple[Callable[[Event], None], ...]:
        """Return functions that discard an event."""
        return (lambda event: None), (lambda event: None)

    def start(self) -> None:
        """Start nothing."""

    def post(self, deferred: Deferred, types: Iterable[type[Event]] = ()) -> None:
        """Discard events that would be made later."""

    def flush_while_delivering(
        self, timeout: float, noting: Callable[[], AbstractContextManager[None]], allowed: Callable[[], bool]
    ) -> bool:
        """Return True: there is nothing to deliver."""
        return True

    def flush(self, timeout: float, noting: AbstractContextManager[None]) -> bool:
        """Return True: there is nothing to deliver."""
        return True
