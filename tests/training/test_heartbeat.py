"""The heartbeat of a run: what it says, which thread writes it, and that nothing it meets harms the training."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from eventloop.ownership.status import FILE, SIZE, Outcome, RunStatus, read_status, write_status
from eventloop.training.heartbeat import Speed
from eventloop.writers import JSONLWriter
from tests.support.internals import substitute
from tests.support.trainers import MakeTrainer
from tests.watching.conftest import DEADLINE, status

Handler = Callable[[Any, Any], None]


def written(trainer: Trainer) -> RunStatus:
    """The status in the work_dir."""
    beat = read_status(trainer.work_dir)
    assert beat is not None
    assert beat.status is not None
    return beat.status


def says(trainer: Trainer, state: str, iteration: int) -> bool:
    """Whether the work_dir has a status with this state and counter by now."""
    beat = read_status(trainer.work_dir)
    return (
        beat is not None
        and beat.status is not None
        and (beat.status.state, beat.status.iter) == (state, iteration)
    )


def wait_for(ready: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline, pause = time.monotonic() + DEADLINE, threading.Event()
    while not ready():
        assert time.monotonic() < deadline
        pause.wait(0.01)


def on(trainer: Trainer, event: str, handler: Handler) -> None:
    """Call a handler after all others of an event."""
    trainer.bus.subscribe(handler, event, priority="LOWEST", name=f"test of {event}")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat each hundredth of a second."""
    substitute(monkeypatch, "holding.TICK_SECONDS", 0.01)


def test_the_heartbeat_says_what_the_run_does(make_trainer: MakeTrainer) -> None:
    """Training, validating, testing, predicting and ending, with the counters of the moment; then that it has ended."""
    seen: list[tuple[str, int, int]] = []
    trainer = make_trainer(
        val_loader=[0],
        test_loader=[0],
        val_step=lambda trainer, batch: {"acc": 1.0},
        sanity_val=0,
        max_epochs=2,
        writers=[JSONLWriter()],
    )

    def see(trainer: Trainer, event: Any) -> None:
        states = {
            "after_val_iter": "validating",
            "after_test_iter": "testing",
            "before_train_iter": "training",
        }
        expected = states.get(type(event).__struct_config__.tag, "ending")
        wait_for(lambda: says(trainer, expected, trainer.iter))
        now = written(trainer)
        seen.append((now.state, now.iter, now.epoch))

    on(
        trainer,
        "before_train_iter",
        lambda trainer, event: see(trainer, event) if event.iter in (1, 4) else None,
    )
    on(trainer, "after_val_iter", see)
    on(trainer, "after_run", see)
    trainer.train()

    assert seen == [
        ("training", 1, 0),
        ("validating", 3, 1),
        ("training", 4, 1),
        ("validating", 6, 2),
        ("ending", 6, 2),
    ]
    last = written(trainer)
    assert (last.state, last.iter, last.epoch, last.max_iters, last.max_epochs) == ("ended", 6, 2, 6, 2)
    assert (last.reason, last.error, last.first_iter, last.checkpoints) == ("completed", None, 0, ["."])


def test_a_paused_run_says_so(make_trainer: MakeTrainer) -> None:
    """From the command `pause` to the command `go`."""
    trainer = make_trainer()
    on(
        trainer,
        "after_train_iter",
        lambda trainer, event: trainer.commands.request("pause") if event.iter == 2 else None,
    )
    states: list[str] = []

    def go() -> None:
        wait_for(lambda: says(trainer, "paused", 3))
        states.append(written(trainer).state)
        trainer.commands.paused = False

    thread = threading.Thread(target=go)
    thread.start()
    trainer.train()
    thread.join()

    assert (states, written(trainer).iter) == (["paused"], 6)


