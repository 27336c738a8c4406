"""When garbage is collected during a training, and that the collector is afterwards as it was before."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from eventloop import Trainer
from eventloop.bus import Bus
from eventloop.hooks import GarbageCollectionHook
from eventloop.hooks.garbage_collection import FROZEN_AT_START
from tests import forked
from tests.hooks.collector import (
    ALL,
    MIDDLE,
    YOUNG,
    Node,
    Now,
    collect_calls,
    collector_as_it_was,
    cycle,
    no_nodes,
)
from tests.hooks.conftest import Batch

Make = Callable[..., Trainer]
__all__ = ["collect_calls", "collector_as_it_was", "no_nodes"]  # fixtures


@pytest.fixture
def seen() -> Iterator[list[tuple[int, str]]]:
    """Which generation was collected, and what was going on."""
    seen: list[tuple[int, str]] = []

    def record_start(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append((info["generation"], Now.name))

    gc.callbacks.append(record_start)
    yield seen
    gc.callbacks.remove(record_start)


def follow(trainer: Trainer) -> Trainer:
    """Keep `Now.name`: a step lasts from the first handler before an iteration to the last one after it except those
    of the lowest priority, where garbage is collected."""
    Now.name = ""

    def name(event: Any) -> None:
        tag = str(type(event).__struct_config__.tag)
        Now.name = "step" if tag == "before_train_iter" else tag

    trainer.bus.subscribe(name, "before_train_iter", priority=0)
    for event in ("after_train_iter", "before_val", "after_val"):
        trainer.bus.subscribe(name, event, priority=99, name=event)
    return trainer


def allocate(trainer: Trainer, batch: Batch) -> torch.Tensor:
    """A step that makes so many lasting and passing objects that Python would collect all generations in it."""
    trainer.kept = getattr(trainer, "kept", [])  # type: ignore[attr-defined]
    trainer.kept.extend([] for _ in range(30_000))  # type: ignore[attr-defined]
    cycle()
    loss: torch.Tensor = trainer.model(batch[0]).square().mean()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("hook", [None, {"interval": 1}])
def test_no_full_collection_inside_a_step(
    make_trainer: Make, seen: list[tuple[int, str]], no_nodes: None, hook: dict[str, int] | None
) -> None:
    """Nothing is collected in a step, however much it allocates; all generations are collected after evaluations.
    Without the hook Python collects in the middle of such steps."""
    trainer = make_trainer(
        batches=12,
        max_epochs=2,
        train_step=allocate,
        val_loader=[torch.zeros(1)],
        val_step=lambda trainer, batch: {"acc": 1.0},
        default_hooks={"garbage_collection": hook},
    )
    follow(trainer)
    seen.clear()

    trainer.train()

    assert any(where == "step" for _, where in seen) == (hook is None)
    if hook is not None:
        assert [where for generation, where in seen if generation == ALL] == ["after_val", "after_val"]


@pytest.mark.slow
def test_generations_take_turns(make_trainer: Make, collect_calls: list[tuple[int, str]]) -> None:
    """After every `interval` iterations the youngest, after ten times as many the middle, after a hundred times as
    many all: the same iterations whatever was allocated, so the same on all ranks."""
    trainer = make_trainer(batches=2, max_iters=405, hooks=[GarbageCollectionHook(interval=2)])

    @trainer.bus.on("after_train_iter", priority=99)
    def record_start(event: Any) -> None:
        Now.name = str(event.iter + 1)

    trainer.train()

    due = [
        (generation, int(where))
        for generation, where in collect_calls
        if where.isdigit() and int(where) < 405
    ]
    expected = [(MIDDLE, 2)]  # before it is frozen
    expected += [
        (ALL if turn % 100 == 0 else MIDDLE if turn % 10 == 0 else YOUNG, turn * 2) for turn in range(2, 203)
    ]
    assert due == expected


@pytest.mark.slow
def test_cycles_of_steps_do_not_pile_up(make_trainer: Make, no_nodes: None) -> None:
    """In a run without epochs and evaluations the cycles its steps leave are never more than those of a few
    intervals; also where each is in use for a while, and where the outputs hold one."""
    alive: list[int] = []
    held: list[Node] = []

    def step(trainer: Trainer, batch: Batch) -> dict[str, Any]:
        held.append(cycle())
        del held[:-7]
        return {"loss": trainer.model(batch[0]).square().mean(), "extra": cycle()}

    trainer = make_trainer(
        batches=2, max_iters=600, train_step=step, hooks=[GarbageCollectionHook(interval=2)]
    )
    trainer.bus.subscribe(lambda event: alive.append(len(Node.alive)), "before_train_iter")

    trainer.train()

    a_step = 4  # nodes
    at_each_look = 2 * 8 + 2  # nodes in use when a collection comes, which leaves them to the next older one
    assert max(alive) <= a_step * 2 + at_each_look * (1 + 2 * 10)
    assert max(alive[400:]) <= max(alive[:400])


@pytest.mark.slow
def test_cycles_of_an_evaluation_do_not_pile_up(make_trainer: Make, no_nodes: None) -> None:
    """A long evaluation within a training is collected by its batches, and afterwards nothing of it is left."""
    alive: list[int] = []

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        cycle()
        alive.append(len(Node.alive))
        return {"acc": 1.0}

    trainer = make_trainer(
        val_loader=[torch.zeros(1)] * 500, val_step=val_step, hooks=[GarbageCollectionHook(interval=5)]
    )
    after: list[int] = []
    trainer.bus.subscribe(lambda event: after.append(len(Node.alive)), "after_train")

    trainer.train()

    assert max(alive) <= 2 * 5
    assert after == [0]


@pytest.mark.slow
def test_what_lasts_is_frozen_after_the_first_interval(make_trainer: Make, no_nodes: None) -> None:
    """Model, optimizer and all that was imported are frozen from then on, garbage is not."""
    seen: dict[int, tuple[int, int]] = {}
    trainer = make_trainer(batches=8, max_epochs=2, hooks=[GarbageCollectionHook(interval=5)])
    trainer.bus.subscribe(lambda event: cycle() and None, "after_train_iter", once=True)

    @trainer.bus.on("after_train_iter", priority=100)
    def record_alive(event: Any) -> None:
        seen[event.iter + 1] = gc.get_freeze_count(), len(Node.alive)

    trainer.train()

    assert seen[4] == (0, 2)
    assert seen[5][0] > 50_000
    assert seen[5][1] == 0


End = Callable[[Bus], object]


def stops(bus: Bus) -> None:
    bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter")


def raises(error: type[BaseException], where: str) -> End:
    """Let a handler raise: a Ctrl-C comes before the hook's own turn, an error after it."""

    def fail(event: Any) -> None:
        raise error

    return lambda bus: bus.subscribe(fail, where, priority=0 if error is KeyboardInterrupt else 50)


