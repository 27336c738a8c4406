"""What a run does, or how it has ended: real runs in other processes, and records of another machine."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from eventloop.ownership.status import FILE, SIZE, read_status
from eventloop.watching import RunReader
from tests.ownership.conftest import Forge
from tests.ownership.trainings import KILL, training
from tests.support.internals import substitute
from tests.support.trainers import MakeTrainer
from tests.watching.conftest import HOST, Write, add_rows, read_until, row

# --- real runs ---------------------------------------------------------------------------------------------


def test_a_run_under_way_says_how_far_it_is(tmp_path: Path) -> None:
    """State, process, and completed iterations of all, while another process trains."""
    run = tmp_path / "run"
    with training(run, iters=20, holds=[8]) as one:
        one.reach("holding")
        view = read_until(RunReader(run), lambda view: view.iter == 7)

        assert (view.state, view.over, view.host, view.pid) == ("training", False, HOST, one.process.pid)
        assert (view.max_iters, view.epoch, view.max_epochs, view.ranks) == (20, 0, None, 1)
        assert f"process {one.process.pid} on {HOST}" in view.sentence


def test_a_killed_run_names_its_process_and_its_iteration(tmp_path: Path) -> None:
    """As soon as the process is gone: where it was, and that it has recorded no end."""
    run = tmp_path / "run"
    with training(run, iters=20, holds=[8]) as one:
        one.reach("holding")
        reader = RunReader(run)
        read_until(reader, lambda view: view.iter == 7)
        one.send(KILL)
        one.process.wait()

        view = reader.read()

    assert (view.state, view.over, view.iter, view.reason) == ("killed", True, 7, None)
    assert f"killed at iteration 7: process {one.process.pid} on {HOST}" in view.sentence
    assert view.eta is None


@pytest.mark.slow
def test_a_stopped_process_hangs_until_it_goes_on(tmp_path: Path) -> None:
    """A process that SIGSTOP has stopped lives and gives no sign of life; after SIGCONT it trains as before."""
    run = tmp_path / "run"
    with training(run, iters=20, holds=[8]) as one:
        one.reach("holding")
        reader = RunReader(run, hung_seconds=3)
        read_until(reader, lambda view: view.iter == 7)
        one.stand_still()
        view = read_until(reader, lambda view: view.state == "hung" and "no sign of life" in view.sentence)
        assert f"process {one.process.pid} on {HOST} lives: it may be stopped" in view.sentence
        assert view.age is not None
        assert view.age > 3

        one.send(signal.SIGCONT)
        read_until(reader, lambda view: view.age is not None and view.age < 3)


def test_a_training_thread_that_stands_still_is_hung(tmp_path: Path) -> None:
    """The process gives signs of life, and no iteration ends: it says for how long, and how to find the place."""
    run = tmp_path / "run"
    with training(run, iters=20, holds=[8]) as one:
        one.reach("holding")
        reader = RunReader(run, hung_seconds=2)
        view = read_until(reader, lambda view: "no iteration has ended for" in view.sentence)
        assert (view.state, view.over, view.iter) == ("hung", False, 7)
        assert view.still is not None
        assert view.still > 2
        assert f"`eventloop tell {run} stacks` shows where the training thread stands" in view.sentence

        one.go()
        one.end()
        assert reader.read().state == "ended"


def test_a_completed_run(make_trainer: MakeTrainer) -> None:
    """Its reason, and the counters at its end."""
    trainer = make_trainer()
    trainer.train()

    view = RunReader(trainer.work_dir).read()

    assert (view.state, view.reason, view.error, view.signal) == ("ended", "completed", None, None)
    assert (view.iter, view.max_iters, view.epoch, view.max_epochs) == (6, 6, 2, 2)
    assert (view.sentence, view.over) == ("ended: completed", True)


def test_a_run_that_failed_names_the_error(make_trainer: MakeTrainer) -> None:
    """The error's type and text, as `after_run` has them."""
    trainer = make_trainer()

    @trainer.bus.on("before_train_iter")
    def fail(trainer: Any, event: Any) -> None:
        if event.iter == 4:
            raise ValueError("no such\nnumber")

    with pytest.raises(ValueError, match="no such"):
        trainer.train()

    view = RunReader(trainer.work_dir).read()
    assert (view.state, view.reason, view.error, view.iter) == (
        "ended",
        "error",
        "ValueError: no such\nnumber",
        4,
    )
    assert view.sentence == "ended by an error: ValueError: no such number"


def test_a_run_that_was_asked_to_stop_gives_the_reason(make_trainer: MakeTrainer) -> None:
    """The reason of `trainer.stop`."""
    trainer = make_trainer()
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter", name="stop")
    trainer.train()

    view = RunReader(trainer.work_dir).read()

    assert (view.state, view.reason, view.iter, view.sentence) == ("ended", "enough", 1, "ended: enough")


