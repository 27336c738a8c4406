"""Looking at a process lane from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from time import monotonic, sleep

from eventloop.background.workers.subscriber import ProcessLane
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter
from tests.conftest import DEADLINE

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
    assert subscription.lane is not None
    assert 0.0 < subscription.lane.waited <= 0.2
    began, _ = subscription.lane._under_way()
    subscription.lane._in_vain = began, DEADLINE


def lane_of(subscription: Subscription) -> ProcessLane:
    assert isinstance(subscription.lane, ProcessLane)
    return subscription.lane


def pid_of(subscription: Subscription) -> int:
    until(lambda: lane_of(subscription).worker)
    worker = lane_of(subscription).worker
    assert worker is not None
    return worker.pid


def kill(subscription: Subscription) -> int:
    """Kill the worker there is, and return its process id."""
    pid = pid_of(subscription)
    os.kill(pid, signal.SIGKILL)
    return pid


def adds_up(subscription: Subscription, accepted: int) -> bool:
    stats = subscription.account()
    return accepted == stats.delivered + stats.failed + stats.dropped + stats.queued