@pytest.mark.representative(3)
@pytest.mark.parametrize(
    "end",
    [
        stops,
        raises(RuntimeError, "after_train_iter"),
        raises(KeyboardInterrupt, "after_train"),
        *(
            raises(RuntimeError, event)
            for event in ("before_run", "before_train", "after_train_epoch", "after_train", "after_run")
        ),
        *(raises(KeyboardInterrupt, event) for event in ("before_train_iter", "after_train_epoch")),
    ],
)
def test_python_is_left_as_it_was(make_trainer: Make, bus: Bus, end: End) -> None:
    """Whatever ends the training, and wherever: collection is automatic again, nothing is frozen. (The fixture
    looks.)"""
    end(bus)

    with suppress(RuntimeError, KeyboardInterrupt):
        make_trainer(hooks=[GarbageCollectionHook(interval=1)], bus=bus).train()


def test_a_loop_that_is_left_puts_it_back(make_trainer: Make) -> None:
    """`break` out of a hand-written loop is an end, too."""
    trainer = make_trainer(hooks=[GarbageCollectionHook(interval=1)])

    for _ in trainer.epochs():
        for batch in trainer.batches(trainer.train_loader):  # type: ignore[arg-type]
            trainer.outputs = {"loss": trainer.model(batch[0]).sum()}
            assert not gc.isenabled()
        break


