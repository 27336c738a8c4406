"""Show a run on the console: as a progress bar on a terminal or in a notebook, as plain lines elsewhere.

The trainer has a `ConsoleWriter` by default if it runs on a terminal or in a notebook. The module `lines`
formats the lines; `progress` and `notebook` draw the bars.
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

    In a notebook it shows a bar, which is updated in place, and a table with a row for each validation.

    A value that is logged repeatedly stays in the same column from line to line.

    Speed and remaining time are computed from a moving average of the scalar `time`, the seconds per
    iteration. If that scalar is not logged, neither is shown. Programs should read `JSONLWriter`'s file
    instead of this output. The run continues when the reader of a pipe closes it, and without a standard
    output.

    Args:
        interval: minimum number of iterations between two training lines. The first line is printed at the
            first logged step that reaches a multiple of `interval`, counted from the start of the epoch.
            Values that are logged between two lines appear in the second of them. The progress bar is updated
            at every logged step, at most ten times a second.
        progress: True for the bar, False for lines. None means the bar in a notebook, and on a terminal if
            rich is installed.
        stream: the text stream to write to; by default the `sys.stdout` at the beginning of the run.

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
        use_terminal_bar = _moves_cursor(stream or sys.stdout) if progress is None else progress
        self._progress_module: ModuleType | None = None
        if use_terminal_bar and not self._notebook:
            self._progress_module = _import_progress(required=progress is True)
        self._bar: ProgressBar | NotebookBar | None = None
        self.nobody_reads = False
        """Whether nothing is written, because there is no output or the reader of the pipe has closed it."""
        self._reset()

    def open(self, run: Run) -> None:
        """Choose the output stream and the bar; without a stream nothing is written."""
        self._run = run
        out: TextIO | None = self.stream or sys.stdout  # None after `>&-`, or in a program without a console
        self.nobody_reads = out is None
        self._reset()
        if out is None:
            return
        self._out = out
        if self._notebook:
            self._bar = NotebookBar(out)
        elif self._progress_module is not None and (self.progress or _moves_cursor(out)):
            self._bar = self._progress_module.ProgressBar(out)

    def write(self, event: Event) -> None:
        self._unless_closed(lambda: self._write(event))

    def _write(self, event: Event) -> None:
        """Show one event in the bar, in the notebook's table or as a line."""
        match event:
            case ScalarsLogged(mode="train"):
                self._show_training(event)
            case BeforeRun():
                self._reset()
            case HandlerFailed(logged=True):  # the Python log, which the console shows too, has a line on it
                pass
            case BeforeVal() | BeforeTest():
                if self._bar is not None:
                    self._bar.show_activity(event.mode)
            case _:
                self._show_other(event)

    def _show_other(self, event: Event) -> None:
        """Show an event in the notebook's table or bar, or else print its line."""
        if self._bar is not None and isinstance(event, ScalarsLogged):
            self._bar.show_activity("")  # these are the scores of a validation or test, which has ended
        self._flush_training(ended=isinstance(event, AfterRun))
        shown_by_bar = self._bar is not None and self._bar.running and self._bar.shows(event)
        if not shown_by_bar:
            self._write_line(self._line(event), multiline=isinstance(event, TextLogged))

    def _line(self, event: Event) -> str:
        """Return the text of an event that is not a training log."""
        if not isinstance(event, ScalarsLogged):
            return notice(event)
        # only the first scalars of an evaluation are its scores, which are aligned with earlier scores
        is_first = self._score_steps.get(event.mode) != event.step
        self._score_steps[event.mode] = event.step
        return score_line(event, self._columns[event.mode] if is_first else Columns())

    def flush(self) -> None:
        self._unless_closed(self._flush_output)

    def _flush_output(self) -> None:
        self._flush_training()
        self._out.flush()

    def close(self) -> None:
        self._unless_closed(self._stop)

    def _stop(self) -> None:
        """Remove the bar, and print the training values that no line has yet."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()
        self._flush_training()

    def _unless_closed(self, show: Callable[[], None]) -> None:
        """Call `show`, which writes to the output, unless the output is closed.

        A pipe that its reader has closed, as in `python train.py | head`, is not an error.
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

    def _reset(self) -> None:
        """Set the state to that at the beginning of a run."""
        self._pace = Pace()
        self._columns: defaultdict[str, Columns] = defaultdict(Columns)  # by mode
        self._score_steps: dict[str, int] = {}  # by mode, the step of the last validation's or test's line
        self._scalars: dict[str, float] = {}  # the training scalars for the next line, or for the bar
        self._line_step: int | None = None  # the step of the last training line, from which `interval` counts
        self._unprinted: ScalarsLogged | None = None  # the last training event, if no line was printed since
        self._has_times = False  # whether an event with the scalar `time` was logged
        self._ended = False  # whether the run has ended; training values that come later are printed as lines

    def _show_training(self, event: ScalarsLogged) -> None:
        """Update the bar with a training event, or print a line if `interval` steps have passed."""
        scalars = {name: value for name, value in event.scalars.items() if not name.startswith(SCALARS)}
        if not scalars and event.scalars:
            return  # an event with the time shares of `CostsHook` alone, which are too many for a line
        has_time = "time" in event.scalars  # true for the events of `LoggerHook`, false for those of handlers
        if not has_time and is_after_epoch(event, self._run):
            self._print_unprinted()
            self._write_line(between_line(event, scalars, self._run))
            return
        self._scalars.update(scalars)
        self._pace.update(event.scalars.get("time", 0.0))
        if has_time and not self._has_times:
            self._has_times, self._line_step = True, None  # the lines so far had only values of handlers
        if self._line_step is None:
            self._line_step = self._multiple_before(event)
        is_due = event.step - self._line_step >= self.interval and (has_time or not self._has_times)
        if self._bar is not None and not self._ended:
            self._bar.show(event, self._scalars, self._pace)
        elif is_due:
            self._print_training(event)
        else:
            self._unprinted = event

    def _multiple_before(self, event: ScalarsLogged) -> int:
        """Return the last step before the event's step that is a multiple of `interval` in the epoch."""
        return event.step - 1 - (iteration_shown(event, self._run) - 1) % self.interval

    def _print_training(self, event: ScalarsLogged) -> None:
        """Print the line with all training scalars since the last line, at the event's step."""
        if self._has_times and "time" not in self._scalars:
            # values of handlers alone, which would leave most columns empty and delay the next regular line
            self._write_line(between_line(event, self._scalars, self._run))
        else:
            self._write_line(train_line(event, self._scalars, self._run, self._pace, self._columns["train"]))
            self._line_step = event.step
        self._scalars = {}
        self._unprinted = None

    def _flush_training(self, *, ended: bool = False) -> None:
        """Print the training values that no line has yet, and draw the progress bar again.

        Args:
            ended: whether the run has ended, so that the bar is stopped.
        """
        self._print_unprinted()
        if self._bar is not None and ended:
            self._bar.stop()
        elif self._bar is not None:
            self._bar.draw()
        self._ended = self._ended or ended

    def _print_unprinted(self) -> None:
        """Print a line for the training events since the last line, if there are any."""
        if self._unprinted is not None:
            self._print_training(self._unprinted)

    def _write_line(self, text: str, *, multiline: bool = False) -> None:
        """Print `text` without control characters, and above a running bar; `multiline` keeps line breaks."""
        line = printable(text) if multiline else on_a_line(text)
        encoding = getattr(self._out, "encoding", None)
        if encoding:  # a character that the output cannot encode must not disable the writer
            line = line.encode(encoding, "backslashreplace").decode(encoding)
        if self._bar is not None and self._bar.running:
            self._bar.print_line(line)
        else:
            self._out.write(line + "\n")
            self._out.flush()


def _moves_cursor(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that can redraw a line."""
    return is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "unknown")


def _import_progress(*, required: bool) -> ModuleType | None:
    """Import `eventloop.writers.progress`; without rich return None, or raise ImportError if `required`."""
    try:
        import eventloop.writers.progress as progress
    except ImportError as error:
        if required:
            raise ImportError(
                "ConsoleWriter(progress=True) needs rich: pip install 'torch-eventloop[demo]'"
            ) from error
        return None
    return progress
