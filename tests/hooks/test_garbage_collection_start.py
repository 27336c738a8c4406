"""What a training does with the garbage that is there before it, and that it begins without a long collection."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from weakref import ref

import pytest
import torch

from eventloop import Trainer
from eventloop.hooks import GarbageCollectionHook
from tests.hooks.collector import ALL, YOUNG, Node, collect_calls, collector_as_it_was, cycle, no_nodes

Make = Callable[..., Trainer]
__all__ = ["collect_calls", "collector_as_it_was", "no_nodes"]  # fixtures


@pytest.mark.parametrize(("interval", "freeze", "expected"), [(10, True, []), (2, False, [YOUNG] * 4)])
def test_a_training_begins_without_a_long_collection(
    make_trainer: Make, collect_calls: list[tuple[int, str]], interval: int, freeze: bool, expected: list[int]
) -> None:
    """Only the youngest objects are collected in the first iterations; `freeze=False` freezes nothing."""
    trainer = make_trainer(batches=4, max_epochs=2, hooks=[GarbageCollectionHook(interval, freeze)])
    frozen: list[int] = []
    trainer.bus.subscribe(lambda event: frozen.append(gc.get_freeze_count()), "after_train_iter")

    trainer.train()

    assert set(frozen) == {0}
    assert [generation for generation, _ in collect_calls] == expected


def of_width(width: int, directory: Path) -> Trainer:
    """A trainer that nothing else holds, of a model with so many inputs and outputs."""
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(
        model,
        optimizer=optimizer,
        train_step=lambda trainer, batch: model.weight[0].sum(),
        max_epochs=1,
        train_loader=[torch.zeros(1)] * 4,
        work_dir=directory,
        default_hooks={"checkpoint": None},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "is_large"), [(2100, True), (20, False)], ids=["large model", "small model"]
)
def test_what_a_large_earlier_training_left_is_freed_before_the_first_step(
    make_trainer: Make, tmp_path: Path, width: int, is_large: bool
) -> None:
    """The next training of a process does not hold the weights of a former one whose trainer is garbage."""
    former = of_width(width, tmp_path)
    former.train()
    former.close()
    gc.collect()  # to the oldest generation
    weights = ref(former.model)
    del former
    there: list[bool] = []
    trainer = make_trainer()
    trainer.bus.subscribe(lambda event: there.append(weights() is not None), "before_train_iter", once=True)

    trainer.train()

    assert there == [not is_large]


def test_a_large_earlier_model_that_refers_to_its_trainer_is_freed_before_the_first_step(
    make_trainer: Make, tmp_path: Path
) -> None:
    """The collection before a training frees a model that only a reference cycle keeps alive."""
    former = of_width(2100, tmp_path)
    former.train()
    former.close()
    vars(former.model)["trainer"] = former
    gc.collect()  # to the oldest generation
    weights = ref(former.model)
    del former
    there: list[bool] = []
    trainer = make_trainer()
    trainer.bus.subscribe(lambda event: there.append(weights() is not None), "before_train_iter", once=True)

    trainer.train()

    assert there == [False]


def test_a_trainer_that_trains_on_begins_without_a_long_collection(
    collect_calls: list[tuple[int, str]], tmp_path: Path
) -> None:
    """Its own model, however large, is in use."""
    trainer = of_width(2100, tmp_path)
    trainer.train()
    trainer.max_epochs = 2
    collect_calls.clear()

    trainer.train()
    trainer.close()

    assert trainer.iter == 8
    assert [generation for generation, _ in collect_calls if generation == ALL] == []


@pytest.mark.slow
def test_garbage_from_before_a_training_is_freed_after_it(make_trainer: Make, no_nodes: None) -> None:
    """A cycle of the oldest generation, which the training froze, is an ordinary object afterwards."""
    old = cycle()
    gc.collect()
    del old
    during: list[int] = []
    trainer = make_trainer(hooks=[GarbageCollectionHook(interval=1)])
    trainer.bus.subscribe(lambda event: during.append(len(Node.alive)), "after_train_epoch")

    trainer.train()
    gc.collect()

    assert during == [2]
    assert len(Node.alive) == 0
