"""EMAHook in checkpoints: what they hold, exact resumption, and loading weights alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint
from eventloop.hooks import BaseAveragedModel, CheckpointHook, EMAHook, GradientCumulativeOptimizerHook
from eventloop.resume.gathering import gather
from tests.checkpoints import rewrite

MakeTrainer = Callable[..., Trainer]

TYPES = ["ExponentialMovingAverage", "StochasticWeightAverage", "MomentumAnnealingEMA"]


def net(hidden: int = 4) -> nn.Module:
    """A model with running statistics and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.25), nn.Linear(hidden, 1))


def copied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state that training does not change any more."""
    return {name: value.clone() for name, value in state.items()}


def differing(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """The names whose tensors are not equal to the bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def assert_same(first: Trainer, second: Trainer) -> None:
    """Model, average and optimizer are equal to the bit."""
    assert differing(first.model.state_dict(), second.model.state_dict()) == []
    a, b = (average_of(trainer) for trainer in (first, second))
    assert a.steps == b.steps > 0
    assert differing(a.module.state_dict(), b.module.state_dict()) == []
    assert str(first.optimizer.state_dict()) == str(second.optimizer.state_dict())


def average_of(trainer: Trainer) -> BaseAveragedModel:
    """The average that a trainer's hook keeps."""
    return next(hook for hook in trainer.hooks if isinstance(hook, EMAHook)).ema_model


