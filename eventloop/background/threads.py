"""Mark the threads that the background runs, by which a call from one of them is recognised."""

from __future__ import annotations

import threading


class BackgroundThread(threading.Thread):
    """A thread of a subscriber, or of the keeper that supervises the queues; daemonic."""


def on_background_thread() -> bool:
    """Return whether the calling thread is a `BackgroundThread`, whatever its name.

    Such a thread must not wait for the background, which would wait for it.
    """
    return isinstance(threading.current_thread(), BackgroundThread)
