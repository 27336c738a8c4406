"""Costs of calls that are no handlers of the bus."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.costs.foreign_calls import ForeignCalls
from eventloop.costs.step_clock import StepClock
from tests.support.internals import substitute


class Busy:
    """A callback that works for some time and measures it by a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.wanted, self.seconds, self.calls = seconds, 0.0, 0

    def __call__(self) -> None:
        began = perf_counter()
        while perf_counter() - began < self.wanted:
            pass
        self.calls += 1
        self.seconds += perf_counter() - began


def test_each_call_has_its_time() -> None:
    """A callback's row has all its calls, and their seconds: those between a clock within and a clock around it."""
    busy, charged, around = Busy(2e-3), [], 0.0
    calls = ForeignCalls(lambda phase, seconds: charged.append((phase, seconds)))
    measured = calls.measured(busy, "Busy.on_batch", "on_batch", in_iteration=True)

    for _ in range(20):
        began = perf_counter()
        measured()
        around += perf_counter() - began

    (cost,) = calls.costs(wall=1.0)
    assert (cost.name, cost.event, cost.calls) == ("Busy.on_batch", "on_batch", busy.calls)
    assert busy.seconds <= cost.seconds <= around
    assert sum(seconds for _, seconds in charged) == pytest.approx(cost.seconds)


def test_a_call_within_a_call_is_charged_once() -> None:
    """The hooks phase gets the seconds of the outer call alone, which contain the inner one's."""
    charged: list[float] = []
    calls = ForeignCalls(lambda phase, seconds: charged.append(seconds))
    inner = calls.measured(Busy(1e-3), "inner", "on_batch", in_iteration=True)
    outer = calls.measured(inner, "outer", "on_batch", in_iteration=True)

    outer()

    costs = {cost.name: cost.seconds for cost in calls.costs(1.0)}
    assert charged == [costs["outer"]]
    assert costs["outer"] >= costs["inner"]


def test_an_error_is_measured_and_raised() -> None:
    """A callback that raises has its call counted, and its error reaches the engine."""

    def fail() -> None:
        raise OSError("full")

    calls = ForeignCalls(lambda phase, seconds: None)

    with pytest.raises(OSError, match="full"):
        calls.measured(fail, "fail", "on_batch", in_iteration=False)()

    (cost,) = calls.costs(1.0)
    assert (cost.calls, cost.in_iteration, cost.share) == (1, False, 0.0)


@pytest.mark.parametrize("where", ["in the step", "between two steps"])
def test_charged_seconds_change_their_phase(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a host's part move from `forward`, or from `data` between two steps, to the part's phase."""
    now = [0.0]
    substitute(monkeypatch, "step_clock.perf_counter", lambda: now[0])
    clock = StepClock()

    def after(seconds: float) -> None:
        now[0] += seconds

    clock.begin_run(0, None, Bus().signal)
    clock.begin_pass()
    after(4.0)
    if where == "between two steps":
        clock.charge("hooks", 3.0)
    clock.end_data()
    clock.begin_forward()
    after(10.0)
    if where == "in the step":
        clock.charge("backward", 5.0)
        clock.charge("hooks", 2.0)
    clock.end_forward()
    after(1.0)
    clock.end()

    found = clock.phases
    expected: dict[str, Any] = {
        "in the step": (4.0, 3.0, 5.0, 3.0),
        "between two steps": (1.0, 10.0, 0.0, 4.0),
    }
    assert (found.data, found.forward, found.backward, found.hooks) == expected[where]
    assert found.wall == 15.0