def test_only_the_heartbeats_thread_writes(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread neither writes nor collects anything, from the begin of the run to its end."""
    threads: set[str] = set()

    def write(directory: Path, status: RunStatus) -> None:
        threads.add(threading.current_thread().name)
        write_status(directory, status)

    substitute(monkeypatch, "heartbeat.write_status", write)
    trainer = make_trainer()
    on(
        trainer,
        "after_train_iter",
        lambda trainer, event: wait_for(lambda: says(trainer, "training", trainer.iter)),
    )
    trainer.train()

    assert threads == {"eventloop heartbeat"}


def test_a_later_call_of_train_begins_anew(make_trainer: MakeTrainer) -> None:
    """It counts from the iteration at which it begins, and has no reason until it ends."""
    trainer = make_trainer(max_epochs=3)
    stops = iter([1, 10])
    at = next(stops)
    seen: list[RunStatus] = []

    def see(trainer: Trainer, event: Any) -> None:
        wait_for(lambda: says(trainer, "training", event.iter))
        seen.append(written(trainer))
        if event.iter == at:
            trainer.stop("enough")

    on(trainer, "before_train_iter", see)
    trainer.train()
    first = written(trainer)
    at = next(stops)
    trainer.train()

    assert (first.state, first.reason, first.iter) == ("ended", "enough", 2)
    assert [(each.iter, each.first_iter, each.reason) for each in seen[2:4]] == [(2, 2, None), (3, 2, None)]
    assert (written(trainer).reason, written(trainer).iter) == ("completed", 9)
    assert seen[2].begun >= first.time


def test_an_evaluation_beside_another_run_writes_no_heartbeat(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """The heartbeat is the owner's."""
    trainer = make_trainer(val_loader=[0], val_step=lambda trainer, batch: {"acc": 1.0}, writers=[])
    trainer.val()

    assert not (trainer.work_dir / FILE).exists()


def test_checkpoints_elsewhere_are_named(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Relative inside the run's directory, else absolute."""
    trainer = make_trainer(
        hooks=[
            CheckpointHook(1, out_dir=str(tmp_path / "outer")),
            CheckpointHook(1, out_dir=str(tmp_path / "run" / "inner")),
        ]
    )
    trainer.train()

    places = written(trainer).checkpoints
    assert [Path(place).is_absolute() for place in places] == [True, False]
    assert places[0].startswith(str(tmp_path / "outer"))
    assert places[1].startswith("inner")


# --- what goes wrong ---------------------------------------------------------------------------------------


def weights(trainer: Trainer) -> torch.Tensor:
    """All weights of the model, as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def test_a_heartbeat_that_cannot_be_written_changes_nothing(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a directory in its place, the weights are those of any other run to the bit, and nothing is logged."""
    (tmp_path / "odd" / FILE).mkdir(parents=True)
    found = []
    for name in ("usual", "odd"):
        trainer = make_trainer(work_dir=tmp_path / name)
        trainer.train()
        found.append(weights(trainer))

    assert torch.equal(*found)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_a_removed_directory_is_not_made_again(make_trainer: MakeTrainer) -> None:
    """The heartbeat creates no directory, and the run trains to its end."""
    trainer = make_trainer(writers=[], default_hooks={"costs": None, "trace": None})
    beats: list[bool] = []

    def remove(trainer: Trainer, event: Any) -> None:
        if event.iter == 2:
            shutil.rmtree(trainer.work_dir)
            calls.clear()
            wait_for(lambda: len(calls) > 2)
            beats.append(trainer.work_dir.exists())

    calls: list[int] = []
    trainer.ownership.each_second.append(lambda: calls.append(1))
    on(trainer, "after_train_iter", remove)
    trainer.train()

    assert (beats, trainer.iter) == ([False], 6)


def test_an_error_each_second_is_logged_once(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """The functions after it are called all the same, at once, again and again, and a last time at the end."""
    trainer = make_trainer()
    ended: list[bool] = []

    def fail() -> None:
        raise ValueError("no such mailbox")

    trainer.ownership.each_second[:0] = [fail, lambda: ended.append(trainer.ownership.ended)]
    on(trainer, "after_train_epoch", lambda trainer, event: wait_for(lambda: len(ended) > 3 * trainer.epoch))
    trainer.train()

    assert ended == [*[False] * (len(ended) - 1), True]
    assert [record.message for record in caplog.records if "no such mailbox" in record.message] == [
        "the run goes on without test_an_error_each_second_is_logged_once.<locals>.fail: ValueError: no such mailbox"
    ]
    assert written(trainer).state == "ended"


# --- the file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["", "é" * 9000, '"\\\x00' * 3000, "\udcff" * 2000, "\n" * 9000])
def test_the_file_has_one_size_whatever_it_says(tmp_path: Path, error: str) -> None:
    """A long error is cut at its end, and what JSON cannot hold is escaped."""
    given = status(state="ended", reason="error", error=error, host="h" * 9999, checkpoints=["p" * 9999] * 99)

    write_status(tmp_path, given)

    beat = read_status(tmp_path)
    assert (tmp_path / FILE).stat().st_size == SIZE
    assert beat is not None
    assert beat.status is not None
    assert beat.status.error is not None
    assert (
        beat.status.error.removesuffix("…")
        == error.encode(errors="backslashreplace").decode()[: len(beat.status.error) - (len(error) > 99)]
    )
    assert beat.status.iter == given.iter


def test_no_file_is_no_status(tmp_path: Path) -> None:
    """Neither in an empty directory, nor where there is none."""
    assert read_status(tmp_path) is None
    assert read_status(tmp_path / "none") is None


def test_a_file_is_whole_while_it_is_written_again_and_again(tmp_path: Path) -> None:
    """A reader finds one status or the next one, however often another thread writes."""
    write_status(tmp_path, status(iter=0))
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            write_status(tmp_path, status(iter=number, error="x" * (number % 2000)))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        read = [beat.status.iter for _ in range(300) if (beat := read_status(tmp_path)) and beat.status]
    finally:
        ended.set()
        thread.join()

    assert (len(read), read) == (300, sorted(read))


def test_outcomes_have_the_fields_of_a_status() -> None:
    """`Outcome` is written as it is."""
    assert set(Outcome._fields) <= set(RunStatus.__struct_fields__)


# --- the speed ---------------------------------------------------------------------------------------------


def speed_of(*values: tuple[float, int], trains: Callable[[float], bool] = lambda now: True) -> float | None:
    """The speed after some values of the counter, as (seconds, iteration)."""
    speed = Speed()
    for now, iteration in values:
        speed.update(now, iteration, trains=trains(now))
    return speed.value


def test_the_speed_is_that_of_the_last_seconds() -> None:
    """Two iterations a second for a minute, then eight: after ten seconds nothing is left of the slow minute."""
    slow = [(float(t), 2 * t) for t in range(60)]
    fast = [(float(t), 118 + 8 * (t - 59)) for t in range(60, 75)]

    assert speed_of(*slow) == pytest.approx(2)
    assert speed_of(*slow, *fast) == pytest.approx(8)


def test_long_iterations_have_a_speed_too() -> None:
    """One in forty seconds, seen each second."""
    assert speed_of(*((float(t), t // 40) for t in range(400))) == pytest.approx(1 / 40)


def test_validations_do_not_slow_the_speed() -> None:
    """From 10 to 50 s the counter stands still, because the run validates."""
    values = [(float(t), min(t, 10) + max(0, t - 50)) for t in range(60)]

    assert speed_of(*values, trains=lambda now: not 10 < now <= 50) == pytest.approx(1)


def test_a_speed_needs_two_iterations() -> None:
    """Before that it is unknown; after a step back it begins anew."""
    assert speed_of() is None
    assert speed_of((0.0, 5), (1.0, 5), (9.0, 5)) is None
    assert speed_of((0.0, 5), (1.0, 9), (2.0, 3)) is None
    assert speed_of((0.0, 5), (1.0, 9), (2.0, 3), (3.0, 4), (4.0, 6)) == pytest.approx(2)
