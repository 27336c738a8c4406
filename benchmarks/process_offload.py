"""What does a writer that is heavy in Python cost a training, on a thread and in a process?

    python -m benchmarks.process_offload --json benchmarks/results/process_offload.json

A loop of steps of about a millisecond (a PyTorch matrix product on one thread, which lets go of the interpreter)
emits `after_train_iter` and, every 40 steps, one event to a writer that burns 20 ms of Python: a histogram, an image
with a checksum in Python, a request to a slow client. Cases of one round: no writer; the writer in a process; on a
thread; inline in the loop. A step's time is that of a block of steps, the writer's work that is done after the block
is not in it: the block has as many steps as the writer needs to keep up.

The second table is about the writers of eventloop: one image and one histogram every 40 steps, to a TensorBoardWriter
in either place.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.helpers.burning_writer import BURN_SECONDS, Report, burn, turns
from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import (
    Case,
    Taken,
    command_line,
    environment,
    markdown_table,
    measure,
    publish,
    yes_no,
)
from eventloop.background.workers.process_runner import ProcessRunner
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, Event, HistogramLogged, ImageLogged
from eventloop.events.run import Run
from eventloop.writers import TensorBoardWriter

EVERY = 40
GOAL = 1.05
MATRIX = 256
IMAGE = (512, 512, 3)
VALUES = 100_000
NO_WRITER, PROCESS, THREAD, INLINE = "no writer", "process", "thread", "inline"


class Steps:
    """A loop of steps that emits an event after each, and the events of `events` every 40 steps."""

    def __init__(self, bus: Bus | None, events: Callable[[int], list[Event]], number: int) -> None:
        self.bus = bus
        self.worst: list[float] = []
        self._events = events
        self._number = number
        self._left, self._right = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
        self._repeat = 1
        self._repeat = max(1, round(0.001 / min(self._step() for _ in range(50))))

    def __call__(self) -> None:
        """Run one block of steps."""
        bus, longest = self.bus or Bus(), 0.0
        for index in range(self._number):
            longest = max(longest, self._step())
            bus.emit(AfterTrainIter(iter=index))
            if self.bus is not None and index % EVERY == 0:
                for event in self._events(index):
                    bus.emit(event)
        self.worst.append(longest)

    def _step(self) -> float:
        began = perf_counter()
        for _ in range(self._repeat):
            torch.mm(self._left, self._right)
        return perf_counter() - began

    def settle(self) -> None:
        """Wait until the writer has done what is left; not timed."""
        if self.bus is not None:
            self.bus.flush(60)


def heavy_cases(stack: ExitStack, number: int) -> dict[str, Steps]:
    """The writer that burns, in every place."""
    cases, work = {}, turns()
    for place in (NO_WRITER, PROCESS, THREAD, INLINE):
        bus = stack.enter_context(Bus()) if place != NO_WRITER else None
        if bus is not None:
            ready(bus.subscribe(burn, Report, offload=None if place == INLINE else place))
        cases[place] = Steps(bus, lambda step: [Report(step=step, turns=work)], number)
    return cases


def tensorboard_cases(stack: ExitStack, number: int) -> dict[str, Steps]:
    """An image and a histogram for TensorBoard."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    pixels = torch.randint(255, IMAGE, dtype=torch.uint8).numpy().tobytes()
    values = torch.randn(VALUES).numpy().tobytes()

    def media(step: int) -> list[Event]:
        return [
            ImageLogged(step=step, name="image", data=pixels, shape=IMAGE),
            HistogramLogged(step=step, name="weights", data=values, shape=(VALUES,)),
        ]

    cases = {}
    for place in (NO_WRITER, PROCESS, THREAD):
        bus = stack.enter_context(Bus()) if place != NO_WRITER else None
        if bus is not None:
            writer = TensorBoardWriter(Path(folder, place))
            writer.offload = place
            ready(writer.attach(bus, lambda: Run(folder)))
        cases[place] = Steps(bus, media, number)
    return cases


