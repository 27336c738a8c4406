"""One row per mode and step: the format for pandas and spreadsheets."""

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
    """Writes scalars to `<work_dir>/<filename>`:

        mode,step,iter,epoch,loss,lr,accuracy
        train,40,39,0,0.1234,0.001,
        val,40,40,1,0.25,,0.93

        Trainer(..., writers=[CSVWriter()], work_dir="runs/digits")

        frame = pandas.read_csv("runs/digits/metrics.csv")
        frame[frame["mode"] == "val"].plot("step", "accuracy")

    An empty cell is a metric that was not logged at this step; a NaN is `nan`, the infinities `inf` and `-inf`. A
    new metric is a new column, empty in the rows before. A metric named like one of the first four columns is in
    `scalars/<name>`, as in `JSONLWriter`'s lines. The columns stay the same when a run is resumed, and its rows go on:
    those of steps after the checkpoint are removed when training begins, because it will do them again. A training
    that begins at 0 beside another run's file keeps that one as `metrics.1.csv`.

    Names stay what they are, also one that begins with "=", "+", "-" or "@", which a spreadsheet takes for a formula: a
    "'" in front would be another name to every other program. Import the file of a run that you do not trust as text.

    Rows are written as they come, and survive a kill of the process. While a run goes on a value that comes late may
    be in a second row of its mode and step; after `flush`, which is at the end of the run, there is one. Of a metric
    that was logged twice for a step the later value stays; `JSONLWriter` keeps both.

    Args:
        filename: relative to the run's work_dir, or absolute.
        name: what reports call the writer; needed for a second one.

    Raises:
        TypeError: `filename` is no path.
    """

    events = (ScalarsLogged, BeforeTrain)
    batch = 64

    def __init__(self, filename: str | PathLike[str] = "metrics.csv", *, name: str | None = None) -> None:
        check_path("filename", filename)
        self.filename = filename
        self.name = name
        self._table: Table | None = None
        self._start = 0  # where training goes on, until the table is told

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
    """Training begins after so many iterations: what is there of later ones is no part of this run."""
    if max(table.last.values(), default=0) <= completed:
        return
    if completed > 0:
        table.forget_after(completed)
    else:
        logger.info("%s is an earlier run's and is kept as %s", table.path, table.set_aside().name)
