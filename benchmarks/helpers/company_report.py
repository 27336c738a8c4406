"""Make the page of `company` from the record that it keeps: a table for each training, and the goals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.helpers.company_engines import WHOLE
from benchmarks.helpers.company_job import SMALL_STATE
from benchmarks.helpers.company_peers import PEERS
from benchmarks.helpers.company_runs import ALONE
from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import markdown_table, yes_no

COMPARED = (WHOLE, *PEERS)
Cells = Mapping[str, Mapping[str, Any]]
COLUMNS = [
    "",
    "whole run",
    "/ by hand",
    "start",
    "loop",
    "/ by hand",
    "end",
    "/ by hand",
    "p50",
    "p99",
    "/ bare",
    "longest step",
    "blocked",
    "best",
    "durable",
    "/ by hand",
    "longest",
    "log to file",
    "longest",
]
GOAL_COLUMNS = ["goal", "wanted", "measured", "met"]


def page_of(title: str, record: dict[str, Any]) -> str:
    """The whole page."""
    about = record["environment"]
    companies = "\n".join(f"- {name}: {text}" for name, text in record["companies"].items())
    parts = [
        f"# {title}",
        f"`{record['command']}`",
        ", ".join(f"{name} {value}" for name, value in about.items()),
        f"Medians of {record['options']['rounds']} rounds. Beside each training:\n\n{companies}",
        markdown_table(GOAL_COLUMNS, [[*goal.values()] for goal in record["goals"]]),
    ]
    for name, companies_of in record["cells"].items():
        rows = [row for company, cell in companies_of.items() for row in rows_of(company, cell)]
        failed = [
            f"{company}, {engine}: {why}"
            for company, cell in companies_of.items()
            for engine, why in cell["failed"].items()
        ]
        parts += [f"## The training of {name}", markdown_table(COLUMNS, rows), *failed]
    difference = max(cell["loss_difference"] for each in record["cells"].values() for cell in each.values())
    parts.append(
        f"The losses after the training differ by {difference:.1g} at most between the engines of a row."
    )
    parts += [f"{name}: {why}." for name, why in record["absent"].items()]
    return "\n\n".join(parts)


def rows_of(company: str, cell: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for each engine in one company; those that failed are empty, and say why below the table."""
    for name, found in cell["engines"].items():
        yield [f"{company}, {name}", *cells_of(found)]
    for name in cell["failed"]:
        yield [f"{company}, {name}", "failed", *["-"] * (len(COLUMNS) - 2)]


def cells_of(found: Mapping[str, float]) -> list[str]:
    """The figures of an engine; a dash for what it does not do."""
    saves, logs = found["saves"] > 0, found["lag_longest"] > 0

    def times(key: str) -> str:
        return f"{found[key]:.2f}x" if key in found else "-"

    def shown(key: str, does: bool = True) -> str:
        return seconds(found[key]) if does else "-"

    return [
        shown("whole"),
        times("whole / by hand"),
        shown("start"),
        shown("loop"),
        times("loop / by hand"),
        shown("end"),
        times("end / by hand"),
        shown("p50"),
        shown("p99"),
        times("p99 / bare"),
        shown("longest"),
        shown("save", saves),
        shown("best", saves),
        shown("durable", saves),
        times("durable / by hand"),
        shown("durable_longest", saves),
        shown("lag", logs),
        shown("lag_longest", logs),
    ]


