"""Describe what a background subscriber is doing, for the messages of a flush or close that waits for it."""

from __future__ import annotations

from eventloop.background.queues.subscriber import Subscriber

STUCK_SECONDS = 1.0
"""The seconds after which a delivery counts as stuck, if a flush or close has waited for it in vain."""


def add_vain_wait(subscriber: Subscriber, seconds: float) -> None:
    """Record that a thread has waited this many seconds in vain for the subscriber's current delivery."""
    began, call_seconds, _ = subscriber.runner.call()
    if began:
        subscriber.waited_in_vain = began, waited(subscriber) + min(call_seconds, seconds)


def waited(subscriber: Subscriber) -> float:
    """Return the seconds that threads have waited in vain for the subscriber's current delivery."""
    began, _, _ = subscriber.runner.call()
    awaited_began, seconds = subscriber.waited_in_vain
    return seconds if began and began == awaited_began else 0.0


def stuck(subscriber: Subscriber) -> str:
    """Describe the call in which the subscriber is stuck, or why it cannot deliver; "" if it is not stuck."""
    runner, ended_by = subscriber.runner, subscriber.account.ended_by
    if ended_by in ("", "closed"):
        if runner.starting and subscriber.queued:
            return doing(subscriber)
        if obstacle := runner.obstacle():
            return obstacle
    if not waited(subscriber) or ended_by == "stalled":  # a stall was logged when it was found
        return ""
    _, seconds, _ = runner.call()
    return f"stuck for {seconds:.1f} s in {_call(subscriber)}" if seconds >= STUCK_SECONDS else ""


def doing(subscriber: Subscriber) -> str:
    """Describe the subscriber's current delivery or callback, or the start of its worker; "" if idle."""
    if subscriber.runner.starting:
        return "its worker process was still importing its modules"
    began, seconds, _ = subscriber.runner.call()
    return f"in {_call(subscriber)} for {seconds:.1f} s" if began else ""


def at_work(subscriber: Subscriber) -> str:
    """Describe the call of a subscriber that uses CPU time and has delivered nothing meanwhile."""
    if subscriber.runner.starting:
        return "its worker process is importing its modules"
    _, seconds, _ = subscriber.runner.call()
    return f"has been in {_call(subscriber)} for {seconds:.0f} s"


def _call(subscriber: Subscriber) -> str:
    """Return the name of the current callback or "one delivery", and what the handler waits for."""
    _, _, callback = subscriber.runner.call()
    return (callback or "one delivery") + subscriber.runner.awaited()
