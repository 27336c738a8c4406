"""Names of other systems: the errors name the replacement, and the replacement exists."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from eventloop import Trainer, hooks, writers
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, OptimizerHook
from eventloop.migration.tables import ARGUMENTS, ATTRIBUTES, CALLS, CLASSES
from eventloop.registry import HOOKS, WRITERS
from tests.support.trainers import MakeTrainer

PARAMETERS = set(inspect.signature(Trainer).parameters)
REPLACEMENTS = [
    text for table in (CLASSES, ATTRIBUTES, CALLS, *ARGUMENTS.values()) for text in table.values()
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"launcher": "pytorch"}, "torchrun"),
        ({"accumulate_grad_batches": 4}, r"hooks=\[GradientCumulativeOptimizerHook\("),
        ({"ckpt_path": "last"}, r'trainer\.resume\("auto"\)'),
        ({"eval_dataset": []}, r"val_loader=DataLoader"),
    ],
)
def test_an_argument_of_another_trainer_is_explained(
    make_trainer: MakeTrainer, arguments: dict[str, Any], message: str
) -> None:
    """The error names the replacement."""
    with pytest.raises(TypeError, match=f"^Trainer has no argument '{next(iter(arguments))}': use {message}"):
        make_trainer(**arguments)


@pytest.mark.parametrize(
    ("hook", "arguments", "message"),
    [
        (
            CheckpointHook,
            {"monitor": "val_loss", "save_top_k": 3, "mode": "min"},
            r"'monitor': use save_best=.*\n  nor 'save_top_k': use keep_best=.*\n  nor 'mode': use rule=\"less\"",
        ),
        (CheckpointHook, {"keep_bst": 2}, "^CheckpointHook has no argument 'keep_bst': did you mean 'keep_best'"),
        (EarlyStoppingHook, {"monitor": "loss", "early_stopping_patience": 3}, "use patience="),
        (OptimizerHook, {"clip_grad": {}}, r"'clip_grad': use grad_clip=\.\.\., the same dict$"),
    ],
)  # fmt: skip
def test_arguments_of_a_hook_are_explained(
    hook: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    """Each unknown argument on a line of its own."""
    with pytest.raises(TypeError, match=message):
        hook(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"default_hooks": {"checkpoint": {"save_top_k": 3}}}, "'save_top_k': use keep_best="),
        ({"hooks": [{"type": "EMAHook", "decay": 0.999}]}, "'decay': use momentum=.* 1 - decay"),
        ({"default_hooks": {"logger": {"intervall": 2}}}, "'intervall': did you mean 'interval'"),
        ({"writers": [{"type": "WandbLogger"}]}, "unknown type 'WandbLogger': use a Writer of your own"),
        ({"hooks": [{"type": "ModelCheckpoint"}]}, r"unknown type 'ModelCheckpoint': use CheckpointHook\("),
        ({"hooks": [{"type": "EvalHook"}]}, "unknown type 'EvalHook': use val_loader="),
    ],
)
def test_names_in_a_config_are_explained(
    make_trainer: MakeTrainer, options: dict[str, Any], message: str
) -> None:
    """Types, and arguments of a class or of a class that it is derived from."""
    with pytest.raises(ValueError, match=message):
        make_trainer(**options)


@pytest.mark.parametrize(
    ("package", "name", "message"),
    [
        ("eventloop", "Runner", "Trainer from eventloop"),
        ("eventloop.hooks", "ModelCheckpoint", r"CheckpointHook\(interval=\.\.\., save_best=\.\.\.\)"),
        ("eventloop.writers", "WandbLogger", "a Writer of your own"),
    ],
)
def test_an_import_is_explained(package: str, name: str, message: str) -> None:
    """The statement's own error names the replacement."""
    with pytest.raises(ImportError, match=f"^cannot import name '{name}' from '{package}': use {message}"):
        exec(f"from {package} import {name}")


@pytest.mark.parametrize("package", ["eventloop", "eventloop.hooks", "eventloop.writers"])
def test_any_other_absent_name_is_pythons_error(package: str) -> None:
    """A misspelled name has Python's message, and `import *` finds every public name."""
    module = importlib.import_module(package)

    with pytest.raises(AttributeError, match=rf"^module '{package}' has no attribute 'nonsense'$"):
        _ = module.nonsense
    with pytest.raises(ImportError, match=rf"cannot import name 'Checkpoints' from '{package}' \("):
        exec(f"from {package} import Checkpoints")
    there: dict[str, object] = {}
    exec(f"from {package} import *", there)
    assert {*module.__all__} <= {*there}


