"""Tests of the votes by which ranks complete a checkpoint together, and of the parts that they write."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from eventloop.checkpoint import find_checkpoints, verify_checkpoint
from eventloop.checkpoint.archive import archive_length, write_archive
from eventloop.checkpoint.commit import Outcome, Save, commit
from eventloop.checkpoint.disk import DISK, Disk, FileHash, SaveGivenUp, Sink
from eventloop.checkpoint.manifest import SHARDED_SCHEMA, Manifest, encode_body
from eventloop.checkpoint.sharded import votes
from eventloop.checkpoint.sharded.part import PartSave, RankFile
from eventloop.checkpoint.sharded.plan import rows_of
from eventloop.checkpoint.sharded.votes import NoCheckpointError, Vote, await_votes, write_vote
from eventloop.temporary.names import name_of_ranks
from tests.ranks import run_ranks

PATIENCE = 0.2
OWN = Vote("form", {"own": FileHash(1, "a")})


def part(folder: Path, rank: int, *, form: str = "form", patience: float = 30.0) -> PartSave:
    """Return one of two ranks' part of a checkpoint."""
    work = folder / name_of_ranks("iter_1", "0123456789ab", 1)
    manifest = encode_body(Manifest(schema=SHARDED_SCHEMA, ranks=2, save=work.name))
    whole = Save(
        folder / "iter_1", (("data.pkl", b"rest"),) if rank == 0 else (), manifest if rank == 0 else b""
    )
    common = (("index.json", b"{}"), (".metadata", b"pickle")) if rank == 0 else ()
    archive = (("data.pkl", b"tensor"), ("data/0", bytes(1000 * (rank + 1))))
    return PartSave(
        whole, work, rank, 2, form, (RankFile(f"__{rank}_0.distcp", (archive,)),), common, patience
    )


def saved_by_both(*parts: PartSave, disk: Disk = DISK) -> list[Outcome]:
    """Commit the parts at the same time, each on a thread of its own, and return the outcomes."""
    outcomes: list[Outcome | None] = [None] * len(parts)

    def save(number: int) -> None:
        (outcomes[number],) = commit([parts[number]], disk)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcome for outcome in outcomes if outcome is not None]


