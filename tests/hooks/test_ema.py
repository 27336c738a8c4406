"""EMAHook: what is averaged, and what is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from eventloop import Trainer
from eventloop.events import OptimizerStepSkipped
from eventloop.hooks import EMAHook, GradientCumulativeOptimizerHook, Hook, on
from tests.support.inside_torch import step_hooks
from tests.support.skipping import SkipSecond

MakeTrainer = Callable[..., Trainer]


class Weights(Hook):
    """Writes down the model's weight: as it was trained, and as it was evaluated."""

    def __init__(self) -> None:
        self.trained: list[float] = []
        self.validated: list[float] = []
        self.tested: list[float] = []

    @on(priority="LOWEST")
    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        self.trained.append(weight_of(trainer))

    def before_val_iter(self, trainer: Trainer, event: Any) -> None:
        self.validated.append(weight_of(trainer))

    def before_test_iter(self, trainer: Trainer, event: Any) -> None:
        self.tested.append(weight_of(trainer))


class Raise(Hook):
    """Raises at one event, once."""

    def __init__(self, event: str, error: BaseException, priority: str = "NORMAL") -> None:
        self._event, self._error, self._place = event, error, priority
        self._raised = False

    def attach(self, bus: Any) -> None:
        bus.subscribe(self._raise, self._event, priority=self._place)

    def _raise(self, event: Any) -> None:
        if not self._raised:
            self._raised = True
            raise self._error


def weight_of(trainer: Trainer) -> float:
    """The first weight of the trainer's model."""
    return float(next(trainer.model.parameters()).detach().flatten()[0])


def means(values: list[float], momentum: float, start: int = 0) -> list[float]:
    """The exponential average after each value from `start` on; before, the value itself."""
    seen: list[float] = []
    for i, value in enumerate(values):
        seen.append(value if i <= start else seen[-1] + momentum * (value - seen[-1]))
    return seen


VAL = {"val_loader": [torch.zeros(1)], "val_step": lambda trainer, batch: {"acc": 0.5}}
BY_ITER = {"max_iters": 6, "val_interval": 1, **VAL}
TEST = {"test_loader": [torch.zeros(1)]}


@pytest.fixture
def weights() -> Weights:
    """What a run's weights were."""
    return Weights()


def test_validation_runs_with_the_average(make_trainer: MakeTrainer, weights: Weights) -> None:
    """Each validation sees the exponential average of the weights so far; training keeps its own."""
    plain = Weights()
    make_trainer(hooks=[plain], **BY_ITER).train()

    make_trainer(hooks=[EMAHook(momentum=0.25), weights], **BY_ITER).train()

    assert weights.trained == plain.trained
    assert weights.validated == pytest.approx(means(weights.trained, 0.25), abs=1e-6)


def test_stochastic_average_is_evaluated(make_trainer: MakeTrainer, weights: Weights) -> None:
    """`ema_type` names the average."""
    hook = EMAHook(ema_type="StochasticWeightAverage")
    make_trainer(hooks=[hook, weights], **BY_ITER).train()

    running = [sum(weights.trained[: n + 1]) / (n + 1) for n in range(6)]
    assert weights.validated == pytest.approx(running, abs=1e-6)


def test_it_runs_between_optimizer_and_timer(make_trainer: MakeTrainer) -> None:
    """In `after_train_iter` the average follows the step, and its cost is in the iteration's time."""
    trainer = make_trainer(hooks=[EMAHook()])

    plan = [row.name for row in trainer.bus.plan("after_train_iter")]

    order = [plan.index(f"{n}.after_train_iter") for n in ("OptimizerHook", "EMAHook", "IterTimerHook")]
    assert order == sorted(order)
    assert {row.priority for row in trainer.bus.plan("after_train_iter") if "EMA" in row.name} == {49}


def test_test_after_training_evaluates_the_average(make_trainer: MakeTrainer, weights: Weights) -> None:
    """`train()` and then `test()` on one trainer: the average is still there, and then the weights again."""
    options = {**VAL, **TEST, "val_step": VAL["val_step"], "batches": 5}
    trainer = make_trainer(hooks=[EMAHook(momentum=0.25), weights], **options)
    trainer.train()

    trainer.test()
    trainer.test()

    assert weights.tested == pytest.approx([means(weights.trained, 0.25)[-1]] * 2, abs=1e-6)
    assert weight_of(trainer) == weights.trained[-1]


