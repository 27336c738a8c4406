"""Define the events that report the health of a run: failures, losses of events, slow parts, a lost loss."""

from __future__ import annotations

from eventloop.events.base import Event
from eventloop.events.types import _LoopEvent


class HandlerFailed(Event, kw_only=True):
    """A background subscriber raised an error, or a delivery exceeded its `stall_timeout`.

    `error` is the exception's text, `count` the failed events so far, `cost` the seconds of the delivery.
    `logged` says that the subscriber has named the failure in the log itself, so the console does not.
    """

    handler: str = ""
    error: str = ""
    count: int = 0
    cost: float = 0.0
    logged: bool = False


class EventsDropped(Event, kw_only=True):
    """A subscriber missed `count` events since the last such event, because its queue was full."""

    handler: str = ""
    count: int = 0


class LoaderStall(_LoopEvent, kw_only=True):
    """A median iteration waits for the train loader for more than 30 % of its time. Emitted once a run.

    `share` is that part of an iteration, 0..1, and `advice` is a sentence with a remedy.
    """

    share: float = 0.0
    advice: str = ""


class SlowHandler(Event, kw_only=True):
    """A handler exceeds its `budget_us`. Emitted once per handler.

    `cost` is the p99 of its calls in seconds, and `count` the number of measured calls.
    """

    handler: str = ""
    count: int = 0
    cost: float = 0.0


class SlowRank(_LoopEvent, kw_only=True):
    """All ranks wait for one slow rank. Emitted on every rank, once while this rank stays slow in this phase.

    `phase` takes `seconds` of an iteration on the slow rank, and all phases together take `longer` seconds
    more than on the median rank; neither includes waits for other ranks. `advice` is a sentence with these
    facts.
    """

    rank: int = 0
    phase: str = ""
    seconds: float = 0.0
    longer: float = 0.0
    advice: str = ""


class InvalidLoss(_LoopEvent, kw_only=True):
    """The loss of iteration `iter` is NaN or infinite. Emitted once by a trainer, as soon as it is found.

    It is found when losses are logged, when a checkpoint is saved, or at the end of the run. `advice` is a
    sentence with the loss and a remedy.
    """

    advice: str = ""
