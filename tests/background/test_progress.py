"""Limits of time of the background are limits of standstill: what computes is slow, not stuck."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, process_time, sleep, thread_time
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from eventloop.processes import cpu_time
from tests.conftest import DEADLINE
from tests.support import process_handlers as handlers
from tests.support.company import busy_machine
from tests.support.internals import substitute
from tests.support.process_support import Lines, Start, emit, pid_of, stands_still, until

pytest_plugins = ("tests.support.process_fixtures",)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has clocks of other processes")

PATIENT = 1.0
"""The `drain_timeout` of the tests: what computes has a hundredth of a processor in it on any machine."""


@pytest.fixture
def go(lines: Lines) -> Iterator[Callable[[], None]]:
    """Let what computes return; at the end of the test at the latest."""
    path = Path(f"{os.environ['LOG']}.go")
    yield path.touch
    path.touch()


@pytest.fixture
def at_the_extension(go: Callable[[], None]) -> Iterator[list[str]]:
    """Let what computes return when the log says that it is waited for; returns what the log says."""
    said = list[str]()

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("waiting for background subscribers"):
                said.append(record.getMessage())
                go()

    hears = Hears()
    logging.getLogger("eventloop").addHandler(hears)
    yield said
    logging.getLogger("eventloop").removeHandler(hears)


@pytest.mark.parametrize("how", ["flush", "close"])
@pytest.mark.parametrize(
    ("handler", "place", "does"),
    [
        (handlers.ComputesWhenMade(), "process", "its worker process is importing its modules"),
        (handlers.compute, "process", "has been in one delivery for "),
        (handlers.compute, "thread", "has been in one delivery for "),
    ],
    ids=["start", "process", "thread"],
)
def test_what_computes_is_waited_for(
    bus: Bus, at_the_extension: list[str], handler: Any, place: str, does: str, how: str
) -> None:
    """In its start or in one delivery, it has more than its time; the log says what it does."""
    bus.drain_timeout = PATIENT
    subscription = bus.subscribe(handler, "after_train_iter", offload=place, name="far")
    emit(bus, 3)
    until(Path(f"{os.environ['LOG']}.computes").exists)  # the start of an interpreter may take longer

    report = getattr(bus, how)()

    assert report.complete
    assert subscription.stats.delivered == 3
    assert f"far has 3 left, and {does}" in at_the_extension[0]


def test_a_callback_that_computes_is_waited_for(bus: Bus, at_the_extension: list[str]) -> None:
    """A close does not leave a writer in the middle of its `on_close`."""
    bus.drain_timeout = PATIENT
    ended = list[bool]()

    def on_close() -> None:
        handlers.compute()
        ended.append(True)

    bus.subscribe(print, "after_train_iter", offload="thread", on_close=on_close, name="near")

    assert bus.close().complete
    assert ended == [True]
    assert "near has 0 left, and has been in on_close for " in at_the_extension[0]


@pytest.mark.parametrize("how", ["start", "delivery"])
def test_what_stands_still_is_not_waited_for(
    bus: Bus, start: Start, lines: Lines, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that waits for what never comes has its time and no more."""
    bus.drain_timeout = PATIENT
    subscription = start(handlers.HangsWhenMade() if how == "start" else handlers.hang)
    emit(bus, 3)
    until(lines)  # the start of its interpreter is past
    until(lambda: stands_still(subscription))  # on a busy machine the line is written long before

    report = bus.close()

    assert not report.complete
    assert "waiting for background subscribers" not in caplog.text


@pytest.mark.slow
def test_a_long_start_is_not_ended(
    bus: Bus,
    start: Start,
    lines: Lines,
    go: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker that computes in its imports may take longer than their limit."""
    substitute(monkeypatch, "process_runner.START_SECONDS", 0.5)
    subscription = start(handlers.ComputesWhenMade())
    emit(bus, 3)
    worker = pid_of(subscription)
    until(lambda: cpu_time.of_process(worker) > 1.5)  # of a processor, so three times the limit at least

    go()
    bus.flush(DEADLINE)

    assert lines() == ["0", "1", "2"]
    assert pid_of(subscription) == worker
    assert "died" not in caplog.text


@pytest.mark.slow
def test_a_start_that_stands_still_is_ended(
    bus: Bus, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker is killed, started again, and given up in the end."""
    substitute(monkeypatch, "process_runner.START_SECONDS", 1.0)
    subscription = start(handlers.HangsWhenMade())
    emit(bus, 3)

    until(lambda: subscription.stats.error.startswith("[error]"))

    assert "it got nowhere in its start for 1 s" in caplog.text
    assert "its worker process died 3 times in a row before it was ready" in subscription.stats.error


@pytest.mark.slow
def test_a_worker_starts_on_a_busy_machine(bus: Bus, start: Start, lines: Lines) -> None:
    """Its modules take 2 s of a processor, and each processor has two busy processes besides: each event of 8 s is
    delivered, although the close leaves no more time than by default."""
    bus.drain_timeout = 10.0
    emitted = 0
    with busy_machine(2):
        subscription = start(handlers.BurnsWhenMade())
        until_then = monotonic() + 8.0
        while monotonic() < until_then:
            bus.emit(AfterTrainIter(iter=emitted))
            emitted += 1
            sleep(0.01)

        report = bus.close()

    assert report.complete
    assert lines() == [str(number) for number in range(emitted)]
    assert subscription.stats.delivered == emitted


def test_cpu_time() -> None:
    """It is that of one thread, or of a process with all threads; what is unknown has none."""
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    assert thread.native_id is not None
    own = threading.get_native_id()
    before = cpu_time.of_thread(own), cpu_time.of_process(os.getpid()), cpu_time.of_thread(thread.native_id)

    while cpu_time.of_thread(own) - before[0] < 0.2:
        pass

    assert cpu_time.of_process(os.getpid()) - before[1] > 0.1
    assert cpu_time.of_thread(thread.native_id) - before[2] < 0.1
    assert (cpu_time.of_process(2**30), cpu_time.of_thread(2**30)) == (0.0, 0.0)
    go.set()
    thread.join()


def test_cpu_time_is_exact() -> None:
    """It has no steps of a clock tick: one step would be progress of a worker that stands still."""
    own = threading.get_native_id()

    process = process_time(), cpu_time.of_process(os.getpid()), process_time()
    thread = thread_time(), cpu_time.of_thread(own), thread_time()

    assert process == tuple(sorted(process))
    assert thread == tuple(sorted(thread))