DAEMON = """
import atexit, gc, threading
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count()))
import torch
from eventloop import Trainer
under_way = threading.Event()

def step(trainer, batch):
    if trainer.iter == 20:
        print(gc.isenabled(), gc.get_freeze_count() > 1000, flush=True)
        under_way.set()
        threading.Event().wait()
    return trainer.model(batch).sum()

model = torch.nn.Linear(2, 2)
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_step=step,
                  train_loader=[torch.ones(1, 2)] * 30, max_epochs=1)
threading.Thread(target=trainer.train, daemon=True).start()
assert under_way.wait(60)
"""


@pytest.mark.slow
def test_an_interpreter_that_ends_during_a_training_finds_it_as_it_was(tmp_path: Path) -> None:
    """A training in a daemon thread has no end of its own; frozen objects would then be a leak, which the bindings of
    Triton print."""
    ran = forked.run(["-c", DAEMON], cwd=tmp_path)

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False True\nTrue 0\n", "")


def test_a_program_that_switched_collection_off_keeps_it_off(
    make_trainer: Make, collect_calls: list[tuple[int, str]]
) -> None:
    """The hook collects nothing then, freezes nothing and switches nothing on."""
    gc.disable()
    try:
        make_trainer(batches=8, max_epochs=2, hooks=[GarbageCollectionHook(interval=1)]).train()

        assert not gc.isenabled()
        assert (collect_calls, gc.get_freeze_count()) == ([], 0)
    finally:
        gc.enable()


def test_objects_that_the_program_froze_stay_frozen(make_trainer: Make) -> None:
    """The hook neither unfreezes them nor adds to them."""
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        during: list[int] = []
        trainer = make_trainer(hooks=[GarbageCollectionHook(interval=1)])
        trainer.bus.subscribe(lambda event: during.append(gc.get_freeze_count()), "after_train_epoch")

        trainer.train()

        assert during[0] <= frozen
        assert gc.get_freeze_count() > FROZEN_AT_START
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_a_training_within_a_training(make_trainer: Make, tmp_path: Path) -> None:
    """The inner one finds collection off, and leaves it so for the outer one."""
    states: list[bool] = []
    inner = make_trainer(batches=2, hooks=[GarbageCollectionHook(interval=1)], work_dir=tmp_path / "inner")
    outer = make_trainer(batches=2, hooks=[GarbageCollectionHook(interval=1)])
    outer.bus.subscribe(lambda event: inner.train(), "after_train_iter", once=True)
    outer.bus.subscribe(lambda event: states.append(gc.isenabled()), "after_train_iter", priority=60)

    outer.train()

    assert states == [False, False]


def test_evaluation_alone_is_left_to_python(make_trainer: Make, collect_calls: list[tuple[int, str]]) -> None:
    """Outside a training the automatic collection stays on."""
    trainer = make_trainer(
        val_loader=[torch.zeros(1)] * 4,
        val_step=lambda trainer, batch: {"on": float(gc.isenabled())},
        hooks=[GarbageCollectionHook(interval=1)],
    )

    assert trainer.val() == {"on": 1.0}
    assert collect_calls == []


class CollectorState(Dataset[torch.Tensor]):
    """Says whether its process collects automatically."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(gc.isenabled()), float(os.getpid())], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_loader_workers_collect_automatically(make_trainer: Make) -> None:
    """A worker inherits a collector that is off, without the hook: it is switched on there."""
    read: list[tuple[float, float]] = []

    def step(trainer: Trainer, batch: torch.Tensor) -> torch.Tensor:
        read.extend((float(enabled), float(process)) for enabled, process in batch)
        assert not gc.isenabled()
        loss: torch.Tensor = trainer.model(batch.float()).sum() * 0
        return loss

    loader = DataLoader(CollectorState(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    make_trainer(train_step=step, train_loader=loader, hooks=[GarbageCollectionHook()]).train()

    assert {enabled for enabled, _ in read} == {1.0}
    assert float(os.getpid()) not in {process for _, process in read}
