"""List the subscribers of a config, such as MMEngine's, without building its model and data.

    default_hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1), timer=None)
    custom_hooks = [dict(type="EMAHook")]            # or hooks = [...]
    writers = [dict(type="JSONLWriter")]
    train_cfg = dict(by_epoch=True, max_epochs=12)   # or max_epochs = 12, max_iters = ...

Other names are ignored. In a Python file each name is a variable, in JSON, TOML or YAML a top-level key.
Python files with `_base_`, `custom_imports` or `read_base` are read by MMEngine. Other files are data, and
run no code.
"""

from __future__ import annotations

import importlib
import json
import re
import runpy
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from eventloop.bus.event_order import EventPlan, event_plans
from eventloop.util.checks import check_keys

DOCUMENTS = (".json", ".toml", ".yaml", ".yml")
SUBSCRIBERS = ("default_hooks", "custom_hooks", "hooks", "writers")
LENGTH = ("max_epochs", "max_iters", "val_interval", "val_begin", "dynamic_intervals")
"""The names of the length of the run and of its validations, at the top of a config or in `train_cfg`."""
NAMES = (*SUBSCRIBERS, "train_cfg", *LENGTH)
"""The names by which a config is recognised; all others are ignored."""
_MMENGINE = re.compile(rb"^(_base_|custom_imports)\s*=|^with read_base\(\)", re.MULTILINE)
_RUN_CODE = ("_base_", "custom_imports")
_EXPECTED = (ImportError, OSError, TypeError, ValueError)
"""The errors whose message is shown without their type, because it describes the fault by itself."""


class ConfigPlan(NamedTuple):
    """Hold the subscribers of each event of a config, and the length of its run."""

    plan: list[EventPlan]
    max_epochs: int | None
    max_iters: int | None


def is_config(path: Path) -> bool:
    """Return whether a file cannot be a script: it is JSON, TOML, YAML, or Python in MMEngine's syntax."""
    return path.suffix in DOCUMENTS or (path.suffix == ".py" and _is_mmengines(path))


def plan_config(path: Path) -> ConfigPlan:
    """Build the hooks and writers of a config, and return their subscriptions.

    It must be called in a dry run (`eventloop.processes.dry_run`), so that they start no threads.

    Raises:
        ImportError, OSError, TypeError, ValueError: the config is bad, or a hook or writer raises an error.
    """
    try:
        config = _read(path)
        _check_names(config, path)
        return _plan(config)
    except SystemExit as ended:
        raise ValueError(f"{path} ends the program or begins a run, so it is not a config") from ended
    except Exception as error:
        raise ValueError(_describe(error, path)) from error


def _describe(error: Exception, path: Path) -> str:
    """Return an error's message with the file's name, and with the error's type if the message is unclear."""
    text = str(error)
    if not text or not isinstance(error, _EXPECTED):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if text.startswith(str(path)) else f"{path}: {text}"


# --- reading -----------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    """Return the values of a config by name, from a Python file or a document."""
    if path.suffix == ".py":
        return _mmengines(path) if _is_mmengines(path) else runpy.run_path(str(path), run_name="config")
    values = _document(path)
    if not isinstance(values, dict):
        raise TypeError(f"{path} must be a mapping of names to values, got {type(values).__name__}")
    for name in _RUN_CODE:
        if values.get(name):
            raise ValueError(
                f"{path}: expected no {name} in a {path.suffix} file, which is data and runs no code, got "
                f"{values[name]!r}: write the config in Python"
            )
    return values


def _document(path: Path) -> Any:
    """Return the content of a JSON, TOML or YAML file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".toml":
        return tomllib.loads(text)
    try:
        return importlib.import_module("yaml").safe_load(text)
    except ImportError as error:
        raise ImportError(
            "expected PyYAML for a config in YAML: pip install pyyaml, or write TOML"
        ) from error


def _is_mmengines(path: Path) -> bool:
    return _MMENGINE.search(path.read_bytes()) is not None


def _mmengines(path: Path) -> dict[str, Any]:
    """Read a config and its base files with `mmengine.Config`."""
    try:
        config = importlib.import_module("mmengine.config")
    except ImportError as error:
        raise ImportError(
            "_base_, custom_imports and read_base are read by MMEngine, which is not installed: pip install "
            "mmengine, or import and assign the values in this file"
        ) from error
    values: dict[str, Any] = config.Config.fromfile(str(path)).to_dict()
    return values


# --- checking and building ---------------------------------------------------------------------------------


def _check_names(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a config that has none of `NAMES`, a misspelled one, or a value of the wrong type."""
    if not any(name in config for name in NAMES):
        raise ValueError(f"{path} is not a config: expected one of the names {', '.join(NAMES)}, got none")
    for name in config:
        similar = get_close_matches(name, NAMES, n=1, cutoff=0.8)
        if similar and name not in NAMES and similar[0] not in config:
            raise ValueError(f"{path} has a {name!r}, which is ignored: did you mean {similar[0]!r}?")
    for name in (n for n in ("default_hooks", "train_cfg") if n in config):
        if not isinstance(config[name], Mapping | None):
            raise TypeError(f"{path}: {name} must be a mapping, got {config[name]!r}")
    for name in (n for n in SUBSCRIBERS[1:] if n in config):
        if not isinstance(config[name], list | tuple | None):
            raise TypeError(f"{path}: {name} must be a list of configs dict(type=...), got {config[name]!r}")


def _plan(config: Mapping[str, Any]) -> ConfigPlan:
    """Build a trainer with the config's hooks and writers and a tiny model, and return its subscriptions."""
    import torch

    from eventloop.training.trainer import Trainer

    model = torch.nn.Linear(1, 1)  # stands for the user's model, and the optimizer below for the user's
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        val_loader=[()],
        test_loader=[()],
        default_hooks=config.get("default_hooks") or {},
        custom_hooks=config.get("custom_hooks") or [],
        hooks=config.get("hooks") or [],
        writers=config.get("writers"),
        **_length(config),
    )
    return ConfigPlan(event_plans(trainer.bus.plan), trainer.max_epochs, trainer.max_iters)


def _length(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Trainer` for the length of the run (by default one epoch) and validations."""
    train_cfg = {key: value for key, value in (config.get("train_cfg") or {}).items() if key != "type"}
    by_epoch = train_cfg.pop("by_epoch", None)
    check_keys("train_cfg", train_cfg, [*LENGTH, "by_epoch", "type"])
    length = {**{key: config[key] for key in LENGTH if key in config}, **train_cfg}
    if by_epoch is not None and ("max_iters" if by_epoch else "max_epochs") in length:
        given = "max_iters" if by_epoch else "max_epochs"
        raise ValueError(f"train_cfg has by_epoch={by_epoch} and {given}: leave by_epoch out")
    if length.get("max_epochs") is None and length.get("max_iters") is None:
        length["max_iters" if by_epoch is False else "max_epochs"] = 1
    return length
