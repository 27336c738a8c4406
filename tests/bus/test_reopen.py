"""A bus that is opened again after its close: the same subscribers, in the same order, with their accounts."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.costs.spans import SpanRecorder
from eventloop.events import AfterTrainIter, HandlerFailed, ScalarsLogged
from tests.conftest import DEADLINE, Held
from tests.support import process_handlers as handlers
from tests.support.process_support import Lines, Start
from tests.support.spilling import emit, in_both_kinds, iters, subscribe

pytest_plugins = ["tests.support.process_fixtures"]


def close_and_reopen(bus: Bus) -> None:
    """Close it, and open it again."""
    bus.close(DEADLINE)
    bus.reopen()


@in_both_kinds
def test_it_delivers_again(bus: Bus, kind: str) -> None:
    """What is emitted while it is closed is dropped and counted; the account goes on, and the last events are known.
    To reopen an open bus changes nothing."""
    seen: list[Any] = []
    bus.subscribe(print, "scalars_logged", offload="thread", when=lambda event: False)
    taking = subscribe(bus, kind, seen.append)
    bus.emit(ScalarsLogged(step=5))
    emit(bus, 3)
    bus.reopen()
    bus.close()
    emit(bus, 2, start=10)
    bus.reopen()
    latest = bus.latest(ScalarsLogged), bus.latest(AfterTrainIter)
    emit(bus, 2, start=20)

    assert bus.flush(DEADLINE)
    assert latest == (ScalarsLogged(step=5), AfterTrainIter(iter=11))
    assert iters(seen) == [0, 1, 2, 20, 21]
    assert not bus.closed
    assert (taking.stats.delivered, taking.stats.dropped, taking.stats.calls) == (5, 2, 5)
    assert taking.stats.queued == 0


@pytest.mark.slow
def test_a_worker_process_begins_anew(bus: Bus, start: Start, lines: Lines) -> None:
    """It is given what comes from then on."""
    subscription = start(handlers.record)
    emit(bus, 2)
    close_and_reopen(bus)
    emit(bus, 2, start=2)

    assert bus.close(DEADLINE).ok
    assert lines() == ["0", "1", "2", "3"]
    assert subscription.stats.delivered == 4


def test_order_filters_once_and_pauses_stay() -> None:
    """A filter that counts goes on counting, and what fired once does not fire again."""
    with Bus() as bus:
        seen: dict[str, list[Any]] = {name: [] for name in ("every", "once", "paused", "sync", "gone")}
        bus.subscribe(seen["sync"].append, "handler_failed", name="sync", every=2)
        bus.subscribe(seen["every"].append, "handler_failed", name="every", every=2, offload="thread")
        bus.subscribe(seen["once"].append, "handler_failed", name="once", once=True, offload="thread")
        paused = bus.subscribe(seen["paused"].append, "handler_failed", name="paused", offload="thread")
        gone = bus.subscribe(seen["gone"].append, "handler_failed", name="gone", offload="thread")
        before = [row.name for row in bus.plan("handler_failed")]
        bus.emit(HandlerFailed(count=1))
        paused.pause()
        gone.cancel()
        close_and_reopen(bus)
        bus.emit(HandlerFailed(count=2))
        assert bus.flush(DEADLINE)

        assert [row.name for row in bus.plan("handler_failed")] == [n for n in before if n != "gone"]
        counts = {name: [event.count for event in events] for name, events in seen.items()}
        assert counts | {"gone": []} == {"sync": [2], "every": [2], "once": [1], "paused": [1], "gone": []}
        paused.resume()
        bus.emit(HandlerFailed(count=3))
        assert bus.flush(DEADLINE)
        assert [event.count for event in seen["paused"]] == [1, 3]


def test_one_that_an_error_disabled_begins_anew(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """What it was not given stays in the account. A second close closes it once more, and repeats nothing of the first
    one's losses."""
    seen: list[Any] = []

    def fails_first(event: AfterTrainIter) -> None:
        if event.iter == 0:
            raise OSError("disk full")
        seen.append(event.iter)

    failing = bus.subscribe(
        fails_first, "after_train_iter", offload="thread", on_close=lambda: seen.append("closed")
    )
    emit(bus, 3)
    close_and_reopen(bus)
    caplog.clear()
    emit(bus, 2, start=3)
    bus.close(DEADLINE)

    assert seen == ["closed", 3, 4, "closed"]
    assert (failing.stats.failed, failing.stats.dropped, failing.stats.delivered) == (1, 2, 2)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_what_a_close_has_left_counts_as_dropped(held: Held) -> None:
    """The one that is still in its delivery is waited for; nothing is delivered twice."""
    bus = Bus(drain_timeout=DEADLINE)
    holding = bus.subscribe(held, "after_train_iter", offload="thread")
    emit(bus, 3)
    assert held.entered.wait(DEADLINE)
    bus.close(0.01)
    assert holding.stats.queued == 3

    held.let_go()
    bus.reopen()
    emit(bus, 1, start=9)

    assert bus.close(DEADLINE).complete
    assert iters(held.seen) == [0, 9]
    assert (holding.stats.delivered, holding.stats.dropped) == (2, 2)


