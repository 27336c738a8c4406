"""`eventloop replay`: any writer, driven from a run's event log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eventloop import WRITERS, Trainer, cli, read_events
from eventloop.events import Event
from eventloop.events.run import Run
from eventloop.writers import CSVWriter, EventLogWriter, JSONLWriter, TensorBoardWriter, Writer, read_jsonl
from tests.support.trainers import batches, tiny_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that wrote a log, and with the other writers too."""
    directory = tmp_path_factory.mktemp("run")
    model = tiny_model()
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=batches(12),
        val_loader=batches(2),
        max_epochs=2,
        work_dir=directory,
        writers=[EventLogWriter(), JSONLWriter(), CSVWriter(), TensorBoardWriter()],
    )
    trainer.train()
    trainer.close()
    return directory


def replay(*arguments: object) -> int:
    """The command, in this process."""
    return cli.main(["replay", *map(str, arguments)])


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(p.step, p.value) for p in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_files_are_what_the_run_wrote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte, and TensorBoard's own reader finds the same curves; the closing line says how many events there
    were, and where they are."""
    for target in ("jsonl", "csv", "tensorboard"):
        assert replay(run, "--to", target, "--out", tmp_path) == 0
    said = capsys.readouterr()

    made = tmp_path / "metrics.jsonl"
    assert made.read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert (tmp_path / "metrics.csv").read_bytes() == (run / "metrics.csv").read_bytes()
    shown = curves(run / "tensorboard")
    assert curves(tmp_path / "tensorboard") == shown
    assert "train/loss" in shown
    assert said.out == ""
    count = len(list(read_jsonl(made)))
    told = rf"eventloop: {count} events replayed into {re.escape(str(made))}; [\d,]+ of kinds that the target does not take"
    assert re.fullmatch(told, said.err.splitlines()[0])


def test_the_console_shows_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the lines that a run without a terminal has, positions within the epoch included."""
    assert replay(run, "--to", "console") == 0

    shown = capsys.readouterr().out
    assert "Epoch(train) [1][10/12]  " in shown
    assert "Epoch(val) [2]  " in shown


def test_only_chooses_events(run: Path, tmp_path: Path) -> None:
    """Also such as the writer leaves out by default."""
    chosen = ("after_train_iter", "after_val_epoch")
    assert replay(run, "--to", "jsonl", "--out", tmp_path, "--only", *chosen) == 0

    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [row["event"] for row in rows] == (["after_train_iter"] * 12 + ["after_val_epoch"]) * 2


class Notes(Writer):
    """A writer of the user's own."""

    path = Path()

    def open(self, run: Run) -> None:
        Notes.path = Path(run.work_dir, "notes")

    def write(self, event: Event) -> None:
        with self.path.open("a") as file:
            file.write(f"{event}\n")


class Mine(JSONLWriter):
    """One derived from eventloop's, and registered under a name with a dot."""

    def __init__(self) -> None:
        super().__init__("mine.jsonl")


@pytest.fixture
def registered() -> Iterator[None]:
    """Make them known, for one test."""
    WRITERS.register(Notes)
    WRITERS.register(name="my.Lines")(Mine)
    yield
    WRITERS.forget("Notes")
    WRITERS.forget("my.Lines")


@pytest.mark.usefixtures("registered")
def test_another_writer_is_found_by_its_class(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a run's writers can be. A full disk is no bad input, and no secret: one line, and exit code 1."""
    assert replay(run, "--to", "Notes", "--out", tmp_path) == 0

    logged = sum(1 for _ in read_events(run, only="scalars_logged"))
    assert len((tmp_path / "notes").read_text().splitlines()) == logged
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").symlink_to("/dev/full")
    capsys.readouterr()
    assert replay(run, "--to", "Notes", "--out", full) == 1
    told = "eventloop: [Errno 28] No space left on device (--traceback shows where)\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--to", "csv"], "no run at nowhere: give the run's directory or its events.evl"),
        (
            ["empty", "--to", "csv"],
            "empty holds no event log (events.evl): a run writes one with writers=[EventLog",
        ),
        (["text", "--to", "csv"], "text is not an event log: expected it to begin with"),
        (["log", "--to", "tensorbord"], "unknown target 'tensorbord': did you mean 'tensorboard'?"),
        (["log", "--to", "paper"], "unknown target 'paper': known are CSVWriter, "),
        (["log", "--to", "Writer"], "unknown target 'Writer'"),
        (
            ["log", "--to", "csv", "--only", "scalar_logged"],
            "unknown event 'scalar_logged': did you mean 'scalars_l",
        ),
        (
            ["log", "--to", "csv", "--only", "after_run"],
            "CSVWriter takes none of after_run: it takes before_train, s",
        ),
        (["log", "--to", "console", "--out", "x"], "--out is for targets that write files"),
        (
            ["log", "--to", "csv", "--out", "full"],
            "full/metrics.csv exists already: choose another --out, or remove",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be done is said before anything is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no log")
    (tmp_path / "log").write_bytes((run / "events.evl").read_bytes())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "metrics.csv").touch()

    assert replay(*arguments) == 2

    errors = capsys.readouterr().err
    assert errors.startswith(f"eventloop: {message}")
    assert (errors.count("\n"), errors.endswith(" (--traceback shows where)\n")) == (1, True)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("target", "made"),
    [
        ("TensorBoardWriter", "tensorboard"),
        ("jsonl", "metrics.jsonl"),
        ("CSVWriter", "metrics.csv"),
        ("EventLogWriter", "events.evl"),
        ("ImageFileWriter", "images"),
        ("my.Lines", "mine.jsonl"),
    ],
)
def test_what_exists_is_not_written_into(
    target: str, made: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However the writer is named: the second replay is refused, and changes nothing."""
    arguments = (run, "--to", target, "--out", tmp_path)
    assert replay(*arguments) == 0
    assert f" events replayed into {tmp_path / made}" in capsys.readouterr().err
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}

    assert replay(*arguments) == 2

    message = f"eventloop: {tmp_path / made} exists already: choose another --out, or remove it"
    assert capsys.readouterr().err == f"{message} (--traceback shows where)\n"
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("name", ["events.evl", "other.evl"])
def test_a_run_is_not_replayed_into_itself(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log would be there twice, whatever it is called."""
    (tmp_path / name).write_bytes((run / "events.evl").read_bytes())

    assert replay(tmp_path, "--to", "EventLogWriter", "--out", tmp_path) == 2

    message = f"{tmp_path} is the run itself, whose {name} is replayed: choose another --out"
    assert capsys.readouterr().err == f"eventloop: {message} (--traceback shows where)\n"
    assert (tmp_path / name).read_bytes() == (run / "events.evl").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [name]
