"""Write metrics, images, histograms, texts, settings and the model's graph for TensorBoard.

The module `tensorboard_records` encodes them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from eventloop.events import (
    AfterRun,
    BeforeTrain,
    Event,
    HistogramLogged,
    ImageLogged,
    RunInfo,
    ScalarsLogged,
    TextLogged,
)
from eventloop.events.base import event_name
from eventloop.events.deferred import Timed
from eventloop.events.encoding_errors import BadEvent, Unencodable
from eventloop.events.outcome import ENDING, RunOutcome
from eventloop.events.run import Run
from eventloop.util.append_file import write_all
from eventloop.util.checks import check_choice, check_path, positive_or
from eventloop.util.text import error_text
from eventloop.writers.checks import OFFLOADS
from eventloop.writers.writer import TimedWriter

TOGETHER = 32
"""The most events written with one system call; with scalars, 32 events take about 0.2 ms."""


class TensorBoardWriter(TimedWriter):
    """Write metrics, images, histograms and texts to files that TensorBoard reads during the run.

        TensorBoardWriter(hparams={"lr": 0.1, "layers": 18, "optimizer": "SGD"}, metrics=["val/accuracy"])

    The tag is `{mode}/{name}`, the step is `event.step`. The writer encodes one record per event itself, so
    an event of ten scalars holds the interpreter lock for 8 us. Ten calls of `SummaryWriter.add_scalar` hold
    it for 500 us or more. `EventFileWriter` with one record for all ten scalars holds it for 90 us, because
    it computes the checksum in Python and has a queue and thread of its own.

    The writer runs on a thread. Encoding an image of 512 x 512 there delays the training steps by only 2 ms
    (`benchmarks.slow_writers`), because the compression releases the interpreter lock. With
    `offload="process"` a worker process writes all events.

    An image or histogram that cannot be encoded counts as failed, and the other events are written.

    When training resumes from a checkpoint, the writer makes TensorBoard discard the steps that are run
    again, so that no curve has them twice. If a histogram has values that are not finite, their number is
    logged as the scalar `{tag}/nonfinite`.

    Args:
        log_dir: the folder of the files; by default `<work_dir>/tensorboard`.
        name: the writer's name in reports; needed if a bus has two writers of this class.
        hparams: the run's settings, compared with those of other runs in the HParams tab.
        metrics: tags of the curves whose last values the HParams tab compares, such as "val/accuracy".
        graph: the model's graph, from `trace_graph(model, inputs)`.
        bins: the number of histogram bins, of equal width between the least and the greatest value. Or
            "tensorflow" for the default bins of `SummaryWriter`: the same in all histograms, each 10 % wider
            than its neighbour nearer to 0.
        offload: "thread", the default, "process", or "auto" (a process if possible).

    Raises:
        ImportError: tensorboard or google-crc32c is not installed.
        TypeError, ValueError: a hyperparameter is not a bool, int, float or str, or another argument is
            wrong.
    """

    events = (ScalarsLogged, ImageLogged, HistogramLogged, TextLogged, RunInfo, BeforeTrain, *ENDING)
    batch = TOGETHER

    def __init__(
        self,
        log_dir: str | PathLike[str] | None = None,
        *,
        name: str | None = None,
        hparams: Mapping[str, bool | int | float | str] | None = None,
        metrics: Sequence[str] = (),
        graph: bytes | None = None,
        bins: int | str = "tensorflow",
        offload: str | None = None,
    ) -> None:
        if offload is not None:
            check_choice("offload", offload, OFFLOADS)
            self.offload = offload
        if log_dir is not None:
            check_path("log_dir", log_dir)
        self.log_dir = None if log_dir is None else os.path.abspath(log_dir)
        self.name = name
        self.hparams = _check_hparams(hparams)
        self.metrics = _check_metrics(metrics, hparams)
        self.graph = _check_graph(graph)
        positive_or("tensorflow", "bins", bins)
        self.bins = bins
        self._lib = _import_library()
        self._scalars = self._lib.Scalars()
        self._file: FileIO | None = None
        self._resumed_at = 0  # the iteration from which the run resumes; 0 once `_restart` has used it
        self._outcome = RunOutcome()
        self._end_is_written = False  # also True if it is not needed, because the run has no `hparams`

    def open(self, run: Run) -> None:
        """Create a file, and write the records of its format, the settings and the graph."""
        folder = Path(self.log_dir or Path(run.work_dir, "tensorboard"))
        folder.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(folder / _file_name(), "xb")
        self._resumed_at = run.start_iter
        self._end_is_written = not self.hparams
        records = [self._lib.begin()]
        if self.hparams:
            records += self._lib.hparams(self.hparams, self.metrics)
        if self.graph is not None:
            records.append(self._lib.graph(self.graph))
        self._write([self._lib.frame(record.SerializeToString()) for record in records])

    def write_timed(self, events: list[Timed]) -> None:
        """Write the events with one system call; raise `Unencodable` if some cannot be encoded."""
        frames: list[bytes] = []
        bad_events: list[BadEvent] = []
        for timestamp, event in events:
            try:
                for record in self._records(event, timestamp):
                    record.wall_time = timestamp
                    frames.append(self._lib.frame(record.SerializeToString()))
            except (TypeError, ValueError) as error:
                bad_events.append(BadEvent(event_name(type(event)), "", error_text(error)))
        self._write(frames)
        if bad_events:
            raise Unencodable(bad_events, of=len(events))

    def _records(self, event: Event, timestamp: float) -> Iterator[Any]:
        """Yield the records of an event; encode each before taking the next, which may reuse the object."""
        lib = self._lib
        self._outcome.receive(event)
        # a restarted worker process gets no `before_train`
        if 0 < self._resumed_at < getattr(event, "step", 0):
            yield from self._restart()
        match event:
            case ScalarsLogged():
                yield self._scalars.record(event)
            case BeforeTrain():
                self._resumed_at = event.iter
                yield from self._restart()
            case ImageLogged():
                yield lib.image(event)
            case HistogramLogged():
                yield lib.histogram(event, self.bins)
            case TextLogged():
                yield lib.text(event)
            case RunInfo():
                yield lib.run_info(event)
            case AfterRun() if not self._end_is_written:
                self._end_is_written = True
                yield lib.session_end(self._outcome.status, timestamp)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- writing -------------------------------------------------------------------------------------------

    def _restart(self) -> Iterator[Any]:
        """Yield, once per run, the record that makes readers discard the steps after the checkpoint."""
        if self._resumed_at > 0:
            step, self._resumed_at = self._resumed_at, 0
            yield self._lib.restart(step + 1)

    def _write(self, frames: list[bytes]) -> None:
        assert self._file is not None
        write_all(self._file, b"".join(frames))


def _import_library() -> ModuleType:
    """Import tensorboard and google-crc32c, and return the module `tensorboard_records`."""
    try:
        import tensorboard.compat.proto.event_pb2  # noqa: F401

        import eventloop.writers.tensorboard_records as tensorboard_records  # imports numpy too
    except ImportError as error:
        raise ImportError(
            "TensorBoardWriter needs tensorboard and google-crc32c: pip install 'torch-eventloop[demo]'"
        ) from error
    return tensorboard_records


def _file_name() -> str:
    """Return a file name that sorts after earlier ones, because TensorBoard reads files sorted by name."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"


