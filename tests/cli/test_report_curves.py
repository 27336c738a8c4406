"""The curves that `eventloop report` reads: of whole files, torn ones, and those of resumed runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventloop.events import AfterRun, BeforeRun, Event, RunInfo, ScalarsLogged
from eventloop.events.run import Run
from eventloop.reporting.curves import POINTS, Curve, RunLog, read_curves
from eventloop.writers import JSONLWriter
from tests.cli.reported_runs import begins, ends, report, scalars, write_lines


def one(log: RunLog, name: str = "loss", mode: str = "train") -> Curve:
    """The curve of that name."""
    (curve,) = [curve for curve in log.curves if (curve.name, curve.mode) == (name, mode)]
    return curve


def points(curve: Curve) -> list[tuple[int, float]]:
    """Those of a short one."""
    return list(zip(curve.steps, curve.mean, strict=True))


def test_what_the_writer_wrote(tmp_path: Path) -> None:
    """Scalars by name and mode, in the order they first came; NaN and the infinities, names that are reserved, the facts
    of the run and how it ended."""
    events: list[Event] = [
        BeforeRun(),
        RunInfo(info={"model": "Net", "value": "NaN"}),
        ScalarsLogged(step=1, scalars={"loss": 0.5, "step": 3.0, "scalars/x": 4.0}),
        ScalarsLogged(step=2, scalars={"loss": math.nan, "lr": 1.0}),
        ScalarsLogged(step=2, mode="val", scalars={"loss": math.inf}),
        AfterRun(reason="error", error="ValueError: no"),
    ]
    writer = JSONLWriter()
    writer.open(Run(work_dir=str(tmp_path)))
    writer.write_batch(events)
    writer.close()

    log = read_curves(tmp_path / "metrics.jsonl")

    named = [f"{curve.mode}/{curve.name}" for curve in log.curves]
    assert named == ["train/loss", "train/step", "train/scalars/x", "train/lr", "val/loss"]
    assert one(log).steps == [1, 2]
    assert (one(log).not_finite, one(log, mode="val").not_finite) == (1, 1)
    assert (log.info, log.ended, log.whole) == ({"model": "Net", "value": "NaN"}, "error: ValueError: no", 6)
    assert (log.resumed_at, log.superseded, log.cut_short) == ([], 0, 0)


@pytest.mark.parametrize(
    ("torn", "last", "cut_short"),
    [
        (b'{"mode":"train","step":3', 2, 1),
        (b'{"mode', 2, 1),
        (b'{"event":"before_run","it', 2, 1),
        (b'{"mode":"train","step":3,"loss":3.0}', 3, 0),
    ],
)
def test_a_torn_end(torn: bytes, last: int, cut_short: int, tmp_path: Path) -> None:
    """What is whole is read, also without its line end; the line that is not is counted."""
    path = write_lines(tmp_path, begins(0), scalars(1, loss=1.0), scalars(2, loss=2.0), torn=torn)

    log = read_curves(path)

    assert points(one(log)) == [(step, float(step)) for step in range(1, last + 1)]
    assert (log.cut_short, log.ended) == (cut_short, None)


def logged(mode: str, *steps: int, value: float) -> list[dict[str, Any]]:
    """Lines of scalars with the same value."""
    return [scalars(step, mode, loss=value) for step in steps]


@pytest.mark.parametrize(
    ("rows", "curves", "resumed_at", "superseded"),
    [
        (
            [
                begins(0),
                *logged("train", 10, 20, 30, value=1.0),
                *logged("val", 20, value=0.1),
                begins(20),
                *logged("val", 20, value=0.2),
                *logged("train", 30, 40, value=2.0),
                begins(30),
                *logged("train", 40, value=3.0),
                ends(40),
            ],
            {"train": [(10, 1.0), (20, 1.0), (30, 2.0), (40, 3.0)], "val": [(20, 0.2)]},
            [20, 30],
            3,
        ),
        (
            [
                begins(0),
                *logged("train", 10, value=1.0),
                *logged("val", 10, value=1.0),
                begins(0),
                *logged("train", 5, value=2.0),
            ],
            {"train": [(5, 2.0)]},
            [0],
            2,
        ),
        (
            [
                begins(0),
                *logged("train", 10, value=1.0),
                ends(10),
                begins(10),
                *logged("test", 10, value=1.0),
                ends(10),
            ],
            {"train": [(10, 1.0)], "test": [(10, 1.0)]},
            [],
            0,
        ),
        (
            [
                *logged("train", 10, 20, 30, value=1.0),
                *logged("val", 30, value=1.0),
                *logged("train", 20, 30, value=2.0),
            ],
            {"train": [(10, 1.0), (20, 2.0), (30, 2.0)]},
            [19],
            3,
        ),
        (
            [begins(0), scalars(1, loss=1.0, lr=1.0), scalars(1, loss=2.0)],
            {"train": [(1, 1.0), (1, 2.0)]},
            [],
            0,
        ),
        ([], {}, [], 0),
    ],
    ids=["resumed twice", "begun anew", "a test after it", "only scalars", "put twice", "just begun"],
)
def test_iterations_that_were_run_again(
    rows: list[dict[str, Any]],
    curves: dict[str, list[tuple[int, float]]],
    resumed_at: list[int],
    superseded: int,
    tmp_path: Path,
) -> None:
    """The later records stay, of steps after the one where it went on, and of a validation at that very step. Where only
    scalars were written, a step of training that goes back says that they were run again."""
    log = read_curves(write_lines(tmp_path, *rows))

    assert {curve.mode: points(curve) for curve in log.curves if curve.name == "loss"} == curves
    assert (log.resumed_at, log.superseded) == (resumed_at, superseded)


def test_whether_a_run_was_begun_again(tmp_path: Path) -> None:
    """After an end, and has none of its own; one that never ended is not begun again, however often it was killed."""
    cases = [
        [begins(0), scalars(10, loss=1.0)],
        [begins(0), begins(0)],
        [begins(0), ends(10)],
        [begins(0), ends(10), begins(10)],
        [begins(0), ends(10), begins(10), begins(20)],
        [begins(0), ends(10), begins(10), ends(20)],
    ]

    logs = [read_curves(write_lines(tmp_path, *rows)) for rows in cases]

    assert [log.begun_again for log in logs] == [False, False, False, True, True, False]


def test_a_long_file(tmp_path: Path) -> None:
    """It has more than one block of lines; its curves are bounded, and have their spikes."""
    count = 10 * POINTS
    rows = [scalars(i, loss=9.0 if i == 77 else 0.5) for i in range(1, count + 1)]
    rows[100:100] = [
        scalars(100, "val", loss=0.25),
        {"event": "checkpoint_saved", "iter": 99, "path": "x" * 200},
    ]
    path = write_lines(
        tmp_path, begins(0), *rows, begins(4000), *(scalars(i, loss=0.5) for i in range(4001, 5001))
    )
    assert path.stat().st_size > 1 << 20

    log = read_curves(path)

    assert one(log).count == 5000
    assert len(one(log).steps) <= POINTS
    assert (one(log).greatest, one(log).greatest_step, max(one(log).high)) == (9.0, 77, 9.0)
    assert points(one(log, mode="val")) == [(100, 0.25)]
    assert log.superseded == count - 4000


@pytest.mark.parametrize("value", [b'"text"', b'"~NaN"', b"null", b"[1]", b'{"a":1}', b"9" * 400])
def test_what_is_no_number_is_left_out(value: bytes, tmp_path: Path) -> None:
    """Another program may have added it, as an integer beyond all floats; the others are read."""
    rest = b'{"mode":"train","step":2,"note":3.0,"loss":2.0}'
    path = write_lines(tmp_path, torn=b'{"mode":"train","step":1,"loss":1.0,"note":' + value + b"}\n" + rest)

    log = read_curves(path)

    assert points(one(log)) == [(1, 1.0), (2, 2.0)]
    assert points(one(log, "note")) == [(2, 3.0)]


@pytest.mark.parametrize(
    "line",
    [
        b'{"mode":"train","step":2,"loss":"\xff"}',
        b'{"event":"before_run","iter":2,"x":"\xff"}',
        b'{"mode":"train","step":2,"loss":' + b"[" * 9999 + b"]" * 9999 + b"}",
        b'{"event":"x","deep":' + b"[" * 450 + b"]" * 450 + b"}",
        b'{"event":"before_run","iter":' + b"9" * 9999 + b"}",
    ],
    ids=["byte", "byte of an event", "deep", "deep event", "endless"],
)
@pytest.mark.parametrize("starts", [[], [begins(0)]], ids=["scalars", "runs"])
def test_a_damaged_line_is_counted(line: bytes, starts: list[dict[str, object]], tmp_path: Path) -> None:
    """One flipped bit costs one line, not the report."""
    path = write_lines(tmp_path, *starts, scalars(1, loss=1.0))
    with path.open("ab") as file:
        file.write(line + b"\n" + msgspec.json.encode(scalars(3, loss=3.0)) + b"\n")

    log = read_curves(path)

    assert points(one(log)) == [(1, 1.0), (3, 3.0)]
    assert log.cut_short <= 1


@pytest.mark.parametrize("step", [2**63, -1, 10**30, "one", None, 1.5])
def test_an_impossible_step_is_left_out(step: object, tmp_path: Path) -> None:
    """Its neighbours are not; also where it is that of a resume."""
    rows = [scalars(1, loss=1.0), scalars(1, loss=2.0) | {"step": step}, scalars(3, loss=3.0)]

    assert points(one(read_curves(write_lines(tmp_path, *rows)))) == [(1, 1.0), (3, 3.0)]
    path = write_lines(tmp_path, begins(0), *rows, begins(2) | {"iter": step})
    assert points(one(read_curves(path))) == [(1, 1.0), (3, 3.0)]


def test_the_greatest_floats(tmp_path: Path) -> None:
    """A text and a page are made of them."""
    values = [1e308, -1e308, 1.7e308, 1.7e308]
    run = tmp_path / "run"
    write_lines(run, *(scalars(i, loss=values[i % 4], flat=1.7e308) for i in range(5000)))

    assert report(run) == 2  # without costs
    assert report(run, "--html", tmp_path / "page.html", "--json") == 2
