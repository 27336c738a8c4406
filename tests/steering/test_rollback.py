"""Test how a run goes back: its events, what is refused, loops of a program, stops, and what stays on the disk."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer
from eventloop.commands.client import post
from eventloop.commands.messages import INBOX, OUTBOX, decode_answer
from eventloop.commands.record import NAME, read_record
from eventloop.hooks import CheckpointHook, Hook
from eventloop.ownership import holding
from eventloop.reporting.curves import read_curves
from eventloop.writers import ConsoleWriter, JSONLWriter
from tests.steering.job import ITERS, Plan, command, recorded, steer
from tests.steering.job import build as steered
from tests.support.interrupted import Case, assert_same, seed
from tests.support.rolled_back import build, final, go_back, once, skip_by_hand, weights
from tests.support.signals import send
from tests.support.trainers import MakeTrainer, batches, collect, event_name, record

Make = Callable[..., Trainer]


@pytest.fixture
def make(make_trainer: MakeTrainer) -> Make:
    """Build trainers of 12 iterations in two epochs that save every two iterations."""

    def make(**changes: Any) -> Trainer:
        hooks = [CheckpointHook(2, by_epoch=False), *changes.pop("hooks", [])]
        return make_trainer(**{"train_loader": batches(6), "max_epochs": 2, "hooks": hooks, **changes})

    return make


def trained(trainer: Trainer) -> list[list[float]]:
    """Train, and return the weights."""
    trainer.train()
    return weights(trainer)


# --- events ------------------------------------------------------------------------------------------------


def test_events_of_a_rollback(make: Make) -> None:
    """The epoch and the training close with "rollback", and begin again with the checkpoint's counters."""
    trainer = make()
    events = collect(
        trainer,
        "before_train",
        "before_train_epoch",
        "after_train_epoch",
        "after_train",
        "rolled_back",
        "after_run",
    )
    go_back(trainer, 5, "iter_2", 1)
    trainer.train()

    assert [
        (event_name(event), event.iter, event.epoch, getattr(event, "reason", None)) for event in events
    ] == [
        ("before_train", 0, 0, None),
        ("before_train_epoch", 0, 0, None),
        ("after_train_epoch", 5, 0, "rollback"),
        ("after_train", 5, 0, "rollback"),
        ("rolled_back", 2, 0, ""),
        ("before_train", 2, 0, None),
        ("before_train_epoch", 2, 0, None),
        ("after_train_epoch", 5, 0, "completed"),
        ("before_train_epoch", 5, 1, None),
        ("after_train_epoch", 11, 1, "completed"),
        ("after_train", 11, 2, "completed"),
        ("after_run", 11, 2, "completed"),
    ]
    rolled = next(event for event in events if event_name(event) == "rolled_back")
    assert (rolled.path, rolled.skipped) == (str(trainer.work_dir / "iter_2"), 1)


def test_command_is_announced_before_the_rollback(make: Make) -> None:
    """`command_applied` has the iteration at which the run turned back, and the checkpoint."""
    trainer = make()
    applied = collect(trainer, "command_applied")
    go_back(trainer, 5, skip=1)
    trainer.train()

    assert [(event.iter, event.command) for event in applied] == [(5, "rollback")]
    path = str(trainer.work_dir / "iter_4")
    assert applied[0].result == {"path": path, "from_iteration": 4, "skip": 1}


def test_abandoned_iteration_is_not_saved_at_the_end(make: Make) -> None:
    """Only the last checkpoint of the whole run is saved beside those of the interval."""
    trainer = make()
    go_back(trainer, 5, "iter_2")
    trainer.train()

    saved = {path.name for path in trainer.work_dir.iterdir() if path.name.startswith("iter_")}
    assert saved == {"iter_2", "iter_2_rollback", *(f"iter_{number}" for number in range(4, 13, 2))}


