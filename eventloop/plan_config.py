"""A config of MMEngine's shape, and who would hear what in its run; neither model nor data are needed.

    default_hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1), timer=None)
    custom_hooks = [dict(type="EMAHook")]            # or hooks = [...]
    writers = [dict(type="JSONLWriter")]
    train_cfg = dict(by_epoch=True, max_epochs=12)   # or max_epochs = 12, max_iters = ...

`_base_` names files whose values it adds to, `custom_imports` modules that register classes. Other names are not
looked at. In Python each is a variable of the module, elsewhere a key of the document.
"""

from __future__ import annotations

import ast
import importlib
import json
import runpy
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from eventloop.catalogue import suggest
from eventloop.outline import EventPlan, outline
from eventloop.rehearsal import Rehearsal

DOCUMENTS = (".json", ".toml", ".yaml", ".yml")
SUBSCRIBERS = ("default_hooks", "custom_hooks", "hooks", "writers")
LENGTH = ("max_epochs", "max_iters", "val_interval", "val_begin", "dynamic_intervals")
NAMES = (*SUBSCRIBERS, "train_cfg", *LENGTH)
"""What a config is told by, and all that is looked at."""
_HARMLESS = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete, ast.Pass)
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class ConfigPlan(NamedTuple):
    """Who would hear what, and how long the run is."""

    plan: list[EventPlan]
    max_epochs: int | None
    max_iters: int | None


def is_config(path: Path) -> bool:
    """True for a document, and for a Python file that assigns one of `NAMES` and does nothing besides importing,
    assigning and defining; False for one that does not parse, whose error Python shows best.

    Raises:
        ValueError: neither Python nor a document.
        OSError: it cannot be read.
    """
    if path.suffix in DOCUMENTS:
        return True
    if path.suffix != ".py":
        known = ", ".join(DOCUMENTS)
        raise ValueError(f"{path} is neither a Python file nor a config ({known})")
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return False
    return all(map(_is_harmless, body)) and any(name in NAMES for node in body for name in _assigned(node))


def _is_harmless(node: ast.stmt) -> bool:
    if isinstance(node, ast.With):  # mmengine's `with read_base():`
        return all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in node.body)
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or isinstance(node, (*_HARMLESS, *_DEFINES))


def _assigned(node: ast.stmt) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id


def plan_config(path: Path) -> ConfigPlan:
    """Build the hooks and writers of a config, and say who hears what.

    Raises:
        ImportError, OSError, TypeError, ValueError: see the message; those of hooks and writers are their own.
    """
    with _importing_beside(path):
        config = read_config(path)
        _check_names(config, path)
        _custom_imports(config)
        return _plan(config)


# --- reading -----------------------------------------------------------------------------------------------


