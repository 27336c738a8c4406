"""Plain-text tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eventloop.catalogue import declared_events, event_name

if TYPE_CHECKING:
    from eventloop.bus import Bus


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell; the columns in `right` are right-aligned."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, ["-" * w for w in widths], *rows]:
        cells = [
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def bus_table(bus: Bus) -> str:
    """Every event somebody listens to, and who does, in the order they run."""
    rows = []
    for event_type in declared_events():
        for i, row in enumerate(bus.plan(event_type)):
            order = str(row.order) if row.order else "-"
            first = event_name(event_type) if i == 0 else ""
            rows.append([first, order, str(row.priority), row.name, row.runs_on, row.filter])
    if not rows:
        return "a bus nobody listens to"
    return table(["event", "order", "priority", "handler", "runs on", "filter"], rows, right=(1, 2))
