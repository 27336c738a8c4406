"""Make the page and the picture of `peers` from the record that it keeps.

What is quoted is the whole run: the steps, and what an engine left to the background, until it is done.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.helpers import peer_dispatch
from benchmarks.helpers.digits_training import EVERY, PEERS
from benchmarks.helpers.engine_process import BUS, BUS_READY, TWIN
from benchmarks.helpers.in_short import section
from benchmarks.helpers.own_trainings import BARE, WHOLE
from benchmarks.helpers.pictures import bars, picture
from benchmarks.helpers.timing import markdown_table, yes_no

LOSS_TOLERANCE = 1e-4
TRAINING_COLUMNS = [
    "engine",
    "whole run",
    "quartiles",
    "/ eventloop",
    "ms a step",
    "mean step",
    "quartiles",
    "p50",
    "p99",
    "added to a step",
    "quartiles, µs",
    "left per epoch",
]
DISPATCH_COLUMNS = ["system", "ns", "x plain loop", "quartiles", "/ eventloop"]
GOAL_COLUMNS = ["goal", "wanted", "measured", "met"]


def page_of(title: str, record: dict[str, Any]) -> str:
    """The whole page."""
    about = record["environment"]
    parts = [
        f"# {title}",
        f"`{record['command']}`",
        ", ".join(f"{name} {value}" for name, value in about.items()),
        "## Goals\n\n" + markdown_table(GOAL_COLUMNS, goal_rows(record)),
    ]
    for name, size in record["sizes"].items():
        parts += [f"## A step of ~{name}", training_table(size), caption(size, record["options"])]
    parts += [f"## One event to {record['dispatch']['handlers']} handlers that do nothing"]
    parts += [dispatch_table(record["dispatch"]), dispatch_caption(record)]
    return "\n\n".join(parts)


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    answers = []
    for name, size in record["sizes"].items():
        runs = ", ".join(f"{engine} {whole:.3f}x" for engine, (_, whole, _) in _measured(size, "wall"))
        answers.append(f"Steps of ~{name}, the whole run to the bare loop's: {runs}.")
    part = record["dispatch"]
    events = ", ".join(
        f"{name} {ratio:.1f}x" for name, (_, ratio, _) in _measured(part, "ratio") if name not in VARIANTS
    )
    answers.append(f"One event to {part['handlers']} handlers, to a plain loop over them: {events}.")
    return section(
        "the same training in each engine, each in a process of its own; and one event announced by each.",
        answers,
        [dict(zip(GOAL_COLUMNS, row, strict=True)) for row in goal_rows(record)],
        record["environment"],
    )


# --- goals -------------------------------------------------------------------------------------------------


def goal_rows(record: dict[str, Any]) -> list[list[str]]:
    """The goals beside what was measured; a peer that could not be measured is no slower one."""
    rows = []
    for name, size in record["sizes"].items():
        _, ratio, _ = size["compared"][WHOLE]["wall"]
        rows.append(
            _goal(f"whole run, ~{name}", f"<= {size['goal']}x", f"{ratio:.3f}x", ratio <= size["goal"])
        )
        rows.append(_slower(f"every peer slower than eventloop, ~{name}", beside_eventloop(size), [*PEERS]))
        off = size["loss_difference"]
        rows.append(
            _goal(f"same loss in all, ~{name}", f"<= {LOSS_TOLERANCE:g}", f"{off:.1e}", off <= LOSS_TOLERANCE)
        )
    peers = [label for label in peer_dispatch.PEERS if label != peer_dispatch.ONE_CLASS]
    ratios = {name: each["to_eventloop"][1] for name, each in record["dispatch"]["compared"].items()}
    rows.append(_slower("every peer slower than bus.emit, event built too", ratios, peers))
    return rows


def beside_eventloop(size: dict[str, Any]) -> dict[str, float]:
    """Return each engine's whole run beside eventloop's in the same round: the medians over the rounds."""
    whole = [turn["wall"] for turn in size["turns"][WHOLE]]
    return {
        name: statistics.median(turn["wall"] / wall for turn, wall in zip(turns, whole, strict=True))
        for name, turns in size["turns"].items()
    }


def _goal(name: str, wanted: str, measured: str, met: bool) -> list[str]:
    return [name, wanted, measured, yes_no(met)]


def _slower(name: str, measured_ratios: dict[str, float], peers: list[str]) -> list[str]:
    ratios = {peer: measured_ratios[peer] for peer in peers if peer in measured_ratios}
    if not ratios:
        return _goal(name, "> 1x", "no peer is there", False)
    nearest = min(ratios, key=lambda peer: ratios[peer])
    absent = len(peers) - len(ratios)
    measured = f"{nearest} {ratios[nearest]:.2f}x" + (f", {absent} not measured" if absent else "")
    return _goal(name, "> 1x", measured, ratios[nearest] > 1.0 and not absent)


# --- tables ------------------------------------------------------------------------------------------------


def training_table(size: dict[str, Any]) -> str:
    """Every engine, the fastest first, and those that could not be measured."""
    compared = sorted(size["compared"].items(), key=lambda item: float(item[1]["wall"][1]))
    compared.sort(key=lambda item: item[0] != BARE)
    beside = beside_eventloop(size)
    rows = [_training_row(name, each, beside[name]) for name, each in compared]
    return _with_absent(TRAINING_COLUMNS, rows, size["failed"])


def _training_row(name: str, each: dict[str, Any], beside: float) -> list[str]:
    whole_low, whole, whole_high = each["wall"]
    low, mean, high = each["mean"]
    more_low, more, more_high = (value * 1e6 for value in each["added"])
    only_others = ["", ""] if name == BARE else [f"{more:+.0f} µs", f"{more_low:+.0f} to {more_high:+.0f}"]
    return [
        name,
        f"{whole:.3f}x",
        f"{whole_low:.3f} to {whole_high:.3f}",
        f"{beside:.2f}",
        f"{each['step'] * 1e3:.3f}",
        f"{mean:.3f}x",
        f"{low:.3f} to {high:.3f}",
        f"{each['p50'][1]:.3f}x",
        f"{each['p99'][1]:.3f}x",
        *only_others,
        f"{each['left'] * 1e3:.1f} ms",
    ]


def dispatch_table(part: dict[str, Any]) -> str:
    """Every system, the fastest first, and those that could not be measured."""
    rows = [
        [
            label,
            f"{each['ns'][1]:.0f}",
            f"{each['ratio'][1]:.2f}",
            f"{each['ratio'][0]:.2f} to {each['ratio'][2]:.2f}",
            f"{each['to_eventloop'][1]:.2f}",
        ]
        for label, each in sorted(part["compared"].items(), key=lambda item: float(item[1]["ratio"][1]))
    ]
    return _with_absent(DISPATCH_COLUMNS, rows, part["failed"])


def _with_absent(columns: list[str], rows: list[list[str]], failed: dict[str, str]) -> str:
    absent = [[name, reason] + [""] * (len(columns) - 2) for name, reason in failed.items()]
    return markdown_table(columns, rows + absent)


def caption(size: dict[str, Any], options: dict[str, int]) -> str:
    """What a table of trainings shows."""
    shape, step = size["size"], size["bare_step"]
    return (
        f"Batches of {shape['batch_size']}, two hidden layers of {shape['width']}, {size['parameters']:,} parameters; "
        f"a bare step takes {step * 1e3:.2f} ms. Loss and learning rate are logged every {EVERY} iterations and a "
        f"checkpoint is saved every {shape['epoch_length']}, that is each {shape['epoch_length'] * step:.2f} s. A turn "
        f"has {size['epochs'] * shape['epoch_length']} iterations; medians over {options['sessions']} session(s) of "
        f"{options['rounds']} rounds, of ratios to the bare loop in the same round. Whole run: a turn, and what it "
        f"left to the background, until that is done. / eventloop: its whole run over eventloop's in the same round. "
        f"mean step, p50, p99: of a turn's steps, logs and checkpoints included. Left per epoch: how long it takes to "
        f"finish what was left to the background. The losses after each turn differ by at most "
        f"{size['loss_difference']:.1e}; a process that waited for its turn used at most {size['idle_cpu']:.1%} of a CPU."
    )


def dispatch_caption(record: dict[str, Any]) -> str:
    """What the table of announcements shows."""
    rounds = record["options"]["sessions"] * record["options"]["rounds"]
    text = (
        f"Medians over {rounds} rounds; each process has the plain loop `for f in handlers: f(event)`, given the event "
        f"ready, beside the system. eventloop builds its event in the same statement, but in the row that says ready. "
        f"Handlers that are methods have a class each, as those of a training have."
    )
    one = record["dispatch"]["compared"].get(peer_dispatch.ONE_CLASS)
    if one is None:
        return text
    return text + (
        f" With ten callbacks of one class torchtnt, whose loop is a plain one over those that override the method, "
        f"takes {one['ratio'][1]:.2f}x: the interpreter then knows what it will call."
    )


# --- the picture -------------------------------------------------------------------------------------------

Quartiles = tuple[float, float, float]
SHORT = {
    BARE + TWIN: "a second bare loop",
    "transformers.Trainer": "transformers",
    BUS: "eventloop",
    BUS_READY: "eventloop, event ready",
    "blinker send": "blinker",
    "pluggy hook": "pluggy",
    "ignite fire_event": "pytorch-ignite",
    "mmengine call_hook": "MMEngine",
    "lightning _call_callback_hooks": "Lightning",
    "transformers CallbackHandler": "transformers",
    "torchtnt CallbackHandler": "torchtnt",
    peer_dispatch.ONE_CLASS: "torchtnt, one class",
}
VARIANTS = (SHORT[BUS_READY], SHORT[peer_dispatch.ONE_CLASS])
"""Rows of systems that have another row."""


def draw(record: dict[str, Any], path: Path) -> None:
    """Ratios to the bare loop, and to the plain loop over handlers, as bars with the quartiles."""
    sizes, part = record["sizes"], record["dispatch"]
    with picture(path, (1, len(sizes) + 1), (4.3 * (len(sizes) + 1), 3.1)) as axes:
        for ax, (name, size) in zip(axes[0], sizes.items(), strict=False):
            bars(ax, _rows(size, "wall"), ours=WHOLE)
            ax.set_title(f"A training of ~{name} a step", loc="left")
            ax.set_xlabel("whole run / the bare loop's")
        bars(axes[0][-1], _rows(part, "ratio"), ours=WHOLE)
        axes[0][-1].set_title(f"One event to {part['handlers']} handlers", loc="left")
        axes[0][-1].set_xlabel("time / a plain loop's over the handlers")


def _rows(part: dict[str, Any], key: str) -> list[tuple[str, Quartiles | None]]:
    """Return the bars, the fastest first, and those that could not be measured."""
    return [*_measured(part, key), *((SHORT.get(name, name), None) for name in part["failed"])]


def _measured(part: dict[str, Any], key: str) -> list[tuple[str, Quartiles]]:
    """Return a ratio of everything but the bare loop, the fastest first."""
    rows = [
        (SHORT.get(name, name), tuple(each[key])) for name, each in part["compared"].items() if name != BARE
    ]
    return sorted(rows, key=lambda row: row[1][1])
