"""`eventloop replay` of a run that somebody else made: nothing is written outside of the folder, nothing of it is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eventloop import WRITERS, cli
from eventloop import replay as replay_into
from eventloop.bus import Bus
from eventloop.events import (
    AfterRun,
    BeforeTrain,
    CheckpointSaved,
    Event,
    HandlerFailed,
    HistogramLogged,
    ImageLogged,
    RunInfo,
    ScalarsLogged,
    StopRequested,
    TextLogged,
)
from eventloop.events.run import Run
from eventloop.writers import EventLogWriter, JSONLWriter, Writer


def hostile(text: str) -> list[Event]:
    """An event of each kind that writers take, with the same text wherever one is."""
    return [
        BeforeTrain(),
        ScalarsLogged(mode=text, step=1, scalars={text: 1.0}),
        TextLogged(mode=text, name=text, text=text),
        ImageLogged(mode=text, name=text, step=1, data=b"\0", shape=(1, 1, 1)),
        HistogramLogged(mode=text, name=text, data=b"\0" * 4, shape=(1,), dtype="float32"),
        RunInfo(info={text: text}),
        CheckpointSaved(path=text),
        HandlerFailed(handler=text, error=text),
        StopRequested(reason=text),
        AfterRun(reason=text, error=text),
    ]


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory with such a log, beside files of ours; its log is all that it has."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "file").write_text("ours")
    run = tmp_path / "a" / "foreign"
    outside = [f"{tmp_path}/ours/file", "../../../../ours/file", "a/../../../../ours"]
    texts = [*outside, "\0", "\x1b[2J\r", "x" * 300]
    with Bus() as bus:
        EventLogWriter().attach(bus, lambda: Run(work_dir=str(run)))
        for text in texts:
            for event in hostile(text):
                bus.emit(event)
    monkeypatch.chdir(run)
    return run


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder, with the bytes of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "target", ["tensorboard", "jsonl", "csv", "console", "ImageFileWriter", "EventLogWriter"]
)
def test_everything_is_written_in_the_folder(
    foreign: Path, tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever names, modes and paths the events have; and the terminal obeys none of them."""
    before = tree(tmp_path)

    assert cli.main(["replay", str(foreign), "--to", target]) == 0

    made = f"{foreign / 'replay'}"
    after = tree(tmp_path)
    assert {path: data for path, data in after.items() if not path.startswith(made)} == before
    assert len(after) > len(before)
    said = capsys.readouterr()
    assert {*"\x1b\r\0"}.isdisjoint(said.out + said.err)


@pytest.mark.parametrize(
    ("link", "target"),
    [("replay", "ours"), ("replay/metrics.jsonl", "ours/new"), ("replay/images/train", "ours")],
)
def test_links_in_the_run_are_not_followed(
    foreign: Path, tmp_path: Path, link: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder for the files is in the run, whose author may have put one there, also one that leads nowhere yet. Such a
    link exists in another folder too: its target is not made."""
    for folder in {foreign, tmp_path / "out"}:
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        (folder / link).symlink_to(tmp_path / target)
    before = tree(tmp_path)

    assert cli.main(["replay", str(foreign), "--to", "jsonl"]) == 2
    said = capsys.readouterr().err
    with pytest.raises(ValueError, match=rf"{link} is a link, which leads out of .*: .*work_dir="):
        replay_into(foreign, JSONLWriter())

    assert f"{foreign / link} is a link" in said
    assert "--out DIR" in said
    if link.endswith(".jsonl"):
        assert (
            cli.main(["replay", str(foreign), "--to", "jsonl", "--out", str(tmp_path / "out" / "replay")])
            == 2
        )
    assert tree(tmp_path) == before


def test_links_that_wandb_makes_are_no_obstacle(foreign: Path, tmp_path: Path) -> None:
    """Links within the folder, and those to W&B's logs, are there when a run is replayed a second time."""
    logs = foreign / "replay" / "wandb" / "run-20260101_000000-abc" / "logs"
    logs.mkdir(parents=True)
    (foreign / "replay" / "wandb" / "latest-run").symlink_to(logs.parent.name)
    (logs / "debug-core.log").symlink_to(tmp_path / "cache")

    assert cli.main(["replay", str(foreign), "--to", "jsonl"]) == 0


def test_a_writer_names_the_links_of_its_library(foreign: Path, tmp_path: Path) -> None:
    """Links of the library of a registered writer are no obstacle to a replay with another writer."""

    class Linking(Writer):
        library_links = ("mine/*.log",)

        def write(self, event: Event) -> None:
            """Nothing."""

    (foreign / "replay" / "mine").mkdir(parents=True)
    (foreign / "replay" / "mine" / "a.log").symlink_to(tmp_path / "cache")
    assert cli.main(["replay", str(foreign), "--to", "jsonl"]) == 2

    WRITERS.register(Linking)
    try:
        assert cli.main(["replay", str(foreign), "--to", "jsonl"]) == 0
    finally:
        WRITERS.forget("Linking")


class Lazy(Writer):
    """A writer that imports its library when it is built, as those for TensorBoard and visdom do."""

    def __init__(self) -> None:
        __import__("library_of_lazy")

    def write(self, event: Event) -> None:
        """Nothing."""


def test_a_module_in_the_run_is_no_library(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From within a run's directory the command imports nothing that lies there, unless --import asks for it."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(foreign))])
    monkeypatch.setitem(sys.modules, "library_of_lazy", None)
    monkeypatch.delitem(sys.modules, "library_of_lazy")
    WRITERS.register(Lazy)
    (foreign / "library_of_lazy.py").write_text("print('run')")

    codes = [
        cli.main(["replay", ".", "--to", "Lazy", *more]) for more in ([], ["--import", "library_of_lazy"])
    ]

    WRITERS.forget("Lazy")
    said = capsys.readouterr()
    assert codes == [2, 0]
    assert "No module named 'library_of_lazy'" in said.err
    assert said.out == "run\n"
