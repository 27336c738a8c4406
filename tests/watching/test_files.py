"""The costs and the checkpoints of a run, read again when their files have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventloop.costs.records import Phases, RunCosts, TrendPoint, read_costs, write_costs
from eventloop.description.record import read_record
from eventloop.hooks import CheckpointHook
from eventloop.temporary.names import temporary_path
from eventloop.watching import RunReader
from eventloop.watching.web.tables import tables
from eventloop.writers import JSONLWriter
from tests.ownership.conftest import Forge
from tests.support.trainers import MakeTrainer, batches
from tests.watching.conftest import Write, add_rows, row


def costs(data: float, rank: int = 0, world_size: int = 1, **changes: Any) -> RunCosts:
    """The costs of 40 iterations, each 1 s and the time for its data."""
    each = Phases(iterations=1, data=data, forward=1.0)
    trend = [TrendPoint(first_iter=i, phases=each) for i in range(40)]
    phases = Phases(iterations=40, data=40 * data, forward=40.0)
    return RunCosts(phases=phases, trend=trend, rank=rank, world_size=world_size, **changes)


def test_the_record_is_that_of_the_run(make_trainer: MakeTrainer) -> None:
    """The live page has a table of it; a damaged one is a note."""
    trainer = make_trainer(writers=[JSONLWriter()], config={"lr": 0.1})
    trainer.train()

    view = RunReader(trainer.work_dir).read()

    assert view.record == read_record(trainer.work_dir)
    assert ["config.lr", "0.1"] in tables(view)["begun"].rows
    (trainer.work_dir / "run.json").write_text("{")
    view = RunReader(trainer.work_dir).read()
    assert view.record is None
    assert [note for note in view.notes if "run.json is truncated" in note]


def test_phases_waits_and_queues_are_those_of_the_costs(make_trainer: MakeTrainer) -> None:
    """Each figure of a view has its field in `costs.json`."""
    trainer = make_trainer(writers=[JSONLWriter()])
    trainer.train()

    view, record = RunReader(trainer.work_dir).read(), read_costs(trainer.work_dir)

    assert {phase.name: phase.seconds * 6 for phase in view.phases} == {
        phase.name: pytest.approx(getattr(record.phases, phase.name)) for phase in view.phases
    }
    assert sum(phase.share for phase in view.phases) == pytest.approx(1)
    assert view.waits == record.waits
    (queue,), (subscriber,) = view.queues, record.subscribers
    assert (queue.name, queue.delivered, queue.dropped, queue.failed) == (
        "JSONLWriter",
        subscriber.delivered,
        0,
        0,
    )
    assert view.advice == [line for line in view.advice if line]


def test_the_capacity_of_a_queue_is_the_one_that_was_asked_for(make_trainer: MakeTrainer) -> None:
    """The number given as `queue=`; 1 for a subscriber of the latest event."""
    trainer = make_trainer()
    trainer.bus.subscribe(lambda event: None, "after_train_iter", offload="thread", queue=77, name="A")
    trainer.bus.subscribe(
        lambda event: None, "after_train_iter", offload="thread", overflow="latest", name="B"
    )
    trainer.train()

    view = RunReader(trainer.work_dir).read()

    assert {queue.name: queue.capacity for queue in view.queues} == {"A": 77, "B": 1}


def test_costs_are_read_again_when_they_have_changed(run: Path, forge: Forge, heartbeat: Write) -> None:
    """The file is replaced while the run goes on."""
    forge(0.0)
    heartbeat()
    reader = RunReader(run)
    assert reader.read().phases == []
    for data in (1.0, 3.0):
        write_costs(run, costs(data))
        assert {phase.name: phase.share for phase in reader.read().phases}["data"] == data / (data + 1)


def test_a_slow_rank_is_named(run: Path, forge: Forge, heartbeat: Write) -> None:
    """Rank 1 waits twice as long for its data: the others wait for it."""
    forge(0.0)
    heartbeat(ranks=2)
    write_costs(run, costs(0.1, 0, 2))
    write_costs(run, costs(2.0, 1, 2))

    view = RunReader(run).read()

    assert (view.ranks, [times.rank for times in view.rank_times]) == (2, [0, 1])
    assert view.slow_rank is not None
    assert (view.slow_rank.rank, view.slow_rank.phase) == (1, "data")
    assert "rank 1 is slow in data" in view.advice[0]


def test_the_costs_of_an_earlier_call_are_not_those_of_a_run_under_way(
    run: Path, forge: Forge, heartbeat: Write
) -> None:
    """A complete record is final, so a run that lives has not written it."""
    forge(0.0)
    heartbeat()
    write_costs(run, costs(1.0, complete=True, outcome="completed"))

    view = RunReader(run).read()

    assert (view.state, view.phases, view.costs_time) == ("training", [], None)


def test_the_end_in_the_costs_counts_without_other_records(run: Path) -> None:
    """For a run of a version without heartbeats, and without logs."""
    write_costs(run, costs(1.0, complete=True, outcome="error: ValueError: no"))

    view = RunReader(run).read()

    assert (view.state, view.reason, view.error, view.iter) == ("ended", "error", "ValueError: no", 40)


def test_damaged_costs_are_a_note(run: Path) -> None:
    """The rest is shown."""
    add_rows(run, row(1, loss=1.0))
    (run / "costs.json").write_text("{")

    view = RunReader(run).read()

    assert view.latest == {"train/loss": 1.0}
    assert [note for note in view.notes if "costs.json is truncated" in note]


# --- checkpoints -------------------------------------------------------------------------------------------


def train(make_trainer: MakeTrainer, run: Path, hook: CheckpointHook, epochs: int = 3) -> None:
    """Validate after each epoch; the second is the best."""
    scores = iter([0.25, 0.75, 0.5, 0.125])
    make_trainer(
        work_dir=run,
        hooks=[hook],
        val_loader=[0],
        val_step=lambda trainer, batch: {"acc": next(scores)},
        sanity_val=0,
        max_epochs=epochs,
    ).train()


def test_checkpoints_say_which_is_newest_and_best(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """All of them are durable; the last is the one that a resume takes."""
    train(make_trainer, tmp_path / "run", CheckpointHook(1, save_best="acc"))

    view = RunReader(tmp_path / "run").read()

    assert [(each.name, each.iter, each.newest, each.best, each.whole) for each in view.checkpoints] == [
        ("epoch_1", 3, False, [], True),
        ("best_acc_epoch_2", 6, False, ["acc"], True),
        ("epoch_2", 6, False, [], True),
        ("epoch_3", 9, True, [], True),
    ]
    assert {each.directory for each in view.checkpoints} == {"."}


def test_checkpoints_elsewhere_are_found_by_the_heartbeat(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The hook's directory is in the heartbeat; one in the run moves with it."""
    for place in ("run/inner", "outer"):
        train(make_trainer, tmp_path / "run", CheckpointHook(1, out_dir=str(tmp_path / place)), epochs=1)
        view = RunReader(tmp_path / "run").read()
        (checkpoint,) = view.checkpoints
        assert checkpoint.name == "epoch_1"
        assert (tmp_path / "run" / checkpoint.directory).resolve().is_relative_to(tmp_path / place)
        assert checkpoint.directory.startswith("inner") == (place == "run/inner")


