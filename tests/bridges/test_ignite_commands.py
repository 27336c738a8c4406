"""Commands to an ignite engine: each is applied by what the program has attached, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ignite", reason="pytorch-ignite is not installed: pip install 'torch-eventloop[ignite]'")

from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.handlers.param_scheduler import LinearCyclicalScheduler, LRScheduler, ParamGroupScheduler

from eventloop.hooks import CheckpointHook
from tests.bridges.test_ignite import Training
from tests.support.told import answers, outcomes, send_at
from tests.support.trainers import batches


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two modules have bitwise the same state."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def rates(training: Training) -> list[float]:
    """Keep the rate of each update from now on."""
    found: list[float] = []
    groups = training.optimizer.param_groups
    training.optimizer.register_step_pre_hook(lambda *_: found.append(groups[0]["lr"]))
    return found


def evaluate(engine: Engine, training: Training) -> None:
    """Run the evaluator of a training."""
    training.evaluator.run(batches(2))


def test_a_told_run(tmp_path: Path) -> None:
    """Notes, own commands, a pause and a stop are applied after their iteration; a rollback is refused by name.

    `before_run` adds a command, in each run anew.
    """
    training = Training()
    bus = training.attach(tmp_path)

    def add(trainer: Any, one: int) -> int:
        """Add one."""
        return one + 1

    bus.subscribe(lambda trainer, event: trainer.command(add), "before_run", name="adding")
    told = [("note", "hello"), ("add", "1"), ("rollback",), ("pause",), ("go",)]
    send_at(bus, {2: told, 3: [("stop", "enough")]})

    training.run()
    first = training.engine.state.iteration
    training.run()

    assert first == 3
    assert (
        sorted(outcomes(tmp_path))[:6]
        == sorted(
            [
                ("note", "applied", 2),
                ("add", "applied", 2),
                ("rollback", "refused", 2),
                ("pause", "applied", 2),
                ("go", "applied", 2),
                ("stop", "applied", 3),
            ]
        )[:6]
    )
    refused = next(each for each in answers(tmp_path) if each.outcome == "refused")
    assert refused.reason.endswith("the loop of ignite fetches its batches itself")


def test_a_checkpoint_of_the_attached_handler(tmp_path: Path) -> None:
    """The answer has a file with what ignite's handler saves; the handler keeps its own files as before."""
    training = Training()
    bus = training.attach(tmp_path / "run")
    objects = {"model": training.model, "optimizer": training.optimizer, "engine": training.engine}
    handler = Checkpoint(objects, DiskSaver(tmp_path / "own"), n_saved=1)
    training.engine.add_event_handler(Events.EPOCH_COMPLETED, handler)
    training.engine.add_event_handler(
        Events.EPOCH_COMPLETED, Checkpoint({"model": training.model}, str(tmp_path / "x"))
    )
    weights: list[torch.Tensor] = []
    bus.subscribe(lambda event: weights.append(next(training.model.parameters()).clone()), "after_train_iter")
    send_at(bus, {3: [("checkpoint",)]})

    training.run()

    (answer,) = answers(tmp_path / "run")
    assert answer.result == {"path": str(tmp_path / "run" / "iter_3.pt")}
    again = Training()
    loaded = {"model": again.model, "optimizer": again.optimizer, "engine": again.engine}
    Checkpoint.load_objects(loaded, torch.load(answer.result["path"]))
    assert torch.equal(next(again.model.parameters()), weights[2])
    assert again.engine.state.iteration == 3
    assert [file.name for file in (tmp_path / "own").iterdir()] == ["checkpoint_8.pt"]


