"""`eventloop init` writes a training script that runs as it stands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventloop.cli import main
from eventloop.writers import read_jsonl
from tests import forked


@pytest.mark.slow
def test_the_script_trains_and_goes_on(tmp_path: Path) -> None:
    """The script learns, saves the best checkpoint and writes its files; `--resume` goes on from there."""
    assert main(["init", str(tmp_path / "start.py")]) == 0
    home = {**os.environ, "PYTHONPATH": forked.ROOT, "COLUMNS": "100"}

    first = forked.run([tmp_path / "start.py", "--epochs", "1", "--work-dir", tmp_path / "run"], env=home)
    again = forked.run(
        [tmp_path / "start.py", "--epochs", "2", "--work-dir", tmp_path / "run", "--resume"], env=home
    )

    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert again.returncode == 0, again.stderr
    assert "iterations of" in first.stdout
    run = tmp_path / "run"
    assert (run / "epoch_2").is_dir()
    assert list(run.glob("best_accuracy_*"))
    assert list(run.glob("tensorboard/events.out.tfevents.*"))
    scores = [row["accuracy"] for row in read_jsonl(run / "metrics.jsonl") if "accuracy" in row]
    assert scores[-1] > 0.9
    assert "python start.py --resume" in (tmp_path / "start.py").read_text()


@pytest.mark.slow
def test_the_script_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mypy finds nothing in the script, in its strict mode."""
    api = pytest.importorskip("mypy.api", reason="mypy is not installed: pip install -e '.[dev]'")
    monkeypatch.chdir(tmp_path)
    main(["init"])

    out, _, code = api.run(["--strict", "--follow-imports=silent", "train.py"])

    assert code == 0, out


def test_the_packages_of_the_script_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line that names the script has the command that installs what it needs, as the script itself does."""
    file = tmp_path / "train.py"

    assert main(["init", str(file)]) == 0

    install = "pip install torchmetrics tensorboard rich"
    assert f"train.py is written: {install}, then python {file}" in capsys.readouterr().err
    assert install in file.read_text()


def test_a_file_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An existing file is not replaced: one line, exit code 2."""
    (tmp_path / "train.py").write_text("mine")

    assert main(["init", str(tmp_path / "train.py")]) == 2

    assert (tmp_path / "train.py").read_text() == "mine"
    assert "train.py exists, and is not replaced: give the name of a new file" in capsys.readouterr().err


def test_a_folder_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in a folder that does not exist is refused on one line."""
    assert main(["init", str(tmp_path / "away" / "train.py")]) == 2

    assert "No such file or directory" in capsys.readouterr().err
