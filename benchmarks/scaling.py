"""How does the cost grow with the number of handlers, writers, parameters and iterations?

    python -m benchmarks.scaling --json scaling.json --markdown scaling.md --picture scaling.svg [--quick]

- handlers, 0 to 100: one event built and emitted, to handlers that do nothing, beside a plain loop over them.
- writers, 0 to 10: an iteration of a small model that logs every 10 iterations to JSON line writers, as the training
  thread sees it, which shares the interpreter with them; until everything is written; and what hooks and loop took of
  it, by the trainer's own clock (`trainer.clock.phases`: hooks and unaccounted), the hand-over among it.
- parameters, 10^4 to 10^8: the bare step; what all default hooks but the optimizer's, and the loop itself, take of an
  iteration, by the same clock and, as far as the noise of a long step lets tell, as the whole less a bare step in the
  same round; and what an EMAHook adds to it. Of the stack only the average and a checkpoint touch parameters;
  checkpoints are off here (see `checkpoint_stall`). A step that goes through more memory than the caches hold leaves
  them empty: Python that has nothing to do with eventloop, timed after each bare step, shows by how much that slows
  down whatever comes next, once and for all.
- iterations, 10^3 to 10^6: one run with all default hooks, JSON lines and a checkpoint every 1000 iterations: its pace
  between two points, and the resident memory. It is the first sweep, in a process that has done nothing else.

The points of a sweep take turns in rounds; its lines go through the medians. Where x spans decades the line
minimises relative residuals, so that the small ones count too. One torch thread.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.helpers import scaling_sweeps
from benchmarks.helpers.in_short import section
from benchmarks.helpers.pictures import OTHERS, OURS, SECOND, picture
from benchmarks.helpers.straight_lines import Series
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, version_of

COLUMNS = ["sweep", "what", "points", "slope", "at 0", "R²", "largest residual", "of the value"]
NOTE = (
    "Least squares through the medians (iterations: one run), of relative residuals where x spans decades. Largest "
    "residual: measured less line, and the largest part of a measured value that one is. Of a flat line, whose points "
    "differ by noise only, R² is near 0: its slope and its residual count."
)
POINT_COLUMNS = ["at", "median", "quartiles", "the line"]


@dataclass(frozen=True)
class Plan:
    """What is measured where, and how often."""

    handlers: tuple[int, ...]
    writers: tuple[int, ...]
    parameters: tuple[int, ...]
    iterations: tuple[int, ...]
    rounds: int
    number: int
    """Repetitions in a block of an emit."""
    length: int
    """Iterations of a turn with writers."""


def decades(first: int, last: int, steps: tuple[int, ...]) -> tuple[int, ...]:
    """1, 2 and 5 times each power of ten, say, from 10^first to 10^last."""
    points = [step * 10**power for power in range(first, last) for step in steps]
    return (*points, 10**last)


FULL = Plan(
    handlers=(0, 1, 2, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100),
    writers=tuple(range(11)),
    parameters=decades(4, 8, (1, 3)),
    iterations=decades(3, 6, (1, 2, 5)),
    rounds=15,
    number=1000,
    length=1000,
)
QUICK = Plan(
    handlers=(0, 1, 10, 50, 100),
    writers=(0, 2, 5, 10),
    parameters=decades(4, 7, (1,)),
    iterations=decades(3, 4, (1, 2, 5)),
    rounds=3,
    number=300,
    length=300,
)


def measure(plan: Plan, directory: Path) -> dict[str, list[Series]]:
    """All sweeps; memory first, before anything else has taken some."""
    sweeps: dict[str, Callable[[], list[Series]]] = {
        "iterations": lambda: scaling_sweeps.iterations(plan.iterations, directory / "iterations"),
        "handlers": lambda: scaling_sweeps.handlers(plan.handlers, plan.rounds, plan.number),
        "writers": lambda: scaling_sweeps.writers(plan.writers, plan.rounds, plan.length, directory),
        "parameters": lambda: scaling_sweeps.parameters(plan.parameters, plan.rounds, directory),
    }
    taken = {name: sweep() for name, sweep in sweeps.items()}
    return {name: taken[name] for name in ("handlers", "writers", "parameters", "iterations")}


def measured(plan: Plan) -> dict[str, Any]:
    """Run all sweeps; return the record that the JSON file keeps."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        sweeps = measure(plan, Path(directory))
    return {
        "command": command_line("benchmarks.scaling"),
        "environment": environment("torch", "msgspec", "blinker", "anyio", "numpy"),
        "sweeps": {name: {s.name: s.record() for s in series} for name, series in sweeps.items()},
    }


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    sweeps = record["sweeps"]
    emit, plain = sweeps["handlers"].values()
    thread, *_ = sweeps["writers"].values()
    stack = sweeps["parameters"]["default hooks and the loop"]
    _, whole, memory = sweeps["iterations"].values()
    return section(
        "the cost of an event or an iteration at growing numbers of handlers, writers, parameters and iterations.",
        [
            f"Handlers, to {emit['x'][-1]:.0f}: {emit['slope_text']} (a plain loop {plain['slope_text']}), R² {emit['r2']:.3f}.",
            f"Writers, to {thread['x'][-1]:.0f}: {thread['slope_text']} on the training thread, of {thread['intercept']:.0f} µs.",
            (
                f"Parameters, to {stack['x'][-1]:,.0f}: default hooks and loop take {min(stack['median']):.0f} to "
                f"{max(stack['median']):.0f} µs an iteration."
            ),
            f"Iterations, to {whole['x'][-1]:,.0f}: {whole['slope_text']}, R² {whole['r2']:.4f}; memory {memory['slope_text']}.",
        ],
        [],
        record["environment"],
    )


