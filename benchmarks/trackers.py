"""What do four trackers that are each 50 ms away cost the steps of a training?

    python -m benchmarks.trackers --json benchmarks/results/trackers.json --markdown benchmarks/results/trackers.md

W&B offline, MLflow with SQLite, trackio and OpenTelemetry are writers of one training at once, and each waits 50 ms
before each request. Three trainings by a `Trainer` with its default hooks and a JSONLWriter take turns, a part of each
in a round: without trackers, with all four in worker processes (the default), and with all four on threads. A step has
matrix products of about 2 ms on one thread, and the forward pass, backward pass and optimizer step of a small model; 10
scalars are logged every 10 steps. The trackers have opened before the first step that is timed, and what a part left to
them is delivered, untimed, before the next one begins. A figure is the median over the rounds of a ratio within a round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat as repeat_forever
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

from benchmarks.helpers.in_short import section
from benchmarks.helpers.slow_trackers import LATENCY_SECONDS, slow_trackers
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from eventloop import Bus, Trainer
from eventloop.writers import JSONLWriter
from eventloop.writers.tracker import TrackerWriter

NONE, PROCESS, THREAD = "none", "in processes", "on threads"
OFFLOADS = {PROCESS: "process", THREAD: "thread"}
EVERY, MATRIX, STEP_SECONDS, ENDLESS = 10, 256, 0.002, 10**9
OUTPUTS = [f"output_{number}" for number in range(4)]
"""Outputs of the step besides the loss; the hooks add the learning rate and four times of the iteration."""
GOAL = 1.1


class Training:
    """A hand-written loop in a `Trainer`, a part at a time.

    Args:
        folder: where its files are.
        trackers: the writers besides a JSONLWriter.
        repeat: how many matrix products a step has; by default as many as take 2 ms.
    """

    def __init__(self, folder: Path, trackers: Sequence[TrackerWriter], repeat: int | None = None) -> None:
        self._left, self._right = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
        self.repeat = 1
        self.repeat = repeat or max(1, round(STEP_SECONDS / min(self._compute() for _ in range(50))))
        self._model = torch.nn.Linear(8, 2)
        self._trainer = Trainer(
            self._model,
            optimizer=torch.optim.SGD(self._model.parameters(), lr=1e-3),
            max_iters=ENDLESS,
            default_hooks={"logger": {"interval": EVERY}, "checkpoint": None},
            writers=[JSONLWriter(), *trackers],
            work_dir=folder,
            bus=Bus(drain_timeout=60),
        )
        self._epochs = self._trainer.epochs()
        next(self._epochs)
        self._batches = self._trainer.batches(repeat_forever(torch.ones(4, 8)))
        next(self._batches)

    def part(self, steps: int) -> list[float]:
        """Run so many steps; return the seconds of each, with those of all hooks."""
        taken = []
        for _ in range(steps):
            began = perf_counter()
            self._compute()
            loss = self._model(self._trainer.batch).square().mean()
            self._trainer.outputs = {"loss": loss} | dict.fromkeys(OUTPUTS, 0.5)
            next(self._batches)  # ends this iteration, and begins the next one
            taken.append(perf_counter() - began)
        self._trainer.bus.flush(60)
        return taken

    def close(self) -> None:
        """End the training."""
        self._trainer.close()

    def _compute(self) -> float:
        began = perf_counter()
        for _ in range(self.repeat):
            torch.mm(self._left, self._right)
        return perf_counter() - began


@contextmanager
def collector() -> Iterator[int]:
    """Start a collector in a process; yield its port."""
    command = [sys.executable, "-m", "benchmarks.helpers.slow_trackers"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.terminate()


def trainings(folder: Path, port: int) -> dict[str, Training]:
    """Make the trainings, with their trackers opened."""
    made: dict[str, Training] = {}
    for place in (NONE, PROCESS, THREAD):
        work_dir = folder / place.replace(" ", "_")
        trackers = slow_trackers(work_dir, port, OFFLOADS[place]) if place in OFFLOADS else []
        made[place] = Training(work_dir, trackers, made[NONE].repeat if made else None)  # the same steps
        made[place].part(EVERY)
    return made


def measured(made: dict[str, Training], rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Return p50, p90 and p99 of each training in each round, in milliseconds."""
    found: dict[str, dict[str, list[float]]] = {place: {"p50": [], "p90": [], "p99": []} for place in made}
    places = [*made]
    for turn in range(-1, rounds):
        for place in (*places[turn % len(places) :], *places[: turn % len(places)]):
            cuts = quantiles(made[place].part(steps), n=100)
            if turn >= 0:
                for name, at in (("p50", 49), ("p90", 89), ("p99", 98)):
                    found[place][name].append(cuts[at] * 1e3)
    return found


def ratio(steps: dict[str, dict[str, list[float]]], place: str, name: str) -> float:
    """Return the median over the rounds of a percentile to that without trackers."""
    pairs = zip(steps[place][name], steps[NONE][name], strict=True)
    return median(mine / none for mine, none in pairs)


def goals(record: dict[str, Any]) -> list[dict[str, str]]:
    """The goal, for each place."""
    found = []
    for place in OFFLOADS:
        value = ratio(record["steps"], place, "p99")
        met = yes_no(value <= GOAL)
        found.append(
            {"goal": f"p99 {place}", "wanted": f"<= {GOAL}x", "measured": f"{value:.2f}x", "met": met}
        )
    return found


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    steps = record["steps"]
    answers = [
        f"{place}: the step takes {ratio(steps, place, 'p50'):.2f}x (p50), {ratio(steps, place, 'p90'):.2f}x (p90) and "
        f"{ratio(steps, place, 'p99'):.2f}x (p99) of that without trackers."
        for place in OFFLOADS
    ]
    load = record["load"]
    answers.append(f"Others used the machine: its load was {load[0]} before and {load[1]} after.")
    return section(
        f"steps of {STEP_SECONDS * 1e3:g} ms with W&B, MLflow, trackio and OpenTelemetry at once, each "
        f"{LATENCY_SECONDS * 1e3:g} ms away.",
        answers,
        goals(record),
        record["environment"],
    )


def page_of(record: dict[str, Any]) -> str:
    """Return the page of a record, without the section that opens it."""
    steps = record["steps"]
    rows = [
        [
            place,
            *(f"{median(steps[place][name]):.2f}" for name in steps[place]),
            *(f"{ratio(steps, place, name):.2f}" for name in steps[place]),
        ]
        for place in steps
    ]
    columns = ["trackers", "p50, ms", "p90, ms", "p99, ms", "p50, ratio", "p90, ratio", "p99, ratio"]
    about = "\n".join(f"- {name}: {value}" for name, value in record["environment"].items())
    return "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}",
            f"    {record['command']}",
            about,
            markdown_table(columns, rows),
        ]
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1000, help="of a part")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as folder, collector() as port:
        os.environ |= {"TRACKIO_DIR": f"{folder}/trackio", "MLFLOW_DISABLE_TELEMETRY": "true"}
        made = trainings(Path(folder), port)
        steps = measured(made, options.rounds, options.steps)
        for training in made.values():
            training.close()
    record = {
        "environment": environment(
            "torch", "wandb", "mlflow-skinny", "sqlalchemy", "trackio", "opentelemetry-proto"
        ),
        "command": command_line("benchmarks.trackers"),
        "load": [before, round(os.getloadavg()[0], 1)],
        "steps": steps,
    }
    publish(page_of(record), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
