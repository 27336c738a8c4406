"""Names of other systems: the errors that say what does that here, and that it is there."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

import eventloop
from eventloop import Trainer, hooks, writers
from eventloop.hooks import (
    AmpOptimizerHook,
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    GradientCumulativeOptimizerHook,
    IterationTimer,
    LoggerHook,
    OptimizerHook,
    PeriodicWriter,
    PreciseBN,
)
from eventloop.migration.names import ARGUMENTS, CLASSES, OF_CLASSES

MakeTrainer = Callable[..., Trainer]

SAID = [*CLASSES.values(), *(here for arguments in ARGUMENTS.values() for here in arguments.values())]
PARAMETERS = set(inspect.signature(Trainer).parameters)
OF_HOOKS = [name for name in OF_CLASSES if name != "Trainer"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"launcher": "pytorch"}, "instead of MMEngine's use torchrun"),
        (
            {"optimizer_config": {}},
            r"instead of mmcv's use default_hooks=dict\(optimizer=dict\(grad_clip=dict\(max_norm=",
        ),
        ({"workflow": []}, r"instead of mmcv's use trainer\.run\("),
        (
            {"accumulate_grad_batches": 4},
            r"instead of Lightning's use hooks=\[GradientCumulativeOptimizerHook\(",
        ),
        ({"limit_val_batches": 2}, r"instead of Lightning's use a loader of torch\.utils\.data\.Subset\("),
        ({"callbacks": []}, r"instead of Lightning's use hooks=\[\.\.\.\]"),
        ({"ckpt_path": "last"}, r'instead of Lightning\'s use trainer\.resume\("auto"\)'),
    ],
)
def test_an_argument_of_another_system_is_explained(
    make_trainer: MakeTrainer, arguments: dict[str, Any], message: str
) -> None:
    """The error names the system, and what does that here."""
    with pytest.raises(TypeError, match=f"^Trainer has no argument '{next(iter(arguments))}': {message}"):
        make_trainer(**arguments)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("CSVLogger", "CSVWriter$"),
        ("SummaryWriter", "TensorBoardWriter$"),
        ("WandbLogger", "a Writer of your own"),
    ],
)
def test_a_logger_is_a_writer(make_trainer: MakeTrainer, name: str, here: str) -> None:
    """Its name is near that of something else, which is not suggested."""
    with pytest.raises(ValueError, match=f"unknown type '{name}': use {here}"):
        make_trainer(writers=[{"type": name}])


def test_what_is_suggested_is_there() -> None:
    """Classes of hooks and writers, and arguments of the trainer."""
    classes = set(re.findall(r"\b[A-Z]\w+(?:Hook|Writer)\b", " ".join(SAID)))
    arguments = {found[1] for text in SAID if (found := re.match(r"(\w+)=", text))}

    assert [name for name in classes if not hasattr(hooks, name) and not hasattr(writers, name)] == []
    assert arguments - PARAMETERS == set()
    assert {name for known in ARGUMENTS.values() for name in known} & PARAMETERS == set()


@pytest.mark.parametrize(
    "arguments",
    [
        {"default_hooks": {"optimizer": {"grad_clip": {"max_norm": 1.0}}}},
        {"default_hooks": {"optimizer": {"grad_clip": {"type": "value", "clip_value": 1.0}}}},
        {"default_hooks": {"optimizer": {"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 2}}},
        {"default_hooks": {"logger": {"interval": 2}}},
        {"hooks": [GradientCumulativeOptimizerHook(cumulative_iters=2)]},
        {"hooks": [AmpOptimizerHook(dtype="bfloat16")]},
    ],
    ids=["norm", "value", "type", "logger", "accumulate", "precision"],
)
def test_what_is_suggested_builds(make_trainer: MakeTrainer, arguments: dict[str, Any]) -> None:
    """As it is written in the error, with values for the dots."""
    make_trainer(**arguments)


@pytest.mark.parametrize(
    ("hook", "arguments", "said"),
    [
        (
            CheckpointHook,
            {"monitor": "val_loss", "save_top_k": 3, "mode": "min"},
            (
                r"CheckpointHook has no argument 'monitor': instead of Lightning's use save_best=\"\.\.\.\", the metric\n"
                r"  nor 'save_top_k': instead of Lightning's use keep_best=.*\n"
                r"  nor 'mode': instead of Lightning's use rule=\"less\""
            ),
        ),
        (CheckpointHook, {"n_saved": 2}, r"'n_saved': instead of ignite's use keep_best="),
        (
            CheckpointHook,
            {"backend_args": None},
            "'backend_args': instead of MMEngine's use no argument: out_dir is",
        ),
        (
            CheckpointHook,
            {"keep_bst": 2},
            "^CheckpointHook has no argument 'keep_bst': did you mean 'keep_best'",
        ),
        (
            EarlyStoppingHook,
            {"monitor": "loss", "mode": "min"},
            "'mode': instead of Lightning's use rule=\"less\"",
        ),
        (
            EarlyStoppingHook,
            {"monitor": "loss", "verbose": True},
            r"'verbose': instead of Lightning's use writers=\[ConsoleWriter\(\)\] of the Trainer",
        ),
        (
            OptimizerHook,
            {"clip_grad": {}},
            r"'clip_grad': instead of MMEngine's use grad_clip=\.\.\., the same dict$",
        ),
        (OptimizerHook, {"max_norm": 1.0}, r"'max_norm': instead of PyTorch's use grad_clip=dict\(max_norm="),
        (
            PeriodicWriter,
            {"max_iter": 100, "display_iter": 20},
            r"'max_iter': instead of Pet's use no argument: .*\n  nor 'display_iter': instead of Pet's use period=\.\.\., and by_epoch",
        ),
        (
            IterationTimer,
            {"max_iter": 100, "start_iter": 0},
            r"'max_iter': instead of Pet's use no argument: .*\n  nor 'start_iter': instead of Pet's use no argument",
        ),
        (PreciseBN, {"period": 100}, r"'period': instead of detectron2's use interval=\.\.\.$"),
        (PreciseBN, {"precise_bn_args": []}, r"'precise_bn_args': instead of Pet's use data_loader=\.\.\.;"),
        (
            LoggerHook,
            {"log_every_n_steps": 50},
            r"'log_every_n_steps': instead of Lightning's use interval=\.\.\.$",
        ),
        (
            EarlyStoppingHook,
            {"cumulative_delta": True},
            "'cumulative_delta': instead of ignite's use no argument: min_delta",
        ),
    ],
)
def test_arguments_of_a_hook_are_explained(
    hook: Callable[..., object], arguments: dict[str, Any], said: str
) -> None:
    """Each that it does not have, on a line of its own: whose it is, and what does that here."""
    with pytest.raises(TypeError, match=said):
        hook(**arguments)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"default_hooks": {"checkpoint": {"save_top_k": 3}}},
            r"CheckpointHook has no argument 'save_top_k': instead of Lightning's use keep_best=",
        ),
        (
            {"hooks": [{"type": "EarlyStoppingHook", "monitor": "loss", "mode": "min"}]},
            "EarlyStoppingHook has no argument 'mode': instead of Lightning's use rule=",
        ),
        (
            {"hooks": [{"type": "AmpOptimizerHook", "gradient_clip_val": 1.0}]},
            r"AmpOptimizerHook has no argument 'gradient_clip_val': instead of Lightning's use grad_clip=dict\(max_norm",
        ),
        (
            {"hooks": [{"type": "EMAHook", "decay": 0.999}]},
            "ExponentialMovingAverage has no argument 'decay': instead of Lightning's use momentum=.* 1 - decay",
        ),
        (
            {"default_hooks": {"logger": {"intervall": 2}}},
            "LoggerHook has no argument 'intervall': did you mean 'interval'",
        ),
    ],
)
def test_arguments_in_a_config_are_explained(
    make_trainer: MakeTrainer, options: dict[str, Any], said: str
) -> None:
    """As where the hook is built; those that a class is derived from are asked too."""
    with pytest.raises(ValueError, match=said):
        make_trainer(**options)


@pytest.mark.parametrize("owner", OF_HOOKS)
def test_arguments_that_are_suggested_are_there(owner: str) -> None:
    """Each is one of the hook's, or its line says whose it is; what is explained is none of them."""
    parameters = set(inspect.signature(getattr(hooks, owner)).parameters)
    if owner == "BaseAveragedModel":  # whose arguments go through the hook's
        parameters |= set(inspect.signature(hooks.MomentumAnnealingEMA).parameters)
        parameters |= set(inspect.signature(EMAHook).parameters)
    of_trainer = {"work_dir", "val_interval", "val_begin", "max_epochs", "writers", "hooks", "schedulers"}

    for arguments in OF_CLASSES[owner].values():
        assert not set(arguments) & parameters
        for here in arguments.values():
            if (named := re.match(r"(\w+)=", here)) and named[1] not in parameters:
                assert named[1] in of_trainer & PARAMETERS, here
                assert "of the Trainer" in here


