"""What does the account of costs add to a dispatch and to an iteration?

    python -m benchmarks.accounting --json benchmarks/results/accounting.json

Everything is timed twice in each round: as it is, and with the accounting compiled out of the plans (the lines that
choose the clocked events) and the `CostsHook` left out. The clock of the phases, some eight
looks at the time an iteration, is in both: the timer hook lives on it. The first rows are the worst there can
be, handlers that do nothing; the others are iterations of the default hooks around a step of some length.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import (
    Case,
    Taken,
    command_line,
    environment,
    markdown_table,
    measure,
    pinned,
    publish,
    statement,
    yes_no,
)
from eventloop import Trainer
from eventloop.bus import Bus
from eventloop.bus import dispatch as plan
from eventloop.bus.handler import Handler
from eventloop.events import AfterTrainIter
from eventloop.hooks import CostsHook

EVENT = AfterTrainIter(iter=7, epoch=0, batch_idx=7)
GOAL, GOAL_AT_1_MS = 1.02, 1.01
CHOICE = "        if count < due:\n"
"""The statement of a plan that chooses between its code without a clock and the code that is clocked."""
WIDTHS = {"about 0.15 ms": 8, "about 1 ms": 320}
"""Of the perceptron whose step is trained."""
IDLE = "{} handlers that do nothing"
STEP = "a train iteration of {}"


@contextmanager
def no_accounting() -> Iterator[None]:
    """Compile plans that clock no event."""
    source = plan._source

    def without(name: str, handlers: Sequence[Handler], hand_overs: int, *, recorded: bool) -> str:
        body: str = source(name, handlers, hand_overs, recorded=recorded)
        assert CHOICE in body
        return body.replace(CHOICE, "        if True:\n")

    with mock.patch.object(plan, "_source", without):
        yield


def idle_cases(n: int, number: int) -> list[Case]:
    """Return the cases of an event, built before, that is dispatched to `n` idle handlers.

    One is with the accounting ("on"), one without ("off").
    """

    def bus() -> Bus:
        made = Bus()
        for _ in range(n):
            made.subscribe(lambda event: None, AfterTrainIter)
        return made

    with no_accounting():
        off = bus()
        off.emit(EVENT)  # compiles the plan
    return [
        statement(f"{IDLE.format(n)}, {name}", "emit(event)", number, {"emit": made.emit, "event": EVENT})
        for name, made in (("on", bus()), ("off", off))
    ]


def iterations(trainer: Trainer, batch: torch.Tensor) -> Generator[None]:
    """Train; each `next` is one iteration."""
    for _ in trainer.epochs():
        for inputs in trainer.batches(repeat(batch)):
            trainer.outputs = {"loss": trainer.model(inputs).square().mean()}
            yield


def trainer_of(width: int, directory: str) -> Trainer:
    """Return a trainer of a perceptron with the default hooks, except checkpoints, which would be noise."""
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(64, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.Linear(width, 10),
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    return Trainer(
        model,
        optimizer=optimizer,
        max_iters=10**9,
        writers=[],
        work_dir=directory,
        default_hooks={"checkpoint": None},
    )


def step_cases(label: str, width: int, number: int, directory: str, ending: ExitStack) -> list[Case]:
    """Train one model, with and without the accounting in turns, so that both have the same memory."""
    steps = iterations(trainer := trainer_of(width, f"{directory}/{width}"), torch.randn(64, 64))
    next(steps)
    ending.callback(steps.close)
    costs = next(hook for hook in trainer.hooks if isinstance(hook, CostsHook)).after_train_iter

    def run() -> None:
        for _ in range(number):
            next(steps)

    def on() -> None:
        with trainer.bus.subscribe(costs, AfterTrainIter, priority=CostsHook.priority):
            run()

    def off() -> None:
        with no_accounting():  # a change of the subscribers compiles the plan anew
            run()

    trainer.bus.off(costs)
    name = STEP.format(label)
    return [Case(f"{name}, on", on, number), Case(f"{name}, off", off, number)]


def goal_of(name: str) -> float:
    """Return the largest ratio that is wanted: of an iteration of 1 ms, or of anything shorter."""
    return GOAL_AT_1_MS if name == STEP.format("about 1 ms") else GOAL


def rows(taken: dict[str, Taken]) -> list[list[str]]:
    """Return a row for each case: the time without the accounting, what it adds, and the ratio."""
    found = []
    for name in (case.removesuffix(", on") for case in taken if case.endswith(", on")):
        on, off = taken[f"{name}, on"], taken[f"{name}, off"]
        ratio = on.ratio_to(off)
        added = (on.median - off.median) * 1e9
        found.append(
            [name, f"{off.ns / 1e3:.2f}", f"{added:+.0f}", f"{ratio:.3f}x", yes_no(ratio <= goal_of(name))]
        )
    return found


def goals(taken: dict[str, Taken]) -> list[dict[str, str]]:
    """The goal for each dispatch beside what was measured."""
    return [
        {"goal": name, "wanted": f"<= {goal_of(name)}x", "measured": ratio, "met": met}
        for name, _, _, ratio, met in rows(taken)
    ]


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    dispatch = next(g for g in record["goals"] if g["goal"] == IDLE.format(10))
    steps = [g for g in record["goals"] if g["goal"].startswith(STEP.format(""))]
    seconds = {g["goal"]: record["figures"][f"{g['goal']}, off"]["median_ns"] / 1e9 for g in steps}
    ratios = ", ".join(f"{g['measured']} for one of {seconds[g['goal']] * 1e3:.2g} ms" for g in steps)
    return section(
        "the same dispatch with the account of costs and without it.",
        [
            f"A train iteration with it, to one without: {ratios}.",
            f"A dispatch to 10 handlers that do nothing: {dispatch['measured']}.",
        ],
        record["goals"],
        record["environment"],
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41, help="rounds the medians are over")
    parser.add_argument(
        "--number", type=int, default=20_000, help="events in a block; iterations: a hundredth"
    )
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as ending, pinned() as cpu:
        cases = [case for n in (1, 10) for case in idle_cases(n, options.number)]
        for label, width in WIDTHS.items():
            cases += step_cases(label, width, options.number // 100, directory, ending)
        taken = measure(cases, rounds=options.rounds)
    about = environment("torch", "msgspec")
    about["pinned"] = "no" if cpu is None else "to one CPU"
    about["rounds"] = f"{options.rounds}, medians of ratios within a round"
    table = markdown_table(["dispatch", "off, µs", "added, ns", "on / off", "as wanted"], rows(taken))
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    report = f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.accounting')}\n\n{facts}\n\n{table}"
    figures = {t.name: t.record() for t in taken.values()}
    record = {"environment": about, "goals": goals(taken), "figures": figures}
    publish(report, record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
