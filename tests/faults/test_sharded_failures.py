"""A rank that cannot write its part of a checkpoint makes that save fail, by name, and nothing else."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.sharded_training import ITERATIONS, KEPT
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit, and a process that writes"),
]

ERRORS = {
    "full": r"rank 1 on host \S+ could not write its part: OSError: .*File too large",
    "silent": r"expected the votes of 2 ranks, got none of rank 1 for 1\S* s",
    # the other error if it is removed before the first rank has synced it
    "removed": r"expected the \d+ bytes that its rank has written, rank 0 does not find it|No such file",
    "other": r"rank 1 on host \S+ has tensors of other names, shapes or types than rank 0",
}


def run(case: str, folder: Path) -> list[dict[str, Any]]:
    """Run both ranks, and return what each says."""
    program = (
        "import sys\nfrom tests.faults.sharded_failures import main\n"
        f"main({case!r}, int(sys.argv[1]), sys.argv[2])"
    )
    return run_ranks(program, folder)


@pytest.mark.parametrize("case", ERRORS)
def test_a_save_that_fails_on_one_rank(case: str, directory: Path) -> None:
    """The first rank alone announces that save as failed, with the rank and its error; then the former checkpoint
    loads, the training goes on, all other saves succeed, and no leftovers stay."""
    first, second = run(case, directory)

    ((name, error),) = first["failed"]
    assert name == "iter_3"
    assert re.search(ERRORS[case], error)
    assert first["former"] == []
    assert first["saved"] == [f"iter_{each}" for each in range(1, ITERATIONS + 1) if each != 3]
    assert (second["failed"], second["saved"]) == ([], [])
    assert first["iter"] == second["iter"] == ITERATIONS
    assert first["left"] == [f"iter_{each}" for each in range(ITERATIONS - KEPT + 1, ITERATIONS + 1)]


def test_a_work_dir_that_ranks_do_not_share(directory: Path) -> None:
    """It is refused on all ranks before the first iteration, with the ranks that others do not see and the hosts."""
    host = re.escape(socket.gethostname())

    for said in run("not shared", directory):
        assert re.search(
            rf"is not shared: .* rank 0 on host {host} does not see the files of rank 1 on host {host}: give",
            said["error"],
        )
        assert said["iter"] == "0"
