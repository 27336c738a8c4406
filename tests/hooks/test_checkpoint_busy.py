"""Test checkpoints that are due while earlier ones are still being written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.retention.pending import Saves, WhenBusy
from eventloop.events import CheckpointFailed, CheckpointSaved
from eventloop.hooks import CheckpointHook, Hook
from tests.checkpoints import rewrite
from tests.support.internals import substitute
from tests.support.saving import Writes

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]
Files = Callable[..., list[str]]
DEADLINE = 60.0


class Slow:
    """Writes of some names that wait until they are released, or until the training waits; `fails` names one
    that then fails."""

    def __init__(self, names: tuple[str, ...], fails: str = "") -> None:
        self.names, self.fails, self.entered, self.go = names, fails, threading.Event(), threading.Event()

    def before(self, path: Path) -> None:
        """Wait if the path is one of the held names."""
        if path.name in self.names:
            self.entered.set()
            assert self.go.wait(DEADLINE)
        if path.name == self.fails:
            raise OSError("input/output error")


@pytest.fixture(autouse=True)
def one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the queue to one checkpoint."""
    substitute(monkeypatch, "saver.QUEUE_BYTES", 0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Slow]]:
    """Return a function that holds the writes of some checkpoints."""
    made: list[Slow] = []
    finish, make_room = Saves.finish, Saves.make_room

    def hold(*names: str, fails: str = "") -> Slow:
        made.append(Slow(names, fails))
        Writes.of_hooks(monkeypatch, made[-1].before)
        return made[-1]

    def let_go(saves: Saves) -> None:
        if saves.under_way:
            for each in made:
                each.go.set()

    def finished(saves: Saves, trainer: Trainer, *, failed: bool = False) -> None:
        let_go(saves)
        finish(saves, trainer, failed=failed)

    def made_room(saves: Saves, trainer: Trainer, when_busy: WhenBusy) -> bool:
        if when_busy == "wait":
            let_go(saves)
        return make_room(saves, trainer, when_busy)

    monkeypatch.setattr(Saves, "finish", finished)
    monkeypatch.setattr(Saves, "make_room", made_room)
    yield hold
    for each in made:
        each.go.set()


class LetGo(Hook):
    """A hook that releases a write in one iteration and waits for it; before the iteration `since` it waits
    for every save."""

    priority = "LOWEST"

    def __init__(self, slow: Slow, iteration: int, hook: CheckpointHook, since: int = 0) -> None:
        self.slow, self.iteration, self.hook, self.since = slow, iteration, hook, since

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Release the write, and wait, in the given iterations."""
        if event.iter >= self.since:
            assert self.slow.entered.wait(DEADLINE)
        if event.iter == self.iteration:
            self.slow.go.set()
        if event.iter == self.iteration or event.iter < self.since:
            for saving in list(self.hook.saves.under_way):
                saving.written.exception(DEADLINE)


@pytest.fixture
def outcomes(make_trainer: Make) -> Callable[..., list[str]]:
    """Return a function that trains, and returns the outcome of each checkpoint in the order of its
    events."""

    def train(*hooks: Hook, **options: Any) -> list[str]:
        trainer = make_trainer(hooks=list(hooks), **options)
        seen: list[str] = []

        @trainer.bus.on("checkpoint_saved", "checkpoint_failed")
        def record(event: CheckpointSaved | CheckpointFailed) -> None:
            error = f" {event.error}" if isinstance(event, CheckpointFailed) else ""
            seen.append(f"{Path(event.path).name}{error}")

        trainer.train()
        return seen

    return train


Outcomes = Callable[..., list[str]]
REPLACED = "replaced by a newer one before it was written"


def test_skip(slow: Callable[..., Slow], outcomes: Outcomes, caplog: pytest.LogCaptureFixture) -> None:
    """With "skip" a due checkpoint is skipped and reported by event and log; the next one with room is
    saved."""
    held, hook = slow("iter_1"), CheckpointHook(interval=1, when_busy="skip")

    seen = outcomes(hook, LetGo(held, 2, hook), max_iters=4)

    skipped = "skipped: iter_1 was still being written"
    assert seen == [f"iter_2 {skipped}", f"iter_3 {skipped}", "iter_1", "iter_4"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert next(line for line in said if "skipped" in line).endswith(f"iter_2 was {skipped}")


def test_many_that_are_skipped(
    slow: Callable[..., Slow], outcomes: Outcomes, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the 1st, 2nd, 4th, 8th, ... skipped checkpoint and their number at the end; events name
    all."""
    slow("iter_1")

    seen = outcomes(CheckpointHook(interval=1, when_busy="skip"), max_iters=7)

    assert [line.split()[0] for line in seen] == [f"iter_{number}" for number in (2, 3, 4, 5, 6, 1, 7)]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    skipped = [line.partition("/run/")[2] for line in said if "skipped" in line]
    reason = "was skipped: iter_1 was still being written"
    assert skipped == [
        f"iter_2 {reason}",
        f"iter_3 {reason} (2 skipped so far)",
        f"iter_5 {reason} (4 skipped so far)",
    ]
    assert said[-1].startswith("5 checkpoints were left out, because another one was still being written")


