"""The closing summary, as a person reads it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from eventloop.costs.records import HandlerCost, Phases, Times
from eventloop.events import Event
from eventloop.hooks import Hook
from eventloop.reporting.facts import OUTSIDE_HANDLERS
from eventloop.reporting.summary import SMALL, cost_table
from eventloop.training.trainer import Trainer
from eventloop.util.formatting import duration
from tests.support.trainers import MakeTrainer


def test_a_long_error_does_not_widen_the_table(make_trainer: MakeTrainer) -> None:
    """It has its whole length once, in the line of its subscriber."""
    error = "the disk says no, " * 30 + "again"
    trainer: Trainer = make_trainer()

    @trainer.bus.on("after_train_iter", offload="thread", name="broken")
    def broken(event: object) -> None:
        raise OSError(error)

    trainer.train()
    trainer.close()

    long = [line for line in trainer.summary().splitlines() if len(line) > 180]
    assert [line.strip().split(":")[0] for line in long] == ["broken"]
    assert error in long[0]


def test_a_handler_of_both_kinds_of_events_has_a_row_for_each(make_trainer: MakeTrainer) -> None:
    """In the iterations its share, as in `trainer.costs()`; outside of them the time of a call, and not of an iteration."""
    trainer: Trainer = make_trainer()

    @trainer.bus.on("before_train", "after_train_iter", name="both")
    def both(event: Event) -> None:
        pass

    trainer.train()

    inside, outside = (
        re.split(r"\s{2,}", line) for line in trainer.summary().splitlines() if line.startswith("both ")
    )
    (share,) = [c.share for c in trainer.costs().handlers if (c.name, c.in_iteration) == ("both", True)]
    (seconds,) = [c.seconds for c in trainer.costs().handlers if (c.name, c.in_iteration) == ("both", False)]
    assert [*inside[1:3], inside[4]] == ["after_train_iter", str(trainer.iter), f"{share:.2%}"]
    assert outside[1:] == ["before_train", "1", duration(seconds), duration(seconds)]


def rows_of(text: str) -> dict[tuple[str, str], list[str]]:
    """Calls, time and share or sum of the rows of both tables, by handler and event."""
    lines = [
        line
        for line in text.splitlines()
        if "  " in line and not line.startswith(("-", "handler ", "outside of "))
    ]
    cells = [re.split(r"\s{2,}", line) for line in lines]
    return {(name, event[0] if event else ""): numbers for name, *event, numbers in map(_split, cells)}


def _split(cells: list[str]) -> tuple[Any, ...]:
    return (*cells[:-3], cells[-3:])


def a_cost(name: str, share: float, *, in_iteration: bool = True) -> HandlerCost:
    """Of 10 iterations that took a second together; the share of one that is outside of them is not told."""
    return HandlerCost(
        name=name, event="after_train_iter" if in_iteration else "before_run", priority=50, calls=10, seconds=share,
        share=share if in_iteration else 0.0, in_iteration=in_iteration, times=Times(),
    )  # fmt: skip


def test_what_costs_next_to_nothing_shares_a_row() -> None:
    """Handlers of ours below the share that matters are summed in the last row; what is above it has its own, and so has
    whatever is not ours."""
    costs = [
        a_cost("EMAHook.after_train_iter", 0.5),
        a_cost("EMAHook.before_run", 2 * SMALL, in_iteration=False),
        a_cost("EMAHook.before_train_iter", SMALL / 2),
        a_cost("LoggerHook.after_train_iter", SMALL / 4),
        a_cost("LoggerHook.before_run", SMALL / 4, in_iteration=False),
        a_cost("step_lr", SMALL / 100),
        a_cost("MyHook.after_train_iter", SMALL / 100),
    ]

    told = cost_table(costs, Phases(iterations=10, forward=1.0), {"EMAHook", "LoggerHook"})

    rows = rows_of(told)
    assert [name for name, _ in rows] == [
        "EMAHook.after_train_iter", "step_lr", "MyHook.after_train_iter", "2 more, each below 0.1%",
        "EMAHook.before_run", "LoggerHook.before_run",
    ]  # fmt: skip
    assert rows["2 more, each below 0.1%", ""] == ["20", "75.0", "0.07%"]
    assert rows["EMAHook.before_run", "before_run"] == ["10", "200 µs", "2.00 ms"]
    assert told.endswith("\ntrainer.costs() and `eventloop report` have every one")


@pytest.mark.parametrize(
    ("costs", "wall"),
    [([a_cost("EMAHook.before_run", SMALL / 2)] * 2, 0.0), ([a_cost("EMAHook.before_run", SMALL / 2)], 1.0)],
    ids=["no iterations", "one"],
)
def test_a_row_is_shared_by_several_and_of_iterations(costs: list[HandlerCost], wall: float) -> None:
    """A run that trained nothing has no share that would matter, and one handler needs no sum."""
    told = cost_table(costs, Phases(forward=wall), {"EMAHook"})

    assert "more, each" not in told
    assert "eventloop report" not in told
    assert told.count("EMAHook.before_run") == len(costs)


def test_a_run_without_iterations_has_times_in_all() -> None:
    """Nothing is spread over iterations that were not trained."""
    told = cost_table([a_cost("validate", 0.25, in_iteration=False)], Phases())

    assert rows_of(told)["validate", "before_run"] == ["10", "25.0 ms", "250 ms"]
    assert "iteration" not in told


def test_a_users_handlers_are_all_in_the_summary(make_trainer: MakeTrainer) -> None:
    """Functions and hooks of one's own, one that has the name of one of ours too; nothing is left out of the costs."""

    class Mine(Hook):
        def before_run(self, trainer: Trainer, event: Event) -> None:
            pass

    class EMAHook(Hook):
        def before_train(self, trainer: Trainer, event: Event) -> None:
            pass

    trainer: Trainer = make_trainer(hooks=[Mine(), EMAHook()])

    @trainer.bus.on("before_train")
    def once(event: Event) -> None:
        pass

    trainer.train()

    names = [name for name, _ in rows_of("\n".join(trainer.summary().split("\n\n")[1:3]))]
    assert {"Mine.before_run", "EMAHook.before_train", "once", "OptimizerHook.after_train_iter"} <= {*names}
    told = [int(name.split()[0]) if "more, each" in name else 1 for name in names if name != OUTSIDE_HANDLERS]
    assert sum(told) == sum(cost.calls > 0 for cost in trainer.costs().handlers)