def test_rows_of_abandoned_iterations_are_superseded(make: Make) -> None:
    """The JSON lines have both, with a line between them, and the curves of a report only the later ones."""
    trainer = make(writers=[JSONLWriter()], default_hooks={"logger": {"interval": 1}})
    go_back(trainer, 5, "iter_2")
    losses: dict[int, float] = {}
    trainer.bus.subscribe(
        lambda trainer, event: losses.update({event.iter: trainer.outputs["loss"].item()}), "after_train_iter"
    )
    trainer.train()
    path = trainer.work_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [row.get("event") or row["step"] for row in rows if row.get("mode") == "train" or "event" in row]
    shown = [step for step in steps if step == "rolled_back" or isinstance(step, int)]
    log = read_curves(path)
    curve = next(curve for curve in log.curves if curve.name == "loss")

    assert shown == [1, 2, 3, 4, 5, "rolled_back", *range(3, 13)]
    assert log.superseded
    assert [*curve.steps] == [*range(1, 13)]
    assert [*curve.mean] == pytest.approx([losses[number] for number in range(12)], rel=1e-6)


def test_console_says_where_the_run_goes_back(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """The console writer has a line with the checkpoint, its iteration and the number of batches."""
    trainer = make(writers=[ConsoleWriter(progress=False)])
    go_back(trainer, 5, "iter_2", 3)
    trainer.train()

    assert (
        f"Rolled back to {trainer.work_dir / 'iter_2'} (iteration 2), skipping 3 batches"
        in capsys.readouterr().out
    )


# --- which checkpoint --------------------------------------------------------------------------------------


def test_newest_older_checkpoint_is_the_default(make: Make) -> None:
    """Without a path the run goes to the newest checkpoint older than the present iteration, never to one that it
    has abandoned."""
    trainer = make()
    rolled = collect(trainer, "rolled_back")
    go_back(trainer, 8, "iter_2")
    once(trainer, "after_train_iter", 6, lambda: go_back(trainer, 4))
    once(trainer, "rolled_back", 2, lambda: None)
    trainer.train()

    assert [event.path for event in rolled] == [
        str(trainer.work_dir / "iter_2"),
        str(trainer.work_dir / "iter_2_rollback"),
    ]


def assert_unharmed(make: Make, trainer: Trainer, reason: str) -> None:
    """Assert that the rollback is refused for a reason, and that the run ends as one that never asked."""
    refused = collect(trainer, "command_refused")
    events = record(trainer, "after_train", "rolled_back")
    with_request = trained(trainer)

    assert len(refused) == 1
    assert reason in refused[0].reason
    assert events == [("after_train", 12, 2)]
    assert with_request == trained(make(work_dir=trainer.work_dir / "plain"))


def test_missing_checkpoint_is_refused(make: Make) -> None:
    """A checkpoint that does not exist is refused with those that do, and the training goes on unharmed."""
    trainer = make()
    go_back(trainer, 5, "iter_3")

    assert_unharmed(
        make, trainer, f"no checkpoint at iter_3, nor one of that name in {trainer.work_dir}: there are "
    )


def test_no_older_checkpoint_is_refused(make: Make) -> None:
    """Without an older checkpoint the refusal says so, and the training goes on unharmed."""
    trainer = make()
    go_back(trainer, 2)

    assert_unharmed(make, trainer, "no checkpoint is older than iteration 2")


def test_damaged_checkpoint_is_refused(make: Make) -> None:
    """A damaged checkpoint is refused before anything is left, and the training goes on unharmed."""
    trainer = make()

    def damage() -> None:
        trainer.state.finish_saves()
        state = trainer.work_dir / "iter_2" / "state.pth"
        state.write_bytes(state.read_bytes()[:-1] + b"?")

    once(trainer, "before_train_iter", 4, damage)
    go_back(trainer, 5, "iter_2")

    assert_unharmed(make, trainer, "iter_2")


def test_checkpoint_of_another_model_is_refused(
    make: Make, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """A checkpoint of another model is refused before anything is left, and the training goes on unharmed."""
    other = nn.Linear(2, 3)
    make_trainer(
        model=other,
        optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
        work_dir=tmp_path / "other",
        hooks=[CheckpointHook(1)],
    ).train()
    trainer = make()
    go_back(trainer, 5, str(tmp_path / "other" / "epoch_1"))

    assert_unharmed(make, trainer, "epoch_1")


class Refuses(Hook):
    """A hook that refuses its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("not today")


def test_error_of_a_hook_ends_the_run(make: Make) -> None:
    """An error while the checkpoint is loaded ends the run; the weights are those before, and nothing is saved."""
    trainer = make(hooks=[Refuses()])
    before: list[list[list[float]]] = []
    trainer.bus.subscribe(lambda event: before.append(weights(trainer)), "after_train")
    go_back(trainer, 5, "iter_2")

    with pytest.raises(ValueError, match="not today"):
        trainer.train()

    assert before == [weights(trainer)]
    assert (trainer.iter, trainer.running, trainer.stops.goes_back) == (5, False, False)
    assert not (trainer.work_dir / "iter_5").exists()


# --- loops and moments -------------------------------------------------------------------------------------


def test_hand_written_loop_goes_on_with_the_epoch_of_the_checkpoint(make: Make) -> None:
    """The inner loop ends, and the outer one goes on with the epoch of the checkpoint; the weights are those of
    `train()`."""
    loader = batches(6)
    trainer = make(train_loader=None)
    go_back(trainer, 9, "iter_4", 1)
    epochs = []
    for epoch in trainer.epochs():
        epochs.append(epoch)
        for inputs, target in trainer.batches(loader):
            trainer.outputs = {"loss": nn.functional.cross_entropy(trainer.model(inputs), target)}
    same = make(work_dir=trainer.work_dir / "same", train_loader=loader)
    go_back(same, 9, "iter_4", 1)

    assert epochs == [0, 1, 0, 1]
    assert weights(trainer) == trained(same)


def test_workflow_goes_back(make: Make) -> None:
    """`run(workflow)` goes back as `train()`, and repeats the evaluations behind the checkpoint."""
    trainer = make(val_loader=batches(1), max_epochs=3)
    events = record(trainer, "after_val", "rolled_back")
    go_back(trainer, 15, "iter_10")
    trainer.run([("train", 1), ("val", 1)])

    assert events == [
        ("after_val", 6, 1),
        ("after_val", 12, 2),
        ("rolled_back", 10, 1),
        ("after_val", 12, 2),
        ("after_val", 18, 3),
    ]


def test_steps_refuse_a_rollback(make: Make) -> None:
    """A loop that fetches the batches itself is refused by name, and goes on."""
    trainer = make(train_loader=None)
    refused = collect(trainer, "command_refused")
    go_back(trainer, 3, "iter_2")
    trainer.begin_run()
    trainer.begin_epoch(6)
    for inputs, target in batches(6):
        trainer.begin_iter((inputs, target))
        trainer.end_iter({"loss": nn.functional.cross_entropy(trainer.model(inputs), target)})
    trainer.end_epoch()
    trainer.end_run()

    assert trainer.iter == 6
    expected = (
        "expected a run of train(), run() or epochs(), got one of begin_run(), whose loop fetches the batches itself: "
        "stop it, and resume from the checkpoint"
    )
    assert [event.reason for event in refused] == [expected]


@pytest.mark.parametrize(
    ("event", "iteration", "at"), [("before_train_iter", 4, 5), ("after_val_epoch", 6, 6)]
)
def test_request_of_any_handler_acts_at_the_end_of_an_iteration(
    make: Make, event: str, iteration: int, at: int
) -> None:
    """A rollback that is requested before an iteration acts after it, and one in a validation after that."""
    trainer = make(val_loader=batches(1))
    ends = record(trainer, "after_train")
    once(trainer, event, iteration, lambda: trainer.rollback("iter_2"))
    trainer.train()

    assert ends == [("after_train", at, at // 6), ("after_train", 12, 2)]


def test_request_after_the_last_iteration_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A request that no iteration follows is not applied, and a warning says so."""
    trainer = make()
    once(trainer, "after_train", 12, trainer.rollback)
    with caplog.at_level(logging.WARNING):
        trainer.train()

    assert "rollback was refused: the run has ended" in caplog.text


def test_second_request_of_an_iteration_is_refused(make: Make) -> None:
    """Of two requests in one iteration the first counts, and the other is refused by its checkpoint."""
    trainer = make()
    refused, rolled = collect(trainer, "command_refused"), record(trainer, "rolled_back")
    once(trainer, "after_train_iter", 6, lambda: [*map(trainer.rollback, ("iter_4", "iter_2"))])
    trainer.train()

    assert rolled == [("rolled_back", 4, 0)]
    assert [event.reason for event in refused] == ["the run goes back to iter_4 already"]


def test_other_commands_wait_for_the_training_from_there(make: Make) -> None:
    """A command that comes with a rollback is applied after the first iteration behind the checkpoint."""
    trainer = make()
    applied = collect(trainer, "command_applied")
    once(trainer, "after_train_iter", 6, lambda: trainer.rollback("iter_2"))
    once(trainer, "after_train_iter", 6, lambda: trainer.commands.request("checkpoint"))
    trainer.train()

    assert [(event.command, event.iter) for event in applied] == [("rollback", 7), ("checkpoint", 3)]
    assert (trainer.work_dir / "iter_3").exists()


@pytest.mark.parametrize(
    ("stops", "outcome"), [(False, ("applied", 3, "")), (True, ("refused", 2, "the run has ended: enough"))]
)
def test_commands_of_senders_with_a_rollback_are_answered(
    make: Make, monkeypatch: pytest.MonkeyPatch, stops: bool, outcome: tuple[str, int, str]
) -> None:
    """A sender's command that comes with a rollback is answered, also if the run ends where it goes back."""
    monkeypatch.setattr(holding, "TICK_SECONDS", 0.02)
    trainer = make()
    ids: list[str] = []

    def send_both() -> None:
        arguments = {"checkpoint": "iter_2", "stop": stops, "reason": "enough"}
        ids.append(post(trainer.work_dir, "rollback", arguments=arguments))
        ids.append(post(trainer.work_dir, "note", "hello"))
        while len(trainer.stops.commands) < 2:
            time.sleep(0.01)

    once(trainer, "after_train_iter", 6, send_both)
    trainer.train()
    trainer.close()

    folder = trainer.work_dir / OUTBOX
    rollback, note = [decode_answer((folder / f"{each}.json").read_bytes(), each) for each in ids]
    assert (rollback.outcome, rollback.iteration) == ("applied", 7)
    assert (note.outcome, note.iteration, note.reason) == outcome
    assert [*(trainer.work_dir / INBOX).iterdir()] == []


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"path": 7}, TypeError, "expected the path or the name of a checkpoint, or None, got path=7"),
        ({"skip": -1}, ValueError, "skip must be .* got -1"),
        ({"skip": "all"}, TypeError, "skip must be .* got 'all'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    make: Make, arguments: dict[str, Any], kind: type[Exception], match: str
) -> None:
    """A wrong argument is an error of the call, with the argument and what came."""
    with pytest.raises(kind, match=match):
        make().rollback(**arguments)


