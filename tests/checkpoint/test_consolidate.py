"""A checkpoint of two ranks becomes one file, with the tensors that PyTorch's own tool finds in its shards."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint
from eventloop.checkpoint.saving.consolidate import consolidate
from eventloop.checkpoint.sharded.reader import Shards
from tests.checkpoint.consolidated_ranks import LAYERS, WIDE, WIDTH, Net
from tests.cli.saved_runs import checkpoints, flip
from tests.faults.damage import rewrite_manifest
from tests.forked import ROOT
from tests.ranks import run_ranks
from tests.support.saving import same

pytestmark = pytest.mark.slow

PARAMETERS = ("one.weight", "one.bias", "head.weight", "head.bias")


@pytest.fixture
def theirs(sharded: Path, tmp_path: Path) -> dict[str, Any]:
    """What PyTorch's own tool makes of the shards."""
    dcp_to_torch_save(sharded / "epoch_2", tmp_path / "theirs.pt")
    found: dict[str, Any] = torch.load(tmp_path / "theirs.pt", weights_only=True)
    return found


@pytest.mark.parametrize("file_format", ["pth", "safetensors"])
def test_it_has_the_tensors_of_the_shards(
    sharded: Path, theirs: dict[str, Any], file_format: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints the path of the file alone, and the weights, averages and optimizer's states are those
    that PyTorch's tool finds."""
    assert checkpoints(sharded, "--consolidate", "--format", file_format) == 0

    (line,) = capsys.readouterr().out.splitlines()
    file = Path(line)
    assert (file.parent, file.suffix) == (sharded, f".{file_format}")
    if file_format == "safetensors":
        assert same(load_file(file), theirs["state_dict"])
        with safe_open(file, "pt") as opened:
            assert (opened.metadata()["iter"], opened.metadata()["format"]) == ("6", "pt")
        return
    ours = torch.load(file, weights_only=True)
    assert same(ours["state_dict"], theirs["state_dict"])
    assert same(ours["ema_state_dict"], theirs["ema_state_dict"])
    states = dict(zip(PARAMETERS, ours["optimizer"]["state"].values(), strict=True))
    assert same(states, theirs["optimizer"])


def test_the_whole_state_is_that_of_the_checkpoint(sharded: Path) -> None:
    """What `load_checkpoint` returns for the file is what it returns for the checkpoint, bitwise; a trainer of
    one process loads it; and the listing verifies it."""
    file = consolidate(sharded / "epoch_2")

    state = load_checkpoint(file)
    assert same(state, load_checkpoint(sharded / "epoch_2"))
    assert list(state) == list(load_checkpoint(sharded / "epoch_2"))
    model = Net()
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=[0],
        max_epochs=1,
        work_dir=sharded.parent / "other",
        writers=[],
    )
    trainer.load_checkpoint(file)
    assert same(dict(model.state_dict()), dict(state["state_dict"]))
    assert checkpoints(sharded, "--verify") == 0


def test_the_listing_names_the_ranks(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the line of a checkpoint, and as a number for programs."""
    assert checkpoints(sharded) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("  newest; of 2 ranks")

    assert checkpoints(sharded, "--json") == 0
    assert [each["ranks"] for each in json.loads(capsys.readouterr().out)["checkpoints"]] == [2, 2]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, _cut, Path.unlink])
@pytest.mark.parametrize("name", ["__1_0.distcp", "rank_1.pth", "state.pth", "index.json", "manifest.json"])
def test_damage_is_refused_by_name(
    sharded: Path, name: str, damage: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit code 1, and before a file is written."""
    damage(sharded / "epoch_2" / name)
    before = sorted(sharded.iterdir())

    assert checkpoints(sharded, "--consolidate", "epoch_2", "--format", "safetensors") == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert str(sharded / "epoch_2") in line
    assert sorted(sharded.iterdir()) == before


def test_a_checkpoint_that_is_replaced_meanwhile(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shards may be those of another save, so no file is left."""
    read, path = Shards.read, sharded / "epoch_2"

    def replacing(shards: Shards, targets: dict[str, torch.Tensor]) -> None:
        read(shards, targets)
        rewrite_manifest(path, lambda manifest: manifest.update(time="later"))

    monkeypatch.setattr(Shards, "read", replacing)
    before = sorted(sharded.iterdir())

    with pytest.raises(CheckpointError, match=r"epoch_2 was replaced while it was read"):
        consolidate(path)
    assert sorted(sharded.iterdir()) == before


MEMORY = """
import sys
from pathlib import Path
from eventloop.checkpoint.saving.consolidate import consolidate
from eventloop.checkpoint.sharded.reader import Shards

def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024

before = peak()
consolidate(Path(sys.argv[1]), sys.argv[2])
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_it_needs_memory_for_a_few_tensors(tmp_path: Path) -> None:
    """Of a model of 96 MiB, in tensors of 4 MiB, both formats need less than half."""
    run_ranks(WIDE, tmp_path, ranks=1)
    path = tmp_path / "run" / "epoch_1"
    assert sum(each.stat().st_size for each in path.iterdir()) > LAYERS * WIDTH**2 * 4

    for file_format in ("pth", "safetensors"):
        arguments = [sys.executable, "-c", MEMORY, str(path), file_format]
        done = subprocess.run(
            arguments, check=False, env={"PYTHONPATH": ROOT}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 48
