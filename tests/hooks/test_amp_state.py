"""Mixed precision: resuming, and the options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.hooks import AmpOptimizerHook as Amp
from eventloop.hooks import CheckpointHook, Hook
from eventloop.hooks import Fp16OptimizerHook as Fp16
from eventloop.hooks import GradientCumulativeFp16OptimizerHook as CumulativeFp16
from eventloop.hooks import GradientCumulativeOptimizerHook as Cumulative
from tests.hooks.amp_recipe import GROWING, Overflow, assert_same

Batches = Callable[[int], list[tuple[torch.Tensor, torch.Tensor]]]
MakeTrainer = Callable[..., Trainer]


@pytest.mark.representative(4)
@pytest.mark.parametrize("at", [1, 3, 4, 5, 7])
@pytest.mark.parametrize(
    ("hook", "overflow"),
    [
        (lambda: Amp(GROWING, "float16"), [2]),
        (lambda: CumulativeFp16(3, loss_scale=GROWING), [2]),
        (lambda: CumulativeFp16(3), [2]),
        (lambda: Amp(cumulative_iters=3), []),
    ],
    ids=["float16", "accumulating", "accumulating static", "accumulating bfloat16"],
)
def test_resumed_run_equals_the_uninterrupted_one(
    make_trainer: MakeTrainer, tmp_path: Path, at: int, hook: Callable[[], Amp], overflow: list[int]
) -> None:
    """Scale, its growth and the gradients of a window go on, to the last bit, past a skipped step."""
    each = CheckpointHook(1, by_epoch=False)
    whole = make_trainer(hooks=[first := hook(), Overflow(*overflow), each], max_epochs=2)
    whole.train()
    options: dict[str, Any] = {"max_epochs": 2, "work_dir": tmp_path / "resumed"}
    trainer = make_trainer(hooks=[rest := hook(), Overflow(*overflow)], **options)

    trainer.resume(tmp_path / "run" / f"iter_{at}")
    trainer.train()

    assert_same(trainer.model, whole.model)
    assert rest.state_dict() == first.state_dict()


def test_factors_are_those_of_the_hook(make_trainer: MakeTrainer) -> None:
    """The scale goes on; what it grows by is what the resumed run was given."""
    make_trainer(hooks=[Fp16(loss_scale={"init_scale": 64.0}), CheckpointHook(1)]).train()
    hook = Fp16(loss_scale={"init_scale": 2.0, "growth_interval": 7, "growth_factor": 4.0})

    make_trainer(hooks=[hook, CheckpointHook(1)], max_epochs=2).resume(changed="apply")

    assert hook.state_dict()["scaler"] == {
        "scale": 64.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.5,
        "growth_interval": 7,
        "_growth_tracker": 4,
    }


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        (Fp16, lambda: Fp16(loss_scale="dynamic"), "loss scaling 'static', this hook has 'dynamic'"),
        (lambda: Amp(dtype="float16"), Fp16, "loss scaling 'dynamic', this hook has 'static'"),
        (Amp, Fp16, "loss scaling 'none', this hook has 'static'"),
        (Fp16, lambda: Cumulative(2), "loss scaling 'static', this hook has 'none'.*load_checkpoint"),
    ],
    ids=["static, dynamic", "dynamic, static", "bfloat16, float16", "float16, float32"],
)
def test_state_of_another_kind_of_scaling_is_refused(
    make_trainer: MakeTrainer, saved: Callable[[], Hook], own: Callable[[], Hook], message: str
) -> None:
    """Its gradients, and its scale, would mean something else."""
    make_trainer(hooks=[saved(), CheckpointHook(1)]).train()

    with pytest.raises(ValueError, match=message):
        make_trainer(hooks=[own(), CheckpointHook(1)], max_epochs=2).resume(changed="keep")


def test_model_moved_after_the_trainer_was_built(make_trainer: MakeTrainer) -> None:
    """A run settles the device anew, and keeps the scale it has."""
    hook = Amp(GROWING, "float16")
    trainer = make_trainer(hooks=[hook])
    trainer.train()
    before = hook.state_dict()
    precision: Any = hook._precision
    precision.device = "elsewhere"

    trainer.val_loader = [(torch.ones(1, 2), torch.ones(1, 1))]
    trainer.val()

    assert hook.state_dict() == before
    assert precision.device == "cpu"


@pytest.mark.parametrize(
    ("loss_scale", "error", "message"),
    [
        ("dynamik", TypeError, "loss_scale must be a number, .*torch.amp.GradScaler.*got 'dynamik'"),
        (True, TypeError, "must be a number.*got True"),
        ([512.0], TypeError, r"must be a number.*got \[512.0\]"),
        (0, ValueError, "loss_scale must be above 0, got 0"),
        (-1.0, ValueError, "loss_scale must be above 0, got -1.0"),
        (float("inf"), ValueError, "loss_scale must be a finite number, got inf"),
        (float("nan"), ValueError, "loss_scale must be a finite number, got nan"),
        ({"init_scal": 1.0}, ValueError, "loss_scale has no argument 'init_scal': did you mean 'init_scale'"),
        ({"init_scale": 0.0}, ValueError, r"loss_scale\['init_scale'\] must be above 0, got 0.0"),
        ({"growth_factor": 1.0}, ValueError, r"loss_scale\['growth_factor'\] must be above 1, got 1.0"),
        ({"backoff_factor": 1.0}, ValueError, r"loss_scale\['backoff_factor'\] must be above 0 and below 1"),
        ({"growth_interval": 0}, ValueError, r"loss_scale\['growth_interval'\] must be at least 1, got 0"),
        ({"growth_interval": 2.5}, TypeError, r"loss_scale\['growth_interval'\] must be an int, got 2.5"),
    ],
)
@pytest.mark.parametrize("hook", [Amp, Fp16, CumulativeFp16])
def test_bad_loss_scale_is_refused(
    hook: Callable[..., Amp], loss_scale: Any, error: type[Exception], message: str
) -> None:
    """When the hook is built, with the key and the value."""
    with pytest.raises(error, match=message):
        hook(loss_scale=loss_scale)


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        (
            "bfloat",
            ValueError,
            "dtype must be 'float16' or 'bfloat16', got 'bfloat': did you mean 'bfloat16'",
        ),
        ("float32", ValueError, "dtype must be 'float16' or 'bfloat16', got 'float32'"),
        (torch.float64, ValueError, "dtype must be 'float16' or 'bfloat16', got 'float64'"),
        (16, TypeError, 'dtype must be "float16" or "bfloat16", got 16'),
    ],
)
def test_bad_dtype_is_refused(dtype: Any, error: type[Exception], message: str) -> None:
    """When the hook is built."""
    with pytest.raises(error, match=message):
        Amp(dtype=dtype)


@pytest.mark.parametrize("hook", [Amp, CumulativeFp16])
def test_bad_cumulative_iters_is_refused(hook: Callable[..., Amp]) -> None:
    """As in the hook that only accumulates."""
    with pytest.raises(ValueError, match="cumulative_iters must be at least 1, got 0"):
        hook(cumulative_iters=0)


@pytest.mark.parametrize(
    "hook", [Amp(), Fp16(), CumulativeFp16(2), Cumulative(2)], ids=lambda h: type(h).__name__
)
def test_they_take_the_default_hooks_place(make_trainer: MakeTrainer, hook: Hook) -> None:
    """There is one optimizer hook, and its state is saved under its name."""
    trainer = make_trainer(hooks=[hook])

    assert hook.name == "optimizer"
    assert len([h for h in trainer.hooks if type(h).__name__.endswith("OptimizerHook")]) == 1
