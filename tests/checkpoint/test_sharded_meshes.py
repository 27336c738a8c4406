"""A checkpoint of several ranks is resumed on any number of ranks, and other programs read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import read_manifest
from tests import forked
from tests.checkpoint.sharded_ranks import KINDS, SAVED, SHARDED, SOURCES
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def started(what: str, kind: str, folder: Path, own: Path) -> list[dict[str, Any]]:
    """What each rank of a kind says."""
    program = (
        f"import sys\nfrom tests.checkpoint.sharded_ranks import {what}\n"
        f"{what}({kind!r}, int(sys.argv[1]), sys.argv[2], {str(folder)!r})"
    )
    return run_ranks(program, own, KINDS[kind])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all kinds."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each kind says that saves."""
    return {kind: started("save", kind, folder, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module", params=[*KINDS])
def resumed(
    request: pytest.FixtureRequest, saved: object, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank of one kind says that resumes the checkpoints of all kinds."""
    return started("load", request.param, folder, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("kind", KINDS)
def test_rest_of_the_run_is_the_uninterrupted_ones(saved: dict[str, list[dict[str, Any]]], kind: str) -> None:
    """On the same number of ranks weights, states, average, running averages and losses are bitwise those of
    the run that was not interrupted, with dropout and a shuffled loader."""
    assert [said["rest"] for said in saved[kind]] == [[]] * KINDS[kind]


@pytest.mark.parametrize("source", SOURCES)
def test_resumed_on_other_ranks(resumed: list[dict[str, Any]], source: str) -> None:
    """Weights, states and average are bitwise those of the run that has saved them, and it trains on; and
    load_checkpoint loads the average into its model."""
    assert [said[source] for said in resumed] == [[]] * len(resumed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_has_no_collective_and_no_step(saved: dict[str, list[dict[str, Any]]], kind: str) -> None:
    """A training with three saves makes as many collectives as one with one, calls as many step hooks, and collects
    the model's state twice more."""
    if kind in SHARDED:
        for said in saved[kind]:
            once, three_times = said["counts"]
            assert once[0] > 0
            assert three_times == [*once[:2], once[2] + 2]


PROGRAM = """
import json, sys, warnings
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
warnings.simplefilter("ignore")
said = {}
for kind in sys.argv[3:]:
    run = Path(sys.argv[1]) / kind
    record = torch.load(run / "record.pth")
    optimizer = {}
    for name, value in record["states"].items():
        parameter, _, key = name.rpartition(".")
        optimizer.setdefault(parameter, {})[key] = value
    expected = {"state_dict": record["average"], "optimizer": optimizer,
        "ema_state_dict": {f"module.{name}": value for name, value in record["weights"].items()}}
    zeros = torch.utils._pytree.tree_map(torch.zeros_like, expected)
    dcp.load(zeros, checkpoint_id=run / sys.argv[2], no_dist=True)
    dcp_to_torch_save(run / sys.argv[2], run / "converted.pth")
    converted = torch.load(run / "converted.pth")
    if int(converted["ema_state_dict"].pop("steps")) != 4:
        said[kind] = ["steps"]
    flat = lambda state: {torch.utils._pytree.keystr(path): value
        for path, value in torch.utils._pytree.tree_flatten_with_path(state)[0]}
    theirs, ours = flat(expected), [flat(zeros), flat(converted)]
    said[kind] = [name for own in ours for name in own.keys() | theirs.keys()
        if name not in own or name not in theirs or own[name].dtype != theirs[name].dtype
        or not own[name].equal(theirs[name])]
said["eventloop"] = "eventloop" in sys.modules
print(json.dumps(said))
"""


def test_other_programs_read_it(saved: object, folder: Path) -> None:
    """PyTorch's own `load` and `dcp_to_torch_save`, where eventloop is not imported, find every tensor."""
    ran = forked.run(["-c", PROGRAM, str(folder), f"iter_{SAVED}", *SHARDED])

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {**{kind: [] for kind in SHARDED}, "eventloop": False}


@pytest.mark.parametrize("kind", KINDS)
def test_files(saved: object, folder: Path, kind: str) -> None:
    """What one process or DDP saves has the files and the manifest that it has always had."""
    path, ranks = folder / kind / f"iter_{SAVED}", range(KINDS[kind])
    names = {"manifest.json", "state.pth"}
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    if kind in SHARDED:
        names |= {".metadata", "index.json", *(f"rank_{rank}.pth" for rank in ranks)}
        names |= {f"__{rank}_0.distcp" for rank in ranks}
        assert (manifest["schema"], manifest["ranks"]) == (2, KINDS[kind])
    else:
        assert manifest["schema"] == 1
        assert not {"ranks", "save"} & manifest.keys()
    assert {each.name for each in path.iterdir()} == names
    assert read_manifest(path).files.keys() == names - {"manifest.json"}
