"""The TensorBoard writer: metrics, images, histograms, texts, settings and the model's graph.

`tensorboard_records` makes the records, `handover` moves the writer from its thread to a worker process.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
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
from eventloop.events.run import Run
from eventloop.util.append_file import write_all
from eventloop.util.checks import check_path
from eventloop.writers.checks import check_offload
from eventloop.writers.handover import Handover
from eventloop.writers.writer import Writer


class Progress(msgspec.Struct):
    """The kinds of records that the writer's thread wrote before the process continued."""

    opened: bool = False
    """True if the thread got any event: the hyperparameters and the graph are in its file."""
    restarted: bool = False
    """True if training began: the record that discards repeated steps is in its file."""
    ended: bool = False
    """True if the run ended: the HParams tab reads only one end."""

    def note(self, event: Event) -> None:
        """Take into account one more event for the thread."""
        self.opened = True
        training = isinstance(event, ScalarsLogged) and event.mode == "train"
        self.restarted = self.restarted or training or isinstance(event, BeforeTrain)
        self.ended = self.ended or isinstance(event, AfterRun)


class Continued(Run, frozen=True):
    """The facts of a run, with those that the process needs from the writer's thread."""

    folder: str = ""
    opened: bool = False
    ended: bool = False


TOGETHER = 32
"""The most events that the thread writes with one system call: they take some 0.2 ms."""


