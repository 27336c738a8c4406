"""The console writer: a progress bar on a terminal or in a notebook, plain lines anywhere else.

The trainer adds a `ConsoleWriter` by default where a terminal or a notebook shows it. `lines` makes its
texts; `progress` and `notebook` draw its bars.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

from eventloop.costs.shares import SCALARS
from eventloop.eventlog.notices import notice
from eventloop.events import (
    AfterLoadCheckpoint,
    AfterRun,
    BeforeRun,
    BeforeTest,
    BeforeVal,
    CheckpointFailed,
    CheckpointSaved,
    CommandApplied,
    CommandRefused,
    Event,
    EventsDropped,
    HandlerFailed,
    LoaderStall,
    PreemptionRequested,
    RolledBack,
    ScalarsLogged,
    SlowHandler,
    SlowRank,
    StopRequested,
    TextLogged,
)
from eventloop.events.run import Run
from eventloop.util.checks import check_optional_bools, positive
from eventloop.util.formatting import on_a_line
from eventloop.util.printable import printable
from eventloop.util.terminal import drop_output, in_notebook, is_terminal
from eventloop.writers.lines import (
    Columns,
    Pace,
    between_line,
    is_after_epoch,
    iteration_shown,
    score_line,
    train_line,
)
from eventloop.writers.notebook import NotebookBar
from eventloop.writers.writer import Writer

if TYPE_CHECKING:
    from eventloop.writers.progress import ProgressBar


class ConsoleWriter(Writer):
    """Print epoch, iteration, loss, learning rate, speed and remaining time.

        Trainer(..., writers=[ConsoleWriter(interval=50)])

        Epoch(train)  [2][ 40/180]  lr: 1.0000e-03  eta: 0:00:08   203.4 it/s   loss: 0.1234      time: 0.0049
        Epoch(val)  [2]  accuracy: 0.9800      loss: 0.0700

    In a notebook there is a bar, which is updated in place, and a table with a row for each validation.

    A value that is logged repeatedly stays in the same column from line to line.

    Speed and remaining time are computed from the scalar `time`, seconds per iteration, smoothed; without
    that scalar neither is shown. The output is for people; programs read `JSONLWriter`'s file. The run
    continues when the reader of a pipe closes it, and when there is no standard output at all.

    Args:
        interval: minimum number of iterations between two training lines. The first line comes at a multiple
            of it, counted from the start of the epoch, or later; values logged in between, and those that
            come without `time`, appear in the next line. The progress bar follows every event, at most ten
            times a second.
        progress: True for the bar, False for lines, None for the bar in a notebook, and where the output is a
            terminal and rich is installed.
        stream: where to write; by default `sys.stdout` as it is when the run begins.

    Raises:
        TypeError, ValueError: `interval` is not a positive int, or `progress` is not True, False or None.
        ImportError: `progress=True` and rich is not installed.
    """

    events = (
        BeforeRun,
        ScalarsLogged,
        TextLogged,
        BeforeVal,
        BeforeTest,
        AfterLoadCheckpoint,
        CheckpointSaved,
        CheckpointFailed,
        StopRequested,
        PreemptionRequested,
        CommandApplied,
        CommandRefused,
        RolledBack,
        HandlerFailed,
        EventsDropped,
        SlowHandler,
        LoaderStall,
        SlowRank,
        AfterRun,
    )

    def __init__(
        self, interval: int = 10, *, progress: bool | None = None, stream: TextIO | None = None
    ) -> None:
        positive("interval", interval)
        check_optional_bools(progress=progress)
        self.interval = interval
        self.progress = progress
        self.stream = stream
        self._notebook = stream is None and progress is not False and in_notebook()
        wanted = _moves_cursor(stream or sys.stdout) if progress is None else progress
        wanted = wanted and not self._notebook
        self._module = _import_progress(required=progress is True) if wanted else None
        self._bar: ProgressBar | NotebookBar | None = None
        self.nobody_reads = False
        """True once the reader of the pipe closed it, or without a stream; nothing is written then."""
        self._start_over()

    def open(self, run: Run) -> None:
        self._run = run
        out: TextIO | None = self.stream or sys.stdout  # None after `>&-`, or in a program without a console
        self.nobody_reads = out is None
        self._start_over()
        if out is None:
            return
        self._out = out
        if self._notebook:
            self._bar = NotebookBar(out)
        elif self._module is not None and (self.progress or _moves_cursor(self._out)):
            self._bar = self._module.ProgressBar(self._out)

    def write(self, event: Event) -> None:
        self._show(lambda: self._write(event))

    def _write(self, event: Event) -> None:
        match event:
            case ScalarsLogged(mode="train"):
                self._train(event)
            case BeforeRun():
                self._start_over()
            case HandlerFailed(logged=True):  # a line of the log has named it
                pass
            case BeforeVal() | BeforeTest():
                if self._bar is not None:
                    self._bar.show_activity(event.mode)
            case _:
                if self._bar is not None and isinstance(event, ScalarsLogged):
                    self._bar.show_activity("")  # the evaluation is over
                self._flush_held(ended=isinstance(event, AfterRun))
                if self._bar is None or not self._bar.running or not self._bar.shows(event):
                    self._write_line(self._line(event), lines=isinstance(event, TextLogged))

    def _line(self, event: Event) -> str:
        if isinstance(event, ScalarsLogged):
            # values that a handler puts after an evaluation fill none of its columns
            again = self._scored.get(event.mode) == event.step
            self._scored[event.mode] = event.step
            return score_line(event, Columns() if again else self._columns[event.mode])
        return notice(event)

    def flush(self) -> None:
        self._show(self._flush_out)

    def _flush_out(self) -> None:
        self._flush_held()
        self._out.flush()

    def close(self) -> None:
        self._show(self._end)

    def _end(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()
        self._flush_held()

    def _show(self, show: Callable[[], None]) -> None:
        """Call `show` unless the output is closed.

        A pipe that its reader closed, as in `python train.py | head`, is not an error.
        """
        if self.nobody_reads:
            return
        try:
            show()
        except BrokenPipeError:
            self.nobody_reads, self._bar = True, None
            if self._out is sys.stdout:
                drop_output()

    # --- training ------------------------------------------------------------------------------------------

    def _start_over(self) -> None:
        self._pace = Pace()
        self._columns: defaultdict[str, Columns] = defaultdict(Columns)  # by mode
        self._scored: dict[str, int] = {}  # the step of the last line of an evaluation, by mode
        self._scalars: dict[str, float] = {}
        # the step of the last training line; at first of a multiple of `interval` in the epoch
        self._printed: int | None = None
        self._held: ScalarsLogged | None = None  # the last training event without a line
        self._has_times = False  # whether the regular logs have the scalar `time`
        self._ended = False

    def _train(self, event: ScalarsLogged) -> None:
        scalars = {name: value for name, value in event.scalars.items() if not name.startswith(SCALARS)}
        if not scalars and event.scalars:
            return  # the shares of `CostsHook`, one for each handler, are for curves
        if "time" not in event.scalars and is_after_epoch(event, self._run):
            self._print_held()
            self._write_line(between_line(event, scalars, self._run))
            return
        self._scalars.update(scalars)
        self._pace.update(event.scalars.get("time", 0.0))
        regular = "time" in event.scalars
        if regular and not self._has_times:
            self._has_times, self._printed = True, None  # the lines so far had only values of handlers
        if self._printed is None:  # the first line comes at the epoch's next multiple of `interval`
            beyond = (iteration_shown(event, self._run) - 1) % self.interval
            self._printed = event.step - 1 - beyond
        if self._bar is not None and not self._ended:
            self._bar.show(event, self._scalars, self._pace)
        elif event.step - self._printed >= self.interval and (regular or not self._has_times):
            self._print(event)
        else:
            self._held = event

    def _print(self, event: ScalarsLogged) -> None:
        if self._has_times and "time" not in self._scalars:  # no column but the first would be filled
            self._write_line(between_line(event, self._scalars, self._run))
        else:
            self._write_line(train_line(event, self._scalars, self._run, self._pace, self._columns["train"]))
        if not self._has_times or "time" in self._scalars:  # else the next regular line would be late
            self._printed = event.step
        self._scalars = {}
        self._held = None

    def _flush_held(self, *, ended: bool = False) -> None:
        """Print the training line that is held back, if there is one, and draw the progress bar again.

        Args:
            ended: whether the run has ended: the bar is stopped then.
        """
        self._print_held()
        if self._bar is not None and ended:
            self._bar.stop()
        elif self._bar is not None:
            self._bar.draw()
        self._ended = self._ended or ended

    def _print_held(self) -> None:
        if self._held is not None:
            self._print(self._held)

    def _write_line(self, text: str, *, lines: bool = False) -> None:
        """Print `text` without control characters; with `lines` it keeps its line breaks."""
        line = printable(text) if lines else on_a_line(text)
        encoding = getattr(self._out, "encoding", None)
        if encoding:  # a character that the output cannot encode must not disable the writer
            line = line.encode(encoding, "backslashreplace").decode(encoding)
        if self._bar is not None and self._bar.running:
            self._bar.print_line(line)
        else:
            self._out.write(line + "\n")
            self._out.flush()


def _moves_cursor(stream: TextIO | None) -> bool:
    return is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "unknown")


def _import_progress(*, required: bool) -> ModuleType | None:
    try:
        import eventloop.writers.progress as progress
    except ImportError as error:
        if required:
            raise ImportError(
                "ConsoleWriter(progress=True) needs rich: pip install 'torch-eventloop[demo]'"
            ) from error
        return None
    return progress