@pytest.mark.parametrize(
    ("statement", "here"),
    [
        (
            "from eventloop.hooks import ModelCheckpoint",
            r"CheckpointHook\(interval=\.\.\., save_best=\.\.\.\)",
        ),
        (
            "from eventloop.hooks import CheckpointHook, EarlyStopping",
            r"EarlyStoppingHook\(monitor=\"\.\.\.\"\)",
        ),
        ("from eventloop.writers import WandbLogger", "a Writer of your own"),
        ("from eventloop.hooks import TrainHook", "Hook from eventloop.hooks"),
        ("from eventloop.hooks import HookBase", "Hook from eventloop.hooks"),
        ("from eventloop.writers import EventWriter", "Writer from eventloop.writers"),
        ("from eventloop import Runner", "Trainer from eventloop"),
        ("from eventloop import MessageHub", r"trainer\.metrics for numbers, and trainer\.bus\.latest"),
        ("from eventloop import get_hooks_info", r"print\(trainer\.bus\)"),
        ("from eventloop import build_hooks", r"hooks=\[\.\.\.\] of the Trainer"),
        ("from eventloop import build_writers", r"writers=\[\.\.\.\] of the Trainer"),
        ("from eventloop.hooks import PrepareTTAHook", r"val_step=\.\.\. of the Trainer"),
    ],
)
def test_an_import_is_explained(statement: str, here: str) -> None:
    """Of another system's name: the statement's own error says what does that here."""
    name = statement.rpartition(" ")[2]
    with pytest.raises(ImportError, match=f"^cannot import name '{name}': use {here}"):
        exec(statement)