@pytest.fixture
def train_net(make_trainer: MakeTrainer) -> MakeTrainer:
    """Build trainers of the net that checkpoint after each epoch."""

    def build(*, ema: EMAHook | None, **options: Any) -> Trainer:
        model = options.pop("model", None) or net()
        hooks = [] if ema is None else [ema]
        hooks += options.pop("also", [CheckpointHook(interval=1)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return make_trainer(model=model, optimizer=optimizer, hooks=hooks, **options)

    return build


# --- what a checkpoint holds -------------------------------------------------------------------------------


def test_state_dict_is_the_average(train_net: MakeTrainer, tmp_path: Path) -> None:
    """Whoever loads `state_dict` has the average, with the model's buffers; the keys are MMEngine's."""
    trainer = train_net(ema=EMAHook(momentum=0.25))
    trainer.train()

    saved = load_checkpoint(tmp_path / "run" / "epoch_1")

    assert differing(saved["state_dict"], average_of(trainer).module.state_dict()) == []
    own = {f"module.{name}": value for name, value in trainer.model.state_dict().items()}
    steps = saved["ema_state_dict"].pop("steps")
    assert differing(saved["ema_state_dict"], own) == []
    assert (int(steps), saved["hooks"]["EMAHook"]) == (4, {"steps": 4})
    assert "0.weight" in differing(saved["state_dict"], trainer.model.state_dict())


def test_plain_model_loads_what_was_evaluated(train_net: MakeTrainer, tmp_path: Path) -> None:
    """The best checkpoint, loaded into a bare model, has the weights whose score was the best."""
    validated: list[dict[str, torch.Tensor]] = []

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        validated.append(copied(trainer.model.state_dict()))
        return {"acc": 1.0}

    trainer = train_net(
        ema=EMAHook(momentum=0.25), also=[CheckpointHook(save_best="acc")], val_loader=[0], val_step=val_step
    )
    trainer.train()
    model = net()

    model.load_state_dict(load_checkpoint(tmp_path / "run" / "best_acc_epoch_1")["state_dict"])

    assert differing(model.state_dict(), validated[-1]) == []


def test_before_it_begins_a_checkpoint_is_as_without(train_net: MakeTrainer, tmp_path: Path) -> None:
    """An average that has not begun is the model, and takes no room in the file."""
    trainer = train_net(ema=EMAHook(begin_epoch=2), max_epochs=2)
    trainer.train()

    first, second = (load_checkpoint(tmp_path / "run" / f"epoch_{n}") for n in (1, 2))

    assert "ema_state_dict" not in first
    assert "ema_state_dict" in second


def test_saving_does_not_touch_the_run(train_net: MakeTrainer) -> None:
    """A run that saves each iteration ends where one does that never saves."""
    often = train_net(ema=EMAHook(momentum=0.25), also=[CheckpointHook(interval=1, by_epoch=False)])
    never = train_net(ema=EMAHook(momentum=0.25), also=[CheckpointHook(save_last=False)])
    for trainer in (often, never):
        torch.manual_seed(1)
        trainer.train()

    assert_same(often, never)


@pytest.mark.parametrize("update_buffers", [False, True])
def test_checkpoint_of_an_evaluation_is_the_same(train_net: MakeTrainer, update_buffers: bool) -> None:
    """Saved in mid-validation, when the model has the average's values, a checkpoint is what it always is."""
    seen: list[dict[str, Any]] = []
    ema = EMAHook(momentum=0.25, update_buffers=update_buffers)
    options = {"val_loader": [torch.zeros(1)], "val_step": lambda trainer, batch: {"acc": 1.0}}
    trainer = train_net(ema=ema, **options)

    def save(trainer: Trainer, event: Any) -> None:
        state = gather(trainer.state, "")
        seen.append({key: copied(state[key]) for key in ("state_dict", "ema_state_dict")})

    trainer.bus.subscribe(save, "before_val_epoch", priority="HIGHEST")
    trainer.bus.subscribe(save, "before_val_iter")
    trainer.bus.subscribe(save, "after_val_epoch", priority="LOWEST")

    trainer.train()

    for other in seen[1:]:
        for key in ("state_dict", "ema_state_dict"):
            assert differing(seen[0][key], other[key]) == []


# --- resuming ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wholes() -> dict[str, Trainer]:
    """Runs that were never stopped, by the type of their average; each made for the first test that needs it."""
    return {}


@pytest.mark.representative(4)
@pytest.mark.parametrize("stop", [1, 3, 4, 6, 11])
@pytest.mark.parametrize("ema_type", TYPES)
def test_resumed_run_equals_the_uninterrupted_one(
    train_net: MakeTrainer, tmp_path: Path, wholes: dict[str, Trainer], ema_type: str, stop: int
) -> None:
    """Stopped anywhere and resumed by a new trainer, model and average end where they would have, to the bit."""

    def build(directory: str) -> Trainer:
        options = {"val_loader": [torch.zeros(1)], "val_step": lambda trainer, batch: {"acc": 1.0}}
        ema = EMAHook(ema_type=ema_type, begin_iter=3, interval=2)
        return train_net(ema=ema, max_epochs=3, work_dir=tmp_path / directory, **options)

    if ema_type not in wholes:
        wholes[ema_type] = build("whole")
        torch.manual_seed(1)
        wholes[ema_type].train()
    second = resumed(build, stop)

    assert_same(second, wholes[ema_type])


def resumed(build: Callable[[str], Trainer], stop: int) -> Trainer:
    """Stop a training after so many iterations, and return another that has resumed it to its end."""
    first = build("parts")
    torch.manual_seed(1)
    first.bus.subscribe(
        lambda trainer, event: trainer.stop("enough"), "after_train_iter", start=stop - 1, once=True
    )
    first.train()
    second = build("parts")
    second.resume()
    second.train()
    return second


@pytest.mark.parametrize("stop", [2, 5])
def test_begin_epoch_counts_on_after_resuming(train_net: MakeTrainer, tmp_path: Path, stop: int) -> None:
    """`begin_epoch` is an epoch of the run, not of what is left of it."""

    def build(directory: str) -> Trainer:
        return train_net(ema=EMAHook(begin_epoch=2), max_epochs=3, work_dir=tmp_path / directory)

    whole = build("whole")
    torch.manual_seed(1)
    whole.train()
    second = resumed(build, stop)

    assert average_of(second).steps == 8
    assert_same(second, whole)


def test_half_precision_average_resumes_exactly(train_net: MakeTrainer, tmp_path: Path) -> None:
    """The float32 average of bfloat16 weights goes through the checkpoint unrounded."""

    def build(directory: str) -> Trainer:
        torch.manual_seed(0)
        batches = [(torch.ones(3, 2).bfloat16(), torch.ones(3, 1).bfloat16())] * 3
        model = nn.Linear(2, 1).bfloat16()
        ema = EMAHook(momentum=0.01)
        return train_net(
            ema=ema, model=model, train_loader=batches, max_epochs=3, work_dir=tmp_path / directory
        )

    whole, first, second = build("whole"), build("parts"), build("parts")
    whole.train()
    first.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter", start=4, once=True)
    first.train()

    second.resume()
    second.train()

    assert_same(second, whole)


def test_accumulated_gradients_and_average_resume_together(train_net: MakeTrainer, tmp_path: Path) -> None:
    """Stopped within a window of accumulated gradients, the next update is that of the window's step."""

    def build(directory: str) -> Trainer:
        torch.manual_seed(0)
        also = [GradientCumulativeOptimizerHook(cumulative_iters=3), CheckpointHook(interval=1)]
        model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        return train_net(
            ema=EMAHook(momentum=0.25), model=model, also=also, max_epochs=3, work_dir=tmp_path / directory
        )

    whole, first, second = build("whole"), build("parts"), build("parts")
    whole.train()
    first.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter", start=4, once=True)
    first.train()

    second.resume()
    second.train()

    assert average_of(second).steps == 4
    assert_same(second, whole)


def test_resuming_a_trainer_that_has_trained(train_net: MakeTrainer) -> None:
    """A trainer may go back to a checkpoint of its own; its average goes back with it."""
    trainer = train_net(ema=EMAHook(momentum=0.25), max_epochs=2)
    trainer.train()
    end = {**copied(trainer.model.state_dict()), **copied(average_of(trainer).state_dict())}

    trainer.resume(trainer.work_dir / "epoch_1")
    assert average_of(trainer).steps == 4
    trainer.train()

    assert differing({**trainer.model.state_dict(), **average_of(trainer).state_dict()}, end) == []


def test_checkpoint_without_an_average_begins_one(
    train_net: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that had no EMAHook is resumed with one: the log says that it starts afresh."""
    train_net(ema=None).train()
    trainer = train_net(ema=EMAHook(), max_epochs=2)

    trainer.resume()
    trainer.train()

    assert "no state of the hook EMAHook, which starts afresh" in caplog.text
    assert average_of(trainer).steps == 4


def test_lazy_model_resumes_with_its_average(train_net: MakeTrainer, tmp_path: Path) -> None:
    """A model whose shapes the checkpoint gives goes on exactly; refused, it has none yet."""

    def build(directory: str, **options: Any) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
        ema = EMAHook(momentum=0.25)
        return train_net(ema=ema, model=model, max_epochs=2, work_dir=tmp_path / directory, **options)

    whole = build("run")
    whole.train()
    second = build("second")
    refusal: list[Exception] = [ValueError("not now")]

    def refuse(*arguments: Any) -> None:
        if refusal:
            raise refusal.pop()

    second.optimizer.register_load_state_dict_post_hook(refuse)

    with pytest.raises(CheckpointError, match="a state that the optimizer refuses: ValueError: not now"):
        second.resume(tmp_path / "run" / "epoch_1")
    assert is_lazy(next(second.model.parameters()))
    second.resume(tmp_path / "run" / "epoch_1")
    second.train()

    assert_same(second, whole)


def test_checkpoint_from_before_the_beginning_resumes(train_net: MakeTrainer) -> None:
    """An average that had begun is not mixed with a checkpoint in which it had not."""
    trainer = train_net(ema=EMAHook(begin_epoch=2), max_epochs=2)
    trainer.train()

    trainer.resume(trainer.work_dir / "epoch_1")

    assert average_of(trainer).steps == 0


def test_average_taken_out_of_a_checkpoint_begins_anew(
    train_net: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where somebody removed `ema_state_dict` the log says so, and the average is a copy."""
    train_net(ema=EMAHook()).train()
    path = tmp_path / "run" / "epoch_1"
    rewrite(path, lambda checkpoint: checkpoint.pop("ema_state_dict"))
    trainer = train_net(ema=EMAHook(), max_epochs=2)

    trainer.resume()
    trainer.train()

    assert "the checkpoint has no ema_state_dict: the average starts again" in caplog.text
    assert average_of(trainer).steps == 4


def test_resuming_without_the_hook_is_refused(train_net: MakeTrainer) -> None:
    """Training would silently go on from averaged weights: the checkpoint asks for its hook, by name."""
    train_net(ema=EMAHook()).train()

    with pytest.raises(CheckpointError, match=r"epoch_1 cannot be resumed from without the hook EMAHook"):
        train_net(ema=None, max_epochs=2).resume()


def test_state_alone_is_not_enough(train_net: MakeTrainer) -> None:
    """The hook's state says how far the average was, and the checkpoint has it."""
    with pytest.raises(RuntimeError, match=r"own state does not hold the average: use Trainer\.resume"):
        EMAHook().load_state_dict({"steps": 3})


# --- loading weights ---------------------------------------------------------------------------------------


def test_loaded_weights_are_what_is_tested(train_net: MakeTrainer) -> None:
    """After `train`, `load_checkpoint` and `test` evaluate the weights of the file, not the average at the end."""
    tested: list[dict[str, torch.Tensor]] = []

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        tested.append(copied(trainer.model.state_dict()))
        return {"acc": 1.0}

    ema = EMAHook(momentum=0.25)
    trainer = train_net(ema=ema, max_epochs=2, test_loader=[torch.zeros(1)], val_step=val_step)
    trainer.train()
    saved = load_checkpoint(trainer.work_dir / "epoch_1")["state_dict"]

    trainer.load_checkpoint(trainer.work_dir / "epoch_1")
    trainer.test()

    assert differing(tested[-1], saved) == []
    assert differing(trainer.model.state_dict(), saved) == []


def test_training_from_loaded_weights_averages_from_there(train_net: MakeTrainer) -> None:
    """Weights that are loaded as a start are no resumption: the average begins with the first update."""
    train_net(ema=EMAHook(momentum=0.25)).train()
    trainer = train_net(ema=EMAHook(momentum=0.25))
    trainer.load_checkpoint(trainer.work_dir / "epoch_1")

    trainer.train()

    assert average_of(trainer).steps == 4


def test_trainer_without_the_hook_gets_the_average(train_net: MakeTrainer) -> None:
    """`load_checkpoint` needs no EMAHook for what was evaluated."""
    first = train_net(ema=EMAHook(momentum=0.25))
    first.train()
    second = train_net(ema=None)

    second.load_checkpoint(first.work_dir / "epoch_1")

    assert differing(second.model.state_dict(), average_of(first).module.state_dict()) == []


def test_loading_in_a_validation_is_not_undone(train_net: MakeTrainer) -> None:
    """Weights that a handler loads while the average is in are not replaced by the weights from before."""
    trainer = train_net(
        ema=EMAHook(momentum=0.25), max_epochs=2, val_loader=[0], val_step=lambda trainer, batch: {"acc": 1.0}
    )

    def load(trainer: Trainer, event: Any) -> None:
        trainer.load_checkpoint(trainer.work_dir / "epoch_1")

    trainer.bus.subscribe(load, "before_val_iter", start=0, once=False, when=lambda event: event.epoch == 2)

    trainer.train()

    saved = load_checkpoint(trainer.work_dir / "epoch_1")["state_dict"]
    assert differing(trainer.model.state_dict(), saved) == []


def test_weights_refused_in_mid_training_leave_the_average(train_net: MakeTrainer, tmp_path: Path) -> None:
    """A `load_checkpoint` that a handler tries while the run goes on does not end the average, if it is refused."""
    other = train_net(ema=None, model=net(hidden=5), work_dir=tmp_path / "other")
    other.train()
    trainer = train_net(ema=EMAHook(momentum=0.25))

    def load(trainer: Trainer, event: Any) -> None:
        with pytest.raises(CheckpointError, match="does not fit the model"):
            trainer.load_checkpoint(tmp_path / "other" / "epoch_1")

    trainer.bus.subscribe(load, "before_train_iter", start=2, once=True)
    trainer.train()

    assert average_of(trainer).steps == 4


@pytest.mark.parametrize("how", ["resume", "load_checkpoint"])
def test_refused_checkpoint_leaves_the_average(train_net: MakeTrainer, tmp_path: Path, how: str) -> None:
    """A checkpoint of another model is refused, and the average that there was is still evaluated."""
    other = train_net(ema=EMAHook(), model=net(hidden=5), work_dir=tmp_path / "other")
    other.train()
    trainer = train_net(ema=EMAHook(momentum=0.25))
    trainer.train()
    before = copied(average_of(trainer).state_dict())

    with pytest.raises(CheckpointError, match=r"does not fit the model; nothing was loaded"):
        getattr(trainer, how)(other.work_dir / "epoch_1")
    trainer.max_epochs = 1
    trainer.train()

    assert differing(average_of(trainer).state_dict(), before) == []


# --- checkpoints that do not fit ---------------------------------------------------------------------------


def renamed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A checkpoint with its average changed."""
    return rewrite(path, lambda checkpoint: change(checkpoint["ema_state_dict"]))


def test_average_with_other_names_is_refused(train_net: MakeTrainer) -> None:
    """With `strict_load` every name on one side only is listed, and nothing live is touched."""
    first = train_net(ema=EMAHook())
    first.train()

    def change(ema: dict[str, Any]) -> None:
        ema["module.other"] = ema.pop("module.0.weight")
        ema["shadow"] = torch.zeros(1)

    path = renamed(first.work_dir / "epoch_1", change)
    trainer = train_net(ema=EMAHook(strict_load=True), max_epochs=2)
    before = copied(trainer.model.state_dict())

    with pytest.raises(
        CheckpointError,
        match=r"(?s)average of another model; nothing was loaded.*0\.weight: not in ema_state_dict"
        r".*module\.other: not in state_dict.*shadow: .*name.*strict_load=False",
    ):
        trainer.resume(path)

    assert differing(trainer.model.state_dict(), before) == []


def test_average_with_other_names_is_logged(train_net: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """Without `strict_load` a name that is missing begins as the average has it, and the log says which."""
    first = train_net(ema=EMAHook(momentum=0.25))
    first.train()
    path = renamed(first.work_dir / "epoch_1", lambda ema: ema.pop("module.0.weight"))
    trainer = train_net(ema=EMAHook(momentum=0.25), max_epochs=2)

    trainer.resume(path)

    assert "has other names than its model: 0.weight: not in ema_state_dict" in caplog.text
    saved = load_checkpoint(path)
    assert torch.equal(trainer.model.state_dict()["0.weight"], saved["state_dict"]["0.weight"])
    assert torch.equal(trainer.model.state_dict()["0.bias"], saved["ema_state_dict"]["module.0.bias"])


@pytest.mark.parametrize("strict", [False, True])
def test_average_of_other_shapes_is_refused(train_net: MakeTrainer, strict: bool) -> None:
    """Both shapes are in the message, whatever `strict_load` says."""
    first = train_net(ema=EMAHook())
    first.train()
    path = renamed(first.work_dir / "epoch_1", lambda ema: ema.update({"module.0.bias": torch.zeros(9)}))
    trainer = train_net(ema=EMAHook(strict_load=strict), max_epochs=2)

    with pytest.raises(CheckpointError, match=r"0\.bias: \(4,\) in state_dict, \(9,\) in ema_state_dict"):
        trainer.resume(path)
