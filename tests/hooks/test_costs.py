"""CostsHook: the cost record of a run, in its directory."""

from __future__ import annotations

import os
import shutil
import signal
import textwrap
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from eventloop import Trainer
from eventloop.costs.records import FILE, read_costs
from eventloop.events import LoaderStall
from eventloop.writers import JSONLWriter
from tests import forked, no_threads
from tests.conftest import DEADLINE
from tests.hooks.conftest import Clock, Make, Scripted
from tests.support.internals import substitute


def test_a_run_leaves_its_record(make_trainer: Make) -> None:
    """Phases of all iterations, every default handler, and every writer with all it was given."""
    trainer = make_trainer(writers=[JSONLWriter()], max_epochs=2)

    trainer.train()

    costs = read_costs(trainer.work_dir)
    assert costs.complete
    assert costs.phases.iterations == 8
    assert {"OptimizerHook.after_train_iter", "IterTimerHook.after_train_iter"} <= {
        h.name for h in costs.handlers
    }
    (writer,) = costs.subscribers
    assert writer.delivered == trainer.bus.stats()[-1].delivered > 0
    assert writer.queued == 0


def test_the_live_record_needs_no_file(make_trainer: Make) -> None:
    """`trainer.costs()` is there at any time, on the training thread."""
    seen: list[int] = []
    trainer = make_trainer(default_hooks={"costs": None})
    trainer.bus.subscribe(
        lambda trainer, event: seen.append(trainer.costs().phases.iterations), "after_train_iter"
    )

    trainer.train()

    assert seen == [0, 1, 2, 3]
    assert not (trainer.work_dir / FILE).exists()


@pytest.mark.parametrize(
    ("end", "outcome"),
    [(None, "completed"), ("stop", "enough"), ("error", "error: ArithmeticError: on purpose")],
)
def test_the_record_says_how_the_run_ended(make_trainer: Make, end: str | None, outcome: str) -> None:
    """Completed, stopped for a reason, or by which error; and how long it was, evaluations and all."""

    def ends(trainer: Trainer, event: Any) -> None:
        if end == "error":
            raise ArithmeticError("on purpose")
        if end == "stop":
            trainer.stop("enough")

    trainer = make_trainer()
    trainer.bus.subscribe(ends, "after_train_iter", start=2)
    with suppress(ArithmeticError):
        trainer.train()

    costs = read_costs(trainer.work_dir)
    assert costs.outcome == outcome
    assert costs.phases.iterations == {None: 4, "stop": 3, "error": 2}[end]
    assert costs.seconds > costs.phases.wall + costs.evaluation


def test_a_validation_leaves_the_record_of_the_training(
    make_trainer: Make, scripted: Scripted, tmp_path: Path
) -> None:
    """A run without a training writes none."""
    make_trainer(work_dir=tmp_path / "run").train()

    make_trainer(work_dir=tmp_path / "run", **scripted(1.0)).val()

    assert read_costs(tmp_path / "run").phases.iterations == 4


