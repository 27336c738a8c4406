"""OptimizerHook: zero_grad, backward, clip, step, and the events between them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from eventloop import Trainer
from eventloop.hooks import AmpOptimizerHook, GradientCumulativeOptimizerHook, Hook, OptimizerHook
from tests.support.internals import substitute

Batches = Callable[[int], list[tuple[torch.Tensor, torch.Tensor]]]


class Spy(torch.optim.SGD):
    """Writes down what it is asked to do."""

    calls: list[str]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Note it."""
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Note it."""
        self.calls.append("step")
        super().step(closure)


def test_order_of_one_step(make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    """zero_grad, backward, after_backward, clip, before_optimizer_step, step, after_optimizer_step."""
    calls: list[str] = []

    class Watch(Hook):
        def after_backward(self, trainer: Trainer, event: Any) -> None:
            assert next(trainer.model.parameters()).grad is not None
            calls.append("after_backward")

        def before_optimizer_step(self, trainer: Trainer, event: Any) -> None:
            calls.append("before_optimizer_step")

        def after_optimizer_step(self, trainer: Trainer, event: Any) -> None:
            calls.append("after_optimizer_step")

    def clip(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append("clip")
        return clip_grad_norm_(*args, **kwargs)

    substitute(monkeypatch, "clipping.clip_grad_norm_", clip)
    model = torch.nn.Linear(2, 1)
    optimizer = Spy(model.parameters(), lr=0.1)
    optimizer.calls = calls
    hooks = [Watch(), OptimizerHook(grad_clip={"max_norm": 1.0})]
    make_trainer(batches=1, model=model, optimizer=optimizer, hooks=hooks).train()

    assert calls == [
        "zero_grad",
        "after_backward",
        "clip",
        "before_optimizer_step",
        "step",
        "after_optimizer_step",
    ]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("options", "clip"),
    [
        (None, lambda parameters: None),
        ({"max_norm": 0.1}, lambda parameters: clip_grad_norm_(parameters, 0.1)),
        ({"max_norm": 0.1, "norm_type": 1}, lambda parameters: clip_grad_norm_(parameters, 0.1, 1)),
        ({"type": "norm", "max_norm": 1}, lambda parameters: clip_grad_norm_(parameters, 1)),
        ({"type": "value", "clip_value": 0.05}, lambda parameters: clip_grad_value_(parameters, 0.05)),
        ({"clip_value": 0.05}, lambda parameters: clip_grad_value_(parameters, 0.05)),
    ],
    ids=["none", "norm", "l1", "typed norm", "value", "value by its argument"],
)
def test_training_equals_a_hand_written_loop_bitwise(
    make_trainer: Callable[..., Trainer],
    make_batches: Batches,
    options: dict[str, Any] | None,
    clip: Callable[[Any], object],
) -> None:
    """Weights after two epochs, clipped or not, are those of the plain PyTorch loop to the last bit."""
    trainer = make_trainer(max_epochs=2, hooks=[OptimizerHook(grad_clip=options)])
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    trainer.train()
    for _ in range(2):
        for inputs, target in make_batches(4):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), target).backward()
            clip(model.parameters())
            optimizer.step()

    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), model.parameters(), strict=True))


def test_norm_is_over_all_parameter_groups_together(make_trainer: Callable[..., Trainer]) -> None:
    """As with torch over `model.parameters()`, not group by group."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    hook = OptimizerHook(grad_clip={"max_norm": 0.01})
    trainer = make_trainer(batches=1, model=model, optimizer=optimizer, hooks=[hook])

    trainer.train()

    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert torch.stack(norms).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_grad_norm_before_clipping_is_logged(
    make_trainer: Callable[..., Trainer], make_batches: Batches
) -> None:
    """The metric `grad_norm` is what torch's clip_grad_norm_ returns."""
    trainer = make_trainer(batches=1, hooks=[OptimizerHook(grad_clip={"max_norm": 0.01})])
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    inputs, target = make_batches(1)[0]
    F.mse_loss(model(inputs), target).backward()

    trainer.train()

    assert trainer.metrics.latest()["grad_norm"] == (clip_grad_norm_(model.parameters(), 0.01).item(), 0)


def test_a_step_reads_no_tensor(make_trainer: Callable[..., Trainer], value_reads: list[str]) -> None:
    """Loss, grad_norm and the logging of both leave the device without the training thread waiting."""
    hook = OptimizerHook(grad_clip={"max_norm": 1.0})
    trainer = make_trainer(
        batches=8, hooks=[hook], default_hooks={"logger": {"type": "LoggerHook", "interval": 2}}
    )

    trainer.train()

    assert value_reads == []


