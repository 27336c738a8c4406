"""Make the tables of the live page from a `RunView`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from eventloop.costs.records import WAITING
from eventloop.reporting.begun import options_table, record_facts
from eventloop.reporting.run_tables import APART, phase_name
from eventloop.reporting.waits import PLACES
from eventloop.util.formatting import ABSENT, duration, memory_size, on_a_line, three_digits, value_text
from eventloop.watching.view import CheckpointView, HandlerView, QueueView, RunView

CHECKPOINTS = 30
"""How many of the newest checkpoints have rows; those that are the best for a metric always have one."""
RANKS = 32
"""The largest number of rows of ranks."""
SCORES = 4
"""The largest number of scores in the row of a checkpoint."""


class PageTable(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a table of the page, which does not show a table without rows."""

    title: str
    header: list[str]
    rows: list[list[str]]
    left: int = 1
    """How many of the first columns are text, set left; the others are numbers, set right."""
    bad: list[int] = []
    """The indices of rows that report a problem."""
    bars: list[float] = []
    """For each row the length of a bar below its first cell, from 0 to 1; [] for no bars."""
    note: str = ""


Columns = Sequence[tuple[str, Callable[[Any], str]]]


def tables(view: RunView) -> dict[str, PageTable]:
    """Return the tables of a run, by the name of the section of the page that shows them."""
    return {
        "handlers": _handlers(view),
        "waits": _waits(view),
        "ranks": _ranks(view),
        "queues": _queues(view),
        "checkpoints": _checkpoints(view),
        "begun": _begun(view),
    }


def _cells(items: Sequence[Any], columns: Columns) -> dict[str, Any]:
    """Return the fields `header` and `rows` of a table with a row for each item.

    Args:
        columns: the title of each column, and the function that returns an item's text in it.
    """
    return {
        "header": [name for name, _ in columns],
        "rows": [[on_a_line(text(item)) for _, text in columns] for item in items],
    }


def _handlers(view: RunView) -> PageTable:
    """Return the table of handlers; the column of budgets only if a handler has one."""
    columns: list[tuple[str, Callable[[HandlerView], str]]] = [
        ("handler", lambda h: h.name),
        ("µs an iteration", lambda h: three_digits(h.seconds * 1e6)),
        ("share", lambda h: f"{h.share:.2%}"),
        ("p99", lambda h: ABSENT if h.p99 is None else duration(h.p99)),
    ]
    if any(handler.budget is not None for handler in view.handlers):
        columns.append(("budget", lambda h: ABSENT if h.budget is None else duration(h.budget)))
    longest = max((handler.seconds for handler in view.handlers), default=0.0)
    return PageTable(
        title="Handlers",
        **_cells(view.handlers, columns),
        bad=[number for number, handler in enumerate(view.handlers) if handler.over_budget],
        bars=[handler.seconds / longest if longest else 0.0 for handler in view.handlers],
        note="Red: over its budget." if any(handler.over_budget for handler in view.handlers) else "",
    )


def _waits(view: RunView) -> PageTable:
    """Return the table of waits, the longest first."""
    waits = sorted(view.waits, key=lambda wait: -wait.seconds)
    longest = waits[0].seconds if waits else 0.0
    columns: Columns = [
        ("cause", lambda wait: WAITING[wait.cause] + (f": {wait.name}" if wait.name else "")),
        ("where", lambda wait: PLACES[wait.place]),
        ("in all", lambda wait: duration(wait.seconds)),
        ("waits", lambda wait: f"{wait.calls:,}"),
        ("longest", lambda wait: duration(wait.longest)),
    ]
    bars = [wait.seconds / longest if longest else 0.0 for wait in waits]
    return PageTable(title="Waits", **_cells(waits, columns), left=2, bars=bars, note=APART)


def _ranks(view: RunView) -> PageTable:
    """Return the table of the ranks' times, with a column for each phase in which a rank spent time."""
    slow = view.slow_rank.rank if view.slow_rank is not None else -1
    # the slow rank first, then by number
    ranks = sorted(view.rank_times, key=lambda times: (times.rank != slow, times.rank))[:RANKS]
    all_phases = ranks[0].own if ranks else ()
    phases = [name for name in all_phases if any(times.own[name] for times in ranks)]
    columns: Columns = [
        ("rank", lambda times: str(times.rank)),
        *(
            (phase_name(name), lambda times, name=name: three_digits(times.own[name] * 1e3))
            for name in phases
        ),
        ("waited", lambda times: three_digits(times.waited * 1e3)),
    ]
    left_out = len(view.rank_times) - len(ranks)
    note = "ms an iteration." + (f" {left_out:,} more ranks have no row." if left_out else "")
    bad = [number for number, times in enumerate(ranks) if times.rank == slow]
    return PageTable(title="Ranks", **_cells(ranks, columns), bad=bad, note=note)


