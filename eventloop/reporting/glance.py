"""Draw the most important lines of a report, as wide as the terminal.

`text` calls it unless `--all` is given, and `trainer.summary()` uses the same tables. Handlers that take less
than 1 % of the iterations share a line, and so do handlers that are part of eventloop and take less than 5 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import NamedTuple

from msgspec.structs import replace

from eventloop.costs.records import HandlerCost, RunCosts, SubscriberCost, phase_names
from eventloop.costs.shares import own_seconds
from eventloop.costs.trend import trend
from eventloop.reporting.comparison import MATTERS, Row, compared_by_time, runs_table
from eventloop.reporting.facts import ESTIMATED, facts, lossy, state
from eventloop.reporting.report import Report
from eventloop.reporting.tables import (
    IN_SECONDS,
    Table,
    filled,
    handlers_table,
    outside_table,
    phases_table,
    ranks_table,
    subscribers_table,
)
from eventloop.util.formatting import (
    ABSENT,
    BLOCKS,
    duration,
    on_a_line,
    share,
    sparkline,
    table,
    three_digits,
    value_text,
)

LINES = 25
"""The largest number of lines of the whole output."""
BUILT_IN = 0.05
"""The share of the iterations, 0..1, below which eventloop's own handlers share a row."""
BUSY = 0.5
"""The share of the run from which a busy background subscriber has a row."""
ALERT = "!"
"""The mark of a highlighted row."""
GAP = 2
"""The number of spaces between columns."""
NAME = 24
"""The least width of the column of names in characters; with shorter names the column is narrower."""
CURVE = 10
"""The least width of a curve, in characters."""
HINT = "  (--all shows every table)"
RATIO = 6
"""The width of a ratio, in characters."""


class Folded(NamedTuple):
    """The handlers of a table: those shown as rows, and the built-in and small ones that share a line."""

    shown: list[HandlerCost]
    built_in: list[HandlerCost]
    small: list[HandlerCost]


def fold(costs: RunCosts, *, inside: bool) -> Folded:
    """Sort the called handlers into those with a row of their own and those that share a line.

    Args:
        inside: True for the handlers called in iterations, False for all others.
    """
    whole = costs.phases.wall if inside else costs.seconds or costs.phases.wall
    folded = Folded([], [], [])
    for cost in sorted(costs.handlers, key=lambda each: -each.seconds):
        if not cost.calls or cost.in_iteration is not inside:
            continue
        least = BUILT_IN if cost.built_in else MATTERS
        matters = cost.over_budget or own_seconds(cost, costs.phases) >= least * whole
        (folded.shown if matters else folded.built_in if cost.built_in else folded.small).append(cost)
    return folded