def test_a_new_checkpoint_is_seen_at_the_next_read(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The listing is read again when a name comes or goes."""
    run = tmp_path / "run"
    counts: list[int] = []
    readers: list[RunReader] = []
    trainer = make_trainer(work_dir=run, hooks=[CheckpointHook(1)], train_loader=batches(2), max_epochs=3)

    def count(trainer: Any, event: Any) -> None:
        trainer.state.finish_saves()
        readers[:] = readers or [RunReader(run)]
        counts.append(len(readers[0].read().checkpoints))

    trainer.bus.subscribe(count, "after_train_epoch", priority="LOWEST", name="count")
    trainer.train()

    assert counts == sorted(counts)
    assert [*counts, len(readers[0].read().checkpoints)][-1] == 3


def test_a_save_under_way_is_not_durable(run: Path) -> None:
    """The temporary directory of a living process is named, and is no checkpoint."""
    add_rows(run, row(1, loss=1.0))
    path = temporary_path(run / "iter_5", "tmp")
    path.mkdir()

    view = RunReader(run).read()

    assert (view.saving, view.checkpoints) == ([path.name], [])


def test_a_checkpoint_that_lost_a_file_is_damaged(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """It is in the list, not whole, with a sentence."""
    run = tmp_path / "run"
    train(make_trainer, run, CheckpointHook(1), epochs=1)
    for path in (run / "epoch_1").iterdir():
        if path.name != "manifest.json":
            path.write_bytes(b"")

    view = RunReader(run).read()

    assert ([each.whole for each in view.checkpoints], len(view.damaged)) == ([False], 1)