def test_one_that_hangs_is_given_nothing_more(
    no_thread_left: None, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread is in the user's code, which a second one must not enter; the log names it, and the others go on."""
    bus, seen = Bus(drain_timeout=0.05), list[Any]()
    bus.subscribe(held, "after_train_iter", offload="thread", name="hung")
    bus.subscribe(seen.append, "after_train_iter", offload="thread", name="fine")
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    bus.close()

    bus.reopen()
    emit(bus, 2, start=1)
    report = bus.close(DEADLINE)

    assert iters(seen) == [0, 1, 2]
    assert "subscriber hung gets no more events: its last delivery had not ended" in caplog.text
    assert [(stats.name, stats.dropped) for stats in report.stats] == [("hung", 2), ("fine", 0)]


def test_while_another_thread_closes(no_thread_left: None, held: Held) -> None:
    """It is refused, as what that delivers would be lost; afterwards the bus opens."""
    bus = Bus(drain_timeout=0.01)
    holding = bus.subscribe(held, "after_train_iter", offload="thread")
    emit(bus, 5)
    assert held.entered.wait(DEADLINE)
    closing = threading.Thread(target=bus.close, args=(DEADLINE,))
    closing.start()
    while not bus.closed:
        pass

    with pytest.raises(RuntimeError, match=r"drain_timeout=0\.01 s for another thread.*closing"):
        bus.reopen()
    held.let_go()
    closing.join(DEADLINE)
    bus.reopen()
    emit(bus, 1, start=5)

    assert bus.close(DEADLINE).ok
    assert iters(held.seen) == [*range(6)]
    assert (holding.stats.delivered, holding.stats.queued) == (6, 0)


def test_a_recorder_goes_on(bus: Bus) -> None:
    """It has the deliveries before the close and after it."""
    bus.subscribe(lambda event: None, "after_train_iter", offload="thread", name="taking")
    recorder = SpanRecorder()
    with bus.record(recorder) as recording:
        emit(bus, 1)
        close_and_reopen(bus)
        emit(bus, 1, start=1)
        assert bus.flush(DEADLINE)
    recording.wait(DEADLINE)

    assert [span.track for span in recorder.spans if span.kind == "delivery"] == ["taking", "taking"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_in_a_forked_process_or_a_subscriber_it_is_refused(python: Any) -> None:
    """After a run a child has none of the subscribers; a background subscriber would wait for itself."""
    ran = python("""
import os, sys
from eventloop.bus import Bus
from eventloop.events import AfterRun
bus = Bus()
bus.begins_in_forks = bus.for_runs = True  # a bridge's, after its first run
def reopens(event):
    while not bus.closed:
        pass
    try:
        bus.reopen()
    except RuntimeError as error:
        print(error, flush=True)
bus.subscribe(reopens, AfterRun, offload="thread")
bus.emit(AfterRun())
bus.close()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    bus.reopen()
except RuntimeError as error:
    print(error, flush=True)
os._exit(7)
""")

    assert ran.returncode == 7
    first, second = ran.stdout.splitlines()
    assert first.startswith("bus.reopen was called by a background subscriber")
    assert second.startswith("bus.reopen was called in a forked process, and the subscribers belong to its")
    assert second.endswith("a bridge to another engine must not have run before the fork")
