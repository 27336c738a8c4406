"""Deliver all events at the end of a run, or only some after a second Ctrl-C, and log the lost ones."""

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
"""The `reason` of a closing event whose hand-written loop was left by `break`, `return` or an exception."""
ERROR = "error"
"""The `reason` of a closing event after an error."""
AT_ONCE_SECONDS = 0.2
"""Seconds for background subscribers after a second Ctrl-C. Only hanging subscribers use them up."""


def ends_at_once(trainer: StoppableTrainer) -> bool:
    """Return whether the run is ended by a Ctrl-C that came after a request to stop, or by a second one.

    Nothing may be waited for then.
    """
    error = trainer.failure
    if not isinstance(error, KeyboardInterrupt):
        return False
    if trainer.asked_to_stop:  # by the first Ctrl-C, or otherwise
        return True
    earlier = error.__context__
    while earlier is not None and not isinstance(earlier, KeyboardInterrupt):
        earlier = earlier.__context__
    return earlier is not None


def log_rest(trainer: StoppableTrainer) -> None:
    """Log the metrics that handlers of `after_run` put after the logger ran."""
    metrics = trainer.metrics
    post_pending, metrics.post_pending = metrics.post_pending, None  # it holds the trainer, which holds it
    if post_pending is not None and (metrics.pending or metrics.pending_media):
        post_pending()


def drain(trainer: StoppableTrainer, *, closes: bool, at_once: bool) -> None:
    """Deliver all events at the end of a run, and log what was lost.

    Args:
        closes: whether to close the bus too, as after an error or a signal, when the program may end here.
            A signal that ends the program during the delivery has the same effect.
        at_once: whether to give writers only a moment, as after a second Ctrl-C; events left then are
            lost. A Ctrl-C during the delivery has the same effect.
    """
    trainer.delivering, trainer.running = True, False
    bus = trainer.bus
    if not isinstance(trainer.failure, Exception | None):  # KeyboardInterrupt, SystemExit
        bus.overtime = False
    exit_by(inf)

    def ends() -> bool:
        return closes or trainer.ends_program

    with bus.ending_run(ends):
        try:
            if not ends():
                report = bus.flush()
            if ends():  # from a signal on, one short wait is all: the exit would wait as long again
                if at_once or not bus.overtime:
                    exit_by(monotonic() + (AT_ONCE_SECONDS if at_once else bus.patience))
                report = bus.close(AT_ONCE_SECONDS if at_once else None)
        except KeyboardInterrupt:
            exit_by(monotonic() + AT_ONCE_SECONDS)
            _log_losses(bus.close(AT_ONCE_SECONDS))
            raise
        _log_losses(report)
    if not at_once:
        bus.deliver_mail(trainer)  # health events of the drain itself


def _log_losses(report: DrainReport) -> None:
    # not the events left, which the flush or the close has logged
    lost = [stats for stats in report.stats if (stats.dropped or stats.failed) and not stats.losses_logged]
    for line in shortfalls([_without_logged_error(stats) for stats in lost]):
        logger.warning("not everything was delivered: %s", line)


def _without_logged_error(stats: SubscriptionStats) -> SubscriptionStats:
    """Shorten the error that ended a subscriber, because the log has it since then."""
    if not stats.error.startswith("[error]") or len(stats.error) <= ERROR_WIDTH:
        return stats
    begin = stats.error[:ERROR_WIDTH].rstrip()
    return msgspec.structs.replace(stats, error=f"{begin}... (logged when it failed)")
