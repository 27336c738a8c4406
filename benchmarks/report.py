"""How long does a report of a run of 1,000,000 iterations take, and how much memory?

    python -m benchmarks.report --json benchmarks/results/report.json

The run logs four scalars in every iteration, and evaluates every 1000; its cost record has as many trend points,
handlers and subscribers as a real one may have. Each form of `eventloop report` runs in a process of its own, as a user
starts it; the time is that of the whole process, the memory the most that was resident in it. What it prints goes into a
file, as into a pipe.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import msgspec

from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from eventloop.costs.records import (
    HandlerCost,
    Phases,
    RunCosts,
    SubscriberCost,
    Times,
    TrendPoint,
    write_costs,
)
from eventloop.eventlog.jsonl import FILE_NAME

SECONDS = 5.0
MEGABYTES = 500.0
FORMS = {"text": [], "--json": ["--json"], "--html": ["--html", "page.html"]}
TREND_POINTS = 512
EVALUATION = 1000


def write_run(directory: Path, iterations: int) -> None:
    """A run as its writers would have left it."""
    numbers, encode = random.Random(0), msgspec.json.Encoder().encode
    with (directory / FILE_NAME).open("wb", buffering=1 << 20) as file:
        file.write(b'{"event":"before_run","iter":0,"epoch":0}\n')
        for i in range(iterations):
            place = {"step": i + 1, "iter": i, "epoch": i // EVALUATION}
            scalars = {"loss": numbers.random(), "lr": 1e-3, "time": numbers.random(), "grad_norm": 1.0}
            file.write(encode({"mode": "train", **place, **scalars}) + b"\n")
            if (i + 1) % EVALUATION == 0:
                file.write(
                    encode({"mode": "val", **place, "loss": numbers.random(), "accuracy": 0.5}) + b"\n"
                )
    write_costs(directory, _costs(iterations))


def _costs(iterations: int) -> RunCosts:
    each = -(-iterations // TREND_POINTS)
    starts = range(0, iterations, each)
    times = Times(samples=1000, mean=1e-5, p50=1e-5, p99=2e-5, max=1e-3)
    return RunCosts(
        phases=_phases(iterations),
        trend=[TrendPoint(first_iter=i, phases=_phases(min(each, iterations - i))) for i in starts],
        handlers=[
            HandlerCost(
                name=f"Hook{i}.after_train_iter",
                event="after_train_iter",
                priority=i,
                calls=iterations,
                seconds=1e-6 * i * iterations,
                share=0.01,
                times=times,
            )
            for i in range(50)
        ],
        subscribers=[
            SubscriberCost(
                name=f"Writer{i}",
                event="scalars_logged",
                runs_on="thread",
                delivered=iterations,
                dropped=0,
                failed=0,
                queued=0,
                peak_queued=100,
                spilled=0,
                calls=iterations,
                seconds=1.0,
                wait=times,
                busy=times,
            )
            for i in range(5)
        ],
        complete=True,
    )


def _phases(iterations: int) -> Phases:
    shares = {
        "data": 1e-4,
        "forward": 1e-3,
        "backward": 2e-3,
        "optimizer": 5e-4,
        "hooks": 5e-5,
        "unaccounted": 1e-5,
    }
    return Phases(iterations=iterations, **{name: seconds * iterations for name, seconds in shares.items()})


class Spent(NamedTuple):
    """What one process took."""

    wall: float
    processor: float
    megabytes: float


def report(directory: Path, arguments: Sequence[str]) -> Spent:
    """Run `eventloop report` once, to its end.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "eventloop", "report", "run", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with (directory / "printed").open("wb") as printed:
        began = perf_counter()
        process = subprocess.Popen(command, cwd=directory, stdout=printed, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        wall = perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    unit = 1e6 if sys.platform == "darwin" else 1e3  # bytes there, kilobytes elsewhere
    return Spent(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1.024 / unit)


def rows(taken: dict[str, list[Spent]]) -> list[list[str]]:
    """Medians and the greatest of all rounds."""
    return [
        [
            form,
            f"{statistics.median(one.wall for one in spent):.2f}",
            f"{max(one.wall for one in spent):.2f}",
            f"{statistics.median(one.processor for one in spent):.2f}",
            f"{max(one.megabytes for one in spent):,.0f}",
        ]
        for form, spent in taken.items()
    ]


def goals(taken: dict[str, list[Spent]]) -> list[dict[str, str]]:
    """What was wanted of each form, and what came out."""
    found = []
    for form, spent in taken.items():
        wall, memory = statistics.median(one.wall for one in spent), max(one.megabytes for one in spent)
        for goal, wanted, measured, met in (
            (f"s, {form}, median", f"< {SECONDS:g}", f"{wall:.2f}", wall < SECONDS),
            (f"MB resident, {form}", f"< {MEGABYTES:g}", f"{memory:,.0f}", memory < MEGABYTES),
        ):
            found.append({"goal": goal, "wanted": wanted, "measured": measured, "met": yes_no(met)})
    return found


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    seconds = ", ".join(
        f"{g['measured']} s ({form_of(g)})" for g in record["goals"] if g["goal"].startswith("s,")
    )
    memory = max(
        int(goal["measured"].replace(",", "")) for goal in record["goals"] if goal["goal"].startswith("MB")
    )
    return section(
        f"`eventloop report` of {record['environment']['the run']}.",
        [f"It takes {seconds}, and at most {memory} MB of memory."],
        record["goals"],
        record["environment"],
    )


def form_of(goal: dict[str, str]) -> str:
    """The form of the report that a goal is about."""
    return goal["goal"].split(", ")[1]


def page(about: dict[str, str], taken: dict[str, list[Spent]]) -> str:
    """The whole page."""
    met = goals(taken)
    header = ["eventloop report", "s, median", "s, slowest", "s of processor, median", "MB resident"]
    return "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.report')}",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            "## Goals\n\n" + markdown_table([*met[0]], [[*goal.values()] for goal in met]),
            "## Each form\n\n" + markdown_table(header, rows(taken)),
        ]
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds the medians are over")
    parser.add_argument("--iterations", type=int, default=1_000_000, help="of the run")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    taken: dict[str, list[Spent]] = {form: [] for form in FORMS}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "run").mkdir()
        write_run(directory / "run", options.iterations)
        size = (directory / "run" / FILE_NAME).stat().st_size
        for _ in range(options.rounds):
            for form, arguments in FORMS.items():
                taken[form].append(report(directory, arguments))
    about = environment("msgspec", "numpy", "plotly")
    about["load"] = ", ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes)"
    about["the run"] = f"{options.iterations:,} iterations, each logged: {size / 1e6:,.0f} MB of {FILE_NAME}"
    about["rounds"] = f"{options.rounds}, the forms in turn"
    figures: dict[str, Any] = {form: [one._asdict() for one in spent] for form, spent in taken.items()}
    record = {"environment": about, "goals": goals(taken), "figures": figures}
    publish(page(about, taken), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
