"""eventloop: a PyTorch training engine built as an event bus.

`from eventloop.bus import Bus` imports no torch; names here that need it are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from eventloop.bus import Bus as Bus
from eventloop.event_log import read_events as read_events
from eventloop.events import Event as Event
from eventloop.peer_names import explain_absent
from eventloop.priority import Priority as Priority
from eventloop.registry import HOOKS as HOOKS
from eventloop.registry import WRITERS as WRITERS
from eventloop.registry import register as register

# At once, and not when it is first used: importing a module binds its name in the package, so that this name would be
# the function or the module, depending on what was imported before. What else the module has is imported from it.
from eventloop.replay import replay as replay

if TYPE_CHECKING:
    from eventloop.loops import SkipIteration as SkipIteration
    from eventloop.metrics import EventStorage as EventStorage
    from eventloop.metrics import get_event_storage as get_event_storage
    from eventloop.trainer import Trainer as Trainer

__version__ = "0.1.0"

__all__ = [
    "HOOKS",
    "WRITERS",
    "Bus",
    "Event",
    "EventStorage",
    "Priority",
    "SkipIteration",
    "Trainer",
    "get_event_storage",
    "read_events",
    "register",
    "replay",
]

_NEED_TORCH = {
    "EventStorage": "eventloop.metrics",
    "SkipIteration": "eventloop.loops",
    "Trainer": "eventloop.trainer",
    "get_event_storage": "eventloop.metrics",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    explain_absent("eventloop", name)


def __dir__() -> list[str]:
    return [*globals(), *_NEED_TORCH]
