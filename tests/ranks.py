"""Two or more processes of one training: a program started once for each rank, and what each has to say."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.forked import ROOT, Forked


def run_ranks(program: str, folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Run `program` with its rank and a rendezvous file as arguments; what each prints is its JSON, by rank."""
    processes = [
        Forked(
            ["-c", program, str(rank), str(folder / "rendezvous")],
            cwd=folder,
            env={"PATH": "", "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, said, strict=True):
        assert process.returncode == 0, err
    return [json.loads(out) for out, _ in said]
