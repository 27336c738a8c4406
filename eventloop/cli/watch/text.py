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
"""The largest number of lines for each kind: waits, queues, checkpoints and notices."""
HEIGHT = 6, 12
"""The least and the largest height of a chart in lines, with its title."""
ONE_CHART = 9
"""The lines that are kept for curves if a terminal is low: a chart, and two more curves of one line."""
NOTE = 2
"""The largest number of lines of a note on a terminal."""
NAME = 12
"""The width, in characters, of the name with which a line begins."""
SPARKLINE = 32
"""The largest width, in characters, of a curve that is drawn within one line."""


class Line(NamedTuple):
    """Hold a line of text and its style."""

    text: str
    style: Style = ""


def view_lines(view: RunView, width: int, height: int | None, encoding: str) -> list[Line]:
    """Return a view as lines of at most `width` characters.

    Args:
        view: the view.
        width: the width of the output in characters, at least 20.
        height: the largest number of lines. Curves are then charts if there is room, and long lines are cut.
            With None there is no limit: each curve is one line, and long lines are wrapped.
        encoding: the encoding of the output. For characters that it lacks, plainer ones are used.
    """
    head = [*_head(view, width, plainly=not encodable(BLOCKS, encoding)), *_notes(view, width, height)]
    details = [*_details(view)]
    if height is None:
        curves = [_curve_line(curve, encoding) for curve in view.curves]
        details = [Line(part, line.style) for line in details for part in _wrapped(line.text, width, NAME)]
    else:
        remaining = height - len(head)
        # on a low terminal, curves take lines from the details, of which at least four stay
        curve_lines = max(remaining - len(details), min(ONE_CHART, remaining - 4))
        curves = [*_charts(view.curves, width, curve_lines, encoding)]
    lines = [*head, *curves, *details]
    return [Line(_cut(on_a_line(line.text.rstrip()), width), line.style) for line in lines[:height]]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _named(name: str, text: str, style: Style = "") -> Line:
    return Line(f"{name:<{NAME}}{text}", style)


# --- the state and the progress ----------------------------------------------------------------------------


def _head(view: RunView, width: int, *, plainly: bool) -> Iterator[Line]:
    """Yield the lines of the run's name, state and progress; `plainly` draws the bar with "#"."""
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
    """Yield the notes of a view, such as on a scalar that does not exist."""
    for note in view.notes:
        parts = _wrapped(f"{'note':<{NAME}}{note}", width, NAME)
        shown = parts if height is None else parts[:NOTE]
        for part in shown:
            yield Line(part, "bad" if note.startswith(MISSING) else "dim")


def _progress(view: RunView) -> Iterator[str]:
    """Yield the parts of the line of the progress, such as "iter 1,200/5,000"."""
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
    """Return a count with its total, if that is known: "1,200/5,000"."""
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"


