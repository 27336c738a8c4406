"""Recognise a dry run, by which `eventloop plan` lists the handlers of a program.

The command runs the program with `PLAN_FILE` in its environment. Then `make_work_dir` creates no directory,
and `Background` starts no thread. The program's first run, or the first event of a bus without a trainer,
writes the plan to that file and ends the program (`eventloop.bus.dry_run`).
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
