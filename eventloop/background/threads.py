"""Define the class of the threads that the background runs, so that a call on one of them is recognised."""

from __future__ import annotations

import threading


class BackgroundThread(threading.Thread):
    """A daemon thread of a subscriber, or the thread that supervises the queues."""


def on_background_thread() -> bool:
    """Return whether the calling thread is a `BackgroundThread`.

    Such a thread must not wait for the background, which may be waiting for this thread.
    """
    return isinstance(threading.current_thread(), BackgroundThread)
