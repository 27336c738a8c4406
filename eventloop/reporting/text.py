"""Draw reports on a terminal: in at most 25 lines as wide as the terminal, or with every table in full.

`trainer.summary()` uses the same lines for handlers. Handlers that take less than 1 % of the iterations share
a line, and so do eventloop's own handlers that take less than 5 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from msgspec.structs import replace

from eventloop.costs.records import HandlerCost, RunCosts, SubscriberCost
from eventloop.costs.step_clock import TIMES
from eventloop.costs.trend import trend
from eventloop.reporting.begun import BRIEF, begun_facts
from eventloop.reporting.comparison import Row, compare, compared_by_time, comparison_tables, runs_table
from eventloop.reporting.facts import ESTIMATED, facts, labels, lossy, state
from eventloop.reporting.report import Report
from eventloop.reporting.run_tables import (
    MATTERS,
    fold,
    folded_table,
    phases_table,
    ranks_table,
    run_tables,
    subscribers_table,
)
from eventloop.reporting.tables import ALERT, GAP, Table, encodable, fitted, in_full, paragraph, plain
from eventloop.util.formatting import (
    ABSENT,
    ASCII_BLOCKS,
    BLOCKS,
    duration,
    on_a_line,
    share,
    sparkline,
    value_text,
)

LINES = 25
"""The largest number of lines of the whole output, except with `--all`."""
BUSY = 0.5
"""A background subscriber has a row if it is busy for at least this share of the run."""
LARGE = 0.1
"""If not all lines fit, only phases of at least this share of the iterations have rows."""
LEAST_HEAD, LEAST_TABLE = 12, 3
"""The lines of a report's head, and of each table, that are shown even if not all lines fit.

The head has a title, three pieces of advice of at most three lines, and the duration of the run. With
`run.json` the third advice has at most two lines, and the begin and the model of the run have a line each. A
table has a header and its two first rows. A head and four tables of these sizes fit in `LINES`.
"""
HINT = "  (--all shows every table)"
RATIO = 6
"""The width of a ratio, in characters."""
Blocks = list[list[str]]
"""Groups of lines with an empty line between them."""


def as_text(reports: Sequence[Report], *, encoding: str = "utf-8", width: int | None = None) -> str:
    """Draw the report of one run or of several as text: in at most 25 lines, or with every table in full.

    Args:
        encoding: the encoding of the output. If it lacks block characters, plainer ones are used.
        width: the width of a line in characters; None draws every table in full, in lines of any width.
    """
    blocks = BLOCKS if encodable(BLOCKS, encoding) else ASCII_BLOCKS
    names = labels(reports)
    if width is None:
        text = _everything(reports, names, blocks)
    elif len(reports) == 1:
        text = _run(reports[0], names[0], width, blocks)
    else:
        text = _runs(reports, names, width, blocks)
    return text if blocks is BLOCKS else plain(text, encoding)


# --- everything --------------------------------------------------------------------------------------------


def _everything(reports: Sequence[Report], names: Sequence[str], blocks: str) -> str:
    """Draw the facts of each run, and all tables in full."""
    parts = [_head(report, name) for report, name in zip(reports, names, strict=True)]
    if len(reports) == 1:
        tables = run_tables(reports[0])
    else:
        tables = comparison_tables(compare(reports), names)
        parts += [in_full(runs_table(reports, names)), _trends(reports, names, blocks)]
    parts += [in_full(table, blocks) for table in tables]
    return "\n\n".join(part for part in parts if part)


def _head(report: Report, name: str) -> str:
    """Draw the head of a report: the run's name, advice, facts and notes."""
    where = "" if name == report.run else f"  ({report.run})"
    rows = _pairs([[fact.name, fact.value] for fact in [*facts(report), *begun_facts(report)]])
    lines = [f"Run {name}{where}", *(f"  -> {line}" for line in report.advice)]
    lines += [*(f"  {row}" for row in rows), *(f"  {note}" for note in report.notes)]
    return "\n".join(map(on_a_line, lines))


def _trends(reports: Sequence[Report], names: Sequence[str], blocks: str) -> str:
    """Draw the mean time of an iteration over the run as a curve, on one line for each run."""
    rows = [
        [name, sparkline(trend(report.costs, "wall"), from_zero=True, blocks=blocks)]
        for name, report in zip(names, reports, strict=True)
        if report.costs is not None and report.costs.trend
    ]
    return "\n".join(["An iteration, over each run", *_pairs(rows)]) if rows else ""


