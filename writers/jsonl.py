"""Write events as JSON, one object per line, for programs, `grep` and `jq`, and read them back.

`eventloop.eventlog.jsonl` defines the keys, and the strings that stand for NaN and the infinities.
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

from eventloop.eventlog.jsonl import FILE_NAME, from_json_value, is_reserved, is_torn, key_of, to_json_value
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

    If the file exists, lines are appended to it, by a resumed run and by a new run in the same `work_dir`.
    Each run begins with a `before_run` line. Its `iter` is 0 for a new training, and for a resumed one the
    iteration from which it continues. Iterations that are run again after that line, or after a `rolled_back`
    line, are in the file twice. Give each training a `work_dir` of its own to keep their lines apart.

    Written lines survive a kill of the process, but not a crash of the machine. An incomplete line that a
    kill or a full disk left is removed when the file is opened again.

    Args:
        filename: the file's path, relative to the run's work_dir or absolute.
        events: the names or classes of the events to write; "*" for every event. By default scalars, texts
            and the events about the run, its checkpoints, commands, stops and failed handlers.
        name: the writer's name in reports; needed if a bus has two writers of this class.

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

    # an attribute of the class, because a writer with its own encoder could not be pickled
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
        """Append a line for each event; raise `Unencodable` if some cannot be encoded."""
        assert self._file is not None
        bad_events: list[BadEvent] = []
        try:
            lines = self._encoder.encode_lines([_row(event) for event in events])
        except Exception:  # at least one event cannot be encoded: encode each event alone
            lines = b"".join(self._encodable_lines(events, bad_events))
        write_all(self._file, lines)
        if bad_events:
            raise Unencodable(bad_events, of=len(events))

    def _encodable_lines(self, events: list[Event], bad_events: list[BadEvent]) -> Iterator[bytes]:
        """Yield the line of each event; append an event that cannot be encoded to `bad_events` instead."""
        for event in events:
            try:
                line = self._encode(_row(event)) + b"\n"
            except Exception as error:
                bad_events.append(why_not(event, error, self._encode))
            else:
                yield line

    def _encode(self, value: Any) -> bytes:
        """Return a value as JSON, with escapes for lone surrogates."""
        try:
            return self._encoder.encode(value)
        except UnicodeEncodeError:
            return self._encoder.encode(encodable(value))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_jsonl(path: str | PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield each line of a file written by `JSONLWriter` as a dict, with NaN and the infinities as floats.

    A line that is not valid JSON, because a kill cut it short, is skipped with a `UserWarning` that has its
    number.
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
                yield from_json_value(row)


def _row(event: Event) -> dict[str, Any]:
    """Return an event as the JSON object of its line."""
    if not isinstance(event, ScalarsLogged):
        row: dict[str, Any] = to_json_value(msgspec.to_builtins(event, enc_hook=plain))
        return row
    scalars = event.scalars
    row = {"mode": event.mode, "step": event.step, "iter": event.iter, "epoch": event.epoch}
    # finite values with unreserved names, the usual case, take a third of the time of the loop below
    if isfinite(sum(scalars.values())) and not any(map(is_reserved, scalars)):
        row.update(scalars)
        return row
    for name, value in scalars.items():
        is_finite = value - value == 0  # faster than `isfinite`
        row[key_of(name)] = value if is_finite else to_json_value(float(value))
    return row
