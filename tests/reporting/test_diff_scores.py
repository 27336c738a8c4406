"""The scores of two runs: paired by their steps, and different only if the difference lasts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from eventloop.reporting.curves import POINTS
from eventloop.reporting.diff.scores import ScoreRow, Scores, compare_scores
from tests.cli.reported_runs import begins, scalars, write_lines

Values = Mapping[int, float | str]
EPOCHS = range(10, 201, 10)


def compared(tmp_path: Path, a: Values, b: Values, mode: str = "val") -> ScoreRow:
    """The only row of two runs with these accuracies, by step."""
    for name, values in (("a", a), ("b", b)):
        lines = (scalars(step, mode, accuracy_loss=value) for step, value in values.items())
        write_lines(tmp_path / name, *lines)
    (row,) = compare_scores(tmp_path / "a", tmp_path / "b").rows
    return row


def noisy(seed: int, shift: float | NDArray[np.float64] = 0.0) -> dict[int, float]:
    """A score that rises from epoch to epoch, with noise of 0.01."""
    rising = 1 - 1 / np.arange(2, len(EPOCHS) + 2)
    noise = np.random.default_rng(seed).normal(0, 0.01, len(EPOCHS))
    return dict(zip(EPOCHS, (rising + noise + shift).tolist(), strict=True))


def test_scores_are_compared_at_the_steps_of_both_runs(tmp_path: Path) -> None:
    """The others are counted; the mean is that of the pairs after the first tenth, the values those of the last."""
    a = {step: step / 100 for step in range(10, 201, 10)}
    b = {step: step / 100 + step / 1000 for step in range(20, 401, 20)}

    row = compared(tmp_path, a, b)

    shared = [step for step in a if step in b]
    assert (row.pairs, row.only_a, row.only_b) == (len(shared), 10, 10) == (10, 10, 10)
    assert (row.last_step, row.a) == (200, 2.0)
    assert row.b == pytest.approx(2.2)
    assert row.difference == pytest.approx(np.mean([step / 1000 for step in shared[1:]]))


def test_a_lasting_difference_is_found_and_noise_is_not(tmp_path: Path) -> None:
    """A shift above the noise is higher or lower; the same program with other noise is noise."""
    shifted = compared(tmp_path, noisy(0), noisy(1, 0.05))
    back = compared(tmp_path, noisy(1, 0.05), noisy(0))
    alike = compared(tmp_path, noisy(0), noisy(1))

    assert (shifted.verdict, back.verdict, alike.verdict) == ("higher", "lower", "noise")
    assert shifted.low is not None
    assert shifted.high is not None
    assert 0 < shifted.low < 0.05 < shifted.high
    assert shifted.difference == pytest.approx(-(back.difference or 0.0))


def test_a_difference_that_fades_is_noise(tmp_path: Path) -> None:
    """A run that only learns earlier ends alike; its interval is above 0 all the same."""
    row = compared(tmp_path, noisy(0), noisy(0, np.linspace(0.2, 0.0, len(EPOCHS))))

    assert row.verdict == "noise"
    assert row.low is not None
    assert row.low > 0


def test_runs_of_the_same_bits_are_equal(tmp_path: Path) -> None:
    """However few pairs they have; other values in few pairs have a mean and no interval."""
    equal = compared(tmp_path, {10: 0.5, 20: 0.25}, {10: 0.5, 20: 0.25, 30: 0.1})
    few = compared(tmp_path, {10: 0.5, 20: 0.25}, {10: 0.5, 20: 0.75})
    none = compared(tmp_path, {10: 0.5}, {20: 0.5})

    assert (equal.verdict, equal.difference, equal.pairs) == ("equal", 0.0, 2)
    assert (few.verdict, few.difference, few.low) == ("unknown", 0.5, None)
    assert (none.verdict, none.difference, none.pairs) == ("unknown", None, 0)


def test_nan_is_counted_and_left_out(tmp_path: Path) -> None:
    """The first step of it is named; the mean is that of the finite pairs."""
    row = compared(
        tmp_path, {10: 1.0, 20: "NaN", 30: 3.0, 40: 4.0}, {10: 1.5, 20: 2.0, 30: 3.5, 40: "Infinity"}
    )

    assert (row.pairs, row.last_step, row.difference) == (2, 30, 0.5)
    assert (row.not_finite_a, row.first_not_finite_a) == (1, 20)
    assert (row.not_finite_b, row.first_not_finite_b) == (1, 40)


def test_a_long_run_is_compared_record_by_record(tmp_path: Path) -> None:
    """A report draws fewer points than the run has records; a comparison pairs each."""
    steps = range(1, 2 * POINTS + 2)
    row = compared(tmp_path, dict.fromkeys(steps, 1.0), {step: 1.0 + step for step in steps[::2]}, "train")

    assert (row.pairs, row.only_a, row.last_step) == (POINTS + 1, POINTS, steps[-1])
    assert row.b == 1.0 + steps[-1]


def test_of_steps_that_ran_twice_the_later_ones_count(tmp_path: Path) -> None:
    """A resumed run has replaced what the killed one logged after its checkpoint."""
    first, killed, again = dict.fromkeys((10, 20), 0.1), dict.fromkeys((30, 40), 9.0), {30: 0.2, 40: 0.2}
    lines = [
        begins(0),
        *(scalars(step, "val", score=value) for step, value in {**first, **killed}.items()),
        begins(20),
        *(scalars(step, "val", score=value) for step, value in again.items()),
    ]
    write_lines(tmp_path / "a", *lines)
    write_lines(tmp_path / "b", *(scalars(step, "val", score=v) for step, v in {**first, **again}.items()))

    (row,) = compare_scores(tmp_path / "a", tmp_path / "b").rows

    assert (row.verdict, row.pairs) == ("equal", 4)


def test_scores_are_metrics_of_validations_and_losses(tmp_path: Path) -> None:
    """Of a training only the losses; the scores of one run come first."""
    train = scalars(10, loss=1.0, lr=0.1, loss_scale=512.0, loss_cls=0.5)
    write_lines(tmp_path / "a", train, scalars(10, "val", accuracy=0.5))
    write_lines(tmp_path / "b", train, scalars(10, "test", accuracy=0.5))

    rows = compare_scores(tmp_path / "a", tmp_path / "b").rows

    assert [(row.mode, row.name, row.verdict) for row in rows] == [
        ("val", "accuracy", "only in A"),
        ("test", "accuracy", "only in B"),
        ("train", "loss", "equal"),
        ("train", "loss_cls", "equal"),
    ]


def test_a_run_without_a_log_is_named(tmp_path: Path) -> None:
    """There is nothing to compare then."""
    write_lines(tmp_path / "a", scalars(10, loss=1.0))

    found = compare_scores(tmp_path / "a", tmp_path / "b")

    assert found == Scores(missing="No scores are compared: no metrics.jsonl in B.")
