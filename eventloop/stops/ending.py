"""Deliver the events that are left at the end of a run, and log events that were lost."""

from __future__ import annotations

import logging
from math import inf
from time import monotonic

import msgspec

from eventloop.bus.process_exit import exit_by
from eventloop.bus.subscription import DrainReport, SubscriptionStats
from eventloop.reporting.summary import ERROR_WIDTH, shortfalls
from eventloop.stops.stopping import StoppableTrainer

logger = logging.getLogger("eventloop")

LEFT = "left"
"""The `reason` of closing events after a hand-written loop was left by `break`, `return` or an exception."""
ERROR = "error"
"""The `reason` of closing events after an error."""
AT_ONCE_SECONDS = 0.2
"""Seconds for which the end of a run waits for background subscribers after a second Ctrl-C."""


def ends_at_once(trainer: StoppableTrainer) -> bool:
    """Return whether a second Ctrl-C, or one after another request to stop, has ended the run.

    The end of the run must then wait for nothing.
    """
    error = trainer.failure
    if not isinstance(error, KeyboardInterrupt):
        return False
    if trainer.asked_to_stop:
        return True
    # a first Ctrl-C that raised KeyboardInterrupt itself is in the context of the second one
    earlier = error.__context__
    while earlier is not None and not isinstance(earlier, KeyboardInterrupt):
        earlier = earlier.__context__
    return earlier is not None


def log_rest(trainer: StoppableTrainer) -> None:
    """Log the metrics that handlers of `after_run` have recorded after LoggerHook's own `after_run`."""
    metrics = trainer.metrics
    # removed, because the function refers to the trainer: a reference cycle
    post_pending, metrics.post_pending = metrics.post_pending, None
    if post_pending is not None and (metrics.pending or metrics.pending_media):
        post_pending()


def drain(trainer: StoppableTrainer, *, closes: bool, at_once: bool) -> None:
    """Deliver the events that are left at the end of a run, and log events that were lost.

    Args:
        closes: whether to close the bus too, as after an error or a signal, when the program may end. The bus
            is also closed if a signal that ends the program comes during the delivery.
        at_once: whether to wait only `AT_ONCE_SECONDS`, as after a second Ctrl-C; undelivered events are then
            lost. The wait also becomes this short if a Ctrl-C comes during the delivery.
    """
    trainer.delivering, trainer.running = True, False
    bus = trainer.bus
    if not isinstance(trainer.failure, Exception | None):  # KeyboardInterrupt, SystemExit
        bus.overtime = False
    exit_by(inf)

    def closes_bus() -> bool:
        return closes or trainer.ends_program

    with bus.ending_run(closes_bus):
        try:
            if not closes_bus():
                report = bus.flush()
            if closes_bus():
                if at_once or not bus.overtime:
                    # after a signal the exit must not wait once more for the same subscribers
                    exit_by(monotonic() + (AT_ONCE_SECONDS if at_once else bus.patience))
                report = bus.close(AT_ONCE_SECONDS if at_once else None)
        except KeyboardInterrupt:
            exit_by(monotonic() + AT_ONCE_SECONDS)
            _log_losses(bus.close(AT_ONCE_SECONDS))
            raise
        _log_losses(report)
    if not at_once:
        bus.deliver_mail(trainer)  # runs the handlers of health events that the delivery has caused


def _log_losses(report: DrainReport) -> None:
    """Log a warning for each subscriber that has dropped or failed events.

    The warning does not count events that are still queued, because the bus has logged those itself.
    """
    lost = [stats for stats in report.stats if (stats.dropped or stats.failed) and not stats.losses_logged]
    for line in shortfalls([_with_short_error(stats) for stats in lost]):
        logger.warning("not everything was delivered: %s", line)


def _with_short_error(stats: SubscriptionStats) -> SubscriptionStats:
    """Shorten the error that ended a subscriber; the whole error was logged when the subscriber failed."""
    if not stats.error.startswith("[error]") or len(stats.error) <= ERROR_WIDTH:
        return stats
    begin = stats.error[:ERROR_WIDTH].rstrip()
    return msgspec.structs.replace(stats, error=f"{begin}... (logged when it failed)")