def test_the_first_record_is_early(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two seconds, then after twice as long each time, up to the interval."""
    now, written = [0.0], []
    substitute(monkeypatch, "costs.monotonic", lambda: now[0])
    substitute(monkeypatch, "costs._try_to_write", lambda trainer, costs: written.append(now[0]))

    def tick(event: Any) -> None:
        now[0] += 1.0

    trainer = make_trainer(batches=60)
    trainer.bus.subscribe(tick, "before_train_iter")

    trainer.train()

    assert written[:-1] == [2.0, 6.0, 14.0, 30.0, 60.0]


def test_a_run_under_way_has_a_record(make_trainer: Make) -> None:
    """Written meanwhile, by another thread, and marked as not the last one."""
    trainer = make_trainer(batches=40, default_hooks={"costs": {"interval_seconds": 1e-9}})

    @trainer.bus.on("after_train_iter", priority="LOWEST", start=20, once=True)
    def await_file(event: Any) -> None:
        deadline = monotonic() + DEADLINE
        while not (trainer.work_dir / FILE).exists():
            assert monotonic() < deadline
            sleep(0.002)
        assert not read_costs(trainer.work_dir).complete

    trainer.train()

    assert read_costs(trainer.work_dir).complete


def test_a_record_that_no_thread_writes(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As once the main thread has ended in Python 3.12: the training goes on, and the last record is there."""
    no_threads.refuse(monkeypatch, "eventloop costs")
    trainer = make_trainer(default_hooks={"costs": {"interval_seconds": 1e-9}})

    trainer.train()

    costs = read_costs(trainer.work_dir)
    assert (costs.complete, costs.phases.iterations) == (True, 4)


@pytest.mark.slow
def test_a_killed_run_has_a_record(tmp_path: Path) -> None:
    """SIGKILL leaves the last one that was written, whole."""
    script = textwrap.dedent(f"""
        import os, signal, torch
        from eventloop import Trainer
        model = torch.nn.Linear(2, 1)
        trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_iters=10**9,
                          train_step=lambda t, b: t.model(b).sum(), train_loader=[torch.ones(1, 2)] * 100,
                          work_dir={str(tmp_path / "run")!r},
                          default_hooks=dict(costs=dict(interval_seconds=1e-9), checkpoint=None))
        @trainer.bus.on("after_train_iter", every=100)
        def die(event):
            if os.path.exists({str(tmp_path / "run" / FILE)!r}):
                os.kill(os.getpid(), signal.SIGKILL)
        trainer.train()
    """)
    died = forked.run(["-c", script], env={**os.environ, "PYTHONPATH": forked.ROOT})

    assert died.returncode == -signal.SIGKILL
    costs = read_costs(tmp_path / "run")
    assert not costs.complete
    assert costs.phases.iterations > 0


def test_a_directory_that_is_gone_costs_a_warning(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The run itself ends as it would."""
    trainer = make_trainer(default_hooks={"trace": None})  # whose file would make the directory again
    trainer.bus.subscribe(lambda event: shutil.rmtree(trainer.work_dir), "before_train_epoch", once=True)

    trainer.train()

    assert "the cost record of the run was not written" in caplog.text
    assert trainer.iter == 4


def test_each_rank_has_a_record(make_trainer: Make) -> None:
    """Rank 0's is `costs.json`; another rank's has its number in the name, and is of its latest training."""
    trainer = make_trainer()
    trainer.rank, trainer.world_size = 1, 2
    (trainer.work_dir / "costs.rank1.json").write_text("of an earlier training")
    left: list[bool] = []
    trainer.bus.subscribe(
        lambda event: left.append((trainer.work_dir / "costs.rank1.json").exists()), "before_train_iter"
    )

    trainer.train()

    assert not (trainer.work_dir / FILE).exists()
    assert not left[0]
    costs = read_costs(trainer.work_dir, rank=1)
    assert (costs.rank, costs.world_size, costs.phases.iterations) == (1, 2, 4)


@pytest.mark.parametrize(("seconds", "stalls"), [(0.25, 1), (0.0, 0)])
def test_a_slow_loader_is_announced_once(
    make_trainer: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, stalls: int
) -> None:
    """While the run goes on, with the share of the wait in an iteration and what to do."""
    substitute(monkeypatch, "costs.monotonic", clock)
    found: list[LoaderStall] = []

    class Slow(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> torch.Tensor:
            clock.advance(seconds)  # the work of a real data set
            return torch.ones(2)

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        clock.advance(0.03125)
        loss: torch.Tensor = trainer.model(batch).square().mean()
        return loss

    trainer = make_trainer(
        train_loader=DataLoader(Slow()),
        default_hooks={"costs": {"interval_seconds": 1e-3}},
        max_epochs=2,
        train_step=step,
    )
    trainer.bus.subscribe(found.append, LoaderStall)

    trainer.train()

    assert len(found) == stalls
    for event in found:
        assert 0.3 < event.share < 1
        assert "num_workers=0" in event.advice
        assert event.iter < 40
