"""The files of recorded windows, in Chrome's trace event format, and `eventloop trace`, which lists and merges them."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer, cli
from eventloop.costs.spans import SAVER, Span, SpanRecorder
from eventloop.events import AfterTrainIter
from eventloop.hooks import CheckpointHook
from eventloop.tracing.chrome import WindowFacts, chrome_trace, nested_rows
from tests.cli.traced_runs import traced

Json = dict[str, Any]


async def observe(event: AfterTrainIter) -> None:
    """A subscriber on the loop."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training with subscribers of all kinds, evaluations, checkpoints, and two windows."""
    directory = tmp_path_factory.mktemp("run")
    trainer = traced(directory, (2, 4), (10, 20))
    trainer.bus.subscribe(observe, AfterTrainIter)
    (hook,) = (hook for hook in trainer.hooks if isinstance(hook, CheckpointHook))

    @trainer.bus.on("after_train_iter", priority="LOWEST")
    def wait(trainer: Trainer, event: AfterTrainIter) -> None:
        """Wait until the save is durable, so that no two overlap."""
        for saving in hook.saves.under_way:
            saving.written.result(60.0)

    trainer.train()
    trainer.close()
    return directory


def trace(*arguments: object) -> int:
    """The command, in this process."""
    return cli.main(["trace", *map(str, arguments)])


@pytest.fixture
def made(run: Path) -> Json:
    """The trace of the last window."""
    loaded: Json = json.loads((run / "traces" / "iterations_10-19.json").read_bytes())
    return loaded


def of(made: Json, ph: str, **having: object) -> list[Json]:
    return [e for e in made["traceEvents"] if e["ph"] == ph and all(e.get(k) == v for k, v in having.items())]


def tracks(made: Json) -> dict[str, int]:
    """Names and numbers."""
    return {e["args"]["name"]: e["tid"] for e in of(made, "M", name="thread_name")}


# --- the format --------------------------------------------------------------------------------------------


def test_every_event_has_what_the_format_requires(made: Json) -> None:
    """Trace Event Format: a phase, a name, process and thread, and times in microseconds that are not negative, in order
    after the metadata. A counter of each queue is in events."""
    assert set(made) == {"otherData", "displayTimeUnit", "traceEvents"}
    assert made["displayTimeUnit"] == "ms"
    assert {e["ph"] for e in made["traceEvents"]} == {"M", "X", "C"}
    for event in made["traceEvents"]:
        kinds = {key: type(event[key]) for key in ("name", "pid", "tid", "args")}
        assert kinds == {"name": str, "pid": int, "tid": int, "args": dict}
        assert event["name"]
        assert event["ts"] >= 0
    assert all(e["dur"] >= 0 and isinstance(e["cat"], str) for e in of(made, "X"))
    assert len({e["pid"] for e in made["traceEvents"]}) == 1
    timed = [e for e in made["traceEvents"] if e["ph"] != "M"]
    assert made["traceEvents"][-len(timed) :] == timed
    assert all(one["ts"] <= other["ts"] for one, other in pairwise(timed))
    counters = of(made, "C")
    assert {e["name"] for e in counters} == {
        f"queue of {name}" for name in ("JSONLWriter", "CSVWriter", "observe")
    }
    counts = [e["args"]["events"] for e in counters]
    assert all(isinstance(count, int) and count >= 0 for count in counts)
    assert any(counts)


