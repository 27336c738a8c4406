"""CheckpointHook: what becomes of a checkpoint that is due while the one before is being written."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import load_checkpoint, save_checkpoint
from eventloop.checkpoint.manifest import Label
from eventloop.checkpoint.retention.pending import Saves
from eventloop.checkpoint.saving.saver import Saver
from eventloop.events import CheckpointFailed, CheckpointSaved
from eventloop.hooks import CheckpointHook, Hook
from eventloop.training.trainer import Trainer
from tests.checkpoints import rewrite

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]
Files = Callable[..., list[str]]
DEADLINE = 60.0


class Slow:
    """Writes of these names that last until they are let go, or until the training waits for them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.entered, self.go = names, threading.Event(), threading.Event()

    def write(self, state: Any, path: Path, label: Label, **options: Any) -> int:
        if path.name in self.names:
            self.entered.set()
            assert self.go.wait(DEADLINE)
        return save_checkpoint(state, path, label, **options)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Slow]]:
    """Hold the writes of some checkpoints."""
    made: list[Slow] = []
    finish = Saves.finish

    def hold(*names: str) -> Slow:
        made.append(Slow(names))
        monkeypatch.setattr("eventloop.hooks.checkpoint.save_checkpoint", made[-1].write)
        return made[-1]

    def waits(saves: Saves, trainer: Trainer) -> None:
        if saves.under_way:
            for each in made:
                each.go.set()
        finish(saves, trainer)

    monkeypatch.setattr(Saves, "finish", waits)
    yield hold
    for each in made:
        each.go.set()


class LetGo(Hook):
    """Lets a write go at the end of an iteration, and waits until it is done; before, that it has begun."""

    priority = "LOWEST"

    def __init__(self, slow: Slow, iteration: int, hook: CheckpointHook) -> None:
        self.slow, self.iteration, self.hook = slow, iteration, hook

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Do that."""
        assert self.slow.entered.wait(DEADLINE)
        if event.iter == self.iteration:
            self.slow.go.set()
            for saving in list(self.hook.saves.under_way):
                saving.written.exception(DEADLINE)


@pytest.fixture
def outcomes(make_trainer: Make) -> Callable[..., list[str]]:
    """Train, and say what became of each checkpoint, in the order it was told."""

    def train(*hooks: Hook, **options: Any) -> list[str]:
        trainer = make_trainer(hooks=list(hooks), **options)
        seen: list[str] = []

        @trainer.bus.on("checkpoint_saved", "checkpoint_failed")
        def note(event: CheckpointSaved | CheckpointFailed) -> None:
            error = f" {event.error}" if isinstance(event, CheckpointFailed) else ""
            seen.append(f"{Path(event.path).name}{error}")

        trainer.train()
        return seen

    return train


Outcomes = Callable[..., list[str]]
REPLACED = "replaced by a newer one before it was written"


def test_wait(slow: Callable[..., Slow], outcomes: Outcomes) -> None:
    """By default the training waits: every checkpoint is there."""
    slow("iter_1", "iter_2")

    assert outcomes(CheckpointHook(interval=1), max_iters=3) == ["iter_1", "iter_2", "iter_3"]


def test_skip(slow: Callable[..., Slow], outcomes: Outcomes, caplog: pytest.LogCaptureFixture) -> None:
    """The new one is left out, which an event and the log tell; once there is time again, the next is saved."""
    held, hook = slow("iter_1"), CheckpointHook(interval=1, when_busy="skip")

    seen = outcomes(hook, LetGo(held, 2, hook), max_iters=4)

    skipped = "skipped: iter_1 was still being written"
    assert seen == [f"iter_2 {skipped}", f"iter_3 {skipped}", "iter_1", "iter_4"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert next(line for line in said if "skipped" in line).endswith(f"iter_2 was {skipped}")


def test_many_that_are_skipped(
    slow: Callable[..., Slow], outcomes: Outcomes, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the 1st, 2nd, 4th, 8th, ..., and at the end their number; events name every one."""
    slow("iter_1")

    seen = outcomes(CheckpointHook(interval=1, when_busy="skip"), max_iters=7)

    assert [line.split()[0] for line in seen] == [
        "iter_2",
        "iter_3",
        "iter_4",
        "iter_5",
        "iter_6",
        "iter_1",
        "iter_7",
    ]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    skipped = [line.partition("/run/")[2] for line in said if "skipped" in line]
    reason = "was skipped: iter_1 was still being written"
    assert skipped == [
        f"iter_2 {reason}", f"iter_3 {reason} (2 skipped so far)", f"iter_5 {reason} (4 skipped so far)",
    ]  # fmt: skip
    assert said[-1] == (
        "5 checkpoints were left out, because another one was still being written: to save them all, use a "
        'longer interval or when_busy="wait"'
    )


