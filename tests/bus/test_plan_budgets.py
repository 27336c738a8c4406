"""The plan says which budget a handler has: in its rows and in the table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from eventloop.bus import Bus
from eventloop.events import AfterRun, BeforeRun


async def later(event: AfterRun) -> None: ...


def receiver(sender: object, event: BeforeRun) -> None:
    """As blinker calls it."""


def test_rows_have_the_budget_as_it_was_given(bus: Bus) -> None:
    """In microseconds, whatever the number; None without one, as for a receiver connected blinker's way."""
    for budget_us in (35, 0.7, 1234567, None):
        bus.subscribe(lambda event: None, BeforeRun, budget_us=budget_us)
    bus.signal("before_run").connect(receiver)
    bus.subscribe(later, AfterRun, budget_us=1.5)
    bus.subscribe(print, AfterRun, offload="thread", budget_us=100)

    rows: list[dict[str, Any]] = msgspec.to_builtins(bus.plan(BeforeRun))
    assert [row["budget_us"] for row in rows] == [35, 0.7, 1234567, None, None]
    assert [row.budget_us for row in bus.plan(AfterRun)] == [1.5, 100]


def test_the_table_has_it_beside_the_filter(bus: Bus) -> None:
    """Alone if there is no filter; the filter itself stays as it is."""
    bus.subscribe(lambda event: None, BeforeRun, name="one", budget_us=500)
    bus.subscribe(lambda event: None, BeforeRun, name="two", every=10, budget_us=0.25)
    bus.subscribe(lambda event: None, BeforeRun, name="three", every=2)

    assert str(bus).splitlines() == [
        "event       order  priority  handler  runs on  filter",
        "----------  -----  --------  -------  -------  -----------------------",
        "before_run      1        50  one      sync     budget_us=500",
        "                2        50  two      sync     every=10 budget_us=0.25",
        "                3        50  three    sync     every=2",
    ]
    assert [row.filter for row in bus.plan(BeforeRun)] == ["", "every=10", "every=2"]


def test_the_table_of_the_background_has_it(bus: Bus) -> None:
    """Before the queue."""
    bus.subscribe(print, BeforeRun, offload="thread", name="far", budget_us=1234567)

    assert str(bus).splitlines()[-1] == (
        "before_run      -         -  far      thread   budget_us=1234567  1,024  spill"
    )


def test_an_int_that_no_float_can_hold_is_refused(bus: Bus) -> None:
    """As infinity is."""
    with pytest.raises(ValueError, match="budget_us, in microseconds, must be a finite number, got 1000"):
        bus.subscribe(lambda event: None, BeforeRun, budget_us=10**400)
