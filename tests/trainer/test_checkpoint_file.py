"""Checkpoint files: whole or absent, durable when they have their name; random state and snapshots."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eventloop.checkpoint import find_checkpoints, load_checkpoint, save_checkpoint, unwrap
from eventloop.hooks import Hook
from eventloop.rng import rng_state, set_rng_state
from eventloop.snapshot import Snapshot
from tests.trainer.conftest import MakeTrainer

OLD, NEW = {"state_dict": {"w": torch.zeros(3)}}, {"state_dict": {"w": torch.ones(3)}}


def test_round_trip(tmp_path: Path) -> None:
    """What was saved is read again, and its size is the file's."""
    size = save_checkpoint(NEW, tmp_path / "a.pth")

    assert torch.equal(load_checkpoint(tmp_path / "a.pth")["state_dict"]["w"], torch.ones(3))
    assert size == (tmp_path / "a.pth").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["a.pth"]


class Unpicklable:
    """Fails in the middle of being written."""

    def __reduce__(self) -> Any:
        raise RuntimeError("disk full")


def test_failure_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    """A save that fails halfway leaves the old file as it was and nothing of its own."""
    path = tmp_path / "a.pth"
    save_checkpoint(OLD, path)

    with pytest.raises(RuntimeError, match="disk full"):
        save_checkpoint({"state_dict": {"w": torch.ones(3)}, "bad": Unpicklable()}, path)

    assert torch.equal(load_checkpoint(path)["state_dict"]["w"], torch.zeros(3))
    assert [path.name for path in tmp_path.iterdir()] == ["a.pth"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failure_of_the_system_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The same holds when the operating system refuses to sync or to rename."""
    path = tmp_path / "a.pth"
    save_checkpoint(OLD, path)

    def fail(*arguments: Any) -> None:
        raise OSError("input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="input/output error"):
            save_checkpoint(NEW, path)

    assert torch.equal(load_checkpoint(path)["state_dict"]["w"], torch.zeros(3))
    assert [path.name for path in tmp_path.iterdir()] == ["a.pth"]


def test_the_remains_of_a_killed_save_are_in_nobodys_way(tmp_path: Path) -> None:
    """A temporary file left by a killed process with the same number (1, in a container) does not stop a save."""
    (tmp_path / f".a.pth.{os.getpid()}.tmp").write_bytes(b"half")

    save_checkpoint(NEW, tmp_path / "a.pth")

    assert [path.name for path in tmp_path.iterdir()] == ["a.pth"]


def test_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced before it is renamed, and the directory after that."""
    path = tmp_path / "a.pth"
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append("fsync directory" if target == str(tmp_path) else "fsync file")
        fsync(descriptor)

    def note_replace(source: Any, target: Any) -> None:
        calls.append("replace" if Path(target) == path else "replace something else")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    save_checkpoint(NEW, path)

    assert calls == ["fsync file", "replace", "fsync directory"]


def test_find_checkpoints_by_age(tmp_path: Path) -> None:
    """Checkpoints are found oldest first; best ones and temporary files are not among them."""
    for age, name in enumerate(
        ["epoch_1.pth", "iter_7.pth", "epoch_2.pth", "best_acc_epoch_2.pth", ".x.pth.1.tmp"]
    ):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))

    assert [path.name for path in find_checkpoints(tmp_path)] == ["epoch_1.pth", "iter_7.pth", "epoch_2.pth"]


def test_find_checkpoints_of_one_age(tmp_path: Path) -> None:
    """Files of one age (a copied directory) go by the number in their name."""
    for name in ("epoch_10.pth", "epoch_9.pth"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))

    assert [path.name for path in find_checkpoints(tmp_path)] == ["epoch_9.pth", "epoch_10.pth"]


def test_unwrap_a_compiled_model() -> None:
    """A compiled model's checkpoint is that of the model inside."""
    model = torch.nn.Linear(1, 1)
    compiled: Any = torch.compile(model, backend="eager")

    assert unwrap(compiled) is model
    assert unwrap(torch.nn.DataParallel(model)) is model
    assert unwrap(model) is model


# --- random state ------------------------------------------------------------------------------------------


def draw() -> tuple[Any, ...]:
    """One number from each generator; the gaussians too, of which one of two is kept for later."""
    return (
        random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()),
        torch.rand(1).item(), torch.randn(1).item(),
    )  # fmt: skip


