"""`eventloop checkpoints`: real checkpoints, and real damage to them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eventloop import __version__
from eventloop.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from eventloop.checkpoint.commit import MANIFEST, PAYLOAD, remove_checkpoint
from eventloop.checkpoint.directory import go_back, scan
from eventloop.checkpoint.listing import Stock
from eventloop.cli.listing_text import size_text
from tests.cli.saved_runs import ALL, During, checkpoints, flip, kill_a_save, label_of, write_half_a_save
from tests.support.internals import substitute


def notes(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What the list says of each checkpoint, by its name."""
    lines = capsys.readouterr().out.splitlines()[1:]
    return {line.split()[0]: line.split("  ")[-1] for line in lines}


def test_the_newest_is_last(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order in which they were saved, a best one before the regular one of its iteration, with epoch,
    iteration, size and time; the newest and the best say so."""
    assert checkpoints(run) == 0

    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "epoch", "iter", "size", "saved", "at"]
    assert [" ".join(line.split()[:3]) for line in lines] == [
        "epoch_1 1 3",
        "best_acc_epoch_2 2 6",
        "epoch_2 2 6",
        "epoch_3 3 9",
        "epoch_4 4 12",
    ]
    assert lines[1].endswith("  best acc 0.75")
    assert lines[4].endswith("  newest; acc 0.5 at iter 9")
    size = size_text((run / "epoch_4" / PAYLOAD).stat().st_size)
    saved = read_manifest(run / "epoch_4").time[:10]
    assert f"  {size}  {saved} " in lines[4]


def test_json_has_it_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for programs, with nothing rounded."""
    assert checkpoints(run, "--json") == 0

    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {"directory", "checkpoints", "damaged", "leftovers"}
    assert [each["name"] for each in told["checkpoints"] if each["newest"]] == ["epoch_4"]
    best = next(each for each in told["checkpoints"] if each["best"])
    assert best == {
        "name": "best_acc_epoch_2",
        "bytes": (run / "best_acc_epoch_2" / PAYLOAD).stat().st_size,
        "time": read_manifest(run / "best_acc_epoch_2").time,
        "ranks": None,
        "epoch": 2,
        "iter": 6,
        "batch_idx": 0,
        "best": {"acc": 0.75},
        "best_now": ["acc"],
        "best_kept": ["acc"],
        "newest": False,
        "abandoned": False,
        "foreign": False,
        "missing": [],
        "metrics": {"acc": 0.75},
        "validated_at": 6,
        "eventloop": __version__,
        "torch": str(torch.__version__),
        "whole": None,
    }


def test_scores_are_those_of_the_last_validation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch is saved before it is validated, so they are of the epoch before, which is told; the first has none.
    Of many the first four are shown, and a best one that was surpassed says so."""
    scores: dict[str, float | str] = {"acc": 0.875, **{name: n / 8 for n, name in enumerate("abcdef")}}
    state = load_checkpoint(run / "epoch_4")
    label = label_of(read_manifest(run / "best_acc_epoch_2"), sequence=99, metrics=scores)
    save_checkpoint(state, run / "best_acc_epoch_5", label)

    checkpoints(run)

    told = notes(capsys)
    assert "acc" not in told["epoch_1"]
    assert [told[f"epoch_{n}"] for n in (2, 3, 4)] == [
        "acc 0.25 at iter 3",
        "acc 0.75 at iter 6",
        "newest; acc 0.5 at iter 9",
    ]
    assert told["best_acc_epoch_2"] == "was best acc 0.75"
    assert told["best_acc_epoch_5"] == "best acc 0.875; a 0, b 0.125, c 0.25, d 0.375 and 2 more"


def test_what_is_odd_about_a_checkpoint_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written by another eventloop or torch, saved within an epoch, or without the optimizer."""
    wrote, state = read_manifest(run / "epoch_4"), load_checkpoint(run / "epoch_4")
    state["meta"] = {**state["meta"], "iter": 14, "position": {**state["meta"]["position"], "batch_idx": 2}}
    save_checkpoint(state, run / "iter_14", label_of(wrote, sequence=98))
    del state["optimizer"]
    save_checkpoint(state, run / "iter_15", label_of(wrote, sequence=99))

    checkpoints(run)
    told = notes(capsys)
    assert told["iter_14"] == "2 batches into epoch 5; acc 0.5"
    assert told["iter_15"].startswith(
        "newest; 2 batches into epoch 5; cannot be resumed from, without optimizer; "
    )

    substitute(monkeypatch, "listing_text.__version__", "99.0")
    substitute(monkeypatch, "listing_text.torch_version", lambda: "99.0")
    checkpoints(run)
    assert notes(capsys)["epoch_1"] == f"eventloop {wrote.eventloop}; torch {wrote.torch}"


def test_what_was_left_behind_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that went back to an earlier one goes on from there: those it left come first, and the newest is last."""
    go_back(scan(run), run / "epoch_2")

    checkpoints(run)

    told = notes(capsys)
    assert [*told] == ["best_acc_epoch_2", "epoch_3", "epoch_4", "epoch_1", "epoch_2"]
    assert [note.split(";")[0] for note in told.values()][:3] == ["left behind"] * 3
    assert told["epoch_2"].startswith("newest")
    checkpoints(run, "--json")
    items = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["abandoned"] for each in items] == [True, True, True, False, False]


# --- damage ------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    """Take the last byte away."""
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "state.pth is damaged: its SHA-256 is not that of what was saved"),
        (cut, " were saved"),
        (Path.unlink, "epoch_3 is incomplete, state.pth cannot be read"),
    ],
)
def test_damage_is_found_and_named(
    run: Path, damage: Callable[[Path], None], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit, a short file, a missing one: exit code 1, and the others are whole; without `--verify` the files
    are not read, and what their sizes tell is told."""
    damage(run / "epoch_3" / PAYLOAD)

    assert checkpoints(run) == (0 if damage is flip else 1)
    assert ("DAMAGED" in capsys.readouterr().out) == (damage is not flip)

    assert checkpoints(run, "--verify") == 1
    _, *lines, damaged = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("DAMAGED")] == ["epoch_3"]
    assert sum(line.endswith("whole") for line in lines) == 4
    assert damaged.startswith(f"damaged: {run / 'epoch_3'}")
    assert reason in damaged


