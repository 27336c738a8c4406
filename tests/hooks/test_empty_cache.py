"""EmptyCacheHook: when cached memory of the device is given back."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop import Trainer
from eventloop.hooks import EmptyCacheHook
from tests.hooks.conftest import Make, Scripted
from tests.support.cuda import set_cuda


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of `torch.cuda.empty_cache`."""
    calls: list[str] = []
    set_cuda(monkeypatch, empty_cache=lambda: calls.append("emptied"))
    return calls


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4),  # after 2 epochs of training and 2 validations
        ({"before_epoch": True}, 8),
        ({"after_epoch": False, "before_epoch": True}, 4),
        ({"after_epoch": False, "after_iter": True}, 8),  # 2 x 3 batches and 2 x 1
        ({"after_epoch": False}, 0),
    ],
)
def test_cache_is_emptied_where_it_is_switched_on(
    make_trainer: Make, scripted: Scripted, emptied: list[str], options: dict[str, bool], expected: int
) -> None:
    """Each flag serves training and validation alike; by default only the end of an epoch is on."""
    trainer = make_trainer(batches=3, max_epochs=2, hooks=[EmptyCacheHook(**options)], **scripted(0.5, 0.5))

    trainer.train()

    assert len(emptied) == expected


def test_test_is_served_too(make_trainer: Make, scripted: Scripted, emptied: list[str]) -> None:
    """A test is a pass over a loader like the others."""
    options = scripted(0.5)
    options["test_loader"] = options.pop("val_loader")

    make_trainer(hooks=[EmptyCacheHook(after_iter=True)], **options).test()

    assert emptied == ["emptied"] * 2


def test_what_is_switched_off_is_not_subscribed(make_trainer: Make) -> None:
    """An iteration pays nothing for a flag that is off."""
    trainer = make_trainer(hooks=[EmptyCacheHook()])

    assert not [row for row in trainer.bus.plan("after_train_iter") if "EmptyCache" in row.name]
    assert [row for row in trainer.bus.plan("after_train_epoch") if "EmptyCache" in row.name]


def test_subclass_may_serve_the_modes_one_by_one(make_trainer: Make, emptied: list[str]) -> None:
    """A method for each mode outranks the one for all of them, and is there whatever the flag says."""

    class Own(EmptyCacheHook):
        def after_train_iter(self, trainer: Trainer, event: Any) -> None:
            emptied.append("own")

        after_val_iter = after_test_iter = after_train_iter

    make_trainer(batches=2, hooks=[Own(after_epoch=False)]).train()

    assert emptied == ["own"] * 2


def test_without_cuda_nothing_happens(make_trainer: Make) -> None:
    """The real call does nothing where there is no device."""
    make_trainer(hooks=[EmptyCacheHook(before_epoch=True, after_iter=True)]).train()