@pytest.mark.parametrize("when_busy", ["skip", "replace"])
def test_the_last_of_the_interval_is_waited_for(
    slow: Callable[..., Slow], outcomes: Outcomes, when_busy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With `save_last` it is not said to be left out, to be saved a moment later."""
    slow("iter_1")

    assert outcomes(CheckpointHook(interval=1, when_busy=when_busy), max_iters=2) == ["iter_1", "iter_2"]
    assert "iter_2 was" not in caplog.text


def test_replace(
    slow: Callable[..., Slow],
    outcomes: Outcomes,
    files: Files,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The one that waits is replaced by the new one, which an event and the log tell."""
    held, hook = slow("iter_1"), CheckpointHook(interval=1, when_busy="replace", save_last=False)

    seen = outcomes(hook, LetGo(held, 3, hook), max_iters=4)

    assert seen == [f"iter_2 {REPLACED}", f"iter_3 {REPLACED}", "iter_1", "iter_4"]
    assert files() == ["iter_1", "iter_4"]
    assert load_checkpoint(tmp_path / "run" / "iter_4")["meta"]["iter"] == 4
    assert f"checkpoint {tmp_path / 'run' / 'iter_2'} was {REPLACED}" in caplog.text


def test_one_that_was_replaced_is_not_counted(
    slow: Callable[..., Slow], outcomes: Outcomes, files: Files
) -> None:
    """`max_keep_ckpts` counts checkpoints that were written: none goes for one that never was."""
    held = slow("iter_2")
    hook = CheckpointHook(interval=1, when_busy="replace", save_last=False, max_keep_ckpts=2)

    class Begin(Hook):
        def before_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter == 1:  # the first is durable
                hook.saves.under_way[0].written.result(DEADLINE)
                held.names = ("iter_2",)

    let_go = LetGo(held, 3, hook)
    held.entered.set()
    seen = outcomes(hook, Begin(), let_go, max_iters=4)

    assert seen == ["iter_1", f"iter_3 {REPLACED}", "iter_2", "iter_4"]
    assert files() == ["iter_2", "iter_4"]


@pytest.mark.parametrize("when_busy", ["skip", "replace"])
def test_the_last_is_always_saved(slow: Callable[..., Slow], outcomes: Outcomes, when_busy: Any) -> None:
    """It is waited for what is before it, and it is waited for."""
    slow("iter_2")

    assert outcomes(CheckpointHook(interval=2, when_busy=when_busy), max_iters=3) == ["iter_2", "iter_3"]


@pytest.mark.parametrize("when_busy", ["skip", "replace"])
def test_the_best_is_always_saved(
    slow: Callable[..., Slow], outcomes: Outcomes, scripted: Scripted, when_busy: Any
) -> None:
    """It waits for the checkpoint of its epoch, and is waited for."""
    slow("epoch_1", "best_acc_epoch_1")
    hook = CheckpointHook(interval=1, save_best="acc", when_busy=when_busy, save_last=False)

    seen = outcomes(hook, max_epochs=2, **scripted(0.25, 0.5))

    assert seen == ["epoch_1", "best_acc_epoch_1", "epoch_2", "best_acc_epoch_2"]


class Fails:
    """A write of this name that fails, once it is let go."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self.go = name, threading.Event()
        monkeypatch.setattr("eventloop.hooks.checkpoint.save_checkpoint", self.write)

    def write(self, state: Any, path: Path, label: Label, **options: Any) -> int:
        if path.name == self.name:
            assert self.go.wait(DEADLINE)
            raise OSError("input/output error")
        return save_checkpoint(state, path, label, **options)


def test_a_failed_write_does_not_touch_the_one_that_waits(
    outcomes: Outcomes, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was being written fails; the one behind it is written, and is what is kept."""
    first = Fails("iter_1", monkeypatch)

    class Go(Hook):
        priority = "LOWEST"

        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter == 1:
                first.go.set()

    hook = CheckpointHook(interval=1, when_busy="replace", save_last=False, max_keep_ckpts=1)

    seen = outcomes(hook, Go(), max_iters=2)

    assert seen == ["iter_1 OSError: input/output error", "iter_2"]
    assert files() == ["iter_2"]
    assert hook.state_dict()["kept"] == ["iter_2"]


def test_a_failed_one_is_not_counted(
    outcomes: Outcomes, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two to keep, the one before the failed one stays: the one that waited goes by what became of it."""
    third = Fails("iter_3", monkeypatch)

    class Go(Hook):
        priority = "LOWEST"

        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.iter < 2:  # durable before the third begins
                for saving in hook.saves.under_way:
                    saving.written.result(DEADLINE)
            if event.iter == 3:
                third.go.set()

    hook = CheckpointHook(interval=1, when_busy="replace", save_last=False, max_keep_ckpts=2)

    seen = outcomes(hook, Go(), max_iters=4)

    assert seen == ["iter_1", "iter_2", "iter_3 OSError: input/output error", "iter_4"]
    assert files() == ["iter_2", "iter_4"]
    assert hook.state_dict()["kept"] == ["iter_2", "iter_4"]


def test_a_resumed_run_counts_what_is_there(
    make_trainer: Callable[..., Trainer], files: Files, tmp_path: Path
) -> None:
    """A checkpoint that names one which was under way, and then failed, does not count it."""
    options: dict[str, Any] = {"interval": 1, "max_keep_ckpts": 2, "save_last": False}
    make_trainer(max_iters=3, hooks=[CheckpointHook(**options)]).train()
    rewrite(tmp_path / "run" / "iter_3", lambda state: state["hooks"]["checkpoint"]["kept"].append("iter_9"))
    trainer = make_trainer(max_iters=4, hooks=[CheckpointHook(**options)])
    trainer.resume()

    trainer.train()

    assert files() == ["iter_3", "iter_4"]


@pytest.mark.parametrize(
    ("signum", "at", "superseded"), [(signal.SIGTERM, 3, [True]), (signal.SIGTERM, 2, []), (None, 3, [])]
)
def test_a_preempted_run_hurries_to_its_last_state(
    make_trainer: Make,
    scripted: Scripted,
    slow: Callable[..., Slow],
    monkeypatch: pytest.MonkeyPatch,
    signum: int | None,
    at: int,
    superseded: list[bool],
) -> None:
    """An older state under way is superseded, of which a process may take too long; not one that is the last itself, nor
    where the time is not short."""
    held, seen = slow("iter_2"), []
    supersede = Saver.supersede

    def spy(saver: Saver) -> None:
        seen.append(saver.busy)
        supersede(saver)

    monkeypatch.setattr(Saver, "supersede", spy)
    trainer = make_trainer(
        **scripted(), max_iters=8, default_hooks={"checkpoint": None}, hooks=[CheckpointHook(interval=2)]
    )

    @trainer.bus.on("after_train_iter", priority="LOWEST", start=at - 1, once=True)
    def ends(trainer: Trainer, event: Any) -> None:
        assert held.entered.wait(DEADLINE)
        trainer.request_stop("the time is over", signum=signum)

    with contextlib.suppress(SystemExit):
        trainer.train()

    assert seen == superseded
    assert load_checkpoint(trainer.work_dir / f"iter_{at}")["meta"]["iter"] == at
