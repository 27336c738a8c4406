"""A plain checkpoint loads into a model that FSDP2, HSDP or tensor parallelism divides, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.checkpoint.shard_ranks import KINDS, Net, data
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process, after two steps."""
    model = Net()
    trainer = Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=[data()] * 2,
        max_epochs=1,
        work_dir=tmp_path_factory.mktemp("plain"),
        writers=[],
        hooks=[CheckpointHook()],
    )
    trainer.train()
    trainer.close()
    return trainer.work_dir / "epoch_1"


@pytest.fixture(scope="module", params=[*KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    """What divides the model."""
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(kind: str, file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says."""
    program = (
        "import sys\nfrom tests.checkpoint.shard_ranks import main\n"
        f"main({kind!r}, int(sys.argv[1]), sys.argv[2], {str(file)!r})"
    )
    return run_ranks(program, tmp_path_factory.mktemp("ranks"), KINDS[kind])


def test_weights_are_those_of_the_file(ranks: list[dict[str, Any]]) -> None:
    """All ranks together hold each tensor bitwise, where no number of ranks divides its rows too, and also
    where an evaluation left the weights gathered; no rank waits for another one."""
    assert [said["loaded"]["weights"] for said in ranks] == [[]] * len(ranks)


def test_weights_are_loaded_last(ranks: list[dict[str, Any]]) -> None:
    """FSDP2's own hooks refuse nothing, so no copy of the former weights is made to undo a load."""
    assert all(said["loaded"]["waits"] for said in ranks)


def test_states_are_those_of_the_file(ranks: list[dict[str, Any]]) -> None:
    """The optimizer's tensors are divided as the parameters are, its step stays plain, and no step is made."""
    for said in ranks:
        assert said["loaded"]["states"] == []
        assert said["loaded"]["kinds"] == ["exp_avg", "exp_avg_sq"]
        assert said["loaded"]["steps"] == 0


def test_a_parameter_without_dimensions(ranks: list[dict[str, Any]]) -> None:
    """Its step stays a plain tensor, although it has the parameter's shape."""
    assert [said["number"] for said in ranks] == [[False, True, True]] * len(ranks)


def test_training_goes_on_as_in_one_process(ranks: list[dict[str, Any]]) -> None:
    """The next step is that of one process that loads the file, up to rounding."""
    assert max(said["loaded"]["next"] for said in ranks) < 1e-6


def test_types_of_states_are_kept(ranks: list[dict[str, Any]]) -> None:
    """States in float32 stay so for parameters in bfloat16."""
    assert [said["half"] for said in ranks] == [[]] * len(ranks)


REFUSED = {
    "shape": r"one\.weight: the checkpoint has \(16, 4\), the model \(17, 4\)",
    "type": r"one\.weight: the checkpoint has complex64, the model float32, which cannot hold it",
    "kind": r"count: the checkpoint has float32, the model int64, which cannot hold it",
    "missing": r"two\.bias: \(6,\) in the model, not in the checkpoint",
    "unexpected": r"three\.bias: \(2,\) in the checkpoint, not in the model",
    "layout": r"two\.weight: the checkpoint has the layout \(\(Replicate.*, the model (\(\(|of a plain)",
    "state": r"the file: optimizer: 'exp_avg' of its parameter 0 cannot be divided.*expected the shape "
    r"\(17, 4\), got \(17, 1\)",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(ranks: list[dict[str, Any]], what: str) -> None:
    """By name, with what the file and the model have, and no tensor of any rank changes."""
    for said in ranks:
        assert re.match(rf"CheckpointError: (?s:.*){REFUSED[what]}", said["refused"][what])


def test_a_load_that_fails_late_is_undone(ranks: list[dict[str, Any]]) -> None:
    """Where a module or an optimizer raises after it has loaded, the parts of each rank are as before."""
    for said in ranks:
        assert re.match(r"CheckpointError: (?s:.*)a bias of sevens", said["late"]["module"])
        assert re.match(r"CheckpointError: (?s:.*)no such state", said["late"]["optimizer"])


def test_a_rank_outside_of_the_mesh(ranks: list[dict[str, Any]]) -> None:
    """It has no part."""
    assert [said["alone"] for said in ranks] == [[3]] + [[0]] * (len(ranks) - 1)
