"""Remove plain files from the paths that a shell has made of a pattern such as `runs/*`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eventloop.cli.output_file import print_stderr

SHOWN = 5
"""The largest number of files that are named on standard error."""


def without_files(paths: Sequence[str]) -> list[str]:
    """Return the paths without plain files, and name these on standard error.

    If all paths are plain files, return them all: `RunReader` then refuses the first one.
    """
    files = [path for path in paths if Path(path).is_file()]
    if not files or len(files) == len(paths):
        return [*paths]
    named = files[:SHOWN]
    if len(files) > SHOWN:
        named.append(f"{len(files) - SHOWN:,} more")
    print_stderr(f"expected directories of runs, got files as well, which are left out: {', '.join(named)}")
    return [path for path in paths if path not in files]
