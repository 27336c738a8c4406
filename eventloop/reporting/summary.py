"""Summarize a run as text: advice, the times of phases and handlers, and delivered and lost events."""

from __future__ import annotations

from eventloop.bus.subscription import SubscriptionStats
from eventloop.costs.records import WAITING, RunCosts, phase_names
from eventloop.data.trainer_parts import TrainerParts
from eventloop.model.peak_memory import peak_memory
from eventloop.util.formatting import on_a_line, table

ERROR_WIDTH = 60
"""The largest number of characters of an error in a table; a line below the table has the whole error."""
ADVICE_LINES = 4
"""The largest number of lines of one piece of advice."""
WIDTH = 100
"""The width of a line in characters; lines with errors may be longer."""
HANDLERS = 20
"""The largest number of rows of handlers."""
EVERYTHING = "trainer.costs() and `eventloop report --all` have every handler"
NAMES = 10
"""The largest number of metrics named as unreadable."""


def delivery_table(stats: list[SubscriptionStats]) -> str:
    """Return a table of the events that each background subscriber has received or lost."""
    rows = [
        [
            s.name,
            s.runs_on,
            *(f"{n:,}" for n in (s.delivered, s.dropped, s.failed, s.queued)),
            f"{s.seconds:.2f}",
            on_a_line(s.error, ERROR_WIDTH),
        ]
        for s in stats
        if s.runs_on != "sync"
    ]
    header = ["subscriber", "runs on", "delivered", "dropped", "failed", "left", "busy s", ""]
    return table(header, rows, right=(2, 3, 4, 5, 6))


def breakdown(trainer: TrainerParts) -> str:
    """Return a line with the number of iterations, their mean time, and the shares of the phases."""
    clock = trainer.clock
    if not clock.iterations:
        return "no iteration was trained"
    phases = clock.phases
    shares = ", ".join(
        f"{WAITING.get(name, name)} {getattr(phases, name) / phases.wall:.1%}" for name in phase_names(phases)
    )
    return f"{phases.iterations:,} iterations of {phases.wall / phases.iterations * 1e3:.3f} ms: {shares}"


def run_costs(trainer: TrainerParts, *, complete: bool = False, outcome: str = "") -> RunCosts:
    """Return the cost record of a run so far. Call it on the training thread.

    Args:
        complete: whether the run has ended and all events were delivered.
        outcome: how the run ended, as in `RunCosts.outcome`.
    """
    bus, clock, device = trainer.bus, trainer.clock, trainer.clock.device
    phases = clock.phases
    handlers = bus.handler_costs(phases.wall, clock.handlers)
    return RunCosts(
        seconds=clock.run_seconds,
        evaluation=clock.evaluation_seconds,
        outcome=outcome,
        first_iter=clock.first_iter,
        phases=phases,
        trend=clock.trend,
        device=device.phases if device is not None and device.samples else None,
        iteration=clock.times.times(),
        histogram=clock.times.histogram(),
        num_workers=getattr(trainer.loader, "num_workers", None),
        handlers=[*handlers, *trainer.foreign_calls.costs(phases.wall)],
        subscribers=bus.subscriber_costs(),
        reads=trainer.metrics.device_reads.records(),
        waits=clock.waits.records(),
        memory=peak_memory(),
        complete=complete,
        rank=trainer.rank,
        world_size=trainer.world_size,
    )


def summarize(trainer: TrainerParts, *, everything: str = EVERYTHING) -> str:
    """Return the report of `trainer.summary()`: advice, phases, handlers, deliveries and losses.

    Args:
        trainer: the trainer of the run.
        everything: a line that names the command or method that lists every handler; "" for no line.
    """
    # imported here: only a printed summary needs these and the modules that they import, 14 in all
    from eventloop.reporting.advice import advice
    from eventloop.reporting.facts import memory_text
    from eventloop.reporting.tables import paragraph
    from eventloop.reporting.text import handler_lines
    from eventloop.reporting.waits import wait_text, waits_by_cause

    stats, costs = trainer.bus.stats(), run_costs(trainer, complete=trainer.bus.closed)
    lines = [line for text in advice(costs) for line in paragraph("  ", text, WIDTH, ADVICE_LINES)]
    blocks = ["\n".join(["what to do:", *lines])] if lines else []
    memory = f"\npeak memory: {text}" if (text := memory_text(costs.memory)) else ""
    handlers = "\n".join(handler_lines(costs, WIDTH, HANDLERS, least=0.0))
    waits = "".join(
        f"\n{WAITING[cause]}: {wait_text(costs, cause, costs.seconds)}" for cause in waits_by_cause(costs)
    )
    blocks += [breakdown(trainer) + waits + memory, handlers, everything]
    if any(s.runs_on != "sync" for s in stats):
        blocks.append(delivery_table(stats))
    losses = shortfalls(stats) + _unread(dict(trainer.metrics.unreadable))
    if losses:
        blocks.append("\n".join(["not everything was delivered:", *(f"  {line}" for line in losses)]))
    return "\n\n".join(block for block in blocks if block)


def _unread(values: dict[str, int]) -> list[str]:
    """Return a line on metrics whose values could not be read and were not logged; [] without any."""
    counts = ", ".join(f"{name} ({count:,})" for name, count in [*values.items()][:NAMES])
    more = f", and {len(values) - NAMES} names more" if len(values) > NAMES else ""
    return [f"metrics: values that could not be read: {counts}{more}"] if values else []


def shortfalls(stats: list[SubscriptionStats]) -> list[str]:
    """Return one line for each background subscriber that missed events."""
    return [text for s in stats if (text := s.shortfall)]