# --- the report --------------------------------------------------------------------------------------------


def line_rows(sweeps: dict[str, list[Series]]) -> list[list[str]]:
    """Every line."""
    rows = []
    for name, all_series in sweeps.items():
        for series in all_series:
            line = series.fit()
            rows.append(
                [
                    name, series.name, str(len(series.xs)), series.slope_text, f"{line.intercept:.4g} {series.unit}",
                    f"{line.r2:.4f}", f"{line.residual:+.3g} {series.unit}", f"{line.residual_share:.1%}",
                ]
            )  # fmt: skip
    return rows


def point_table(series: Series) -> str:
    """Every point of one line."""
    line = series.fit()
    rows = [
        [f"{x:,.0f}", f"{y:.4g}", f"{low:.4g} to {high:.4g}", f"{line.at(x):.4g}"]
        for x, y, (low, high) in zip(series.xs, series.ys, series.quartiles, strict=True)
    ]
    return markdown_table(POINT_COLUMNS, rows)


def report(record: dict[str, Any], sweeps: dict[str, list[Series]]) -> str:
    """The whole page."""
    about = record["environment"]
    parts = [
        f"# {(__doc__ or '').splitlines()[0]}",
        f"`{record['command']}`",
        ", ".join(f"{name} {value}" for name, value in about.items()),
        "## The lines\n\n" + markdown_table(COLUMNS, line_rows(sweeps)),
        NOTE,
    ]
    for name, all_series in sweeps.items():
        parts += [f"### {name}: {each.name}, {each.unit}\n\n{point_table(each)}" for each in all_series]
    return "\n\n".join(parts)


# --- the picture -------------------------------------------------------------------------------------------


Line = tuple[Series, str, str]
"""What is drawn, its colour and the style of the line."""


