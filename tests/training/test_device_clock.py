"""Times on the device: recorded in sampled iterations, read on the background loop, never waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.model.device_clock import MEASURED_FIRST, PERIOD, DeviceClock, device_clock
from tests.support.cuda import set_cuda
from tests.support.internals import substitute
from tests.support.trainers import DEADLINE, MakeTrainer, batches

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Device:
    """A device whose queue is at `now` milliseconds, and which has passed everything once it is `done`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = threading.Event()
        self.records = 0
        self.read_on: set[str] = set()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Stands for CUDA's streams and events; each record is a millisecond after the one before."""
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            device.records += 1
            device.now += 1.0
            self.at = device.now

        def query(self) -> bool:
            device.read_on.add(threading.current_thread().name)
            return device.done.is_set()

        def elapsed_time(self, end: Any) -> float:
            assert device.done.is_set()
            device.read_on.add(threading.current_thread().name)
            return float(end.at - self.at)

        def synchronize(self) -> None:
            raise AssertionError("nobody may wait for the device")

    set_cuda(monkeypatch, Event=Event, current_stream=lambda where: "the current stream")
    yield device
    device.done.set()


@pytest.fixture
def on_device(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """Trainers that take their model for one on the device."""

    def make(**options: Any) -> Trainer:
        substitute(
            monkeypatch,
            "trainer.device_clock",
            lambda model, post: DeviceClock(torch.device("cuda", 0), post),
        )
        options = {"default_hooks": {"checkpoint": None}, **options}
        return make_trainer(**options)

    return make


def test_phases_are_those_between_the_marks(on_device: Callable[..., Trainer], device: Device) -> None:
    """Forward, backward and step of each sampled iteration, in seconds, are read on the background loop. The first
    iterations after the warm-up are sampled, and then one in `PERIOD`: five events each, none in the others."""
    device.done.set()
    trainer = on_device(max_iters=PERIOD, train_loader=batches(PERIOD))

    trainer.train()

    found = trainer.costs().device
    assert found is not None
    assert found.iterations == MEASURED_FIRST + 1
    assert device.records == 5 * found.iterations
    for phase in (found.forward, found.backward, found.optimizer):
        assert phase == pytest.approx(found.iterations * 0.001)
    assert device.read_on == {"eventloop background"}


def test_phases_of_an_iteration_of_several_batches(on_device: Callable[..., Trainer], device: Device) -> None:
    """Forward and backward are summed over its batches, and the step begins after the last backward."""
    device.done.set()
    hooks = {"optimizer": {"cumulative_iters": 2}, "checkpoint": None}
    trainer = on_device(max_iters=5, train_loader=batches(10), unit="update", default_hooks=hooks)

    trainer.train()

    found = trainer.costs().device
    assert found is not None
    assert found.iterations == 2
    for phase in (found.forward, found.backward, found.optimizer):
        assert phase == pytest.approx(2 * 0.002)


def test_a_device_that_lags_holds_nobody(on_device: Callable[..., Trainer], device: Device) -> None:
    """Training goes on while nothing was passed yet; the times come when it is."""
    trainer = on_device(max_iters=20, train_loader=batches(20))
    seen: list[int] = []

    @trainer.bus.on("after_train", priority="LOWEST")
    def record_samples(trainer: Trainer, event: Any) -> None:
        assert trainer.clock.device is not None
        seen.append(trainer.clock.device.samples)
        device.done.set()

    trainer.train()

    assert seen == [0]
    assert trainer.costs().device is not None


def test_backward_by_hand_is_in_the_forward_phase(on_device: Callable[..., Trainer], device: Device) -> None:
    """No mark separates them in a hand-written loop without the optimizer hook."""
    device.done.set()
    trainer = on_device(
        default_hooks={"optimizer": None, "checkpoint": None}, max_iters=20, train_loader=batches(20)
    )

    for _ in trainer.epochs():
        for batch in trainer.batches(batches(20)):
            trainer.outputs = trainer.train_step(batch)
            trainer.outputs["loss"].backward()

    found = trainer.costs().device
    assert found is not None
    assert found.forward > 0
    assert (found.backward, found.optimizer) == (0.0, 0.0)


def test_a_model_on_the_cpu_has_no_device_clock(make_trainer: MakeTrainer) -> None:
    """Nothing is recorded, and the record says nothing of a device."""
    trainer = make_trainer()

    trainer.train()

    assert device_clock(trainer.model, trainer.bus.post) is None
    assert trainer.costs().device is None


@needs_cuda
def test_a_real_device_is_timed(make_trainer: MakeTrainer) -> None:
    """On a GPU, forward, backward and step all take some time there."""
    trainer = make_trainer(max_iters=30, train_loader=batches(30), device="cuda")

    trainer.train()
    assert trainer.bus.flush(DEADLINE)

    found = trainer.costs().device
    assert found is not None
    assert found.iterations >= MEASURED_FIRST
    assert min(found.forward, found.backward, found.optimizer) > 0