def _clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds: "1:02:03"."""
    whole_seconds = round(min(seconds, 1e12))
    return f"{whole_seconds // 3600}:{whole_seconds // 60 % 60:02}:{whole_seconds % 60:02}"


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """Break a text into lines between words; all lines except the first are indented."""
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


def _charts(curves: Sequence[CurveView], width: int, height: int, encoding: str) -> Iterator[Line]:
    """Yield as many charts as fit into `height` lines, and one line for each other curve."""
    least, most = HEIGHT
    # each curve has one line, and a chart takes at least `least - 1` lines more
    count = min(len(curves), max(0, height - len(curves)) // (least - 1))
    if width < LABEL + 4:
        count = 0
    chart_height = min(most, (height - (len(curves) - count)) // count) if count else 0
    braille = encodable(chr(BRAILLE), encoding)
    for index, curve in enumerate(curves):
        if index >= count:
            yield _curve_line(curve, encoding)
            continue
        yield Line(f"{_title(curve)}  {value_text(curve.last)} at {curve.last_step:,}", "title")
        for text in chart(curve.steps, curve.mean, width, chart_height - 1, braille=braille):
            yield Line(text)


# --- the rest ----------------------------------------------------------------------------------------------


def _details(view: RunView) -> Iterator[Line]:
    """Yield the lines below the curves: problems, last values, costs, checkpoints and notices."""
    for notice in view.health[-MOST:]:
        yield _named("health", _notice(notice), "bad")
    drawn = {_title(curve) for curve in view.curves}
    others = [name for name in view.latest if name not in drawn]
    others.sort(key=lambda name: name.rpartition("/")[2] in TIMES)  # moves the times to the end
    scalars = [f"{name} {value_text(view.latest[name])}" for name in others]
    if scalars:
        yield _named("last", "  ".join(scalars))
    yield from _costs(view)
    yield from _checkpoints(view)
    good_notices = [notice for notice in view.lines if not notice.bad]  # bad ones are in `view.health`
    for notice in good_notices[-MOST:]:
        yield _named("log", _notice(notice))


def _costs(view: RunView) -> Iterator[Line]:
    """Yield the lines on the times of an iteration, waits, queues, a slow rank and advice."""
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
    worst_first = sorted(view.queues, key=_by_trouble, reverse=True)
    for queue in worst_first[:MOST]:
        yield _named("queue", _queue(queue), "bad" if queue.dropped or queue.failed or queue.error else "")
    if view.slow_rank is not None:
        yield _named("ranks", view.slow_rank.text, "bad")
    for advice in view.advice:
        yield _named("advice", advice)


def _by_trouble(queue: QueueView) -> tuple[int, int]:
    """Return the sort key of a queue: first the lost events, then the waiting ones."""
    return queue.dropped + queue.failed, queue.queued


def _queue(queue: QueueView) -> str:
    """Describe a queue on a line: its events now and at most, its losses, and its error."""
    backlog = f"{queue.name} {_of(queue.queued, queue.capacity)}, at most {queue.peak:,} so far"
    losses = {"dropped": queue.dropped, "failed": queue.failed}
    lost = "".join(f", {count:,} {name}" for name, count in losses.items() if count)
    return f"{backlog}{lost}{f': {queue.error}' if queue.error else ''}"


def _checkpoints(view: RunView) -> Iterator[Line]:
    """Yield a line for the newest, the best and a few other checkpoints, and for saves under way."""
    marked = [checkpoint for checkpoint in view.checkpoints if checkpoint.newest or checkpoint.best]
    others = [checkpoint for checkpoint in view.checkpoints if checkpoint not in marked]
    newest_others = others[-(MOST - len(marked)) :] if len(marked) < MOST else []
    for checkpoint in view.checkpoints:
        if checkpoint in marked or checkpoint in newest_others:
            yield _named("checkpoint", _checkpoint(checkpoint), "" if checkpoint.whole else "bad")
    if left_out := len(others) - len(newest_others):
        yield _named("checkpoint", f"and {left_out:,} more", "dim")
    for name in view.saving:
        yield _named("saving", f"{name}: not durable yet")
    for reason in view.damaged:
        yield _named("damaged", reason, "bad")


def _checkpoint(checkpoint: CheckpointView) -> str:
    """Describe a checkpoint on a line, with the reasons why the run keeps it."""
    facts = [f"iter {checkpoint.iter:,}"] if checkpoint.iter is not None else []
    facts += [size_text(checkpoint.bytes), "durable" if checkpoint.whole else "DAMAGED"]
    if checkpoint.newest:
        facts.append("newest")
    elif checkpoint.abandoned:
        facts.append("left behind")
    facts += [f"best {metric}" for metric in checkpoint.best]
    return f"{checkpoint.name}: {', '.join(facts)}"


def _notice(notice: Notice) -> str:
    at = time.strftime("%H:%M:%S ", time.localtime(notice.time)) if notice.time is not None else ""
    where = f"[{notice.iter:,}] " if notice.iter is not None else ""
    return f"{at}{where}{notice.text}"
