"""Names of other systems: the errors name the replacement, and the replacement exists."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import HOOKS, WRITERS, Bus, Trainer, bus, hooks, writers
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, OptimizerHook
from eventloop.migration.tables import ARGUMENTS, ATTRIBUTES, CALLS, CLASSES
from eventloop.registry import build
from tests.support.trainers import MakeTrainer

PARAMETERS = set(inspect.signature(Trainer).parameters)
REPLACEMENTS = [
    text for table in (CLASSES, ATTRIBUTES, CALLS, *ARGUMENTS.values()) for text in table.values()
]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda make: make(launcher="pytorch"),
            TypeError,
            "Trainer has no argument 'launcher': use torchrun",
        ),
        (lambda make: make(ckpt_path="last"), TypeError, r"'ckpt_path': use trainer\.resume\(\"auto\"\)"),
        (lambda make: make(eval_dataset=[]), TypeError, "'eval_dataset': use val_loader=DataLoader"),
        (
            lambda make: make().train(ckpt_path="last"),
            TypeError,
            r"Trainer.train has no argument 'ckpt_path': use trainer\.res",
        ),
        (
            lambda make: make().val(val_loader=[]),
            TypeError,
            "Trainer.val has no argument 'val_loader': it is an argument of Trainer",
        ),
        (
            lambda make: make().test(max_epoch=3),
            TypeError,
            r"Trainer.test has no argument 'max_epoch': did you mean 'max_epochs'",
        ),
        (
            lambda make: make().run(data_loaders=[]),
            TypeError,
            "Trainer.run has no argument 'data_loaders': use .* train_loader",
        ),
        (
            lambda make: make().resume("auto", strict=False),
            TypeError,
            r"^Trainer.resume has no argument 'strict': use trainer.load_checkpoint\(path, strict=",
        ),
        (
            lambda make: make(criterion=F.mse_loss),
            TypeError,
            r"Trainer has no argument 'criterion': use loss_fn=",
        ),
        (lambda make: make(loader=[]), TypeError, r"Trainer has no argument 'loader': use train_loader="),
        (
            lambda make: make(data=[]),
            TypeError,
            r"Trainer has no argument 'data': use train_loader=DataLoader\(data",
        ),
        (
            lambda make: make(dataset=[]),
            TypeError,
            r"Trainer has no argument 'dataset': use train_loader=DataLoader\(data",
        ),
        (lambda make: make(metrics=[]), TypeError, r"Trainer has no argument 'metrics': use evaluator="),
        (
            lambda make: make(amp=True),
            TypeError,
            r"Trainer has no argument 'amp': use hooks=\[AmpOptimizerHook\(",
        ),
        (lambda make: make(ema=True), TypeError, r"Trainer has no argument 'ema': use hooks=\[EMAHook\("),
        (
            lambda make: make(lr=0.1),
            TypeError,
            r"Trainer has no argument 'lr': use optimizer=torch\.optim\.SGD\(.*lr=",
        ),
        (
            lambda make: make().train([1]),
            TypeError,
            r"Trainer\.train takes no argument without a name, got list: loaders .* are arguments of Trainer\(train_loader=",
        ),
        (
            lambda make: make().train(3),
            TypeError,
            r"Trainer\.train takes no argument without a name, got int: .* Trainer\(.*max_epochs=",
        ),
        (
            lambda make: make().predict([1], print),
            TypeError,
            r"Trainer\.predict takes 1 argument without a name, got list, builtin.*: write the name .*, to=",
        ),
        (lambda make: make().fit, AttributeError, r"^Trainer has no attribute 'fit': use trainer\.train\(\)"),
        (
            lambda make: type(make()).global_step,
            AttributeError,
            r"^Trainer has no attribute 'global_step': use trainer\.iter$",
        ),
    ],
)
def test_names_of_another_trainer_are_explained(
    make_trainer: MakeTrainer, call: Callable[[MakeTrainer], object], error: type[Exception], message: str
) -> None:
    """Arguments of the constructor and of a call, and attributes, asked of the class too: the error names the
    replacement."""
    with pytest.raises(error, match=message):
        call(make_trainer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda net: Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), []),  # type: ignore[call-arg, arg-type]
            "Trainer takes without a name only model, got 3 arguments: write the names of .*, such as optimizer=",
        ),
        (
            lambda net: Trainer(max_epochs=3),  # type: ignore[call-arg]
            r"^Trainer needs model \(torch\.nn\.Module\), got only max_epochs$",
        ),
        (lambda net: Trainer(), r"^Trainer needs model \(torch\.nn\.Module\), got no argument$"),  # type: ignore[call-arg]
        (
            lambda net: EarlyStoppingHook(patience=3),  # type: ignore[call-arg]
            r"^EarlyStoppingHook needs monitor \(str\), got only patience$",
        ),
        (
            lambda net: Bus(3),  # type: ignore[call-arg]
            "^Bus takes without a name no argument, got 1 arguments: .* such as drain_timeout=",
        ),
        (
            lambda net: CheckpointHook(1, True),  # type: ignore[call-arg]
            "CheckpointHook takes without a name only interval, got 2 arguments: write the names of the others",
        ),
    ],
)
def test_arguments_without_a_name(make: Callable[[torch.nn.Module], object], message: str) -> None:
    """The error says which arguments need none, how to write the others, and which are missing."""
    with pytest.raises(TypeError, match=message):
        make(torch.nn.Linear(2, 1))


def from_config(**config: Any) -> object:
    """Build a hook or writer."""
    return build(config)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (
            CheckpointHook,
            {"monitor": "val_loss", "save_top_k": 3, "mode": "min"},
            r"no argument 'monitor': use save_best=.*\n  nor 'save_top_k': use keep_best=.*\n  nor 'mode': use rule=",
        ),
        (
            CheckpointHook,
            {"keep_bst": 2},
            "^CheckpointHook has no argument 'keep_bst': did you mean 'keep_best'",
        ),
        (EarlyStoppingHook, {"monitor": "x", "early_stopping_patience": 3}, "use patience="),
        (OptimizerHook, {"clip_grad": {}}, r"'clip_grad': use grad_clip=\.\.\., the same dict$"),
        (from_config, {"type": "CheckpointHook", "save_top_k": 3}, "'save_top_k': use keep_best="),
        (from_config, {"type": "EMAHook", "decay": 0.999}, "no argument 'decay': use momentum=.* 1 - decay"),
        (from_config, {"type": "LoggerHook", "intervall": 2}, "'intervall': did you mean 'interval'"),
        (from_config, {"type": "WandbLogger"}, "unknown type 'WandbLogger': use WandbWriter"),
        (from_config, {"type": "CometLogger"}, "unknown type 'CometLogger': use a Writer of your own"),
        (from_config, {"type": "ModelCheckpoint"}, r"unknown type 'ModelCheckpoint': use CheckpointHook\("),
        (from_config, {"type": "EvalHook"}, "unknown type 'EvalHook': use val_loader="),
    ],
)
def test_names_of_other_hooks_are_explained(
    make: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    """Arguments of a class or of a class that it is derived from, each on a line of its own, and types in a config."""
    with pytest.raises((TypeError, ValueError), match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("package", "name", "message"),
    [
        ("eventloop", "Runner", "Trainer from eventloop"),
        ("eventloop.hooks", "ModelCheckpoint", r"CheckpointHook\(interval=\.\.\., save_best=\.\.\.\)"),
        ("eventloop.writers", "WandbLogger", "WandbWriter"),
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


def test_a_trainer_has_none_of_these_attributes(make_trainer: MakeTrainer) -> None:
    """Neither for `hasattr` nor for a copy, and one that steers no run may be set."""
    trainer: Any = make_trainer()

    assert [name for name in ATTRIBUTES if hasattr(trainer, name) or hasattr(copy.copy(trainer), name)] == []
    trainer.logger = "mine"
    assert trainer.logger == "mine"
    with pytest.raises(AttributeError, match=r"^'Trainer' object has no attribute 'itre'"):
        trainer.itre  # noqa: B018


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("should_stop", r"trainer\.stop\(reason\)"),
        ("stop_training", r"trainer\.stop\(reason\)"),
        ("max_epoch", r"trainer\.max_epochs"),
        ("global_step", r"trainer\.iter"),
        ("lr", "the param_groups of trainer.optimizer"),
    ],
)
def test_setting_an_attribute_of_another_trainer_is_refused(
    make_trainer: MakeTrainer, name: str, meant: str
) -> None:
    """It would be a new attribute that nothing reads, so that the run would not stop."""
    with pytest.raises(AttributeError, match=f"^Trainer has no attribute '{name}': use {meant}"):
        setattr(make_trainer(), name, 1)


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
    name, _, method = owner.partition(".")
    places: list[object] = [hooks, writers, bus]
    found = next((getattr(place, name) for place in places if hasattr(place, name)), Trainer)
    parameters = set(inspect.signature(getattr(found, method) if method else found).parameters)
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
