"""Say what one background subscriber is doing, to a flush or close that waits for it."""

from __future__ import annotations

from eventloop.background.queues.subscriber import Subscriber

STUCK_SECONDS = 1.0
"""The seconds after which a delivery that a flush or close waited for in vain is logged as stuck."""


def add_vain_wait(subscriber: Subscriber, seconds: float) -> None:
    """Note that a thread waited this many seconds for the current delivery, and has stopped waiting."""
    began, took, _ = subscriber.runner.call()
    if began:
        subscriber.waited_in_vain = began, waited(subscriber) + min(took, seconds)


def waited(subscriber: Subscriber) -> float:
    """Return the seconds that callers have waited in vain for the current delivery."""
    began, _, _ = subscriber.runner.call()
    since, seconds = subscriber.waited_in_vain
    return seconds if began and began == since else 0.0


def stuck(subscriber: Subscriber) -> str:
    """Describe what the subscriber is stuck in, or what its events wait for; "" if it is not stuck."""
    runner, ended_by = subscriber.runner, subscriber.account.ended_by
    if ended_by in ("", "closed"):
        if runner.starting and subscriber.queued:
            return doing(subscriber)
        if obstacle := runner.obstacle():
            return obstacle
    if not waited(subscriber) or ended_by == "stalled":  # then it is reported already
        return ""
    _, took, _ = runner.call()
    return f"stuck for {took:.1f} s in {_call(subscriber)}" if took >= STUCK_SECONDS else ""


def doing(subscriber: Subscriber) -> str:
    """Describe what the subscriber does: a delivery, a callback or the start of its worker; "" if idle."""
    if subscriber.runner.starting:
        return "its worker process was still importing its modules"
    began, took, _ = subscriber.runner.call()
    return f"in {_call(subscriber)} for {took:.1f} s" if began else ""


def at_work(subscriber: Subscriber) -> str:
    """Describe what a subscriber does that computes, and has delivered nothing meanwhile."""
    if subscriber.runner.starting:
        return "its worker process is importing its modules"
    _, took, _ = subscriber.runner.call()
    return f"has been in {_call(subscriber)} for {took:.0f} s"


def _call(subscriber: Subscriber) -> str:
    _, _, callback = subscriber.runner.call()
    return (callback or "one delivery") + subscriber.runner.awaited()