def test_rollback_outside_of_a_training_is_an_error(make: Make) -> None:
    """Without a training that runs the call raises, because no iteration will end."""
    with pytest.raises(
        RuntimeError, match="expected a training that runs, got the request 'rollback' outside"
    ):
        make().rollback()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"skip": -2}, "expected a number of batches to skip, at least 0, got -2"),
        ({"scale_lr": 0}, "expected a factor scale_lr above 0, got 0.0"),
        ({"scale_lr": -1.5}, "expected a factor scale_lr above 0, got -1.5"),
    ],
)
def test_wrong_arguments_of_the_command_are_refused(
    make: Make, arguments: dict[str, Any], reason: str
) -> None:
    """A command with a number out of range is refused with what came."""
    trainer = make()
    refused = collect(trainer, "command_refused")
    once(trainer, "after_train_iter", 6, lambda: trainer.commands.request("rollback", **arguments))
    trainer.train()

    assert [event.reason for event in refused] == [reason]


# --- stops, kills and records ------------------------------------------------------------------------------


def test_signal_during_a_rollback_ends_the_run_there(make: Make, received: Any) -> None:
    """A signal that comes while the run goes back ends it before the next iteration, and a resume goes on as if it
    had not come."""
    trainer = make()
    go_back(trainer, 5, "iter_2", 1)
    once(trainer, "rolled_back", 2, send)
    trainer.train()
    after = trainer.iter
    undisturbed = make(work_dir=trainer.work_dir / "undisturbed")
    go_back(undisturbed, 5, "iter_2", 1)
    expected = trained(undisturbed)
    resumed = make()
    resumed.resume()

    assert after == 2
    assert trained(resumed) == expected


