"""Names of the founding documents that are not here: the error names the same quantity, not a similar word."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eventloop import EventStorage, hooks
from tests.support.trainers import MakeTrainer, tiny_model

IterationTimer: Any = hooks.IterationTimer
LoggerHook: Any = hooks.LoggerHook
PreciseBN: Any = hooks.PreciseBN


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: IterationTimer(max_iter=9),
            "no argument 'max_iter': use max_epochs or max_iters of the Trainer",
        ),
        (
            lambda: IterationTimer(start_iter=0),
            "no argument 'start_iter': use max_epochs or max_iters of the Trai",
        ),
        (
            lambda: IterationTimer(10, 0, 3, True),
            r"takes at most 2 arguments \(warmup_iter, ignore_warmup_time\), got 4(.|\n)*max_iter: use max_epochs or",
        ),
        (lambda: PreciseBN(max_iter=9), "no argument 'max_iter': use max_epochs or max_iters of the Trainer"),
        (
            lambda: PreciseBN(precise_bn_args=[]),
            "no argument 'precise_bn_args': use data_loader=... and forward=",
        ),
        (
            lambda: LoggerHook(interval_exp_name=1000),
            "no argument 'interval_exp_name': use work_dir=... of the Trai",
        ),
    ],
)
def test_an_argument_is_explained_by_its_quantity(call: Callable[[], Any], message: str) -> None:
    """The suggestion is the place of the same value, and no other argument with a similar name."""
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("name", ["VisualizerHook", "NaiveVisualizationHook"])
def test_an_import_is_explained(name: str) -> None:
    """The hook that draws is VisualizationHook here."""
    with pytest.raises(ImportError, match=rf"import name '{name}'.*: use VisualizationHook\("):
        getattr(importlib.import_module("eventloop.hooks"), name)


@pytest.mark.parametrize(
    ("kind", "meant"),
    [
        ("StepParamScheduler", "MultiStepLR"),
        ("CosineParamScheduler", "CosineAnnealingLR"),
        ("LinearParamScheduler", "LinearLR"),
    ],
)
def test_fvcores_schedulers_are_explained(kind: str, meant: str, make_trainer: MakeTrainer) -> None:
    """The replacement is a scheduler of the same curve."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=rf"unknown scheduler '{kind}': use schedulers=.* such as {meant}"):
        make_trainer(model=model, optimizer=optimizer, schedulers=[{"type": kind}])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("vis_data", r"put_image\(name, image\)"),
        ("clear_images", r"put_image\(name, image\)"),
        ("update_scalars", r"put_scalars\(values\)"),
        ("get_scalar", r"history\(name\)"),
    ],
)
def test_attributes_of_other_storages_are_explained(name: str, meant: str) -> None:
    """Reading one says what there is; `hasattr` is False."""
    with pytest.raises(AttributeError, match=rf"EventStorage has no attribute '{name}': use {meant}"):
        getattr(EventStorage(), name)
    assert not hasattr(EventStorage(), name)
