"""Write scalars to a CSV file with one row per mode and step, for pandas and spreadsheets.

`csv_table` owns the file and its crash safety.
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

    An empty cell is a metric that was not logged at this step. NaN is `nan`, the infinities are `inf` and
    `-inf`. A new metric adds a column, which is empty in earlier rows. A metric named like one of the first
    four columns is written as `scalars/<name>`, as in `JSONLWriter`'s lines.

    A resumed run keeps the columns and appends rows. When its training begins, the rows of steps after the
    checkpoint are removed, because these steps are run again. If the file already exists when training starts
    at iteration 0, it belongs to an earlier run and is renamed to `metrics.1.csv`.

    Metric names are written unchanged, also those that begin with "=", "+", "-" or "@", which a spreadsheet
    takes for a formula: a leading "'" would change the name for every other program. Import the file of a run
    that you do not trust as text.

    Rows are written as they arrive, and survive a kill of the process. During the run a late value may be in
    a second row of its mode and step; `flush`, which is called at the end of the run, merges the two. If a
    metric is logged twice at one step, the later value is kept; `JSONLWriter` keeps both.

    Args:
        filename: relative to the run's work_dir, or absolute.
        name: the writer's name in reports; needed if there are two of this class.

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
        self._start = 0  # the iteration at which training resumes, until later rows are removed

    def open(self, run: Run) -> None:
        self._start = run.start_iter
        self._table = Table(Path(run.work_dir, self.filename))

    def write(self, event: Event) -> None:
        self.write_batch([event])

    def write_batch(self, events: list[Event]) -> None:
        assert self._table is not None
        rows: dict[Key, dict[str, str]] = {}
        for event in events:
            if isinstance(event, BeforeTrain):
                self._table.add(rows)
                rows, self._start = {}, 0
                _begin(self._table, event.iter)
            elif isinstance(event, ScalarsLogged):
                if event.mode == "train" and self._start:
                    _begin(self._table, self._start)
                    self._start = 0
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


def _begin(table: Table, completed: int) -> None:
    """Remove rows of steps after `completed` iterations; at 0, rename the file of an earlier run."""
    if max(table.last.values(), default=0) <= completed:
        return
    if completed > 0:
        table.remove_after(completed)
    else:
        logger.info("%s belongs to an earlier run and is kept as %s", table.path, table.set_aside().name)
