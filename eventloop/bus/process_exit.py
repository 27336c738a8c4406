"""Drain buses at interpreter exit, and make them inert in a forked process.

Every bus registers itself here when it is created or reopened.
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
"""The backgrounds that may have events left, with the seconds to deliver them at exit, and the bus."""

_exit_by = inf
"""The time by `monotonic()` until which buses deliver at exit; finite once a signal has ended a run."""
EXIT_AT_LEAST_SECONDS = 0.5
"""The seconds for a bus at exit after other buses have used up the time.

Most buses have no events left, and need no more.
"""
FORK_SECONDS = 1.0
"""The total seconds that a fork waits for threads that write a log line."""


def watch(bus: Closable, background: Background) -> None:
    """Drain the bus at interpreter exit, make it inert in a forked process, and end it when it is freed."""
    _buses.add(bus)
    for ended in [b for b in list(_open) if b.finished]:
        unwatch(ended)
    _open[background] = bus.drain_timeout, weakref.ref(bus)
    weakref.finalize(bus, background.end_soon).atexit = False


def unwatch(background: Background) -> None:
    """Drop a closed background, which has no events left to deliver."""
    _open.pop(background, None)


def exit_by(moment: float) -> None:
    """Set the time by `monotonic()` until which the buses of this process deliver at interpreter exit."""
    global _exit_by
    _exit_by = moment


@atexit.register
def _drain_all() -> None:
    """Drain each bus within its own `drain_timeout`, and all within the longest one and `exit_by`.

    The buses deliver at the same time.
    """
    buses = list(_open.items())
    until = min(_exit_by, monotonic() + max((timeout for _, (timeout, _) in buses), default=0.0))
    for background, (timeout, alive) in buses:
        bus = alive()
        end = partial(close, background) if bus is None else bus.end
        end(min(timeout, max(EXIT_AT_LEAST_SECONDS, round(until - monotonic(), 1))))
    if _exit_by < inf:
        skip_collections()


def drain_first() -> None:
    """Drain the buses at exit before the cleanup of libraries that have begun to work by now.

    Python calls the function first that was registered last.
    """
    atexit.unregister(_drain_all)
    atexit.register(_drain_all)


def _silence_all() -> None:
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

    The child renews the handlers' locks, but not the lock inside a file that is being flushed: its first line
    to that file would wait forever for a thread that does not exist in the child. (Standard output and error
    are safe.)
    """
    if not _open:
        return
    deadline = monotonic() + FORK_SECONDS  # a line to a pipe without a reader may never end
    for handler in _log_handlers():
        lock = handler.lock
        if lock is not None and lock.acquire(timeout=max(0.0, deadline - monotonic())):
            _held.locks.append(lock)


def _let_logs_go() -> None:
    """Release the log handlers' locks in parent and child. In the child logging may have renewed them."""
    while _held.locks:
        with suppress(RuntimeError):
            _held.locks.pop().release()


def _log_handlers() -> list[logging.Handler]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    own = [logger.handlers for logger in loggers if isinstance(logger, logging.Logger)]
    return [*dict.fromkeys(handler for handlers in own for handler in handlers)]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_logs, after_in_parent=_let_logs_go, after_in_child=_let_logs_go)
    os.register_at_fork(after_in_child=_silence_all)
