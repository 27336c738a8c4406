"""CSVWriter: one row per mode and step, whatever comes in whatever order."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventloop.bus import Bus
from eventloop.events import Event, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers.csv_writer import CSVWriter
from tests.writers.conftest import Attach, emit, train, val, write
from tests.writers.csv_rows import rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def one_by_one(bus: Bus, *events: Event) -> None:
    """Each event in a delivery of its own."""
    for event in events:
        emit(bus, event)
    bus.close()


def test_scalars_are_one_row(attach: Attach, path: Path) -> None:
    """A row is mode, step, iter, epoch and the metrics, under a header that names them."""
    write(
        attach(CSVWriter()),
        ScalarsLogged(step=40, iter=39, epoch=1, scalars={"loss": 0.25, "lr": 1e-3}),
        val(40, accuracy=0.5),
    )

    assert path.read_text() == (
        "mode,step,iter,epoch,loss,lr,accuracy\n"
        "train,40,39,1,0.25,0.001,\n"
        "val,40,40,0,,,0.5\n"
    )  # fmt: skip


def test_a_new_metric_is_a_new_column(attach: Attach, tmp_path: Path) -> None:
    """Earlier rows keep their values, and are empty in the new column; the file may be chosen, and is a link that stays
    one."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/all.csv").symlink_to(tmp_path / "real.csv")
    bus = attach(CSVWriter("logs/all.csv", name="second"))
    one_by_one(bus, *train(1, a=1.0), *train(2, b=2.0), *train(3, c=3.0, a=4.0))

    assert [(row["a"], row["b"], row["c"]) for row in rows(tmp_path / "real.csv")] == [
        ("1.0", "", ""), ("", "2.0", ""), ("4.0", "", "3.0"),
    ]  # fmt: skip
    assert (tmp_path / "logs/all.csv").is_symlink()


def test_one_row_per_mode_and_step(attach: Attach, path: Path) -> None:
    """The values of a step in several events are in its one row, also when another step came in between."""
    events = [
        *train(1, a=1.0), *train(2, a=2.0), *train(1, b=3.0), val(1, a=5.0), *train(3, a=6.0),
    ]  # fmt: skip

    one_by_one(attach(CSVWriter()), *events)

    assert [(row["mode"], row["step"], row["a"], row["b"]) for row in rows(path)] == [
        ("train", "1", "1.0", "3.0"), ("train", "2", "2.0", ""), ("val", "1", "5.0", ""),
        ("train", "3", "6.0", ""),
    ]  # fmt: skip


def test_a_late_step_is_put_in_its_place(attach: Attach, path: Path) -> None:
    """The steps of a mode increase down the file, in whatever order they came."""
    one_by_one(attach(CSVWriter()), *train(10, 40, 20, 30, 5, 50))

    assert [row["step"] for row in rows(path)] == ["5", "10", "20", "30", "40", "50"]


def test_of_a_metric_logged_twice_the_later_value_stays(attach: Attach, path: Path) -> None:
    """A row has one cell for it."""
    one_by_one(attach(CSVWriter()), *train(1, a=1.0, b=7.0), *train(1, a=2.0))

    assert [(row["a"], row["b"]) for row in rows(path)] == [("2.0", "7.0")]


def test_late_values_wait_at_the_end_of_the_file(path: Path) -> None:
    """They are appended in a second row, and in their places after a flush."""
    writer = CSVWriter()
    writer.open(Run(work_dir=str(path.parent)))
    writer.write_batch([*train(1, 2, 3, a=1.0, b=0.0)])
    writer.write_batch([*train(1, b=2.0)])

    assert [(row["step"], row["b"]) for row in rows(path)][-1] == ("1", "2.0")
    writer.flush()
    assert [(row["a"], row["b"]) for row in rows(path)] == [("1.0", "2.0"), ("1.0", "0.0"), ("1.0", "0.0")]
    writer.close()


def test_names_stay_what_they_are(attach: Attach, path: Path) -> None:
    """Names that a spreadsheet takes for formulas, or with separators, quotes and line ends, are not changed; a file with
    such names is gone on with."""
    names = [
        "=1+1",
        "+a",
        "-b",
        "@c",
        "\td",
        "\re",
        "f\rg",
        "h\r\ni",
        '"',
        ",",
        "'=x",
        "j\nk",
        'a,"b"',
        " größe ",
    ]
    for step in (1, 2):
        scalars = dict.fromkeys(names, -1.5 * step)
        event = ScalarsLogged(mode=f"={names[5]}", step=step, iter=-1, scalars=scalars)
        one_by_one(attach(CSVWriter()), event, val(step, late=1.0))

    read = [row for row in rows(path) if row["mode"] == "=\re"]
    assert [[row[name] for name in names] for row in read] == [["-1.5"] * 14, ["-3.0"] * 14]
    assert {row["iter"] for row in read} == {"-1"}
