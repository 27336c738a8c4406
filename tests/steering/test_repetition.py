"""Test that a steered run can be repeated: bitwise the same weights, from the record alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventloop import Trainer
from eventloop.commands.messages import Applied
from eventloop.commands.record import NAME
from eventloop.hooks import CheckpointHook
from tests.steering.job import ITERS, PLAN, Plan, applied, build, collected, planned, recorded, steer, weights


def steered(folder: Path, plan: Plan = PLAN, **options: Any) -> Trainer:
    """Train with the commands of a plan."""
    trainer = build(folder, **options)
    steer(trainer, plan)
    trainer.train()
    trainer.close()
    return trainer


def repeated(folder: Path, record: Path, **options: Any) -> Trainer:
    """Train with the commands of a record."""
    trainer = build(folder, commands=record / NAME, **options)
    trainer.train()
    trainer.close()
    return trainer


CASES: list[tuple[str, Plan, dict[str, Any]]] = [
    ("by epoch", PLAN, {}),
    ("by iteration", PLAN, {"by_epoch": False}),
    ("skipped batches", {**PLAN, 8: [("shake", "0.5")]}, {"skips": [1, 3]}),
    ("after the last iteration", {ITERS: [("shake", "0.5")], 1: [("shake", "0.1")]}, {}),
    ("after the last iteration, by iteration", {ITERS: [("shake", "0.5")]}, {"by_epoch": False}),
]


@pytest.mark.parametrize(("plan", "options"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_repetition_is_the_same_to_the_bit(tmp_path: Path, plan: Plan, options: dict[str, Any]) -> None:
    """A run that is given the record of a steered run ends with its weights; without the record it does not."""
    first = steered(tmp_path / "first", plan, **options)

    again = repeated(tmp_path / "again", tmp_path / "first", **options)

    assert weights(again) == weights(first)
    assert weights(steered(tmp_path / "alone", {}, **options)) != weights(first)
    assert recorded(tmp_path / "again") == recorded(tmp_path / "first")


def test_the_record_has_each_command_once_at_its_iteration(tmp_path: Path) -> None:
    """`commands.jsonl` has the applied commands in their order, and the last checkpoint has the same."""
    first = steered(tmp_path / "run")

    fresh = build(tmp_path / "run")
    fresh.resume("auto")

    assert recorded(tmp_path / "run") == sorted(planned(PLAN), key=lambda row: row[0])
    assert fresh.applied_commands == first.applied_commands
    fresh.close()


def test_a_repetition_of_a_repetition(tmp_path: Path) -> None:
    """The record of a repetition serves as well as that of the first run."""
    first = steered(tmp_path / "first")
    repeated(tmp_path / "again", tmp_path / "first")

    third = repeated(tmp_path / "third", tmp_path / "again")

    assert weights(third) == weights(first)


def test_pauses_are_not_repeated(tmp_path: Path) -> None:
    """The record has what was applied during a pause, and not the pause; a repetition does not wait."""
    first = steered(tmp_path / "first", {3: [("pause",), ("shake", "0.3"), ("go",)]})

    again = repeated(tmp_path / "again", tmp_path / "first")

    assert recorded(tmp_path / "first") == [(3, "shake")]
    assert weights(again) == weights(first)


def test_commands_of_the_program_are_not_recorded(tmp_path: Path) -> None:
    """What a handler gives is given again by the handler of the repetition, so the record lacks it."""
    trainer = build(tmp_path / "run")
    trainer.bus.subscribe(lambda event: trainer.save_checkpoint(), "after_train_iter", name="saves")
    steer(trainer, {3: [("shake", "0.3")]})

    trainer.train()

    assert recorded(tmp_path / "run") == [(3, "shake")]
    trainer.close()


def test_a_refused_command_is_not_recorded(tmp_path: Path) -> None:
    """A command that was refused changes nothing, and no repetition applies it."""
    trainer = build(tmp_path / "run")
    refusals = collected(trainer, "command_refused")
    steer(trainer, {3: [("shake", "much")], 4: [("go",)]})

    trainer.train()

    assert [(each.iter, each.command) for each in refusals] == [(3, "shake"), (4, "go")]
    assert trainer.applied_commands == []
    assert not (tmp_path / "run" / NAME).exists()
    trainer.close()


# --- resumes -----------------------------------------------------------------------------------------------


def stopped_at(trainer: Trainer, iteration: int) -> None:
    """Train up to an iteration; the run has neither a last checkpoint nor another reason to stop."""
    trainer.bus.subscribe(
        lambda event: trainer.stop("test"),
        "before_train_iter",
        when=lambda event: event.iter == iteration - 1,
    )
    trainer.train()
    trainer.close()


def unsaved() -> list[CheckpointHook]:
    """Return a hook that saves every five iterations, and not at the end, like a run that is killed."""
    return [CheckpointHook(interval=5, by_epoch=False, save_last=False)]


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("stop", [4, 7, 9])
def test_a_resumed_run_applies_later_commands_again(tmp_path: Path, by_epoch: bool, stop: int) -> None:
    """Commands after the checkpoint are applied again at their iterations: the run is the uninterrupted one."""
    plan = {**PLAN, 8: [("shake", "0.5")], 5: [("shake", "0.6")]}
    whole = steered(tmp_path / "whole", plan, by_epoch=by_epoch)
    first = build(tmp_path / "run", by_epoch=by_epoch, hooks=unsaved())
    steer(first, plan)
    stopped_at(first, stop)

    then = build(tmp_path / "run", by_epoch=by_epoch, hooks=unsaved())
    if stop > 5:
        then.resume("auto")
    steer(then, {at: words for at, words in plan.items() if at > stop or stop < 5})
    then.train()

    assert weights(then) == weights(whole)
    assert sorted(recorded(tmp_path / "run")) == sorted(planned(plan))
    then.close()


def test_an_interrupted_repetition_goes_on(tmp_path: Path) -> None:
    """A repetition that is interrupted and resumed, with the same argument, ends as the steered run did."""
    first = steered(tmp_path / "first")
    again = build(tmp_path / "again", commands=tmp_path / "first" / NAME, hooks=unsaved())
    stopped_at(again, 9)

    then = build(tmp_path / "again", commands=tmp_path / "first" / NAME)
    then.resume("auto")
    then.train()

    assert weights(then) == weights(first)
    assert applied(then.applied_commands) == applied(first.applied_commands)
    then.close()


def test_a_resume_by_name_begins_another_lineage(tmp_path: Path) -> None:
    """Commands after the named checkpoint are not applied again, and the former record is set aside."""
    steered(tmp_path / "run")
    plain = steered(tmp_path / "plain", {at: words for at, words in PLAN.items() if at < 5})

    back = build(tmp_path / "run")
    back.resume("iter_5")
    back.train()

    assert weights(back) == weights(plain)
    assert recorded(tmp_path / "run") == [row for row in planned(PLAN) if row[0] < 5]
    assert (tmp_path / "run" / "commands-1.jsonl").exists()
    back.close()


def test_a_resume_after_a_resume_by_name_follows_the_new_lineage(tmp_path: Path) -> None:
    """What was applied in the new lineage is applied again, and what was left behind is not."""
    steered(tmp_path / "run")
    back = build(tmp_path / "run", hooks=unsaved())
    back.resume("iter_5")
    steer(back, {7: [("shake", "0.7")]})
    stopped_at(back, 9)

    then = build(tmp_path / "run", hooks=unsaved())
    then.resume("auto")
    then.train()

    early = {at: words for at, words in PLAN.items() if at < 5}
    assert weights(then) == weights(steered(tmp_path / "plain", {**early, 7: [("shake", "0.7")]}))
    then.close()


def test_a_fresh_run_in_a_used_directory(tmp_path: Path) -> None:
    """A run from the beginning repeats nothing unless it is given a record, and sets the old one aside."""
    steered(tmp_path / "run")
    plain = steered(tmp_path / "plain", {})

    fresh = steered(tmp_path / "run", {})

    assert weights(fresh) == weights(plain)
    assert not (tmp_path / "run" / NAME).exists()
    assert len((tmp_path / "run" / "commands-1.jsonl").read_bytes().splitlines()) == len(planned(PLAN))


def test_a_run_that_trains_twice_repeats_nothing(tmp_path: Path) -> None:
    """A second call of `train` goes on with the record of the first."""
    plan: Plan = {3: [("shake", "0.1")], 6: [("shake", "0.3")]}
    whole = steered(tmp_path / "whole", plan)
    trainer = build(tmp_path / "run")
    steer(trainer, plan)
    stopping = trainer.bus.subscribe(lambda event: trainer.stop("test"), "command_applied", once=True)

    trainer.train()
    assert trainer.iter == 3
    trainer.train()

    assert stopping is not None
    assert weights(trainer) == weights(whole)
    assert recorded(tmp_path / "run") == planned(plan)
    trainer.close()


# --- what cannot be repeated -------------------------------------------------------------------------------


def test_an_unreadable_record_is_refused_at_construction(tmp_path: Path) -> None:
    """The error names the file, the line, and what came."""
    (tmp_path / "broken").write_text('{"iter":1,"epoch":0,"id":"a","command":"note"}\n{"iter":"two"}\n')

    with pytest.raises(
        ValueError, match=r"broken, line 2: expected an applied command .* got b'\{\"iter\":\"two"
    ):
        build(tmp_path / "run", commands=tmp_path / "broken")


def test_a_missing_record_is_refused_at_construction(tmp_path: Path) -> None:
    """The error names the argument and the file."""
    with pytest.raises(
        FileNotFoundError, match=r"commands='.*absent': expected the commands.jsonl .* No such file"
    ):
        build(tmp_path / "run", commands=tmp_path / "absent")


def test_a_record_out_of_order_is_refused(tmp_path: Path) -> None:
    """Lines that somebody has edited are in the order of the run."""
    rows = [Applied(iter=at, epoch=0, id=f"{at}-x", command="note", words=["x"]) for at in (5, 3)]
    (tmp_path / "edited").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))

    with pytest.raises(
        ValueError, match=r"commands='.*edited', line 2: expected an iteration from 5 on.*got 3"
    ):
        build(tmp_path / "run", commands=tmp_path / "edited")


def test_no_path_is_refused(tmp_path: Path) -> None:
    """The error names the argument and the type."""
    with pytest.raises(TypeError, match=r"commands.*got 5"):
        build(tmp_path / "run", commands=5)


def test_commands_before_the_resumed_iteration_are_refused(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint without them can no longer apply them; nothing is trained."""
    steered(tmp_path / "first")
    steered(tmp_path / "plain", {})
    trainer = build(tmp_path / "plain", commands=tmp_path / "first" / NAME)
    trainer.resume("auto")

    with pytest.raises(
        ValueError, match=r"commands='.*': expected commands after iteration 12, .* 'note' after iteration 2"
    ):
        trainer.train()

    trainer.close()


