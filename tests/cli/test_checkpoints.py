"""`eventloop checkpoints`: real checkpoints, and real damage to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from eventloop import __version__
from eventloop.checkpoint import load_checkpoint, save_checkpoint
from eventloop.checkpoint.commit import MANIFEST, PAYLOAD, remove_checkpoint
from eventloop.checkpoint.directory import go_back, scan
from eventloop.checkpoint.listing import Stock, list_leftovers
from eventloop.checkpoint.manifest import read_manifest
from eventloop.cli import listing_text as inventory_text
from eventloop.cli.listing_text import size_text
from tests.cli.conftest import ENVIRONMENT, train
from tests.cli.saved_runs import ALL, During, checkpoints, flip, kill_a_save, label_of


def test_the_newest_is_last(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order in which they were saved, a best one before the regular one of its iteration, with epoch,
    iteration, size and time; the newest and the best say so."""
    assert checkpoints(run) == 0

    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "epoch", "iter", "size", "saved", "at"]
    assert [line.split()[:3] for line in lines] == [
        ["epoch_1", "1", "3"],
        ["best_acc_epoch_2", "2", "6"],
        ["epoch_2", "2", "6"],
        ["epoch_3", "3", "9"],
        ["epoch_4", "4", "12"],
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
        "name": "best_acc_epoch_2", "bytes": (run / "best_acc_epoch_2" / PAYLOAD).stat().st_size,
        "time": read_manifest(run / "best_acc_epoch_2").time, "epoch": 2, "iter": 6, "batch_idx": 0,
        "best": {"acc": 0.75}, "best_now": ["acc"], "best_kept": ["acc"], "newest": False, "abandoned": False, "missing": [],
        "metrics": {"acc": 0.75}, "validated_at": 6,
        "eventloop": __version__, "torch": str(torch.__version__), "whole": None,
    }  # fmt: skip


def test_a_best_that_was_surpassed_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that could not be removed is not taken for the best."""
    label = read_manifest(run / "best_acc_epoch_2")
    state = load_checkpoint(run / "best_acc_epoch_2")
    save_checkpoint(state, run / "best_acc_epoch_5", label_of(label, sequence=99, metrics={"acc": 0.875}))

    checkpoints(run)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines if "best acc" in line] == [
        "was best acc 0.75",
        "newest; best acc 0.875",
    ]


def test_scores_are_those_of_the_last_validation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch is saved before it is validated, so they are of the epoch before, which is told; the first has none.
    Of many the first four are shown."""
    label = read_manifest(run / "epoch_4")
    scores = {name: number / 8 for number, name in enumerate("abcdef")}
    save_checkpoint(
        load_checkpoint(run / "epoch_4"), run / "epoch_5", label_of(label, sequence=99, metrics=scores)
    )

    checkpoints(run)

    lines = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert "acc" not in lines[0]
    assert [lines[at] for at in (2, 3, 4)] == [
        "acc 0.25 at iter 3",
        "acc 0.75 at iter 6",
        "acc 0.5 at iter 9",
    ]
    assert lines[-1] == "newest; a 0, b 0.125, c 0.25, d 0.375 and 2 more"


def test_what_was_left_behind_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that went back to an earlier one goes on from there: those it left come first, and the newest is last."""
    go_back(scan(run), run / "epoch_2")

    checkpoints(run)

    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [
        "best_acc_epoch_2",
        "epoch_3",
        "epoch_4",
        "epoch_1",
        "epoch_2",
    ]
    assert [line.split("  ")[-1].split(";")[0] for line in lines[:3]] == ["left behind"] * 3
    assert lines[-1].split("  ")[-1].startswith("newest")
    checkpoints(run, "--json")
    told = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["abandoned"] for each in told] == [True, True, True, False, False]


def test_versions_are_told_where_they_differ(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What eventloop or torch a checkpoint was written by, unless it is the one that is here."""
    monkeypatch.setattr(inventory_text, "__version__", "99.0")
    monkeypatch.setattr(inventory_text, "torch_version", lambda: "99.0")

    checkpoints(run)

    wrote = read_manifest(run / "epoch_1")
    assert (
        capsys.readouterr().out.splitlines()[1].endswith(f"eventloop {wrote.eventloop}; torch {wrote.torch}")
    )


def test_what_cannot_be_resumed_from_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that were saved without the optimizer."""
    train(tmp_path / "run", save_optimizer=False)

    checkpoints(tmp_path / "run")

    assert "newest; cannot be resumed from, without optimizer; acc 0.5 at iter 9\n" in capsys.readouterr().out


def test_a_checkpoint_within_an_epoch_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its epochs are the completed ones."""
    state = load_checkpoint(run / "epoch_4")
    state["meta"] = {**state["meta"], "iter": 14, "position": {**state["meta"]["position"], "batch_idx": 2}}
    save_checkpoint(state, run / "iter_14", label_of(read_manifest(run / "epoch_4"), sequence=99))

    checkpoints(run)

    assert capsys.readouterr().out.splitlines()[-1].endswith("newest; 2 batches into epoch 5; acc 0.5")


