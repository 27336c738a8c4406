"""A writer that moves from its thread to a process in the middle of a run: when the first heavy event comes."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Protocol

from eventloop.events import Event

if TYPE_CHECKING:
    from eventloop.background.queues.subscriber import Lane
    from eventloop.bus import Bus
    from eventloop.bus.subscription import Subscription

logger = logging.getLogger("eventloop")

END_SECONDS = 5.0
"""How long the process waits, before it opens its file, for the thread to end what it was given."""


class Moving(Protocol):
    """A writer that can go on in a process."""

    def stays(self, event: Event) -> bool:
        """True when the event may be written on the thread; asked for one event after another."""

    def go_on_in_process(self, bus: Bus, handover: Handover) -> Subscription:
        """Subscribe another writer, in a process, which goes on with what comes now."""


class Handover:
    """Says which events a writer's thread is given: those before the first heavy one. That one and all later ones go to
    a process, which does not exist before.

    The bus asks about one event after another, on the thread that routes them, so that each event is written once and
    in its turn. Where no process can be had the thread goes on with everything.
    """

    def __init__(self, bus: Bus, writer: Moving) -> None:
        self._bus = weakref.ref(bus)  # which must not be kept alive by its own subscriber
        self._writer = writer
        self._thread: weakref.ref[Subscription] | None = None
        self._moved = self._failed = False

    def begin(self, thread: Subscription) -> None:
        """The writer was subscribed, with the filter `before_media`."""
        self._thread = weakref.ref(thread)

    @property
    def _lane(self) -> Lane | None:
        """The lane of this writer; another one after the bus was opened again."""
        thread = self._thread() if self._thread is not None else None
        return thread.lane if thread is not None else None

    def before_media(self, event: Event) -> bool:
        """The filter of the thread's subscription."""
        if self._moved:
            return False
        return self._failed or self._writer.stays(event) or not self._move(event)

    def wanted(self, event: Event) -> bool:
        """The filter of the process's subscription: who cancels or pauses the writer means both."""
        thread = self._thread() if self._thread is not None else None
        return thread is not None and thread.active and not (self._lane and self._lane.paused)

    def wait_for_thread(self) -> None:
        """Let the thread end what it was given. A thread that hangs is not waited for longer than `END_SECONDS`."""
        if self._lane is not None:
            self._lane.flush_soon()
            self._lane.wait_flushed(END_SECONDS)

    def _move(self, event: Event) -> bool:
        bus = self._bus()
        if bus is None or bus.closed:  # what is left is written where the writer is
            return False
        try:
            process = self._writer.go_on_in_process(bus, self)
        except Exception as error:
            self._failed = True
            logger.warning("a writer stays on its thread, no process can be had for its images: %s", error)
            return False
        assert process.lane is not None
        process.lane.put(event, None)  # its routes begin behind this one
        self._moved = True
        return True
