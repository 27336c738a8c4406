"""Define `Writer`, the base class of all writers.

A writer is a background subscriber: the bus calls it on a thread of its own, or in a worker process.
`Writer.attach` subscribes it to a bus. The bus calls the `worker_*` methods and `begin_in_worker` to create
an equal writer in a worker process.
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
        flush()                        when the bus is flushed: make written events visible to readers
        close()                        once, also after an error in write

    A writer imports its library in its constructor, so that a missing library raises an error there, and a
    run without the writer does not load the library. A writer never receives the trainer, a tensor or a
    queue.

    The attributes below set which events a writer receives and how. Set them on the class or on one writer. A
    wrong attribute or method signature raises an error where the class is defined or the writer is attached.

    A writer that computes much in Python can run in a worker process: set `offload = "process"`, or "auto"
    for a process where that is possible and a thread otherwise. The process constructs its own writer from
    the class and the constructor arguments, which must pickle. The class must be in an importable module, and
    attributes set after construction are not sent. If the process dies, its successor calls `open` again, and
    a few events are written a second time.
    """

    events: tuple[str | type[Event], ...] = (ScalarsLogged,)
    """The events that `write` receives: classes or names, one or several, or "*" for every event."""
    offload: str = "thread"
    """Where the methods run: "thread" (the writer's own), "process", or "auto" (a process if possible)."""
    queue: ClassVar[int] = 16_384
    """The most events that wait in memory; `overflow` decides what happens to further events."""
    overflow: ClassVar[Overflow] = "spill"
    """The policy for a full queue: "spill" writes further events to a temporary file; see `Bus.subscribe`."""
    batch: bool | int = False
    """Whether `write_batch` is called with all waiting events; if False, `write` is called with each event.

    A number is the most events of a call. A training step may wait while a batch runs Python: on a thread,
    keep a batch below 0.3 ms."""
    linger: float = 0.0
    """Least seconds between two deliveries, for a destination whose calls are costly.

    Events that are emitted meanwhile are delivered together. A flush or close delivers them at once."""
    budget_us: float | None = None
    """Upper limit for the p99 of the time of a delivery, in microseconds; see `Bus.subscribe`."""
    stall_timeout: float = 60.0
    """Most seconds for a call of a method; a longer call is reported, and the bus stops waiting for it."""
    on_error: OnError = "disable"
    """What follows an error in a method: "disable" the writer, "log" the error and continue, or "raise" it.

    "raise" raises it on the training thread; see `Bus.subscribe`."""
    name: str | None = None
    """The name in reports, by default the class name. Two writers of one class on a bus need two names."""

    secret_arguments: ClassVar[tuple[str, ...]] = ()
    """Names of the constructor's keyword arguments, such as keys, that must not be written to a file."""
    library_links: ClassVar[tuple[str, ...]] = ()
    """Patterns of the symbolic links that the writer's library makes in its folder, such as "logs/*".

    A replay accepts such a link even if it leads out of its folder, because nothing writes through it."""

    _opened = False
    _bus: ReferenceType[Bus] | None = None  # the bus that the writer was last attached to
    _made_with: functools.partial[Any] | None = None  # constructs a writer with the same arguments

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the methods and attributes of a new writer class, and store its constructor's arguments."""
        super().__init_subclass__(**options)
        if isinstance(cls.events, str | type):
            cls.events = several(cls.events)
        check_signatures(cls, Writer)
        check_attributes(cls, cls.__name__)
        if "__init__" in vars(cls):
            setattr(cls, "__init__", _storing_arguments(cls.__init__))  # noqa: B010  # mypy knows no other way

    def attach(self, bus: Bus, run: Callable[[], Run]) -> Subscription:
        """Subscribe the writer to a bus.

        Args:
            bus: the bus.
            run: returns the facts of the run for `open`; called at the first event.

        Raises:
            TypeError, ValueError: the writer has no `write`, a name that another subscriber of the bus has,
                or a wrong attribute such as `events`, or it is attached to another bus that is still open.
        """
        self._refuse_second_bus(bus)
        self._get_run = run
        check_attributes(self, self._called)
        check_writes(self, Writer)
        previous_bus, self._bus = self._bus, ref(bus)
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
        except BaseException:  # also after Ctrl-C
            self._bus = previous_bus
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, without the bus that this writer is attached to."""
        return {name: value for name, value in vars(self).items() if name != "_bus"}

    def open(self, run: Run) -> None:
        """Open files and connections; called before the first event, when `run.work_dir` exists."""

    def write(self, event: Event) -> None:
        """Write one event.

        Raises:
            NotImplementedError: the subclass has no `write`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no write(event): override it")

    def write_batch(self, events: list[Event]) -> None:
        """Write several events at once; called instead of `write` unless `batch` is False.

        Raises:
            Unencodable: some events cannot be encoded. The bus counts the events that the error names as
                failed, and the others as delivered; after any other error it counts all as failed.
        """
        bad_events: list[BadEvent] = []
        for event in events:
            try:
                self.write(event)
            except Unencodable as error:
                bad_events += error.events
        if bad_events:
            raise Unencodable(bad_events, of=len(events))

    def flush(self) -> None:
        """Make written events visible to readers."""

    def close(self) -> None:
        """Close files and connections; called once, also after an error in `write`."""

    def _refuse_second_bus(self, bus: Bus) -> None:
        """Raise a ValueError if the writer is attached to an open bus other than `bus`."""
        previous_bus = None if self._bus is None else self._bus()
        if previous_bus is not None and previous_bus is not bus and not previous_bus.closed:
            raise ValueError(
                f"{self._called} is attached to another open bus, or trainer, and would mix both in its "
                "files: make a writer for each, or close the other one first"
            )

    @property
    def _called(self) -> str:
        """Return the name of the writer in reports, logs and errors."""
        return self.name or type(self).__name__

    def _runs_on(self) -> str:
        """Return "thread" or "process"; for "auto" a process if a worker could construct this writer."""
        if self.offload != "auto":
            return self.offload
        return "process" if self._works_in_process() else "thread"

    # --- in a process; see eventloop.background.workers.importable -----------------------------------------

    def _works_in_process(self) -> bool:
        """Return whether a worker process could construct an equal writer on this system."""
        try:
            pack(self._deliver, self._flush, self._close)
        except TypeError:
            return False
        return hasattr(signal, "pthread_sigmask")  # a worker process needs it; Windows does not have it

    def worker_recipe(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return a callable and its arguments, with which a worker process constructs an equal writer."""
        return (type(self) if self._made_with is None else self._made_with), ()

    def worker_facts(self) -> Run:
        """Return the facts of the run for the worker process; called when the first event is sent to it."""
        return self._get_run()

    def begin_in_worker(self, facts: Run, *, restarts: int, first: Event) -> None:
        """Store the facts of the run in the worker process; called before the first event is written.

        After a restart, `start_iter` of the facts becomes the step of `first`. A writer that removes the
        steps after `start_iter`, because they are run again, must not remove those that the dead worker has
        written.

        Args:
            facts: the facts of the run.
            restarts: how many worker processes of this writer have died before.
            first: the first event for this process, which no dead worker has acknowledged.
        """
        if restarts:
            first_step = getattr(first, "step", getattr(first, "iter", facts.start_iter))
            facts = msgspec.structs.replace(facts, start_iter=max(facts.start_iter, first_step))
        self._get_run = lambda: facts
        self.begin_process()

    def begin_process(self) -> None:
        """Prepare a process that only runs writers: a worker process, or `eventloop replay`."""

    def _deliver(self, delivery: Any) -> None:
        """Write a delivery of the bus: one event, or a list of events."""
        self._open_once()
        if isinstance(delivery, list):
            self.write_batch(delivery)
        else:
            self.write(delivery)

    @property
    def _timed(self) -> bool:
        """Return whether the bus delivers each event with the time of its emit."""
        return False

    def _open_once(self) -> None:
        """Call `open` before the first delivery, on the thread or in the process that writes."""
        if not self._opened:
            self.open(self._get_run())
            self._opened = True

    def _flush(self) -> None:
        """Call `flush`, unless no event has opened the writer."""
        if self._opened:
            self.flush()

    def _close(self) -> None:
        """Call `close` once, unless no event has opened the writer; a later event opens it again."""
        if self._opened:
            self._opened = False
            self.close()


class TimedWriter(Writer, ABC):
    """Write events with the time of each event's emit; a base class.

        class Stages(TimedWriter):
            events = ("before_train_epoch", "after_train_epoch")

            def write_timed(self, events):
                for time, event in events:
                    print(f"{time:.6f}", type(event).__name__)

    A subclass overrides `write_timed`; `batch` limits the number of events in a call. A subclass that
    overrides `write` or `write_batch` receives events without times.
    """

    batch: bool | int = True

    @property
    def takes_times(self) -> bool:
        """Whether events are delivered to `write_timed`: no subclass overrides `write` or `write_batch`."""
        cls = type(self)
        return cls.write is TimedWriter.write and cls.write_batch is TimedWriter.write_batch

    @property
    def _timed(self) -> bool:
        return self.takes_times and self.batch is not False

    @abstractmethod
    def write_timed(self, events: list[Timed]) -> None:
        """Write events, each with the Unix time of its emit in seconds."""

    def write(self, event: Event) -> None:
        """Write one event as if it were emitted now."""
        self.write_timed([Timed(time.time(), event)])

    def write_batch(self, events: list[Event]) -> None:
        """Write several events as if they were emitted now, by `write` if a subclass overrides it."""
        if type(self).write is TimedWriter.write:
            now = time.time()
            self.write_timed([Timed(now, event) for event in events])
        else:
            super().write_batch(events)

    def _deliver(self, delivery: Any) -> None:
        """Write a delivery of the bus: events with their times, or as in `Writer` without times."""
        if isinstance(delivery, list) and isinstance(delivery[0], Timed):
            self._open_once()
            self.write_timed(delivery)
        else:
            super()._deliver(delivery)


def _storing_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that it stores its arguments in `_made_with`.

    If the constructor of a subclass calls the wrapped constructor, the stored arguments are those of the
    subclass. An unknown argument raises a TypeError that suggests the right one.
    """
    checked_init = knowing_others(init) if isinstance(init, FunctionType) else init

    @functools.wraps(init)
    def store_and_init(self: Writer, /, *args: Any, **kwargs: Any) -> None:
        if self._made_with is None:
            self._made_with = functools.partial(type(self), *args, **kwargs)
        checked_init(self, *args, **kwargs)

    return store_and_init
