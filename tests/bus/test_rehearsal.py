"""A rehearsal: a program is taken up to the moment its run would begin, and nothing is started."""

from __future__ import annotations

import threading

import pytest

from eventloop.bus import Bus
from eventloop.bus.dry_run import Rehearsal, RunReached
from eventloop.events import AfterRun, BeforeRun, BeforeTrain
from tests.support.process_handlers import note_pid


def test_subscribers_are_listed_and_none_is_started() -> None:
    """Neither thread nor process; flush and close wait for nobody, and what is cancelled is no longer listed."""
    before = {*threading.enumerate()}
    with Rehearsal(), Bus() as bus:

        async def later(event: BeforeRun) -> None: ...

        bus.subscribe(later, BeforeRun)
        bus.subscribe(print, AfterRun, offload="thread", overflow="block", queue=3)
        bus.subscribe(note_pid, AfterRun, offload="process", overflow="latest")
        bus.subscribe(print, AfterRun, offload="thread", name="cancelled").cancel()

        rows = [(r.runs_on, r.queue, r.overflow) for r in bus.plan(BeforeRun) + bus.plan(AfterRun)]
        assert bus.flush()
        assert {*threading.enumerate()} <= before  # those of others may end

    assert rows == [("loop", 1024, "spill"), ("thread", 3, "block"), ("process", 1, "latest")]


def test_a_process_that_could_not_be_had_is_refused_all_the_same() -> None:
    """What registration would say it says here."""
    with Rehearsal(), Bus() as bus, pytest.raises(TypeError, match="lambda"):
        bus.subscribe(lambda event: None, AfterRun, offload="process")


def test_a_closed_bus_takes_no_background_subscriber() -> None:
    """As without a rehearsal."""
    with Rehearsal():
        bus = Bus()
        bus.close()
        with pytest.raises(RuntimeError, match="cannot subscribe print: the bus is closed"):
            bus.subscribe(print, AfterRun, offload="thread")


def test_the_first_event_that_somebody_would_hear() -> None:
    """Is where a bus without a trainer is held; one that nobody hears passes."""
    heard: list[BeforeRun] = []
    with Rehearsal() as rehearsal:
        bus = Bus()
        bus.subscribe(heard.append, BeforeRun)
        bus.emit(BeforeTrain())
        assert rehearsal.reached is None
        with pytest.raises(RunReached):
            bus.emit(BeforeRun())

    assert heard == []
    assert rehearsal.reached is not None
    assert rehearsal.reached.event == "before_run"
    assert rehearsal.reached.where.startswith(f"{__file__}:")


def test_buses_made_before_or_after_are_as_ever() -> None:
    """Only those that are made while it is under way belong to it."""
    heard: list[BeforeRun] = []
    earlier = Bus()
    with Rehearsal() as rehearsal:
        earlier.subscribe(heard.append, BeforeRun)
        earlier.emit(BeforeRun())
    later = Bus()
    later.subscribe(heard.append, BeforeRun, offload="thread")
    later.emit(BeforeRun())
    later.close()

    assert len(heard) == 2
    assert (rehearsal.reached, rehearsal.has_buses) == (None, False)