def test_a_command_that_the_program_no_longer_has(tmp_path: Path) -> None:
    """A repetition without the program's command ends before the first iteration, not as another run."""
    steered(tmp_path / "first")
    path = tmp_path / "first" / NAME
    path.write_bytes(path.read_bytes().replace(b'"shake"', b'"shuffle"'))
    trainer = build(tmp_path / "run", commands=path)

    with pytest.raises(
        ValueError, match=r"commands='.*': expected commands .* got 'shuffle' after iteration 3: unknown"
    ):
        trainer.train()

    assert trainer.iter == 0
    trainer.close()


def test_a_refusal_in_a_repetition_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for an answer to a repeated command, so the log says that it was refused."""
    steered(tmp_path / "first", {3: [("checkpoint",)]})

    with caplog.at_level(logging.WARNING, "eventloop"):
        repeated(tmp_path / "again", tmp_path / "first", hooks=[], default_hooks={"checkpoint": None})

    assert "checkpoint was refused: the run has no CheckpointHook" in caplog.text


def test_a_broken_record_of_the_directory(tmp_path: Path) -> None:
    """A resumed run must know the commands after its checkpoint; one from the beginning sets the file aside."""
    steered(tmp_path / "run")
    (tmp_path / "run" / NAME).write_text("nonsense\n")
    trainer = build(tmp_path / "run")
    trainer.resume("auto")

    with pytest.raises(
        ValueError, match=r"commands.jsonl, line 1: expected .* got b'nonsense'.*: restore the file, or"
    ):
        trainer.train()
    trainer.close()
    steered(tmp_path / "run", {})

    assert (tmp_path / "run" / "commands-1.jsonl").read_text() == "nonsense\n"