def test_a_signal_is_named(tmp_path: Path) -> None:
    """SIGTERM ends the run with its name."""
    run = tmp_path / "run"
    with training(run, iters=20, holds=[8]) as one:
        one.reach("holding")
        one.send(signal.SIGTERM)
        one.end()

    view = RunReader(run).read()
    assert (view.state, view.signal) == ("ended", "SIGTERM")
    assert view.sentence.startswith("ended by SIGTERM: ")


def test_two_runs_are_read_apart(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Each reader has the counters of its own run."""
    for name, epochs in (("one", 1), ("two", 3)):
        make_trainer(work_dir=tmp_path / name, max_epochs=epochs).train()

    views = [reader.read() for reader in [RunReader(tmp_path / "one"), RunReader(tmp_path / "two")]]

    assert [(view.run, view.iter) for view in views] == [
        (str(tmp_path / "one"), 3),
        (str(tmp_path / "two"), 9),
    ]


# --- another machine ---------------------------------------------------------------------------------------


def test_a_run_elsewhere_lives_by_its_record(run: Path, forge: Forge, heartbeat: Write) -> None:
    """Its process cannot be looked up here; a fresh record and a fresh heartbeat mean that it trains."""
    forge(0.0)
    heartbeat()

    view = RunReader(run).read()

    assert (view.state, view.host, view.iter, view.speed, view.eta) == (
        "training",
        "elsewhere",
        30,
        2.0,
        35.0,
    )


def test_a_run_elsewhere_is_dead_after_half_a_minute(run: Path, forge: Forge, heartbeat: Write) -> None:
    """Silence of its record decides, and the machine is named."""
    forge(31.0)
    heartbeat()

    view = RunReader(run).read()

    assert view.state == "killed"
    assert view.sentence.startswith(
        "killed at iteration 30: process 12 on elsewhere has given its last sign of life at "
    )


def test_the_clocks_of_two_machines_are_not_compared(run: Path, forge: Forge, heartbeat: Write) -> None:
    """A clock that is a day ahead or behind makes no run hang: only differences of one clock count."""
    forge(0.0)
    for ahead in (-86400.0, 86400.0):
        heartbeat(time=1060.0 + ahead, moved=1060.0 + ahead, begun=1000.0 + ahead)
        view = RunReader(run).read()
        assert view.state == "training"
        assert view.still is not None
        assert view.still < 30


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"moved": 1000.0 - 1}, "hung"),  # 61 s, and iterations of half a second
        ({"moved": 1000.0 - 1, "speed": 0.3}, "training"),  # 20 iterations are 67 s
        ({"moved": 1000.0 - 1, "iter": 1}, "training"),  # the first two may be compiled
        ({"moved": 400.0, "iter": 1}, "hung"),
        ({"moved": 400.0, "state": "validating"}, "validating"),
        ({"moved": 400.0, "state": "paused"}, "paused"),
        ({"moved": 400.0, "state": "ending"}, "ending"),
    ],
)
def test_long_iterations_and_other_work_do_not_hang(
    run: Path, forge: Forge, heartbeat: Write, changes: dict[str, Any], state: str
) -> None:
    """A training hangs after a minute without the end of an iteration, or 20 mean iterations if they are longer."""
    forge(0.0)
    heartbeat(**changes)

    assert RunReader(run).read().state == state


def test_an_old_heartbeat_of_a_living_process_hangs(run: Path, forge: Forge, heartbeat: Write) -> None:
    """At the first read already: the file's age is taken by the clock of its directory."""
    forge(0.0)
    heartbeat()
    when = (run / FILE).stat().st_mtime - 20
    os.utime(run / FILE, (when, when))

    view = RunReader(run).read()

    assert (view.state, view.age is not None and view.age >= 20) == ("hung", True)
    assert "no sign of life" in view.sentence
    assert "its machine may be gone" in view.sentence


# --- what is missing ---------------------------------------------------------------------------------------


def test_a_run_that_has_just_begun_is_starting(run: Path, forge: Forge, heartbeat: Write) -> None:
    """It owns the directory, and the heartbeat is none yet, or that of an earlier process."""
    forge(0.0)
    assert RunReader(run).read().state == "starting"

    heartbeat(pid=11, state="ended", reason="completed")
    assert RunReader(run).read().state == "starting"


def test_a_directory_without_an_owner_and_an_end_is_unknown(run: Path, heartbeat: Write) -> None:
    """Nothing is invented about a run whose last status says that it trains."""
    heartbeat()

    view = RunReader(run).read()

    assert (view.state, view.over) == ("unknown", True)
    assert "no process owns the directory, and no end of a run is recorded" in view.sentence


def test_rows_alone_have_the_end_of_a_run(run: Path) -> None:
    """A run of a version without heartbeats ended as its log says; its progress is unknown, and said to be."""
    add_rows(run, row(5, loss=0.5), {"event": "after_run", "iter": 5, "reason": "completed"})

    view = RunReader(run).read()

    assert (view.state, view.reason, view.iter) == ("ended", "completed", None)
    assert any(f"There is no {FILE} here" in note for note in view.notes)


def test_a_run_that_was_killed_after_its_end_has_ended(run: Path, forge: Forge, heartbeat: Write) -> None:
    """Everything was written; only the record of the owner was left."""
    forge(31.0)
    heartbeat(state="ended", reason="completed")

    assert RunReader(run).read().state == "ended"


def test_a_pruned_directory_shows_the_run_that_ended(run: Path, forge: Forge, heartbeat: Write) -> None:
    """Commands own a directory as runs do, and are no run."""
    heartbeat(state="ended", reason="completed")
    forge(0.0, state="pruning")

    assert RunReader(run).read().state == "ended"


@pytest.mark.parametrize("damage", [b"", b'{"version":1,', b"\xff\xfe", b'{"version":99}', b"[]"])
def test_a_damaged_heartbeat_leaves_the_rest(run: Path, forge: Forge, damage: bytes) -> None:
    """Progress is unknown, the owner and the rows are shown all the same."""
    forge(0.0)
    add_rows(run, row(5, loss=0.5))
    (run / FILE).write_bytes(damage)

    view = RunReader(run).read()

    assert (view.state, view.iter, view.latest) == ("starting", None, {"train/loss": 0.5})


def test_a_heartbeat_that_is_being_written_is_read_again(
    run: Path, heartbeat: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is torn at the first read is whole at the second one."""
    heartbeat(iter=31)
    whole = (run / FILE).read_bytes()
    (run / FILE).write_bytes(whole[:100])
    substitute(monkeypatch, "status.sleep", lambda seconds: (run / FILE).write_bytes(whole))

    beat = read_status(run)

    assert beat is not None
    assert beat.status is not None
    assert (beat.status.iter, len(whole)) == (31, SIZE)


# --- what is no run ----------------------------------------------------------------------------------------


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    """With what was expected, what there is, and where runs are."""
    (tmp_path / "other").mkdir()
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(
        ValueError,
        match=r"is no run to watch: expected a directory with heartbeat\.json or .*got notes.txt, other$",
    ):
        RunReader(tmp_path)

    add_rows(tmp_path / "other")
    (tmp_path / "more").mkdir()
    with pytest.raises(ValueError, match=r"got more, notes.txt, other: there are runs in other$"):
        RunReader(tmp_path)
    with pytest.raises(ValueError, match=r"got no directory$"):
        RunReader(tmp_path / "none")
    with pytest.raises(ValueError, match=f"got a file: is it {tmp_path}"):
        RunReader(tmp_path / "notes.txt")


@pytest.mark.parametrize("beside", ["notes.txt", "weights.pth"])
def test_a_directory_of_runs_is_no_run(tmp_path: Path, beside: str) -> None:
    """A directory that has only runs, and files such as weights, is refused with what to watch instead."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        add_rows(tmp_path / name)
    (tmp_path / beside).write_bytes(b"")

    with pytest.raises(
        ValueError, match=f"expected a run, got a directory of runs: watch {re.escape(str(tmp_path))}/\\*$"
    ):
        RunReader(tmp_path)


def test_a_run_with_runs_in_it_is_a_run(tmp_path: Path, forge: Forge) -> None:
    """A directory with rows of its own is watched, and so is one that a living process has just taken."""
    (tmp_path / "run" / "one").mkdir(parents=True)
    add_rows(tmp_path / "run" / "one")
    forge(pid=os.getpid())
    assert RunReader(tmp_path / "run").read().state != "unknown"


def test_arguments_are_checked(run: Path) -> None:
    """A single text for `metrics` would be a sequence of letters."""
    add_rows(run)
    with pytest.raises(
        TypeError, match=r"metrics must be a sequence of names or patterns, got 'loss': give \['loss'\]"
    ):
        RunReader(run, metrics="loss")
    with pytest.raises(ValueError, match="points must be at least 2, got 1"):
        RunReader(run, points=1)
    with pytest.raises(ValueError, match="hung_seconds must be above 0 seconds, got 0"):
        RunReader(run, hung_seconds=0)


def test_a_directory_that_goes_away_is_said_to_be_gone(run: Path, heartbeat: Write) -> None:
    """A reader does not raise when somebody removes the run."""
    heartbeat()
    reader = RunReader(run)
    (run / FILE).unlink()
    run.rmdir()

    view = reader.read()

    assert (view.state, view.over, view.sentence) == ("unknown", True, f"{run} is gone")
