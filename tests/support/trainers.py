"""What the trainer's tests share: a tiny model, its data, trainers with short lives, and records of events."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Bus, Trainer
from eventloop.checkpoint.commit import commit
from eventloop.checkpoint.saving.saver import Saver
from eventloop.events import Event
from eventloop.writers import Writer
from tests.support import saving
from tests.support.internals import substitute
from tests.support.reading import Reads, watch_reads
from tests.support.saving import Gate, Late
from tests.support.signals import Heard, receiving_signals

torch.set_num_threads(1)
DEADLINE = saving.DEADLINE

MakeTrainer = Callable[..., Trainer]


def tiny_model() -> nn.Module:
    """Two inputs, three classes, and a dropout whose mask depends on the random state."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes 1 ms, for other devices
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def samples(count: int) -> TensorDataset:
    """Points and the classes they belong to."""
    inputs = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


def batches(count: int, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A loader of `count` batches that draws nothing from the random state."""
    inputs, target = samples(count * size).tensors
    return list(zip(inputs.split(size), target.split(size), strict=True))


def shuffled(count: int, size: int = 4, **options: Any) -> DataLoader[Any]:
    """A loader of `count` batches in random order."""
    return DataLoader(samples(count * size), batch_size=size, shuffle=True, **options)


def build_trainer(work_dir: Path, **changes: Any) -> Trainer:
    """A trainer of the tiny model, with one argument or another changed."""
    model = changes.pop("model", None) or tiny_model()
    arguments: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loss_fn": F.cross_entropy,
        "train_loader": batches(3),
        "work_dir": work_dir,
        "bus": Bus(drain_timeout=DEADLINE),
        **changes,
    }
    if "max_epochs" not in arguments and "max_iters" not in arguments:
        arguments["max_epochs"] = 2
    if "train_step" in arguments:
        del arguments["loss_fn"]
    return Trainer(model, **arguments)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    """Build trainers of the tiny model, with one argument or another changed; they are closed afterwards."""
    made: list[Trainer] = []

    def make(**changes: Any) -> Trainer:
        made.append(build_trainer(**{"work_dir": tmp_path / "run", **changes}))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """How often which thread asked a tensor for its value."""
    return watch_reads(monkeypatch)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Let go at the end of the test."""
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """A process that is killed is waited for until it is gone, however busy the machine is: one that was not is a warning
    in whatever test comes next."""
    with pytest.MonkeyPatch.context() as patch:
        substitute(patch, "child.END_SECONDS", DEADLINE)
        yield


@pytest.fixture
def make_saver(gate: Gate) -> Iterator[Callable[..., Saver]]:
    """Make savers, with a process if it is asked for."""
    made: list[Saver] = []

    def make(write: Any = commit, *, process: bool = False) -> Saver:
        made.append(Saver(write, process=process))
        return made[-1]

    yield make
    gate.open.set()
    for saver in made:
        saver.close()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """Let go at the end of the test."""
    late = Late(monkeypatch)
    yield late
    late.go.set()


Row = tuple[str, int, int]
"""An event's name, `iter` and `epoch`."""


def record(trainer: Trainer, *events: str) -> list[Row]:
    """Note every event of the loop, or those named, with its counters, as it happens."""
    rows: list[Row] = []

    def append_row(event: Any) -> None:
        rows.append((event_name(event), event.iter, event.epoch))

    trainer.bus.subscribe(append_row, *(events or LOOP_EVENTS), priority="LOWEST", name="record")
    return rows


def collect(trainer: Trainer, *events: str) -> list[Any]:
    """Keep the events named, as they happen."""
    seen: list[Any] = []
    trainer.bus.subscribe(seen.append, *events, priority="LOWEST", name="collect")
    return seen


def event_name(event: Event) -> str:
    """What an event is subscribed by."""
    return str(event.__struct_config__.tag)


def names(rows: list[Row]) -> list[str]:
    """The names alone."""
    return [name for name, _, _ in rows]


LOOP_EVENTS = tuple(
    f"{when}_{what}"
    for when in ("before", "after")
    for what in (
        "run",
        *(f"{mode}{part}" for mode in ("train", "val", "test") for part in ("", "_epoch", "_iter")),
    )
)


@pytest.fixture
def received() -> Iterator[Heard]:
    """The signals that a handler of the program's own got: with one, `train` returns."""
    with receiving_signals() as taken:
        yield taken


@pytest.fixture
def default_handlers() -> Iterator[None]:
    """The handlers a program has that installs none."""
    numbers: dict[int, Any] = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGUSR1: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    yield
    assert {number: signal.getsignal(number) for number in numbers} == numbers
    for number, handler in before.items():
        signal.signal(number, handler)


class Stuck(Writer):
    """Does not return from its first event before it is let go."""

    events = ("*",)

    def __init__(self) -> None:
        self.gate = threading.Event()

    def write(self, event: Event) -> None:
        self.gate.wait(DEADLINE)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    """A writer that hangs, let go at the end of the test."""
    writer = Stuck()
    yield writer
    writer.gate.set()