def test_a_checkpoint_of_the_hook(tmp_path: Path) -> None:
    """Without a handler of ignite a CheckpointHook saves; without both the command is refused."""
    hooked, plain = Training(), Training()
    for training, hooks in ((hooked, [CheckpointHook(interval=100)]), (plain, [])):
        folder = tmp_path / str(len(hooks))
        send_at(training.attach(folder, hooks=hooks), {3: [("checkpoint",)]})
        training.run()

    (saved,), (refused,) = answers(tmp_path / "1"), answers(tmp_path / "0")
    assert Path(saved.result["path"]).exists()
    assert refused.reason == "the engine has no Checkpoint handler of ignite, and the run no CheckpointHook"


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("kind", ["ignite's", "PyTorch's", "a group"])
def test_a_steered_rate(tmp_path: Path, kind: str, measure: bool) -> None:
    """The schedulers among the engine's handlers go on in proportion, and are the program's own after the run."""
    found = []
    for plan in ({}, {2: [("set", {"lr*": 0.5})]}):
        training = Training()
        optimizer = training.optimizer
        scheduler: Any = LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.02, 16)
        if kind == "PyTorch's":
            scheduler = LRScheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
        if kind == "a group":
            scheduler = ParamGroupScheduler([scheduler], names=["lr"])
        training.engine.add_event_handler(Events.ITERATION_STARTED, scheduler)
        send_at(training.attach(tmp_path, measure=measure), plan)
        seen = rates(training)
        training.run()
        found.append(seen)
        assert training.engine.has_event_handler(scheduler)
        assert any(
            entry[0] is scheduler for entry in training.engine._event_handlers[Events.ITERATION_STARTED]
        )

    alone, told = found
    assert told == pytest.approx([*alone[:2], *(rate * 0.5 for rate in alone[2:])])
    assert len({*alone}) > 4


def test_a_scheduler_that_the_bridge_does_not_know(tmp_path: Path) -> None:
    """The answer says that a scheduler which a function of the program steps may write the rate again."""
    training = Training()
    scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1 / (1 + step))
    training.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
    send_at(training.attach(tmp_path), {2: [("set", {"lr": 0.5})]})

    training.run()

    (answer,) = answers(tmp_path)
    assert answer.result["lr"]["note"] == "a scheduler that the trainer does not step may write lr again"


def test_a_validation_changes_nothing(tmp_path: Path) -> None:
    """The evaluator runs again over the data of its last run; weights are those of a run that nobody told."""
    trained = []
    for plan in ({}, {2: [("validate",)], 6: [("validate",)]}):
        training = Training()
        bus = training.attach(tmp_path)
        training.engine.add_event_handler(Events.EPOCH_COMPLETED, evaluate, training)
        send_at(bus, plan)
        training.run()
        trained.append(training)

    assert same(trained[0].model, trained[1].model)
    early, late = answers(tmp_path)
    assert early.reason == "the evaluator of 'val' has not run yet, so its data are not known"
    assert (late.outcome, late.iteration, [*late.result]) == ("applied", 6, ["accuracy"])


def test_a_validation_without_an_evaluator(tmp_path: Path) -> None:
    """Without an evaluator that the bridge knows a validation is refused."""
    training = Training()
    send_at(training.attach(tmp_path, evaluators={}), {2: [("validate",)]})

    training.run()

    assert answers(tmp_path)[0].reason.startswith("the bridge knows no evaluator: give attach(engine")


def test_what_fails_in_an_evaluator_is_refused(tmp_path: Path) -> None:
    """An evaluator that fails in a validation by command refuses it, and the engine goes on."""
    training, fails = Training(), list[bool]()
    bus = training.attach(tmp_path)
    training.engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: training.evaluator.run(batches(2)))

    def check(engine: Engine) -> None:
        if training.engine.state.iteration == 6 and not fails:
            fails.append(True)
            raise OSError("no such image")

    training.evaluator.add_event_handler(Events.ITERATION_COMPLETED, check)
    send_at(bus, {6: [("validate",)], 7: [("validate",)]})
    training.run()

    failed, worked = answers(tmp_path)
    assert failed.reason == "it raised OSError: no such image"
    assert (worked.outcome, training.engine.state.iteration) == ("applied", 8)