def test_signal_before_a_rollback_waits_for_it(make: Make, received: Any) -> None:
    """A signal in the iteration that goes back ends the run at the checkpoint, not in the abandoned iteration."""
    trainer = make()
    rolled = collect(trainer, "rolled_back")
    go_back(trainer, 5, "iter_2")
    once(trainer, "after_train_iter", 4, send)
    trainer.train()

    assert (trainer.iter, len(rolled)) == (2, 1)


def test_run_that_stops_refuses_a_rollback(make: Make) -> None:
    """A handler that has stopped the run cannot have it go back."""
    trainer = make()
    refused = collect(trainer, "command_refused")
    once(trainer, "after_train_iter", 4, lambda: trainer.stop("enough"))
    once(trainer, "after_train_iter", 4, lambda: trainer.rollback("iter_2"))
    trainer.train()

    assert (trainer.iter, trainer.stop_reason) == (5, "enough")
    assert [event.reason for event in refused] == ["the run is stopping: enough"]


def test_kill_after_a_rollback_keeps_the_skip(tmp_path: Path) -> None:
    """What a kill leaves of a run that has just gone back continues as that run did, with the same batches skipped."""
    seed()
    trainer, losses = build(Case("global"), tmp_path / "a")
    go_back(trainer, 12, "iter_5", 4)

    def copy() -> None:  # a kill here would leave as much
        shutil.copytree(trainer.work_dir, tmp_path / "b", ignore=shutil.ignore_patterns(".*"))

    once(trainer, "rolled_back", 5, lambda: once(trainer, "before_train_iter", 5, copy))
    trainer.train()
    state = final(trainer)
    seed(99)
    resumed, of_rest = build(Case("global"), tmp_path / "b")
    found = resumed.resume()
    resumed.train()

    assert found.name == "iter_5_rollback"
    assert of_rest == {number: loss for number, loss in losses.items() if number in of_rest}
    assert_same(final(resumed), state)


