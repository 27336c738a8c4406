"""The list of faults in the code that tests must see. They are tried by `scripts/mutants`."""

from __future__ import annotations

import pytest

from tests.faults.mutants import MUTANTS, ROOT, Mutant, source_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.what}")
def test_the_text_is_still_there(mutant: Mutant) -> None:
    """A fault that cannot be put into the code any more would pass for one that was seen."""
    source = source_of(mutant).read_text()

    changed = mutant.apply(source)

    assert changed != source
    compile(changed, mutant.file, "exec")


def test_the_tests_are_there() -> None:
    """Those that are to turn red."""
    files = {name for mutant in MUTANTS for name in mutant.tests}

    assert [name for name in files if not (ROOT / name).exists()] == []


def test_a_text_that_is_gone_is_refused() -> None:
    """It says which one."""
    with pytest.raises(ValueError, match=r"disk.py has 'gone' 0 times, expected once: a sync"):
        Mutant("a sync", "disk.py", "gone", "").apply("here")