def test_spans_of_a_track_are_nested(made: Json) -> None:
    """Any two lie within each other or side by side, to the nanosecond: both viewers draw nothing else rightly."""
    for tid in tracks(made).values():
        ends: list[int] = []
        spans = [(round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in of(made, "X", tid=tid)]
        assert spans
        for began, ended in spans:
            while ends and ends[-1] <= began:
                ends.pop()
            assert not ends or ended <= ends[-1]
            ends.append(ended)


def test_tracks_have_names_and_an_order(made: Json, run: Path) -> None:
    """The training thread is the first, then come the saver and the background subscribers."""
    (process,) = of(made, "M", name="process_name")
    assert process["args"] == {"name": f"eventloop {run.name}, rank 0 of 1"}
    assert list(tracks(made)) == [
        "training thread",
        "checkpoint saver",
        "CSVWriter (thread)",
        "JSONLWriter (thread)",
        "observe (loop)",
    ]
    order = {e["tid"]: e["args"]["sort_index"] for e in of(made, "M", name="thread_sort_index")}
    assert [order[tid] for tid in tracks(made).values()] == sorted(order.values())
    assert {e["tid"] for e in of(made, "X")} == set(tracks(made).values())


# --- what it shows -----------------------------------------------------------------------------------------


def test_iterations_phases_and_handlers_are_shown(made: Json) -> None:
    """On the training thread, with iteration, event and priority; the phases of an iteration lie within it, and add up
    to hardly more than it."""
    tid = tracks(made)["training thread"]

    iterations = of(made, "X", cat="iteration", tid=tid)
    assert [e["args"]["iter"] for e in iterations] == list(range(10, 20))
    for iteration in iterations:
        end = iteration["ts"] + iteration["dur"]
        phases = {
            e["name"]: e["dur"]
            for e in of(made, "X", cat="phase", tid=tid)
            if e["args"]["iter"] == iteration["args"]["iter"] and iteration["ts"] <= e["ts"] < end
        }
        assert {"data", "forward", "backward", "optimizer"} <= phases.keys()
        parts = [phases[name] for name in ("data", "forward", "backward", "optimizer")]
        assert sum(parts) <= iteration["dur"] + 0.01
    handler = of(made, "X", cat="handler", name="OptimizerHook.after_train_iter")[0]
    assert handler["args"] == {"iter": 10, "event": "after_train_iter", "priority": 30}
    assert len(of(made, "X", cat="event", name="after_train_iter")) == 10


def test_evaluations_saves_and_deliveries_are_shown(made: Json) -> None:
    """A validation from its first event to its last; a save from its begin to its being durable; each delivery on the
    track of its subscriber, with how many events it was."""
    (val, *_) = of(made, "X", cat="phase", name="val")
    inner = [e for e in of(made, "X", cat="event") if val["ts"] <= e["ts"] < val["ts"] + val["dur"]]
    assert {"before_val", "after_val"} <= {e["name"] for e in inner}
    assert {"iter_12", "iter_13", "iter_14"} <= {e["name"] for e in of(made, "X", cat="save")}

    seen = of(made, "X", cat="delivery", tid=tracks(made)["observe (loop)"])
    iterations = [e["args"]["iter"] for e in seen]  # some before it too, which were delivered only then
    assert iterations == list(range(iterations[0], iterations[-1] + 1))
    assert set(range(10, 20)) <= set(iterations)
    args = {"iter": iterations[0], "event": "after_train_iter", "events": 1, "runs_on": "loop"}
    assert seen[0]["args"] == args


def test_saves_that_overlap_have_rows_of_their_own() -> None:
    """A row holds only what is nested or apart; a second one is a track with its number."""
    one, two = Span(SAVER, "save", "a", 1.0, 3.0), Span(SAVER, "save", "b", 2.0, 3.0)
    inner, later = Span(SAVER, "save", "c", 1.5, 0.25), Span(SAVER, "save", "d", 4.0, 1.0)

    assert nested_rows([later, two, inner, one]) == [[one, inner, later], [two]]
    recorder = SpanRecorder()
    for span in (one, two):
        recorder.add(span)
    made = chrome_trace(WindowFacts("run", 0, 1, True, 1.0, 100.0, thread=7, pid=9), recorder)
    assert list(tracks(made)) == ["checkpoint saver", "checkpoint saver #2"]


# --- the command -------------------------------------------------------------------------------------------


def test_windows_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each, with its number and its file, and how to open it."""
    assert trace(run) == 0

    said = capsys.readouterr()
    head, _, *rows, last = said.out.splitlines()
    assert head.split() == ["window", "iterations", "size", "file"]
    assert [(row.split()[0], row.split()[1], row.split()[-1]) for row in rows] == [
        ("1", "2..3", f"{run}/traces/iterations_2-3.json"),
        ("2", "10..19", f"{run}/traces/iterations_10-19.json"),
    ]
    assert last == "open it at https://ui.perfetto.dev or in chrome://tracing"
    assert said.err == ""


@pytest.mark.parametrize(
    ("options", "number", "name"),
    [([], "10..19", "iterations_10-19"), (["--window", 1], "2..3", "iterations_2-3")],
)
def test_a_window_is_copied(
    options: list[object],
    number: str,
    name: str,
    run: Path,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """The last one, or that of a number, also over an earlier copy; a device is written to, and `-` is standard output."""
    out, null = tmp_path / "copy.json", tmp_path / "null"
    out.write_bytes((run / "traces" / "iterations_2-3.json").read_bytes())
    null.symlink_to(os.devnull)
    whole = (run / "traces" / f"{name}.json").read_bytes()

    assert [trace(run, "-o", path, *options) for path in (out, null, "-")] == [0, 0, 0]

    assert out.read_bytes() == whole
    assert null.is_symlink()
    said = capfdbinary.readouterr()
    assert said.out == whole
    told = said.err.decode().splitlines()
    opens = "; open it at https://ui.perfetto.dev or in chrome://tracing"
    assert told == [
        f"eventloop: iterations {number}{where}"
        for where in (f" into {out}{opens}", f" into {null}{opens}", "")
    ]


def test_windows_are_merged(run: Path, tmp_path: Path) -> None:
    """Each is a process of its own, named after its iterations; the later one begins later."""
    assert trace(run, "--merge", "-o", tmp_path / "all.json") == 0

    merged: Json = json.loads((tmp_path / "all.json").read_bytes())
    begins = {}
    for pid, iterations in ((1, range(2, 4)), (2, range(10, 20))):
        spans = of(merged, "X", cat="iteration", pid=pid)
        assert [e["args"]["iter"] for e in spans] == list(iterations)
        (name,) = of(merged, "M", name="process_name", pid=pid)
        assert name["args"]["name"].endswith(f", iterations {iterations[0]}..{iterations[-1]}")
        begins[pid] = (spans[0]["ts"], spans[-1]["ts"] + spans[-1]["dur"])
    assert 0 <= begins[1][0] < begins[1][1] < begins[2][0]
    assert merged["otherData"]["iterations"] == "2..3, 10..19"
    assert trace(run, "--merge", "-o", tmp_path / "all.json") == 0


def test_what_was_beyond_the_limit_is_said() -> None:
    """In the file, which has as many spans as allowed."""
    recorder = SpanRecorder(limit=20)
    for begin in range(25):
        recorder.add(Span(SAVER, "save", "a", float(begin), 0.5))

    made = chrome_trace(WindowFacts("run", 0, 1, True, 1.0, 100.0, thread=7, pid=9), recorder)

    assert made["otherData"]["not recorded"] == "5 spans and depths beyond the limit"
    assert len(of(made, "X")) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no run at nowhere: expected the directory of a run"),
        (["no\nrun"], "no run at no run: expected the directory of a run"),
        (
            ["empty"],
            "empty has no trace: expected files in empty/traces, got none; the run had no TraceHook, or",
        ),
        (["."], ". has no trace: expected files in traces, got none; there are runs in foreign, run, torn"),
        (["run", "--window", "1"], "--merge and --window are for writing a file: expected -o FILE, got none"),
        (["run", "--merge", "--window", "1"], "--merge takes all windows: leave out --merge or --window"),
        (
            ["run", "--window", "3", "-o", "x"],
            "run/traces has no window 3: it has 1: iterations 2..3; 2: iterations 10..1",
        ),
        (
            ["run", "-o", "run/metrics.jsonl"],
            "-o run/metrics.jsonl is not a trace, and is not replaced: give the name",
        ),
        (["run", "-o", "x" * 255], f"-o {'x' * 255} cannot be written: File name too long (--traceback"),
        (
            ["torn", "--merge", "-o", "x"],
            "torn/traces/iterations_1-2.json is damaged, or not a trace of eventloop: ",
        ),
        (
            ["foreign", "--merge", "-o", "x"],
            "foreign/traces/iterations_1-2.json is damaged, or not a trace of eventloop: it",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_or_1(
    arguments: list[str],
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be done is said before anything is written; 1 where the file could not be."""
    whole = (run / "traces" / "iterations_2-3.json").read_bytes()
    for name, content in {"torn": whole[:900], "foreign": b"{}"}.items():
        (tmp_path / name / "traces").mkdir(parents=True)
        for file in ("iterations_1-2.json", "iterations_3-4.json"):
            (tmp_path / name / "traces" / file).write_bytes(content)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").symlink_to(run)
    monkeypatch.chdir(tmp_path)

    assert trace(*arguments) == (1 if "x" * 255 in arguments else 2)

    errors = capsys.readouterr().err
    assert errors.startswith(f"eventloop: {message}")
    assert (errors.count("\n"), errors.endswith(" (--traceback shows where)\n")) == (1, True)
    assert not (tmp_path / "x").exists()
