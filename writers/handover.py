"""Move a writer from its thread to a worker process during a run, at the first image or histogram.

`TensorBoardWriter` uses it. Each event is written once and in order: all events before the first heavy one by
the thread, all others by the process.
"""

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
"""Seconds that the process waits, before it opens its file, for the thread to write its queued events."""


class Moving(Protocol):
    """A writer that can continue in a worker process."""

    def stays(self, event: Event) -> bool:
        """Return whether `event` may be written on the thread; called for each event in order."""

    def go_on_in_process(self, bus: Bus, handover: Handover) -> Subscription:
        """Subscribe a second writer like this one, in a process, for the events from now on."""


class Handover:
    """Filters events between a writer's thread and the worker process that replaces it.

    The thread gets the events before the first heavy one; then the process is started and gets that event and
    all later ones. The bus calls both filters for one event after another, on its routing thread. If no
    process can be started, the thread writes everything.
    """

    def __init__(self, bus: Bus, writer: Moving) -> None:
        self._bus = weakref.ref(bus)  # a subscriber must not keep its bus alive
        self._writer = writer
        self._thread: weakref.ref[Subscription] | None = None
        self._moved = self._failed = False

    def begin(self, thread: Subscription) -> None:
        """Take the subscription of the writer's thread, whose filter is `before_media`."""
        self._thread = weakref.ref(thread)

    @property
    def _lane(self) -> Lane | None:
        """Return the queue of the writer's thread, or None; reopening the bus makes a new one."""
        thread = self._thread() if self._thread is not None else None
        return thread.lane if thread is not None else None

    def before_media(self, event: Event) -> bool:
        """Return whether the thread gets `event`; start the process at the first event for it."""
        if self._moved:
            return False
        return self._failed or self._writer.stays(event) or not self._move(event)

    def wanted(self, event: Event) -> bool:
        """Return False while the thread's subscription is cancelled or paused: this stops the process too."""
        thread = self._thread() if self._thread is not None else None
        return thread is not None and thread.active and not (self._lane and self._lane.paused)

    def wait_for_thread(self) -> None:
        """Wait until the thread has written and flushed the events in its queue, at most `END_SECONDS`."""
        if self._lane is not None:
            self._lane.flush_soon()
            self._lane.wait_flushed(END_SECONDS)

    def _move(self, event: Event) -> bool:
        bus = self._bus()
        if bus is None or bus.closed:  # the thread writes the remaining events
            return False
        try:
            process = self._writer.go_on_in_process(bus, self)
        except Exception as error:
            self._failed = True
            logger.warning(
                "a writer stays on its thread, as no process could be started for its images: %s", error
            )
            return False
        assert process.lane is not None
        process.lane.put(event, None)  # the new subscription is routed only later events
        self._moved = True
        return True
