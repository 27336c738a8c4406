"""Plan the run of a config of MMEngine's shape; neither the model nor the data are needed.

    default_hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1), timer=None)
    custom_hooks = [dict(type="EMAHook")]            # or hooks = [...]
    writers = [dict(type="JSONLWriter")]
    train_cfg = dict(by_epoch=True, max_epochs=12)   # or max_epochs = 12, max_iters = ...

`_base_` names files whose values it adds to, `custom_imports` modules that register classes. Other names are
ignored. In Python each is a variable of the module, elsewhere a key of the document. A Python file is read
within a rehearsal, because it may be a training script that only assigns. A document is data: unless it is
trusted it imports nothing, and modules in its folder are not found.
"""

from __future__ import annotations

import ast
import importlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from eventloop.bus import Bus
from eventloop.bus.dry_run import Rehearsal, RunReached
from eventloop.bus.event_order import EventPlan, event_plans
from eventloop.cli.plan_reader import DOCUMENTS, BaseIsScript, describe, read_config
from eventloop.cli.plan_script import RehearsalResult, as_script, exit_code, result_of, stdout_to_stderr
from eventloop.util.suggest import suggest

SUBSCRIBERS = ("default_hooks", "custom_hooks", "hooks", "writers")
LENGTH = ("max_epochs", "max_iters", "val_interval", "val_begin", "dynamic_intervals")
NAMES = (*SUBSCRIBERS, "train_cfg", *LENGTH)
"""The names by which a config is recognised; all others are ignored."""
_IMPORTS = ("imports", "allow_failed_imports")
_HARMLESS = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete, ast.Pass)
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class ConfigPlan(NamedTuple):
    """The subscribers of each event of a config, and the length of its run."""

    plan: list[EventPlan]
    max_epochs: int | None
    max_iters: int | None


def is_config(path: Path) -> bool:
    """Return whether a file is a config: a document, or a Python file that assigns one of `NAMES`.

    Such a Python file does nothing but import, assign and define, as far as can be seen without running it:
    `result = trainer.train()` assigns too. A file with a syntax error is not a config, because Python shows
    the error best.

    Raises:
        ValueError: the file is neither Python nor a document.
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


def plan_config(
    path: Path, arguments: Sequence[str] = (), *, quiet: bool = False, trust: bool = False
) -> ConfigPlan | RehearsalResult:
    """Build the hooks and writers of a config, and return its plan.

    A script that looks like a config gives the result of its rehearsal: it begins a run, makes a trainer or a
    bus, or ends itself.

    Args:
        arguments: those of the script.
        quiet: redirect printed text to standard error.
        trust: let a document import modules and use any file as `_base_`, Python files too.

    Raises:
        ImportError, OSError, TypeError, ValueError: the config is bad, or a hook or writer raises an error,
            which is reported with the line of the user's code.
    """
    runs_code = trust or path.suffix not in DOCUMENTS
    finding = as_script(path, arguments, str(Path.cwd())) if runs_code else nullcontext()
    with finding, stdout_to_stderr(quiet):
        config = _read(path, trust=trust)
        if isinstance(config, RehearsalResult):
            return config
        if arguments:
            raise ValueError(f"{path} is a config, which takes no arguments, got {' '.join(arguments)}")
        _check_names(config, path)
        return _build(config, path)


# --- reading -----------------------------------------------------------------------------------------------


def _read(path: Path, *, trust: bool) -> dict[str, Any] | RehearsalResult:
    """Return the values of a config, or the result of a script, which is not run a second time."""
    rehearsal, code = Rehearsal(), 0
    config: dict[str, Any] | None = None
    try:
        with rehearsal:
            config = read_config(path, trust=trust)
    except RunReached:
        pass
    except SystemExit as ended:
        code = exit_code(ended)
    except Exception as error:
        if rehearsal.reached is None or isinstance(error, BaseIsScript):
            raise
    finally:
        left = rehearsal.remove_directories()
    if config is None or rehearsal.reached is not None or _has_a_bus(config):
        return result_of(rehearsal, code, left)
    return config


def _has_a_bus(values: Mapping[str, Any]) -> bool:
    from eventloop.training.trainer import Trainer

    return any(isinstance(value, Bus | Trainer) for value in values.values())


def _custom_imports(wanted: Any, path: Path) -> None:
    """Import the modules that register classes, as MMEngine does."""
    options = wanted if isinstance(wanted, Mapping) else {"imports": wanted}
    for key in options:
        if key not in _IMPORTS:
            raise ValueError(f"{path}: custom_imports has no key {key!r}{suggest(str(key), [*_IMPORTS])}")
    given = options.get("imports")
    names = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            f"{path}: custom_imports must be the name of a module, a list of names, or dict(imports=[...]), "
            f"got {wanted!r}"
        )
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            if not (isinstance(error, ImportError) and options.get("allow_failed_imports")):
                raise ImportError(
                    f"{path}: custom_imports: {name} cannot be imported: {describe(error)}"
                ) from error


# --- checking and building ---------------------------------------------------------------------------------


def _check_names(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a config without any of `NAMES`, or with a name that is nearly one of them."""
    if not any(name in config for name in NAMES):
        raise ValueError(f"{path} is not a config: expected one of the names {', '.join(NAMES)}, got none")
    for name in config:
        near = get_close_matches(name, NAMES, n=1, cutoff=0.8)
        if near and name not in NAMES and near[0] not in config:
            raise ValueError(f"{path} has a {name!r}, which is ignored: did you mean {near[0]!r}?")
    for name in (n for n in ("default_hooks", "train_cfg") if n in config):
        if not isinstance(config[name], Mapping | None):
            raise TypeError(f"{path}: {name} must be a mapping, got {config[name]!r}")
    for name in (n for n in SUBSCRIBERS[1:] if n in config):
        if not isinstance(config[name], list | tuple | None):
            raise TypeError(f"{path}: {name} must be a list of configs dict(type=...), got {config[name]!r}")