def draw(sweeps: dict[str, list[Series]], path: Path) -> None:
    """A panel for each sweep: medians, quartiles and lines."""
    with picture(path, (2, 2), (9.6, 6.6)) as axes:
        (for_handlers, for_writers), (for_parameters, for_iterations) = axes
        emitted, plain = sweeps["handlers"]
        panel(for_handlers, "Handlers of an event", "ns", [(plain, OTHERS, "--"), (emitted, OURS, "-")])
        thread, written, own = sweeps["writers"]
        panel(
            for_writers, "Writers", "µs an iteration",
            [(written, OTHERS, "--"), (thread, SECOND, "-"), (own, OURS, "-")],
        )  # fmt: skip
        bare, average, own, _, python = sweeps["parameters"]
        panel(
            for_parameters, "Parameters", "µs an iteration",
            [(bare, OTHERS, "-"), (average, SECOND, "-"), (own, OURS, "-"), (python, OTHERS, ":")],
            logarithmic="xy",
        )  # fmt: skip
        pace, _, memory = sweeps["iterations"]
        panel(
            for_iterations, "Iterations", "µs an iteration", [(pace, OURS, "-")], logarithmic="x",
            right=(memory, SECOND, "-"),
        )  # fmt: skip


def panel(
    ax: Any, title: str, unit: str, lines: list[Line], *, logarithmic: str = "", right: Line | None = None
) -> None:
    """Series of one unit, and one of another with its axis on the right. The legend is above the lines."""
    ax.set_title(title, loc="left")
    ax.set_ylabel(unit)
    ax.grid(True)
    ax.set_axisbelow(True)
    ax.set_xscale("log" if "x" in logarithmic else "linear")
    ax.set_yscale("log" if "y" in logarithmic else "linear")
    handles = [plot(ax, *line) for line in lines]
    top = max(max(series.ys) for series, _, _ in lines)
    if "y" in logarithmic:
        ax.set_ylim(top=top * 10 ** (0.5 * len(lines)))
    else:
        ax.set_ylim(0, top * 1.4)
    if right is not None:
        series, colour, _ = right
        other = ax.twinx()
        other.set_ylabel(series.unit, color=colour)
        other.tick_params(axis="y", labelcolor=colour, color=colour)
        other.set_ylim(0, max(series.ys) * 1.8)
        handles.append(plot(other, *right))
    ax.legend(handles=handles, loc="upper left", fontsize=8)


def plot(ax: Any, series: Series, colour: str, style: str) -> Any:
    """Points, their quartiles, and the line, which is returned."""
    line = series.fit()
    below = [max(0.0, y - low) for y, (low, _) in zip(series.ys, series.quartiles, strict=True)]
    above = [max(0.0, high - y) for y, (_, high) in zip(series.ys, series.quartiles, strict=True)]
    ax.errorbar(
        series.xs, series.ys, yerr=[below, above], fmt="o", markersize=3.5, color=colour, elinewidth=1.0
    )
    first, last = series.xs[0], series.xs[-1]
    steps = [first * (last / first) ** (i / 60) for i in range(61)] if first else [first, last]
    (drawn,) = ax.plot(
        steps, [line.at(x) for x in steps], style, color=colour, linewidth=1.2,
        label=f"{series.name}: {series.slope_text}",
    )  # fmt: skip
    return drawn


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds: a trial")
    parser.add_argument("--from", dest="kept", type=Path, help="report on a JSON file, and measure nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--picture", type=Path, help=".svg or .png")
    options = parser.parse_args()
    if options.picture is not None and version_of("matplotlib") == "not installed":
        parser.error("--picture needs matplotlib: pip install -c constraints.txt -e '.[bench]'")
    return options


def main() -> None:
    """Measure, print, keep, draw."""
    options = arguments()
    if options.kept is not None:
        record = msgspec.json.decode(options.kept.read_bytes())
    else:
        record = measured(QUICK if options.quick else FULL)
    sweeps = {
        name: [Series.of(*kept) for kept in all_series.items()]
        for name, all_series in record["sweeps"].items()
    }
    publish(report(record, sweeps), record, short, json=options.json, markdown=options.markdown)
    if options.picture is not None:
        draw(sweeps, options.picture)


if __name__ == "__main__":
    main()
