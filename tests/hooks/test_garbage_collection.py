"""When garbage is collected during a training, and that nothing of it is left behind afterwards."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from eventloop.assembly.attach import DEFAULT_HOOKS
from eventloop.bus import Bus
from eventloop.hooks import garbage_collection
from eventloop.hooks.garbage_collection import GarbageCollectionHook
from eventloop.training.trainer import Trainer
from tests import forked
from tests.conftest import count_frozen
from tests.hooks.conftest import Batch

Make = Callable[..., Trainer]
NO_HOOK = dict.fromkeys(DEFAULT_HOOKS.keys() & {"garbage_collection"})
YOUNG, MIDDLE, ALL = range(3)


@pytest.fixture(autouse=True)
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins with the collector on and nothing frozen, and ends so."""
    monkeypatch.setattr(gc, "get_freeze_count", count_frozen)
    gc.unfreeze()
    gc.enable()
    yield
    frozen = gc.get_freeze_count()
    gc.freeze()  # what other tests count on
    assert gc.isenabled()
    assert frozen == 0
    assert not garbage_collection._switched_off


@pytest.fixture
def seen() -> Iterator[list[tuple[int, str]]]:
    """Which generation was collected after which event, by the name `now` says."""
    seen: list[tuple[int, str]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append((info["generation"], Now.name))

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Which generation somebody asked to collect, and when; Python's own collections are not among them."""
    asked: list[tuple[int, str]] = []
    collect = gc.collect

    def note(generation: int = ALL) -> int:
        asked.append((generation, Now.name))
        return collect(generation)

    monkeypatch.setattr(gc, "collect", note)
    return asked


class Now:
    """What is going on."""

    name = ""


def follow(trainer: Trainer) -> Trainer:
    """Keep `Now.name`: a step lasts from the first handler before an iteration to the last one after it but for those
    of the lowest priority, where garbage is collected."""
    Now.name = ""

    def name(event: Any) -> None:
        tag = str(type(event).__struct_config__.tag)
        mode, _, what = tag.partition("_")[2].rpartition("_")
        before = tag.startswith("before")
        number = f" {event.iter + 1}" if mode == "train" and what == "iter" else ""
        Now.name = f"step{number}" if number and before else f"{tag}{number}"

    trainer.bus.subscribe(name, "before_train_iter", priority=0)
    for event in ("after_train_iter", "after_train_epoch", "before_val", "after_val"):
        trainer.bus.subscribe(name, event, priority=99, name=event)
    return trainer


class Node:
    """Half of a reference cycle."""

    alive: ClassVar[WeakSet[Node]] = WeakSet()

    def __init__(self) -> None:
        Node.alive.add(self)
        self.other: Node | None = None


def cycle() -> Node:
    """Two objects that only a collection frees."""
    a, b = Node(), Node()
    a.other, b.other = b, a
    return a


@pytest.fixture
def no_nodes() -> Iterator[None]:
    """None of another test."""
    gc.collect()
    assert not Node.alive
    yield
    gc.collect()


def allocate(trainer: Trainer, batch: Batch) -> torch.Tensor:
    """A step that makes so many lasting and passing objects that Python would collect all generations in it."""
    trainer.kept = getattr(trainer, "kept", [])  # type: ignore[attr-defined]
    trainer.kept.extend([] for _ in range(30_000))  # type: ignore[attr-defined]
    cycle()
    loss: torch.Tensor = trainer.model(batch[0]).square().mean()
    return loss


@pytest.mark.slow
def test_steps_that_allocate_are_collected_by_python(
    make_trainer: Make, seen: list[tuple[int, str]], no_nodes: None
) -> None:
    """Without the hook Python collects all generations in the middle of such steps: the test below would see it."""
    trainer = make_trainer(batches=12, train_step=allocate, default_hooks=NO_HOOK)

    follow(trainer).train()

    assert [where for generation, where in seen if generation == ALL and where.startswith("step")]


@pytest.mark.slow
def test_no_full_collection_inside_a_step(
    make_trainer: Make, seen: list[tuple[int, str]], no_nodes: None
) -> None:
    """With it nothing at all is collected between before_train_iter and the end of after_train_iter, however much a
    step allocates; a full collection comes once before the first step, then after evaluations."""
    trainer = make_trainer(
        batches=12, max_epochs=2, train_step=allocate, val_loader=[torch.zeros(1)],
        val_step=lambda trainer, batch: {"acc": 1.0}, hooks=[GarbageCollectionHook(interval=1)],
    )  # fmt: skip
    assert [row.priority for row in trainer.bus.plan("after_train_iter")][-1] == 100
    follow(trainer)
    seen.clear()

    trainer.train()

    assert not [where for _, where in seen if where.startswith("step")]
    full = [where for generation, where in seen if generation == ALL]
    assert full == ["", "after_val", "after_val"]


@pytest.mark.slow
def test_generations_take_turns(make_trainer: Make, asked: list[tuple[int, str]]) -> None:
    """After every `interval` iterations the youngest, after ten times as many the middle, after a hundred times as
    many all: the same iterations whatever was allocated, so the same on all ranks."""
    trainer = make_trainer(batches=2, max_iters=405, hooks=[GarbageCollectionHook(interval=2)])
    due: list[tuple[int, int]] = []

    @trainer.bus.on("after_train_iter", priority=99)
    def note(event: Any) -> None:
        Now.name = str(event.iter + 1)

    trainer.train()

    due = [(generation, int(where)) for generation, where in asked if where.isdigit() and int(where) < 405]
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
        loss = trainer.model(batch[0]).square().mean()
        return {"loss": loss, "extra": cycle()}

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
    """Model, optimizer and all that was imported are out of the collector's sight from then on, garbage is not, and
    full collections look at what came since."""
    seen: dict[int, tuple[int, int]] = {}
    trainer = make_trainer(batches=8, max_epochs=2, hooks=[GarbageCollectionHook(interval=5)])
    trainer.bus.subscribe(lambda event: cycle() and None, "after_train_iter", once=True)

    @trainer.bus.on("after_train_iter", priority=100)
    def look(event: Any) -> None:
        seen[event.iter + 1] = gc.get_freeze_count(), len(Node.alive)

    trainer.train()

    assert seen[4] == (0, 2)
    assert seen[5][0] > 50_000
    assert seen[5][1] == 0


@pytest.mark.slow
def test_everything_is_looked_at_once_before_the_first_step(
    make_trainer: Make, asked: list[tuple[int, str]]
) -> None:
    """The one long collection is made where no iteration waits for it; until what lasts is frozen no other is."""
    trainer = follow(make_trainer(batches=4, max_epochs=2, hooks=[GarbageCollectionHook(interval=10)]))
    trainer.train()

    assert asked == [(ALL, "")]


def test_freeze_can_be_declined(make_trainer: Make, asked: list[tuple[int, str]]) -> None:
    """`freeze=False` collects at the same points, and freezes nothing."""
    trainer = make_trainer(batches=4, max_epochs=2, hooks=[GarbageCollectionHook(interval=2, freeze=False)])
    frozen: list[int] = []
    trainer.bus.subscribe(
        lambda event: frozen.append(gc.get_freeze_count()), "after_train_iter", priority=100
    )

    trainer.train()

    assert set(frozen) == {0}
    assert [generation for generation, _ in asked] == [ALL, YOUNG, YOUNG, YOUNG, YOUNG]


def error_at(where: str) -> Callable[[Trainer], None]:
    """A handler that raises when an event comes for the first time."""

    def arm(trainer: Trainer) -> None:
        def fail(event: Any) -> None:
            raise RuntimeError("mine")

        trainer.bus.subscribe(fail, where, priority=50, name="fails")

    return arm


def ctrl_c_at(where: str) -> Callable[[Trainer], None]:
    """A Ctrl-C while handlers of an event run."""

    def arm(trainer: Trainer) -> None:
        def interrupt(event: Any) -> None:
            raise KeyboardInterrupt

        trainer.bus.subscribe(interrupt, where, priority=0, name="is interrupted")

    return arm


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    "arm",
    [
        error_at("before_run"), error_at("before_train"), error_at("after_train_iter"), error_at("after_train_epoch"),
        error_at("after_train"), error_at("after_run"), ctrl_c_at("before_train_iter"), ctrl_c_at("after_train_epoch"),
        ctrl_c_at("after_train"), lambda trainer: trainer.bus.subscribe(
            lambda trainer, event: trainer.stop("enough"), "after_train_iter"),
    ],
)  # fmt: skip
def test_python_is_left_as_it_was(make_trainer: Make, arm: Callable[[Trainer], None]) -> None:
    """Whatever ends the training, and wherever: collection is automatic again, nothing is frozen. (The fixture
    looks.)"""
    trainer = make_trainer(hooks=[GarbageCollectionHook(interval=1)])
    arm(trainer)

    with suppress(RuntimeError, KeyboardInterrupt):
        trainer.train()