def test_a_damaged_manifest_is_always_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no checkpoint any more, and not hidden for that; an incomplete directory likewise, also of nothing else."""
    flip(run / "epoch_2" / MANIFEST)
    (run / "epoch_3" / MANIFEST).unlink()

    assert checkpoints(run) == 1

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["epoch_1", "best_acc_epoch_2", "epoch_4"]
    assert lines[4].startswith(f"damaged: {run / 'epoch_2' / MANIFEST} is damaged: ")
    assert lines[5] == f"damaged: {run / 'epoch_3'} has no readable {MANIFEST}: it was not completed"
    for path in run.glob(f"*/{MANIFEST}"):
        path.unlink()
    assert checkpoints(run, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["checkpoints"], len(told["damaged"])) == ([], len(ALL))


def test_what_a_run_removes_meanwhile_is_not_damaged(run: Path) -> None:
    """A run that goes on removes what it no longer wants while the files are read: it is not in the list then."""
    stock = Stock(run)
    remove_checkpoint(run / "epoch_1")
    save_checkpoint({"state_dict": {}}, run / "epoch_2", label_of(read_manifest(run / "epoch_2")))
    (run / "epoch_2" / PAYLOAD).unlink()

    stock.verify()

    told = stock.inventory()
    assert [item.name for item in told.checkpoints] == ["best_acc_epoch_2", "epoch_3", "epoch_4"]
    assert told.damaged == []


@pytest.mark.slow
def test_leftovers_tell_killed_saves_from_running_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By whether their process lives; neither is damage."""
    dead = kill_a_save(run)
    codes: list[int] = []
    save_checkpoint({"state_dict": {}}, run / "epoch_6", disk=During(lambda: codes.append(checkpoints(run))))

    assert set(codes) == {0}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("leftover: ")][:2]
    assert lines[0].startswith(f"leftover: {dead}, ")
    assert "of a save that was killed: process " in lines[0]
    assert lines[1].endswith(f"of a save that is under way: process {os.getpid()}")


def test_nothing_but_leftovers_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose first save was killed: it is listed, and there is none."""
    dead = write_half_a_save(tmp_path)

    assert checkpoints(tmp_path) == 2

    said = capsys.readouterr()
    assert dead in said.out
    assert said.err == f"eventloop: {tmp_path} holds no checkpoint\n"


# --- what cannot be done -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no directory at nowhere: give the directory that holds the checkpoints"),
        (["file"], "no directory at file: give the directory that holds the checkpoints"),
        (["empty"], "empty holds no checkpoint"),
        (["."], ". holds no checkpoint: there are some in run"),
        (["run/epoch_4"], "run/epoch_4 is a checkpoint: give the directory that holds it, "),
        (["run", "--yes"], "--yes needs --prune N"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With what to do about it."""
    monkeypatch.chdir(run.parent)
    Path("file").touch()
    Path("empty").mkdir()

    assert checkpoints(*arguments) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"eventloop: {message}")
    assert said.err.endswith(" (--traceback shows where)\n")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (999, "999 B"),
        (999_949, "999.9 kB"),
        (999_960, "1.0 MB"),
        (2_500_000_000, "2.5 GB"),
        (3 * 10**12, "3.0 TB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    """As a person reads them."""
    assert size_text(size) == text