def test_frozen_parameters_of_the_optimizer_are_fine(make_trainer: Callable[..., Trainer]) -> None:
    """Parameters without a gradient are neither clipped nor stepped."""
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    model = torch.nn.Sequential(frozen, torch.nn.Linear(2, 1))
    before = frozen.weight.clone()

    make_trainer(model=model, hooks=[OptimizerHook(grad_clip={"max_norm": 1.0})]).train()

    assert torch.equal(frozen.weight, before)


def test_loss_that_needs_no_grad_is_an_error(make_trainer: Callable[..., Trainer]) -> None:
    """Backward would train nothing; the error says what to look for."""

    def detached(trainer: Trainer, batch: Any) -> torch.Tensor:
        return F.mse_loss(trainer.model(batch[0]), batch[1]).detach()

    with pytest.raises(
        RuntimeError, match=r"the loss needs no grad.*torch\.no_grad\(\), detached, or .* frozen"
    ):
        make_trainer(train_step=detached).train()


@pytest.mark.parametrize(
    "outputs", [None, {}, {"los": torch.zeros(1)}, {"loss": 0.5}, {"loss": torch.zeros(2)}], ids=str
)
def test_outputs_without_a_loss_are_an_error(
    make_trainer: Callable[..., Trainer], make_batches: Batches, outputs: Any
) -> None:
    """In a hand-written loop that forgets `trainer.outputs`, or sets something else, the error says what is due."""
    trainer = make_trainer()

    def loop() -> None:
        for _ in trainer.epochs():
            for _ in trainer.batches(make_batches(1)):
                trainer.outputs = outputs

    with pytest.raises(
        TypeError, match=r"expected trainer\.outputs to be a mapping with a 'loss' tensor of one"
    ):
        loop()


def test_hook_without_an_optimizer_is_an_error(
    make_trainer: Callable[..., Trainer], make_batches: Batches
) -> None:
    """Asked for in a hand-written loop, the hook says what it lacks."""
    trainer = make_trainer(optimizer=None, hooks=[OptimizerHook()])

    def loop() -> None:
        for _ in trainer.epochs():
            for batch in trainer.batches(make_batches(1)):
                trainer.outputs = trainer.train_step(batch)

    with pytest.raises(RuntimeError, match=r"has no optimizer to step: pass optimizer=\.\.\. to the Trainer"):
        loop()


def test_without_the_hook_the_loop_steps_itself(
    make_trainer: Callable[..., Trainer], make_batches: Batches
) -> None:
    """`default_hooks=dict(optimizer=None)` leaves backward and step to the hand-written loop."""
    trainer = make_trainer(default_hooks={"optimizer": None})
    before = trainer.model.state_dict()["weight"].clone()

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(make_batches(2)):
            trainer.outputs = {"loss": F.mse_loss(trainer.model(inputs), target)}

    assert torch.equal(trainer.model.state_dict()["weight"], before)


STEPPERS: list[Callable[[], OptimizerHook]] = [
    OptimizerHook,
    lambda: GradientCumulativeOptimizerHook(cumulative_iters=2),
    lambda: AmpOptimizerHook(dtype="bfloat16"),
]


@pytest.mark.parametrize(
    "returned",
    [torch.Tensor.clone, torch.Tensor.detach, torch.Tensor.item],
    ids=["graph", "detached", "number"],
)
@pytest.mark.parametrize("make_hook", STEPPERS, ids=["plain", "cumulative", "amp"])
def test_own_step_beside_the_hook_names_the_option(
    make_trainer: Callable[..., Trainer],
    make_hook: Callable[[], OptimizerHook],
    returned: Callable[[torch.Tensor], Any],
) -> None:
    """A train_step that calls backward() and step() itself is an error that names the default hook to remove."""

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        loss = F.mse_loss(trainer.model(batch[0]), batch[1])
        loss.backward()
        trainer.optimizer.step()
        return {"loss": returned(loss)}

    with pytest.raises((RuntimeError, TypeError)) as raised:
        make_trainer(train_step=step, hooks=[make_hook()]).train()

    text = "\n".join([str(raised.value), *raised.value.__notes__])
    assert re.search(
        r"calls backward\(\) and step\(\) itself needs default_hooks=dict\(optimizer=None\)", text
    )


