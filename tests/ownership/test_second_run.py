"""A second run in the directory of a live one is refused, and changes nothing."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer, read_events
from eventloop.checkpoint import CheckpointError
from eventloop.checkpoint.directory import scan
from eventloop.events import AfterTrainEpoch, CheckpointFailed, CheckpointSaved, Event
from eventloop.hooks import CheckpointHook
from eventloop.ownership import WorkDirInUseError, read_owner
from eventloop.ownership.owner import records_in
from eventloop.writers import ConsoleWriter, CSVWriter, JSONLWriter
from tests.ownership.conftest import ELSEWHERE
from tests.ownership.trainings import KILL, alive, contents, steps, training
from tests.ranks import run_ranks
from tests.support.internals import substitute
from tests.support.process_support import until
from tests.support.saving import DEADLINE, Gate, Writes
from tests.support.trainers import batches, build_trainer


def check_one_run(run: Path, iters: int = 20) -> None:
    """Look at what one whole training leaves: each step and sequence number once, the checkpoints of one lineage."""
    lines = steps(run)
    assert sorted(lines) == sorted(set(lines))
    assert max(step for _, step in lines) == iters
    numbers = [record.sequence for record in read_events(run)]
    assert numbers == sorted(set(numbers))
    found = scan(run)
    assert found.abandoned == frozenset()
    assert [path.name for path in found.paths if path.name.startswith("iter")] == [
        f"iter_{iters - 5}",
        f"iter_{iters}",
    ]
    assert [path.name for path in run.glob("best_*")] != []
    assert len(list(run.glob("metrics*.csv"))) == 1


def start_two(run: Path) -> None:
    """Begin two trainings at one moment: one trains, the other is refused by the name of the first."""
    with training(run, holds=[12]) as one, training(run, holds=[12]) as two:
        for each in (one, two):
            assert each.next_line() == "ready"
        for each in (one, two):
            each.go()
        first, second = (
            one.next_line(),
            two.next_line(),
        )  # the one that trains waits until the other has ended
        winner, refused, loser = (one, second, two) if first == "holding" else (two, first, one)
        owner = f"process {winner.process.pid} on {os.uname().nodename} owns it since 20"
        assert f"{run} is in use: {owner}" in refused["refused"]
        assert refused["refused"].endswith("give this run a directory of its own (work_dir=)")
        assert loser.process.wait() == 3
        assert winner.run() == {"trained": 20}
        assert winner.process.wait() == 0
    check_one_run(run)


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n > 0)) for n in range(10)])
def test_two_that_begin_at_one_moment(tmp_path: Path, number: int) -> None:
    """Exactly one of them trains, and its files are as if it had been alone."""
    start_two(tmp_path / "run")


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    """It is refused before it has written a byte, also with `resume`, and the first one goes on."""
    run = tmp_path / "run"
    with training(run, holds=[12]) as first:
        first.reach("holding")
        first.stand_still()
        before = contents(run)
        for options in ({}, {"resume": True}):
            with training(run, **options) as second:
                said = second.run()
                assert f"process {first.process.pid} on " in said["refused"]
                assert second.process.wait() == 3
            assert contents(run) == before
        first.send(signal.SIGCONT)
        first.run()
    check_one_run(run)


def test_a_killed_run_is_followed_at_once(tmp_path: Path) -> None:
    """The new run resumes what the killed one has saved."""
    run = tmp_path / "run"
    with training(run, holds=[12]) as first, training(run, resume=True) as second:
        first.reach("holding")
        first.send(KILL)
        first.process.wait()
        assert second.run() == {"resumed": "iter_10", "trained": 20}
    assert read_owner(run) is None
    assert max(step for _, step in steps(run)) == 20


def a_trainer(run: Path, **options: Any) -> Trainer:
    return build_trainer(run, **{"writers": [JSONLWriter(), CSVWriter()], **options})


def test_two_in_one_process(tmp_path: Path) -> None:
    """A loop of one's own owns the directory until it ends, by `break` too; another trainer waits for nobody."""
    run = tmp_path / "run"
    first, second = a_trainer(run), a_trainer(run)
    loop = first.epochs()
    next(loop)
    first.bus.flush()
    before = contents(run)
    with pytest.raises(
        WorkDirInUseError, match=r"another run of this process .*trainer.close\(\) ends a loop"
    ):
        second.train()
    assert contents(run) == before

    del loop  # as a `break` leaves it
    second.train()
    assert second.epoch == 2