def _pairs(rows: Sequence[Sequence[str]]) -> list[str]:
    """Draw pairs of a name and a value, each on one line, with the values below each other."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name.ljust(width)}  {value}" for name, value in rows]


# --- the lines that matter ---------------------------------------------------------------------------------


def _run(report: Report, name: str, width: int, blocks: str) -> str:
    """Draw one run in at most 25 lines: advice, facts, phases, and expensive handlers and subscribers."""
    shown = [fact for fact in facts(report) if fact.name != "state" and (fact.bad or fact.value != "0")]
    begun = [fact for fact in begun_facts(report) if fact.name in BRIEF]
    label = max((len(fact.name) for fact in [*shown, *begun]), default=0) + GAP
    of_begin = [paragraph(fact.name.ljust(label), fact.value, width, 1) for fact in begun]
    first = 0 if report.begun is None else 2  # the begin and the model
    head = [*_title_and_advice(report, name, width), *chain(*of_begin[:first])]
    for fact in shown:
        head += paragraph(fact.name.ljust(label), fact.value, width)
    for note in report.notes[:2]:
        head += paragraph("", note, width)
    head += chain(*of_begin[first:])  # last, because the end of a long head is cut
    costs, scalars = report.costs, _scalars(report, width, label)
    if costs is None:
        return _fit_lines(lambda _: [head, scalars])
    ranks, foot = ranks_table(report), [*subscriber_lines(costs, width), *scalars]

    def blocks_of(rows: int) -> Blocks:
        table = ranks if ranks.rows else phases_table(costs, MATTERS if rows else LARGE)
        steps = fitted(table, width, blocks) if table.rows else []
        return [head, steps, handler_lines(costs, width, max(1, rows)), foot]

    return _fit_lines(blocks_of)


def _title_and_advice(report: Report, name: str, width: int) -> list[str]:
    """Draw the run's name and state on one line, and each advice on at most three.

    With `run.json` the third advice has at most two lines, which leaves room for the begin and the model.
    """
    title = on_a_line(f"Run {name}: {state(report)}", width)
    lines = [title + HINT if len(title + HINT) <= width else title]
    for number, line in enumerate(report.advice):
        lines += paragraph("-> ", line, width, 2 if number == 2 and report.begun else 3)
    return lines


def handler_lines(costs: RunCosts, width: int, rows: int, least: float = MATTERS) -> list[str]:
    """Draw a table of the handlers that were called in iterations, and one of the other handlers.

    The most expensive handlers have rows, and a last row of each table stands for all others.

    Args:
        rows: the largest number of handlers with rows in the first table; the second table has half as many.
        least: the time outside of handlers has a row if it is above this share of the iterations.
    """
    lines: list[str] = []
    shown: list[HandlerCost] = []
    for inside, most in ((True, rows), (False, (rows + 1) // 2)):
        table = folded_table(costs, most, inside=inside, least=least)
        shown += fold(costs, inside=inside).shown[:most]
        if not inside:
            table = table._replace(header=["outside of the iterations", *table.header[1:]])
        if table.rows:
            lines += [*([""] if lines else []), *fitted(table, width)]
    if any(cost.estimated for cost in shown):
        lines.append(on_a_line(f"{ESTIMATED}: estimated, because only some of the calls were clocked", width))
    return lines


def subscriber_lines(costs: RunCosts, width: int) -> list[str]:
    """Draw a table of the background subscribers that lost events or are busy, and a line on all others."""
    notable = [s for s in costs.subscribers if _is_notable(s, costs)]
    others = [s for s in costs.subscribers if s not in notable]
    lines = fitted(subscribers_table(replace(costs, subscribers=notable)), width) if notable else []
    lines += [on_a_line(f"{s.name}: {s.error}", width) for s in notable if s.error]
    if others:
        names = ", ".join(s.name for s in others)
        busy = f", busy {share(max(s.seconds for s in others), costs.seconds)} of the run at most"
        lines += paragraph("", f"{names}: no event lost{busy if costs.seconds else ''}", width)
    return lines


def _is_notable(subscriber: SubscriberCost, costs: RunCosts) -> bool:
    """Return whether a subscriber lost events, was over its budget, or was busy for much of the run."""
    busy = bool(costs.seconds) and subscriber.seconds >= BUSY * costs.seconds
    return lossy(subscriber, costs) or subscriber.over_budget or busy


def _scalars(report: Report, width: int, label: int) -> list[str]:
    """Draw the last values of the logged scalars, except times and learning rates, and name those with NaN.

    Args:
        label: the width of the names of facts in characters, so that values are below each other.
    """
    curves = report.log.curves if report.log is not None else []
    values = [f"{c.mode}/{c.name} {value_text(c.last)}" for c in curves if c.name not in (*TIMES, "lr")]
    lines = paragraph("scalars".ljust(label), ", ".join(values), width) if values else []
    bad = [f"{c.mode}/{c.name} from step {c.first_not_finite:,}" for c in curves if c.not_finite]
    if bad:
        lines += paragraph(f"{ALERT} ", f"NaN or infinite: {', '.join(bad)}", width)
    return lines


def _runs(reports: Sequence[Report], names: Sequence[str], width: int, blocks: str) -> str:
    """Draw several runs in at most 25 lines: a line for each run, and the largest differences in time."""
    costs = [report.costs for report in reports]
    differences = [row for row in compared_by_time(costs) if row.matters]
    lines = [trend(record, "wall") if record is not None else [] for record in costs]
    runs, advice = runs_table(reports, names), []
    for name, report in zip(names, reports, strict=True):
        for line in report.advice[:1]:
            advice += paragraph("-> ", f"{name}: {line}", width)

    def blocks_of(rows: int) -> Blocks:
        """Return the blocks with at most `rows` differences, and at most two runs more than that."""
        rows = max(1, rows)
        most = rows + 2  # runs that are shown, also where only one difference is
        table = fitted(runs._replace(rows=runs.rows[:most], lines=lines[:most]), width, blocks)
        more = [f"{len(names) - most:,} more runs: --all shows them"] if len(names) > most else []
        return [[*table, *more], advice, _differences(differences, names, width, rows)]

    return _fit_lines(blocks_of)


def _differences(rows: Sequence[Row], names: Sequence[str], width: int, most: int) -> list[str]:
    """Draw the rows that differ most, with a column for each run; a note counts rows and runs left out."""
    if not rows:
        return [on_a_line("No phase, handler or writer differs by 1 % of a run.", width)]
    shown = [[row.name, *(_difference(row, run) for run in range(len(names)))] for row in rows[:most]]
    lines = fitted(Table("", ["what differs", *names], shown), width)
    notes = []
    if missing := sum(name not in lines[0] for name in names):
        notes.append(f"{missing:,} of {len(names):,} runs do not fit in {width} characters")
    if len(rows) > most:
        notes.append(f"{len(rows) - most:,} more rows")
    if notes:
        lines += paragraph("", f"{'; '.join(notes)}: --all shows them", width)
    return lines


def _difference(row: Row, run: int) -> str:
    """Return a row's time in a run, with the ratio to the first run if the difference is large enough."""
    value = row.values[run]
    text = ABSENT if value is None else duration(value.value)
    if not run:
        return text
    ratio = row.ratio(run)
    return f"{text} {ratio if ratio.endswith('×') else '':>{RATIO}}"


