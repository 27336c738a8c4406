"""Two ranks under torchrun: statistics and buffers are those of both, files are rank 0's, and nobody waits forever.

What holds for two processes without it is in test_distributed.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop.checkpoint.commit import PAYLOAD
from eventloop.hooks import update_bn_stats
from tests.training.two_ranks_script import SHARES, model_with_bn, rows_of

pytestmark = pytest.mark.slow

DEADLINE = 120.0
"""Seconds against hangs; it takes a few."""

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks work."""
    return tmp_path_factory.mktemp("torchrun")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    """What the two ranks have to say."""
    script = Path(__file__).with_name("two_ranks_script.py")
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *(str(script), str(folder)),
    ]
    done = subprocess.run(
        launch,
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=DEADLINE,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(script.parents[2]),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bitwise."""
    assert {name: value.tolist() for name, value in one.items()} == {n: v.tolist() for n, v in other.items()}


def statistics(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The running means and variances of a state."""
    return {name: value for name, value in state.items() if "running" in name}


# --- training ----------------------------------------------------------------------------------------------


def test_ranks_are_torchruns(ranks: Ranks) -> None:
    """The process group is the one torchrun's environment names."""
    assert [rank["rank"] for rank in ranks] == [[0, 2, 0], [1, 2, 1]]


def test_each_epoch_has_an_order_of_its_own(ranks: Ranks) -> None:
    """Samplers are seeded with the epoch, on all ranks alike: together they see each sample once."""
    orders = [rank["training"]["orders"] for rank in ranks]

    assert orders[0][0] != orders[0][1]
    for parts in zip(*orders, strict=True):
        assert sorted(sample for part in parts for batch in part for sample in batch) == list(range(12))


def test_buffers_are_the_mean_of_the_ranks(ranks: Ranks) -> None:
    """After the epoch the running averages, which had drifted apart, are their mean on both ranks."""
    before, after = ([rank["training"][when][0] for rank in ranks] for when in ("before", "after"))
    first, second = (statistics(state) for state in before)

    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert_same(after[0], after[1])
    for name in first:
        torch.testing.assert_close(after[0][name], (first[name] + second[name]) / 2)


def test_precise_at_the_end(ranks: Ranks) -> None:
    """The run ends with the statistics of the whole data on both ranks, and the last checkpoint has them."""
    data = rows_of(12, 0)

    for rank in ranks:
        end = rank["training"]["end"]
        torch.testing.assert_close(end["0.running_mean"], data.mean(0))
        torch.testing.assert_close(end["0.running_var"], data.var(0, correction=0))
    assert_same(ranks[0]["training"]["end"], ranks[1]["training"]["end"])


def test_the_checkpoint_is_precise(ranks: Ranks, folder: Path) -> None:
    """The checkpoint of the last epoch has the precise statistics, that of the first the synced averages."""
    first, last = (torch.load(folder / "run" / f"epoch_{n}" / PAYLOAD, weights_only=True) for n in (1, 2))
    synced = {name.removeprefix("module."): b for name, b in ranks[0]["training"]["after"][0].items()}

    assert_same(last["state_dict"], ranks[0]["training"]["end"])
    assert_same({name: first["state_dict"][name] for name in synced}, synced)


def test_metrics_that_only_one_rank_has(ranks: Ranks) -> None:
    """A metric that the data of one rank does not bring forth is, on both, that of the ranks that have it."""
    for rank in ranks:
        assert rank["training"]["metrics"] == {"class_0": 1.0, "class_1": 2.0}


def test_only_rank_0_writes(ranks: Ranks, folder: Path) -> None:
    """One log, one event file of TensorBoard, one set of checkpoints, though the ranks share a directory, in which each
    has its costs and its trace."""
    names = sorted(
        "tfevents" if "tfevents" in path.name else path.name
        for path in (folder / "run").rglob("*")
        if path.is_file()
    )

    records = [
        "costs.json",
        "costs.rank1.json",
        "heartbeat.json",
        "iterations_0-3.json",
        "iterations_0-3.rank1.json",
        *["manifest.json"] * 2,
        "metrics.jsonl",
        "run.json",
        *["state.pth"] * 2,
        "tfevents",
    ]
    assert names == records
    assert (folder / "run" / "metrics.jsonl").read_text().count('"before_run"') == 2


def test_every_rank_hears_of_a_save(ranks: Ranks) -> None:
    """A collective in before_save_checkpoint finds all ranks there, at each save."""
    assert [rank["training"]["gathered"] for rank in ranks] == [[[0, 1], [0, 1]]] * 2


def logged(ranks: Ranks, name: str) -> list[dict[int, dict[str, float]]]:
    """What each rank logged of a training, by step."""
    return [
        {step: scalars for mode, step, scalars in rank[name]["logged"] if mode == "train"} for rank in ranks
    ]


def test_metrics_of_a_training_are_of_both_ranks(ranks: Ranks) -> None:
    """With `reduce` what is logged is the mean of the ranks, the same on both, to the last value of the run."""
    # the loss is the iteration and ten times the rank; logged are the means of the iterations 0-2 and 3-6
    expected = {3: 6.0, 7: 9.5}

    for own in logged(ranks, "reduced"):
        assert {step: own[step]["loss"] for step in own if "loss" in own[step] and step < 8} == expected
        assert [own[step]["lr_like"] for step in sorted(own)] == [0.1] * 8
    assert logged(ranks, "reduced")[1].keys() == logged(ranks, "reduced")[0].keys()


def test_maxima_of_both_ranks(ranks: Ranks) -> None:
    """Of a group that is named the largest is logged, at each iteration that it was put."""
    for own in logged(ranks, "reduced"):
        assert [own[step]["memory/peak"] for step in sorted(own)][:7] == [10.0 + i for i in range(7)]


def test_a_value_of_one_rank_is_logged_as_it_is(ranks: Ranks) -> None:
    """In the interval in which only rank 0 puts it, each rank logs its own values, and none waits."""
    first, second = logged(ranks, "reduced")

    assert (first[8]["of rank 0"], first[8]["loss"]) == (7.0, 7.0)
    assert ("of rank 0" in second[8], second[8]["loss"]) == (False, 17.0)


def test_a_periodic_writer_reduces_too(ranks: Ranks) -> None:
    """`PeriodicWriter` has the same options."""
    for own in logged(ranks, "maxima"):
        assert own[8]["loss"] == 13.5


def test_histories_stay_the_ranks_own(ranks: Ranks) -> None:
    """`trainer.metrics` of a rank has what was put there."""
    for number, rank in enumerate(ranks):
        assert rank["reduced"]["own"] == [(i + 10.0 * number, i) for i in range(8)]


def test_rank_0_writes_what_is_reduced(ranks: Ranks, folder: Path) -> None:
    """The file has what was logged there, in its order, beside the metrics of the validations."""
    lines = [json.loads(line) for line in (folder / "reduced" / "metrics.jsonl").read_text().splitlines()]

    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == [
        (3, 6.0),
        (7, 9.5),
        (8, 7.0),
    ]
    assert [line["step"] for line in lines if line.get("mode") == "val"] == [4, 8]


# --- precise statistics ------------------------------------------------------------------------------------


def test_statistics_of_one_process(ranks: Ranks) -> None:
    """Shares of unequal sizes give, on both ranks alike, the statistics that one process finds in all of it."""
    alone = model_with_bn()
    update_bn_stats(alone, [batch for share in SHARES for batch in share], None)

    assert_same(ranks[0]["precise"]["state"], ranks[1]["precise"]["state"])
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(ranks[0]["precise"]["state"][name], value)
    assert [rank["precise"]["ran"] for rank in ranks] == [3, 1]


def test_layers_that_one_rank_uses(ranks: Ranks) -> None:
    """A layer that only one rank uses has its population on both; one that none uses keeps what it has."""
    (share,) = SHARES[1]

    for rank in ranks:
        state = rank["one of two layers"]
        torch.testing.assert_close(state["0.running_mean"], share.mean(0))
        torch.testing.assert_close(state["0.running_var"], share.var(0, correction=0))
        assert_same(
            {name[2:]: state[name] for name in state if name[0] == "1"}, nn.BatchNorm1d(2).state_dict()
        )


def test_a_loader_that_fails_on_one_rank(ranks: Ranks) -> None:
    """The rank whose loader raised has its error, the other says that another one failed, and nobody waits."""
    assert ranks[0]["loader raises"].startswith("RuntimeError: the data loader of another rank failed")
    assert ranks[1]["loader raises"] == "OSError: the disk is gone"


def test_a_stop_on_one_rank(ranks: Ranks) -> None:
    """A stop that one rank hears of ends the pass of all before the same batch."""
    assert [rank["stopped"] for rank in ranks] == [(0, 3), (0, 3)]


def test_passes_that_end_early_change_nothing(ranks: Ranks) -> None:
    """After a pass that failed or was stopped the model is as it was."""
    for rank in ranks:
        assert_same(rank["state after"], model_with_bn().state_dict())


# --- buffers and handlers ----------------------------------------------------------------------------------


def test_buffers_of_all_types(ranks: Ranks) -> None:
    """Floating point buffers are averaged, half precision without overflow; others are rank 0's."""
    expected = {
        "float": [1.5, 4.5],
        "half": [60000.0],
        "complex": [1.5 + 3j],
        "int": [[7]],
        "bool": True,
        "empty": [],
    }

    assert [rank["buffers"] for rank in ranks] == [expected, expected]


def test_a_handler_of_one_rank_cannot_hang(ranks: Ranks) -> None:
    """A collective in a handler of rank 0 is an error there, in place of a wait for ranks that never come."""
    (ran, harmless, reduces, waits), others = ranks[0]["one rank"], ranks[1]["one rank"]

    assert (ran, harmless) == (["2.0"], "")
    for error in (reduces, waits):
        assert "runs on rank 0 only" in error
        assert "would wait forever for the other ranks" in error
    assert "allreduce" in reduces
    assert "barrier" in waits
    assert others == [[], "", "", ""]
    assert [rank["together"] for rank in ranks] == [2.0, 2.0]
    assert len(ranks[0]["in the background"]) == 3
    assert all("runs on rank 0 only" in error for error in ranks[0]["in the background"])
    assert ranks[1]["in the background"] == []


@pytest.mark.parametrize("needs", ["buffers", "evaluated", "order"])
def test_a_forward_pass_of_one_rank_cannot_hang(ranks: Ranks, needs: str) -> None:
    """A DistributedDataParallel whose forward pass begins with a collective is refused like one: it sends its buffers,
    in eval mode and without gradients too, or agrees on the order of its gradients."""
    refused, other = (rank["forward passes"][needs] for rank in ranks)

    assert "predict runs on rank 0 only" in refused
    assert "broadcast" in refused
    assert "would wait forever for the other ranks" in refused
    assert other == ""


def test_ranks_train_on_after_a_refused_forward_pass(ranks: Ranks) -> None:
    """What was refused left nothing behind: a step of both ranks has gradients, the same on both."""
    first, second = (rank["trained after them"] for rank in ranks)

    for own, other in zip(first, second, strict=True):
        assert len(own) > 3
        assert_same(own, other)