def _build(config: Mapping[str, Any], path: Path) -> ConfigPlan:
    """Build the hooks and writers, and describe an error of theirs in a line."""
    rehearsal = Rehearsal()
    try:
        with rehearsal:
            _custom_imports(config.get("custom_imports"), path)
            return _plan(config)
    except SystemExit as ended:
        at = f" at {rehearsal.reached.where}" if rehearsal.reached is not None else ""
        what = f"would begin a run{at}" if isinstance(ended, RunReached) else "ends the program"
        raise ValueError(f"{path}: building its hooks and writers {what}, so there is no plan") from ended
    except Exception as error:
        text = describe(error)
        if text == str(error):
            raise
        raise ValueError(f"{path}: {text}") from error
    finally:
        rehearsal.remove_directories()


def _plan(config: Mapping[str, Any]) -> ConfigPlan:
    import torch

    from eventloop.training.trainer import Trainer

    model = torch.nn.Linear(1, 1)  # in place of the user's model; the optimizer likewise
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            val_loader=[()],
            test_loader=[()],
            default_hooks=config.get("default_hooks") or {},
            custom_hooks=config.get("custom_hooks") or [],
            hooks=config.get("hooks") or [],
            writers=config.get("writers"),
            work_dir=folder,
            **_length(config),
        )
        return ConfigPlan(event_plans(trainer.bus.plan), trainer.max_epochs, trainer.max_iters)


def _length(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the length of the run and the schedule of its validations; without a length it is one epoch."""
    train_cfg = {key: value for key, value in (config.get("train_cfg") or {}).items() if key != "type"}
    by_epoch = train_cfg.pop("by_epoch", None)
    for key in train_cfg:
        if key not in LENGTH:
            raise ValueError(f"train_cfg has no key {key!r}{suggest(key, [*LENGTH, 'by_epoch', 'type'])}")
    length = {**{key: config[key] for key in LENGTH if key in config}, **train_cfg}
    if by_epoch is not None and ("max_iters" if by_epoch else "max_epochs") in length:
        given = "max_iters" if by_epoch else "max_epochs"
        raise ValueError(f"train_cfg has by_epoch={by_epoch} and {given}: leave by_epoch out")
    if length.get("max_epochs") is None and length.get("max_iters") is None:
        length["max_iters" if by_epoch is False else "max_epochs"] = 1
    return length
