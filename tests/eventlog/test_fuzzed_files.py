"""Fuzz the files that readers, reports, replays and traces read, checksums made right again: one line, or success."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from eventloop import cli, read_events
from eventloop.checkpoint import CheckpointError, read_manifest
from eventloop.checkpoint.commit import sealed
from eventloop.checkpoint.manifest import Manifest
from eventloop.costs.spans import Span, SpanRecorder
from eventloop.eventlog.format import HEADER, EventLogError, pack
from eventloop.events.base import event_name
from eventloop.events.catalogue import declared_events
from eventloop.events.run import Run
from eventloop.ownership.owner import Record, read_record
from eventloop.tracing.chrome import WindowFacts
from eventloop.tracing.files import of_rank, trace_path, write_trace
from eventloop.writers import EventLogWriter
from tests.cli.reported_runs import TRAINED, make_run

hypothesis = pytest.importorskip("hypothesis", reason="not installed: pip install 'torch-eventloop[test]'")
st = pytest.importorskip("hypothesis.strategies")
pytestmark = pytest.mark.slow
settings = hypothesis.settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[*hypothesis.HealthCheck],
)
Test = TypeVar("Test", bound=Callable[..., None])


def fuzzed(**strategies: Any) -> Callable[[Test], Test]:
    """Run a test with many drawn arguments, the same ones each time."""

    def wrap(test: Test) -> Test:
        made: Test = settings(hypothesis.given(**strategies)(test))
        return made

    return wrap


EDGES = [
    0,
    -1,
    1,
    2**31,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    1e308,
    -1e308,
    1e-320,
    0.5,
    "",
    "NaN",
    "-Infinity",
    "a" * 300,
    "\x1b[2J\n",
    "../../x",
    "loss",
    "\u202e",
    None,
    True,
    [],
    {},
    [[]],
    {"": 0},
    [1, 2, 3],
    [-1, -1],
    {"event": "before_run"},
]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in items for place in places(item, (*at, key)))]


def changed(original: Any, choose: Any) -> Any:
    """The value with up to three of its parts replaced or left out."""
    value = [copy.deepcopy(original)]
    for _ in range(choose(st.integers(1, 3))):
        *way, last = choose(st.sampled_from(places(value)[1:]))
        owner: Any = value
        for key in way:
            owner = owner[key]
        if isinstance(owner, dict) and choose(st.booleans()):
            del owner[last]
        else:
            other = choose(st.sampled_from(EDGES) | st.integers() | st.floats() | st.text(max_size=9))
            owner[last] = copy.deepcopy(other)
    return value[0]


def run(capsys: pytest.CaptureFixture[str], *arguments: object, lines: int = 1) -> None:
    """Run a command, which does what it is for or says on one line why not."""
    capsys.readouterr()
    code = cli.main([*map(str, arguments)])
    said = capsys.readouterr().err
    assert code in (0, 1, 2)
    assert said.count("\n") <= lines, said
    assert code == 0 or said.startswith("eventloop: ") or lines > 1, said
    assert "\x1b" not in said


BODIES = [
    (event_name(kind), {**json.loads(msgspec.json.encode(kind())), "event": event_name(kind)})
    for kind in declared_events()
    if kind.__module__ == "eventloop.events.types" and not kind.__name__.startswith("_")
]
IMAGE = {
    "event": "image_logged",
    "name": "a",
    "data": b"xyz",
    "shape": [1, 1, 3],
    "dtype": "uint8",
    "step": 1,
}
HISTOGRAM = {"event": "histogram_logged", "name": "a", "data": bytes(8), "shape": [2], "dtype": "float32"}
RECORDS: list[Any] = [
    ["$run", 0, 1.5, 0, msgspec.to_builtins(Run(work_dir="run"))],
    *([tag, number, 1.5, 0, body] for number, (tag, body) in enumerate(BODIES)),
    ["image_logged", 50, 1.5, 0, IMAGE],
    ["histogram_logged", 51, 1.5, 0, HISTOGRAM],
    ["scalars_logged", 52, 1.5, 0, {"event": "scalars_logged", "step": 3, "scalars": {"loss": 0.5}}],
]


def framed(record: Any) -> bytes:
    try:
        payload = msgspec.msgpack.encode(record)
    except (OverflowError, ValueError):  # an integer that msgpack cannot hold
        payload = msgspec.msgpack.encode(repr(record))
    return pack(payload) + payload


@fuzzed(data=st.data(), target=st.sampled_from(["console", "jsonl", "csv", "tensorboard", "ImageFileWriter"]))
def test_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any, target: str) -> None:
    """Records of other contents are read or counted, replayed or named, and continued or refused."""
    records = list(RECORDS)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(records) - 1))
        records[place] = changed(records[place], data.draw)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    log = tmp_path / "run" / "events.evl"
    log.parent.mkdir()
    log.write_bytes(HEADER + b"".join(map(framed, records)))

    reader = read_events(log, on_torn="ignore")
    assert len(list(reader)) + sum(reader.unreadable.values()) + sum(reader.unknown.values()) <= len(records)
    run(capsys, "replay", log, "--to", target)
    writer = EventLogWriter()
    with suppress(EventLogError):
        writer.open(Run(work_dir=str(log.parent)))
    writer.close()


def window(directory: Path, rank: int) -> Path:
    recorder = SpanRecorder()
    for name, kind in (("iteration 3", "iteration"), ("data", "phase"), ("before_train_iter", "event")):
        recorder.add(Span(1, kind, name, 3.0, 1.0, 3))  # type: ignore[arg-type]
    facts = WindowFacts("run", 3, 1, True, 3.0, 100.0, 1, pid=99, rank=rank, world_size=2)
    write_trace(directory, facts, recorder)
    return of_rank(trace_path(directory, facts), 0) if not rank else trace_path(directory, facts)


@fuzzed(data=st.data(), options=st.sampled_from([["--merge"], ["--ranks"], ["--window", "1"]]))
def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any, options: list[str]) -> None:
    """A trace of other contents is merged, or refused by name."""
    path = window(tmp_path, 0)
    window(tmp_path, 1)
    trace = json.loads(path.read_bytes())
    trace = changed(trace, data.draw)
    path.write_text(json.dumps(trace, separators=(",", ":")))

    run(capsys, "trace", tmp_path, *options, "-o", tmp_path / "out.json")
    (tmp_path / "out.json").unlink(missing_ok=True)


@fuzzed(data=st.data(), options=st.sampled_from([[], ["--json"], ["--all"], ["--diff"]]))
def test_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any, options: list[str]) -> None:
    """A cost record of other contents is reported, or refused by name."""
    path = make_run(tmp_path / "run") / "costs.json"
    path.write_text(json.dumps(changed(json.loads(path.read_bytes()), data.draw)))

    run(capsys, "report", path.parent, *([path.parent] if options == ["--diff"] else []), *options)


@fuzzed(data=st.data(), options=st.sampled_from([[], ["--json"], ["--all"]]))
def test_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any, options: list[str]) -> None:
    """Lines of other contents are reported, or the file is refused by name."""
    path = make_run(tmp_path / "run") / "metrics.jsonl"
    rows = changed(TRAINED, data.draw)
    rows = rows if isinstance(rows, list) else [rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    run(capsys, "report", path.parent, *options)


MANIFEST = {
    **msgspec.to_builtins(Manifest(iter=3, epoch=1, keys=("meta",))),
    "metrics": {"acc": 0.5},
    "best": ["acc"],
    "files": {"a.bin": {"bytes": 1, "sha256": "0" * 64}},
}


@fuzzed(data=st.data())
def test_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any) -> None:
    """A manifest of other contents with its right hash is listed, or refused by name."""
    path = tmp_path / "run" / "iter_3" / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(sealed("manifest", json.dumps(changed(MANIFEST, data.draw)).encode()))

    with suppress(CheckpointError):
        read_manifest(path.parent)
    run(capsys, "checkpoints", path.parent.parent, lines=9)


OWNER = msgspec.to_builtins(
    Record(
        host="h", pid=1, place="p", start=2, since="2026-01-01T00:00:00", state="training", directory=b"/run"
    )
)


@fuzzed(data=st.data())
def test_a_record_of_an_owner(tmp_path: Path, data: Any) -> None:
    """An owner's record of other contents is read, or is damaged."""
    path = tmp_path / ".owner-1"
    path.write_text(json.dumps(changed(OWNER, data.draw)))

    record, touched = read_record(path)

    assert touched > 0
    assert record is None or isinstance(record.process.pid, int)