@pytest.mark.slow
def test_ctrl_c_before_its_turn_in_after_train(make_trainer: Make) -> None:
    """Where a Ctrl-C keeps `after_train` from the hook, `after_run` reaches it."""

    def interrupt(event: Any) -> None:
        raise KeyboardInterrupt

    with Bus() as bus:
        bus.subscribe(interrupt, "after_train", priority=0)
        trainer = make_trainer(hooks=[GarbageCollectionHook(interval=1)], bus=bus)

        with pytest.raises(KeyboardInterrupt):
            trainer.train()


@pytest.mark.slow
def test_a_loop_that_is_left_puts_it_back(make_trainer: Make) -> None:
    """`break` out of a hand-written loop is an end like any other."""
    trainer = make_trainer(hooks=[GarbageCollectionHook(interval=1)])
    within: list[bool] = []

    for _ in trainer.epochs():
        for batch in trainer.batches(trainer.train_loader):  # type: ignore[arg-type]
            trainer.outputs = {"loss": trainer.model(batch[0]).sum()}
            within.append(gc.isenabled())
        break

    assert within == [False] * 4


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
    """A training in a daemon thread has no end of its own; what is frozen then would be a leak, which the bindings of
    Triton print."""
    ran = forked.run(["-c", DAEMON], cwd=tmp_path)

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False True\nTrue 0\n", "")