def _check_hparams(hparams: Any) -> dict[str, bool | int | float | str]:
    """Return `hparams`, a mapping or None, as a dict; raise TypeError if TensorBoard cannot store it."""
    if not isinstance(hparams, Mapping | None):
        raise TypeError(f"hparams must be a mapping of names to values, got {hparams!r}")
    for key, value in (hparams or {}).items():
        if not isinstance(key, str) or type(value) not in (bool, int, float, str):
            raise TypeError(
                "hparams must map names to bool, int, float or str, the types that TensorBoard compares, got "
                f"{key!r}: {value!r}"
            )
    return dict(hparams or {})


def _check_metrics(metrics: Any, hparams: object) -> list[str]:
    """Return `metrics` as a list; raise an error if they are no texts, or given without `hparams`."""
    is_list = isinstance(metrics, Sequence) and not isinstance(metrics, str)
    if not is_list or not all(isinstance(tag, str) for tag in metrics):
        raise TypeError(f"metrics must be a list of tags such as ['val/accuracy'], got {metrics!r}")
    if metrics and not hparams:
        raise ValueError(
            f"metrics needs hparams, got metrics={metrics!r} and no hparams: pass hparams= too, or no metrics"
        )
    return list(metrics)


def _check_graph(graph: Any) -> bytes | None:
    """Return the graph, or raise a TypeError if it is neither bytes nor None."""
    if not isinstance(graph, bytes | None):
        raise TypeError(
            f"graph must be the bytes that trace_graph(model, inputs) returns, got {type(graph).__name__}"
        )
    return graph