def test_a_single_file_is_listed_and_never_pruned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another program's: there is nothing to compare it with."""
    torch.save({"state_dict": {}}, run / "epoch_4.pth")

    assert checkpoints(run, "--verify", "--prune", "1", "--yes") == 0

    assert capsys.readouterr().out.splitlines()[1].endswith("a single file, without a manifest")
    assert (run / "epoch_4.pth").is_file()


def test_no_torch_is_imported(run: Path) -> None:
    """Listing, verifying and pruning need none."""
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "eventloop", "checkpoints", str(run), "--verify", "--prune", "1", "--yes"],
        capture_output=True, text=True, timeout=60, check=True, env=ENVIRONMENT,
    )  # fmt: skip

    imported = {line.split("|")[-1].strip().split(".")[0] for line in ran.stderr.splitlines()}
    assert "eventloop" in imported
    assert {"torch", "numpy"}.isdisjoint(imported)


def test_nobody_need_read_to_the_end(run: Path) -> None:
    """As in `eventloop checkpoints run | head -1`: no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "eventloop", "checkpoints", str(run)],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    os.close(writer)

    assert (ran.returncode, ran.stderr) == (0, "")


# --- damage ------------------------------------------------------------------------------------------------


def test_whole_ones_are_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each says that it is."""
    assert checkpoints(run, "--verify") == 0

    assert all(line.endswith("whole") for line in capsys.readouterr().out.splitlines()[1:])


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
    """A flipped bit, a short file, a missing one: exit code 1; without `--verify` the files are not read, and what their
    sizes tell is told."""
    damage(run / "epoch_3" / PAYLOAD)

    if damage is flip:
        assert checkpoints(run) == 0
        assert "amaged" not in capsys.readouterr().out
    else:
        assert checkpoints(run) == 1
        listed = capsys.readouterr().out
        assert checkpoints(run, "--verify") == 1
        assert capsys.readouterr().out.replace("; whole", "").replace("  whole", "") == listed

    assert checkpoints(run, "--verify") == 1
    *lines, damaged = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("DAMAGED")] == ["epoch_3"]
    assert damaged.startswith(f"damaged: {run / 'epoch_3'}")
    assert reason in damaged


def test_a_damaged_manifest_is_always_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no checkpoint any more, and not hidden for that; an incomplete directory likewise."""
    flip(run / "epoch_2" / MANIFEST)
    (run / "epoch_3" / MANIFEST).unlink()

    assert checkpoints(run) == 1

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["epoch_1", "best_acc_epoch_2", "epoch_4"]
    assert lines[4].startswith(f"damaged: {run / 'epoch_2' / MANIFEST} is damaged: ")
    assert lines[5] == f"damaged: {run / 'epoch_3'} has no readable {MANIFEST}: it was not completed"


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
def test_a_leftover_that_is_removed_meanwhile(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that ends while its bytes are counted has none left."""
    dead = kill_a_save(run)

    def gone(path: Path, pattern: str) -> Iterator[Path]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "rglob", gone)

    (left,) = list_leftovers(run)
    assert (left.name, left.bytes) == (dead, 0)


def test_nothing_but_damage_is_listed_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not "no checkpoint"."""
    for path in run.glob(f"*/{MANIFEST}"):
        path.unlink()

    assert checkpoints(run, "--json") == 1

    told = json.loads(capsys.readouterr().out)
    assert (told["checkpoints"], len(told["damaged"])) == ([], len(ALL))


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
    dead = kill_a_save(tmp_path)

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
    run: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
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


def test_traceback_shows_where_bad_input_was_found(tmp_path: Path) -> None:
    """Asked for, the error itself is raised."""
    with pytest.raises(ValueError, match="holds no checkpoint"):
        checkpoints(tmp_path, "--traceback")


@pytest.mark.parametrize("number", ["0", "-1", "few"])
def test_a_number_that_is_none_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command line."""
    with pytest.raises(SystemExit, match="2"):
        checkpoints(".", "--prune", number)

    assert "argument --prune: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_960, "1.0 MB"), (2_500_000_000, "2.5 GB"),
     (3_000_000_000_000, "3.0 TB")],
)  # fmt: skip
def test_sizes(size: int, text: str) -> None:
    """As a person reads them."""
    assert size_text(size) == text