def test_damaged_newest_checkpoint_leads_to_that_of_the_rollback(make: Make, tmp_path: Path) -> None:
    """A resume that passes over a damaged checkpoint takes none of the abandoned ones."""
    trainer = make()
    go_back(trainer, 7, "iter_2")
    trainer.bus.subscribe(
        lambda trainer, event: (
            trainer.stop("enough") if event.iter == 2 and event.batch_idx == 2 and went else None
        ),
        "after_train_iter",
    )
    went = collect(trainer, "rolled_back")
    trainer.train()
    state = trainer.work_dir / "iter_3" / "state.pth"
    state.write_bytes(b"")
    resumed = make()

    assert resumed.resume().name == "iter_2_rollback"


def test_commands_before_the_rollback_are_in_the_record_once(make: Make) -> None:
    """The record has all commands in their order, and a run that is resumed after the rollback repeats none of them."""
    trainer = make()
    once(
        trainer, "after_train_iter", 3, lambda: trainer.commands.request("note", source="anna", text="before")
    )
    once(
        trainer,
        "after_train_iter",
        6,
        lambda: trainer.commands.request("rollback", source="anna", checkpoint="iter_2", skip=1),
    )
    once(
        trainer,
        "rolled_back",
        2,
        lambda: once(trainer, "after_train_iter", 2, lambda: trainer.stop("enough")),
    )
    trainer.train()
    recorded = read_record(trainer.work_dir / NAME)
    resumed = make()
    applied = collect(resumed, "command_applied")
    resumed.resume()
    resumed.train()

    assert [(each.command, each.iter) for each in recorded] == [("note", 4), ("rollback", 7)]
    assert recorded[1].arguments == {"checkpoint": "iter_2", "skip": 1}
    assert applied == []
    assert [each.id for each in read_record(trainer.work_dir / NAME)] == [each.id for each in recorded]


