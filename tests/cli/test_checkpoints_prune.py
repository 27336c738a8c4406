"""`eventloop checkpoints --prune`: what goes, what stays, and who is asked."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import load_checkpoint, load_newest, read_manifest, save_checkpoint
from eventloop.checkpoint.commit import PAYLOAD
from tests.cli.saved_runs import (
    ALL,
    During,
    checkpoints,
    flip,
    kill_a_save,
    label_of,
    names,
    write_half_a_save,
)


def test_prune_keeps_the_newest_and_the_best(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others go, after they were named; what stays can be resumed from. A link is neither counted nor removed; of
    more than there are all stay, and nothing is asked."""
    (run / "latest").symlink_to("epoch_4")
    (run / "first").symlink_to("epoch_2")
    for many in ("9", "9" * 23):
        assert checkpoints(run, "--prune", many) == 0
        said = capsys.readouterr()
        assert said.out.endswith("There is nothing to remove.\n")
        assert (said.err, names(run)) == ("", ALL)

    assert checkpoints(run, "--prune", "2", "--yes") == 0

    assert names(run) == {"best_acc_epoch_2", "epoch_3", "epoch_4"}
    *_, keeps, goes = capsys.readouterr().out.splitlines()
    assert keeps == "Verified, and kept: best_acc_epoch_2, epoch_3, epoch_4"
    assert goes.startswith("To be removed, ")
    assert goes.endswith(": epoch_1, epoch_2")
    assert load_newest(run)[0].resolve() == run / "epoch_4"
    assert (run / "latest" / PAYLOAD).is_file()
    assert (run / "first").is_symlink()


@pytest.mark.slow
def test_leftovers_of_killed_saves_are_removed(run: Path) -> None:
    """But never that of a process that lives."""
    dead = kill_a_save(run)
    during: list[set[str]] = []

    def prune() -> None:
        checkpoints(run, "--prune", "5", "--yes")
        during.append(names(run))

    save_checkpoint({"state_dict": {}}, run / "epoch_6", disk=During(prune))

    (running,) = during[0] - ALL
    assert dead not in during[0]
    assert f".{os.getpid()}-" in running
    assert names(run) == ALL | {"epoch_6"}