class TensorBoardWriter(Writer):
    """Write metrics, images, histograms and texts to files that TensorBoard reads during the run.

        TensorBoardWriter(hparams={"lr": 0.1, "layers": 18, "optimizer": "SGD"}, metrics=["val/accuracy"])

    The tag is `{mode}/{name}`, the step is `event.step`. An event of ten scalars takes 8 us of the
    interpreter, because the writer encodes one record per event itself. (`SummaryWriter.add_scalar` takes 500
    us or more for ten scalars; `EventFileWriter`, with one record for all ten, takes 90 us for its checksum
    in Python, a second queue and thread.)

    With `offload="auto"` the writer begins on a thread and continues in a worker process, with a file of its
    own, from the first image or histogram on. The reason is that encoding an image of 512 x 512 on a thread
    delays the training steps (measured by `benchmarks.slow_writers`); scalars alone are cheaper on the
    thread. A run without images and histograms starts no process. Later scalars go to the process too,
    because TensorBoard stops reading a file when a later one exists. The process is a second subscription,
    named "..., in a process". A writer that a process cannot import, such as a class of the main script,
    stays on its thread.

    When training resumes from a checkpoint, a record makes TensorBoard discard the steps that are run again,
    so that no curve has them twice. The number of a histogram's values that are not finite is a curve
    `{tag}/nonfinite`.

    Args:
        log_dir: the folder of the files; `<work_dir>/tensorboard` by default.
        name: the writer's name in reports; needed if there are two of this class.
        hparams: the run's settings, compared with those of other runs in the HParams tab.
        metrics: tags of the curves to compare there, such as "val/accuracy".
        graph: the model's graph, from `trace_graph(model, inputs)`.
        bins: number of equal histogram bins between the least and the greatest value, or "tensorflow", the
            default of `SummaryWriter`: bins that grow by 10 % with their distance from 0, the same in all
            histograms.
        offload: "thread" or "process" for all events; "auto", the default, is described above.

    Raises:
        ImportError: tensorboard or google-crc32c is not installed.
        TypeError, ValueError: a hyperparameter is not a bool, int, float or str, or another argument is
            wrong.
    """

    events = (ScalarsLogged, ImageLogged, HistogramLogged, TextLogged, RunInfo, BeforeTrain, AfterRun)
    offload = "auto"

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
            self.offload = check_offload(offload)
        if log_dir is not None:
            check_path("log_dir", log_dir)
        self.log_dir = None if log_dir is None else os.path.abspath(log_dir)
        self.name = name
        self.hparams = _check_hparams(hparams)
        self.metrics = _check_metrics(metrics, hparams)
        self.graph = _check_graph(graph)
        self.bins = _check_bins(bins)
        self._lib = _import_library()
        self._scalars = self._lib.Scalars()
        self._file: FileIO | None = None
        self._start = 0  # the iteration at which training resumes, until the restart record is written
        self._ended = False  # whether the end of the run is written: the HParams tab reads only one
        self._begun = Progress()
        self._handover: Handover | None = None  # set on the writer that continues in a process

    def attach(self, bus: Bus, run: Callable[[], Run]) -> Subscription:
        """Subscribe to `bus`, with "auto" on a thread until the first image; see `Writer.attach`."""
        if self.offload != "auto" or self.overflow == "block" or not self._can_be_sent():
            return super().attach(bus, run)
        self._refuse_another(bus)
        self._get_run = run
        handover = Handover(bus, self)
        # scalars and texts are small; an image comes here only if no process could be started
        together = TOGETHER if type(self).write is TensorBoardWriter.write else False
        thread = self._subscribe(bus, "thread", when=handover.before_media, batch=together)
        handover.begin(thread)
        return thread

    def open(self, run: Run) -> None:
        continued = run if isinstance(run, Continued) else Continued(run.work_dir, folder=self._folder(run))
        folder = Path(continued.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(folder / _file_name(), "xb")
        self._start = run.start_iter
        self._ended = not self.hparams or continued.ended
        records = [self._lib.begin()]
        if not continued.opened:
            records += self._begin()
        self._write([self._lib.frame(record.SerializeToString()) for record in records])

    def _folder(self, run: Run) -> str:
        return self.log_dir or os.path.abspath(Path(run.work_dir, "tensorboard"))

    def _begin(self) -> list[Any]:
        records = list(self._lib.hparams(self.hparams, self.metrics)) if self.hparams else []
        if self.graph is not None:
            records.append(self._lib.graph(self.graph))
        return records

    def write(self, event: Event) -> None:
        self.write_batch([event])

    def write_batch(self, events: list[Event]) -> None:
        self._write(
            [
                self._lib.frame(record.SerializeToString())
                for event in events
                for record in self._records(event)
            ]
        )

    def _records(self, event: Event) -> Iterator[Any]:
        """Yield the records of an event; encode each before taking the next, as its object is used again."""
        lib = self._lib
        match event:
            case ScalarsLogged():
                if event.mode == "train":
                    yield from self._restart()
                yield self._scalars.record(event)
            case BeforeTrain():
                self._start = event.iter
                yield from self._restart()
            case ImageLogged():
                yield lib.image(event)
            case HistogramLogged():
                yield lib.histogram(event, self.bins)
            case TextLogged():
                yield lib.text(event)
            case RunInfo():
                yield lib.run_info(event)
            case AfterRun() if not self._ended:
                self._ended = True
                yield lib.session_end(event)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- from the thread to a process ----------------------------------------------------------------------

    def stays(self, event: Event) -> bool:
        """Return whether `event` is neither an image nor a histogram, and note it if so."""
        if isinstance(event, ImageLogged | HistogramLogged):
            return False
        self._begun.note(event)
        return True

    def go_on_in_process(self, bus: Bus, handover: Handover) -> Subscription:
        """Subscribe a writer with the same arguments and settings, in a worker process."""
        assert self._made_with is not None
        writer: TensorBoardWriter = self._made_with()
        writer._get_run, writer._handover, writer._begun = self._get_run, handover, self._begun
        writer.log_dir, writer.budget_us = self.log_dir, self.budget_us
        writer.stall_timeout, writer.on_error = self.stall_timeout, self.on_error
        return writer._subscribe(bus, "process", name=f"{self._called}, in a process", when=handover.wanted)

    def worker_facts(self) -> Run:
        """Return the run and what the thread wrote of it; waits until the thread has written its queue."""
        run = super().worker_facts()
        if self._handover is None:
            return run
        self._handover.wait_for_thread()
        facts = msgspec.structs.asdict(run) | {"folder": self._folder(run), "opened": self._begun.opened}
        start = 0 if self._begun.restarted else run.start_iter
        return Continued(**facts | {"start_iter": start, "ended": self._begun.ended})

    # --- writing -------------------------------------------------------------------------------------------

    def _restart(self) -> Iterator[Any]:
        """Yield the record that discards the steps after the checkpoint, once, if training resumed from one.

        A run that only evaluates a checkpoint repeats no steps, and yields nothing.
        """
        if self._start > 0:
            start, self._start = self._start, 0
            yield self._lib.restart(start + 1)

    def _write(self, frames: list[bytes]) -> None:
        assert self._file is not None
        write_all(self._file, b"".join(frames))


def _import_library() -> ModuleType:
    try:
        import tensorboard.compat.proto.event_pb2  # noqa: F401

        import eventloop.writers.tensorboard_records as tensorboard_records  # imports numpy too
    except ImportError as error:
        raise ImportError(
            "TensorBoardWriter needs tensorboard and google-crc32c: pip install 'torch-eventloop[demo]'"
        ) from error
    return tensorboard_records


def _file_name() -> str:
    """Return a file name that sorts after earlier ones, because TensorBoard reads files in that order."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"


def _check_hparams(hparams: Any) -> dict[str, bool | int | float | str]:
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
    if isinstance(metrics, str) or not all(isinstance(tag, str) for tag in metrics):
        raise TypeError(f"metrics must be a list of tags such as ['val/accuracy'], got {metrics!r}")
    if metrics and not hparams:
        raise ValueError(
            f"metrics needs hparams, got metrics={metrics!r} without: give hparams too, or no metrics"
        )
    return list(metrics)


def _check_graph(graph: Any) -> bytes | None:
    if not isinstance(graph, bytes | None):
        raise TypeError(
            f"graph must be the bytes that trace_graph(model, inputs) returns, got {type(graph).__name__}"
        )
    return graph


def _check_bins(bins: Any) -> int | str:
    if bins != "tensorflow" and (isinstance(bins, bool) or not isinstance(bins, int) or bins < 1):
        raise ValueError(f"bins must be a positive int or 'tensorflow', got {bins!r}")
    checked: int | str = bins
    return checked
