"""TensorBoard event files: scalars as curves, texts and run info as markdown."""

from __future__ import annotations

import os
import socket
import time
from io import FileIO
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eventloop.events import Event, RunInfo, ScalarsLogged, TextLogged
from eventloop.run import Run
from eventloop.writers.appending import write_all
from eventloop.writers.writer import Writer


class TensorBoardWriter(Writer):
    """Writes `{mode}/{name}` at step `event.step`, in files that TensorBoard reads while the run goes on.

    Ten scalars of one event take 30 us of the interpreter. `SummaryWriter.add_scalar` takes 500 us for them, and
    `EventFileWriter` with one record for all ten takes 90 us: the rest is a checksum in pure Python, a second queue
    and a second thread. So this writes the records itself, one an event, on the thread that it has already.

    A resumed run tells TensorBoard to forget the steps that will be run again, so that no curve doubles.

    Args:
        log_dir: where the files go; `<work_dir>/tensorboard` by default.
        name: what reports call the writer; needed for a second one.

    Raises:
        ImportError: tensorboard is not installed.
    """

    events = (ScalarsLogged, TextLogged, RunInfo)

    def __init__(self, log_dir: str | PathLike[str] | None = None, *, name: str | None = None) -> None:
        self.log_dir = log_dir
        self.name = name
        self._lib = _import_library()
        self._file: FileIO | None = None

    def open(self, run: Run) -> None:
        folder = Path(run.work_dir, "tensorboard") if self.log_dir is None else Path(self.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(folder / _file_name(), "xb")
        self._record(self._lib.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if (
            run.start_iter > 0
        ):  # whatever an interrupted run wrote from this step on is about to be written again
            session = self._lib.SessionLog(status=self._lib.SessionLog.START)
            self._record(self._lib.Event(wall_time=time.time(), step=run.start_iter + 1, session_log=session))

    def write(self, event: Event) -> None:
        match event:
            case ScalarsLogged():
                record = self._lib.Event(wall_time=time.time(), step=event.step)
                add = record.summary.value.add
                for name, value in event.scalars.items():
                    add(tag=f"{event.mode}/{name}", simple_value=value)
                self._record(record)
            case TextLogged():
                self._text(f"{event.mode}/{event.name}", event.text, event.step)
            case RunInfo():
                self._text("run_info", _table(event.info), event.step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _text(self, tag: str, text: str, step: int) -> None:
        record = self._lib.Event(wall_time=time.time(), step=step)
        value = record.summary.value.add(tag=tag)
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = self._lib.DT_STRING
        value.tensor.tensor_shape.dim.add(size=1)
        value.tensor.string_val.append(text.encode())
        self._record(record)

    def _record(self, event: Any) -> None:
        assert self._file is not None
        write_all(self._file, self._lib.frame(event.SerializeToString()))


def _import_library() -> SimpleNamespace:
    try:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.types_pb2 import DT_STRING
    except ImportError as error:
        raise ImportError(
            "TensorBoardWriter needs tensorboard: pip install 'torch-eventloop[demo]'"
        ) from error
    from eventloop.writers.tfrecord import frame  # imports numpy

    return SimpleNamespace(Event=Record, SessionLog=SessionLog, DT_STRING=DT_STRING, frame=frame)


def _file_name() -> str:
    """TensorBoard reads a folder's files in the order of their names: a later one must sort after an earlier one."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"


def _table(info: dict[str, str]) -> str:
    rows = [f"|{_cell(key)}|{_cell(value)}|" for key, value in info.items()]
    return "\n".join(["|key|value|", "|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