def test_an_import_of_any_other_name_is_pythons() -> None:
    """A misspelled name has Python's message, with the file."""
    with pytest.raises(ImportError, match=r"cannot import name 'Checkpoints' from 'eventloop.hooks' \("):
        exec("from eventloop.hooks import Checkpoints")


def test_eventloop_itself_has_none_of_them() -> None:
    """`hasattr` says so, and any other name has Python's message."""
    assert not hasattr(eventloop, "Runner")
    with pytest.raises(AttributeError, match=r"^module 'eventloop' has no attribute 'nonsense'$"):
        _ = eventloop.nonsense
    with pytest.raises(ImportError, match=r"cannot import name 'Trainr' from 'eventloop' \("):
        exec("from eventloop import Trainr")


@pytest.mark.parametrize("package", ["eventloop.hooks", "eventloop.writers"])
def test_an_absent_name_is_absent(package: str) -> None:
    """To `hasattr`, to `getattr` with a default, to `import *` and to pickle it is one that is not there."""
    module = importlib.import_module(package)

    assert not hasattr(module, "ModelCheckpoint")
    assert getattr(module, "WandbLogger", None) is None
    with pytest.raises(AttributeError, match=rf"^module '{package}' has no attribute 'ModelCheckpoint': use"):
        _ = module.ModelCheckpoint
    with pytest.raises(AttributeError, match=rf"^module '{package}' has no attribute 'nonsense'$"):
        _ = module.nonsense
    there: dict[str, object] = {}
    exec(f"from {package} import *", there)
    assert {*module.__all__} <= {*there}
    for name in module.__all__:
        assert pickle.loads(pickle.dumps(getattr(module, name))) is getattr(module, name)
