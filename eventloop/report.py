"""What a run's directory tells: the costs in `costs.json`, and the curves in `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from eventloop.costs import FILE as COSTS
from eventloop.costs import RunCosts, read_costs
from eventloop.curves_reader import RunLog, read_curves
from eventloop.jsonl_format import FILE_NAME as METRICS
from eventloop.log_format import FILE_NAME as EVENTS
from eventloop.manifest import MANIFEST

VERSION = 1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run; what `eventloop report RUN --json` prints. Times are in seconds, NaN is null.

    report = load_report(Path("runs/digits"))
    report.costs.phases.wall / report.costs.phases.iterations  # seconds an iteration
    """

    version: int = VERSION
    run: str
    """Its directory, as it was given."""
    costs: RunCosts | None
    log: RunLog | None
    notes: list[str]
    """What there is not, or not all of, and why."""


def load_report(run: Path) -> Report:
    """Read the directory of a run. One that is under way, or was killed, is read as far as it is whole.

    Raises:
        OSError: something in it cannot be read.
        ValueError: it is not the directory of a run, or empty; a file in it is torn, or of a newer version.
    """
    _check_run(run)
    costs = read_costs(run) if (run / COSTS).is_file() else None
    log = read_curves(run / METRICS) if (run / METRICS).is_file() else None
    if costs is None and (log is None or not log.whole):
        raise ValueError(f"{run} has nothing to tell yet: {METRICS} is empty, and there is no {COSTS}")
    return Report(run=str(run), costs=costs, log=log, notes=[*_notes(run, costs, log)])


def _check_run(run: Path) -> None:
    """Refuse what is no run, and say what it is.

    Raises:
        ValueError: see the message.
    """
    wanted = f"expected a run's directory, with {COSTS} or {METRICS} in it"
    if run.is_file():
        raise ValueError(f"{run} is a file: {wanted}; is it {run.resolve().parent}?")
    if not run.is_dir():
        raise ValueError(f"no directory at {run}: {wanted}")
    if _is_run(run):
        return
    if (run / MANIFEST).is_file():
        raise ValueError(f"{run} is a checkpoint: {wanted}; is it {run.resolve().parent}?")
    inside = sorted(run.iterdir())
    if not inside:
        raise ValueError(f"{run} is empty: {wanted}")
    runs = [path.name for path in inside if path.is_dir() and _is_run(path)]
    raise ValueError(f"{run} is not a run: {wanted}{_hint(run, runs)}")


def _is_run(path: Path) -> bool:
    return (path / COSTS).is_file() or (path / METRICS).is_file()


def _hint(run: Path, runs: list[str]) -> str:
    if runs:
        return f"; there are runs in {', '.join(runs)}"
    return f"; {_from_events(run)}" if (run / EVENTS).is_file() else ""


def _from_events(run: Path) -> str:
    return f"`eventloop replay {run} --to jsonl --out {run}` makes {METRICS} from {EVENTS}"


def _notes(run: Path, costs: RunCosts | None, log: RunLog | None) -> list[str]:
    notes = []
    if costs is None:
        notes.append(
            f"There are no costs: no {COSTS} here. A run writes it while it goes on, unless it was killed early."
        )
    elif not costs.complete:
        notes.append(f"The run is under way, or was killed: {COSTS} is as it was written last.")
    if costs is not None and costs.first_iter:
        notes.append(
            f"The costs are of the iterations from {costs.first_iter:,} on: those before were another process's."
        )
    if log is None:
        makes = f" {_from_events(run)}." if (run / EVENTS).is_file() else " JSONLWriter writes it."
        notes.append(f"There are no curves: no {METRICS} here.{makes}")
        return notes
    if not log.curves:
        notes.append(f"There are no curves: {METRICS} has no scalars.")
    if log.resumed_at:
        at = ", ".join(f"{iteration:,}" for iteration in log.resumed_at)
        notes.append(
            f"Iterations were run again from {at} on: {log.superseded:,} records that others have replaced are left out."
        )
    if log.cut_short:
        lines = "line is" if log.cut_short == 1 else "lines are"
        notes.append(f"{log.cut_short:,} {lines} cut short in {METRICS}, and left out.")
    return notes
