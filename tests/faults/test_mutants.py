"""The list of faults in the code that tests must see. All of them are tried by `scripts/mutants`, some of them here."""

from __future__ import annotations

import pytest

from tests.faults.mutants import MUTANTS, ROOT, Mutant, is_killed, source_of

TRIED = (
    "no fsync of a file",
    "removed under its name",
    "no join before a resume",
    "nothing is copied at once",
)
"""One of each kind: an fsync, a rename, a join and a copy."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.what}")
def test_the_text_is_still_there(mutant: Mutant) -> None:
    """A fault that cannot be put into the code any more would pass for one that was seen."""
    source = source_of(mutant).read_text()

    changed = mutant.apply(source)

    assert changed != source
    compile(changed, mutant.file, "exec")


@pytest.mark.skipif(not (ROOT / "eventloop").is_dir(), reason="there is no checkout to put a fault into")
@pytest.mark.parametrize("what", TRIED)
def test_a_fault_turns_a_test_red(what: str) -> None:
    """Put into a copy of the code, it is seen."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.what == what)

    killed, last = is_killed(mutant)

    assert killed, last


def test_the_tests_are_there() -> None:
    """Those that are to turn red."""
    files = {name for mutant in MUTANTS for name in mutant.tests}

    assert [name for name in files if not (ROOT / name).exists()] == []


def test_a_text_that_is_gone_is_refused() -> None:
    """It says which one."""
    with pytest.raises(ValueError, match=r"disk.py has 'gone' 0 times, expected once: a sync"):
        Mutant("a sync", "disk.py", "gone", "").apply("here")