def test_replace(
    slow: Callable[..., Slow],
    outcomes: Outcomes,
    files: Files,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With "replace" the waiting checkpoint is dropped for the new one, and reported by event and log."""
    held, hook = slow("iter_1"), CheckpointHook(interval=1, when_busy="replace", save_last=False)

    seen = outcomes(hook, LetGo(held, 3, hook), max_iters=4)

    assert seen == [f"iter_2 {REPLACED}", f"iter_3 {REPLACED}", "iter_1", "iter_4"]
    assert files() == ["iter_1", "iter_4"]
    assert load_checkpoint(tmp_path / "run" / "iter_4")["meta"]["iter"] == 4
    assert f"checkpoint {tmp_path / 'run' / 'iter_2'} was {REPLACED}" in caplog.text


def test_one_that_was_replaced_is_not_counted(
    slow: Callable[..., Slow], outcomes: Outcomes, files: Files
) -> None:
    """`max_keep_ckpts` does not count replaced checkpoints, so no other one is removed for them."""
    hook = CheckpointHook(interval=1, when_busy="replace", save_last=False, max_keep_ckpts=2)

    seen = outcomes(hook, LetGo(slow("iter_2"), 3, hook, since=1), max_iters=4)

    assert seen == ["iter_1", f"iter_3 {REPLACED}", "iter_2", "iter_4"]
    assert files() == ["iter_2", "iter_4"]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("when_busy", "interval", "iters", "expected"),
    [
        ("wait", 1, 3, ["iter_1", "iter_2", "iter_3"]),
        *(
            (when_busy, interval, iters, [f"iter_{interval}", f"iter_{iters}"])
            for when_busy in ("skip", "replace")
            for interval, iters in ((1, 2), (2, 3))
        ),
    ],
)
def test_the_last_is_always_saved(
    slow: Callable[..., Slow],
    outcomes: Outcomes,
    caplog: pytest.LogCaptureFixture,
    when_busy: Any,
    interval: int,
    iters: int,
    expected: list[str],
) -> None:
    """The last checkpoint is always saved, and with "wait" every one is."""
    slow(*expected[:-1])

    assert outcomes(CheckpointHook(interval=interval, when_busy=when_busy), max_iters=iters) == expected
    assert f"{expected[-1]} was" not in caplog.text


@pytest.mark.parametrize("when_busy", ["skip", "replace"])
def test_the_best_is_always_saved(
    slow: Callable[..., Slow], outcomes: Outcomes, scripted: Scripted, when_busy: Any
) -> None:
    """A best checkpoint is never skipped or replaced."""
    slow("epoch_1", "best_acc_epoch_1")
    hook = CheckpointHook(interval=1, save_best="acc", when_busy=when_busy, save_last=False)

    seen = outcomes(hook, max_epochs=2, **scripted(0.25, 0.5))

    assert [line for line in seen if "best" in line.split()[0]] == ["best_acc_epoch_1", "best_acc_epoch_2"]


def test_a_failed_one_is_not_counted(slow: Callable[..., Slow], outcomes: Outcomes, files: Files) -> None:
    """A failed checkpoint does not count for `max_keep_ckpts`, and the one waiting after it is written."""
    hook = CheckpointHook(interval=1, when_busy="replace", save_last=False, max_keep_ckpts=2)

    seen = outcomes(hook, LetGo(slow("iter_3", fails="iter_3"), 3, hook, since=2), max_iters=4)

    assert seen == ["iter_1", "iter_2", "iter_3 OSError: input/output error", "iter_4"]
    assert files() == ["iter_2", "iter_4"]
    assert hook.state_dict()["kept"] == ["iter_2", "iter_4"]


def test_a_resumed_run_counts_what_is_there(
    make_trainer: Callable[..., Trainer], files: Files, tmp_path: Path
) -> None:
    """A resumed run does not count checkpoints that its state lists and that do not exist."""
    options: dict[str, Any] = {"interval": 1, "max_keep_ckpts": 2, "save_last": False}
    make_trainer(max_iters=3, hooks=[CheckpointHook(**options)]).train()
    rewrite(tmp_path / "run" / "iter_3", lambda state: state["hooks"]["checkpoint"]["kept"].append("iter_9"))
    trainer = make_trainer(max_iters=4, hooks=[CheckpointHook(**options)])
    trainer.resume()

    trainer.train()

    assert files() == ["iter_3", "iter_4"]


@pytest.mark.parametrize("when_busy", ["wait", "skip", "replace"])
def test_small_checkpoints_wait_in_a_queue(
    slow: Callable[..., Slow], outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch, when_busy: Any
) -> None:
    """While the queue has room, no checkpoint is waited for, skipped or replaced."""
    substitute(monkeypatch, "saver.QUEUE_BYTES", 1 << 20)
    held, hook = slow("iter_1"), CheckpointHook(interval=1, when_busy=when_busy, save_last=False)

    seen = outcomes(hook, LetGo(held, 4, hook), max_iters=5)

    assert seen == [f"iter_{number}" for number in range(1, 6)]
