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
minimises relative residuals, so that the small ones count too. One torch thread. What was measured is drawn again by

    python -m benchmarks.scaling --from scaling.json --markdown scaling.md --picture scaling.svg
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

COLUMNS = ["sweep", "what", "points", "the medians", "line", "at 0", "R²", "largest residual", "of the value"]
NOTE = (
    "The medians are called straight if R² is at least 0.99, and level if none is more than 10 % from the middle one; "
    "of others no slope is quoted. The line is least squares through the medians (iterations: one run), of relative "
    "residuals where x spans decades; it stands here also where it does not fit. Largest residual: measured less line, "
    "and the largest part of a measured value that one is."
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
    sweeps = series_of(record)
    emit, plain = sweeps["handlers"]
    thread, *_ = sweeps["writers"]
    stack = sweeps["parameters"][2]
    pace, whole, memory = sweeps["iterations"]
    return section(
        "the cost of an event or an iteration at growing numbers of handlers, writers, parameters and iterations.",
        [
            f"Handlers, 0 to {emit.xs[-1]:.0f}, time of an event: {emit.text}; a plain loop over them: {plain.text}.",
            f"Writers, 0 to {thread.xs[-1]:.0f}, time of an iteration on the training thread: {thread.text}.",
            f"Parameters, to {stack.xs[-1]:,.0f}, default hooks and loop in an iteration: {stack.text}.",
            f"Iterations, to {whole.xs[-1]:,.0f}, time since the beginning: {whole.text}.",
            f"The same, time of an iteration: {pace.text}.",
            f"The same, resident memory: {memory.text}.",
        ],
        [],
        record["environment"],
    )


def series_of(record: dict[str, Any]) -> dict[str, list[Series]]:
    """Return the series of each sweep of a record."""
    return {
        name: [Series.of(*kept) for kept in all_series.items()]
        for name, all_series in record["sweeps"].items()
    }


# --- the report --------------------------------------------------------------------------------------------


def line_rows(sweeps: dict[str, list[Series]]) -> list[list[str]]:
    """Every line."""
    rows = []
    for name, all_series in sweeps.items():
        for series in all_series:
            line = series.fit()
            rows.append(
                [
                    name,
                    series.name,
                    str(len(series.xs)),
                    series.text,
                    series.slope_text,
                    f"{line.intercept:.4g} {series.unit}",
                    f"{line.r2:.4f}",
                    f"{line.residual:+.3g} {series.unit}",
                    f"{line.residual_share:.1%}",
                ]
            )
    return rows


def point_table(series: Series) -> str:
    """Every point of one line."""
    line = series.fit()
    rows = [
        [f"{x:,.0f}", f"{y:.4g}", f"{low:.4g} to {high:.4g}", f"{line.at(x):.4g}"]
        for x, y, (low, high) in zip(series.xs, series.ys, series.quartiles, strict=True)
    ]
    return markdown_table(POINT_COLUMNS, rows)


def page_of(record: dict[str, Any]) -> str:
    """The whole page."""
    about, sweeps = record["environment"], series_of(record)
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
    iteration = "time of an iteration, µs"
    with picture(path, (2, 2), (10.4, 7.6)) as axes:
        (for_handlers, for_writers), (for_parameters, for_iterations) = axes
        emitted, plain = sweeps["handlers"]
        panel(
            for_handlers,
            "One event to more handlers",
            "handlers of the event",
            "time of an event, ns",
            [(plain, OTHERS, "--"), (emitted, OURS, "-")],
        )
        thread, written, own = sweeps["writers"]
        panel(
            for_writers,
            "An iteration with more writers",
            "writers",
            iteration,
            [(written, OTHERS, "--"), (thread, SECOND, "-"), (own, OURS, "-")],
        )
        bare, average, own, _, python = sweeps["parameters"]
        panel(
            for_parameters,
            "An iteration of a larger model",
            "parameters of the model",
            iteration,
            [(bare, OTHERS, "-"), (average, SECOND, "-"), (own, OURS, "-"), (python, OTHERS, ":")],
            logarithmic="xy",
        )
        pace, _, memory = sweeps["iterations"]
        panel(
            for_iterations,
            "A longer run",
            "iterations since the beginning",
            iteration,
            [(pace, OURS, "-")],
            logarithmic="x",
            right=("resident memory, MiB", (memory, SECOND, "-")),
        )


def panel(
    ax: Any,
    title: str,
    across: str,
    upwards: str,
    lines: list[Line],
    *,
    logarithmic: str = "",
    right: tuple[str, Line] | None = None,
) -> None:
    """Series of one unit, and one of another with its axis on the right. The legend is above the lines."""
    ax.set_title(title, loc="left")
    ax.set_xlabel(across)
    ax.set_ylabel(upwards)
    ax.grid(axis="y")
    ax.set_axisbelow(True)
    ax.set_xscale("log" if "x" in logarithmic else "linear")
    ax.set_yscale("log" if "y" in logarithmic else "linear")
    handles = [plot(ax, *line) for line in lines]
    top = max(high for series, _, _ in lines for _, high in series.quartiles)
    if "y" in logarithmic:
        ax.set_ylim(top=top * 10 ** (0.45 * len(lines)))
    else:
        ax.set_ylim(0, top * (1.1 + 0.1 * len(lines)))
    low, high = ax.get_ylim()
    ax.set_yticks(
        [tick for tick in ax.get_yticks() if low <= tick <= top], minor=False
    )  # none behind the legend
    ax.set_ylim(low, high)
    if right is not None:
        label, (series, colour, _) = right
        other = ax.twinx()
        other.set_ylabel(label, color=colour)
        other.tick_params(axis="y", labelcolor=colour, color=colour)
        other.set_ylim(0, max(series.ys) * 1.8)
        handles.append(plot(other, *right[1]))
    ax.legend(handles=handles, loc="upper left", fontsize=7.5, borderaxespad=0.2)


def plot(ax: Any, series: Series, colour: str, style: str) -> Any:
    """Points, their quartiles, and a line, which is returned: straight or level where the points are, else through them."""
    below = [max(0.0, y - low) for y, (low, _) in zip(series.ys, series.quartiles, strict=True)]
    above = [max(0.0, high - y) for y, (_, high) in zip(series.ys, series.quartiles, strict=True)]
    ax.errorbar(
        series.xs, series.ys, yerr=[below, above], fmt="o", markersize=3.5, color=colour, elinewidth=1.0
    )
    (drawn,) = ax.plot(
        series.xs, line_of(series), style, color=colour, linewidth=1.2, label=f"{series.name}: {series.text}"
    )
    return drawn


def line_of(series: Series) -> list[float]:
    """Return the line at each x: what the medians are called, or the medians."""
    if series.shape == "straight":
        line = series.fit()
        return [line.at(x) for x in series.xs]
    return [series.middle] * len(series.xs) if series.shape == "level" else series.ys


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
    publish(page_of(record), record, short, json=options.json, markdown=options.markdown)
    if options.picture is not None:
        draw(series_of(record), options.picture)


if __name__ == "__main__":
    main()
