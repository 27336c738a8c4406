"""The curves that `eventloop report` reads: of whole files, torn ones, and those of resumed runs."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from eventloop.events import AfterRun, BeforeRun, RunInfo, ScalarsLogged
from eventloop.events.run import Run
from eventloop.reporting import curves as curves_reader
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
    writer = JSONLWriter()
    writer.open(Run(work_dir=str(tmp_path)))
    writer.write_batch(
        [
            BeforeRun(),
            RunInfo(info={"model": "Net", "value": "NaN"}),
            ScalarsLogged(step=1, scalars={"loss": 0.5, "step": 3.0, "scalars/x": 4.0}),
            ScalarsLogged(step=2, scalars={"loss": math.nan, "lr": 1.0}),
            ScalarsLogged(step=2, mode="val", scalars={"loss": math.inf}),
            AfterRun(reason="error", error="ValueError: no"),
        ]
    )
    writer.close()

    log = read_curves(tmp_path / "metrics.jsonl")

    assert [(curve.mode, curve.name) for curve in log.curves] == [
        ("train", "loss"), ("train", "step"), ("train", "scalars/x"), ("train", "lr"), ("val", "loss"),
    ]  # fmt: skip
    assert one(log).steps == [1, 2]
    assert (one(log).not_finite, one(log, mode="val").not_finite) == (1, 1)
    assert (log.info, log.ended, log.whole) == ({"model": "Net", "value": "NaN"}, "error: ValueError: no", 6)
    assert (log.resumed_at, log.superseded, log.cut_short) == ([], 0, 0)


@pytest.mark.parametrize("torn", [b'{"mode":"train","step":3', b'{"mode', b'{"event":"before_run","it'])
def test_a_torn_end(torn: bytes, tmp_path: Path) -> None:
    """What is whole is read; the line that is not is counted."""
    path = write_lines(tmp_path, begins(0), scalars(1, loss=1.0), scalars(2, loss=2.0), torn=torn)

    log = read_curves(path)

    assert points(one(log)) == [(1, 1.0), (2, 2.0)]
    assert (log.cut_short, log.ended) == (1, None)


def test_a_line_without_its_end_may_be_whole(tmp_path: Path) -> None:
    """A writer that was killed before the line end has lost nothing."""
    path = write_lines(tmp_path, scalars(1, loss=1.0), torn=b'{"mode":"train","step":2,"loss":2.0}')

    assert points(one(read_curves(path))) == [(1, 1.0), (2, 2.0)]


def test_iterations_that_were_run_again(tmp_path: Path) -> None:
    """The later records stay, of steps after the one where it went on, and of a validation at that very step."""
    path = write_lines(
        tmp_path,
        begins(0),
        *(scalars(step, loss=1.0, lr=float(step)) for step in (10, 20, 30)),
        scalars(20, "val", acc=0.1),
        begins(20),
        scalars(20, "val", acc=0.2),
        scalars(30, loss=2.0),
        scalars(40, loss=2.0),
        begins(30),
        scalars(40, loss=3.0),
        ends(40),
    )

    log = read_curves(path)

    assert points(one(log)) == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 3.0)]
    assert points(one(log, "lr")) == [(10, 10.0), (20, 20.0)]
    assert points(one(log, "acc", "val")) == [(20, 0.2)]
    assert (log.resumed_at, log.superseded) == ([20, 30], 4)


def test_a_run_that_begins_anew_in_the_same_directory(tmp_path: Path) -> None:
    """Nothing of the earlier one is left in the curves."""
    path = write_lines(
        tmp_path,
        begins(0),
        scalars(10, loss=1.0),
        scalars(10, "val", acc=1.0),
        begins(0),
        scalars(5, loss=2.0),
    )

    log = read_curves(path)

    assert [points(curve) for curve in log.curves] == [[(5, 2.0)]]
    assert log.resumed_at == [0]


def test_a_validation_after_the_training_is_no_resume(tmp_path: Path) -> None:
    """It begins where the training ended, and both are told."""
    path = write_lines(
        tmp_path,
        begins(0),
        scalars(10, loss=1.0),
        ends(10),
        begins(10),
        scalars(10, "test", acc=1.0),
        ends(10),
    )

    log = read_curves(path)

    assert [points(curve) for curve in log.curves] == [[(10, 1.0)], [(10, 1.0)]]
    assert (log.resumed_at, log.superseded) == ([], 0)


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


def test_a_file_without_the_lines_of_the_runs(tmp_path: Path) -> None:
    """Where only scalars were written, a step of training that goes back says that they were run again."""
    path = write_lines(
        tmp_path,
        *(scalars(step, loss=1.0) for step in (10, 20, 30)),
        scalars(30, "val", acc=1.0),
        *(scalars(step, loss=2.0) for step in (20, 30)),
    )

    log = read_curves(path)

    assert points(one(log)) == [(10, 1.0), (20, 2.0), (30, 2.0)]
    assert (log.resumed_at, log.superseded) == ([19], 3)


def test_two_values_of_one_step_are_both_kept(tmp_path: Path) -> None:
    """A metric that was put twice in an iteration has two records."""
    path = write_lines(tmp_path, begins(0), scalars(1, loss=1.0, lr=1.0), scalars(1, loss=2.0))

    assert points(one(read_curves(path))) == [(1, 1.0), (1, 2.0)]


@pytest.mark.parametrize("block", [64, 1000, 1 << 20])
def test_a_long_file_in_blocks(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is cut, also within a line: the same curves, bounded, with their spikes."""
    monkeypatch.setattr(curves_reader, "BLOCK", block)
    count = 3 * POINTS
    rows = [scalars(i, loss=9.0 if i == 77 else 0.5) for i in range(1, count + 1)]
    rows[100:100] = [
        scalars(100, "val", loss=0.25),
        {"event": "checkpoint_saved", "iter": 99, "path": "x" * 200},
    ]
    path = write_lines(
        tmp_path, begins(0), *rows, begins(4000), *(scalars(i, loss=0.5) for i in range(4001, 5001))
    )

    log = read_curves(path)

    assert one(log).count == 5000
    assert len(one(log).steps) <= POINTS
    assert (one(log).greatest, one(log).greatest_step, max(one(log).high)) == (9.0, 77, 9.0)
    assert points(one(log, mode="val")) == [(100, 0.25)]
    assert log.superseded == 2000


