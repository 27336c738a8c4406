"""When is garbage collected during a training, and what does a step pay for it?

    python -m benchmarks.garbage_collection --json benchmarks/results/garbage_collection.json

The same training, whose steps leave reference cycles and keep objects for good or do not, with Python's own automatic collection;
with `GarbageCollectionHook`; with the collection of the middle generation every 50 steps that torchtitan makes; and
with none at all, in interleaved rounds. A step lasts from before_train_iter to after_train_iter; an iteration
is the mean from one to the next, with the collections between them. Every collection is
timed by `gc.callbacks`. A long one before the first step, with which the last two begin, is given beside. What steps
keep is looked at by every full collection until the training ends: it may become a cycle yet.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from eventloop import Trainer
from eventloop.assembly.attach import DEFAULT_HOOKS
from eventloop.events import AfterTrain, AfterTrainIter, BeforeTrain
from eventloop.hooks import Hook
from eventloop.hooks.garbage_collection import GarbageCollectionHook

PAUSE_GOAL, MORE_GOAL = 0.001, 1.01
PYTHON, OURS, MIDDLE, NEVER = "Python's own", "GarbageCollectionHook", "middle every 50", "never"
COLUMNS = [
    "",
    "iteration",
    "step p50",
    "p99",
    "max",
    "full in steps",
    "longest in a step",
    "longest between",
    "before the first step",
    "cycles",
]


KEPT = (0, 100)
"""Objects a step keeps for good: as most trainings do, and far more than any should."""


class Node:
    """A node of a reference cycle of two, which a step leaves behind."""

    __slots__ = ("__weakref__", "other")

    def __init__(self) -> None:
        self.other: Node | None = None


class Manual(Hook):
    """No automatic collection; of the middle generation every so many iterations, or never."""

    def __init__(self, every: int | None = None) -> None:
        self._every = every

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Switch the automatic collection off, after a full one."""
        gc.disable()
        gc.collect()

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Collect what is due."""
        if self._every is not None and self.every_n_train_iters(trainer, self._every):
            gc.collect(1)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Switch the automatic collection on again."""
        gc.enable()


CASES: dict[str, Callable[[], list[Hook]]] = {
    PYTHON: list,
    OURS: lambda: [GarbageCollectionHook()],
    MIDDLE: lambda: [Manual(50)],
    NEVER: lambda: [Manual()],
}


