"""Look at the runner of a subscriber in a worker process from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

from eventloop.background.queues.awaited import waited
from eventloop.background.workers.process_runner import ProcessRunner
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter
from tests.conftest import DEADLINE

IN_FLIGHT = 64
"""The events that a worker process has at most, beside those in its subscriber's queue."""
Lines = Callable[[], list[str]]
Start = Callable[..., Subscription]


def emit(bus: Bus, times: int) -> None:
    for i in range(times):
        bus.emit(AfterTrainIter(iter=i))


def until(condition: Callable[[], object]) -> None:
    """Wait for what another process does."""
    deadline = monotonic() + DEADLINE
    while not condition():
        assert monotonic() < deadline
        sleep(0.002)


def waits_long(subscription: Subscription) -> None:
    """Somebody has waited for what it is at, in vain, and as long as `DEADLINE`: nobody waits again."""
    assert subscription.subscriber is not None
    assert 0.0 < waited(subscription.subscriber) <= 0.2
    began, _, _ = subscription.subscriber.runner.call()
    subscription.subscriber.waited_in_vain = began, DEADLINE


def runner_of(subscription: Subscription) -> ProcessRunner:
    assert subscription.subscriber is not None
    assert isinstance(subscription.subscriber.runner, ProcessRunner)
    return subscription.subscriber.runner


def pid_of(subscription: Subscription) -> int:
    until(lambda: runner_of(subscription).worker)
    worker = runner_of(subscription).worker
    assert worker is not None
    return worker.pid


def stands_still(subscription: Subscription) -> bool:
    """Whether the main thread of the worker waits for something, as Linux says."""
    stat = Path(f"/proc/{pid_of(subscription)}/stat").read_text(encoding="utf-8")
    return stat.rpartition(")")[2].split()[0] == "S"


def kill(subscription: Subscription) -> int:
    """Kill the worker there is, and return its process id."""
    pid = pid_of(subscription)
    os.kill(pid, signal.SIGKILL)
    return pid


def adds_up(subscription: Subscription, accepted: int) -> bool:
    stats = subscription.account()
    return accepted == stats.delivered + stats.failed + stats.dropped + stats.queued
