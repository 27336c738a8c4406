"""Several ranks stop at one place, whichever of them was asked: who went on alone would wait for the others forever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.stops.agreement_script import TRIALS

pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]
PER_EPOCH = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What the two ranks have to say."""
    script = Path(__file__).with_name("agreement_script.py").read_text(encoding="utf-8")
    return run_ranks(script, tmp_path_factory.mktemp("agreement"))


def closing(reason: str, *, epoch: str | None = None) -> list[list[str]]:
    """The end of a training."""
    ends = [["after_train", reason], ["after_run", reason]]
    return ends if epoch is None else [["after_train_epoch", epoch], *ends]


def reason_on(rank: int, reason: str, requesting: int) -> str:
    """The reason, as a rank gives it."""
    return reason if rank == requesting else f"rank {requesting} asked to stop: {reason}"


@pytest.mark.parametrize(("iteration", "requesting"), TRIALS)
def test_a_signal_to_one_rank(ranks: Ranks, iteration: int, requesting: int) -> None:
    """Both stop after the next iteration, or at the end of the epoch if that comes before; rank 0 saves; each says why."""
    at = iteration + (iteration % PER_EPOCH > 0)
    whole = at % PER_EPOCH == 0
    for rank, said in enumerate(ranks):
        run = said[f"signal {iteration} {requesting}"]
        reason = reason_on(rank, "preempted by SIGTERM", requesting)
        assert run["at"] == [at, at // PER_EPOCH]
        assert ["preemption_requested", reason] in run["seen"]
        assert run["seen"][-3:] == [
            ["stop_requested" if whole else "after_train_epoch", reason],
            *closing(reason),
        ]
    assert ranks[0][f"signal {iteration} {requesting}"]["saved"] == [
        f"epoch_{at // PER_EPOCH}" if whole else f"iter_{at}"
    ]


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("by iteration", [4, 0]),
        ("edge", [4, 1]),
        ("uneven", [3, 0]),
        ("stop of one", [3, 0]),
        ("own loop", [6, 1]),
        ("early stop", [4, 1]),
        ("precise", [4, 1]),
    ],
)
def test_they_stop_together(ranks: Ranks, name: str, at: list[int]) -> None:
    """In runs measured in iterations, between epochs, by `trainer.stop`, in hand-written loops, by a handler of the
    validation, and in a pass of PreciseBN."""
    assert [said[name]["at"] for said in ranks] == [at, at]
    assert [said[name]["seen"][-1][0] for said in ranks] == ["after_run"] * 2


def test_what_they_do_until_then(ranks: Ranks) -> None:
    """A pass of PreciseBN is cut at one batch. The rank that asks logs where the others do, which may be reduced. A rank
    with batches that the other has not ends its epoch. The next run knows nothing of the stop, nor of one that came
    too late for the last one."""
    assert [said["precise"]["ran"] for said in ranks] == [2, 2]
    assert [said["stop of one"]["logged"] for said in ranks] == [[3], [3]]
    assert [said["longer rank"]["at"] for said in ranks] == [[4, 1], [6, 1]]
    assert [(said["again"]["stopped"], said["again"]["at"]) for said in ranks] == [(2, [8, 2])] * 2
    assert [said["too late"]["seen"][-2:] for said in ranks] == [closing("completed")] * 2


def test_unequal_lengths_are_told(ranks: Ranks) -> None:
    """Where ranks train unequally many batches, by each of them and once for a run; of a validation nothing is said, nor
    where they are equal."""
    for rank, said in enumerate(ranks):
        warned = [line for line in said["unequal"]["told"] if "batches in this epoch" in line]
        assert len(warned) == 1
        assert warned[0].startswith(
            f"rank {rank} has {2 + rank} batches in this epoch, and the ranks have from 2 to 3:"
        )
        for name in ("stop of one", "validation", "long validation", "by iteration"):
            assert not any("batches in this epoch" in line for line in said[name]["told"])


def test_numbers_of_ranks_are_not_rounded(ranks: Ranks) -> None:
    """The mean of what a validation returned on each, in Python's floats."""
    for said in ranks:
        assert abs(said["numbers"]["x"] - (1 + 1e-12)) < 1e-15


def test_a_stop_of_all_ranks_is_met_at_once(ranks: Ranks) -> None:
    """Where every rank asks by itself, as hooks do that see the same numbers, no iteration more is made than in one
    process."""
    for said in ranks:
        assert said["stop of both"]["at"] == [2, 0]
        assert said["stop of both"]["seen"] == [
            ["stop_requested", "enough"],
            *closing("enough", epoch="enough"),
        ]


def test_before_the_first_iteration(ranks: Ranks) -> None:
    """A stop of one rank in before_train lets none begin."""
    for rank, said in enumerate(ranks):
        reason = reason_on(rank, "enough", 0)
        assert said["before training"]["at"] == [0, 0]
        assert said["before training"]["seen"] == [["stop_requested", reason], *closing(reason)]


def test_a_validation_is_cut_at_one_batch(ranks: Ranks) -> None:
    """Neither gathers metrics, though their loaders are of unequal lengths."""
    for rank, said in enumerate(ranks):
        assert ["after_val", reason_on(rank, "preempted by SIGTERM", 1)] in said["validation"]["seen"]


@pytest.mark.parametrize("name", ["long validation", "no length"])
def test_a_validation_that_is_completed(ranks: Ranks, name: str) -> None:
    """In a batch that the other rank has not, or where nobody knows: the pass is done, its metrics are gathered, and then
    both stop."""
    for rank, said in enumerate(ranks):
        assert said[name]["seen"][1] == ["after_val", "completed"]
        assert said[name]["seen"][-2:] == closing(reason_on(rank, "preempted by SIGTERM", 0))


def test_all_ranks_exit_alike(ranks: Ranks) -> None:
    """One got SIGTERM: both end with its exit code, so that none goes on to a collective alone."""
    assert [said["exit"]["code"] for said in ranks] == [143, 143]