def test_who_switched_collection_off_keeps_it_off(make_trainer: Make, asked: list[tuple[int, str]]) -> None:
    """Where the automatic collection was off before, the hook collects nothing, freezes nothing and switches nothing
    on."""
    gc.disable()
    try:
        make_trainer(batches=8, max_epochs=2, hooks=[GarbageCollectionHook(interval=1)]).train()

        assert not gc.isenabled()
        assert (asked, gc.get_freeze_count()) == ([], 0)
    finally:
        gc.enable()


def test_who_froze_objects_keeps_them_frozen(make_trainer: Make) -> None:
    """What somebody else froze is neither thawed nor added to."""
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        during: list[int] = []
        trainer = make_trainer(hooks=[GarbageCollectionHook(interval=1)])
        trainer.bus.subscribe(lambda event: during.append(gc.get_freeze_count()), "after_train_epoch")

        trainer.train()

        assert during[0] <= frozen
        assert gc.get_freeze_count() > garbage_collection.FROZEN_AT_START
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_a_training_within_a_training(make_trainer: Make) -> None:
    """The inner one finds collection off, and leaves it so for the outer one."""
    states: list[bool] = []
    inner = make_trainer(batches=2, hooks=[GarbageCollectionHook(interval=1)])
    outer = make_trainer(batches=2, hooks=[GarbageCollectionHook(interval=1)])
    outer.bus.subscribe(lambda event: inner.train(), "after_train_iter", once=True)
    outer.bus.subscribe(lambda event: states.append(gc.isenabled()), "after_train_iter", priority=60)

    outer.train()

    assert states == [False, False]


def test_evaluation_alone_is_left_to_python(make_trainer: Make, asked: list[tuple[int, str]]) -> None:
    """Outside a training nothing is switched off."""
    trainer = make_trainer(
        val_loader=[torch.zeros(1)] * 4, val_step=lambda trainer, batch: {"on": float(gc.isenabled())},
        hooks=[GarbageCollectionHook(interval=1)],
    )  # fmt: skip

    assert trainer.val() == {"on": 1.0}
    assert asked == []


class CollectorState(Dataset[torch.Tensor]):
    """Says whether its process collects automatically."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(gc.isenabled()), float(os.getpid())], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_loader_workers_collect_automatically(make_trainer: Make) -> None:
    """A worker inherits a collector that is off, and has nobody who collects: it is switched on there."""
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


def test_nothing_to_save(make_trainer: Make) -> None:
    """It has no state: a resumed training collects at the same iterations all by itself."""
    assert not GarbageCollectionHook().stateful


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        ({"interval": 2.5}, TypeError, "interval must be an int, got 2.5"),
        ({"freeze": 1}, TypeError, "freeze must be True or False, got 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """In the constructor."""
    with pytest.raises(error, match=message):
        GarbageCollectionHook(**options)