def test_rng_round_trip_through_a_file(tmp_path: Path) -> None:
    """Saved, loaded and put back, the random state of Python, NumPy and torch gives the same numbers again."""
    random.gauss(0, 1)
    np.random.randn()
    torch.save({"before": torch.zeros(3, dtype=torch.uint8), "rng": rng_state()}, tmp_path / "rng.pt")
    expected = draw()

    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True)["rng"])

    assert draw() == expected


def test_rng_round_trip_through_a_snapshot() -> None:
    """A snapshot packs states into shared buffers, from whose middle they are put back all the same."""
    state = {"all": [torch.zeros(3, dtype=torch.uint8), rng_state()]}
    taken = Snapshot().take(state)
    expected = draw()

    set_rng_state(taken["all"][1])

    assert draw() == expected


# --- snapshots ---------------------------------------------------------------------------------------------


def pointers(state: dict[str, Any]) -> set[int]:
    """Where the tensors of a state lie."""
    return {tensor.untyped_storage().data_ptr() for tensor in state["state_dict"].values()}


def test_a_snapshot_is_a_copy() -> None:
    """What is changed in place afterwards is not changed in the snapshot."""
    live: dict[str, Any] = {
        "state_dict": {"w": torch.zeros(3)},
        "nested": [{"n": 1, "t": (torch.ones(()), None)}],
    }

    taken = Snapshot().take(live)
    live["state_dict"]["w"].add_(1)

    assert torch.equal(taken["state_dict"]["w"], torch.zeros(3))
    assert taken["nested"] == [{"n": 1, "t": (torch.ones(()), None)}]


def test_a_snapshot_reuses_its_buffers() -> None:
    """The second snapshot of a state goes where the first one was."""
    snapshot = Snapshot()
    first = pointers(snapshot.take(OLD))

    second = snapshot.take(NEW)

    assert pointers(second) == first
    assert torch.equal(second["state_dict"]["w"], torch.ones(3))


def test_a_snapshot_of_another_shape() -> None:
    """A state whose shapes have changed gets new buffers."""
    snapshot = Snapshot()
    snapshot.take(OLD)

    taken = snapshot.take({"state_dict": {"w": torch.ones(2, 2)}})

    assert torch.equal(taken["state_dict"]["w"], torch.ones(2, 2))


def test_names_that_look_alike_are_kept_apart() -> None:
    """Two tensors whose places read the same when joined by slashes, or as text, do not share a buffer."""
    state: dict[str, Any] = {
        "a/b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0), 0: torch.tensor(3.0), "0": torch.tensor(4.0)},
    }

    taken = Snapshot().take(state)

    assert (taken["a/b"].item(), [t.item() for t in taken["a"].values()]) == (1.0, [2.0, 3.0, 4.0])


def test_parameters_with_grad_are_copied_as_values() -> None:
    """A snapshot takes no part in autograd."""
    taken = Snapshot().take({"state_dict": {"w": torch.nn.Parameter(torch.ones(2))}})

    assert not taken["state_dict"]["w"].requires_grad


SCHEDULERS: dict[str, dict[str, Any]] = {
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 100},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
    "ReduceLROnPlateau": {},
    "LambdaLR": {"lr_lambda": lambda step: 1.0},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_kind_of_scheduler_is_loadable(make_trainer: MakeTrainer, name: str) -> None:
    """Whatever the scheduler keeps, the checkpoint is readable with `weights_only=True`."""
    trainer = make_trainer()
    kind = getattr(torch.optim.lr_scheduler, name)
    trainer.schedulers.append(kind(trainer.optimizer, **SCHEDULERS[name]))

    save_checkpoint(trainer.state.gather(""), trainer.work_dir / "a.pth")

    assert len(load_checkpoint(trainer.work_dir / "a.pth")["param_schedulers"]) == 1


def test_numpy_numbers_are_saved_as_plain_ones(make_trainer: MakeTrainer) -> None:
    """A learning rate of NumPy's does not make the checkpoint unreadable."""
    model = torch.nn.Linear(2, 3)
    trainer = make_trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=np.float64(0.25)))

    save_checkpoint(trainer.state.gather(""), trainer.work_dir / "a.pth")

    assert load_checkpoint(trainer.work_dir / "a.pth")["optimizer"]["param_groups"][0]["lr"] == 0.25


def test_a_state_that_could_not_be_loaded(make_trainer: MakeTrainer) -> None:
    """A hook's state that `weights_only=True` would refuse is refused when it is saved, by its place."""

    class Careless(Hook):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": [range(3)]}

    trainer = make_trainer(hooks=[Careless()])

    with pytest.raises(
        TypeError, match=r"the checkpoint's hooks\['Careless'\]\['seen'\]\[0\] is range\(0, 3\), a range"
    ):
        trainer.state.gather("")
