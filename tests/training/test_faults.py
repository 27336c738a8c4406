"""What goes wrong in the background while a model is trained.

In each case the training ends on time, with the weights it would have had without, the counts are exact, and the
summary and what `bus.close` returns say what happened.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from eventloop import Bus, Trainer
from eventloop.background.workers.subscriber import ProcessLane
from eventloop.bus.subscription import SubscriptionStats
from eventloop.events import Event
from eventloop.writers import JSONLWriter, TensorBoardWriter
from eventloop.writers.event_log_writer import EventLogWriter
from eventloop.writers.writer import Writer
from tests.support.fault_writers import FaultNumbered, NeverReturns, RaisesAtThird, TakesItsTime
from tests.support.trainers import DEADLINE, MakeTrainer, batches
from tests.writers.test_event_log_disk import WRITERS, fill_disk

pytestmark = pytest.mark.slow

BATCHES = 15
"""Of an epoch; there are two."""
PROMPT = DEADLINE / 2
"""Seconds that mean somebody waited for a faulty subscriber after all."""


class FaultEchoed(Event):
    """An event of a subscriber's own."""

    depth: int


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return list(trainer.model.state_dict().values())


@pytest.fixture
def without(make_trainer: MakeTrainer, tmp_path: Path) -> list[torch.Tensor]:
    """The weights of the training without anything in the background."""
    trainer = make_trainer(work_dir=tmp_path / "without", train_loader=batches(BATCHES))
    trainer.train()
    return weights(trainer)


class Ended:
    """A training that was closed: its account of one subscriber, in the summary and in the report of the close."""

    def __init__(self, trainer: Trainer, name: str, within: float = PROMPT) -> None:
        began = monotonic()
        trainer.train()
        report = trainer.bus.close()
        assert monotonic() - began < within
        assert trainer.iter == 2 * BATCHES
        self.weights = weights(trainer)
        self.complete = report.complete
        self.summary = trainer.summary()
        self.stats: SubscriptionStats = next(stats for stats in report.stats if stats.name == name)

    @property
    def total(self) -> int:
        stats = self.stats
        return stats.delivered + stats.failed + stats.dropped + stats.queued

    @property
    def missing(self) -> str:
        """What the summary says was not delivered."""
        return self.summary.partition("not everything was delivered:")[2]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def placed(writer: Writer, place: str) -> Writer:
    writer.offload = place
    return writer


in_both_places = pytest.mark.parametrize("place", ["thread", "process"])


@in_both_places
def test_a_writer_that_raises(make_trainer: MakeTrainer, without: list[torch.Tensor], place: str) -> None:
    """What it had is delivered, one has failed, and the others are dropped."""
    trainer = make_trainer(train_loader=batches(BATCHES), writers=[placed(RaisesAtThird(), place)])
    ended = Ended(trainer, "faulty")

    assert same(ended.weights, without)
    # a process has been sent more by then, and takes none of it
    assert (ended.stats.delivered, ended.stats.failed, ended.stats.queued) == (2, 1, 0)
    assert (ended.total, ended.complete) == (2 * BATCHES, True)
    assert "[error] ValueError: no luck" in ended.stats.error
    assert "faulty: 27 dropped, 1 failed, 0 left - [error] ValueError: no luck" in ended.missing


@in_both_places
def test_a_writer_that_never_returns(
    make_trainer: MakeTrainer, without: list[torch.Tensor], place: str
) -> None:
    """The training waits for it as long as was agreed, once at its end and once at the close."""
    writer = NeverReturns()
    trainer = make_trainer(
        train_loader=batches(BATCHES), writers=[placed(writer, place)], bus=Bus(drain_timeout=0.5)
    )
    ended = Ended(trainer, "faulty")
    writer.gate.set()

    assert same(ended.weights, without)
    assert not ended.complete
    assert (ended.stats.delivered, ended.stats.queued, ended.total) == (0, 2 * BATCHES, 2 * BATCHES)
    assert "faulty: 0 dropped, 0 failed, 30 left" in ended.missing


