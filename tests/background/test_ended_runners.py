"""Subscribers whose thread, task or loop has ended, whatever ended it: nobody waits for them, and they are named."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from time import sleep
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, AfterVal
from tests.conftest import DEADLINE
from tests.support import process_handlers as handlers
from tests.support.process_support import Lines, Start, until
from tests.support.spilling import Anything, emit, total

pytest_plugins = ["tests.support.process_fixtures"]

EVENTS = 30

thread_may_exit = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Exits:
    """A value that ends the thread that pickles it, if nothing prevents that."""

    def __reduce__(self) -> Any:
        raise SystemExit(3)


class LeavingLog(logging.Handler):
    """A handler of the log that exits at an error, as some do, but not in the test itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit("an error was logged")


@pytest.fixture
def leaving_log() -> Iterator[None]:
    handler = LeavingLog(logging.ERROR)
    logging.getLogger("eventloop").addHandler(handler)
    yield
    logging.getLogger("eventloop").removeHandler(handler)


def emit_all(bus: Bus, times: int) -> None:
    """Emit in a thread, so that an emit that waits forever fails the test."""
    thread = threading.Thread(target=emit, args=(bus, times), daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive(), "an emit waits for a subscriber that has ended"


def ends(subscription: Subscription) -> bool:
    """Wait until a subscriber has ended, as a close does."""
    assert subscription.subscriber is not None
    return subscription.subscriber.closed.wait(DEADLINE)


async def ignores(event: AfterTrainIter) -> None:
    pass


def slow(event: AfterTrainIter) -> None:
    sleep(0.005)


@pytest.mark.slow
def test_an_event_whose_pickling_exits_fails_alone(
    bus: Bus, start: Start, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    """A SystemExit in `__reduce__` costs its event; the emits that wait for room go on, and the rest arrives."""
    far = start(handlers.record_anything, Anything, "after_train_iter", overflow="block", queue=8)
    bus.emit(Anything(value=Exits()))
    emit_all(bus, EVENTS)

    assert bus.flush(DEADLINE)
    assert (far.stats.delivered, far.stats.failed, far.stats.queued) == (EVENTS, 1, 0)
    assert len(lines()) == EVENTS
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        "cannot be encoded for its field value, a tests.background.test_ended_runners.Exits: SystemExit"
        in line
    )


@pytest.mark.slow
@thread_may_exit
@pytest.mark.usefixtures("leaving_log")
@pytest.mark.parametrize("how", ["thread", "task", "process", "filter"])
def test_a_log_that_exits_leaves_nobody_waiting(bus: Bus, start: Start, how: str) -> None:
    """A subscriber ended by the log of its own error has ended for the emits that wait, and for its account."""
    options: dict[str, Any] = {"overflow": "block", "queue": 4, "on_error": "log"}
    if how == "process":
        bad = start(handlers.fail, **options)
    elif how == "filter":
        options["overflow"] = "drop_oldest"
        bad = bus.subscribe(slow, "after_train_iter", offload="thread", when=lambda event: 1 / 0, **options)
    else:
        bad = bus.subscribe(
            fails_at_once if how == "thread" else fails_in_a_task,
            "after_train_iter",
            offload="thread" if how == "thread" else None,
            **options,
        )

    emit_all(bus, EVENTS)

    assert ends(bad)
    stats = bad.stats
    assert (total(stats), stats.queued, stats.delivered) == (EVENTS, 0, 0)
    assert stats.error.startswith("[error]")


def fails_at_once(event: AfterTrainIter) -> None:
    raise ValueError("no")


async def fails_in_a_task(event: AfterTrainIter) -> None:
    raise ValueError("no")


KILLED = """
import ctypes, logging, sys, time
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from tests.support import process_handlers

logging.basicConfig(format="%(message)s", stream=sys.stdout)
bus = Bus(drain_timeout=60.0)
handler = process_handlers.record if sys.argv[1] == "process" else lambda event: None
called = {"on_close": lambda: print("closed")} if sys.argv[1] == "thread" else {}
far = bus.subscribe(
    handler, "after_train_iter", offload=sys.argv[1], name="far", overflow="block", queue=4, **called)
bus.emit(AfterTrainIter())
bus.flush()
thread = far.subscriber.runner.thread
while thread.is_alive():  # as libraries do that end threads
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    far.subscriber.runner.wake()
    time.sleep(0.0005)
for i in range(30):
    bus.emit(AfterTrainIter(iter=i))
assert far.subscriber.closed.wait(60.0)
stats = far.stats
print(stats.delivered, stats.failed + stats.dropped, stats.queued, stats.error[:7])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "process"])
def test_a_thread_that_is_killed_is_noticed(
    python: Callable[..., CompletedProcess[str]], tmp_path: Path, how: str
) -> None:
    """Emits do not wait for it, `on_close` is called, and its events are counted under its name in the log."""
    ended = python(KILLED, how, LOG=str(tmp_path / "log.txt"))

    assert ended.returncode == 0, ended.stderr
    assert "1 30 0 [error]" in ended.stdout
    assert "far: 30 dropped, 0 failed of 31" in ended.stdout
    assert ("closed" in ended.stdout.splitlines()) == (how == "thread")


def test_a_loop_that_a_task_of_a_subscriber_ends_is_noticed(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """`sys.exit` in a task of its own ends the loop of all coroutines: each is counted and named, and none waited for."""

    async def leaves() -> None:
        sys.exit(4)

    async def creates(event: AfterVal) -> None:
        tasks.append(asyncio.create_task(leaves()))

    tasks: list[asyncio.Task[None]] = []
    bus.subscribe(creates, "after_val", name="creates")
    other = bus.subscribe(ignores, "after_train_iter", overflow="block", queue=2, name="other")
    bus.emit(AfterVal())
    assert ends(other)
    assert isinstance(tasks[0].exception(), SystemExit)
    emit_all(bus, EVENTS)

    assert (total(other.stats), other.stats.dropped, other.stats.queued) == (EVENTS, EVENTS, 0)
    until(lambda: "the event loop of all coroutine subscribers was ended" in caplog.text)
    assert "in leaves" in caplog.text
    assert "the event loop of subscriber other has ended" in other.stats.error

    later = bus.subscribe(ignores, "after_train_iter")
    emit(bus, 3)
    assert bus.flush(DEADLINE)
    assert later.stats.delivered == 3


def test_a_callers_loop_that_ends_without_an_event_is_noticed(bus: Bus) -> None:
    """Its subscriber has ended then, and not at the next event only."""

    async def main() -> Subscription:
        return bus.subscribe(ignores, "after_train_iter", loop=asyncio.get_running_loop())

    ended = asyncio.run(main())
    assert ends(ended)
    emit_all(bus, EVENTS)

    assert (ended.stats.dropped, ended.stats.queued) == (EVENTS, 0)
