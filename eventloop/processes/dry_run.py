"""Recognise a dry run: `eventloop plan` runs a program until its run would begin, and lists its handlers.

The command runs the program with `PLAN_FILE` in its environment. In such a program `make_work_dir` creates no
directory, and `Background` starts no thread. When the first run begins, or a bus without a trainer emits its
first event, `eventloop.bus.dry_run` writes the plan to that file and ends the program.
"""

from __future__ import annotations

import os
from pathlib import Path

PLAN_FILE = "EVENTLOOP_PLAN_FILE"
"""The environment variable with the path to which a dry run writes its plan."""


def plan_file() -> Path | None:
    """Return the path for the plan in a dry run; None otherwise."""
    path = os.environ.get(PLAN_FILE)
    return Path(path) if path else None