def test_without_training_the_model_is_evaluated(make_trainer: MakeTrainer, weights: Weights) -> None:
    """A test of a model that was not trained has no average to evaluate."""
    trainer = make_trainer(hooks=[EMAHook(), weights], **{**VAL, **TEST})

    trainer.test()

    assert weights.tested == [weight_of(trainer)]


def test_evaluation_of_a_handler_has_the_average(make_trainer: MakeTrainer, weights: Weights) -> None:
    """`trainer.val()` from within training evaluates the average, before backward too: gradients are not hurt."""

    def deep() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))  # backward needs the second one's weights

    plain = Weights()
    make_trainer(model=deep(), hooks=[plain]).train()
    trainer = make_trainer(model=deep(), hooks=[EMAHook(momentum=0.25), weights], **VAL)
    trainer.bus.subscribe(lambda trainer, event: trainer.val(), "after_train_iter", priority="HIGHEST")

    trainer.train()

    assert weights.trained == plain.trained
    assert weights.validated[1:4] == pytest.approx(means(weights.trained, 0.25)[:3], abs=1e-6)


def test_test_within_a_validation_leaves_the_average_in(make_trainer: MakeTrainer, weights: Weights) -> None:
    """The inner evaluation's end does not end the outer one's average."""
    trainer = make_trainer(hooks=[EMAHook(momentum=0.25), weights], **{**VAL, **TEST})
    trainer.bus.subscribe(lambda trainer, event: trainer.test(), "before_val_epoch", priority="LOWEST")

    trainer.train()

    assert weights.tested == weights.validated != weights.trained[-1:]
    assert weight_of(trainer) == weights.trained[-1]


# --- always swapped back -----------------------------------------------------------------------------------


@pytest.mark.representative(2)
@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize(
    ("event", "priority"),
    [
        ("before_val", "NORMAL"),
        ("before_val_epoch", "HIGHEST"),
        ("before_val_epoch", "LOWEST"),
        ("before_val_iter", "NORMAL"),
        ("after_val_epoch", "HIGHEST"),
        ("after_val", "HIGHEST"),
    ],
)
def test_weights_are_back_after_a_failed_validation(
    make_trainer: MakeTrainer, weights: Weights, event: str, priority: str, error: BaseException
) -> None:
    """Wherever a validation fails or is interrupted, the model ends with the weights it was trained to."""
    failing = Raise(event, error, priority)
    trainer = make_trainer(hooks=[EMAHook(momentum=0.25), weights, failing], **VAL)

    with pytest.raises(type(error)):
        trainer.train()

    assert weight_of(trainer) == weights.trained[-1]


@pytest.mark.parametrize(
    ("interrupted", "back_by"),
    [(["after_val_epoch"], "after_train"), (["after_val_epoch", "after_val"], "after_run")],
)
def test_interrupts_while_closing_leave_the_next_event_to_swap_back(
    make_trainer: MakeTrainer, weights: Weights, interrupted: list[str], back_by: str
) -> None:
    """When Ctrl-C comes before the hook's turn in a closing event, the closing event around it serves."""
    seen: list[float] = []
    failing = [Raise(event, KeyboardInterrupt(), "HIGHEST") for event in interrupted]
    trainer = make_trainer(hooks=[EMAHook(momentum=0.25), weights, *failing], **VAL)
    trainer.bus.subscribe(lambda trainer, event: seen.append(weight_of(trainer)), back_by, priority="LOWEST")

    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    assert seen == weights.trained[-1:]


def test_weights_are_back_after_a_failed_val_step(make_trainer: MakeTrainer, weights: Weights) -> None:
    """The same for an error in the forward pass of a test."""

    def fail(trainer: Trainer, batch: Any) -> dict[str, float]:
        raise RuntimeError("out of memory")

    options = {**VAL, **TEST, "val_step": fail, "val_loader": None}
    trainer = make_trainer(hooks=[EMAHook(momentum=0.25), weights], **options)
    trainer.train()

    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.test()

    assert weight_of(trainer) == weights.trained[-1]


