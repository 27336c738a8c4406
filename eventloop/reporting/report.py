"""Read the directory of a run (costs, curves, `run.json`, checkpoints) into a `Report`.

`eventloop report` shows it as text, as a page or as JSON.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from eventloop.checkpoint.commit import MANIFEST
from eventloop.checkpoint.listing import Item
from eventloop.commands.messages import Applied
from eventloop.commands.record import NAME as COMMANDS
from eventloop.commands.record import read_record as read_commands
from eventloop.costs.ranks import RankTimes, Straggler
from eventloop.costs.records import FILE as COSTS
from eventloop.costs.records import RunCosts, read_costs
from eventloop.description.record import RunRecord, read_record
from eventloop.eventlog.format import FILE_NAME as EVENTS
from eventloop.eventlog.jsonl import FILE_NAME as METRICS
from eventloop.reporting.advice import MOST, advice
from eventloop.reporting.curves import RunLog, read_curves
from eventloop.reporting.outcomes import Score, checkpoints_of, scores_of
from eventloop.reporting.ranks import rank_advice, read_ranks, slow_rank_of, times_of
from eventloop.tracing.files import FOLDER as TRACES

VERSION = 1
SHOWN = 5
"""The largest number of file names in an error message."""
WITHOUT = (
    f"There are no costs: no {COSTS} here. A run writes it while it goes on, unless it was killed early."
)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the costs, curves and outcome of one run, as `eventloop report RUN --json` prints them.

        report = load_report(Path("runs/digits"))
        report.costs.phases.wall / report.costs.phases.iterations  # seconds per iteration

    Times are in seconds; NaN is null in JSON.
    """

    version: int = VERSION
    run: str
    """The run's directory, as it was given."""
    costs: RunCosts | None
    """The contents of `costs.json`; None without that file."""
    log: RunLog | None
    """The contents of `metrics.jsonl`; None without that file."""
    notes: list[str]
    """Sentences on incomplete parts of the report, with the reasons."""
    missing: list[str] = []
    """Sentences on missing cost records of the run or of ranks.

    `eventloop report` shows the rest, prints these lines to standard error, and exits with 2.
    """
    advice: list[str] = []
    """At most three lines of advice on the parts that take the time, with remedies."""
    ranks: list[RankTimes] = []
    """Mean times of an iteration on each rank, without waits for other ranks; [] for a run of one rank."""
    slow_rank: Straggler | None = None
    """The rank that the others wait for; None if there is none."""
    commands: list[Applied] = []
    """The commands that were applied to the run, oldest first."""
    begun: RunRecord | None = None
    """The contents of `run.json`: options, model, machine, versions and commit. None without that file."""
    scores: list[Score] = []
    """The best and last score of each metric of the run's validations and tests."""
    checkpoints: list[Item] = []
    """The run's durable checkpoints, as `eventloop checkpoints RUN --json` lists them."""


def load_report(run: Path) -> Report:
    """Read the directory of a run, which may also be under way or have been killed.

    Raises:
        OSError: a file cannot be read.
        ValueError: the directory has no costs and no log; or a file in it is damaged, or has another format
            or a newer version.
    """
    costs = read_costs(run) if (run / COSTS).is_file() else None
    log = read_curves(run / METRICS) if (run / METRICS).is_file() else None
    if costs is None and (log is None or not log.whole):
        raise ValueError(_nothing(run))
    name = str(run).encode(errors="replace").decode()  # a file name need not be UTF-8
    records, missing = read_ranks(run, costs)
    slow, lines = slow_rank_of(records), []
    if costs is not None:
        lines = advice_on_ranks(costs, records, slow)
    report = Report(run=name, costs=costs, log=log, notes=_notes(run, costs, log), advice=lines)
    return replace(
        report,
        missing=missing or ([] if costs else [WITHOUT]),
        ranks=times_of(records),
        slow_rank=slow,
        commands=read_commands(run / COMMANDS) if (run / COMMANDS).is_file() else [],
        begun=read_record(run),
        scores=[] if log is None else scores_of(log.curves),
        checkpoints=checkpoints_of(run),
    )


