"""Choose the runs among the paths that a pattern such as `runs/*` of a shell gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eventloop.cli.output_file import print_stderr

SHOWN = 5
"""The largest number of names in the line about files."""


def without_files(paths: Sequence[str]) -> list[str]:
    """Return the paths without plain files, which are named on standard error.

    If all are plain files they stay, so that the reader refuses the first one.
    """
    files = [path for path in paths if Path(path).is_file()]
    if not files or len(files) == len(paths):
        return [*paths]
    named = [*files[:SHOWN], *([f"{len(files) - SHOWN:,} more"] if len(files) > SHOWN else [])]
    print_stderr(f"expected directories of runs, got files as well, which are left out: {', '.join(named)}")
    return [path for path in paths if path not in files]