def test_both_parts_make_one_checkpoint(tmp_path: Path) -> None:
    """The checkpoint has the files of both ranks and the hash of each; no vote is left in it."""
    outcomes = saved_by_both(part(tmp_path, 0), part(tmp_path, 1))
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert find_checkpoints(tmp_path) == [tmp_path / "iter_1"]
    files = {"__0_0.distcp", "__1_0.distcp", "index.json", ".metadata", "state.pth"}
    assert set(verify_checkpoint(tmp_path / "iter_1").files) == files
    assert {path.name for path in (tmp_path / "iter_1").iterdir()} == files | {"manifest.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["iter_1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_is_written_again(tmp_path: Path, rank: int) -> None:
    """A thread that repeats the work of a process that died in the middle replaces what that has written."""
    first = part(tmp_path, rank)
    first.work.mkdir()
    (first.work / f"__{rank}_0.distcp").write_bytes(b"half")
    assert [outcome.error for outcome in saved_by_both(part(tmp_path, 0), part(tmp_path, 1))] == [None, None]
    verify_checkpoint(tmp_path / "iter_1")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_was_done_is_done_again(tmp_path: Path, rank: int) -> None:
    """If the process died after the checkpoint had its name, a thread that repeats the work changes nothing."""
    saved_by_both(part(tmp_path, 0), part(tmp_path, 1))
    before = (tmp_path / "iter_1" / "manifest.json").stat()
    (outcome,) = commit([part(tmp_path, rank, patience=PATIENCE)])
    assert outcome.error is None
    assert (tmp_path / "iter_1" / "manifest.json").stat() == before


class FullDisk(Disk):
    """A disk without room for the shard of rank 1."""

    def write(self, file: object, data: memoryview) -> int:
        """Raise the error of a full disk for that file."""
        if "__1_" in str(getattr(file, "name", "")):
            raise OSError(28, "No space left on device")
        return super().write(file, data)  # type: ignore[arg-type]


def test_a_rank_without_room(tmp_path: Path) -> None:
    """Its error is named on rank 0, nothing is left, and the next save is not in its way."""
    first, second = saved_by_both(part(tmp_path, 0), part(tmp_path, 1), disk=FullDisk())
    assert "rank 1" in str(first.error)
    assert "No space left on device" in str(first.error)
    assert isinstance(second.error, OSError)
    assert find_checkpoints(tmp_path) == []
    assert [outcome.error for outcome in saved_by_both(part(tmp_path, 0), part(tmp_path, 1))] == [None, None]


def test_what_killed_ranks_have_left(tmp_path: Path) -> None:
    """A save removes a directory of an earlier run that was written last two minutes ago, and no fresher one."""
    old, fresh = (tmp_path / name_of_ranks(name, "ba9876543210", 1) for name in ("old", "fresh"))
    for left, age in ((old, 130.0), (fresh, 60.0)):
        left.mkdir()
        (left / "__0_0.distcp").write_bytes(b"half")
        for path in (left / "__0_0.distcp", left):
            os.utime(path, (time.time() - age,) * 2)
    saved_by_both(part(tmp_path, 0), part(tmp_path, 1))
    assert {path.name for path in tmp_path.iterdir()} == {"iter_1", fresh.name}


@pytest.mark.parametrize(
    ("vote", "message"),
    [
        (
            Vote("form", {}, "OSError: read-only"),
            "rank 1 on host .* could not write its part: OSError: read-only",
        ),
        (Vote("other", {}), "rank 1 on host .* has tensors of other names, shapes or types than rank 0"),
        (None, "expected the votes of 2 ranks, got none of rank 1 for 0.2 s"),
    ],
    ids=["against", "other tensors", "silent"],
)
def test_no_checkpoint(tmp_path: Path, vote: Vote | None, message: str) -> None:
    """A vote against, one for other tensors, or none at all is an error that names the rank."""
    if vote is not None:
        write_vote(tmp_path, 1, vote, DISK)
    with pytest.raises(NoCheckpointError, match=message):
        await_votes(tmp_path, OWN, 2, PATIENCE)


def test_a_slow_rank_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a rank's file grows it lives, however much longer than the patience it takes."""
    shard, now = tmp_path / "__1_0.distcp", [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += 10.0  # of the 25 s that a silent rank has
        with shard.open("ab") as file:
            file.write(b"part")
        if now[0] > 500.0:
            write_vote(tmp_path, 1, Vote("form", {"shard": FileHash(2, "b")}), DISK)

    monkeypatch.setattr(votes, "monotonic", lambda: now[0])
    monkeypatch.setattr(votes, "sleep", pass_time)
    assert [vote.files for vote in await_votes(tmp_path, OWN, 2, 25.0)] == [
        OWN.files,
        {"shard": FileHash(2, "b")},
    ]


def test_giving_up(tmp_path: Path) -> None:
    """A wait for votes ends when the save is given up."""
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(SaveGivenUp):
        await_votes(tmp_path, OWN, 2, 600.0, given_up)


@pytest.mark.parametrize("sizes", [(0,), (1, 63, 64, 65), (3 << 20, 5), (1 << 20, (1 << 20) + 1)])
def test_the_length_of_an_archive(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """The length that is computed from the records' lengths is that of the file that is written."""
    records: list[tuple[str, bytes]] = [(f"data/{number}", bytes(size)) for number, size in enumerate(sizes)]
    with DISK.create(tmp_path / "archive") as file:
        write_archive(records, Sink(DISK, file))
    expected = (tmp_path / "archive").stat().st_size
    assert archive_length([(name, len(data)) for name, data in records]) == expected


def test_a_rank_that_holds_two_pieces() -> None:
    """Placements that give a rank more than one piece of a dimension are refused: a chunk is one piece."""
    assert rows_of((8,), [_StridedShard(0, split_factor=2), Shard(0)], (2, 2), (1, 0)) == [range(2, 4)]
    with pytest.raises(TypeError, match=r"one piece of dimension 0, got .*StridedShard.*\[0, 1, 4, 5\]"):
        rows_of((8,), [_StridedShard(0, split_factor=2)], (2,), (0,))


OTHER_ROWS = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from eventloop import Trainer
from eventloop.checkpoint.sharded import reader

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
model = nn.Linear(4, 3)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
trainer = Trainer(model, train_step=lambda trainer, batch: model(batch).mean(), train_loader=[torch.ones(2, 4)],
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_iters=1, work_dir=Path(sys.argv[2]).parent / "run", writers=[])
trainer.train()
before = model.weight.full_tensor()
reader.compute_local_shape_and_global_offset = lambda shape, mesh, placements: (tuple(shape), (1, 0))
try:
    trainer.load_checkpoint("iter_1")
except Exception as error:
    print(json.dumps([f"{type(error).__name__}: {error}", model.weight.full_tensor().equal(before)]))
"""


@pytest.mark.slow
def test_a_version_of_torch_that_reads_other_rows(tmp_path: Path) -> None:
    """Rather than other rows of a weight nothing is loaded; the error names the weight and the version."""
    ((error, unchanged),) = run_ranks(OTHER_ROWS, tmp_path, 1)
    assert re.match(
        r"CheckpointError: .*state_dict\.weight: PyTorch 2\.\S+ would read .* from \(1, 0\) on, expected from \(0, 0\)",
        error,
    )
    assert unchanged