def seconds(value: float) -> str:
    """As it is printed."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


# --- goals ---------------------------------------------------------------------------------------------------


def goals(cells: Cells, before: Cells | None) -> list[dict[str, str]]:
    """Each goal beside the worst row that it speaks of; `before` are the cells of an earlier commit."""
    return [
        goal("whole run in company, to by hand", 1.3, worst(cells, "whole / by hand", in_company)),
        not_slower_alone(cells, before),
        goal("small best checkpoint blocks, in company", 2.0, worst(cells, "best", small, 1e3), " ms"),
        goal("last step to exit, to by hand", 2.0, worst(cells, "end / by hand", everywhere)),
        goal("p99 of a step in company, to the bare loop's", 1.15, worst(cells, "p99 / bare", in_company)),
        goal("save to durable, to by hand", 3.0, worst(cells, "durable / by hand", everywhere)),
    ]


def everywhere(training: str, company: str) -> bool:
    """Every row."""
    return True


def in_company(training: str, company: str) -> bool:
    """The rows that are not alone."""
    return company != ALONE


def alone(training: str, company: str) -> bool:
    """The rows that are alone."""
    return company == ALONE


def small(training: str, company: str) -> bool:
    """The rows of the small state that are not alone."""
    return in_company(training, company) and training == SMALL_STATE


NO_ROW = "no such row was measured"
Worst = tuple[float, str] | None
"""The largest value, and in which row it is; None if a row could not be measured, or there is none."""


def worst(
    cells: Cells, figure: str, counts: Callable[[str, str], bool], scale: float = 1.0
) -> tuple[Worst, str]:
    """The largest figure of eventloop in the rows that count, and why it is not known otherwise."""
    found: list[tuple[float, str]] = []
    for training, companies in cells.items():
        for company, cell in companies.items():
            if not counts(training, company):
                continue
            row = f"{training}, {company}"
            if WHOLE in cell["failed"]:
                return None, f"{row}: {cell['failed'][WHOLE]}"
            if figure in (own := cell["engines"][WHOLE]):
                found.append((own[figure] * scale, row))
    return (max(found), "") if found else (None, NO_ROW)


def goal(what: str, wanted: float, measured: tuple[Worst, str], unit: str = "x") -> dict[str, str]:
    """A line of the table of goals; a row that could not be measured misses every goal."""
    found, why = measured
    if found is None:
        measured_text, met = ("nothing", why) if why == NO_ROW else (f"failed ({why})", yes_no(False))
        return {"goal": what, "wanted": f"<= {wanted:g}{unit}", "measured": measured_text, "met": met}
    value, row = found
    return {
        "goal": what,
        "wanted": f"<= {wanted:g}{unit}",
        "measured": f"{value:.3g}{unit} ({row})",
        "met": yes_no(value <= wanted),
    }


NOISE = 1.05
"""A ratio of two measurements of the same code, on different days, is within this."""


def not_slower_alone(cells: Cells, before: Cells | None) -> dict[str, str]:
    """The whole runs that are alone, to by hand, beside those of an earlier commit."""
    what, wanted = "whole run alone, to an earlier commit", f"<= {NOISE:g}x"
    found: list[tuple[float, str]] = []
    for training, companies in cells.items():
        now = companies.get(ALONE, {}).get("engines", {}).get(WHOLE, {})
        then = (before or {}).get(training, {}).get(ALONE, {}).get("engines", {}).get(WHOLE, {})
        if (figure := "whole / by hand") in now and figure in then:
            found.append((now[figure] / then[figure], training))
    if not found:
        why = "needs --before" if before is None else NO_ROW
        return {"goal": what, "wanted": wanted, "measured": "nothing", "met": why}
    value, row = max(found)
    return {
        "goal": what,
        "wanted": wanted,
        "measured": f"{value:.2f}x ({row})",
        "met": yes_no(value <= NOISE),
    }


# --- in short ------------------------------------------------------------------------------------------------


def short(record: dict[str, Any]) -> str:
    """The section that opens the page."""
    cells = record["cells"]
    answers = [
        f"{where}: {'; '.join(lines)}."
        for where, counts in (("Alone", alone), ("In company", in_company))
        if (lines := [span(cells, engine, counts) for engine in engines_of(cells) if engine in COMPARED])
    ]
    return section(
        f"whole runs of {len(cells)} trainings with best checkpoints and three writers, to the same loop by hand, synced.",
        answers,
        record["goals"],
        record["environment"],
    )


def engines_of(cells: Cells) -> list[str]:
    """The engines that were measured anywhere."""
    return [
        *dict.fromkeys(name for each in cells.values() for cell in each.values() for name in cell["engines"])
    ]


def span(cells: Cells, engine: str, counts: Callable[[str, str], bool]) -> str:
    """The least and the most that the whole run of an engine takes, to by hand, and in which row it is the most."""
    found = [
        (cell["engines"][engine]["whole / by hand"], f"{training}, {company}")
        for training, companies in cells.items()
        for company, cell in companies.items()
        if counts(training, company) and "whole / by hand" in cell["engines"].get(engine, {})
    ]
    if not found:
        return f"{engine} not measured"
    (least, _), (most, row) = min(found), max(found)
    return f"{engine} {least:.2f} to {most:.2f} times ({row})"
