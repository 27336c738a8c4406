"""A dry run: a program is taken up to the moment its run would begin, and nothing is started."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
import torch

from eventloop import Trainer
from eventloop.bus import Bus
from eventloop.bus.dry_run import ProgramPlan
from eventloop.events import AfterRun, BeforeRun, BeforeTrain
from eventloop.processes.dry_run import PLAN_FILE
from tests.support.process_handlers import record_process
from tests.support.trainers import tiny_model


@pytest.fixture(autouse=True)
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment that the command gives to a program."""
    path = tmp_path / "plan" / "plan.json"
    path.parent.mkdir()
    monkeypatch.setenv(PLAN_FILE, str(path))
    monkeypatch.chdir(tmp_path)
    return path


def written(plan_file: Path) -> ProgramPlan:
    """The plan that the program has left."""
    return msgspec.json.decode(plan_file.read_bytes(), type=ProgramPlan)


def test_subscribers_are_listed_and_none_is_started() -> None:
    """Neither thread nor process; flush and close do not wait, and what is cancelled is not listed."""
    before = {*threading.enumerate()}
    with Bus() as bus:

        async def later(event: BeforeRun) -> None: ...

        bus.subscribe(later, BeforeRun)
        bus.subscribe(print, AfterRun, offload="thread", overflow="block", queue=3)
        bus.subscribe(record_process, AfterRun, offload="process", overflow="latest")
        bus.subscribe(print, AfterRun, offload="thread", name="cancelled").cancel()

        rows = [(r.runs_on, r.queue, r.overflow) for r in bus.plan(BeforeRun) + bus.plan(AfterRun)]
        assert bus.flush()
        assert {*threading.enumerate()} <= before  # those of others may end

    assert rows == [("loop", 1024, "spill"), ("thread", 3, "block"), ("process", 1, "latest")]


def test_registration_refuses_what_it_always_refuses() -> None:
    """A process that cannot import its handler, and a closed bus."""
    bus = Bus()
    with pytest.raises(TypeError, match="lambda"):
        bus.subscribe(lambda event: None, AfterRun, offload="process")
    bus.close()
    with pytest.raises(RuntimeError, match="cannot subscribe print: the bus is closed"):
        bus.subscribe(print, AfterRun, offload="thread")


def test_the_first_event_with_a_subscriber_ends_the_program(plan_file: Path) -> None:
    """An event without a subscriber passes; no handler is called."""
    heard: list[BeforeRun] = []
    bus = Bus()
    bus.subscribe(heard.append, BeforeRun)
    bus.emit(BeforeTrain())
    with pytest.raises(SystemExit, match="0"):
        bus.emit(BeforeRun())

    plan = written(plan_file)
    assert heard == []
    assert (plan.event, plan.ended) == ("before_run", False)
    assert plan.where.startswith(f"{__file__}:")
    assert [row.name for row in plan.buses[-1][0].handlers] == [bus.plan(BeforeRun)[0].name]


@pytest.mark.parametrize("begin", ["train", "run", "val", "test", "epochs"])
def test_a_run_does_not_begin(begin: str, plan_file: Path, tmp_path: Path) -> None:
    """However it begins; its plan is that of its bus, and its directory is a temporary one."""
    model = tiny_model()
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_step=lambda trainer, batch: 1 / 0,
        val_step=lambda trainer, batch: {},
        train_loader=[1, 2],
        val_loader=[1],
        test_loader=[1],
        max_epochs=2,
        work_dir="out",
    )
    (trainer.work_dir / "config.txt").write_text("lr = 0.1")

    with pytest.raises(SystemExit, match="0"):
        [*getattr(trainer, begin)()]

    plan = written(plan_file)
    assert (plan.max_epochs, plan.max_iters) == (2, 4)
    assert plan.where.startswith(f"{__file__}:")
    assert [each.handlers for each in plan.buses[0]] == [
        trainer.bus.plan(each.event) for each in plan.buses[0]
    ]
    assert trainer.work_dir.parent == plan_file.parent
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


def test_the_first_run_is_the_one_that_is_shown(plan_file: Path) -> None:
    """A program that catches the exit and goes on does not replace the plan."""
    for event in (BeforeRun, AfterRun):
        bus = Bus()
        bus.subscribe(print, event)
        with pytest.raises(SystemExit):
            bus.emit(event())

    assert written(plan_file).event == "before_run"
