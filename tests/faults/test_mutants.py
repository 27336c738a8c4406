"""The list of faults in the code that tests must see. All of them are tried by `scripts/mutants`, some of them here."""

from __future__ import annotations

import pytest

from tests.faults.mutants import MUTANTS
from tests.faults.mutation import PACKAGE, ROOT, Fault, all_faults, is_killed, source_of
from tests.faults.removals import HARMLESS, TESTS, Place, calls_in, removals

pytestmark = pytest.mark.slow

TRIED = (
    "no fsync of a file",
    "removed under its name",
    "no join before a resume",
    "nothing is copied at once",
)
"""One of each kind: an fsync, a rename, a join and a copy."""


NO_CHECKPOINTS = {
    "util/append_file.py",
    "costs/records.py",
    "cli/output_file.py",
    "tracing/files.py",
    "writers/csv_table.py",
    "writers/event_log_writer.py",
    "eventlog/undelivered.py",
    "commands/client.py",
    "commands/inbox.py",
    "commands/record.py",
    "sidecar/reports.py",
}
"""What syncs or renames files of another kind."""


@pytest.mark.parametrize("fault", all_faults(), ids=lambda fault: f"{fault.file}: {fault.what}")
def test_the_text_is_still_there(fault: Fault) -> None:
    """A fault that cannot be put into the code any more would pass for one that was seen."""
    source = source_of(fault).read_text()

    changed = fault.apply(source)

    assert changed != source
    compile(changed, fault.file, "exec")


def test_every_call_has_a_fault() -> None:
    """Whichever sync, rename, wait or copy of the checkpoint code is left out: that is tried, or known to be harmless."""
    left = {removal.place for removal in removals(PACKAGE)}
    for file in TESTS:
        source = (PACKAGE / file).read_text()
        for function, call in calls_in(source):
            place = Place(file, function, call)
            seen = [
                m for m in MUTANTS if m.file == file and (function, call) not in calls_in(m.apply(source))
            ]
            assert place in left or seen or place in HARMLESS, place


def test_what_is_harmless_is_still_there() -> None:
    """Else the reason is one for nothing."""
    assert [
        place for place in HARMLESS if place[1:] not in calls_in((PACKAGE / place.file).read_text())
    ] == []


def test_no_file_is_left_out() -> None:
    """Whatever syncs or renames files is checkpoint code, or named as something else."""
    durable = ("fsync", "fdatasync", "sync_directory", "write_file", "os.rename", "os.replace", ".rename")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in (*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py"))  # two of the folders are links
        if any(call.partition("(")[0].endswith(durable) for _, call in calls_in(path.read_text()))
    }

    assert found - TESTS.keys() - NO_CHECKPOINTS == set()


@pytest.mark.skipif(not (ROOT / "eventloop").is_dir(), reason="there is no checkout to put a fault into")
@pytest.mark.parametrize("what", TRIED)
def test_a_fault_turns_a_test_red(what: str) -> None:
    """Put into a copy of the code, it is seen."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.what == what)

    killed, last = is_killed(mutant)

    assert killed, last


def test_the_tests_are_there() -> None:
    """Those that are to turn red."""
    files = {name for fault in all_faults() for name in fault.tests}

    assert [name for name in files if not (ROOT / name).exists()] == []
