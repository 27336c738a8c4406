"""Recognise a dry run, in which `eventloop plan` lists the handlers of a program.

The command sets `PLAN_FILE` in the environment of the program. Then `make_work_dir` creates no directory, and
`Background` starts no thread. The first run, or the first event of a bus without a trainer, writes the plan
to that file and ends the program (`eventloop.bus.dry_run`).
"""

from __future__ import annotations

import os
from pathlib import Path

PLAN_FILE = "EVENTLOOP_PLAN_FILE"
"""The environment variable with the path to which a dry run writes its plan."""


def plan_file() -> Path | None:
    """Return the path for the plan of a dry run; None in any other process."""
    path = os.environ.get(PLAN_FILE)
    return Path(path) if path else None