def ready(subscription: Subscription) -> None:
    """Wait until a worker process has imported what it needs: a run has hours, this has seconds."""
    runner = subscription.subscriber.runner if subscription.subscriber is not None else None
    if isinstance(runner, ProcessRunner):
        runner.ready.wait(60)


def rows(cases: dict[str, Steps], taken: dict[str, Taken]) -> list[list[str]]:
    """One row for each place."""
    base = taken[NO_WRITER]
    return [
        [
            place,
            f"{taken[place].median * 1e3:.3f}",
            f"{taken[place].ratio_to(base):.3f}",
            f"{median(steps.worst) * 1e3:.1f}",
        ]
        for place, steps in cases.items()
    ]


def goals(record: dict[str, Any]) -> list[dict[str, str]]:
    """The goal for each writer beside what was measured."""
    found = []
    for title, places in record.items():
        if title != "environment":
            ratio = over_none(places, PROCESS)
            found.append(
                {
                    "goal": f"{title.split(':')[0]}, in a process",
                    "wanted": f"<= {GOAL}x",
                    "measured": f"{ratio:.3f}x",
                    "met": yes_no(ratio <= GOAL),
                }
            )
    return found


def over_none(places: dict[str, Any], place: str) -> float:
    """Return the ratio of a step with the writer in `place` to a step without one.

    Args:
        places: the times by place, as the JSON file holds them.
    """
    return Taken(**places[place]).ratio_to(Taken(**places[NO_WRITER]))


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    answers = []
    for title, places in record.items():
        if title != "environment":
            ratios = (f"{over_none(places, place):.2f}x ({place})" for place in places if place != NO_WRITER)
            answers.append(f"{title}: a step takes {', '.join(ratios)}, beside no writer.")
    return section(
        "a loop of steps of about 1 ms with a writer that is heavy in Python, in a process, on a thread, or inline.",
        answers,
        goals(record),
        record["environment"],
    )


def worker_mib(bus: Bus | None) -> str:
    """The resident size of the one worker of a bus, from Linux's /proc."""
    subscriptions = bus._subscribers._subscriptions if bus is not None else []
    for runner in (each.subscriber.runner for each in subscriptions if each.subscriber is not None):
        if isinstance(runner, ProcessRunner) and runner.worker is not None:
            text = Path(f"/proc/{runner.worker.pid}/status").read_text(encoding="ascii")
            return f"{int(text.split('VmRSS:')[1].split()[0]) / 1024:.0f} MiB"
    return "unknown"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400, help="in a block")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    return parser.parse_args()


def main() -> None:
    """Measure, print, keep."""
    options = arguments()
    torch.set_num_threads(1)
    columns = ["the writer runs in a", "step, ms", "over no writer", "longest step, ms"]
    about = environment("torch", "msgspec", "tensorboard")
    record: dict[str, object] = {"environment": about}
    parts = [
        f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.process_offload')}",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
    ]
    with ExitStack() as stack:
        for title, make in {
            f"{BURN_SECONDS * 1e3:g} ms of Python every {EVERY} steps": heavy_cases,
            f"TensorBoardWriter: a {IMAGE[0]}×{IMAGE[1]} image and a histogram of {VALUES:,} values every {EVERY} steps": tensorboard_cases,
        }.items():
            cases = make(stack, options.steps)
            taken = measure(
                [Case(place, steps, options.steps, steps.settle) for place, steps in cases.items()],
                rounds=options.rounds,
            )
            ratio = taken[PROCESS].ratio_to(taken[NO_WRITER])
            parts.append(f"## {title}\n\n" + markdown_table(columns, rows(cases, taken)))
            parts.append(
                f"Goal: a step with the writer in a process takes at most {GOAL} times as long as without: "
                f"{ratio:.3f}, {yes_no(ratio <= GOAL)}. The worker has {worker_mib(cases[PROCESS].bus)}."
            )
            record[title] = {place: asdict(taken[place]) for place in cases}
    publish("\n\n".join(parts), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
