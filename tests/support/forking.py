"""Fork a child process of a test."""

from __future__ import annotations

import os
from collections.abc import Callable

FAILED = 7
"""The exit code of a child whose work raises."""


def forked(work: Callable[[], object]) -> int:
    """Fork a child that does `work` and exits with the number it returns, else with 0; return its process id.

    Nothing of the parent's is closed or flushed at the child's exit.
    """
    if (child := os.fork()) == 0:
        code = FAILED
        try:
            made = work()
            code = made if isinstance(made, int) else 0
        finally:
            os._exit(code)
    return child
