"""Start the training of `tests.commands.training` in a process, and read what it prints."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.forked import ROOT, Forked


class Steered:
    """A training in another process, which trains when this returns."""

    def __init__(self, run: Path, **options: Any) -> None:
        self.run, self._log = run, run.with_suffix(".log")
        with self._log.open("a") as log:
            self.process = Forked(
                ["-m", "tests.commands.training", json.dumps({"run": str(run), **options})],
                cwd=Path(ROOT),
                env={"PATH": os.environ["PATH"], "PYTHONPATH": ROOT},
                stdout=subprocess.PIPE,
                stderr=log.fileno(),
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "trains\n", self.log()

    def log(self) -> list[str]:
        """Return the lines of its log so far."""
        return self._log.read_text().splitlines()

    def end(self) -> tuple[dict[str, Any], list[str]]:
        """Wait for its end, and return what it prints, and the lines of its log."""
        out, _ = self.process.communicate(timeout=120)
        assert out, self.log()
        state: dict[str, Any] = json.loads(out.splitlines()[-1])
        return state, self.log()

    def die(self) -> int:
        """Wait for its death, and return the exit code."""
        self.process.communicate(timeout=120)
        return self.process.returncode


@contextmanager
def steered(run: Path, **options: Any) -> Iterator[Steered]:
    """A training that is killed at the end of the block, if it has not ended by then."""
    one = Steered(run, **options)
    try:
        yield one
    finally:
        one.process.kill()
        with suppress(Exception):
            one.process.communicate()
