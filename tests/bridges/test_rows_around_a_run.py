"""The calls just before and after a host's run that have no row in the costs, as the page of each bridge says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from eventloop.costs.records import read_costs
from tests.support.trainers import batches

pytestmark = pytest.mark.filterwarnings("ignore")  # MMEngine's own, of every kind


def with_methods(base: type, name: str, methods: Iterable[str], **attributes: Any) -> Any:
    """Make an object whose class defines some methods of a host's base class, which do nothing."""

    def nothing(*_: Any, **__: Any) -> None:
        """Do nothing."""

    return type(name, (base,), {**dict.fromkeys(methods, nothing), **attributes})()


def without_row(work_dir: Path, name: str, methods: Iterable[str]) -> set[str]:
    """Return the methods of a class that have no row in the costs."""
    rows = {cost.name for cost in read_costs(work_dir).handlers}
    return {method for method in methods if f"{name}.{method}" not in rows}


@pytest.mark.parametrize(
    ("call", "early", "late"),
    [
        ("train", {"before_run", "before_train"}, {"before_run", "after_run"}),
        ("val", {"before_run", "before_val"}, {"before_run", "after_run"}),
    ],
)
def test_mmengine(tmp_path: Path, call: str, early: set[str], late: set[str]) -> None:
    """A hook before the bridge has no row for `before_train`, one after it none for `after_run`, both none for `before_run`."""
    pytest.importorskip("mmengine", reason="pip install 'torch-eventloop[mmengine]'")
    from mmengine.hooks import Hook

    from eventloop.bridges.mmengine import EventLoopHook
    from tests.bridges.test_mmengine import runner

    evaluation = (
        "before_val",
        "before_val_epoch",
        "before_val_iter",
        "after_val_iter",
        "after_val_epoch",
        "after_val",
    )
    training = (
        "before_train",
        "before_train_epoch",
        "before_train_iter",
        "after_train_iter",
        "after_train_epoch",
        "after_train",
        "before_save_checkpoint",
    )
    methods = ["before_run", *evaluation, *(training if call == "train" else ()), "after_run"]
    hooks = [
        with_methods(Hook, "Early", methods, priority="NORMAL"),
        EventLoopHook(work_dir=tmp_path),
        with_methods(Hook, "Late", methods, priority="LOWEST"),
    ]

    getattr(runner(tmp_path, *hooks, epochs=1), call)()

    assert without_row(tmp_path, "Early", methods) == early
    assert without_row(tmp_path, "Late", methods) == late


@pytest.mark.parametrize(
    ("added", "late"), [(False, {"on_init_end"}), (True, {"on_init_end", "on_train_end"})]
)
def test_transformers(tmp_path: Path, added: bool, late: set[str]) -> None:
    """`on_init_end` has no row, nor has `on_train_begin` before the bridge, or `on_train_end` after one that was added."""
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason="pip install 'torch-eventloop[transformers]'")
    from transformers import TrainerCallback

    from eventloop.bridges.transformers import EventLoopCallback
    from tests.support.transformers_host import host, rows

    methods = [
        "on_init_end",
        "on_train_begin",
        "on_epoch_begin",
        "on_step_begin",
        "on_step_end",
        "on_log",
        "on_evaluate",
        "on_save",
        "on_epoch_end",
        "on_train_end",
    ]
    callbacks = [
        with_methods(TrainerCallback, "Early", methods),
        EventLoopCallback(),
        with_methods(TrainerCallback, "Late", methods),
    ]
    native = host(
        tmp_path,
        *([] if added else callbacks),
        num_train_epochs=1,
        eval_strategy="epoch",
        eval_dataset=rows(4),
        save_strategy="epoch",
    )
    for callback in callbacks if added else ():
        native.add_callback(callback)

    native.train()

    assert without_row(tmp_path, "Early", methods) == {"on_init_end", "on_train_begin"}
    assert without_row(tmp_path, "Late", methods) == late


def test_ignite(tmp_path: Path) -> None:
    """A handler of an evaluator has rows for its runs within a run of the engine, after the handlers of `STARTED`."""
    pytest.importorskip("ignite", reason="pip install 'torch-eventloop[ignite]'")
    from ignite.engine import Events

    from tests.bridges.test_ignite import Training

    def evaluated() -> None:
        """Do nothing."""

    training = Training()
    training.evaluator.add_event_handler(Events.COMPLETED, evaluated)
    for event in (Events.STARTED, Events.COMPLETED):
        training.engine.add_event_handler(event, lambda: training.evaluator.run(batches(1)))
    training.attach(tmp_path)

    training.evaluator.run(batches(1))
    training.run(epochs=1)
    training.evaluator.run(batches(1))

    calls = {cost.name.rpartition(".")[2]: cost.calls for cost in read_costs(tmp_path).handlers}
    assert calls["evaluated"] == 1