def _queues(view: RunView) -> PageTable:
    """Return the table of queues: first those that lost events, then the longest."""
    queues = sorted(view.queues, key=lambda queue: (-_lost(queue), -queue.queued, queue.name))
    columns: Columns = [
        ("subscriber", lambda q: q.name),
        ("waiting", lambda q: _of(q.queued, q.capacity)),
        ("most", lambda q: f"{q.peak:,}"),
        ("delivered", lambda q: f"{q.delivered:,}"),
        ("dropped", lambda q: f"{q.dropped:,}"),
        ("failed", lambda q: f"{q.failed:,}"),
    ]
    return PageTable(
        title="Queues",
        **_cells(queues, columns),
        bad=[number for number, queue in enumerate(queues) if _lost(queue) or queue.error],
        bars=[min(1.0, queue.queued / queue.capacity) if queue.capacity else 0.0 for queue in queues],
        note="\n".join(["In events.", *(on_a_line(f"{q.name}: {q.error}") for q in queues if q.error)]),
    )


def _lost(queue: QueueView) -> int:
    return queue.dropped + queue.failed


def _checkpoints(view: RunView) -> PageTable:
    """Return the table of the newest checkpoints and of all best ones."""
    newest_first = view.checkpoints[::-1]
    shown = [
        checkpoint
        for number, checkpoint in enumerate(newest_first)
        if number < CHECKPOINTS or checkpoint.newest or checkpoint.best
    ]
    columns: Columns = [
        ("checkpoint", lambda c: c.name if c.directory == "." else f"{c.directory}/{c.name}"),
        ("", _state),
        ("scores", _scores),
        ("iteration", lambda c: ABSENT if c.iter is None else f"{c.iter:,}"),
        ("size", lambda c: memory_size(c.bytes)),
        ("saved", lambda c: _clock_time(c.time)),
    ]
    left_out = len(newest_first) - len(shown)
    notes = [f"{name}: being saved, not durable yet" for name in view.saving] + view.damaged
    notes += [f"{left_out:,} older ones have no row."] if left_out else []
    bad = [number for number, checkpoint in enumerate(shown) if not checkpoint.whole]
    note = "\n".join(map(on_a_line, notes))
    return PageTable(title="Checkpoints", **_cells(shown, columns), left=3, bad=bad, note=note)


def _begun(view: RunView) -> PageTable:
    """Return the facts and all settings of `run.json`."""
    rows = [
        [fact.name, on_a_line(fact.value)] for fact in record_facts(view.record) if fact.name != "options"
    ]
    rows += [[on_a_line(text) for text in row] for row in options_table(view.record).rows]
    return PageTable(title="Begun with", header=["what", "value"], rows=rows, left=2)


def _state(checkpoint: CheckpointView) -> str:
    """Describe whether a checkpoint is intact, and why the run keeps it."""
    words = ["durable" if checkpoint.whole else "DAMAGED"]
    if checkpoint.newest:
        words.append("newest")
    elif checkpoint.abandoned:
        words.append("left behind")
    return ", ".join([*words, *(f"best {metric}" for metric in checkpoint.best)])


def _scores(checkpoint: CheckpointView) -> str:
    """Return the first scores of a checkpoint, with an ellipsis for more."""
    shown = [*checkpoint.metrics.items()][:SCORES]
    texts = [f"{name} {value if isinstance(value, str) else value_text(value)}" for name, value in shown]
    if len(checkpoint.metrics) > SCORES:
        texts.append("…")
    return ", ".join(texts)


def _clock_time(text: str) -> str:
    """Return a time without the year, in the local time zone; any other text unchanged."""
    try:
        return f"{datetime.fromisoformat(text).astimezone():%m-%d %H:%M:%S}"
    except ValueError:
        return text


def _of(done: int, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,} of {total:,}"
