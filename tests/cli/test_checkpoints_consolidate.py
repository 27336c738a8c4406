"""`eventloop checkpoints --consolidate` of checkpoints of one process, and its options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eventloop.checkpoint import load_checkpoint, save_checkpoint
from tests.cli.saved_runs import checkpoints, flip
from tests.support.saving import same


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((), "epoch_4"), (("auto",), "epoch_4"), (("best",), "best_acc_epoch_2"), (("epoch_1",), "epoch_1")],
)
def test_the_chosen_one_becomes_a_file(
    run: Path, arguments: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest one without a value; the path is the only line."""
    assert checkpoints(run, "--consolidate", *arguments) == 0

    (line,) = capsys.readouterr().out.splitlines()
    assert Path(line).stem.rpartition("-")[0] == name
    assert same(torch.load(line, weights_only=True), load_checkpoint(run / name))
    assert checkpoints(run, "--verify") == 0


def test_a_file_becomes_safetensors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a single file in the directory, unless its name has another hash."""
    assert checkpoints(run, "--consolidate") == 0
    single = Path(capsys.readouterr().out.strip())

    assert checkpoints(run, "--consolidate", single.name, "--format", "safetensors") == 0
    weights = load_file(capsys.readouterr().out.strip())
    assert same(weights, load_checkpoint(run / "epoch_4")["state_dict"])
    flip(single)
    assert checkpoints(run, "--consolidate", single.name) == 1
    assert f"{single} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--format", "pth"], 2, "--format pth needs --consolidate"),
        (["--consolidate", "--prune", "1"], 2, "expected no --prune with it"),
        (["--consolidate", "--verify"], 2, "expected no --verify with it"),
        (["--consolidate", "--json"], 2, "expected no --json with it"),
        (["--consolidate", "epoch_5"], 2, "no checkpoint at"),
        (["--consolidate", "../run/epoch_1"], 2, "got '../run/epoch_1'"),
    ],
)
def test_bad_options_are_one_line(
    run: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2, and nothing is written."""
    before = sorted(run.iterdir())

    assert checkpoints(run, *arguments) == code

    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(run.iterdir()) == before


def test_damage_is_refused_by_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 1, though an older checkpoint is whole, and nothing is written."""
    flip(run / "epoch_4" / "state.pth")
    before = sorted(run.iterdir())

    assert checkpoints(run, "--consolidate") == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run / 'epoch_4' / 'state.pth'} is damaged" in line
    assert sorted(run.iterdir()) == before


def test_a_directory_without_a_best_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says what saves one."""
    save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "one")

    assert checkpoints(tmp_path, "--consolidate", "best") == 2
    assert "has no best checkpoint: CheckpointHook(save_best=...)" in capsys.readouterr().err


def test_weights_that_the_format_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names what is in the way, and the other format; the whole state fits that."""
    save_checkpoint({"state_dict": {"w": torch.eye(2).to_sparse().coalesce()}}, tmp_path / "one")

    assert checkpoints(tmp_path, "--consolidate", "--format", "safetensors") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "w is a tensor of layout torch.sparse_coo; use --format pth" in line
    assert checkpoints(tmp_path, "--consolidate") == 0


def test_without_safetensors_the_extra_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit code 2."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)

    assert checkpoints(run, "--consolidate", "--format", "safetensors") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--format safetensors needs safetensors: pip install 'torch-eventloop[safetensors]'" in line