def test_average_survives_a_failed_validation(make_trainer: MakeTrainer) -> None:
    """Swapping in and out does not touch the average."""
    hook = EMAHook(momentum=0.25)
    trainer = make_trainer(hooks=[hook, Raise("before_val_iter", ValueError("broken"))], **VAL)
    with pytest.raises(ValueError, match="broken"):
        trainer.train()

    assert abs(float(next(hook.ema_model.parameters())[0, 0]) - weight_of(trainer)) > 0
    assert hook.ema_model.steps == 4


def test_stopped_validation_swaps_back(make_trainer: MakeTrainer, weights: Weights) -> None:
    """A stop in mid-validation ends it early, with the weights back."""
    options = {**VAL, "val_loader": [torch.zeros(1)] * 3}
    trainer = make_trainer(hooks=[EMAHook(momentum=0.25), weights], **options)
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "before_val_iter")

    trainer.train()

    assert weight_of(trainer) == weights.trained[-1]


# --- from when on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "start"), [(0, 0), (1, 0), (2, 1), (4, 3), (6, 5)])
def test_begin_iter_is_the_iteration_of_the_first_update(
    make_trainer: MakeTrainer, weights: Weights, begin: int, start: int
) -> None:
    """Until then the model is its own average; the average begins as a copy, whatever the weights were before."""
    make_trainer(hooks=[EMAHook(begin_iter=begin, momentum=0.25), weights], **BY_ITER).train()

    assert weights.validated == pytest.approx(means(weights.trained, 0.25, start), abs=1e-6)


def test_an_average_that_begins_with_the_initial_weights(make_trainer: MakeTrainer, weights: Weights) -> None:
    """An update before the training copies the weights, and decays from the first step on: the closed form."""
    hook = EMAHook(momentum=0.25)
    trainer = make_trainer(hooks=[weights, hook], val_loader=None)
    trainer.bus.subscribe(
        lambda trainer, event: hook.ema_model.update_parameters(trainer.model), "before_train", priority="LOW"
    )
    average = weight_of(trainer)
    trainer.train()

    for trained in weights.trained:
        average += 0.25 * (trained - average)
    assert float(next(hook.ema_model.module.parameters()).detach().flatten()[0]) == pytest.approx(average)


@pytest.mark.parametrize(("begin", "start"), [(0, 0), (1, 0), (2, 2), (3, 4)])
def test_begin_epoch_is_the_epoch_of_the_first_update(
    make_trainer: MakeTrainer, weights: Weights, begin: int, start: int
) -> None:
    """Counted from 1, as in MMEngine: the first iteration of that epoch begins the average."""
    hook = EMAHook(begin_epoch=begin, momentum=0.25)
    make_trainer(hooks=[hook, weights], batches=2, max_epochs=3, **VAL).train()

    assert weights.validated == pytest.approx(means(weights.trained, 0.25, start)[1::2], abs=1e-6)


def test_no_step_no_update(make_trainer: MakeTrainer, weights: Weights) -> None:
    """An iteration whose step was skipped leaves the average, and the number of its updates, alone."""

    hook = EMAHook(momentum=0.25)
    make_trainer(hooks=[hook, weights, SkipSecond()], **BY_ITER).train()

    assert weights.validated[0] == weights.validated[1]
    taken = [w for i, w in enumerate(weights.trained) if i != 1]
    assert weights.validated[-1] == pytest.approx(means(taken, 0.25)[-1], abs=1e-6)
    assert hook.ema_model.steps == 5


def test_step_that_was_called_in_vain_is_no_step(make_trainer: MakeTrainer) -> None:
    """A fused optimizer may be called and change nothing: `optimizer_step_skipped` after it counts."""
    hook = EMAHook()
    trainer = make_trainer(hooks=[hook], batches=4)
    trainer.bus.subscribe(
        lambda trainer, event: trainer.announce(OptimizerStepSkipped, reason="inf"), "after_optimizer_step"
    )

    trainer.train()

    assert hook.ema_model.steps == 0


