"""Plain-text tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from eventloop.bus.event_order import EventPlan
from eventloop.bus.subscription import PlanRow
from eventloop.util.formatting import on_a_line


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell, a row a line; the columns in `right` are right-aligned."""
    rows = [[*map(on_a_line, row)] for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, ["-" * w for w in widths], *rows]:
        cells = [
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def plan_table(plans: Sequence[EventPlan]) -> str:
    """The table of `event_plans`; a budget stands beside the filter. Background subscribers have no place among the others;
    where there are any, it says how many events may wait for each, and what becomes of more."""
    if not plans:
        return "a bus nobody listens to"
    header = ["event", "order", "priority", "handler", "runs on", "filter", "queue", "overflow"]
    rows = [
        [plan.event if i == 0 else "", *_cells(row)] for plan in plans for i, row in enumerate(plan.handlers)
    ]
    if all(row.order for plan in plans for row in plan.handlers):
        header, rows = header[:6], [row[:6] for row in rows]
    return table(header, rows, right=(1, 2, 6))


def _cells(row: PlanRow) -> list[str]:
    budget = "" if row.budget_us is None else f"budget_us={row.budget_us:.12g}"
    told = f"{row.filter} {budget}".strip()
    if row.order:
        return [str(row.order), str(row.priority), row.name, row.runs_on, told, "", ""]
    return ["-", "-", row.name, row.runs_on, told, f"{row.queue:,}", row.overflow]