def test_repetition_goes_back_at_the_same_iterations(make: Make, tmp_path: Path) -> None:
    """A run that is given the record goes back in the same iteration to its own checkpoint, and ends bitwise alike."""
    trainer = make()
    for after, checkpoint, skip in ((7, "iter_4", 1), (8, "iter_2", 2)):
        ask = partial(trainer.commands.request, "rollback", source="anna", checkpoint=checkpoint, skip=skip)
        once(trainer, "after_train_iter", after - 1, ask)
    rolled = collect(trainer, "rolled_back")
    steered = trained(trainer)
    repeated = make(work_dir=tmp_path / "again", commands=trainer.work_dir / NAME)
    again = collect(repeated, "rolled_back")

    assert trained(repeated) == steered
    assert [event.iter for event in rolled] == [event.iter for event in again] == [4, 2]
    assert [Path(event.path).parent.name for event in again] == ["again", "again"]


def test_run_without_checkpoint_hook_goes_back_to_another_directory(
    make_trainer: MakeTrainer, make: Make, tmp_path: Path
) -> None:
    """A checkpoint elsewhere is recorded by its path, and a run that saves nothing goes back to it as well."""
    saved = make(work_dir=tmp_path / "other")
    once(saved, "after_train_iter", 3, lambda: saved.stop("enough"))
    saved.train()
    trainer = make_trainer(train_loader=batches(6), max_epochs=2, hooks=[CheckpointHook(save_last=False)])
    rolled = collect(trainer, "rolled_back")
    go_back(trainer, 6, str(tmp_path / "other" / "iter_2"), 2)
    found = trained(trainer)
    fresh = make_trainer(train_loader=batches(6), max_epochs=2, work_dir=tmp_path / "fresh")
    fresh.resume(tmp_path / "other" / "iter_2")
    skip_by_hand(fresh, 2)

    assert found == trained(fresh)
    assert [event.path for event in rolled] == [str(tmp_path / "other" / "iter_2")]


def test_run_that_was_stopped_where_it_went_back_can_be_resumed(tmp_path: Path) -> None:
    """A stop that came with a rollback, after which nothing was trained, does not stop the resumed run again."""
    stopped = steered(tmp_path / "run", hooks=[CheckpointHook(2, by_epoch=False)])
    steer(stopped, {5: [("rollback",), ("stop", "enough")]})
    stopped.train()
    stopped.close()

    resumed = steered(tmp_path / "run", hooks=[CheckpointHook(2, by_epoch=False)])
    resumed.resume("auto")
    resumed.train()
    resumed.close()

    assert (stopped.iter, stopped.stop_reason) == (4, "enough")
    assert (resumed.iter, resumed.stop_reason) == (ITERS, None)
    assert recorded(tmp_path / "run") == [(5, "rollback"), (4, "stop")]


def test_kill_between_the_checkpoint_of_a_rollback_and_its_record(tmp_path: Path) -> None:
    """A resume that finds a rollback in the checkpoint, and not in the record, repeats what the record has left."""

    folder = tmp_path / "run"

    def run(plan: Plan, end: int, *, resume: bool = True, rollback: bool = False) -> None:
        trainer = steered(folder)
        once(trainer, "after_train_iter", end, lambda: trainer.stop("enough"))
        if rollback:
            once(trainer, "after_train_iter", 5, lambda: trainer.stops.commands.append(command("rollback")))
        steer(trainer, plan)
        if resume:
            trainer.resume("auto")
        trainer.train()
        trainer.close()

    run({2: [("note", "a")], 8: [("shake", "0.1")]}, 8, resume=False)
    before = (folder / NAME).read_bytes()
    shutil.rmtree(folder / "iter_9")  # as if a kill had come before it was saved, also below
    run({}, 6, rollback=True)
    shutil.rmtree(folder / "iter_7")
    (folder / NAME).write_bytes(before)
    run({}, 9)

    assert recorded(folder) == [(2, "note"), (6, "rollback"), (8, "shake")]
    assert not [*folder.glob("commands-*")]
