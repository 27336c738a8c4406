"""Every operation of a commit, failing. The long form: `scripts/torture operations`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.operations import CASES, all_tries, check_training, check_try, one_of_each, training_tries
from tests.faults.shim import OPERATIONS


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_any_operation_of_a_save_may_fail(directory: Path, case: str) -> None:
    """An error is raised, or for what comes after the save is durable, logged; what was there is there, whole, and
    nothing else is taken for a checkpoint; a write that is cut short is gone on with; the next save works."""
    tries = all_tries(directory / "undisturbed", case)

    for number, attempt in enumerate(tries if case != "in pieces" else random.Random(1).sample(tries, 40)):
        check_try(directory / str(number), attempt)


@pytest.mark.slow
def test_any_operation_of_a_training_may_fail(directory: Path) -> None:
    """The failure is announced in the next iteration, the training goes on, and it can be resumed from. Each kind of
    operation is tried with each fault."""
    tries = one_of_each(training_tries(directory / "undisturbed"), random.Random(1))

    assert {each.name for each in tries} == {*OPERATIONS}
    for number, _, fault in tries:
        check_training(directory / f"{number}-{fault}", number, fault)
