"""The ranks exchange their times as they train, and name the slow one within 50 iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventloop import cli
from eventloop.costs.step_clock import StepClock
from eventloop.stops.rank_times import RANKS, TimesExchange
from tests.hooks.conftest import Make
from tests.ranks import run_ranks
from tests.support.internals import substitute

PLACES = {"data": "data", "forward": "forward", "hook": "hooks", "before": "hooks"}
"""Where rank 1 sleeps, and the phase that has it."""


class Clock(StepClock):
    """A clock whose iterations are as long as they are said to be."""

    def iterate(self, number: int, **seconds: float) -> None:
        """Add iterations of 10 ms in backward and the seconds of other phases."""
        for _ in range(number):
            self.data = self.forward = self.optimizer = self.hooks = 1e-3
            self.backward = 10e-3
            for phase, longer in seconds.items():
                setattr(self, phase, getattr(self, phase) + longer)
            self._add(self.data + self.forward + self.backward + self.optimizer + self.hooks)


class Pair:
    """Two ranks that exchange their times, which one process adds up."""

    def __init__(self) -> None:
        self.clocks = Clock(), Clock()
        self.ranks = [TimesExchange(clock, rank, 2) for rank, clock in enumerate(self.clocks)]

    def exchange(self) -> None:
        """Exchange once."""
        numbers = [sum(both) for both in zip(*(rank.numbers() for rank in self.ranks), strict=True)]
        for rank in self.ranks:
            rank.receive(numbers)

    def train(self, iterations: int) -> int:
        """Train until a rank is found; return after how many iterations."""
        for done in range(0, iterations, 4):
            if self.ranks[0].found is not None:
                return done
            self.clocks[0].iterate(4, backward=5e-3)
            self.clocks[1].iterate(4, hooks=5e-3)
            self.exchange()
        return iterations


def test_both_ranks_find_the_slow_one_at_the_same_iteration() -> None:
    """From the same numbers, within 50 iterations."""
    pair = Pair()
    pair.clocks[0].iterate(3, forward=3.0)  # the first iterations are slow on rank 0
    pair.exchange()

    assert pair.train(100) <= 50

    first, second = (rank.found for rank in pair.ranks)
    assert first is not None
    assert (first.rank, first.phase) == (1, "hooks")
    assert second == first


def test_boundaries_without_iterations_are_no_windows() -> None:
    """A long validation between them neither hides the slow rank nor adds to it."""
    pair = Pair()
    pair.train(16)
    for _ in range(100):
        pair.exchange()

    assert pair.ranks[0].found is None
    assert pair.train(50) <= 34


@pytest.mark.parametrize(("world_size", "every"), [(2, 4), (RANKS, 4), (RANKS + 1, 8), (1024, 128)])
def test_many_ranks_are_compared_less_often(world_size: int, every: int) -> None:
    """So that comparing them costs an iteration the same."""
    assert TimesExchange(StepClock(), 0, world_size).every == every


def test_a_run_of_one_rank_exchanges_nothing(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made for it, and no boundary looks for it."""
    substitute(monkeypatch, "rank_times.TimesExchange", None)

    make_trainer().train()


# --- two processes -----------------------------------------------------------------------------------------

PROGRAM = """
import json, logging, sys, time
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)

from eventloop import Trainer
from eventloop.hooks import Hook

lines, said = [], {}
class Note(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("eventloop").addHandler(Note())

class Sleepy(Hook):
    def before_train_iter(self, trainer, event): sleep("before")
    def after_train_iter(self, trainer, event): sleep("hook")

class Loader:
    def __len__(self): return 25
    def __iter__(self):
        for _ in range(25):
            sleep("data")
            yield torch.ones(4, 2), torch.zeros(4, dtype=torch.long)

def sleep(where):
    if rank == 1 and where == place:
        time.sleep(0.03)

def step(trainer, batch):
    sleep("forward")
    return F.cross_entropy(trainer.model(batch[0]), batch[1])

for place, wrapped in (("data", True), ("forward", True), ("hook", True), ("before", True), ("plain", False), ("even", True)):
    model = torch.nn.Linear(2, 2)
    model = DistributedDataParallel(model) if wrapped else model
    run, place = place, "forward" if place == "plain" else place
    trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_step=step, train_loader=Loader(),
                      max_iters=50, work_dir=run, hooks=[Sleepy()], default_hooks=dict(checkpoint=None))
    found = []
    trainer.bus.subscribe(lambda event: found.append([event.iter, event.rank, event.phase, event.longer]), "slow_rank")
    trainer.train()
    said[run] = dict(found=found, lines=[line for line in lines if "is slow" in line])
    lines.clear()
    trainer.close()
print(json.dumps(said))
dist.destroy_process_group()
"""


class Ran:
    """What two ranks said in their runs, and the directory of these."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: list[dict[str, Any]] = run_ranks(PROGRAM, folder)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs of 50 iterations, in all but the last of which rank 1 sleeps somewhere for 30 ms."""
    return Ran(tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "phase"), [*PLACES.items(), ("plain", "forward")])
def test_log_and_event_name_the_slow_rank_and_its_phase(ran: Ran, place: str, phase: str) -> None:
    """Within 50 iterations, on both ranks, also without a collective of the model."""
    for said in ran.ranks:
        ((iteration, rank, found, longer),) = said[place]["found"]
        assert (rank, found) == (1, phase)
        assert iteration < 50
        assert 0.0225 < longer < 0.045
        (line,) = said[place]["lines"]
        assert f"rank 1 is slow in {phase}" in line


@pytest.mark.slow
@pytest.mark.parametrize(("place", "phase"), [*PLACES.items(), ("plain", "forward")])
def test_report_and_trace_name_it_too(
    ran: Ran, place: str, phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the files of the ranks; the report says which handler it is."""
    run = ran.folder / place

    assert cli.main(["report", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert cli.main(["trace", str(run), "--ranks", "-o", str(tmp_path / "ranks.json")]) == 0

    assert f"-> rank 1 is slow in {phase}" in shown
    assert (f"most of it is in Sleepy.{'after' if place == 'hook' else 'before'}_train_iter" in shown) == (
        phase == "hooks"
    )
    assert f"rank 1 is slow in {phase}" in capsys.readouterr().err
    assert f"rank 1, slow in {phase}: " in (tmp_path / "ranks.json").read_text()


@pytest.mark.slow
def test_even_ranks_are_not_named(ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By no log, event, report or trace."""
    run = ran.folder / "even"

    assert [said["even"] for said in ran.ranks] == [{"found": [], "lines": []}] * 2
    assert cli.main(["report", str(run)]) == 0
    assert cli.main(["trace", str(run), "--ranks", "-o", str(tmp_path / "ranks.json")]) == 0
    said = capsys.readouterr()
    assert "is slow" not in said.out
    assert "no rank is slow" in said.err
