"""Format a `RunView` as lines, for the live view on a terminal and for `--once`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from eventloop.cli.listing_text import size_text
from eventloop.cli.watch.chart import BRAILLE, LABEL, chart
from eventloop.costs.records import WAITING
from eventloop.costs.step_clock import TIMES
from eventloop.reporting.tables import encodable
from eventloop.reporting.waits import PLACES
from eventloop.util.formatting import ASCII_BLOCKS, BLOCKS, duration, on_a_line, sparkline, value_text
from eventloop.watching.logged import MISSING
from eventloop.watching.view import CheckpointView, CurveView, Notice, QueueView, RunView

Style = Literal["", "title", "good", "bad", "dim"]
MOST = 4
"""The largest number of waits, queues, checkpoints, notices and scores shown of each kind."""
HEIGHT = 6, 12
"""The least and the largest height of a chart in lines, with its title."""
ONE_CHART = 9
"""The lines that curves have in any case on a terminal, before details: a chart, and two curves as a line."""
NOTE = 2
"""The largest number of lines of a note on a terminal."""
NAME = 12
"""The width of the names at the begin of a line."""
SPARKLINE = 32
"""The largest width of a curve in a line."""


class Line(NamedTuple):
    """A line of text, and how to show it."""

    text: str
    style: Style = ""


def view_lines(view: RunView, width: int, height: int | None, encoding: str) -> list[Line]:
    """Return a view as lines of at most `width` characters.

    Args:
        view: the view.
        width: at least 20 characters.
        height: the largest number of lines, each cut at the width; None for any, with the curves as a line
            each, and long lines wrapped.
        encoding: the encoding of the output; if it lacks a character, plainer ones are used.
    """
    head = [*_head(view, width, plainly=not encodable(BLOCKS, encoding)), *_notes(view, width, height)]
    rest = [*_rest(view)]
    if height is None:
        curves = [_curve_line(curve, encoding) for curve in view.curves]
        rest = [Line(part, line.style) for line in rest for part in _wrapped(line.text, width, NAME)]
    else:
        left = height - len(head)
        curves = [*_charts(view.curves, width, max(left - len(rest), min(ONE_CHART, left - 4)), encoding)]
    lines = [*head, *curves, *rest]
    return [Line(_cut(on_a_line(line.text.rstrip()), width), line.style) for line in lines[:height]]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _named(name: str, text: str, style: Style = "") -> Line:
    return Line(f"{name:<{NAME}}{text}", style)


# --- the state and the progress ----------------------------------------------------------------------------


def _head(view: RunView, width: int, *, plainly: bool) -> Iterator[Line]:
    yield Line(view.run, "title")
    bad = view.state in ("hung", "killed") or view.error is not None
    for part in _wrapped(view.sentence, width, 0)[:4]:
        yield Line(part, "bad" if bad else "good")
    if view.iter is None:
        return
    yield Line("  ".join(_progress(view)))
    if view.max_iters:
        share = min(1.0, view.iter / view.max_iters)
        filled = int(share * (width - 8))
        yield Line(f"{'#' * filled if plainly else '█' * filled:.<{width - 8}} {share:.0%}", "good")


def _notes(view: RunView, width: int, height: int | None) -> Iterator[Line]:
    """Yield the notes, such as on a scalar that does not exist, where the curves would be."""
    for note in view.notes:
        parts = _wrapped(f"{'note':<{NAME}}{note}", width, NAME)
        for part in parts if height is None else parts[:NOTE]:
            yield Line(part, "bad" if note.startswith(MISSING) else "dim")


def _progress(view: RunView) -> Iterator[str]:
    yield f"iter {_of(view.iter, view.max_iters)}"
    if view.epoch is not None and view.max_epochs is not None:
        yield f"epoch {_of(view.epoch, view.max_epochs)}"
    if view.speed:
        yield f"{value_text(view.speed)} it/s"
    if view.eta is not None:
        yield f"eta {_clock(view.eta)}"
    if view.ranks is not None and view.ranks > 1:
        yield f"{view.ranks} ranks"


def _of(done: int | None, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"


def _clock(seconds: float) -> str:
    left = round(min(seconds, 1e12))
    return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """Return a text as lines that are not cut within a word; all but the first are indented."""
    lines = [text[:indent]]
    for word in text[indent:].split(" "):
        if lines[-1].strip() and len(lines[-1]) + 1 + len(word) > width:
            lines.append(" " * indent)
        lines[-1] += f"{' ' if len(lines[-1]) > indent else ''}{word}"
    return lines


# --- curves ------------------------------------------------------------------------------------------------


def _title(curve: CurveView) -> str:
    return f"{curve.mode}/{curve.name}"


def _curve_line(curve: CurveView, encoding: str) -> Line:
    blocks = BLOCKS if encodable(BLOCKS + "×", encoding) else ASCII_BLOCKS
    course = sparkline(curve.mean, width=SPARKLINE, blocks=blocks)
    return Line(f"{_title(curve):<20}  {value_text(curve.last):>10}  {course}")


def _charts(curves: Sequence[CurveView], width: int, room: int, encoding: str) -> Iterator[Line]:
    """Yield as many charts as the room allows, and a line for each other curve."""
    least, most = HEIGHT
    drawn = min(len(curves), max(0, room - len(curves)) // (least - 1))
    if width < LABEL + 4:
        drawn = 0
    height = min(most, (room - (len(curves) - drawn)) // drawn) if drawn else 0
    braille = encodable(chr(BRAILLE), encoding)
    for index, curve in enumerate(curves):
        if index >= drawn:
            yield _curve_line(curve, encoding)
            continue
        yield Line(f"{_title(curve)}  {value_text(curve.last)} at {curve.last_step:,}", "title")
        for text in chart(curve.steps, curve.mean, width, height - 1, braille=braille):
            yield Line(text)


# --- the rest ----------------------------------------------------------------------------------------------


def _rest(view: RunView) -> Iterator[Line]:
    for notice in view.health[-MOST:]:
        yield _named("health", _notice(notice), "bad")
    drawn = {_title(curve) for curve in view.curves}
    others = [name for name in view.latest if name not in drawn]
    others.sort(key=lambda name: name.rpartition("/")[2] in TIMES)  # stable: the times are last
    scalars = [f"{name} {value_text(view.latest[name])}" for name in others]
    if scalars:
        yield _named("last", "  ".join(scalars))
    yield from _costs(view)
    yield from _checkpoints(view)
    usual = [notice for notice in view.lines if not notice.bad]
    for notice in usual[-MOST:]:
        yield _named("log", _notice(notice))


def _costs(view: RunView) -> Iterator[Line]:
    if view.phases:
        step = sum(phase.seconds for phase in view.phases)
        shares = "  ".join(
            f"{WAITING.get(phase.name, phase.name)} {phase.share:.0%}"
            for phase in view.phases
            if phase.share >= 0.005
        )
        yield _named("iteration", f"{duration(step)}: {shares}")
    for wait in sorted(view.waits, key=lambda wait: -wait.seconds)[:MOST]:
        name = f" ({wait.name})" if wait.name else ""
        sums = f"{duration(wait.seconds)} in {wait.calls:,}, longest {duration(wait.longest)}"
        yield _named("wait", f"{WAITING[wait.cause]}{name} {PLACES[wait.place]}: {sums}")
    fullest = sorted(view.queues, key=_by_trouble, reverse=True)
    for queue in fullest[:MOST]:
        yield _named("queue", _queue(queue), "bad" if queue.dropped or queue.failed or queue.error else "")
    if view.slow_rank is not None:
        yield _named("ranks", view.slow_rank.text, "bad")
    for advice in view.advice:
        yield _named("advice", advice)


def _by_trouble(queue: QueueView) -> tuple[int, int]:
    return queue.dropped + queue.failed, queue.queued


def _queue(queue: QueueView) -> str:
    backlog = f"{queue.name} {_of(queue.queued, queue.capacity)}, at most {queue.peak:,} so far"
    losses = {"dropped": queue.dropped, "failed": queue.failed}
    lost = "".join(f", {count:,} {name}" for name, count in losses.items() if count)
    return f"{backlog}{lost}{f': {queue.error}' if queue.error else ''}"


def _checkpoints(view: RunView) -> Iterator[Line]:
    matter = [each for each in view.checkpoints if each.newest or each.best]
    others = [each for each in view.checkpoints if each not in matter]
    shown = others[-max(0, MOST - len(matter)) :] if len(matter) < MOST else []
    for each in view.checkpoints:
        if each in matter or each in shown:
            yield _named("checkpoint", _checkpoint(each), "" if each.whole else "bad")
    if left := len(view.checkpoints) - len(matter) - len(shown):
        yield _named("checkpoint", f"and {left:,} more", "dim")
    for name in view.saving:
        yield _named("saving", f"{name}: not durable yet")
    for reason in view.damaged:
        yield _named("damaged", reason, "bad")


def _checkpoint(each: CheckpointView) -> str:
    marks = [f"iter {each.iter:,}"] if each.iter is not None else []
    marks += [size_text(each.bytes), "durable" if each.whole else "DAMAGED"]
    marks += ["newest"] if each.newest else ["left behind"] if each.abandoned else []
    marks += [f"best {metric}" for metric in each.best]
    return f"{each.name}: {', '.join(marks)}"


def _notice(notice: Notice) -> str:
    at = time.strftime("%H:%M:%S ", time.localtime(notice.time)) if notice.time is not None else ""
    where = f"[{notice.iter:,}] " if notice.iter is not None else ""
    return f"{at}{where}{notice.text}"
