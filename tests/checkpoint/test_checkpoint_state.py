"""Test the contents of a checkpoint: plain values, the model inside its wrappers, and the random state."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eventloop.checkpoint import load_checkpoint, save_checkpoint
from eventloop.checkpoint.weights import unwrap
from eventloop.data.rng import rng_state, set_rng_state
from eventloop.hooks import Hook
from eventloop.resume.gathering import gather
from eventloop.state.plain_values import plain
from tests.support.trainers import MakeTrainer


def test_unwrap_a_compiled_model() -> None:
    """`unwrap` returns the model inside `torch.compile` and DataParallel."""
    model = torch.nn.Linear(1, 1)
    compiled: Any = torch.compile(model, backend="eager")

    assert unwrap(compiled) is model
    assert unwrap(torch.nn.DataParallel(model)) is model
    assert unwrap(model) is model


# --- meta --------------------------------------------------------------------------------------------------


def test_meta_says_where_the_run_was_and_how_it_was_built(make_trainer: MakeTrainer) -> None:
    """`meta` has the counters, the length of the run, the classes and parameter names of the optimizer, the
    position, the settings, the time and torch's version, and nothing else."""
    trainer = make_trainer()
    trainer.schedulers.append(torch.optim.lr_scheduler.StepLR(trainer.optimizer, 3))
    trainer.train()

    meta = load_checkpoint(trainer.work_dir / "epoch_1")["meta"]

    assert time.strptime(meta.pop("time"), "%Y-%m-%dT%H:%M:%S%z")
    assert meta.pop("position").keys() >= {"batch_idx", "passes"}
    assert meta.pop("settings").keys() == {
        "optimizer",
        "param_schedulers",
        "run",
        "hooks",
        "hook_options",
        "frozen",
    }
    assert meta.pop("parameters") == {"": ["\n".join(dict(trainer.model.named_parameters()))]}
    assert meta == {
        "schema": 2,
        "iter": 3,
        "epoch": 1,
        "max_iters": 6,
        "max_epochs": 2,
        "optimizer": "SGD",
        "param_schedulers": ["StepLR"],
        "scheduler_optimizers": [""],
        "frozen": [],
        "torch": str(torch.__version__),
    }


def test_facts_of_ones_own_in_meta(make_trainer: MakeTrainer) -> None:
    """Values that a handler of before_save_checkpoint adds to `meta` are there for a handler of
    after_load_checkpoint."""
    facts = {"seed": 7, "cfg": "lr = 0.1", "experiment_name": "tiny", "dataset_meta": {"classes": ["a", "b"]}}
    first = make_trainer()
    first.bus.subscribe(
        lambda trainer, event: trainer.checkpoint["meta"].update(facts), "before_save_checkpoint"
    )
    first.train()
    second = make_trainer()
    found: list[Any] = []
    second.bus.subscribe(
        lambda trainer, event: found.append(trainer.checkpoint["meta"]), "after_load_checkpoint"
    )

    second.resume()

    assert {name: found[0][name] for name in facts} == facts


# --- random state ------------------------------------------------------------------------------------------


def draw() -> tuple[Any, ...]:
    """Draw numbers from each global generator, also gaussians, of which the generators cache every second
    one."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(1).item(),
        torch.randn(1).item(),
    )


def test_rng_round_trip_through_a_file(tmp_path: Path) -> None:
    """After its state is saved, loaded and restored, each global generator draws the same numbers again."""
    random.gauss(0, 1)
    np.random.randn()
    torch.save({"before": torch.zeros(3, dtype=torch.uint8), "rng": rng_state()}, tmp_path / "rng.pt")
    expected = draw()

    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True)["rng"])

    assert draw() == expected


SCHEDULERS: dict[str, dict[str, Any]] = {
    "CosineAnnealingWarmRestarts": {"T_0": 4},
    "ReduceLROnPlateau": {},
    "LambdaLR": {"lr_lambda": lambda step: 1.0},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_kind_of_scheduler_is_loadable(make_trainer: MakeTrainer, name: str) -> None:
    """The states of all these schedulers can be read with `weights_only=True`."""
    trainer = make_trainer()
    kind = getattr(torch.optim.lr_scheduler, name)
    trainer.schedulers.append(kind(trainer.optimizer, **SCHEDULERS[name]))

    save_checkpoint(gather(trainer.state, ""), trainer.work_dir / "a")

    assert len(load_checkpoint(trainer.work_dir / "a")["param_schedulers"]) == 1


class Named(torch.Tensor):
    """A tensor class that `torch.load` does not know, such as torchvision's boxes and masks."""


def test_values_of_other_classes_are_saved_as_plain_ones(make_trainer: MakeTrainer) -> None:
    """NumPy numbers and tensors of unknown classes are saved as plain numbers and tensors, so that
    `weights_only=True` reads them."""
    model = torch.nn.Linear(2, 3)
    model.register_buffer("boxes", torch.ones(3).as_subclass(Named))
    trainer = make_trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=np.float64(0.25)))

    state = gather(trainer.state, "")
    save_checkpoint({**state, "seen": plain({np.int64(1), (2, "b")}, "seen")}, trainer.work_dir / "a")

    loaded = load_checkpoint(trainer.work_dir / "a")
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.25
    assert loaded["seen"] == {1, (2, "b")}
    boxes = loaded["state_dict"]["boxes"]
    assert type(boxes) is torch.Tensor
    assert torch.equal(boxes, torch.ones(3))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({Path("a")}, r"PosixPath\('a'\), a PosixPath"),
        (np.datetime64("2026-01-01"), r".*, a datetime64"),
        (np.longdouble(1), r".*, a longdouble"),
    ],
    ids=["a path in a set", "a date of NumPy's", "a number of more digits"],
)
def test_what_only_looks_plain(value: object, found: str) -> None:
    """A value that `weights_only=True` would refuse is refused at any depth, with its place."""
    with pytest.raises(
        TypeError, match=rf"the checkpoint's hooks\['seen'\] is {found}: a state_dict must consist of"
    ):
        plain({"seen": value}, "hooks")


def test_a_state_that_could_not_be_loaded(make_trainer: MakeTrainer) -> None:
    """A hook's state that `weights_only=True` would refuse is refused when it is saved, with its place."""

    class Careless(Hook):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": [range(3)]}

    trainer = make_trainer(hooks=[Careless()])

    with pytest.raises(
        TypeError, match=r"the checkpoint's hooks\['Careless'\]\['seen'\]\[0\] is range\(0, 3\), a range"
    ):
        gather(trainer.state, "")
