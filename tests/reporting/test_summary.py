"""The closing summary, as a person reads it."""

from __future__ import annotations

import re
from typing import Any

from eventloop import Trainer
from eventloop.costs.records import HandlerCost, Phases, RunCosts, Times
from eventloop.events import Event
from eventloop.hooks import Hook
from eventloop.reporting.text import handler_lines
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


def table_of(*costs: HandlerCost, **facts: Any) -> list[list[str]]:
    """The cells of the lines on handlers, of a run of ten iterations of 0.1 s."""
    record = RunCosts(
        handlers=[*costs], **{"phases": Phases(iterations=10, forward=1.0), "seconds": 2.0, **facts}
    )
    return [re.split(r"\s{2,}", line.strip()) for line in handler_lines(record, 100, 20)]


def a_cost(name: str, share: float, *, in_iteration: bool = True, **facts: Any) -> HandlerCost:
    """Ten calls, that took a share of a second."""
    return HandlerCost(
        **{
            "name": name,
            "event": "after_train_iter" if in_iteration else "before_run",
            "priority": 50,
            "calls": 10,
            "seconds": share,
            "share": share if in_iteration else 0.0,
            "in_iteration": in_iteration,
            "times": Times(),
            **facts,
        }
    )


def test_a_handler_of_both_kinds_of_events_has_a_row_in_each_table() -> None:
    """In the iterations its share; outside of them the time of a call, and not of an iteration."""
    inside, outside = a_cost("both", 0.25), a_cost("both", 0.5, in_iteration=False)

    lines = table_of(inside, outside)

    assert [line for line in lines if line[0] != ""] == [
        ["handler", "event", "priority", "calls", "µs/iteration", "share", "a call"],
        ["both", "after_train_iter", "50", "10", "25,000", "25.00 %", "25.0 ms"],
        ["outside of the iterations", "event", "priority", "calls", "in all", "a call"],
        ["both", "before_run", "50", "10", "500 ms", "50.0 ms"],
    ]


def test_one_call_is_not_spread_over_the_iterations() -> None:
    """A handler that works once has the time of its call, also if the call is in an iteration."""
    once = a_cost("compile", 0.5, calls=1)

    (header, row) = table_of(once)

    assert dict(zip(header, row, strict=True)) | {"priority": "", "event": ""} == {
        "handler": "compile",
        "event": "",
        "priority": "",
        "calls": "1",
        "share": "50.00 %",
        "a call": "500 ms",
    }


def test_a_run_without_iterations_has_times_in_all() -> None:
    """Nothing is spread over iterations that were not trained."""
    lines = table_of(a_cost("validate", 0.25, in_iteration=False), phases=Phases())

    assert lines[-1] == ["validate", "before_run", "50", "10", "250 ms", "25.0 ms"]
    assert not any("iteration" in cell for line in lines[1:] for cell in line)


def test_every_handler_is_counted(make_trainer: MakeTrainer) -> None:
    """Those without a row are in the line below; a class of yours that has the name of one of ours is yours."""

    class EMAHook(Hook):
        def after_train_iter(self, trainer: Trainer, event: Event) -> None:
            sum(range(300_000))

    trainer: Trainer = make_trainer(hooks=[EMAHook()])
    trainer.train()

    costs = {cost.name: cost.built_in for cost in trainer.costs().handlers}
    assert (costs["EMAHook.after_train_iter"], costs["OptimizerHook.after_train_iter"]) == (False, True)
    block = trainer.summary().partition("\nhandler ")[2].partition("\n\ntrainer.costs() and")[0]
    rows = [line for line in block.splitlines() if re.search(r"^\w+\.\w+ ", line)]
    counted = sum(int(number) for number in re.findall(r"(\d+) (?:more|built-in|below)", block))
    assert any(row.startswith("EMAHook.after_train_iter") for row in rows)
    assert counted + len(rows) == sum(cost.calls > 0 for cost in trainer.costs().handlers)


def test_an_estimated_time_is_marked() -> None:
    """And a line says why; exact times have no such line."""
    exact, guess = a_cost("exact", 0.5), a_cost("guess", 0.5, estimated=True)

    lines = ["  ".join(line) for line in table_of(exact, guess)]

    assert {line.split()[0]: "~" in line for line in lines if line.startswith(("exact", "guess"))} == {
        "exact": False,
        "guess": True,
    }
    assert "~: estimated, because only some of the calls were clocked" in lines
    assert not any("estimated" in cell for line in table_of(exact) for cell in line)