def test_a_handler_does_not_train_in_the_directory(tmp_path: Path) -> None:
    """Nor does another thread: its trainer is refused, and can train afterwards."""
    run = tmp_path / "run"
    outer, inner = a_trainer(run), a_trainer(run)
    errors: list[BaseException] = []

    def train() -> None:
        try:
            inner.train()
        except WorkDirInUseError as error:
            errors.append(error)

    @outer.bus.on("after_train_epoch")
    def handler(event: Event) -> None:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        train()

    outer.train()
    assert len(errors) == 4
    assert inner.iter == 0
    inner.train()
    assert inner.epoch == 2


@pytest.mark.parametrize("fails", ["handler", "interrupt", "before_run"])
def test_an_error_gives_the_directory_back(tmp_path: Path, fails: str) -> None:
    """Whatever ends a run, the next one trains."""
    run = tmp_path / "run"
    trainer = a_trainer(run)
    kind = KeyboardInterrupt if fails == "interrupt" else ValueError

    @trainer.bus.on("before_run" if fails == "before_run" else "after_train_iter", once=True)
    def fail(event: Event) -> None:
        raise kind("on purpose")

    with pytest.raises(kind):
        trainer.train()
    assert read_owner(run) is None
    a_trainer(run).train()


def test_the_directory_is_kept_until_all_is_written(tmp_path: Path) -> None:
    """The owner is ending while checkpoints are saved and writers receive their events, and is gone afterwards."""
    run = tmp_path / "run"
    seen: dict[str, str | None] = {}

    class Slow(JSONLWriter):
        def flush(self) -> None:
            super().flush()
            owner = read_owner(run)
            seen["flush"] = None if owner is None else owner.state

    trainer = build_trainer(run, writers=[Slow()])

    @trainer.bus.on("after_train_iter", once=True)
    def read_state(event: Event) -> None:
        owner = read_owner(run)
        seen["train"] = None if owner is None else owner.state

    trainer.train()
    assert seen == {"train": "training", "flush": "ending"}
    assert read_owner(run) is None


def test_each_directory_of_checkpoints_has_an_owner(tmp_path: Path) -> None:
    """Runs of one name in two places save in one directory of `out_dir`; the second is refused before it owns any."""
    first, second = (
        build_trainer(tmp_path / place / "run", hooks=[CheckpointHook(1, out_dir=tmp_path / "out")])
        for place in ("a", "b")
    )
    loop = first.epochs()
    next(loop)
    with pytest.raises(WorkDirInUseError, match=f"{tmp_path}/out/run is in use"):
        second.train()
    assert read_owner(tmp_path / "b" / "run") is None

    first.close()
    second.train()


def test_an_evaluation_beside_a_training(tmp_path: Path) -> None:
    """It looks at checkpoints and writes nothing; with a writer of files it is refused."""
    run = tmp_path / "run"
    with training(run, holds=[12]) as first:
        first.reach("holding")
        first.stand_still()
        before = contents(run)
        for writers in ([], [ConsoleWriter()]):
            trainer = build_trainer(run, test_loader=batches(2), val_loader=batches(2), writers=writers)
            assert trainer.test()["loss"] > 0
            trainer.predict(batches(1))
        with pytest.raises(WorkDirInUseError, match=f"process {first.process.pid} on "):
            build_trainer(run, test_loader=batches(2), writers=[JSONLWriter()]).test()
        assert contents(run) == before
        first.send(signal.SIGCONT)
        first.run()
    check_one_run(run)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_has_no_owner(tmp_path: Path) -> None:
    """A run goes on as ever where its checkpoints cannot be saved."""
    (tmp_path / "out").mkdir(mode=0o500)
    build_trainer(tmp_path / "run", hooks=[CheckpointHook(1, out_dir=tmp_path / "out")]).train()


