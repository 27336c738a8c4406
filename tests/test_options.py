"""Options that hooks and writers check alike: what would be taken for True, or fail in the background, is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import hooks, writers
from eventloop.hooks import LoggerHook, LrUpdaterHook, MomentumUpdaterHook
from eventloop.writers import CSVWriter, EventLogWriter, ImageFileWriter, JSONLWriter, TensorBoardWriter

NEEDED: dict[str, Any] = {
    "model": torch.nn.Linear(1, 1),
    "data_loader": [],
    "inputs": torch.zeros(1, 1),
    "monitor": "acc",
    "step": 3,
    "gamma": 0.5,
    "max_lr": 1.0,
    "min_lr": 0.1,
    "min_momentum": 0.1,
    "periods": [9],
    "project": "digits",
    "tracking_uri": "sqlite:///x.db",
}
"""What has no default, or one that is not enough, by its name: values that are right."""


class MyLrUpdater(LrUpdaterHook):
    """A policy: the base alone cannot be built."""

    def get_lr(self, trainer: Any, base_lr: float) -> float:
        """See `LrUpdaterHook`."""
        return base_lr


class MyMomentumUpdater(MomentumUpdaterHook):
    """A policy, likewise."""

    def get_momentum(self, trainer: Any, base_momentum: float) -> float:
        """See `MomentumUpdaterHook`."""
        return base_momentum


STAND_INS = {"LrUpdaterHook": MyLrUpdater, "MomentumUpdaterHook": MyMomentumUpdater}


def parts(annotation: object) -> set[str]:
    """Of `bool | None` both."""
    return {part.strip() for part in str(annotation).split("|")}


def bools() -> Iterator[Any]:
    """Each public callable of hooks and writers with each of its parameters that is a bool."""
    for module in (hooks, writers):
        for name in module.__all__:
            public = STAND_INS.get(name, getattr(module, name))
            for parameter in inspect.signature(public).parameters.values() if callable(public) else ():
                if "bool" in parts(parameter.annotation) or isinstance(parameter.default, bool):
                    yield pytest.param(public, parameter.name, id=f"{name}-{parameter.name}")


BOOLS = [*bools()]


def test_the_walk_finds_them() -> None:
    """Those of constructors and functions, None allowed or not."""
    found = {param.id for param in BOOLS}

    assert found > {"CheckpointHook-save_last", "PreciseBN-by_epoch", "ConsoleWriter-progress", "on-once"}
    assert len(found) > 75


@pytest.mark.parametrize(("public", "option"), BOOLS)
def test_a_bool_takes_nothing_else(public: Callable[..., Any], option: str) -> None:
    """Whatever is no bool is a TypeError where the object is built, with the option, what was expected and what came."""
    parameters = inspect.signature(public).parameters
    needed = {name: NEEDED[name] for name in parameters if name in NEEDED}
    refused: list[Any] = ["no", 1, None]
    if "None" in parts(parameters[option].annotation):
        public(**needed, **{option: refused.pop()})

    for value in refused:
        with pytest.raises(TypeError, match=rf"^{option} must be True.* got {re.escape(repr(value))}"):
            public(**needed, **{option: value})


@pytest.mark.parametrize(
    ("public", "option"),
    [
        (CSVWriter, "filename"),
        (JSONLWriter, "filename"),
        (EventLogWriter, "filename"),
        (ImageFileWriter, "folder"),
        (TensorBoardWriter, "log_dir"),
        (LoggerHook, "out_dir"),
    ],
)
def test_a_path_takes_nothing_else(public: Callable[..., Any], option: str) -> None:
    """A number is refused where it was written, not when the file is opened in the background."""
    for right in ("there", Path("there")):
        public(**{option: right})
    with pytest.raises(TypeError, match=f"{option} must be a path, a str or a Path, got 5"):
        public(**{option: 5})
