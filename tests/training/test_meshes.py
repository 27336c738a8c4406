"""Each way to divide a model over ranks trains, validates and predicts as one process does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.mesh_ranks import PROGRAM, RANKS, SHARES

pytestmark = pytest.mark.slow

TOLERANCE = {"bf16": 1e-3, "fp16 static": 2e-4, "fp16 skip": 2e-4, "fp16 again": 2e-4}
"""The largest difference of a weight from one process's, where it is not 1e-6."""


@pytest.fixture(scope="module", params=[*RANKS])
def kind(request: pytest.FixtureRequest) -> str:
    """What divides the model, or its data, over the ranks."""
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(kind: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank prints."""
    head = f"KIND, RANKS, SHARES = {kind!r}, {RANKS[kind]}, {SHARES[kind]}\n"
    return run_ranks(head + PROGRAM, tmp_path_factory.mktemp("ranks"), RANKS[kind])


@pytest.mark.parametrize(
    "run",
    [
        "plain",
        "norm",
        "norm of order 1",
        "largest norm",
        "value",
        "accumulation",
        "bf16",
        "fp16 static",
        "fp16 skip",
        "fp16 again",
        "hooks",
    ],
)
def test_training_is_that_of_one_process(ranks: list[dict[str, Any]], run: str) -> None:
    """All ranks end with the same weights, norms and loss scale, and they are those of one process."""
    expected, tolerance = ranks[0]["expected"][run], TOLERANCE.get(run, 1e-6)

    assert all(said["ours"][run] == ranks[0]["ours"][run] for said in ranks)
    ours = ranks[0]["ours"][run]
    assert ours["weights"] == pytest.approx(expected["weights"], abs=tolerance, rel=0)
    assert [norm for norm in ours["norms"] if math.isfinite(norm)] == pytest.approx(
        expected["norms"], rel=max(1e-6, 20 * tolerance if run in TOLERANCE else 0)
    )
    assert ours["scale"] == expected["scale"]


def test_rates_are_of_all_data(ranks: list[dict[str, Any]]) -> None:
    """Samples are counted once, though several ranks of a mesh have the same ones."""
    assert [said["rates"]["samples"] for said in ranks] == [8.0] * len(ranks)


def test_data_ranks_are_found(ranks: list[dict[str, Any]], kind: str) -> None:
    """By the sampler, else by the mesh of tensor parallelism, else one for each rank, unless they are given."""
    without = 1 if kind == "TP" else RANKS[kind]

    assert [said["found"] for said in ranks] == [[SHARES[kind], without, 1]] * len(ranks)


def test_other_data_ranks_are_refused(ranks: list[dict[str, Any]]) -> None:
    """A number that does not divide the number of ranks."""
    for said in ranks:
        assert (
            f"data_ranks must divide the number of ranks, {len(ranks)}, got 3"
            in said["refused"]["data_ranks"]
        )


def test_validation_is_that_of_one_process(ranks: list[dict[str, Any]]) -> None:
    """All ranks have the metrics of the whole data."""
    for said in ranks:
        assert {name: said["val"][name] for name in said["val expected"]} == pytest.approx(
            said["val expected"], abs=1e-6
        )


def test_prediction_is_that_of_one_process(ranks: list[dict[str, Any]]) -> None:
    """Each sample once, in the order of the data set, without advice for ranks that share their data."""
    for said in ranks:
        assert said["warned"] == []
        for ours, theirs in zip(said["predicted"], said["output"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)


def test_prediction_without_indices(ranks: list[dict[str, Any]], kind: str) -> None:
    """Rank after rank; once if all ranks share their data, and refused if only some do."""
    for said in ranks:
        if kind == "FSDP+TP":
            assert "got a list: of 4 ranks with data_ranks=2 no index" in said["without indices"]
            continue
        output = said["output"]
        expected = [row for share in range(SHARES[kind]) for row in output[share :: SHARES[kind]]]
        for ours, theirs in zip(said["listed"], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)


def test_sums_are_made_before_values_are_clipped(ranks: list[dict[str, Any]], kind: str) -> None:
    """A gradient that is still to be summed over ranks is clipped as the sum."""
    if kind == "TP":
        assert [said["sum"] for said in ranks] == [[2.0, 1.5, -2.0]] * 2


def test_a_norm_that_is_not_finite(ranks: list[dict[str, Any]], kind: str) -> None:
    """With error_if_nonfinite all ranks raise the error."""
    if kind == "TP":
        for said in ranks:
            assert "of the gradients is inf" in said["not finite"]


def test_a_nan_on_one_rank(ranks: list[dict[str, Any]], kind: str) -> None:
    """The norm of infinite order is NaN on all ranks, beside larger and infinite values on others."""
    if kind == "TP":
        assert [said["with a NaN"] for said in ranks] == ["nan"] * 2