@pytest.mark.parametrize(("outside", "rows"), [(0.019, 2), (0.021, 3)])
def test_the_rows_add_up_to_the_hooks_phase(outside: float, rows: int) -> None:
    """What no handler took is the first row, above 2 %; the phases that a handler runs itself are none of it."""
    optimizer = msgspec.structs.replace(a_cost("OptimizerHook.after_train_iter", 5.4), includes=["backward"])
    costs = [a_cost("mine", 0.6 - outside), optimizer]

    table = cost_table(costs, Phases(iterations=1000, forward=3.0, backward=5.0, hooks=1.0)).splitlines()[2:]

    assert len(table) == rows
    if rows == 3:
        assert table[0].startswith(OUTSIDE_HANDLERS)
        assert table[0].split()[-2:] == ["21.0", "0.23%"]


def test_an_estimated_time_is_marked() -> None:
    """And the line below says why; exact times have no such line."""
    exact, phases = a_cost("exact", 1.0), Phases(iterations=10, forward=2.0)
    table = cost_table([exact, msgspec.structs.replace(exact, name="guess", estimated=True)], phases)

    assert {line.split()[0]: "~" in line for line in table.splitlines() if line.startswith(("exact", "guess"))} == {
        "exact": False, "guess": True,
    }  # fmt: skip
    assert "~: estimated" in table
    assert "estimated" not in cost_table([exact], phases)
