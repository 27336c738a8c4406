"""A writer's `budget_us`: of its class, its own or of a config, it is what its subscriptions have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import ScalarsLogged
from eventloop.registry import build
from eventloop.writers import JSONLWriter, Writer
from tests.conftest import DEADLINE
from tests.writers.conftest import Attach


class Budgeted(JSONLWriter):
    """With a budget of its class."""

    budget_us = 250


def with_budget(writer: Any, budget_us: Any) -> Any:
    """The writer, with a budget of its own."""
    writer.budget_us = budget_us
    return writer


def budgets(bus: Bus) -> list[float | None]:
    """Those of everything that hears scalars."""
    return [row.budget_us for row in bus.plan("scalars_logged")]


@pytest.mark.parametrize(
    ("writer", "budget"),
    [
        (JSONLWriter(), None),
        (Budgeted(), 250),
        (with_budget(Budgeted(), 40), 40),
        (with_budget(Budgeted(), None), None),
        (build({"type": "JSONLWriter", "budget_us": 7.5}), 7.5),
    ],
)
def test_the_subscription_has_the_budget(writer: Writer, budget: float | None, attach: Attach) -> None:
    """The class's, unless the writer has another."""
    assert budgets(attach(writer)) == [budget]


def test_a_writer_over_its_budget_is_named(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the budget, as a hook is."""
    bus = attach(with_budget(JSONLWriter(), 1e-3))

    for step in range(300):
        bus.emit(ScalarsLogged(step=step, scalars={"loss": 0.5}))
        if step % 10 == 0:
            bus.flush(DEADLINE)  # a delivery for each of them
    bus.close(DEADLINE)

    told = [r.getMessage() for r in caplog.records if "budget_us=0.001" in r.getMessage()]
    assert len(told) == 1
    assert "JSONLWriter" in told[0]


@pytest.mark.parametrize("budget_us", [0, -1, float("nan"), float("inf")])
def test_a_class_with_a_budget_of_nothing_is_refused(budget_us: float) -> None:
    """Where it is defined, by its name."""
    with pytest.raises(ValueError, match="Nothing: budget_us must be above 0 microseconds and finite, got"):
        type("Nothing", (JSONLWriter,), {"budget_us": budget_us})


def test_a_class_with_a_budget_that_is_no_number_is_refused() -> None:
    """As at `bus.on`."""
    with pytest.raises(TypeError, match="Text: budget_us must be a number of microseconds, got '5'"):
        type("Text", (JSONLWriter,), {"budget_us": "5"})


def test_a_writer_is_refused_by_its_name(tmp_path: Path) -> None:
    """When it is attached, before it is on the bus."""
    named = with_budget(JSONLWriter(), 0)
    named.name = "metrics"
    bus = Bus()

    with pytest.raises(ValueError, match="metrics: budget_us must be above 0 microseconds and finite, got 0"):
        named.attach(bus, lambda: None)
    with pytest.raises(TypeError, match="JSONLWriter: budget_us must be a number of microseconds, got True"):
        with_budget(JSONLWriter(), True).attach(bus, lambda: None)

    assert budgets(bus) == []