def advice_on_ranks(costs: RunCosts, records: list[RunCosts], slow: Straggler | None) -> list[str]:
    """Return at most three lines of advice on a run; if it has a slow rank, the first line is on that.

    Args:
        costs: the costs of rank 0.
        records: the costs of all ranks; [] for a run of one rank.
        slow: the rank that the others wait for; None without one.
    """
    lines = advice(costs, [] if slow is not None else records or None)
    return lines if slow is None else [rank_advice(slow, records), *lines][:MOST]


def outdated(costs: RunCosts | None, log: RunLog | None) -> bool:
    """Return whether the log has a later call of `train()` than the one whose costs these are.

    Return False if a subscriber has lost events, because then the log may lack the end of a call.
    """
    if costs is None or not costs.complete or log is None or not log.begun_again:
        return False
    return not any(s.dropped or s.failed or s.queued or s.error for s in costs.subscribers)


def _nothing(run: Path) -> str:
    """Return the text of the error for a path without costs and logs, with files there and hints."""
    names = sorted(path.name for path in run.iterdir()) if run.is_dir() else []
    got, hints = ", ".join(names[:SHOWN]) or "nothing", []
    if not run.is_dir():
        got = "a file" if run.is_file() else "no directory"
    if run.is_file() or (run / MANIFEST).is_file():
        hints.append(f"is it {run.resolve().parent}?")
    if (run / EVENTS).is_file():
        hints.append(_from_events(run))
    if (run / TRACES).is_dir():
        hints.append(f"`eventloop trace {run}` lists its traces")
    if any((run / name / MANIFEST).is_file() for name in names):
        hints.append(f"`eventloop checkpoints {run}` lists its checkpoints")
    if runs := [name for name in names if (run / name / COSTS).is_file() or (run / name / METRICS).is_file()]:
        hints.append(f"there are runs in {', '.join(runs)}")
    wanted = f"expected a run's directory with {COSTS} or lines in {METRICS}"
    late = "a run writes its first costs after some seconds"
    return "; ".join([f"{run} has nothing to report: {wanted}, got {got}", late, *hints])


def _from_events(run: Path) -> str:
    return f"`eventloop replay {run} --to jsonl --out {run}` makes {METRICS} from {EVENTS}"


def _notes(run: Path, costs: RunCosts | None, log: RunLog | None) -> list[str]:
    """Return sentences on costs that do not cover the whole run, on missing curves and damaged lines."""
    notes = []
    if costs is not None and not costs.complete:
        notes.append(f"The run is under way, or was killed: {COSTS} is as it was written last.")
    elif outdated(costs, log):
        notes.append(
            f"The run was begun again, and is under way or was killed: {COSTS} is that of the call before."
        )
    if costs is not None and costs.first_iter:
        notes.append(
            f"The costs are of the iterations from {costs.first_iter:,} on: those before were another "
            "process's."
        )
    if costs is not None and log is not None:
        reached = costs.first_iter + costs.phases.iterations
        last = max((curve.last_step for curve in log.curves if curve.mode == "train"), default=0)
        if last > reached:
            notes.append(f"The costs go up to iteration {reached:,}, the log goes to {last:,}.")
    if log is None:
        remedy = f"{_from_events(run)}." if (run / EVENTS).is_file() else "JSONLWriter writes it."
        notes.append(f"There are no curves: no {METRICS} here. {remedy}")
        return notes
    if not log.curves:
        notes.append(f"There are no curves: {METRICS} has no scalars.")
    if log.resumed_at:
        iterations = ", ".join(f"{iteration:,}" for iteration in log.resumed_at)
        notes.append(
            f"Iterations were run again from {iterations} on: {log.superseded:,} records that others have "
            "replaced are left out."
        )
    if log.cut_short:
        lines = "line is" if log.cut_short == 1 else "lines are"
        notes.append(f"{log.cut_short:,} {lines} cut short or damaged in {METRICS}, and left out.")
    return notes
