"""`offload="process"`: what a subscriber in a worker process is given, and which are refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import Event, ImageLogged
from tests.conftest import DEADLINE
from tests.support import process_handlers as handlers
from tests.support.process_support import IN_FLIGHT, Lines, Start, adds_up, emit, pid_of, runner_of, until

pytest_plugins = ("tests.support.process_fixtures",)

# --- what it is given --------------------------------------------------------------------------------------


def test_every_event_arrives_once_and_in_order(bus: Bus, start: Start, lines: Lines) -> None:
    """A worker that lives sees each event once, and the account knows its calls and its seconds."""
    far = start(handlers.record)
    emit(bus, 1000)

    assert bus.flush(DEADLINE)
    assert lines() == [str(i) for i in range(1000)]
    stats = far.stats
    assert (stats.delivered, stats.calls, stats.failed, stats.dropped, stats.queued) == (1000, 1000, 0, 0, 0)
    assert stats.seconds > 0
    assert stats.runs_on == "process"


def test_times_are_of_single_calls(bus: Bus, start: Start) -> None:
    """One acknowledgement is of many; a slow call among them is still seen, and held to a budget."""
    told: list[str] = []
    bus.subscribe(lambda event: told.append(event.handler), "slow_handler")
    start(handlers.spiky, budget_us=20_000)
    emit(bus, 60)
    bus.flush(DEADLINE)
    bus.poll()

    (cost,) = bus.subscriber_costs()
    assert cost.busy.p50 < 0.02 < cost.busy.p99
    assert told == ["far"]


@pytest.mark.parametrize(("batch", "most"), [(True, IN_FLIGHT), (3, 3)])
def test_batch_delivers_lists(bus: Bus, start: Start, lines: Lines, batch: bool | int, most: int) -> None:
    """With `batch=True` the handler gets what waits, up to what may be in flight, with `batch=n` at most n events."""
    far = start(handlers.record_batch, batch=batch)
    emit(bus, 1000)
    bus.flush(DEADLINE)

    assert " ".join(lines()).split() == [str(i) for i in range(1000)]
    assert len(lines()) == far.stats.calls < 1000
    assert max(len(line.split()) for line in lines()) <= most


def test_flush_and_close_are_called_in_the_worker(bus: Bus, start: Start, lines: Lines) -> None:
    """`on_flush` comes after what was emitted before, `on_close` once, at the end."""
    start(handlers.record, on_flush=handlers.flushed, on_close=handlers.closed)
    emit(bus, 2)
    bus.flush(DEADLINE)
    flushed = lines()
    emit(bus, 1)
    bus.close(DEADLINE)

    assert flushed == ["0", "1", "flushed"]
    assert lines() == ["0", "1", "flushed", "0", "closed"]


def test_handler_runs_in_a_child_process_without_torch(bus: Bus, start: Start, lines: Lines) -> None:
    """It is a child of this process, has its priority, and imports torch only if the handler's module does."""
    start(handlers.record_process)
    emit(bus, 1)
    bus.flush(DEADLINE)
    pid, parent, niceness, *modules = lines()[0].split()

    assert int(pid) != os.getpid() == int(parent)
    assert int(niceness) == os.nice(0)
    assert modules == []


def test_users_event_and_values_that_msgpack_lacks_arrive(bus: Bus, start: Start, lines: Lines) -> None:
    """A worker imports the module that declares an event; what msgpack would change is pickled."""
    start(handlers.record_lunch, "meal_served")
    bus.emit(handlers.MealServed(dish="soup", place=Path("/tmp")))
    bus.flush(DEADLINE)

    assert lines() == ["tests.support.process_handlers soup /tmp"]


def test_event_that_no_worker_can_import_arrives_in_likeness(bus: Bus, start: Start, lines: Lines) -> None:
    """A class of the program itself has the same name and fields there, and the nearest base there is."""

    class SupperServed(handlers.MealServed):
        guests: int = 0

    start(handlers.record_anything, SupperServed)
    bus.emit(SupperServed(dish="bread", guests=3, place=Path("/tmp").as_posix()))  # type: ignore[arg-type]
    bus.flush(DEADLINE)

    assert lines() == ["SupperServed SupperServed(dish='bread', place='/tmp', guests=3)"]


