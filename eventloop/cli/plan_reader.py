"""Read a config of MMEngine's shape with its `_base_` files, and describe an error of one in a line.

`plan_config` uses it. JSON, TOML and YAML files are data: they run no code unless they are trusted.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eventloop.bus.dry_run import PACKAGE, RunReached

DOCUMENTS = (".json", ".toml", ".yaml", ".yml")
_EXPECTED = (ImportError, OSError, TypeError, ValueError)
"""Errors whose message says what is wrong with the input; that of another error needs its type."""
_INSTALLED = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class BaseIsScript(ValueError):
    """A base file of a config begins a run, or ends the program."""


def read_config(
    path: Path, above: tuple[Path, ...] = (), *, trust: bool = False, folder: Path | None = None
) -> dict[str, Any]:
    """Return the values of a config, merged into those of its `_base_` files.

    Args:
        above: the files that it is a base of.
        trust: let documents import modules, and be based on Python files and on files outside of `folder`.
        folder: the resolved folder of the first config: the bases of documents lie there or below.

    Raises:
        FileNotFoundError, TypeError, ValueError, ImportError: the config or a base does not exist, or cannot
            be read; a document asks for code without `trust`.
        SystemExit: the config ends the program; `RunReached` if it begins a run during a rehearsal.
    """
    if path.resolve() in above:
        raise ValueError(f"{path} is a base of itself, by way of _base_: remove it from _base_")
    values = _load(path)
    bases = _bases(values.pop("_base_", None), path)
    here = path.parent.resolve()
    if folder is None or not here.is_relative_to(folder):  # a Python file may name bases anywhere
        folder = here
    if path.suffix in DOCUMENTS and not trust:
        _refuse_code(values.get("custom_imports"), bases, path, folder)
    merged: dict[str, Any] = {}
    for name in bases:
        merged = _merged(merged, _read_base(path.parent / name, (*above, path.resolve()), trust, folder))
    return _merged(merged, values)


def _refuse_code(imports: Any, bases: Sequence[str | os.PathLike[str]], path: Path, folder: Path) -> None:
    """Refuse a document that would import a module, run a Python file or read a file elsewhere.

    A document is data, which a user inspects before trusting it.

    Raises:
        ValueError: naming the module or the file.
    """
    if isinstance(imports, Mapping):
        imports = imports.get("imports")
    if imports:
        raise ValueError(
            f"{path}: custom_imports names {imports!r}, whose code would run: expected none in a "
            f"{path.suffix} file, which is data; --trust imports it"
        )
    for name in bases:
        base = path.parent / name
        inside = not Path(name).is_absolute() and base.resolve().is_relative_to(folder)
        if not inside or base.suffix not in DOCUMENTS:
            raise ValueError(
                f"{path}: _base_ names {os.fspath(name)!r}: expected the relative path of a file in {folder} "
                f"with the suffix {', '.join(DOCUMENTS)}, because a {path.suffix} file is data; --trust "
                "reads it"
            )


def _bases(given: Any, path: Path) -> list[str | os.PathLike[str]]:
    bases = [] if given is None else [given] if isinstance(given, str | os.PathLike) else given
    if isinstance(bases, list | tuple) and all(isinstance(base, str | os.PathLike) for base in bases):
        return list(bases)
    raise TypeError(f"{path}: _base_ must be the path of a config, or a list of paths, got {given!r}")


def _read_base(path: Path, above: tuple[Path, ...], trust: bool, folder: Path) -> dict[str, Any]:
    try:
        return read_config(path, above, trust=trust, folder=folder)
    except SystemExit as ended:
        what = "begins a run" if isinstance(ended, RunReached) else "ends the program"
        raise BaseIsScript(
            f"{path}, a base of {above[-1].name}, {what} when it is read: expected a config, got a script"
        ) from ended


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no config at {path}")
    try:
        values = _parse(path)
    except ImportError as error:
        raise ImportError(f"{path}: {error}") from error
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {describe(error, typed=True)}") from error
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
    """Merge two configs by MMEngine's rule: mappings are merged, other values and `_delete_=True` replace."""
    result = dict(base)
    for key, value in own.items():
        if isinstance(value, Mapping) and isinstance(former := base.get(key), Mapping):
            kept = {} if value.get("_delete_") else former
            result[key] = _merged(kept, {k: v for k, v in value.items() if k != "_delete_"})
        else:
            result[key] = value
    return result


# --- errors ------------------------------------------------------------------------------------------------


def describe(error: Exception, *, typed: bool = False) -> str:
    """Return the message of an error with the location in the user's code, and its type if it is needed.

        describe(KeyError("k"))  # "KeyError: 'k' (my_hooks.py:12)"

    Args:
        typed: always include the type.
    """
    text = str(error)
    if typed or not text or not isinstance(error, _EXPECTED):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    location = error_location(error)
    return f"{text} ({location})" if location else text


def error_location(error: Exception) -> str:
    """Return file and line of the user's code that raised an error or called the raising code, or "".

    An unexpected error from an installed package has the line there. An expected one without a line of the
    user's code gives "", because its message is enough.
    """
    own = elsewhere = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(("<", PACKAGE)):
            elsewhere = f"{file}:{traceback.tb_lineno}"
            own = own if file.startswith(_INSTALLED) else elsewhere
        traceback = traceback.tb_next
    return own or ("" if isinstance(error, _EXPECTED) else elsewhere)