def fitted(each: Table, width: int, blocks: str = BLOCKS) -> str:
    """Draw a table without its title and notes, with the columns that fit and long names shortened.

    Columns whose cells are all empty are left out.

    Args:
        width: the width of a line in characters.
        blocks: the characters of curves, from low to high.
    """
    said = [i for i in range(len(each.header)) if filled(each, i)]
    header = [on_a_line(each.header[i]) for i in said]
    rows = [[on_a_line(row[i]) for i in said] for row in each.rows]
    if each.bad:
        rows = [[f"{ALERT if i in each.bad else ' '} {row[0]}", *row[1:]] for i, row in enumerate(rows)]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    named = [header.index(name) for name in each.first if name in header]
    kept, room = [0], width - min(widths[0], max(NAME, width // 3))
    for column in [*named, *(i for i in range(1, len(header)) if i not in named)]:
        if widths[column] + GAP > room:
            break
        kept, room = [*kept, column], room - widths[column] - GAP
    name = min(widths[0], max(NAME, width // 3) + room)
    room -= name - min(widths[0], max(NAME, width // 3))
    drawn = [[on_a_line(row[0], name), *(row[i] for i in sorted(kept) if i)] for row in rows]
    heads = [on_a_line(header[0], name), *(header[i] for i in sorted(kept) if i)]
    if each.lines is not None and room >= CURVE + GAP:
        heads.append("over the run"[: room - GAP])
        for row, values in zip(drawn, each.lines, strict=True):
            row.append(sparkline(values, width=min(32, room - GAP), from_zero=True, blocks=blocks))
    texts = sum(said[i] < each.left for i in kept)
    return table(heads, drawn, right=range(texts, len(kept)), rule=False)


# --- one run -----------------------------------------------------------------------------------------------


def run_at_a_glance(report: Report, name: str, width: int, blocks: str = BLOCKS) -> str:
    """Draw one run in at most 25 lines: advice, facts, phases, and expensive handlers and subscribers."""
    title = on_a_line(f"Run {name}: {state(report)}", width)
    head = [
        title + HINT if len(title + HINT) <= width else title,
        *paragraphs("-> ", report.advice, width, 3),
    ]
    known = [fact for fact in facts(report) if fact.name != "state" and (fact.bad or fact.value != "0")]
    label = max((len(fact.name) for fact in known), default=0) + GAP
    for fact in known:
        head += _paragraph(fact.name.ljust(label), fact.value, width, 2)
    head += paragraphs("", report.notes[:2], width, 2)
    costs, last = report.costs, _scalars(report, width, label)
    if costs is None:
        return _within(head, last)

    def blocks_of(rows: int) -> list[list[str]]:
        return [
            head, rank_lines(report, width) or phase_lines(costs, width, blocks),
            handler_lines(costs, width, rows),
            [*subscriber_lines(costs, width), *last],
        ]  # fmt: skip

    return _within(*_first_that_fits(blocks_of))


def phase_lines(costs: RunCosts, width: int, blocks: str = BLOCKS) -> list[str]:
    """Draw the phases that take at least 1 % of the iterations."""
    phases = costs.phases
    whole = phases_table(costs)
    if not whole.rows:
        return []
    kept = [i for i, name in enumerate(phase_names(phases)) if getattr(phases, name) >= MATTERS * phases.wall]
    lines = [(whole.lines or [])[i] for i in kept]
    return fitted(whole._replace(rows=[whole.rows[i] for i in kept], lines=lines), width, blocks).split("\n")


def rank_lines(report: Report, width: int) -> list[str]:
    """Draw the phases of all ranks and the waits for other ranks; return [] for a run of one rank."""
    table = ranks_table(report)
    return fitted(table, width).split("\n") if table.rows else []


def handler_lines(costs: RunCosts, width: int, rows: int, least: float = MATTERS) -> list[str]:
    """Draw the most expensive handlers, one table for those in iterations and one for those outside.

    Each table ends with a row for all other handlers.

    Args:
        rows: the largest number of handlers in the first table; the second table has half as many.
        least: the share of the iterations from which the time outside of handlers has a row.
    """
    inside, outside = fold(costs, inside=True), fold(costs, inside=False)
    few = (rows + 1) // 2
    first = handlers_table(costs, inside.shown[:rows], least=least)
    first = _with_others(first, costs, inside, rows)
    second = _with_others(outside_table(costs, outside.shown[:few]), costs, outside, few)
    second = second._replace(header=["outside of the iterations", *second.header[1:]])
    tables = [fitted(each, width) for each in (first, second) if each.rows]
    lines = "\n\n".join(tables).split("\n") if tables else []
    if any(cost.estimated for cost in [*inside.shown[:rows], *outside.shown[:few]]):
        lines += [on_a_line(f"{ESTIMATED}: estimated, because only some of the calls were clocked", width)]
    return lines


def _with_others(shown: Table, costs: RunCosts, folded: Folded, rows: int) -> Table:
    """Return a table with a last row that sums up the handlers without a row of their own.

    Their times are counted without the phases that they run.
    """
    more = folded.shown[rows:]
    others = [*more, *folded.built_in, *folded.small]
    if not others:
        return shown
    counts = {"more": more, "built-in": folded.built_in, f"below {MATTERS:.0%}": folded.small}
    name = ", ".join(f"{len(members):,} {what}" for what, members in counts.items() if members)
    seconds, wall = sum(own_seconds(cost, costs.phases) for cost in others), costs.phases.wall
    sums = {
        "calls": f"{sum(cost.calls for cost in others):,}",
        "µs/iteration": three_digits(seconds / costs.phases.iterations * 1e6) if wall else ABSENT,
        "share": f"{seconds / wall * 100:.2f} %" if wall else ABSENT,
        "in all": duration(seconds),
    }
    empty = [
        ABSENT if i >= shown.left and column in shown.first else "" for i, column in enumerate(shown.header)
    ]
    row = [sums.get(column, empty[i]) for i, column in enumerate(shown.header)]
    return shown._replace(rows=[*shown.rows, [name, *row[1:]]])


def subscriber_lines(costs: RunCosts, width: int) -> list[str]:
    """Draw the background subscribers that lost events or are busy, and one line for all others."""
    if not costs.subscribers:
        return []
    matters = [s for s in costs.subscribers if _matters(s, costs)]
    fine = [s for s in costs.subscribers if s not in matters]
    lines = (
        fitted(subscribers_table(replace(costs, subscribers=matters)), width).split("\n") if matters else []
    )
    for s in matters:
        lines += [on_a_line(f"{s.name}: {s.error}", width)] if s.error else []
    if fine:
        names = ", ".join(s.name for s in fine)
        busy = f", busy {share(max(s.seconds for s in fine), costs.seconds)} of the run at most"
        text = f"{names}: no event lost{busy if costs.seconds else ''}"
        lines += _paragraph("", text, width, 2)
    return lines


def _matters(subscriber: SubscriberCost, costs: RunCosts) -> bool:
    busy = bool(costs.seconds) and subscriber.seconds >= BUSY * costs.seconds
    return lossy(subscriber, costs) or subscriber.over_budget or busy


def _scalars(report: Report, width: int, label: int) -> list[str]:
    """Draw the last values of the logged scalars, except times and learning rates; name those with NaN."""
    curves = report.log.curves if report.log is not None else []
    values = [f"{c.mode}/{c.name} {value_text(c.last)}" for c in curves if c.name not in (*IN_SECONDS, "lr")]
    lines = _paragraph("scalars".ljust(label), ", ".join(values), width, 2) if values else []
    bad = [f"{c.mode}/{c.name} from step {c.first_not_finite:,}" for c in curves if c.not_finite]
    return [*lines, *(_paragraph(f"{ALERT} ", f"NaN or infinite: {', '.join(bad)}", width, 2) if bad else [])]


# --- several runs ------------------------------------------------------------------------------------------


def runs_at_a_glance(
    reports: Sequence[Report], names: Sequence[str], width: int, blocks: str = BLOCKS
) -> str:
    """Draw several runs in at most 25 lines: a line for each run, and the largest differences in time."""
    costs = [report.costs for report in reports]
    rows = [row for row in compared_by_time(costs) if row.matters]
    lines = [trend(each, "wall") if each is not None else [] for each in costs]
    advice = [
        line
        for name, report in zip(names, reports, strict=True)
        for line in paragraphs("-> ", [f"{name}: {line}" for line in report.advice[:1]], width, 2)
    ]

    def blocks_of(most: int) -> list[list[str]]:
        runs = runs_table(reports, names)._replace(lines=lines)
        few = runs._replace(rows=runs.rows[: most + 2], lines=lines[: most + 2])
        more = [f"{len(names) - most - 2:,} more runs: --all shows them"] if len(names) > most + 2 else []
        return [
            [*fitted(few, width, blocks).split("\n"), *more],
            advice,
            _differences(rows, names, width, most),
        ]

    return _within(*_first_that_fits(blocks_of))


def _differences(rows: Sequence[Row], names: Sequence[str], width: int, most: int) -> list[str]:
    """Draw the rows that differ most, with a column for each run; a note counts the runs that do not fit."""
    if not rows:
        return [on_a_line("No phase, handler or writer differs by 1 % of a run.", width)]
    title = "what differs"
    columns = [[title, *(row.name for row in rows[:most])]]
    for number, name in enumerate(names):
        cells = [_difference(row, number) for row in rows[:most]]
        columns.append([name, *cells])
    header, *body = ([*line] for line in zip(*columns, strict=True))
    drawn = fitted(Table(title, header, body), width).split("\n")
    notes = []
    if missing := sum(name not in drawn[0] for name in names):
        notes.append(f"{missing:,} of {len(names):,} runs do not fit in {width} characters")
    if len(rows) > most:
        notes.append(f"{len(rows) - most:,} more rows")
    text = f"{'; '.join(notes)}: --all shows them" if notes else ""
    return [*drawn, *(_paragraph("", text, width, 2) if text else [])]


def _difference(row: Row, run: int) -> str:
    """Return a row's time in a run, with the ratio to the first run if the difference matters."""
    value = row.values[run]
    text, compared = ABSENT if value is None else duration(value.value), row.ratio(run) if run else ""
    return f"{text} {compared if compared.endswith('×') else '':>{RATIO}}" if run else text


# --- lines -------------------------------------------------------------------------------------------------


def paragraphs(begin: str, texts: Sequence[str], width: int, most: int) -> list[str]:
    """Wrap each text to lines of at most `width` characters, and cut it short after `most` lines."""
    return [line for text in texts for line in _paragraph(begin, text, width, most)]


def _paragraph(begin: str, text: str, width: int, most: int) -> list[str]:
    """Wrap a text into at most `most` lines of at most `width` characters, later lines indented."""
    return wrap(
        begin + on_a_line(text), width, subsequent_indent=" " * len(begin), max_lines=most, placeholder=" …",
        break_on_hyphens=False,
    )  # fmt: skip


def _first_that_fits(blocks_of: Callable[[int], list[list[str]]]) -> list[list[str]]:
    """Return the blocks with as many rows as fit into 25 lines."""
    for rows in range(12, 1, -1):
        found = blocks_of(rows)
        if _height(found) <= LINES:
            return found
    return blocks_of(1)


def _height(found: Sequence[Sequence[str]]) -> int:
    """Return the number of non-empty lines, plus two separating lines that `_within` keeps."""
    return sum(bool(line) for block in found for line in block) + 2


def _within(*found: Sequence[str]) -> str:
    """Join blocks to at most 25 lines; to fit, empty lines are removed first, beginning at the end."""
    lines = "\n\n".join("\n".join(block) for block in found if block).split("\n")
    while len(lines) > LINES and "" in lines:
        del lines[len(lines) - 1 - lines[::-1].index("")]
    return "\n".join(lines if len(lines) <= LINES else [*lines[: LINES - 1], "--all shows the rest"])
