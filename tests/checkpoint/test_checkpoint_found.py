"""Test which checkpoints a scan of a directory finds, and which of them are the newest and the best."""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import (
    CheckpointError,
    find_checkpoints,
    latest_checkpoint,
    load_best,
    load_newest,
    save_checkpoint,
)
from eventloop.checkpoint.commit import MANIFEST, PAYLOAD, remove_checkpoint
from eventloop.checkpoint.directory import MOST_SCANS, scan
from eventloop.checkpoint.manifest import Label


def save(directory: Path, name: str, sequence: int = 0, **label: Any) -> Path:
    """Save a checkpoint whose weight is its sequence number."""
    state = {"meta": {}, "state_dict": {"w": torch.tensor(float(sequence))}}
    save_checkpoint(state, directory / name, Label(sequence=sequence, **label))
    return directory / name


def save_best(directory: Path, sequence: int, metric: str, value: float | str, rule: str = "greater") -> Path:
    """Save a checkpoint that is the best of a metric."""
    name = f"best_{metric}_{sequence}"
    return save(directory, name, sequence, best={metric: rule}, metrics={metric: value, "other": 0.0})


def damage(path: Path) -> None:
    """Flip a bit in the middle of the payload."""
    raw = bytearray((path / PAYLOAD).read_bytes())
    raw[len(raw) // 2] ^= 1
    (path / PAYLOAD).write_bytes(raw)


# --- what there is -----------------------------------------------------------------------------------------


def test_by_their_sequence(tmp_path: Path) -> None:
    """Checkpoints are sorted by sequence and not by time, because a clock may go back and a copy has a new
    time."""
    for sequence, name in [(3, "epoch_3"), (1, "iter_9"), (2, "best_acc_epoch_2")]:
        save(tmp_path, name, sequence)

    assert [path.name for path in find_checkpoints(tmp_path)] == ["iter_9", "best_acc_epoch_2", "epoch_3"]
    assert [m.sequence for m in scan(tmp_path).manifests.values()] == [2, 3, 1]


def test_of_one_sequence_by_their_iterations(tmp_path: Path) -> None:
    """Checkpoints without a sequence, which another program saved, are sorted by iteration."""
    for number in (10, 9):
        save_checkpoint({"meta": {"iter": number}, "state_dict": {}}, tmp_path / f"epoch_{number}")

    assert [path.name for path in find_checkpoints(tmp_path)] == ["epoch_9", "epoch_10"]


def test_single_files_come_first(tmp_path: Path) -> None:
    """Single files come before checkpoints with a manifest, sorted by modification time."""
    save(tmp_path, "epoch_1", 1)
    for age, name in [(2, "b.pth"), (1, "c.ckpt"), (3, "a.pt"), (0, "notes.txt")]:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))

    assert [path.name for path in find_checkpoints(tmp_path)] == ["c.ckpt", "b.pth", "a.pt", "epoch_1"]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    """A scan ignores other directories and broken links; a directory without its manifest counts as
    damaged."""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "nowhere").symlink_to("none")
    (tmp_path / "round").symlink_to("round")
    (save(tmp_path, "epoch_1", 1) / MANIFEST).unlink()

    found = scan(tmp_path)

    assert (found.paths, found.manifests) == ([], {})
    assert found.damaged == [f"{tmp_path / 'epoch_1'} has no readable manifest.json: it was not completed"]
    assert find_checkpoints(tmp_path / "none") == []


