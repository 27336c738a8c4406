"""Checkpoints of several ranks are kept, listed, removed, published and loaded as those of one are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import load_checkpoint
from tests.checkpoint.sharded_ranks import Net
from tests.cli.saved_runs import checkpoints, names
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of two ranks, whose model FSDP2 divides."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of them says."""
    program = (
        "import sys\nfrom tests.checkpoint.kept_ranks import kept\n"
        f"kept('FSDP2', int(sys.argv[1]), sys.argv[2], {str(folder)!r})"
    )
    return run_ranks(program, folder)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether two mappings have the same plain tensors."""
    assert ours.keys() == theirs.keys()
    return all(
        type(ours[name]) is torch.Tensor and ours[name].dtype == value.dtype and ours[name].equal(value)
        for name, value in theirs.items()
    )


def test_newest_and_best_are_kept(ranks: list[dict[str, Any]], folder: Path) -> None:
    """Two regular ones and the best one, and no leftover of a save."""
    assert names(folder / "best") == {"epoch_3", "epoch_4", ranks[0]["best"]}
    assert ranks[0]["best"].startswith("best_loss_epoch_")
    assert [said["best"] for said in ranks] == [ranks[0]["best"]] * 2


def test_best_is_loaded(ranks: list[dict[str, Any]], folder: Path) -> None:
    """By load_checkpoint("best") on all ranks, with the weights that one process finds in that file."""
    expected = torch.load(folder / "expected.pth", weights_only=True)

    assert all(said["same"] for said in ranks)
    assert same(load_checkpoint(folder / "best" / ranks[0]["best"])["state_dict"], expected["best"])


def test_one_process_loads_it(ranks: list[dict[str, Any]], folder: Path) -> None:
    """load_checkpoint of a path gives whole tensors, which a model that is not divided takes."""
    checkpoint = load_checkpoint(folder / "best" / "epoch_4")

    assert same(checkpoint["state_dict"], torch.load(folder / "expected.pth", weights_only=True)["last"])
    Net().load_state_dict(checkpoint["state_dict"])


def test_published_file_is_plain(ranks: list[dict[str, Any]], folder: Path) -> None:
    """published_keys writes the whole weights of the last and of the best checkpoint."""
    published = {path.name.rpartition("-")[0]: path for path in (folder / "best").glob("*-*.pth")}

    assert published.keys() == {"epoch_4", ranks[0]["best"]}
    state = torch.load(published["epoch_4"], weights_only=True)["state_dict"]
    assert same(state, torch.load(folder / "expected.pth", weights_only=True)["last"])


def test_a_run_goes_back(
    ranks: list[dict[str, Any]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a resume of an earlier checkpoint those saved after it are abandoned, and "auto" passes them over."""
    assert [said["resumed"] for said in ranks] == ["epoch_3"] * 2

    assert checkpoints(folder / "line", "--json", "--verify") == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert [name for name, each in found.items() if each["abandoned"]] == ["epoch_4"]
    assert [name for name, each in found.items() if each["newest"]] == ["epoch_3"]
    assert {name: each["whole"] for name, each in found.items()} == dict.fromkeys(found, True)
    sizes = {name: sum(file.stat().st_size for file in (folder / "line" / name).iterdir()) for name in found}
    manifests = {name: (folder / "line" / name / "manifest.json").stat().st_size for name in found}
    assert {name: each["bytes"] + manifests[name] for name, each in found.items()} == sizes


def test_prune(ranks: list[dict[str, Any]], folder: Path) -> None:
    """`--prune 1` leaves the newest one."""
    assert checkpoints(folder / "line", "--prune", 1, "--yes") == 0

    assert names(folder / "line") == {"epoch_3"}
    assert checkpoints(folder / "line", "--verify") == 0


def test_all_kinds_of_weights(ranks: list[dict[str, Any]], folder: Path) -> None:
    """Tied weights, other types and layouts, and empty tensors, also without an optimizer's state."""
    expected = torch.load(folder / "weights.pth", weights_only=True)
    checkpoint = load_checkpoint(folder / "alone" / "epoch_1")

    assert same(checkpoint["state_dict"], expected)
    assert "optimizer" not in checkpoint


def test_published_safetensors(ranks: list[dict[str, Any]], folder: Path) -> None:
    """A tied weight is written once, and other DTensors are not taken for tied ones."""
    from safetensors.torch import load_file

    expected = torch.load(folder / "weights.pth", weights_only=True)
    (path,) = (folder / "alone").glob("*.safetensors")
    del expected["more_tied.weight"]

    assert same(load_file(path), expected)


def test_a_tensor_without_rank_0_is_refused(ranks: list[dict[str, Any]]) -> None:
    """By name on rank 0, whose index would name chunks that no rank writes."""
    assert re.search(r"state_dict\.x: .* mesh with rank 0.*\[1\] on rank 0", ranks[0]["elsewhere"])
    assert ranks[1]["elsewhere"] == ""
