"""CSVWriter: one row per mode and step, whatever comes in whatever order, in a file that a run goes on with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventloop.bus import Bus
from eventloop.events import BeforeTrain, Event, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import CSVWriter
from eventloop.writers.csv_table import Table
from tests.writers.conftest import Account, Attach, emit, train, val, write
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
        "mode,step,iter,epoch,loss,lr,accuracy\ntrain,40,39,1,0.25,0.001,\nval,40,40,0,,,0.5\n"
    )


def test_a_new_metric_is_a_new_column(attach: Attach, tmp_path: Path) -> None:
    """Earlier rows keep their values, and are empty in the new column; the file may be chosen, and is a link that stays
    one."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/all.csv").symlink_to(tmp_path / "real.csv")
    bus = attach(CSVWriter("logs/all.csv", name="second"))
    one_by_one(bus, *train(1, a=1.0), *train(2, b=2.0), *train(3, c=3.0, a=4.0))

    assert [(row["a"], row["b"], row["c"]) for row in rows(tmp_path / "real.csv")] == [
        ("1.0", "", ""),
        ("", "2.0", ""),
        ("4.0", "", "3.0"),
    ]
    assert (tmp_path / "logs/all.csv").is_symlink()


def test_one_row_per_mode_and_step(attach: Attach, path: Path) -> None:
    """The values of a step in several events are in its one row, also when another step came in between."""
    events = [*train(1, a=1.0), *train(2, a=2.0), *train(1, b=3.0), val(1, a=5.0), *train(3, a=6.0)]

    one_by_one(attach(CSVWriter()), *events)

    assert [(row["mode"], row["step"], row["a"], row["b"]) for row in rows(path)] == [
        ("train", "1", "1.0", "3.0"),
        ("train", "2", "2.0", ""),
        ("val", "1", "5.0", ""),
        ("train", "3", "6.0", ""),
    ]


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


# --- a file that is there, and a run that breaks off -----------------------------------------------------------


def test_a_resumed_run_goes_on_in_the_file(attach: Attach, path: Path) -> None:
    """Steps after the checkpoint are those of the resumed run; earlier ones, and the columns, stay."""
    write(attach(CSVWriter()), *train(10, 20, 30, 40, a=1.0), val(20, acc=0.5), val(40, acc=0.75))

    write(attach(CSVWriter()), BeforeTrain(iter=20), *train(25, 35, a=2.0, b=3.0))

    assert [(row["mode"], row["step"], row["a"], row["acc"], row["b"]) for row in rows(path)] == [
        ("train", "10", "1.0", "", ""),
        ("train", "20", "1.0", "", ""),
        ("val", "20", "", "0.5", ""),
        ("train", "25", "2.0", "", "3.0"),
        ("train", "35", "2.0", "", "3.0"),
    ]


def test_without_before_train_the_run_says_where_it_goes_on(attach: Attach, path: Path) -> None:
    """A bus without a trainer gives the writer `run.start_iter`; an evaluation of an earlier checkpoint removes nothing."""
    write(attach(CSVWriter()), *train(10, 20, 30, a=1.0))
    write(attach(CSVWriter(), start_iter=10), ScalarsLogged(mode="test", step=10, scalars={"acc": 1.0}))
    tested = [(row["mode"], row["step"]) for row in rows(path)]

    write(attach(CSVWriter(), start_iter=10), *train(15, a=2.0))

    assert tested == [("train", "10"), ("train", "20"), ("train", "30"), ("test", "10")]
    assert [(row["mode"], row["step"]) for row in rows(path)] == [
        ("train", "10"),
        ("test", "10"),
        ("train", "15"),
    ]


def test_a_new_training_keeps_the_file_of_an_earlier_one(attach: Attach, path: Path, tmp_path: Path) -> None:
    """It begins a file of its own, and the other is beside it, row for row."""
    for loss in (1.0, 2.0, 3.0):
        write(attach(CSVWriter()), BeforeTrain(), *train(10, 20, loss=loss))

    assert [row["loss"] for row in rows(path)] == ["3.0"] * 2
    assert [row["loss"] for row in rows(tmp_path / "metrics.1.csv")] == ["1.0"] * 2
    assert [row["loss"] for row in rows(tmp_path / "metrics.2.csv")] == ["2.0"] * 2


def test_a_validation_before_the_training_stays(attach: Attach, path: Path) -> None:
    """The score of the untrained model belongs to the run."""
    write(attach(CSVWriter()), val(0, acc=0.1), BeforeTrain(), *train(1))

    assert [(row["mode"], row["step"]) for row in rows(path)] == [("val", "0"), ("train", "1")]


def test_a_file_that_was_cut_anywhere_is_gone_on_with(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Within its first line too, or within a letter: whole rows stay, and one warning names the rest."""
    whole = "mode,step,iter,epoch,verlust_größe\ntrain,1,0,0,0.5\ntrain,2,1,0,0.25\n".encode()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        caplog.clear()

        table = Table(path)
        table.add({("train", 3): {"iter": "2", "epoch": "0", "verlust_größe": "0.125"}})
        table.close()

        kept = max(0, whole[:end].count(b"\n") - 1)
        assert [row["step"] for row in rows(path)] == [*["1", "2"][:kept], "3"]
        torn = len(whole[:end].rpartition(b"\n")[2])
        assert len(caplog.messages) == bool(torn)
        assert not torn or f"({torn} bytes)" in caplog.text
        if end == len(whole) - 1:
            assert (
                "metrics.csv: the last row was cut short and is removed: b'train,2,1,0,0.25'" in caplog.text
            )


def test_rows_that_a_kill_left_in_disorder_are_merged(attach: Attach, path: Path) -> None:
    """The next run finds the late values at the end of the file, and puts them in their places."""
    path.write_text("mode,step,iter,epoch,a,b\ntrain,1,0,0,1.0,\ntrain,2,1,0,1.0,\ntrain,1,0,0,,2.0\n")

    write(attach(CSVWriter()), *train(3, a=1.0))

    assert [(row["step"], row["b"]) for row in rows(path)] == [("1", "2.0"), ("2", ""), ("3", "")]


def test_a_failed_rewrite_leaves_the_old_file(
    attach: Attach, account: Account, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up while columns are added takes no earlier row."""
    write(attach(CSVWriter()), *train(1, 2, a=1.0))
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    bus = attach(CSVWriter())
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        write(bus, *train(3, b=1.0))

    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["metrics.csv"]
    assert "No space left on device" in account(bus).error


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "epoch,loss\n1,0.5",
            "its first line must begin with mode,step,iter,epoch, got 'epoch,loss'; choose another",
        ),
        ("mode,step,iter,epoch,loss\ntrain,1,0,0,0,5\n", "line 2 is not a row of this table"),
    ],
)
def test_another_programs_file_is_refused(
    attach: Attach, account: Account, path: Path, text: str, error: str
) -> None:
    """A file that is no table of a CSVWriter, or that an editor has changed, is left as it is."""
    path.write_text(text)
    bus = attach(CSVWriter())

    write(bus, *train(1))

    assert error in account(bus).error
    assert path.read_text() == text
