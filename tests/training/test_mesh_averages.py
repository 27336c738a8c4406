"""Averages of a model that is divided over ranks are those of one process, and evaluations use them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.average_ranks import PROGRAM
from tests.training.mesh_ranks import RANKS, SETUP, SHARES

pytestmark = pytest.mark.slow

TYPES = ["ExponentialMovingAverage", "StochasticWeightAverage", "MomentumAnnealingEMA"]
TOLERANCE = 3e-7
"""The largest difference from one process's weights, which alone differ by up to 1.2e-7 without an average."""


@pytest.fixture(scope="module", params=["FSDP2", "HSDP", "TP", "FSDP+TP"])
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the first rank prints; the others print the same."""
    kind = request.param
    head = f"KIND, RANKS, SHARES = {kind!r}, {RANKS[kind]}, {SHARES[kind]}\n"
    ranks = run_ranks(head + SETUP + PROGRAM, tmp_path_factory.mktemp("ranks"), RANKS[kind])
    assert all(other == ranks[0] for other in ranks)
    return ranks[0]


@pytest.mark.parametrize("kind", TYPES)
def test_average_is_that_of_one_process(printed: dict[str, Any], kind: str) -> None:
    """After six steps the average is the formula's, of one process's weights."""
    ours = printed["ours"][kind]

    assert ours["own"] == pytest.approx(printed["own expected"], abs=TOLERANCE, rel=0)
    assert ours["average"] == pytest.approx(printed["expected"][kind], abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("kind", TYPES)
def test_evaluations_use_the_average(printed: dict[str, Any], kind: str) -> None:
    """A validation and a prediction are those of one process's model with the averaged weights."""
    ours = printed["ours"][kind]

    assert ours["val"]["loss"] == pytest.approx(ours["loss"], abs=1e-6)
    for row, expected in zip(ours["predicted"], ours["output"], strict=True):
        assert row == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_training_is_that_without_an_average(printed: dict[str, Any], kind: str) -> None:
    """After evaluations the model's own weights and the average are bitwise those before, and so is the end of a
    longer training."""
    ours = printed["ours"][kind]

    assert ours["own after"] == ours["own"]
    assert ours["average after"] == ours["average"]
    assert ours["longer"] == printed["without"]


def test_both_weights_are_evaluated(printed: dict[str, Any]) -> None:
    """Validations of the own weights and the average, several in a row, are those of one process's models."""
    first, second = printed["both"]

    assert first == second
    for name, expected in printed["both expected"].items():
        assert first[name] == pytest.approx(expected, abs=1e-6)
    assert first["loss"] != first["ema/loss"]


def test_own_weights_come_back_after_an_error(printed: dict[str, Any]) -> None:
    """A forward pass that fails in a validation leaves no averaged weight gathered for the training after it."""
    assert "[8, 5]" in printed["raised"] or "8x5" in printed["raised"]
    assert printed["own came back"]
    assert printed["after an error"] == printed["without"]


@pytest.mark.parametrize("when", ["stored", "stored while the average is in"])
def test_checkpoint_has_both(printed: dict[str, Any], when: str) -> None:
    """The average and the model's own weights come from a checkpoint as they were, also from one that was made
    while the model had the average, after which its own weights come back."""
    assert printed[when] == printed["values"]
    assert printed["values"]["average"] != printed["values"]["own"]
    assert printed["put back"] == printed["values"]["own"]


def test_average_is_loaded(printed: dict[str, Any]) -> None:
    """By load_state_dict of another average, with its number of updates, and by a hook that resumes."""
    assert printed["loaded"] == printed["resumed"] == printed["values"]["average"]
    assert printed["loaded steps"] == [6, 6]


def test_call_is_refused(printed: dict[str, Any]) -> None:
    """The average has no forward pass; the error says what to do."""
    assert "sharded over ranks has values but no forward pass" in printed["called"]
    assert "trainer.val()" in printed["called"]


def test_names_are_the_models(printed: dict[str, Any]) -> None:
    """Of parameters, buffers and the state, in order: with tied weights, buffers that are not saved, and
    checkpoint_wrapper, which changes names; so the state can be loaded."""
    theirs, ours = printed["names"]

    assert ours == theirs
    assert {"seen", "two.weight", "tied.weight"} <= {*ours[2]}
    assert "hidden" in ours[1]
    assert "hidden" not in ours[2]
    assert "All keys matched" in printed["wrapped"]
    assert printed["zeros"] == 0


def test_other_names_are_refused(printed: dict[str, Any]) -> None:
    """A model whose own state_dict changes the names, because the average could not be stored under them."""
    assert "'net.scale' is a name of " in printed["renamed"]
    assert "Renamed.state_dict(): expected one of the names that its modules give" in printed["renamed"]


def test_own_formula_has_local_tensors(printed: dict[str, Any]) -> None:
    """avg_func of a subclass gets plain tensors, this rank's parts, and its result is the average."""
    dtensors, differences = printed["locals"]

    assert dtensors == [False]
    assert differences == pytest.approx([1.0] * len(differences), abs=1e-6)


def test_half_precision_is_averaged_in_float32(printed: dict[str, Any]) -> None:
    """The mean of 1, 1 + 1/128 and 1 + 2/128, each a bfloat16, is 1 + 1/128."""
    assert printed["half"] == ["torch.float32", [1.0078125]]


def test_a_model_that_is_divided_later(printed: dict[str, Any]) -> None:
    """Its average begins again as a copy, divided alike."""
    assert printed["divided later"] == ["DTensor", True]


@pytest.mark.parametrize("change", ["grown", "moved"])
def test_a_model_that_changes(printed: dict[str, Any], change: str) -> None:
    """With a new parameter, or in other memory, its averages go on: here the mean of the weights and of zeros."""
    before, after = printed[change]

    assert any(before)
    assert after == pytest.approx([value / 2 for value in before])
