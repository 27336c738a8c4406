"""Define the events about the health of a run: failures, dropped events, slow parts, an invalid loss."""

from __future__ import annotations

from eventloop.events.base import Event
from eventloop.events.types import _LoopEvent


class HandlerFailed(Event, kw_only=True):
    """A background subscriber raised an error, or a delivery exceeded its `stall_timeout`.

    `error` is the exception's text, `count` the number of failed events so far, and `cost` the seconds of the
    delivery. `logged` is true if the subscriber has logged the failure itself, so that the console does not.
    """

    handler: str = ""
    error: str = ""
    count: int = 0
    cost: float = 0.0
    logged: bool = False


class EventsDropped(Event, kw_only=True):
    """A subscriber missed `count` events since its last `events_dropped`, because its queue was full."""

    handler: str = ""
    count: int = 0


class LoaderStall(_LoopEvent, kw_only=True):
    """The median iteration spends more than 30 % of its time waiting for the train loader.

    Emitted once a run. `share` is this part of an iteration, 0..1, and `advice` is a sentence with a remedy.
    """

    share: float = 0.0
    advice: str = ""


class SlowHandler(Event, kw_only=True):
    """A handler exceeds its `budget_us`. Emitted once per handler.

    `cost` is the 99th percentile of its calls in seconds, and `count` the number of measured calls.
    """

    handler: str = ""
    count: int = 0
    cost: float = 0.0


class SlowRank(_LoopEvent, kw_only=True):
    """All ranks wait for `rank`, which is slow. Emitted on every rank, once while it stays slow in `phase`.

    On the slow rank, `phase` takes `seconds` of an iteration. All phases of this rank together take `longer`
    seconds more than those of the median rank. Neither time includes waits for other ranks. `advice` is a
    sentence with these facts.
    """

    rank: int = 0
    phase: str = ""
    seconds: float = 0.0
    longer: float = 0.0
    advice: str = ""


class InvalidLoss(_LoopEvent, kw_only=True):
    """The loss of iteration `iter` is NaN or infinite. A trainer emits this event at most once.

    Losses are checked when they are logged, when a checkpoint is saved, and at the end of the run. `advice`
    is a sentence with the loss and a remedy.
    """

    advice: str = ""
