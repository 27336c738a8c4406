"""Write events as JSON, one object per line, for programs, `grep` and `jq`, and read them back.

`eventloop.eventlog.jsonl` owns the names of keys and the form of special values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from io import FileIO
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from eventloop.eventlog.jsonl import FILE_NAME, is_reserved, is_torn, key_of, marked, unmarked
from eventloop.events import (
    AfterLoadCheckpoint,
    AfterRun,
    BeforeRun,
    CheckpointFailed,
    CheckpointSaved,
    CommandApplied,
    CommandRefused,
    Event,
    EventsDropped,
    HandlerFailed,
    PreemptionRequested,
    RolledBack,
    RunInfo,
    ScalarsLogged,
    StopRequested,
    TextLogged,
)
from eventloop.events.catalogue import find_event, several
from eventloop.events.encoding_errors import BadEvent, Unencodable, why_not
from eventloop.events.run import Run
from eventloop.util.append_file import open_appending, write_all
from eventloop.util.checks import check_path
from eventloop.writers.plain import encodable, plain
from eventloop.writers.writer import Writer


class JSONLWriter(Writer):
    """Append each event as one JSON line to `<work_dir>/<filename>`.

        {"mode":"train","step":40,"iter":39,"epoch":0,"loss":0.1234,"lr":0.001}
        {"event":"checkpoint_saved","iter":39,"epoch":0,...,"path":"runs/digits/epoch_1"}

        Trainer(..., writers=[JSONLWriter()], work_dir="runs/digits")

        for row in read_jsonl("runs/digits/metrics.jsonl"):
            print(row)

    A line without the key "event" is a `scalars_logged` event. NaN and the infinities are the strings "NaN",
    "Infinity" and "-Infinity", because JSON cannot represent them; `read_jsonl` converts them back. A text
    that equals one of these strings gets a "~" in front. A metric named like a reserved key is written as
    `scalars/<name>`.

    An event that JSON cannot represent, such as one with a tensor in it, is left out: it counts as failed and
    is named in the Python log. In text that is not valid UTF-8, such as some paths, lone surrogates become
    escapes: `\\udcff`.

    A file that is already there gets more lines: from a resumed run, and from a new one in the same
    directory, for which `CSVWriter` renames the file. A `before_run` line begins each run. Its `iter` is 0 in
    a new training, whose steps begin again; in a resumed one it is the iteration from which that continued,
    and iterations that are run again have a second line after it. The same applies to a `rolled_back` line
    within a run. Give each training a `work_dir` of its own
    to keep them apart.

    Written lines survive a kill of the process, but not a crash of the machine. An incomplete line that a
    kill or a full disk left is removed when the file is opened again.

    Args:
        filename: relative to the run's work_dir, or absolute.
        events: the events to write, names or classes; "*" for every event. By default scalars, texts and the
            events about the run, its checkpoints, stops and failed handlers.
        name: the writer's name in reports; needed if there are two of this class.

    Raises:
        TypeError, ValueError: an event is unknown, or `filename` is not a path.
    """

    events: tuple[str | type[Event], ...] = (
        ScalarsLogged,
        TextLogged,
        RunInfo,
        BeforeRun,
        AfterRun,
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
    )
    batch = 64

    # on the class, not the writer, so that a writer can be pickled
    _encoder: ClassVar[msgspec.json.Encoder] = msgspec.json.Encoder(enc_hook=plain)

    def __init__(
        self,
        filename: str | PathLike[str] = FILE_NAME,
        *,
        events: str | type[Event] | Sequence[str | type[Event]] | None = None,
        name: str | None = None,
    ) -> None:
        check_path("filename", filename)
        self.filename = filename
        self.name = name
        if events is not None:
            self.events = tuple("*" if event == "*" else find_event(event) for event in several(events))
        self._file: FileIO | None = None

    def open(self, run: Run) -> None:
        self._file = open_appending(Path(run.work_dir, self.filename), is_torn)

    def write(self, event: Event) -> None:
        self.write_batch([event])

    def write_batch(self, events: list[Event]) -> None:
        assert self._file is not None
        bad: list[BadEvent] = []
        try:
            lines = self._encoder.encode_lines([_row(event) for event in events])
        except Exception:  # one event cannot be encoded; write the lines of the others
            lines = b"".join(self._lines(events, bad))
        write_all(self._file, lines)
        if bad:
            raise Unencodable(bad, of=len(events))

    def _lines(self, events: list[Event], bad: list[BadEvent]) -> Iterator[bytes]:
        for event in events:
            try:
                line = self._encode(_row(event)) + b"\n"
            except Exception as error:
                bad.append(why_not(event, error, self._encode))
            else:
                yield line

    def _encode(self, value: Any) -> bytes:
        try:
            return self._encoder.encode(value)
        except UnicodeEncodeError:
            return self._encoder.encode(encodable(value))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_jsonl(path: str | PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file written by `JSONLWriter` as dicts, with NaN and the infinities as floats.

    A line that a kill cut short is left out, with a `UserWarning` that names it.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = msgspec.json.decode(line)
            except msgspec.DecodeError:
                warnings.warn(
                    f"{path}, line {number} was cut short and is left out: {line[:80]!r}", stacklevel=2
                )
            else:
                yield unmarked(row)


def _row(event: Event) -> dict[str, Any]:
    if not isinstance(event, ScalarsLogged):
        line: dict[str, Any] = marked(msgspec.to_builtins(event, enc_hook=plain))
        return line
    row: dict[str, Any] = {"mode": event.mode, "step": event.step, "iter": event.iter, "epoch": event.epoch}
    scalars = event.scalars
    # the usual case takes a third of the time of the loop below
    if isfinite(sum(scalars.values())) and not any(map(is_reserved, scalars)):
        row.update(scalars)
        return row
    for name, value in scalars.items():
        finite = value - value == 0  # false for NaN and the infinities, at the cost of one subtraction
        row[key_of(name)] = value if finite else marked(float(value))
    return row
