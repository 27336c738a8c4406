"""Raise KeyboardInterrupt before each line of some modules in turn, as the handler of a signal may."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType, ModuleType
from typing import Any


def cut_at(line: int, modules: Collection[ModuleType], work: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt before the n-th line of these modules that `work` runs.

    Return False if it runs fewer lines.
    """
    files, left = {str(module.__file__) for module in modules}, line

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return left < 0
