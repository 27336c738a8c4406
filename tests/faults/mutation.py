"""Puts one fault after another into a copy of the code, and names those that no test sees.

scripts/mutants [part of a file's name, or of what is wrong]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import eventloop
from tests.faults.mutants import COPY, MUTANTS, READ, STORE, Mutant
from tests.faults.removals import Removal, removals

ROOT = Path(__file__).parents[2]
PACKAGE = Path(eventloop.__file__).parent
TREE = ("eventloop", "hooks", "writers", "tests", "pyproject.toml")
HANGS = 240.0
"""Seconds after which tests are taken to hang, which is red too."""

Fault = Mutant | Removal


def all_faults() -> list[Fault]:
    """Those that somebody has thought of, and every call that is left out."""
    return [*MUTANTS, *removals(PACKAGE)]


def source_of(fault: Fault, package: Path = PACKAGE) -> Path:
    """The file it changes; `eventloop/hooks` is a link in a checkout, and a folder where the wheel was installed."""
    return package / fault.file


def is_killed(fault: Fault | None) -> tuple[bool, str]:
    """Whether a test turns red, and the last it said; None for the tree as it is."""
    with tempfile.TemporaryDirectory(prefix="eventloop-mutant-") as directory:
        copy = Path(directory)
        for name in TREE:
            _copy(ROOT / name, copy / name)
        if fault is not None:
            path = source_of(fault, copy / "eventloop")
            path.write_text(fault.apply(path.read_text()))
        tests = fault.tests if fault is not None else dict.fromkeys([*STORE, *READ, *COPY])
        try:
            ran = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-n0",
                    "-x",
                    "-q",
                    "--no-header",
                    "-p",
                    "no:cacheprovider",
                    *tests,
                ],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": str(copy)},
                capture_output=True,
                text=True,
                timeout=HANGS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True, "it hangs"
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"the tests could not be run: {ran.stdout[-500:]}{ran.stderr[-500:]}")
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ran.returncode == 1, (lines or ran.stdout.splitlines() or [ran.stderr])[-1]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def survivors(faults: Sequence[Fault], print_now: Callable[[str], object]) -> list[Fault]:
    """Those that no test sees."""
    left = []
    for fault in faults:
        killed, last = is_killed(fault)
        print_now(f"{'killed  ' if killed else 'SURVIVED'} {fault.file}: {fault.what}  [{last[:140]}]\n")
        if not killed:
            left.append(fault)
    return left


def main() -> int:
    """Try them, or those of which the file's name or what is wrong has a text in it."""
    wanted = sys.argv[1] if sys.argv[1:] else ""
    chosen = [fault for fault in all_faults() if wanted in f"{fault.file} {fault.what}"]

    def print_now(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    left = survivors(chosen, print_now)
    print_now(f"mutants killed: {len(chosen) - len(left)} of {len(chosen)}\n")
    if left and is_killed(None)[0]:
        print_now("and the tree as it is, is red too: none of this says anything\n")
    return len(left)


if __name__ == "__main__":
    sys.exit(main())