def test_other_errors_of_backward_get_no_advice(make_trainer: Callable[..., Trainer]) -> None:
    """Only a graph that was freed is explained."""

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a kernel failed")

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        loss = F.mse_loss(trainer.model(batch[0]), batch[1])
        loss.register_hook(fail)
        return loss

    with pytest.raises(RuntimeError, match="a kernel failed") as raised:
        make_trainer(train_step=step).train()

    assert not any("optimizer=None" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("make_hook", STEPPERS, ids=["plain", "cumulative", "amp"])
def test_outputs_are_detached_after_the_step(
    make_trainer: Callable[..., Trainer], make_hook: Callable[[], OptimizerHook]
) -> None:
    """A handler behind the optimizer reads the loss without PyTorch's warning; one before it has the graph."""
    before: list[tuple[float, list[bool]]] = []
    behind: list[tuple[float, list[bool]]] = []

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        preds = trainer.model(batch[0])
        return {"loss": F.mse_loss(preds, batch[1]), "preds": preds, "target": batch[1], "name": "x"}

    def needs_graph(outputs: dict[str, Any]) -> list[bool]:
        return [outputs[name].requires_grad for name in ("loss", "preds", "target")]

    trainer = make_trainer(train_step=step, hooks=[make_hook()])
    trainer.bus.subscribe(
        lambda trainer, event: before.append(
            (trainer.outputs["loss"].detach().item(), needs_graph(trainer.outputs))
        ),
        "after_train_iter",
        priority=29,
        name="before",
    )
    trainer.bus.subscribe(
        lambda trainer, event: behind.append((float(trainer.outputs["loss"]), needs_graph(trainer.outputs))),
        "after_train_iter",
        priority=31,
        name="behind",
    )
    torch.set_warn_always(True)  # else it warns once a process
    try:
        trainer.train()
    finally:
        torch.set_warn_always(False)

    assert [loss for loss, _ in behind] == [loss for loss, _ in before]
    assert [flags for _, flags in before] == [[True, True, False]] * 4
    assert [flags for _, flags in behind] == [[False, False, False]] * 4


def test_outputs_of_a_class_of_their_own_are_left_as_they_are(
    make_trainer: Callable[..., Trainer], make_batches: Batches
) -> None:
    """A mapping with attributes, as other libraries' models return, keeps its class."""

    class Output(dict[str, torch.Tensor]):
        pass

    seen: list[Any] = []
    trainer = make_trainer()
    trainer.bus.subscribe(
        lambda trainer, event: seen.append(trainer.outputs), "after_train_iter", priority=31
    )
    for _ in trainer.epochs():
        for inputs, target in trainer.batches(make_batches(1)):
            given = trainer.outputs = Output(loss=F.mse_loss(trainer.model(inputs), target))

    assert len(seen) == 1
    assert seen[0] is given


def test_hook_without_a_window_is_called_once_in_an_iteration(make_trainer: Callable[..., Trainer]) -> None:
    """A method that a subclass adds is called too, and one with `cumulative_iters` needs more calls."""

    class Own(OptimizerHook):
        begun = 0

        def before_train(self, trainer: Trainer, event: Any) -> None:
            super().before_train(trainer, event)
            self.begun += 1

    hook = Own()
    trainer = make_trainer(hooks=[hook])
    trainer.train()
    own = {row.event for row in trainer.bus.stats() if row.name.startswith("Own.")}
    windows = make_trainer(hooks=[OptimizerHook(cumulative_iters=2)])
    others = {row.event for row in windows.bus.stats() if row.name.startswith("OptimizerHook.")}

    assert hook.begun == 1
    assert own == {"before_train", "after_train_iter"}
    assert others > {"before_train_iter", "after_train_iter", "before_save_checkpoint"}


@pytest.mark.parametrize(
    ("grad_clip", "message"),
    [
        (35, r"grad_clip must be a dict such as dict\(max_norm=35\), got 35"),
        (
            {"type": "nrom", "max_norm": 1},
            "the type of grad_clip must be 'norm' or 'value', got 'nrom': did you mean 'norm'",
        ),
        ({"maxnorm": 1}, "grad_clip has no argument 'maxnorm': did you mean 'max_norm'"),
        ({"type": "value", "max_norm": 1}, "grad_clip has no argument 'max_norm'"),
        ({}, r"grad_clip by norm needs max_norm above 0, got \{\}"),
        ({"type": "value"}, "grad_clip by value needs clip_value above 0"),
        ({"max_norm": 0}, "needs max_norm above 0"),
        ({"max_norm": float("nan")}, "needs max_norm above 0"),
        ({"max_norm": True}, "grad_clip: max_norm must be a number, got True"),
        ({"max_norm": "1.0"}, "grad_clip: max_norm must be a number, got '1.0'"),
        ({"clip_value": "1.0"}, "grad_clip: clip_value must be a number, got '1.0'"),
    ],
)
def test_bad_grad_clip_is_refused(grad_clip: Any, message: str) -> None:
    """Types, names and bounds are checked when the hook is built."""
    with pytest.raises((TypeError, ValueError), match=message):
        OptimizerHook(grad_clip=grad_clip)