def _fit_lines(blocks_of: Callable[[int], Blocks]) -> str:
    """Join blocks of lines to at most 25 lines, with as many rows in their tables as fit.

    If they fit with one row only without empty lines, remove empty lines, from the end on. If they do not fit
    at all, cut the blocks.

    Args:
        blocks_of: returns the blocks whose tables have at most a number of rows. For 0 it returns the most
            important lines, of which some may be cut.
    """
    for rows in range(12, 0, -1):
        lines = _joined(blocks_of(rows))
        text_lines = sum(map(bool, lines))
        if text_lines + 2 <= LINES:  # all lines with text fit, and two empty ones
            break
    if text_lines > LINES:
        lines = [*_cut(_joined(blocks_of(0)), LINES - 1), "--all shows the rest"]
    while len(lines) > LINES:
        del lines[len(lines) - 1 - lines[::-1].index("")]
    return "\n".join(lines)


def _joined(blocks: Blocks) -> list[str]:
    """Return the lines of all blocks, with an empty line between two blocks."""
    return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


def _cut(lines: Sequence[str], most: int) -> list[str]:
    """Return at most `most` of the lines, without empty ones, which divide the lines into blocks.

    Each block loses lines at its end: the first one keeps at least `LEAST_HEAD`, and each other one at least
    `LEAST_TABLE`, as far as `most` allows it. The block with the most lines beyond these is cut first.
    """
    blocks = [block.split("\n") for block in "\n".join(lines).split("\n\n")]
    least = [LEAST_HEAD, *(LEAST_TABLE for _ in blocks[1:])]
    while sum(map(len, blocks)) > most:
        longest = max(range(len(blocks)), key=lambda number: len(blocks[number]) - least[number])
        blocks[longest].pop()
    return [line for block in blocks for line in block]
