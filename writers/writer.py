"""Define `Writer`, the base class of all writers.

A writer is a background subscriber: the bus calls it on its own thread, or in a worker process. `attach`
subscribes it; the `worker_*` methods send it to a process.
"""

from __future__ import annotations

import functools
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar
from weakref import ReferenceType, ref

import msgspec

from eventloop.background.queues.options import OnError, Overflow
from eventloop.background.workers.importable import pack
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import Event, ScalarsLogged
from eventloop.events.catalogue import several
from eventloop.events.deferred import Timed
from eventloop.events.encoding_errors import BadEvent, Unencodable
from eventloop.events.run import Run
from eventloop.migration.names import knowing_others
from eventloop.writers.checks import check_attributes, check_signatures, check_writes


class Writer:
    """Write a run's events to one destination; the base class of all writers.

        class PrintLoss(Writer):
            events = (ScalarsLogged,)

            def write(self, event):
                print(event.step, event.scalars["loss"])

    A writer is a background subscriber. A subclass overrides `write` or `write_batch`, and the other methods
    as needed. They run on the writer's own thread, in this order:

        open(run)                      before the first event
        write(event) write(event) ...  one call an event, in the order they were emitted
        flush()                        when the bus is flushed: make what was written visible to readers
        close()                        once, also after an error in write

    A writer imports its library in its constructor, so that a missing library is an error where the writer is
    made, and a run without the writer does not load it. It never receives the trainer, a tensor or a queue.

    The attributes below set which events it receives and how; set them on the class or on one writer. A wrong
    attribute or method signature raises where the class is defined, or where the writer is attached.

    A writer that computes much in Python can run in a worker process: set `offload = "process"`, or "auto"
    for a process where that is possible and a thread otherwise. The process makes its own writer from the
    class and the constructor arguments, which must pickle; the class must be in an importable module, and
    attributes set after construction are not sent. If the process dies, a new one calls `open` again, and a
    few events are written a second time.
    """

    events: tuple[str | type[Event], ...] = (ScalarsLogged,)
    """The events that `write` receives: classes or names, one or several, or "*" for every event."""
    offload: str = "thread"
    """Where the methods run: "thread" (the writer's own), "process", or "auto" (a process if possible)."""
    queue: ClassVar[int] = 16_384
    """The most events that wait in memory; `overflow` decides about further events."""
    overflow: ClassVar[Overflow] = "spill"
    """The policy for a full queue: "spill" writes further events to a temporary file; see `Bus.subscribe`."""
    batch: bool | int = False
    """True calls `write_batch` with all waiting events instead of `write`; a number limits their count.

    A training step may wait while a batch runs Python: on a thread, keep a batch below 0.3 ms."""
    linger: float = 0.0
    """Seconds from one delivery to the next, in which events gather, for a destination whose calls cost much.

    The first event after a pause is delivered at once, and a flush or close waits for none."""
    budget_us: float | None = None
    """Upper limit for the p99 of the time of a delivery, in microseconds; see `Bus.subscribe`."""
    stall_timeout: float = 60.0
    """Most seconds for a call of a method; a longer call is reported, and the bus stops waiting for it."""
    on_error: OnError = "disable"
    """The reaction to an error in a method; see `Bus.subscribe`.

    "disable" the writer, "log" the error and continue, or "raise" it on the training thread."""
    name: str | None = None
    """The name in reports, by default that of the class. Two writers of a class on a bus need two names."""

    secret_arguments: ClassVar[tuple[str, ...]] = ()
    """Names of the constructor's keyword arguments that must not get into a file, such as keys."""
    library_links: ClassVar[tuple[str, ...]] = ()
    """Patterns of the links that the writer's library puts into its folder, such as "logs/*".

    They may lead out of the folder of a replay, because nothing writes through them."""

    _opened = False
    _bus: ReferenceType[Bus] | None = None  # the bus it was attached to last
    _made_with: functools.partial[Any] | None = None  # makes a writer with the same constructor arguments

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if isinstance(cls.events, str | type):
            cls.events = several(cls.events)
        check_signatures(cls, Writer)
        check_attributes(cls, cls.__name__)
        if "__init__" in vars(cls):
            setattr(cls, "__init__", _remembering(cls.__init__))  # noqa: B010  # mypy knows no other way

    def attach(self, bus: Bus, run: Callable[[], Run]) -> Subscription:
        """Subscribe to `bus`; at the first event `run()` returns the facts of the run, which `open` receives.

        Raises:
            TypeError, ValueError: the writer has no `write`, a name that is taken or a bad attribute such as
                `events`, or it is attached to another bus that is still open.
        """
        self._refuse_another(bus)
        self._get_run = run
        check_attributes(self, self._called)
        check_writes(self, Writer)
        former, self._bus = self._bus, ref(bus)
        try:
            return bus.subscribe(
                self._deliver,
                *bus.possible(several(self.events)),
                name=self._called,
                offload=self._runs_on(),
                queue=self.queue,
                overflow=self.overflow,
                batch=self.batch,
                budget_us=self.budget_us,
                on_flush=self._flush,
                on_close=self._close,
                stall_timeout=self.stall_timeout,
                on_error=self.on_error,
                linger=self.linger,
                timed=self._timed,
            )
        except BaseException:  # Ctrl-C among them
            self._bus = former
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, which is not attached to the bus."""
        return {name: value for name, value in vars(self).items() if name != "_bus"}

    def open(self, run: Run) -> None:
        """Open files and connections; called before the first event, and `run.work_dir` exists."""

    def write(self, event: Event) -> None:
        """Write one event.

        Raises:
            NotImplementedError: the subclass has no `write`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no write(event): override it")

    def write_batch(self, events: list[Event]) -> None:
        """Write several events at once; called instead of `write` unless `batch` is False.

        If it raises `Unencodable`, the events that the error names count as failed; after any other error all
        of them do.
        """
        bad: list[BadEvent] = []
        for event in events:
            try:
                self.write(event)
            except Unencodable as error:
                bad += error.events
        if bad:
            raise Unencodable(bad, of=len(events))

    def flush(self) -> None:
        """Make what was written visible to readers."""

    def close(self) -> None:
        """Close files and connections; called once, also after an error in `write`."""

    def _refuse_another(self, bus: Bus) -> None:
        """Check that the writer is not attached to another open bus."""
        other = None if self._bus is None else self._bus()
        if other is not None and other is not bus and not other.closed:
            raise ValueError(
                f"{self._called} is attached to another open bus, or trainer, and would mix both in its "
                "files: make a writer for each, or close the other one first"
            )

    @property
    def _called(self) -> str:
        return self.name or type(self).__name__

    def _runs_on(self) -> str:
        """Return "thread" or "process"; "auto" is a process if the writer can be sent to one."""
        if self.offload != "auto":
            return self.offload
        return "process" if self._can_be_sent() else "thread"

    # --- in a process; see eventloop.background.workers.importable -----------------------------------------

    def _can_be_sent(self) -> bool:
        """Return whether a worker process could make a writer like this one."""
        try:
            pack(self._deliver, self._flush, self._close)
        except TypeError:
            return False
        return hasattr(signal, "pthread_sigmask")

    def worker_recipe(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return a callable and its arguments, with which a worker process makes a writer like this one."""
        return (type(self) if self._made_with is None else self._made_with), ()

    def worker_facts(self) -> Run:
        """Return the facts of the run for the process; called when the first event is sent."""
        return self._get_run()

    def begin_in_worker(self, facts: Run, *, restarts: int, first: Event) -> None:
        """Store the facts of the run in the worker process; called before `first` is written.

        After a restart the run's `start_iter` is the step of the first event that the dead worker did not
        acknowledge, so that a writer that removes repeated steps removes no others.
        """
        if restarts:
            step = getattr(first, "step", getattr(first, "iter", facts.start_iter))
            facts = msgspec.structs.replace(facts, start_iter=max(facts.start_iter, step))
        self._get_run = lambda: facts
        self.begin_process()

    def begin_process(self) -> None:
        """Prepare a process that does nothing but write: a worker, or `eventloop replay`."""

    def _deliver(self, delivery: Any) -> None:
        self._open_once()
        if isinstance(delivery, list):
            self.write_batch(delivery)
        else:
            self.write(delivery)

    @property
    def _timed(self) -> bool:
        """Whether the bus is to give the times of the events."""
        return False

    def _open_once(self) -> None:
        if not self._opened:
            self.open(self._get_run())
            self._opened = True

    def _flush(self) -> None:
        if self._opened:
            self.flush()

    def _close(self) -> None:
        if self._opened:
            self._opened = False
            self.close()


class TimedWriter(Writer, ABC):
    """The base class of writers that receive the time of each event's emit.

        class Stages(TimedWriter):
            events = ("before_train_epoch", "after_train_epoch")

            def write_timed(self, events):
                for time, event in events:
                    print(f"{time:.6f}", type(event).__name__)

    A subclass overrides `write_timed`; `batch` limits the events of a call. If it overrides `write` or
    `write_batch`, it receives events without times.
    """

    batch: bool | int = True

    @property
    def takes_times(self) -> bool:
        """False if a subclass overrides `write` or `write_batch`, which receive no times."""
        cls = type(self)
        return cls.write is TimedWriter.write and cls.write_batch is TimedWriter.write_batch

    @property
    def _timed(self) -> bool:
        return self.takes_times and self.batch is not False

    @abstractmethod
    def write_timed(self, events: list[Timed]) -> None:
        """Write events, each with the Unix time of its emit in seconds."""

    def write(self, event: Event) -> None:
        """Write one event with the present time."""
        self.write_timed([Timed(time.time(), event)])

    def write_batch(self, events: list[Event]) -> None:
        """Write several events with the present time."""
        if type(self).write is TimedWriter.write:
            now = time.time()
            self.write_timed([Timed(now, event) for event in events])
        else:
            super().write_batch(events)

    def _deliver(self, delivery: Any) -> None:
        if isinstance(delivery, list) and isinstance(delivery[0], Timed):
            self._open_once()
            self.write_timed(delivery)
        else:
            super()._deliver(delivery)


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor to check its arguments, and to keep those of its outermost call in `_made_with`."""
    checked = knowing_others(init) if isinstance(init, FunctionType) else init

    @functools.wraps(init)
    def remember(self: Writer, /, *args: Any, **kwargs: Any) -> None:
        if self._made_with is None:
            self._made_with = functools.partial(type(self), *args, **kwargs)
        checked(self, *args, **kwargs)

    return remember