@pytest.mark.parametrize(
    ("name", "message"),
    [("fit", r"trainer\.train\(\)"), ("global_step", r"trainer\.iter$"), ("runner", "the trainer itself$")],
)
def test_an_attribute_of_another_trainer_is_explained(
    make_trainer: MakeTrainer, name: str, message: str
) -> None:
    """The error names the replacement; asked of the class too."""
    for owner in (make_trainer(), Trainer):
        with pytest.raises(AttributeError, match=f"^Trainer has no attribute '{name}': use {message}"):
            getattr(owner, name)


def test_a_trainer_has_none_of_these_attributes(make_trainer: MakeTrainer) -> None:
    """Neither for `hasattr` nor for a copy, and an attribute of that name can be set."""
    trainer: Any = make_trainer()

    assert [name for name in ATTRIBUTES if hasattr(trainer, name) or hasattr(copy.copy(trainer), name)] == []
    trainer.global_step = 3
    assert trainer.global_step == 3
    with pytest.raises(AttributeError, match=r"^'Trainer' object has no attribute 'itre'"):
        trainer.itre  # noqa: B018


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("train", {"ckpt_path": "last"}, r'use trainer\.resume\("auto"\)'),
        ("val", {"val_loader": []}, r"it is an argument of Trainer\(\.\.\.\)"),
        ("test", {"max_epoch": 3}, r"did you mean 'max_epochs'\?"),
        ("run", {"data_loaders": []}, "use .* train_loader"),
    ],
)
def test_an_argument_of_a_call_is_explained(
    make_trainer: MakeTrainer, method: str, arguments: dict[str, Any], message: str
) -> None:
    """An argument of another system's method, and one that belongs to the constructor."""
    name = next(iter(arguments))
    with pytest.raises(TypeError, match=f"^Trainer.{method} has no argument '{name}'(: |; ){message}"):
        getattr(make_trainer(), method)(**arguments)


def test_an_error_of_a_handler_is_not_hidden(make_trainer: MakeTrainer) -> None:
    """An AttributeError of what a property of the trainer calls is not taken for a missing attribute."""
    trainer = make_trainer()

    @trainer.bus.on("stop_requested")
    def fail(event: Any) -> None:
        event.resaon  # noqa: B018

    trainer.request_stop("enough")
    with pytest.raises(AttributeError, match="resaon"):
        trainer.stopping  # noqa: B018


def test_every_replacement_exists(make_trainer: MakeTrainer) -> None:
    """Classes of hooks and writers, attributes of the trainer, and no name of ours is explained."""
    trainer = make_trainer()
    classes = set(re.findall(r"\b[A-Z]\w+(?:Hook|Writer)\b", " ".join(REPLACEMENTS)))
    chains = {chain for text in REPLACEMENTS for chain in re.findall(r"\btrainer((?:\.\w+)+)", text)}

    assert [name for name in classes if not hasattr(hooks, name) and not hasattr(writers, name)] == []
    assert len(chains) > 20
    for chain in chains:
        found: Any = trainer
        for name in chain[1:].split("."):
            found = getattr(found, name)
    assert not {*CALLS} & PARAMETERS
    assert not {*CLASSES} & {*HOOKS.names(), *WRITERS.names()}


@pytest.mark.parametrize("owner", ARGUMENTS)
def test_every_suggested_argument_exists(owner: str) -> None:
    """It is an argument of the class, or its line names the Trainer; what is explained is not an argument."""
    parameters = set(inspect.signature(getattr(hooks, owner, Trainer)).parameters)
    if owner == "BaseAveragedModel":  # whose arguments go through the hook's
        parameters |= set(inspect.signature(hooks.MomentumAnnealingEMA).parameters)
        parameters |= set(inspect.signature(EMAHook).parameters)

    assert not {*ARGUMENTS[owner]} & parameters
    for text in ARGUMENTS[owner].values():
        if (named := re.match(r"(\w+)=", text)) and named[1] not in parameters:
            assert named[1] in PARAMETERS, text
            assert "of the Trainer" in text


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "default_hooks": {
                "optimizer": {"grad_clip": {"max_norm": 1.0, "norm_type": 2}},
                "logger": {"interval": 2},
            }
        },
        {"default_hooks": {"optimizer": {"grad_clip": {"type": "value", "clip_value": 1.0}}}},
        {"hooks": [{"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 2}]},
        {"hooks": [{"type": "AmpOptimizerHook", "dtype": "bfloat16"}]},
    ],
    ids=["norm and logger", "value", "accumulate", "precision"],
)
def test_replacements_can_be_built(make_trainer: MakeTrainer, arguments: dict[str, Any]) -> None:
    """As they are written in the error, with values for the dots."""
    make_trainer(**arguments)
