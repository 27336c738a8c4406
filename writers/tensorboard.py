"""TensorBoard event files: curves, images, histograms, texts, hyperparameters and the model's graph."""

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
from eventloop.writers.checks import check_place
from eventloop.writers.handover import Handover
from eventloop.writers.writer import Writer


class Begun(msgspec.Struct):
    """What a writer's thread was given before a process went on."""

    opened: bool = False
    """Anything: the settings and the graph are in its file."""
    restarted: bool = False
    """A beginning of training: TensorBoard was told which steps are run again."""
    ended: bool = False
    """An end of a run, which the HParams tab takes in once."""

    def note(self, event: Event) -> None:
        """One more event."""
        self.opened = True
        training = isinstance(event, ScalarsLogged) and event.mode == "train"
        self.restarted = self.restarted or training or isinstance(event, BeforeTrain)
        self.ended = self.ended or isinstance(event, AfterRun)


class Continued(Run, frozen=True):
    """A run whose beginning another writer has written."""

    folder: str = ""
    opened: bool = False
    ended: bool = False


TOGETHER = 32
"""Events without media that are written with one system call, at most: some 0.2 ms."""


class TensorBoardWriter(Writer):
    """Writes `{mode}/{name}` at step `event.step`, in files that TensorBoard reads while the run goes on.

        TensorBoardWriter(hparams={"lr": 0.1, "layers": 18, "optimizer": "SGD"}, metrics=["val/accuracy"])

    Ten scalars of one event take 8 us of the interpreter. `SummaryWriter.add_scalar` takes 500 us and more, and
    `EventFileWriter` with one record for all ten takes 90 us: the rest is a checksum in pure Python, a second queue
    and a second thread. So this writes the records itself, one an event, on the thread that it has already.

    Runs without images and histograms never start a process. At the first one a process goes on, in a file of its own,
    and is given all that comes from then on: while a thread encodes an image of 512 by 512, Python's other threads wait,
    and so do the steps (`benchmarks.slow_writers` measures it). Scalars alone are cheaper on the thread. They move too,
    because TensorBoard takes a folder's files one after another: it reads no more of a file once a later one is there,
    and the mark of a resumed run in one file takes away what others hold. The process is another subscription, named
    "..., in a process". A writer that no process can import (a class of the script that is run, say) stays on its
    thread, and so does one with `offload="thread"`.

    When training goes on from a checkpoint, TensorBoard is told to forget the steps that will be run again, so that
    no curve doubles. Of a histogram's values those that are not finite are a curve of their own, `{name}/nonfinite`.

    Args:
        log_dir: where the files go; `<work_dir>/tensorboard` by default.
        name: what reports call the writer; needed for a second one.
        hparams: the run's settings, shown in the HParams tab beside those of other runs.
        metrics: tags of the curves to compare there, such as "val/accuracy".
        graph: the model's graph, from `trace_graph(model, inputs)`.
        bins: of histograms: how many, between the least and the greatest value; or "tensorflow", the default of
            `SummaryWriter`: bins that grow by 10 % with their distance from 0, the same in all histograms.
        offload: "thread" or "process" for everything from the start; "auto" by default, as said above.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError, ValueError: a hyperparameter that is no bool, int, float or str, or another bad argument.
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
            self.offload = check_place(offload)
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
        self._start = 0  # where training goes on, until TensorBoard is told
        self._ended = False  # whether the HParams tab was told how the run ended, which it takes in once
        self._begun = Begun()
        self._handover: Handover | None = None  # where this is the writer that goes on

    def attach(self, bus: Bus, run: Callable[[], Run]) -> Subscription:
        """Subscribe to the bus: on a thread, until there is an image or a histogram; see `Writer.attach`."""
        if self.offload != "auto" or self.overflow == "block" or not self._can_be_sent():
            return super().attach(bus, run)
        self._refuse_another(bus)
        self._get_run = run
        handover = Handover(bus, self)
        # of scalars and texts, which are small; an image comes here only where no process can be had for it
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
        """What is written of an event; each is to be encoded before the next is asked for."""
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
        """True until the first image or histogram; see `Handover`."""
        if isinstance(event, ImageLogged | HistogramLogged):
            return False
        self._begun.note(event)
        return True

    def go_on_in_process(self, bus: Bus, handover: Handover) -> Subscription:
        """Subscribe a writer made like this one, in a process."""
        assert self._made_with is not None
        writer: TensorBoardWriter = self._made_with()
        writer._get_run, writer._handover, writer._begun = self._get_run, handover, self._begun
        writer.log_dir, writer.budget_us = self.log_dir, self.budget_us
        writer.stall_timeout, writer.on_error = self.stall_timeout, self.on_error
        return writer._subscribe(bus, "process", name=f"{self._called}, in a process", when=handover.wanted)

    def worker_facts(self) -> Run:
        """The run, and what is written of it already, once it is written."""
        run = super().worker_facts()
        if self._handover is None:
            return run
        self._handover.wait_for_thread()
        facts = msgspec.structs.asdict(run) | {"folder": self._folder(run), "opened": self._begun.opened}
        start = 0 if self._begun.restarted else run.start_iter
        return Continued(**facts | {"start_iter": start, "ended": self._begun.ended})

    # --- writing -------------------------------------------------------------------------------------------

    def _restart(self) -> Iterator[Any]:
        """Whatever an interrupted run wrote of later steps is about to be written again. A run that only evaluates a
        checkpoint writes none of them, and takes none away."""
        if self._start > 0:
            start, self._start = self._start, 0
            yield self._lib.restart(start + 1)

    def _write(self, frames: list[bytes]) -> None:
        assert self._file is not None
        write_all(self._file, b"".join(frames))


def _import_library() -> ModuleType:
    try:
        import tensorboard.compat.proto.event_pb2  # noqa: F401

        from eventloop.writers import tensorboard_records  # imports numpy too
    except ImportError as error:
        raise ImportError(
            "TensorBoardWriter needs tensorboard and google-crc32c: pip install 'torch-eventloop[demo]'"
        ) from error
    return tensorboard_records


def _file_name() -> str:
    """TensorBoard reads a folder's files in the order of their names: a later one must sort after an earlier one."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"


def _check_hparams(hparams: Any) -> dict[str, bool | int | float | str]:
    if not isinstance(hparams, Mapping | None):
        raise TypeError(f"hparams must be a mapping of names to values, got {hparams!r}")
    for key, value in (hparams or {}).items():
        if not isinstance(key, str) or type(value) not in (bool, int, float, str):
            raise TypeError(
                f"hparams must map names to bool, int, float or str, which is what TensorBoard compares; got "
                f"{key!r}: {value!r}"
            )
    return dict(hparams or {})


def _check_metrics(metrics: Any, hparams: object) -> list[str]:
    if isinstance(metrics, str) or not all(isinstance(tag, str) for tag in metrics):
        raise TypeError(f"metrics must be a list of tags such as ['val/accuracy'], got {metrics!r}")
    if metrics and not hparams:
        raise ValueError("metrics are what hparams are compared by: give hparams too, or no metrics")
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
