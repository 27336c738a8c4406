"""Two or more processes of one training: a program started once for each rank, and what each has to say."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import Any, TextIO

from tests.forked import ROOT, Forked

HANG_SECONDS = 600.0
"""Seconds after which a rank prints the stacks of its threads and ends. The longest program takes 10 s on an idle
machine, and 80 s where thirty others compute on two CPUs."""
AFTER_FAILURE_SECONDS = 5.0
"""Seconds in which the others may fail, too, once a rank has; some would wait for it for half an hour."""
LOOK_SECONDS = 0.05

GUARDED = """
import faulthandler
faulthandler.dump_traceback_later({seconds}, exit=True)
exec(compile({program!r}, "<rank>", "exec"))
"""


def run_ranks(program: str, folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Run `program` with its rank and a rendezvous file as arguments; what each prints is its JSON, by rank.

    Raises:
        AssertionError: a rank fails or hangs; with what all ranks have written to standard error.
    """
    guarded = GUARDED.format(seconds=HANG_SECONDS, program=program)
    with ExitStack() as stack:
        errors = [stack.enter_context(TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            Forked(
                ["-c", guarded, str(rank), str(folder / "rendezvous")],
                cwd=folder,
                env={"PATH": "", "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                stderr=errors[rank].fileno(),
            )
            for rank in range(ranks)
        ]
        try:
            printed = _printed(processes)
        finally:
            for process in processes:
                process.kill()
        ends = [process.wait() for process in processes]
        assert not any(ends), "\n".join(_ended(rank, ends[rank], errors[rank]) for rank in range(ranks))
    return [json.loads(printed[rank]) for rank in range(ranks)]


def _printed(processes: list[Forked]) -> dict[int, str]:
    """Read all that the ranks print until they end, or some time after one of them has failed."""
    printed: dict[int, str] = {}
    until, failed = monotonic() + HANG_SECONDS + AFTER_FAILURE_SECONDS, False
    while len(printed) < len(processes) and monotonic() < until:
        for rank, process in enumerate(processes):
            if rank not in printed:
                with suppress(subprocess.TimeoutExpired):
                    printed[rank], _ = process.communicate(timeout=LOOK_SECONDS)
        if not failed and any(process.poll() for process in processes):
            until, failed = monotonic() + AFTER_FAILURE_SECONDS, True
    return printed


def _ended(rank: int, code: int, errors: TextIO) -> str:
    """Describe how a rank ended."""
    errors.seek(0)
    return f"rank {rank}: exit code {code}\n{errors.read()}"
