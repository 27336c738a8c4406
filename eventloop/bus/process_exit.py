"""Close all buses at interpreter exit, and make them inert in a forked process.

Every bus registers itself here when it is created or reopened. Its close delivers the remaining events.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from typing import Protocol

from eventloop.background.background import Background
from eventloop.background.closing import close
from eventloop.processes.exiting import skip_collections


class Closable(Protocol):
    """The parts of a bus that are used when the process ends or forks."""

    drain_timeout: float

    def end(self, timeout: float) -> bool:
        """Deliver within `timeout` seconds and close. Return whether everything was delivered."""

    def become_inert(self) -> None:
        """Drop all threads and files, which belong to the parent process."""


_buses: weakref.WeakSet[Closable] = weakref.WeakSet()
_open: dict[Background, tuple[float, weakref.ref[Closable]]] = {}
"""The backgrounds that may have undelivered events, with the seconds of their closes and their buses."""

_exit_by = inf
"""The `monotonic` time until which buses deliver events at exit; finite once a signal has ended a run."""
EXIT_AT_LEAST_SECONDS = 0.5
"""The least seconds for a bus to deliver at exit, even if other buses have used up the common time.

Most buses have no events left, and need less.
"""
FORK_SECONDS = 1.0
"""The longest time in seconds that a fork waits in total for threads that write log lines."""


def watch(bus: Closable, background: Background) -> None:
    """Register a bus to be closed at exit, made inert in a forked process, and ended when it is freed."""
    _buses.add(bus)
    for finished in [each for each in list(_open) if each.finished]:
        unwatch(finished)
    _open[background] = bus.drain_timeout, weakref.ref(bus)
    weakref.finalize(bus, background.end_soon).atexit = False


def unwatch(background: Background) -> None:
    """Drop a closed background, which has no events left to deliver."""
    _open.pop(background, None)


def exit_by(moment: float) -> None:
    """Set the `monotonic` time until which the buses of this process deliver events at interpreter exit."""
    global _exit_by
    _exit_by = moment


@atexit.register
def _drain_all() -> None:
    """Close each bus within its own `drain_timeout`, and all of them within the longest one of these.

    All buses deliver at the same time, so together they need no longer. `exit_by` may have set an earlier
    end.
    """
    buses = list(_open.items())
    deadline = min(_exit_by, monotonic() + max((timeout for _, (timeout, _) in buses), default=0.0))
    for background, (timeout, bus_reference) in buses:
        bus = bus_reference()
        end = partial(close, background) if bus is None else bus.end
        remaining_seconds = round(deadline - monotonic(), 1)  # rounded, because the log shows the timeout
        end(min(timeout, max(EXIT_AT_LEAST_SECONDS, remaining_seconds)))
    if _exit_by < inf:
        skip_collections()


def drain_first() -> None:
    """Let the buses be closed at exit before the libraries that were loaded so far clean up.

    Python calls the functions of `atexit` in the reverse order of their registration.
    """
    atexit.unregister(_drain_all)
    atexit.register(_drain_all)


def _silence_all() -> None:
    """Make every bus inert, in a forked process."""
    _open.clear()
    for bus in list(_buses):
        bus.become_inert()


class _Held(threading.local):
    """The locks of log handlers that the forking thread holds during the fork."""

    def __init__(self) -> None:
        self.locks: list[threading.RLock] = []


_held = _Held()


def _hold_logs() -> None:
    """Hold the locks of all log handlers during a fork, so that no thread is writing a log line.

    In the child `logging` resets these locks, but not the lock inside a file that a thread was flushing. The
    child's first line to that file would wait forever, because this thread does not exist in the child.
    (Standard output and error are safe.)
    """
    if not _open:
        return
    # not longer, because a thread that writes to a full pipe may hold its handler's lock forever
    deadline = monotonic() + FORK_SECONDS
    for handler in _log_handlers():
        lock = handler.lock
        if lock is not None and lock.acquire(timeout=max(0.0, deadline - monotonic())):
            _held.locks.append(lock)


def _let_logs_go() -> None:
    """Release the log handlers' locks after a fork, in the parent and in the child."""
    while _held.locks:
        with suppress(RuntimeError):  # `logging` may have reset the lock in the child, which releases it
            _held.locks.pop().release()


def _log_handlers() -> list[logging.Handler]:
    """Return the handlers of all loggers, each of them once."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers_of_loggers = [logger.handlers for logger in loggers if isinstance(logger, logging.Logger)]
    return [*dict.fromkeys(handler for handlers in handlers_of_loggers for handler in handlers)]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_logs, after_in_parent=_let_logs_go, after_in_child=_let_logs_go)
    os.register_at_fork(after_in_child=_silence_all)
