"""Make the sections of the live page from a `RunView`: head, notices, and phases of an iteration.

All numbers become text here, in the formats of the terminal and of the report. The page never inserts a text
as HTML, so a name that looks like HTML is shown as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from eventloop.costs.records import WAITING
from eventloop.reporting.begun import record_facts
from eventloop.reporting.facts import PHASE_COLOURS
from eventloop.util.formatting import duration, on_a_line, three_digits, value_text
from eventloop.watching.view import Notice, RunView
from eventloop.watching.web.tables import tables

BEGUN = 400
"""The largest number of characters of the line on model, machine and options; a table has all of them."""
SCALARS = 4
"""The largest number of scalars among the figures at the top of the page."""
GOOD, BAD, BUSY, CALM = "good", "bad", "busy", "calm"
"""The colours of a run's state; the style sheet of the page defines them."""


def sections(view: RunView) -> dict[str, Any]:
    """Return the sections of a run as JSON values, by name. A section is sent again when it has changed."""
    return {
        "head": _head(view),
        "health": [_notice(notice) for notice in reversed(view.health)],
        "lines": [_notice(notice) for notice in reversed(view.lines) if not notice.bad],
        "time": _time(view),
        "notes": [on_a_line(note) for note in view.notes],
        **tables(view),
    }


def _head(view: RunView) -> dict[str, Any]:
    """Return the head of the page: the state, the progress and the main figures."""
    done = view.iter / view.max_iters if view.iter is not None and view.max_iters else None
    process = "" if view.host is None else f"process {view.pid} on {view.host}"
    return {
        "path": on_a_line(view.run),
        "state": "failed" if view.error is not None else view.state,
        "mood": _mood(view),
        "sentence": on_a_line(view.sentence),
        "over": view.over,
        "paused": view.state == "paused",
        "done": None if done is None else min(1.0, done),
        "figures": [[name, value, remark] for name, value, remark in _figures(view)],
        "begun": _begun(view),
        "host": "" if process in view.sentence else process,
    }


def _begun(view: RunView) -> str:
    """Return the model, the device, the versions, the commit and the options of the run on one line."""
    facts = [f"{fact.name} {fact.value}" for fact in record_facts(view.record) if fact.name != "begun"]
    return on_a_line(" · ".join(facts), BEGUN)


def _mood(view: RunView) -> str:
    """Return the colour of the state: `GOOD`, `BAD`, `BUSY` or `CALM`."""
    if view.error is not None or view.state in ("hung", "killed"):
        return BAD
    if view.state in ("ended", "paused", "unknown"):
        return GOOD if view.reason == "completed" else CALM
    return BUSY


def _figures(view: RunView) -> Iterator[tuple[str, str, str]]:
    """Yield the figures at the top of the page, each as name, value, and a remark below it."""
    if view.iter is not None:
        yield "iteration", f"{view.iter:,}", "" if view.max_iters is None else f"of {view.max_iters:,}"
    if view.epoch is not None:
        yield "epoch", f"{view.epoch:,}", "" if view.max_epochs is None else f"of {view.max_epochs:,}"
    if not view.over and view.max_iters is not None:
        yield "time left", "–" if view.eta is None else clock(view.eta), "without evaluations"
    if not view.over:
        yield "speed", three_digits(view.speed) if view.speed else "–", "iterations a second"
    for name in _important(view):
        yield name, value_text(view.latest[name]), ""
    if view.ranks is not None and view.ranks > 1:
        yield "ranks", f"{view.ranks:,}", ""


def _important(view: RunView) -> Sequence[str]:
    """Return the names of the scalars for the top of the page: the loss and those of validations."""
    names = "train/loss", *(name for name in view.latest if name.startswith("val/"))
    return [name for name in names if name in view.latest and not name.endswith("_time")][:SCALARS]


def _notice(notice: Notice) -> dict[str, Any]:
    return {"time": notice.time, "iter": notice.iter, "event": notice.event, "text": notice.text}


def _time(view: RunView) -> dict[str, Any]:
    """Return the phases of a mean iteration with their times, and the advice on them."""
    return {
        "iteration": duration(sum(phase.seconds for phase in view.phases)) if view.phases else "",
        "phases": [
            {
                "name": WAITING.get(phase.name, phase.name),
                "seconds": duration(phase.seconds),
                "share": phase.share,
                "colour": PHASE_COLOURS.get(phase.name, "#8e98a6"),
            }
            for phase in view.phases
        ],
        "advice": [on_a_line(advice) for advice in view.advice],
        "slow_rank": "" if view.slow_rank is None else on_a_line(view.slow_rank.text),
        "written": view.costs_time,
    }


def clock(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds: `1:02:03`."""
    whole_seconds = round(min(seconds, 1e12))
    return f"{whole_seconds // 3600}:{whole_seconds // 60 % 60:02}:{whole_seconds % 60:02}"