def test_a_directory_that_is_no_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line says that it has no owner; the run goes on, and ends with the error of its saves."""
    (tmp_path / "out").touch()
    trainer = build_trainer(tmp_path / "run", hooks=[CheckpointHook(out_dir=tmp_path / "out")])
    with pytest.raises(
        CheckpointError, match=r"a checkpoint .*, got none: its save failed, .*/out/run/.*: FileExistsError"
    ):
        trainer.train()
    assert trainer.epoch == 2
    assert f"{tmp_path}/out/run has no owner, because it cannot be written: " in caplog.text


def be_taken(trainer: Trainer, run: Path) -> None:
    """Let a run on another machine take the directory of a trainer, and wait until the trainer has noticed."""
    (record,) = records_in(run)
    changed = record.read_bytes().replace(b'"place":"', b'"place":"x')
    (run / f".owner-1-{ELSEWHERE}-1-1").write_bytes(changed)
    record.unlink()
    until(lambda: trainer.asked_to_stop)


def test_a_run_whose_directory_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a machine was suspended for long, another run may have it: the first ends, saves nothing more, and says
    so once."""

    substitute(monkeypatch, "holding.BEAT_SECONDS", 0.01)
    run = tmp_path / "run"
    trainer = build_trainer(run, max_epochs=50, hooks=[CheckpointHook(-1)])

    @trainer.bus.on("after_train_epoch", once=True)
    def suspend(event: Event) -> None:
        be_taken(trainer, run)

    trainer.train()

    assert trainer.epoch < 50
    assert trainer.stop_reason == f"another run has taken {run}"
    assert [path.name for path in run.glob("epoch_*")] == []
    assert caplog.text.count(f"another run has taken {run}, because this one gave no sign of life") == 1
    assert [path.name for path in records_in(run)] == [f".owner-1-{ELSEWHERE}-1-1"]


def test_saves_that_wait_are_dropped_when_the_directory_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save that is being written is completed, and those behind it are not begun; events report both."""
    substitute(monkeypatch, "holding.BEAT_SECONDS", 0.01)
    gate, run, told = Gate(), tmp_path / "run", list[tuple[str, str]]()
    Writes.of_hooks(monkeypatch, gate.hold)
    trainer = build_trainer(run, max_epochs=50, hooks=[CheckpointHook(1)])

    @trainer.bus.on("after_train_epoch", priority="LOWEST")
    def lose(event: AfterTrainEpoch) -> None:
        assert gate.entered.wait(DEADLINE)  # else both saves might be written as one group
        if event.epoch == 1:
            be_taken(trainer, run)
            gate.open.set()

    @trainer.bus.on("checkpoint_saved", "checkpoint_failed")
    def record(event: CheckpointSaved | CheckpointFailed) -> None:
        told.append((Path(event.path).name, getattr(event, "error", "")))

    trainer.train()

    assert gate.names == ["epoch_1"]
    assert [path.name for path in run.glob("epoch_*")] == ["epoch_1"]
    assert told == [
        ("epoch_1", ""),
        ("epoch_2", f"{run}/epoch_2 was not written, because another run has taken its directory"),
    ]


def test_alive_helper_is_refused_by_name(tmp_path: Path) -> None:
    """The error names directory, machine, process and start, and what to write."""
    run = tmp_path / "run"
    with alive(run) as first:
        owner = read_owner(run)
        assert owner is not None
        with pytest.raises(WorkDirInUseError) as refused:
            a_trainer(run).train()
        assert str(refused.value) == (
            f"{run} is in use: process {first.process.pid} on {owner.host} owns it since {owner.since}, and is "
            "training: wait until it has ended, or end it, or give this run a directory of its own (work_dir=)"
        )


RANKS = """
import json, sys
import torch, torch.distributed as dist
from eventloop.ownership import WorkDirInUseError
from tests.support.trainers import build_trainer

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
said = []
for name in ("run", "free"):
    try:
        build_trainer(name, max_epochs=1).train()
    except WorkDirInUseError as error:
        said.append(str(error))
    else:
        said.append("trained")
print(json.dumps(said))
dist.destroy_process_group()
"""


def test_all_ranks_are_refused(tmp_path: Path) -> None:
    """Rank 0 finds the owner, and the error is raised on every rank; then they train together elsewhere."""
    loop = (trainer := build_trainer(tmp_path / "run")).epochs()
    next(loop)

    said = run_ranks(RANKS, tmp_path)

    assert said[0] == said[1]
    refused, trained = said[0]
    assert f"run is in use: process {os.getpid()} on " in refused
    assert trained == "trained"
    assert read_owner(tmp_path / "free") is None
    trainer.close()


def test_a_directory_that_is_renamed_under_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line says so; what is saved later is in a new directory of the old name, which the run owns."""
    run = tmp_path / "run"
    trainer = build_trainer(run, hooks=[CheckpointHook(1)])

    @trainer.bus.on("after_train_epoch", once=True, priority=0)
    def rename(event: Event) -> None:
        run.rename(tmp_path / "renamed")

    trainer.train()

    assert caplog.text.count(f"{run} was renamed or removed while a run writes there") == 1
    assert (run / "epoch_2").is_dir()
    assert read_owner(run) is None
