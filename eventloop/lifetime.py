"""What happens to buses at the edges of a process: interpreter exit, fork, and being forgotten."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING

from eventloop.background import Background

if TYPE_CHECKING:
    from eventloop.bus import Bus

_buses: weakref.WeakSet[Bus] = weakref.WeakSet()
_open: dict[Background, float] = {}
"""Background sides that may still owe somebody an event, with the seconds each may take to deliver at exit."""


def watch(bus: Bus, background: Background) -> None:
    """Drain the bus at interpreter exit, make it inert in a forked child, and let a forgotten one end itself."""
    _buses.add(bus)
    for ended in [b for b in list(_open) if b.closed]:
        forget(ended)
    _open[background] = bus.drain_timeout
    weakref.finalize(bus, background.end_soon).atexit = False


def forget(background: Background) -> None:
    """It is closed: nothing is left to drain."""
    _open.pop(background, None)


@atexit.register
def _drain_all() -> None:
    for background, timeout in list(_open.items()):
        background.close(timeout)


def _silence_all() -> None:
    _open.clear()
    for bus in list(_buses):
        bus.become_inert()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_all)