def test_accumulating_iterations_do_not_count(make_trainer: MakeTrainer, weights: Weights) -> None:
    """With a step every two iterations there is an update every two iterations."""
    hook, optimizer = EMAHook(momentum=0.25), GradientCumulativeOptimizerHook(cumulative_iters=2)
    make_trainer(hooks=[hook, weights, optimizer], **BY_ITER).train()

    assert hook.ema_model.steps == 3
    assert weights.validated[-1] == pytest.approx(means(weights.trained[1::2], 0.25)[-1], abs=1e-6)


def test_step_with_left_over_gradients_counts(make_trainer: MakeTrainer, weights: Weights) -> None:
    """A step that comes only when the epoch has ended is taken in before its validation."""
    hook, optimizer = EMAHook(momentum=0.25), GradientCumulativeOptimizerHook(cumulative_iters=2)
    loader = make_trainer(batches=3).train_loader
    assert loader is not None
    trainer = make_trainer(
        train_loader=_Endless(list(loader)), hooks=[hook, weights, optimizer], max_epochs=1, **VAL
    )

    trainer.train()

    assert hook.ema_model.steps == 2
    ends = [weights.trained[1], weight_of(trainer)]
    assert weights.validated == pytest.approx(means(ends, 0.25)[-1:], abs=1e-6)


class _Endless:
    """A loader that does not know its length."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)


def test_step_of_a_loop_of_ones_own_counts(make_trainer: MakeTrainer, weights: Weights) -> None:
    """A hand-written step is seen too, made every other iteration or not."""
    hook = EMAHook(momentum=0.25)
    trainer = make_trainer(
        hooks=[hook, weights], default_hooks={"optimizer": None}, batches=6, loss_fn=F.mse_loss
    )
    optimizer = trainer.optimizer
    for _ in trainer.epochs():
        assert trainer.train_loader is not None
        for i, (inputs, target) in enumerate(trainer.batches(trainer.train_loader)):
            F.mse_loss(trainer.model(inputs), target).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()

    assert hook.ema_model.steps == 3


def test_without_an_optimizer_every_iteration_counts(make_trainer: MakeTrainer) -> None:
    """Where the trainer does not know the optimizer, the average cannot see its steps."""
    hook = EMAHook()
    trainer = make_trainer(
        hooks=[hook], optimizer=None, default_hooks={"optimizer": None}, batches=4, loss_fn=F.mse_loss
    )

    trainer.train()

    assert hook.ema_model.steps == 4


def test_several_optimizers_make_one_update(make_trainer: MakeTrainer) -> None:
    """Two optimizers that step in one iteration are one update."""
    model = nn.Linear(2, 1)
    optimizers = {
        "weight": torch.optim.SGD([model.weight], lr=0.1),
        "bias": torch.optim.SGD([model.bias], lr=0.1),
    }
    hook = EMAHook()

    make_trainer(model=model, optimizer=optimizers, hooks=[hook], batches=4).train()

    assert hook.ema_model.steps == 4


def test_optimizer_that_is_never_stepped_is_reported(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that steps another optimizer than the trainer's would average nothing, silently."""
    trainer = make_trainer(hooks=[EMAHook()], default_hooks={"optimizer": None}, loss_fn=F.mse_loss)

    trainer.train()

    assert "EMAHook averaged nothing: the trainer's optimizer was never stepped" in caplog.text


def test_optimizer_is_left_as_it_was(make_trainer: MakeTrainer) -> None:
    """After the run the hook no longer listens to the optimizer."""
    trainer = make_trainer(hooks=[EMAHook()])
    before = step_hooks(trainer.optimizer)

    trainer.train()

    assert step_hooks(trainer.optimizer) == before


# --- models ------------------------------------------------------------------------------------------------


