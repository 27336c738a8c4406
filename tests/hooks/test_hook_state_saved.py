"""What the state of a hook may consist of, and when it is known that it cannot be saved."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.hooks import CheckpointHook, Hook
from tests.hooks.conftest import Make


class Holds(Hook):
    """A user's hook that saves whatever it was given."""

    def __init__(self, value: Any, name: str = "mine") -> None:
        self.value, self.name = value, name
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the value, at two depths."""
        return {"top": self.value, "deep": [{"in": (1, self.value)}]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state."""
        self.loaded = state


ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::-1],
    np.array(2.5),
    np.array([], dtype=np.float32),
    np.array([True, False]),
    np.array([1 + 2j]),
    np.array([1.5, -2], dtype=">f4"),
    np.array([3, 4], dtype=np.uint8),
    np.array([0.5], dtype=np.float16),
]


@pytest.mark.parametrize("array", ARRAYS, ids=[f"{each.dtype}{each.shape}" for each in ARRAYS])
def test_numeric_arrays(make_trainer: Make, tmp_path: Path, array: np.ndarray[Any, Any]) -> None:
    """An array is a tensor in the file, which plain PyTorch reads, and an array of its own in `load_state_dict`."""
    make_trainer(hooks=[Holds(array), Holds({"no": "array"}, "other"), CheckpointHook()]).train()
    path = tmp_path / "run" / "epoch_1"

    saved = torch.load(path / PAYLOAD, weights_only=True)["hooks"]["mine"]
    hook, other = Holds(None), Holds(None, "other")
    make_trainer(hooks=[hook, other, CheckpointHook()], max_epochs=2).resume()

    for found in (saved["top"], saved["deep"][0]["in"][1]):
        assert isinstance(found, torch.Tensor)
        np.testing.assert_array_equal(found.numpy(), array)
    for found in (hook.loaded["top"], hook.loaded["deep"][0]["in"][1]):
        assert (type(found), found.shape, found.flags.writeable) == (np.ndarray, array.shape, True)
        assert found.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, array)
    assert other.loaded == {"top": {"no": "array"}, "deep": [{"in": (1, {"no": "array"})}]}


def test_the_array_of_that_moment_is_saved(make_trainer: Make, tmp_path: Path) -> None:
    """What the hook writes into its array later is in no earlier checkpoint."""
    array = np.zeros(3)

    class Writes(Holds):
        def after_train_iter(self, trainer: Any, event: Any) -> None:
            self.value += 1

    make_trainer(hooks=[Writes(array), CheckpointHook(1, by_epoch=False)]).train()

    saved = [load_checkpoint(tmp_path / "run" / f"iter_{n}")["hooks"]["mine"]["top"].tolist() for n in (1, 3)]
    assert saved == [[1.0] * 3, [3.0] * 3]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (datetime.date(2026, 1, 1), "date"),
        (np.array(["text"]), "ndarray"),
        (np.array([{}], dtype=object), "ndarray"),
        (np.ma.masked_array([1, 2], mask=[True, False]), "MaskedArray"),
        (torch.nn.Linear(1, 1), "Linear"),
    ],
)
def test_a_state_that_cannot_be_saved(make_trainer: Make, value: Any, kind: str) -> None:
    """It is refused before the first iteration, with the hook and the key."""
    trainer = make_trainer(hooks=[Holds(value), CheckpointHook()])

    with pytest.raises(
        TypeError, match=rf"(?s)checkpoint's hooks\['mine'\]\['top'\] is .*a {kind}: a state_dict must"
    ):
        trainer.train()

    assert trainer.iter == 0


def test_any_other_part(make_trainer: Make) -> None:
    """So is the state of a scheduler, of an optimizer's group, or of a module."""
    trainer = make_trainer(hooks=[CheckpointHook()])
    trainer.optimizer.param_groups[0]["note"] = object()

    with pytest.raises(
        TypeError, match=r"checkpoint's optimizer\['param_groups'\]\[0\]\['note'\] is <object"
    ):
        trainer.train()

    assert trainer.iter == 0


@pytest.mark.parametrize("hooks", [[], [CheckpointHook(save_last=False)]], ids=["no hook", "saves nothing"])
def test_without_checkpoints_nobody_asks(make_trainer: Make, hooks: list[Hook]) -> None:
    """A trainer that saves nothing trains with a hook whose state cannot be saved."""
    trainer = make_trainer(
        hooks=[Holds(object()), *hooks], default_hooks={} if hooks else {"checkpoint": None}
    )

    trainer.train()

    assert trainer.iter > 0


def test_a_state_that_cannot_be_read_yet(
    make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook that makes its attributes in the first iteration is named in the log, and trains and saves."""

    class Late(Hook):
        def after_train_iter(self, trainer: Any, event: Any) -> None:
            self.last = event.iter

        def state_dict(self) -> dict[str, Any]:
            return {"last": self.last}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.last = state["last"]

    with caplog.at_level(logging.WARNING, "eventloop"):
        make_trainer(hooks=[Late(), CheckpointHook()]).train()

    assert "state of the hook Late cannot be read before the first iteration" in caplog.text
    assert load_checkpoint(tmp_path / "run" / "epoch_1")["hooks"]["Late"] == {"last": 3}
