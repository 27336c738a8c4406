"""The base of every writer: a destination that is fed off the training thread."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import ReferenceType, ref

import msgspec

from eventloop.background.queues.options import OnError, Overflow
from eventloop.background.workers.importable import pack
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import Event, ScalarsLogged
from eventloop.events.catalogue import several
from eventloop.events.encoding_errors import BadEvent, Unencodable
from eventloop.events.filters import Predicate
from eventloop.events.run import Run
from eventloop.writers.checks import check_attributes, check_signatures, check_writes


class Writer:
    """Override `write`, and what else is needed. All methods run on the writer's own thread, in this order:

        open(run)                      before the first event
        write(event) write(event) ...  one call an event, in the order they were emitted
        flush()                        when the bus is flushed: make what was written visible to readers
        close()                        once, also after an error in write

    A writer imports its library in its constructor, so that a missing one is an error at the line that asked for
    it, and a run without the writer does not pay for it. It never sees the trainer, a tensor or a queue.

        class PrintLoss(Writer):
            events = (ScalarsLogged,)

            def write(self, event):
                print(event.step, event.scalars["loss"])

    How it is fed its attributes say, of the class or of one writer: `events`, `offload`, `queue`, `overflow`, `batch`,
    `budget_us`, `stall_timeout`, `on_error`, `name`; see below. What is wrong with them, or with the methods, is an error
    where the class is defined, or where the writer is attached.

    A writer that is heavy in Python runs in a process: `writer.offload = "process"`, or the same in its class; with
    "auto" where a process can have it, and on a thread where not. There it is made anew from its class and the arguments of its constructor, which must pickle; the class must be in a
    module, and what was set on the writer since does not reach it. When its process dies another one goes on: it
    calls `open` again, and a few events are written a second time.
    """

    events: tuple[str | type[Event], ...] = (ScalarsLogged,)
    """What `write` is called with: classes or names, one or several, or "*" for every event."""
    offload: str = "thread"
    """Where its methods run: on a "thread" of its own, in a "process", or "auto": there if it can be sent there."""
    queue: ClassVar[int] = 16_384
    overflow: ClassVar[Overflow] = "spill"
    batch: bool | int = False
    """True: `write_batch` is called with all that is waiting, instead of `write`; a number: with at most so many. A step
    of the training may wait for a batch's Python: on a thread, keep it to some 0.3 ms."""
    budget_us: float | None = None
    """What the p99 of its deliveries should stay under, in microseconds; see `bus.on`."""
    stall_timeout: float = 60.0
    """Seconds that a call of one of its methods may last; then it is reported, and no longer waited for."""
    on_error: OnError = "disable"
    """What an error of its own does: "disable" the writer, "log" and go on, or "raise" on the training thread; see
    `bus.on`."""
    name: str | None = None
    """What reports call it; the class's name by default. Two writers of a class on one bus need two names."""

    _opened = False
    _bus: ReferenceType[Bus] | None = None  # the one it was attached to last
    _made_with: functools.partial[Any] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if isinstance(cls.events, str | type):
            cls.events = several(cls.events)
        check_signatures(cls, Writer)
        check_attributes(cls, cls.__name__)
        if "__init__" in vars(cls):
            setattr(cls, "__init__", _remembering(cls.__init__))  # noqa: B010  # mypy knows no other way

    def attach(self, bus: Bus, run: Callable[[], Run]) -> Subscription:
        """Subscribe to the bus. `run` is asked for the facts of the run when the first event arrives.

        Raises:
            TypeError, ValueError: it has no `write`, a name that is taken, or a bad attribute, as `events`; or it is attached
                to another bus, which is open.
        """
        self._refuse_another(bus)
        self._get_run = run
        return self._subscribe(bus, self._place())

    def open(self, run: Run) -> None:
        """Get ready to write; `run.work_dir` exists."""

    def write(self, event: Event) -> None:
        """Write one event.

        Raises:
            NotImplementedError: the subclass has no `write`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no write(event): override it")

    def write_batch(self, events: list[Event]) -> None:
        """Write several events at once, where that is cheaper; only called where `batch` is not False. If it raises,
        all of them count as failed; if that is an `Unencodable`, those that it names."""
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
        """Let go of files and connections."""

    def _refuse_another(self, bus: Bus) -> None:
        """Keep to one bus; asked before anything of another is noted.

        Raises:
            ValueError: it is attached to another one, which is open.
        """
        other = None if self._bus is None else self._bus()
        if other is not None and other is not bus and not other.closed:
            raise ValueError(
                f"{self._called} writes for another trainer, or bus, and would mix the two in its files: make a writer for "
                "each, or close the other one before"
            )

    def _subscribe(
        self,
        bus: Bus,
        offload: str,
        *,
        name: str | None = None,
        when: Predicate | None = None,
        batch: bool | int | None = None,
    ) -> Subscription:
        check_attributes(self, self._called)
        check_writes(self, Writer)
        subscription = bus.subscribe(
            self._deliver, *several(self.events), name=name or self._called, offload=offload, when=when, queue=self.queue,
            overflow=self.overflow, batch=self.batch if batch is None else batch, budget_us=self.budget_us, on_flush=self._flush,
            on_close=self._close, stall_timeout=self.stall_timeout, on_error=self.on_error,
        )  # fmt: skip
        self._bus = ref(bus)
        return subscription

    @property
    def _called(self) -> str:
        return self.name or type(self).__name__

    def _place(self) -> str:
        """Where it runs: what `offload` says, and for "auto" a process if there can be one."""
        if self.offload != "auto":
            return self.offload
        return "process" if self._can_be_sent() else "thread"

    # --- in a process; see eventloop.background.workers.importable ----------------------------------------------------------------

    def _can_be_sent(self) -> bool:
        """Whether a worker process could make a writer like this one."""
        try:
            pack(self._deliver, self._flush, self._close)
        except TypeError:
            return False
        return hasattr(signal, "pthread_sigmask")

    def worker_recipe(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """What makes a writer like this one in another process."""
        return (type(self) if self._made_with is None else self._made_with), ()

    def worker_facts(self) -> Run:
        """The run, as it is when the first event is sent."""
        return self._get_run()

    def begin_in_worker(self, facts: Run, *, restarts: int, first: Event) -> None:
        """Ready to open. Where a worker died the run goes on from the first event that it had not acknowledged, so
        that a writer that cuts off what is about to be written again cuts off no more than that."""
        if restarts:
            step = getattr(first, "step", getattr(first, "iter", facts.start_iter))
            facts = msgspec.structs.replace(facts, start_iter=max(facts.start_iter, step))
        self._get_run = lambda: facts

    def _deliver(self, delivery: Event | list[Event]) -> None:
        if not self._opened:
            self.open(self._get_run())
            self._opened = True
        if isinstance(delivery, list):
            self.write_batch(delivery)
        else:
            self.write(delivery)

    def _flush(self) -> None:
        if self._opened:
            self.flush()

    def _close(self) -> None:
        if self._opened:
            self._opened = False
            self.close()


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that keeps its arguments; of several, the outermost one's."""

    @functools.wraps(init)
    def remember(self: Writer, /, *args: Any, **kwargs: Any) -> None:
        if self._made_with is None:
            self._made_with = functools.partial(type(self), *args, **kwargs)
        init(self, *args, **kwargs)

    return remember
