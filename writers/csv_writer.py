"""Write scalars to a CSV file with one row per mode and step, for pandas and spreadsheets.

`eventloop.writers.csv_table` keeps the file complete through kills and crashes.
"""

from __future__ import annotations

import logging
from os import PathLike
from pathlib import Path

from eventloop.eventlog.jsonl import key_of
from eventloop.events import BeforeTrain, Event, ScalarsLogged
from eventloop.events.run import Run
from eventloop.util.checks import check_path
from eventloop.writers.csv_table import Key, Table
from eventloop.writers.writer import Writer

logger = logging.getLogger("eventloop")


class CSVWriter(Writer):
    """Write scalars to the CSV file `<work_dir>/<filename>`.

        mode,step,iter,epoch,loss,lr,accuracy
        train,40,39,0,0.1234,0.001,
        val,40,40,1,0.25,,0.93

        Trainer(..., writers=[CSVWriter()], work_dir="runs/digits")

        frame = pandas.read_csv("runs/digits/metrics.csv")
        frame[frame["mode"] == "val"].plot("step", "accuracy")

    A metric that was not logged at a step has an empty cell. NaN is written as `nan`, the infinities as `inf`
    and `-inf`. A new metric adds a column, which is empty in earlier rows. A metric named like one of the
    first four columns is written as `scalars/<name>`, as in `JSONLWriter`'s lines.

    A resumed run keeps the columns and appends rows. When its training begins, the rows of steps after the
    checkpoint are removed, because these steps are run again. If the file has rows when a training starts at
    iteration 0, it belongs to an earlier run and is renamed to `metrics.1.csv`, or the next free number.

    Metric names are written unchanged. A spreadsheet takes a name that begins with "=", "+", "-" or "@" for a
    formula, so import the file of a run that you do not trust as text.

    Rows are written as they arrive, and survive a kill of the process. During the run, values of one mode and
    step that arrive separately may be in two rows; `flush`, which the end of the run calls, merges the rows.
    If a metric is logged twice at one step, the later value is kept; `JSONLWriter` keeps both.

    Args:
        filename: the file's path, relative to the run's work_dir or absolute.
        name: the writer's name in reports; needed if a bus has two writers of this class.

    Raises:
        TypeError: `filename` is not a path.
    """

    events = (ScalarsLogged, BeforeTrain)
    batch = 64

    def __init__(self, filename: str | PathLike[str] = "metrics.csv", *, name: str | None = None) -> None:
        check_path("filename", filename)
        self.filename = filename
        self.name = name
        self._table: Table | None = None
        # the iteration from which the run resumes; 0 once the rows of later steps are removed
        self._resumed_at = 0

    def open(self, run: Run) -> None:
        self._resumed_at = run.start_iter
        self._table = Table(Path(run.work_dir, self.filename))

    def write(self, event: Event) -> None:
        self.write_batch([event])

    def write_batch(self, events: list[Event]) -> None:
        """Append a row for each mode and step; at the begin of a training, remove the rows of later steps."""
        assert self._table is not None
        rows: dict[Key, dict[str, str]] = {}
        for event in events:
            if isinstance(event, BeforeTrain):
                self._table.add(rows)
                rows, self._resumed_at = {}, 0
                _remove_repeated(self._table, event.iter)
            elif isinstance(event, ScalarsLogged):
                if event.mode == "train" and self._resumed_at:  # a restarted worker gets no `BeforeTrain`
                    _remove_repeated(self._table, self._resumed_at)
                    self._resumed_at = 0
                row = rows.setdefault((event.mode, event.step), {})
                row |= {"iter": str(event.iter), "epoch": str(event.epoch)}
                row |= {key_of(name): repr(float(value)) for name, value in event.scalars.items()}
        self._table.add(rows)

    def flush(self) -> None:
        if self._table is not None:
            self._table.merge()

    def close(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            table.close()


def _remove_repeated(table: Table, start: int) -> None:
    """Remove the rows after step `start`, at which a training begins; for step 0 rename the file instead."""
    if max(table.last.values(), default=0) <= start:
        return
    if start > 0:
        table.remove_after(start)
    else:
        logger.info("%s belongs to an earlier run and is kept as %s", table.path, table.set_aside().name)