def test_standard_streams_are_guarded(
    bus: Bus, start: Start, lines: Lines, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a handler prints goes where the program's prints go; reading its input finds nothing."""
    start(handlers.speak)
    bus.subscribe(handlers.record_stdin, "after_train_iter", offload="process")
    emit(bus, 2)

    assert bus.flush(DEADLINE)
    assert capfd.readouterr().out == "heard 0\nheard 1\n"
    assert lines() == ["''", "''"]


def test_large_events_cross_the_pipe(bus: Bus, start: Start, lines: Lines) -> None:
    """More bytes than a pipe holds, several times over."""
    far = start(handlers.record_process, "image_logged")
    for step in range(5):
        bus.emit(ImageLogged(step=step, data=bytes(3_000_000), shape=(1000, 1000, 3)))

    assert bus.flush(DEADLINE)
    assert far.stats.delivered == len(lines()) == 5


# --- its queue ---------------------------------------------------------------------------------------------


def test_no_more_than_a_window_is_in_flight(bus: Bus, start: Start) -> None:
    """The rest stays in the queue, where the overflow policy applies."""
    far = start(handlers.hang, queue=10, overflow="drop_oldest")
    pid_of(far)
    assert runner_of(far).ready.wait(DEADLINE)
    emit(bus, 500)
    bus.stats()
    until(lambda: runner_of(far).flights.sent)
    emit(bus, 500)
    stats = far.stats

    assert stats.queued <= IN_FLIGHT + 10
    assert stats.dropped == 1000 - stats.queued
    bus.close(0.1)
    assert adds_up(far, 1000)


def test_latest_has_one_in_flight(bus: Bus, start: Start, lines: Lines) -> None:
    """`overflow="latest"` delivers the newest, not those that wait in a pipe."""
    far = start(handlers.record_slowly, overflow="latest")
    assert runner_of(far).ready.wait(DEADLINE)
    os.kill(pid_of(far), signal.SIGSTOP)
    emit(bus, 500)
    until(lambda: far.stats.queued and runner_of(far).flights.sent)
    os.kill(pid_of(far), signal.SIGCONT)
    bus.flush(DEADLINE)

    assert lines()[-1] == "499"
    assert far.stats.delivered == len(lines()) <= 3
    assert far.stats.dropped == 500 - len(lines())


# --- it is refused -----------------------------------------------------------------------------------------


class Unpicklable:
    """Holds what no other process can have."""

    def __init__(self) -> None:
        self.lock = __import__("threading").Lock()

    def method(self, event: Event) -> None:
        pass


def test_what_no_worker_can_import_is_refused(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the line that subscribes it, with the reason; its callbacks run there, too."""

    def inside(event: Event) -> None:
        pass

    def main_function(event: Event) -> None:
        pass

    def orphan(event: Event) -> None:
        pass

    main_function.__module__, main_function.__qualname__ = "__main__", "main_function"
    orphan.__module__, orphan.__qualname__ = "made_by_hand", "orphan"
    changed = handlers.record
    monkeypatch.setattr(handlers, "record", handlers.fail)
    refused: list[tuple[Any, str]] = [
        (inside, r"inside cannot be sent to a worker process: .*inside is defined inside a function"),
        (lambda event: None, r"is a lambda, which has no name to import it by"),
        (main_function, r"main_function is defined in __main__, the program itself"),
        (orphan, r"orphan is defined in made_by_hand, which no import finds"),
        (changed, r"record is a different object now"),
        (Unpicklable().method, r"Unpicklable.method cannot be sent to a worker process: .*lock"),
    ]
    for fn, reason in refused:
        with pytest.raises(TypeError, match=reason):
            bus.subscribe(fn, "after_train_iter", offload="process")
    with pytest.raises(TypeError, match=r"is a lambda, .* or use offload='thread'"):
        bus.subscribe(handlers.record, "after_train_iter", offload="process", on_close=lambda: None)
    assert bus.stats() == []


def test_system_without_signals_masks_is_refused(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows."""
    monkeypatch.delattr(signal, "pthread_sigmask")
    with pytest.raises(ValueError, match="offload='process' needs a POSIX system: use offload='thread'"):
        bus.subscribe(handlers.record, "after_train_iter", offload="process")
