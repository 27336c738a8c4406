"""`eventloop demo --resume best`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eventloop import cli
from eventloop.checkpoint import find_checkpoints, load_checkpoint, load_newest, save_checkpoint
from eventloop.checkpoint.manifest import Label


def resume(*arguments: str) -> int:
    """The command, in this process."""
    return cli.main(["demo", "--epochs", "2", "--work-dir", "run", *arguments])


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo whose first epoch was the best: its checkpoint says so, whatever the digits were learned to."""
    directory = tmp_path_factory.mktemp("demo") / "run"
    assert cli.main(["demo", "--epochs", "2", "--work-dir", str(directory)]) == 0
    label = Label(best={"accuracy": "greater"}, metrics={"accuracy": 1.5})
    save_checkpoint(load_checkpoint(directory / "epoch_1"), directory / "best_accuracy_epoch_1", label)
    return directory


@pytest.fixture(autouse=True)
def _run(demonstrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(demonstrated, tmp_path / "run")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_it_goes_on_from_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    """Not from the newest: what was trained after it is trained again."""
    assert resume("--resume", "best") == 0

    said = capsys.readouterr().out
    assert "resuming from run/best_accuracy_epoch_1\n" in said
    assert "Epoch(train) [2]" in said
    assert "Epoch(train) [1]" not in said
    assert load_newest("run")[1]["meta"]["epoch"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "taken"), [("auto", "epoch_2"), ("", "epoch_2"), ("run/epoch_1", "epoch_1")]
)
def test_auto_takes_the_newest_and_a_path_is_taken(
    given: str, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Auto also where no value is given."""
    assert resume("--resume", *filter(None, [given])) == 0

    assert f"resuming from run/{taken}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_without_a_best_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line that says how to get one."""
    for path in find_checkpoints("run"):
        if path.name.startswith("best"):
            path.rename(path.name)

    assert resume("--resume", "best") == 2

    assert "run holds no best checkpoint at all: CheckpointHook(save_best" in capsys.readouterr().err
