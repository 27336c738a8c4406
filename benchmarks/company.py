"""Does a training beside a busy machine, busy loader workers or another rank end as soon as the loop by hand?

    python -m benchmarks.company --json benchmarks/results/company.json     # about 20 minutes on 2 CPUs
    python -m benchmarks.company --company busy2 --training peers           # one row
    python -m benchmarks.company --short                                    # less than a minute, without peers
    python -m benchmarks.company --before earlier.json                      # also: not slower alone than it was

The trainings are those of `peers`, `checkpoint_stall` (with 50 MB of state), `small_checkpoints` and `slow_writers` (a disk
that takes 20 ms for each line), each with checkpoints at an interval, best checkpoints and three writers. Each is run alone,
beside one and two processes a CPU that do nothing but `while True`, with a DataLoader whose workers keep all CPUs busy, and
with two gloo ranks; by the bare loop, by hand, eventloop, pytorch-ignite and Lightning. In another row of `checkpoint_stall`
FSDP2 divides the model over the two ranks, and all of them save by hand with `torch.distributed.checkpoint.save`.

Each run is a process of its own, which imports everything before the company comes; the runs of a round follow each
other, and each round begins with another engine. A run is timed from outside: from the line that tells it to begin until
its process has ended. Ratios are medians over the rounds of two runs in the same company and round.

- start: until the first step; loop: from there to the last one; end: from the beginning of the last step until the process has ended
- p99: of the steps, each from the beginning of a forward pass to that of the next, with logs, validations and saves
- blocked: the time of the training thread in a save, the median; best: of those after a validation
- durable: from the snapshot until the checkpoint is there under its name. Ours is `checkpoint_saved.seconds`; by hand it is
  the call of torch.save, fsync, rename, fsync of the folder; the peers' is the call, and they sync nothing
- log to file: from the call that logs, on the training thread, until the JSON line is in the file

A run that takes longer than `--limit` is killed, and counts as failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.helpers import company_report
from benchmarks.helpers.company_engines import BARE, BY_HAND, ENGINES, WHOLE
from benchmarks.helpers.company_job import LARGE_STATE, TRAININGS, Training
from benchmarks.helpers.company_peers import PEERS
from benchmarks.helpers.company_runs import COMPANIES, Company, Failed, Prepared, Run, busy
from benchmarks.helpers.timing import NOT_INSTALLED, command_line, environment, publish, version_of

SHORT_PARTS = 4
SHORT_ROWS = {
    "peers": ["busy1"],
    "checkpoint_stall": ["loader", "fsdp2"],
    "small_checkpoints": ["alone", "busy2"],
    "slow_writers": ["ranks"],
}
"""The short form has a fourth of the iterations, and every training and every company once, unless rows are named."""
Cell = dict[str, list[Run]]
"""The runs of one training in one company, by engine, one a round."""

short = company_report.short


def page_of(record: dict[str, Any]) -> str:
    """The whole page."""
    return company_report.page_of((__doc__ or "").splitlines()[0], record)


def not_installed() -> dict[str, str]:
    """The peers that lack something, with what."""
    lacks = {
        name: [each for each in needs if version_of(each) == NOT_INSTALLED]
        for name, (needs, _) in PEERS.items()
    }
    return {name: f"not installed: {', '.join(absent)}" for name, absent in lacks.items() if absent}


def take_round(
    engines: list[str],
    training: Training,
    company: Company,
    options: argparse.Namespace,
    failed: dict[str, str],
) -> dict[str, Run]:
    """One run of each engine, in this order; what fails is added to `failed`."""
    taken: dict[str, Run] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory)))
        prepared: dict[str, Prepared] = {}
        for name in engines:
            prepared[name] = Prepared(name, training, company, folder)
            stack.callback(prepared[name].close)
        for name in engines:
            try:
                prepared[name].wait()
            except Failed as error:
                failed[name] = str(error)
        stack.enter_context(busy(company.busy))
        for name in engines:
            if name in failed:
                continue
            try:
                taken[name] = prepared[name].run(options.limit)
            except Failed as error:
                failed[name] = str(error)
    return taken


def measure_cell(
    training: Training, company: Company, engines: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """All rounds of one training in one company; an engine that failed once is left out of the later rounds."""
    failed: dict[str, str] = {}
    runs: Cell = {name: [] for name in engines}
    for number in range(options.rounds):
        left = [name for name in engines if name not in failed]
        begin = number % len(left)
        for name, run in take_round(left[begin:] + left[:begin], training, company, options, failed).items():
            runs[name].append(run)
    whole = {name: taken for name, taken in runs.items() if name not in failed}
    losses = {run.loss for taken in whole.values() for run in taken}
    return {
        "engines": compare(whole),
        "failed": failed,
        "loss_difference": max(losses) - min(losses) if losses else 0.0,
        "runs": msgspec.to_builtins(whole),
    }


def compare(runs: Cell) -> dict[str, dict[str, float]]:
    """By engine the medians of what its runs took, and of the ratios to other engines in the same round."""
    fields = Run.__struct_fields__
    compared: dict[str, dict[str, float]] = {}
    for name, own in runs.items():
        compared[name] = {field: statistics.median(getattr(run, field) for run in own) for field in fields}
        for field, other in (
            ("whole", BY_HAND),
            ("loop", BY_HAND),
            ("end", BY_HAND),
            ("durable", BY_HAND),
            ("p99", BARE),
        ):
            if (beside := ratio(own, runs.get(other), field)) is not None:
                compared[name][f"{field} / {other}"] = beside
    return compared


def ratio(own: list[Run], other: list[Run] | None, field: str) -> float | None:
    """The median over the rounds; None where there is nothing to compare with."""
    if other is None:
        return None
    pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(own, other, strict=True)]
    return statistics.median(a / b for a, b in pairs) if all(a and b for a, b in pairs) else None


def rows_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """The companies of each training that is to be measured."""
    if options.short and not (options.training or options.company):
        return SHORT_ROWS
    return {name: options.company or companies_of(name) for name in options.training or TRAININGS}


def companies_of(training: str) -> list[str]:
    """The companies in which a training is measured by default: only large models are divided."""
    return [name for name, each in COMPANIES.items() if training == LARGE_STATE or not each.sharded]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as it is kept."""
    absent = not_installed()
    peers = [name for name in PEERS if name not in absent and not options.short]
    if options.short:
        absent = {**dict.fromkeys(PEERS, "left out of the short form"), **absent}
    rows = rows_of(options)
    cells: dict[str, dict[str, Any]] = {name: {} for name in rows}
    for name, companies in rows.items():
        training = TRAININGS[name].shortened(SHORT_PARTS if options.short else 1)
        for company in companies:
            print(f"{name}, {company}", file=sys.stderr, flush=True)
            engines = [*ENGINES, *(() if COMPANIES[company].sharded else peers)]
            cells[name][company] = measure_cell(training, COMPANIES[company], engines, options)
    record = {
        "command": command_line("benchmarks.company"),
        "environment": environment(
            "torch", "tensorboard", *(n for needs, _ in PEERS.values() for n in needs)
        ),
        "options": {"rounds": options.rounds, "limit": options.limit, "short": options.short},
        "companies": {
            name: each.text for name, each in COMPANIES.items() if any(name in row for row in cells.values())
        },
        "absent": absent,
        "cells": cells,
    }
    before = None if options.before is None else msgspec.json.decode(options.before.read_bytes())
    return {**record, "goals": company_report.goals(cells, None if before is None else before["cells"])}


def failures(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where the bare loop, the loop by hand or eventloop could not be measured."""
    return [
        f"{training}, {company}: {name} {why}"
        for training, companies in cells.items()
        for company, cell in companies.items()
        for name, why in cell["failed"].items()
        if name in (BARE, BY_HAND, WHOLE)
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--training", nargs="+", choices=TRAININGS)
    parser.add_argument("--company", nargs="+", choices=COMPANIES)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a run is killed")
    parser.add_argument(
        "--short", action="store_true", help="one round of short runs, without peers: a trial"
    )
    parser.add_argument("--before", type=Path, help="a JSON file of an earlier commit on this machine")
    parser.add_argument("--directory", type=Path, help="on the disk to write to; by default a temporary one")
    parser.add_argument("--from", dest="kept", type=Path, help="report on a JSON file, and measure nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.short else 3)
    return options


def main() -> None:
    """Measure, or read what was; print, keep. Ends with 1 where eventloop or what it is compared with failed."""
    options = arguments()
    record = measure(options) if options.kept is None else msgspec.json.decode(options.kept.read_bytes())
    publish(page_of(record), record, short, json=options.json, markdown=options.markdown)
    if failed := failures(record["cells"]):
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