def norm_net() -> nn.Module:
    """A model with running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("update_buffers", [False, True])
def test_buffers_in_evaluation(make_trainer: MakeTrainer, update_buffers: bool) -> None:
    """An evaluation has the model's own running statistics, or their average with `update_buffers`; training
    goes on with its own in either case."""
    seen: list[torch.Tensor] = []
    hook = EMAHook(momentum=0.25, update_buffers=update_buffers)
    model = norm_net()
    trainer = make_trainer(model=model, hooks=[hook], **VAL)
    own = dict(model.named_buffers())["1.running_mean"]
    trainer.bus.subscribe(lambda event: seen.append(own.clone()), "before_val_iter")
    trainer.bus.subscribe(lambda event: seen.append(own.clone()), "after_train_epoch")

    trainer.train()

    assert torch.equal(seen[0], seen[1]) is not update_buffers
    assert torch.equal(own, seen[0])


def test_ema_model_has_the_models_buffers(make_trainer: MakeTrainer) -> None:
    """Whoever takes the average out of the hook gets a model that is whole."""
    hook, model = EMAHook(), norm_net()
    make_trainer(model=model, hooks=[hook]).train()

    averaged = dict(hook.ema_model.module.named_buffers())

    assert all(torch.equal(averaged[name], buffer) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("update_buffers", [False, True])
def test_ema_model_is_the_model_before_the_first_update(
    make_trainer: MakeTrainer, *, update_buffers: bool
) -> None:
    """A run that ended before averaging began gives what was trained, not what training began with."""
    hook, model = EMAHook(begin_iter=3, update_buffers=update_buffers), norm_net()
    trainer = make_trainer(model=model, hooks=[hook], max_iters=5)
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter", start=1)
    trainer.train()

    averaged = hook.ema_model

    assert trainer.iter == 2
    assert averaged.steps == 0
    own = model.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in averaged.module.state_dict().items())


def test_half_precision_model_keeps_its_average_exact(make_trainer: MakeTrainer) -> None:
    """The average of bfloat16 weights is float32, evaluated in bfloat16, and not rounded by that."""
    model = nn.Linear(2, 1).to(torch.bfloat16)
    batches = [(torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(3, 1, dtype=torch.bfloat16))] * 3
    hook, weights = EMAHook(momentum=0.25), Weights()
    trainer = make_trainer(model=model, train_loader=batches, hooks=[hook, weights], **VAL)
    trainer.train()
    average = next(hook.ema_model.parameters()).clone()

    trainer.val()

    assert average.dtype == torch.float32
    assert torch.equal(next(hook.ema_model.parameters()), average)
    assert weights.validated[-1] == float(average[0, 0].bfloat16())
    assert weight_of(trainer) == weights.trained[-1]


def test_lazy_model_is_averaged_once_it_has_its_shape(make_trainer: MakeTrainer) -> None:
    """The copy is made at the first update."""
    model = nn.LazyLinear(1)
    hook = EMAHook()

    make_trainer(model=model, hooks=[hook]).train()

    assert hook.ema_model.steps == 4


def test_parameter_added_during_training_is_evaluated(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that grows is validated whole, and keeps what it was averaged so far."""
    model = nn.Sequential(nn.Linear(2, 1))
    hook = EMAHook(momentum=0.25)
    trainer = make_trainer(model=model, hooks=[hook], **VAL)

    def grow(event: Any) -> None:
        model.append(nn.Linear(1, 1))

    trainer.bus.subscribe(grow, "after_train_iter", start=1, once=True, priority="LOWEST")

    trainer.train()

    assert [*dict(hook.ema_model.module.named_parameters())] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert "the average of 1.weight, 1.bias begins as a copy" in caplog.text


def test_average_of_a_wrapped_model(make_trainer: MakeTrainer) -> None:
    """What distributes or compiles a model is not copied; the model inside is."""
    hook = EMAHook()
    model = nn.Linear(2, 1)

    make_trainer(
        model=nn.DataParallel(model), optimizer=torch.optim.SGD(model.parameters(), 0.1), hooks=[hook]
    ).train()

    assert isinstance(hook.ema_model.module, nn.Linear)


def test_second_training_goes_on_with_the_average(make_trainer: MakeTrainer, weights: Weights) -> None:
    """Calling `train` again after raising `max_epochs` does not begin anew."""
    hook = EMAHook(momentum=0.25)
    trainer = make_trainer(hooks=[hook, weights], batches=2)
    trainer.train()
    trainer.max_epochs = 2

    trainer.train()

    expected = means(weights.trained, 0.25)[-1]
    assert float(next(hook.ema_model.parameters())[0, 0]) == pytest.approx(expected, abs=1e-6)
