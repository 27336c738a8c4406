"""Files whose checksums are right and whose contents are not: one line, and what is good is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
import pytest

from eventloop import cli, read_events
from eventloop.costs.records import RunCosts, read_costs, write_costs
from eventloop.costs.spans import Span, SpanRecorder
from eventloop.eventlog.format import HEADER, EventLogError, pack
from eventloop.eventlog.reader import NAMELESS
from eventloop.events import TextLogged
from eventloop.events.run import Run
from eventloop.reporting.curves import read_curves
from eventloop.tracing.chrome import WindowFacts
from eventloop.tracing.files import read_trace, trace_path, write_trace
from eventloop.writers import EventLogWriter

GOOD: tuple[Any, ...] = ("text_logged", 0, 1.5, 0, {"event": "text_logged", "text": "good"})


def framed(payload: bytes) -> bytes:
    return pack(payload) + payload


def log_of(tmp_path: Path, *records: object) -> Path:
    """A log of these records, each with its right checksum."""
    path = tmp_path / "events.evl"
    path.write_bytes(HEADER + b"".join(framed(msgspec.msgpack.encode(each)) for each in records))
    return path


@pytest.mark.parametrize(
    "record",
    [
        (1, 2, 3, 4, {}),
        (None, 1, 1.5, 0, {}),
        ([], 1, 1.5, 0, {}),
        (b"text_logged", 1, 1.5, 0, {}),
        ("", 1, 1.5, 0, {}),
        ({"event": "text_logged"}, 1, 1.5, 0, {}),
        ("x" * 300, 1, 1.5, 0, {}),
        ["text_logged"] * 16,
        "a text",
        1e9,
        {"tag": "text_logged"},
    ],
)
def test_a_record_without_a_name_is_counted(tmp_path: Path, record: object) -> None:
    """It is skipped as unreadable, and those around it are read."""
    reader = read_events(log_of(tmp_path, GOOD, record, record, GOOD))

    assert [each.event for each in reader] == [TextLogged(text="good")] * 2
    assert (reader.unreadable, reader.unknown, reader.damaged) == ({NAMELESS: 2}, {}, 0)


@pytest.mark.parametrize(
    ("fields", "writer", "message"),
    [
        ({"shape": [], "data": b""}, "ImageFileWriter", r"'a' has 0 bytes, expected 1 for shape \(\)"),
        ({"shape": [], "data": b"x"}, "tensorboard", r"'a' must have the shape \(height, .*, got \(\)"),
        ({"shape": [-1, -1, 1], "data": b"x"}, "tensorboard", r"expected 1 for shape \(-1, -1, 1\)"),
        (
            {"shape": [1, 1, 1], "data": b"x", "dtype": "loss"},
            "tensorboard",
            "'a' must have a numpy dtype .*'loss'",
        ),
        (
            {"shape": [1, 1, 1], "data": bytes(8), "dtype": "O"},
            "tensorboard",
            "'a' must have a numpy dtype .*'O'",
        ),
        ({"shape": [1, 1, 1], "data": b"", "dtype": "U"}, "tensorboard", "'a' must have a numpy dtype .*'U'"),
    ],
)
def test_an_image_that_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], writer: str, message: str
) -> None:
    """`eventloop replay` names the log, the writer, what was expected and what came, and exits with 1."""
    event = {"event": "image_logged", "name": "a", **fields}
    log = log_of(tmp_path, GOOD, ("image_logged", 1, 1.5, 0, event))

    code = cli.main(["replay", str(log), "--to", writer])

    said = capsys.readouterr().err.splitlines()
    assert (code, len(said)) == (1, 1)
    assert re.search(f"Writer cannot write an event of {log}: .*{message}", said[0])


@pytest.mark.parametrize(
    ("record", "got"),
    [
        ((1, 2, 3, 4, {}), "Expected `str`, got `int`"),
        (("a", -5, 1.5, 0, {}), "the sequence -5"),
        (("a", 2**64 - 1, 1.5, 0, {}), "the sequence 18446744073709551615"),
        ("a text", "Expected `array`, got `str`"),
    ],
)
def test_a_log_without_a_last_number_is_not_continued(tmp_path: Path, record: object, got: str) -> None:
    """The writer names the file, what its last record must be, and what it is; the file stays."""
    log = log_of(tmp_path, GOOD, record)
    before = log.read_bytes()

    with pytest.raises(
        EventLogError, match=rf"events\.evl cannot .* must be \[tag, sequence, .* got .*{got}"
    ):
        EventLogWriter().open(Run(work_dir=str(tmp_path)))

    assert log.read_bytes() == before


@pytest.mark.parametrize(
    ("rank", "world_size", "got"), [(0, 2**40, "rank 0 of 1099511627776"), (3, 2, "rank 3 of 2")]
)
def test_costs_of_impossible_ranks_are_refused(tmp_path: Path, rank: int, world_size: int, got: str) -> None:
    """A reader does not look for the files of a trillion ranks."""
    write_costs(tmp_path, RunCosts(rank=rank, world_size=world_size))

    with pytest.raises(ValueError, match=rf"costs.* is not a cost record: expected rank < .*, got {got}"):
        read_costs(tmp_path, rank)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (("otherData",), "began", None),
        (("otherData",), "world_size", 2**40),
        (("otherData",), "world_size", "two"),
        ((), "traceEvents", {}),
        (("traceEvents", -1), "ph", "?"),
        (("traceEvents", -1), "ts", "soon"),
        (("traceEvents", -1), "ts", 1e300),
        (("traceEvents", -1), "args", []),
        (("traceEvents", -1, "args"), "iter", None),
    ],
)
def test_a_trace_of_other_contents_is_refused(
    tmp_path: Path, place: tuple[Any, ...], name: str, value: object
) -> None:
    """The error names the file and the field, whatever is in it."""
    recorder = SpanRecorder()
    recorder.add(Span(1, "iteration", "iteration 0", 0.0, 1.0, 0))
    facts = WindowFacts("run", 0, 1, True, 0.0, 100.0, 1, pid=99)
    write_trace(tmp_path, facts, recorder)
    path = trace_path(tmp_path, facts)
    trace = changed = json.loads(path.read_bytes())
    for key in place:
        changed = changed[key]
    changed[name] = value
    path.write_text(json.dumps(trace, separators=(",", ":")))

    with pytest.raises(
        ValueError, match=rf"iterations_0-0\.json is damaged, or not a trace .*(\$|tag).*({name}|'\?')"
    ):
        read_trace(path)


def resumes(count: int) -> str:
    """A file of `metrics.jsonl` in which each line begins the run again and has a metric of its own."""
    line = '{{"event":"before_run","iter":{0}}}\n{{"mode":"train","step":{0},"m{0}":{0}.5}}\n'
    return "".join(line.format(n) for n in range(10_000, 10_000 + count))


def test_many_resumes_cost_linear_time(tmp_path: Path) -> None:
    """A file of runs begun again, each with another metric, takes about four times the CPU time if four times as long."""
    path = tmp_path / "metrics.jsonl"

    def seconds(count: int) -> float:
        path.write_text(resumes(count))
        began = process_time()
        assert len(read_curves(path).curves) == count
        return process_time() - began

    seconds(50)
    small = min(seconds(500) for _ in range(3))
    assert seconds(2000) < 9 * small