@pytest.mark.parametrize("value", ["text", "~NaN", None, [1], {"a": 1}])
def test_what_is_no_number_is_left_out(value: object, tmp_path: Path) -> None:
    """Another program may have added it; the others are read."""
    row = scalars(1, loss=1.0) | {"note": value}

    log = read_curves(write_lines(tmp_path, row, scalars(2, loss=2.0) | {"note": 3.0}))

    assert points(one(log)) == [(1, 1.0), (2, 2.0)]
    assert points(one(log, "note")) == [(2, 3.0)]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{"epoch":1,"mode":"train","step":"one"}', r'b\'\{"epoch":1,"mode":"train","step":"one"\}\''),
        (b"\x00\xff\x00", r"b'\\x00\\xff\\x00'"),
        (b"hello\n", r"b'hello\\n'"),
    ],
)
def test_a_file_of_something_else(content: bytes, line: str, tmp_path: Path) -> None:
    """A file without any line of scalars or events is an error that shows its first line."""
    path = write_lines(tmp_path, torn=content)

    with pytest.raises(
        ValueError, match=rf"metrics\.jsonl .*expected JSON objects .*, got the first line {line}"
    ):
        read_curves(path)


def test_an_empty_file_has_no_curves(tmp_path: Path) -> None:
    """A run that has just begun is no error."""
    assert read_curves(write_lines(tmp_path)).curves == []


@pytest.mark.parametrize(
    "line",
    [
        b'{"mode":"train","step":2,"loss":"\xff"}', b'{"event":"before_run","iter":2,"x":"\xff"}',
        b'{"mode":"train","step":2,"loss":' + b"[" * 9999 + b"]" * 9999 + b"}",
        b'{"event":"x","deep":' + b"[" * 450 + b"]" * 450 + b"}", b'{"event":"before_run","iter":' + b"9" * 9999 + b"}",
    ],
    ids=["byte", "byte of an event", "deep", "deep event", "endless"],
)  # fmt: skip
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


def test_an_integer_beyond_all_floats_is_no_number(tmp_path: Path) -> None:
    """The other values are read."""
    path = write_lines(
        tmp_path, scalars(1, loss=1.0), torn=b'{"mode":"train","step":2,"loss":' + b"9" * 400 + b"}"
    )

    assert points(one(read_curves(path))) == [(1, 1.0)]


def test_the_greatest_floats(tmp_path: Path) -> None:
    """A text and a page are made of them."""
    values = [1e308, -1e308, 1.7e308, 1.7e308]
    run = tmp_path / "run"
    write_lines(run, *(scalars(i, loss=values[i % 4], flat=1.7e308) for i in range(5000)))

    assert report(run) == 0
    assert report(run, "--html", tmp_path / "page.html", "--json") == 0