@pytest.mark.parametrize("module", WRITERS)
def test_a_full_disk(
    make_trainer: MakeTrainer, without: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """The writer has failed, and every event that it asked for is in its account."""
    make, number = WRITERS[module]
    fill_disk(monkeypatch, module, number)
    trainer = make_trainer(train_loader=batches(BATCHES), writers=[make()])
    name = {"jsonl": JSONLWriter, "tensorboard": TensorBoardWriter, "event_log_writer": EventLogWriter}[
        module
    ].__name__
    # so that there are several writes, however quick the training
    trainer.bus.subscribe(lambda event: trainer.bus.flush(), "after_train_iter", every=5)
    heard: list[Event] = []
    events = next(s for s in trainer.bus._subscribers._subscriptions if s.name == name)
    trainer.bus.subscribe(
        heard.append, *(events.events or "*"), offload="thread", name="counts", queue=10_000
    )
    ended = Ended(trainer, name)

    assert same(ended.weights, without)
    assert (ended.stats.failed > 0, ended.stats.queued, ended.complete) == (True, 0, True)
    # "*" hears of the failure itself, which the failed one is not told of
    assert len(heard) - sum(type(event).__name__ == "HandlerFailed" for event in heard) == ended.total
    assert "No space left on device" in ended.stats.error
    assert f"{name}: " in ended.missing


class KillsMidBatch:
    """Kills a writer's worker in every fifth iteration, in the middle of a batch, when another one was over since."""

    def __init__(self, trainer: Trainer) -> None:
        self.bus = trainer.bus
        self.path = trainer.work_dir / "taken.txt"
        self.lane = next(
            s.lane for s in trainer.bus._subscribers._subscriptions if isinstance(s.lane, ProcessLane)
        )
        self.killed: list[int] = []
        self.emitted = self.over = 0

    def __call__(self, event: Any) -> None:
        if event.iter % 5 != 4 or len(self.killed) == 5:
            return
        deadline = monotonic() + DEADLINE
        while not self.kill():
            assert monotonic() < deadline
            self.bus.emit(FaultNumbered(number=self.emitted))
            self.emitted += 1
            sleep(0.004)

    def kill(self) -> bool:
        worker = self.lane.worker
        if worker is None or worker.pid in self.killed or not self.path.exists():
            return False
        os.kill(worker.pid, signal.SIGSTOP)  # what it is at, it stays at
        lines = self.path.read_text(encoding="utf-8").split()
        over = lines.count("over")
        if over <= self.over or lines[-1] == "over":
            os.kill(worker.pid, signal.SIGCONT)
            return False
        os.kill(worker.pid, signal.SIGKILL)
        self.killed.append(worker.pid)
        self.over = over
        return True


def test_a_worker_that_is_killed_five_times_in_the_middle_of_a_batch(
    make_trainer: MakeTrainer, without: list[torch.Tensor]
) -> None:
    """Each event is written, those of the torn batches again, and each is counted once."""
    trainer = make_trainer(train_loader=batches(BATCHES), writers=[TakesItsTime()])
    kills = KillsMidBatch(trainer)
    trainer.bus.subscribe(kills, "after_train_iter", priority="LOWEST")
    ended = Ended(trainer, "faulty")

    assert same(ended.weights, without)
    assert len(kills.killed) == kills.lane.deaths == 5
    taken = kills.path.read_text(encoding="utf-8").split()
    assert {int(line) for line in taken if line != "over"} == {*range(kills.emitted)}
    assert (ended.stats.delivered, ended.total, ended.complete) == (kills.emitted, kills.emitted, True)
    assert ended.missing == ""


def test_a_subscriber_that_emits(make_trainer: MakeTrainer, without: list[torch.Tensor]) -> None:
    """It is given its own events, too, and all of them are in its account."""
    trainer = make_trainer(train_loader=batches(BATCHES))

    def echo(event: Any) -> None:
        depth = event.depth if isinstance(event, FaultEchoed) else 0
        if depth < 3:
            trainer.bus.emit(FaultEchoed(depth=depth + 1))

    @trainer.bus.on("after_train_epoch")
    def settle(event: Any) -> None:
        for _ in range(4):  # each flush waits for what was emitted before it
            trainer.bus.flush()

    trainer.bus.subscribe(echo, "after_train_iter", FaultEchoed, offload="thread", name="echo")
    ended = Ended(trainer, "echo")

    assert same(ended.weights, without)
    assert (ended.stats.delivered, ended.total) == (8 * BATCHES, 8 * BATCHES)
    assert (ended.complete, ended.missing) == (True, "")


def test_subscribers_that_come_and_go(make_trainer: MakeTrainer, without: list[torch.Tensor]) -> None:
    """Another thread subscribes and cancels all the time; whoever stays hears everything, in order."""
    trainer = make_trainer(train_loader=batches(BATCHES))
    stays: list[int] = []
    trainer.bus.subscribe(
        lambda event: stays.append(event.iter), "after_train_iter", offload="thread", name="stays"
    )
    came, over, one_more = 0, threading.Event(), threading.Semaphore(0)

    def come_and_go() -> None:
        nonlocal came
        while not over.is_set():
            subscription = trainer.bus.subscribe(
                lambda event: None, "*", offload="thread" if came % 2 else None
            )
            one_more.release()
            subscription.cancel()
            came += 1

    @trainer.bus.on("before_train_iter")
    def wait_for_one(event: Any) -> None:
        assert one_more.acquire(timeout=DEADLINE)

    restless = threading.Thread(target=come_and_go)
    restless.start()
    trainer.bus.subscribe(lambda event: over.set(), "after_train")
    ended = Ended(trainer, "stays")
    restless.join(DEADLINE)

    assert same(ended.weights, without)
    assert came >= 2 * BATCHES
    assert stays == [*range(2 * BATCHES)]
    assert (ended.stats.delivered, ended.total, ended.missing) == (2 * BATCHES, 2 * BATCHES, "")


@pytest.mark.parametrize("overflow", ["spill", "drop_oldest", "drop_newest", "latest", "block"])
def test_more_than_a_subscriber_can_take(
    make_trainer: MakeTrainer, without: list[torch.Tensor], overflow: Any
) -> None:
    """Each policy counts what it drops of a million events, and says so."""
    trainer = make_trainer(train_loader=batches(BATCHES))
    seen, each = 0, 1_000_000 // (2 * BATCHES)

    def take(events: list[Event]) -> None:
        nonlocal seen
        seen += len(events)

    @trainer.bus.on("after_train_iter")
    def flood(event: Any) -> None:
        for number in range(each):
            trainer.bus.emit(FaultEchoed(depth=number))

    queue = 1024 if overflow == "block" else 8  # there each time that it is full is a change of threads
    trainer.bus.subscribe(
        take, FaultEchoed, offload="thread", name="flooded", queue=queue, overflow=overflow, batch=True
    )
    ended = Ended(trainer, "flooded", within=10 * DEADLINE)

    assert same(ended.weights, without)
    assert ended.total == each * 2 * BATCHES
    assert (ended.stats.delivered, ended.stats.queued, ended.complete) == (seen, 0, True)
    lossless = overflow in ("spill", "block")
    assert (ended.stats.dropped == 0) == lossless
    assert ("flooded: " in ended.missing) == (not lossless)