def test_a_damaged_one_does_not_count(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where one that would stay is damaged the next newest stays instead; damaged ones are named, and left for somebody to
    look at."""
    flip(run / "epoch_4" / PAYLOAD)
    os.truncate(run / "epoch_1" / PAYLOAD, 100)

    assert checkpoints(run, "--prune", "1", "--yes") == 1

    assert names(run) == {"epoch_1", "best_acc_epoch_2", "epoch_3", "epoch_4"}
    told = capsys.readouterr().out
    assert f"damaged: {run / 'epoch_4' / PAYLOAD} is damaged" in told
    assert "Verified, and kept: best_acc_epoch_2, epoch_3\n" in told


def test_the_next_best_takes_the_place_of_a_damaged_one(run: Path) -> None:
    """As `resume("best")` would."""
    label = label_of(read_manifest(run / "best_acc_epoch_2"), sequence=99, metrics={"acc": 0.875})
    save_checkpoint(load_checkpoint(run / "epoch_4"), run / "best_acc_epoch_4", label)
    flip(run / "best_acc_epoch_4" / PAYLOAD)

    checkpoints(run, "--prune", "1", "--yes")

    assert names(run) == {"best_acc_epoch_2", "best_acc_epoch_4", "epoch_4"}


def test_nothing_is_removed_where_none_is_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even leftovers: one of them may be all there is."""
    dead = write_half_a_save(run)
    for path in run.glob(f"*/{PAYLOAD}"):
        flip(path)

    assert checkpoints(run, "--prune", "1", "--yes") == 1

    assert names(run) == ALL | {dead}
    assert "Nothing is removed: there is no checkpoint here that is whole.\n" in capsys.readouterr().out


def test_one_to_resume_from_is_kept(run: Path) -> None:
    """Where the newest are weights alone, of another hook in the same directory."""
    state: dict[str, Any] = {"meta": {}, "state_dict": {}}
    for number in (5, 6):
        label = label_of(read_manifest(run / "epoch_4"), sequence=90 + number, best={})
        save_checkpoint(state, run / f"weights_{number}", label)

    checkpoints(run, "--prune", "2", "--yes")

    assert names(run) == {"best_acc_epoch_2", "epoch_4", "weights_5", "weights_6"}


@pytest.mark.parametrize("stdin", [io.StringIO("y\n"), None])
def test_without_a_terminal_it_needs_yes(
    run: Path, stdin: io.StringIO | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what would go, and removes nothing; after `2>&- <&-` the exit code alone tells."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", stdin)
        if stdin is None:
            patched.setattr(sys, "stderr", None)
        assert checkpoints(run, "--prune", "1") == 2

    said = capsys.readouterr()
    assert ": epoch_1, epoch_2, epoch_3\n" in said.out
    told = "nothing was removed, because there is no terminal to ask on: --yes removes without asking"
    assert said.err == (f"eventloop: {told}\n" if stdin is not None else "")
    assert names(run) == ALL


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A terminal to answer at."""
    keyboard, screen = os.openpty()
    with os.fdopen(screen) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield lambda text: (os.write(keyboard, text.encode()), None)[1]
    os.close(keyboard)


@pytest.mark.parametrize(("answer", "left"), [("y", 2), ("yes", 2), ("", 5), ("n", 5), ("what?", 5)])
def test_on_a_terminal_it_asks(
    run: Path, terminal: Callable[[str], None], answer: str, left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a yes removes anything."""
    terminal(f"{answer}\n")

    assert checkpoints(run, "--prune", "1") == 0

    assert len(names(run)) == left
    said = capsys.readouterr()
    assert said.err.startswith("Remove it? [y/N] ")
    assert ("nothing was removed" in said.err) == (left == 5)


def test_json_of_a_prune(
    run: Path, terminal: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is one object, what was there and what became of it; the question goes elsewhere."""
    dead = write_half_a_save(run)
    terminal("y\n")

    assert checkpoints(run, "--prune", "1", "--json") == 0

    said = capsys.readouterr()
    assert json.loads(said.out)["prune"] == {
        "keep": ["best_acc_epoch_2", "epoch_4"],
        "remove": ["epoch_1", "epoch_2", "epoch_3"],
        "leftovers": [dead],
        "removed": True,
        "failed": [],
    }
    assert ": epoch_1, epoch_2, epoch_3, " in said.err
    assert names(run) == {"best_acc_epoch_2", "epoch_4"}


class Answer(io.StringIO):
    """Somebody at a terminal who does something before saying yes."""

    def __init__(self, first: Callable[[], object]) -> None:
        super().__init__("y\n")
        self._first = first

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> Any:
        self._first()
        return "y\n"


def save_again(run: Path) -> None:
    """Save another checkpoint under a name that is taken."""
    label = label_of(read_manifest(run / "epoch_2"), sequence=77)
    save_checkpoint(load_checkpoint(run / "epoch_1"), run / "epoch_2", label)


@pytest.mark.parametrize(
    ("meanwhile", "code", "left", "message"),
    [
        (
            save_again,
            1,
            {"epoch_2", "best_acc_epoch_2", "epoch_4"},
            "epoch_2 was not removed: it changed meanwhile",
        ),
        (
            lambda run: shutil.rmtree(run / "epoch_4"),
            1,
            ALL - {"epoch_4"},
            "nothing was removed: epoch_4 changed meanwhile; run the command again",
        ),
        (lambda run: shutil.rmtree(run / "epoch_1"), 0, {"best_acc_epoch_2", "epoch_4"}, ""),
    ],
    ids=["saved again", "what stays is gone", "gone already"],
)
def test_a_run_goes_on_while_the_question_waits(
    run: Path,
    meanwhile: Callable[[Path], object],
    code: int,
    left: set[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was saved meanwhile is not removed; nothing is where what would stay is gone; what is gone is no failure."""
    monkeypatch.setattr(sys, "stdin", Answer(lambda: meanwhile(run)))

    assert checkpoints(run, "--prune", "1") == code

    assert names(run) == left
    assert message in capsys.readouterr().err


def test_what_cannot_be_removed_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others go nevertheless; one that the run itself removes at that moment is no failure."""
    rename = os.rename

    def refuse(source: Any, target: Any) -> None:
        if Path(source).name == "epoch_1":
            raise PermissionError("read-only")
        if Path(source).name == "epoch_2":
            shutil.rmtree(source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)

    assert checkpoints(run, "--prune", "1", "--yes") == 1

    assert names(run) == {"epoch_1", "best_acc_epoch_2", "epoch_4"}
    assert capsys.readouterr().err == f"eventloop: {run / 'epoch_1'} was not removed: read-only\n"


# --- the best few of a metric ------------------------------------------------------------------------------


def save_losses(run: Path, numbers: list[int]) -> None:
    """Save four checkpoints, each as one of the best of another metric, by how many its run keeps."""
    state, newest = load_checkpoint(run / "epoch_1"), read_manifest(run / "epoch_4")
    for at, (loss, keep_best) in enumerate(zip((0.25, 0.75, 0.5, 0.75), numbers, strict=True), 50):
        said: dict[str, Any] = {"best": {"loss": "less"}, "metrics": {"loss": loss}, "keep_best": keep_best}
        save_checkpoint(state, run / f"loss_{at}", label_of(newest, sequence=at, **said))


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ([3, 3, 3, 3], {"loss_50", "loss_52", "loss_53"}),
        ([3, 3, 3, 1], {"loss_50", "loss_53"}),
        ([1, 1, 3, 4], {"loss_50", "loss_51", "loss_52", "loss_53"}),
        ([-1, -1, -1, -1], {"loss_50", "loss_51", "loss_52", "loss_53"}),
    ],
    ids=["three", "fewer", "more", "all"],
)
def test_prune_keeps_as_many_as_the_run(run: Path, numbers: list[int], kept: set[str]) -> None:
    """As the newest of them says, which is kept as the newest of all in any case; of equal ones the newest first."""
    save_losses(run, numbers)

    assert checkpoints(run, "--prune", "1", "--yes") == 0

    assert names(run) == {"best_acc_epoch_2", *kept}


def test_the_best_few_are_told_from_what_was_outdone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best, those that stay beside it, and what no longer is one of them."""
    save_losses(run, [3, 3, 3, 3])
    checkpoints(run)
    notes = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "  best loss 0.25" in notes["loss_50"]
    assert "one of the best loss 0.5" in notes["loss_52"]
    assert "was best loss 0.75" in notes["loss_51"]

    checkpoints(run, "--json")
    items = {item["name"]: item for item in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert [name for name, item in items.items() if item["best_now"] == ["loss"]] == ["loss_50"]
    kept = {name for name, item in items.items() if "loss" in item["best_kept"]}
    assert kept == {"loss_50", "loss_52", "loss_53"}
