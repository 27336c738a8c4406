"""What happens to buses at the edges of a process: interpreter exit, fork, and being forgotten."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from contextlib import suppress
from time import monotonic
from typing import Protocol

from eventloop.background.loop import Background


class Closable(Protocol):
    """A bus, as its process ends or forks."""

    drain_timeout: float

    def end(self, timeout: float) -> bool:
        """Deliver within `timeout` seconds and close. Return whether everything was delivered."""

    def become_inert(self) -> None:
        """Let go of threads and files, which are the parent process's."""


_buses: weakref.WeakSet[Closable] = weakref.WeakSet()
_open: dict[Background, tuple[float, weakref.ref[Closable]]] = {}
"""Background sides that may still owe somebody an event, with the seconds each may take to deliver at exit, and its bus."""

EXIT_AT_LEAST_SECONDS = 0.5
"""What a bus gets at exit when others have taken all the time: most have delivered everything by then, and end."""
FORK_SECONDS = 1.0
"""How long a fork may wait, in all, for threads that are writing a log line."""


def watch(bus: Closable, background: Background) -> None:
    """Drain the bus at interpreter exit, make it inert in a forked child, and let a forgotten one end itself."""
    _buses.add(bus)
    for ended in [b for b in list(_open) if b.finished]:
        forget(ended)
    _open[background] = bus.drain_timeout, weakref.ref(bus)
    weakref.finalize(bus, background.end_soon).atexit = False


def forget(background: Background) -> None:
    """It is closed: nothing is left to drain."""
    _open.pop(background, None)


@atexit.register
def _drain_all() -> None:
    """Each within its own time, all of them within the longest: while one is waited for the others deliver."""
    buses = list(_open.items())
    until = monotonic() + max((timeout for _, (timeout, _) in buses), default=0.0)
    for background, (timeout, alive) in buses:
        bus = alive()
        end = background.close if bus is None else bus.end
        end(min(timeout, max(EXIT_AT_LEAST_SECONDS, round(until - monotonic(), 1))))


def _silence_all() -> None:
    _open.clear()
    for bus in list(_buses):
        bus.become_inert()


class _Held(threading.local):
    """The locks that the forking thread took."""

    def __init__(self) -> None:
        self.locks: list[threading.RLock] = []


_held = _Held()


def _hold_logs() -> None:
    """Let no thread be in the middle of a log line when the process is copied. Background subscribers log, and are
    logged about. The child renews the handlers' locks, but not the one inside a file that is being flushed: the
    child's first line to it would wait forever for a thread that is not there. (Standard output and error are safe.)
    """
    if not _open:
        return
    deadline = monotonic() + FORK_SECONDS  # a line that nobody reads may never end
    for handler in _log_handlers():
        lock = handler.lock
        if lock is not None and lock.acquire(timeout=max(0.0, deadline - monotonic())):
            _held.locks.append(lock)


def _let_logs_go() -> None:
    """In parent and child, where logging may have renewed a lock: then there is nothing to release."""
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
