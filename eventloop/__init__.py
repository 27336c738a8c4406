"""eventloop: a PyTorch training engine built as an event bus.

`from eventloop.bus import Bus` imports no torch; the names in this package that need torch, and those that
read event logs, are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from eventloop._version import __version__ as __version__
from eventloop.bus import Bus as Bus
from eventloop.events import Event as Event
from eventloop.events.priority import Priority as Priority
from eventloop.migration.names import explain_absent
from eventloop.registry import HOOKS as HOOKS
from eventloop.registry import WRITERS as WRITERS
from eventloop.registry import register as register

if TYPE_CHECKING:
    from eventloop.data.seeding import seed_everything as seed_everything
    from eventloop.eventlog.reader import read_events as read_events
    from eventloop.eventlog.replay import replay as replay
    from eventloop.metrics import EventStorage as EventStorage
    from eventloop.metrics import get_event_storage as get_event_storage
    from eventloop.training.loop_steps import SkipIteration as SkipIteration
    from eventloop.training.trainer import Trainer as Trainer
    from eventloop.tuning.curve import LRCurve as LRCurve

__all__ = [
    "HOOKS",
    "WRITERS",
    "Bus",
    "Event",
    "EventStorage",
    "LRCurve",
    "Priority",
    "SkipIteration",
    "Trainer",
    "get_event_storage",
    "read_events",
    "register",
    "replay",
    "seed_everything",
]

_ON_FIRST_USE = {
    "EventStorage": "eventloop.metrics",
    "LRCurve": "eventloop.tuning.curve",
    "SkipIteration": "eventloop.training.loop_steps",
    "Trainer": "eventloop.training.trainer",
    "get_event_storage": "eventloop.metrics",
    "read_events": "eventloop.eventlog.reader",
    "replay": "eventloop.eventlog.replay",
    "seed_everything": "eventloop.data.seeding",
}


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    explain_absent("eventloop", name)


def __dir__() -> list[str]:
    return [*globals(), *_ON_FIRST_USE]