def read_config(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a config, with those of its `_base_` files, which its own are merged into.

    Args:
        above: the files that it is a base of.

    Raises:
        FileNotFoundError, TypeError, ValueError, ImportError: it, or a base, is not there, or cannot be read.
    """
    if path.resolve() in above:
        raise ValueError(f"{path} is, by way of _base_, a base of itself")
    values = _load(path)
    base = values.pop("_base_", [])
    merged: dict[str, Any] = {}
    for name in [base] if isinstance(base, str) else base:
        merged = _merged(merged, read_config(path.parent / name, (*above, path.resolve())))
    return _merged(merged, values)


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no config at {path}")
    try:
        values = _parse(path)
    except ImportError as error:
        raise ImportError(f"{path}: {error}") from error
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(values, dict):
        raise TypeError(f"{path} must be a mapping of names to values, got {type(values).__name__}")
    return values


def _parse(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".toml":
        return tomllib.loads(path.read_text(encoding="utf-8"))
    if path.suffix in (".yaml", ".yml"):
        return _yaml().safe_load(path.read_text(encoding="utf-8"))
    names = runpy.run_path(str(path), run_name="config")
    return {name: value for name, value in names.items() if name == "_base_" or not name.startswith("_")}


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise ImportError(
            "a config in YAML needs PyYAML: pip install pyyaml, or write TOML or JSON"
        ) from error


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """MMEngine's rule: mappings are merged, unless one says `_delete_=True`; anything else replaces."""
    result = dict(base)
    for key, value in own.items():
        if isinstance(value, Mapping) and isinstance(former := base.get(key), Mapping):
            kept = {} if value.get("_delete_") else former
            result[key] = _merged(kept, {k: v for k, v in value.items() if k != "_delete_"})
        else:
            result[key] = value
    return result


@contextmanager
def _importing_beside(path: Path) -> Iterator[None]:
    """Have modules found in the working directory and beside the config, and leave no bytecode there."""
    places, bytecode = [str(Path.cwd()), str(path.resolve().parent)], sys.dont_write_bytecode
    sys.path[:0] = places
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        for place in places:
            if place in sys.path:
                sys.path.remove(place)


def _custom_imports(config: Mapping[str, Any]) -> None:
    """Import the modules that register classes, as MMEngine does."""
    wanted = config.get("custom_imports") or {}
    names = wanted.get("imports", []) if isinstance(wanted, Mapping) else wanted
    for name in [names] if isinstance(names, str) else names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if not (isinstance(wanted, Mapping) and wanted.get("allow_failed_imports")):
                raise ImportError(f"custom_imports: {name} cannot be imported: {error}") from error


# --- checking and building ---------------------------------------------------------------------------------


def _check_names(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a config of something else, and a name that is nearly one of `NAMES`; others may be the user's own."""
    if not any(name in config for name in NAMES):
        raise ValueError(f"{path} has none of {', '.join(NAMES)}: it is no config that can be planned by")
    for name in config:
        near = get_close_matches(name, NAMES, n=1, cutoff=0.8)
        if near and name not in NAMES and near[0] not in config:
            raise ValueError(f"{path} has a {name!r}, which nothing reads: did you mean {near[0]!r}?")
    for name in (n for n in ("default_hooks", "train_cfg") if n in config):
        if not isinstance(config[name], Mapping | None):
            raise TypeError(f"{name} must be a mapping, got {config[name]!r}")
    for name in (n for n in SUBSCRIBERS[1:] if n in config):
        if not isinstance(config[name], list | tuple | None):
            raise TypeError(f"{name} must be a list of configs dict(type=...), got {config[name]!r}")


def _plan(config: Mapping[str, Any]) -> ConfigPlan:
    import torch

    from eventloop.trainer import Trainer

    model = torch.nn.Linear(1, 1)  # stands for any model, as the optimizer for any
    with Rehearsal(), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            val_loader=[()],
            test_loader=[()],
            default_hooks=config.get("default_hooks") or {},
            custom_hooks=config.get("custom_hooks") or [],
            hooks=config.get("hooks") or [],
            writers=config.get("writers") or [],
            work_dir=folder,
            **_length(config),
        )
        return ConfigPlan(outline(trainer.bus), trainer.max_epochs, trainer.max_iters)


def _length(config: Mapping[str, Any]) -> dict[str, Any]:
    """The length of the run, and when it validates; a config that does not say is measured in epochs."""
    train_cfg = {key: value for key, value in (config.get("train_cfg") or {}).items() if key != "type"}
    by_epoch = train_cfg.pop("by_epoch", None)
    for key in train_cfg:
        if key not in LENGTH:
            raise ValueError(f"train_cfg has a {key!r}{suggest(key, [*LENGTH, 'by_epoch', 'type'])}")
    length = {**{key: config[key] for key in LENGTH if key in config}, **train_cfg}
    if by_epoch is not None and ("max_iters" if by_epoch else "max_epochs") in length:
        given = "max_iters" if by_epoch else "max_epochs"
        raise ValueError(f"train_cfg says by_epoch={by_epoch}, and gives {given}: leave by_epoch out")
    if length.get("max_epochs") is None and length.get("max_iters") is None:
        length["max_iters" if by_epoch is False else "max_epochs"] = 1
    return length
