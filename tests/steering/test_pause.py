"""Test a run that a command pauses."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eventloop import Trainer
from eventloop.commands.messages import PROGRAM
from tests.steering.job import build, collected, command, steer
from tests.support.internals import substitute
from tests.support.trainers import DEADLINE

POLL = 0.002


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a paused run look more often whether it goes on."""
    substitute(monkeypatch, "commands.PAUSE_SECONDS", POLL)


def during_pause(trainer: Trainer, *acts: Callable[[], object]) -> threading.Thread:
    """Do something once the run is paused, each when the one before has taken effect: as somebody outside does."""
    answers = collected(trainer, "command_applied", "command_refused")

    def work() -> None:
        end = time.monotonic() + DEADLINE
        wait_until(lambda: trainer.commands.paused, end)
        for act in acts:
            before = len(answers)
            act()
            wait_until(lambda before=before: len(answers) > before or not trainer.running, end)  # type: ignore[misc]

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def wait_until(condition: Callable[[], object], end: float) -> None:
    """Wait for a condition, and give up at the deadline."""
    while not condition() and time.monotonic() < end:
        time.sleep(POLL)


def give(trainer: Trainer, *words: str) -> Callable[[], None]:
    """Return a function that gives a command as the background does."""
    return lambda: trainer.stops.commands.append(command(*words))


def test_commands_work_during_a_pause(tmp_path: Path) -> None:
    """All of them are applied at the iteration of the pause, and a second pause changes nothing."""
    trainer = build(tmp_path / "run")
    seen = collected(trainer, "command_applied")
    saves = collected(trainer, "checkpoint_saved")
    steer(trainer, {3: [("pause",)]})
    told = [("pause",), ("shake", "0.1"), ("validate",), ("checkpoint",), ("go",)]

    thread = during_pause(trainer, *(give(trainer, *words) for words in told))
    trainer.train()
    thread.join()
    trainer.close()

    assert [(each.iter, each.command) for each in seen] == [(3, "pause"), *((3, words[0]) for words in told)]
    assert (saves[0].iter, Path(saves[0].path).name) == (3, "iter_3")
    assert trainer.iter == 12
    assert not trainer.commands.paused


def test_go_without_a_pause(tmp_path: Path) -> None:
    """It is refused, and the run goes on."""
    trainer = build(tmp_path / "run")
    refusals = collected(trainer, "command_refused")
    steer(trainer, {3: [("go",)]})

    trainer.train()
    trainer.close()

    assert [each.reason for each in refusals] == ["the run is not paused"]
    assert trainer.iter == 12


def test_stop_during_a_pause(tmp_path: Path) -> None:
    """The run ends where it is, with a checkpoint."""
    trainer = build(tmp_path / "run")
    steer(trainer, {3: [("pause",)]})

    thread = during_pause(trainer, give(trainer, "stop", "enough", "of", "it"))
    trainer.train()
    thread.join()
    trainer.close()

    assert (trainer.iter, trainer.stop_reason) == (3, "enough of it")
    assert (tmp_path / "run" / "iter_3").exists()


def test_pause_and_stop_together(tmp_path: Path) -> None:
    """A run that is stopped at the same boundary does not wait."""
    trainer = build(tmp_path / "run")
    steer(trainer, {3: [("pause",), ("stop",)]})

    trainer.train()
    trainer.close()

    assert (trainer.iter, trainer.stop_reason) == (3, "stopped by a command")


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize(
    ("signum", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_ends_the_pause_and_the_run(
    tmp_path: Path, signum: int, raised: type[BaseException]
) -> None:
    """SIGTERM and Ctrl-C end the pause, then the run, with a checkpoint of that iteration."""
    trainer = build(tmp_path / "run")
    steer(trainer, {3: [("pause",)]})

    thread = during_pause(trainer, lambda: os.kill(os.getpid(), signum))
    with pytest.raises(raised):
        trainer.train()
    thread.join()
    trainer.close()

    assert (trainer.iter, trainer.stop_signal) == (3, signum)
    assert (tmp_path / "run" / "iter_3").exists()


def test_the_time_of_a_pause_is_in_no_iteration(tmp_path: Path) -> None:
    """Neither the times of iterations, of which the estimate of the remaining time is made, nor the phases have it."""
    trainer, clock = build(tmp_path / "run"), dict[str, float]()
    times: list[float] = []
    trainer.bus.subscribe(
        lambda event: times.append(trainer.metrics.latest()["time"].value),
        "after_train_iter",
        priority="LOWEST",
    )
    trainer.bus.subscribe(
        lambda event: clock.setdefault(event.command, time.perf_counter()), "command_applied"
    )
    steer(trainer, {3: [("pause",)]})

    def go_later() -> None:
        paused = time.perf_counter()
        wait_until(lambda: time.perf_counter() > paused + 0.3, time.monotonic() + DEADLINE)
        give(trainer, "go")()

    thread = during_pause(trainer, go_later)
    began = time.perf_counter()
    trainer.train()
    whole = time.perf_counter() - began
    thread.join()
    trainer.close()

    paused = clock["go"] - clock["pause"]
    assert sum(times) < whole - paused
    assert trainer.costs().phases.wall < whole - paused
    assert trainer.costs().evaluation < whole - paused


def test_a_pause_by_the_program(tmp_path: Path) -> None:
    """A handler may pause the run, too; somebody outside lets it go on."""
    trainer = build(tmp_path / "run")
    trainer.bus.subscribe(
        lambda event: trainer.commands.request("pause") if event.iter == 4 else None, "after_train_iter"
    )
    seen = collected(trainer, "command_applied")

    thread = during_pause(trainer, give(trainer, "go"))
    trainer.train()
    thread.join()
    trainer.close()

    assert [(each.iter, each.command, each.source == PROGRAM) for each in seen] == [
        (5, "pause", True),
        (5, "go", False),
    ]