class Turn:
    """One training, and what was seen of it."""

    def __init__(self, hooks: list[Hook], steps: int, kept: int, directory: str) -> None:
        self.steps: list[float] = []
        self.cycles = 0
        self.in_step: list[tuple[int, float]] = []
        self.between: list[tuple[int, float]] = []
        self.before: list[float] = []  # the first step
        self._nodes: WeakSet[Node] = WeakSet()
        self._keeps, self._kept = kept, list[list[int]]()
        self._inside = False
        self._first = self._began = self._ended = self._collecting = 0.0
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        default = dict.fromkeys({"checkpoint", "garbage_collection"} & DEFAULT_HOOKS.keys())
        if any(isinstance(hook, GarbageCollectionHook) for hook in hooks):
            default.pop("garbage_collection", None)
        self._trainer = Trainer(
            model,
            optimizer=torch.optim.AdamW(model.parameters()),
            train_step=self._step,
            max_epochs=4,
            train_loader=[torch.rand(32, 64)] * (steps // 4),
            hooks=hooks,
            default_hooks=default,
            writers=[],
            work_dir=directory,
        )
        bus = self._trainer.bus
        bus.subscribe(self._begin, "before_train_iter", priority=0)
        bus.subscribe(self._end, "after_train_iter", priority=99)

    def run(self) -> None:
        """Train."""
        gc.callbacks.append(self._collected)
        try:
            self._trainer.train()
        finally:
            gc.callbacks.remove(self._collected)
            self._trainer.close()

    def figures(self) -> dict[str, float]:
        """In seconds, and numbers."""
        return {
            "iteration": (self._ended - self._first) / len(self.steps),
            "p50": statistics.median(self.steps),
            "p99": statistics.quantiles(self.steps, n=100)[98],
            "max": max(self.steps),
            "full_in_steps": sum(generation == 2 for generation, _ in self.in_step),
            "in_step": max((took for _, took in self.in_step), default=0.0),
            "between": max((took for _, took in self.between), default=0.0),
            "before": max(self.before, default=0.0),
            "cycles": self.cycles,
        }

    def _step(self, trainer: Any, batch: Any) -> torch.Tensor:
        for _ in range(20):
            a, b = Node(), Node()
            a.other, b.other = b, a
            self._nodes.add(a)
        self._kept += [[number] for number in range(self._keeps)]
        loss: torch.Tensor = trainer.model(batch).square().mean()
        return loss

    def _begin(self, event: Any) -> None:
        self._inside = True
        self._began = perf_counter()
        self._first = self._first or self._began

    def _end(self, event: Any) -> None:
        self._ended = perf_counter()
        self.steps.append(self._ended - self._began)
        self._inside = False
        self.cycles = max(self.cycles, len(self._nodes))

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = perf_counter()
            return
        took = perf_counter() - self._collecting
        if not self._first:
            self.before.append(took)
        else:
            (self.in_step if self._inside else self.between).append((info["generation"], took))


def milliseconds(seconds: float) -> str:
    """As it is printed."""
    return f"{seconds * 1e3:.3f} ms"


def row(name: str, found: dict[str, float]) -> list[str]:
    """A line of the table."""
    times = [milliseconds(found[key]) for key in ("iteration", "p50", "p99", "max")]
    pauses = [milliseconds(found[key]) for key in ("in_step", "between", "before")]
    return [name, *times, f"{found['full_in_steps']:g}", *pauses, f"{found['cycles']:g}"]


Figures = dict[str, dict[str, float]]


def measure(steps: int, kept: int, rounds: int) -> tuple[Figures, float, float]:
    """Measure all cases in rounds; return the medians by case and two figures of our hook.

    The figures are the most full collections that one turn had within its steps, and the ratio of an
    iteration to that of the case without collections in the same round.
    """
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    names = [*CASES]
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory() as directory:
                turn = Turn(CASES[name](), steps, kept, directory)
                turn.run()
            taken[name].append(turn.figures())
            del turn
            gc.collect()
    medians = {
        name: {key: statistics.median(each[key] for each in turns) for key in turns[0]}
        for name, turns in taken.items()
    }
    pairs = zip(taken[OURS], taken[NEVER], strict=True)
    ratio = statistics.median(ours["iteration"] / never["iteration"] for ours, never in pairs)
    return medians, max(each["full_in_steps"] for each in taken[OURS]), ratio


def goal(what: str, wanted: str, measured: str, met: bool) -> dict[str, str]:
    """A line of the table of goals."""
    return {"goal": what, "wanted": wanted, "measured": measured, "met": yes_no(met)}


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    lasting = record["figures"][str(KEPT[-1])]
    python, ours = lasting["Python's own"], lasting[OURS]
    return section(
        "the same training with Python's own collection, with GarbageCollectionHook, and with none.",
        [
            (
                f"Where steps keep {KEPT[-1]} objects, Python's own collection makes {python['full_in_steps']:g} full collections in "
                f"steps, and the slowest step takes {python['max'] * 1e3:.0f} ms."
            ),
            (
                f"With the hook there are {ours['full_in_steps']:g} in steps, and the slowest takes {ours['max'] * 1e3:.1f} ms; the longest pause "
                f"between steps is {ours['between'] * 1e3:.1f} ms there, and {record['goals'][1]['measured']} where steps keep none."
            ),
        ],
        record["goals"],
        record["environment"],
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="of a turn, in four epochs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {kept: measure(options.steps, kept, options.rounds) for kept in KEPT}
    usual, _, ratio = found[KEPT[0]]
    pause, full = usual[OURS]["between"], max(most for _, most, _ in found.values())
    longest = milliseconds(PAUSE_GOAL)
    goals = [
        goal("full collections in steps", "0", f"{full:g}", not full),
        goal("longest pause between steps", f"<= {longest}", milliseconds(pause), pause <= PAUSE_GOAL),
        goal("iteration, beside never collecting", f"<= {MORE_GOAL}x", f"{ratio:.3f}x", ratio <= MORE_GOAL),
    ]
    about = environment("torch")
    parts = [
        f"# {(__doc__ or '').splitlines()[0]}",
        f"`{command_line('benchmarks.garbage_collection')}`",
        ", ".join(f"{name} {value}" for name, value in about.items()),
        markdown_table([*goals[0]], [[*each.values()] for each in goals]),
    ]
    for kept, (figures, _, _) in found.items():
        parts.append(f"## Steps that leave 20 cycles and keep {kept} objects")
        parts.append(markdown_table(COLUMNS, [row(name, each) for name, each in figures.items()]))
    parts.append("Medians over the rounds. Cycles: the most that waited to be collected.")
    record = {
        "environment": about,
        "goals": goals,
        "figures": {str(kept): each for kept, (each, _, _) in found.items()},
    }
    publish("\n\n".join(parts), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
