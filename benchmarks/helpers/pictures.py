"""Draw pictures that are readable on a white page and on a dark one.

matplotlib is imported when a picture is drawn, so that what measures needs none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

TEXT, FAINT, OURS, OTHERS, SECOND = "#768390", "#76839050", "#2f81f7", "#8b949e", "#db6d28"
"""All have a contrast of at least 3 to white and to GitHub's #0d1117; blue and orange differ for colour-blind eyes."""
STYLE = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "svg.hashsalt": "eventloop",  # the same figures give the same file
    "svg.fonttype": "path",  # it looks the same where the font is missing
}


@contextmanager
def picture(
    path: Path, panels: tuple[int, int], inches: tuple[float, float], **options: Any
) -> Iterator[Any]:
    """A figure, as an array of its panels, written to `path` at the end; .svg, or .png with 200 dots an inch.

    Args:
        panels: rows and columns.
        options: of `plt.subplots`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    matplotlib = import_module("matplotlib")
    matplotlib.use("agg")
    plt = import_module("matplotlib.pyplot")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(*panels, figsize=inches, layout="constrained", squeeze=False, **options)
        yield axes
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=200, metadata=metadata)
        plt.close(figure)


def plain_ticks(axis: Any, values: list[float], text: str = "{:g}") -> None:
    """These ticks and no others, on an axis of any scale."""
    ticker = import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.FixedLocator(values))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text.format(value)))
    axis.set_minor_locator(ticker.NullLocator())


def bars(ax: Any, rows: list[tuple[str, tuple[float, float, float] | None]], *, ours: str) -> None:
    """Horizontal bars from 1x on a logarithmic axis, the first row at the top.

    Args:
        rows: a label, and quartiles of a ratio (lower, median, upper), or None for what could not be measured.
        ours: whose labels are beginning with this is in colour.
    """
    measured = [value for _, value in rows if value is not None]
    low, high = min(0.98, *(v[0] for v in measured)), max(v[2] for v in measured)
    ax.set_xscale("log")
    room = (high / low) ** 0.22  # for the labels
    ax.set_xlim(low, high * room)
    plain_ticks(ax.xaxis, [tick for tick in ticks_to(high) if low <= tick <= high * room], "{:g}×")
    ax.set_yticks(range(len(rows)), [label for label, _ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(axis="x")
    ax.set_axisbelow(True)
    ax.axvline(1.0, color=TEXT, linewidth=1.0)
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    for place, (label, value) in enumerate(rows):
        mine = label.startswith(ours)
        if value is None:
            ax.text(1.0, place, "  not measured", va="center", style="italic")
            continue
        lower, middle, upper = value
        colour = OURS if mine else OTHERS
        ax.barh(place, middle - 1.0, left=1.0, height=0.62, color=colour, alpha=0.6)
        ax.plot([lower, upper], [place, place], color=colour, linewidth=2.0, solid_capstyle="butt")
        decimals = 2 if middle < 4.995 else 1 if middle < 9.95 else 0
        ax.annotate(
            f"{middle:.{decimals}f}×",
            (max(upper, middle, 1.0), place),
            xytext=(4, 0),
            va="center",
            textcoords="offset points",
            weight="bold" if mine else "normal",
            color=OURS if mine else TEXT,
        )


def ticks_to(high: float) -> list[float]:
    """Where a logarithmic axis from 1 is marked."""
    if high < 1.25:
        return [0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2]
    if high < 1.75:
        return [0.8, 0.9, 1.0, 1.2, 1.4, 1.6]
    if high < 4.0:
        return [0.8, 1.0, 1.5, 2.0, 3.0, 4.0]
    return [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
