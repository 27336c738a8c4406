"""`load_sharded` fills the tensors of any program from a checkpoint of several ranks, or changes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import CheckpointError, load_checkpoint, load_sharded, save_checkpoint
from tests.cli.saved_runs import flip
from tests.support.saving import same

KEY = "state_dict.head.bias"


@pytest.mark.slow
def test_tensors_are_filled_in_place(sharded: Path, printed: list[dict[str, Any]]) -> None:
    """Plain ones and those that are divided by columns, on each rank without the other one; bitwise what
    `load_checkpoint` reads. The keys of the others are returned."""
    expected = load_checkpoint(sharded / "epoch_2")["state_dict"]

    for rank in range(2):
        filled = torch.load(sharded.parent / f"filled_{rank}.pt", weights_only=True)
        assert same(filled, {f"state_dict.{name}": tensor for name, tensor in expected.items()})
        assert {key.partition(".")[0] for key in printed[rank]["left_out"]} == {"ema_state_dict", "optimizer"}
        assert "optimizer.head.bias.exp_avg" in printed[rank]["left_out"]


@pytest.mark.slow
def test_the_state_of_an_optimizer(sharded: Path) -> None:
    """By the name of its parameter, and into a parameter too."""
    state = torch.nn.Parameter(torch.zeros(3))

    load_sharded(sharded / "epoch_2", {"optimizer.head.bias.exp_avg": state})

    saved = load_checkpoint(sharded / "epoch_2")["optimizer"]["state"]
    assert torch.equal(state, saved[3]["exp_avg"])
    assert state.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        (KEY, torch.zeros(4), r"head\.bias: the checkpoint has \(3,\) of torch\.float32, .* \(4,\)"),
        (KEY, torch.zeros(3).double(), r"head\.bias: .* of torch\.float32, .* of torch\.float64"),
        (KEY, torch.zeros(3, device="meta"), r"head\.bias: expected a dense tensor with memory, .* on meta"),
        (KEY, 3.0, r"head\.bias: expected a tensor, got a float"),
        (
            "state_dict.head.bais",
            torch.zeros(3),
            r"head\.bais: not in the checkpoint: .* 'state_dict.head.bias'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sharded: Path, key: str, tensor: Any, message: str) -> None:
    """By its key, and no other tensor is changed."""
    other = torch.zeros(3)

    with pytest.raises(CheckpointError, match=message):
        load_sharded(sharded / "epoch_2", {"optimizer.head.bias.exp_avg": other, key: tensor})
    assert not other.any()


@pytest.mark.slow
def test_an_unfinished_sum_is_refused(printed: list[dict[str, Any]]) -> None:
    """Each rank would hold the whole value, and the sum would be too large."""
    assert all(
        "head.bias: expected a DTensor that is sharded or replicated" in each["sum"] for each in printed
    )


@pytest.mark.slow
@pytest.mark.parametrize("verify", [True, False])
def test_damage_is_refused(sharded: Path, verify: bool) -> None:
    """A changed bit by the hashes, unless the caller has verified the checkpoint; a short file always."""
    tensors = {f"state_dict.{name}.weight": torch.zeros(17, 4) for name in ("one",)}
    file = sharded / "epoch_2" / "__1_0.distcp"
    if verify:
        flip(file)
        with pytest.raises(CheckpointError, match=r"__1_0\.distcp is damaged: its SHA-256"):
            load_sharded(sharded / "epoch_2", tensors)
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is damaged: it has \d+ bytes"):
        load_sharded(sharded / "epoch_2", tensors, verify=verify)
    assert not any(tensor.any() for tensor in tensors.values())


def test_a_checkpoint_of_one_process_is_refused(tmp_path: Path) -> None:
    """It has no shards; the message says what reads it."""
    save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "one")

    with pytest.raises(CheckpointError, match=r"one: expected .* several ranks .*: load_checkpoint reads it"):
        load_sharded(tmp_path / "one", {"state_dict.w": torch.zeros(2)})
