"""Create the functions by which an emit queues an event for a background subscriber."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from eventloop.background.background import Background
from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.threads import on_background_thread
from eventloop.events import Event
from eventloop.events.deferred import Stamped

Append = Callable[[Event], None]


def appenders(
    background: Background, subscriber: Subscriber, event_type: type[Event]
) -> tuple[Append, Append]:
    """Return two functions that append an event to a subscriber's list of incoming events.

    Both append it only if it passes the filters of the emitting thread (`Route.early`). The second function
    also stores the time of the emit; the first one does so only with the option `timed`. Without a filter the
    first function is the list's own `append`. With overflow="block" both first wait until the queue has room,
    except on a background thread.
    """
    inbox = subscriber.inbox
    append, early = inbox.incoming.append, inbox.routes[event_type].early
    blocks = subscriber.options.overflow == "block"

    def enqueue(event: Event) -> None:
        if early is None or early(event):
            append(event)

    def enqueue_timed(event: Event) -> None:
        if early is None or early(event):
            append(Stamped(event, perf_counter()))

    def passes_and_has_room(event: Event) -> bool:
        """Return whether the early filter lets an event pass; if so, wait for room in the queue first."""
        passes = early is None or inbox.passes(early, event)
        if passes:
            background.wait_for_room(subscriber)
        return passes

    def enqueue_with_room(event: Event) -> None:
        if passes_and_has_room(event):
            append(event)

    def enqueue_timed_with_room(event: Event) -> None:
        emitted = perf_counter()
        if passes_and_has_room(event):
            append(Stamped(event, emitted))

    timed = enqueue_timed_with_room if blocks else enqueue_timed
    if subscriber.options.timed:
        return timed, timed
    if blocks:
        return enqueue_with_room, timed
    return (append if early is None else enqueue), timed


def counted(background: Background, append: Append) -> Append:
    """Return a function that calls `append`, and counts the event if a background thread emits it.

    A flush waits until this count, `Background.emissions`, stops growing.
    """

    def append_and_count(event: Event) -> None:
        append(event)
        if on_background_thread():
            background.emissions += 1

    return append_and_count
