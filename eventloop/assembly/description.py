"""Describe a training for `run.json`, the report and experiment trackers: options, model and versions."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from eventloop._version import __version__
from eventloop.assembly.hook_owner import given_arguments
from eventloop.checkpoint.weights import unwrap
from eventloop.description.plain_values import plain_value
from eventloop.description.record import Begin, RunRecord
from eventloop.optim.optimizers import named_optimizers
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.settings import Settings
from eventloop.util.functions import handler_name


def check_config(config: object) -> dict[str, Any]:
    """Return the argument `config` of the trainer, converted to values that JSON has; {} for None.

    Raises:
        TypeError: `config` is no mapping, or a name in it is no text.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise TypeError(
            "config must be a mapping of names to settings, such as vars(args) or a dict, got "
            f"{type(config).__name__}"
        )
    for key in config:
        if not isinstance(key, str):
            raise TypeError(f"the names in config must be a str, got {key!r} ({type(key).__name__})")
    plain: dict[str, Any] = plain_value(config)
    return plain


def record_begin(trainer: ResumableTrainer, settings: Settings, *, trains: bool) -> Begin | None:
    """Record the settings of a run that begins now; return its time, iteration and host if it trains."""
    settings.record_begin()
    if not trains:
        return None
    return Begin(time=time.time(), iter=trainer.iter, host=socket.gethostname())


def describe(trainer: ResumableTrainer, settings: Settings, begin: Begin) -> RunRecord:
    """Return the model, machine, versions and options of a training, without reading a tensor's values.

    The loop over the parameters takes milliseconds for thousands of them, so the heartbeat's thread calls
    this function.
    """
    known = [p for p in trainer.model.parameters() if not is_lazy(p)]
    device = trainer.device or next((p.device for p in known), torch.device("cpu"))
    return RunRecord(
        begins=[begin],
        model=type(unwrap(trainer.model)).__name__,
        parameters=sum(p.numel() for p in known),
        trainable=sum(p.numel() for p in known if p.requires_grad),
        device=str(device),
        ranks=trainer.world_size,
        python=platform.python_version(),
        torch=str(torch.__version__),
        eventloop=__version__,
        config=trainer.config,
        options=options_of(trainer, settings),
    )


def options_of(trainer: ResumableTrainer, of_checkpoints: Settings) -> dict[str, Any]:
    """Return the settings of the trainer, its optimizers, its schedulers and its hooks.

    They are the settings that checkpoints have, the arguments with which the hooks were constructed, and
    those arguments of the trainer that are neither.
    """
    settings = of_checkpoints.state_dict()
    length = "max_epochs" if trainer.by_epoch else "max_iters"
    own = {length: getattr(trainer, length), "limit_batches": trainer.limits.given, **settings["run"]}
    own |= _arguments(trainer)
    schedulers = [
        {"type": type(scheduler).__name__, **_public(state)}
        for scheduler, state in zip(trainer.schedulers, settings["param_schedulers"], strict=False)
    ]
    hooks = {
        hook.name: {
            "type": type(hook).__name__,
            **given_arguments(hook),
            **settings["hook_options"].get(hook.name, {}),
        }
        for hook in trainer.hooks
    }
    options = {
        "trainer": {name: value for name, value in own.items() if value is not None},
        "optimizer": _optimizers(trainer.optimizer, settings["optimizer"]),
        "schedulers": schedulers,
        "hooks": hooks,
    }
    plain: dict[str, Any] = plain_value({name: value for name, value in options.items() if value})
    return plain


def _arguments(trainer: ResumableTrainer) -> dict[str, Any]:
    """Return arguments of the trainer that a resume does not compare; None for one that has its default.

    Functions, metrics and writers are named. The arguments of writers, which may be secret, are left out.
    """
    return {
        "val_before_train": trainer.schedule.before_train or None,
        "sanity_val": trainer.monitored.sanity_val,
        "fast_dev_run": trainer.fast_dev_run or None,
        "device": None if trainer.device is None else str(trainer.device),
        "compile": _named(trainer.compile_options),
        "loss_fn": _named(trainer.loss_fn),
        "evaluator": _named(trainer.evaluator) or None,
        "writers": [type(writer).__name__ for writer in trainer.writers] or None,
    }


def _named(value: Any) -> Any:
    """Return a value with names in place of functions and of objects that can be called, in mappings too."""
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items()}
    return handler_name(value) if callable(value) else value


def _optimizers(given: Any, groups: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the class and the settings of an optimizer, or those of several optimizers by name.

    Args:
        given: the trainer's optimizer, or its optimizers by name.
        groups: the settings of the param groups, by the optimizer's name.
    """
    by_name = {}
    for name, optimizer in named_optimizers(given).items():
        of_groups = groups.get(name, [])
        settings = of_groups[0] if len(of_groups) == 1 else {"param_groups": of_groups}
        by_name[name] = {"type": type(optimizer).__name__, **settings}
    return by_name[""] if [*by_name] == [""] else by_name


def _public(state: Any) -> dict[str, Any]:
    """Return the arguments in a scheduler's state; the names of other values begin with `_`."""
    return {key: value for key, value in state.items() if not str(key).startswith("_")}
