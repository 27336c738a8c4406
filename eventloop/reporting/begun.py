"""Collect facts on a run: options, machine and versions from `run.json`, scores, checkpoints, logged texts.

The text and the page of a report show them below the facts of `facts`, which are on times and lost events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from eventloop.checkpoint.listing import Item
from eventloop.description.plain_values import flat
from eventloop.description.record import Begin, RunRecord
from eventloop.reporting.facts import Fact
from eventloop.reporting.outcomes import Score
from eventloop.reporting.report import Report
from eventloop.reporting.tables import Table
from eventloop.util.formatting import value_text

BRIEF = ("begun", "model", "options", "scores")
"""The facts that the short text of a report shows, each on one line."""
NOTES = 5
"""The largest number of logged texts among the facts."""
OPTIONS = "Options"
"""The title of the table of all options."""


def begun_facts(report: Report) -> list[Fact]:
    """Return the facts of `run.json`, and the scores, checkpoints and last logged texts of a run."""
    facts = record_facts(report.begun)
    if report.scores:
        facts.append(Fact("scores", ", ".join(map(_score, report.scores))))
    if report.checkpoints:
        facts.append(Fact("checkpoints", _checkpoints(report.checkpoints)))
    texts = [] if report.log is None else report.log.texts
    one_line_texts = [line for line in texts if "\n" not in line.text]  # the page shows all texts below
    facts += [Fact(f"{line.name} at {line.step:,}", line.text) for line in one_line_texts[-NOTES:]]
    return facts


def options_table(record: RunRecord | None) -> Table:
    """Return the table of all settings of a run; it has no rows without `run.json`."""
    settings = {} if record is None else {"config": record.config, **record.options}
    rows = [[name, _shown(value)] for name, value in _listed(settings)]
    return Table(OPTIONS, ["option", "value"], rows, left=2)


def record_facts(record: RunRecord | None) -> list[Fact]:
    """Return the facts of a run's `run.json`; [] without it."""
    return [] if record is None else [*_record_facts(record)]


def _record_facts(record: RunRecord) -> Iterator[Fact]:
    """Yield the facts of `run.json`: begin, model, device, versions, commit and options."""
    yield Fact("begun", _begins(record.begins))
    frozen = record.parameters - record.trainable
    trained = f", {frozen:,} of them frozen" if frozen else ""
    yield Fact("model", f"{record.model}, {record.parameters:,} parameters{trained}")
    ranks = f", {record.ranks:,} ranks" if record.ranks > 1 else ""
    yield Fact("device", f"{record.device}{ranks}")
    versions = f"python {record.python}, torch {record.torch}, eventloop {record.eventloop}"
    yield Fact("versions", versions)
    if commit := record.begins[-1].commit:
        yield Fact("commit", commit)
    if options := _short_options(record):
        yield Fact("options", ", ".join(options))


def _begins(begins: Sequence[Begin]) -> str:
    """Describe when and where a run began, and how often it began again."""
    first, last = begins[0], begins[-1]
    text = f"{_clock(first.time)} on {first.host}"
    if len(begins) == 1:
        return text if not first.iter else f"{text}, after iteration {first.iter:,}"
    again = f"begun again {len(begins) - 1:,} times" if len(begins) > 2 else "begun again"
    return f"{text}; {again}, last at {_clock(last.time)} on {last.host}, after iteration {last.iter:,}"


def _clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M:%S}"


def _short_options(record: RunRecord) -> list[str]:
    """Return the program's config as `name=value`, else the options of the trainer and its optimizers."""
    if record.config:
        return [f"{name}={_shown(value)}" for name, value in _listed(record.config)]
    parts: dict[str, Any] = {
        name: options for name, options in record.options.items() if name in ("trainer", "optimizer")
    }
    return [
        f"{name}={_shown(value)}"
        for name, value in _listed(parts)
        if value is not None and value is not False and value != []
    ]


def _listed(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all settings with names such as "optimizer.lr", or "hooks[0].interval" for dicts in a list."""
    for name, value in flat(settings):
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                yield from _listed({f"{name}[{number}]": item})
        else:
            yield name, value


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _score(score: Score) -> str:
    """Describe the best and the last value of a score; only the last without a rule for the best."""
    last = f"{value_text(score.last)} at step {score.last_step:,}"
    if score.best is None:
        return f"{score.name} last {last}"
    if score.best_step == score.last_step:
        return f"{score.name} best and last {last}"
    return f"{score.name} best {value_text(score.best)} at step {score.best_step:,}, last {last}"


def _checkpoints(checkpoints: Sequence[Item]) -> str:
    """Return the number of checkpoints, and the names of the newest and best ones."""
    texts = [f"{len(checkpoints):,}"]
    for checkpoint in checkpoints:
        marks = ["newest"] if checkpoint.newest else []
        marks += [f"best {metric}" for metric in checkpoint.best_now]
        if marks:
            at = "" if checkpoint.iter is None else f" of iteration {checkpoint.iter:,}"
            texts.append(f"{checkpoint.name}{at} ({', '.join(marks)})")
    return ", ".join(texts)
