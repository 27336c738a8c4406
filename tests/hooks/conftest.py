"""What the tests of the hooks share: a tiny regression that trains in milliseconds, and a clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from eventloop import Trainer
from eventloop.events import ScalarsLogged
from eventloop.hooks import CheckpointHook, Hook
from tests.support.internals import set_clock

torch.set_num_threads(1)

Batch = tuple[torch.Tensor, torch.Tensor]
Make = Callable[..., Trainer]
Record = Callable[[Trainer], list[ScalarsLogged]]
Scripted = Callable[..., dict[str, Any]]
Train = Callable[..., CheckpointHook]


class Clock:
    """A `perf_counter` that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class PutNumber(Hook):
    """Puts the number of each iteration."""

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Put it, early enough to be logged in the same iteration."""
        trainer.metrics.put_scalar("number", float(event.iter))


class SlowLoader:
    """A loader whose every batch takes so many seconds on a clock."""

    def __init__(self, clock: Clock, seconds: float, batches: Sequence[Any]) -> None:
        self.clock, self.seconds, self.batches = clock, seconds, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.clock.advance(self.seconds)
            yield batch


def rates(start: Any = 1.0) -> dict[str, Any]:
    """Options of a trainer whose rate is halved after each iteration."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=start)
    return {"model": model, "optimizer": optimizer, "schedulers": [StepLR(optimizer, 1, gamma=0.5)]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the loop and of the hooks that measure; use binary fractions, their sums are exact."""
    clock = Clock()
    set_clock(
        monkeypatch, clock, "step_clock", "iter_timer", "optimizer", "update_batches", "checkpoint", "commit"
    )
    return clock


@pytest.fixture
def value_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which tensors' values the training thread asks for."""
    names: list[str] = []
    training_thread = threading.get_ident()
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "numpy", "cpu"):
        original = getattr(torch.Tensor, name)

        def watched(self: Any, *args: Any, _name: str = name, _original: Any = original, **kw: Any) -> Any:
            if threading.get_ident() == training_thread:
                names.append(_name)
            return _original(self, *args, **kw)

        monkeypatch.setattr(torch.Tensor, name, watched)
    return names


@pytest.fixture
def make_batches() -> Callable[[int], list[Batch]]:
    """A loader of so many batches, the same each time."""

    def make(count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(7)
        return [
            (torch.randn(3, 2, generator=generator), torch.randn(3, 1, generator=generator))
            for _ in range(count)
        ]

    return make


@pytest.fixture
def make_trainer(
    tmp_path: Path, make_batches: Callable[[int], list[Batch]]
) -> Iterator[Callable[..., Trainer]]:
    """Build trainers: `batches` an epoch, one epoch unless told; no checkpoints unless a hook is given."""
    built: list[Trainer] = []

    def make(*, batches: int = 4, **options: Any) -> Trainer:
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes 1 ms, for other devices
        model = options.pop("model", None) or torch.nn.Linear(2, 1)
        options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.125))
        options.setdefault("train_loader", make_batches(batches))
        options.setdefault("work_dir", tmp_path / "run")
        if "train_step" not in options:
            options.setdefault("loss_fn", F.mse_loss)
        if "max_iters" not in options:
            options.setdefault("max_epochs", 1)
        options["default_hooks"] = {"checkpoint": None, **options.get("default_hooks", {})}
        built.append(Trainer(model, **options))
        return built[-1]

    yield make
    for trainer in built:
        trainer.close()


@pytest.fixture
def scripted() -> Callable[..., dict[str, Any]]:
    """Trainer options for validations that return these metrics, one mapping (or value of `acc`) each; without a sanity
    validation, which would take the first."""

    def make(*results: float | dict[str, float]) -> dict[str, Any]:
        left = iter(results)

        def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
            result = next(left)
            return result if isinstance(result, dict) else {"acc": result}

        return {"val_loader": [torch.zeros(1)], "val_step": val_step, "sanity_val": 0}

    return make


@pytest.fixture
def train(make_trainer: Make, scripted: Scripted) -> Train:
    """Train until there were so many epochs in all, one a score, after a resume from `resumed`; return the hook."""

    def run(
        *scores: float | dict[str, float], resumed: str = "", epochs: int = 0, **options: Any
    ) -> CheckpointHook:
        hook = CheckpointHook(**{"save_best": "acc", "save_last": False, **options})
        trainer = make_trainer(max_epochs=epochs or len(scores), hooks=[hook], **scripted(*scores))
        if resumed:
            trainer.resume(resumed)
        trainer.train()
        return hook

    return run


@pytest.fixture
def record_scalars() -> Callable[[Trainer], list[ScalarsLogged]]:
    """Collect the `scalars_logged` of a trainer into a list, complete once a run has ended."""

    def record(trainer: Trainer) -> list[ScalarsLogged]:
        seen: list[ScalarsLogged] = []
        trainer.bus.subscribe(seen.append, "scalars_logged", offload="thread")
        return seen

    return record


@pytest.fixture
def record_names() -> Callable[..., list[str]]:
    """Collect the names of events as a trainer emits them, at the lowest priority."""

    def record(trainer: Trainer, *events: str) -> list[str]:
        seen: list[str] = []
        for name in events:
            trainer.bus.subscribe(
                lambda event, name=name: seen.append(name), name, priority="LOWEST", name=f"record {name}"
            )
        return seen

    return record


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[str]]:
    """The names of the checkpoints and files in the work directory, hidden ones too, sorted by their numbers; the run's
    records of its costs, its options and its owner are left out."""

    def listing(folder: str = "run") -> list[str]:
        names = {path.name for path in (tmp_path / folder).iterdir() if not path.name.startswith(".owner-")}
        names -= {"costs.json", "heartbeat.json", "run.json", "traces"}
        return sorted(names, key=lambda name: (len(name), name))

    return listing