def test_one_that_cannot_be_looked_into(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that cannot be read is named in the log, and the other checkpoints are found."""
    save(tmp_path, "epoch_1", 1)
    (tmp_path / "epoch_2").symlink_to("x" * 300)  # which not even root can follow

    assert load_newest(tmp_path)[0].name == "epoch_1"

    assert len(scan(tmp_path).damaged) == 1
    assert f"{tmp_path / 'epoch_2'} may be a checkpoint, and cannot be read: " in caplog.text


def test_a_directory_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the directory itself may not be listed, the error says so, and not that it is empty."""

    def refuse(path: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "listdir", refuse)

    with pytest.raises(FileNotFoundError, match=f"{re.escape(str(tmp_path))} cannot be listed: not yours"):
        load_newest(tmp_path)


# --- while a run goes on -----------------------------------------------------------------------------------


@pytest.fixture
def meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets a run save the next checkpoint and remove the former one before each call
    of another function."""
    sequence = itertools.count(2)
    save_best(tmp_path, 1, "acc", 1)

    def go_on(module: str, function: str, times: int) -> None:
        original = getattr(importlib.import_module(f"eventloop.checkpoint.{module}"), function)

        def after(*arguments: Any) -> Any:
            if (number := next(sequence)) < times + 2:
                save_best(tmp_path, number, "acc", number)
                remove_checkpoint(tmp_path / f"best_acc_{number - 1}")
            return original(*arguments)

        monkeypatch.setattr(f"eventloop.checkpoint.{module}.{function}", after)

    return go_on


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("store", "read_checkpoint"),
        ("store", "read_identified"),
        ("directory", "read_manifest"),
        ("directory", "_is_there"),
    ],
)
@pytest.mark.parametrize("load", [load_newest, load_best])
def test_what_a_run_removes_meanwhile_has_a_successor(
    tmp_path: Path,
    meanwhile: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    load: Callable[[Path], tuple[Path, Any]],
    module: str,
    function: str,
) -> None:
    """If a run removes a checkpoint during the scan or the load, the checkpoint that replaced it is
    loaded."""
    meanwhile(module, function, times=2)

    path, state = load(tmp_path)

    assert (path.name, state["state_dict"]["w"].item()) == ("best_acc_3", 3.0)
    assert not caplog.records


def test_looking_has_an_end(tmp_path: Path, meanwhile: Callable[..., None]) -> None:
    """A scan gives up with an error if a run removes checkpoints faster than they are read."""
    meanwhile("store", "read_checkpoint", times=MOST_SCANS)

    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint to resume from; no checkpoint at .*best_acc_"
    ):
        load_newest(tmp_path)


# --- the newest --------------------------------------------------------------------------------------------


def test_newest_passes_over_what_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each damaged checkpoint, and each that fails the check, is named in the log with the reason."""
    paths = [save(tmp_path, f"epoch_{sequence}", sequence) for sequence in range(1, 6)]
    damage(paths[1])
    (paths[2] / PAYLOAD).unlink()
    (paths[3] / MANIFEST).write_bytes(b"{")
    save_checkpoint({"state_dict": {}}, paths[4], Label(sequence=5))

    path, state = load_newest(tmp_path, needs_meta)

    assert (path, state["state_dict"]["w"].item()) == (paths[0], 1.0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert all(line.startswith(f"passed over for {paths[0]}: ") for line in said)
    whys = ("SHA-256", "is incomplete", "is damaged", "has no meta")
    for path, what in zip(paths[1:], whys, strict=True):
        assert any(path.name in line and what in line for line in said)
    assert latest_checkpoint(str(tmp_path)) == paths[4]


def needs_meta(state: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint that has only weights."""
    if "meta" not in state:
        raise CheckpointError(f"{name} has no meta")


def test_none_that_can_be_used(tmp_path: Path) -> None:
    """If no checkpoint can be used, the error has the reason for each of them."""
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint to resume from$"):
        load_newest(tmp_path)

    damage(save(tmp_path, "epoch_1", 1))
    save_checkpoint({"state_dict": {}}, tmp_path / "epoch_2", Label(sequence=2))
    (tmp_path / "torn.pth").write_bytes(b"half")
    with pytest.raises(
        FileNotFoundError,
        match=r"holds no checkpoint to resume from; epoch_2 has no meta; .*epoch_1/state\.pth is damaged: its SHA-256.*; .*torn.pth cannot be read",
    ):
        latest_checkpoint(tmp_path, needs_meta)


# --- the best ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "rule", "best"),
    [
        ([0.25, 0.75, 0.5], "greater", 2),
        ([0.25, 0.75, 0.5], "less", 1),
        (["-inf", "inf", 2.0], "greater", 2),
        ([0.5, 0.5], "greater", 2),
    ],
)
def test_best_by_its_rule(tmp_path: Path, values: list[float | str], rule: str, best: int) -> None:
    """The rule in the manifests decides which score is the best; of equal scores the newest checkpoint is
    taken."""
    for sequence, value in enumerate(values, 1):
        save_best(tmp_path, sequence, "acc", value, rule)
    save(tmp_path, "epoch_4", 4)

    path, state = load_best(tmp_path)

    assert (path.name, state["state_dict"]["w"].item()) == (f"best_acc_{best}", best)


def test_best_of_several_metrics(tmp_path: Path) -> None:
    """By default the best checkpoint is that of the first preferred metric, else that of the newest best
    checkpoint."""
    save_best(tmp_path, 1, "acc", 0.5)
    save_best(tmp_path, 2, "loss", 3.0, "less")

    assert load_best(tmp_path)[0].name == "best_loss_2"
    assert load_best(tmp_path, prefer=["f1", "acc", "loss"])[0].name == "best_acc_1"
    assert load_best(tmp_path, prefer=["auto"])[0].name == "best_loss_2"
    assert load_best(tmp_path, "acc")[0].name == "best_acc_1"


def test_best_passes_over_what_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the best checkpoint is damaged, the next best one is loaded, and the log says so."""
    save_best(tmp_path, 1, "acc", 0.5)
    damage(save_best(tmp_path, 2, "acc", 0.75))

    assert load_best(tmp_path)[0].name == "best_acc_1"
    assert "best_acc_2/state.pth is damaged: its SHA-256" in caplog.text


def test_no_best(tmp_path: Path) -> None:
    """The error says which option saves best checkpoints, and suggests a metric for a misspelled one."""
    save(tmp_path, "epoch_1", 1)
    for metric in (None, "acc"):
        with pytest.raises(
            FileNotFoundError, match=r"holds no best checkpoint at all: CheckpointHook\(save_best"
        ):
            load_best(tmp_path, metric)

    save_best(tmp_path, 2, "accuracy", 0.5)
    with pytest.raises(FileNotFoundError, match="no best checkpoint of 'acuracy': did you mean 'accuracy'"):
        load_best(tmp_path, "acuracy")


# --- several directories -----------------------------------------------------------------------------------


def test_of_several_directories(tmp_path: Path) -> None:
    """Of several directories the newest and the best checkpoint of all are found by their manifests."""
    left, right = tmp_path / "left", tmp_path / "right"
    for place, sequence, value in [(left, 1, 0.25), (right, 2, 0.75), (left, 3, 0.5)]:
        save_best(place, sequence, "acc", value)

    assert load_newest([left, right])[0] == load_newest([str(right), str(left)])[0] == left / "best_acc_3"
    assert load_best([left, right])[0] == load_best([right, left])[0] == right / "best_acc_2"


def test_several_directories_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Messages name all directories that were scanned, and the full paths of checkpoints."""
    left, right = tmp_path / "left", tmp_path / "right"
    both = re.escape(f"{left} and {right}")
    with pytest.raises(FileNotFoundError, match=f"{both} hold no checkpoint to resume from$"):
        load_newest([left, right])
    with pytest.raises(FileNotFoundError, match=f"{both} hold no best checkpoint at all"):
        load_best([left, right])

    save(left, "epoch_1", 1)
    save_checkpoint({"state_dict": {}}, right / "epoch_1", Label(sequence=2))
    assert load_newest([left, right], needs_meta)[0] == left / "epoch_1"
    assert f"passed over for {left / 'epoch_1'}: {right / 'epoch_1'} has no meta" in caplog.text
