"""How much processor time does a short run take with a trainer, to the same run by hand?

    python -m benchmarks.short_run --json benchmarks/results/short_run.json

A digits-like classifier is trained for 100 iterations and validated at the end, by a plain PyTorch script (the original), by a
trainer with its default hooks but that of checkpoints and a `JSONLWriter` (the port), and without the writer. Every run is a
process of its own, and a round has one run of each way; ratios are those within a round.

- run: user and system time of the process with all its threads, from the start of Python to its exit
- imports, construction, training: the parts of the script; construction has the data and the optimizer, with which PyTorch
  imports its compiler, and training has the validation
- end: the rest of the process, its exit above all, and the start of Python

Python's bytecode is compiled before, as pip does when it installs a package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.helpers.in_short import section
from benchmarks.helpers.short_run_ways import ORIGINAL, PARTS, PORT, WAYS, WITHOUT_WRITERS
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no

GOAL = 1.05
RUN, END = "run", "end"
MEASURES = (RUN, *PARTS, END)


def run(way: str, iterations: int, bytecode: str) -> dict[str, float]:
    """Return the seconds of processor time that a run takes, and its parts, in a process of its own.

    Args:
        bytecode: the directory with the bytecode of all modules.
    """
    variables = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "benchmarks.helpers.short_run_ways",
            way,
            str(iterations),
            directory,
        ]
        before = os.times()
        printed = subprocess.run(command, check=True, capture_output=True, text=True, env=variables).stdout
        after = os.times()
    parts: dict[str, float] = json.loads(printed.splitlines()[-1])
    whole = after.children_user + after.children_system - before.children_user - before.children_system
    return {RUN: whole, **parts, END: whole - sum(parts.values())}


def figures(taken: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return, by way, the seconds of a run and of its parts and the ratio to the original: medians over the rounds."""
    return {
        way: {measure: statistics.median(each[measure] for each in runs) for measure in MEASURES}
        | {"ratio": statistics.median(a[RUN] / b[RUN] for a, b in zip(runs, taken[ORIGINAL], strict=True))}
        for way, runs in taken.items()
    }


def goals(record: dict[str, Any]) -> list[list[str]]:
    """Return the goal, and what was measured."""
    ratio = record["ways"][PORT]["ratio"]
    return [["run, to the original", f"<= {GOAL}x", f"{ratio:.3f}x", yes_no(ratio <= GOAL)]]


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    ways = record["ways"]
    more = {part: (ways[PORT][part] - ways[ORIGINAL][part]) * 1e3 for part in (*PARTS, END)}
    return section(
        f"the processor time of a whole process that trains for {record['iterations']} iterations and validates.",
        [
            (
                f"With a trainer it takes {ways[PORT]['ratio']:.3f} of the time by hand, "
                f"{ways[WITHOUT_WRITERS]['ratio']:.3f} without a writer; by hand {ways[ORIGINAL][RUN]:.2f} s."
            ),
            f"More or less of each part: {', '.join(f'{part} {ms:+.0f} ms' for part, ms in more.items())}.",
        ],
        [dict(zip(("goal", "wanted", "measured", "met"), row, strict=True)) for row in goals(record)],
        record["environment"],
    )


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run every way once a round, each round beginning with another; one more round compiles the bytecode."""
    taken: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as bytecode:
        for turn in range(-1, options.rounds):
            first = turn % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                seconds = run(way, options.iterations, bytecode)
                if turn >= 0:
                    taken[way].append(seconds)
    return figures({way: taken[way] for way in WAYS})


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=100, help="of a run")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    ways = measure(options)
    load = os.getloadavg()[0]
    about = {
        **environment("torch", "msgspec"),
        "rounds": f"{options.rounds}, medians",
        "load": f"{load:.1f} processes wanted a CPU on average at the end",
    }
    record = {"environment": about, "iterations": options.iterations, "ways": ways}
    rows = [
        [way, f"{each['ratio']:.3f}x", *(f"{each[measure] * 1e3:,.0f} ms" for measure in MEASURES)]
        for way, each in ways.items()
    ]
    report = "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.short_run')}",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            markdown_table(("goal", "wanted", "measured", "met"), goals(record)),
            markdown_table(("way", "run, to the original", *MEASURES), rows),
        ]
    )
    publish(report, record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
